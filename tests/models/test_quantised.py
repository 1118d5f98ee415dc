"""Quantised weights, and fp8 caches under policies that read no keys, on the CPU engine, against dense models with the
same mask."""

import numpy as np
import pytest
import torch
from engine import exactly, logprobs_of, random_prompt
from oracle.quantised import CONFIGS, make_quantised
from oracle.visible import visible

FP8 = {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "block_size": 32}
SIZES = {"budget": 128, "sink": 32, "allow": []}
#: Mean difference of log-probabilities that fp8 and bfloat16 make, and one that a wrong mask makes.
NOISE, MATTERS = 0.4, 1.5
#: As `NOISE`, of bfloat16 and of activations in int8, beside weights as they are quantised.
WEIGHTS_NOISE = 0.1
POLICIES = {
    "sink-window": {"name": "sink-window", **SIZES},
    "strided": {"name": "strided", "recent": 64, "buffer": 32, **SIZES},
    "random": {"name": "random", "recent": 64, "buffer": 32, **SIZES},
}


def mean_difference(dense, prompt, output, mask):
    """Of the answer's log-probabilities from those of a dense model that sees what the mask says."""
    ids = [*prompt, *output.outputs[0].token_ids]
    logits, _ = dense.forward(ids, dense.new_cache(), mask[: len(ids), : len(ids)] | torch.eye(len(ids)).bool())
    logprobs = torch.log_softmax(logits.double(), -1)[len(prompt) - 1 : -1]
    tokens = list(output.outputs[0].token_ids)
    return np.abs(logprobs_of(output) - np.asarray(logprobs[range(len(tokens)), tokens])).mean()


def assert_like_dense_but_noise(dense, server, noise):
    """A mask of all earlier tokens would matter more than quantisation does."""
    masks, prompts = visible(server), [random_prompt(300 + 20 * seed, seed) for seed in range(3)]
    outputs = server.generate(prompts, max_tokens=60, logprobs=0)
    for prompt, output in zip(prompts, outputs):
        assert output.kv_usage.evicted_blocks > 4
        mask = next(mask for request, mask in masks.items() if request.startswith(output.request_id))
        assert mean_difference(dense, prompt, output, mask) < noise
        assert mean_difference(dense, prompt, output, torch.ones_like(mask).tril()) > MATTERS
    server.assert_nothing_left()


def answers(server):
    prompts = [random_prompt(100, seed) for seed in range(3)]
    return exactly(server.generate(prompts, max_tokens=20, logprobs=0))


@pytest.mark.parametrize("name", POLICIES)
def test_policies_without_scores_evict_from_fp8_caches(engine, dense, poisoned, name):
    """Freed blocks are full of NaN."""
    assert_like_dense_but_noise(dense, engine(POLICIES[name], **FP8), NOISE)


def test_under_a_budget_that_covers_fp8_caches_are_stock(engine):
    covering = {**POLICIES["sink-window"], "budget": 512}
    assert answers(engine(covering, **FP8)) == answers(engine(None, **FP8))


@pytest.fixture(scope="module", params=CONFIGS)
def quantised(request, tmp_path_factory):
    """Directory and dense oracle of a model with quantised weights."""
    return make_quantised(tmp_path_factory.mktemp(request.param), request.param)


def test_scores_choose_what_stays_with_quantised_weights(engine, quantised, poisoned):
    path, dense = quantised
    server = engine(
        {"name": "h2o", "budget": 128, "sink": 32, "recent": 64, "buffer": 32}, model=path, dtype="bfloat16"
    )
    assert_like_dense_but_noise(dense, server, WEIGHTS_NOISE)


def test_full_is_stock_with_quantised_weights(engine, quantised):
    options = {"model": quantised[0], "dtype": "bfloat16"}
    assert answers(engine("full", **options)) == answers(engine(None, **options))
