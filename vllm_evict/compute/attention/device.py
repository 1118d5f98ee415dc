"""`BackendOps` of vLLM's attention backends on a device, with the plugin's Triton kernels."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any

import torch

from ..images import seen_ahead
from ..kernels.compact import is_ordered
from ..kernels.paged import PagedAttention
from ..kernels.queries import Queries
from ..kernels.take import take
from ..probes import LayerCall, MassTarget
from ..transfer import to_device
from ..work import HeadSlice
from .arguments import narrowed, paged
from .decoding import Decoding, DeviceScratch
from .fp8 import FP8, FP8_NAMES, cache_scales, scaled, stored_as
from .ops import BackendOps, BatchMetadata, Fit

#: Sizes of heads of which the kernels for a device measure mass and gather tokens, and of those that they decode.
READ_HEADS, DECODED_HEADS = range(16, 513), range(16, 257)
#: Attribute of a backend's metadata that holds the step's `PagedAttention.ahead`.
AHEAD = "kv_evict_ahead"
#: Attributes of which vLLM's metadata have one where images attend to themselves; a model may clear it (Gemma 4).
RANGES = ("mm_prefix_range_tensor", "mm_prefix_query_range_tensor")


class DeviceMetadata(BatchMetadata):
    """The backend's own metadata, with what the queries of images see."""

    def build(self, builder: Any, stock: Callable[[], Any], common: Any, needed: bool, in_graph: bool) -> Any:
        metadata = stock()
        if (ahead := seen_ahead(common)) is not None:
            setattr(metadata, AHEAD, to_device(ahead, common.seq_lens.device))
        return metadata

    def ahead(self, metadata: Any) -> torch.Tensor | None:
        attends = any(getattr(metadata, name, None) is not None for name in RANGES)
        return getattr(metadata, AHEAD, None) if attends else None


class DeviceOps(BackendOps):
    """`BackendOps` on a device. Nothing is read on the host.

    A slot of kv_cache has a token's key before its value, in any of vLLM's layouts, and the two may differ in
    dimensions, which no kernel decodes. Rows of padding are skipped.

    Caches may be fp8 (`FP8_NAMES`), which vLLM passes as bytes. Kernels read fp8 directly: the scale of keys multiplies
    the softmax scale, and the scale of values multiplies the output. `fp8.dequantised` converts quantised queries.

    The mass beside a stock kernel takes a separate pass for the LSE, unless a subclass gets the LSE from the kernel.

    Attributes:
        decoding: launches the decode kernels.
        heads_at_once: most query heads in a slice of those of a KV head, into which `mass` divides them if a request
            has several queries; None: it does not divide them.
    """

    batch: BatchMetadata = DeviceMetadata()
    scratch: DeviceScratch
    beside = "query_lse and mass_from_lse"
    decodes_measured = True
    compiles = True
    heads_at_once: int | None = None

    def __init__(self, scratch: DeviceScratch | None = None) -> None:
        self.scratch = scratch or DeviceScratch()
        self.decoding = Decoding(self.scratch)
        #: Caches -> their plan of `compact`.
        self._places: dict[tuple[Any, ...], Any] = {}

    def fit(self, layer: Any) -> Fit:
        if (unreadable := self._unreadable(layer)) is not None:
            return Fit(unreadable)
        if layer.head_size_v != layer.head_size:
            return Fit()
        return Fit(decodes=layer.impl.alibi_slopes is None and layer.impl.head_size in DECODED_HEADS)

    def _unreadable(self, layer: Any) -> str | None:
        """Return `Fit.unreadable` of a layer."""
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

    def mass(self, call: LayerCall, measured: MassTarget) -> None:
        """Run `mass_from_lse`, by `BackendOps.mass`.

        Mass that `out` has as a sum over heads is computed for each KV head in the scratch, so that more programs run
        at once. The scratch takes some requests at a time.
        """
        from ...triton_kernels.mass_from_lse import mass_from_lse

        out, last = measured.out, measured.last
        assert out is not None
        attention = self._arguments(call, measured, call.metadata.seq_lens[: len(out)])
        lse = self._lse_of(attention, call.metadata.max_query_len)
        of_heads = attention.key_cache.shape[1], out.shape[2]
        scratch = self.scratch.reserve(call.query.device)
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

    def _arguments(self, call: LayerCall, measured: MassTarget, lens: torch.Tensor) -> PagedAttention:
        """Return the record of kernels for the layer's cache (see `arguments.paged`)."""
        keys, values = keys_and_values(call.layer, call.kv_cache)
        return paged(call, measured, lens, keys, values, ahead=self.batch.ahead(call.metadata))

    def warm_up_mass(self, call: LayerCall, measured: MassTarget) -> None:
        """Launch all variants of `mass`, with its arguments."""
        self.mass(call, measured)

    def _lse_of(self, attention: PagedAttention, longest: int) -> torch.Tensor:
        """Return the LSE of queries, at most `longest` of a request: float32 [T, H] (see `query_lse`)."""
        from ...triton_kernels.query_lse import query_lse

        lse = torch.empty(attention.query.shape[:2], dtype=torch.float32, device=attention.query.device)
        query_lse(attention, lse, longest=longest)
        return lse

    def mass_of(self, call: LayerCall, queries: Queries, width: int) -> torch.Tensor:
        """Run `decode_mass`, by `BackendOps.mass_of`, or two passes over keys that it does not decode."""
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
        attention = self._arguments(replace(call, query=query, metadata=alone), MassTarget(out), queries.lens)
        assert attention.value_cache is not None
        if query.shape[2] in DECODED_HEADS and query.shape[2] == attention.value_cache.shape[3]:
            self.decoding.decode(attention, numbers[:-1], torch.empty_like(query))
        else:
            mass_from_lse(attention, DeviceOps._lse_of(self, attention, 1))
        return out.mul_(kv_heads / query.shape[1])

    def decode(self, call: LayerCall, rows: torch.Tensor, seq_lens: torch.Tensor, measured: MassTarget) -> None:
        attention = narrowed(self._arguments(call, measured, seq_lens), call.metadata)
        self.decoding.decode(attention, rows, call.output[: len(attention.query)].view(attention.query.shape))

    def decode_together(self, slices: Sequence[HeadSlice], measured: Sequence[MassTarget]) -> None:
        """Decode as `BackendOps.decode_together` says. Two groups are one call of `triton_kernels.decode_classes`,
        other numbers
        of groups a `decode` each.
        """
        if len(slices) == 2:
            classes = [
                narrowed(self._arguments(heads.call, its, heads.work.seq_lens), heads.call.metadata)
                for heads, its in zip(slices, measured)
            ]
            outputs = [heads.call.output[: len(its.query)] for heads, its in zip(slices, classes)]
            self.decoding.decode_two(classes, slices[0].work.rows, outputs)
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


def slices_of(heads: int, at_once: int | None) -> int:
    """Return the fewest equal slices of query heads that have at most `at_once` each."""
    return next(each for each in range(1, heads + 1) if heads % each == 0 and heads // each <= (at_once or heads))


def keys_and_values(layer: Any, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of a layer's cached keys [num_blocks, Hkv, block_size, D] and values. A cache of bytes is fp8."""
    if kv_cache.dtype == torch.uint8:
        kv_cache = kv_cache.view(FP8)
    size = layer.impl.head_size
    return kv_cache[..., :size], kv_cache[..., size:]
