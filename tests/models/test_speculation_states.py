"""Speculative decoding beside states: n-grams and MTP with Qwen3-Next, whose linear attention takes rejected drafts back."""

import pytest
from drafting import NGRAM, VOCAB, Drafter, LayeredDrafter, prompt_of, serve, speculative
from engine import V2
from oracle.hybrids import DenseHybrid, add_mtp, make_tiny_hybrid
from parity import assert_like_oracle
from test_drafters import assert_full_is_stock
from test_drafters_async import check_late_holes
from test_hybrids import NOISE, apart

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


@pytest.mark.both_runners(nightly=("mtp",))
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_full_serves_as_stock_does(engine, model, drafter):
    assert_full_is_stock(engine, model, DRAFTERS[drafter][0], rounded=True, **OPTIONS)


@pytest.mark.oracle("hybrids")
@pytest.mark.both_runners(nightly=("ngram-sink-window", "mtp-h2o"))
@pytest.mark.nightly(push=("ngram-h2o", "mtp-snapkv"))
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("drafter", DRAFTERS)
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


@pytest.fixture(scope="module")
def mamba(tmp_path_factory):
    return make_tiny_hybrid(tmp_path_factory.mktemp("states") / "mamba", "falcon_h1")


@pytest.mark.nightly
def test_holes_come_a_step_late_under_async_scheduling(async_engine, model, dense, poisoned):
    """Rounding may route a token to other experts, which moves single log-probabilities."""
    noise = dict(mean=NOISE["qwen3_next"][0], most=1.0)
    check_late_holes(async_engine, model, speculative("mtp"), "sink-window", dense, **noise, dtype="bfloat16")


@pytest.mark.skipif(not V2, reason="states are not cached beside drafts on V1")
@pytest.mark.both_runners
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


def test_prefix_caching_of_states_is_refused(engine, model):
    with pytest.raises(KVPolicyError, match="prefix caching of states on Model Runner V1.*set --no-enable-prefix-cach"):
        engine("h2o", model=model, speculative_config=NGRAM, dtype="bfloat16", enable_prefix_caching=True)


def test_states_that_do_not_take_drafts_back_are_refused(engine, mamba):
    """vLLM's CPU kernel for Mamba2 does not, without a policy either: log-probabilities are off by up to 13."""
    with pytest.raises(KVPolicyError, match="got states of MAMBA2_ATTN; expected GDN_ATTN.*leave --speculative-config"):
        engine("h2o", model=mamba, speculative_config=NGRAM, enable_prefix_caching=False)
