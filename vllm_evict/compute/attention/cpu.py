"""`BackendOps` of vLLM's CPU attention backend."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..kernels.compact import compact
from ..kernels.decode import decode_classes, decode_mass
from ..kernels.logits import logits_of
from ..kernels.mass import block_mass, kernel_path, pack_keys, pack_values, unpack_keys, unpack_values
from ..kernels.queries import Queries
from ..work import HeadSlice
from .ops import WithoutScratch

#: ISA of the backend -> layout of its packed keys in `block_mass`.
KEY_LAYOUTS = {"vec": "vec", "vec16": "vec", "amx": "amx"}


class CPUOps(WithoutScratch):
    """`BackendOps` on a CPU.

    A block and head of kv_cache has all keys before all values, packed. Metadata is vLLM's `CPUAttentionMetadata`.
    """

    heads_dim = 1
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
        """Whether `decode` computes the same as the layer's own kernel, at least as fast."""
        impl = layer.impl
        # Layout "amx" packs values too, and vLLM's AMX kernel is faster in spite of a second read of the keys.
        readable = KEY_LAYOUTS.get(layer.isa) == "vec" and not impl.is_fp8_kv_cache and impl.head_size % 16 == 0
        return impl.alibi_slopes is None and readable and kernel_path() not in ("torch reference", "portable")

    @staticmethod
    def metadata(builder: Any, stock: Callable[[], Any], common: Any, needed: bool, in_graph: bool) -> Any:
        """Return the backend's metadata, which has all that these operations read."""
        return stock()

    @staticmethod
    def kv_heads(kv_cache: torch.Tensor) -> int:
        return kv_cache.shape[1]

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
        keys, _ = _halves(kv_cache)
        block_mass(
            query[: metadata.num_actual_tokens],
            keys,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            layer.impl.scale,
            out,
            per_token=per_token,
            weights=weights,
            **_how(layer),
        )

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
        keys, _ = _halves(kv_cache)
        out = torch.zeros(len(queries.tokens), keys.shape[1], width)
        block_mass(
            query[queries.tokens],
            keys,
            metadata.block_table[queries.rows],
            torch.arange(len(queries.tokens) + 1, dtype=torch.int32),
            queries.lens,
            layer.impl.scale,
            out,
            **_how(layer),
        )
        return out.mul_(keys.shape[1] / query.shape[1])

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
        keys, values = _halves(kv_cache)
        tokens = metadata.num_actual_tokens
        decode_mass(
            query[:tokens],
            keys,
            values,
            metadata.block_table,
            metadata.query_start_loc,
            seq_lens,
            rows,
            layer.impl.scale,
            output[:tokens].view(query[:tokens].shape),
            out=out,
            per_token=per_token,
            weights=weights,
            **_how(layer),
        )

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
        keys, values = zip(*(_halves(heads.kv_cache) for heads in slices))
        metadata = slices[0].metadata
        tokens = metadata.num_actual_tokens
        decode_classes(
            query[:tokens],
            keys,
            values,
            [heads.metadata.block_table for heads in slices],
            metadata.query_start_loc,
            [heads.work.seq_lens for heads in slices],
            slices[0].work.rows,
            layer.impl.scale,
            output[:tokens],
            out=outs,
            per_token=per_token,
            weights=weights,
            **_how(layer),
        )

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


def _how(layer: Any) -> dict[str, Any]:
    """Return the arguments of kernels that belong to a layer, with sinks in float32."""
    logits = logits_of(layer)
    sinks = None if logits["sinks"] is None else logits["sinks"].float()
    return {"layout": KEY_LAYOUTS[layer.isa], "soft_cap": logits["soft_cap"], "sinks": sinks}


def _halves(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed keys and values of a cache, [num_blocks, Hkv, block_size, D] each."""
    block_size = kv_cache.shape[2]
    pages = _pages(kv_cache)
    return pages[:, :, :block_size], pages[:, :, block_size:]


def _pages(kv_cache: torch.Tensor) -> torch.Tensor:
    """View a cache as [num_blocks, Hkv, 2 * block_size, D]: keys, then values."""
    num_blocks, kv_heads, block_size, _ = kv_cache.shape
    return kv_cache.view(num_blocks, kv_heads, 2 * block_size, -1)
