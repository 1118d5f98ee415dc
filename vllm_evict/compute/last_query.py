"""A probe that bounds the attention of a step's last query to each block, by boxes of keys (`policies.keybound`)."""

from collections.abc import Mapping, Set

import numpy as np
import torch

from ..core.plan import Report, Reports
from ..policies import KEY_BOUND, QUERIED
from .holes import Start
from .kernels.bounds import bound_scores, key_bounds
from .kernels.logits import logits_of
from .needs import Needs
from .parts import AllReduce
from .probes import LayerCall, Probe, StepProbe
from .shape import Shape
from .step_batch import Row, StepBatch
from .transfer import to_host


class _Asked:
    """One request whose resident blocks are scored in a step, by the query of row `query`."""

    def __init__(self, row: Row, query: int, device: torch.device) -> None:
        self.query, self.length, self.verified = query, row.length, row.verified
        self.resident, self.index = row.physical.long(), row.logical
        self.scores = torch.zeros(len(self.index), device=device)


class BoundStep(StepProbe):
    """Scores of one step by bounds of keys, over all layers of a KV group.

    Args:
        asked: request -> the blocks that are scored, in an order that all ranks have.
    """

    def __init__(self, asked: Mapping[str, _Asked]) -> None:
        self._asked = asked

    def add(self, call: LayerCall) -> None:
        layer = call.layer
        for asked in self._asked.values():
            keys, _ = call.ops.read(layer, call.kv_cache, asked.resident, False)
            there = None
            if asked.verified is not None:
                there = torch.arange(len(keys), device=keys.device) * keys.shape[2] < asked.verified
            bounds = key_bounds(keys, asked.length, verified=asked.verified)
            own = call.query[asked.query]
            asked.scores += bound_scores(own, bounds, layer.impl.scale, **logits_of(layer), there=there)

    def report(self, reports: Reports, all_reduce: AllReduce) -> None:
        """Put the scores into reports."""
        flat = torch.cat([asked.scores for asked in self._asked.values()]).double()
        flat = to_host(all_reduce(flat, False))
        ends = np.cumsum([len(asked.index) for asked in self._asked.values()])
        for (req_id, asked), scores in zip(self._asked.items(), np.split(flat, ends[:-1])):
            before = reports[req_id].statistics if req_id in reports else {}
            reports[req_id] = Report(asked.index, {**before, KEY_BOUND: scores})


class LastQuery(Probe):
    """Scores the resident blocks of requests that report `KEY_BOUND`, by their last query."""

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
            asked = {
                req_id: _Asked(batch.rows[req_id], int(batch.ends[places[req_id]]) - 1, self._device)
                for req_id in sorted(batch.rows)
                if KEY_BOUND in batch.plan.report.get(req_id, ())
            }
            self._step = BoundStep(asked) if asked else None
        return self._step

    def end(
        self, asked: Mapping[str, frozenset[str]], rows: Mapping[str, Row], reports: Reports, all_reduce: AllReduce
    ) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.report(reports, all_reduce)

    def needs(self, shape: Shape) -> Needs:
        return Needs(step=2 * shape.keys * shape.itemsize // shape.block_size + shape.keys * shape.itemsize)
