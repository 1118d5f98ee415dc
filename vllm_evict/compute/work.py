"""Work of the plugin's kernels in one step, beside the stock attention kernel or in its place."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from .host import BoundStep
from .measure import MassBuffers, MassStep
from .prompts import PromptStep
from .select import SelectStep
from .tokens import TokenStep
from .transfer import to_device

#: No rows of a batch.
NO_ROWS = np.empty(0, np.int64)


@dataclass(slots=True)
class HeadSlice:
    """The heads of one layer in one KV group.

    Attributes:
        work: the step's work of the KV group.
        place: index of the layer in the KV group (see `StepWork.do`).
        query: [T, H, D], queries of these heads.
        kv_cache: KV cache of these heads.
        metadata: the backend's metadata of the KV group.
    """

    work: "StepWork"
    place: int
    query: torch.Tensor
    kv_cache: Any
    metadata: Any


class StepWork:
    """Attention and measurements of the plugin in one step, the same for all layers of a KV group.

    Some requests are attended for by a kernel of the plugin, which computes output and mass in one read
    (`EvictionRuntime._own`). The others use vLLM's kernel, so their output is bit-identical to vLLM's. Their mass is
    measured beside it.

    Args:
        mass: measurement by block; None if there is none.
        tokens: measurement by token; None if there is none.
        prompts: measurement of repeated prompts; None if there is none.
        bounds: scores by bounds of keys; None if there are none.
        select: selection of blocks; None if there is none.
        rows: int64 [n], batch rows that the plugin attends for.
        selecting: int64 [m], the rows of them that select blocks.
        query_start_loc: int32 [R + 1].
        seq_lens: int32 [R], resident tokens.

    Attributes:
        seq_lens: as given.
        is_all: whether no query is left for the stock kernel.
        stock_lens: int32 [R], lengths for the stock kernel: for each of `rows` the number of its queries, as it need
            not compute their output.
    """

    def __init__(
        self,
        mass: MassStep | MassBuffers | None,
        rows: np.ndarray,
        query_start_loc: np.ndarray,
        seq_lens: torch.Tensor,
        tokens: TokenStep | None = None,
        prompts: PromptStep | None = None,
        bounds: BoundStep | None = None,
        select: SelectStep | None = None,
        selecting: np.ndarray = NO_ROWS,
    ) -> None:
        self.mass, self.tokens, self.prompts, self.bounds, self.select = mass, tokens, prompts, bounds, select
        queries = np.diff(query_start_loc)
        own = queries[rows]
        self.is_all = own.sum() == query_start_loc[-1]
        self.rows = to_device(rows.astype(np.int32), seq_lens.device)
        #: Of `rows`, the rows that attend to all resident blocks.
        self._unselected = self.rows
        if len(selecting):
            self._unselected = to_device(np.setdiff1d(rows, selecting).astype(np.int32), seq_lens.device)
        self.seq_lens = self.stock_lens = seq_lens
        if len(rows) and len(rows) == len(queries):
            self.stock_lens = to_device(queries.astype(np.int32), seq_lens.device)
        elif len(rows):
            self.stock_lens = seq_lens.clone()
            self.stock_lens.index_copy_(0, self.rows.long(), to_device(own.astype(np.int32), seq_lens.device))
        self._own, self._queries = rows, queries
        #: Per query 0 if the plugin attends for it, else 1: float32 [T]. Made when a layer first asks.
        self._of_stock: torch.Tensor | None = None

    @classmethod
    def of_graph(
        cls,
        mass: MassStep | MassBuffers | None,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        tokens: TokenStep | None,
    ) -> "StepWork":
        """Make the work of a full graph: the plugin decodes all requests, on memory that stays.

        Args:
            mass, tokens: measurement by block, or by token.
            rows: int32 [R], the batch's rows, -1 for padding.
            seq_lens: int32 [R], resident tokens.
        """
        work = cls(mass, np.empty(0, np.int64), np.zeros(1, np.int32), seq_lens, tokens)
        work.rows = rows
        return work

    @property
    def measures(self) -> bool:
        """Whether queries of the stock kernel are measured."""
        return (self.mass is not None or self.tokens is not None) and not self.is_all

    def do(self, ops: Any, layer: Any, place: int, query: Any, kv_cache: Any, metadata: Any, output: Any) -> None:
        """Do the work of one layer, after the stock kernel (see `attention.ops.BackendOps`).

        `place` is the index of the layer in its KV group, as in `store.Store`.
        """

        def weigh(weights: torch.Tensor | None, out: torch.Tensor | None, per_token: bool = False) -> None:
            how = {"per_token": True} if per_token else {}
            if len(self.rows):
                ops.decode(layer, query, kv_cache, metadata, output, self.rows, self.seq_lens, weights, out, **how)
            if out is not None and not self.is_all:
                step = self.tokens if per_token else self.mass
                assert not isinstance(step, MassBuffers), "a graph leaves no query to the stock kernel"
                ops.mass(layer, query, kv_cache, metadata, self._stock_weights(weights), out, last=step.last, **how)

        kv_heads = 0 if self.mass is None and self.tokens is None else ops.kv_heads(kv_cache)
        if self.mass is not None:
            weigh_each = partial(ops.mass_of, layer, query, kv_cache, metadata)
            self.mass.add(weigh, kv_heads, query.shape[1] // kv_heads, weigh_each)
        if self.tokens is not None:
            self.tokens.add(partial(weigh, per_token=True), kv_heads, place)
        if self.select is not None:
            self._attend_selected(ops, layer, place, query, kv_cache, metadata, output)
        elif self.mass is None and self.tokens is None:
            weigh(None, None)
        if self.prompts is not None:
            self.prompts.add(ops, layer, place, query, kv_cache, metadata)
        if self.bounds is not None:
            self.bounds.add(ops, layer, place, query, kv_cache)

    def _attend_selected(self, ops: Any, layer: Any, place: int, query: Any, kv_cache: Any, *rest: Any) -> None:
        """Decode `rows`, each over its resident blocks or over those that the layer selects. Measures nothing."""
        self.select.begin(ops, layer, place, query, kv_cache)
        selects = self.select.decode(ops, layer, place, query, kv_cache, *rest)
        rows = self._unselected if selects else self.rows
        if len(rows):
            ops.decode(layer, query, kv_cache, *rest, rows, self.seq_lens, None, None)

    def _stock_weights(self, weights: torch.Tensor | None) -> torch.Tensor | None:
        """Return the weights with 0 for queries that the plugin attends for: float32 [T]; None: 1."""
        if not len(self._own):
            return weights
        if self._of_stock is None:
            others = np.ones(len(self._queries), np.float32)
            others[self._own] = 0
            self._of_stock = to_device(np.repeat(others, self._queries), self.seq_lens.device)
        return self._of_stock if weights is None else self._of_stock * weights


def do_together(ops: Any, layer: Any, query: torch.Tensor, slices: Sequence[HeadSlice], output: torch.Tensor) -> bool:
    """Decode one layer in all its KV groups by one call, if the step has no other work.

    Args:
        query, output: [T, H, D], heads in the order of `slices`.

    Returns:
        Whether the layer was decoded.
    """
    works = [heads.work for heads in slices]
    if any(work is None or not work.is_all or work.bounds is not None or work.select is not None for work in works):
        return False
    measuring = [(heads, step) for heads in slices for step in (heads.work.mass, heads.work.tokens) if step is not None]
    if len(measuring) > 1:
        return False

    def attend(weights: torch.Tensor | None, out: torch.Tensor | None, per_token: bool = False) -> None:
        outs = [out if measuring and heads is measuring[0][0] else None for heads in slices]
        ops.decode_together(layer, query, slices, output, weights, outs, per_token)

    if not measuring:
        attend(None, None)
        return True
    ((heads, step),) = measuring
    kv_heads = ops.kv_heads(heads.kv_cache)
    if step is heads.work.tokens:
        step.add(partial(attend, per_token=True), kv_heads, heads.place)
    else:
        weigh_each = partial(ops.mass_of, layer, heads.query, heads.kv_cache, heads.metadata)
        step.add(attend, kv_heads, heads.query.shape[1] // kv_heads, weigh_each)
    return True
