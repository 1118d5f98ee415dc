"""The interface of probes, each of which measures something in a step."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.plan import Reports
from .parts import AllReduce, Part
from .step_batch import Row, StepBatch

#: Attribute of a backend's metadata with its `kernel_blocks.KernelBlockViews`; absent: kernels read the pool's blocks.
KERNEL_BLOCKS = "kv_evict_kernel_blocks"


@dataclass(slots=True)
class LayerCall:
    """One call of a layer's attention, for its heads in one KV group.

    Attributes:
        ops: operations of the layer's backend (`attention.ops.BackendOps`).
        layer: the layer.
        place: its index in the KV group, as in `store.Store`.
        query: [T, H, D].
        kv_cache: cache of these heads.
        metadata: the backend's metadata of the KV group.
        output: [T, H, D].
        stored: whether the cache has the step's tokens.
    """

    ops: Any
    layer: Any
    place: int
    query: torch.Tensor
    kv_cache: Any
    metadata: Any
    output: Any = None
    stored: bool = True

    @property
    def kv_heads(self) -> int:
        """KV heads of the layer in the KV group."""
        return kv_heads(self.kv_cache)

    def rewritten(self) -> None:
        """Copy again what kernels read of the batch's block table, which the layer has written."""
        if (views := getattr(self.metadata, KERNEL_BLOCKS, None)) is not None:
            views.rewritten()
        self.ops.batch.rewritten(self.metadata)


def kv_heads(kv_cache: torch.Tensor) -> int:
    """Return the KV heads of a cache: [num_blocks, Hkv, ...], or of latents [num_blocks, block_size, D]."""
    return kv_cache.shape[1] if kv_cache.dim() > 3 else 1


class MassTarget(NamedTuple):
    """Memory to which a kernel that attends adds the mass of one call.

    Attributes:
        out: float32 [R, Hkv or 1, W], memory to which the kernel adds (see `kernels.paged.PagedAttention`); None: no
            mass is measured.
        weights: float32 [T], weight of each query's mass; None: 1.
        per_token: whether mass is by token instead of by block.
        last: int32 [R], queries of each row from the first that has a weight; None: all.
    """

    out: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    per_token: bool = False
    last: torch.Tensor | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a `PagedAttention` that say what is measured."""
        return {"mass": self.out, "weights": self.weights, "per_token": self.per_token}


class StepProbe:
    """The part of a probe in one step, called by each layer. This one measures nothing.

    A probe of attention mass passes buffers to the kernels that attend: `weights`, and the result of `out`.

    Attributes:
        takes_mass: whether kernels that attend measure for it.
        weights: float32 [T], weight of each query's mass; None: 1.
        per_token: whether mass is by token instead of by block.
        last: int32 [R], queries of each row from the first that has a weight; None: all.
        measured: int64 [K], rows of the batch that take mass; None: any may.
    """

    takes_mass = False
    measured: np.ndarray | None = None
    weights: torch.Tensor | None = None
    per_token = False
    last: torch.Tensor | None = None

    def out(self, call: LayerCall) -> torch.Tensor | None:
        """Return the memory to which kernels add the layer's mass, float32 [R, Hkv or 1, W]; None: they add none."""
        return None

    def target(self, call: LayerCall) -> MassTarget:
        """Return where kernels add what they measure of the layer."""
        return MassTarget(self.out(call), self.weights, self.per_token, self.last)

    def joins(self, other: "StepProbe") -> bool:
        """Measure for another probe of the step too, by the same calls, if that can be; return whether."""
        return False

    def add(self, call: LayerCall) -> None:
        """Take in one layer, after it has attended. A model may call a layer any number of times in a step."""


class MassKind(NamedTuple):
    """The mass that one call of a kernel measures.

    Attributes:
        heads: rows of mass for each request; 0: no mass.
        weighted: whether queries have weights.
        per_token: whether mass is by token.
    """

    heads: int = 0
    weighted: bool = False
    per_token: bool = False


class Probe(Part):
    """Base class of parts that measure requests. By default a probe measures nothing."""

    @property
    def is_active(self) -> bool:
        """Whether a step may have work, whatever the plan asks for."""
        return False

    @property
    def measured(self) -> Set[str]:
        """Requests whose attention is measured in each step."""
        return frozenset()

    def step(self, batch: StepBatch) -> StepProbe | None:
        """Return what is done in each layer of this step; None: nothing."""
        return None

    def fits_graph(self, requests: Set[str]) -> bool:
        """Return whether a full graph can measure all that the probe measures of a decode step of these requests."""
        return True

    def reserve(self, requests: int, blocks: int, queries: int) -> None:
        """Allocate what full graphs read and write, for so many requests of so many resident blocks and so many queries
        each; once.
        """

    def captured(self, rows: int, lens: torch.Tensor) -> StepProbe | None:
        """Return what a full graph of `rows` requests does in each layer, on memory that stays; None: nothing.

        `lens`: int32 [rows], resident tokens.
        """
        return None

    def end(
        self, asked: Mapping[str, frozenset[str]], rows: Mapping[str, Row], reports: Reports, all_reduce: AllReduce
    ) -> None:
        """Take in what the step has measured, and add the probe's statistics to the reports.

        Args:
            asked: request -> statistics that it reports, of requests in `rows`.
            rows: request -> its resident blocks.
            reports: request -> its report so far.
            all_reduce: over the ranks of the model.
        """

    def kinds(self, kv_heads: int) -> list[MassKind]:
        """Return the kinds of mass that kernels may measure for it, in layers of `kv_heads` KV heads."""
        return []

    def warm_up(self) -> None:
        """Compile the probe's own kernels, by launches that change nothing."""
