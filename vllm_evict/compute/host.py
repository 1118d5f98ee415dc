"""Host memory of a worker for evicted blocks: their bytes as the cache has them, and bounds of their keys."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch

from ..core.mechanisms.recall import BOUND
from ..core.plan import Copy, Report, Reports, Waiting
from .kernels.bounds import bound_scores, key_bounds
from .tokens import Store
from .transfer import to_device, to_host

#: Queries of a request, the last ones of a step, that say which host blocks are wanted.
WINDOW = 32


class HostBlocks:
    """Host blocks of one KV group.

    Bytes lie on the host, pinned where there is a device. Bounds of their keys lie where the cache is, as scores need
    them there.

    Args:
        store: the KV cache.
        blocks: of the host.
        device: where the cache is.
        bounds: whether bounds are kept.
    """

    def __init__(self, store: Store, blocks: int, device: torch.device, bounds: bool) -> None:
        self._store, self._device, self._on_cpu = store, device, device.type == "cpu"
        self._pages = [
            torch.empty((blocks, *page.shape[1:]), dtype=page.dtype, pin_memory=not self._on_cpu)
            for page in store.pages()
        ]
        #: Of each layer [blocks, Hkv, D], the least and the largest keys.
        self._low: list[torch.Tensor] = []
        self._high: list[torch.Tensor] = []
        none = torch.zeros(0, dtype=torch.int64, device=device)
        for keys, _ in store.read(none, False) if bounds else ():
            shape = blocks, keys.shape[1], keys.shape[3]
            self._low.append(torch.empty(shape, dtype=keys.dtype, device=device))
            self._high.append(torch.empty(shape, dtype=keys.dtype, device=device))

    def obey(self, copies: Sequence[Copy]) -> None:
        """Copy blocks, in this order."""
        for kind, run in groupby(copies, key=lambda copy: copy.kind):
            some = list(run)
            numbers = [copy.number for copy in some]
            if kind == "poison":
                for page in self._pages:
                    (page.view(torch.float8_e4m3fn) if page.dtype == torch.uint8 else page)[numbers] = float("nan")
                for bounds in (*self._low, *self._high):
                    bounds[numbers] = float("nan")
            elif kind == "fetch":
                self._fetch([copy.physical for copy in some], numbers)
            else:
                self._spill([copy.physical for copy in some], numbers)

    def _spill(self, physical: list[int], numbers: list[int]) -> None:
        for page, own in zip(self._store.pages(), self._pages):
            if self._on_cpu:
                own[numbers] = page[physical]
                continue
            for block, number in zip(physical, numbers):
                own[number].copy_(page[block], non_blocking=True)
        if self._low:
            blocks, places = (to_device(np.array(each, np.int64), self._device) for each in (physical, numbers))
            for (keys, _), low, high in zip(self._store.read(blocks, False), self._low, self._high):
                low[places], high[places] = key_bounds(keys)

    def _fetch(self, physical: list[int], numbers: list[int]) -> None:
        for page, own in zip(self._store.pages(), self._pages):
            if self._on_cpu:
                page[physical] = own[numbers]
                continue
            for block, number in zip(physical, numbers):
                page[block].copy_(own[number], non_blocking=True)

    def bounds(self, layer: int, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of some host blocks (int64 [n]) in one layer; twice [n, Hkv, D]."""
        return self._low[layer][numbers], self._high[layer][numbers]


class _Look:
    """One request whose host blocks are scored in a step."""

    def __init__(self, row: Any, waiting: Waiting, queries: slice, device: torch.device) -> None:
        self.queries, self.length = queries, row.length
        self.resident = row.physical.long()
        self.numbers = to_device(np.array(waiting.numbers, np.int64), device)
        index = np.concatenate((row.logical, np.array(waiting.logical, np.int64)))
        self._order = np.argsort(index)
        self.index = index[self._order]
        self.scores = torch.zeros(len(index), device=device)

    def ordered(self, scores: np.ndarray) -> np.ndarray:
        """Scores of resident blocks and then of host blocks, in the order of `index`."""
        return scores[self._order]


class BoundStep:
    """Scores of one step by bounds of keys, over all layers of a KV group: resident blocks and host blocks alike.

    Args:
        host: host blocks of the group.
        waiting: request -> its host blocks.
        rows: request -> its resident blocks (`cached.Row`).
        places: request -> row of the batch.
        starts: int32 [R + 1], first query of each row.
        device: where the cache is.
    """

    def __init__(
        self,
        host: HostBlocks,
        waiting: Mapping[str, Waiting],
        rows: Mapping[str, Any],
        places: Mapping[str, int],
        starts: np.ndarray,
        device: torch.device,
    ) -> None:
        self._host, self._looks = host, {}
        for req_id, blocks in waiting.items():
            first, end = int(starts[places[req_id]]), int(starts[places[req_id] + 1])
            queries = slice(max(first, end - WINDOW), end)
            self._looks[req_id] = _Look(rows[req_id], blocks, queries, device)

    def add(self, ops: Any, layer: Any, place: int, query: torch.Tensor, kv_cache: Any) -> None:
        """Take in one layer, the `place`-th, whose queries are [T, H, D]."""
        for look in self._looks.values():
            keys, _ = ops.read(layer, kv_cache, look.resident, False)
            bounds = zip(key_bounds(keys, look.length), self._host.bounds(place, look.numbers))
            low, high = (torch.cat(each) for each in bounds)
            look.scores += bound_scores(query[look.queries], low, high, layer.impl.scale)

    def report(self, reports: Reports, all_reduce: Callable[[torch.Tensor, bool], torch.Tensor]) -> None:
        """Put the scores into reports, over all of a request's blocks; other statistics of host blocks are 0."""
        if not self._looks:
            return
        req_ids = sorted(self._looks)  # ranks have to agree on what is where
        flat = torch.cat([self._looks[req_id].scores for req_id in req_ids]).double()
        flat = to_host(all_reduce(flat, False))
        ends = np.cumsum([len(self._looks[req_id].index) for req_id in req_ids])
        for req_id, scores in zip(req_ids, np.split(flat, ends[:-1])):
            look, before = self._looks[req_id], reports.get(req_id)
            statistics = {BOUND: look.ordered(scores)}
            for name, values in before.statistics.items() if before is not None else ():
                statistics[name] = np.zeros(len(look.index))
                statistics[name][look.index.searchsorted(before.index)] = values
            reports[req_id] = Report(look.index, statistics)
