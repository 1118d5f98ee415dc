"""The load on the scheduler without a model (tests/loads): a part of it on every push, and that it finds what is wrong.

The whole of it: `python -m tests.harness.loads.scheduler --requests 100000`.
"""

from collections import Counter
from pathlib import Path

import loads
import pytest
from loads.contents import Fault
from loads.program import Maker, Program
from loads.scheduler import failure, run, shortest
from mutants import MUTANTS, source
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from vllm_evict.core.blocks import RequestBlocks
from vllm_evict.core.offload import OffloadPool
from vllm_evict.core.plan import PLAN
from vllm_evict.integration.engine.managers import EvictableManager
from vllm_evict.integration.engine.scheduler import EvictionMixin

#: Policies that hold what they hold for different reasons; the others differ from one of them in their scores alone.
KINDS = [
    *("sink-window", "h2o", "snapkv", "keydiff", "kvzip", "duo", "pyramidkv", "adakv", "fastgen", "full"),
    *("h2o+pyramid", "tova+ada", "keydiff+ada"),
]


def held(maker, programs):
    """Counts over so many programs; one that does not hold fails the test, shortened."""
    counts = Counter()
    for _ in range(programs):
        program = maker.program()
        try:
            counts.update(run(program))
        except Fault as fault:
            command = "`python -m tests.harness.loads.scheduler --replay`"
            pytest.fail(f"{fault}\nshortened, for {command}:\n{shortest(program, fault, 20)}")
    return counts


@pytest.mark.parametrize("name", ["stock", *KINDS])
def test_random_programs_hold(name):
    counts = held(Maker(seed=17, only=[name]), 10)
    assert counts["finished"] > 50 and counts["steps"] > 500
    if name not in ("stock", "full"):
        assert counts["holes"] > 50


@pytest.mark.parametrize("name", ["stock", "sink-window", "h2o", "snapkv", "keydiff", "adakv"])
def test_random_programs_hold_on_servers_that_speculate(name):
    """A worker that accepts all drafts, none, or some; half of the schedulers are asynchronous."""
    counts = held(Maker(seed=23, only=[name], drafts=True), 6)
    assert counts["finished"] > 30 and counts["drafts"] > counts["accepted"] > 50
    if name != "stock":
        assert counts["holes"] > 20


@pytest.mark.parametrize("name", ["sink-window", "h2o", "quest", "keydiff"])
def test_random_programs_hold_on_servers_that_keep_evicted_blocks_on_the_host(name):
    """Host pools of one block and more; blocks come back, ends of prompts are computed again."""
    counts = held(Maker(seed=31, only=[name], host=True), 30)
    assert counts["finished"] > 50 and counts["spilled"] > 100
    assert counts["fetched"] > 10 and counts["rewound"] > 0 and counts["saved"] >= counts["restored"]


@pytest.mark.parametrize("name", ["sink-window", "h2o", "snapkv", "kvzip", "full"])
def test_random_programs_hold_on_servers_that_audit(name):
    """All answers; shadows begin beside other requests, and are withdrawn for them."""
    counts = held(Maker(seed=41, only=[name], audits=1.0), 12)
    assert counts["finished"] > 50 and counts["audits"] > 20 and counts["rows"] >= counts["audits"]
    assert name == "full" or counts["measured"] > 0


