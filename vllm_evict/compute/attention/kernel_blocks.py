"""`BackendOps` behind kernels that read smaller blocks than the pool's: what they take and return is of the pool's."""

from collections.abc import Sequence
from typing import Any

import torch

from ..kernels.queries import Queries
from .device import DeviceOps


class KernelBlocks(DeviceOps):
    """Converts blocks and their mass for a backend's `BackendOps`, which come after it among a class's bases.

    vLLM splits a block of the pool into n kernel blocks: block b is kernel blocks n * b to n * b + n - 1. Layers have
    their caches by kernel blocks, and metadata has its block table by them (see `compute.kernel_blocks`).

    Attributes:
        block_size: tokens of a block of the pool.
    """

    splits_blocks = True
    by_kernel_blocks = True
    block_size: int

    def mass(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        weights: torch.Tensor | None,
        out: torch.Tensor,
        per_token: bool = False,
        last: torch.Tensor | None = None,
    ) -> None:
        count = 1 if per_token else self._count(kv_cache)
        split = _split(out, count)
        super().mass(layer, query, kv_cache, metadata, weights, split, per_token, last)
        _add(out, split, count)

    def mass_of(
        self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, queries: Queries, width: int
    ) -> torch.Tensor:
        count = self._count(kv_cache)
        split = super().mass_of(layer, query, kv_cache, metadata, queries, width * count)
        return split.unflatten(2, (width, count)).sum(3)

    def decode(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        weights: torch.Tensor | None,
        out: torch.Tensor | None,
        per_token: bool = False,
    ) -> None:
        count = 1 if per_token or out is None else self._count(kv_cache)
        split = out if out is None else _split(out, count)
        super().decode(layer, query, kv_cache, metadata, output, rows, seq_lens, weights, split, per_token)
        if out is not None:
            _add(out, split, count)

    def compact(
        self,
        layer: Any,
        kv_caches: Sequence[torch.Tensor],
        source: torch.Tensor,
        keep: torch.Tensor,
        target: torch.Tensor,
    ) -> None:
        count = self._count(kv_caches[0])
        super().compact(layer, kv_caches, _of_kernels(source, count), keep, _of_kernels(target, count))

    def write(  # type: ignore[override]  # a static method in the base
        self, layer: Any, kv_cache: torch.Tensor, blocks: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        count = self._count(kv_cache)
        halves = (each.unflatten(2, (count, -1)).transpose(1, 2).flatten(0, 1) for each in (keys, values))
        super().write(layer, kv_cache, _of_kernels(blocks, count), *halves)

    def read(  # type: ignore[override]  # a static method in the base
        self, layer: Any, kv_cache: torch.Tensor, blocks: torch.Tensor, values: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        count = self._count(kv_cache)
        keys, content = super().read(layer, kv_cache, _of_kernels(blocks, count), values)
        return _joined(keys, count), None if content is None else _joined(content, count)

    def _count(self, kv_cache: torch.Tensor) -> int:
        """Return how many blocks of the kernels a block of the pool is."""
        return self.block_size // kv_cache.shape[2]


def with_kernel_blocks(ops: type[DeviceOps], block_size: int) -> type[DeviceOps]:
    """Return a `BackendOps` for kernels that may read smaller blocks than the pool's, of `block_size` tokens."""
    return type(f"KernelBlocks{ops.__name__}", (KernelBlocks, ops), {"block_size": block_size})


def _split(out: torch.Tensor, count: int) -> torch.Tensor:
    """Return memory for mass by kernel blocks: zeros [R, H, n * W]; `out` itself if they are the pool's."""
    return out if count == 1 else out.new_zeros(*out.shape[:2], out.shape[2] * count)


def _add(out: torch.Tensor, split: torch.Tensor, count: int) -> None:
    """Add mass by kernel blocks, as `_split` made its memory, to that by the pool's blocks."""
    if count > 1:
        out.add_(split.unflatten(2, (-1, count)).sum(3))


def _of_kernels(blocks: torch.Tensor, count: int) -> torch.Tensor:
    """Return the kernel blocks of some of the pool's, in order: [n * count]."""
    return (blocks[:, None] * count + torch.arange(count, dtype=blocks.dtype, device=blocks.device)).flatten()


def _joined(content: torch.Tensor, count: int) -> torch.Tensor:
    """Return keys or values by the pool's blocks: [n * count, Hkv, size, D] as [n, Hkv, count * size, D]."""
    return content.unflatten(0, (-1, count)).transpose(1, 2).flatten(2, 3)
