"""Serving end to end, on both model runners: what users get, what the pool sees, what requests may ask for."""

import dataclasses
import itertools
import logging
import math
import pickle

import numpy as np
import pytest
import torch
from engine import PLAN, V2, Engine, greedy, logprobs_of, random_prompt
from oracle.model import DenseLlama
from oracle.tiny import make_tiny_llama
from parity import assert_like_oracle
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.metrics.stats import RequestStateStats

BLOCK = 32
H2O = {"name": "h2o", "budget": 192, "buffer": 64, "sink": 32, "recent": 64}
WINDOW = {"name": "sink-window", "budget": 192, "buffer": 0, "sink": 32}
POLICIES = {"h2o": H2O, "sink-window": WINDOW}


def on(policy):
    """Sampling parameters of a request under one of the policies."""
    return {"extra_args": {"kv_policy": policy}}


def most_held(policy):
    """Blocks that a request may hold once its chunk is done."""
    return math.ceil((policy["budget"] + policy["buffer"]) / BLOCK) + 1


def table_of(logprobs):
    """Everything that vLLM says about log-probabilities, for exact comparison."""
    return [row and {token: value.logprob for token, value in row.items()} for row in logprobs or []]


def everything(output):
    completion = output.outputs[0]
    return list(completion.token_ids), table_of(completion.logprobs), table_of(output.prompt_logprobs)


@pytest.fixture(scope="module")
def dense(tiny):
    return DenseLlama(tiny)


# --- full, and budgets that cover the sequence -----------------------------------------------------------------------

COVERING = {
    "full": {"name": "full"},
    "h2o": {"name": "h2o", "budget": 512},
    "sink-window": {"name": "sink-window", "budget": 512, "sink": 32},
}
PROMPTS = [random_prompt(length, seed) for seed, length in enumerate((300, 40, 150, 33))]
TOKENS = 8 if V2 else 20


def answers(subject):
    """Outputs to compare: greedy and sampled, with and without prompt log-probabilities, chunked prefill."""
    outputs = subject.generate(PROMPTS, max_tokens=TOKENS, logprobs=3, prompt_logprobs=2)
    torch.manual_seed(7)
    outputs += subject.generate(PROMPTS, max_tokens=TOKENS, logprobs=1, temperature=0.8)
    return [everything(output) for output in outputs]


@pytest.fixture(scope="module")
def stock_answers(tiny):
    stock = Engine(tiny, max_num_batched_tokens=128)
    try:
        return answers(stock)
    finally:
        stock.close()


@pytest.mark.both_runners("full")
@pytest.mark.parametrize("name", COVERING)
def test_a_budget_that_covers_the_sequence_changes_no_bit(engine, stock_answers, name):
    subject = engine(COVERING[name], max_num_batched_tokens=128)
    assert type(subject.scheduler).__name__ == "EvictionScheduler"
    assert answers(subject) == stock_answers


def test_full_asked_for_by_a_request_changes_no_bit(engine, stock_answers):
    """On a server whose own policy evicts from these very prompts."""
    server = engine({**H2O, "budget": 160, "allow": ["full"]}, max_num_batched_tokens=128)
    evicted = server.generate(PROMPTS[:1], max_tokens=TOKENS)[0]
    assert evicted.kv_usage.evicted_blocks > 0
    server.scheduler.reset_prefix_cache()
    outputs = server.generate(PROMPTS, max_tokens=TOKENS, logprobs=3, prompt_logprobs=2, **on("full"))
    assert [everything(output) for output in outputs] == stock_answers[: len(PROMPTS)]


def test_requests_shorter_than_the_budget_are_left_alone(engine, stock_answers):
    """Up to 320 tokens just fit in 10 blocks; the trigger is at 10."""
    server = engine({**H2O, "budget": 320, "buffer": 0}, max_num_batched_tokens=128)
    outputs = server.generate(PROMPTS, max_tokens=TOKENS, logprobs=3, prompt_logprobs=2)
    assert [everything(output) for output in outputs] == stock_answers[: len(PROMPTS)]
    assert [output.kv_usage.evicted_blocks for output in outputs] == [0] * len(PROMPTS)
    # The last token is sampled and never computed.
    held = [math.ceil((len(prompt) + TOKENS - 1) / 32) for prompt in PROMPTS]
    assert [output.kv_usage.peak_resident_blocks for output in outputs] == held


