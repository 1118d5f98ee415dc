"""Measurements of one step by block: memory for attention mass, and queries tested for pivotal blocks."""

from typing import NamedTuple

import numpy as np
import torch

from .kernels.queries import Queries
from .kernels.take import take
from .probes import LayerCall, StepProbe

#: Most bytes of temporary tensors of queries that are tested one by one.
PIVOT_SCRATCH = 64 << 20


class MassBuffers(NamedTuple):
    """Memory that the layers of one step read and write to measure mass.

    Attributes:
        weights: float32 [T], weight of each query; None: 1.
        mass: float32 [R, H, W], sum or maximum over layers; counts in rows that are tested for pivotal blocks.
        layer: float32 [R, Hkv, W], mass of one layer, zeros between layers; None: layers add to `mass` directly.
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
        """Return views of the memory for fewer requests, of fewer blocks; weights stay those of all queries."""
        of_rows = {"lens": self.lens[:requests]}
        if self.tested is not None:
            of_rows["tested"] = self.tested[:requests]
        if self.layer is not None:
            of_rows["layer"] = self.layer[:requests, :, :blocks]
        return self._replace(mass=self.mass[:requests, :, :blocks], **of_rows)


class LayerMass(StepProbe):
    """Adds up the mass of each layer by block.

    Attributes:
        buffers: memory of R rows and W blocks.
        queries: queries that are tested for pivotal blocks, if a row has several; None if there are none.
        weighs: whether any row takes mass.
        last: see `StepProbe`.
    """

    takes_mass = True

    def __init__(
        self,
        buffers: MassBuffers,
        queries: Queries | None = None,
        weighs: bool = True,
        last: torch.Tensor | None = None,
    ) -> None:
        self.buffers, self.queries, self.weighs, self.last = buffers, queries, weighs, last
        self.weights = buffers.weights

    @property
    def mass(self) -> torch.Tensor:
        """Memory of the mass of all layers."""
        return self.buffers.mass

    def out(self, call: LayerCall) -> torch.Tensor | None:
        return self._of_layer(call.kv_heads) if self.weighs else None

    def add(self, call: LayerCall) -> None:
        """Add the layer's pivotal blocks, and reduce what it measured over layers."""
        buffers, kv_heads = self.buffers, call.kv_heads
        if self.queries is not None:
            self._test(call, self.queries, self._of_layer(kv_heads))
        if buffers.layer is not None:
            take(
                self._of_heads(buffers.mass, kv_heads),
                buffers.layer[:, :kv_heads],
                buffers.lens,
                buffers.block_size,
                maximise=buffers.maximise,
                tested=buffers.tested,
                share=kv_heads / call.query.shape[1],
            )

    def _of_layer(self, kv_heads: int) -> torch.Tensor:
        """Return the memory of one layer's mass: float32 [R, H, W]."""
        buffers = self.buffers
        return self._of_heads(buffers.mass if buffers.layer is None else buffers.layer, kv_heads)

    @staticmethod
    def _of_heads(mass: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """Return the part of a layer with `kv_heads` KV heads; layers may differ in them."""
        return mass if mass.shape[1] == 1 else mass[:, :kv_heads]

    def _test(self, call: LayerCall, queries: Queries, out: torch.Tensor) -> None:
        """Add the blocks that are pivotal for each of the queries to `out`, float32 [R, H, W]."""
        heads, width = out.shape[1:]
        if (ahead := call.ops.batch.ahead(call.metadata)) is not None:
            queries = queries._replace(lens=queries.lens + ahead[queries.tokens])
        at_once = max(PIVOT_SCRATCH // (16 * call.kv_heads * width), 1)
        for some in queries.split(at_once):
            each = call.ops.mass_of(call, some, width)
            out.index_add_(0, some.rows, self._pivots(some, each, heads))

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


class MassStep(LayerMass):
    """Mass of one step's queries on the batch's resident blocks, over all layers of a KV group.

    Attributes:
        rows: int64 [K], measured rows of the batch.
        slots: int64 [K], their rows in the running sums.
        counted: int64 [K], number of queries that count in each measured row; more, where lengths are not known.
        logical: int32 [R, W], logical index of each resident block, -1 past the end.
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
        super().__init__(buffers, queries, weighs, last)
        self.rows, self.measured = rows, rows
        self.slots, self.counted, self.logical, self.kept = slots, counted, logical, kept

    @property
    def _plain(self) -> bool:
        """Whether kernels add the mass of the queries with a weight, and layers have nothing else to do."""
        own = self.buffers
        return self.weighs and self.weights is not None and own.layer is own.tested is self.queries is None

    def joins(self, other: StepProbe) -> bool:
        # No row is measured for both: each takes its own rows out of one memory, and a query has the weight of its row.
        if not isinstance(other, MassStep) or not (self._plain and other._plain):
            return False
        if self.mass.shape != other.mass.shape or (self.last is None) is not (other.last is None):
            return False
        assert self.weights is not None and other.weights is not None and self.measured is not None
        self.weights = self.weights + other.weights
        if self.last is not None and other.last is not None:
            self.last = self.last + other.last
        self.measured = np.union1d(self.measured, other.rows)
        other.buffers = other.buffers._replace(mass=self.mass)
        return True
