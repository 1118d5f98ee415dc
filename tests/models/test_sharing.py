"""Layers that read another layer's cache (Gemma 3n, Gemma 4 E2B): they lose the same blocks, and add to its scores."""

import pytest
import test_logits
import test_poison
import test_reach
import test_read
from drafting import VOCAB, LayeredDrafter, serve
from engine import random_prompt
from oracle.logits import SHARING, DenseLogits, make_assistant, make_tiny
from parity import assert_like_oracle
from test_drafters import assert_full_is_stock
from test_logits import BASE, POLICIES, served
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_evict.config import KVPolicyError

models = test_logits.models
SCORED = {
    **{name: {"name": name, **BASE} for name in ("sink-window", "keydiff")},
    **{name: POLICIES[name] for name in ("h2o", "snapkv")},
}


@pytest.mark.oracle("shared caches")
@pytest.mark.both_runners("gemma3n_text-h2o")
@pytest.mark.parametrize("kind, name", [*(("gemma3n_text", name) for name in SCORED), ("gemma4_text", "h2o")])
def test_evictions_and_logprobs_match_the_dense_oracle(engine, models, kind, name):
    """Attention mass of layers 3 and 5 adds up, for they read one cache; keys are scored once for each cache."""
    path, dense = models(kind)
    assert dense.full == [1, 3] and dense.targets == {4: 2, 5: 3}
    server, requests = served(engine, SCORED[name], path)
    ((place, reader),) = ((layer.impl.kv_evict_place, layer) for layer in readers(server))
    assert place == 1 and reader.kv_cache.data_ptr() == caches(server)[3].data_ptr() != caches(server)[1].data_ptr()
    assert sum(assert_like_oracle(dense, *request, SCORED[name], atol=3e-5) for request in requests) > 12
    server.assert_nothing_left()


def attention(server):
    return [module.self_attn.attn for module in server.worker.get_model().model.layers]


def readers(server):
    """Full attention layers without a cache."""
    every = attention(server)
    return [layer for layer in every if layer.kv_sharing_target_layer_name and layer.sliding_window is None]


def caches(server):
    return [layer.kv_cache for layer in attention(server)]


@pytest.mark.oracle("shared caches")
@pytest.mark.parametrize("kind", SHARING)
def test_tokens_of_each_head_match_the_dense_oracle(engine, models, kind):
    test_logits.check_tokens(engine, *models(kind))


@pytest.mark.parametrize("kind", SHARING)
def test_full_is_stock_to_the_byte(engine, models, kind):
    test_logits.check_full_is_stock(engine, models(kind)[0])


@pytest.mark.oracle("shared caches")
@pytest.mark.both_runners("gemma3n_text")
@pytest.mark.parametrize("kind", SHARING)
def test_layers_reach_blocks_of_the_host(engine, models, poisoned, kind):
    """Layers that share a cache read what its layer has chosen."""
    test_reach.check_classes(engine, models(kind)[1], model=models(kind)[0])


@pytest.mark.both_runners("prompts-gemma3n_text")
@pytest.mark.parametrize("kind", SHARING)
@pytest.mark.parametrize("read_prompts", test_read.OF_PROMPTS.values(), ids=test_read.OF_PROMPTS)
def test_layers_read_their_best_blocks(engine, models, poisoned, kind, read_prompts):
    test_read.check_classes(engine, models(kind)[1], read_prompts=read_prompts, model=models(kind)[0])


def test_prompts_that_are_shorter_change_no_bit(engine, models):
    test_read.check_shorter(engine, model=models("gemma3n_text")[0])


@pytest.mark.nightly
def test_freed_blocks_are_never_read_and_all_come_back(engine, models, monkeypatch):
    """With prefix hits, aborted and preempted requests."""
    path, dense = models("gemma3n_text")
    policy, budgets, blocks = test_poison.SERVERS["h2o"]
    test_poison.check_crowd(engine, path, monkeypatch, policy, budgets, 2 * blocks, "prefix-cache", dense)


@pytest.mark.oracle("shared caches")
@pytest.mark.both_runners
def test_drafts_of_an_assistant_match_the_dense_oracle(engine, tmp_path, monkeypatch):
    """Its layers have no caches: they read the model's, through the views of the model's layers."""
    model = make_tiny(tmp_path / "model", "gemma4_text", vocab_size=VOCAB, vocab_size_per_layer_input=VOCAB)
    config = {"num_speculative_tokens": 3, "model": str(make_assistant(tmp_path / "assistant", model))}
    dense, policy = DenseLogits(model), {**SCORED["h2o"], "budget": 128, "recent": 32}
    assert_full_is_stock(engine, model, config)

    def check(prompt, output, trace):
        assert assert_like_oracle(dense, prompt, output, trace, policy, atol=3e-5) >= 2

    assert serve(engine, model, policy, check, monkeypatch, config, LayeredDrafter).runs > 100


REFUSED = {
    "heads": (
        {"name": "adakv", **BASE},
        "layers that share a cache, because the policy puts heads into pages of its own.*: use a policy for whole layers",
    ),
    "context": ({"name": "h2o", **BASE, "context": 1024}, "a context and layers that share a cache.*leave context out"),
    "kvzip": ({"name": "kvzip", **BASE}, "kvzip and layers that share a cache.*leave kvzip out"),
    "dense layers": (
        {"name": "full", "read": 256, "dense_layers": 1},
        "layers that share a cache.*set dense_layers: 0",
    ),
}


@pytest.fixture(scope="module")
def without_windows(tmp_path_factory):
    """A model that shares caches and has no windows: with windows most of this is refused before the model is loaded."""
    path = tmp_path_factory.mktemp("sharing") / "without-windows"
    make_tiny(path, "gemma3n_text")
    config = AutoConfig.from_pretrained(path, layer_types=["full_attention"] * 6)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("what", REFUSED)
def test_what_shared_caches_cannot_do_is_refused_with_what_can_be_done(engine, without_windows, what):
    policy, message = REFUSED[what]
    with pytest.raises(KVPolicyError, match=message):
        engine(policy, model=without_windows)


def test_layers_without_windows_are_in_one_group(engine, without_windows):
    server = engine(SCORED["h2o"], model=without_windows)
    assert [len(group.layer_names) for group in server.scheduler.kv_cache_config.kv_cache_groups] == [4]
    (output,) = server.generate([random_prompt(400)], max_tokens=8)
    assert output.kv_usage.evicted_blocks > 4 and [layer.impl.kv_evict_place for layer in readers(server)] == [3, 3]
    server.assert_nothing_left()
