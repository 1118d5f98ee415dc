"""fp8 caches under policies that read no keys, on the CPU engine, against a dense model with the same mask."""

import numpy as np
import pytest
import torch
from engine import exactly, logprobs_of, random_prompt
from oracle.visible import visible

FP8 = {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "block_size": 32}
SIZES = {"budget": 128, "sink": 32, "allow": []}
#: Mean difference of log-probabilities that fp8 and bfloat16 make, and one that a wrong mask makes.
NOISE, MATTERS = 0.4, 1.5
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


@pytest.mark.parametrize("name", POLICIES)
def test_policies_without_scores_evict_from_fp8_caches(engine, dense, poisoned, name):
    """Freed blocks are full of NaN. The mask matters more than fp8 does."""
    server = engine(POLICIES[name], **FP8)
    masks, prompts = visible(server), [random_prompt(300 + 20 * seed, seed) for seed in range(3)]
    outputs = server.generate(prompts, max_tokens=60, logprobs=0)
    for prompt, output in zip(prompts, outputs):
        assert output.kv_usage.evicted_blocks > 4
        mask = next(mask for request, mask in masks.items() if request.startswith(output.request_id))
        assert mean_difference(dense, prompt, output, mask) < NOISE
        assert mean_difference(dense, prompt, output, torch.ones_like(mask).tril()) > MATTERS


def test_under_a_budget_that_covers_fp8_caches_are_stock(engine):
    prompts, covering = [random_prompt(100, seed) for seed in range(3)], {**POLICIES["sink-window"], "budget": 512}
    stock, got = (
        exactly(engine(policy, **FP8).generate(prompts, max_tokens=20, logprobs=0)) for policy in (None, covering)
    )
    assert got == stock
