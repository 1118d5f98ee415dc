"""Host memory of a worker for evicted blocks: their bytes as the cache has them, and bounds of their keys."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch

from ..core.offload import Copy
from ..core.plan import GroupPlan, Trouble
from .holes import Holes, Start
from .kernels.bounds import bounds_width, key_bounds
from .offload_pages import FilePages, MemoryPages, OffloadPages
from .parts import AllReduce, Mover, Room
from .source import Source
from .store import Store
from .transfer import to_device


class OffloadedBlocks:
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
        self._store, self._device, self._kind = store, device, bounds or "box"
        pages = store.pages()
        self.pages: OffloadPages = (
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
        """Return the copies that failed on any rank. All ranks have to see the same blocks."""
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

    def pages_of(self, layer: int) -> torch.Tensor:
        """Return the pages of all host blocks in one layer, which are in memory: [blocks, ...]."""
        assert isinstance(self.pages, MemoryPages)
        return self.pages.own[layer]

    def bounds(self, layer: int, numbers: torch.Tensor) -> torch.Tensor:
        """Return the bounds of host blocks `numbers` (int64 [n]) in one layer: [n, Hkv, X]."""
        return self._bounds[layer][numbers]

    def bounds_beside(self, keys: torch.Tensor, length: int, layer: int, numbers: torch.Tensor) -> torch.Tensor:
        """Return bounds of resident blocks with `length` tokens of keys, then those of host blocks: [n, Hkv, X]."""
        return torch.cat((key_bounds(keys, length, self._kind), self.bounds(layer, numbers)))


def empty_bounds(store: Store, blocks: int, device: torch.device, kind: str) -> list[torch.Tensor]:
    """Allocate the bounds of `blocks` blocks: for each layer [blocks, Hkv, X]."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    shapes = [(keys.shape[1], bounds_width(kind, keys.shape[3]), keys.dtype) for keys, _ in store.read(none, False)]
    return [torch.zeros((blocks, heads, dims), dtype=dtype, device=device) for heads, dims, dtype in shapes]


class Offload(Mover):
    """Copies blocks of one KV group between the device and the host.

    Args:
        store: KV cache of the group.
        holes: of the group; a block that does not come back stays a hole.
        source: of the group; it hears of blocks that come back.
        bounds: see `OffloadedBlocks`.
        device: device of the cache.

    Attributes:
        blocks: host blocks; they are there from `allocate` on.
    """

    kind = Copy
    blocks: OffloadedBlocks

    def __init__(self, store: Store, holes: Holes, source: Source, bounds: str | None, device: torch.device) -> None:
        self._store, self._holes, self._source = store, holes, source
        self._kind, self._device = bounds, device
        self._plan = GroupPlan()

    def allocate(self, room: Room) -> None:
        self.blocks = OffloadedBlocks(self._store, room.host_blocks, self._device, self._kind, room.path)

    def begin(self, start: Start) -> None:
        self._plan = start.plan

    def obey(self, orders: Sequence[Copy], all_reduce: AllReduce) -> Trouble | None:
        failed = self.blocks.obey(orders, all_reduce)
        missing = self._holes.withhold([(copy.req_id, copy.physical) for copy in failed], self._plan)
        why, self.blocks.pages.error = self.blocks.pages.error, None
        self._source.copied(orders)
        return None if why is None and not missing else Trouble(why or "", missing)
