"""Retrieval and streaming heads on the engine: KV groups with block tables of their own, against per-head masks."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine import PLAN, after, exactly, greedy, logprobs_of, random_prompt, random_requests
from oracle.heads import replay_heads
from oracle.replay import Config
from oracle.tiny import make_tiny_llama
from parity import assert_logprobs
from parts import holes_of

from vllm_evict.compute.cached import CachedStatistics, Row
from vllm_evict.config import HeadPattern, KVPolicyError
from vllm_evict.core.arrange import arrange
from vllm_evict.integration.engine.managers import EvictableManager, longest_hit

pytestmark = pytest.mark.minutes

BLOCK = 32
SINK, RECENT = 32, 96
#: Layers x KV heads; one layer has no retrieval head, one has nothing else.
PATTERN = np.array([[0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]])
H2O = {"name": "h2o", "budget": 224, "buffer": 64, "sink": 32, "recent": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("duo") / "model", layers=4, heads=8, kv_heads=4)


@pytest.fixture
def heads(tmp_path):
    """Write a file of gates; returns its path."""

    def write(pattern, sink=SINK, recent=RECENT):
        np.savetxt(tmp_path / "heads.tsv", np.asarray(pattern, float), delimiter="\t")
        (tmp_path / "config.json").write_text(json.dumps({"sink_size": sink, "recent_size": recent}))
        return str(tmp_path / "heads.tsv")

    return write


@pytest.fixture
def duo(engine, model, heads):
    """An engine with split heads."""

    def make(pattern=PATTERN, *, retrieval=None, **kwargs):
        policy = {"name": "duo", "gates": heads(pattern), **({"retrieval": retrieval} if retrieval else {})}
        return engine(policy, **{"model": model, **kwargs})

    return make


def groups_of(pattern, retrieval=None):
    """The oracle's KV groups, in the engine's order."""
    pattern = np.asarray(pattern, bool)
    arranged = arrange(pattern)
    policy = dict(retrieval or {"name": "full"})
    configs = (
        Config(policy.pop("name"), BLOCK, **policy),
        Config("sink-window", BLOCK, budget=SINK + RECENT + BLOCK, sink=SINK, recent=RECENT),
    )
    groups = []
    for which, config in enumerate(configs):
        for part in range(arranged.groups[which]):
            layers = [place[which].group == part for place in arranged.places[0]]
            groups.append((config, (pattern if which == 0 else ~pattern) & np.array(layers)[:, None]))
    return groups


def assert_like_oracle(dense, prompt, output, trace, groups):
    """The same blocks evicted from each group after the same steps, the same log-probabilities."""
    tokens = [*prompt, *output.outputs[0].token_ids]
    replays = replay_heads(dense, tokens, trace.steps, groups, trace.start)
    for got, want in zip(trace.groups, replays, strict=True):
        assert got.evicted[:-1] == want.evicted[: len(trace.steps) - 1]
    assert_logprobs(output, prompt, trace, replays[0].logits)


RETRIEVAL = {
    "full": None,
    "h2o": H2O,
    "h2o-mean": {**H2O, "accumulate": "mean", "heads": "mean", "layers": "mean"},
    "knorm": {**H2O, "name": "knorm"},
    "scissorhands": {**H2O, "name": "scissorhands", "window": 48},
}
#: One KV group of retrieval heads, four of streaming heads.
MANY = np.eye(4, dtype=int)


@pytest.mark.oracle("full attention")
@pytest.mark.both_runners("two-groups-h2o")
@pytest.mark.parametrize(
    "pattern, name",
    [pytest.param(PATTERN, name, id=f"two-groups-{name}") for name in RETRIEVAL]
    + [pytest.param(MANY, name, id=f"five-groups-{name}") for name in ("full", "h2o")],
)
def test_blocks_and_logprobs_match_per_head_masks(duo, dense, pattern, name):
    """Prompts longer and shorter than a chunk and a window in one batch, decoded past several decisions."""
    server = duo(pattern, retrieval=RETRIEVAL[name], max_num_batched_tokens=192)
    requests = random_requests((450, 70), (90, 120), (20, 30))
    outputs, traces = server.traced(requests)
    groups = groups_of(pattern, RETRIEVAL[name])
    assert len(groups) == len(server.managers) == (2 if pattern is PATTERN else 5)
    for (prompt, _), output, trace in zip(requests, outputs, traces):
        assert_like_oracle(dense, prompt, output, trace, groups)
    assert sum(map(len, traces[0].groups[-1].evicted)) > 5, "streaming heads never lost a block"
    assert any(map(any, traces[0].evicted)) == (name != "full")
    server.assert_nothing_left()


PROMPTS = [random_prompt(length, length) for length in (500, 300, 40)]


@pytest.mark.parametrize("retrieval", [None, H2O], ids=["full", "h2o"])
def test_all_heads_retrieval_is_their_policy_alone(duo, engine, model, retrieval):
    """To the byte: stock vLLM, where they keep everything."""
    split = duo(np.ones((4, 4)), retrieval=retrieval)
    whole = engine(retrieval, model=model)
    got, want = (exactly(server.generate(PROMPTS, max_tokens=60, logprobs=0)) for server in (split, whole))
    assert got == want
    assert len(split.managers) == 1


def test_all_heads_streaming_is_sink_window(duo, engine, model):
    split = duo(np.zeros((4, 4)))
    whole = engine({"name": "sink-window", "sink": SINK, "recent": RECENT}, model=model)
    got, want = (server.generate(PROMPTS, max_tokens=60, logprobs=0) for server in (split, whole))
    assert exactly(got) == exactly(want)
    assert got[0].kv_usage.policy == "duo" and got[0].kv_usage.evicted_blocks == want[0].kv_usage.evicted_blocks > 0


def test_a_window_that_covers_the_sequence_is_stock(duo, engine, model, heads):
    """In another order of heads, so sums are rounded otherwise."""
    policy = {"name": "duo", "gates": heads(PATTERN), "sink": 64, "recent": 512}
    split, stock = engine(policy, model=model), engine(model=model)
    got, want = (server.generate(PROMPTS, max_tokens=60, logprobs=0) for server in (split, stock))
    for one, other in zip(got, want):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        np.testing.assert_allclose(logprobs_of(one), logprobs_of(other), atol=1e-4)
        assert one.kv_usage.evicted_blocks == 0


@pytest.mark.both_runners
def test_weights_past_the_loaders_are_refused_whoever_reloads_them(duo, engine, model):
    """vLLM's worker asks its model runner, and an extension of a worker may ask the runner itself."""
    split, stock = duo(PATTERN), engine(model=model)
    for server in (split, stock):
        worker = server.worker
        refused = lambda: pytest.raises(KVPolicyError, match="reload with is_checkpoint_format=True")  # noqa: E731
        for reload_weights in (worker.reload_weights, worker.model_runner.reload_weights):
            with refused() if server is split else nullcontext():
                reload_weights([], is_checkpoint_format=False)
            with refused() if server is split else nullcontext():
                reload_weights([], None, False)
    before = exactly(split.generate(PROMPTS, max_tokens=8, logprobs=0))
    split.worker.model_runner.reload_weights()
    split.llm.reset_prefix_cache()
    assert exactly(split.generate(PROMPTS, max_tokens=8, logprobs=0)) == before