# --- blocks go back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("chunk", [96, 256])
def test_blocks_go_back_to_the_pool(engine, name, chunk):
    """After every step the pool's free count is its size less what requests hold, and no request holds more than
    ceil((budget + buffer) / block) + 1; with a chunk in flight, budget + buffer + the chunk."""
    policy = POLICIES[name]
    server = engine(policy, max_num_batched_tokens=chunk)
    peaks, after = {}, []
    schedule = server.scheduler.schedule

    def watched(*args):
        output = schedule(*args)
        for req_id in output.num_scheduled_tokens:
            peaks[req_id] = max(peaks.get(req_id, 0), len(server.held_by(req_id)))
        return output

    server.scheduler.schedule = watched

    def check(server):
        assert server.free_blocks == server.all_blocks - len(server.held_blocks())
        for request in server.scheduler.running:
            held = server.held_by(request.request_id)
            assert len(held) == len(set(held))
            assert len(held) <= most_held(policy)
            after.append(len(held))

    for seed, (length, tokens) in enumerate([(700, 40), (64, 250), (330, 90)]):
        server.add(random_prompt(length, seed), max_tokens=tokens)
    outputs = server.run(check)
    assert max(after) >= most_held(policy) - 1, "the bound was never reached: nothing was shown"
    limit = math.ceil((policy["budget"] + policy["buffer"] + chunk) / BLOCK) + 1
    assert max(peaks.values()) <= limit < 700 // BLOCK
    assert sorted(peaks.values()) == sorted(output.kv_usage.peak_resident_blocks for output in outputs.values())
    server.assert_nothing_left()


def test_one_request_after_another_is_evicted_from(engine):
    server = engine(WINDOW)
    usages = [server.generate([random_prompt(400, seed)], max_tokens=8)[0].kv_usage for seed in range(3)]
    assert [usage.evicted_blocks for usage in usages] == [usages[0].evicted_blocks] * 3
    assert usages[0].evicted_blocks >= 6


# --- admission -------------------------------------------------------------------------------------------------------


def concurrency(server):
    return server.llm.llm_engine.vllm_config.cache_config.kv_cache_max_concurrency


def most_running(server):
    """8 requests of 300 + 30 tokens: how many run at once, and the outputs' lengths."""
    running = []
    for seed in range(8):
        server.add(random_prompt(300, seed), max_tokens=30)
    outputs = server.run(lambda server: running.append(len(server.scheduler.running)))
    assert [len(output.outputs[0].token_ids) for output in outputs.values()] == [30] * 8
    assert server.free_blocks == server.all_blocks
    return max(running)


@pytest.mark.parametrize("name", POLICIES)
def test_a_small_pool_serves_more_requests_at_once(engine, name):
    """40 blocks hold 3 whole requests of 11 blocks (vLLM starts a fourth, and takes it back)."""
    small = dict(blocks=41, max_model_len=512, max_num_batched_tokens=64, enable_prefix_caching=False)
    stock, evicting = engine(**small), engine({**POLICIES[name], "buffer": 0}, **small)
    assert most_running(stock) <= 4
    assert most_running(evicting) >= 6
    # At most: the trigger of 6 blocks, and a chunk of 2 in flight that may reach into one more.
    assert concurrency(stock) == pytest.approx(41 / 16, rel=0.05)
    assert concurrency(evicting) == pytest.approx(41 / 9, rel=0.05)


def test_a_request_longer_than_the_whole_pool_is_served(engine, tiny):
    """20 blocks are 640 tokens; stock vLLM does not even start with a context of 2,048."""
    page = 2 * 2 * 32 * 32 * 4 * BLOCK // 32  # K and V, heads, head size, float32, tokens of one layer's block
    small = dict(kv_cache_memory_bytes=20 * 2 * page, num_gpu_blocks_override=None, max_num_batched_tokens=128)
    with pytest.raises(Exception, match="KV cache"):
        engine(**small)
    server = engine(WINDOW, **small)
    assert server.all_blocks < 20
    output = server.generate([random_prompt(1500)], max_tokens=100)[0]
    assert len(output.outputs[0].token_ids) == 100
    assert output.kv_usage.evicted_tokens > 1200
    server.assert_nothing_left()


def test_a_long_cached_prefix_does_not_starve_its_request(engine):
    """Blocks that a hit would take plus those of the first chunk are more than the pool has: nobody else runs, so
    waiting frees nothing."""
    server = engine({"name": "sink-window", "budget": 320, "sink": 32}, blocks=20)
    prompt = random_prompt(1024)
    server.generate([prompt[:512]], max_tokens=1)
    server.add(prompt, max_tokens=4)
    for _ in range(40):
        done = [output for output in server.llm.llm_engine.step() if output.finished]
        if done:
            break
    assert done, "the request was never scheduled"
    assert len(done[0].outputs[0].token_ids) == 4


# --- prefix caching --------------------------------------------------------------------------------------------------


def pure_tokens(trace):
    """Tokens computed while nothing was missing."""
    first = next((step for step, evicted in enumerate(trace.evicted) if evicted), None)
    steps = trace.steps if first is None else trace.steps[: first + 1]
    return trace.start + sum(steps)


