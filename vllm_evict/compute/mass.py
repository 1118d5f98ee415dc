"""Probes of attention mass, by block and by token."""

from collections.abc import Mapping, Set

import torch

from ..core.actions import Judged
from ..core.mechanisms.shared import SharedHoles
from ..core.plan import Reports
from ..policies import RUNNING
from . import measure
from .holes import Start
from .measure import LayerMass, MassBuffers, MassStep
from .needs import OF_TOKEN, Needs
from .parts import AllReduce, Capacity
from .probes import MassKind, Probe
from .shape import Shape
from .step_batch import Row, StepBatch
from .sums import RunningSums
from .tokens import TokenBuffers, TokenStep, TokenSums


class SumsProbe(Probe):
    """Keeps running sums up to the plan. Subclasses measure what adds up.

    Args:
        sums: of the KV group.
        per_token, summed: as `Scoring` has them, of the requests that it measures.
    """

    def __init__(self, sums: RunningSums, per_token: bool = False, summed: bool = False) -> None:
        self.sums, self._measures = sums, (per_token, summed)

    @property
    def is_active(self) -> bool:
        return len(self.sums) > 0

    @property
    def measured(self) -> Set[str]:
        return self.sums.requests

    def begin(self, start: Start) -> None:
        sums, plan, holes = self.sums, start.plan, start.holes
        for req_id in start.gone | plan.untrack:
            sums.stop(req_id)
        for req_id, scoring in plan.track.items():
            if (scoring.per_token, scoring.summed) == self._measures:
                sums.start(req_id, scoring)
                sums.set_holes(req_id, holes.count(req_id))
        for req_id, trigger in plan.triggers.items():
            sums.set_trigger(req_id, trigger)
        shared = SharedHoles.within(plan)
        counts = {} if shared is None else shared.counts
        for req_id in start.changed | counts.keys():
            sums.set_holes(req_id, counts.get(req_id, holes.count(req_id)))


class BlockMass(SumsProbe):
    """Mass of requests that are measured by block.

    Args:
        sums: of the KV group.
        tests: whether queries may be tested for pivotal blocks.
        tests_in_graphs: whether full graphs test queries too, which makes each layer slower.
        in_graphs: whether full graphs measure by block.
        summed: as `Scoring` has it, of the requests that it measures.
    """

    def __init__(
        self, sums: RunningSums, tests: bool, tests_in_graphs: bool, in_graphs: bool, summed: bool = False
    ) -> None:
        super().__init__(sums, summed=summed)
        self._tests, self._tests_in_graphs, self._in_graphs = tests, tests_in_graphs, in_graphs
        #: Memory of full graphs; None: none measures by block.
        self.memory: MassBuffers | None = None
        #: What the layers of this step measure; None: nothing.
        self._step: MassStep | None = None

    @property
    def kept_bytes(self) -> int:
        return self.sums.kept_bytes + bytes_of(self.memory)

    def step(self, batch: StepBatch) -> MassStep | None:
        if not self.is_active:
            return None
        if not batch.in_graph:
            self._step = self.sums.step(batch)
        elif self.memory is not None:
            self._step = self.sums.step(batch, self.memory.part(*batch.logical.shape))
        return self._step

    def fits_graph(self, requests: Set[str]) -> bool:
        if not self._in_graphs:
            return requests.isdisjoint(self.sums.requests)
        return self._tests_in_graphs or not self.sums.test(requests)

    def reserve(self, requests: int, blocks: int, queries: int) -> None:
        if self._in_graphs and self.memory is None:
            ones = torch.ones(requests * queries, device=self.sums.device)
            lens = torch.zeros(requests, dtype=torch.int32, device=self.sums.device)
            self.memory = self.sums.buffers(requests, blocks, lens, ones, self._tests_in_graphs)

    def captured(self, rows: int, lens: torch.Tensor) -> LayerMass | None:
        return None if self.memory is None else LayerMass(self.memory.part(rows)._replace(lens=lens))

    def end(
        self, asked: Mapping[str, frozenset[str]], rows: Mapping[str, Row], reports: Reports, all_reduce: AllReduce
    ) -> None:
        step, self._step = self._step, None
        if step is not None:
            self.sums.fold(step)
        running = [req_id for req_id, names in asked.items() if names & RUNNING and req_id in self.sums]
        if running:
            reports |= self.sums.report(running, [rows[req_id].logical for req_id in running], all_reduce)

    def needs(self, shape: Shape) -> Needs:
        sums, queries = self.sums, shape.queries
        by_layer = sums.kv_heads if self._tests or sums.maximise_layers else 0
        step = 4 * shape.blocks * (sums.heads + by_layer)
        # A copy of the queries in another dtype, or their LSE. Tested queries need copies and outputs beside it.
        step += 3 * queries + measure.PIVOT_SCRATCH if self._tests else queries
        # Reports: two indices of each block, sums in float32 and float64, and their reduction.
        return Needs(step, between=shape.blocks * (32 + 16 * sums.heads))

    def kinds(self, kv_heads: int) -> list[MassKind]:
        # Tests for pivotal blocks need the mass of each head. Other calls measure queries that are tested one by one.
        heads = {self.sums.heads} | ({kv_heads} if self._tests else set())
        kinds = [MassKind(each, weighted) for each in sorted(heads) for weighted in (False, True)]
        return [*kinds, MassKind(0, True)] if self._tests else kinds

    def warm_up(self) -> None:
        self.sums.warm_up(self._tests)


