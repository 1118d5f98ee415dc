"""The KV cache of one KV group, layer by layer, as what measures and moves its blocks sees it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from .attention.ops import BackendOps
from .kernels.rotate import Rotation
from .probes import kv_heads


class Store:
    """The KV cache of one KV group on this rank. Blocks are physical.

    Args:
        ops: operations of the backend.
        caches: returns pairs of a layer and the part of its KV cache in this group. Called on use, since vLLM allocates
            caches late.
        drafting: like `caches`, of a drafter's layers in the same blocks, for `pages` and `compact`.
    """

    def __init__(
        self,
        ops: BackendOps,
        caches: Callable[[], Iterable[tuple[Any, Any]]],
        drafting: Callable[[], Iterable[tuple[Any, Any]]] = tuple,
    ) -> None:
        self._ops, self._caches, self._drafting = ops, caches, drafting

    def read(self, blocks: torch.Tensor, values: bool) -> Iterable[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return for each layer copies of keys, and values or None, of blocks (see `BackendOps.read`)."""
        return (self._ops.read(layer, kv_cache, blocks, values) for layer, kv_cache in self._caches())

    def kv_heads(self) -> list[int]:
        """Return the number of KV heads of each layer."""
        return [kv_heads(kv_cache) for _, kv_cache in self._caches()]

    def pages(self, drafting: bool = True) -> list[torch.Tensor]:
        """Return each layer's cache, blocks first: of the model's layers, then of a drafter's if they are asked for."""
        return [kv_cache for _, kv_cache in (*self._caches(), *(self._drafting() if drafting else ()))]

    def compact(self, source: torch.Tensor, keep: list[torch.Tensor], target: torch.Tensor) -> None:
        """Gather kept tokens of all layers (see `kernels.compact`).

        Args:
            source, target: int32 [n] and [m], blocks, on the host.
            keep: for each layer int32 [Hkv, kept], on the device of the cache.
        """
        layers = list(self._caches())
        if len({len(heads) for heads in keep}) == 1:
            self._ops.compact(layers[0][0], [cache for _, cache in layers], source, torch.stack(keep), target)
        else:
            for (layer, cache), heads in zip(layers, keep):
                self._ops.compact(layer, [cache], source, heads[None], target)
        for layer, cache in self._drafting():
            one = most_kept(keep, len(source), len(target))
            heads = one.expand(1, kv_heads(cache), -1).contiguous()
            self._ops.compact(layer, [cache], source, heads, target)

    def write(self, layer: int, blocks: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite blocks (int64 [n]) of one layer; keys and values [n, Hkv, block_size, D], of any float dtype."""
        self._ops.write(*list(self._caches())[layer], blocks, keys, values)

    def keys(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return keys of all layers, as the cache stores them, of blocks int64 [n]: [n, X] of the cache's dtype."""
        layers = [self._ops.stored_keys(layer, kv_cache) for layer, kv_cache in self._caches()]
        sizes = [stored[0].numel() for stored in layers]
        keys = torch.empty(len(blocks), sum(sizes), dtype=layers[0].dtype, device=layers[0].device)
        for stored, part in zip(layers, keys.split(sizes, 1)):
            part.copy_(stored[blocks].flatten(1))
        return keys

    def turn(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        keys: torch.Tensor,
        tokens: torch.Tensor,
        rotations: Mapping[Any, Rotation],
    ) -> None:
        """Copy blocks of all layers, with rotated keys.

        Args:
            source, target: int64 [n]; a block of `target` is its own source, or no source at all.
            keys: [n, X], computed keys as `keys` returns them.
            tokens: int64 [n], distance in positions by which each block's keys are rotated.
            rotations: layer -> rotation of its keys.
        """
        first = 0
        for layer, kv_cache in self._caches():
            stored = self._ops.stored_keys(layer, kv_cache)
            size = stored[0].numel()
            its = self._ops.as_keys(layer, keys[:, first : first + size].unflatten(1, stored.shape[1:]))
            first += size
            _, values = self._ops.read(layer, kv_cache, source, True)
            self._ops.write(layer, kv_cache, target, rotations[layer](its, tokens), values)


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
