"""Evicted blocks that wait on the host and come back: to the bit, and when a query asks for them."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from engine import after, greedy, logprobs_of, random_prompt
from oracle.model import DenseLlama
from oracle.visible import BLOCK, assert_like_dense, visible, watch_bytes

from vllm_evict.core.actions import Swap
from vllm_evict.core.mechanisms import Mechanism, Recall
from vllm_evict.eval.prompts import Prompts
from vllm_evict.eval.score import score
from vllm_evict.eval.sessions import Sessions
from vllm_evict.eval.tasks import make
from vllm_evict.eval.words import Filler
from vllm_evict.integration.engine.offloading import Offloading

ROOT = Path(__file__).parents[2]
HOST = {"name": "h2o", "budget": 128, "buffer": 0, "sink": 32, "recent": 32, "evict": "host", "host": "64MiB"}
QUEST = {**HOST, "recall": "quest"}
#: Blocks that layers read on the host (test_reach.py).
REACH = {"name": "full", "evict": "host", "host": "64MiB"}


# --- to the bit -------------------------------------------------------------------------------------------------------


class RecallAll(Mechanism):
    """All that went to the host comes back before the next step."""

    @classmethod
    def serves(cls, config):
        return config.evict == "host"

    def decide(self, plan, reports):
        for group in self.view.groups:
            for req_id, blocks in group.residents.items():
                if blocks.residence.host and self.view.running_request(req_id):
                    yield Swap(req_id, 0, returns=np.array(sorted(blocks.residence.host), np.int64))


@pytest.mark.both_runners("float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_that_went_comes_back_to_the_bit(engine, monkeypatch, dtype):
    """Each decision evicts all that may go, and all of it is back before the next query."""
    monkeypatch.setenv("VLLM_EVICT_POISON", "1")
    prompts = [random_prompt(400), random_prompt(500, 1)]
    subject, stock = engine(HOST, dtype=dtype), engine(dtype=dtype)
    subject.scheduler.mechanisms.add(RecallAll(subject.scheduler))
    outputs = [server.generate(prompts, max_tokens=70, logprobs=1) for server in (subject, stock)]
    for ours, theirs in zip(*outputs):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert (logprobs_of(ours) == logprobs_of(theirs)).all()
        assert ours.kv_usage.recalled_blocks == ours.kv_usage.spilled_blocks > 20
        assert ours.kv_usage.dropped_blocks == 0
    subject.assert_nothing_left()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_come_back_byte_for_byte(engine, dtype):
    server = engine({**QUEST, "recall_every": 1}, dtype=dtype)
    compared = watch_bytes(server.worker)
    server.generate([random_prompt(700), random_prompt(500, 1)], max_tokens=60)
    assert len(compared) > 3 and all(compared)
    server.assert_nothing_left()


# --- when a query asks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "again, chunk, steps",
    [
        (256, 256, [256, 194, 255, 1 + 255]),
        (64, 256, [256, 256, 193, 1 + 63]),
        (256, 96, [96, 96, 96, 96, 96, 96, 34, 95, 1 + 95]),
        (0, 256, [256, 256, 194]),
    ],
)
def test_one_chunk_holds_what_is_computed_again(engine, again, chunk, steps):
    """The chunk before the last one leaves it `again` tokens, or as many as a chunk has. Then come these, with one more."""
    server, planned = engine({**QUEST, "again": again}, max_num_batched_tokens=chunk), []
    after(server.scheduler, "schedule", lambda output, *_: planned.extend(output.num_scheduled_tokens.values()))
    server.generate([random_prompt(706)], max_tokens=1)
    assert planned[: len(steps)] == steps


@pytest.mark.oracle("full attention")
@pytest.mark.both_runners("1-box")
@pytest.mark.parametrize("rounds, bounds", [(1, "box"), (2, "box"), (1, "sphere"), (1, "mean")])
def test_the_end_of_a_prompt_is_computed_again_and_sees_what_came_back(engine, tiny, monkeypatch, rounds, bounds):
    monkeypatch.setenv("VLLM_EVICT_POISON", "1")
    fields = {"again_rounds": rounds, "recall_every": 4, "recall_bounds": bounds}
    server = engine({**QUEST, **fields}, enable_prefix_caching=False)
    masks, dense = visible(server), DenseLlama(tiny)
    prompts = [random_prompt(700), random_prompt(530, 1), random_prompt(300, 2)]
    ids = [server.add(prompt, max_tokens=40, logprobs=1) for prompt in prompts]
    outputs = server.run()
    for prompt, req_id in zip(prompts, ids):
        usage = outputs[req_id].kv_usage
        # The last chunk of the shortest prompt may be planned before anything went.
        assert usage.recalled_blocks > 0 and usage.asked_again <= rounds
        assert usage.asked_again or len(prompt) < 400
        assert usage.spilled_blocks == usage.evicted_blocks
        assert_like_dense(dense, prompt, outputs[req_id], masks[req_id])
    metrics = server.metrics()
    assert metrics["prompts_again", "h2o"] == sum(outputs[each].kv_usage.asked_again for each in ids)
    assert metrics["blocks_recalled", "h2o"] == sum(outputs[each].kv_usage.recalled_blocks for each in ids)
    assert metrics["host_blocks", "h2o"] == 0
    server.assert_nothing_left()


def test_under_async_scheduling(async_engine, tiny):
    """The last token of a prompt waits for its report; reports that are older than a recall are no faults."""
    server = async_engine({**QUEST, "recall_every": 2}, enable_prefix_caching=False)
    masks, dense, prompts = visible(server), DenseLlama(tiny), [random_prompt(600), random_prompt(400, 1)]
    ids = [server.add(prompt, max_tokens=60, logprobs=1) for prompt in prompts]
    outputs = server.run()
    for prompt, req_id in zip(prompts, ids):
        # The last chunk of the shorter one is planned before the decision that follows its first.
        assert outputs[req_id].kv_usage.asked_again == (len(prompt) > 512)
        assert outputs[req_id].kv_usage.recalled_blocks > 3
        assert_like_dense(dense, prompt, outputs[req_id], masks[req_id])
    assert server.metrics()["reports_missing", "h2o"] == 0
    server.assert_nothing_left()


def test_prompts_that_share_a_prefix_publish_nothing_that_was_computed_again(engine):
    """The second request hits what the first one published, and its log-probabilities are those of an engine alone."""
    prompt = random_prompt(600)
    server, alone = engine(QUEST), engine(QUEST, enable_prefix_caching=False)
    first = server.generate([prompt], max_tokens=8, logprobs=1)[0]
    full = {"kv_policy": "sink-window", "kv_budget": 96}
    params = greedy(max_tokens=8, logprobs=1, extra_args=full)
    again, expected = (each.generate([prompt], params)[0] for each in (server, alone))
    assert first.kv_usage.asked_again == 1 and again.num_cached_tokens >= 224
    assert np.isfinite(logprobs_of(again)).all() and np.isfinite(logprobs_of(expected)).all()
    dense_hit = server.generate([prompt[:224]], max_tokens=1, logprobs=1)[0]
    dense_own = alone.generate([prompt[:224]], max_tokens=1, logprobs=1)[0]
    np.testing.assert_allclose(logprobs_of(dense_hit), logprobs_of(dense_own), atol=1e-5)
    server.assert_nothing_left()


def test_a_host_pool_that_is_too_small_and_a_pool_that_is(engine, monkeypatch):
    """Requests come, are aborted and preempted; no query reads poison, and both pools are as full afterwards."""
    monkeypatch.setenv("VLLM_EVICT_POISON", "1")
    page = 2 * 2 * 2 * 32 * BLOCK * 4 // 2
    server = engine(
        {**QUEST, "host": 24 * page, "recall_every": 2, "allow": ["sink-window", "keydiff"]},
        blocks=14,
        max_model_len=1024,
        max_num_batched_tokens=128,
        max_num_seqs=6,
    )
    rng, preempted = np.random.default_rng(0), []
    preempt = server.scheduler._preempt_request

    def watched(request, *args, **kwargs):
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    server.scheduler._preempt_request = watched
    prefix, ids, aborted, outputs = random_prompt(200, 9), [], set(), {}
    pool, steps = server.scheduler.part(Offloading).pool, 0
    while len(ids) < 30 or server.llm.llm_engine.has_unfinished_requests():
        if len(ids) < 30 and rng.random() < 0.5:
            prompt = prefix[: int(rng.choice([0, 90, 200]))] + random_prompt(int(rng.integers(5, 500)), len(ids))
            extra = {"kv_policy": str(rng.choice(["h2o", "sink-window", "keydiff"]))}
            if extra["kv_policy"] == "sink-window":
                extra["kv_budget"] = 128
            ids.append(server.add(prompt, max_tokens=int(rng.integers(1, 60)), logprobs=1, extra_args=extra))
        steps += 1
        if steps % 40 == 0:
            server.core.reset_prefix_cache(reset_running_requests=True)
        if ids and rng.random() < 0.02:
            aborted.add(ids[-1])
            server.llm.llm_engine.abort_request([ids[-1]])
        for output in server.llm.llm_engine.step():
            if output.finished:
                outputs[output.request_id] = output
        held = sum(len(blocks.residence.host) for blocks in server.scheduler.residents.values())
        assert pool.used == held <= pool.blocks and pool.used + len(pool._free) == pool.blocks
        # What comes back is copied with the next step.
        coming = {copy.physical for copy in server.scheduler.next_plan.orders if copy.kind == "fetch"}
        held = sorted(server.held_blocks() - coming)
        assert not any(torch.isnan(cache[held]).any() for cache in server.worker.model_runner.kv_caches)
    for output in outputs.values():
        assert np.isfinite(logprobs_of(output)).all()
    assert sum(bool(output.kv_usage.recalled_blocks) for output in outputs.values()) > 3
    metrics = server.metrics()
    assert metrics["blocks_dropped", "h2o"] > 0 and preempted
    assert not any(value for (name, *_), value in metrics.items() if name == "reports_missing")
    server.assert_nothing_left()
    assert pool.used == 0 and sorted(pool._free) == list(range(pool.blocks))


def test_a_host_pool_of_two_blocks_may_drop_what_is_about_to_come_back(engine, monkeypatch):
    """Blocks that a swap evicts take the host blocks that it would bring back."""
    monkeypatch.setenv("VLLM_EVICT_POISON", "1")
    server = engine({**QUEST, "host": 2 * 32768, "recall_every": 1})
    assert server.scheduler.part(Offloading).pool.blocks == 2
    choose = Recall._choose

    def all_of_both(self, req_id, group, blocks, computed_tokens, again):
        if choose(self, req_id, group, blocks, computed_tokens, again) is None:
            return None
        candidates, _ = blocks.replaceable(computed_tokens)
        return Swap(req_id, group, holes=candidates, returns=np.array(sorted(blocks.residence.host), np.int64))

    monkeypatch.setattr(Recall, "_choose", all_of_both)
    outputs = server.generate([random_prompt(600), random_prompt(500, 1)], max_tokens=30, logprobs=1)
    assert all(np.isfinite(logprobs_of(output)).all() for output in outputs)
    assert sum(output.kv_usage.dropped_blocks for output in outputs) > 10
    server.assert_nothing_left()


def test_blocks_that_take_turns_are_looked_at_more_rarely(engine, monkeypatch):
    """Each look brings back what the look before evicted, so the time between looks doubles, until one brings nothing."""
    server, looks = engine({**QUEST, "recall_every": 2, "again": 0}, enable_prefix_caching=False), []

    def the_oldest(self, req_id, group, blocks, computed_tokens, again):
        looks.append(computed_tokens)
        candidates, _ = blocks.replaceable(computed_tokens)
        if len(looks) == 10:
            return None
        return Swap(req_id, group, holes=candidates[:1], returns=np.array(sorted(blocks.residence.host)[:1], np.int64))

    monkeypatch.setattr(Recall, "_choose", the_oldest)
    monkeypatch.setattr("vllm_evict.core.mechanisms.recall.FEW_RETURNS", 1000)
    server.generate([random_prompt(600)], max_tokens=450)
    assert np.diff(looks)[:13].tolist() == [2, 4, 8, 16, 32, 64, 64, 64, 64, 2, 2, 4, 8]
    server.assert_nothing_left()


# --- the embedded model -----------------------------------------------------------------------------------------------


TURNS = (0, 1024, 2048)
NEEDLE = ROOT / "examples/needle/model"


def needles():
    """Ten questions behind contexts of 2,048 tokens: name -> sample, and name -> its token ids."""
    prompts, filler, samples = Prompts(str(NEEDLE)), Filler(), {}
    for task in ("niah", "multikey"):
        for depth in (0.1, 0.17, 0.25, 0.33, 0.41):
            samples[f"{task}-{depth}"] = make(task, 2048, depth, 0, 0, prompts.count, filler)
    return samples, {name: prompts.ids(sample) for name, sample in samples.items()}


@pytest.mark.both_runners("host-one-chunk")
@pytest.mark.since("0.31", "each turn of a session has the max_tokens of the first")
@pytest.mark.parametrize(
    "policy, starts, least, most",
    [
        (QUEST, TURNS, 9, 10),
        ({**QUEST, "recall_bounds": "sphere"}, TURNS, 7, 10),
        ({"name": "h2o"}, TURNS, 0, 1),
        (QUEST, (0,), 9, 10),
        ({"name": "h2o"}, (0,), 0, 1),
        (REACH, TURNS, 9, 10),
        (REACH, (0,), 9, 10),
    ],
    ids=["host", "spheres", "drop", "host-one-chunk", "drop-one-chunk", "reach", "reach-one-chunk"],
)
def test_a_fact_is_found_after_its_context_was_evicted(engine, policy, starts, least, most):
    """Two turns bring the context, which is evicted down to a tenth, and the question comes with the third. Or one chunk
    brings all, and is evicted before the second token of the answer. How many of ten answers are right differs by one
    between CPUs, whose bfloat16 kernels round differently."""
    samples, ids = needles()
    sizes = {"budget": 224, "buffer": 0, "sink": 32, "recent": 32}
    options = {"max_model_len": 2304, "max_num_batched_tokens": 10 * 2304, "enable_prefix_caching": True}
    server = engine({**policy, **sizes}, model=NEEDLE, dtype="bfloat16", blocks=1500, **options)
    sessions = Sessions(server.llm)
    for start, end in pairwise(starts):
        sessions.turn({name: tokens[start:end] for name, tokens in ids.items()}, greedy(1))
    answers = sessions.turn({name: tokens[starts[-1] :] for name, tokens in ids.items()}, greedy(4))
    right = [score(answers[name].outputs[0].text, sample) for name, sample in samples.items()]
    assert least <= sum(right) <= most
    sessions.end()
    server.assert_nothing_left()
