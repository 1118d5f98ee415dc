"""A stock attention backend behind a view, with a mass pass beside it, or a decode kernel in its place.

This module serves every backend: all read the block tables and lengths that a view consists of. Operations that differ
between backends are in their `BackendOps`.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import AttentionSpec, replace_as

from ...compute.attention.fp8 import dequantised
from ...compute.attention.ops import BackendOps
from ...compute.group import GroupRuntime
from ...compute.kernel_blocks import KernelBlockViews
from ...compute.probes import KERNEL_BLOCKS, LayerCall
from ...config import KVPolicyError
from ..engine.spec import EVICTABLE
from ..seams import replaces
from ..start import advice
from ..start.versions import splits_in_builders

#: Attribute of a backend's metadata that holds the step's `StepWork`.
STEP_WORK = "kv_evict_step_work"
#: Attribute of a layer's attention that holds its place in the KV group (see `LayerCall`).
PLACE = "kv_evict_place"


def resident_backend(
    backend: Any, runtime: GroupRuntime, ops: BackendOps, head_class: str, kv_heads: int | None = None
) -> type:
    """Return a subclass of an `AttentionBackend` whose metadata builder takes `runtime`'s view.

    Args:
        backend: the stock backend.
        runtime: of the KV group.
        ops: of the backend.
        head_class: of all heads of its layers (see `KVPolicyConfig.classes`).
        kv_heads: of a layer on this rank, where heads are split: the group's pages have head slots for many layers.
    """

    @replaces(
        "vllm.v1.attention.backend:AttentionMetadataBuilder",
        methods="get_cudagraph_support build_for_drafting",
        why="full graphs of decodes only, and views for a drafter's passes",
        remove_when="vLLM lets plugins wrap a backend that it has chosen",
    )
    @replaces(
        "vllm.model_executor.layers.attention.mla_attention:MLACommonMetadataBuilder",
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder",
        "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder",
        "vllm.v1.attention.backends.flashinfer:FlashInferMetadataBuilder",
        "vllm.v1.attention.backends.triton_attn:TritonAttentionMetadataBuilder",
        methods="__init__ build",
        why="metadata is built from views",
        remove_when="vLLM lets plugins change the block tables that metadata is built from",
    )
    class ResidentBuilder(backend.get_builder_cls()):  # type: ignore[misc]  # the backend is known at run time
        #: If True, vLLM reuses finished metadata for other layers and replaces its view by a block table with holes.
        supports_update_block_table = False

        @classmethod
        def get_cudagraph_support(cls, *args: Any, **kwargs: Any) -> AttentionCGSupport:
            """Full graphs of decodes only (`graphs`): other batches differ too much from step to step."""
            stock = super().get_cudagraph_support(*args, **kwargs)
            return min(stock, AttentionCGSupport.UNIFORM_BATCH, key=lambda support: support.value)

        def __init__(self, kv_cache_spec: AttentionSpec, *args: Any, **kwargs: Any) -> None:
            if kv_heads is not None:
                kv_cache_spec = replace(kv_cache_spec, num_kv_heads=kv_heads)
            super().__init__(kv_cache_spec, *args, **kwargs)
            # vLLM would go on with the lengths of a drafter's first pass, in which no view is made anew.
            self.supports_draft_decode_metadata_update = False
            if kv_heads is not None:
                ops.batch.for_parts(self)
            #: None: kernels read the pool's blocks.
            self.kernel_blocks: KernelBlockViews | None = None
            if kv_cache_spec.block_size != runtime.block_size:
                served = ops.splits_blocks and self.vllm_config.model_config.is_hybrid and splits_in_builders()
                if not served:
                    whole = partial(advice.reads_whole, runtime.block_size)
                    others = advice.either(advice.working(self.vllm_config, ops.whole_blocks, whole))
                    raise KVPolicyError(
                        f"{backend.get_name()} splits KV blocks of {runtime.block_size} tokens into kernel blocks of "
                        f"{kv_cache_spec.block_size}, which a KV policy can't evict: use --block-size "
                        f"{kv_cache_spec.block_size}, or, where vLLM chooses the size (hybrids), --attention-backend "
                        f"{others}"
                    )
                self.kernel_blocks = KernelBlockViews(runtime, kv_cache_spec.block_size)

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            if self.kernel_blocks is None:
                viewed, work = runtime.view(common_attn_metadata)
                read = viewed
            else:
                viewed, read, work = self.kernel_blocks.view(common_attn_metadata)
            # FlashAttention 3's schedule is for all heads of a layer: useless for parts of a layer, or without rows. It
            # has room for as many rows as there are requests, and rows that are cut are more.
            needed = work is None or not work.is_all
            unscheduled = kv_heads is not None or not needed or read.num_reqs > common_attn_metadata.num_reqs
            stock = partial(super().build, common_prefix_len, read, fast_build or unscheduled)
            measured = read if ops.by_kernel_blocks else viewed
            metadata = ops.batch.build(self, stock, measured, needed, runtime.batch.graph is not None)
            setattr(metadata, STEP_WORK, work)
            if self.kernel_blocks is not None:
                setattr(metadata, KERNEL_BLOCKS, self.kernel_blocks)
            return metadata

        def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Any:
            """Return the metadata of a drafter's pass."""
            views = self.kernel_blocks or runtime
            return super().build(0, views.drafting_view(common_attn_metadata), fast_build=True)

    @replaces(
        "vllm.v1.attention.backend:AttentionBackend",
        methods="get_builder_cls customize_spec",
        why="builds metadata from views, and has the plugin's KV cache specs; layers of the model get it as theirs",
        remove_when="vLLM lets plugins wrap a backend that it has chosen",
    )
    class ResidentBackend(backend):
        @staticmethod
        def get_builder_cls() -> type:
            return ResidentBuilder

        @classmethod
        def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
            spec = super().customize_spec(spec)
            if (evictable := EVICTABLE.get(type(spec))) is not None:
                spec = replace_as(spec, evictable, backend=backend.get_name(), head_class=head_class)
            return spec

    # vLLM groups layers by the name of their backend.
    ResidentBackend.__qualname__ = f"Resident[{backend.__qualname__}]"
    return ResidentBackend


