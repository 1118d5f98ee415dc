"""The load on the scheduler without a model (tests/loads): a part of it on every push, and that it finds what is wrong.

The whole of it: `python tests/harness/loads/scheduler.py --requests 100000`.
"""

from collections import Counter
from pathlib import Path

import loads
import pytest
from loads.contents import Fault
from loads.program import Maker, Op, Program, Settings
from loads.scheduler import failure, run, shortest
from mutants import MUTANTS, source
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from vllm_evict.core.blocks import RequestBlocks
from vllm_evict.core.host_pool import HostPool
from vllm_evict.core.mechanisms import Staging
from vllm_evict.core.plan import PLAN
from vllm_evict.integration.engine.managers import ChangingManager, EvictableManager
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
            command = "`python tests/harness/loads/scheduler.py --replay`"
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


def test_random_programs_hold_on_servers_with_blocks_on_the_host():
    """Hosts for the longest request and more: prompts read them, decodes less, and prefixes are hit there."""
    counts = held(Maker(seed=31, host=True), 60)
    assert counts["finished"] > 500 and counts["spilled"] > 1000 and counts["fetched"] > 50
    assert counts["staged"] > 1000 and counts["reached"] > 500 and counts["relieved"] > 20


@pytest.mark.parametrize("host", [False, True], ids=["pool", "host"])
def test_random_programs_hold_with_priorities(host):
    """A request may be preempted in the very step that has planned, and published, what it was to fill."""
    counts = held(Maker(seed=6, only=None if host else ["sink-window", "h2o", "full"], host=host, priorities=1.0), 12)
    assert counts["finished"] > 150 and counts["restarts"] > 5


def test_what_a_preempted_request_was_to_fill_is_no_prefix(monkeypatch):
    """A request that decodes needs a block in the step that plans a chunk of a less important one."""
    programs = [
        Program(
            Settings({"name": "full"}, long=8, priorities=True, extra=extra),
            (Op(id="low", length=60, priority=1), Op(1, id="high", length=length, tokens=40)),
        )
        for extra in range(3)
        for length in range(1, 9)
    ]
    assert not any(map(failure, programs))
    monkeypatch.setattr(EvictionMixin, "_withdraw", lambda self, request: None)
    assert any(fault.kind == "purity" for fault in filter(None, map(failure, programs)))


