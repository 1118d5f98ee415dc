"""Preempted requests whose blocks wait on the host: they go on where they were, as if nothing had happened."""

import re
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine import V2, after, greedy, logprobs_of, random_prompt
from oracle.visible import BLOCK, assert_like_dense, visible

from vllm_evict.compute.sums import RunningSums
from vllm_evict.config import KVPolicyConfig, KVPolicyError
from vllm_evict.core.blocks import RequestBlocks
from vllm_evict.core.offload import Copy, OffloadPool
from vllm_evict.core.plan import EvictionPlan, Scoring
from vllm_evict.integration.engine.offloading import Offloading
from vllm_evict.integration.engine.preempted import Preempted

SIZES = {"budget": 128, "buffer": 0, "sink": 32, "recent": 32}
HOST = {"name": "h2o", **SIZES, "evict": "host", "host": "64MiB", "preempt": "host"}
QUEST = {**HOST, "recall": "quest", "recall_every": 4}


def preempt(server, req_id):
    """Preempt a request as vLLM does where the pool is empty."""
    scheduler = server.scheduler
    request = scheduler.requests[req_id]
    scheduler.running.remove(request)
    scheduler._preempt_request(request, time.monotonic())


def run(server, prompts, preempt_at=(), max_tokens=60, **params):
    """Outputs of the prompts, and what queries saw; see `answer`."""
    masks = visible(server)
    outputs = answer(server, prompts, preempt_at, max_tokens, **params)
    return list(outputs.values()), [masks[each] for each in outputs]


def answer(server, prompts, preempt_at=(), max_tokens=60, **params):
    """Output of each prompt by id. `preempt_at`: steps in whose middle all that run are preempted."""
    ids = [server.add(prompt, max_tokens=max_tokens, logprobs=1, **params) for prompt in prompts]
    schedule, step = server.scheduler.schedule, 0

    def scheduled(*args, **kwargs):
        nonlocal step
        step += 1
        if step in preempt_at:
            for request in server.scheduler.running[::-1]:
                preempt(server, request.request_id)
        return schedule(*args, **kwargs)

    server.scheduler.schedule = scheduled
    outputs = server.run()
    server.scheduler.schedule = schedule
    return {each: outputs[each] for each in ids}


@pytest.mark.both_runners("h2o")
@pytest.mark.parametrize("name", ["h2o", "recall", "snapkv", "keydiff", "full"])
def test_a_restored_request_answers_as_one_that_was_never_preempted(engine, poisoned, dense, name):
    """In the middle of its prompt, after it, while it decodes, and twice in a row; its sums and its holes are kept."""
    policy = QUEST if name == "recall" else {**HOST, "name": "h2o" if name == "full" else name}
    asked = {"extra_args": {"kv_policy": "full"}} if name == "full" else {}
    policy |= {"allow": ["full"]} if name == "full" else {}
    prompts = [random_prompt(600), random_prompt(333, 1), random_prompt(40, 2)]
    (other, subject), results = (engine({**policy}, enable_prefix_caching=False) for _ in range(2)), []
    for server, steps in ((other, ()), (subject, (2, 4, 9, 10, 30, 31, 32))):
        results.append((*run(server, prompts, steps, **asked), server.metrics()))
    (their_outputs, their_masks, _), (outputs, masks, metrics) = results
    for prompt, ours, theirs, seen, expected in zip(prompts, outputs, their_outputs, masks, their_masks):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        np.testing.assert_allclose(logprobs_of(ours), logprobs_of(theirs), atol=1e-5)
        assert torch.equal(seen, expected) and ours.kv_usage.evicted_blocks == theirs.kv_usage.evicted_blocks
        assert ours.kv_usage.restored >= 3 and ours.kv_usage.recomputed == 0 and theirs.kv_usage.restored is None
        assert_like_dense(dense, prompt, ours, seen)
    label = "full" if name == "full" else policy["name"]
    restored = sum(output.kv_usage.restored for output in outputs)
    assert metrics["preemptions_saved", label] == metrics["preemptions_restored", label] == restored
    assert metrics["preemptions_recomputed", label] == 0
    for server in (subject, other):
        server.assert_nothing_left()
        assert server.scheduler.part(Offloading).pool.used == 0


@pytest.mark.both_runners
@pytest.mark.parametrize("asked", ["prompt_logprobs", "prompt_logprob_token_ids"])
def test_log_probabilities_of_a_prompt_are_complete(engine, asked):
    """Preempted in the middle of its prompt, which it may take from the prefix cache: no row is lost."""
    if asked == "prompt_logprob_token_ids" and not V2:
        pytest.skip("vLLM serves it on Model Runner V2")
    prompt = random_prompt(333)
    params = {"prompt_logprobs": 0} if asked == "prompt_logprobs" else {asked: [[5, 7]] * 332}
    params["skip_reading_prefix_cache"] = False
    rows = []
    for steps in ((), (3,)):
        server = engine(HOST | {"budget": 1024}, max_num_batched_tokens=128, enable_prefix_caching=False)
        (output,) = answer(server, [prompt], steps, max_tokens=4, **params).values()
        assert not output.kv_usage.restored and (output.kv_usage.recomputed or 0) == len(steps)
        if asked == "prompt_logprobs":
            rows.append([row[token].logprob for row, token in zip(output.prompt_logprobs[1:], prompt[1:])])
        else:
            rows.append(np.array(output.prompt_token_id_logprobs))
    assert len(rows[0]) == 332
    np.testing.assert_allclose(rows[1], rows[0], atol=1e-4)


