"""Decode kernels of a device: their scratch, and plans that fit into it."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from ..kernels import decode_cuda
from ..kernels.paged import DecodeShape, PagedAttention
from .ops import Scratch

#: Bytes of the decode kernels' scratch for mass, or more if one request needs more. Enough for 256 requests with 32
#: query heads and 128k tokens each, or 8k tokens each if mass is by token.
MASS_SCRATCH = 256 << 20
GRANULE = 16  # least tokens for which decode kernels store one number for each query head
#: Bytes of the decode kernels' scratch for splits.
SPLIT_SCRATCH = 32 << 20
ALIGNED = 64  # float32 numbers, alignment of parts of the scratch


class DeviceScratch(Scratch):
    """Scratch of all plans. Layers, steps and graphs run one after the other, so they share it."""

    def __init__(self) -> None:
        self.nbytes = MASS_SCRATCH + SPLIT_SCRATCH
        self._memory: torch.Tensor | None = None

    def size_for(
        self, requests: int, in_graphs: int, heads: int, block_size: int, longest: int, per_token: bool
    ) -> int:
        of_block = 4 * heads * (block_size if per_token else max(block_size // GRANULE, 1))
        one = of_block * _power_of_2(longest)
        room = min(max(MASS_SCRATCH, one), one * _power_of_2(requests))
        self.nbytes = room + SPLIT_SCRATCH if requests else 0
        return min(MASS_SCRATCH // (of_block * in_graphs), longest) if in_graphs else 0

    def reserve(self, device: torch.device) -> torch.Tensor:
        if self._memory is None:
            self._memory = torch.empty(self.nbytes // 4, dtype=torch.float32, device=device)
        return self._memory


class Decoding:
    """Launches the decode kernels of a device.

    Args:
        scratch: of the backend.
    """

    def __init__(self, scratch: DeviceScratch) -> None:
        self._scratch = scratch
        #: Requests and shapes -> plan of the decode kernels, and the number of requests that it is for.
        self._plans: dict[tuple[Any, ...], tuple[Any, int]] = {}
        #: Kernels that replace `decode_mass` for tensors that they support; None unless VLLM_EVICT_DECODE=cuda.
        self._cuda = decode_cuda.library_if_wanted()

    def in_cuda(self, attention: PagedAttention) -> bool:
        """Return whether the CUDA C++ kernel replaces `decode_mass` for these arguments."""
        return self._cuda is not None and decode_cuda.refused(attention) is None

    def decode(self, attention: PagedAttention, rows: torch.Tensor, output: torch.Tensor) -> None:
        """Run `kernels.decode.decode_mass` for requests `rows` of one token each: int32 [n]."""
        if self.in_cuda(attention):
            plan, at_once = self._cuda_plan(attention, len(rows))
            for some in rows.split(at_once):
                decode_cuda.decode_mass(attention, some, output, plan=plan, kernels=self._cuda)
            return
        from ...triton_kernels.decode_mass import decode_mass

        (plan,), at_once = self._plans_for([attention], len(rows))
        for some in rows.split(at_once):
            decode_mass(attention, some, output, plan=plan)

    def decode_two(
        self, classes: Sequence[PagedAttention], rows: torch.Tensor, outputs: Sequence[torch.Tensor]
    ) -> None:
        """Run `kernels.decode.decode_classes` for two classes of heads, and requests `rows` of one token each."""
        from ...triton_kernels.decode_classes import decode_classes

        plans, at_once = self._plans_for(classes, len(rows))
        for some in rows.split(at_once):
            decode_classes(classes, some, outputs, plans=plans)

    def _plans_for(self, classes: Sequence[PagedAttention], rows: int) -> tuple[list[Any], int]:
        """Return the plan of the Triton kernels for each class, and the requests of a launch (see `_plan`)."""
        from ...triton_kernels.decode_classes import plan_classes

        one, kv_heads = classes[0], tuple(each.key_cache.shape[1] for each in classes)
        shape = one.group, kv_heads, one.query.shape[2], one.key_cache.shape[2]
        widths = self._rounded(*(each.block_table.shape[1] for each in classes))
        mass, per_token, dtype = any(each.mass is not None for each in classes), one.per_token, one.query.dtype

        def make(rows: int, take: Callable[..., torch.Tensor]) -> list[Any]:
            shapes = [DecodeShape.of(each, rows, width) for each, width in zip(classes, widths)]
            return plan_classes(shapes, mass=mass, per_token=per_token, take=take)

        return self._plan(make, one.query.device, rows, *shape, dtype, per_token, mass, *widths)

    def _cuda_plan(self, attention: PagedAttention, rows: int) -> tuple[Any, int]:
        """Return the plan of the CUDA C++ kernel, and the requests of a launch (see `_plan`)."""
        query, (_, kv_heads, block_size, _) = attention.query, attention.key_cache.shape
        (width,), mass = self._rounded(attention.block_table.shape[1]), attention.mass is not None
        shape = query.shape[1], kv_heads, query.shape[2], block_size, width

        def make(rows: int, take: Callable[..., torch.Tensor]) -> Any:
            return decode_cuda.plan_decode(DecodeShape.of(attention, rows, width), mass=mass, take=take)

        return self._plan(make, query.device, rows, "cuda", *shape, query.dtype, mass)

    def _plan(self, make: Callable[..., Any], device: torch.device, rows: int, *key: Any) -> tuple[Any, int]:
        """Return a plan, and the number of requests that it is for: `rows`, or as many as the scratch has room for.

        Args:
            make: (requests, allocator called like `torch.empty`) -> plan.
            rows: requests of the batch.
            key: all other values that the plan depends on.
        """
        (rows,) = self._rounded(rows)
        key = rows, *key
        if key not in self._plans:
            scratch = self._scratch.reserve(device)
            plan = make(rows, taking := _Taking(scratch))
            while not taking.fits and rows > 1:
                rows = -(-rows // 2)
                plan = make(rows, taking := _Taking(scratch))
            if not taking.fits and self._scratch.capturing:
                raise RuntimeError(
                    f"a CUDA graph of {key[0]} requests got {len(scratch):,} numbers of scratch memory; expected "
                    "room for one request: use --enforce-eager, and please report this"
                )
            self._plans[key] = plan if taking.fits else make(rows, torch.empty), rows
        return self._plans[key]

    def _rounded(self, *sizes: int) -> tuple[int, ...]:
        """Round sizes up to powers of two, so that similar steps share a plan. Sizes of a capture stay exact, since
        graphs are few and the scratch has room for exact sizes only."""
        return sizes if self._scratch.capturing else tuple(map(_power_of_2, sizes))


class _Taking:
    """Allocates successive parts of the scratch, called like `torch.empty`. Past its end tensors are on "meta"."""

    def __init__(self, scratch: torch.Tensor) -> None:
        self.fits, self._left = True, scratch

    def __call__(self, *shape: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        size = prod(shape)
        self.fits &= size <= len(self._left)
        if not self.fits:
            return torch.empty(shape, dtype=dtype, device="meta")
        part, self._left = self._left[:size], self._left[-(-size // ALIGNED) * ALIGNED :]
        return part.view(shape)


def _power_of_2(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()
