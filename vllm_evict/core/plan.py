"""What scheduler and workers tell each other, once a step, on vLLM's own messages."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..config import KVPolicyConfig
from ..policies import RUNNING

#: Name of the attribute that carries an `EvictionPlan` on a `SchedulerOutput`.
PLAN = "kv_evict_plan"
#: Name of the attribute that carries `Reports` of each KV group on a `ModelRunnerOutput`.
REPORTS = "kv_evict_reports"


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a worker measures one request's blocks, or its tokens: the part of its policy that workers need.

    `trigger` (blocks) lets a worker foresee the next decision, for scores of the last queries before it.
    """

    accumulate: str
    decay: float
    window: int
    every: int
    trigger: int
    #: What adds up: one of `policies.RUNNING`.
    statistic: str = "mass"
    #: Position of the first query that counts.
    start: int = 0
    #: Every token of every head, instead of blocks.
    per_token: bool = False

    @classmethod
    def of(cls, config: KVPolicyConfig, trigger: int) -> "Scoring | None":
        """None if nothing adds up under this policy."""
        accumulate, decay = config.accumulate, config.decay
        if config.when == "pressure" and accumulate == "last":
            # Nobody can foresee the decision, so there are no last queries before it: the same window, exponential.
            accumulate, decay = "ema", max(1 - 1 / config.window, 1e-6)
        for statistic in config.policy.measures & RUNNING:
            per_token = config.granularity == "token"
            return cls(accumulate, decay, config.window, config.every, trigger, statistic, per_token=per_token)
        return None


@dataclass(frozen=True, slots=True)
class Repetition:
    """A shadow's part of a prompt, for scores by token: what it repeats, and where they go.

    Attributes:
        prompt: number by which workers remember the scores.
        length: tokens of the prompt; queries after them count.
        start, end: tokens that are repeated.
        sink: leading tokens that always stay, which each query sees beside the part.
    """

    prompt: int
    length: int
    start: int
    end: int
    sink: int


@dataclass(frozen=True, slots=True)
class Compaction:
    """Gather the tokens that each head of a KV group keeps, out of some blocks into fewer.

    Attributes:
        req_id: whose blocks.
        group: KV group.
        config: decides which tokens.
        resident: physical blocks, all that it holds, in logical order.
        length: tokens in them that are computed.
        first, count: those of `resident` whose tokens are gathered.
        target: physical blocks that they go to, all of which they fill.
        position: of the newest token that is computed.
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


@dataclass(frozen=True, slots=True)
class KeyRotation:
    """Rotate keys of a request's blocks to later positions, as others that came after them are gone.

    Attributes:
        req_id: whose blocks.
        group: KV group.
        blocks: logical blocks.
        source: physical blocks.
        target: physical blocks that get their keys, rotated, and their values; each its own source, or a new block.
        tokens: positions from those that keys of each block were computed for to those that they get.
        again: whether keys in the source are rotated already, by a move before.
    """

    req_id: str
    group: int
    blocks: list[int]
    source: list[int]
    target: list[int]
    tokens: list[int]
    again: list[bool]


@dataclass(slots=True)
class GroupPlan:
    """What workers have to do in one KV group, and what the scheduler waits for.

    Attributes:
        holes: request -> logical blocks evicted since the last plan.
        missing: request -> blocks that count as missing where the next decision is foreseen, if not those of `holes`.
        track: requests that are to be measured from this step on, from zero.
        untrack: requests that are not to be measured any more.
        triggers: request -> blocks above which its next decision falls; what was measured stays.
        report: request -> statistics that the scheduler needs with this step's output.
        judged: requests of which tokens may go after this step; what was measured until then decides.
        moved: request -> {logical block: physical block}, those that got another one.
        due: request -> its incarnation, those that may be over their trigger after this step.
        asked: request -> its incarnation, those whose scores are wanted for when the pool runs out.
        repeats: shadows that start in this step, and what they repeat by token.
        scored: request -> number of a prompt and how many of its tokens; from now on their scores are the request's.
        forgotten: numbers of prompts whose scores nobody will ask for again.
    """

    holes: dict[str, list[int]] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)
    track: dict[str, Scoring] = field(default_factory=dict)
    untrack: set[str] = field(default_factory=set)
    triggers: dict[str, int] = field(default_factory=dict)
    report: dict[str, frozenset[str]] = field(default_factory=dict)
    judged: set[str] = field(default_factory=set)
    moved: dict[str, dict[int, int]] = field(default_factory=dict)
    due: dict[str, int] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)
    repeats: dict[str, Repetition] = field(default_factory=dict)
    scored: dict[str, tuple[int, int]] = field(default_factory=dict)
    forgotten: list[int] = field(default_factory=list)


@dataclass(slots=True)
class EvictionPlan:
    """Rides on the step's `SchedulerOutput`; workers obey it before they run the step.

    Attributes:
        groups: a plan for each KV group.
        compactions: in the order in which they were decided; one may write where one before has read.
        moves: the same. A server has either of them.
        poison: freed physical blocks to fill with NaN (tests only).
        clean: reallocated physical blocks to fill with zeros (tests only).
    """

    groups: list[GroupPlan]
    compactions: list[Compaction] = field(default_factory=list)
    rotations: list[KeyRotation] = field(default_factory=list)
    poison: list[int] = field(default_factory=list)
    clean: list[int] = field(default_factory=list)

    @classmethod
    def empty(cls, groups: int) -> "EvictionPlan":
        return cls([GroupPlan() for _ in range(groups)])


class Report(NamedTuple):
    """Statistics of one request's resident blocks: logical index (int64 [n], ascending), and name -> float64 [n]."""

    index: np.ndarray
    statistics: dict[str, np.ndarray]


Reports = dict[str, Report]