def test_a_request_that_reads_no_prefix_cache_goes_on_with_its_own_blocks(engine):
    server = engine(HOST, max_num_batched_tokens=128)
    (output,) = answer(server, [random_prompt(333)], (3, 9), max_tokens=20, skip_reading_prefix_cache=True).values()
    assert output.kv_usage.restored == 2 and not output.kv_usage.recomputed


def test_under_async_scheduling(async_engine, dense):
    """A step in flight still writes blocks that are saved; its token comes before the request goes on."""
    server = async_engine({**QUEST}, enable_prefix_caching=False)
    prompts = [random_prompt(600), random_prompt(400, 1)]
    outputs, masks = run(server, prompts, (5, 14, 25, 40))
    for prompt, output, mask in zip(prompts, outputs, masks):
        assert output.kv_usage.restored >= 2 and output.kv_usage.recalled_blocks > 0
        assert_like_dense(dense, prompt, output, mask)
    server.assert_nothing_left()


def test_blocks_that_are_in_the_prefix_cache_are_taken_from_there(engine, poisoned):
    """What other requests did not take is not copied, and blocks are published as they were."""
    server = engine({**HOST, "allow": ["full"]})
    prompt, full = random_prompt(300), {"extra_args": {"kv_policy": "full"}}
    copied = []

    def look(output, *_):
        copied.append([copy.kind for copy in output.kv_evict_plan.orders if copy.kind != "poison"])

    after(server.scheduler, "schedule", look)
    (output,), _ = run(server, [prompt], (6,), max_tokens=20, **full)
    # 300 tokens and the first generated ones are ten blocks: all but the one that was being filled are published.
    assert output.kv_usage.restored == 1 and sum(copied, []) == ["save"] * 10 + ["fetch"]
    again = server.generate([prompt], greedy(20, logprobs=1, **full))[0]
    assert again.num_cached_tokens == 288
    np.testing.assert_allclose(logprobs_of(again), logprobs_of(output), atol=1e-5)
    copied.clear()
    # Others take the blocks: they are copied, published again, and another request hits them.
    ids = server.add(prompt, max_tokens=20, logprobs=1, **full)
    for _ in range(4):
        server.llm.llm_engine.step()
    preempt(server, next(iter(server.scheduler.requests)))
    server.scheduler.kv_cache_manager.block_pool.reset_prefix_cache()
    outputs = server.run()
    assert sum(copied, []).count("fetch") == 10 and outputs[ids].outputs[0].token_ids == again.outputs[0].token_ids
    last = server.generate([prompt], greedy(20, logprobs=1, **full))[0]
    assert last.num_cached_tokens == 288 and last.outputs[0].token_ids == again.outputs[0].token_ids
    server.assert_nothing_left()


def test_requests_that_the_host_cannot_keep_are_computed_again(engine, poisoned, dense):
    """Four host blocks are too few for one request and enough for another; a reset forgets what is saved; so does an
    abort."""
    server = engine({**HOST, "host": 4 * 32768, "budget": 192}, enable_prefix_caching=False)
    pool = server.scheduler.part(Offloading).pool
    prompts = [random_prompt(100), random_prompt(600, 1)]
    (short, long), masks = run(server, prompts, (8,), max_tokens=20)
    assert (short.kv_usage.restored, short.kv_usage.recomputed) == (1, 0)
    assert (long.kv_usage.restored, long.kv_usage.recomputed) == (0, 1)
    assert_like_dense(dense, prompts[0], short, masks[0])
    for ending in ("reset", "abort", "turn"):
        req_id = server.add(random_prompt(100, 3), max_tokens=20)
        for _ in range(5):
            server.llm.llm_engine.step()
        (name,) = server.scheduler.requests
        preempt(server, name)
        assert pool.used == 4 and server.scheduler.residents[name].residence.saved is not None
        if ending == "reset":
            server.core.reset_prefix_cache(reset_running_requests=True)
        elif ending == "abort":
            server.llm.llm_engine.abort_request([req_id])
        else:
            request, resident = server.scheduler.requests[name], server.scheduler.residents[name]
            preempted, saved = server.scheduler.part(Preempted), resident.residence.saved
            assert preempted._finds_room(request, resident, saved)
            room = dict.fromkeys(range(server.scheduler.free_blocks + 1))
            assert not preempted._finds_room(request, resident, replace(saved, numbers=room))
            preempted._forget(resident)
        assert (pool.used == 0 and name not in server.scheduler.residents) or ending != "abort"
        outputs = server.run()
        assert ending == "abort" or outputs[req_id].kv_usage.recomputed == 1
        server.assert_nothing_left()
    assert server.metrics()["preemptions_recomputed", "h2o"] == 3


