"""The KV cache of one KV group, as what measures and moves its blocks sees it."""

from collections.abc import Iterable
from typing import Protocol

import torch


class Store(Protocol):
    """The KV cache of one KV group on this rank, layer by layer. Blocks are physical.

    Attributes:
        kept_bytes: bytes on the device beside the cache.
    """

    @property
    def kept_bytes(self) -> int: ...

    def read(self, blocks: torch.Tensor, values: bool) -> Iterable[tuple[torch.Tensor, torch.Tensor | None]]:
        """See `cached.ReadBlocks`."""
        ...

    def kv_heads(self) -> list[int]:
        """Return the number of KV heads of each layer."""
        ...

    def pages(self) -> list[torch.Tensor]:
        """Return each layer's cache, blocks first."""
        ...

    def compact(self, source: torch.Tensor, keep: list[torch.Tensor], target: torch.Tensor) -> None:
        """Gather kept tokens of all layers (see `kernels.compact`).

        Args:
            source, target: int32 [n] and [m], blocks, on the host.
            keep: for each layer int32 [Hkv, kept], on the device of the cache.
        """
        ...

    def write(self, layer: int, blocks: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite blocks (int64 [n]) of one layer; keys and values [n, Hkv, block_size, D], of any float dtype."""
        ...

    def keys(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return keys of all layers, as the cache stores them, of blocks int64 [n]: [n, X] of the cache's dtype."""
        ...

    def turn(self, source: torch.Tensor, target: torch.Tensor, keys: torch.Tensor, tokens: torch.Tensor) -> None:
        """Copy blocks of all layers, with rotated keys.

        Args:
            source, target: int64 [n]; a block of `target` is its own source, or no source at all.
            keys: [n, X], computed keys as `keys` returns them.
            tokens: int64 [n], distance in positions by which each block's keys are rotated.
        """
        ...