def test_a_cached_prefix_that_fits_is_used_whole(engine):
    """However long the chunks that could be in flight: a request that fits even whole waits for nothing."""
    small = dict(blocks=24, max_num_batched_tokens=1024, max_model_len=512)
    server = engine({"name": "sink-window", "budget": 256, "sink": 32}, **small)
    prompt = random_prompt(330)
    for cached in (0, 320):
        (output,) = server.generate([prompt], max_tokens=60)
        assert output.num_cached_tokens == cached
    assert output.kv_usage.evicted_blocks > 0


@pytest.mark.parametrize("name", POLICIES)
def test_the_prefix_cache_holds_pure_blocks_and_nothing_else(engine, dense, name):
    """A is evicted from. Who shares a prefix with A hits A's pure blocks, evicted ones too, and not one block more;
    what they compute is what they would compute alone."""
    policy = POLICIES[name]
    server = engine(policy, max_num_batched_tokens=160)
    prompt = random_prompt(600, 1)
    (first,), (trace,) = server.traced([(prompt, {"max_tokens": 40, "logprobs": 1})])
    pure = pure_tokens(trace)
    assert pure < 400 < first.kv_usage.evicted_tokens + policy["budget"], "nothing to tell apart"
    assert min(sum(trace.evicted, [])) * BLOCK < pure, "no pure block was evicted"

    again = [*prompt, *first.outputs[0].token_ids, *random_prompt(50, 2)]
    outputs, traces = server.traced([(again, {"max_tokens": 12, "logprobs": 1})])
    assert traces[0].start == outputs[0].num_cached_tokens == pure // BLOCK * BLOCK > 0
    assert assert_like_oracle(dense, again, outputs[0], traces[0], policy) > 0

    short = [*prompt[:150], *random_prompt(30, 3)]
    shared = server.generate([short], max_tokens=10, logprobs=1)[0]
    alone = engine(policy, max_num_batched_tokens=160).generate([short], max_tokens=10, logprobs=1)[0]
    assert shared.num_cached_tokens == 128 and not alone.num_cached_tokens
    assert shared.outputs[0].token_ids == alone.outputs[0].token_ids
    np.testing.assert_allclose(logprobs_of(shared), logprobs_of(alone), atol=1e-4)


def test_full_requests_publish_more_than_evicted_ones(engine):
    """The other half of the test before: without eviction all those blocks would have been hit."""
    server = engine({**WINDOW, "allow": ["full"]}, max_num_batched_tokens=160)
    prompt = random_prompt(600, 1)
    first = server.generate([prompt], max_tokens=40, **on("full"))[0]
    again = [*prompt, *first.outputs[0].token_ids, *random_prompt(50, 2)]
    assert server.generate([again], max_tokens=1)[0].num_cached_tokens == 640 // BLOCK * BLOCK - BLOCK


def test_a_shared_block_is_dropped_not_freed(engine):
    """A and B read the same blocks. A's eviction takes A's reference only: B goes on unharmed, and the block is
    counted as shared."""
    server = engine({**WINDOW, "allow": ["full"]}, max_num_batched_tokens=512)
    prefix = random_prompt(192, 5)
    a, b = [*prefix, *random_prompt(20, 6)], [*prefix, *random_prompt(40, 7)]
    alone = server.generate([b], max_tokens=60, logprobs=1, **on("full"))[0]
    before = server.metrics()
    ids = [server.add(b, max_tokens=60, logprobs=1, **on("full")), server.add(a, max_tokens=50)]
    shared = []

    def check(server):
        tables = [server.manager.req_to_blocks[request.request_id] for request in server.scheduler.running]
        if len(tables) == 2:
            assert tables[0][:6] and all(block.ref_cnt in (1, 2) for block in tables[0][:6])
            shared.append(sum(block.ref_cnt == 2 for block in tables[0][:6]))
        assert server.free_blocks == server.all_blocks - len(server.held_blocks())

    outputs = server.run(check)
    server.drain()
    assert shared[0] > shared[-1] >= 1  # the sink stays shared
    after = server.metrics()
    moved = {key: after[key, "sink-window"] - before[key, "sink-window"] for key in ("blocks_evicted", "blocks_shared")}
    assert moved["blocks_shared"] == 6 - shared[-1]
    assert moved["blocks_evicted"] == outputs[ids[1]].kv_usage.evicted_blocks == moved["blocks_shared"]
    assert outputs[ids[0]].kv_usage.evicted_blocks == 0
    assert outputs[ids[0]].outputs[0].token_ids == alone.outputs[0].token_ids
    np.testing.assert_allclose(logprobs_of(outputs[ids[0]]), logprobs_of(alone), atol=1e-4)
    server.assert_nothing_left()


# --- preemption, abort -----------------------------------------------------------------------------------------------


