"""The interface `BackendOps`, and its implementation for each attention backend that policies run on."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from ..kernels.logits import logits_of
from ..kernels.paged import PagedAttention
from ..kernels.queries import Queries
from ..probes import LayerCall, MassTarget
from ..work import HeadSlice
from .fp8 import scales

#: Name of a backend -> module and class of its `BackendOps`. Imported on use, since a CPU may lack Triton.
OPS = {
    "CPU_ATTN": ("cpu", "CPUOps"),
    "FLASH_ATTN": ("flash", "FlashOps"),
    "FLASHINFER": ("flashinfer", "FlashInferOps"),
    "TRITON_ATTN": ("triton", "TritonOps"),
    "FLASH_ATTN_DIFFKV": ("flash", "FlashOps"),
    "TRITON_ATTN_DIFFKV": ("triton", "TritonOps"),
    "CPU_MLA": ("latent", "LatentOps"),
    "AMX_MLA": ("latent", "LatentOps"),
    "FLASHMLA": ("latent", "DeviceLatentOps"),
    "FLASHINFER_MLA": ("latent", "DeviceLatentOps"),
    "FLASH_ATTN_MLA": ("latent", "DeviceLatentOps"),
    "TRITON_MLA": ("latent", "DeviceLatentOps"),
}
#: Backends of multi-head latent attention (MLA), on a CPU and on a device.
LATENT = ("CPU_MLA", "AMX_MLA", "FLASHINFER_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "TRITON_MLA")
#: Backends of keys and values of unlike dimensions, on a device.
UNLIKE = ("FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV")
#: Backends some of whose kernels plan for all heads of a layer. Policies that split heads run with their other kernels.
WHOLE_LAYERS = ("FLASHINFER",)
#: Sizes of heads of which the kernels for a device measure mass and gather tokens, and of those that they decode.
READ_HEADS, DECODED_HEADS = range(16, 513), range(16, 257)
#: vLLM's names of float8_e4m3fn caches, with one scale for a layer's keys and one for its values.
FP8_NAMES = ("fp8", "fp8_e4m3")
#: vLLM's names of all fp8 caches that are read on a CPU.
CPU_FP8_NAMES = (*FP8_NAMES, "fp8_e5m2")


class BackendOps(ABC):
    """Operations on one layer, beside a backend's kernel or in its place.

    What is not abstract serves backends whose metadata has all that the operations read, and whose kernels need no
    reserved scratch. A class that lacks `compact`, `decode` and what follows it serves no policy that needs them.

    Shapes of a `LayerCall`: query and output [T, H, D], the query rotated; kv_cache [num_blocks, Hkv, block_size,
    D + dimensions of a value]; metadata is the backend's, made from views. Blocks are physical.

    Attributes:
        beside: names of the kernels of `mass`, for the log.
        heads_dim: dimension of a layer's cache that counts its KV heads.
        decodes_measured: whether `decode`, which reads keys once, attends for measured requests.
        compiles: whether kernels are compiled at their first launch (see `attention.warmup`). They run on a device.
        capturing: whether calls are captured in a full CUDA graph, or warm one up.
        scratch_bytes: bytes that `reserve` allocates.
        splits_blocks: whether the backend's kernels may read smaller blocks than the pool's (`kernel_blocks`).
        by_kernel_blocks: whether metadata and caches are then by the kernels' blocks; else they are by the pool's.
        whole_blocks: backends for the same layers whose kernels read the pool's blocks on most devices, for a message.
    """

    beside: str
    heads_dim = 1
    decodes_measured = False
    compiles = False
    capturing = False
    scratch_bytes = 0
    splits_blocks = False
    by_kernel_blocks = False
    whole_blocks: tuple[str, ...] = ("FLASH_ATTN", "TRITON_ATTN")

    @abstractmethod
    def unreadable(self, layer: Any) -> str | None:
        """Return why the score pass cannot read a layer's keys, as the end of a sentence; None if it can."""

    @abstractmethod
    def can_decode(self, layer: Any) -> bool:
        """Return whether `decode` replaces the layer's own kernel, of which it computes the same."""

    def outruns(self, layer: Any) -> bool:
        """Return whether `decode` is at least as fast as the layer's own kernel, for prompts too and without mass.

        If so, `decode` attends for requests with holes that are not measured, and for prompts.
        """
        return False

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
        return 0

    def reserve(self, device: Any) -> Any:  # noqa: B027 - what most backends do is nothing
        """Return the scratch; the first call allocates it."""

    def metadata(self, builder: Any, stock: Callable[[], Any], common: Any, needed: bool, in_graph: bool) -> Any:
        """Return a step's metadata for the other methods.

        Args:
            builder: the backend's builder.
            stock: makes the backend's metadata.
            common: vLLM's `CommonAttentionMetadata`, with views.
            needed: whether the backend's kernel attends to anything.
            in_graph: whether a full CUDA graph is captured or replayed.
        """
        return stock()

    def rewritten(self, metadata: Any) -> None:  # noqa: B027
        """Hear that a layer has written the batch's block table, before the backend's kernel attends.

        What the backend has copied from the table is copied again.
        """

    def ahead(self, metadata: Any) -> Any:
        """Return how many tokens after its own each query sees in a layer, int32 [T], by the layer's metadata; None:
        no query sees one (see `compute.images`), as on a CPU, where vLLM has all tokens attend to those before them.
        """
        return None

    def for_parts(self, builder: Any) -> None:  # noqa: B027
        """Make the backend's builder build metadata that serve any part of a layer's heads, where it does not."""

    def dequantised(self, layer: Any, query: Any) -> Any:
        """Return the query in the model's dtype, as `mass`, `mass_of`, `decode` and `decode_together` take it."""
        return query

    def kv_heads(self, kv_cache: Any) -> int:
        return int(kv_cache.shape[1])

    def attending(self) -> AbstractContextManager[None]:
        """Return a context for the stock kernel of one layer, before `mass`."""
        return nullcontext()

    @abstractmethod
    def mass(self, call: LayerCall, measured: MassTarget) -> None:
        """Add the mass of queries that the stock kernel attends to (see `kernels.mass`). `measured.out` is given."""

    def paged(
        self,
        call: LayerCall,
        measured: MassTarget,
        lens: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor | None = None,
        **others: Any,
    ) -> PagedAttention:
        """Return the arguments of kernels for one layer and the leading rows of its batch.

        Args:
            lens: int32 [R], resident tokens of these rows.
            keys, values: of the cache, as kernels take them.
            others: arguments that the backend's kernels take beside them, or in place of the layer's own.
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
            ahead=self.ahead(metadata),
            **{**logits_of(layer), **measured.arguments, **others},
        )

    def mass_of(self, call: LayerCall, queries: Queries, width: int) -> torch.Tensor:
        """Return the mass of each of n queries, averaged over the query heads of a KV head: float32 [n, Hkv, width].

        Each query is a request of its own to `mass`.
        """
        query, kv_heads = call.query[queries.tokens], call.kv_heads
        out = torch.zeros(len(query), kv_heads, width, device=query.device)
        alone = SimpleNamespace(
            num_actual_tokens=len(query),
            block_table=call.metadata.block_table[queries.rows],
            query_start_loc=torch.arange(len(query) + 1, dtype=torch.int32, device=query.device),
            seq_lens=queries.lens,
            max_query_len=1,
            max_seq_len=width * call.kv_cache.shape[-2],
        )
        self.mass(replace(call, query=query, metadata=alone), MassTarget(out))
        return out.mul_(kv_heads / query.shape[1])

    @abstractmethod
    def read(self, layer: Any, kv_cache: Any, blocks: Any, values: bool = True) -> tuple[Any, Any]:
        """Return copies of keys, and values or None, of `blocks` (int64 [n]): [n, Hkv, block_size, D] each.

        An fp8 cache gives float32, multiplied by its scale.
        """

    def compact(self, layer: Any, kv_caches: Sequence[Any], source: Any, keep: Any, target: Any) -> None:
        """Gather kept tokens of L layers with equal numbers of heads (see `kernels.compact`).

        Args:
            source, target: int32, on the host.
            keep: int32 [L, Hkv, kept], on the device of the caches.
        """
        raise NotImplementedError

    def decode(self, call: LayerCall, rows: Any, seq_lens: Any, measured: MassTarget) -> None:
        """Attend for the requests `rows`, and add their mass (see `kernels.decode`).

        Each of them has one token, unless the kernel `outruns` the layers' own.

        Args:
            call: gets the output.
            rows: int32 [n], rows of the batch.
            seq_lens: int32 [R], resident tokens.
            measured: what is measured.
        """
        raise NotImplementedError

    def decode_together(self, slices: Sequence[HeadSlice], measured: Sequence[MassTarget]) -> None:
        """`decode` of one layer's heads in several KV groups, which differ in `MassTarget.out` alone."""
        raise NotImplementedError

    def write(self, layer: Any, kv_cache: Any, blocks: Any, keys: Any, values: Any) -> None:
        """Overwrite `blocks` (int64 [n]) with keys and values [n, Hkv, block_size, D], of any float dtype.

        Numbers beyond the range of fp8 are clamped, as in vLLM.
        """
        raise NotImplementedError

    def stored_keys(self, layer: Any, kv_cache: Any) -> Any:
        """Return a view of a layer's keys as the cache stores them, blocks first."""
        raise NotImplementedError

    def as_keys(self, layer: Any, stored: Any) -> Any:
        """Convert blocks of `stored_keys` to [n, Hkv, block_size, D] in plain order, as `read` returns them."""
        raise NotImplementedError


def ops_for(backend: str, block_size: int | None = None) -> BackendOps:
    """Make the `BackendOps` of a backend, with scratch of its own, for all layers of one engine.

    Args:
        backend: name.
        block_size: tokens of a block of the pool, if the backend's kernels on a device may read smaller ones.
    """
    module, name = OPS[backend]
    ops = getattr(import_module(f".{module}", __package__), name)
    if block_size is not None and ops.compiles and not ops.splits_blocks:
        ops = import_module(".by_kernel_blocks", __package__).with_kernel_blocks(ops, block_size)
    return ops()
