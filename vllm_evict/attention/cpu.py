"""vLLM's CPU attention backend: where its keys lie, for the mass pass."""

from typing import Any

import torch

from .mass import block_mass

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
) -> None:
    """One layer's attention mass on the CPU engine (a `ScorePass`).

    Args:
        layer: vLLM's `Attention`; `layer.isa` says how keys are packed.
        query: [T, H, D], rotated.
        kv_cache: [num_blocks, Hkv, block_size, 2 * D], in each block and head first K, then V.
        metadata: vLLM's `CPUAttentionMetadata`, made through the resident view.
        scale: softmax scale.
        weights: float32 [T], or None.
        out: float32 [R, Hkv or 1, W], added to.
    """
    num_blocks, kv_heads, block_size, _ = kv_cache.shape
    keys = kv_cache.view(num_blocks, kv_heads, 2 * block_size, -1)[:, :, :block_size]
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