@pytest.mark.both_runners("h2o-True")
@pytest.mark.parametrize("name, caching", [(a, b) for a in POLICIES for b in (False, True)])
def test_preempted_requests_start_over_with_everything(engine, dense, name, caching):
    """Four requests outgrow a pool of 23 blocks. Who comes back has all its blocks again, and is evicted from anew."""
    policy = {**POLICIES[name], "budget": 160, "buffer": 64}
    if name == "h2o":
        policy["accumulate"] = "mean"  # ages count from the first query after the restart
    server = engine(policy, blocks=24, max_num_batched_tokens=128, enable_prefix_caching=caching)
    requests = [(random_prompt(100 + 10 * seed, seed), {"max_tokens": 150, "logprobs": 1}) for seed in range(4)]

    def check(server):
        assert server.free_blocks == server.all_blocks - len(server.held_blocks())
        for request in server.scheduler.requests.values():
            assert 0 <= request.num_computed_tokens <= request.num_tokens
            assert server.scheduler.residents[request.request_id].holes >= 0

    outputs, traces = server.traced(requests, check)
    assert sum(trace.restarts for trace in traces) > 0, "nobody was preempted"
    assert any(trace.restarts and sum(map(len, trace.evicted)) for trace in traces)
    for (prompt, _), output, trace in zip(requests, outputs, traces):
        assert len(output.outputs[0].token_ids) == 150
        assert np.isfinite(logprobs_of(output)).all()
        assert_like_oracle(dense, prompt, output, trace, policy)
    server.assert_nothing_left()


@pytest.mark.both_runners("h2o")
@pytest.mark.parametrize("name", POLICIES)
def test_a_request_that_pauses_keeps_its_holes(engine, tiny, name):
    """A running request that is left out of a step loses its row in the batch; it comes back with a row made anew."""
    check_pauses(engine, tiny, POLICIES[name])


def check_pauses(engine, model, policy):
    dense = DenseLlama(model)
    server = engine(policy, model=model, max_num_batched_tokens=128, enable_prefix_caching=False)
    schedule, steps, pauses = server.scheduler.schedule, itertools.count(), []

    def pausing(*args):
        running = server.scheduler.running
        paused = running.pop(next(steps) % 2) if len(running) == 2 and next(steps) % 5 == 0 else None
        output = schedule(*args)
        if paused is not None:
            assert paused.request_id not in output.num_scheduled_tokens
            pauses.append(server.scheduler.residents[paused.request_id].holes)
            server.scheduler.running.insert(0, paused)
        return output

    server.scheduler.schedule = pausing
    requests = [(random_prompt(400 - 60 * seed, seed), {"max_tokens": 80, "logprobs": 1}) for seed in range(2)]
    outputs, traces = server.traced(requests)
    assert sum(holes > 0 for holes in pauses) > 5
    for (prompt, _), output, trace in zip(requests, outputs, traces):
        assert assert_like_oracle(dense, prompt, output, trace, policy) > 0
    server.assert_nothing_left()


def test_a_reset_of_the_prefix_cache_under_way_restarts_cleanly(engine):
    """`reset_prefix_cache(reset_running_requests=True)` preempts a request and resumes it in the same step, while
    holes of its old table wait to be told."""
    server = engine(WINDOW, enable_prefix_caching=False)
    prompt = random_prompt(400)
    alone = server.generate([prompt], max_tokens=30, logprobs=1)[0]
    server.add(prompt, max_tokens=30, logprobs=1)
    resets = []

    def reset(server):
        if server.scheduler._plan.groups[0].holes and not resets:
            resets.append(server.scheduler.reset_prefix_cache(reset_running_requests=True))

    (output,) = server.run(reset).values()
    assert resets == [True]
    assert output.kv_usage.evicted_blocks > alone.kv_usage.evicted_blocks, "it was not evicted from a second time"
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids
    np.testing.assert_allclose(logprobs_of(output), logprobs_of(alone), atol=1e-4)
    # Nothing was ever written through a hole.
    for cache in server.worker.model_runner.kv_caches:
        assert not cache[0].any()
    server.assert_nothing_left()


@pytest.mark.parametrize("steps", [2, 12], ids=["in-prefill", "in-decode"])
def test_abort_gives_everything_back(engine, steps):
    server = engine(H2O, max_num_batched_tokens=128, enable_prefix_caching=False)
    prompts = [random_prompt(400, 1), random_prompt(90, 2)]
    alone = server.generate(prompts[1:], max_tokens=30, logprobs=1)[0]
    aborted = server.add(prompts[0], max_tokens=100)
    survivor = server.add(prompts[1], max_tokens=30, logprobs=1)
    for _ in range(steps):
        server.llm.llm_engine.step()
    (request,) = [r for r in server.scheduler.requests.values() if r.request_id.startswith(aborted)]
    assert (request.num_computed_tokens < 400) == (steps == 2)
    assert server.scheduler.residents[request.request_id].holes == (0 if steps == 2 else 6)
    server.llm.llm_engine.abort_request([aborted])
    assert request.request_id not in server.scheduler.residents
    outputs = server.run()
    assert list(outputs) == [survivor]
    assert outputs[survivor].outputs[0].token_ids == alone.outputs[0].token_ids
    np.testing.assert_allclose(logprobs_of(outputs[survivor]), logprobs_of(alone), atol=1e-4)
    server.assert_nothing_left()


