"""Applies the scheduler's plan on a worker, then picks the decode kernel and the CUDA graph of the step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch

from ..config import KVPolicyError
from ..core.plan import PLAN, EvictionPlan, Reports
from .batch import Batch
from .graphs import Attends
from .group import GroupRuntime
from .parts import AllReduce, Capacity
from .transfer import copied
from .views import Views


def _bypassed(names: Sequence[str]) -> str:
    some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"{some} got past by the model's own attention kernel; expected the model to call each layer's attention in "
        "every step, where the KV policy's kernels do their part: leave --kv-policy out for this model"
    )


#: `EvictionRuntime._graph` before the step's graph is chosen.
_UNKNOWN = object()


class EvictionRuntime:
    """State of one worker, between the scheduler's plans and the attention backend.

    Order of a step (docs/design.md, "Parts of a worker"): `begin`, `rearrange`, each group's `view`, each layer's
    `StepWork`, `end`.

    Nothing here waits for a device: offsets of queries, lengths and holes come from vLLM's host copies and from plans.
    All of a step runs in torch's inference mode, as caches and sums are made in it.

    Args:
        groups: KV groups that may have holes, in vLLM's order.
        ops: the layers' attention backend (`attention.ops.BackendOps`).
        pages: if heads are split, layer names of the groups' pages.
        measures_in_graphs: what attends in full CUDA graphs that measure; None: no graph measures.
        names: for each group the names of its layers, or of its pages.
        block_bytes: bytes of a block of the pool, if other groups share the pool.
        speculates: whether requests may have drafts.
        ahead: whether steps are planned before the drafts of the step before are verified.
        attended: to which layers add themselves (see `Batch`); None: no layer does.

    Attributes:
        plan: of the step that runs; empty between steps.
        in_step: whether a step runs; if not, a dummy step may.
        numbers: for each group its index among all of vLLM's KV groups, which include groups of sliding windows.
        exact: whether the backend's kernel attends for all requests without holes.
        outruns: whether the plugin's kernel is faster than the layers' own (see `Fit.outruns`).
        told: what the worker tells of the last step beside reports (see `Source.told`).
        copied: event after which the contents of the last reports are valid (see `transfer`); None: they are valid.
        views: views of the groups.
    """

    def __init__(
        self,
        groups: list[GroupRuntime],
        ops: Any = None,
        pages: Sequence[str] = (),
        measures_in_graphs: Attends | None = None,
        names: Sequence[Sequence[str]] = (),
        block_bytes: int = 0,
        speculates: bool = False,
        ahead: bool = False,
        attended: set[Any] | None = None,
    ) -> None:
        self.groups, self.ops, self.pages = groups, ops, list(pages)
        self.names, self.block_bytes = [list(each) for each in names], block_bytes
        self.numbers = list(range(len(groups)))
        self.measures_in_graphs = measures_in_graphs
        self.speculates, self._ahead = speculates, ahead
        #: Request -> its drafts in the last step.
        self._drafts: dict[str, int] = {}
        self.plan = self._no_plan = EvictionPlan.empty(len(groups))
        self.in_step = False
        self.batch = Batch(attended)
        self.views = Views(groups, self.batch)
        self.exact = self.outruns = False
        self.copied: Any = None
        self.told: dict[str, Any] = {}
        #: Whether a plan has come. After the first plan each step with requests has a plan.
        self._planned = False
        self._scheduler_output: Any = None
        self._graph: Any = _UNKNOWN
        self._tries = False
        for group in groups:
            group.batch, group.views = self.batch, self.views

    def settle(self, decodes: bool, outruns: bool, exact: bool) -> None:
        """Take what is known once layers have their kernels.

        Args:
            decodes: whether the plugin's kernel can attend in place of the layers' own.
            outruns: see `Fit.outruns`.
            exact: whether the layers' own kernels attend for all requests without holes.
        """
        for group in self.groups:
            group.decodes = decodes
            # On a device, and for rows with drafts, layers write what they read into the table that both kernels have.
            group.source.decodes = decodes and not (self.ops.compiles or self.speculates or group.source.cuts)
        self.outruns, self.exact = outruns, exact
        # Scores of drafts are for decodes alone, and what prompts compute of blocks on the host stays pure.
        pure = exact and not all(group.source.reads_all for group in self.groups)
        self.batch.takes_prompts = outruns and not (self.speculates or pure)

    def begin(self, scheduler_output: Any) -> None:
        """Apply a plan: drop requests that ended or restart, note holes, start and stop measuring.

        Raises:
            RuntimeError: the step has requests and no plan. Only dummy steps before the first plan have none.
        """
        told = getattr(scheduler_output, PLAN, None)
        if told is None and self._planned and scheduler_output.num_scheduled_tokens:
            raise RuntimeError(
                "the KV policy's worker got a step without its plan; expected the SchedulerOutput as the scheduler "
                "made it, with all its attributes: leave --kv-policy out, or use another "
                "--distributed-executor-backend"
            )
        self._planned |= told is not None
        self.plan, self.in_step = told or self._no_plan, True
        for number, group, plan in zip(self.numbers, self.groups, self.plan.groups, strict=True):
            group.begin(scheduler_output, plan, number)
        self.batch.graph, self.batch.prompts = None, self.plan.prompts
        self.batch.attended.clear()
        self.views.begin()
        if self.speculates:
            tokens, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
            self.batch.verified = {req_id: tokens[req_id] - len(each) for req_id, each in drafts.items()}
            if self._ahead:
                self.batch.unsure = self._drafts
                self._drafts = {req_id: len(each) for req_id, each in drafts.items()}
        self.batch.own = self._own() if self.groups[0].decodes else set()
        self._scheduler_output, self._graph = scheduler_output, _UNKNOWN

    def check_begun(self, scheduler_output: Any) -> None:
        """Check, before the runner takes in a step, that `begin` has applied its plan.

        Raises:
            RuntimeError: an executor bypassed the worker, so the plan was not applied.
        """
        plan = getattr(scheduler_output, PLAN, None)
        if plan is not None and plan is not self.plan:
            raise RuntimeError(
                "an executor gave a step to the model runner past the worker, which applies the KV policy's plan: "
                "leave --kv-policy out, or use another --distributed-executor-backend"
            )

    def check_attended(self) -> None:
        """Check, once the layers of a step have run, that the plugin's kernels did their work in each.

        A replayed full graph calls no layer; its capture was checked (see `trying`).

        Raises:
            RuntimeError: a model's own kernel read the cache past its layer's attention. The rows that the plugin
                attends for would have wrong outputs.
        """
        for group in self.groups if self.batch.graph is None else ():
            if group.works and (names := group.unattended()):
                raise RuntimeError(_bypassed(names))

    @contextmanager
    def trying(self, graph: bool = False) -> Iterator[None]:
        """Run a dummy step, before the server takes requests, that has to call each layer's attention.

        Args:
            graph: whether the dummy step is of a full graph's capture. Others replay none.

        Raises:
            KVPolicyError: it called no attention of some layer.
        """
        self.batch.attended.clear()
        self._tries = not graph
        try:
            yield
        finally:
            self._tries = False
        if names := [name for group in self.groups for name in group.unattended()]:
            raise KVPolicyError(_bypassed(names))

    def reserve(self) -> None:
        """Allocate memory that stays, before vLLM measures what is left for its pool."""
        self.ops.scratch.reserve(self.groups[0].device)
        for group in self.groups:
            group.reserve(self.measures_in_graphs is not None)

    def allocate(self, capacity: Capacity, tables: Sequence[torch.Tensor] = ()) -> None:
        """Allocate memory that depends on the pool, and views as wide as vLLM's block tables."""
        for group, table in zip(self.groups, tables):
            self.views.memory(group, table.shape)
        for group in self.groups:
            group.allocate(capacity)

    @property
    def decodes_lacking(self) -> bool:
        """Whether the plugin's kernel attends for requests with holes, in layers that it supports."""
        return bool(self.pages) or self.outruns

    @property
    def decodes_measured(self) -> bool:
        """Whether it attends for all measured requests. With `exact` it attends for those with holes alone."""
        return self.ops.decodes_measured and not self.exact

    def _own(self) -> set[str]:
        """Return the requests that the plugin's kernel attends for, where it can.

        - Measured requests: vLLM's kernel would leave a second read of the keys to the score pass.
        - Requests with holes, if that kernel is faster or heads are split (one call attends for split heads), and those
          whose prompts will have some. A prompt goes there with all rows of its step, or not at all.
        """
        own: set[str] = set()
        if self.ops.decodes_measured:
            own.update(*(group.measured for group in self.groups))
        if self.exact:
            own &= set().union(*(group.with_holes for group in self.groups))
        if self.decodes_lacking:
            own.update(*(group.with_holes for group in self.groups))
        if self.batch.takes_prompts:
            own.update(*(group.source.outgrowing for group in self.groups))
        return own

    def choose_graph(self, full: bool) -> Attends | None:
        """Choose the full CUDA graph that this step replays; None: no full graph.

        Args:
            full: whether vLLM has a full graph for the step. During a capture the captured graph is returned instead.
        """
        if not self.ops.scratch.capturing:
            self.batch.graph = self.graph if full else None
        return self.batch.graph

    @property
    def graph(self) -> Attends | None:
        """The full CUDA graph that fits this step of decodes; None: no full graph fits."""
        if not self.in_step:
            return None if self._tries else Attends.STOCK  # a dummy step
        if self._graph is _UNKNOWN:
            self._graph = self._fitting()
        return self._graph

    def _fitting(self) -> Attends | None:
        requests = self._scheduler_output.num_scheduled_tokens.keys()
        if not all(group.fits_graphs(requests) for group in self.groups):
            return None
        # The plugin's kernel attends for requests of one query. Decodes with drafts have several.
        own = set() if self.speculates else self.batch.own
        if not requests.isdisjoint(own):
            # In an `OWN` graph the plugin's kernel attends for requests without holes too.
            fits = self.measures_in_graphs is Attends.OWN and (not self.exact or requests <= own)
        elif any(not requests.isdisjoint(group.measured) for group in self.groups):
            fits = self.measures_in_graphs is Attends.BESIDE
        else:
            return Attends.STOCK
        return self.measures_in_graphs if fits and self._fits_memory() else None

    def _fits_memory(self) -> bool:
        """Return whether graphs that measure have room for the longest request of the step."""
        output, tokens = self._scheduler_output, self._scheduler_output.num_scheduled_tokens
        new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
        computed = [request.num_computed_tokens for request in new] + cached.num_computed_tokens
        if max(computed) + max(tokens.values()) <= min(group.shape.graph_tokens for group in self.groups):
            return True  # even without holes
        req_ids = [request.req_id for request in new] + cached.req_ids
        lengths = {req_id: before + tokens[req_id] for req_id, before in zip(req_ids, computed)}
        return all(group.fits_memory(lengths) for group in self.groups)

    @contextmanager
    def capturing(self, attends: Attends | None) -> Iterator[None]:
        """Capture a CUDA graph, its warm-up included. None: the graph is not a full one."""
        self.batch.graph, self.ops.scratch.capturing = attends, attends is not None
        try:
            yield
        finally:
            self.batch.graph, self.ops.scratch.capturing = None, False

    def rearrange(self, all_reduce: AllReduce) -> None:
        """Carry out the plan's orders, before the step writes any block.

        Args:
            all_reduce: (float64 tensor, whether to take the maximum) -> the tensor reduced over tensor-parallel ranks.
        """
        for (number, _), some in groupby(self.plan.orders, key=lambda order: (order.group, type(order))):
            self.groups[number].obey(list(some), all_reduce)
        for group in self.groups:
            group.obeyed()

    def end(self, all_reduce: AllReduce) -> list[Reports]:
        """Return each group's reports (see `GroupRuntime.end`)."""
        self.plan, self.in_step = self._no_plan, False
        reports = [group.end(all_reduce) for group in self.groups]
        self.told = {}
        for group in self.groups:
            self.told |= group.source.told()
        self.copied = copied(self.groups[0].device) if any(reports) or self.told else None
        return reports

    def abandon(self) -> None:
        """End a step that failed here. Other ranks may not have failed, or elsewhere: nothing waits for them."""
        self.plan, self.in_step, self.told, self.copied = self._no_plan, False, {}, None
        for group in self.groups:
            group.abandon()

    def drafted(self) -> None:
        """Note that drafters have run after a step: passes before the next step are of dummy steps."""
        self.batch.req_ids = []
