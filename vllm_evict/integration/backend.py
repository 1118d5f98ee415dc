"""A stock attention backend behind a resident view, with a mass pass beside it, or a decode kernel in its place.

Nothing here knows which backend it is: the view is made of block tables and lengths, which all of them read. What is
special to one lies in its `BackendOps`.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, replace_as

from ..compute.attention.ops import BackendOps
from ..compute.group import GroupRuntime
from .spec import EvictableSpec

#: Attribute of a backend's metadata that holds the step's `StepWork`.
STEP_WORK = "kv_evict_step_work"
#: Attribute of a layer's attention that holds its place in the KV group (see `StepWork.do`).
PLACE = "kv_evict_place"


def resident_backend(
    backend: type, runtime: GroupRuntime, ops: BackendOps, head_class: str = "", kv_heads: int | None = None
) -> type:
    """A subclass of an `AttentionBackend` whose metadata builder looks through `runtime`'s view.

    Args:
        backend: the stock backend.
        runtime: of the KV group.
        ops: of the backend.
        head_class: of all heads of its layers (see `KVPolicyConfig.classes`).
        kv_heads: of a layer on this rank, where heads are split: the group's pages have slots for those of many layers.
    """

    class ResidentBuilder(backend.get_builder_cls()):
        #: Else vLLM takes finished metadata for other layers and swaps its block table for one that has its holes.
        supports_update_block_table = False

        @classmethod
        def get_cudagraph_support(cls, *args: Any, **kwargs: Any) -> AttentionCGSupport:
            """Full graphs of decodes (see `compat.graphs`); all else differs too much from step to step."""
            stock = super().get_cudagraph_support(*args, **kwargs)
            return min(stock, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, key=lambda support: support.value)

        def __init__(self, kv_cache_spec: AttentionSpec, *args: Any, **kwargs: Any) -> None:
            if kv_heads is not None:
                kv_cache_spec = replace(kv_cache_spec, num_kv_heads=kv_heads)
            super().__init__(kv_cache_spec, *args, **kwargs)
            if kv_cache_spec.block_size != runtime.block_size:
                raise ValueError(
                    f"{backend.get_name()} splits KV blocks of {runtime.block_size} tokens into kernel blocks of "
                    f"{kv_cache_spec.block_size}, which a KV policy can't evict: use --block-size "
                    f"{kv_cache_spec.block_size}"
                )

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            common_attn_metadata, work = runtime.view(common_attn_metadata)
            # Schedules made ahead (FlashAttention 3) are for all heads of a layer: no use to parts of it, or to nobody.
            needed = work is None or not work.is_all
            unscheduled = kv_heads is not None or not needed
            stock = partial(super().build, common_prefix_len, common_attn_metadata, fast_build or unscheduled)
            metadata = ops.metadata(self, stock, common_attn_metadata, needed, runtime.batch.graph is not None)
            setattr(metadata, STEP_WORK, work)
            return metadata

    class ResidentBackend(backend):
        @staticmethod
        def get_builder_cls() -> type:
            return ResidentBuilder

        @classmethod
        def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
            spec = super().customize_spec(spec)
            if type(spec) is FullAttentionSpec:
                spec = replace_as(spec, EvictableSpec, backend=backend.get_name(), head_class=head_class)
            return spec

    # vLLM groups layers by their backend's name.
    ResidentBackend.__qualname__ = f"Resident[{backend.__qualname__}]"
    return ResidentBackend


def working_impl(impl: type, ops: BackendOps) -> type:
    """A subclass of an `AttentionImpl` that does the step's `StepWork` and leaves the rest to the stock kernel.

    Its instances have a `PLACE`.
    """

    class WorkingImpl(impl):
        def fused_output_quant_supported(self, quant_key: Any) -> bool:
            """Not by the kernel that decodes."""
            return False

        def forward(
            self,
            layer: Any,
            query: Any,
            key: Any,
            value: Any,
            kv_cache: Any,
            attn_metadata: Any,
            output: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            work = getattr(attn_metadata, STEP_WORK, None)
            if work is None or not work.is_all:
                with ops.attending() if work is not None and work.measures else nullcontext():
                    super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
            if work is not None:
                place = getattr(self, PLACE)
                work.do(ops, layer, place, ops.dequantised(layer, query), kv_cache, attn_metadata, output)
            return output

    return WorkingImpl
