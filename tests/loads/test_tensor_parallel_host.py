"""Evicted blocks on the host under tensor parallelism: each rank copies its heads' part, and all see the same blocks."""

import numpy as np
import pytest
from engine import logprobs_of, random_prompt
from oracle.model import DenseLlama
from oracle.tiny import make_tiny_llama
from oracle.visible import assert_like_dense
from test_host_path import FAULTS, fails, open_files
from test_preempted import answer
from test_recall import ROOT
from workers import Watched

from vllm_evict.compute import offload_pages
from vllm_evict.eval.prompts import Prompts
from vllm_evict.eval.score import score
from vllm_evict.eval.tasks import make
from vllm_evict.eval.words import Filler
from vllm_evict.integration.engine.offloading import Offloading

pytestmark = pytest.mark.minutes

SIZES = {"budget": 128, "buffer": 0, "sink": 32, "recent": 32}
HOST = {"name": "h2o", **SIZES, "evict": "host", "host": "16MiB"}
QUEST = {**HOST, "recall": "quest", "recall_every": 4}
PROMPTS = [random_prompt(700), random_prompt(530, 1), random_prompt(300, 2)]


def assert_like_one_rank(one, several):
    """Outputs by id are those of one rank."""
    for alone, together in zip(one.values(), several.values(), strict=True):
        assert together.kv_usage == alone.kv_usage
        assert together.outputs[0].token_ids == alone.outputs[0].token_ids
        np.testing.assert_allclose(logprobs_of(together), logprobs_of(alone), atol=1e-3)


def assert_like_oracle(model, prompts, outputs, masks):
    dense = DenseLlama(model)
    for prompt, (req_id, output) in zip(prompts, outputs.items(), strict=True):
        assert_like_dense(dense, prompt, output, masks[req_id])


SERVED = {
    "box": ({}, 2, 2),
    "sphere": ({"recall_bounds": "sphere"}, 2, 2),
    "keydiff": ({"name": "keydiff"}, 2, 2),
    # Ranks have the same KV head, each with queries of its own.
    "one KV head": ({}, 2, 1),
    "four ranks": ({}, 4, 2),
}


@pytest.mark.both_runners("box")
@pytest.mark.parametrize("name", SERVED)
def test_ranks_bring_back_what_one_does(ranked_engine, tmp_path, name):
    """Same scores of each block, same blocks, byte for byte on each rank; freed blocks are NaN on device and host."""
    fields, most, kv_heads = SERVED[name]
    model, results = make_tiny_llama(tmp_path, kv_heads=kv_heads), []
    for ranks in (1, most):
        server = ranked_engine({**QUEST, **fields}, ranks, model=model, enable_prefix_caching=False)
        watched = Watched(server)
        results.append((answer(server, PROMPTS, max_tokens=40), watched.reports()))
        # Ranks share the bytes, and have one KV head at least.
        blocks = server.scheduler.part(Offloading).pool.blocks
        assert (
            blocks == 1024 // max(ranks, kv_heads)
            and blocks * server.scheduler.part(Offloading).block_bytes == 16 << 20
        )
        server.assert_nothing_left()
    (one, scores), (several, reduced) = results
    assert_like_one_rank(one, several)
    assert all(output.kv_usage.recalled_blocks > 0 for output in several.values())
    assert_like_oracle(model, PROMPTS, several, watched.masks())
    for ours, theirs in zip(reduced, scores, strict=True):
        for report, expected in zip(ours.values(), theirs.values(), strict=True):
            assert report.index.tolist() == expected.index.tolist()
            for statistic, values in expected.statistics.items():
                np.testing.assert_allclose(report.statistics[statistic], values, rtol=1e-4, atol=1e-5)
    of_ranks = watched.bytes()
    assert len(of_ranks) == most and all(len(each) > 10 and all(each) for each in of_ranks)


def test_under_async_scheduling(ranked_engine, tiny, async_stays):
    server = ranked_engine(QUEST, async_scheduling=True)
    assert server.core.batch_queue_size == 2
    watched = Watched(server)
    outputs = answer(server, PROMPTS)
    assert all(output.kv_usage.recalled_blocks > 0 for output in outputs.values())
    assert_like_oracle(tiny, PROMPTS, outputs, watched.masks())
    assert server.metrics()["reports_missing", "h2o"] == 0
    assert all(all(each) for each in watched.bytes()) and watched.reports()
    server.assert_nothing_left()


def test_blocks_that_no_request_took_come_back_without_a_copy(ranked_engine, tiny, monkeypatch):
    monkeypatch.setenv("VLLM_EVICT_POISON", "0")
    server = ranked_engine(QUEST, enable_prefix_caching=False)
    watched = Watched(server)
    outputs = answer(server, PROMPTS)
    usages = [output.kv_usage for output in outputs.values()]
    there, recalled = sum(each.still_there_blocks for each in usages), sum(each.recalled_blocks for each in usages)
    copied = [len(each) for each in watched.bytes()]
    assert there > 5 and copied == 2 * [recalled - there]
    assert_like_oracle(tiny, PROMPTS, outputs, watched.masks())
    server.assert_nothing_left()


