"""The KV cache of one KV group, layer by layer, through `BackendOps`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from ..kernels.rotate import Rotation
from .ops import BackendOps


class LayerStore:
    """Implements `compute.store.Store`, which documents the methods.

    Args:
        ops: operations of the backend.
        caches: returns pairs of a layer and the part of its KV cache in this group. Called on use, since vLLM allocates
            caches late.
        rotations: layer -> rotation of its keys, for `turn`.
        drafting: like `caches`, of a drafter's layers in the same blocks; only `compact` takes them.
    """

    def __init__(
        self,
        ops: BackendOps,
        caches: Callable[[], Iterable[tuple[Any, Any]]],
        rotations: Mapping[Any, Rotation] = MappingProxyType({}),
        drafting: Callable[[], Iterable[tuple[Any, Any]]] = tuple,
    ) -> None:
        self._ops, self._caches, self._rotations, self._drafting = ops, caches, rotations, drafting

    @property
    def kept_bytes(self) -> int:
        """Bytes of device memory beside the cache."""
        return sum(rotation.frequencies.nbytes for rotation in {id(r): r for r in self._rotations.values()}.values())

    def read(self, blocks: torch.Tensor, values: bool) -> Iterable[tuple[torch.Tensor, torch.Tensor | None]]:
        return (self._ops.read(layer, kv_cache, blocks, values) for layer, kv_cache in self._caches())

    def kv_heads(self) -> list[int]:
        return [self._ops.kv_heads(kv_cache) for _, kv_cache in self._caches()]

    def pages(self) -> list[torch.Tensor]:
        """Return each layer's cache, blocks first."""
        return [kv_cache for _, kv_cache in self._caches()]

    def compact(self, source: torch.Tensor, keep: list[torch.Tensor], target: torch.Tensor) -> None:
        layers = list(self._caches())
        if len({len(heads) for heads in keep}) == 1:
            self._ops.compact(layers[0][0], [cache for _, cache in layers], source, torch.stack(keep), target)
        else:
            for (layer, cache), heads in zip(layers, keep):
                self._ops.compact(layer, [cache], source, heads[None], target)
        for layer, cache in self._drafting():
            one = most_kept(keep, len(source), len(target))
            heads = one.expand(1, self._ops.kv_heads(cache), -1).contiguous()
            self._ops.compact(layer, [cache], source, heads, target)

    def write(self, layer: int, blocks: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._ops.write(*list(self._caches())[layer], blocks, keys, values)

    def keys(self, blocks: torch.Tensor) -> torch.Tensor:
        layers = [self._ops.stored_keys(kv_cache) for _, kv_cache in self._caches()]
        sizes = [stored[0].numel() for stored in layers]
        keys = torch.empty(len(blocks), sum(sizes), dtype=layers[0].dtype, device=layers[0].device)
        for stored, part in zip(layers, keys.split(sizes, 1)):
            part.copy_(stored[blocks].flatten(1))
        return keys

    def turn(self, source: torch.Tensor, target: torch.Tensor, keys: torch.Tensor, tokens: torch.Tensor) -> None:
        first = 0
        for layer, kv_cache in self._caches():
            stored = self._ops.stored_keys(kv_cache)
            size = stored[0].numel()
            its = self._ops.as_keys(layer, keys[:, first : first + size].unflatten(1, stored.shape[1:]))
            first += size
            _, values = self._ops.read(layer, kv_cache, source, True)
            self._ops.write(layer, kv_cache, target, self._rotations[layer](its, tokens), values)


def most_kept(keep: Sequence[torch.Tensor], source: int, target: int) -> torch.Tensor:
    """Return the tokens that the most heads keep, of equally many heads the newest: int32 [kept], ascending.

    Args:
        keep: for each layer int32 [Hkv, kept].
        source, target: number of blocks before and after.
    """
    kept = torch.cat([heads.flatten() for heads in keep]).long()
    count = keep[0].shape[1]
    votes = torch.zeros(source * count // target, dtype=torch.int32, device=kept.device)
    votes.index_add_(0, kept, torch.ones_like(kept, dtype=torch.int32))
    return votes.argsort(stable=True)[-count:].sort().values.int()
