"""Models by neural architecture search, whose layers differ in KV heads or have no attention."""

import numpy as np
import pytest
import torch
from engine import logprobs_of, random_prompt, random_requests
from oracle.searched import make_searched
from parity import assert_like_oracle
from parts import Drawn, batch_of, part_of
from vllm.engine.arg_utils import EngineArgs

from vllm_evict.compute.cached import CachedStatistics, Row
from vllm_evict.compute.host_copies import HostCopies
from vllm_evict.compute.kernels.keys import key_scores
from vllm_evict.compute.reduction import Reduction
from vllm_evict.compute.sums import RunningSums
from vllm_evict.config import KVPolicyError
from vllm_evict.core.plan import Scoring
from vllm_evict.integration.engine.reaching import Reaching

KV_HEADS = (2, 4, 0, 1)
SIZES = {"budget": 224, "buffer": 64, "sink": 32, "recent": 64}
H2O = {"name": "h2o", **SIZES}


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """Directory and dense oracle of a model whose layers have 2, 4, no and 1 KV heads."""
    return make_searched(tmp_path_factory.mktemp("searched"), KV_HEADS)


@pytest.fixture
def serve(engine, searched):
    return lambda policy, **options: engine(policy, model=searched[0], trust_remote_code=True, **options)


SCORED = {
    "h2o": H2O,
    "h2o-mean": {**H2O, "heads": "mean", "layers": "mean"},
    "snapkv": {"name": "snapkv", **SIZES, "window": 24, "kernel": 3},
}


@pytest.mark.both_runners("h2o")
@pytest.mark.parametrize("name", SCORED)
def test_evictions_and_logprobs_match_the_dense_oracle(serve, searched, name):
    """The mass of a layer is that of all its query heads, however many KV heads they share."""
    server = serve(SCORED[name], max_num_batched_tokens=192)
    requests = random_requests((450, 70), (90, 200))
    answered = server.answered(requests)
    assert sum(assert_like_oracle(searched[1], *request, SCORED[name]) for request in answered) > 6
    server.assert_nothing_left()


ASKED = {
    "max": {"heads": "max"},
    "token-all": {"granularity": "token", "sets": "all", "heads": "max", "layers": "max"},
    "context": {"context": 1024},
}
SERVERS = {
    **{f"h2o-{name}": {**H2O, **fields} for name, fields in ASKED.items()},
    "keydiff-max": {"name": "keydiff", **SIZES, "heads": "max"},
    "merged": {"name": "h2o", **SIZES, "granularity": "token", "merge": "d2o"},
    "kvzip": {"name": "kvzip", **SIZES},
    "kvzip-token": {"name": "kvzip", **SIZES, "granularity": "token"},
    "host": {"name": "full", **SIZES, "evict": "host", "host": "64MiB"},
    "read": {"name": "keydiff", **SIZES, "read": 128, "leaders": [1]},
}


@pytest.mark.parametrize("name", SERVERS)
def test_every_mechanism_serves_layers_that_differ(serve, poisoned, name):
    server = serve(SERVERS[name])
    (output,) = server.generate([random_prompt(450)], max_tokens=40, logprobs=0)
    assert output.kv_usage.evicted_blocks > 4 and np.isfinite(logprobs_of(output)).all()
    server.assert_nothing_left()


def test_a_host_block_has_the_heads_of_all_layers(serve, poisoned):
    """Scheduler and worker have as many blocks."""
    size = sum(KV_HEADS) * 32 * 2 * 32 * 4  # tokens of a block, keys and values, dimensions, bytes
    server = serve({"name": "full", **SIZES, "evict": "host", "host": 100 * size + 1})
    part, (page, *_) = server.scheduler.part(Reaching), part_of(server.runtime, HostCopies).blocks.own
    assert part.pool.blocks == len(page) == 100 and part.block_bytes == size
    (output,) = server.generate([random_prompt(900)], max_tokens=40, logprobs=0)
    assert output.kv_usage.spilled_blocks > 4 and np.isfinite(logprobs_of(output)).all()
    server.assert_nothing_left()