@pytest.mark.parametrize("recall", ["quest", "none"])
def test_preempted_requests_go_on_where_they_were(ranked_engine, tiny, recall):
    """In the middle of a prompt, after it, and while it decodes, on both ranks; host blocks are NaN once they are free."""
    policy, results = {**(QUEST if recall == "quest" else HOST), "preempt": "host"}, []
    for steps in ((), (2, 4, 9, 10, 30, 31)):
        server = ranked_engine(policy, enable_prefix_caching=False)
        watched = Watched(server)
        results.append((answer(server, PROMPTS, steps), watched.masks()))
        server.assert_nothing_left()
        assert server.scheduler.part(Offloading).pool.used == 0
    (theirs, expected), (ours, masks) = results
    for alone, preempted in zip(theirs.values(), ours.values()):
        assert preempted.kv_usage.restored >= 3 and preempted.kv_usage.recomputed == 0
        assert preempted.outputs[0].token_ids == alone.outputs[0].token_ids
        np.testing.assert_allclose(logprobs_of(preempted), logprobs_of(alone), atol=1e-5)
    assert all(seen.equal(other) for seen, other in zip(masks.values(), expected.values(), strict=True))
    assert_like_oracle(tiny, PROMPTS, ours, masks)
    of_ranks = watched.bytes()
    assert len(of_ranks) == 2 and all(len(each) > 20 and all(each) for each in of_ranks)


def test_pools_that_are_too_small(ranked_engine, tiny):
    """The host drops evicted blocks for preempted requests, or has no room: ranks see the same, and read no NaN."""
    policy = {**QUEST, "preempt": "host", "host": 20 * 32768, "recall_every": 2}
    small = dict(blocks=40, max_model_len=1024, max_num_batched_tokens=128, max_num_seqs=6)
    server = ranked_engine(policy, enable_prefix_caching=False, **small)
    watched, prompts = Watched(server), [random_prompt(100 + 90 * i, i) for i in range(6)]
    outputs, masks = answer(server, prompts, range(20, 200, 15), max_tokens=100), watched.masks()
    usages = [output.kv_usage for output in outputs.values()]
    assert min(sum(getattr(each, name) or 0 for each in usages) for name in ("restored", "dropped_blocks")) > 3
    assert all(np.isfinite(logprobs_of(output)).all() for output in outputs.values())
    dense, kept = DenseLlama(tiny), 0
    for prompt, (req_id, output) in zip(prompts, outputs.items()):
        if not output.kv_usage.recomputed:  # what was sampled before a request starts over saw other blocks
            assert_like_dense(dense, prompt, output, masks[req_id])
            kept += 1
    assert kept > 2 and all(all(each) for each in watched.bytes())
    server.assert_nothing_left()
    assert server.scheduler.part(Offloading).pool.used == 0


# --- a file for each rank ---------------------------------------------------------------------------------------------


def fail_on_one_rank(worker, rank, call, after, error):
    if worker.rank == rank:
        with pytest.MonkeyPatch.context() as patch:
            fails(patch, call, after, error)
            failing = getattr(offload_pages.os, call)
        setattr(offload_pages.os, call, failing)  # as long as the worker lives


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", [None, "a write that fails at once", "a read that fails"])
def test_a_disk_that_fails_on_one_rank_is_none_for_all(ranked_engine, tiny, tmp_path, complaints, fault, rank):
    """All ranks go on without the blocks that one rank lost, from the same step on."""
    server = ranked_engine({**QUEST, "host_path": str(tmp_path / "blocks")}, enable_prefix_caching=False)
    if fault is not None:
        server.ask(fail_on_one_rank, rank, *FAULTS[fault])
    watched = Watched(server)
    files = [[name for name in files if str(tmp_path) in name] for files in server.ask(lambda worker: open_files())]
    assert files == [[f"{tmp_path}/blocks{number} (deleted)"] for number in ("", ".1")]
    outputs = answer(server, PROMPTS)
    assert_like_oracle(tiny, PROMPTS, outputs, watched.masks())
    metrics, warned = server.metrics(), [text for _, text in complaints if "host blocks can't be written" in text]
    assert metrics["reports_missing", "h2o"] == 0 and metrics["host_blocks", "h2o"] == 0
    if fault is None:
        assert not warned and all(output.kv_usage.recalled_blocks > 0 for output in outputs.values())
        assert all(len(each) > 10 and all(each) for each in watched.bytes())
    else:
        assert metrics["host_failures", "h2o"] > 0 and len(warned) == 1
        assert ("Input/output error" if rank == 0 else "on another rank") in warned[0]
    server.assert_nothing_left()


# --- the embedded model -----------------------------------------------------------------------------------------------


def test_needles_that_dropping_loses_are_found(ranked_engine):
    """The question comes when the context was evicted down to a tenth."""
    model, found = ROOT / "examples/needle/model", []
    prompts, filler = Prompts(str(model)), Filler()
    samples = [
        make(task, 2048, depth, 0, 0, prompts.count, filler)
        for task in ("niah", "multikey")
        for depth in (0.1, 0.2, 0.3, 0.5, 0.7)
    ]
    for policy in (QUEST, {"name": "h2o"}):
        server = ranked_engine(
            {**policy, **SIZES, "budget": 224}, model=model, dtype="bfloat16", max_model_len=2304,
            enable_prefix_caching=False,
        )  # fmt: skip
        outputs = server.generate([prompts.ids(sample) for sample in samples], max_tokens=4)
        answers = [prompts.tokenizer.decode(output.outputs[0].token_ids) for output in outputs]
        found.append(sum(map(score, answers, samples)))
        server.assert_nothing_left()
    assert found[0] >= 9 and found[1] <= 1, found
