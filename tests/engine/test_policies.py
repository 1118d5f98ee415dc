"""Every policy of one server: picked by requests, mixed in one batch, each like the dense oracle."""

import numpy as np
import pytest
from engine import greedy, logprobs_of, random_prompt
from parity import assert_like_oracle
from parts import sums_of

from vllm_evict.compute.cached import CachedStatistics
from vllm_evict.config import KVPolicyConfig
from vllm_evict.policies import CACHED, POLICIES, RUNNING, Blocks
from vllm_evict.policies.random import _splitmix

SERVER = {"name": "h2o", "budget": 192, "buffer": 64, "sink": 32, "recent": 64}
#: What a server may let requests pick.
EVICTING = [name for name, policy in POLICIES.items() if name not in ("full", "kvzip") and not policy.allocator.splits]


def granted(server, prompt, name):
    """Return the policy of a request, in the words of a configuration."""
    return server.scheduler.kv_policy.for_request({"kv_policy": name}, len(prompt), 32).to_dict()


def asks(name, **sampling):
    return {"logprobs": 1, "extra_args": {"kv_policy": name}, **sampling}


@pytest.mark.parametrize("caching", [True, False])
def test_all_policies_in_one_batch(engine, dense, caching):
    """Prompts longer than a chunk with one prefix, which the cache has or has not; decoded past several decisions."""
    server = engine({**SERVER, "allow": EVICTING}, max_num_batched_tokens=256, enable_prefix_caching=caching)
    prefix = random_prompt(150, 99)
    server.generate([prefix], max_tokens=1)
    requests = [
        (prefix + random_prompt(170 + 3 * seed, seed), asks(name, max_tokens=200)) for seed, name in enumerate(EVICTING)
    ]
    outputs, traces = server.traced(requests)
    for name, (prompt, _), output, trace in zip(EVICTING, requests, outputs, traces):
        assert (trace.start > 0) == caching
        assert output.kv_usage.policy == name
        assert assert_like_oracle(dense, prompt, output, trace, granted(server, prompt, name)) > 4, name
    # Policies differ: each evicted something else.
    assert len({str(trace.evicted) for trace in traces}) == len(EVICTING)
    server.assert_nothing_left()


def test_preempted_requests_start_over(engine, dense):
    server = engine({**SERVER, "budget": 160}, blocks=24, max_num_batched_tokens=128)
    names = ["scissorhands", "rkv", "keydiff", "snapkv"]
    requests = [(random_prompt(100 + 10 * i, i), asks(name, max_tokens=150)) for i, name in enumerate(names)]
    outputs, traces = server.traced(requests)
    assert sum(trace.restarts for trace in traces) > 0
    for name, (prompt, _), output, trace in zip(names, requests, outputs, traces):
        assert np.isfinite(logprobs_of(output)).all()
        assert_like_oracle(dense, prompt, output, trace, granted(server, prompt, name))
    server.assert_nothing_left()


def test_what_is_not_needed_is_not_measured(engine, monkeypatch):
    """Sums only for policies of sums, keys only for policies of keys, and only when a decision is due."""
    server = engine(SERVER, max_num_batched_tokens=256)
    asked = []
    report = CachedStatistics.report
    monkeypatch.setattr(CachedStatistics, "report", lambda self, *args: asked.append(args[0]) or report(self, *args))
    for name in ("sink-window", "strided"):
        server.generate([random_prompt(300)], extra_args={"kv_policy": name})
        assert len(sums_of(server.runtime)) == 0 and not asked
    for name in ("knorm", "keydiff", "pagedeviction"):
        asked.clear()
        _, (trace,) = server.traced(
            [(random_prompt(300), asks(name, max_tokens=200))],
            on_step=lambda server: sums_of(server.runtime)._slots and pytest.fail("sums were taken"),
        )
        decisions = [chosen for chosen in trace.evicted if chosen]
        assert len(asked) == len(decisions) > 1
        assert all(names == POLICIES[name].measures <= CACHED for ask in asked for names in ask.values())
    slots = []
    server.traced(
        [(random_prompt(300), asks("h2o"))], on_step=lambda server: slots.append(len(sums_of(server.runtime)))
    )
    assert max(slots) == 1 and POLICIES["h2o"].measures <= RUNNING


