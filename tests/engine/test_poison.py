"""Randomised serving with freed blocks full of NaN: nobody reads what was given back, and all of it comes back."""

import numpy as np
import pytest
import torch
from engine import PLAN, after, logprobs_of
from oracle.model import DenseLlama
from vllm.model_executor.layers.attention import Attention

from vllm_evict.integration.engine.poison import Fills

MASS = {"budget": 160, "buffer": 32, "sink": 32, "recent": 64}
# Name -> the server's policy, what budgets requests ask for by policy, blocks of the pool.
SERVERS = {
    # A request that picks h2o here gets h2o's own recent window of 256.
    "full": ({"name": "full"}, {"sink-window": (96, 200), "h2o": (352, 400)}, 34),
    "h2o": (
        {"name": "h2o", **MASS, "allow": ["full", "sink-window"]},
        {"sink-window": (96, 160), "h2o": (128, 160)},
        36,
    ),
    "h2o-last": (
        {"name": "h2o", **MASS, "accumulate": "last", "window": 8, "allow": ["full"]},
        {"h2o": (128, 160)},
        36,
    ),
    "h2o-pressure": (
        {"name": "h2o", "when": "pressure", "admit": True, **MASS, "allow": ["full", "sink-window"]},
        {"sink-window": (96, 160), "h2o": (128, 160)},
        36,
    ),
    # Keys and values are read when a decision is due, and queries measured one by one.
    "rkv": (
        {"name": "rkv", **MASS, "allow": ["full", "keydiff", "pagedeviction", "scissorhands", "snapkv"]},
        dict.fromkeys(("rkv", "keydiff", "pagedeviction", "scissorhands", "snapkv"), (128, 160)),
        36,
    ),
    # Tokens move into private blocks.
    "h2o-tokens": (
        {"name": "h2o", **MASS, "granularity": "token", "allow": ["full", "knorm", "sink-window", "tova"]},
        {"h2o": (128, 160), "sink-window": (96, 160), **dict.fromkeys(("knorm", "tova"), (128, 160))},
        36,
    ),
    # Two KV groups, so twice the pool.
    "tova-ada": (
        {"name": "tova", **MASS, "allocate": "ada", "bands": 2, "allow": ["full"]},
        {"tova": (128, 160)},
        72,
    ),
}
# With a prefix cache only blocks that were never published are poisoned, without one all that are freed.
CACHING = {"prefix-cache": True, "no-prefix-cache": False}
CASES = [(name, "prefix-cache") for name in ("h2o", "full", "tova-ada", "h2o-tokens")]
CASES += [(name, "no-prefix-cache") for name in ("rkv", "h2o-last", "h2o-pressure", "h2o-tokens")]
REQUESTS = 40


class Crowd:
    """Requests that come and go: random lengths, prefixes, policies and budgets, and some that are taken back."""

    def __init__(self, server, budgets, seed):
        self.server, self.budgets = server, budgets
        self.rng = np.random.default_rng(seed)
        self.prefixes = [self.rng.integers(0, 256, 400).tolist() for _ in range(3)]
        self.prompts, self.outputs, self.aborted = {}, {}, set()

    def arrive(self):
        rng = self.rng
        prefix = self.prefixes[rng.integers(3)][: int(rng.choice([0, 70, 150, 400]))]
        prompt = prefix + rng.integers(0, 256, int(5 * 80 ** rng.random())).tolist()
        name = str(rng.choice(["full", *self.budgets])) if "full" in self.server.scheduler.kv_policy.allowed else None
        extra = {} if name is None else {"kv_policy": name}
        if name != "full" and rng.random() < 0.7:
            extra["kv_budget"] = int(rng.integers(*self.budgets[name or "sink-window"])) + 1
        request_id = self.server.add(
            prompt,
            max_tokens=int(rng.integers(1, 200)),
            logprobs=0,
            prompt_logprobs=0 if rng.random() < 0.2 else None,
            extra_args=extra,
        )
        self.prompts[request_id] = prompt

    def step(self):
        rng = self.rng
        if len(self.prompts) < REQUESTS and rng.random() < 0.4:
            self.arrive()
        alive = sorted(set(self.prompts) - set(self.outputs) - self.aborted)
        if alive and rng.random() < 0.01:
            victim = str(rng.choice(alive))
            self.aborted.add(victim)
            self.server.llm.llm_engine.abort_request([victim])
        for output in self.server.llm.llm_engine.step():
            if output.finished:
                self.outputs[output.request_id] = output

    @property
    def busy(self):
        return len(self.prompts) < REQUESTS or self.server.llm.llm_engine.has_unfinished_requests()


