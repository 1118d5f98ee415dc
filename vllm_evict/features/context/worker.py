"""Keeps computed keys of rotated blocks on the host, so that rotated keys are rounded once, however often they move."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch

from ...compute.holes import Holes, Start
from ...compute.kernels.rotate import Rotation
from ...compute.needs import Needs
from ...compute.parts import AllReduce, Mover
from ...compute.shape import Shape
from ...compute.store import Store
from ...compute.transfer import restored, stashed, to_device
from .plan import KeyRotation

#: Tokens of one layer whose keys are rotated at once, since float32 copies take several times their memory.
TURNED = 1024
#: Bytes that a rotation takes for each element of a key with that of its value: read, float32, rotated and written.
OF_TURNED = 32


class Originals(Mover):
    """Rotates keys of blocks in one KV group of a worker.

    A rotated key is rounded to the cache's dtype. Rotating rounded keys again would add up errors: fp8 keys are useless
    after 100 rotations. So the first rotation of a block copies its computed keys to the host, as bytes of the cache.
    Each rotation starts from that copy and turns it by the whole distance. The copy ends with its block or request.
    docs/design.md ("Past the model's context") has the measured errors, and why the copies lie on the host.

    Args:
        store: KV cache of the group.
        holes: of the group.
        block_size: tokens.
        held_blocks: most blocks that a request holds.
        device: device of the cache.

    Attributes:
        rotations: layer -> rotation of its keys.
    """

    kind = KeyRotation
    host_use = (
        "a request that outgrows its context takes up to {} of host memory on each rank, for its keys as they were "
        "computed"
    )

    def __init__(self, store: Store, holes: Holes, block_size: int, held_blocks: int, device: torch.device) -> None:
        self._store, self._holes, self._held_blocks, self._device = store, holes, held_blocks, device
        self.rotations: Mapping[Any, Rotation] = {}
        #: Blocks that are rotated at once.
        self._some = max(TURNED // block_size, 1)
        #: Request -> {logical block: computed keys of all layers, [X] (see `Store.keys`)}.
        self._kept: dict[str, dict[int, torch.Tensor]] = {}
        #: Requests whose holes changed with this step.
        self._changed: Set[str] = frozenset()

    def loaded(self, vllm_config: Any, model: torch.nn.Module, layers: Mapping[str, Any]) -> None:
        from .positions import rotations

        self.rotations = rotations(vllm_config, model, layers)

    @property
    def kept_bytes(self) -> int:
        return sum(each.frequencies.nbytes for each in {id(each): each for each in self.rotations.values()}.values())

    @property
    def is_empty(self) -> bool:
        """Whether no request has keys here."""
        return not self._kept

    @property
    def host_bytes(self) -> int:
        return self._held_blocks * self.block_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of host memory for each rotated block. Pinned memory is allocated in powers of two."""
        keys = self._store.keys(torch.empty(0, dtype=torch.int64, device=self._device))
        size = keys.shape[1] * keys.itemsize
        return size if self._device.type == "cpu" else 1 << (size - 1).bit_length()

    def blocks(self, req_id: str) -> Set[int]:
        """Return the logical blocks of a request whose computed keys are kept."""
        return self._kept.get(req_id, {}).keys()

    def begin(self, start: Start) -> None:
        """Drop the keys of requests that ended or restart."""
        self._changed = start.changed
        for req_id in start.gone | start.resumed if self._kept else ():
            self._kept.pop(req_id, None)

    def obey(self, orders: Sequence[KeyRotation], all_reduce: AllReduce) -> None:
        for order in orders:
            self.turn(order)

    def obeyed(self) -> None:
        """Drop the keys of evicted blocks: the rotations may have included them."""
        for req_id in self._changed & self._kept.keys():
            for block in self.blocks(req_id) & self._holes.of(req_id):
                del self._kept[req_id][block]

    def needs(self, shape: Shape) -> Needs:
        tokens = max(min(TURNED, shape.held_blocks * shape.block_size), shape.block_size)
        # The rotation of one layer, and computed keys of all layers.
        of_dimension = OF_TURNED + shape.layers * shape.itemsize
        return Needs(between=tokens * shape.kv_heads * shape.head_size * of_dimension)

    def turn(self, order: KeyRotation) -> None:
        """Rotate the keys of an order's blocks.

        Raises:
            KeyError: the order says that a block has been rotated before, and its computed keys are not here.
        """
        kept = self._kept.setdefault(order.req_id, {})
        rows = np.array([order.source, order.target, order.tokens], np.int64)
        again = np.array(order.again, bool)
        for which in (np.flatnonzero(~again), np.flatnonzero(again)):
            for start in range(0, len(which), self._some):
                at = which[start : start + self._some]
                blocks = [order.blocks[i] for i in at.tolist()]
                source, target, tokens = (to_device(row, self._device) for row in rows[:, at])
                if again[at[0]]:
                    keys = restored([kept[block] for block in blocks], self._device)
                else:
                    keys = self._store.keys(source)
                    kept.update(zip(blocks, map(stashed, keys)))
                self._store.turn(source, target, keys, tokens, self.rotations)
