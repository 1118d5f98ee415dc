"""Running sums of attention mass against a rewrite that takes one query at a time. A made-up mass pass is enough."""

from functools import partial

import numpy as np
import pytest
import torch
from parts import Drawn, batch_of
from waits import NoWaits

from vllm_evict.compute import measure
from vllm_evict.compute.sums import RunningSums
from vllm_evict.core.plan import Scoring

BLOCK = 4
HEADS, LAYERS = 3, 2
REDUCE = {"sum": np.sum, "mean": np.mean, "max": np.max}


def scoring(accumulate="sum", decay=0.8, window=6, every=1, trigger=5, statistic="mass"):
    return Scoring(accumulate, decay, window, every, trigger, statistic)


def local(values, maximise):
    """All-reduce over one rank."""
    return values


class Slow:
    """One request, one query at a time, in float64. Layers are reduced step by step, as the plugin defines it."""

    def __init__(self, how, blocks):
        self.how, self.sums, self.holes = how, np.zeros((HEADS, blocks)), 0

    def counts(self, position, last):
        """Whether the query at `position` counts in a step that ends at `last`."""
        how = self.how
        if position % how.every:
            return False
        if how.accumulate != "last":
            return True
        held = last // BLOCK + 1 - self.holes
        decision = last if held > how.trigger else (how.trigger + self.holes) * BLOCK
        return decision - how.window < position <= decision

    def step(self, first, probabilities, resident, layers):
        """probabilities: [L, heads, queries, resident blocks]; queries start at position `first`."""
        last = first + probabilities.shape[2] - 1
        per_layer = np.zeros((LAYERS, *self.sums.shape))
        counted = [q for q in range(first, last + 1) if self.counts(q, last)]
        old = self.sums
        for position in counted:
            if self.how.accumulate == "ema":
                old, per_layer = old * self.how.decay, per_layer * self.how.decay
                share = 1 - self.how.decay
            else:
                share = 1
            per_layer[:, :, resident] += share * probabilities[:, :, position - first]
        self.sums = old + REDUCE[layers](per_layer, axis=0)
        return len(counted)

    def report(self, resident, heads):
        values = REDUCE[heads](self.sums, axis=0)[resident]
        if self.how.accumulate == "last":
            self.sums[:] = 0
        return values