@pytest.mark.nightly(
    push=(
        *("h2o-prefix-cache", "h2o-tokens-prefix-cache", "h2o-tokens-no-prefix-cache"),
        *("h2o-pressure-no-prefix-cache", "rkv-no-prefix-cache", "tova-ada-prefix-cache"),
    )
)
@pytest.mark.both_runners("h2o-prefix-cache")
@pytest.mark.parametrize("name, caching", CASES)
def test_freed_blocks_are_never_read_and_all_come_back(engine, tiny, monkeypatch, name, caching):
    check_crowd(engine, tiny, monkeypatch, *SERVERS[name], caching)


def check_crowd(engine, model, monkeypatch, policy, budgets, blocks, caching, dense=None):
    """A crowd under a policy, in a pool that is too small for it; `caching` is one of `CACHING`, `dense` an oracle."""
    monkeypatch.setenv("VLLM_EVICT_POISON", "1")
    server = engine(
        policy,
        model=model,
        blocks=blocks,
        max_model_len=1024,
        max_num_batched_tokens=192,
        max_num_seqs=8,
        enable_prefix_caching=CACHING[caching],
    )
    layers = server.core.vllm_config.compilation_config.static_forward_context.values()
    caches = [layer.kv_cache for layer in layers if isinstance(layer, Attention)]
    if server.scheduler.kv_policy.allocator.splits:  # pages hold heads of many layers, which read parts of them
        caches = server.worker.model_runner.kv_caches
    # States are their own memory's only reader, and not of the pages' dtype.
    assert len(caches) == len(server.worker.model_runner.kv_caches) or dense is not None
    plans, preempted = [], []
    after(server.scheduler, "schedule", lambda output, *_: plans.append(getattr(output, PLAN)))
    after(server.scheduler, "_preempt_request", lambda *_: preempted.append(True))
    crowd = Crowd(server, budgets, seed=1)
    poisoned = 0
    while crowd.busy:
        crowd.step()
        held = server.held_blocks()
        assert server.free_blocks == server.all_blocks - len(held)
        for cache in caches:
            assert not torch.isnan(cache[sorted(held)]).any(), "a block in use holds poison"
        if plans:
            plan = plans.pop()
            fills = Fills.within(plan) or Fills()
            gone = sorted(set(fills.poison) - set(fills.clean))
            poisoned += len(gone)
            for cache in caches:
                assert torch.isnan(cache[gone]).all(), "a freed block was not poisoned"

    assert poisoned > 0 and preempted and len(crowd.outputs) > REQUESTS // 2
    assert crowd.aborted
    assert CACHING[caching] == any(output.num_cached_tokens for output in crowd.outputs.values())
    assert sum(output.kv_usage.evicted_blocks > 0 for output in crowd.outputs.values()) > REQUESTS // 8
    assert set(crowd.outputs) | crowd.aborted == set(crowd.prompts)
    server.assert_nothing_left()
    missing = [value for (metric, *_), value in server.metrics().items() if metric == "reports_missing"]
    assert missing and not any(missing), "scores of NaN: mass was taken of a freed block"

    dense, whole = dense or DenseLlama(model), 0
    for request_id, output in crowd.outputs.items():
        prompt, tokens = crowd.prompts[request_id], list(output.outputs[0].token_ids)
        got = logprobs_of(output)
        assert np.isfinite(got).all()
        for row, token in zip((output.prompt_logprobs or [])[1:], prompt[1:]):
            assert np.isfinite(row[token].logprob)
        if output.kv_usage.evicted_blocks == 0:
            # It missed nothing, whatever happened around it: what a dense model says.
            whole += 1
            ids = [*prompt, *tokens]
            logits, _ = dense.forward(ids, dense.new_cache(), torch.ones(len(ids), len(ids)).tril().bool())
            logprobs = torch.log_softmax(logits.double(), -1)[len(prompt) - 1 : -1]
            np.testing.assert_allclose(got, logprobs[range(len(tokens)), tokens], atol=2e-3)
    assert whole > 0
