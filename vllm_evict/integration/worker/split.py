"""Attention of layers whose KV heads lie in several KV groups.

One call serves all groups if the plugin's kernel attends for all rows, else each group has a call of its own.
"""

from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from ...compute.attention.fp8 import dequantised
from ...compute.attention.ops import BackendOps
from ...compute.probes import LayerCall
from ...compute.work import HeadSlice, do_together
from ...config import KVPolicyError
from ..seams import replaces
from .backend import PLACE, STEP_WORK, without_fused_quant


@dataclass(slots=True)
class LayerPart:
    """The heads of one class in one layer. A layer's heads are in the order of its parts (`core.arrange`).

    Attributes:
        pages: layer name of the KV group's pages.
        heads, query_heads: the part's share of the layer's KV heads and query heads.
        slots: the part's head slots in the group's pages.
        impl: the layer's attention, for the part's heads.
        holder: the stand-in layer; vLLM sets its `kv_cache` each time that it allocates the pages.
        heads_dim: dimension of the pages that counts head slots.
    """

    pages: str
    heads: slice
    query_heads: slice
    slots: slice
    impl: Any
    holder: Any
    heads_dim: int
    _seen: tuple[Any, Any] = (None, None)

    @property
    def kv_cache(self) -> torch.Tensor:
        """The part's slots of the pages: [num_blocks, heads, ...]."""
        pages, cache = self._seen
        if pages is not self.holder.kv_cache:
            pages = self.holder.kv_cache
            cache = pages.movedim(self.heads_dim, 0)[self.slots].movedim(0, self.heads_dim)
            self._seen = pages, cache
        return cache


def part_of(
    layer: Any, pages: str, holder: Any, heads_dim: int, first: int, heads: int, slot: int, place: int
) -> LayerPart:
    """Return the part with KV heads from `first` on, in head slots from `slot` on, the `place`-th of the KV group."""
    impl, group = copy(layer.impl), layer.num_heads // layer.num_kv_heads
    impl.num_kv_heads, impl.num_heads = heads, heads * group
    setattr(impl, PLACE, place)
    query_heads = slice(first * group, (first + heads) * group)
    slots = slice(slot, slot + heads)
    return LayerPart(pages, slice(first, first + heads), query_heads, slots, impl, holder, heads_dim)


def split_impl(impl: type, parts: list[LayerPart], ops: BackendOps, attended: set[Any]) -> type:
    """Return a subclass of an `AttentionImpl` for one layer, which calls the `impl` of each part.

    The layer is added to `attended` when it attends.
    """

    @replaces(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl",
        methods="forward",
        why="heads of a layer lie in several KV groups; a layer's attention becomes one of this class",
        remove_when="vLLM has KV groups of heads",
    )
    class SplitImpl(without_fused_quant(impl)):  # type: ignore[misc]  # the backend is known at run time
        def forward(
            self,
            layer: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            kv_cache: torch.Tensor,
            attn_metadata: Any,
            output: torch.Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> torch.Tensor:
            if key is None or value is None:
                raise KVPolicyError(
                    f"{layer.layer_name} got no keys and values, because the model writes them into its cache itself; "
                    "expected both, since heads are split over several caches; use a policy for whole layers, such as "
                    "h2o, snapkv or sink-window"
                )
            if attn_metadata is None:  # a dummy step: zeros, so that a router of experts gets defined numbers
                return output.fill_(0)
            attended.add(layer)
            of_group, shares = get_forward_context().attn_metadata, []
            own_query = dequantised(layer, query)
            for part in parts:
                metadata = of_group[part.pages]
                # vLLM does not write keys and values of a layer that shares another layer's cache.
                part.impl.do_kv_cache_update(
                    layer, key[:, part.heads], value[:, part.heads], part.kv_cache, metadata.slot_mapping
                )
                work: Any = getattr(metadata, STEP_WORK, None)
                where = getattr(part.impl, PLACE), own_query[:, part.query_heads], part.kv_cache, metadata
                shares.append(HeadSlice(work, LayerCall(ops, layer, *where, output[:, part.query_heads])))
            if all(share.work is not None for share in shares) and do_together(shares):
                return output
            for part, share in zip(parts, shares):
                # Kernels write contiguous outputs.
                its_output = torch.empty(share.call.query.shape, dtype=output.dtype, device=output.device)
                its_query = query[:, part.query_heads]
                part.impl.forward(layer, its_query, None, None, part.kv_cache, share.call.metadata, its_output)
                share.call.output.copy_(its_output)
            return output

    return SplitImpl