class Batch:
    """Random steps of a batch: some rows measured, some not; decode and prefill mixed; holes here and there."""

    def __init__(self, seed, methods, heads="sum", layers="sum"):
        self.rng = np.random.default_rng(seed)
        self.heads, self.layers = heads, layers
        self.subject = RunningSums(8, HEADS, LAYERS, 40, BLOCK, heads, layers)
        self.length = {f"r{i}": 0 for i in range(len(methods) + 2)}
        self.gone = {req_id: set() for req_id in self.length}
        self.slow = {}
        for req_id, how in zip(self.length, methods):
            self.subject.start(req_id, how)
            self.slow[req_id] = Slow(how, 40)

    def resident(self, req_id):
        blocks = -(-self.length[req_id] // BLOCK)
        return np.array([block for block in range(blocks) if block not in self.gone[req_id]])

    def punch(self, req_id):
        """Evict a block, as a plan would say."""
        resident = self.resident(req_id)[1:-1]
        if len(resident):
            self.gone[req_id].add(int(self.rng.choice(resident)))
            if req_id in self.slow:
                self.slow[req_id].holes += 1
                self.subject.set_holes(req_id, self.slow[req_id].holes)

    def step(self):
        rng = self.rng
        batch = [req_id for req_id in rng.permutation(list(self.length)) if rng.random() < 0.8] or ["r0"]
        lens = [int(rng.integers(1, 9)) if rng.random() < 0.5 else 1 for _ in batch]
        firsts = [self.length[req_id] for req_id in batch]
        for req_id, count in zip(batch, lens):
            self.length[req_id] += count
        resident = [self.resident(req_id) for req_id in batch]
        width = max(map(len, resident))
        logical = torch.full((len(batch), width + 1), -1, dtype=torch.int32)[:, :width]
        for row, blocks in enumerate(resident):
            logical[row, : len(blocks)] = torch.from_numpy(blocks)
        starts = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
        seq_lens = np.array([self.length[req_id] for req_id in batch], np.int32)
        probabilities = [rng.random((LAYERS, HEADS, count, len(blocks))) for count, blocks in zip(lens, resident)]

        lens = [len_ - BLOCK * len(self.gone[req_id]) for req_id, len_ in zip(batch, seq_lens)]
        step = self.subject.step(batch_of(batch, starts, seq_lens, torch.tensor(lens, dtype=torch.int32), logical))
        counted = {
            req_id: self.slow[req_id].step(first, p, blocks, self.layers)
            for req_id, first, p, blocks in zip(batch, firsts, probabilities, resident)
            if req_id in self.slow
        }
        if step is None:
            assert not any(counted.values())
            return
        assert {batch[row]: count for row, count in zip(step.rows, step.counted.tolist())} == counted

        def mass_pass(layer, weights, out):
            weights = np.ones(starts[-1]) if weights is None else weights.numpy().astype(np.float64)
            for row, p in enumerate(probabilities):
                mass = np.einsum("hqb,q->hb", p[layer], weights[starts[row] : starts[row + 1]])
                if out.shape[1] == 1:
                    mass = mass.sum(0, keepdims=True)
                out[row, :, : mass.shape[1]] += torch.from_numpy(mass).float()

        for layer in range(LAYERS):
            Drawn(partial(mass_pass, layer), HEADS, 2 * HEADS).on(step)
        self.subject.fold(step)

    def check(self, req_ids):
        resident = [self.resident(req_id) for req_id in req_ids]
        reports = self.subject.report(req_ids, resident, local)
        assert list(reports) == list(req_ids)
        for req_id, index in zip(req_ids, resident):
            np.testing.assert_array_equal(reports[req_id].index, index)
            expected = self.slow[req_id].report(index, self.heads)
            np.testing.assert_allclose(reports[req_id].statistics["mass"], expected, rtol=1e-4, atol=1e-5)


METHODS = {
    "sum": [scoring()] * 3,
    "every": [scoring(every=3), scoring(every=2), scoring(every=5)],
    "ema": [scoring("ema", decay=0.9), scoring("ema", decay=0.5), scoring("ema", decay=0.99, every=2)],
    "last": [scoring("last", window=3), scoring("last", window=7, trigger=3), scoring("last", every=2, trigger=2)],
    "mixed": [scoring(), scoring("ema"), scoring("last"), scoring("mean", every=4)],
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("seed", range(4))
def test_sums_are_those_of_one_query_at_a_time(name, seed):
    batch = Batch(seed, METHODS[name])
    for _ in range(12):
        batch.step()
        if batch.rng.random() < 0.4:
            batch.punch(str(batch.rng.choice(list(batch.length))))
        if batch.rng.random() < 0.3:
            batch.check([req_id for req_id in batch.slow if batch.length[req_id]][:2])
    batch.check([req_id for req_id in batch.slow if batch.length[req_id]])


@pytest.mark.parametrize("heads", REDUCE)
@pytest.mark.parametrize("layers", REDUCE)
def test_heads_and_layers_are_reduced_as_asked(heads, layers):
    batch = Batch(5, [scoring(), scoring("ema"), scoring(every=2)], heads, layers)
    for _ in range(8):
        batch.step()
    batch.check([req_id for req_id in batch.slow if batch.length[req_id]])


def add_mass(sums, req_ids, lens, seq_lens, value=1.0, width=6):
    """One step in which every counted query puts `value` on each of `width` blocks."""
    starts = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
    logical = torch.arange(width, dtype=torch.int32).expand(len(req_ids), width)
    seq_lens = np.array(seq_lens, np.int32)
    step = sums.step(batch_of(req_ids, starts, seq_lens, torch.from_numpy(seq_lens), logical))
    if step is None:
        return None

    def mass_pass(weights, out):
        weights = torch.ones(int(starts[-1])) if weights is None else weights
        for row in range(len(req_ids)):
            out[row] += value * weights[starts[row] : starts[row + 1]].sum()

    Drawn(mass_pass, HEADS, 2 * HEADS).on(step)
    sums.fold(step)
    return step


def masses(sums, req_id, width=6):
    return sums.report([req_id], [np.arange(width)], local)[req_id].statistics["mass"].tolist()


def one_layer(requests=4, heads="sum", layers="sum"):
    return RunningSums(requests, HEADS, 1, 10, BLOCK, heads, layers)


def test_start_zeroes():
    sums = one_layer()
    sums.start("a", scoring())
    add_mass(sums, ["a"], [3], [20])
    assert masses(sums, "a") == [3.0] * 6
    sums.set_holes("a", 2)
    sums.start("a", scoring(every=2))
    assert masses(sums, "a") == [0.0] * 6
    add_mass(sums, ["a"], [3], [23])
    assert masses(sums, "a") == [2.0] * 6  # positions 20 and 22
    assert len(sums) == 1


def test_a_slot_that_is_used_again_starts_from_zero():
    sums = one_layer(requests=1)
    sums.start("a", scoring("ema"))
    add_mass(sums, ["a"], [3], [20])
    sums.set_holes("a", 3)
    sums.stop("a")
    sums.start("b", scoring())
    assert masses(sums, "b") == [0.0] * 6
    add_mass(sums, ["b"], [2], [20])
    assert masses(sums, "b") == [2.0] * 6


def test_pivots_are_counted_query_by_query_and_mass_beside_them():
    """Queries one by one: each with the tokens that it sees, holes squeezed out. Mass only for who sums up mass."""
    sums = RunningSums(2, HEADS, 1, 10, BLOCK, "sum", "sum")
    sums.start("a", scoring("last", window=2, trigger=1, statistic="pivots"))
    sums.start("b", scoring())
    sums.set_holes("a", 1)
    logical = torch.tensor([[0, 2, 3], [0, 1, -1]], dtype=torch.int32)
    # Request a: positions 11 to 13, one hole of 4 tokens; the last two count and see 9 and 10 tokens.
    lens = torch.tensor([10, 6], dtype=torch.int32)
    step = sums.step(batch_of(["a", "b"], np.array([0, 3, 5], np.int32), np.array([14, 6], np.int32), lens, logical))
    assert [values.tolist() for values in step.queries[:3]] == [[1, 2], [0, 0], [9, 10]]
    assert step.buffers.weights.tolist() == [0, 0, 0, 1, 1]

    def weigh(weights, out):
        out[1, :, :2] += 2.0

    def weigh_each(queries, width):  # shares of 4/9, 4/9 and 1/9, then of 4/10, 4/10 and 2/10
        first = torch.tensor([0.45, 0.44, 0.11]).expand(3, width)
        return torch.stack([first, torch.tensor([[0.41, 0.41, 0.18], [0.41, 0.39, 0.2], [0.39, 0.39, 0.22]])])

    Drawn(weigh, HEADS, 2 * HEADS, weigh_each).on(step)
    sums.fold(step)
    reports = sums.report(["a", "b"], [np.array([0, 2, 3]), np.array([0, 1])], local)
    assert reports["a"].statistics.keys() == {"pivots"} and reports["b"].statistics.keys() == {"mass"}
    assert reports["a"].statistics["pivots"].tolist() == [3 + 2, 1, 1]
    assert reports["b"].statistics["mass"].tolist() == [2.0, 2.0]


def test_pivots_may_be_counted_over_all_queries():
    sums = RunningSums(1, HEADS, 1, 10, BLOCK, "sum", "sum")
    sums.start("a", scoring("sum", statistic="pivots"))
    logical = torch.arange(3, dtype=torch.int32)[None]
    resident = torch.tensor([9], dtype=torch.int32)
    step = sums.step(batch_of(["a"], np.array([0, 9], np.int32), np.array([9], np.int32), resident, logical))
    assert step.queries.tokens.tolist() == list(range(9)) and step.counted.tolist() == [9]


@pytest.mark.parametrize("accumulate", ["last", "ema"])
@pytest.mark.parametrize("layers", ["sum", "max"])
def test_pivots_of_one_query_each_follow_from_its_own_mass(layers, accumulate):
    """The mass of two query heads on each of a KV head's blocks, of a request with a hole and one that sums up mass."""
    sums = RunningSums(2, HEADS, 1, 10, BLOCK, "sum", layers)
    sums.start("a", scoring(accumulate, window=2, trigger=1, statistic="pivots"))
    sums.start("b", scoring())
    sums.set_holes("a", 1)
    logical = torch.tensor([[0, 2, 3], [0, 1, -1]], dtype=torch.int32)
    lens = torch.tensor([10, 6], dtype=torch.int32)
    step = sums.step(batch_of(["a", "b"], np.arange(3, dtype=np.int32), np.array([14, 6], np.int32), lens, logical))
    assert step.queries is None and step.buffers.tested.tolist() == [1, 0]

    def weigh(weights, out):
        assert weights.tolist() == [1.0, 1.0] and not out.any()
        out[0] = 2 * torch.tensor([[0.41, 0.41, 0.18], [0.41, 0.39, 0.2], [0.39, 0.39, 0.22]])  # 0.4, 0.4, 0.2 is even
        out[1, :, :2] += 2.0

    for _ in range(2):  # layers
        Drawn(weigh, HEADS, 2 * HEADS).on(step)
    sums.fold(step)
    reports = sums.report(["a", "b"], [np.array([0, 2, 3]), np.array([0, 1])], local)
    times = 2 if layers == "sum" else 1
    assert reports["a"].statistics["pivots"].tolist() == [2 * times, times, times]
    assert reports["b"].statistics["mass"].tolist() == [6.0 * times] * 2


def test_pivots_are_counted_some_queries_at_a_time(monkeypatch):
    monkeypatch.setattr(measure, "PIVOT_SCRATCH", 2 * 16 * HEADS * 3)
    sums = RunningSums(1, HEADS, 1, 10, BLOCK, "sum", "sum")
    sums.start("a", scoring("last", window=5, trigger=0, statistic="pivots"))
    logical = torch.arange(3, dtype=torch.int32)[None]
    resident = torch.tensor([9], dtype=torch.int32)
    step = sums.step(batch_of(["a"], np.array([0, 9], np.int32), np.array([9], np.int32), resident, logical))
    counts, asked = len(step.queries.tokens), []

    def weigh_each(queries, width):
        asked.append(len(queries.tokens))
        return torch.ones(len(queries.tokens), HEADS, width)

    Drawn(lambda weights, out: None, HEADS, 2 * HEADS, weigh_each).on(step)
    assert counts > 3 and asked == [2] * (counts // 2) + [1] * (counts % 2)
    assert step.mass[0, 0, 0] == counts * HEADS


def test_slots_do_not_leak():
    sums = one_layer(requests=4)
    rng = np.random.default_rng(0)
    alive = []
    for i in range(5000):
        if len(alive) == 4 or (alive and rng.random() < 0.5):
            sums.stop(alive.pop(int(rng.integers(len(alive)))))
        else:
            alive.append(f"r{i}")
            sums.start(alive[-1], scoring())
            if rng.random() < 0.3:
                sums.start(alive[-1], scoring("ema"))  # again, without a stop between
        sums.stop("nobody")
        assert len(sums) == len(alive) == 4 - len(sums._free)
        assert all(req_id in sums for req_id in alive)
    assert len(set(sums._slots.values()) | set(sums._free)) == 4


def test_more_requests_than_slots_is_an_error():
    sums = one_layer(requests=1)
    sums.start("a", scoring())
    with pytest.raises(IndexError):
        sums.start("b", scoring())


def test_only_some_rows_are_measured():
    sums = one_layer()
    sums.start("b", scoring())
    step = add_mass(sums, ["a", "b", "c"], [2, 3, 1], [20, 21, 22])
    assert step.rows.tolist() == [1] and step.buffers.weights.tolist() == [0, 0, 1, 1, 1, 0]
    assert masses(sums, "b") == [3.0] * 6


def test_rows_that_are_all_measured_alike_need_no_weights():
    sums = one_layer()
    sums.start("a", scoring())
    sums.start("b", scoring("mean"))
    assert add_mass(sums, ["b", "a"], [2, 3], [20, 21]).buffers.weights is None


def test_nothing_to_measure_is_no_step():
    sums = one_layer()
    assert add_mass(sums, ["a"], [3], [20]) is None
    sums.start("a", scoring(every=100))
    assert add_mass(sums, ["a"], [3], [20]) is None
    assert add_mass(sums, ["b"], [1], [101]) is None
    assert add_mass(sums, ["a"], [1], [101]) is not None


def test_a_batch_that_changes_is_seen():
    """The rows are remembered from step to step; every way in which they change must be noticed."""
    sums = one_layer()
    sums.start("a", scoring())
    batch = ["a", "b"]
    add_mass(sums, batch, [1, 1], [20, 20])
    sums.start("b", scoring())
    add_mass(sums, batch, [1, 1], [21, 21])
    assert (masses(sums, "a"), masses(sums, "b")) == ([2.0] * 6, [1.0] * 6)
    batch.reverse()  # the runner's own list, in place
    add_mass(sums, batch, [5, 1], [25, 22])
    assert (masses(sums, "a"), masses(sums, "b")) == ([3.0] * 6, [6.0] * 6)
    sums.stop("a")
    step = add_mass(sums, batch, [1, 1], [26, 23])
    assert step.rows.tolist() == [0]
    sums.start("c", scoring())
    batch[1] = "c"
    assert add_mass(sums, batch, [1, 1], [27, 9]).rows.tolist() == [0, 1]


def test_last_is_empty_after_a_report():
    sums = one_layer()
    sums.start("a", scoring("last", window=4, trigger=4))
    sums.start("b", scoring())
    add_mass(sums, ["a", "b"], [10, 10], [24, 24])  # six blocks, four allowed: a decision at 23
    assert masses(sums, "a") == [4.0] * 6 and masses(sums, "b") == [10.0] * 6
    assert masses(sums, "a") == [0.0] * 6 and masses(sums, "b") == [10.0] * 6


def test_a_window_is_emptied_without_a_wait_for_the_device():
    sums = one_layer()
    sums.start("a", scoring("last"))
    add_mass(sums, ["a"], [2], [24])
    with NoWaits():
        (report,) = sums.report(["a"], [np.arange(3)], local).values()
    assert report.statistics["mass"].any() and not sums._sums.any()


def test_queries_before_the_first_that_counts_are_named():
    """A device's kernels skip them. Window 4 before the decision at 23, in chunks of 10; all queries of "b" count."""
    sums = one_layer()
    sums.start("a", scoring("last", window=4, trigger=4))
    sums.start("b", scoring())
    step = add_mass(sums, ["a", "none", "b"], [10, 3, 2], [24, 20, 20])
    assert step.buffers.weights.tolist() == [0] * 6 + [1] * 4 + [0] * 3 + [1, 1]
    assert step.last.dtype == torch.int32 and step.last.tolist() == [4, 0, 2]
    assert add_mass(sums, ["b"], [5], [25]).last is None
    assert add_mass(sums, ["a", "b"], [1, 1], [25, 26]).last is None


def test_last_foresees_the_decision():
    """Trigger 4, block 4: the decision falls at position 16, when a fifth block is begun; window 3: 14, 15 and 16."""
    sums = one_layer()
    sums.start("a", scoring("last", window=3, trigger=4))
    counted = [add_mass(sums, ["a"], [1], [position + 1]) is not None for position in range(18)]
    assert [position for position, counts in enumerate(counted) if counts] == [14, 15, 16, 17]
    # Two holes put the next one off by two blocks, to 24.
    sums.set_holes("a", 2)
    counted = [add_mass(sums, ["a"], [1], [position + 1]) is not None for position in range(17, 25)]
    assert counted == [False] * 5 + [True] * 3


def test_reports_keep_to_what_is_asked():
    sums = one_layer()
    for req_id in "ab":
        sums.start(req_id, scoring())
    add_mass(sums, ["a", "b"], [2, 3], [24, 24])
    assert sums.report([], [], local) == {}
    reports = sums.report(["b", "a"], [np.array([0, 4]), np.array([1, 2, 5])], local)
    assert reports["b"].statistics["mass"].tolist() == [3.0, 3.0] and reports["a"].statistics["mass"].tolist() == [
        2.0,
        2.0,
        2.0,
    ]
    assert reports["a"].index.tolist() == [1, 2, 5] and reports["a"].statistics["mass"].dtype == np.float64


@pytest.mark.parametrize("heads", REDUCE)
def test_ranks_are_reduced_before_heads_are_scaled(heads):
    """All requests' sums travel in one all-reduce; of maxima for max, of sums otherwise."""
    sums = one_layer(heads=heads)
    for req_id in "ab":
        sums.start(req_id, scoring())
    add_mass(sums, ["a", "b"], [2, 4], [24, 24])
    calls = []

    def all_reduce(values, maximise):
        calls.append((len(values), maximise))
        return values * 10

    reports = sums.report(["a", "b"], [np.arange(3), np.arange(2)], all_reduce)
    assert calls == [(5, heads == "max")]
    scale = 10 / HEADS if heads == "mean" else 10
    np.testing.assert_allclose(reports["a"].statistics["mass"], [2 * scale] * 3)
    np.testing.assert_allclose(reports["b"].statistics["mass"], [4 * scale] * 2)