@pytest.mark.parametrize("name", ["sink-window", "h2o", "snapkv", "kvzip", "full"])
def test_random_programs_hold_on_servers_that_audit(name):
    """All answers; shadows begin beside other requests, and are withdrawn for them."""
    counts = held(Maker(seed=47, only=[name], audits=1.0), 12)
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
    # A waiting request was to take free blocks of the prefix cache, and the room of one that gave blocks for it took them.
    "a hit in the room of another request": """
{"settings": {"policy": {"name": "full", "evict": "host", "host": 274127, "when": "pressure", "admit": true,
                         "budget": 0.4123279094184272, "buffer": 4, "sink": 0, "recent": 4}, "chunk": 32, "length": 118},
 "ops": [{"at": 6, "id": "r24", "length": 117, "shared": 117, "n": 2},
         {"at": 6, "id": "r25", "length": 60, "shared": 30, "tokens": 7, "stops": true},
         {"at": 7, "id": "r26", "length": 101, "shared": 101, "tokens": 5, "n": 3, "hot": true}]}
""",
    # Blocks that others hold stayed, and later ones went for them, which decodes take for recent ones.
    "shared blocks among those that go to the host": """
{"settings": {"policy": {"name": "full", "evict": "host", "host": 163928, "when": "pressure", "admit": true, "budget": 16, "buffer": 4,
                         "sink": 1, "recent": 7}, "chunk": 20, "length": 77, "extra": 11, "long": 8},
 "ops": [{"at": 5, "id": "r1", "length": 75, "family": 1, "tokens": 3, "n": 3}]}
""",
    # A third request hit, as the second one had in the same step, what the first one was computing in it.
    "blocks on the host that their step computes": """
{"settings": {"policy": {"name": "full", "evict": "host", "host": 381067, "when": "pressure", "admit": true, "budget": 8, "buffer": 11,
                         "sink": 4, "recent": 0}, "chunk": 32, "length": 179, "extra": 16},
 "ops": [{"at": 5, "id": "r15", "length": 73, "family": 1, "shared": 36, "tokens": 90, "ask": {"kv_usage": true}},
         {"at": 6, "id": "r19", "length": 178, "family": 1, "shared": 178, "tokens": 20, "n": 2, "hot": true},
         {"at": 6, "id": "r20", "length": 46, "family": 1, "shared": 23, "n": 3, "ask": {"kv_policy": "full"}}]}
""",
    # Its prefix on the host stayed in use while a request waited: running requests found no room there.
    "a waiting request with its prefix on the host": """
{"settings": {"policy": {"name": "full", "evict": "host", "host": 148289, "when": "pressure", "budget": 28, "buffer": 0,
                         "sink": 7, "recent": 9}, "length": 70},
 "ops": [{"at": 23, "id": "r11", "length": 69, "family": 1, "shared": 69, "n": 3, "hot": true}]}
""",
    # An idle session held the host: a request that ran alone found no room there, and was preempted for ever.
    "an idle session that holds the host": """
{"settings": {"policy": {"name": "full", "evict": "host", "host": 245760, "budget": 16, "buffer": 0, "sink": 4,
                         "recent": 4}, "length": 113, "extra": 4, "ahead": true, "seed": 6},
 "ops": [{"id": "s0", "length": 93, "tokens": 6, "session": true},
         {"at": 100, "id": "a1", "length": 74, "family": 6, "tokens": 30}]}
""",
    # What a request of another policy fills while layers read less was taken for pure: its policy had other sinks.
    "a request of another policy where layers read less": """
{"settings": {"policy": {"name": "full", "allow": ["sink-window", "keydiff"], "read": 1, "hold": 1, "sink": 0,
                         "recent": 0}},
 "ops": [{"id": "r16", "tokens": 5, "ask": {"kv_policy": "keydiff"}}]}
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
    assert (counts["holes"] or counts["read_less"]) and (counts["finished"] or counts["turns"] + counts["restarts"] > 0)


def test_few_pages_of_sums_cut_no_prefix_to_less_than_nothing():
    """A step may begin more blocks than pages of sums are set aside."""
    sizes = {"sink": 0, "recent": 0, "buffer": 0, "budget": 0.4393728144815817}
    settings = Settings({"name": "h2o", "granularity": "token", **sizes}, chunk=129, length=125)
    assert run(Program(settings, (Op(id="a", length=124, ask={"kv_recent": 10}),)))["finished"] == 1


def test_room_is_made_for_the_whole_request_and_its_next_chunk():
    """Sliding windows hold less of the request than of a chunk: room for the one was not enough for the other."""
    counts = run(Program.parse((Path(loads.__file__).parent / "vain.json").read_text()))
    assert counts["finished"] and counts["relieved"]


# --- what the load finds ----------------------------------------------------------------------------------------------


def freed_twice(monkeypatch):
    rewrite = EvictableManager.rewrite

    def and_again(self, *args):
        changed = rewrite(self, *args)
        if changed is not None:
            _, given_back, _ = changed
            self.block_pool.free_blocks([block for block in given_back if block.ref_cnt])
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
    monkeypatch.setattr(ChangingManager, "cache_blocks", FullAttentionManager.cache_blocks)


def reads_purely(monkeypatch):
    monkeypatch.setattr(RequestBlocks, "note_step", lambda *_: None)


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
    monkeypatch.setattr(HostPool, "release", lambda self, plan, blocks: None)


def unlimited(monkeypatch):
    """Prompts are planned for which staging pages have no room."""
    monkeypatch.setattr(Staging, "_limit_chunk", lambda self, req_id, blocks, tokens: tokens)


def kept_uncounted(monkeypatch):
    """Blocks on the host that two requests have are given back by the first one that ends."""
    monkeypatch.setattr(HostPool, "use", lambda self, number: self._users.__setitem__(number, 1))


def held_while_waiting(monkeypatch):
    """A request that finds no room keeps its prefix on the host in use."""
    monkeypatch.setattr(Staging, "_cancel_all", lambda self: None)


def not_told(monkeypatch):
    """No event tells that a host block is dropped."""
    note = HostPool._note
    monkeypatch.setattr(HostPool, "_note", lambda self, hashes, there: note(self, hashes if there else (), there))


@pytest.mark.parametrize(
    ("mutation", "kinds"),
    [
        (held_while_waiting, ("host",)),
        (not_told, ("events",)),
        (released_late, ("host", "left")),
        (unlimited, ("host", "purity", "reads")),
        (kept_uncounted, ("host", "KeyError")),
        (reads_purely, ("purity", "reads")),
    ],
)
def test_it_finds_what_is_wrong_with_host_blocks(monkeypatch, mutation, kinds):
    mutation(monkeypatch)
    maker, found = Maker(seed=3, host=True), []
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
        (reads_purely, ("purity", "reads"), ["full", "sink-window", "duo"]),
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
