"""What the layers of one step measure by block: memory for attention mass, and queries tested for pivotal blocks."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from .kernels.queries import Queries
from .kernels.take import take

#: Attends for one layer and adds the mass of its queries: (weights [T] or None, out [R, H, W] or None) -> None.
Weigh = Callable[[torch.Tensor | None, torch.Tensor | None], None]
#: Returns one layer's mass of each of n queries, averaged over the query heads of a KV head:
#: (queries, W) -> float32 [n, Hkv, W].
WeighEach = Callable[[Queries, int], torch.Tensor]


#: Most bytes of temporary tensors of queries that are tested one by one.
PIVOT_SCRATCH = 64 << 20


class MassBuffers(NamedTuple):
    """Memory that the layers of one step read and write to measure mass.

    Attributes:
        weights: float32 [T], weight of each query; None: 1.
        mass: float32 [R, H, W], sum or maximum over layers; counts in rows that are tested for pivotal blocks.
        layer: float32 [R, Hkv, W], mass of one layer, zeros between layers; None if layers add to `mass` directly.
        tested: int32 [R], not 0 for rows of one query that is tested for pivotal blocks; None: no row is tested.
        lens: int32 [R], resident tokens.
        block_size: tokens.
        maximise: whether layers are reduced by the maximum instead of the sum.
    """

    weights: torch.Tensor | None
    mass: torch.Tensor
    layer: torch.Tensor | None
    tested: torch.Tensor | None
    lens: torch.Tensor
    block_size: int
    maximise: bool

    def part(self, requests: int, blocks: int | None = None) -> "MassBuffers":
        """Return views of the memory for fewer requests, of fewer blocks."""
        of_rows = {name: getattr(self, name)[:requests] for name in ("weights", "lens")}
        if self.tested is not None:
            of_rows["tested"] = self.tested[:requests]
        if self.layer is not None:
            of_rows["layer"] = self.layer[:requests, :, :blocks]
        return self._replace(mass=self.mass[:requests, :, :blocks], **of_rows)

    def add(self, weigh: Weigh, kv_heads: int, group: int, weigh_each: WeighEach | None = None) -> None:
        """Add one layer with `kv_heads` KV heads and `group` query heads for each of them."""
        self.take(lambda out: weigh(self.weights, out), kv_heads, group)

    def take(self, measure: Callable[[torch.Tensor], None], kv_heads: int, group: int) -> None:
        """Add one layer, whose mass `measure` adds to the tensor that it gets."""
        # Layers may differ in their numbers of heads.
        mass = self.mass if self.mass.shape[1] == 1 else self.mass[:, :kv_heads]
        if self.layer is None:
            measure(mass)
            return
        layer = self.layer[:, :kv_heads]
        measure(layer)
        options = {"maximise": self.maximise, "tested": self.tested, "share": 1 / group}
        take(mass, layer, self.lens, self.block_size, **options)


class MassStep:
    """Mass of one step's queries on the batch's resident blocks, over all layers of a KV group.

    Attributes:
        rows: int64 [K], measured rows of the batch.
        slots: int64 [K], their rows in the running sums.
        counted: int64 [K], number of queries that count in each measured row; more, where lengths are not known.
        logical: int32 [R, W], logical index of each resident block, -1 past the end.
        buffers: memory of R rows and W blocks.
        queries: queries that are tested for pivotal blocks, if a row has several; None if there are none.
        weighs: whether any row takes mass.
        last: int32 [R], queries of each row from the first that counts (see `RunningSums._last`); None: all.
        kept: float32 [R], factor of the sums before the step; None: 1.
    """

    def __init__(
        self,
        rows: np.ndarray,
        slots: np.ndarray,
        counted: np.ndarray,
        logical: torch.Tensor,
        buffers: MassBuffers,
        queries: Queries | None = None,
        weighs: bool = True,
        last: torch.Tensor | None = None,
        kept: torch.Tensor | None = None,
    ) -> None:
        self.rows, self.slots, self.counted, self.logical = rows, slots, counted, logical
        self.buffers, self.queries, self.weighs, self.last, self.kept = buffers, queries, weighs, last, kept

    @property
    def mass(self) -> torch.Tensor:
        return self.buffers.mass

    def add(self, weigh: Weigh, kv_heads: int, group: int, weigh_each: WeighEach | None = None) -> None:
        """Add one layer with `kv_heads` KV heads and `group` query heads for each of them."""

        def measure(out: torch.Tensor) -> None:
            weigh(self.buffers.weights, out if self.weighs else None)
            if self.queries is not None:
                at_once = max(PIVOT_SCRATCH // (16 * kv_heads * out.shape[2]), 1)
                for some in self.queries.split(at_once):
                    out.index_add_(0, some.rows, self._pivots(some, weigh_each(some, out.shape[2]), out.shape[1]))

        self.buffers.take(measure, kv_heads, group)

    def _pivots(self, queries: Queries, mass: torch.Tensor, heads: int) -> torch.Tensor:
        """Return 1 for blocks that draw more than 1/t for each of their tokens from a query that sees t tokens, else 0.

        NaN stays NaN. float32 [n, H, W].
        """
        lens, block_size = queries.lens[:, None], self.buffers.block_size
        places = torch.arange(mass.shape[2], device=mass.device)
        tokens = (lens - places * block_size).clamp(0, block_size)
        pivots = (mass * lens[:, None] > tokens[:, None]).float() + 0 * mass
        if queries.counts is not None:
            pivots *= queries.counts[:, None, None]
        return pivots.sum(1, keepdim=True) if heads == 1 else pivots