def test_requests_may_pick_every_policy_of_the_default_allow(serve, poisoned):
    server = serve({**H2O, "granularity": "token"})
    names = sorted(server.scheduler.kv_policy.allowed - {"full"})
    assert {"scissorhands", "keydiff", "rkv", "keybound", "pagedeviction"} < set(names)
    for seed, name in enumerate(names):
        server.add(random_prompt(420, seed), name, max_tokens=8, logprobs=0, extra_args={"kv_policy": name})
    for output in server.run().values():
        assert output.kv_usage.evicted_blocks and np.isfinite(logprobs_of(output)).all()


def test_heads_are_not_split_where_layers_differ(searched):
    for name in ("adakv", "pyramidkv", "fastgen"):
        with pytest.raises(KVPolicyError, match="layers of 1 and 2 and 4 KV heads.*use a policy for whole layers"):
            EngineArgs(str(searched[0]), kv_policy=name, trust_remote_code=True).create_engine_config()


# --- reductions ------------------------------------------------------------------------------------------------------


def reduced(numbers, of_heads, of_layers):
    """Numbers of layers, float64 [H, n] each, one by one: head by head over layers, then over heads."""
    reduce = {"sum": sum, "mean": lambda x: sum(x) / len(x), "max": lambda x: torch.stack(x).amax(0)}
    if of_heads != "max" and of_layers != "max":  # each head of each layer weighs the same
        total, heads = sum(layer.sum(0) for layer in numbers), sum(map(len, numbers)) / len(numbers)
        return total / (heads if of_heads == "mean" else 1) / (len(numbers) if of_layers == "mean" else 1)
    most = max(map(len, numbers))
    heads = []
    for head in range(most):
        having = [layer[head] for layer in numbers if len(layer) > head]
        # A sum over few layers is compared with sums over all of them.
        missing = len(numbers) / len(having) if of_layers == "sum" and of_heads == "max" else 1
        heads.append(missing * reduce[of_layers](having))
    total = reduce[of_heads](heads)
    return total * most / (sum(map(len, numbers)) / len(numbers)) if of_heads == "mean" else total


REDUCTIONS = [(heads, layers) for heads in ("sum", "mean", "max") for layers in ("sum", "mean", "max")]


@pytest.mark.parametrize("of_heads, of_layers", REDUCTIONS)
def test_mass_is_reduced_over_the_heads_that_layers_have(of_heads, of_layers):
    heads, blocks = [2, 4, 1], 5
    numbers = [torch.rand(count, blocks, generator=torch.Generator().manual_seed(count)) for count in heads]
    sums = RunningSums(1, max(heads), len(heads), 8, 32, of_heads, of_layers, heads=heads)
    sums.start("a", Scoring("sum", 0.0, 0, 1, 99))
    logical = torch.arange(blocks, dtype=torch.int32)[None]
    length = torch.tensor([160], dtype=torch.int32)
    step = sums.step(batch_of(["a"], np.array([0, 1]), length.numpy(), length, logical))
    for layer in numbers:
        mass = lambda weights, out, layer=layer: out.add_(layer.sum(0) if out.shape[1] == 1 else layer)  # noqa: E731
        Drawn(mass, len(layer), 2 * len(layer)).on(step)
    sums.fold(step)
    report = sums.report(["a"], [np.arange(blocks)], lambda values, maximise: values)["a"]
    want = reduced([layer.double() for layer in numbers], of_heads, of_layers)
    np.testing.assert_allclose(report.statistics["mass"], want, rtol=1e-6)


@pytest.mark.parametrize("of_heads, of_layers", REDUCTIONS)
def test_keys_are_reduced_over_the_heads_that_layers_have(of_heads, of_layers):
    """Scores of keys may be below 0: a head that few layers have is not the largest for that."""
    heads, blocks, size = [2, 4, 1], 5, 8
    generator = torch.Generator().manual_seed(0)
    caches = [torch.randn(blocks, count, size, 16, generator=generator) for count in heads]
    statistics = CachedStatistics(
        lambda rows, values: ((keys[rows], None) for keys in caches), heads, of_heads, of_layers
    )
    row = Row(np.arange(blocks), torch.arange(blocks), blocks * size)
    asked = {"a": frozenset({"key_diff", "key_norm", "-key_norm"})}
    report = statistics.report(asked, {"a": row}, lambda values, maximise: values)["a"]
    scores = [key_scores(keys, None, blocks * size, asked["a"], None) for keys in caches]
    for name in asked["a"]:
        want = reduced([of_layer[name].double() for of_layer in scores], of_heads, of_layers)
        np.testing.assert_allclose(report.statistics[name], want, rtol=1e-6)


