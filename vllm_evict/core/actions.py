"""Actions: what mechanisms decide about the blocks of one request in one KV group; and the orders of some actions.

An action names the logical blocks that workers read, the blocks that they write, and the blocks that become holes. The
scheduler applies all actions in one place: it makes written blocks private to the request, returns evicted blocks to
the pool, and puts the action on the next plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..config import KVPolicyConfig
from .blocks import RequestBlocks
from .plan import Order, Payload, Report
from .residence import NO_BLOCKS


@dataclass(frozen=True, slots=True)
class Work(Order):
    """Work on blocks of the pool: an order that an action brings, whose blocks the scheduler fills in.

    Attributes:
        source: physical blocks of the action's `reads`, before it.
        target: physical blocks of its `writes`, after it.
    """

    source: list[int]
    target: list[int]


@dataclass(frozen=True, slots=True)
class Compaction(Work):
    """Gathers the tokens that each KV head keeps, out of `count` blocks of a request into the blocks of `target`.

    `source` has all resident blocks of the request, in logical order. Kept tokens fill `target`.

    Attributes:
        config: policy that chooses the kept tokens.
        length: computed tokens in `source`.
        first, count: range of `source` whose tokens are candidates.
        position: position of the newest computed token.
        judged: number of the decision (see `Judged`).
    """

    config: KVPolicyConfig
    length: int
    first: int
    count: int
    position: int
    judged: int = 0


@dataclass(slots=True)
class Judged(Payload):
    """Decisions by token that may follow a step.

    Attributes:
        numbers: request that the decision may take tokens from -> number of the decision. Workers copy the request's
            sums after the step.
    """

    feature = "tokens"

    numbers: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Action:
    """A change of what a request has, in one KV group.

    Attributes:
        req_id: id of a running request, or of a session between two turns.
        group: index of the KV group among the KV groups that may have holes.
        holes: int64 [k], resident logical blocks that become holes, ascending.
        reads: int64 [m], logical blocks that workers read for this action, ascending.
        writes: int64 [n], logical blocks that workers write for this action, ascending.
        work: what workers do beside noting holes, without its blocks; None: nothing. Work on what is no block of the
            pool, such as a host block, is an order that a mechanism adds in `on_applied`.
        ends_purity: whether layers of later steps read less than what was in `holes`: their tokens are not pure.
        must: if True, a request for whose action the pool has no room is preempted; if False, the action is put off.
    """

    req_id: str
    group: int
    holes: np.ndarray = field(default_factory=lambda: NO_BLOCKS)
    reads: np.ndarray = field(default_factory=lambda: NO_BLOCKS)
    writes: np.ndarray = field(default_factory=lambda: NO_BLOCKS)
    work: Work | None = None
    ends_purity: bool = True
    must: bool = False


class Applied(NamedTuple):
    """An action that the scheduler has applied.

    Attributes:
        action: the action.
        blocks: of the request, as they are now.
        before: for each of `writes` and `holes` the physical block that it was.
        written: physical blocks that workers write.
        freed: physical blocks that no request holds any more, without those that the prefix cache has.
    """

    action: Action
    blocks: RequestBlocks
    before: Mapping[int, int]
    written: Sequence[int]
    freed: Sequence[int]


def back_to_budget(
    req_id: str, group: int, blocks: RequestBlocks, computed_tokens: int, report: Report | None, judged: int = 0
) -> Action | None:
    """Make the action that brings a request back to its budget; None if the request does not exceed its trigger.

    Args:
        req_id, group: as for `Action`.
        blocks: blocks of the request in that group.
        computed_tokens: tokens whose step is done.
        report: statistics of the blocks; if None, the oldest blocks go first. Not read with token granularity, where
            workers choose tokens by their own sums.
        judged: number of the decision, by which workers know these sums (see `Judged`).
    """
    if blocks.config.granularity == "block":
        victims = blocks.choose(computed_tokens, report)
        return Action(req_id, group, victims) if len(victims) else None
    candidates, spare = blocks.spare(computed_tokens)
    if not spare:
        return None
    pool, keep = blocks.residence.pool, len(candidates) - spare
    length, first = computed_tokens - blocks.holes * blocks.block_size, int(np.searchsorted(pool, candidates[0]))
    its = length, first, len(candidates), computed_tokens - 1, judged
    work = Compaction(req_id, group, [], [], blocks.config, *its)
    return Action(req_id, group, candidates[keep:], pool, candidates[:keep], work)