def test_short_prompts_keep_everything(engine):
    server = engine({**SERVER, "min_prompt": 200}, max_num_batched_tokens=256)
    short, long, other = server.llm.generate(
        [{"prompt_token_ids": random_prompt(length)} for length in (199, 200, 199)],
        [greedy(150), greedy(150), greedy(150, extra_args={"kv_policy": "tova"})],
        use_tqdm=False,
    )
    assert short.kv_usage.evicted_blocks == 0 and short.kv_usage.budget_tokens is None
    assert short.kv_usage.peak_resident_blocks == 11
    assert long.kv_usage.evicted_blocks > 0
    assert other.kv_usage.policy == "tova" and other.kv_usage.evicted_blocks == 0


def test_unprotected_sinks_go(engine):
    """Sliding window: sink-window without its sinks."""
    for protect in (True, False):
        server = engine({"name": "sink-window", "sink": 64, "recent": 96, "protect": protect, "allow": []})
        _, (trace,) = server.traced([(random_prompt(300), {"max_tokens": 70})])
        gone = sorted(sum(trace.evicted, []))
        assert gone == list(range(2, 2 + len(gone))) if protect else gone == list(range(len(gone)))
        assert len(gone) >= 4 and trace.held[-1] <= 7


# --- policies that measure nothing, by hand --------------------------------------------------------------------------


def weigh(name, index, count, key=0, **options):
    config = KVPolicyConfig.parse({"name": name, **options})
    return POLICIES[name].importance(Blocks(np.array(index), config, {}, count, key))


def test_strides_grow_with_age():
    """One block at a time, for ever: what is left is dense near the end and ever thinner behind."""
    held = []
    for count in range(1, 513):
        held.append(count - 1)
        if len(held) > 24:
            held.pop(int(np.argmin(weigh("strided", held, count))))
    gaps = np.diff(held)
    assert held[0] == 0 and held[-1] == 511
    assert (gaps[-4:] == 1).all()
    assert gaps[:3].min() >= 16
    ages = 512 - np.array(held[1:])
    assert (gaps <= ages).all(), "never a hole larger than what follows it"


def test_chance_is_the_same_in_every_run():
    first = weigh("random", range(50), 51, key=123)
    assert weigh("random", range(50), 99, key=123).tolist() == first.tolist()
    assert weigh("random", [7, 30], 51, key=123).tolist() == first[[7, 30]].tolist()
    for other in (weigh("random", range(50), 51, key=124), weigh("random", range(50), 51, key=123, seed=1)):
        assert np.argsort(other).tolist() != np.argsort(first).tolist()
    # SplitMix64's published first output for state 0.
    with np.errstate(over="ignore"):
        assert int(_splitmix(np.array([0], np.uint64))[0]) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("kernel, want", [(1, [1, 5, 2, 0, 3]), (3, [5, 5, 5, 3, 3]), (5, [5, 5, 5, 3, 3])])
def test_pooling_reaches_to_neighbours_in_the_sequence(kernel, want):
    """Blocks 2, 3, 4, then a hole, 7 and 8: block 7 is no neighbour of 4 until the kernel spans 7."""
    config = KVPolicyConfig.parse({"name": "snapkv", "kernel": kernel})
    mass = {"mass": np.array([1.0, 5, 2, 0, 3])}
    got = POLICIES["snapkv"].importance(Blocks(np.array([2, 3, 4, 7, 8]), config, mass, 12, 0))
    assert got.tolist() == want
    wide = KVPolicyConfig.parse({"name": "snapkv", "kernel": 99})
    assert POLICIES["snapkv"].importance(Blocks(np.array([2, 3, 4, 7, 8]), wide, mass, 12, 0)).tolist() == [5] * 5
    none = Blocks(np.array([], np.int64), wide, {"mass": np.array([])}, 12, 0)
    assert POLICIES["snapkv"].importance(none).tolist() == []
