"""The interface of what the plugin does beside an attention backend: `BackendOps`, and the parts that it is made of."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ..kernels.queries import Queries
from ..probes import LayerCall, MassTarget
from ..work import HeadSlice


class Fit(NamedTuple):
    """The fit of a backend's operations to one layer.

    Attributes:
        unreadable: why the score pass cannot read the layer's keys, as the end of a sentence; None: it can.
        decodes: whether `decode` replaces the layer's own kernel, of which it computes the same.
        outruns: whether `decode` is at least as fast as the layer's own kernel, for prompts too and without mass. Then
            it attends for requests with holes that are not measured, and for prompts.
    """

    unreadable: str | None = None
    decodes: bool = False
    outruns: bool = False


class BatchMetadata:
    """A backend's metadata of a step's batch. This class serves backends whose own has all that operations read."""

    def build(self, builder: Any, stock: Callable[[], Any], common: Any, needed: bool, in_graph: bool) -> Any:
        """Return a step's metadata, for the backend's kernel and for `BackendOps`.

        Args:
            builder: the backend's builder.
            stock: makes the backend's metadata.
            common: vLLM's `CommonAttentionMetadata`, with views.
            needed: whether the backend's kernel attends to anything.
            in_graph: whether a full CUDA graph is captured or replayed.
        """
        return stock()

    def rewritten(self, metadata: Any) -> None:
        """Copy again what the backend has copied from the batch's block table.

        A layer has written the table, and the backend's kernel attends next.
        """

    def ahead(self, metadata: Any) -> torch.Tensor | None:
        """Return how many tokens after its own each query sees in a layer, int32 [T], by the layer's metadata; None:
        no query sees one (see `compute.images`), as on a CPU, where vLLM has all tokens attend to those before them.
        """
        return None

    def for_parts(self, builder: Any) -> None:
        """Make the backend's builder build metadata that serve any part of a layer's heads, where it does not."""


class Scratch:
    """Memory of a backend's kernels that stays. Kernels of this class need none.

    Attributes:
        nbytes: bytes that `reserve` allocates.
        capturing: whether calls are captured in a full CUDA graph, or warm one up.
    """

    nbytes = 0
    capturing = False

    def size_for(
        self, requests: int, in_graphs: int, heads: int, block_size: int, longest: int, per_token: bool
    ) -> int:
        """Set the size. One launch of `decode` takes as many requests as the scratch has room for.

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

    def reserve(self, device: torch.device) -> torch.Tensor:
        """Return the scratch, float32 [nbytes / 4]; the first call allocates it."""
        return torch.empty(0, device=device)


class BackendOps(ABC):
    """Operations on one layer, beside a backend's kernel or in its place.

    A class that lacks `compact`, `decode` and what follows it serves no policy that needs them.

    Shapes of a `LayerCall`: query and output [T, H, D], the query rotated; kv_cache [num_blocks, Hkv, block_size,
    D + dimensions of a value]; metadata is the backend's, made from views. Blocks are physical.

    Attributes:
        batch: the backend's metadata.
        scratch: memory of the kernels.
        beside: names of the kernels of `mass`, for the log.
        heads_dim: dimension of a layer's cache that counts its KV heads.
        decodes_measured: whether `decode`, which reads keys once, attends for measured requests.
        compiles: whether kernels are compiled at their first launch (see `attention.warmup`). They run on a device.
        splits_blocks: whether the backend's kernels may read smaller blocks than the pool's (`kernel_blocks`).
        by_kernel_blocks: whether metadata and caches are then by the kernels' blocks; else they are by the pool's.
        whole_blocks: backends for the same layers whose kernels read the pool's blocks on most devices, for a message.
    """

    batch = BatchMetadata()
    beside: str
    heads_dim = 1
    decodes_measured = False
    compiles = False
    splits_blocks = False
    by_kernel_blocks = False
    whole_blocks: tuple[str, ...] = ("FLASH_ATTN", "TRITON_ATTN")

    def __init__(self) -> None:
        self.scratch = Scratch()

    @abstractmethod
    def fit(self, layer: Any) -> Fit:
        """Return what the operations can do for a layer. Keys are packed by then."""

    def attending(self) -> AbstractContextManager[None]:
        """Return a context for the stock kernel of one layer, before `mass`."""
        return nullcontext()

    @abstractmethod
    def mass(self, call: LayerCall, measured: MassTarget) -> None:
        """Add the mass of queries that the stock kernel attends to (see `kernels.mass`). `measured.out` is given."""

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

        Each of them has one token, unless the kernel outruns the layers' own (`Fit`).

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
