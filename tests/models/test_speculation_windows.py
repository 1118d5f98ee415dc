"""Drafters with layers beside sliding windows: their layers stand in a KV group with full attention layers of the model."""

import json

import pytest
import test_reach_drafts
from drafting import (
    MODEL,
    NGRAM,
    SERVED,
    VOCAB,
    Drafter,
    LayeredDrafter,
    drafter_of,
    make_dflash,
    make_dspark,
    make_eagle,
    serve,
    speculative,
)
from engine import V2
from oracle.logits import DenseLogits, make_tiny
from oracle.model import DenseLlama
from oracle.tiny import make_tiny_llama
from parity import assert_like_oracle
from test_drafters import POLICIES, assert_full_is_stock
from test_sliding import WINDOW, assert_groups_like_oracle
from vllm.model_executor.layers.attention import Attention

from vllm_evict.config import KVPolicyError

pytestmark = SERVED

#: Layers of the model.
WINDOWS = [WINDOW, 0, WINDOW]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Drafter -> directory of the model, and its `speculative_config`."""
    root = tmp_path_factory.mktemp("windows")
    model = make_tiny_llama(root / "model", **{**MODEL, "windows": WINDOWS})
    plain = make_tiny_llama(root / "plain", **{**MODEL, "layers": 1, "seed": 3})
    heads = {name: make_eagle(root / name, plain, name) for name in ("eagle", "eagle3")}
    other = make_eagle(root / "other", plain, "eagle3")
    config = json.loads((other / "config.json").read_text())
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    (other / "config.json").write_text(json.dumps(config | sizes))
    sliding = make_eagle(root / "sliding", plain, "eagle3")
    windows = {"sliding_window": WINDOW, "layer_types": ["sliding_attention"]}
    (sliding / "config.json").write_text(json.dumps(config | windows))
    return {
        **{name: (model, speculative(name, head)) for name, head in heads.items()},
        "ngram": (model, NGRAM),
        "sliding": (model, speculative("eagle3", sliding)),
        "other": (model, speculative("eagle3", other)),
        "draft_model": (model, speculative("draft_model", plain)),
        "dflash": (model, speculative("dflash", make_dflash(root / "dflash", plain, [None, WINDOW]))),
        "dspark": (model, speculative("dspark", make_dspark(root / "dspark", plain))),
    }


@pytest.fixture(scope="module")
def dense(folders):
    return DenseLlama(folders["eagle"][0])


@pytest.mark.parametrize("drafter", ["ngram", "eagle", "sliding"])
def test_full_serves_as_stock_does(engine, folders, drafter):
    assert_full_is_stock(engine, *folders[drafter])


@pytest.mark.oracle("sliding windows")
@pytest.mark.parametrize(
    "drafter, name", [("ngram", "h2o"), ("eagle", "snapkv"), ("eagle3", "sink-window"), ("sliding", "h2o")]
)
def test_evictions_and_logprobs_match_the_dense_oracle(engine, folders, dense, monkeypatch, drafter, name):
    model, config = folders[drafter]

    def check(prompt, output, trace):
        assert assert_like_oracle(dense, prompt, output, trace, POLICIES[name], tie=2e-6) >= 2

    double = Drafter if drafter == "ngram" else LayeredDrafter
    served = serve(engine, model, POLICIES[name], check, monkeypatch, config, double)
    if drafter != "ngram":
        layers = drafter_of(served.runner).model.modules()
        (window,) = [layer.sliding_window for layer in layers if type(layer) is Attention]
        assert served.runs > 100 and (window == WINDOW if drafter == "sliding" else window is None)


@pytest.mark.oracle("sliding windows")
@pytest.mark.both_runners("eagle-host")
@pytest.mark.parametrize(
    "drafter, name",
    [("ngram", "host"), ("eagle", "host"), ("sliding", "host"), ("eagle", "full"), ("sliding", "prompts")],
)
def test_rows_with_drafts_choose_what_they_read(engine, folders, dense, monkeypatch, drafter, name):
    """On the host, or on the device alone."""
    model, config = folders[drafter]
    double, policy = Drafter if drafter == "ngram" else LayeredDrafter, test_reach_drafts.CHOOSING[name]
    test_reach_drafts.check_drafts(engine, model, dense, monkeypatch, config, double, policy)


def test_a_drafter_stands_in_one_of_several_groups_that_lose_blocks(engine, tmp_path, monkeypatch):
    """Groups evict different blocks, and the drafter's layer loses those of its group."""
    model = make_tiny_llama(tmp_path / "model", **{**MODEL, "layers": 5, "windows": [0, WINDOW, 0, WINDOW, 0]})
    plain = make_tiny_llama(tmp_path / "plain", **{**MODEL, "layers": 1})
    dense, config = DenseLlama(model), speculative("eagle", make_eagle(tmp_path / "eagle", plain, "eagle"))
    differ = []

    def check(prompt, output, trace):
        assert assert_groups_like_oracle(dense, prompt, output, trace, POLICIES["snapkv"], [[0, 4], [2]]) >= 4
        differ.append(trace.groups[0].evicted != trace.groups[1].evicted)

    assert serve(engine, model, POLICIES["snapkv"], check, monkeypatch, config, LayeredDrafter).runs > 100
    assert any(differ)


