"""Host memory of a worker for evicted blocks: their bytes as the cache has them, and scores by bounds of keys."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch

from ..core.mechanisms.recall import BOUND
from ..core.plan import Copy, Report, Reports, Waiting
from ..policies import KEY_BOUND
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
        #: Of each layer [blocks, Hkv, 2 * D] of `key_bounds`.
        self._bounds = empty_bounds(store, blocks, device) if bounds else []

    def obey(self, copies: Sequence[Copy]) -> None:
        """Copy blocks, in this order."""
        for kind, run in groupby(copies, key=lambda copy: copy.kind):
            some = list(run)
            numbers = [copy.number for copy in some]
            if kind == "poison":
                for page in self._pages:
                    (page.view(torch.float8_e4m3fn) if page.dtype == torch.uint8 else page)[numbers] = float("nan")
                for bounds in self._bounds:
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
        if self._bounds:
            blocks, places = (to_device(np.array(each, np.int64), self._device) for each in (physical, numbers))
            for (keys, _), bounds in zip(self._store.read(blocks, False), self._bounds):
                bounds[places] = key_bounds(keys)

    def _fetch(self, physical: list[int], numbers: list[int]) -> None:
        for page, own in zip(self._store.pages(), self._pages):
            if self._on_cpu:
                page[physical] = own[numbers]
                continue
            for block, number in zip(physical, numbers):
                page[block].copy_(own[number], non_blocking=True)

    def bounds(self, layer: int, numbers: torch.Tensor) -> torch.Tensor:
        """Of some host blocks (int64 [n]) in one layer; [n, Hkv, 2 * D]."""
        return self._bounds[layer][numbers]


def empty_bounds(store: Store, blocks: int, device: torch.device) -> list[torch.Tensor]:
    """Memory for bounds of so many blocks: for each layer [blocks, Hkv, 2 * D]."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    shapes = [(keys.shape[1], 2 * keys.shape[3], keys.dtype) for keys, _ in store.read(none, False)]
    return [torch.zeros((blocks, heads, dims), dtype=dtype, device=device) for heads, dims, dtype in shapes]


class _Look:
    """One request whose blocks are scored in a step. `waiting`: its host blocks; None: resident blocks alone."""

    def __init__(self, row: Any, waiting: Waiting | None, queries: slice, device: torch.device) -> None:
        self.queries, self.length = queries, row.length
        self.resident = row.physical.long()
        self.numbers = None if waiting is None else to_device(np.array(waiting.numbers, np.int64), device)
        index = np.concatenate((row.logical, np.array(() if waiting is None else waiting.logical, np.int64)))
        self._order = np.argsort(index)
        self.index = index[self._order]
        self.scores = torch.zeros(len(index), device=device)

    def ordered(self, scores: np.ndarray) -> np.ndarray:
        """Scores of resident blocks and then of host blocks, in the order of `index`."""
        return scores[self._order]


class BoundStep:
    """Scores of one step by bounds of keys, over all layers of a KV group.

    The last `WINDOW` queries of a request that waits for host blocks score its resident blocks and its host blocks
    alike. The last query of a request that reports `KEY_BOUND` scores its resident blocks.

    Args:
        host: host blocks of the group; None: no request has host blocks.
        waiting: request -> its host blocks.
        asked: request -> statistics that it reports.
        rows: request -> its resident blocks (`cached.Row`).
        places: request -> row of the batch.
        starts: int32 [R], first query of each row.
        ends: [R], end of each row's queries of settled tokens; drafts follow them.
        device: where the cache is.
    """

    def __init__(
        self,
        host: HostBlocks | None,
        waiting: Mapping[str, Waiting],
        asked: Mapping[str, frozenset[str]],
        rows: Mapping[str, Any],
        places: Mapping[str, int],
        starts: np.ndarray,
        ends: np.ndarray,
        device: torch.device,
    ) -> None:
        self._host = host
        self._looks: dict[tuple[str, str], _Look] = {}
        for req_id in sorted(rows):  # ranks have to agree on what is where
            first, end = int(starts[places[req_id]]), int(ends[places[req_id]])
            if KEY_BOUND in asked.get(req_id, ()):
                self._looks[req_id, KEY_BOUND] = _Look(rows[req_id], None, slice(end - 1, end), device)
            if req_id in waiting:
                queries = slice(max(first, end - WINDOW), end)
                self._looks[req_id, BOUND] = _Look(rows[req_id], waiting[req_id], queries, device)

    def add(self, ops: Any, layer: Any, place: int, query: torch.Tensor, kv_cache: Any) -> None:
        """Take in one layer, the `place`-th, whose queries are [T, H, D]."""
        for look in self._looks.values():
            keys, _ = ops.read(layer, kv_cache, look.resident, False)
            bounds = key_bounds(keys, look.length)
            if look.numbers is not None:
                bounds = torch.cat((bounds, self._host.bounds(place, look.numbers)))
            look.scores += bound_scores(query[look.queries], bounds, layer.impl.scale)

    def report(self, reports: Reports, all_reduce: Callable[[torch.Tensor, bool], torch.Tensor]) -> None:
        """Put the scores into reports, over all of a request's blocks; other statistics of host blocks are 0."""
        if not self._looks:
            return
        flat = torch.cat([look.scores for look in self._looks.values()]).double()
        flat = to_host(all_reduce(flat, False))
        ends = np.cumsum([len(look.index) for look in self._looks.values()])
        for ((req_id, name), look), scores in zip(self._looks.items(), np.split(flat, ends[:-1])):
            before, statistics = reports.get(req_id), {name: look.ordered(scores)}
            for other, values in before.statistics.items() if before is not None else ():
                statistics[other] = np.zeros(len(look.index))
                statistics[other][look.index.searchsorted(before.index)] = values
            reports[req_id] = Report(look.index, statistics)
