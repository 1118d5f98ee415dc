"""`BackendOps` of vLLM's CPU attention backend."""

from collections.abc import Sequence
from typing import Any

import torch

from ..kernels.compact import compact
from ..kernels.decode import decode_classes, decode_mass
from ..kernels.logits import learned_sinks
from ..kernels.mass import block_mass, kernel_path, pack_keys, pack_values, unpack_keys, unpack_values
from ..kernels.paged import PagedAttention
from ..probes import LayerCall, MassTarget
from ..work import HeadSlice
from .arguments import paged
from .fp8 import CPU_FP8_NAMES, cache_scales, elements, scaled, stored_as
from .ops import BackendOps, Fit

#: ISA of the backend -> layout of its packed keys in `block_mass`.
KEY_LAYOUTS = {"vec": "vec", "vec16": "vec", "amx": "amx"}


class CPUOps(BackendOps):
    """`BackendOps` on a CPU.

    A block and head of kv_cache has all keys before all values, packed. Metadata is vLLM's `CPUAttentionMetadata`.
    Caches may be fp8 (`CPU_FP8_NAMES`), which kernels read directly, as on a device.
    """

    decodes_measured = True
    beside = "block_mass"

    def fit(self, layer: Any) -> Fit:
        if (unreadable := self._unreadable(layer)) is not None:
            return Fit(unreadable)
        runs = kernel_path() not in ("torch reference", "portable")
        decodes = layer.impl.alibi_slopes is None and layer.impl.head_size % 16 == 0 and runs
        # vLLM's kernels for AMX are faster, several times so for prompts.
        return Fit(None, decodes, outruns=KEY_LAYOUTS[layer.isa] == "vec")

    def _unreadable(self, layer: Any) -> str | None:
        """Return `Fit.unreadable` of a layer."""
        if layer.impl.is_fp8_kv_cache and layer.kv_cache_dtype not in CPU_FP8_NAMES:
            readable = f"the model's own dtype, {', '.join(CPU_FP8_NAMES)}"
            return f"keeps its keys as {layer.kv_cache_dtype}, which the score pass can't read (it reads {readable})"
        if layer.isa in KEY_LAYOUTS:
            return None
        return f"packs its keys for {layer.isa!r}, which the score pass can't read (it reads {', '.join(KEY_LAYOUTS)})"

    def compact(
        self,
        layer: Any,
        kv_caches: Sequence[torch.Tensor],
        source: torch.Tensor,
        keep: torch.Tensor,
        target: torch.Tensor,
    ) -> None:
        compact([_pages(kv_cache) for kv_cache in kv_caches], source, keep, target, layout=KEY_LAYOUTS[layer.isa])

    def mass(self, call: LayerCall, measured: MassTarget) -> None:
        block_mass(self._arguments(call, measured, call.metadata.seq_lens))  # skips queries of weight 0 by itself

    def decode(self, call: LayerCall, rows: torch.Tensor, seq_lens: torch.Tensor, measured: MassTarget) -> None:
        attention = self._arguments(call, measured, seq_lens)
        decode_mass(attention, rows, call.output[: len(attention.query)].view(attention.query.shape))

    def decode_together(self, slices: Sequence[HeadSlice], measured: Sequence[MassTarget]) -> None:
        classes = [self._arguments(heads.call, its, heads.work.seq_lens) for heads, its in zip(slices, measured)]
        outputs = [heads.call.output[: len(its.query)] for heads, its in zip(slices, classes)]
        decode_classes(classes, slices[0].work.rows, outputs)

    def _arguments(self, call: LayerCall, measured: MassTarget, lens: torch.Tensor) -> PagedAttention:
        """Return the record of kernels for the layer's cache (see `arguments.paged`)."""
        layer, halves = call.layer, _halves(elements(call.layer, call.kv_cache))
        layout, sinks = KEY_LAYOUTS[layer.isa], learned_sinks(layer)
        return paged(call, measured, lens, *halves, layout=layout, sinks=sinks)

    def write(
        self, layer: Any, kv_cache: torch.Tensor, blocks: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        packs = (pack_keys, keys), (pack_values, values)
        halves = _halves(elements(layer, kv_cache))
        for half, scale, (pack, content) in zip(halves, cache_scales(layer, kv_cache), packs):
            half[blocks] = pack(stored_as(content, half.dtype, scale), KEY_LAYOUTS[layer.isa])

    def read(
        self, layer: Any, kv_cache: torch.Tensor, blocks: torch.Tensor, values: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        stored_keys, stored_values = _halves(elements(layer, kv_cache))
        keys, scale = self.as_keys(layer, stored_keys[blocks]), cache_scales(layer, kv_cache)[1]
        if not values:
            return keys, None
        return keys, scaled(unpack_values(stored_values[blocks], KEY_LAYOUTS[layer.isa]), scale)

    def stored_keys(self, layer: Any, kv_cache: torch.Tensor) -> torch.Tensor:
        return _halves(kv_cache)[0]

    def as_keys(self, layer: Any, stored: torch.Tensor) -> torch.Tensor:
        keys = unpack_keys(elements(layer, stored), KEY_LAYOUTS[layer.isa])
        return scaled(keys, cache_scales(layer, stored)[0])


def _halves(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed keys and values of a cache, [num_blocks, Hkv, block_size, D] each."""
    num_blocks, kv_heads, block_size, _ = kv_cache.shape
    keys, values = kv_cache.view(num_blocks, kv_heads, 2, block_size, -1).unbind(2)
    return keys, values


def _pages(kv_cache: torch.Tensor) -> torch.Tensor:
    """View a cache as [num_blocks, Hkv, 2 * block_size, D]: keys, then values."""
    num_blocks, kv_heads, block_size, _ = kv_cache.shape
    return kv_cache.view(num_blocks, kv_heads, 2 * block_size, -1)