# --- requests --------------------------------------------------------------------------------------------------------

MIX = [
    (random_prompt(80, 1), {"max_tokens": 300}, H2O),
    (random_prompt(330, 2), {"max_tokens": 60, "extra_args": {"kv_budget": 128}}, {**H2O, "budget": 128}),
    (random_prompt(200, 3), {"max_tokens": 90, **on("sink-window")}, {**WINDOW, "buffer": 64}),
    (
        random_prompt(60, 4),
        {"max_tokens": 200, "extra_args": {"kv_policy": "sink-window", "kv_budget": 96}},
        {**WINDOW, "buffer": 64, "budget": 96},
    ),
    (random_prompt(250, 5), {"max_tokens": 64, **on("full")}, {"name": "full"}),
    (random_prompt(260, 6), {"max_tokens": 40, "extra_args": {"kv_budget": 0.5}}, {**H2O, "budget": 160}),
]


def test_policies_and_budgets_mix_in_one_batch(engine, dense):
    """Each request of a mixed batch is what the oracle says for it alone, and what the engine says for it alone."""
    server = engine({**H2O, "allow": ["full", "sink-window"]}, max_num_batched_tokens=2048, enable_prefix_caching=False)
    requests = [(prompt, {**sampling, "logprobs": 1}) for prompt, sampling, _ in MIX]
    outputs, traces = server.traced(requests)
    evicted = [
        assert_like_oracle(dense, prompt, output, trace, policy)
        for (prompt, _, policy), output, trace in zip(MIX, outputs, traces)
    ]
    assert [blocks > 0 for blocks in evicted] == [True, True, True, True, False, True]
    assert [output.kv_usage.policy for output in outputs] == [policy["name"] for *_, policy in MIX]
    for request, output in zip(requests, outputs):
        ((alone,), _) = server.traced([request])
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        np.testing.assert_allclose(logprobs_of(alone), logprobs_of(output), atol=1e-3)
        assert alone.kv_usage == output.kv_usage
    server.assert_nothing_left()


def test_streamed_tokens_add_up_to_the_finished_output(engine):
    server = engine({**H2O, "allow": ["sink-window"]}, enable_prefix_caching=False)
    requests = [(random_prompt(300, 1), {}), (random_prompt(280, 2), on("sink-window"))]
    whole = [server.generate([prompt], max_tokens=40, **options)[0] for prompt, options in requests]
    ids = [
        server.add(prompt, max_tokens=40, output_kind=RequestOutputKind.DELTA, **options)
        for prompt, options in requests
    ]
    streamed, usage = {i: [] for i in ids}, {i: [] for i in ids}
    while server.llm.llm_engine.has_unfinished_requests():
        for output in server.llm.llm_engine.step():
            streamed[output.request_id] += output.outputs[0].token_ids
            usage[output.request_id].append(output.kv_usage)
    assert list(streamed.values()) == [output.outputs[0].token_ids for output in whole]
    for request_usage, output in zip(usage.values(), whole):
        assert request_usage[-1] == output.kv_usage and request_usage[-1].evicted_blocks > 0
        assert set(request_usage[:-1]) == {None}


def test_each_of_n_completions_has_its_usage(engine):
    server = engine(H2O)
    output = server.generate([random_prompt(300)], max_tokens=30, n=3, temperature=1.0)[0]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) > 1
    assert [completion.kv_usage.policy for completion in output.outputs] == ["h2o"] * 3
    assert all(completion.kv_usage.evicted_blocks >= 4 for completion in output.outputs)
    assert output.kv_usage == output.outputs[0].kv_usage
    server.assert_nothing_left()


def test_a_request_has_its_usage_in_its_metrics(engine):
    """Ray Data shows `dataclasses.asdict` of an output's metrics. Streamed outputs that nobody has read are merged."""
    server = engine(H2O, disable_log_stats=False)
    prompt = random_prompt(300)
    (output,) = server.generate([prompt], max_tokens=30)
    shown = dataclasses.asdict(pickle.loads(pickle.dumps(output)).metrics)
    assert shown.pop("kv_usage") == dataclasses.asdict(output.kv_usage) and output.kv_usage.evicted_blocks > 0
    assert shown.keys() == dataclasses.asdict(RequestStateStats()).keys() and shown["num_generation_tokens"] == 30

    server.add(prompt, max_tokens=30, output_kind=RequestOutputKind.DELTA)
    first, *others = [output for _ in range(40) for output in server.llm.llm_engine.step()]
    for output in others:
        first.add(output, aggregate=True)
    assert first.finished and first.metrics.kv_usage == dataclasses.asdict(output.kv_usage)
    (several,) = server.generate([prompt], max_tokens=30, n=2, temperature=1.0)
    usages = [dataclasses.asdict(completion.kv_usage) for completion in several.outputs]
    assert several.metrics.kv_usage == usages and len(usages) == 2


