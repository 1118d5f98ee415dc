"""Statistics of resident keys and values, read from the KV cache when a request reports."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch

from ..core.plan import Report, Reports
from ..policies import CACHED
from .kernels.keys import key_scores
from .needs import AT_A_TIME, OF_DIMENSION, Needs
from .parts import AllReduce
from .probes import Probe
from .reduction import Reduction
from .shape import Shape
from .step_batch import Row
from .transfer import to_host

#: (physical blocks, int64 [n]; whether to read values) -> for each layer keys, and values or None,
#: [n, Hkv, block_size, D] each.
ReadBlocks = Callable[[torch.Tensor, bool], Iterable[tuple[torch.Tensor, torch.Tensor | None]]]

#: Statistics that read values.
OF_VALUES = frozenset({"value_key_ratio", "-value_key_ratio"})


class CachedStatistics(Probe):
    """Computes `policies.CACHED` of requests that report, reduced over layers and heads.

    Args:
        read: reads the KV cache of this rank and KV group.
        heads: KV heads of each layer (see `Reduction`).
        reduce_heads, reduce_layers: "sum", "mean" or "max".
    """

    def __init__(self, read: ReadBlocks, heads: Sequence[int], reduce_heads: str, reduce_layers: str) -> None:
        self._read = read
        self._reduction = Reduction(heads, reduce_heads, reduce_layers)

    def end(
        self, asked: Mapping[str, frozenset[str]], rows: Mapping[str, Row], reports: Reports, all_reduce: AllReduce
    ) -> None:
        if any(names & CACHED for names in asked.values()):
            for req_id, report in self.report(asked, rows, all_reduce).items():
                reports.setdefault(req_id, report).statistics.update(report.statistics)

    def needs(self, shape: Shape) -> Needs:
        return Needs(between=shape.keys * (2 * shape.itemsize + OF_DIMENSION) + AT_A_TIME)

    def report(
        self,
        asked: Mapping[str, frozenset[str]],
        rows: Mapping[str, Row],
        all_reduce: AllReduce,
    ) -> Reports:
        """Compute statistics of some requests, reduced over heads and ranks.

        Args:
            asked: request -> names of statistics; names outside `CACHED` are ignored.
            rows: request -> its resident blocks.
            all_reduce: (float64 tensor, whether to take the maximum) -> the tensor reduced over the model's ranks.
        """
        # Sorted, so that all ranks have one order.
        wanted = [(req_id, name) for req_id, names in asked.items() for name in sorted(names & CACHED)]
        if not wanted:
            return {}
        scores = {req_id: self._scores(rows[req_id], asked[req_id] & CACHED) for req_id, _ in wanted}
        flat = torch.cat([scores[req_id][name] for req_id, name in wanted])
        lengths = [len(rows[req_id].logical) for req_id, _ in wanted]
        flat = to_host(all_reduce(flat, self._reduction.maximises_heads) * self._reduction.scale)
        ends = np.cumsum(lengths)
        reports = {req_id: Report(rows[req_id].logical, {}) for req_id, _ in wanted}
        for (req_id, name), values in zip(wanted, np.split(flat, ends[:-1])):
            reports[req_id].statistics[name] = values
        return reports

    def _scores(self, row: Row, names: frozenset[str]) -> dict[str, torch.Tensor]:
        """Return this rank's scores: name -> float64 [n]."""
        # A rank without heads of the KV group reports zeros.
        total: dict[str, torch.Tensor] = {}
        reduction = self._reduction
        none = torch.zeros(1, len(row.logical), dtype=torch.float64, device=row.physical.device)
        for keys, values in self._read(row.physical.long(), bool(names & OF_VALUES)):
            for name, score in key_scores(keys, values, row.length, names, row.verified).items():
                score = score.double() if reduction.is_by_head else score.double().sum(0, keepdim=True)
                before = total.get(name, score[:0])
                # Layers may differ in their numbers of heads.
                both = min(len(before), len(score))
                if reduction.maximises_layers:
                    torch.maximum(before[:both], score[:both], out=before[:both])
                else:
                    before[:both] += score[:both]
                total[name] = before if both == len(score) else torch.cat((before, score[both:]))
        return {name: reduction.of_heads(total.get(name, none)) for name in names}
