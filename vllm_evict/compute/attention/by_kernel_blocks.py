"""`BackendOps` of kernels that read smaller blocks than the pool's. Arguments and results are by the pool's blocks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..kernels.queries import Queries
from ..probes import LayerCall, MassTarget
from .device import DeviceOps


class ByKernelBlocks(DeviceOps):
    """Converts blocks and their mass for a backend's `BackendOps`, which come after it among a class's bases.

    vLLM splits a block of the pool into n kernel blocks: block b is kernel blocks n * b to n * b + n - 1. Layers have
    their caches by kernel blocks, and metadata has its block table by them (see `compute.kernel_blocks`).

    Attributes:
        block_size: tokens of a block of the pool.
    """

    splits_blocks = True
    by_kernel_blocks = True
    block_size: int

    def mass(self, call: LayerCall, measured: MassTarget) -> None:
        with self._split(call, measured) as split:
            super().mass(call, split)

    def mass_of(self, call: LayerCall, queries: Queries, width: int) -> torch.Tensor:
        count = self._count(call.kv_cache)
        return super().mass_of(call, queries, width * count).unflatten(2, (width, count)).sum(3)

    def decode(self, call: LayerCall, rows: torch.Tensor, seq_lens: torch.Tensor, measured: MassTarget) -> None:
        with self._split(call, measured) as split:
            super().decode(call, rows, seq_lens, split)

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

    def write(
        self, layer: Any, kv_cache: torch.Tensor, blocks: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        count = self._count(kv_cache)
        halves = (each.unflatten(2, (count, -1)).transpose(1, 2).flatten(0, 1) for each in (keys, values))
        super().write(layer, kv_cache, _of_kernels(blocks, count), *halves)

    def read(
        self, layer: Any, kv_cache: torch.Tensor, blocks: torch.Tensor, values: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        count = self._count(kv_cache)
        keys, content = super().read(layer, kv_cache, _of_kernels(blocks, count), values)
        return _joined(keys, count), None if content is None else _joined(content, count)

    @contextmanager
    def _split(self, call: LayerCall, measured: MassTarget) -> Iterator[MassTarget]:
        """Yield where the kernels measure, by their own blocks, and add that to `measured` by the pool's blocks."""
        out, count = measured.out, self._count(call.kv_cache)
        if out is None or measured.per_token or count == 1:
            yield measured
            return
        split = out.new_zeros(*out.shape[:2], out.shape[2] * count)
        yield measured._replace(out=split)
        out.add_(split.unflatten(2, (-1, count)).sum(3))

    def _count(self, kv_cache: torch.Tensor) -> int:
        """Return how many blocks of the kernels a block of the pool is."""
        return self.block_size // kv_cache.shape[2]


def with_kernel_blocks(ops: type[DeviceOps], block_size: int) -> type[DeviceOps]:
    """Return a `BackendOps` for kernels that may read smaller blocks than the pool's, of `block_size` tokens."""
    return type(f"ByKernelBlocks{ops.__name__}", (ByKernelBlocks, ops), {"block_size": block_size})


def _of_kernels(blocks: torch.Tensor, count: int) -> torch.Tensor:
    """Return the kernel blocks of some of the pool's, in order: [n * count]."""
    return (blocks[:, None] * count + torch.arange(count, dtype=blocks.dtype, device=blocks.device)).flatten()


def _joined(content: torch.Tensor, count: int) -> torch.Tensor:
    """Return keys or values by the pool's blocks: [n * count, Hkv, size, D] as [n, Hkv, count * size, D]."""
    return content.unflatten(0, (-1, count)).transpose(1, 2).flatten(2, 3)
