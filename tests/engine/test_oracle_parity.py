"""The engine against the dense oracle: same evicted blocks at the same steps, same log-probabilities."""

import numpy as np
import pytest
import torch
from engine import random_prompt
from oracle.replay import replay
from parity import assert_like_oracle, oracle_config

from vllm_evict.compute.attention import cpu

BLOCK = 32
BASE = {"budget": 192, "buffer": 64, "sink": 32, "recent": 64}
POLICIES = {
    "sink-window": {"name": "sink-window", **BASE},
    "h2o": {"name": "h2o", **BASE},
    "h2o-mean": {"name": "h2o", **BASE, "accumulate": "mean"},
    "h2o-ema": {"name": "h2o", **BASE, "accumulate": "ema", "decay": 0.95},
    "h2o-last": {"name": "h2o", **BASE, "accumulate": "last", "window": 24},
    "h2o-every": {"name": "h2o", **BASE, "every": 4},
    "h2o-max-layers": {"name": "h2o", **BASE, "heads": "sum", "layers": "max"},
    "h2o-odd": {"name": "h2o", "budget": 200, "buffer": 40, "sink": 20, "recent": 50},
    "h2o-unprotected": {"name": "h2o", **BASE, "protect": False},
    "strided": {"name": "strided", **BASE},
    "scissorhands-max": {"name": "scissorhands", **BASE, "window": 100, "heads": "max", "layers": "max"},
    "tova": {"name": "tova", **BASE},
    "snapkv": {"name": "snapkv", **BASE, "window": 24, "kernel": 5, "heads": "max"},
    "rkv": {"name": "rkv", **BASE, "window": 12, "mix": 0.5},
    "rkv-max": {"name": "rkv", **BASE, "window": 12, "mix": 0.3, "heads": "max", "layers": "mean"},
    "knorm": {"name": "knorm", **BASE},
    "keydiff": {"name": "keydiff", **BASE, "heads": "mean", "layers": "max"},
    "pagedeviction": {"name": "pagedeviction", "budget": 192},
    "keybound": {"name": "keybound", **BASE},
    "random": {"name": "random", **BASE, "seed": 7},
}


@pytest.mark.oracle("full attention")
@pytest.mark.both_runners("h2o", "h2o-max-layers", "keydiff")
@pytest.mark.parametrize("name", POLICIES)
def test_evictions_and_logprobs_match_the_dense_oracle(engine, dense, name):
    """Two requests in one batch, prompts longer and shorter than a chunk, decoded past decisions."""
    policy = POLICIES[name]
    subject = engine(kv_policy=policy, max_num_batched_tokens=192)
    requests = [
        (random_prompt(length, seed), {"max_tokens": tokens, "logprobs": 1, "prompt_logprobs": prompt_logprobs})
        for seed, (length, tokens, prompt_logprobs) in enumerate([(500, 80, 1), (150, 120, None)])
    ]
    for prompt, output, trace in subject.answered(requests):
        tokens = [*prompt, *output.outputs[0].token_ids]
        reference = replay(dense, tokens, trace.steps, oracle_config(policy, prompt, BLOCK), start=trace.start)
        assert sum(map(len, trace.evicted)) > 0, "the policy never acted"
        assert reference.closest > 1e-5, "rounding could tell whether a block was pivotal: choose other prompts"
        # The last step's request is finished, so nothing is decided after it.
        assert trace.evicted[:-1] == reference.evicted[: len(trace.steps) - 1]
        logprobs = torch.log_softmax(reference.logits.double(), -1)
        first = len(prompt) - 1 - trace.start
        got = [step[token].logprob for step, token in zip(output.outputs[0].logprobs, output.outputs[0].token_ids)]
        want = [logprobs[first + i, token].item() for i, token in enumerate(output.outputs[0].token_ids)]
        np.testing.assert_allclose(got, want, atol=2e-3)
        if output.prompt_logprobs:
            got = [row[token].logprob for row, token in zip(output.prompt_logprobs[1:], prompt[1:])]
            want = [logprobs[i, token].item() for i, token in enumerate(prompt[1:])]
            np.testing.assert_allclose(got, want, atol=2e-3)


@pytest.mark.oracle("full attention")
def test_decodes_beside_prompts_are_measured_once(engine, dense):
    """One request decodes and evicts in steps that compute chunks of other prompts."""
    policy = {"name": "h2o", "budget": 64, "buffer": 0, "accumulate": "ema", "decay": 0.5, "protect": False}
    server = engine(policy, max_num_batched_tokens=48)
    others = [(random_prompt(1990, seed), {"max_tokens": 4}) for seed in (1, 2)]
    short, *_ = server.answered([(random_prompt(48, seed=0), {"max_tokens": 90, "logprobs": 1}), *others])
    assert [0] in short[2].evicted, "the first block went while others' prompts were computed"
    assert assert_like_oracle(dense, *short, policy) > 2


def test_the_stock_kernel_may_keep_all_decodes(engine, dense, monkeypatch):
    """With mass beside it: the same evictions."""
    monkeypatch.setattr(cpu, "decode_mass", lambda *_, **__: pytest.fail("it was to be left out"))
    monkeypatch.setenv("VLLM_EVICT_DECODE", "stock")
    policy = {"name": "h2o", "budget": 96, "buffer": 32, "sink": 32, "recent": 32}
    server = engine(policy)
    prompt = random_prompt(200)
    (output,), (trace,) = server.traced([(prompt, {"max_tokens": 120, "logprobs": 1})])
    assert assert_like_oracle(dense, prompt, output, trace, policy) > 2
    server.assert_nothing_left()