#: Programs that failed once, as the load printed them, shortened.
FAILED = {
    # Heads that keep everything left too little room beside a cached prefix, and a request waited for ever.
    "a hit beside heads that keep everything": """
{"settings": {"policy": {"name": "duo", "pattern": ["1010", "1101", "0011", "0011"], "sink": 0, "recent": 0, "allow": []},
              "length": 350, "late": 0.2},
 "ops": [{"at": 130, "id": "r31", "length": 308, "shared": 53, "tokens": 21},
         {"at": 137, "id": "r33", "length": 349, "shared": 128, "stops": true, "hot": true}]}
""",
    "a hit beside heads with a larger budget": """
{"settings": {"policy": {"name": "duo", "pattern": ["0011", "1010", "1101", "0001"], "sink": 0, "recent": 0, "retrieval":
                         {"name": "tova", "sink": 0, "recent": 0, "buffer": 0, "granularity": "token"}}, "length": 138},
 "ops": [{"id": "r0", "length": 117, "shared": 97, "n": 2},
         {"id": "r2", "length": 137, "shared": 137, "tokens": 4, "hot": true}]}
""",
    # A turn ended over its trigger, and the next one found no room for its first chunk.
    "a session in the smallest pool": """
{"settings": {"policy": {"name": "knorm", "sink": 0, "recent": 0, "buffer": 0, "budget": 25, "allow": []},
              "length": 169},
 "ops": [{"at": 40, "id": "r29", "length": 84, "family": 2, "shared": 84, "tokens": 2, "session": true},
         {"at": 40, "do": "turn", "id": "r29", "length": 31, "family": 2, "ask": {"kv_budget": 0.873053572957806}},
         {"at": 52, "do": "turn", "id": "r29", "length": 49, "family": 2}]}
""",
    # A swap evicted blocks, and the pool had no room for those that were to come.
    "a swap without room": """
{"settings": {"policy": {"name": "pagedeviction", "sink": 0, "recent": 0, "buffer": 0, "protect": false, "evict": "host",
                         "host": 26247, "recall": "quest", "recall_every": 1, "recall_blocks": 2, "again": 1,
                         "again_rounds": 2}, "length": 83},
 "ops": [{"at": 1, "id": "r9", "length": 81, "family": 2, "shared": 81, "tokens": 26,
          "ask": {"kv_policy": "strided", "kv_budget": 0.41124646660620934, "kv_usage": true}}]}
""",
    # The last prompt token saw blocks that came back, and the request kept them.
    "one token again": """
{"settings": {"policy": {"name": "scissorhands", "sink": 0, "recent": 0, "buffer": 0, "budget": 0.43736599360386275,
                         "protect": false, "evict": "host", "host": 17723, "recall": "quest", "recall_every": 1,
                         "recall_blocks": 8, "again": 1, "again_rounds": 3}, "length": 108, "extra": 2},
 "ops": [{"at": 5, "id": "r22", "length": 107, "family": 1, "tokens": 14, "n": 3}]}
""",
    # The end of a prompt was not computed again after all, when the budget had counted without it.
    "not again after all": """
{"settings": {"policy": {"name": "quest", "sink": 0, "recent": 0, "buffer": 9, "budget": 32, "protect": false,
                         "evict": "host", "host": 42175, "recall": "quest", "recall_every": 1, "recall_blocks": 1,
                         "again": 24, "again_rounds": 2}, "block": 8, "length": 225},
 "ops": [{"id": "r11", "length": 224, "tokens": 22, "hot": true}]}
""",
    # The host dropped blocks that were about to come back for those that went for them.
    "a host pool of one block": """
{"settings": {"policy": {"name": "keydiff", "sink": 0, "recent": 0, "buffer": 2, "budget": 1, "protect": false,
                         "evict": "host", "host": 2881, "recall": "quest", "recall_every": 3, "recall_blocks": 4,
                         "again": 256, "again_rounds": 1}, "block": 1, "length": 68},
 "ops": [{"at": 8, "id": "r19", "length": 66, "shared": 3, "tokens": 6}]}
""",
    # Steps of one token settled blocks that the request already had, and no decision followed them.
    "a prompt's end again, a token at a time": """
{"settings": {"policy": {"name": "keydiff", "sink": 0, "recent": 0, "buffer": 0, "budget": 1, "min_prompt": 0,
                         "evict": "host", "host": 10306, "preempt": "recompute", "recall": "quest", "recall_every": 1,
                         "recall_blocks": 1, "again": 6, "again_rounds": 1}, "chunk": 10, "extra": 3, "long": 1},
 "ops": [{"at": 3, "id": "r1", "length": 20, "family": 2, "shared": 10},
         {"at": 5, "id": "r3", "length": 13, "shared": 6, "tokens": 8}]}
""",
    "a session with a context in the smallest pool": """
{"settings": {"policy": {"name": "random", "sink": 0, "recent": 0, "buffer": 0, "budget": 1, "context": 24},
              "length": 90},
 "ops": [{"at": 3, "id": "r9", "length": 44, "family": 1, "stops": true, "session": true, "hot": true},
         {"at": 6, "do": "turn", "id": "r9", "length": 29, "family": 1, "tokens": 15, "stops": true}]}
""",
}


@pytest.mark.parametrize("name", FAILED)
def test_programs_that_failed_once_hold(name):
    counts = run(Program.parse(FAILED[name]))
    assert counts["holes"] and (counts["finished"] or counts["turns"] + counts["restarts"] > 0)


def test_room_is_made_for_the_whole_request_and_its_next_chunk():
    """Sliding windows hold less of the request than of a chunk: room for the one was not enough for the other."""
    counts = run(Program.parse((Path(loads.__file__).parent / "vain.json").read_text()))
    assert counts["finished"] and counts["relieved"]


def test_blocks_come_back_beside_a_block_in_flight():
    """A block in flight was within the trigger when its step was planned, so blocks that come back leave room for it."""
    counts = run(Program.parse((Path(loads.__file__).parent / "in-flight.json").read_text()))
    assert counts["finished"] and counts["spilled"]


# --- what the load finds ----------------------------------------------------------------------------------------------


def freed_twice(monkeypatch):
    rewrite = EvictableManager.rewrite

    def and_again(self, *args):
        changed = rewrite(self, *args)
        if changed is not None:
            self.block_pool.free_blocks([block for block in changed[0] if block.ref_cnt])
        return changed

    monkeypatch.setattr(EvictableManager, "rewrite", and_again)