@pytest.mark.both_runners
def test_a_step_that_comes_to_the_runner_past_the_worker_ends(engine):
    """vLLM's older Ray executor does so, and so may executors of others: nobody would obey the plan."""
    server = engine(H2O)
    server.add(random_prompt(40), max_tokens=4)
    step = server.scheduler.schedule()
    with pytest.raises(RuntimeError, match="to the model runner past the worker"):
        server.worker.model_runner.execute_model(step)
    server.worker.execute_model(step)


def test_a_step_without_its_plan_ends(engine):
    """An executor that makes steps anew may lose it. Requests would read blocks that are others' by now."""
    server = engine(H2O)
    server.add(random_prompt(40), max_tokens=4)
    server.llm.llm_engine.step()
    step = server.scheduler.schedule()
    delattr(step, PLAN)
    with pytest.raises(RuntimeError, match="got a step without its plan"):
        server.worker.execute_model(step)


def test_a_stop_string_ends_a_request_with_its_usage(engine):
    """Stop strings are found by the front end, which then aborts the request in the engine."""
    server = engine(H2O, enable_prefix_caching=False)
    prompt = random_prompt(300)
    whole = server.generate([prompt], max_tokens=30)[0]
    word = whole.outputs[0].text.split()[20]
    output = server.generate([prompt], max_tokens=30, stop=[word + " "])[0]
    assert output.outputs[0].finish_reason == "stop"
    assert output.kv_usage is not None
    assert output.kv_usage.evicted_blocks == whole.kv_usage.evicted_blocks


def test_usage_so_far_is_sent_when_it_is_news(engine):
    """The front end keeps the last one, as a stop string may end the request with any token."""
    server = engine(H2O, enable_prefix_caching=False)
    sent, update = [], server.scheduler.update_from_output

    def watched(*args):
        clients = update(*args)
        sent.extend(getattr(output, "kv_usage", None) for client in clients.values() for output in client.outputs)
        return clients

    server.scheduler.update_from_output = watched
    server.add(random_prompt(300), max_tokens=100, stop=["no such words"])
    (output,) = server.run().values()
    usages = [usage for usage in sent[:-1] if usage]
    assert len(sent) == 100 and 2 <= len(usages) <= 100 // BLOCK + 2
    assert all(one != other for one, other in zip(usages, usages[1:]))
    assert usages[-1].evicted_blocks == output.kv_usage.evicted_blocks > 0


BAD = {
    "unknown policy": ({"kv_policy": "h2"}, "unknown KV policy 'h2'.*h2o"),
    "policy that is not enabled": ({"kv_policy": "full"}, "'full' is not enabled here: expected one of: .*h2o"),
    "too large a budget": ({"kv_budget": 256}, "above the server's 192"),
    "too small a budget": ({"kv_budget": 96}, "budget 96 leaves nothing to choose.*32 . 64"),
    "zero": ({"kv_budget": 0}, "above 0"),
    "negative": ({"kv_budget": -5}, "above 0"),
    "not a number": ({"kv_budget": "many"}, "'many'"),
    "NaN": ({"kv_budget": float("nan")}, "nan"),
    "a bool": ({"kv_budget": True}, "True"),
    "null, as text": ({"kv_budget": "null"}, "null"),
    "a ratio above 1": ({"kv_budget": 1.5}, "between 0 and 1"),
    "a typo": ({"kv_buget": 128}, "'kv_buget'.*kv_budget"),
    "sinks that are the budget": ({"kv_sink": 160}, "budget 192 leaves nothing to choose.*160 . 64"),
}


def test_bad_requests_are_refused_with_the_reason_and_the_engine_goes_on(engine):
    server = engine({**H2O, "allow": ["sink-window"]})
    running = server.add(random_prompt(300), max_tokens=40)
    server.llm.llm_engine.step()
    for what, (extra_args, reason) in BAD.items():
        with pytest.raises(VLLMValidationError, match=reason):
            server.add(random_prompt(300), extra_args=extra_args)
            pytest.fail(f"{what} was accepted")
        server.llm.llm_engine.step()
    outputs = server.run()
    assert list(outputs) == [running] and len(outputs[running].outputs[0].token_ids) == 40
    server.assert_nothing_left()
    with pytest.raises(VLLMValidationError, match="'kv_buget'"):
        server.generate([random_prompt(50)], extra_args={"kv_buget": 128})
    assert server.generate([random_prompt(400)], max_tokens=2, **on("sink-window"))[0].kv_usage.evicted_blocks > 0