@pytest.mark.oracle("sliding windows")
@pytest.mark.skipif(not V2, reason="served on Model Runner V2 alone")
@pytest.mark.nightly(push=("dflash",))
@pytest.mark.parametrize("drafter", ["dflash", "dspark"])
def test_drafts_in_parallel_match_the_dense_oracle(engine, folders, dense, monkeypatch, drafter):
    """By a head with full attention alone, and by one whose other layer has a window."""
    model, config = folders[drafter]
    assert_full_is_stock(engine, model, config)

    def check(prompt, output, trace):
        assert assert_like_oracle(dense, prompt, output, trace, POLICIES["h2o"], tie=2e-6) >= 2

    assert serve(engine, model, POLICIES["h2o"], check, monkeypatch, config, LayeredDrafter).runs > 50


@pytest.mark.oracle("chunks of local attention")
@pytest.mark.parametrize("name", ["host", "full", "prompts"])
def test_rows_with_drafts_choose_what_they_read_beside_chunks(engine, tmp_path, monkeypatch, name):
    model = make_tiny(tmp_path / "model", "llama4_text", vocab_size=VOCAB)
    policy = test_reach_drafts.CHOOSING[name]
    test_reach_drafts.check_drafts(engine, model, DenseLogits(model), monkeypatch, policy=policy)


@pytest.mark.oracle("chunks of local attention")
@pytest.mark.both_runners
def test_drafts_beside_chunks_match_the_dense_oracle(engine, tmp_path, monkeypatch):
    """Llama 4, and n-grams. For drafters with layers vLLM switches its hybrid KV cache manager off."""
    model = make_tiny(tmp_path / "model", "llama4_text", vocab_size=VOCAB)
    dense = DenseLogits(model)
    assert_full_is_stock(engine, model, NGRAM)

    def check(prompt, output, trace):
        assert assert_like_oracle(dense, prompt, output, trace, POLICIES["h2o"], atol=1e-4, tie=2e-6) >= 2

    serve(engine, model, POLICIES["h2o"], check, monkeypatch)


REFUSED = {
    "other": "has a KV group of its own; expected keys and values of the model's sizes.*set another model",
    "draft_model": 'a draft model beside sliding windows, .*set "method" in --speculative-config to eagle or eagle3, ',
}


@pytest.mark.parametrize("drafter", REFUSED)
def test_drafters_that_would_read_other_blocks_are_refused(engine, folders, drafter):
    model, config = folders[drafter]
    with pytest.raises(KVPolicyError, match=REFUSED[drafter]):
        engine("h2o", model=model, speculative_config=config)
