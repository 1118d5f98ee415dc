"""Decodes that attend to the best resident blocks of each layer: against a dense model that chooses for itself."""

import math

import numpy as np
import pytest
import torch
from engine import logprobs_of, random_prompt
from oracle.model import DenseLlama
from oracle.tiny import make_tiny_llama

BLOCK = 32
SELECT = {"select": 256, "select_sink": 32, "select_recent": 32, "dense_layers": 1}
EVICTING = {"budget": 384, "buffer": 64, "sink": 32, "recent": 64}


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A model of five layers, so that filters have layers before, between and after them."""
    return make_tiny_llama(tmp_path_factory.mktemp("deep"), layers=5)


class Chooser:
    """What layers of a dense model see under a selection. Chooses by plain loops over its own queries and keys.

    Attributes:
        closest: how near, relative to the larger, the shares of a chosen block and of another one came.
        chosen: number of choices.
    """

    def __init__(self, model, *, select, select_sink, select_recent, dense_layers=2, filter_layers=(), select_every=1):
        self.model, self.every = model, select_every
        self.recent = math.ceil((select_recent - 1) / BLOCK) + 1
        self.sinks, self.blocks = math.ceil(select_sink / BLOCK), math.ceil(select / BLOCK)
        self.dense, self.filters = dense_layers, filter_layers
        self.steps, self.held, self.closest, self.chosen = 0, {}, math.inf, 0

    def mask(self, base, resident):
        """A step's mask. base: bool [Q, N] of all resident tokens; resident: logical blocks, ascending."""
        if len(base) > 1 or len(resident) <= self.blocks:
            self.held, self.steps = {}, 0
            return base
        if self.steps % self.every == 0:
            self.held = {}
        self.steps += 1
        latest = [None]

        def of_layer(layer, queries, keys):
            own = layer in self.filters if self.filters else layer >= self.dense
            if own:
                if layer not in self.held:
                    self.held[layer] = self.choose(queries[0], keys, resident)
                latest[0] = self.held[layer]
            if latest[0] is None or layer in self.filters or (not self.filters and not own):
                return base
            seen = resident[: self.sinks] + latest[0] + resident[-self.recent :]
            return base & torch.isin(torch.arange(base.shape[1]) // BLOCK, torch.tensor(seen))

        return of_layer

    def choose(self, query, keys, resident):
        heads, group = self.model.heads, self.model.heads // self.model.kv_heads
        full, shares = resident[:-1], torch.zeros(len(resident) - 1, dtype=torch.float64)
        for h in range(heads):
            bounds = []
            for block in full:
                of_block = keys[block * BLOCK : (block + 1) * BLOCK, h // group].double()
                q = query[h].double()
                bounds.append(torch.maximum(q * of_block.amax(0), q * of_block.amin(0)).sum())
            shares += (torch.stack(bounds) / self.model.head_dim**0.5).softmax(0)
        last = len(resident) - self.recent
        order = sorted(range(self.sinks, last), key=lambda place: -shares[place])
        count = self.blocks - self.sinks - self.recent
        kept, other = shares[order[count - 1]].item(), shares[order[count]].item()
        self.closest, self.chosen = min(self.closest, 1 - other / kept), self.chosen + 1
        return sorted(full[place] for place in order[:count])


def assert_selects_like_dense(model, prompt, output, trace, **select):
    """Log-probabilities of a traced request are those of a dense model that chooses for itself. Returns its choices."""
    dense = DenseLlama(model)
    chooser, tokens = Chooser(dense, **select), [*prompt, *output.outputs[0].token_ids]
    cache, n, gone, logits = dense.new_cache(), 0, set(), []
    if trace.start:
        dense.forward(tokens[: trace.start], cache, torch.ones(trace.start, trace.start).tril().bool())
        n = trace.start
    for count, evicted in zip(trace.steps, trace.evicted):
        first, n = n, n + count
        resident = [block for block in range(math.ceil(n / BLOCK)) if block not in gone]
        base = torch.arange(n) <= torch.arange(first, n)[:, None]
        base &= torch.isin(torch.arange(n) // BLOCK, torch.tensor(resident))
        logits.append(dense.forward(tokens[first:n], cache, chooser.mask(base, resident))[0])
        if set(evicted) - gone:
            chooser.held, chooser.steps = {}, 0
        gone |= set(evicted)
    logprobs = torch.log_softmax(torch.cat(logits).double(), -1)
    assert chooser.closest > 1e-5, "rounding could choose another block: take another prompt"
    want = [
        logprobs[len(prompt) - 1 - trace.start + i, token].item() for i, token in enumerate(output.outputs[0].token_ids)
    ]
    np.testing.assert_allclose(logprobs_of(output), want, atol=2e-3)
    return chooser.chosen


CASES = {
    "full": {"name": "full", **SELECT},
    "every": {"name": "full", **SELECT, "select_every": 5},
    "filters": {"name": "full", **SELECT, "filter_layers": [0, 2]},
    "wide": {"name": "full", "select": 320, "select_sink": 40, "select_recent": 100, "dense_layers": 0},
    "sink-window": {"name": "sink-window", "budget": 448, "buffer": 96, "sink": 32, **SELECT},
    "keydiff": {"name": "keydiff", **EVICTING, **SELECT, "select_every": 3},
    "quest": {"name": "quest", **EVICTING, **SELECT},
}


@pytest.mark.both_runners("full", "quest")
@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_a_dense_model_that_chooses_for_itself(engine, deep, monkeypatch, name):
    """Three requests in one batch; one is shorter than the selection at first."""
    monkeypatch.setenv("VLLM_EVICT_POISON", "1")
    policy = dict(CASES[name])
    if "filter_layers" in policy:
        del policy["dense_layers"]
    server = engine(policy, model=deep, max_num_batched_tokens=192)
    requests = [
        (random_prompt(length, seed), {"max_tokens": tokens, "logprobs": 1})
        for seed, (length, tokens) in enumerate([(700, 50), (230, 80), (500, 40)])
    ]
    outputs, traces = server.traced(requests)
    chosen = 0
    for (prompt, _), output, trace in zip(requests, outputs, traces):
        given = {
            field: value
            for field, value in policy.items()
            if field in Chooser.__init__.__kwdefaults__ or field in SELECT
        }
        chosen += assert_selects_like_dense(deep, prompt, output, trace, **given)
    assert chosen > 100 / policy.get("select_every", 1)
    assert not list(server.runtime.selection.requests) or server.drain() or not list(server.runtime.selection.requests)
    server.assert_nothing_left()
