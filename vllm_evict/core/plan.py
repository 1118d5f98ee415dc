"""Messages between scheduler and workers, one each way a step, as attributes of vLLM's own messages."""

from collections.abc import Callable, Collection, Set
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..config import KVPolicyConfig
from ..policies import RUNNING

N = TypeVar("N")
#: Attribute of a `SchedulerOutput` that holds the step's `EvictionPlan`.
PLAN = "kv_evict_plan"
#: Attribute of a `ModelRunnerOutput` that holds a list of `Reports`, one for each KV group.
REPORTS = "kv_evict_reports"
#: Attribute of a `ModelRunnerOutput` that holds scored rows, request -> float32 [rows, 5]; absent without any.
SCORED = "kv_evict_scored"
#: Attribute of a `ModelRunnerOutput` that holds what layers of decodes have read on the host, request -> int32 [3], by
#: `COUNTED`; absent without any.
READ_ON_HOST = "kv_evict_read_on_host"
#: What is counted of blocks that a layer has chosen on the host: those that it copied into the room, those that were
#: there, and those that the bound `fetch` cut.
COUNTED = ("fetched", "in_room", "cut")


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
        summed: whether heads and layers are added up, whatever the policy's `heads` and `layers` are.
    """

    accumulate: str
    decay: float
    window: int
    every: int
    trigger: int
    statistic: str = "mass"
    start: int = 0
    per_token: bool = False
    summed: bool = False

    @classmethod
    def of(cls, config: KVPolicyConfig, trigger: int) -> "Scoring | None":
        """Take it from a policy; None if no statistic of the policy adds up."""
        accumulate, decay = config.accumulate, config.decay
        if config.when == "pressure" and accumulate == "last":
            # A worker cannot foresee when the pool runs out. An exponential window of the same mean age stands in for
            # the last queries before the decision.
            accumulate, decay = "ema", max(1 - 1 / config.window, 1e-6)
        statistic = next(iter(config.policy.measures & RUNNING), None)
        if statistic is None:
            return None
        per_token = config.granularity == "token"
        return cls(accumulate, decay, config.window, config.every, trigger, statistic, per_token=per_token)


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
class Order:
    """Work on blocks of one request that workers do before the step writes any block.

    Each kind of order is a class, in the file of what decides it; a part of each worker carries it out
    (`compute.parts.Mover`). An order names what it reads and writes in its own terms: blocks of the pool, host blocks,
    or other memory of that part.

    Attributes:
        req_id: id of the request that has, or had, the blocks; "": none.
        group: index of the KV group.
    """

    req_id: str
    group: int


class RoomOf(NamedTuple):
    """The device blocks of a request into which workers bring what its layers read from the host.

    Attributes:
        first: its first logical block; blocks before it are sinks.
        blocks: their number.
        recent: blocks at the end of the request that layers always read.
    """

    first: int
    blocks: int
    recent: int


class Truncation(NamedTuple):
    """The tokens that a request may sample, as vLLM's sampling parameters have them.

    Attributes:
        top_k: the likeliest ones; 0: all.
        top_p: the likeliest ones that have so much probability together.
        min_p: those that have so much of the probability of the likeliest one.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class ScoredRows(NamedTuple):
    """Rows of a step that workers score: how likely the token after each row is, as the model sees it.

    Attributes:
        first: index of the first row among those that the request computes in the step.
        tokens: for each row the token after it.
        temperature: divides the logits.
        truncation: the tokens that could be sampled; None: all.
    """

    first: int
    tokens: list[int]
    temperature: float
    truncation: Truncation | None = None


@dataclass(slots=True)
class GroupPlan:
    """The plan of one KV group.

    Attributes:
        changes: request -> {logical block: its physical block, or `HOLE`} of each block whose place changed since the
            last plan. Workers replay it: only where a block is now counts, not how it came there.
        missing: request -> number of holes by which a worker foresees the next decision, in place of its count.
        track: request -> how workers measure it from this step on, from zero.
        untrack: requests that workers stop to measure.
        triggers: request -> new trigger in blocks. The request's sums go on.
        report: request -> statistics that workers report with this step's output.
        judged: request from which this step's decision may evict tokens -> number of the decision. Workers copy its
            sums after the step.
        repeats: shadow that starts in this step -> the tokens that it repeats.
        scored: request -> (number of a prompt, tokens). The scores of these tokens become the request's.
        forgotten: numbers of prompts whose scores workers drop.
        rooms: request -> its room, whose blocks hold what workers choose from this step on.
        reached: request -> {logical block: host block} of blocks that its layers read on the host from this step on.
    """

    changes: dict[str, dict[int, int]] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)
    track: dict[str, Scoring] = field(default_factory=dict)
    untrack: set[str] = field(default_factory=set)
    triggers: dict[str, int] = field(default_factory=dict)
    report: dict[str, frozenset[str]] = field(default_factory=dict)
    judged: dict[str, int] = field(default_factory=dict)
    repeats: dict[str, Repetition] = field(default_factory=dict)
    scored: dict[str, tuple[int, int]] = field(default_factory=dict)
    forgotten: list[int] = field(default_factory=list)
    rooms: dict[str, RoomOf] = field(default_factory=dict)
    reached: dict[str, dict[int, int]] = field(default_factory=dict)

    def forget(self, req_id: str) -> None:
        """Drop all that the plan says of a request."""
        for name in _BY_REQUEST:
            getattr(self, name).pop(req_id, None)
        self.untrack.discard(req_id)


_BY_REQUEST = tuple(each.name for each in fields(GroupPlan) if each.default_factory is dict)


@dataclass(slots=True)
class EvictionPlan:
    """What the scheduler tells workers with a step. Workers apply it before they run the step.

    Notes of mechanisms on the step are `of` a class of the mechanism's. They stay with the scheduler, as all fields do
    that are not given to the constructor.

    Attributes:
        groups: a plan for each KV group.
        orders: of all kinds, as they were decided and are carried out: one may write what one before reads, or read
            what one before wrote.
        rows: request -> its rows that workers score in the step.
        poison: freed physical blocks to fill with NaN (tests only).
        clean: reallocated physical blocks to fill with zeros (tests only).
        unread: requests of which other processes may still read blocks; the step waits until they have.
        prompts: requests of which the step computes one token that is no decode (see `mechanisms.base.decodes`).
    """

    groups: list[GroupPlan]
    orders: list[Order] = field(default_factory=list)
    rows: dict[str, ScoredRows] = field(default_factory=dict)
    poison: list[int] = field(default_factory=list)
    clean: list[int] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    prompts: set[str] = field(default_factory=set)
    _notes: dict[Any, Any] = field(default_factory=dict, init=False)
    #: Number of orders when their requests were last collected, and these requests.
    _ordered: tuple[int, Set[str]] = field(default=(0, frozenset()), init=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return EvictionPlan, tuple(getattr(self, each.name) for each in fields(self) if each.init)

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

    def forget(self, req_id: str) -> None:
        """Drop what the plan says of a request that has no block table any more."""
        for group in self.groups:
            group.forget(req_id)
        if req_id in self._ordering():
            self.orders = [order for order in self.orders if order.req_id != req_id]
            self._ordered = 0, frozenset()

    def _ordering(self) -> Set[str]:
        """Return the requests that the plan has orders for. Of many requests that end at once, few have any."""
        if self._ordered[0] != len(self.orders):
            self._ordered = len(self.orders), {order.req_id for order in self.orders}
        return self._ordered[1]

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
