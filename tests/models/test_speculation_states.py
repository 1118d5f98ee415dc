"""Speculative decoding beside states: n-grams and MTP with Qwen3-Next, whose linear attention takes rejected drafts
back.
"""

from importlib.metadata import version
from types import SimpleNamespace

import pytest
import test_reach_drafts
import torch
from drafting import DRAFTS, NGRAM, VOCAB, Drafter, LayeredDrafter, make_dspark, prompt_of, serve, speculative
from engine import V2
from linear import stand_in_for_gdn
from oracle.hybrids import DenseHybrid, add_mtp, make_tiny_hybrid
from packaging.version import Version
from parity import assert_like_oracle
from test_drafters import assert_full_is_stock
from test_drafters_async import check_late_holes
from test_hybrids import NOISE, apart
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

from vllm_evict.config import KVPolicyError

pytestmark = pytest.mark.since("0.32", "its CPU kernels of states fail on drafts")

BASE = {"budget": 128, "buffer": 32, "sink": 32, "recent": 32}
POLICIES = {
    "sink-window": {"name": "sink-window", "budget": 128, "sink": 32},
    "h2o": {"name": "h2o", **BASE},
    "snapkv": {"name": "snapkv", **BASE, "window": 24},
}
#: vLLM copies cached states by Triton kernels, which its Model Runner V1 lacks on a CPU.
OPTIONS = {"dtype": "bfloat16", "enable_prefix_caching": V2}
DRAFTERS = {"ngram": (NGRAM, Drafter), "mtp": (speculative("mtp"), LayeredDrafter)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_tiny_hybrid(tmp_path_factory.mktemp("states") / "model", "qwen3_next", vocab_size=VOCAB)
    add_mtp(folder)
    return folder


@pytest.fixture(scope="module")
def dense(model):
    return DenseHybrid(model)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_full_serves_as_stock_does(engine, model, drafter):
    assert_full_is_stock(engine, model, DRAFTERS[drafter][0], rounded=True, **OPTIONS)


@pytest.mark.oracle("hybrids")
@pytest.mark.both_runners("mtp-snapkv")
@pytest.mark.nightly(push=("mtp-snapkv",))
@pytest.mark.parametrize("drafter, name", [("ngram", "h2o"), ("mtp", "snapkv")])
def test_evictions_and_logprobs_match_transformers(engine, model, dense, monkeypatch, drafter, name):
    """Within the noise of bfloat16, in which vLLM's CPU engine computes this model."""
    mean, most = NOISE["qwen3_next"]

    def check(prompt, output, trace):
        assert assert_like_oracle(dense, prompt, output, trace, POLICIES[name], atol=most, tie=5e-3) >= 2
        differ, whole = apart(dense, prompt, output, trace), apart(dense, prompt, output)
        assert differ.mean() <= mean and differ.max() <= most < whole.max()

    config, double = DRAFTERS[drafter]
    served = serve(engine, model, POLICIES[name], check, monkeypatch, config, double, tokens=80, **OPTIONS)
    assert drafter == "ngram" or served.runs > 100


@pytest.mark.oracle("hybrids")
@pytest.mark.both_runners("mtp-host")
@pytest.mark.parametrize("drafter, name", [("ngram", "host"), ("mtp", "host"), ("mtp", "full"), ("mtp", "prompts")])
def test_rows_with_drafts_choose_what_they_read(engine, model, dense, monkeypatch, drafter, name):
    """On the host, or on the device alone. In float32: `stand_in_for_gdn` computes what vLLM's kernel does."""
    stand_in_for_gdn()
    like = (dense, monkeypatch, *DRAFTERS[drafter], test_reach_drafts.CHOOSING[name])
    test_reach_drafts.check_drafts(engine, model, *like, enable_prefix_caching=V2)


@pytest.mark.oracle("hybrids")
@pytest.mark.skipif(not V2, reason="served on Model Runner V2 alone")
@pytest.mark.nightly
def test_drafts_in_parallel_match_transformers(engine, model, dense, monkeypatch, tmp_path):
    """By DSpark, whose head has keys and values of the model's sizes."""
    config, (mean, most) = speculative("dspark", make_dspark(tmp_path / "dspark", model)), NOISE["qwen3_next"]
    assert_full_is_stock(engine, model, config, rounded=True, **OPTIONS)

    def check(prompt, output, trace):
        assert assert_like_oracle(dense, prompt, output, trace, POLICIES["h2o"], atol=most, tie=5e-3) >= 2
        differ = apart(dense, prompt, output, trace)
        assert differ.mean() <= mean and differ.max() <= most

    like = (monkeypatch, config, LayeredDrafter)
    assert serve(engine, model, POLICIES["h2o"], check, *like, tokens=80, **OPTIONS).runs > 50


@pytest.fixture(scope="module")
def mamba(tmp_path_factory):
    return make_tiny_hybrid(tmp_path_factory.mktemp("states") / "mamba", "falcon_h1")


@pytest.mark.nightly
def test_holes_come_a_step_late_under_async_scheduling(async_engine, model, dense, poisoned):
    """In float32, and as close to transformers' as that: `stand_in_for_gdn` computes what vLLM's kernel does."""
    stand_in_for_gdn()
    sizes = dict(lengths=(200, 140), tokens_each=110)
    check_late_holes(async_engine, model, speculative("mtp"), "sink-window", dense, mean=1e-5, most=1e-4, **sizes)


@pytest.mark.skipif(not V2, reason="states are not cached beside drafts on V1")
def test_what_was_computed_over_holes_is_never_hit(engine, model, dense, poisoned):
    """A request repeats another one with its answer: it hits states of the prompt alone, and answers as the oracle."""
    server = engine(POLICIES["h2o"], model=model, speculative_config=speculative("mtp"), **OPTIONS)
    prompt = prompt_of(150, 5)
    (first,), _ = server.traced([(prompt, {"max_tokens": 50})])
    assert first.kv_usage.evicted_blocks >= 2
    longer, (mean, most) = [*prompt, *first.outputs[0].token_ids], NOISE["qwen3_next"]
    (output,), (trace,) = server.traced([(longer, {"max_tokens": 20, "logprobs": 1})])
    assert 64 <= output.num_cached_tokens <= 160
    assert assert_like_oracle(dense, longer, output, trace, POLICIES["h2o"], atol=most, tie=5e-3) >= 2
    assert apart(dense, longer, output, trace).mean() <= mean
    server.assert_nothing_left()


@pytest.mark.v1(why="V2 caches states beside drafts")
def test_prefix_caching_of_states_is_refused(engine, model):
    with pytest.raises(KVPolicyError, match="prefix caching of states on Model Runner V1.*set --no-enable-prefix-cach"):
        engine("h2o", model=model, speculative_config=NGRAM, dtype="bfloat16", enable_prefix_caching=True)


def test_states_that_do_not_take_drafts_back_are_refused(engine, mamba):
    """vLLM's CPU kernel for Mamba2 does not, without a policy either: log-probabilities are off by up to 13."""
    with pytest.raises(KVPolicyError, match="got states of MAMBA2_ATTN; expected GDN_ATTN.*leave --speculative-config"):
        engine("h2o", model=mamba, speculative_config=NGRAM, enable_prefix_caching=False)


def in_steps(*lengths):
    """Return the answer of vLLM's CPU kernel for GDN to the same tokens in rows of so many, all of which are accepted:
    [N, D].
    """
    random, count, dim = torch.Generator().manual_seed(0), sum(lengths), 128
    weight, inputs, b, a, bias = (
        torch.randn(shape, generator=random).bfloat16() for shape in ((3 * dim, 4), (count, 3 * dim), *3 * [(count, 1)])
    )
    sizes = dict(key_dim=dim, value_dim=dim, tp_size=1, head_k_dim=dim, head_v_dim=dim)
    conv1d = SimpleNamespace(weight=weight, bias=None)
    layer = SimpleNamespace(conv1d=conv1d, activation="silu", A_log=torch.ones(1), dt_bias=bias[0], **sizes)
    layer.rearrange_mixed_qkv = lambda each: QwenGatedDeltaNetAttention.rearrange_mixed_qkv(layer, each)
    before, states = torch.zeros(DRAFTS + 2, 3 * dim, 3 + DRAFTS).bfloat16(), torch.zeros(DRAFTS + 2, 1, dim, dim)
    row = SimpleNamespace(num_spec_decodes=1, spec_state_indices_tensor=torch.arange(1, DRAFTS + 2)[None])
    outs, row.num_accepted_tokens = [], torch.tensor([1])
    for each, its_b, its_a in zip(*(tokens.split(lengths) for tokens in (inputs, b, a))):
        row.spec_query_start_loc = torch.tensor([0, len(each)])
        outs.append(gdn_attention._spec_forward(layer, row, each, its_b, its_a, before, states, 4, 3 + DRAFTS))
        row.num_accepted_tokens = torch.tensor([len(each)])
    return torch.cat([out.reshape(-1, dim) for out in outs])


def test_vllm_is_wrong_after_a_row_with_fewer_drafts(monkeypatch):
    """By its kernel for CPUs without AMX, without the plugin, until 0.33.

    Without 0.32 docs/serving.md and `stand_in_for_gdn` say less.
    """
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    whole = in_steps(DRAFTS + 1)
    wrong = (in_steps(1, DRAFTS) - whole).abs().amax(1)
    assert wrong[0] == 0
    if Version(version("vllm")) >= Version("0.33"):
        assert (wrong == 0).all()
        return
    assert wrong[1] > 0.1 * whole.abs().max()
    with pytest.raises(RuntimeError, match="size of tensor"):
        in_steps(DRAFTS + 1, 1)
