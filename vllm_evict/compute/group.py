"""State of one KV group on a worker: holes, view, sums and reports."""

from collections.abc import Iterator, Mapping, Sequence, Set
from copy import copy
from typing import Any

import numpy as np
import torch

from ..config import KVPolicyConfig
from ..core.plan import Copy, GroupPlan, Reports
from ..policies import CACHED, QUERIED, RUNNING
from .batch import Batch
from .cached import CachedStatistics, Row
from .graphs import Attends, GraphMemory
from .host import BoundStep, HostBlocks
from .measure import MassStep
from .merge import Merger
from .originals import Originals
from .prompts import PromptScores
from .select import Selection
from .store import Store
from .sums import RunningSums
from .tokens import TokenSums
from .views import Views
from .work import NO_ROWS, StepWork


class GroupRuntime:
    """One KV group of a worker: its holes, its view and its sums.

    Args:
        config: policy of the group's heads.
        block_size: tokens.
        max_requests: most requests at once.
        max_model_len: tokens.
        kv_heads: most KV heads of a layer, on this rank and in this KV group.
        layers: of this rank and KV group.
        store: KV cache of the group.
        heads: KV heads of each layer whose values add up, those of other stages of a pipeline included; None:
            `kv_heads` in each of `layers`.
        places: for each place in the group the layer of the model; None: one for each of `layers`.
        device: device of block tables and KV cache.
        graph_blocks: resident blocks of the longest request in a full graph that measures.
        held_blocks: most blocks that a request holds; None: the blocks of `max_model_len` tokens.
    """

    def __init__(
        self,
        config: KVPolicyConfig,
        block_size: int,
        max_requests: int,
        max_model_len: int,
        kv_heads: int,
        layers: int,
        store: Store,
        heads: Sequence[int] | None = None,
        places: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        graph_blocks: int = 0,
        held_blocks: int | None = None,
    ) -> None:
        heads = heads or [kv_heads] * layers
        self.block_size, self.shape = block_size, (kv_heads, layers)
        #: Statistics that requests may need, and whether decisions are by token.
        self.statistics, self.by_token = config.statistics, config.granularity == "token"
        self.merges = bool(config.merge)
        #: Whether full graphs test queries for pivotal blocks, which makes each layer slower.
        self._tests = "pivots" in config.policy.measures
        self.device = torch.device(device)
        max_blocks = -(-max_model_len // block_size) + 1
        self.max_requests, self.max_blocks = max_requests, max_blocks
        self.held_blocks = min(held_blocks or max_blocks, max_blocks)
        self.batch = Batch()
        self.views = Views([self], self.batch)
        self.plan: GroupPlan | None = None
        self.sums: RunningSums | None = None
        if config.statistics & RUNNING:
            reduced = config.heads, config.layers
            self.sums = RunningSums(max_requests, *self.shape, max_blocks, block_size, *reduced, self.device, heads)
        self.tokens: TokenSums | None = None
        if config.granularity == "token" and config.statistics & RUNNING:
            self.tokens = TokenSums(max_requests, *self.shape, block_size, max_blocks, self.device)
        self.prompts: PromptScores | None = None
        if config.granularity == "token" and config.reconstructs:
            self.prompts = PromptScores(kv_heads, layers, block_size, self.device)
        self.store = store
        #: None unless the policy has a context.
        self.originals: Originals | None = None
        if config.context is not None:
            self.originals = Originals(store, block_size, self.device)
        #: Host memory of evicted blocks; None: evicted blocks are dropped.
        self.host: HostBlocks | None = None
        self._bounds: BoundStep | None = None
        #: None: decodes attend to all resident blocks.
        self.selection: Selection | None = None
        if config.select:
            self.selection = Selection(config, block_size, places or range(layers), store, self.device)
        #: Request -> its merger, of requests that merge tokens.
        self.mergers: dict[str, Merger] = {}
        self.cached = CachedStatistics(store.read, heads, config.heads, config.layers)
        #: Whether the plugin's kernel can decode all layers of the group (see `StepWork`).
        self.decodes = False
        #: Request -> its holes, logical blocks.
        self.with_holes: dict[str, list[int]] = {}
        #: Request -> holes that the scheduler does not know yet: blocks that did not come back from the host.
        self._withheld: dict[str, list[int]] = {}
        self._lacks: tuple[list[str], np.ndarray] | None = None
        self._identity = torch.arange(max_blocks, dtype=torch.int32, device=self.device)
        self._graph_blocks = min(graph_blocks, max_blocks)
        self._graph_memory: GraphMemory | None = None
        self._viewed: tuple[Any, StepWork | None] | None = None
        self._rows: dict[str, Row] = {}
        #: Layers of the model that attend in this group, with and without a cache of their own -> their names.
        self.layers: dict[Any, str] = {}

    def begin(self, scheduler_output: Any, plan: GroupPlan, number: int) -> None:
        """See `EvictionRuntime.begin`. `number` is the index of the group among all of vLLM's KV groups."""
        self.plan = plan
        gone = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        cached = scheduler_output.scheduled_cached_reqs
        for req_id in gone | cached.resumed_req_ids:
            self.with_holes.pop(req_id, None)
            self._withheld.pop(req_id, None)
        started = [(new.req_id, new.block_ids) for new in scheduler_output.scheduled_new_reqs]
        if cached.resumed_req_ids:
            started += [each for each in zip(cached.req_ids, cached.new_block_ids) if each[0] in cached.resumed_req_ids]
        for req_id, holes in plan.holes.items():
            known = self._withheld.pop(req_id, ())
            self.with_holes.setdefault(req_id, []).extend(block for block in holes if block not in known)
            if untold := [block for block in known if block not in holes]:
                self._withheld[req_id] = untold
        for req_id, blocks in plan.returned.items():
            left = set(self.with_holes.pop(req_id, ())).difference(blocks)
            if left:
                self.with_holes[req_id] = list(left)
        for req_id, block_ids in started:
            # The table of a started request has all its holes: those of a session's former turns and of this plan, or
            # those of a cached prefix.
            self.with_holes.pop(req_id, None)
            self._withheld.pop(req_id, None)
            if 0 in block_ids[number]:
                self.with_holes[req_id] = np.flatnonzero(np.equal(block_ids[number], 0)).tolist()
        if gone or started or plan.holes or plan.returned:
            self._lacks = None
            if self.selection is not None:
                self.selection.forget(gone.union(plan.holes, plan.returned, (req_id for req_id, _ in started)))
        for req_id in gone if self.mergers else ():
            self.mergers.pop(req_id, None)
        if self.originals is not None:
            self.originals.forget(gone | cached.resumed_req_ids)
        if self.prompts is not None:
            self.prompts.begin(gone | cached.resumed_req_ids, plan)
        for sums in (self.sums, self.tokens):
            if sums is None:
                continue
            for req_id in plan.parked:
                sums.park(req_id)
            for req_id in gone.difference(plan.parked) | plan.untrack:
                sums.stop(req_id)
            for req_id in plan.restored:
                sums.unpark(req_id, len(self.with_holes.get(req_id, ())))
            for req_id, scoring in plan.track.items():
                if scoring.per_token == (sums is self.tokens):
                    sums.start(req_id, scoring)
                    # Holes of earlier plans. Holes of this plan are counted below.
                    new = len(plan.holes.get(req_id, ())) - len(plan.returned.get(req_id, ()))
                    sums.count_holes(req_id, len(self.with_holes.get(req_id, ())) - new)
            for req_id, trigger in plan.triggers.items():
                sums.set_trigger(req_id, trigger)
            for req_id, holes in plan.holes.items():
                if req_id not in plan.missing:
                    sums.count_holes(req_id, len(holes))
            for req_id, blocks in plan.returned.items():
                sums.count_holes(req_id, -len(blocks))
            for req_id, missing in plan.missing.items():
                sums.set_holes(req_id, missing)

    @property
    def graph_tokens(self) -> int:
        """Resident tokens of the longest request in full CUDA graphs in which the plugin's kernel attends."""
        return self._graph_blocks * self.block_size

    @property
    def measured(self) -> set[str]:
        """Requests whose attention is measured."""
        return set().union(*(sums.requests for sums in (self.sums, self.tokens) if sums is not None))

    def fits_graphs(self, requests: Set[str]) -> bool:
        """Whether a full graph can measure all that a decode step of these requests measures."""
        if self.plan is not None and (self.plan.waiting or self._asks_for_bounds()):
            return False
        if self.selection is not None or (self.prompts is not None and len(self.prompts)):
            return False
        if self.tokens is not None:
            return self.tokens.fit_graphs(requests) and self.sums.requests.isdisjoint(requests)
        return self._tests or self.sums is None or not self.sums.test(requests)

    def fits_memory(self, lengths: Mapping[str, int]) -> bool:
        """Whether resident tokens of all requests (request -> length with holes) fit into `Attends.OWN` graphs."""
        room, holes = self.graph_tokens, self.with_holes
        return all(
            length <= room or length - len(holes.get(req_id, ())) * self.block_size <= room
            for req_id, length in lengths.items()
        )

    def held(self, seq_lens: np.ndarray) -> np.ndarray:
        """Return the resident tokens of the batch's requests, int32 [R], from their lengths with holes."""
        return seq_lens - self._lacking(self.batch.req_ids) if self.with_holes else seq_lens

    def reserve(self, in_graphs: bool = True) -> None:
        """Allocate the memory of views and of `Attends.OWN` graphs, once."""
        self.views.memory(self)
        if in_graphs and self._graph_memory is None:
            sizes = self.max_requests, self._graph_blocks
            self._graph_memory = GraphMemory(*sizes, self.sums, self.tokens, self._tests, self.device)

    def hold(self, pool: int) -> None:
        """Allocate the sums by token for a pool of this many blocks."""
        if self.tokens is not None:
            self.tokens.hold(min(pool, self.max_requests * self.held_blocks))

    @property
    def kept_bytes(self) -> int:
        """Bytes on the device that the group keeps between steps."""
        kept = sum(each.nbytes for each in self.views.memory(self)) + self._identity.nbytes
        kept += self.store.kept_bytes + (0 if self.selection is None else self.selection.kept_bytes)
        return kept + sum(each.kept_bytes for each in (self.sums, self.tokens, self._graph_memory) if each is not None)

    def changes(self) -> Iterator[tuple[str, dict[int, int]]]:
        """Yield requests whose tables change with this step, and {logical block: physical block, 0 for a hole}."""
        if self.plan is None:
            return
        for req_id in self.plan.holes.keys() | self.plan.moved.keys():
            holes = dict.fromkeys((*self.plan.holes.get(req_id, ()), *self._withheld.get(req_id, ())), 0)
            yield req_id, self.plan.moved.get(req_id, {}) | holes

    def withhold(self, copies: Sequence[Copy]) -> list[tuple[str, int]]:
        """Keep holes whose blocks did not come back from the host; return request and logical block of each."""
        missing = []
        for each in copies:
            for block, physical in self.plan.moved.get(each.req_id, {}).items():
                if physical == each.physical:
                    self.with_holes.setdefault(each.req_id, []).append(block)
                    self._withheld.setdefault(each.req_id, []).append(block)
                    missing.append((each.req_id, block))
        self._lacks = None
        return missing

    def view(self, metadata: Any) -> tuple[Any, StepWork | None]:
        """Return batch metadata with resident views in place of block tables and lengths.

        vLLM's metadata comes back unchanged if no request of the worker has a hole and none is measured.

        Args:
            metadata: vLLM's `CommonAttentionMetadata`.

        Returns:
            The metadata, and the work of the plugin's kernels (None: none). All builders of a step get the same; a KV
            group has several builders if its layers differ in query heads.
        """
        if self.plan is None:  # a dummy step
            return (metadata, None) if self.batch.graph is None else self._captured_view(metadata)
        if self._viewed is None:
            self._viewed = self._view(metadata) if self.batch.graph is None else self._graph_view(metadata)
        return self._viewed

    def _captured_view(self, metadata: Any) -> tuple[Any, StepWork | None]:
        """`view` of a dummy step that captures a graph: metadata in the memory that all replays read."""
        rows, width = metadata.block_table_tensor.shape
        table, lens, _ = (each[:rows] for each in self.views.memory(self, metadata.block_table_tensor.shape))
        table[:, :width].copy_(metadata.block_table_tensor)
        lens.copy_(metadata.seq_lens[:rows])
        metadata = copy(metadata)
        metadata.block_table_tensor, metadata.seq_lens = table, lens
        if self.batch.graph is Attends.STOCK:
            return metadata, None
        lens.clamp_(max=self.graph_tokens)  # lengths of dummy steps may exceed it
        memory = self._graph_memory
        memory.use(rows)
        metadata.max_seq_len = self.graph_tokens
        mass = None if memory.mass is None else memory.mass.part(rows)._replace(lens=lens)
        tokens = None if memory.tokens is None else self.tokens.captured(memory.tokens.part(rows), lens)
        return metadata, StepWork.of_graph(mass, memory.rows[:rows], lens, tokens)

    def _graph_view(self, metadata: Any) -> tuple[Any, StepWork | None]:
        """`_view` of a step that replays a full graph. Fills all memory that the graph reads; rows may be padding."""
        req_ids, rows = self.batch.req_ids, len(metadata.block_table_tensor)
        live = len(req_ids)
        seq_lens = metadata.seq_lens_cpu_upper_bound[:live].numpy()
        held = self.held(seq_lens)
        longest = int(held.max())
        table, lens, logical = self.views.of(self, metadata)
        metadata = copy(metadata)
        metadata.block_table_tensor, metadata.seq_lens = table, lens
        padded = np.zeros(rows, np.int32)
        padded[:live] = held
        metadata.seq_lens_cpu_upper_bound, metadata.max_seq_len = torch.from_numpy(padded), longest
        metadata._num_computed_tokens_cache = None
        self._resident(table, held, lens)
        if self.batch.graph is Attends.STOCK:
            return metadata, None
        memory, step, tokens = self._graph_memory, None, None
        memory.use(live)
        width, starts = -(-longest // self.block_size), np.arange(live + 1, dtype=np.int32)
        if memory.tokens is not None:
            buffers = memory.tokens.part(live, width)
            tokens = self.tokens.token_step(req_ids, starts, seq_lens, held, lens[:live], buffers)
        elif memory.mass is not None:
            mass = memory.mass.part(live, width)
            step = self.sums.step(req_ids, starts, seq_lens, logical[:live, :width], lens[:live], mass)
        return metadata, StepWork.of_graph(step, memory.rows[:rows], lens, tokens)

    def _view(self, metadata: Any) -> tuple[Any, StepWork | None]:
        measuring = self.sums is not None and len(self.sums) > 0
        decodes, selects = bool(self.batch.own), self.selection is not None
        by_token = self.tokens is not None and len(self.tokens) > 0
        repeating = self.prompts is not None and len(self.prompts) > 0
        if not (self.with_holes or measuring or by_token or repeating or self.plan.report or decodes or selects):
            return metadata, None
        req_ids = self.batch.req_ids
        rows = len(req_ids)
        starts = metadata.query_start_loc_cpu[: rows + 1].numpy()
        # Too large by at most `slack`, and right without it; `lengths` are right, and known to the device alone.
        seq_lens, lengths = metadata.seq_lens_cpu_upper_bound[:rows].numpy(), metadata.seq_lens[:rows]
        held, settled, slack = self.held(seq_lens), self.batch.settled_queries(starts), self.batch.slack()
        longest = int(held.max())
        width = max(-(-longest // self.block_size), 1)
        lens, own = metadata.seq_lens[:rows], NO_ROWS
        select, selecting = None, NO_ROWS
        if selects:
            selecting = self.selection.rows(starts, held)
            filled = self.selection.filled(metadata.block_table_tensor, starts, seq_lens)
        if self.with_holes:
            table, lens, logical = self.views.of(self, metadata)
            logical = logical[:, :width]
            metadata = copy(metadata)
            metadata.block_table_tensor, metadata.seq_lens = table, lens
            metadata.seq_lens_cpu_upper_bound, metadata.max_seq_len = torch.from_numpy(held), longest
            metadata._num_computed_tokens_cache = None
        else:
            table = metadata.block_table_tensor
            logical = self._identity[:width].expand(rows, width)
        if decodes:
            # The plugin's kernel attends for a request in all groups or in none.
            own = self.batch.own_now(starts)
        if selects:
            select = self.selection.step(req_ids, selecting, filled, table, starts, held)
            own = np.union1d(own, selecting)
        self._resident(table, held, lens, None if settled is None else np.diff(starts) - settled)
        step = None
        if measuring:
            step = self.sums.step(
                req_ids, starts, seq_lens, logical, lens, settled=settled, lengths=lengths, slack=slack
            )
        tokens = None
        if by_token:
            tokens = self.tokens.token_step(req_ids, starts, seq_lens, held, lens, settled=settled)
        prompts = self.prompts.step(req_ids, starts, seq_lens) if repeating else None
        if self.plan.waiting or self._asks_for_bounds():
            places = {req_id: row for row, req_id in enumerate(req_ids)}
            asked, ends = (
                (self.plan.waiting, self.plan.report),
                starts[1:] if settled is None else starts[:-1] + settled,
            )
            self._bounds = BoundStep(self.host, *asked, self._rows, places, starts[:-1], ends, self.device)
        if not len(own) and all(each is None for each in (step, tokens, prompts, self._bounds, select)):
            return metadata, None
        work = StepWork(step, own, starts, lens, tokens, prompts, self._bounds, select, selecting)
        if len(own):
            metadata = metadata if self.with_holes else copy(metadata)
            stock = held.copy()
            stock[own] = np.diff(starts)[own]
            metadata.seq_lens, metadata.seq_lens_cpu_upper_bound = work.stock_lens, torch.from_numpy(stock)
        return metadata, work

    def drafting_view(self, metadata: Any) -> Any:
        """Return the metadata of a drafter's pass with resident views in place of block tables and lengths.

        Drafters run after their step, on the block tables of the step and on lengths that differ from pass to pass.

        Args:
            metadata: vLLM's `CommonAttentionMetadata` of the pass. It comes back unchanged if no request has a hole.
        """
        if not self.with_holes:
            return metadata
        table, lens = self.views.drafting(self, metadata)
        metadata = copy(metadata)
        metadata.block_table_tensor, metadata.seq_lens = table, lens
        if (bound := metadata.seq_lens_cpu_upper_bound) is not None:
            metadata.seq_lens_cpu_upper_bound = bound - torch.from_numpy(self._lacking(self.batch.req_ids))
        metadata._num_computed_tokens_cache = None
        return metadata

    def unattended(self) -> list[str]:
        """Return the names of layers whose attention did not run in this step."""
        return [name for layer, name in self.layers.items() if layer not in self.batch.attended]

    @property
    def works(self) -> bool:
        """Whether the plugin's kernels have work in this step, in each layer."""
        return self._viewed is not None and self._viewed[1] is not None

    def end(self, all_reduce: Any) -> Reports:
        """Add the step's mass to the running sums, and return the reports that the plan asks for.

        Args:
            all_reduce: (float64 tensor, whether to take the maximum) -> the tensor reduced over the model's ranks.
        """
        plan, viewed = self.plan, self._viewed
        self.plan, self._viewed = None, None
        if viewed is not None and viewed[1] is not None and isinstance(viewed[1].mass, MassStep):
            self.sums.fold(viewed[1].mass)
        for req_id, number in plan.judged.items():
            if self.tokens is not None and req_id in self.tokens:
                self.tokens.judge(req_id, number)
        asked = {req_id: names for req_id, names in plan.report.items() if req_id in self._rows}
        running = [req_id for req_id, names in asked.items() if names & RUNNING and req_id in (self.sums or ())]
        reports: Reports = {}
        if running:
            reports = self.sums.report(running, [self._rows[req_id].logical for req_id in running], all_reduce)
        if any(names & CACHED for names in asked.values()):
            for req_id, report in self.cached.report(asked, self._rows, all_reduce).items():
                reports.setdefault(req_id, report).statistics.update(report.statistics)
        if self._bounds is not None:
            self._bounds.report(reports, all_reduce)
            self._bounds = None
        self._rows = {}
        # A report has all statistics that were asked for; an incomplete one is left out.
        return {req_id: report for req_id, report in reports.items() if asked[req_id] <= report.statistics.keys()}

    def _lacking(self, req_ids: list[str]) -> np.ndarray:
        """Return the tokens in the holes of each row: int32 [R]. Cached until batch or holes change."""
        if self._lacks is None or self._lacks[0] != req_ids:
            tokens = (len(self.with_holes.get(req_id, ())) * self.block_size for req_id in req_ids)
            self._lacks = list(req_ids), np.fromiter(tokens, np.int32, len(req_ids))
        return self._lacks[1]

    def _asks_for_bounds(self) -> bool:
        """Whether some request reports a statistic of its last query (`policies.QUERIED`)."""
        return any(names & QUERIED for names in self.plan.report.values())

    def _resident(
        self, table: torch.Tensor, held: np.ndarray, lens: torch.Tensor, drafts: np.ndarray | None = None
    ) -> None:
        """Note the resident blocks of requests that report; more, where the host does not know how many are settled.

        Args:
            table: int32 [R, W], resident blocks.
            held, lens: int32 [R], resident tokens as the host and as the device know them.
            drafts: int64 [R], of them drafts of this step; None: none are.
        """
        if not self.plan.report:
            return
        held, slack = held if drafts is None else held - drafts, self.batch.slack()
        rows = {req_id: row for row, req_id in enumerate(self.batch.req_ids)}
        for req_id in self.plan.report:
            row, holes = rows[req_id], self.with_holes.get(req_id, [])
            length = int(held[row])
            blocks = -(-length // self.block_size)
            is_held = np.ones(blocks + len(holes), bool)
            is_held[holes] = False
            index = np.flatnonzero(is_held)
            settled = None
            if slack is not None and slack[row]:
                settled = lens[row] - (0 if drafts is None else int(drafts[row]))
            self._rows[req_id] = Row(index, table[row, :blocks], length, settled)
