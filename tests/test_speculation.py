"""Speculative decoding: drafts neither score nor publish, and decisions see settled tokens; against the dense oracle."""

import numpy as np
import pytest
from engine import Engine, random_prompt
from oracle.model import DenseLlama
from oracle.tiny import make_tiny_llama
from parity import assert_like_oracle, assert_tokens_like_oracle

DRAFTS, VOCAB = 3, 4096
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
BASE = {"budget": 160, "buffer": 32, "sink": 32, "recent": 32}
POLICIES = {
    "sink-window": {"name": "sink-window", "budget": 160, "sink": 32},
    "h2o": {"name": "h2o", **BASE},
    "h2o-ema": {"name": "h2o", **BASE, "accumulate": "ema", "decay": 0.95},
    "h2o-every": {"name": "h2o", **BASE, "every": 3},
    "snapkv": {"name": "snapkv", **BASE, "window": 24},
    "tova": {"name": "tova", **BASE},
    "scissorhands": {"name": "scissorhands", **BASE, "window": 48},
}
BY_TOKEN = {
    "h2o": {"name": "h2o", **BASE, "granularity": "token"},
    "snapkv": {"name": "snapkv", **BASE, "granularity": "token", "window": 24},
}


class Drafter:
    """Takes the place of vLLM's n-gram drafter: drafts from known texts, of which some are wrong.

    Attributes:
        texts: prompts with their outputs.
        right: 0: all drafts are wrong; 1: none; "some": in turn none, one, two of them and so on are right.
    """

    def __init__(self, server: Engine):
        self.texts, self.right = [], 0
        server.worker.model_runner.drafter.propose = self.propose

    def propose(self, count, sampled, lengths, tokens, **_):
        return [self.draft(tokens[row, : lengths[row]], count) if ids else [] for row, ids in enumerate(sampled)]

    def draft(self, known, count):
        following = next((text[len(known) :] for text in self.texts if text[:20] == known[:20].tolist()), [])
        following = (following + [0] * count)[:count]
        right = {0: 0, 1: count, "some": len(known) % (count + 1)}[self.right]
        return [token if at < right else (token + 1) % VOCAB for at, token in enumerate(following)]


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    """vLLM's search for n-grams runs in Python, as numba compiles it for longer than the tests take."""
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")  # read at its import, which has to come after vLLM's scan of modules


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speculation") / "model"
    return make_tiny_llama(folder, layers=3, heads=8, kv_heads=4, vocab=VOCAB)


@pytest.fixture(scope="module")
def dense(model):
    return DenseLlama(model)


def prompt_of(length, seed):
    return np.random.default_rng(seed).permutation(VOCAB)[:length].tolist()


def accepted(server):
    values = server.metrics()
    return values["vllm:spec_decode_num_accepted_tokens"], values["vllm:spec_decode_num_draft_tokens"]


def test_full_serves_as_stock_does(engine, tiny):
    """The same tokens as without speculation, and as many accepted drafts as in stock vLLM."""
    prompts, answers, counts = [random_prompt(40, seed) * 5 for seed in range(3)], [], []
    for policy, speculative in ((None, NGRAM), ("full", NGRAM), ("full", None)):
        server = engine(policy, speculative_config=speculative)
        answers.append([each.outputs[0].token_ids for each in server.generate(prompts, max_tokens=80)])
        counts += [accepted(server)] if speculative else []
        if policy is not None:
            server.assert_nothing_left()
    assert answers[0] == answers[1] == answers[2]
    assert counts[0] == counts[1] and counts[0][0] > 0


def serve(engine, model, policy, check, monkeypatch):
    """Serve with a drafter that is never right, then by answers before: evictions come at other tokens, and answers differ."""
    monkeypatch.setenv("VLLM_EVICT_POISON", "1")
    server = engine(policy, model=model, max_num_batched_tokens=96, speculative_config=NGRAM)
    drafter, prompts = Drafter(server), [prompt_of(length, 60 + length) for length in (250, 90)]
    requests = [(prompt, {"max_tokens": 160, "logprobs": 1}) for prompt in prompts]
    for right in (0, "some", 1):
        drafter.right, before = right, accepted(server)
        outputs, traces = server.traced(requests)
        drafts, kept = (new - old for new, old in zip(accepted(server)[::-1], before[::-1]))
        assert drafts and (kept == 0 if right == 0 else kept > 10)
        drafter.texts = [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(prompts, outputs)]
        for prompt, output, trace in zip(prompts, outputs, traces):
            assert sum(map(len, trace.evicted)) >= 2
            check(prompt, output, trace)
        server.llm.reset_prefix_cache()
    server.assert_nothing_left()


@pytest.mark.parametrize("name", POLICIES)
def test_evictions_and_logprobs_match_the_dense_oracle(engine, model, dense, monkeypatch, name):
    def check(prompt, output, trace):
        assert assert_like_oracle(dense, prompt, output, trace, POLICIES[name], tie=2e-6) >= 2

    serve(engine, model, POLICIES[name], check, monkeypatch)


@pytest.mark.parametrize("name", BY_TOKEN)
def test_heads_keep_the_tokens_of_the_dense_oracle(engine, model, dense, monkeypatch, name):
    def check(prompt, output, trace):
        assert_tokens_like_oracle(dense, prompt, output, trace, BY_TOKEN[name])

    serve(engine, model, BY_TOKEN[name], check, monkeypatch)
