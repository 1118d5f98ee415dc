"""State of one KV group on a worker: its holes, its view, and its parts (see `compose`)."""

from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import numpy as np
import torch

from ..config import KVPolicyConfig
from ..core.plan import GroupPlan, Reports
from .batch import Batch
from .compose import compose
from .graphs import Attends, GraphRows
from .holes import Holes
from .images import with_ranges
from .parts import AllReduce, Capacity, Part
from .probes import StepProbe
from .shape import Shape
from .source import NO_ROWS, with_table
from .step_batch import Row, StepBatch
from .store import Store
from .views import Views
from .work import StepWork

#: The plan between steps.
NO_PLAN = GroupPlan()


class GroupRuntime:
    """One KV group of a worker.

    Args:
        config: policy of the group's heads.
        shape: sizes of the group.
        store: KV cache of the group.

    Attributes:
        source, probes, movers: see `compose.Parts`.
        parts: all of them.
        decodes: whether the plugin's kernel can decode all layers of the group (see `StepWork`).
        in_step: whether a step runs; if not, a dummy step may.
        layers: layers of the model that attend in this group, with and without a cache of their own -> their names.
    """

    def __init__(self, config: KVPolicyConfig, shape: Shape, store: Store) -> None:
        self.shape, self.store, self.holes = shape, store, Holes(shape.block_size)
        self.block_size, self.device = shape.block_size, shape.device
        self.batch = Batch()
        self.views = Views([self], self.batch)
        self.source, self.probes, self.movers = compose(config, shape, store, self.holes)
        self.parts: list[Part] = [self.source, *self.probes, *self.movers]
        self.decodes = self.in_step = False
        self.layers: dict[Any, str] = {}
        self.identity = torch.arange(shape.max_blocks, dtype=torch.int32, device=shape.device)
        self.graph_rows = GraphRows(shape.max_requests, shape.device)
        self._plan = NO_PLAN
        #: Request that reports in this step -> its resident blocks.
        self._rows: dict[str, Row] = {}
        #: What `view` has returned in this step; None: nothing yet.
        self._viewed: tuple[Any, StepWork | None] | None = None

    @property
    def with_holes(self) -> dict[str, set[int]]:
        """Request -> its holes, logical blocks."""
        return self.holes.of_request

    @property
    def has_view(self) -> bool:
        """Whether layers may read another table than vLLM's."""
        return bool(self.with_holes) or self.source.writes

    @property
    def measured(self) -> set[str]:
        """Requests whose attention is measured."""
        return set().union(*(probe.measured for probe in self.probes))

    def fits_graphs(self, requests: Set[str]) -> bool:
        """Return whether a full graph can do all that a decode step of these requests does."""
        return self.source.fits_graph(requests) and all(probe.fits_graph(requests) for probe in self.probes)

    def fits_memory(self, lengths: Mapping[str, int]) -> bool:
        """Return whether resident tokens of requests (request -> length with holes) fit into graphs that measure."""
        room, holes = self.shape.graph_tokens, self.holes
        return all(
            length <= room or length - holes.count(req_id) * self.block_size <= room
            for req_id, length in lengths.items()
        )

    def resident_tokens(self, seq_lens: np.ndarray) -> np.ndarray:
        """Return the resident tokens of the batch's requests, int32 [R], from their lengths with holes."""
        return self.holes.resident_tokens(self.batch.req_ids, seq_lens)

    def leave_out(self) -> None:
        """Take away optional parts, which never had a request."""
        self.probes = [probe for probe in self.probes if not probe.optional]
        self.parts = [part for part in self.parts if not part.optional]

    def reserve(self, in_graphs: bool = True) -> None:
        """Allocate the memory of views and of graphs that measure, once."""
        self.views.memory(self)
        if in_graphs:
            self.graph_rows.reserve()
            for probe in self.probes:
                blocks = self.shape.graph_tokens // self.block_size
                probe.reserve(self.shape.max_requests, blocks, self.shape.graph_queries)

    def allocate(self, capacity: Capacity) -> None:
        """Allocate memory that depends on the pool."""
        for part in self.parts:
            part.allocate(capacity)

    def begin(self, scheduler_output: Any, plan: GroupPlan, number: int) -> None:
        """Begin a step as `EvictionRuntime.begin` says. `number` is the index of the group among all of vLLM's KV
        groups.
        """
        self._plan, self.in_step = plan, True
        start = self.holes.begin(scheduler_output, plan, number)
        for part in self.parts:
            part.begin(start)

    def changes(self) -> Iterable[tuple[str, dict[int, int]]]:
        """Yield requests whose tables change with this step, and {logical block: physical block, or `HOLE`}."""
        return self._plan.changes.items()

    def obey(self, orders: Sequence[Any], all_reduce: AllReduce) -> None:
        """Carry out orders of one kind (see `parts.Mover.obey`)."""
        (mover,) = (mover for mover in self.movers if mover.kind is type(orders[0]))
        mover.obey(orders, all_reduce)

    def obeyed(self) -> None:
        """Go on after all orders of the step are carried out."""
        for mover in self.movers:
            mover.obeyed()

    def view(self, metadata: Any) -> tuple[Any, StepWork | None]:
        """Return batch metadata with resident views in place of block tables and lengths.

        vLLM's metadata comes back unchanged if no request of the worker has a hole and none is measured.

        Args:
            metadata: vLLM's `CommonAttentionMetadata`.

        Returns:
            The metadata, and the work of the plugin's kernels (None: none). All builders of a step get the same; a KV
            group has several builders if its layers differ in query heads.
        """
        if not self.in_step:
            return (metadata, None) if self.batch.graph is None else self._captured_view(metadata)
        if self._viewed is None:
            self._viewed = self._view(metadata) if self.batch.graph is None else self._graph_view(metadata)
        return self._viewed

    def _captured_view(self, metadata: Any) -> tuple[Any, StepWork | None]:
        """`view` of a dummy step that captures a graph: metadata in the memory that all replays read."""
        rows, width = metadata.block_table_tensor.shape
        memory = self.views.memory(self, metadata.block_table_tensor.shape)
        table, lens = memory.table[:rows], memory.lens[:rows]
        table[:, :width].copy_(metadata.block_table_tensor)
        lens.copy_(metadata.seq_lens[:rows])
        if self.batch.graph is Attends.STOCK:
            return with_table(metadata, table, lens), None
        lens.clamp_(max=self.shape.graph_tokens)  # lengths of dummy steps may exceed it
        made = [step for probe in self.probes if (step := probe.captured(rows, lens)) is not None]
        longest = self.shape.graph_tokens if self.batch.graph is Attends.OWN else None
        return with_table(metadata, table, lens, longest=longest), self._graph_work(made, rows, rows, lens)

    def _graph_view(self, metadata: Any) -> tuple[Any, StepWork | None]:
        """`_view` of a step that replays a full graph. Fills all memory that the graph reads; rows may be padding."""
        rows, live = len(metadata.block_table_tensor), len(self.batch.req_ids)
        batch = StepBatch(self.batch, self._plan, self.holes, metadata, in_graph=True)
        view = self.views.of(self, metadata)
        batch.see(*view.of_rows(live), self.block_size)
        self.source.replays(batch)
        self._rows, padded = batch.rows, np.zeros(rows, np.int32)
        padded[:live] = batch.resident_tokens
        metadata = with_table(metadata, view.table, view.lens, padded, batch.longest)
        if self.batch.graph is Attends.STOCK:
            return metadata, None
        return metadata, self._graph_work(self._measured(batch), rows, live, view.lens)

    def _graph_work(self, steps: list[StepProbe], rows: int, live: int, lens: torch.Tensor) -> StepWork:
        """Return the work of a full graph of `rows` requests, all but `live` of them padding.

        Args:
            steps: what probes do in each layer.
            lens: int32 [rows], resident tokens.
        """
        if self.batch.graph is Attends.BESIDE:
            return StepWork(steps, NO_ROWS, np.ones(rows, np.int32), lens)
        self.graph_rows.use(live)
        return StepWork.of_graph(steps, self.graph_rows.rows[:rows], lens)

    def _view(self, metadata: Any) -> tuple[Any, StepWork | None]:
        works = self.batch.own or self._plan.report or not self.source.reads_all
        works = works or any(probe.is_active for probe in self.probes)
        if not works and not self.with_holes:
            return metadata, None
        cut = self.source.cut(metadata, self.batch)
        batch = StepBatch(self.batch, self._plan, self.holes, metadata, cut=cut)
        if self.has_view:
            if cut is None:
                table, lens, logical = self.views.of(self, metadata)
            else:
                metadata = cut.metadata
                table, lens = metadata.block_table_tensor, metadata.seq_lens
                logical = self.identity.expand(len(lens), -1)
            self.source.rewrite(batch, table, lens)
            metadata = with_ranges(metadata, partial(self._unread, batch), self.block_size)
        else:
            table, lens = metadata.block_table_tensor, metadata.seq_lens[: len(batch.req_ids)]
            logical = self.identity.expand(len(batch.req_ids), -1)
        longest = batch.longest if self.has_view else None
        if not works:
            return with_table(metadata, table, lens, batch.resident_tokens, longest), None
        batch.see(table, lens, logical, self.block_size)
        self._rows, read = batch.rows, self.source.step(batch)
        # The plugin's kernel attends for a request in all groups or in none.
        own = self.batch.own_now(batch.queries) if self.batch.own else NO_ROWS
        own = np.union1d(own, read.rows) if len(read.rows) else own
        measured, work, held = self._measured(batch), None, batch.resident_tokens
        if len(own) or measured or not read.is_plain:
            work = StepWork(measured, own, batch.queries, lens, read)
        if work is not None and len(own):
            lens, held = work.stock_lens, held.copy()
            held[own] = batch.queries[own]
        if self.has_view or len(own):
            metadata = with_table(metadata, table, lens, held, longest)
        return metadata, work

    def _measured(self, batch: StepBatch) -> list[StepProbe]:
        """Return what probes do in each layer of the step; one of them may measure for others too."""
        steps = [step for probe in self.probes if (step := probe.step(batch)) is not None]
        made: list[StepProbe] = []
        for step in steps:
            # A graph has captured what each of them does.
            if batch.in_graph or not any(each.joins(step) for each in made):
                made.append(step)
        return made

    def drafting_view(self, metadata: Any) -> Any:
        """Return the metadata of a drafter's pass with resident views in place of block tables and lengths.

        Passes have the block tables of a step. Those after the step have lengths of their own.

        Args:
            metadata: vLLM's `CommonAttentionMetadata` of the pass. It comes back unchanged if no request has a hole and
                in dummy steps.
        """
        live = len(self.batch.req_ids)
        if not (self.with_holes and live):
            return metadata
        hidden = self.source.hidden(self.batch.req_ids)
        if self.in_step and not self.source.rewrites:
            table, lens, _ = self.views.of(self, metadata)
        else:
            table, lens, _ = self.views.drafting(self, metadata, hidden)
        held = None
        if (bound := metadata.seq_lens_cpu_upper_bound) is not None:
            held = bound.numpy()[: len(lens)].copy()
            held[:live] -= self.holes.lacking(self.batch.req_ids)
            for row, blocks in hidden:
                held[row] -= len(blocks) * self.block_size
        req_ids, rooms = self.batch.req_ids, dict(hidden)
        metadata = with_ranges(
            metadata, lambda row: {*self.holes.of(req_ids[row]), *rooms.get(row, ())} or None, self.block_size
        )
        return with_table(metadata, table, lens, held)

    def _unread(self, batch: StepBatch, row: int) -> Set[int] | None:
        """Return the holes of a row that leaves blocks out, None for one that reads all (see `with_ranges`)."""
        return self.holes.of(batch.req_ids[row]) if batch.resident_tokens[row] < batch.seq_lens[row] else None

    def unattended(self) -> list[str]:
        """Return the names of layers whose attention did not run in this step."""
        return [name for layer, name in self.layers.items() if layer not in self.batch.attended]

    @property
    def works(self) -> bool:
        """Whether the plugin's kernels have work in this step, in each layer."""
        return self._viewed is not None and self._viewed[1] is not None

    def abandon(self) -> None:
        """Forget the step, which ends or has failed."""
        self._plan, self._rows, self._viewed, self.in_step = NO_PLAN, {}, None, False

    def end(self, all_reduce: AllReduce) -> Reports:
        """Take in what the step has measured, and return the reports that the plan asks for.

        Args:
            all_reduce: (float64 tensor, whether to take the maximum) -> the tensor reduced over the model's ranks.
        """
        rows, asked, reports = self._rows, self._plan.report, Reports()
        self.abandon()
        asked = {req_id: names for req_id, names in asked.items() if req_id in rows}
        for probe in self.probes:
            probe.end(asked, rows, reports, all_reduce)
        # A report has all statistics that were asked for; an incomplete one is left out.
        return {req_id: report for req_id, report in reports.items() if asked[req_id] <= report.statistics.keys()}
