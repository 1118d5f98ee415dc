"""Keys of blocks that have moved up, as they were computed: each move turns these, so keys are rounded once."""

from collections.abc import Iterable, Mapping, Set

import numpy as np
import torch

from ..core.plan import KeyRotation
from .tokens import TURNED, Store
from .transfer import restored, stashed, to_device


class Originals:
    """Turns keys of blocks that move up, in one KV group of a worker.

    A turned key is rounded to the cache's dtype. If the next move turned that one, roundings would add up: fp8 keys
    lose most of what they say in 100 moves. So the first move of a block puts its keys aside, bytes of the cache, and
    every move turns these by the whole distance from the position that they were computed for. They lie on the host: a
    device's memory is vLLM's pool's, and moves are rare. They go with their block, or with their request.

    Args:
        store: KV cache of the group.
        block_size: tokens.
        device: where the cache is.
    """

    def __init__(self, store: Store, block_size: int, device: torch.device) -> None:
        self._store, self._device = store, device
        #: Blocks that are turned at once.
        self._some = max(TURNED // block_size, 1)
        #: Request -> {logical block: its keys of all layers, [X] (see `Store.keys`)}.
        self._kept: dict[str, dict[int, torch.Tensor]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no request is known."""
        return not self._kept

    @property
    def block_bytes(self) -> int:
        """Of host memory for each block that moves. Memory that a device copies to comes in powers of two."""
        keys = self._store.keys(torch.empty(0, dtype=torch.int64, device=self._device))
        size = keys.shape[1] * keys.itemsize
        return size if self._device.type == "cpu" else 1 << (size - 1).bit_length()

    def blocks(self, req_id: str) -> Set[int]:
        """Logical blocks of a request whose keys are put aside."""
        return self._kept.get(req_id, {}).keys()

    def forget(self, req_ids: Iterable[str]) -> None:
        """These requests ended, or begin again with their first token."""
        for req_id in req_ids:
            self._kept.pop(req_id, None)

    def drop(self, holes: Mapping[str, list[int]]) -> None:
        """These blocks are gone: request -> logical blocks."""
        for req_id, blocks in holes.items():
            if (kept := self._kept.get(req_id)) is not None:
                for block in blocks:
                    kept.pop(block, None)

    def turn(self, move: KeyRotation) -> None:
        """Obey a move.

        Raises:
            KeyError: a block has moved before, and its keys were not put aside.
        """
        kept = self._kept.setdefault(move.req_id, {})
        orders = np.array([move.source, move.target, move.tokens], np.int64)
        again = np.array(move.again, bool)
        for which in (np.flatnonzero(~again), np.flatnonzero(again)):
            for start in range(0, len(which), self._some):
                at = which[start : start + self._some]
                blocks = [move.blocks[i] for i in at.tolist()]
                source, target, tokens = (to_device(order, self._device) for order in orders[:, at])
                if again[at[0]]:
                    keys = restored([kept[block] for block in blocks], self._device)
                else:
                    keys = self._store.keys(source)
                    kept.update(zip(blocks, map(stashed, keys)))
                self._store.turn(source, target, keys, tokens)
