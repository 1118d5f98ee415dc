"""vLLM's CPU attention backend: where its keys and values lie, for scores."""

from typing import Any

import torch

from .mass import block_mass, unpack_keys, unpack_values
from .queries import Queries

#: Backend ISAs whose packed keys `block_mass` reads -> its name of the layout.
KEY_LAYOUTS = {"vec": "vec", "vec16": "vec", "amx": "amx"}


def cpu_mass(
    layer: Any,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: Any,
    scale: float,
    weights: torch.Tensor | None,
    out: torch.Tensor,
    queries: Queries | None = None,
) -> None:
    """One layer's attention mass on the CPU engine (a `ScorePass`).

    Args:
        layer: vLLM's `Attention`; `layer.isa` says how keys are packed.
        query: [T, H, D], rotated.
        kv_cache: [num_blocks, Hkv, block_size, 2 * D], in each block and head first K, then V.
        metadata: vLLM's `CPUAttentionMetadata`, made through the resident view.
        scale: softmax scale.
        weights: float32 [T], or None.
        out: float32 [R, Hkv or 1, W], added to; [n, Hkv, W] for n `queries`.
        queries: measure these one by one: each on its own row of `out`, the mean over a KV head's query heads.
    """
    num_blocks, kv_heads, block_size, _ = kv_cache.shape
    keys = kv_cache.view(num_blocks, kv_heads, 2 * block_size, -1)[:, :, :block_size]
    if queries is not None:
        block_mass(
            query[queries.tokens],
            keys,
            metadata.block_table[queries.rows],
            torch.arange(len(queries.tokens) + 1, dtype=torch.int32),
            queries.lens,
            scale,
            out,
            layout=KEY_LAYOUTS[layer.isa],
        )
        out *= kv_heads / query.shape[1]
        return
    block_mass(
        query[: metadata.num_actual_tokens],
        keys,
        metadata.block_table,
        metadata.query_start_loc,
        metadata.seq_lens,
        scale,
        out,
        weights=weights,
        layout=KEY_LAYOUTS[layer.isa],
    )


def cpu_keys_values(layer: Any, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of some physical blocks of one layer, in the cache's dtype.

    Args:
        layer: vLLM's `Attention`, its cache bound.
        blocks: int64 [n].

    Returns:
        Copies, [n, Hkv, block_size, D] each, element (t, d) in its place.
    """
    packed = layer.kv_cache[blocks]
    num_blocks, kv_heads, block_size, _ = packed.shape
    keys, values = packed.view(num_blocks, kv_heads, 2 * block_size, -1).split(block_size, dim=2)
    layout = KEY_LAYOUTS[layer.isa]
    return unpack_keys(keys.contiguous(), layout), unpack_values(values.contiguous(), layout)
