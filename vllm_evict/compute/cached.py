"""Statistics of what a request's blocks hold, read from the KV cache when it has to report."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from ..core.plan import Report, Reports
from ..policies import CACHED
from .kernels.keys import key_scores
from .transfer import to_device, to_host

#: (physical blocks (int64 [n]), whether values are wanted) -> keys, and values or None, of each layer,
#: [n, Hkv, block_size, D] each.
ReadBlocks = Callable[[torch.Tensor, bool], Iterable[tuple[torch.Tensor, torch.Tensor | None]]]

#: Statistics that look at values.
OF_VALUES = frozenset({"value_key_ratio"})

#: Statistics of which less speaks for a block. A maximum over heads or layers takes the one that speaks most for it.
LESS_IS_MORE = frozenset({"key_norm", "redundancy"})


class Row(NamedTuple):
    """Resident blocks of one request: logical (int64 [n], ascending) and physical (int32 [n]); tokens in them."""

    logical: np.ndarray
    physical: torch.Tensor
    length: int


class CachedStatistics:
    """Computes `policies.CACHED` for requests that report, all layers and heads reduced.

    Args:
        read: the KV cache of this rank and KV group.
        kv_heads, layers: of this rank and KV group.
        reduce_heads, reduce_layers: "sum", "mean" or "max".
    """

    def __init__(self, read: ReadBlocks, kv_heads: int, layers: int, reduce_heads: str, reduce_layers: str) -> None:
        self._read = read
        self._maximise_heads, self._maximise_layers = reduce_heads == "max", reduce_layers == "max"
        self._scale = 1.0
        if reduce_heads == "mean":
            self._scale /= kv_heads
        if reduce_layers == "mean":
            self._scale /= layers

    def report(
        self,
        asked: Mapping[str, frozenset[str]],
        rows: Mapping[str, Row],
        all_reduce: Callable[[torch.Tensor, bool], torch.Tensor],
    ) -> Reports:
        """Statistics of some requests, heads and ranks reduced.

        Args:
            asked: request -> statistics; those that are not of `CACHED` are left to others.
            rows: of these requests.
            all_reduce: (float64 tensor, whether to take the maximum) -> the same over tensor-parallel ranks.
        """
        # Sorted: ranks have to agree on what is where.
        wanted = [(req_id, name) for req_id, names in asked.items() for name in sorted(names & CACHED)]
        if not wanted:
            return {}
        scores = {req_id: self._scores(rows[req_id], asked[req_id] & CACHED) for req_id, _ in wanted}
        flat = torch.cat([scores[req_id][name] for req_id, name in wanted])
        lengths = [len(rows[req_id].logical) for req_id, _ in wanted]
        factors = [-self._scale if name in LESS_IS_MORE else self._scale for _, name in wanted]
        flat = all_reduce(flat, self._maximise_heads)
        flat = to_host(flat * to_device(np.repeat(factors, lengths), flat.device))
        ends = np.cumsum(lengths)
        reports = {req_id: Report(rows[req_id].logical, {}) for req_id, _ in wanted}
        for (req_id, name), values in zip(wanted, np.split(flat, ends[:-1])):
            reports[req_id].statistics[name] = values
        return reports

    def _scores(self, row: Row, names: frozenset[str]) -> dict[str, torch.Tensor]:
        """This rank's scores, the more the better. name -> float64 [n]."""
        # A rank may have no heads of a KV group.
        total: dict[str, torch.Tensor] = {}
        none = torch.zeros(1, len(row.logical), dtype=torch.float64, device=row.physical.device)
        for keys, values in self._read(row.physical.long(), bool(names & OF_VALUES)):
            for name, score in key_scores(keys, values, row.length, names).items():
                score = -score.double() if name in LESS_IS_MORE else score.double()
                if not (self._maximise_heads or self._maximise_layers):
                    score = score.sum(0, keepdim=True)  # layers may differ in heads
                if name not in total:
                    total[name] = score
                elif self._maximise_layers:
                    torch.maximum(total[name], score, out=total[name])
                else:
                    total[name] += score
        scores = {name: total.get(name, none) for name in names}
        return {name: score.amax(0) if self._maximise_heads else score.sum(0) for name, score in scores.items()}