def test_a_request_pins_the_start_of_its_prompt(engine):
    """A system prompt, say: `kv_sink` tokens stay, whatever they draw, within the server's budget."""
    server = engine(H2O)
    kept = {}

    def check(server):
        for request in server.scheduler.running:
            table = server.manager.req_to_blocks[request.request_id]
            kept[request.request_id] = [index for index, block in enumerate(table) if not block.is_null]

    pinned = server.add(prompt := random_prompt(400), max_tokens=60, extra_args={"kv_sink": 96, "kv_recent": 32})
    plain = server.add(prompt, max_tokens=60)
    usage = {req_id: output.kv_usage for req_id, output in server.run(check).items()}
    assert usage[pinned].budget_tokens == usage[plain].budget_tokens and usage[pinned].evicted_blocks > 0
    held = {
        name: next(blocks for req_id, blocks in kept.items() if req_id.startswith(name)) for name in (pinned, plain)
    }
    assert held[pinned][: 96 // BLOCK] == list(range(96 // BLOCK)) != held[plain][: 96 // BLOCK]
    server.assert_nothing_left()


def test_no_request_holds_more_than_the_servers_bound(engine):
    """Whatever a request may ask for keeps within what admission and the pool were planned with."""
    policy = {"name": "h2o", "budget": 200, "buffer": 40, "sink": 20, "recent": 50}
    server = engine(policy, enable_prefix_caching=False)
    bound = math.ceil((200 + 40) / BLOCK)
    after = []

    def check(server):
        after.extend(len(server.held_by(request.request_id)) for request in server.scheduler.running)

    for extra_args in ({}, {"kv_policy": "sink-window"}, {"kv_budget": 200}, {"kv_budget": 224}, {"kv_budget": 0.5}):
        try:
            server.add(random_prompt(250), max_tokens=100, extra_args=extra_args)
        except VLLMValidationError:
            assert extra_args == {"kv_budget": 224}  # may as well be refused
    server.run(check)
    assert max(after) == bound


# --- what is visible -------------------------------------------------------------------------------------------------


def test_usage_is_what_the_trace_says(engine):
    policy = {**H2O, "allow": ["sink-window", "full"]}
    server = engine(policy, max_num_batched_tokens=160)
    requests = [
        (random_prompt(400, 1), {"max_tokens": 70}),
        (random_prompt(333, 2), {"max_tokens": 20, **on("sink-window")}),
        (random_prompt(200, 3), {"max_tokens": 33, **on("full")}),
    ]
    outputs, traces = server.traced(requests)
    for output, trace in zip(outputs, traces):
        usage = output.kv_usage
        missing = np.concatenate(([0], np.cumsum([len(evicted) for evicted in trace.evicted])))
        tables = -(-np.cumsum(trace.steps) // BLOCK)
        assert usage.peak_resident_blocks == max(tables - missing[:-1])
        assert usage.peak_resident_tokens == usage.peak_resident_blocks * BLOCK
        assert usage.evicted_blocks == missing[-1]
        assert usage.evicted_tokens == usage.evicted_blocks * BLOCK
    assert [output.kv_usage.policy for output in outputs] == ["h2o", "sink-window", "full"]
    assert [output.kv_usage.budget_tokens for output in outputs] == [192, 192, None]
    assert [output.kv_usage.evicted_blocks > 0 for output in outputs] == [True, True, False]


def test_metrics_move_by_policy(engine):
    server = engine({**H2O, "allow": ["sink-window", "full"]}, enable_prefix_caching=False)
    before = server.metrics()
    resident = []

    def look(server):
        held = sum(len(server.held_by(request.request_id)) for request in server.scheduler.running)
        metrics = server.metrics()
        gauge = sum(metrics.get(("blocks_resident", name), 0) for name in ("h2o", "sink-window", "full"))
        resident.append((held, gauge))

    ids = [server.add(random_prompt(400, 1), max_tokens=40) for _ in range(2)]
    ids += [server.add(random_prompt(300, 2), max_tokens=40, **on("sink-window"))]
    ids += [server.add(random_prompt(300, 3), max_tokens=40, **on("full"))]
    outputs = server.run(look)
    server.drain()
    after = server.metrics()

    def moved(name, policy):
        return after[name, policy] - before.get((name, policy), 0)

    evicted = {name: 0 for name in ("h2o", "sink-window", "full")}
    for i in ids:
        evicted[outputs[i].kv_usage.policy] += outputs[i].kv_usage.evicted_blocks
    assert evicted["h2o"] > 0 and evicted["sink-window"] > 0 and evicted["full"] == 0
    for name, blocks in evicted.items():
        assert moved("blocks_evicted", name) == blocks
        assert moved("blocks_freed", name) + moved("blocks_shared", name) == blocks
        assert moved("blocks_shared", name) == 0
        assert moved("requests", name) == {"h2o": 2, "sink-window": 1, "full": 0}[name]
        assert after["blocks_resident", name] == 0
    # The gauge is taken before the step's own decision.
    assert max(gauge for _, gauge in resident) >= max(held for held, _ in resident)
    steady = [(held, gauge) for held, gauge in resident[10:20]]
    assert [held for held, _ in steady] == [gauge for _, gauge in steady]


def test_metrics_stay_stocks_own_without_a_policy(engine):
    server = engine()
    server.generate([random_prompt(400)], max_tokens=4)
    assert not [key for key in server.metrics() if isinstance(key, tuple)]


@pytest.mark.parametrize("name", ["h2o", "sink-window", "full"])
def test_the_start_up_lines_say_what_is_going_to_happen(engine, monkeypatch, name):
    lines = []
    # The first engine of a process configures vLLM's loggers anew: levels and handlers would not outlive that.
    monkeypatch.setattr(logging.getLogger("vllm.evict"), "info", lines.append)
    server = engine(POLICIES.get(name, {"name": "full"}))
    of_worker, line = [line for line in lines if line.startswith("KV policy")]
    assert f"KV policy {name}" in line and f"KV policy {name}" in of_worker
    # Requests may ask for policies that measure, whatever the server's own does.
    assert "beside CPU_ATTN's own kernel mass comes from block_mass" in of_worker
    assert "model runner V1" in line
    assert ("budget=192" in line) == (name != "full")
    assert server.manager.kv_cache_spec.backend == "CPU_ATTN" and "attention backend CPU_ATTN" in line
    assert "1 KV group of 2 layers" in line
    assert {"h2o": "hold 8 blocks of 32", "sink-window": "hold 6 blocks of 32", "full": "hold all"}[name] in line


# --- shapes ----------------------------------------------------------------------------------------------------------

SHAPES = {
    "mha": (dict(kv_heads=4), dict()),
    "mqa": (dict(kv_heads=1, head_dim=64), dict()),
    "wide-gqa": (dict(hidden=96, heads=6, kv_heads=2, head_dim=80, layers=3), dict()),
    "head-128": (dict(kv_heads=2, head_dim=128), dict(block_size=64)),
    "block-128": (dict(), dict(block_size=128)),
    "block-64-mha": (dict(kv_heads=4, head_dim=64), dict(block_size=64)),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("policy", POLICIES)
def test_head_layouts_and_block_sizes_match_the_oracle(engine, tmp_path, name, policy):
    model_args, engine_args = SHAPES[name]
    model = make_tiny_llama(tmp_path / "model", **model_args)
    block = engine_args.get("block_size", BLOCK)
    policy = {"name": policy, "budget": 6 * block, "sink": block, "recent": 2 * block, "buffer": block}
    server = engine(policy, model, max_num_batched_tokens=5 * block, **engine_args)
    requests = [
        (random_prompt(13 * block + 5, 1), {"max_tokens": 3 * block, "logprobs": 1}),
        (random_prompt(2 * block, 2), {"max_tokens": 6 * block, "logprobs": 1}),
    ]
    outputs, traces = server.traced(requests)
    reference = DenseLlama(model)
    for (prompt, _), output, trace in zip(requests, outputs, traces):
        assert assert_like_oracle(reference, prompt, output, trace, policy, block_size=block) > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", POLICIES)
def test_half_precision_follows_the_oracle_up_to_rounding(engine, tmp_path, name, dtype):
    """The oracle runs in fp32 on the rounded weights: evictions agree unless two blocks are nearly as important."""
    model = make_tiny_llama(tmp_path / "model", dtype=dtype)
    server = engine(POLICIES[name], model, dtype=dtype, max_num_batched_tokens=192)
    requests = [(random_prompt(length, length), {"max_tokens": 60, "logprobs": 1}) for length in (500, 90 + 64, 300)]
    outputs, traces = server.traced(requests)
    reference = DenseLlama(model)
    for (prompt, _), output, trace in zip(requests, outputs, traces):
        assert_like_oracle(reference, prompt, output, trace, POLICIES[name], atol=0.3, tie=0.1)
        assert trace.evicted and max(trace.held) <= most_held(POLICIES[name])


def test_who_is_bound_to_a_grammar_stays_so(engine):
    """Masks of a grammar go by rows of the batch, which has requests without one in between."""
    server = engine(WINDOW, max_num_batched_tokens=128, structured_outputs_config={"backend": "xgrammar"})
    grammar = StructuredOutputsParams(regex="(t1|t2|t3){20,500}")
    params = [greedy(60, structured_outputs=grammar if index % 2 else None) for index in range(6)]
    outputs = server.generate([random_prompt(400, index) for index in range(6)], params)
    for index, output in enumerate(outputs):
        assert output.kv_usage.evicted_blocks > 0
        assert (set(output.outputs[0].token_ids) <= {1, 2, 3}) == bool(index % 2)
