"""The record that kernels of attention take, of one layer's call."""

from dataclasses import replace
from typing import Any

import torch

from ..kernels.logits import logits_of
from ..kernels.paged import PagedAttention
from ..probes import LayerCall, MassTarget
from .fp8 import scales


def paged(
    call: LayerCall,
    measured: MassTarget,
    lens: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None = None,
    **others: Any,
) -> PagedAttention:
    """Return the record of one layer and the leading rows of its batch.

    Args:
        call: of the layer.
        measured: what is measured.
        lens: int32 [R], resident tokens of these rows.
        keys, values: of the cache, as kernels take them.
        others: fields that the backend's kernels have beside these, or in place of the layer's own.
    """
    layer, metadata, rows = call.layer, call.metadata, len(lens)
    scale, value_scale = scales(layer, keys)
    return PagedAttention(
        call.query[: metadata.num_actual_tokens],
        keys,
        metadata.block_table[:rows],
        metadata.query_start_loc[: rows + 1],
        lens,
        scale,
        values,
        value_scale,
        **{**logits_of(layer), **measured.arguments, **others},
    )


def narrowed(attention: PagedAttention, metadata: Any) -> PagedAttention:
    """Return the record with the block table cut to the batch's longest request: scratch grows with it."""
    width = -(-metadata.max_seq_len // attention.key_cache.shape[2])
    return replace(attention, block_table=attention.block_table[:, :width])
