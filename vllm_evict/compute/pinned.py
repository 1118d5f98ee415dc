"""Pinned host memory of exact size, for bytes that stay as long as a server.

torch's allocator of pinned memory rounds each allocation up to a power of two: 100 GB takes 128. What `transfer` pins
is small and reused, and comes from that allocator.
"""

import math
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..config import KVPolicyError


class _Pages(mmap.mmap):
    """Memory of whole pages, zero at first. It is unpinned before it is unmapped, and when the process ends."""

    unpin: Callable[[], Any] | None = None

    def __del__(self) -> None:
        if self.unpin is not None:
            self.unpin()


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros in memory of its own, which a device copies from and to without waiting.

    The memory goes with the last tensor that shares it.

    Raises:
        MemoryError: the machine does not give so much memory.
        KVPolicyError: the machine gives the memory, and its driver does not pin it.
    """
    used = math.prod(shape) * dtype.itemsize
    size = max(used, 1)
    try:
        pages = _Pages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{size} bytes") from error
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if refused := register(memory.data_ptr(), size):
        raise KVPolicyError(
            f"host: {size} bytes of host memory can't be pinned ({refused}); expected memory that the GPU's driver may "
            "lock; set host to less"
        )
    pages.unpin = weakref.finalize(pages, unregister, memory.data_ptr())
    return memory[:used].view(dtype).view(shape)


def register(address: int, size: int) -> str | None:
    """Pin memory for all devices; returns the driver's error, None if there is none."""
    runtime: Any = torch.cuda.cudart()
    error = runtime.cudaHostRegister(address, size, 0)
    return str(runtime.cudaGetErrorString(error)) if int(error) else None


def unregister(address: int) -> None:
    """Unpin memory, once no copy from or to a device is under way."""
    torch.cuda.synchronize()
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(address)
