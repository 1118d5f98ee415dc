"""Blocks of the host that layers reach, beside speculative decoding: one choice for all queries of a row."""

import pytest
from drafting import (
    MODEL,
    NGRAM,
    SERVED,
    LayeredDrafter,
    accepted,
    make_eagle,
    make_mimo,
    serve,
    speculative,
)
from engine import random_prompt
from oracle.model import DenseLlama
from oracle.tiny import make_tiny_llama
from test_reach import REACH, assert_reaches_like_dense

pytestmark = SERVED

#: What layers read, and how long they read it.
FIELDS = {"read": 160, "hold": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("drafted") / "model", **MODEL)


@pytest.mark.oracle("full attention")
@pytest.mark.both_runners
def test_rows_with_drafts_choose_by_the_largest_share_of_their_queries(engine, model, monkeypatch):
    """Drafts are wrong, right, and some of both; log-probabilities are those of a dense model that chooses for itself."""
    policy, dense, chosen = {**REACH, **FIELDS}, DenseLlama(model), []

    def check(prompt, output, trace):
        chosen.append(assert_reaches_like_dense(None, prompt, output, trace, dense=dense, **FIELDS))

    serve(engine, model, policy, check, monkeypatch, tokens=230)
    assert min(chosen) > 20


def test_a_budget_that_covers_all_drafts_as_stock_does(engine, tiny):
    prompts, answers = [random_prompt(40, seed) * 3 for seed in range(3)], []
    for policy in (REACH, None):
        server = engine(policy, speculative_config=NGRAM)
        outputs = server.generate(prompts, max_tokens=80, logprobs=0)
        answers.append(([each.outputs[0].token_ids for each in outputs], accepted(server)))
    assert answers[0] == answers[1] and answers[0][1][0] > 0


@pytest.fixture(scope="module")
def drafted(tmp_path_factory, model):
    """Drafter -> directory of the model, `speculative_config`, and the model's oracle."""
    root = tmp_path_factory.mktemp("layered")
    wide = make_tiny_llama(root / "wide", **{**MODEL, "hidden": 256})
    small = make_tiny_llama(root / "small", layers=1, heads=4, kv_heads=2, vocab=MODEL["vocab"], seed=3)
    return {
        "eagle": (model, speculative("eagle", make_eagle(root / "eagle", model, "eagle")), model),
        "small": (model, speculative("draft_model", small), model),
        "mtp": (make_mimo(root / "mimo", wide), speculative("mtp"), wide),
    }


@pytest.mark.oracle("full attention")
@pytest.mark.both_runners("eagle")
@pytest.mark.parametrize("drafter", ["eagle", "small", "mtp"])
def test_layers_of_drafters_read_what_stays_on_the_device(engine, drafted, monkeypatch, drafter):
    """They skip rooms, where they have nothing; their logits are finite though all that is freed is poison."""
    model, config, reference = drafted[drafter]
    dense, chosen = DenseLlama(reference), []

    def check(prompt, output, trace):
        chosen.append(assert_reaches_like_dense(None, prompt, output, trace, dense=dense, **FIELDS))

    double = serve(engine, model, {**REACH, **FIELDS}, check, monkeypatch, config, LayeredDrafter, tokens=230)
    assert double.runs > 50 and min(chosen) > 20
