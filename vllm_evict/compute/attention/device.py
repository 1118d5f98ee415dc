"""`BackendOps` of vLLM's attention backends on a device, with the plugin's Triton kernels."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any

import torch

from ..images import seen_ahead
from ..kernels import decode_cuda
from ..kernels.compact import is_ordered
from ..kernels.paged import PagedAttention
from ..kernels.queries import Queries
from ..kernels.take import take
from ..probes import LayerCall, MassTarget
from ..transfer import to_device
from ..work import HeadSlice
from .fp8 import FP8, cache_scales, scaled, stored_as
from .ops import DECODED_HEADS, FP8_NAMES, READ_HEADS, BackendOps

#: Bytes of the decode kernels' scratch for mass, or more if one request needs more. Enough for 256 requests with 32
#: query heads and 128k tokens each, or 8k tokens each if mass is by token.
MASS_SCRATCH = 256 << 20
GRANULE = 16  # least tokens for which decode kernels store one number for each query head
#: Bytes of the decode kernels' scratch for splits.
SPLIT_SCRATCH = 32 << 20
ALIGNED = 64  # float32 numbers, alignment of parts of the scratch
#: Attribute of a backend's metadata that holds the step's `PagedAttention.ahead`.
AHEAD = "kv_evict_ahead"
#: Attributes of which vLLM's metadata have one where images attend to themselves; a model may clear it (Gemma 4).
RANGES = ("mm_prefix_range_tensor", "mm_prefix_query_range_tensor")


class DeviceOps(BackendOps):
    """`BackendOps` on a device. Nothing is read on the host.

    A slot of kv_cache has a token's key before its value, in any of vLLM's layouts, and the two may differ in
    dimensions, which no kernel decodes. Rows of padding are skipped.

    Caches may be fp8 (`FP8_NAMES`), which vLLM passes as bytes. Kernels read fp8 directly: the scale of keys multiplies
    the softmax scale, and the scale of values multiplies the output. `dequantised` converts quantised queries.

    The mass beside a stock kernel takes a separate pass for the LSE, unless a subclass gets the LSE from the kernel.
    """

    beside = "query_lse and mass_from_lse"
    decodes_measured = True
    compiles = True

    def __init__(self) -> None:
        self.capturing = False
        #: Requests and shapes -> plan of the decode kernels, and the number of requests that it is for.
        self._plans: dict[tuple[Any, ...], tuple[Any, int]] = {}
        #: Scratch of all plans. Layers, steps and graphs run one after the other, so they share it.
        self._scratch: torch.Tensor | None = None
        self.scratch_bytes = MASS_SCRATCH + SPLIT_SCRATCH
        #: Caches -> their plan of `compact`.
        self._places: dict[tuple[Any, ...], Any] = {}
        #: Kernels that replace `decode_mass` for tensors that they support; None unless VLLM_EVICT_DECODE=cuda.
        self._cuda = decode_cuda.library_if_wanted()

    def metadata(self, builder: Any, stock: Callable[[], Any], common: Any, needed: bool, in_graph: bool) -> Any:
        """See `BackendOps.metadata`: the backend's own, with what the queries of images see."""
        metadata = stock()
        if (ahead := seen_ahead(common)) is not None:
            setattr(metadata, AHEAD, to_device(ahead, common.seq_lens.device))
        return metadata

    def ahead(self, metadata: Any) -> torch.Tensor | None:
        attends = any(getattr(metadata, name, None) is not None for name in RANGES)
        return getattr(metadata, AHEAD, None) if attends else None

    def unreadable(self, layer: Any) -> str | None:
        if layer.kv_cache_dtype in FP8_NAMES:
            if any(scale.numel() != 1 for scale in (layer._q_scale, layer._k_scale, layer._v_scale)):
                return "has fp8 scales for each head, which the score pass can't read (it reads one for a layer)"
        elif layer.kv_cache_torch_dtype != layer.dtype:
            readable = f"the model's own dtype, {', '.join(FP8_NAMES)}"
            return f"keeps its keys as {layer.kv_cache_dtype}, which the score pass can't read (it reads {readable})"
        if layer.impl.head_size not in READ_HEADS:
            sizes = f"{READ_HEADS[0]} to {READ_HEADS[-1]}"
            return f"has heads of size {layer.impl.head_size}, which the score pass can't read (it reads {sizes})"
        return None

    def can_decode(self, layer: Any) -> bool:
        if layer.head_size_v != layer.head_size:
            return False
        impl = layer.impl
        return impl.alibi_slopes is None and impl.head_size in DECODED_HEADS and self.unreadable(layer) is None

    def scratch_for(
        self, requests: int, in_graphs: int, heads: int, block_size: int, longest: int, per_token: bool
    ) -> int:
        of_block = 4 * heads * (block_size if per_token else max(block_size // GRANULE, 1))
        one = of_block * _power_of_2(longest)
        room = min(max(MASS_SCRATCH, one), one * _power_of_2(requests))
        self.scratch_bytes = room + SPLIT_SCRATCH if requests else 0
        return min(MASS_SCRATCH // (of_block * in_graphs), longest) if in_graphs else 0

    def reserve(self, device: torch.device) -> torch.Tensor:
        """Return the scratch; the first call allocates it."""
        if self._scratch is None:
            self._scratch = torch.empty(self.scratch_bytes // 4, dtype=torch.float32, device=device)
        return self._scratch

    def dequantised(self, layer: Any, query: torch.Tensor) -> torch.Tensor:
        return query if query.dtype != FP8 else query.to(layer.dtype) * layer._q_scale_float

    def decodes_in_cuda(self, attention: PagedAttention) -> bool:
        """Return whether the CUDA C++ kernel replaces `decode_mass` for these arguments."""
        return self._cuda is not None and decode_cuda.refused(attention) is None

    def mass(self, call: LayerCall, measured: MassTarget) -> None:
        """See `BackendOps.mass`; runs `mass_from_lse`.

        Mass that `out` has as a sum over heads is computed for each KV head in the scratch, so that more programs run
        at once. The scratch takes some requests at a time.
        """
        from ...triton_kernels.mass_from_lse import mass_from_lse

        out, last = measured.out, measured.last
        assert out is not None
        attention = self.arguments(call, measured, call.metadata.seq_lens[: len(out)])
        lse = self.lse_of(attention, call.metadata.max_query_len)
        of_heads = attention.key_cache.shape[1], out.shape[2]
        scratch = self.reserve(call.query.device)
        at_once = len(scratch) // prod(of_heads)
        if out.shape[1] == of_heads[0] or not at_once:
            mass_from_lse(attention, lse, last=last)
            return
        block_size = 1 if measured.per_token else attention.key_cache.shape[2]
        for first in range(0, len(out), at_once):
            some = slice(first, min(first + at_once, len(out)))
            lens = attention.seq_lens[some]
            mass = scratch[: len(lens) * prod(of_heads)].view(len(lens), *of_heads).zero_()
            part = replace(
                attention,
                block_table=attention.block_table[some],
                query_start_loc=attention.query_start_loc[first : some.stop + 1],
                seq_lens=lens,
                mass=mass,
            )
            mass_from_lse(part, lse, last=None if last is None else last[some])
            take(out[some], mass, lens, block_size)

    def warm_up_mass(self, call: LayerCall, measured: MassTarget) -> None:
        """Launch all variants of `mass`, with its arguments."""
        self.mass(call, measured)

    def slices(self, heads: int) -> int:
        """Return into how many slices `mass` divides the query heads of a KV head, if a request has several queries."""
        return 1

    def arguments(self, call: LayerCall, measured: MassTarget, lens: torch.Tensor) -> PagedAttention:
        """See `BackendOps.paged`, for the layer's cache."""
        return self.paged(call, measured, lens, *keys_and_values(call.layer, call.kv_cache))

    def lse_of(self, attention: PagedAttention, longest: int) -> torch.Tensor:
        """Return the LSE of queries, at most `longest` of a request: float32 [T, H] (see `query_lse`)."""
        from ...triton_kernels.query_lse import query_lse

        lse = torch.empty(attention.query.shape[:2], dtype=torch.float32, device=attention.query.device)
        query_lse(attention, lse, longest=longest)
        return lse

    def mass_of(self, call: LayerCall, queries: Queries, width: int) -> torch.Tensor:
        """See `BackendOps.mass_of`; runs `decode_mass`, or two passes over keys that it does not decode."""
        from ...triton_kernels.mass_from_lse import mass_from_lse

        query, kv_heads = call.query[queries.tokens], call.kv_heads
        numbers = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device)
        out = torch.zeros(len(query), kv_heads, width, device=query.device)
        alone = SimpleNamespace(
            num_actual_tokens=len(query),
            block_table=call.metadata.block_table[queries.rows, :width],
            query_start_loc=numbers,
            seq_lens=queries.lens,
        )
        attention = self.arguments(replace(call, query=query, metadata=alone), MassTarget(out), queries.lens)
        assert attention.value_cache is not None
        if query.shape[2] in DECODED_HEADS and query.shape[2] == attention.value_cache.shape[3]:
            self._decode_mass(attention, numbers[:-1], torch.empty_like(query))
        else:
            mass_from_lse(attention, DeviceOps.lse_of(self, attention, 1))
        return out.mul_(kv_heads / query.shape[1])

    def decode(self, call: LayerCall, rows: torch.Tensor, seq_lens: torch.Tensor, measured: MassTarget) -> None:
        attention = narrowed(self.arguments(call, measured, seq_lens), call.metadata)
        self._decode_mass(attention, rows, call.output[: len(attention.query)].view(attention.query.shape))

    def decode_together(self, slices: Sequence[HeadSlice], measured: Sequence[MassTarget]) -> None:
        """See `BackendOps.decode_together`. Two groups are one call of `triton_kernels.decode_classes`, other numbers
        of groups a `decode` each.
        """
        if len(slices) == 2:
            self._decode_two(slices, measured)
            return
        for heads, its in zip(slices, measured):
            self.decode(heads.call, heads.work.rows, heads.work.seq_lens, its)

    def compact(
        self,
        layer: Any,
        kv_caches: Sequence[torch.Tensor],
        source: torch.Tensor,
        keep: torch.Tensor,
        target: torch.Tensor,
    ) -> None:
        from ...triton_kernels.compact import compact, plan_compact

        one = kv_caches[0]
        key = one.shape, one.stride(), *(cache.data_ptr() for cache in kv_caches)
        if (plan := self._places.get(key)) is None:
            plan = self._places[key] = plan_compact(kv_caches)
        blocks = (to_device(each.numpy(), keep.device) for each in (source, target))
        compact(kv_caches, next(blocks), keep, next(blocks), ordered=is_ordered(source, target), plan=plan)

    def write(
        self, layer: Any, kv_cache: torch.Tensor, blocks: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        parts = keys_and_values(layer, kv_cache)
        for part, content, scale in zip(parts, (keys, values), cache_scales(layer, kv_cache)):
            part[blocks] = stored_as(content, part.dtype, scale)

    def read(
        self, layer: Any, kv_cache: torch.Tensor, blocks: torch.Tensor, values: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        read = [part[blocks] for part in keys_and_values(layer, kv_cache)[: 1 + values]]
        read = [scaled(part, scale) for part, scale in zip(read, cache_scales(layer, kv_cache))]
        return read[0], read[1] if values else None

    def stored_keys(self, layer: Any, kv_cache: torch.Tensor) -> torch.Tensor:
        return keys_and_values(layer, kv_cache)[0]

    def as_keys(self, layer: Any, stored: torch.Tensor) -> torch.Tensor:
        return scaled(stored, cache_scales(layer, stored)[0])

    def _decode_two(self, slices: Sequence[HeadSlice], measured: Sequence[MassTarget]) -> None:
        from ...triton_kernels.decode_classes import decode_classes

        rows = slices[0].work.rows
        classes = [
            narrowed(self.arguments(heads.call, its, heads.work.seq_lens), heads.call.metadata)
            for heads, its in zip(slices, measured)
        ]
        plans, at_once = self._plans_for(classes, len(rows))
        outputs = [heads.call.output[: len(its.query)] for heads, its in zip(slices, classes)]
        for some in rows.split(at_once):
            decode_classes(classes, some, outputs, plans=plans)

    def _decode_mass(self, attention: PagedAttention, rows: torch.Tensor, output: torch.Tensor) -> None:
        if self.decodes_in_cuda(attention):
            plan, at_once = self._cuda_plan(attention, len(rows))
            for some in rows.split(at_once):
                decode_cuda.decode_mass(attention, some, output, plan=plan, kernels=self._cuda)
            return
        from ...triton_kernels.decode_mass import decode_mass

        (plan,), at_once = self._plans_for([attention], len(rows))
        for some in rows.split(at_once):
            decode_mass(attention, some, output, plan=plan)

    def _plans_for(self, classes: Sequence[PagedAttention], rows: int) -> tuple[list[Any], int]:
        """Return the plan of the Triton kernels for each class, and the requests of a launch (see `_plan`)."""
        from ...triton_kernels.decode_classes import plan_classes

        one, kv_heads = classes[0], tuple(each.key_cache.shape[1] for each in classes)
        shape = one.group, kv_heads, one.query.shape[2], one.key_cache.shape[2]
        widths = self._rounded(*(each.block_table.shape[1] for each in classes))
        mass, per_token, dtype = any(each.mass is not None for each in classes), one.per_token, one.query.dtype

        def make(rows: int, take: Callable[..., torch.Tensor]) -> list[Any]:
            options = {"mass": mass, "per_token": per_token, "take": take}
            return plan_classes(rows, *shape, widths, dtype, one.query.device, **options)

        return self._plan(make, one.query.device, rows, *shape, dtype, per_token, mass, *widths)

    def _cuda_plan(self, attention: PagedAttention, rows: int) -> tuple[Any, int]:
        """Return the plan of the CUDA C++ kernel, and the requests of a launch (see `_plan`)."""
        query, (_, kv_heads, block_size, _) = attention.query, attention.key_cache.shape
        (width,), mass = self._rounded(attention.block_table.shape[1]), attention.mass is not None
        shape = query.shape[1], kv_heads, query.shape[2], block_size, width

        def make(rows: int, take: Callable[..., torch.Tensor]) -> Any:
            return decode_cuda.plan_decode(rows, *shape, query.dtype, query.device, mass=mass, take=take)

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
            scratch = self.reserve(device)
            plan = make(rows, taking := _Taking(scratch))
            while not taking.fits and rows > 1:
                rows = -(-rows // 2)
                plan = make(rows, taking := _Taking(scratch))
            if not taking.fits and self.capturing:
                raise RuntimeError(
                    f"a CUDA graph of {key[0]} requests got {len(scratch):,} numbers of scratch memory; expected "
                    "room for one request: use --enforce-eager, and please report this"
                )
            self._plans[key] = plan if taking.fits else make(rows, torch.empty), rows
        return self._plans[key]

    def _rounded(self, *sizes: int) -> tuple[int, ...]:
        """Round sizes up to powers of two, so that similar steps share a plan. Sizes of a capture stay exact, since
        graphs are few and the scratch has room for exact sizes only."""
        return sizes if self.capturing else tuple(map(_power_of_2, sizes))


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


def keys_and_values(layer: Any, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of a layer's cached keys [num_blocks, Hkv, block_size, D] and values. A cache of bytes is fp8."""
    if kv_cache.dtype == torch.uint8:
        kv_cache = kv_cache.view(FP8)
    size = layer.impl.head_size
    return kv_cache[..., :size], kv_cache[..., size:]


def narrowed(attention: PagedAttention, metadata: Any) -> PagedAttention:
    """Return arguments with the block table cut to the batch's longest request: scratch grows with it."""
    width = -(-metadata.max_seq_len // attention.key_cache.shape[2])
    return replace(attention, block_table=attention.block_table[:, :width])