@pytest.mark.parametrize("tokens", [200, 1500])
def test_blocks_are_held_as_the_pattern_says(duo, heads, tokens):
    """To within one block a request and KV group, beside what is in flight; all come back."""
    server = duo(MANY, max_num_batched_tokens=64)
    held = HeadPattern.read(heads(MANY)).blocks(tokens, BLOCK)
    _, (trace,) = server.traced([(random_prompt(tokens - 40), {"max_tokens": 40})])
    retrieval, *streaming = trace.groups
    assert retrieval.held[-2] == held[0]
    for group in streaming:
        assert held[1] <= group.held[-2] <= held[1] + 1
    in_flight = 64 // BLOCK + 1
    assert all(max(group.held) <= held[1] + 1 + in_flight for group in streaming)
    server.assert_nothing_left()


def test_the_pool_is_planned_for_what_a_request_may_hold(duo):
    """2,048 tokens: 64 blocks of retrieval heads; 1 + 3 + 1 blocks of streaming heads in each group, and 256 / 32 + 1 in
    flight."""
    server = duo(MANY, blocks=500)
    concurrency = server.llm.llm_engine.vllm_config.cache_config.kv_cache_max_concurrency
    assert concurrency == pytest.approx(500 / (64 + 4 * (1 + 3 + 1 + 8 + 1)), rel=0.02)


