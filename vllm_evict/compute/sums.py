"""Running sums of attention mass, or counts of pivotal queries, for each request and logical block."""

from collections.abc import Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.plan import Report, Reports, Scoring
from .counting import Counting, all_of
from .kernels.fold import fold
from .kernels.queries import Queries
from .kernels.take import take
from .measure import MassBuffers, MassStep
from .parts import AllReduce
from .reduction import Reduction
from .step_batch import StepBatch
from .transfer import to_device, to_host


class _MeasuredRows(NamedTuple):
    """The measured rows of a batch.

    Attributes:
        req_ids: requests of the batch, in row order.
        rows, slots: int64 [K], measured rows, and their rows in the running sums.
        by_place: whether a query's position decides if it counts.
        decays: whether sums fade.
        tests: whether queries are tested for pivotal blocks.
    """

    req_ids: list[str]
    rows: np.ndarray
    slots: np.ndarray
    by_place: bool
    decays: bool
    tests: bool


class RunningSums:
    """Sums of attention mass, or counts of pivotal queries: float32 [measured requests, heads, logical blocks].

    A request's sums start at zero when it starts or restarts. They are indexed by logical block, so holes move nothing.
    Layers are reduced in each step, queries as `Scoring.accumulate` says, heads in reports.

    Args:
        requests: most requests at once.
        kv_heads: most KV heads of a layer on this rank.
        layers: of this rank and KV group.
        blocks: most logical blocks of a request.
        block_size: tokens.
        reduce_heads, reduce_layers: "sum", "mean" or "max".
        device: device of the sums.
        heads: as for `Reduction`; None: `kv_heads` in each of `layers`.
    """

    def __init__(
        self,
        requests: int,
        kv_heads: int,
        layers: int,
        blocks: int,
        block_size: int,
        reduce_heads: str,
        reduce_layers: str,
        device: torch.device | str = "cpu",
        heads: Sequence[int] | None = None,
    ) -> None:
        self.block_size, self.kv_heads = block_size, kv_heads
        self._reduction = Reduction(heads or [kv_heads] * layers, reduce_heads, reduce_layers)
        self.maximise_heads, self.maximise_layers = self._reduction.maximises_heads, self._reduction.maximises_layers
        # The kernel adds up heads, so a sum takes one row. A maximum over heads or layers takes a row for each head.
        self.heads = kv_heads if self._reduction.is_by_head else 1
        self._sums = torch.zeros(requests, self.heads, blocks, device=device)
        self._slots: dict[str, int] = {}
        self._free = list(range(requests))
        # `Scoring` of each slot as arrays, so that no step loops over requests.
        self._every = np.ones(requests, np.int64)
        self._window = np.zeros(requests, np.int64)
        self._decay = np.zeros(requests)
        self._trigger = np.zeros(requests, np.int64)
        self._holes = np.zeros(requests, np.int64)
        self._pivots = np.zeros(requests, bool)
        self._start = np.zeros(requests, np.int64)
        #: Whether the last step of a slot may have led to no decision, as only drafts reached its trigger; and whether
        #: the slot's window ended with such a step: holes tell that it led to one.
        self._tentative = np.zeros(requests, bool)
        self._ended = np.zeros(requests, bool)
        #: None after a slot was given, taken or set anew.
        self._batch: _MeasuredRows | None = None
        #: Rows of the last batch, and int32 [R] the slot of each of its requests, -1 for none, on the device.
        self._folded: tuple[Any, torch.Tensor] = (None, torch.empty(0, dtype=torch.int32))

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._slots

    def __len__(self) -> int:
        """Return the number of measured requests."""
        return len(self._slots)

    @property
    def requests(self) -> Set[str]:
        """Measured requests."""
        return self._slots.keys()

    @property
    def device(self) -> torch.device:
        """Device of the sums."""
        return self._sums.device

    @property
    def kept_bytes(self) -> int:
        """Bytes of the sums on their device."""
        return self._sums.nbytes

    def start(self, req_id: str, scoring: Scoring) -> None:
        """Start to measure a request, from zero."""
        slot = self._slot(req_id)
        self._sums[slot] = 0
        self._every[slot] = scoring.every
        self._window[slot] = scoring.window if scoring.accumulate == "last" else 0
        self._decay[slot] = scoring.decay if scoring.accumulate == "ema" else 0
        self._trigger[slot] = scoring.trigger
        self._holes[slot] = 0
        self._pivots[slot] = scoring.statistic == "pivots"
        self._start[slot] = scoring.start
        self._tentative[slot] = self._ended[slot] = False

    def _slot(self, req_id: str) -> int:
        self._batch = None
        if req_id not in self._slots:
            self._slots[req_id] = self._free.pop()
        return self._slots[req_id]

    def stop(self, req_id: str) -> None:
        if (slot := self._slots.pop(req_id, None)) is not None:
            self._free.append(slot)
            self._batch = None

    def set_trigger(self, req_id: str, trigger: int) -> None:
        """Set the resident blocks above which the request's next decision is due."""
        if (slot := self._slots.get(req_id)) is not None:
            self._trigger[slot] = trigger

    def set_holes(self, req_id: str, holes: int) -> None:
        """Set the number of holes by which the next decision is foreseen: a mean if KV groups share a budget."""
        if (slot := self._slots.get(req_id)) is not None:
            self._holes[slot] = holes
            self._decided(slot)

    def _decided(self, slot: int) -> None:
        """Empty a slot's window if it ended with the decision that left these holes."""
        if self._ended[slot]:
            self._ended[slot] = False
            self._empty(np.array([slot]))

    def _end_windows(self, slots: np.ndarray) -> None:
        """Empty the windows of slots that were reported: at once, or with the holes if drafts alone made them due."""
        windows = slots[self._window[slots] > 0]
        self._ended[windows] = self._tentative[windows]
        if len(sure := windows[~self._tentative[windows]]):
            self._empty(sure)

    def _empty(self, slots: np.ndarray) -> None:
        self._sums.index_fill_(0, self._to_device(slots), 0.0)  # with `[…] = 0` torch waits for a GPU, to copy the 0

    def test(self, req_ids: Set[str]) -> bool:
        """Return whether queries of any of these requests are tested for pivotal blocks."""
        return bool(self._pivots.any()) and any(self._pivots[self._slots[each]] for each in req_ids & self.requests)

    def buffers(
        self, requests: int, blocks: int, lens: torch.Tensor, weights: torch.Tensor | None, tests: bool
    ) -> MassBuffers:
        """Allocate memory for a batch.

        Args:
            requests, blocks: R and W.
            lens, weights: as in `MassBuffers`.
            tests: whether rows of one query may be tested for pivotal blocks.
        """
        zeros = partial(torch.zeros, device=lens.device)
        layer = zeros(requests, self.kv_heads, blocks) if self.maximise_layers or tests else None
        tested = zeros(requests, dtype=torch.int32) if tests else None
        mass = zeros(requests, self.heads, blocks)
        return MassBuffers(weights, mass, layer, tested, lens, self.block_size, self.maximise_layers)

    def step(self, batch: StepBatch, memory: MassBuffers | None = None) -> MassStep | None:
        """Return what layers measure in this step; None if nothing.

        Args:
            batch: of the step.
            memory: memory of a graph, of R rows and W blocks; None allocates.
        """
        measured = self._measured(batch.req_ids)
        rows, slots, verified, slack = measured.rows, measured.slots, batch.verified, batch.slack
        if not len(rows):
            return None
        plain = not (measured.by_place or measured.decays or measured.tests)
        plain = plain and (verified is None or bool((verified == batch.queries).all()))
        weights = given = kept = queries = tested = None
        weighs = True
        if plain:
            counted = batch.queries[rows].astype(np.int64)
            weights = None if len(rows) == len(batch.req_ids) else all_of(rows, batch.queries)
        else:
            counting, weights, counted = self._weigh(measured, batch, slack)
            if not counted.any():
                return None
            if slack is not None and measured.by_place:
                known = counting.to(self.device)
                given, exactly = known.weights(batch.lengths)
                given, kept = given.float(), (known.base**exactly).float() if measured.decays else None
            elif measured.decays:
                kept = self._to_device((counting.base**counted).astype(np.float32))
            counted = counted[rows]
            if measured.tests:
                tested = np.zeros(len(batch.req_ids), np.int32)
                tested[rows] = self._pivots[slots]
                if len(weights) == len(batch.req_ids):  # one query in each row
                    weights[tested > 0] = weights[tested > 0] > 0
                    if given is not None:
                        given = torch.where(self._to_device(tested) > 0, (given > 0).float(), given)
                else:
                    queries = self._queries(weights, tested, batch, given)
                    weighs, tested = queries is None or bool(weights.any()), None
        if given is None:
            given = None if weights is None else self._to_device(weights)
        if memory is None:
            requests, blocks = batch.logical.shape
            memory = self.buffers(requests, blocks, batch.lens, given, tested is not None)
        else:
            memory.mass.zero_()
            _fill(memory.weights, given)
        if memory.tested is not None:
            memory.tested.zero_() if tested is None else memory.tested.copy_(self._to_device(tested))
        last = self._last(weights, batch.starts)
        return MassStep(rows, slots, counted, batch.logical, memory, queries, weighs, last, kept)

    def fold(self, step: MassStep) -> None:
        """Add a step's mass to the running sums."""
        rows = len(step.logical)
        if step.rows is not self._folded[0] or len(self._folded[1]) != rows:
            slots = np.full(rows, -1, np.int32)
            slots[step.rows] = step.slots
            self._folded = step.rows, self._to_device(slots)
        fold(self._sums, self._folded[1], step.mass, step.logical, step.kept)

    def warm_up(self, tests: bool) -> None:
        """Compile the kernels of `fold` and of layers, by launches for a row that is not measured."""
        device = self._sums.device
        none, zero = (torch.full((1,), each, dtype=torch.int32, device=device) for each in (-1, 0))
        mass, ones = torch.zeros(1, self.heads, 1, device=device), torch.ones(1, device=device)
        for kept in (None, ones):
            fold(self._sums, none, mass, none[None], kept)
        for tested in [None] * self.maximise_layers + [zero] * tests:
            layer = torch.zeros(1, self.kv_heads, 1, device=device)
            take(mass, layer, zero, self.block_size, maximise=self.maximise_layers, tested=tested)

    def report(self, req_ids: Sequence[str], resident: Sequence[np.ndarray], all_reduce: AllReduce) -> Reports:
        """Return the sums of some requests, reduced over heads and ranks.

        Args:
            req_ids: measured requests.
            resident: for each request int64 [n], resident logical blocks, ascending.
            all_reduce: (float64 tensor, whether to take the maximum) -> the tensor reduced over the model's ranks.
        """
        if not req_ids:
            return {}
        slots = np.array([self._slots[req_id] for req_id in req_ids])
        lengths = [len(index) for index in resident]
        slot, block = self._to_device(np.repeat(slots, lengths)), self._to_device(np.concatenate(resident))
        mass = self._sums.transpose(0, 1)[:, slot, block].double()
        mass = self._reduction.of_heads(mass)
        self._end_windows(slots)
        mass = np.split(to_host(all_reduce(mass, self.maximise_heads) * self._reduction.scale), np.cumsum(lengths)[:-1])
        names = np.where(self._pivots[slots], "pivots", "mass").tolist()
        return {
            req_id: Report(index, {name: values}) for req_id, index, name, values in zip(req_ids, resident, names, mass)
        }

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self._sums.device)

    def _measured(self, req_ids: list[str]) -> _MeasuredRows:
        """Return the measured rows of the batch. Cached until the batch or a slot changes."""
        if self._batch is None or req_ids != self._batch.req_ids:
            slot_of = np.array([self._slots.get(req_id, -1) for req_id in req_ids], np.int64)
            rows = np.flatnonzero(slot_of >= 0)
            slots = slot_of[rows]
            by_place = self._window[slots].any() or (self._every[slots] > 1).any() or self._start[slots].any()
            decays, tests = self._decay[slots].any(), self._pivots[slots].any()
            self._batch = _MeasuredRows(list(req_ids), rows, slots, bool(by_place), bool(decays), bool(tests))
        return self._batch

    def _queries(
        self, weights: np.ndarray, tested: np.ndarray, batch: StepBatch, given: torch.Tensor | None
    ) -> Queries | None:
        """Return the queries of `tested` rows that count; None: none does. Sets their weights to 0, in `given` too."""
        row = np.repeat(np.arange(len(batch.queries)), batch.queries)
        tokens = np.flatnonzero((weights > 0) & (tested > 0)[row])
        if not len(tokens):
            return None
        weights[tokens] = 0
        row = row[tokens]
        later = self._to_device((batch.starts[row + 1] - 1 - tokens).astype(np.int32))
        at, of_row, counts = self._to_device(tokens), self._to_device(row), None
        if given is not None:
            counts = (given[at] > 0).float()
            given.index_fill_(0, at, 0.0)
        return Queries(at, of_row, batch.lens[of_row] - later, counts)

    def _last(self, weights: np.ndarray | None, query_start_loc: np.ndarray) -> torch.Tensor | None:
        """Return the queries of each row from its first query of weight > 0 to its last: int32 [R].

        None if all queries count, or if each row has one query.
        """
        if weights is None or len(weights) < len(query_start_loc):
            return None
        counting = np.append(np.flatnonzero(weights), len(weights))
        first = counting[np.searchsorted(counting[:-1], query_start_loc[:-1])]
        return self._to_device(np.maximum(query_start_loc[1:] - first, 0).astype(np.int32))

    def _weigh(
        self, measured: _MeasuredRows, batch: StepBatch, slack: np.ndarray | None
    ) -> tuple[Counting, np.ndarray, np.ndarray]:
        """Return which queries count, their weights, float32 [T], and how many count in each row, int64 [R].

        With `slack` the weights are above 0 for each query that may count.
        """
        rows, slots, verified = measured.rows, measured.slots, batch.verified
        counting = self._counting(rows, slots, batch.queries, batch.queries if verified is None else verified)
        weights, counted = counting.at_most(slack).weights(batch.seq_lens)
        if verified is not None:
            ends = (batch.seq_lens - counting.drafts - (0 if slack is None else slack))[rows]
            self._tentative[slots] = -(-ends // self.block_size) - self._holes[slots] <= self._trigger[slots]
        return counting, weights.astype(np.float32), counted

    def _counting(self, rows: np.ndarray, slots: np.ndarray, lens: np.ndarray, verified: np.ndarray) -> Counting:
        def of(values: np.ndarray, other: float) -> np.ndarray:
            spread = np.full(len(lens), other, values.dtype)
            spread[rows] = values[slots]
            return spread

        scoring = of(self._every, 1), of(self._window, 0), of(self._start, 0)
        limit = of((self._trigger + self._holes) * self.block_size, 0)
        measured = np.zeros(len(lens), np.int64)
        measured[rows] = verified[rows]
        return Counting.of(*scoring, limit, of(self._decay, 0.0), lens, verified, measured)


def _fill(weights: torch.Tensor, given: torch.Tensor | None) -> None:
    """Set the leading weights of a graph's memory, of the step's queries: float32 [T]; None: 1."""
    weights.fill_(1.0) if given is None else weights[: len(given)].copy_(given)
