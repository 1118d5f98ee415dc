"""Drafters with layers: draft models, EAGLE and MTP lose the model's blocks and read views; the oracle knows none of them."""

import pytest
import torch
from drafting import (
    DRAFTS,
    MODEL,
    SERVED,
    VOCAB,
    LayeredDrafter,
    make_dflash,
    make_dspark,
    make_eagle,
    make_mimo,
    prompt_of,
    serve,
    speculative,
)
from engine import V2, after
from oracle.model import DenseLlama
from oracle.tiny import make_tiny_llama
from parity import assert_like_oracle, assert_tokens_like_oracle

from vllm_evict.compute.store import most_kept

pytestmark = SERVED

BASE = {"budget": 160, "buffer": 32, "sink": 32, "recent": 32}
POLICIES = {
    "sink-window": {"name": "sink-window", "budget": 160, "sink": 32},
    "h2o": {"name": "h2o", **BASE},
    "snapkv": {"name": "snapkv", **BASE, "window": 24},
}
BY_TOKEN = {name: {**POLICIES[name], "granularity": "token"} for name in ("h2o", "snapkv")}
#: Drafters with other pages than the model, and with pages of its sizes.
DRAFTERS = ("small", "eagle", "mtp")
#: Drafters that draft all tokens of a step in one pass.
IN_PARALLEL = ("dflash", "dspark")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Drafter -> directory of the model, and its `speculative_config`."""
    root = tmp_path_factory.mktemp("drafters")
    model = make_tiny_llama(root / "model", **MODEL)
    small = make_tiny_llama(root / "small", layers=1, heads=4, kv_heads=2, vocab=VOCAB, seed=3)
    wide = make_tiny_llama(root / "wide", **{**MODEL, "hidden": 256})
    return {
        "same": (model, speculative("draft_model", model)),
        "small": (model, speculative("draft_model", small)),
        "eagle": (model, speculative("eagle", make_eagle(root / "eagle", model, "eagle"))),
        "eagle3": (model, speculative("eagle3", make_eagle(root / "eagle3", model, "eagle3"))),
        "mtp": (make_mimo(root / "mimo", wide), speculative("mtp")),
        "dflash": (model, speculative("dflash", make_dflash(root / "dflash", model))),
        "dspark": (model, speculative("dspark", make_dspark(root / "dspark", model))),
    }


@pytest.fixture(scope="module")
def dense(folders):
    """Model -> its oracle."""
    models = {folders[drafter][0] for drafter in folders}
    return {model: DenseLlama(model if model.name == "model" else model.parent / "wide") for model in models}


def noted_drafts(server):
    """The drafts of each step from now on."""
    steps = []

    def look(output, *_):
        steps.append(sorted(output.scheduled_spec_decode_tokens.values()))

    after(server.scheduler, "schedule", look)
    return steps


def assert_full_is_stock(engine, model, config, rounded=False, **options):
    """The tokens of a server without drafts, and step by step the drafts of stock vLLM.

    `rounded`: steps with drafts round in another way in vLLM itself, so that only servers with drafts are compared.
    """
    prompts, answers, drafts = [prompt_of(90, seed) for seed in range(3)], [], []
    for policy, speculates in ((None, config), ("full", config), *([("full", None)] * (not rounded))):
        server = engine(policy, model=model, speculative_config=speculates, **options)
        steps = noted_drafts(server)
        answers.append([each.outputs[0].token_ids for each in server.generate(prompts, max_tokens=60)])
        drafts += [steps[:]] if speculates else []
        if policy is not None:
            server.assert_nothing_left()
    assert all(each == answers[0] for each in answers)
    assert drafts[0] == drafts[1] and any(drafts[0])


@pytest.mark.both_runners("eagle")
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_full_serves_as_stock_does(engine, folders, drafter):
    assert_full_is_stock(engine, *folders[drafter])


@pytest.mark.skipif(not V2, reason="served on Model Runner V2 alone")
def test_full_serves_drafts_in_parallel_as_stock_does(engine, folders):
    assert_full_is_stock(engine, *folders["dflash"])


@pytest.mark.oracle("full attention")
@pytest.mark.skipif(not V2, reason="served on Model Runner V2 alone")
@pytest.mark.parametrize("drafter", IN_PARALLEL)
def test_drafts_in_parallel_match_the_dense_oracle(engine, folders, dense, monkeypatch, drafter):
    """All tokens are drafted in one pass, whose queries see each other."""
    model, config = folders[drafter]

    def check(prompt, output, trace):
        assert assert_like_oracle(dense[model], prompt, output, trace, POLICIES["h2o"], tie=2e-6) >= 2

    assert serve(engine, model, POLICIES["h2o"], check, monkeypatch, config, LayeredDrafter).runs > 50


@pytest.mark.both_runners("eagle-h2o", "mtp-sink-window")
@pytest.mark.oracle("full attention")
@pytest.mark.parametrize(
    ("drafter", "name"), [("small", "snapkv"), ("eagle", "h2o"), ("eagle3", "snapkv"), ("mtp", "sink-window")]
)
def test_evictions_and_logprobs_match_the_dense_oracle(engine, folders, dense, monkeypatch, drafter, name):
    model, config = folders[drafter]

    def check(prompt, output, trace):
        assert assert_like_oracle(dense[model], prompt, output, trace, POLICIES[name], tie=2e-6) >= 2

    assert serve(engine, model, POLICIES[name], check, monkeypatch, config, LayeredDrafter).runs > 100


@pytest.mark.parametrize(("drafter", "name"), [("small", "snapkv"), ("eagle", "h2o")])
def test_heads_keep_the_tokens_of_the_dense_oracle(engine, folders, dense, monkeypatch, drafter, name):
    model, config = folders[drafter]

    def check(prompt, output, trace):
        assert_tokens_like_oracle(dense[model], prompt, output, trace, BY_TOKEN[name])

    assert serve(engine, model, BY_TOKEN[name], check, monkeypatch, config, LayeredDrafter).runs > 100


@pytest.mark.both_runners("h2o")
@pytest.mark.parametrize("name", ["h2o", "h2o-tokens"])
def test_a_drafter_like_the_model_sees_what_the_model_sees(engine, folders, poisoned, name):
    """Its drafts are right, except those that are verified over holes which were decided after them."""
    model, config = folders["same"]
    policy = POLICIES.get(name, {**BY_TOKEN["h2o"], "sets": "all"})
    server = engine(policy, model=model, max_num_batched_tokens=96, speculative_config=config)
    requests = [(prompt_of(length, length), {"max_tokens": 120}) for length in (250, 90, 400)]
    _, traces = server.traced(requests)
    for trace in traces:
        kept = [tokens - settled for tokens, settled in zip(trace.steps, trace.settled)]
        same = [not evicted for evicted in trace.evicted[:-1]]
        first = trace.settled.index(1)  # the last step's drafts may go beyond the end of the output
        after = {count for count, unchanged in zip(kept[first:-1], same[first - 1 :]) if unchanged}
        assert after == {DRAFTS} and False in same, (trace.settled, kept, trace.evicted)
    server.assert_nothing_left()


def test_a_drafter_keeps_what_the_most_heads_keep():
    """Of tokens that equally many heads keep, the newest."""
    keep = [torch.tensor([[0, 2], [1, 2]]), torch.tensor([[0, 3], [3, 5]])]
    assert most_kept(keep, 3, 1).tolist() == [2, 3]
    assert most_kept([heads[:1] for heads in keep], 3, 1).tolist() == [0, 3]
    assert most_kept([keep[0][:1]] * 2, 3, 1).tolist() == [0, 2]
