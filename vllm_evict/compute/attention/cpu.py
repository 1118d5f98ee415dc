"""`BackendOps` of vLLM's CPU attention backend."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from ..kernels.compact import compact
from ..kernels.decode import decode_classes, decode_mass
from ..kernels.logits import logits_of
from ..kernels.mass import block_mass, kernel_path, pack_keys, pack_values, unpack_keys, unpack_values
from ..kernels.paged import PagedAttention
from ..kernels.queries import Queries
from ..work import HeadSlice
from .ops import WithoutScratch

#: ISA of the backend -> layout of its packed keys in `block_mass`.
KEY_LAYOUTS = {"vec": "vec", "vec16": "vec", "amx": "amx"}


class CPUOps(WithoutScratch):
    """`BackendOps` on a CPU.

    A block and head of kv_cache has all keys before all values, packed. Metadata is vLLM's `CPUAttentionMetadata`.
    """

    decodes_measured = True
    beside = "block_mass"

    @staticmethod
    def unreadable(layer: Any) -> str | None:
        """See `BackendOps.unreadable`."""
        if layer.impl.is_fp8_kv_cache:
            return f"keeps its keys as {layer.kv_cache_dtype}, which the score pass can't read on a CPU"
        if layer.isa in KEY_LAYOUTS:
            return None
        return f"packs its keys for {layer.isa!r}, which the score pass can't read (it reads {', '.join(KEY_LAYOUTS)})"

    @staticmethod
    def can_decode(layer: Any) -> bool:
        """Return whether `decode` computes what the layer's own kernel does, faster than that and `mass`."""
        impl = layer.impl
        readable = layer.isa in KEY_LAYOUTS and not impl.is_fp8_kv_cache and impl.head_size % 16 == 0
        return impl.alibi_slopes is None and readable and kernel_path() not in ("torch reference", "portable")

    @staticmethod
    def outruns(layer: Any) -> bool:
        """See `BackendOps.outruns`. vLLM's kernels for AMX are faster, several times so for prompts."""
        return KEY_LAYOUTS.get(layer.isa) == "vec"

    @staticmethod
    def compact(
        layer: Any, kv_caches: Sequence[torch.Tensor], source: torch.Tensor, keep: torch.Tensor, target: torch.Tensor
    ) -> None:
        """See `BackendOps.compact`."""
        compact([_pages(kv_cache) for kv_cache in kv_caches], source, keep, target, layout=KEY_LAYOUTS[layer.isa])

    @staticmethod
    def mass(
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        weights: torch.Tensor | None,
        out: torch.Tensor,
        per_token: bool = False,
        last: torch.Tensor | None = None,
    ) -> None:
        """See `BackendOps.mass`; runs `block_mass`, which skips queries of weight 0 by itself."""
        block_mass(_attention(layer, query, kv_cache, metadata, mass=out, weights=weights, per_token=per_token))

    @staticmethod
    def mass_of(
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        queries: Queries,
        width: int,
    ) -> torch.Tensor:
        """See `BackendOps.mass_of`; runs `block_mass`."""
        kv_heads = kv_cache.shape[1]
        out = torch.zeros(len(queries.tokens), kv_heads, width)
        alone = SimpleNamespace(
            num_actual_tokens=len(out),
            block_table=metadata.block_table[queries.rows],
            query_start_loc=torch.arange(len(out) + 1, dtype=torch.int32),
            seq_lens=queries.lens,
        )
        block_mass(_attention(layer, query[queries.tokens], kv_cache, alone, mass=out))
        return out.mul_(kv_heads / query.shape[1])

    @staticmethod
    def decode(
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
        """See `BackendOps.decode`; runs `decode_mass`."""
        measured = {"mass": out, "weights": weights, "per_token": per_token}
        attention = _attention(layer, query, kv_cache, metadata, seq_lens=seq_lens, **measured)
        decode_mass(attention, rows, output[: len(attention.query)].view(attention.query.shape))

    @staticmethod
    def decode_together(
        layer: Any,
        query: torch.Tensor,
        slices: Sequence[HeadSlice],
        output: torch.Tensor,
        weights: torch.Tensor | None,
        outs: Sequence[torch.Tensor | None],
        per_token: bool = False,
    ) -> None:
        """See `BackendOps.decode_together`; runs `decode_classes`."""
        classes = [
            _attention(
                *(layer, heads.query, heads.kv_cache, heads.metadata),
                seq_lens=heads.work.seq_lens,
                mass=out,
                weights=weights,
                per_token=per_token,
            )
            for heads, out in zip(slices, outs)
        ]
        outputs = output[: len(classes[0].query)].split([its.query.shape[1] for its in classes], 1)
        decode_classes(classes, slices[0].work.rows, outputs)

    @staticmethod
    def write(
        layer: Any, kv_cache: torch.Tensor, blocks: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """See `BackendOps.write`."""
        layout = KEY_LAYOUTS[layer.isa]
        packed = (pack_keys(keys.to(kv_cache.dtype), layout), pack_values(values.to(kv_cache.dtype), layout))
        for half, content in zip(_halves(kv_cache), packed):
            half[blocks] = content

    @staticmethod
    def read(
        layer: Any, kv_cache: torch.Tensor, blocks: torch.Tensor, values: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `BackendOps.read`."""
        stored_keys, stored_values = _halves(kv_cache)
        keys = CPUOps.as_keys(layer, stored_keys[blocks])
        return keys, unpack_values(stored_values[blocks], KEY_LAYOUTS[layer.isa]) if values else None

    @staticmethod
    def stored_keys(kv_cache: torch.Tensor) -> torch.Tensor:
        """See `BackendOps.stored_keys`."""
        return _halves(kv_cache)[0]

    @staticmethod
    def as_keys(layer: Any, stored: torch.Tensor) -> torch.Tensor:
        """See `BackendOps.as_keys`."""
        return unpack_keys(stored, KEY_LAYOUTS[layer.isa])


def _attention(
    layer: Any,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: Any,
    *,
    seq_lens: torch.Tensor | None = None,
    **measured: Any,
) -> PagedAttention:
    """Return the arguments of kernels for a layer and the backend's metadata, whose lengths `seq_lens` replaces."""
    keys, values = _halves(kv_cache)
    logits = logits_of(layer)
    if logits["sinks"] is not None:
        logits["sinks"] = logits["sinks"].float()
    return PagedAttention(
        query[: metadata.num_actual_tokens],
        keys,
        metadata.block_table,
        metadata.query_start_loc,
        metadata.seq_lens if seq_lens is None else seq_lens,
        layer.impl.scale,
        values,
        layout=KEY_LAYOUTS[layer.isa],
        **logits,
        **measured,
    )


def _halves(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed keys and values of a cache, [num_blocks, Hkv, block_size, D] each."""
    num_blocks, kv_heads, block_size, _ = kv_cache.shape
    keys, values = kv_cache.view(num_blocks, kv_heads, 2, block_size, -1).unbind(2)
    return keys, values


def _pages(kv_cache: torch.Tensor) -> torch.Tensor:
    """View a cache as [num_blocks, Hkv, 2 * block_size, D]: keys, then values."""
    num_blocks, kv_heads, block_size, _ = kv_cache.shape
    return kv_cache.view(num_blocks, kv_heads, 2 * block_size, -1)