def given_back_late(monkeypatch):
    """Workers hear of holes with the step after the one that hands the blocks out."""
    schedule, kept = EvictionMixin.schedule, []

    def late(self, *args, **kwargs):
        output = schedule(self, *args, **kwargs)
        plan = getattr(output, PLAN)
        kept.append([group.changes for group in plan.groups])
        for group, changes in zip(plan.groups, kept[-2] if len(kept) > 1 else [{}] * len(plan.groups)):
            group.changes = changes
        return output

    monkeypatch.setattr(EvictionMixin, "schedule", late)


def published_impure(monkeypatch):
    monkeypatch.setattr(EvictableManager, "cache_blocks", FullAttentionManager.cache_blocks)


def selects_purely(monkeypatch):
    monkeypatch.setattr(RequestBlocks, "plan_step", lambda *_: None)


def never_due(monkeypatch):
    monkeypatch.setattr(RequestBlocks, "over_trigger", lambda self, blocks: False)


def one_too_many(monkeypatch):
    spare = RequestBlocks.spare

    def more(self, computed_tokens):
        candidates, count = spare(self, computed_tokens)
        return candidates, min(count + 1, len(candidates)) if count else 0

    monkeypatch.setattr(RequestBlocks, "spare", more)


def pure_with_drafts(monkeypatch):
    """Drafts in flight count as computed before the first hole."""
    evict = RequestBlocks.evict
    monkeypatch.setattr(RequestBlocks, "evict", lambda self, victims, computed: evict(self, victims, computed + 16))


def released_late(monkeypatch):
    """Host blocks of requests that end stay theirs."""
    monkeypatch.setattr(OffloadPool, "release", lambda self, plan, blocks: None)


def forgotten_early(monkeypatch):
    """Requests are over their trigger with the step that takes their table over it, or not at all."""
    monkeypatch.setattr(EvictionMixin, "_reaches_later", lambda self, manager, req_id: bool(self.num_spec_tokens))


def back_in_front(monkeypatch):
    """Blocks come back before those that go for them are copied."""
    fetch = OffloadPool.fetch

    def first(self, plan, *args):
        before = len(plan.orders)
        fetch(self, plan, *args)
        plan.orders[:] = plan.orders[before:] + plan.orders[:before]

    monkeypatch.setattr(OffloadPool, "fetch", first)


def back_into_others(monkeypatch):
    """Blocks come back into room that running requests need."""
    monkeypatch.setattr(EvictableManager, "in_flight", property(lambda self: -(1 << 20)))


def back_and_published(monkeypatch):
    bring_back = EvictableManager.bring_back

    def shared(self, request_id, indices, there):
        back = bring_back(self, request_id, indices, there)
        self.block_pool.touch([self.block_pool.blocks[next(iter(back.values()))]])
        return back

    monkeypatch.setattr(EvictableManager, "bring_back", shared)


@pytest.mark.parametrize(
    ("mutation", "kinds"),
    [
        (released_late, ("host", "left", "KeyError")),
        (back_in_front, ("reads", "host")),
        (back_into_others, ("recall", "AssertionError", "ValueError")),
        (back_and_published, ("host", "books")),
        (forgotten_early, ("bound",)),
    ],
)
def test_it_finds_what_is_wrong_with_host_blocks(monkeypatch, mutation, kinds):
    mutation(monkeypatch)
    maker, found = Maker(seed=3, only=["sink-window", "h2o"], host=True), []
    while len(found) < 120 and not (found and found[-1].startswith(kinds)):
        fault = failure(maker.program())
        found.append("" if fault is None else fault.kind)
    assert found[-1].startswith(kinds), f"found {set(found)}, expected one of {kinds}"


@pytest.mark.parametrize(
    ("mutation", "kinds", "policies"),
    [
        (pure_with_drafts, ("purity", "reads"), ["sink-window", "h2o"]),
        (freed_twice, ("books", "AssertionError", "reads", "tables"), ["sink-window", "h2o"]),
        (given_back_late, ("tables", "reads"), ["sink-window", "h2o"]),
        (published_impure, ("purity", "reads"), ["sink-window", "h2o"]),
        (selects_purely, ("purity", "reads"), ["full", "sink-window", "duo"]),
        (never_due, ("bound", "stall"), ["sink-window"]),
        (one_too_many, ("floor",), ["sink-window", "h2o"]),
    ],
)
def test_it_finds_what_is_wrong(monkeypatch, mutation, kinds, policies):
    """The same programs find nothing wrong without the mutation (`test_random_programs_hold` has others)."""
    mutation(monkeypatch)
    maker, found = Maker(seed=3, only=policies, drafts=mutation is pure_with_drafts), []
    while len(found) < 120 and not (found and found[-1].startswith(kinds)):
        fault = failure(maker.program())
        found.append("" if fault is None else fault.kind)
    assert found[-1].startswith(kinds), f"found {set(found)}, expected one of {kinds}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_seeded_faults_still_apply(mutant):
    """`python tests/harness/mutants.py` runs them. A mutant has its fault, and Python can compile it."""
    text = source(mutant)
    assert mutant.new in text and compile(text, mutant.file, "exec")