@pytest.mark.parametrize("caching", [True, False])
def test_a_cached_prefix_is_taken_without_what_streaming_heads_lost(duo, dense, caching):
    """The second request finds all blocks of the retrieval heads; of the streaming heads' only those that were pure. The
    pool has room for all that was freed, then for little of it: sinks and the window must do."""
    prefix = random_prompt(240, 7)
    server = duo(MANY, max_num_batched_tokens=256, blocks=200, enable_prefix_caching=caching)
    server.generate([prefix], max_tokens=1)
    requests = [(prefix + random_prompt(60 + i, i), {"max_tokens": 40, "logprobs": 0}) for i in range(2)]
    for prompt, output, trace in server.answered(requests):
        assert trace.start == (224 if caching else 0)
        assert_like_oracle(dense, prompt, output, trace, groups_of(MANY))
    server.assert_nothing_left()


def test_sinks_and_window_of_a_prefix_are_enough(duo, dense):
    """Once the pool has handed out what streaming heads lost, a request starts with holes in a cached prefix, and what it
    computes is not published."""
    prefix = random_prompt(250, 7)
    server = duo(MANY, max_num_batched_tokens=256, blocks=200)
    server.generate([prefix], max_tokens=1)
    pool = server.pool
    pool.evict_blocks(lost_by_streaming_heads(server, prefix))
    published = len(pool.cached_block_hash_to_block)
    prompt = prefix + random_prompt(300, 3)
    (output,), (trace,) = server.traced([(prompt, {"max_tokens": 40, "logprobs": 0})])
    assert trace.start == 224
    holes = [(), *[range(1, 3)] * 4]
    tokens = [*prompt, *output.outputs[0].token_ids]
    replays = replay_heads(dense, tokens, trace.steps, groups_of(MANY), trace.start, holes)
    for got, want in zip(trace.groups, replays, strict=True):
        assert got.evicted[:-1] == want.evicted[: len(trace.steps) - 1]
    logprobs = torch.log_softmax(replays[0].logits.double(), -1)
    want = [logprobs[len(prompt) + i - 225, token].item() for i, token in enumerate(output.outputs[0].token_ids)]
    np.testing.assert_allclose(logprobs_of(output), want, atol=2e-3)
    assert len(pool.cached_block_hash_to_block) == published
    server.assert_nothing_left()


def lost_by_streaming_heads(server, prefix):
    """Cached blocks 1 and 2 of each streaming group."""
    lost = {
        block.block_id
        for manager in server.managers[1:]
        for position, block_hash in enumerate(hashes_of(server, prefix))
        if 1 <= position < 3 and (block := server.pool.get_cached_block(block_hash, [manager.kv_cache_group_id])[0])
    }
    assert len(lost) == 8
    return lost


def hashes_of(server, prompt):
    """Block hashes of a prompt, as the engine makes them."""
    request_id = server.add(prompt, max_tokens=1)
    hashes = next(request for request in server.scheduler.requests.values()).block_hashes
    server.llm.llm_engine.abort_request([request_id])
    server.run()
    return hashes


