"""Soft caps of logits (Gemma 2) and learned sinks (gpt-oss): policies that score, against dense models of their own."""

from functools import cache

import pytest
import test_poison
import torch
from engine import assert_like_stock, random_prompt
from oracle.logits import KINDS, SINKS, DenseLogits, make_tiny
from oracle.replay import replay
from parity import assert_like_oracle, assert_tokens_like_oracle, oracle_config

BASE = {"budget": 192, "buffer": 64, "sink": 32, "recent": 64}
POLICIES = {
    "h2o": {"name": "h2o", **BASE},
    "scissorhands": {"name": "scissorhands", **BASE, "window": 48},
    "snapkv": {"name": "snapkv", **BASE, "window": 24, "kernel": 5},
    "rkv": {"name": "rkv", **BASE, "window": 12, "mix": 0.5},
}
TOKENS = {**POLICIES["h2o"], "budget": 224, "granularity": "token"}
OTHERS = [("gpt_oss", "scissorhands"), ("gemma2", "rkv")]
#: Models with sinks or caps; the tokens of layers with chunks are not evicted one by one.
BENT = ("gemma2", "gpt_oss")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Kind -> its directory and dense model."""
    folder = tmp_path_factory.mktemp("logits")

    @cache
    def make(kind):
        path = make_tiny(folder / kind, kind)
        return path, DenseLogits(path)

    return make


def served(engine, policy, path, lengths=((500, 60), (333, 60))):
    """The engine, and prompt, output and trace of requests in one batch."""
    server = engine(policy, model=path, max_num_batched_tokens=192)
    prompts = [random_prompt(length, seed) for seed, (length, _) in enumerate(lengths)]
    asked = [(prompt, {"max_tokens": tokens, "logprobs": 1}) for prompt, (_, tokens) in zip(prompts, lengths)]
    return server, server.answered(asked)


pytestmark = pytest.mark.since("0.31", "its CPU engine computes sinks in bfloat16 alone", kind="gpt_oss")


@pytest.mark.oracle("soft caps, learned sinks")
@pytest.mark.both_runners("gpt_oss-h2o", "gemma2-h2o")
@pytest.mark.parametrize("kind, name", [(kind, name) for kind in KINDS for name in ("h2o", "snapkv")] + OTHERS)
def test_evictions_and_logprobs_match_the_dense_oracle(engine, models, kind, name):
    path, dense = models(kind)
    server, requests = served(engine, POLICIES[name], path)
    assert server.runtime.decodes, "the plugin's kernel decodes requests with holes"
    evicted = [assert_like_oracle(dense, *request, POLICIES[name]) for request in requests]
    assert sum(evicted) > 12
    server.assert_nothing_left()


@pytest.mark.oracle("soft caps, learned sinks")
@pytest.mark.parametrize("kind", BENT)
def test_tokens_of_each_head_match_the_dense_oracle(engine, models, kind):
    check_tokens(engine, *models(kind))


def check_tokens(engine, path, dense):
    server, requests = served(engine, TOKENS, path, ((500, 90), (90, 240)))
    for request in requests:
        assert_tokens_like_oracle(dense, *request, TOKENS)
    assert all(any(trace.evicted) for _, _, trace in requests)
    server.assert_nothing_left()


@pytest.mark.parametrize("kind", KINDS)
def test_where_vllm_s_kernel_decodes_mass_is_measured_beside_it(engine, models, monkeypatch, kind):
    """vLLM's own kernel and the plugin's measurement agree on both."""
    monkeypatch.setenv("VLLM_EVICT_DECODE", "stock")
    path, dense = models(kind)
    server, requests = served(engine, POLICIES["h2o"], path)
    assert not server.runtime.decodes
    assert sum(assert_like_oracle(dense, *request, POLICIES["h2o"]) for request in requests) > 12


@pytest.mark.parametrize("kind", BENT)
def test_the_oracle_decides_otherwise_without_sinks_and_caps(models, kind):
    """Sinks take a good part of some heads' rows, caps bend rows, and decisions follow."""
    path, dense = models(kind)
    plain, ids = DenseLogits(path, capped=False, sinks=False), random_prompt(530)
    causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    (_, probs), (_, without) = (each.forward(ids, each.new_cache(), causal, want_probs=True) for each in (dense, plain))
    if kind == "gpt_oss":
        shares = 1 - probs[dense.full][:, :, -100:].sum(-1).mean((0, 2))
        assert len(shares) == len(SINKS) and shares.min() < 0.1 and shares.max() > 0.3
    assert (probs - without).abs().max() > 0.1
    steps, config = [192, 192, 116] + [1] * 30, oracle_config(POLICIES["snapkv"], ids)
    with_them, others = (replay(each, ids, steps, config).evicted for each in (dense, plain))
    assert with_them != others


@pytest.mark.parametrize("kind", KINDS)
def test_full_is_stock_to_the_byte(engine, models, kind):
    check_full_is_stock(engine, models(kind)[0])


def check_full_is_stock(engine, path):
    """A request that is measured and loses nothing has stock vLLM's output too."""
    prompts = [random_prompt(300), random_prompt(40, 1)]
    assert_like_stock(engine, prompts, {**POLICIES["h2o"], "budget": 512}, model=path)


@pytest.mark.nightly
def test_freed_blocks_are_never_read_and_all_come_back(engine, models, monkeypatch):
    path, dense = models("gpt_oss")
    policy, budgets, blocks = test_poison.SERVERS["h2o"]
    test_poison.check_crowd(engine, path, monkeypatch, policy, budgets, 2 * blocks, "no-prefix-cache", dense)
