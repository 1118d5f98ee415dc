"""Probes of what the last queries of a step may attend to, by bounds of keys."""

from collections.abc import Mapping, Set

import numpy as np
import torch

from ..core.mechanisms.recall import BOUND
from ..core.plan import Report, Reports, Waiting
from ..policies import KEY_BOUND, QUERIED
from .holes import Start
from .kernels.bounds import bound_scores, key_bounds
from .kernels.logits import logits_of
from .needs import Needs, Sizes
from .offload import Offload
from .parts import AllReduce
from .probes import LayerCall, Probe, StepProbe
from .step_batch import Row, StepBatch
from .transfer import to_device, to_host

#: Queries of a request, the last ones of a step, that say which host blocks are wanted.
WINDOW = 32


class _Look:
    """One request whose resident blocks are scored in a step.

    Attributes:
        index: int64 [n], logical blocks that are scored, ascending.
    """

    def __init__(self, row: Row, queries: slice, device: torch.device) -> None:
        self.queries, self.length, self.verified = queries, row.length, row.verified
        self.resident, self.index = row.physical.long(), row.logical
        self.scores = torch.zeros(len(self.index), device=device)

    def bounds(self, keys: torch.Tensor, place: int) -> torch.Tensor:
        """Return bounds of the scored blocks in one layer, from the keys of the resident ones: [n, Hkv, X]."""
        return key_bounds(keys, self.length, verified=self.verified)

    def ordered(self, scores: np.ndarray) -> np.ndarray:
        """Return scores in the order of `index`."""
        return scores


class _HostLook(_Look):
    """One request whose resident blocks and host blocks are scored alike."""

    def __init__(self, row: Row, queries: slice, device: torch.device, offload: Offload, waiting: Waiting) -> None:
        index = np.concatenate((row.logical, np.array(waiting.logical, np.int64)))
        self._order = np.argsort(index)
        super().__init__(row, queries, device)
        self.index = index[self._order]
        self.scores = torch.zeros(len(index), device=device)
        self._offload, self._numbers = offload, to_device(np.array(waiting.numbers, np.int64), device)

    def bounds(self, keys: torch.Tensor, place: int) -> torch.Tensor:
        """Return bounds of resident blocks, then those of host blocks. Such servers know lengths on the host."""
        return self._offload.blocks.bounds_beside(keys, self.length, place, self._numbers)

    def ordered(self, scores: np.ndarray) -> np.ndarray:
        return scores[self._order]


class BoundStep(StepProbe):
    """Scores of one step by bounds of keys, over all layers of a KV group.

    Args:
        looks: request -> the blocks that are scored, in an order that all ranks have.
    """

    def __init__(self, looks: Mapping[str, _Look]) -> None:
        self._looks = looks

    def add(self, call: LayerCall) -> None:
        layer = call.layer
        for look in self._looks.values():
            keys, _ = call.ops.read(layer, call.kv_cache, look.resident, False)
            there = None
            if look.verified is not None:
                there = torch.arange(len(keys), device=keys.device) * keys.shape[2] < look.verified
            bounds = look.bounds(keys, call.place)
            own = call.query[look.queries]
            look.scores += bound_scores(own, bounds, layer.impl.scale, **logits_of(layer), there=there)

    def report(self, name: str, reports: Reports, all_reduce: AllReduce) -> None:
        """Put the scores into reports, over all scored blocks; other statistics of host blocks are 0."""
        flat = torch.cat([look.scores for look in self._looks.values()]).double()
        flat = to_host(all_reduce(flat, False))
        ends = np.cumsum([len(look.index) for look in self._looks.values()])
        for (req_id, look), scores in zip(self._looks.items(), np.split(flat, ends[:-1])):
            statistics = {name: look.ordered(scores)}
            if (before := reports.get(req_id)) is not None:
                for other, values in before.statistics.items():
                    statistics[other] = np.zeros(len(look.index))
                    statistics[other][look.index.searchsorted(before.index)] = values
            reports[req_id] = Report(look.index, statistics)


class LastQuery(Probe):
    """Scores the resident blocks of requests that report `KEY_BOUND`, by their last query."""

    name = KEY_BOUND

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asked = False
        self._step: BoundStep | None = None

    def begin(self, start: Start) -> None:
        report = start.plan.report
        self._asked = bool(report) and any(names & QUERIED for names in report.values())

    def fits_graph(self, requests: Set[str]) -> bool:
        return not self._asked

    def step(self, batch: StepBatch) -> BoundStep | None:
        if self._asked:
            places = {req_id: row for row, req_id in enumerate(batch.req_ids)}
            made = {req_id: self._look(batch, req_id, places[req_id]) for req_id in sorted(batch.rows)}
            looks = {req_id: look for req_id, look in made.items() if look is not None}
            self._step = BoundStep(looks) if looks else None
        return self._step

    def _look(self, batch: StepBatch, req_id: str, place: int) -> _Look | None:
        """Return what is scored of a request in row `place`; None: nothing."""
        if KEY_BOUND not in batch.plan.report.get(req_id, ()):
            return None
        end = int(batch.ends[place])
        return _Look(batch.rows[req_id], slice(end - 1, end), self._device)

    def end(
        self, asked: Mapping[str, frozenset[str]], rows: Mapping[str, Row], reports: Reports, all_reduce: AllReduce
    ) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.report(self.name, reports, all_reduce)

    def needs(self, sizes: Sizes) -> Needs:
        return Needs(step=2 * sizes.keys * sizes.itemsize // sizes.block_size + sizes.keys * sizes.itemsize)


class Looks(LastQuery):
    """Scores the resident blocks and the host blocks of requests that wait for these, by the last `WINDOW` queries."""

    name = BOUND

    def __init__(self, offload: Offload, device: torch.device) -> None:
        super().__init__(device)
        self._offload = offload

    def begin(self, start: Start) -> None:
        self._asked = bool(start.plan.waiting)

    def _look(self, batch: StepBatch, req_id: str, place: int) -> _Look | None:
        if (waiting := batch.plan.waiting.get(req_id)) is None:
            return None
        first, end = int(batch.starts[place]), int(batch.ends[place])
        queries = slice(max(first, end - WINDOW), end)
        return _HostLook(batch.rows[req_id], queries, self._device, self._offload, waiting)

    def needs(self, sizes: Sizes) -> Needs:
        return Needs()
