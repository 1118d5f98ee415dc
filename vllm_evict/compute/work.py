"""What the plugin's kernels do in one step, beside the stock attention kernel or in its place."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from .prompts import PromptStep
from .sums import MassBuffers, MassStep
from .tokens import TokenStep
from .transfer import to_device


@dataclass(slots=True)
class HeadSlice:
    """What falls to the heads of one layer that are in one KV group.

    Attributes:
        work: of their KV group.
        place: of the layer in the KV group (see `StepWork.do`).
        query: [T, H, D], of these heads.
        kv_cache: theirs.
        metadata: the backend's, of their KV group.
    """

    work: "StepWork"
    place: int
    query: torch.Tensor
    kv_cache: Any
    metadata: Any


class StepWork:
    """One step's decodes that the plugin attends to itself, and what it measures; the same for all layers.

    A request that lacks nothing stays with the stock kernel, so that its output is stock's to the byte. One that has
    holes is decoded by a kernel that yields output and mass in one read; queries of its prefill are measured beside.

    Args:
        mass: what is measured by block; None if nothing.
        tokens: what is measured by token; None if nothing.
        prompts: what is measured of repeated prompts; None if nothing.
        rows: int64 [n], batch rows of one query each that the plugin attends to.
        query_start_loc: int32 [R + 1].
        seq_lens: int32 [R], resident tokens.

    Attributes:
        seq_lens: as given.
        is_all: whether no query is left for the stock kernel.
        stock_lens: int32 [R], lengths for the stock kernel: 1 for each of `rows`, which it need not read.
    """

    def __init__(
        self,
        mass: MassStep | MassBuffers | None,
        rows: np.ndarray,
        query_start_loc: np.ndarray,
        seq_lens: torch.Tensor,
        tokens: TokenStep | None = None,
        prompts: PromptStep | None = None,
    ) -> None:
        self.mass, self.tokens, self.prompts = mass, tokens, prompts
        self.is_all = len(rows) == query_start_loc[-1]
        self.rows = to_device(rows.astype(np.int32), seq_lens.device)
        self.seq_lens = self.stock_lens = seq_lens
        if len(rows):
            self.stock_lens = seq_lens.clone().index_fill_(0, self.rows.long(), 1)
        self._own_queries = to_device(query_start_loc[rows].astype(np.int64), seq_lens.device)
        self._queries = int(query_start_loc[-1])

    @classmethod
    def of_graph(
        cls,
        mass: MassStep | MassBuffers | None,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        tokens: TokenStep | None = None,
    ) -> "StepWork":
        """All decodes of a batch, on memory that stays.

        Args:
            mass, tokens: where it is measured, by block or by token.
            rows: int32 [R], the batch's rows, -1 where a row is padding.
            seq_lens: int32 [R], resident tokens.
        """
        work = cls(mass, np.empty(0, np.int64), np.zeros(1, np.int32), seq_lens, tokens)
        work.rows = rows
        return work

    @property
    def measures(self) -> bool:
        """Whether mass is taken of what the stock kernel attends to."""
        return (self.mass is not None or self.tokens is not None) and not self.is_all

    def do(self, ops: Any, layer: Any, place: int, query: Any, kv_cache: Any, metadata: Any, output: Any) -> None:
        """One layer's share, after the stock kernel's (see `attention.backend.BackendOps`).

        `place` is the layer's number in its KV group, as in `worker.tokens.Store`.
        """

        def weigh(weights: torch.Tensor | None, out: torch.Tensor | None, per_token: bool = False) -> None:
            how = {"per_token": True} if per_token else {}
            if len(self.rows):
                ops.decode(layer, query, kv_cache, metadata, output, self.rows, self.seq_lens, weights, out, **how)
            if out is not None and not self.is_all:
                ops.mass(layer, query, kv_cache, metadata, self._stock_weights(weights), out, **how)

        kv_heads = 0 if self.mass is None and self.tokens is None else ops.kv_heads(kv_cache)
        if self.mass is not None:
            weigh_each = partial(ops.mass_of, layer, query, kv_cache, metadata)
            self.mass.add(weigh, kv_heads, query.shape[1] // kv_heads, weigh_each)
        if self.tokens is not None:
            self.tokens.add(partial(weigh, per_token=True), kv_heads, place)
        if self.mass is None and self.tokens is None:
            weigh(None, None)
        if self.prompts is not None:
            self.prompts.add(ops, layer, place, query, kv_cache, metadata)

    def _stock_weights(self, weights: torch.Tensor | None) -> torch.Tensor | None:
        """Weights without the queries that the plugin attends to. float32 [T]"""
        if not len(self.rows):
            return weights
        ones = torch.ones(self._queries, device=self.seq_lens.device) if weights is None else weights.clone()
        return ones.index_fill_(0, self._own_queries, 0.0)


def do_together(ops: Any, layer: Any, query: torch.Tensor, shares: Sequence[HeadSlice], output: torch.Tensor) -> bool:
    """One layer's decodes in all its KV groups by one call, if nothing else is to do. Returns whether it was done.

    Args:
        query, output: [T, H, D], heads in the order of `shares`.
    """
    works = [share.work for share in shares]
    if any(work is None or not work.is_all for work in works):
        return False
    measuring = [(share, step) for share in shares for step in (share.work.mass, share.work.tokens) if step is not None]
    if len(measuring) > 1:
        return False

    def attend(weights: torch.Tensor | None, out: torch.Tensor | None, per_token: bool = False) -> None:
        outs = [out if measuring and share is measuring[0][0] else None for share in shares]
        ops.decode_together(layer, query, shares, output, weights, outs, per_token)

    if not measuring:
        attend(None, None)
        return True
    ((share, step),) = measuring
    kv_heads = ops.kv_heads(share.kv_cache)
    if step is share.work.tokens:
        step.add(partial(attend, per_token=True), kv_heads, share.place)
    else:
        weigh_each = partial(ops.mass_of, layer, share.query, share.kv_cache, share.metadata)
        step.add(attend, kv_heads, share.query.shape[1] // kv_heads, weigh_each)
    return True
