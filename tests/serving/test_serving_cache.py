"""The prefix cache beside eviction, preemption and aborts."""

import itertools

import numpy as np
import pytest
from engine import logprobs_of, random_prompt
from oracle.model import DenseLlama
from parity import assert_like_oracle
from test_serving import BLOCK, H2O, POLICIES, WINDOW, on

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
@pytest.mark.parametrize("name, caching", [("h2o", True), ("sink-window", False)])
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


@pytest.mark.both_runners
def test_a_request_that_pauses_keeps_its_holes(engine, tiny):
    """A running request that is left out of a step loses its row in the batch; it comes back with a row made anew."""
    check_pauses(engine, tiny, H2O)


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
        if server.manager.changes and not resets:
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