def drafting_backend(backend: Any) -> type:
    """Return a subclass of a `resident_backend` for a drafter's layers: no work of the plugin's kernels is theirs.

    They have builders of their own. Model Runner V2 builds the metadata of a drafter's first pass with the step's, and
    that of further passes after the step. V1 builds all of them after it.
    """

    class DraftingBuilder(backend.get_builder_cls()):  # type: ignore[misc]  # the backend is known at run time
        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            return self.build_for_drafting(common_attn_metadata, 0)

    class DraftingBackend(backend):
        @staticmethod
        def get_builder_cls() -> type:
            return DraftingBuilder

    DraftingBackend.__qualname__ = f"Drafting[{backend.__qualname__}]"
    return DraftingBackend


def without_fused_quant(impl: type) -> type:
    """Make a subclass of an `AttentionImpl` whose outputs no kernel quantises."""

    @replaces(
        "vllm.v1.attention.backend:AttentionImpl",
        methods="fused_output_quant_supported",
        why="the plugin's decode kernel does not quantise outputs",
        remove_when="never: subclasses may say so",
    )
    class WithoutFusedQuant(impl):
        def fused_output_quant_supported(self, quant_key: Any) -> bool:
            return False

    return WithoutFusedQuant


def working_impl(impl: type, ops: BackendOps, attended: set[Any]) -> type:
    """Make a subclass of an `AttentionImpl` that does the step's `StepWork`; the stock kernel attends to other rows.

    Its instances have a `PLACE`. Each layer that it attends for is added to `attended`.
    """

    @replaces(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl",
        "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl",
        "vllm.v1.attention.backends.flashinfer:FlashInferImpl",
        "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl",
        methods="forward",
        why="does a step's work beside the stock kernel or in its place; a layer's attention becomes one of this class",
        remove_when="vLLM lets plugins wrap a backend that it has chosen",
    )
    class WorkingImpl(without_fused_quant(impl)):  # type: ignore[misc]  # the backend is known at run time
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
            if attn_metadata is not None:  # None: a dummy step without attention
                attended.add(layer)
            work = getattr(attn_metadata, STEP_WORK, None)
            if work is None:
                return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
            own_query = dequantised(layer, query)
            call = LayerCall(ops, layer, getattr(self, PLACE), own_query, kv_cache, attn_metadata, output)
            if work.precedes:
                work.before(call)
            if not work.is_all:
                with ops.attending() if work.measures else nullcontext():
                    super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
            work.do(call)
            return output

    return WorkingImpl
