"""Lengths that the device alone knows: what counts, and what keys are measured, is what it is where the host knows them."""

import numpy as np
import pytest
import torch
from parts import batch_of

from vllm_evict.compute.kernels.keys import key_scores
from vllm_evict.compute.sums import RunningSums
from vllm_evict.core.plan import Scoring
from vllm_evict.policies import CACHED

BLOCK, HEADS, DRAFTS = 4, 2, 3
HOW = {
    "sum": Scoring("sum", 0.9, 6, 1, 5),
    "every": Scoring("sum", 0.9, 6, 3, 5),
    "ema": Scoring("ema", 0.8, 6, 1, 5),
    "ema-every": Scoring("ema", 0.8, 6, 2, 5),
    "window": Scoring("last", 0.9, 6, 1, 3),
    "last": Scoring("last", 0.9, 1, 1, 4),
    "pivots": Scoring("last", 0.9, 7, 2, 3, "pivots"),
    "pivots-ema": Scoring("ema", 0.7, 7, 2, 1 << 40, "pivots"),
    "start": Scoring("sum", 0.9, 6, 1, 5, start=17),
}


def counting(step, queries):
    """Weights of a step's queries, and which of them are tested for pivotal blocks, with the tokens that they see."""
    if step is None:
        return [0.0] * queries, []
    weights, tested = step.buffers.weights, []
    if step.queries is not None:
        of = step.queries
        counts = torch.ones(len(of.tokens)) if of.counts is None else of.counts
        tested = [
            (at, row, seen) for at, row, seen, count in zip(*map(torch.Tensor.tolist, (*of[:3], counts))) if count
        ]
    return [1.0] * queries if weights is None else weights.tolist(), tested


@pytest.mark.parametrize("names", [[name] for name in HOW] + [["window", "ema-every", "pivots", "sum"]], ids="-".join)
def test_the_same_queries_count(names):
    """Requests with and without drafts, some not measured; lengths on the host count drafts that were rejected."""
    rng = np.random.default_rng(len(names) * 100 + len(names[0]))
    subjects = [RunningSums(8, HEADS, 1, 60, BLOCK, "sum", "sum") for _ in range(2)]
    req_ids = [f"r{at}" for at in range(len(names) + 1)]
    for req_id, name in zip(req_ids, names):
        for sums in subjects:
            sums.start(req_id, HOW[name])
    length, holes, counted = dict.fromkeys(req_ids, 9), dict.fromkeys(req_ids, 0), 0
    for at in range(60):
        batch = [req_id for req_id in rng.permutation(req_ids).tolist() if rng.random() < 0.9] or req_ids
        single = rng.random() < 0.3
        drafts = np.array([0 if single else int(rng.integers(0, DRAFTS + 1)) for _ in batch])
        leading = np.array([1 if single or rng.random() < 0.7 else int(rng.integers(1, 6)) for _ in batch])
        lens = leading + drafts
        slack = rng.integers(0, DRAFTS + 1, len(batch)) * (rng.random(len(batch)) < 0.7)
        over = np.array([int(rng.integers(0, most + 1)) for most in slack])
        true = np.array([length[each] for each in batch]) + lens
        starts = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
        resident = torch.from_numpy(true - BLOCK * np.array([holes[each] for each in batch])).int()
        logical = torch.zeros(len(batch), 60, dtype=torch.int32)
        given = dict(verified=leading, lengths=torch.from_numpy(true).int())
        steps = [
            sums.step(batch_of(batch, starts, (true + more).astype(np.int32), resident, logical, slack=unsure, **given))
            for sums, more, unsure in zip(subjects, (0, over), (None, slack if slack.any() else None))
        ]
        known, unknown = (counting(step, starts[-1]) for step in steps)
        np.testing.assert_allclose(unknown[0], known[0], rtol=1e-6, err_msg=f"step {at}")
        assert unknown[1] == known[1]
        if steps[0] is not None:
            counted += sum(map(bool, known[0])) + len(known[1])
            assert steps[1] is not None
            kept = [torch.ones(len(batch)) if step.kept is None else step.kept for step in steps]
            torch.testing.assert_close(*kept, rtol=1e-6, atol=0)
            if steps[1].last is not None:  # a kernel may skip queries before the first that counts, and none of these
                assert (steps[1].last >= steps[0].last).all()
        for req_id, tokens, rejected in zip(batch, lens, drafts):
            length[req_id] += int(tokens) - int(rng.integers(0, rejected + 1))
            if length[req_id] > BLOCK * (6 + holes[req_id]) and length[req_id] < 200:
                holes[req_id] += 2
                for sums in subjects:
                    sums.set_holes(req_id, holes[req_id])
    assert counted > 15


@pytest.mark.parametrize(("length", "settled"), [(14, 13), (14, 11), (16, 12), (9, 8), (16, 16)])
def test_keys_behind_the_settled_ones_do_not_count(length, settled):
    """They may be anything, as rejected drafts and other requests leave them."""
    generator = torch.Generator().manual_seed(length)
    keys, values = torch.randn(2, 4, HEADS, BLOCK, 8, generator=generator)
    keys[2] = keys[0] + 0.1 * keys[2]
    blocks = -(-settled // BLOCK)
    want = key_scores(keys[:blocks], values[:blocks], settled, CACHED)
    for cached in (keys, values):
        for token in range(settled, 4 * BLOCK):
            cached[token // BLOCK, :, token % BLOCK] = float("nan")
    got = key_scores(keys[: -(-length // BLOCK)], values[: -(-length // BLOCK)], length, CACHED, torch.tensor(settled))
    assert got.keys() == CACHED
    for name, scores in got.items():
        torch.testing.assert_close(scores[:, :blocks], want[name], rtol=1e-5, atol=1e-6)
        assert not scores[:, blocks:].any()
