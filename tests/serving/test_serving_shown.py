"""A server with a policy tells usage, metrics, lines at start; and shapes of models that it serves."""

import logging

import numpy as np
import pytest
from engine import V2, greedy, random_prompt
from oracle.model import DenseLlama
from oracle.tiny import make_tiny_llama
from parity import assert_like_oracle
from test_serving import BLOCK, H2O, POLICIES, WINDOW, most_held, on
from vllm.sampling_params import StructuredOutputsParams

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
    assert f"model runner {'V2' if V2 else 'V1'}" in line
    assert ("budget=192" in line) == (name != "full")
    assert server.manager.kv_cache_spec.backend == "CPU_ATTN" and "attention backend CPU_ATTN" in line
    assert "1 KV group of 2 layers" in line
    assert {"h2o": "hold 8 blocks of 32", "sink-window": "hold 6 blocks of 32", "full": "hold all"}[name] in line


# --- shapes ----------------------------------------------------------------------------------------------------------

SHAPES = {
    "mqa": (dict(kv_heads=1, head_dim=64), dict()),
    "wide-gqa": (dict(hidden=96, heads=6, kv_heads=2, head_dim=80, layers=3), dict()),
    "head-128": (dict(kv_heads=2, head_dim=128), dict(block_size=64)),
    "block-128": (dict(), dict(block_size=128)),
    "block-64-mha": (dict(kv_heads=4, head_dim=64), dict(block_size=64)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_head_layouts_and_block_sizes_match_the_oracle(engine, tmp_path, name):
    model_args, engine_args = SHAPES[name]
    model = make_tiny_llama(tmp_path / "model", **model_args)
    block = engine_args.get("block_size", BLOCK)
    policy = {"name": "h2o", "budget": 6 * block, "sink": block, "recent": 2 * block, "buffer": block}
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
def test_half_precision_follows_the_oracle_up_to_rounding(engine, tmp_path, dtype):
    """The oracle runs in fp32 on the rounded weights: evictions agree unless two blocks are nearly as important."""
    model = make_tiny_llama(tmp_path / "model", dtype=dtype)
    server = engine(H2O, model, dtype=dtype, max_num_batched_tokens=192)
    requests = [(random_prompt(length, length), {"max_tokens": 60, "logprobs": 1}) for length in (500, 90 + 64, 300)]
    outputs, traces = server.traced(requests)
    reference = DenseLlama(model)
    for (prompt, _), output, trace in zip(requests, outputs, traces):
        assert_like_oracle(reference, prompt, output, trace, H2O, atol=0.3, tie=0.1)
        assert trace.evicted and max(trace.held) <= most_held(H2O)


def test_who_is_bound_to_a_grammar_stays_so(engine):
    """Masks of a grammar go by rows of the batch, which has requests without one in between."""
    server = engine(WINDOW, max_num_batched_tokens=128, structured_outputs_config={"backend": "xgrammar"})
    grammar = StructuredOutputsParams(regex="(t1|t2|t3){20,500}")
    params = [greedy(60, structured_outputs=grammar if index % 2 else None) for index in range(6)]
    outputs = server.generate([random_prompt(400, index) for index in range(6)], params)
    for index, output in enumerate(outputs):
        assert output.kv_usage.evicted_blocks > 0
        assert (set(output.outputs[0].token_ids) <= {1, 2, 3}) == bool(index % 2)
