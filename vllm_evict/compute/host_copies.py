"""Host memory of a worker, with blocks that layers read there. A block has the same bytes as in the cache."""

from collections.abc import Sequence

import numpy as np
import torch

from ..config import KVPolicyError
from ..core.host_pool import Copy, runs
from .index import BlockIndex
from .kernels.reach import copy_blocks
from .parts import AllReduce, Capacity, Mover
from .pinned import pinned
from .store import Store
from .transfer import to_device


class HostPages:
    """Bytes of host blocks, in all layers of a KV group; pinned where there is a device.

    Args:
        pages: each layer's cache, blocks first.
        blocks: of the host.
        device: device of the cache.

    Attributes:
        own: for each layer [blocks, ...], like the blocks of its cache.

    Raises:
        KVPolicyError: the machine does not give so much memory, or does not pin it.
    """

    def __init__(self, pages: Sequence[torch.Tensor], blocks: int, device: torch.device) -> None:
        self._device = device
        allocate = torch.empty if device.type == "cpu" else pinned
        try:
            self.own = [allocate((blocks, *page.shape[1:]), dtype=page.dtype) for page in pages]
        except (RuntimeError, MemoryError) as error:
            size = sum(page[0].nbytes for page in pages)
            raise KVPolicyError(
                f"host: the machine has not {blocks} blocks of {size} bytes left; expected {blocks * size} bytes "
                "beside what it runs; set host to less"
            ) from error

    def write(self, pages: Sequence[torch.Tensor], physical: list[int], numbers: list[int]) -> None:
        """Copy blocks `physical` of the device to host blocks `numbers`."""
        self._copy(self.own, numbers, pages, physical)

    def read(self, pages: Sequence[torch.Tensor], physical: list[int], numbers: list[int]) -> None:
        """Copy host blocks `numbers` to blocks `physical` of the device."""
        self._copy(pages, physical, self.own, numbers)

    def _copy(
        self, targets: Sequence[torch.Tensor], to: list[int], sources: Sequence[torch.Tensor], of: list[int]
    ) -> None:
        there, here = (to_device(np.array(each, np.int32), self._device) for each in (to, of))
        for target, source in zip(targets, sources):
            copy_blocks(target, source, there, here)

    def poison(self, numbers: list[int]) -> None:
        """Fill host blocks with NaN (tests)."""
        for page in self.own:
            _floats(page)[numbers] = float("nan")


def _floats(page: torch.Tensor) -> torch.Tensor:
    """Return a page in a dtype that has NaN."""
    return page.view(torch.float8_e4m3fn) if page.dtype == torch.uint8 else page


class HostCopies(Mover):
    """Copies blocks of one KV group between the device and the host.

    Args:
        store: KV cache of the group.
        index: of its blocks, which goes with them.
        device: device of the cache.

    Attributes:
        blocks: host blocks; they are there from `allocate` on.
    """

    kind = Copy
    blocks: HostPages

    def __init__(self, store: Store, index: BlockIndex, device: torch.device) -> None:
        self._store, self._index, self._device = store, index, device

    def allocate(self, capacity: Capacity) -> None:
        self.blocks = HostPages(self._store.pages(), capacity.host_blocks, self._device)

    def obey(self, orders: Sequence[Copy], all_reduce: AllReduce) -> None:
        self._index.catch_up()
        for kind, some in runs(orders):
            physical, numbers = [copy.physical for copy in some], [copy.number for copy in some]
            if kind == "poison":
                self.blocks.poison(numbers)
            elif kind == "fetch":
                self.blocks.read(self._store.pages(), physical, numbers)
            else:
                self.blocks.write(self._store.pages(), physical, numbers)
            self._index.copy(kind, physical, numbers)
