"""Messages between scheduler and workers, one each way a step, as attributes of vLLM's own messages."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..config import KVPolicyConfig
from ..policies import RUNNING

N = TypeVar("N")
#: Attribute of a `SchedulerOutput` that holds the step's `EvictionPlan`.
PLAN = "kv_evict_plan"
#: Attribute of a `ModelRunnerOutput` that holds a list of `Reports`, one for each KV group.
REPORTS = "kv_evict_reports"
#: Attribute of a `ModelRunnerOutput` that holds scored rows, request -> float32 [rows, 4]; absent without any.
SCORED = "kv_evict_scored"
#: Attribute of a `ModelRunnerOutput` that holds `HostTrouble`; absent without any.
TROUBLE = "kv_evict_host_trouble"


@dataclass(frozen=True, slots=True)
class Scoring:
    """The part of a request's policy that a worker needs to measure the request.

    Attributes:
        accumulate, decay, window, every: the policy's fields.
        trigger: resident blocks above which the next decision is due. Workers foresee that decision by it, where only
            the last queries before a decision count.
        statistic: the statistic that adds up, one of `policies.RUNNING`.
        start: position of the first query that counts.
        per_token: whether every token of every KV head is measured instead of blocks.
    """

    accumulate: str
    decay: float
    window: int
    every: int
    trigger: int
    statistic: str = "mass"
    start: int = 0
    per_token: bool = False

    @classmethod
    def of(cls, config: KVPolicyConfig, trigger: int) -> "Scoring | None":
        """Take it from a policy; None if no statistic of the policy adds up."""
        accumulate, decay = config.accumulate, config.decay
        if config.when == "pressure" and accumulate == "last":
            # A worker cannot foresee when the pool runs out. An exponential window of the same mean age stands in for
            # the last queries before the decision.
            accumulate, decay = "ema", max(1 - 1 / config.window, 1e-6)
        for statistic in config.policy.measures & RUNNING:
            per_token = config.granularity == "token"
            return cls(accumulate, decay, config.window, config.every, trigger, statistic, per_token=per_token)
        return None


@dataclass(frozen=True, slots=True)
class Repetition:
    """The part of a prompt that one shadow repeats, for scores by token.

    Attributes:
        prompt: number under which workers keep the prompt's scores.
        length: tokens of the prompt. Queries at later positions count.
        start, end: range of repeated tokens.
        sink: leading tokens of the prompt that queries see beside the repeated tokens.
    """

    prompt: int
    length: int
    start: int
    end: int
    sink: int


@dataclass(frozen=True, slots=True)
class Compaction:
    """Gathers the tokens that each KV head keeps, out of `count` blocks of a request into the blocks of `target`.

    Attributes:
        req_id: id of the request.
        group: index of the KV group.
        config: policy that chooses the kept tokens.
        resident: all resident physical blocks of the request, in logical order.
        length: computed tokens in `resident`.
        first, count: range of `resident` whose tokens are candidates.
        target: physical blocks that kept tokens go to; kept tokens fill them.
        position: position of the newest computed token.
        judged: number of the decision (see `GroupPlan.judged`).
    """

    req_id: str
    group: int
    config: KVPolicyConfig
    resident: list[int]
    length: int
    first: int
    count: int
    target: list[int]
    position: int
    judged: int = 0


@dataclass(frozen=True, slots=True)
class KeyRotation:
    """Rotates keys of a request's blocks to later positions, to close the gaps that evicted blocks left.

    Attributes:
        req_id: id of the request.
        group: index of the KV group.
        blocks: logical blocks.
        source: their physical blocks.
        target: for each block the physical block that gets its rotated keys and its values: its source, or a new block.
        tokens: for each block the distance in positions from where its keys were computed to where they go.
        again: for each block whether an earlier plan has rotated its keys.
    """

    req_id: str
    group: int
    blocks: list[int]
    source: list[int]
    target: list[int]
    tokens: list[int]
    again: list[bool]


class Copy(NamedTuple):
    """One block between a device and the host.

    Attributes:
        req_id: id of the request that has, or had, the block.
        group: KV group.
        kind: `spill`, from the device to the host; `save`, the same of a preempted request; `fetch`, back; `poison`,
            the host block is filled with NaN (tests).
        physical: block of the device.
        number: block of the host.
    """

    req_id: str
    group: int
    kind: str
    physical: int
    number: int


class Rows(NamedTuple):
    """Rows of a step that workers score: how likely the token after each row is, as the model sees it.

    Attributes:
        first: index of the first row among those that the request computes in the step.
        tokens: for each row the token after it.
        temperature: divides the logits.
    """

    first: int
    tokens: list[int]
    temperature: float


class HostTrouble(NamedTuple):
    """Host blocks that could not be written or read.

    Attributes:
        why: reason, as the system has it.
        missing: request and logical block of each block that did not come back; workers go on without it.
    """

    why: str
    missing: list[tuple[str, int]]


class Waiting(NamedTuple):
    """Blocks of a request that wait on the host: logical blocks, ascending, and the host block of each."""

    logical: list[int]
    numbers: list[int]


@dataclass(slots=True)
class GroupPlan:
    """The plan of one KV group.

    Attributes:
        holes: request -> logical blocks evicted since the last plan.
        missing: request -> number of holes by which a worker foresees the next decision, in place of its count.
        track: request -> how workers measure it from this step on, from zero.
        untrack: requests that workers stop to measure.
        triggers: request -> new trigger in blocks. The request's sums go on.
        report: request -> statistics that workers report with this step's output.
        judged: request from which this step's decision may evict tokens -> number of the decision. Workers copy its
            sums after the step.
        moved: request -> {logical block: new physical block}.
        repeats: shadow that starts in this step -> the tokens that it repeats.
        scored: request -> (number of a prompt, tokens). The scores of these tokens become the request's.
        forgotten: numbers of prompts whose scores workers drop.
        returned: request -> logical blocks that are no holes any more; `moved` says where they are.
        waiting: request -> its host blocks; bounds of their keys are scored with the resident ones in this step.
        parked: preempted requests whose sums workers set aside, as they will go on.
        restored: requests that go on where they were preempted, with the sums that were set aside.
    """

    holes: dict[str, list[int]] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)
    track: dict[str, Scoring] = field(default_factory=dict)
    untrack: set[str] = field(default_factory=set)
    triggers: dict[str, int] = field(default_factory=dict)
    report: dict[str, frozenset[str]] = field(default_factory=dict)
    judged: dict[str, int] = field(default_factory=dict)
    moved: dict[str, dict[int, int]] = field(default_factory=dict)
    repeats: dict[str, Repetition] = field(default_factory=dict)
    scored: dict[str, tuple[int, int]] = field(default_factory=dict)
    forgotten: list[int] = field(default_factory=list)
    returned: dict[str, list[int]] = field(default_factory=dict)
    waiting: dict[str, Waiting] = field(default_factory=dict)
    parked: set[str] = field(default_factory=set)
    restored: set[str] = field(default_factory=set)

    def leave_holes(self, req_id: str, blocks: list[int]) -> None:
        """Note that a request lost some logical blocks."""
        if came := self.returned.get(req_id):
            # Workers have not heard that these came back: to them they are holes already.
            back = [block for block in blocks if block in came]
            blocks = [block for block in blocks if block not in back]
            for block in back:
                came.remove(block)
                del self.moved[req_id][block]
            if not came:
                del self.returned[req_id]
        if blocks:
            self.holes.setdefault(req_id, []).extend(blocks)

    def fill_holes(self, req_id: str, blocks: dict[int, int]) -> None:
        """Note that logical blocks of a request are back: {logical block: physical block}."""
        left = self.holes.get(req_id, [])
        for block in blocks:
            if block in left:  # workers have not heard that it went
                left.remove(block)
            else:
                self.returned.setdefault(req_id, []).append(block)
        if req_id in self.holes and not left:
            del self.holes[req_id]
        self.moved.setdefault(req_id, {}).update(blocks)


@dataclass(slots=True)
class EvictionPlan:
    """What the scheduler tells workers with a step. Workers apply it before they run the step.

    Notes of mechanisms on the step are `of` a class of the mechanism's. They stay with the scheduler.

    Attributes:
        groups: a plan for each KV group.
        compactions: in the order of decisions. One may write blocks that an earlier one reads.
        rotations: in the order of decisions. A server has compactions or rotations, not both.
        copies: between device and host, in the order in which they were decided; one may read what one before wrote.
        rewound: request -> tokens of it that are computed, where some are computed again.
        rows: request -> its rows that workers score in the step.
        poison: freed physical blocks to fill with NaN (tests only).
        clean: reallocated physical blocks to fill with zeros (tests only).
    """

    groups: list[GroupPlan]
    compactions: list[Compaction] = field(default_factory=list)
    rotations: list[KeyRotation] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    rewound: dict[str, int] = field(default_factory=dict)
    rows: dict[str, Rows] = field(default_factory=dict)
    poison: list[int] = field(default_factory=list)
    clean: list[int] = field(default_factory=list)
    _notes: dict[Any, Any] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        orders = self.compactions, self.rotations, self.copies, self.rewound, self.rows
        return EvictionPlan, (self.groups, *orders, self.poison, self.clean)

    def of(self, kind: Callable[[], N]) -> N:
        """Return a mechanism's notes on the step: the object of this class, which is made when first asked for."""
        notes: N | None = self._notes.get(kind)
        if notes is None:
            notes = self._notes[kind] = kind()
        return notes

    def use(self, blocks: Collection[int]) -> None:
        """Note that freed physical blocks are in use again before workers get this plan."""
        if self.poison:
            self.poison = [block for block in self.poison if block not in blocks]

    def forget(self, req_id: str, copies: bool = True) -> None:
        """Drop all orders about a request that has no block table any more; its copies too, unless they save it."""
        for group in self.groups:
            of_group = (group.holes, group.missing, group.moved, group.track, group.triggers, group.scored)
            for told in (*of_group, group.returned, self.rewound):
                told.pop(req_id, None)
            group.untrack.discard(req_id)
        self.compactions = [order for order in self.compactions if order.req_id != req_id]
        self.rotations = [order for order in self.rotations if order.req_id != req_id]
        if copies:
            self.copies = [order for order in self.copies if order.req_id != req_id]

    @classmethod
    def empty(cls, groups: int) -> "EvictionPlan":
        return cls([GroupPlan() for _ in range(groups)])


class Report(NamedTuple):
    """Statistics of one request's resident blocks.

    Attributes:
        index: int64 [n], logical blocks, ascending.
        statistics: name -> float64 [n].
    """

    index: np.ndarray  # type: ignore[assignment]  # a tuple has a method of this name
    statistics: dict[str, np.ndarray]

    def before(self, end: int | None) -> "Report":
        """Return the statistics of the blocks before logical block `end`; None: of all."""
        if end is None:
            return self
        count = int(self.index.searchsorted(end))
        return Report(self.index[:count], {name: values[:count] for name, values in self.statistics.items()})


#: Request -> its report in one KV group.
Reports = dict[str, Report]
