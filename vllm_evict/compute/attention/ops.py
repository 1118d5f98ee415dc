"""The interface `BackendOps`, and its implementation for each attention backend that policies run on."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, Protocol

from ..kernels.queries import Queries
from ..probes import LayerCall, Measured
from ..work import HeadSlice

#: Name of a backend -> module and class of its `BackendOps`. Imported on use, since a CPU may lack Triton.
OPS = {
    "CPU_ATTN": ("cpu", "CPUOps"),
    "FLASH_ATTN": ("flash", "FlashOps"),
    "FLASHINFER": ("flashinfer", "FlashInferOps"),
    "TRITON_ATTN": ("triton", "TritonOps"),
    "CPU_MLA": ("latent", "LatentOps"),
    "AMX_MLA": ("latent", "LatentOps"),
    "FLASHMLA": ("latent", "DeviceLatentOps"),
    "FLASHINFER_MLA": ("latent", "DeviceLatentOps"),
    "FLASH_ATTN_MLA": ("latent", "DeviceLatentOps"),
    "TRITON_MLA": ("latent", "DeviceLatentOps"),
}
#: Backends of multi-head latent attention (MLA), on a CPU and on a device.
LATENT = ("CPU_MLA", "AMX_MLA", "FLASHINFER_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "TRITON_MLA")
#: Backends some of whose kernels plan for all heads of a layer. Policies that split heads run with their other kernels.
WHOLE_LAYERS = ("FLASHINFER",)
#: Sizes of heads that the kernels for a device read.
READ_HEADS = range(16, 257)
#: vLLM's names of float8_e4m3fn caches, with one scale for a layer's keys and one for its values.
FP8_NAMES = ("fp8", "fp8_e4m3")
#: vLLM's names of all fp8 caches that are read on a CPU.
CPU_FP8_NAMES = (*FP8_NAMES, "fp8_e5m2")


class BackendOps(Protocol):
    """Operations on one layer, beside a backend's kernel or in its place.

    Shapes of a `LayerCall`: query and output [T, H, D], the query rotated; kv_cache [num_blocks, Hkv, block_size,
    2 * D]; metadata is the backend's, made from views. Blocks are physical.

    Attributes:
        heads_dim: dimension of a layer's cache that counts its KV heads.
        beside: names of the kernels of `mass`, for the log.
        decodes_measured: whether `decode`, which reads keys once, attends for measured requests.
        compiles: whether kernels are compiled at their first launch (see `attention.warmup`). They run on a device.
        capturing: whether calls are captured in a full CUDA graph, or warm one up.
        scratch_bytes: bytes that `reserve` allocates.
        splits_blocks: whether the backend's kernels may read smaller blocks than the pool's (`kernel_blocks`).
        by_kernel_blocks: whether metadata and caches are then by the kernels' blocks; else they are by the pool's.
        whole_blocks: backends for the same layers whose kernels read the pool's blocks on most devices, for a message.
    """

    heads_dim: int
    beside: str
    decodes_measured: bool
    compiles: bool
    capturing: bool
    scratch_bytes: int
    splits_blocks: bool
    by_kernel_blocks: bool
    whole_blocks: tuple[str, ...]

    def unreadable(self, layer: Any) -> str | None:
        """Return why the score pass cannot read a layer's keys, as the end of a sentence; None if it can."""
        ...

    def can_decode(self, layer: Any) -> bool:
        """Return whether `decode` replaces the layer's own kernel."""
        ...

    def outruns(self, layer: Any) -> bool:
        """Return whether `decode` is at least as fast as the layer's own kernel, for prompts too and without mass.

        If so, `decode` attends for requests with holes that are not measured, and for prompts.
        """
        ...

    def scratch_for(
        self, requests: int, in_graphs: int, heads: int, block_size: int, longest: int, per_token: bool
    ) -> int:
        """Set the size of `decode`'s scratch. One launch decodes as many requests as the scratch has room for.

        Args:
            requests: most requests of a step; 0: `decode` is not used.
            in_graphs: most requests of a full CUDA graph; 0: there are no full graphs.
            heads: query heads of a layer.
            block_size: tokens.
            longest: most blocks of a request.
            per_token: whether mass may be by token.

        Returns:
            Most blocks of a request that `decode` supports in full CUDA graphs, at most `longest`; 0: none.
        """
        ...

    def reserve(self, device: Any) -> None:
        """Allocate the scratch, once."""
        ...

    def metadata(self, builder: Any, stock: Callable[[], Any], common: Any, needed: bool, in_graph: bool) -> Any:
        """Return a step's metadata for the other methods.

        Args:
            builder: the backend's builder.
            stock: makes the backend's metadata.
            common: vLLM's `CommonAttentionMetadata`, with views.
            needed: whether the backend's kernel attends to anything.
            in_graph: whether a full CUDA graph is captured or replayed.
        """
        ...

    def for_parts(self, builder: Any) -> None:
        """Make the backend's builder build metadata that serve any part of a layer's heads."""
        ...

    def dequantised(self, layer: Any, query: Any) -> Any:
        """Return the query in the model's dtype, as `mass`, `mass_of`, `decode` and `decode_together` take it."""
        ...

    def kv_heads(self, kv_cache: Any) -> int: ...

    def attending(self) -> AbstractContextManager[None]:
        """Return a context for the stock kernel of one layer, before `mass`."""
        ...

    def compact(self, layer: Any, kv_caches: Sequence[Any], source: Any, keep: Any, target: Any) -> None:
        """Gather kept tokens of L layers with equal numbers of heads (see `kernels.compact`).

        Args:
            source, target: int32, on the host.
            keep: int32 [L, Hkv, kept], on the device of the caches.
        """
        ...

    def mass(self, call: LayerCall, measured: Measured) -> None:
        """Add the mass of queries that the stock kernel attends to (see `kernels.mass`). `measured.out` is given."""
        ...

    def mass_of(self, call: LayerCall, queries: Queries, width: int) -> Any:
        """Return the mass of each of n queries, averaged over the query heads of a KV head: float32 [n, Hkv, width]."""
        ...

    def decode(self, call: LayerCall, rows: Any, seq_lens: Any, measured: Measured) -> None:
        """Attend for the requests `rows`, and add their mass (see `kernels.decode`).

        Each of them has one token, unless the kernel `outruns` the layers' own.

        Args:
            call: gets the output.
            rows: int32 [n], rows of the batch.
            seq_lens: int32 [R], resident tokens.
            measured: what is measured.
        """
        ...

    def decode_together(self, slices: Sequence[HeadSlice], measured: Sequence[Measured]) -> None:
        """`decode` of one layer's heads in several KV groups, which differ in `Measured.out` alone."""
        ...

    def write(self, layer: Any, kv_cache: Any, blocks: Any, keys: Any, values: Any) -> None:
        """Overwrite `blocks` (int64 [n]) with keys and values [n, Hkv, block_size, D], of any float dtype."""
        ...

    def read(self, layer: Any, kv_cache: Any, blocks: Any, values: bool) -> tuple[Any, Any]:
        """Return copies of keys, and values or None, of `blocks` (int64 [n]): [n, Hkv, block_size, D] each."""
        ...

    def stored_keys(self, kv_cache: Any) -> Any:
        """Return a view of all keys as the cache stores them, blocks first."""
        ...

    def as_keys(self, layer: Any, stored: Any) -> Any:
        """Convert blocks of `stored_keys` to [n, Hkv, block_size, D] in plain order, as `read` returns them."""
        ...


