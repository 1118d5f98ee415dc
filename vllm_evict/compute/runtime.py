"""What one worker does in a step, over its KV groups: it obeys plans, and chooses who decodes, and in which graph."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..core.plan import PLAN, EvictionPlan, Reports
from .graphs import Attends
from .group import Batch, GroupRuntime
from .merge import Merger
from .tokens import compact
from .transfer import copied
from .views import Views

#: Of `EvictionRuntime.graph`, until somebody asks.
_UNKNOWN = object()


class EvictionRuntime:
    """State of one worker, between the scheduler's plans and the attention backend.

    A step goes: `begin` (obey the plan), the runner puts `holes` of each group into its block tables and names the
    batch's rows, the metadata builders ask for their group's `view`, each layer does its own work, `end` sums up and
    reports.

    Nothing here waits for a device: what the host has to know (offsets of queries, lengths, who lacks which blocks) it
    knows from vLLM's own host copies and from the plans.

    Args:
        groups: of those of vLLM's KV groups that may have holes, in order.
        ops: of the layers' attention backend (`attention.backend.BackendOps`).
        pages: where heads are split, layer names of the groups' pages.
        attends_in_graphs: whether there are full CUDA graphs in which the plugin's kernel attends.
        names: of the layers, or pages, in each group.
        block_bytes: of a block of the pool, where other groups share it.

    Attributes:
        numbers: of the groups, among all of vLLM's: layers with sliding windows have groups that are vLLM's alone.
        copied: event after which the last reports hold what they say (see `transfer`); None: at once.
        views: of the groups, made of vLLM's block tables.
    """

    def __init__(
        self,
        groups: list[GroupRuntime],
        ops: Any = None,
        pages: Sequence[str] = (),
        attends_in_graphs: bool = False,
        names: Sequence[Sequence[str]] = (),
        block_bytes: int = 0,
    ) -> None:
        self.groups, self.ops, self.pages = groups, ops, list(pages)
        self.names, self.block_bytes = [list(each) for each in names], block_bytes
        self.numbers = list(range(len(groups)))
        self.attends_in_graphs = attends_in_graphs
        self.plan: EvictionPlan | None = None
        self.batch = Batch()
        self.views = Views(groups, self.batch)
        self.copied: Any = None
        #: Whether a plan has come. From then on each step of requests has one.
        self._planned = False
        self._scheduler_output: Any = None
        self._graph: Any = _UNKNOWN
        for group in groups:
            group.batch, group.views = self.batch, self.views

    def begin(self, scheduler_output: Any) -> None:
        """Obey a plan: forget requests that ended or start over, note holes, start to measure.

        Raises:
            RuntimeError: the step has requests and no plan. Only vLLM's warm-up, before the first plan, has none.
        """
        self.plan = getattr(scheduler_output, PLAN, None)
        if self.plan is None and self._planned and scheduler_output.num_scheduled_tokens:
            raise RuntimeError(
                "the KV policy's worker got a step without its plan; expected the SchedulerOutput as the scheduler "
                "made it, with all its attributes: leave --kv-policy out, or use another "
                "--distributed-executor-backend"
            )
        self._planned |= self.plan is not None
        self.plan = self.plan or EvictionPlan.empty(len(self.groups))
        for number, group, plan in zip(self.numbers, self.groups, self.plan.groups, strict=True):
            group.begin(scheduler_output, plan, number)
        self.batch.graph = None
        self.views.begin()
        self.batch.own = self._own() if self.groups[0].decodes else set()
        self._scheduler_output, self._graph = scheduler_output, _UNKNOWN

    def check_begun(self, scheduler_output: Any) -> None:
        """Before the runner takes a step in: its plan has to be the one that the worker has begun.

        Raises:
            RuntimeError: an executor went past the worker, so nobody would obey the plan.
        """
        plan = getattr(scheduler_output, PLAN, None)
        if plan is not None and plan is not self.plan:
            raise RuntimeError(
                "an executor gave a step to the model runner past the worker, who obeys its KV policy's plan: "
                "leave --kv-policy out, or use another --distributed-executor-backend"
            )

    def reserve(self) -> None:
        """Memory that stays, before vLLM measures what is left for its pool."""
        self.ops.reserve(self.groups[0].device)
        for group in self.groups:
            group.reserve(self.attends_in_graphs)

    def hold(self, pool: int, tables: Sequence[torch.Tensor]) -> None:
        """Memory for what is kept of each of the pool's blocks, and views as wide as vLLM's block tables."""
        for group, table in zip(self.groups, tables):
            self.views.memory(group, table.shape)
            group.hold(pool)

    @property
    def decodes_lacking(self) -> bool:
        """Whether who lacks blocks is decoded by the plugin's kernel, where that can decode."""
        return bool(self.pages) or not self.ops.decodes_measured

    def _own(self) -> set[str]:
        """Requests whose decodes are the plugin's kernel's.

        Those that lack blocks, where it is the faster one, or where heads are split, which it decodes by one call. On a
        device those that are measured, which beside another kernel takes a second read of the keys.
        """
        own = set()
        if self.ops.decodes_measured:
            own.update(*(group.measured for group in self.groups))
        if self.decodes_lacking:
            own.update(*(group.with_holes for group in self.groups))
        return own

    def choose_graph(self, full: bool) -> Attends | None:
        """Which full CUDA graph this step replays, if it is one of decodes that has some (`full`); None: none.

        While a graph is captured it is that one.
        """
        if not self.ops.capturing:
            self.batch.graph = self.graph if full else None
        return self.batch.graph

    @property
    def graph(self) -> Attends | None:
        """What attends in the full CUDA graph that a step of decodes fits in; None: it fits in none."""
        if self.plan is None:
            return Attends.STOCK  # a dummy run: no request of ours is in it
        if self._graph is _UNKNOWN:
            self._graph = self._fitting()
        return self._graph

    def _fitting(self) -> Attends | None:
        requests = self._scheduler_output.num_scheduled_tokens.keys()
        if not all(group.fits_graphs(requests) for group in self.groups):
            return None
        if requests.isdisjoint(self.batch.own):
            measured = any(not requests.isdisjoint(group.measured) for group in self.groups)
            return None if measured else Attends.STOCK
        return Attends.OWN if self.attends_in_graphs and self._fits_memory() else None

    def _fits_memory(self) -> bool:
        """Whether graphs in which the plugin's kernel attends have room for the longest request of the step."""
        output, tokens = self._scheduler_output, self._scheduler_output.num_scheduled_tokens
        new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
        computed = [request.num_computed_tokens for request in new] + cached.num_computed_tokens
        if max(computed) + max(tokens.values()) <= min(group.graph_tokens for group in self.groups):
            return True  # whatever they lack
        req_ids = [request.req_id for request in new] + cached.req_ids
        lengths = {req_id: before + tokens[req_id] for req_id, before in zip(req_ids, computed)}
        return all(group.fits_memory(lengths) for group in self.groups)

    @contextmanager
    def capturing(self, attends: Attends | None) -> Iterator[None]:
        """Around the capture of a CUDA graph, its warm-up included; None: it is not a full one."""
        self.batch.graph, self.ops.capturing = attends, attends is not None
        try:
            yield
        finally:
            self.batch.graph, self.ops.capturing = None, False

    @torch.inference_mode()  # caches and sums are made in it
    def rearrange(self, all_reduce: Any) -> None:
        """Gather what heads keep, and turn keys of blocks that move up, before any block of this step is written."""
        for move in self.plan.rotations:
            self.groups[move.group].originals.turn(move)
        for group, plan in zip(self.groups, self.plan.groups):
            if group.originals is not None:
                group.originals.drop(plan.holes)  # some may have moved with this very plan
        for each in self.plan.compactions:
            group = self.groups[each.group]
            merger = group.mergers.setdefault(each.req_id, Merger())
            sums = group.prompts if each.config.policy.reconstructs else group.tokens
            compact(each, group.store, sums, group.block_size, merger, all_reduce, group.device)

    @torch.inference_mode()
    def end(self, all_reduce: Any) -> list[Reports]:
        """Sum up the step and report what the plan asks for, group by group."""
        self.plan = None
        reports = [group.end(all_reduce) for group in self.groups]
        self.copied = copied(self.groups[0].device) if any(reports) else None
        return reports
