"""Compares what the engine did to one request with the dense oracle's replay of the same steps."""

from dataclasses import replace as replaced

import numpy as np
import torch
from engine import logprobs_of
from oracle.replay import Config, replay
from oracle.tokens import replay_tokens

from vllm_evict.config.fields import TIER
from vllm_evict.config.options import names_of
from vllm_evict.policies import TOKEN_OPTIONS

#: Relative gap in importance below which rounding may tell tokens apart either way.
TOKEN_TIE = 2e-6


def oracle_config(policy, prompt, block_size=32, chunk=None):
    """The oracle's words for a plugin policy; with a context, of a server whose steps compute `chunk` tokens at most."""
    not_its = {"name", "when", "allow", "min_prompt", "prompt", "exact"} | TOKEN_OPTIONS | names_of(TIER)
    assert policy.get("granularity", "block") == "block"
    options = {key: value for key, value in policy.items() if key not in not_its}
    if options.get("context") is None:
        options.pop("context", None)
    whole = len(prompt) if policy.get("prompt") == "whole" else 0
    config = Config(policy=policy["name"], block_size=block_size, prompt=tuple(prompt), whole=whole, **options)
    if chunk is None:
        return config
    return replaced(config, ahead=(config.trigger_blocks - config.budget_blocks + 1) * block_size + chunk)


def assert_like_oracle(dense, prompt, output, trace, policy, *, block_size=32, atol=2e-3, tie=1e-4, chunk=None):
    """The same evictions after the same steps, and the same log-probabilities. Returns how many blocks were evicted.

    Two blocks whose importance differs by less than `tie` (relative) may be told apart either way by rounding; what
    comes after such a decision is not compared. With the default that practically never happens in fp32.
    """
    tokens = [*prompt, *output.outputs[0].token_ids]
    config = oracle_config(policy, prompt, block_size, chunk)
    steps = steps_of(trace, tokens)
    reference = replay(dense, tokens, steps, config, start=trace.start, settled=trace.settled)
    same = len(steps)
    # After the last step the request is finished, so nothing is decided.
    for step, (got, want) in enumerate(zip(trace.evicted[:-1], reference.evicted)):
        if got != want:
            gap = next(decision.relative_gap for decision in reference.decisions if decision.step == step)
            assert len(got) == len(want) and gap < tie, f"step {step}: evicted {got}, the oracle {want} (gap {gap})"
            same = step + 1
            break
    computed = trace.start + np.cumsum(steps)
    last = computed[same - 1]  # positions below were computed with the same blocks
    logprobs = torch.log_softmax(reference.logits.double(), -1)
    before = trace.known - len(prompt)  # generated before a restart
    got = logprobs_of(output)
    compared = [i for i in range(before, len(got)) if len(prompt) + i - 1 < last]
    assert compared, "nothing to compare"
    want = [logprobs[len(prompt) + i - 1 - trace.start, output.outputs[0].token_ids[i]].item() for i in compared]
    np.testing.assert_allclose(got[compared], want, atol=atol)
    if output.prompt_logprobs and not trace.restarts:
        got = [row[token].logprob for row, token in zip(output.prompt_logprobs[1:], prompt[1:])]
        want = [logprobs[i, token].item() for i, token in enumerate(prompt[1:])]
        np.testing.assert_allclose(got[:last], want[:last], atol=atol)
    return sum(map(len, trace.evicted[:same]))


def steps_of(trace, tokens):
    """Tokens of each step. The last step may have accepted drafts after the end of the output."""
    *before, last = trace.steps
    return [*before, min(last, len(tokens) - trace.start - sum(before))]


def token_config(policy, block_size=32, prompt=()):
    """The oracle's words for a plugin policy of token granularity."""
    options = {key: value for key, value in policy.items() if key in {*Config.__dataclass_fields__} - {"prompt"}}
    whole = len(prompt) if policy.get("prompt") == "whole" else 0
    return Config(policy=policy["name"], block_size=block_size, whole=whole, **options)


def assert_logprobs(output, prompt, trace, logits, atol=2e-3):
    """Those of sampled tokens are those of the oracle's logits."""
    logprobs = torch.log_softmax(logits.double(), -1)
    before = trace.known - len(prompt)  # generated before a restart
    tokens = list(enumerate(output.outputs[0].token_ids))[before:]
    want = [logprobs[len(prompt) - 1 - trace.start + i, token].item() for i, token in tokens]
    np.testing.assert_allclose(logprobs_of(output)[before:], want, atol=atol)


def assert_tokens_like_oracle(dense, prompt, output, trace, policy, *, block_size=32, tie=TOKEN_TIE, atol=2e-3):
    """The same number of blocks after the same steps, and log-probabilities of the same tokens in each head. Returns
    the oracle's requests."""
    tokens = [*prompt, *output.outputs[0].token_ids]
    merge = policy if policy.get("merge") else None
    groups = [(token_config(policy, block_size, prompt), None)]
    steps = steps_of(trace, tokens)
    requests = replay_tokens(
        dense, tokens, steps, groups, trace.start, policy.get("sets", "head"), merge, settled=trace.settled
    )
    for got, want in zip(trace.groups, requests, strict=True):
        assert got.evicted[:-1] == want.replay.evicted[: len(trace.steps) - 1]
    closest = min(request.closest for request in requests)
    assert closest > tie, "rounding could choose another token: take another prompt"
    assert_logprobs(output, prompt, trace, requests[0].replay.logits, atol)
    return requests