class WithStockMetadata:
    """Parts of `BackendOps` for backends whose own metadata has all that the operations read."""

    heads_dim = 1
    splits_blocks = False
    by_kernel_blocks = False
    whole_blocks = ("FLASH_ATTN", "TRITON_ATTN")

    @staticmethod
    def metadata(builder: Any, stock: Callable[[], Any], common: Any, needed: bool, in_graph: bool) -> Any:
        return stock()

    @staticmethod
    def for_parts(builder: Any) -> None:
        """Do nothing: the metadata serve any heads already."""

    @staticmethod
    def outruns(layer: Any) -> bool:
        return False

    @staticmethod
    def kv_heads(kv_cache: Any) -> int:
        return kv_cache.shape[1]


class WithoutScratch(WithStockMetadata):
    """Parts of `BackendOps` for backends whose kernels need no reserved scratch."""

    decodes_measured = False
    compiles = False
    capturing = False
    scratch_bytes = 0

    @staticmethod
    def scratch_for(requests: int, in_graphs: int, heads: int, block_size: int, longest: int, per_token: bool) -> int:
        return 0

    @staticmethod
    def reserve(device: Any) -> None:
        """Do nothing."""

    @staticmethod
    def dequantised(layer: Any, query: Any) -> Any:
        """Return the query: vLLM does not quantise it for these backends."""
        return query

    @staticmethod
    def attending() -> AbstractContextManager[None]:
        return nullcontext()


def ops_for(backend: str, block_size: int | None = None) -> BackendOps:
    """Make the `BackendOps` of a backend, with scratch of its own, for all layers of one engine.

    Args:
        backend: name.
        block_size: tokens of a block of the pool, if the backend's kernels on a device may read smaller ones.
    """
    module, name = OPS[backend]
    ops = getattr(import_module(f".{module}", __package__), name)
    if block_size is not None and ops.compiles and not ops.splits_blocks:
        ops = import_module(".kernel_blocks", __package__).with_kernel_blocks(ops, block_size)
    return ops()
