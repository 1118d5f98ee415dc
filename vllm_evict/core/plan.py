"""Messages between scheduler and workers, one each way a step, as attributes of vLLM's own messages."""

from collections.abc import Callable, Collection, Set
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from ..config import KVPolicyConfig
from ..policies import RUNNING

N = TypeVar("N")
P = TypeVar("P", bound="Payload")
#: Attribute of a `SchedulerOutput` that holds the step's `EvictionPlan`.
PLAN = "kv_evict_plan"
#: Attribute of a `ModelRunnerOutput` that holds a list of `Reports`, one for each KV group.
REPORTS = "kv_evict_reports"


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


@dataclass(slots=True)
class Payload:
    """A message of a feature's half in the scheduler to its half on workers, with a plan.

    Each feature that tells something has a subclass, a dataclass of containers. Plans carry payloads by the feature's
    name (`GroupPlan.of`, `EvictionPlan.of`), and no other part reads them. A plan without news has none.

    Attributes:
        feature: name of the feature.
    """

    feature: ClassVar[str] = ""

    @classmethod
    def add_to(cls: type[P], plan: "GroupPlan | EvictionPlan") -> P:
        """Return a plan's payload, to add to it; it is made when first asked for."""
        payload: P | None = plan.of.get(cls.feature)
        if payload is None:
            payload = plan.of[cls.feature] = cls()
        return payload

    @classmethod
    def within(cls: type[P], plan: "GroupPlan | EvictionPlan") -> P | None:
        """Return a plan's payload; None if it has none."""
        payload: P | None = plan.of.get(cls.feature)
        return payload

    @property
    def writes(self) -> Collection[int]:
        """Physical blocks of the pool that workers write because of the payload."""
        return ()

    def use(self, blocks: Collection[int]) -> None:
        """Note that freed physical blocks are in use again before workers get the plan."""

    def forget(self, req_id: str) -> bool:
        """Drop what a group's payload says of a request: its dicts are by request. Return whether anything is left."""
        left = False
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, dict):
                value.pop(req_id, None)
            left = left or bool(value)
        return left


@dataclass(slots=True)
class GroupPlan:
    """The plan of one KV group.

    Attributes:
        changes: request -> {logical block: its physical block, or `HOLE`} of each block whose place changed since the
            last plan. Workers replay it: only where a block is now counts, not how it came there.
        track: request -> how workers measure it from this step on, from zero.
        untrack: requests that workers stop to measure.
        triggers: request -> new trigger in blocks. The request's sums go on.
        report: request -> statistics that workers report with this step's output.
        of: feature -> its payload (see `Payload`).
    """

    changes: dict[str, dict[int, int]] = field(default_factory=dict)
    track: dict[str, Scoring] = field(default_factory=dict)
    untrack: set[str] = field(default_factory=set)
    triggers: dict[str, int] = field(default_factory=dict)
    report: dict[str, frozenset[str]] = field(default_factory=dict)
    of: dict[str, Any] = field(default_factory=dict)

    def forget(self, req_id: str) -> None:
        """Drop all that the plan says of a request."""
        for each in (self.changes, self.track, self.triggers, self.report):
            each.pop(req_id, None)
        self.untrack.discard(req_id)
        for feature, payload in list(self.of.items()):
            if not payload.forget(req_id):
                del self.of[feature]


@dataclass(slots=True)
class EvictionPlan:
    """The message of the scheduler to workers with a step. Workers apply it before they run the step.

    A mechanism's `notes` on the step stay with the scheduler, as all fields do that are not given to the constructor.

    Attributes:
        groups: a plan for each KV group.
        orders: of all kinds, as they were decided and are carried out: one may write what one before reads, or read
            what one before wrote.
        of: feature -> its payload for all KV groups (see `Payload`).
        prompts: requests of which the step computes one token that is no decode (see `mechanisms.base.decodes`).
    """

    groups: list[GroupPlan]
    orders: list[Order] = field(default_factory=list)
    of: dict[str, Any] = field(default_factory=dict)
    prompts: set[str] = field(default_factory=set)
    _notes: dict[Any, Any] = field(default_factory=dict, init=False)
    #: Number of orders when their requests were last collected, and these requests.
    _ordered: tuple[int, Set[str]] = field(default=(0, frozenset()), init=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return EvictionPlan, tuple(getattr(self, each.name) for each in fields(self) if each.init)

    def notes(self, kind: Callable[[], N]) -> N:
        """Return a mechanism's notes on the step: the object of this class, which is made when first asked for."""
        notes: N | None = self._notes.get(kind)
        if notes is None:
            notes = self._notes[kind] = kind()
        return notes

    def use(self, blocks: Collection[int]) -> None:
        """Note that freed physical blocks are in use again before workers get this plan."""
        for payload in self.of.values():
            payload.use(blocks)

    @property
    def writes(self) -> list[int]:
        """Physical blocks of the pool that workers write because of payloads, not of orders."""
        return [block for payload in self.of.values() for block in payload.writes]

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