@pytest.mark.parametrize("retrieval", [None, H2O], ids=["full", "h2o"])
def test_preempted_requests_start_over(duo, dense, retrieval):
    blocks = 34
    server = duo(PATTERN, retrieval=retrieval, blocks=blocks, max_num_batched_tokens=128, max_model_len=512)
    requests = [(random_prompt(100 + 10 * i, i), {"max_tokens": 150, "logprobs": 0}) for i in range(4)]
    outputs, traces = server.traced(requests)
    assert sum(trace.restarts for trace in traces) > 0
    for (prompt, _), output, trace in zip(requests, outputs, traces):
        assert_like_oracle(dense, prompt, output, trace, groups_of(PATTERN, retrieval))
    server.assert_nothing_left()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_poison(duo, async_engine, model, heads, dense, poisoned, asynchronous):
    """Requests that come and go while freed blocks are full of NaN; what was computed is what the holes that workers were
    told of leave."""
    policy = {"name": "duo", "gates": heads(MANY), "retrieval": H2O}
    args = dict(model=model, blocks=80, max_num_batched_tokens=128, enable_prefix_caching=False, max_model_len=1024)
    server = async_engine(policy, **args) if asynchronous else duo(MANY, retrieval=H2O, **args | {"model": model})
    told, steps = {}, {}

    def look(output, *_):
        started = {new.req_id for new in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        for req_id, count in output.num_scheduled_tokens.items():
            if req_id in started:
                told[req_id], steps[req_id] = [[] for _ in range(5)], []
            steps[req_id].append(count)
            for group, plan in zip(told[req_id], getattr(output, PLAN).groups):
                group.append(holes_of(plan.changes).get(req_id, []))

    after(server.scheduler, "schedule", look)
    prompts = [random_prompt(length, length) for length in (400, 60, 250, 130, 500)]
    ids = [server.add(prompt, max_tokens=40 + 30 * i, logprobs=0) for i, prompt in enumerate(prompts)]
    outputs = server.run()
    by_id = {req_id.split("-")[0]: req_id for req_id in told}
    for request_id, prompt in zip(ids, prompts):
        output, inside = outputs[request_id], by_id[request_id]
        tokens = [*prompt, *output.outputs[0].token_ids]
        done = np.searchsorted(np.cumsum(steps[inside]), len(tokens) - 1) + 1
        holes = [group[:done] for group in told[inside]]
        assert len(prompt) < 100 or sum(len(blocks) for group in holes for blocks in group) > 8
        (replay, *_) = replay_heads(dense, tokens, steps[inside][:done], groups_of(MANY, H2O), told=holes)
        logprobs = torch.log_softmax(replay.logits.double(), -1)[len(prompt) - 1 :]
        got = logprobs_of(output)
        want = [logprobs[i, token].item() for i, token in enumerate(output.outputs[0].token_ids)]
        np.testing.assert_allclose(got, want, atol=2e-3)
    server.assert_nothing_left()


def test_requests_may_keep_everything_or_less(duo, engine, model, heads):
    policy = {"name": "duo", "gates": heads(PATTERN), "retrieval": H2O, "allow": ["full"]}
    server = engine(policy, model=model)
    before = server.metrics()
    outputs = server.llm.generate(
        [{"prompt_token_ids": PROMPTS[0]}] * 3,
        [
            greedy(40, logprobs=0, extra_args=extra)
            for extra in (None, {"kv_policy": "full"}, {"kv_policy": "duo", "kv_budget": 160})
        ],
        use_tqdm=False,
    )
    own, full, less = (output.kv_usage for output in outputs)
    assert (own.policy, full.policy, less.policy) == ("duo", "full", "duo")
    assert full.evicted_blocks == 0 < own.evicted_blocks < less.evicted_blocks
    after = server.metrics()
    moved = {name: after[name, "duo"] - before.get((name, "duo"), 0) for name in ("blocks_evicted", "requests")}
    assert moved == {"blocks_evicted": own.evicted_blocks + less.evicted_blocks, "requests": 2}
    assert after["blocks_resident", "duo"] == 0
    with pytest.raises(Exception, match="kv_policy 'h2o' is not enabled here: expected one of: "):
        server.generate(PROMPTS[:1], extra_args={"kv_policy": "h2o"})
    server.assert_nothing_left()
    (want,) = engine(model=model).generate(PROMPTS[:1], max_tokens=40, logprobs=0)
    assert outputs[1].outputs[0].token_ids == want.outputs[0].token_ids


def test_under_pressure_retrieval_heads_give_way(duo, dense):
    """While the pool has room retrieval heads keep everything; streaming heads never do."""
    retrieval = {"name": "h2o", "when": "pressure", "admit": True, "budget": 96, "sink": 32, "recent": 32, "buffer": 0}
    server = duo(PATTERN, retrieval=retrieval, blocks=44, max_num_batched_tokens=128, max_model_len=512)
    requests = [(random_prompt(100 + 10 * i, i), {"max_tokens": 180}) for i in range(4)]
    outputs, traces = server.traced(requests)
    assert not any(trace.restarts for trace in traces)
    assert sum(output.kv_usage.evicted_blocks for output in outputs) > 8
    server.assert_nothing_left()


def test_wrong_files_are_refused_with_both_shapes(engine, model, heads):
    with pytest.raises(KVPolicyError, match="heads.tsv has 3 layers x 4 KV heads, the model has 4 x 4"):
        engine({"name": "duo", "gates": heads(PATTERN[:3])}, model=model)
    with pytest.raises(KVPolicyError, match="LoRA"):
        engine({"name": "duo", "gates": heads(PATTERN)}, model=model, enable_lora=True)


def test_who_keeps_everything_takes_no_prefix_with_holes(engine, model, heads):
    server = engine({"name": "duo", "gates": heads(MANY), "allow": ["full"]}, model=model, blocks=800)
    prefix = random_prompt(250, 7)
    server.generate([prefix], max_tokens=1)
    server.pool.evict_blocks(lost_by_streaming_heads(server, prefix))
    prompt = prefix + random_prompt(100, 3)
    (output,) = server.generate([prompt], max_tokens=10, logprobs=0, extra_args={"kv_policy": "full"})
    (want,) = engine(model=model).generate([prompt], max_tokens=10, logprobs=0)
    np.testing.assert_allclose(logprobs_of(output), logprobs_of(want), atol=2e-3)
    assert output.num_cached_tokens == 32


def test_prefixes_may_be_hashed_finer_than_blocks(duo, dense):
    prefix = random_prompt(250, 7)
    server = duo(MANY, blocks=300, prefix_match_unit=16)
    server.generate([prefix], max_tokens=1)
    prompt = prefix + random_prompt(100, 3)
    (output,), (trace,) = server.traced([(prompt, {"max_tokens": 10, "logprobs": 0})])
    assert trace.start == 224
    assert_like_oracle(dense, prompt, output, trace, groups_of(MANY))


def test_a_rank_may_have_no_heads_of_a_group():
    """Its scores are none, and those of the others count."""
    statistics = CachedStatistics(lambda blocks, values: iter(()), [2], "sum", "sum")
    rows = {"a": Row(np.arange(3), torch.arange(3), 96)}
    reports = statistics.report({"a": frozenset({"key_diff"})}, rows, lambda values, maximise: values + 5)
    assert reports["a"].statistics["key_diff"].tolist() == [5, 5, 5]


@pytest.mark.parametrize(
    "there, sink, window, taken",
    [
        ("11111111", 1, 2, "11111111"),  # nothing is missing: no holes
        ("11011111", 1, 2, "10000011"),
        ("11011110", 1, 2, "1000011"),
        ("10011010", 1, 2, "10011"),  # the longest whose last two are there
        ("01111111", 1, 2, ""),
        ("10111111", 2, 2, "1"),
        ("11000000", 2, 2, "11"),
        ("00001100", 0, 2, "000011"),
        ("", 1, 2, ""),
    ],
)
def test_longest_hit(there, sink, window, taken):
    count, needed = longest_hit([digit == "1" for digit in there], sink, window)
    assert count == len(taken) and "".join("01"[bool(x)] for x in needed) == taken


def test_a_hit_that_is_too_long_for_the_pool_is_taken_with_sinks_and_window():
    manager = object.__new__(EvictableManager)
    manager.kv_cache_spec, manager._null_block = SimpleNamespace(sink=2, window=3), None
    assert manager.without_middle([*range(8)]) == [0, 1, None, None, None, 5, 6, 7]
    assert manager.without_middle([*range(5)]) == [*range(5)]
    manager.kv_cache_spec.window = None  # heads that keep everything
    assert manager.without_middle([*range(8)]) == [*range(8)]
