"""A stock attention backend behind a resident view, with a mass pass beside it, or a decode kernel in its place.

Nothing here knows which backend it is: the view is made of block tables and lengths, which all of them read. What is
special to one lies in its `BackendOps`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, replace_as

from ..core.spec import EvictableSpec
from ..kernels.queries import Queries
from ..worker.group import GroupRuntime
from ..worker.work import Share

#: Attribute of a backend's metadata that holds the step's `StepWork`.
STEP_WORK = "kv_evict_step_work"


class BackendOps(Protocol):
    """What is done for one layer beside or instead of a backend's kernel. `attention.cpu.CPUOps` has the shapes.

    Attributes:
        heads_dim: dimension of a layer's cache that counts its KV heads.
        beside: the kernels of `mass`, for the log.
        decodes_measured: whether requests that are measured are better decoded by `decode`, which reads keys once, and
            all others by the backend's kernel; else those that lack blocks are.
        compiles: whether its kernels are compiled when they are first launched: see `attention.warmup`. They run on a
            device, whose memory vLLM shares out.
        capturing: whether calls are captured in a full CUDA graph, or warm up one.
        scratch_bytes: of what `reserve` takes.
    """

    heads_dim: int
    beside: str
    decodes_measured: bool
    compiles: bool
    capturing: bool
    scratch_bytes: int

    def unreadable(self, layer: Any) -> str | None: ...

    def can_decode(self, layer: Any) -> bool: ...

    def scratch_for(
        self, requests: int, in_graphs: int, heads: int, block_size: int, longest: int, per_token: bool
    ) -> int:
        """Settle how much scratch `decode` has. It attends to as many requests at once as there is room for.

        Args:
            requests: most of a step; 0: nothing is decoded.
            in_graphs: most of a full CUDA graph; 0: there are none.
            heads: query heads of a layer.
            block_size: tokens.
            longest: most blocks of a request.
            per_token: whether mass may be by token.

        Returns:
            Blocks of the longest request that `decode` takes in full CUDA graphs, at most `longest`; 0: it is in none.
        """
        ...

    def reserve(self, device: Any) -> None:
        """Take the scratch, if there is none yet."""
        ...

    def metadata(self, builder: Any, stock: Callable[[], Any], common: Any, needed: bool, in_graph: bool) -> Any:
        """A step's metadata, which the other methods are given.

        Args:
            builder: the backend's.
            stock: has it make the backend's metadata.
            common: vLLM's `CommonAttentionMetadata` that it is made of, through the resident view.
            needed: whether the backend's kernel attends to anything.
            in_graph: whether it is for a full CUDA graph, to capture or to replay.
        """
        ...

    def dequantised(self, layer: Any, query: Any) -> Any: ...

    def kv_heads(self, kv_cache: Any) -> int: ...

    def attending(self) -> AbstractContextManager[None]:
        """Around the stock kernel of one layer, where `mass` comes next."""
        ...

    def compact(self, layer: Any, kv_caches: Sequence[Any], source: Any, keep: Any, target: Any) -> None: ...

    def mass(
        self, layer: Any, query: Any, kv_cache: Any, metadata: Any, weights: Any, out: Any, per_token: bool = False
    ) -> None: ...

    def mass_of(self, layer: Any, query: Any, kv_cache: Any, metadata: Any, queries: Queries, width: int) -> Any: ...

    def decode(
        self,
        layer: Any,
        query: Any,
        kv_cache: Any,
        metadata: Any,
        output: Any,
        rows: Any,
        seq_lens: Any,
        weights: Any,
        out: Any,
        per_token: bool = False,
    ) -> None: ...

    def decode_together(
        self,
        layer: Any,
        query: Any,
        shares: Sequence[Share],
        output: Any,
        weights: Any,
        outs: Any,
        per_token: bool = False,
    ) -> None: ...

    def write(self, layer: Any, kv_cache: Any, blocks: Any, keys: Any, values: Any) -> None: ...

    def read(self, layer: Any, kv_cache: Any, blocks: Any, values: bool) -> tuple[Any, Any]: ...


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
    """A subclass of an `AttentionImpl` that does the step's `StepWork` and leaves the rest to the stock kernel."""

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
                work.do(ops, layer, ops.dequantised(layer, query), kv_cache, attn_metadata, output)
            return output

    return WorkingImpl