def test_a_pool_that_preempts_saves_and_restores(engine, poisoned, dense):
    """Requests that decode far beyond their prompts preempt each other, in a pool that holds two of them."""
    server = engine(
        {**QUEST, "allow": ["full"]}, blocks=26, max_model_len=640, max_num_batched_tokens=128, max_num_seqs=6,
        enable_prefix_caching=False,
    )  # fmt: skip
    prompts = [random_prompt(30 + 40 * i, i) for i in range(6)]
    outputs, masks = run(server, prompts, max_tokens=300, extra_args={"kv_policy": "full"})
    assert sum(output.kv_usage.restored or 0 for output in outputs) > 3
    for prompt, output, mask in zip(prompts, outputs, masks):
        assert_like_dense(dense, prompt, output, mask)
    server.assert_nothing_left()
    assert server.scheduler.part(Offloading).pool.used == 0


# --- parts ------------------------------------------------------------------------------------------------------------


def make_blocks():
    return RequestBlocks(KVPolicyConfig(name="h2o"), None, BLOCK)


def test_saved_blocks_are_never_dropped_and_never_take_the_request_s_own():
    pool, plan, (a, b, c) = OffloadPool(5), EvictionPlan.empty(1), (make_blocks() for _ in range(3))
    pool.spill(plan, "a", 0, a, [1, 2], [11, 12])
    pool.spill(plan, "b", 0, b, [3], [13])
    assert pool.save(plan, "a", 0, a, {5: 20, 6: 21, 7: 22, 8: 23}, 250) is None and a.residence.saved is None
    assert pool.save(plan, "a", 0, a, {5: 20, 6: 21, 7: 22}, 250) == [b] and not b.residence.host
    assert pool.used == 5 and a.residence.host.keys() == {1, 2} and a.residence.saved.numbers.keys() == {5, 6, 7}
    # Of two evicted blocks one finds room, in the place of a's evicted block that waited longest.
    assert pool.spill(plan, "c", 0, c, [1], [30]) == [a] and pool.spill(plan, "c", 0, c, [2], [31]) == [a]
    assert pool.spill(plan, "c", 0, c, [3], [32]) == [c] and a.residence.saved.numbers.keys() == {5, 6, 7}
    a.residence.saved.coming = {7: 40}
    pool.restore(plan, "a", 0, a, a.residence.saved)
    assert plan.orders[-1] == Copy("a", 0, "fetch", 40, plan.orders[5].number) and a.residence.saved is None
    pool.release(plan, c)
    assert pool.used == 0 and sorted(pool._free) == list(range(5))


def test_sums_that_were_set_aside_go_on():
    sums, index = RunningSums(2, 1, 1, 4, BLOCK, "sum", "sum"), np.arange(4)
    scoring = Scoring("last", 0.5, 8, 1, 4)
    for number, req_id in enumerate("ab"):
        sums.start(req_id, scoring)
        sums._sums[sums._slots[req_id]] = 1.0 + number
    sums.set_holes("a", 2)
    sums.park("a")
    assert "a" not in sums
    sums.start("c", scoring)  # takes its row
    sums.stop("b")
    sums.unpark("a", 3)
    report = sums.report(["a", "c"], [index, index], lambda values, maximum: values)
    assert report["a"].statistics["mass"].tolist() == [1.0] * 4 and not report["c"].statistics["mass"].any()
    slot = sums._slots["a"]
    assert (sums._window[slot], sums._trigger[slot], sums._holes[slot]) == (8, 4, 3)
    sums.park("c")
    sums.stop("c")
    sums.unpark("c", 0)
    assert "c" not in sums and not sums._parked


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"preempt": "host"}, "preempt: blocks that are dropped have no copy on the host: it needs evict: host"),
        (
            {"preempt": "host", "evict": "host", "host": "1GiB", "host_path": "/tmp/kv"},
            "a disk that fails would lose the newest tokens of a preempted request: leave host_path or preempt out",
        ),
        ({"preempt": "swap"}, "preempt: input should be 'recompute' or 'host', not 'swap'"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(fields, message):
    with pytest.raises(KVPolicyError, match=re.escape(message)):
        KVPolicyConfig.parse({"name": "h2o", **fields})


def test_a_server_that_only_saves_is_not_warned_of_recall(engine, complaints):
    server = engine(HOST)
    assert not complaints
    assert server.scheduler.kv_policy.preempt == "host"
    assert SimpleNamespace(**server.scheduler.kv_policy.to_dict()).preempt == "host"
