"""Actions: what mechanisms decide about the blocks of one request in one KV group; and the orders of some actions.

An action names the logical blocks that workers read, the blocks that they write, the blocks that become holes, and the
holes that come back from the host. The scheduler applies all actions in one place: it makes written blocks private to
the request, returns evicted blocks to the pool, and puts the action on the next plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np

from ..config import KVPolicyConfig
from .blocks import RequestBlocks
from .plan import EvictionPlan, Order, Report, RoomOf
from .residence import NO_BLOCKS


@dataclass(frozen=True, slots=True)
class Action:
    """A change of what a request has, in one KV group.

    Blocks that come back take room that the pool has, and then the room of `holes`. If the pool has less room, the last
    ones of both stay where they are.

    Attributes:
        req_id: id of a running request, or of a session between two turns.
        group: index of the KV group among the KV groups that may have holes.
        holes: int64 [k], resident logical blocks that become holes, ascending. Beside `returns` a mechanism gives the
            least wanted first, and `Mechanism.before_apply` sorts those that go.
        reads: int64 [m], logical blocks that workers read for this action, ascending.
        writes: int64 [n], logical blocks that workers write for this action, ascending.
        returns: int64 [r], logical blocks on the host that come back, the most wanted first; no fewer than `holes`.
    """

    req_id: str
    group: int
    #: If True, a request for whose action the pool has no room is preempted; if False, the action is put off.
    must: ClassVar[bool] = False

    holes: np.ndarray = field(default_factory=lambda: NO_BLOCKS)
    reads: np.ndarray = field(default_factory=lambda: NO_BLOCKS)
    writes: np.ndarray = field(default_factory=lambda: NO_BLOCKS)
    returns: np.ndarray = field(default_factory=lambda: NO_BLOCKS)

    def order(self, plan: EvictionPlan, source: list[int], target: list[int]) -> None:
        """Add work of this action to a plan, beside its holes.

        Work on what is no logical block, such as a host block, is an order that a mechanism adds in `on_applied`.

        Args:
            plan: the plan that workers get next.
            source: physical blocks of `reads` before the action.
            target: physical blocks of `writes` after the action.
        """


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


@dataclass(frozen=True, slots=True)
class Evict(Action):
    """Evicts whole blocks."""


@dataclass(frozen=True, slots=True)
class Unload(Action):
    """Moves blocks to the host, where layers reach them. With the first of them blocks of the device become a room.

    Attributes:
        recent: blocks at the end of the request that layers always read.
    """

    recent: int = 0

    def order(self, plan: EvictionPlan, source: list[int], target: list[int]) -> None:
        if len(self.writes):
            room = RoomOf(int(self.writes[0]), len(self.writes), self.recent)
            plan.groups[self.group].rooms[self.req_id] = room


@dataclass(frozen=True, slots=True)
class Swap(Action):
    """Brings blocks back from the host, and evicts others for them.

    Attributes:
        again: whether they come back for the end of a prompt that is computed again.
    """

    again: bool = False


@dataclass(frozen=True, slots=True)
class Compaction(Order):
    """Gathers the tokens that each KV head keeps, out of `count` blocks of a request into the blocks of `target`.

    Attributes:
        config: policy that chooses the kept tokens.
        resident: all resident physical blocks of the request, in logical order.
        length: computed tokens in `resident`.
        first, count: range of `resident` whose tokens are candidates.
        target: physical blocks that kept tokens go to; kept tokens fill them.
        position: position of the newest computed token.
        judged: number of the decision (see `GroupPlan.judged`).
    """

    config: KVPolicyConfig
    resident: list[int]
    length: int
    first: int
    count: int
    target: list[int]
    position: int
    judged: int = 0


@dataclass(frozen=True, slots=True)
class Compact(Action):
    """Gathers the kept tokens of each KV head in `writes`, the first of the candidate blocks, and evicts the others.

    Attributes:
        config: policy that chooses the kept tokens.
        length: computed tokens in `reads`.
        first: index in `reads` of the first candidate block.
        position: position of the newest computed token.
        judged: number of the decision (see `GroupPlan.judged`).
    """

    config: KVPolicyConfig | None = None
    length: int = 0
    first: int = 0
    position: int = 0
    judged: int = 0

    def order(self, plan: EvictionPlan, source: list[int], target: list[int]) -> None:
        assert self.config is not None
        count = len(self.writes) + len(self.holes)
        compaction = Compaction(
            self.req_id,
            self.group,
            self.config,
            source,
            self.length,
            self.first,
            count,
            target,
            self.position,
            self.judged,
        )
        plan.orders.append(compaction)


@dataclass(frozen=True, slots=True)
class KeyRotation(Order):
    """Rotates keys of a request's blocks to later positions, to close the gaps that evicted blocks left.

    Attributes:
        blocks: logical blocks.
        source: their physical blocks.
        target: for each block the physical block that gets its rotated keys and its values: its source, or a new block.
        tokens: for each block the distance in positions from where its keys were computed to where they go.
        again: for each block whether an earlier plan has rotated its keys.
    """

    blocks: list[int]
    source: list[int]
    target: list[int]
    tokens: list[int]
    again: list[bool]


@dataclass(frozen=True, slots=True)
class Rotate(Action):
    """Closes position gaps: rotates keys of kept blocks to later positions.

    Attributes:
        tokens: for each block of `writes`, distance in positions from where its keys were computed to where they go.
        again: for each block of `writes`, whether an earlier action has rotated its keys.
    """

    must: ClassVar[bool] = True

    tokens: tuple[int, ...] = ()
    again: tuple[bool, ...] = ()

    def order(self, plan: EvictionPlan, source: list[int], target: list[int]) -> None:
        blocks = self.writes.tolist()
        plan.orders.append(
            KeyRotation(self.req_id, self.group, blocks, source, target, list(self.tokens), list(self.again))
        )


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
        judged: number of the decision, by which workers know these sums (see `GroupPlan.judged`).
    """
    if blocks.config.reaches:
        return unload(req_id, group, blocks, computed_tokens)
    if blocks.config.granularity == "block":
        victims = blocks.choose(computed_tokens, report)
        return Evict(req_id, group, victims) if len(victims) else None
    candidates, spare = blocks.spare(computed_tokens)
    if not spare:
        return None
    keep = len(candidates) - spare
    return Compact(
        req_id,
        group,
        holes=candidates[keep:],
        reads=blocks.residence.pool,
        writes=candidates[:keep],
        config=blocks.config,
        length=computed_tokens - blocks.holes * blocks.block_size,
        first=int(np.searchsorted(blocks.residence.pool, candidates[0])),
        position=computed_tokens - 1,
        judged=judged,
    )


def unload(req_id: str, group: int, blocks: RequestBlocks, computed_tokens: int) -> Unload | None:
    """Make the action that moves the oldest blocks above the budget to the host; None if there are none.

    The first blocks after the sinks are the room. They stay on the device, and go to the host too.
    """
    candidates, spare = blocks.spare(computed_tokens)
    if not spare or blocks.limits is None:
        return None
    room, recent = blocks.config.room(blocks.limits, blocks.block_size)
    holes = candidates[room : room + spare]
    if not len(holes):
        return None
    writes = NO_BLOCKS if blocks.residence.host else candidates[:room]
    return Unload(req_id, group, holes=holes, writes=writes, recent=recent)