def test_layers_alike_are_reduced_as_before():
    values = torch.rand(4, 3, dtype=torch.float64)
    one = Reduction([4, 4], "mean", "mean")
    assert one.scale == 1 / 8 and one.of_heads(values).equal(values.sum(0))
    assert Reduction([4, 4], "max", "sum").of_heads(values).equal(values.amax(0))


# --- layers without attention ----------------------------------------------------------------------------------------

GAPS = (2, 0, 2, 0, 0, 2, 2)


@pytest.fixture(scope="module")
def gaps(tmp_path_factory):
    """Directory of a model of seven layers, of which four have attention, with 2 KV heads each."""
    return make_searched(tmp_path_factory.mktemp("gaps"), GAPS)[0]


SPLIT = {
    "pyramidkv": ({"name": "pyramidkv", **SIZES, "bands": 4}, [1, 1, 1, 1]),
    "pyramidkv-3": ({"name": "pyramidkv", **SIZES, "bands": 3}, [1, 1, 2]),
    "adakv": ({"name": "adakv", **SIZES}, [4, 4]),
    "fastgen": ({"name": "fastgen", **SIZES}, [4, 4]),
    "duo": ({"name": "duo", "pattern": ["10", "01", "11", "00"], "sink": 32, "recent": 64, "retrieval": H2O}, [3, 3]),
}


@pytest.mark.parametrize("name", SPLIT)
def test_heads_are_split_over_layers_with_attention(engine, gaps, poisoned, name):
    """Pages are as wide as these layers need; pyramidkv's budgets fall from the first of them to the last."""
    policy, layers = SPLIT[name]
    server = engine(policy, model=gaps, trust_remote_code=True)
    groups = server.worker.kv_evict.groups
    assert [len(group.store.pages()) for group in groups] == layers
    config = server.scheduler.kv_policy
    assert config._depth in (4, None) and all(
        part.limits(32, 900) or name == "fastgen" for part in config.classes.values()
    )
    (pages,) = {group.kv_cache_spec.num_kv_heads for group in server.scheduler.kv_cache_config.kv_cache_groups}
    assert pages == (2 * max(layers) if name.startswith("pyramidkv") else 4)
    (output,) = server.generate([random_prompt(450)], max_tokens=40, logprobs=0)
    assert np.isfinite(logprobs_of(output)).all() and (output.kv_usage.evicted_blocks > 4 or name == "fastgen")
    server.assert_nothing_left()


COUNTED = {
    "bands": ({"name": "pyramidkv", "bands": 5}, "can't make 5 of 4 layers, at most 4"),
    "heads": ({"name": "adakv", "bands": 3}, "can't make 3 of 2 KV heads on each rank, at most 2"),
    "pattern": ({"name": "duo", "pattern": ["10"] * len(GAPS), "sink": 32, "recent": 64}, "the model has 4 x 2"),
    "leaders": ({"name": "keydiff", **SIZES, "read": 256, "leaders": [3]}, "a model with 4 layers"),
    "dense-layers": ({"name": "keydiff", **SIZES, "read": 256, "dense_layers": 4}, "a model with 4 layers"),
}


@pytest.mark.parametrize("what", COUNTED)
def test_layers_without_attention_count_for_nothing(gaps, what):
    policy, message = COUNTED[what]
    with pytest.raises(KVPolicyError, match=message):
        EngineArgs(str(gaps), kv_policy=policy, trust_remote_code=True, block_size=32).create_engine_config()


def test_layers_that_the_configuration_does_not_name_are_refused(engine, gaps, monkeypatch):
    """Bands by a wrong count would cut layers off."""
    monkeypatch.setattr("vllm_evict.integration.start.attending.kv_heads", lambda model: [2] * 7)
    with pytest.raises(
        KVPolicyError, match=r"attention layers of \[2, 2, 2, 2\] KV heads; expected \[2, 2, 2, 2, 2, 2, 2\]"
    ):
        engine({"name": "pyramidkv", **SIZES, "bands": 2}, model=gaps, trust_remote_code=True)
