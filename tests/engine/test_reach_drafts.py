"""Blocks of the host that layers reach, beside speculative decoding: one choice for all queries of a row."""

import pytest
from drafting import (
    MODEL,
    NGRAM,
    SERVED,
    Drafter,
    LayeredDrafter,
    accepted,
    make_dflash,
    make_eagle,
    make_mimo,
    serve,
    speculative,
)
from engine import random_prompt
from oracle.model import DenseLlama
from oracle.tiny import make_tiny_llama
from test_reach import BLOCK, REACH, assert_reaches_like_dense
from test_read import assert_reads_like_dense

pytestmark = SERVED

#: What layers read, by what index, and how long they read it.
FIELDS = {"read": 160, "hold": 3, "index": "box"}
READ = {"sink": 32, "recent": 32}
#: Policies whose decodes choose what they read, on the host or on the device alone.
CHOOSING = {
    "host": REACH,
    "full": {"name": "full", **READ},
    "leaders": {"name": "full", **READ, "leaders": 2},
    "prompts": {"name": "full", **READ, "read_prompts": 224},
    "sink-window": {"name": "sink-window", "budget": 224, "buffer": 32, "sink": 32, "allow": []},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("drafted") / "model", **MODEL)


def check_drafts(engine, model, dense, monkeypatch, config=NGRAM, double=Drafter, policy=REACH, size=BLOCK, **options):
    """Drafts are wrong, right, and some of both; log-probabilities are those of a dense model that chooses for itself.

    `policy`: without a host decodes read less of what is on the device.
    """
    compare, chosen, evicted = assert_reaches_like_dense, [], 2
    like = {"dense": dense, "size": size, **FIELDS}
    if "host" not in policy:
        compare, evicted = assert_reads_like_dense, 2 * (policy["name"] != "full")
        # Of five blocks a policy that evicts reads one of recent tokens, whatever it protects.
        like |= {"sink": 32, "recent": 1 if evicted else 32}
    like |= {field: policy[field] for field in policy.keys() & {"leaders", "read_prompts"}}

    def check(*answered):
        chosen.append(compare(None, *answered, **like))

    lengths = (120, 310) if "read_prompts" in policy else (310, 120)  # its chunks read less beside drafts
    sizes = {"lengths": lengths, "tokens": 180, "evicted": evicted}
    served = serve(engine, model, {**FIELDS, **policy}, check, monkeypatch, config, double, **sizes, **options)
    assert min(chosen) > 5 and (double is Drafter or served.runs > 50)


@pytest.mark.oracle("full attention")
@pytest.mark.both_runners
def test_rows_with_drafts_choose_by_the_largest_share_of_their_queries(engine, model, monkeypatch):
    check_drafts(engine, model, DenseLlama(model), monkeypatch)


@pytest.mark.parametrize("policy", [REACH, {"name": "full", "read": 512, "read_prompts": 512}], ids=["host", "prompts"])
def test_a_budget_that_covers_all_drafts_as_stock_does(engine, tiny, policy):
    prompts, answers = [random_prompt(40, seed) * 3 for seed in range(3)], []
    for each in (policy, None):
        server = engine(each, speculative_config=NGRAM)
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
        "dflash": (model, speculative("dflash", make_dflash(root / "dflash", model)), model),
    }


@pytest.mark.oracle("full attention")
@pytest.mark.both_runners("eagle")
@pytest.mark.parametrize("drafter", ["eagle", "small", "mtp", "dflash"])
def test_layers_of_drafters_read_what_stays_on_the_device(engine, drafted, monkeypatch, drafter):
    """They skip rooms, where they have nothing; their logits are finite though all that is freed is poison."""
    model, config, reference = drafted[drafter]
    check_drafts(engine, model, DenseLlama(reference), monkeypatch, config, LayeredDrafter)


@pytest.mark.oracle("full attention")
@pytest.mark.both_runners("eagle-sink-window", "eagle-prompts")
@pytest.mark.parametrize(
    "drafter, name",
    [("ngram", "full"), ("ngram", "leaders"), ("ngram", "prompts"), ("eagle", "sink-window"), ("eagle", "prompts")],
)
def test_rows_with_drafts_read_their_best_blocks(engine, drafted, monkeypatch, drafter, name):
    """A drafter's layers read all resident blocks."""
    model, config, reference = drafted["eagle"]
    like = (NGRAM, Drafter) if drafter == "ngram" else (config, LayeredDrafter)
    check_drafts(engine, model, DenseLlama(reference), monkeypatch, *like, policy=CHOOSING[name])
