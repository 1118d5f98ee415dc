"""Work of the plugin's kernels in one step, beside the stock attention kernel or in its place."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from .probes import LayerCall, StepProbe
from .source import NO_ROWS, StepSource
from .transfer import to_device

#: Measures nothing.
UNMEASURED = StepProbe()


@dataclass(slots=True)
class HeadSlice:
    """The heads of one layer in one KV group.

    Attributes:
        work: the step's work of the KV group.
        call: the call of the layer's attention for these heads.
    """

    work: "StepWork"
    call: LayerCall


class StepWork:
    """Attention and measurements of the plugin in one step, the same for all layers of a KV group.

    Some requests are attended for by a kernel of the plugin, which computes output and mass in one read
    (`EvictionRuntime._own`). The others use vLLM's kernel, so their output is bit-identical to vLLM's. Their mass is
    measured beside it.

    Args:
        steps: what probes do in each layer.
        rows: int64 [n], batch rows that the plugin attends for.
        queries: int32 [R], of each row.
        seq_lens: int32 [R], resident tokens.
        source: what the layers read; None: the block tables of the backend's metadata.

    Attributes:
        rows: int32 [n], the same on the device.
        seq_lens: as given.
        masses: those of `steps` that take attention mass.
        is_all: whether no query is left for the stock kernel.
        stock_lens: int32 [R], lengths for the stock kernel: for each of `rows` the number of its queries, as it need
            not compute their output.
    """

    def __init__(
        self,
        steps: Sequence[StepProbe],
        rows: np.ndarray,
        queries: np.ndarray,
        seq_lens: torch.Tensor,
        source: StepSource | None = None,
    ) -> None:
        self.masses = [step for step in steps if step.takes_mass]
        self._beside = [step for step in steps if not step.takes_mass]
        self._source = source or StepSource(seq_lens)
        own = queries[rows]
        self.is_all = len(rows) == len(queries) or own.sum() == queries.sum()
        self.rows = to_device(rows.astype(np.int32), seq_lens.device)
        self.seq_lens = self.stock_lens = seq_lens
        if len(rows) and len(rows) == len(queries):
            self.stock_lens = to_device(queries.astype(np.int32), seq_lens.device)
        elif len(rows):
            self.stock_lens = seq_lens.clone()
            self.stock_lens.index_copy_(0, self.rows.long(), to_device(own.astype(np.int32), seq_lens.device))
        self._own, self._queries = rows, queries
        self._shares = self._shared(rows)
        #: Per query 0 if the plugin attends for it, else 1: float32 [T]. Made when a layer first asks.
        self._of_stock: torch.Tensor | None = None

    def _shared(self, rows: np.ndarray) -> dict[StepProbe, torch.Tensor]:
        """Return for each of several `masses` the rows that are attended for with it, each row with one of them."""
        shares: dict[StepProbe, torch.Tensor] = {}
        if len(self.masses) < 2:
            return shares
        first, *others = sorted(self.masses, key=lambda each: each.measured is not None)
        for mass in others:
            share = rows if mass.measured is None else np.intersect1d(rows, mass.measured)
            rows = rows if mass.measured is None else np.setdiff1d(rows, share)
            shares[mass] = to_device(share.astype(np.int32), self.seq_lens.device)
        return shares | {first: to_device(rows.astype(np.int32), self.seq_lens.device)}

    @classmethod
    def of_graph(cls, steps: Sequence[StepProbe], rows: torch.Tensor, seq_lens: torch.Tensor) -> "StepWork":
        """Make the work of a full graph: the plugin decodes all requests, on memory that stays.

        Args:
            steps: what probes do in each layer.
            rows: int32 [R], the batch's rows, -1 for padding.
            seq_lens: int32 [R], resident tokens.
        """
        work = cls(steps, NO_ROWS, NO_ROWS, seq_lens)
        work.rows = rows
        return work

    @property
    def precedes(self) -> bool:
        """Whether layers have work before the stock kernel."""
        return self._source.in_place

    @property
    def queried(self) -> int:
        """The number of the step's leading tokens that have all queries which `before` reads."""
        return self._source.queried

    @property
    def follows(self) -> bool:
        """Whether layers have work after it."""
        return bool(len(self.rows) or self.masses or self._beside) or not (self._source.is_plain or self.precedes)

    @property
    def measures(self) -> bool:
        """Whether queries of the stock kernel are measured."""
        return bool(self.masses) and not self.is_all

    @property
    def joins(self) -> bool:
        """Whether one call for all KV groups of a layer can do the work."""
        return self.is_all and self._source.is_plain and not self._beside

    def before(self, call: LayerCall) -> None:
        """Write what the stock kernel of one layer reads into its table.

        Args:
            call: of the layer; its query may end after `queried` tokens.
        """
        self._source.table(call)

    def after(self, call: LayerCall) -> None:
        """Take in what a layer has stored that was not when `before` was called."""
        self._source.fill(call)

    def do(self, call: LayerCall) -> None:
        """Do the work of one layer, after the stock kernel (see `attention.ops.BackendOps`)."""
        metadata, lens = (call.metadata, self.seq_lens) if self.precedes else self._source.table(call)
        reading = call if metadata is call.metadata else replace(call, metadata=metadata)
        for mass in self.masses or (UNMEASURED,):
            measured, rows = mass.target(call), self._shares.get(mass, self.rows)
            if len(rows):
                call.ops.decode(reading, rows, lens, measured)
            if measured.out is not None and not self.is_all:
                call.ops.mass(call, measured._replace(weights=self._stock_weights(measured.weights)))
            mass.add(call)
        for step in self._beside:
            step.add(call)

    def _stock_weights(self, weights: torch.Tensor | None) -> torch.Tensor | None:
        """Return the weights with 0 for queries that the plugin attends for: float32 [T]; None: 1."""
        if not len(self._own):
            return weights
        if self._of_stock is None:
            others = np.ones(len(self._queries), np.float32)
            others[self._own] = 0
            self._of_stock = to_device(np.repeat(others, self._queries), self.seq_lens.device)
        return self._of_stock if weights is None else self._of_stock * weights


def do_together(slices: Sequence[HeadSlice]) -> bool:
    """Decode one layer in all its KV groups by one call, if the step has no other work.

    Returns:
        Whether the layer was decoded.
    """
    measuring = [(heads, mass) for heads in slices for mass in heads.work.masses]
    if len(measuring) > 1 or not all(heads.work.joins for heads in slices):
        return False
    heads, mass = measuring[0] if measuring else (slices[0], UNMEASURED)
    measured = mass.target(heads.call)
    unmeasured = measured._replace(out=None)
    heads.call.ops.decode_together(slices, [measured if each is heads else unmeasured for each in slices])
    mass.add(heads.call)
    return True
