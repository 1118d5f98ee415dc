"""vLLM's attention backends that a policy runs on, by name: all of them, in one place."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Protocol

from ..kernels.queries import Queries
from ..work import HeadSlice

#: Name of a backend -> module and class of its `BackendOps`, imported when it is used: a CPU may have no Triton.
OPS = {
    "CPU_ATTN": ("cpu", "CPUOps"),
    "FLASH_ATTN": ("flash", "FlashOps"),
    "FLASHINFER": ("flashinfer", "FlashInferOps"),
    "TRITON_ATTN": ("triton", "TritonOps"),
}
#: Those whose metadata is made for all heads of a layer: policies that split heads are not for them.
WHOLE_LAYERS = ("FLASHINFER",)
#: vLLM's names of caches in float8_e4m3fn, with one scale for a layer's keys and one for its values.
FP8_NAMES = ("fp8", "fp8_e4m3")


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
        shares: Sequence[HeadSlice],
        output: Any,
        weights: Any,
        outs: Any,
        per_token: bool = False,
    ) -> None: ...

    def write(self, layer: Any, kv_cache: Any, blocks: Any, keys: Any, values: Any) -> None: ...

    def read(self, layer: Any, kv_cache: Any, blocks: Any, values: bool) -> tuple[Any, Any]: ...

    def stored_keys(self, kv_cache: Any) -> Any: ...

    def as_keys(self, layer: Any, stored: Any) -> Any: ...


def ops_for(backend: str) -> BackendOps:
    """What is done beside or instead of a backend's kernel; with its own scratch, for the layers of one engine."""
    module, name = OPS[backend]
    return getattr(import_module(f".{module}", __package__), name)()
