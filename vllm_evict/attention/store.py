"""The KV cache of one KV group, layer by layer, through what a backend says of its layout."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .backend import BackendOps


class LayerStore:
    """Implements `worker.tokens.Store`.

    Args:
        ops: of the backend.
        caches: gives each layer of the group with the part of its KV cache that is the group's; called when needed, for
            caches are allocated late.
    """

    def __init__(self, ops: BackendOps, caches: Callable[[], Iterable[tuple[Any, Any]]]) -> None:
        self._ops, self._caches = ops, caches

    def read(self, blocks: torch.Tensor, values: bool) -> Iterable[tuple[torch.Tensor, torch.Tensor | None]]:
        """Keys, and values or None, of each layer: copies, [n, Hkv, block_size, D] each."""
        return (self._ops.read(layer, kv_cache, blocks, values) for layer, kv_cache in self._caches())

    def kv_heads(self) -> list[int]:
        """Of each layer."""
        return [self._ops.kv_heads(kv_cache) for _, kv_cache in self._caches()]

    def compact(self, source: torch.Tensor, keep: list[torch.Tensor], target: torch.Tensor) -> None:
        """Gather kept tokens of each layer, int32 [Hkv, kept] each, from `source` into `target`, int32 on the host."""
        layers = list(self._caches())
        if len({len(heads) for heads in keep}) == 1:
            self._ops.compact(layers[0][0], [cache for _, cache in layers], source, torch.stack(keep), target)
            return
        for (layer, cache), heads in zip(layers, keep):
            self._ops.compact(layer, [cache], source, heads[None], target)

    def write(self, layer: int, blocks: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite blocks of the layer with this number; keys and values [n, Hkv, block_size, D]."""
        self._ops.write(*list(self._caches())[layer], blocks, keys, values)