class TokenMass(SumsProbe):
    """Mass of requests that are measured by token. A full graph of their KV group measures by token only.

    Args:
        sums: of the KV group.
        most_blocks: blocks that requests hold if they share none.
    """

    sums: TokenSums

    def __init__(self, sums: TokenSums, most_blocks: int) -> None:
        super().__init__(sums, per_token=True)
        self._most_blocks = most_blocks
        #: Memory of full graphs; None: there are none.
        self.memory: TokenBuffers | None = None
        self._judged: dict[str, int] = {}

    @property
    def kept_bytes(self) -> int:
        return self.sums.kept_bytes + bytes_of(self.memory)

    @property
    def pool_bytes(self) -> int:
        return self.sums.nbytes

    def begin(self, start: Start) -> None:
        super().begin(start)
        told = Judged.within(start.plan)
        self._judged = {} if told is None else told.numbers

    def allocate(self, capacity: Capacity) -> None:
        if capacity.ahead:
            self.sums.allocate(min(capacity.blocks, self._most_blocks))

    def step(self, batch: StepBatch) -> TokenStep | None:
        if not batch.in_graph:
            return self.sums.token_step(batch) if self.is_active else None
        return None if self.memory is None else self.sums.token_step(batch, self.memory.part(*batch.logical.shape))

    def fits_graph(self, requests: Set[str]) -> bool:
        return self.sums.fit_graphs(requests)

    def reserve(self, requests: int, blocks: int, queries: int) -> None:
        if self.memory is None:
            self.memory = self.sums.token_buffers(requests, blocks, queries)

    def captured(self, rows: int, lens: torch.Tensor) -> TokenStep | None:
        return None if self.memory is None else self.sums.captured(self.memory.part(rows), lens)

    def end(
        self, asked: Mapping[str, frozenset[str]], rows: Mapping[str, Row], reports: Reports, all_reduce: AllReduce
    ) -> None:
        for req_id, number in self._judged.items():
            if req_id in self.sums:
                self.sums.judge(req_id, number)

    def needs(self, shape: Shape) -> Needs:
        block = OF_TOKEN * shape.layers * shape.kv_heads * shape.block_size
        return Needs(step=4 * shape.tokens * shape.max_requests, block=block)

    def kinds(self, kv_heads: int) -> list[MassKind]:
        return [MassKind(kv_heads, weighted=True, per_token=True)]

    def warm_up(self) -> None:
        self.sums.warm_up(tests=False)


def bytes_of(memory: MassBuffers | TokenBuffers | None) -> int:
    """Return the bytes of a graph's memory."""
    return sum(tensor.nbytes for tensor in memory or () if isinstance(tensor, torch.Tensor))
