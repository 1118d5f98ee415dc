"""The index of keys, an entry for each block, wherever the block lives: layers choose blocks by it.

It is their numbers at two bits each (`kernels.codes`), signs (`kernels.signs`), or a box of them (Quest: Tang et al.,
ICML 2024, arXiv:2406.10774).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from .attention.fp8 import scaled
from .kernels.bounds import key_boxes
from .kernels.codes import pack_keys, store_codes
from .kernels.reach import SCRATCH
from .kernels.signs import key_signs, store_signs
from .probes import LayerCall
from .shape import Shape
from .store import Store
from .transfer import to_device

#: Two bytes of which numbers of any index are NaN: the units of codes, centres and boxes.
NAN = 0x7FFF


class Kind(NamedTuple):
    """A kind of index.

    Attributes:
        of_keys: [n, Hkv, block_size, D] -> [n, Hkv, X].
        put: writes what stands for keys into an index: (index, blocks, keys).
    """

    of_keys: Callable[[torch.Tensor], torch.Tensor]
    put: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def _put_boxes(index: torch.Tensor, blocks: torch.Tensor, keys: torch.Tensor) -> None:
    index[blocks] = key_boxes(keys)


#: Kinds by the value of the field `index`.
KINDS = {
    "bits": Kind(pack_keys, store_codes),
    "signs": Kind(key_signs, store_signs),
    "box": Kind(key_boxes, _put_boxes),
}


class BlockIndex:
    """The index of all blocks of one KV group: those of the pool, and after them those of the host.

    Args:
        kind: a key of `KINDS`.
        store: KV cache of the group.
        shape: sizes of the group.

    Attributes:
        of_layers: for each layer [blocks, Hkv, X].
    """

    def __init__(self, kind: str, store: Store, shape: Shape) -> None:
        self._of_keys, self._put = KINDS[kind]
        self._store, self._shape, self._device = store, shape, shape.device
        self.of_layers: list[torch.Tensor] = []
        #: Blocks of the pool, after which come those of the host.
        self._pool = 0
        #: Where graphs are replayed int64 [blocks of the pool], of which the first `_late_count` wait for their index,
        #: in any order.
        self._late, self._late_count = torch.empty(0, dtype=torch.int64), 0

    @property
    def kept_bytes(self) -> int:
        """Bytes on the device."""
        return self._late.nbytes + sum(index.nbytes for index in self.of_layers)

    @property
    def is_late(self) -> bool:
        """Whether blocks may wait for their index."""
        return len(self._late) > 0

    def bytes_beside(self, keys: int, dtype: torch.dtype) -> int:
        """Return the bytes of the index of a block, in a cache of `dtype`.

        Args:
            keys: bytes of its keys if they are as wide as values. Wider ones take up to twice as many.
        """
        elements = sum(self._shape.of_layers) * self._shape.block_size * self._shape.head_size
        keys = max(keys, min(elements * dtype.itemsize, 2 * keys))
        head = torch.zeros(1, 1, self._shape.block_size, self._shape.head_size, dtype=dtype)
        return keys * self._of_keys(scaled(head, 1.0)).nbytes // head.nbytes

    def allocate(self, pool: int, host: int, late: bool) -> None:
        """Allocate the index of so many blocks of the pool and of the host; `late`: the pool's may wait for theirs."""
        self._pool = pool
        none = torch.zeros(0, dtype=torch.int64, device=self._device)
        empty = [self._of_keys(keys) for keys, _ in self._store.read(none, False)]
        self.of_layers = [each.new_zeros((pool + host, *each.shape[1:])) for each in empty]
        if late:
            self._late = torch.empty(pool, dtype=torch.int64, device=self._device)

    def fill(self, call: LayerCall, filled: torch.Tensor) -> None:
        """Compute the index of blocks that the step has filled, in one layer."""
        keys, _ = call.ops.read(call.layer, call.kv_cache, filled, False)
        self._put(self.of_layers[call.place], filled, keys)

    def note(self, filled: torch.Tensor | None) -> None:
        """Have blocks wait for their index, which is computed when a layer may ask for it."""
        if filled is None:
            return
        count, self._late_count = self._late_count, self._late_count + len(filled)
        if self._late_count <= len(self._late):
            self._late[count : self._late_count] = filled
        else:
            torch.arange(len(self._late), out=self._late)
            self._late_count = len(self._late)

    def catch_up(self) -> None:
        """Compute the index of blocks that wait for it, layer by layer, as many at once as `SCRATCH` has room for."""
        if not self._late_count:
            return
        late, self._late_count = self._late[: self._late_count], 0
        at_once = max(SCRATCH // (4 * max(page[0].numel() for page in self._store.pages())), 1)
        for some in late.split(at_once):
            for index, (keys, _) in zip(self.of_layers, self._store.read(some, False)):
                self._put(index, some, keys)

    def copy(self, kind: str, physical: Sequence[int], numbers: Sequence[int]) -> None:
        """Copy what stands for blocks that are copied between device and host, as `core.host_pool.Copy` has them."""
        there, here = (to_device(np.array(each, np.int64), self._device) for each in (physical, numbers))
        here += self._pool
        for index in self.of_layers:
            if kind == "poison":
                index.view(torch.int16)[here] = NAN
            elif kind == "fetch":
                index[there] = index[here]
            else:
                index[here] = index[there]
