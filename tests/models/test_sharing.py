"""Layers that read another layer's cache (Gemma 3n, Gemma 4 E2B): they lose the same blocks, and add to its scores."""

import pytest
import test_logits
import test_poison
from engine import random_prompt
from oracle.logits import SHARING, add_unused, make_tiny
from parity import assert_like_oracle
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
@pytest.mark.parametrize("name", SCORED)
@pytest.mark.parametrize("kind", SHARING)
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


@pytest.mark.both_runners(nightly=tuple(SHARING))
@pytest.mark.parametrize("kind", SHARING)
def test_full_is_stock_to_the_byte(engine, models, kind):
    test_logits.check_full_is_stock(engine, models(kind)[0])


@pytest.mark.nightly(push=("gemma3n_text",))
@pytest.mark.parametrize("kind", SHARING)
def test_freed_blocks_are_never_read_and_all_come_back(engine, models, monkeypatch, kind):
    """With prefix hits, aborted and preempted requests."""
    path, dense = models(kind)
    policy, budgets, blocks = test_poison.SERVERS["h2o"]
    test_poison.check_crowd(engine, path, monkeypatch, policy, budgets, 2 * blocks, "prefix-cache", dense)


REFUSED = {
    "heads": (
        {"name": "adakv", **BASE},
        "layers that share a cache, because the policy puts heads into pages of its own.*: use a policy for whole layers",
    ),
    "context": ({"name": "h2o", **BASE, "context": 1024}, "a context and layers that share a cache.*leave context out"),
    "kvzip": ({"name": "kvzip", **BASE}, "kvzip and layers that share a cache.*leave kvzip out"),
    "select": ({"name": "keydiff", **BASE, "select": 256}, "select and layers that share a cache.*leave select out"),
    "host": (
        {"name": "h2o", **BASE, "evict": "host", "host": "64MiB", "recall": "quest"},
        "evict: host and layers that share a cache.*set evict: drop",
    ),
}


@pytest.fixture(scope="module")
def without_windows(tmp_path_factory):
    """A model that shares caches and has no windows: with windows most of this is refused before the model is loaded."""
    path = tmp_path_factory.mktemp("sharing") / "without-windows"
    make_tiny(path, "gemma3n_text")
    config = AutoConfig.from_pretrained(path, layer_types=["full_attention"] * 6)
    model = AutoModelForCausalLM.from_config(config)
    add_unused(model)
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
