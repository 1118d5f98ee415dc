"""Host memory of a worker for evicted blocks: their bytes as the cache has them, and scores by bounds of keys."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch

from ..core.mechanisms.recall import BOUND
from ..core.plan import Copy, Report, Reports, Waiting
from ..policies import KEY_BOUND
from .cached import AllReduce
from .host_pages import FilePages, HostPages, MemoryPages
from .kernels.bounds import bound_scores, bounds_width, key_bounds
from .kernels.logits import logits_of
from .store import Store
from .transfer import to_device, to_host

#: Queries of a request, the last ones of a step, that say which host blocks are wanted.
WINDOW = 32


class HostBlocks:
    """Host blocks of one KV group.

    `pages` holds the bytes, in memory or in a file. Bounds of their keys lie where the cache is, as scores need
    them there.

    Args:
        store: the KV cache.
        blocks: of the host.
        device: where the cache is.
        bounds: kind of the bounds that are kept, `box`, `sphere` or `mean`; None: none are.
        path: of a file that holds the bytes; None: they are in memory.

    Attributes:
        pages: bytes of the host blocks.
    """

    def __init__(
        self, store: Store, blocks: int, device: torch.device, bounds: str | None, path: str | None = None
    ) -> None:
        self._store, self._device, self._kind = store, device, bounds
        pages = store.pages()
        self.pages: HostPages = (
            MemoryPages(pages, blocks, device.type == "cpu") if path is None else FilePages(path, pages, blocks)
        )
        #: Host blocks that hold nothing, because they could not be written.
        self._void: set[int] = set()
        #: Of each layer [blocks, Hkv, X] of `key_bounds`.
        self._bounds = [] if bounds is None else empty_bounds(store, blocks, device, bounds)

    def obey(self, copies: Sequence[Copy], all_reduce: AllReduce) -> list[Copy]:
        """Copy this rank's part of blocks, in this order.

        Returns:
            The copies by which no block came back on some rank. On ranks whose copy failed such a block is zero.
        """
        failed: list[Copy] = []
        for kind, run in groupby(copies, key=lambda copy: copy.kind):
            # A host block may be dropped, and written again, by one plan: what comes last stays.
            some = list({copy.number: copy for copy in run}.values())
            numbers = [copy.number for copy in some]
            if kind == "poison":
                self.pages.poison(numbers)
                for bounds in self._bounds:
                    bounds[numbers] = float("nan")
            elif kind == "fetch":
                failed += self._fetch(some)
            else:
                self._spill([copy.physical for copy in some], numbers, kind == "spill")
        return self._failed_anywhere(copies, failed, all_reduce) if self.pages.may_fail else failed

    def _failed_anywhere(self, copies: Sequence[Copy], failed: list[Copy], all_reduce: AllReduce) -> list[Copy]:
        """The copies that failed on any rank, on every rank: all ranks have to see the same blocks."""
        marks = [copy in failed for copy in copies] + [self.pages.error is not None]
        *marks, erred = all_reduce(torch.tensor(marks, dtype=torch.float64), True).tolist()
        if erred and self.pages.error is None:
            self.pages.error = "on another rank"
        return [copy for copy, mark in zip(copies, marks) if mark]

    def _spill(self, physical: list[int], numbers: list[int], bounded: bool) -> None:
        self._void.difference_update(numbers)
        self._void.update(self.pages.write(self._store.pages(), physical, numbers))
        if self._bounds and bounded:
            blocks, places = (to_device(np.array(each, np.int64), self._device) for each in (physical, numbers))
            for (keys, _), bounds in zip(self._store.read(blocks, False), self._bounds):
                bounds[places] = key_bounds(keys, kind=self._kind)

    def _fetch(self, copies: list[Copy]) -> list[Copy]:
        pages, there = self._store.pages(), [copy for copy in copies if copy.number not in self._void]
        failed = set(self.pages.read(pages, [copy.physical for copy in there], [copy.number for copy in there]))
        failed |= {copy.physical for copy in copies if copy.number in self._void}
        for page in pages if failed else ():
            page[sorted(failed)] = 0
        return [copy for copy in copies if copy.physical in failed]

    def bounds(self, layer: int, numbers: torch.Tensor) -> torch.Tensor:
        """Of some host blocks (int64 [n]) in one layer; [n, Hkv, X]."""
        return self._bounds[layer][numbers]

    def bounds_beside(self, keys: torch.Tensor, length: int, layer: int, numbers: torch.Tensor) -> torch.Tensor:
        """Of resident blocks with these keys, of so many tokens, and then of some host blocks: [n, Hkv, X]."""
        return torch.cat((key_bounds(keys, length, self._kind or "box"), self.bounds(layer, numbers)))


def empty_bounds(store: Store, blocks: int, device: torch.device, kind: str) -> list[torch.Tensor]:
    """Memory for bounds of so many blocks, of this kind: for each layer [blocks, Hkv, X]."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    shapes = [(keys.shape[1], bounds_width(kind, keys.shape[3]), keys.dtype) for keys, _ in store.read(none, False)]
    return [torch.zeros((blocks, heads, dims), dtype=dtype, device=device) for heads, dims, dtype in shapes]


class _Look:
    """One request whose blocks are scored in a step. `waiting`: its host blocks; None: resident blocks alone."""

    def __init__(self, row: Any, waiting: Waiting | None, queries: slice, device: torch.device) -> None:
        self.queries, self.length, self.settled = queries, row.length, row.settled
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
            there = None
            if look.settled is not None:
                there = torch.arange(len(keys), device=keys.device) * keys.shape[2] < look.settled
            if look.numbers is None:
                bounds = key_bounds(keys, look.length, settled=look.settled)
            else:  # on no server whose lengths the device alone knows
                bounds = self._host.bounds_beside(keys, look.length, place, look.numbers)
            look.scores += bound_scores(query[look.queries], bounds, layer.impl.scale, **logits_of(layer), there=there)

    def report(self, reports: Reports, all_reduce: AllReduce) -> None:
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
