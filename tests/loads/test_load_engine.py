"""Random load on engines (load/embedded.py), 2,000 requests of it, and its verdict on engines that are broken."""

from collections import Counter

import pytest
from engine import V2
from loads.cases import KINDS, make_case, make_program
from loads.embedded import Failure, Run, run_case
from loads.models import Models
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from vllm_evict.compute.group import GroupRuntime
from vllm_evict.features.audit import engine as audits
from vllm_evict.features.audit.engine import Audits
from vllm_evict.integration.engine.managers import ChangingManager

pytestmark = pytest.mark.minutes

#: Requests of a program, and programs of each case; two of kinds in which all that is counted below happens in two.
SIZE, PROGRAMS = (12, 1) if V2 else (56, 4)
OF_KIND = {} if V2 else dict.fromkeys(("pressure", "bands", "allocated", "duo", "windows", "gaps"), 2)
# vLLM's reference kernel for latents is slow, and so is the stand-in for FlashAttention.
OF_KIND |= {"latent": 1, "drafts-latent": 1, "unlike": 1, "searched": 1 if V2 else 3}
#: Number of a case of each kind.
CASES = [1, 1, 11, 21, 22, 8, 6, 7, 8, 11, 1, 1, 9, 7, 14, 1, 8, 1]
#: Further cases of models whose layers differ: tokens and host blocks; bands of heads and `duo`. Of fp8 caches: pressure
#: and `context`.
UNLIKE = [("searched", 3), ("searched", 9), ("gaps", 23), ("gaps", 2), ("fp8", 7), ("fp8", 12)]
#: Chunks of local attention; drafters beside KV connectors; keys and values of unlike dimensions. Images on Model Runner
#: V2 alone: stock vLLM (0.32.0) ends engines of V1 under such load ("Encoder cache miss").
UNLIKE += [("chunks", 1), ("connected", 1)]
UNLIKE += [("images", 1), ("reach-images", 8)] if V2 else [("unlike", 1), ("reach-unlike", 6)]
#: LoRA adapters, some of which are loaded again under their names. Ends of prompts that fill blocks in part; the last case
#: has requests that publish such an end in a step in which the pool runs out, and no whole block.
OTHERWISE = [("reach-adapters", 1 if V2 else 2), ("reach-units", 1), ("units", 53 if V2 else 33)]
UNLIKE += OTHERWISE
OF_KIND |= {kind: 1 for kind, _ in OTHERWISE}
#: Drafters beside windows and latents.
UNLIKE += [("drafts-windows", 1), ("drafts-latent", 0)] if V2 else []


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = Models(tmp_path_factory.mktemp("load"))
    yield made
    made.close()


@pytest.fixture
def counts():
    return Counter()


@pytest.mark.both_runners(
    "blocks-1", "drafts-windows-1", "drafts-latent-0", *(f"{kind}-{number}" for kind, number in OTHERWISE)
)
@pytest.mark.nightly(push=tuple(f"{kind}-{number}" for kind, number in zip(KINDS, CASES)))
@pytest.mark.parametrize("kind, number", [*zip(KINDS, CASES), ("reach", 8), *UNLIKE])
def test_each_kind_of_engine_under_random_load(models, async_stays, complaints, counts, monkeypatch, kind, number):
    case, programs = make_case(number, kind), OF_KIND.get(kind, PROGRAMS)
    programs = min(programs, 2) if (kind, number) in UNLIKE else programs
    monkeypatch.setattr(audits, "IDLE_ONLY", 0.0)
    judge = Audits.judge

    def judged(self, *audit):
        counts.update(audits=1, measured=bool(audit[-1]))
        judge(self, *audit)

    monkeypatch.setattr(Audits, "judge", judged)
    run_case(case, models, range(programs), SIZE, counts)
    assert counts["requests"] + counts["refused"] == SIZE * programs
    assert counts["finished"] + counts["aborted"] == counts["requests"]
    assert counts["finished"] > counts["requests"] // 2
    assert not [message for level, message in complaints if level == "ERROR"]
    assert counts["reloads"] or kind != "reach-adapters"
    assert counts["ends"] or not kind.endswith("units")
    if not V2 and (kind, number) not in UNLIKE:
        assert (
            counts["aborted"]
            and (kind == "latent" or (counts["refused"] and counts["resets"]))
            and counts["turns"]
            and counts["answers compared"]
        )
        assert counts["evicted from"] and counts["preemptions"]
        assert counts["hit tokens"] or kind == "latent"
        assert counts["pages"] > 100 or not case.options["enable_prefix_caching"]
        assert kind != "audited" or counts["audits"] > 20
        assert kind != "audited" or counts["measured"] > 5 or case.policy.get("granularity") == "token"
        # Where heads are split, each part calls the attention kernel by itself.
        assert counts["bit-equal"] == counts["pages"] or kind in ("bands", "allocated", "duo", "gaps")


def test_a_program_follows_from_its_number():
    case = make_case(3)
    assert make_program(case, 5, 40) == make_program(make_case(3), 5, 40) != make_program(case, 6, 40)


def test_blocks_that_are_published_impure_are_seen(models, async_stays, monkeypatch, counts):
    monkeypatch.setattr(ChangingManager, "cache_blocks", FullAttentionManager.cache_blocks)
    with pytest.raises(Failure, match="published block .* differ from stock's by"):
        run_case(make_case(9, "blocks"), models, range(PROGRAMS), SIZE, counts)


@pytest.mark.parametrize("tables, expected", [(True, "workers hold others at"), (False, "NaN")])
def test_a_block_that_is_read_after_it_was_freed_is_seen(models, async_stays, monkeypatch, counts, tables, expected):
    """Holes do not reach workers, so workers read freed blocks: block tables show it, and so do log-probabilities."""
    begin = GroupRuntime.begin

    def deaf(self, scheduler_output, plan, number):
        plan.changes.clear()
        begin(self, scheduler_output, plan, number)

    monkeypatch.setattr(GroupRuntime, "begin", deaf)
    if not tables:
        monkeypatch.setattr(Run, "_check_tables", lambda self: None)
    with pytest.raises(Failure, match=expected):
        run_case(make_case(9, "blocks"), models, range(PROGRAMS), SIZE, counts)
