"""What mechanisms decide: actions on the blocks of one request in one KV group, applied in one place by the scheduler.

Every action names the logical blocks that it reads, those that it writes into, and those that become holes. The
scheduler sees that no other request reads what is written, gives the other blocks back to the pool, and tells workers.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from ..config import KVPolicyConfig
from .blocks import NO_BLOCKS, RequestBlocks
from .plan import Compaction, EvictionPlan, KeyRotation, Report


@dataclass(frozen=True, slots=True)
class Action:
    """Holes in place of some blocks of a request.

    Attributes:
        req_id: of a running request, or of a session between two turns.
        group: KV group, by its number among those that may have holes.
        holes: int64 [k], ascending logical blocks that are evicted, none of them a hole.
        reads: int64 [m], ascending logical blocks whose physical blocks workers read for it.
        writes: int64 [n], ascending logical blocks that workers write into.
    """

    req_id: str
    group: int
    #: Whether the request can't go on without it: it is preempted if the pool has no room for the action.
    must: ClassVar[bool] = False

    holes: np.ndarray = field(default_factory=lambda: NO_BLOCKS)
    reads: np.ndarray = field(default_factory=lambda: NO_BLOCKS)
    writes: np.ndarray = field(default_factory=lambda: NO_BLOCKS)

    def order(self, plan: EvictionPlan, source: list[int], target: list[int]) -> None:
        """Add to a plan what workers have to do beside noting holes.

        Args:
            plan: that goes to the workers next.
            source: physical blocks of `reads` as they were.
            target: physical blocks of `writes` as they are from now on.
        """


@dataclass(frozen=True, slots=True)
class Evict(Action):
    """Whole blocks go."""


@dataclass(frozen=True, slots=True)
class Compact(Action):
    """Kept tokens of each head are gathered in the first blocks of those that they lie in; the others go.

    Attributes:
        config: decides which tokens are kept.
        length: computed tokens in `reads`.
        first: place in `reads` of the first block whose tokens may go.
        position: of the newest computed token.
    """

    config: KVPolicyConfig | None = None
    length: int = 0
    first: int = 0
    position: int = 0

    def order(self, plan: EvictionPlan, source: list[int], target: list[int]) -> None:
        count = len(self.writes) + len(self.holes)
        compaction = Compaction(
            self.req_id, self.group, self.config, source, self.length, self.first, count, target, self.position
        )
        plan.compactions.append(compaction)


@dataclass(frozen=True, slots=True)
class Rotate(Action):
    """Kept blocks close the gaps before them: their keys are rotated to later positions.

    Attributes:
        tokens: for each block of `writes`, positions from those that its keys were computed for to those that they get.
        again: for each, whether its keys are rotated already, by a move before.
    """

    must: ClassVar[bool] = True

    tokens: tuple[int, ...] = ()
    again: tuple[bool, ...] = ()

    def order(self, plan: EvictionPlan, source: list[int], target: list[int]) -> None:
        blocks = self.writes.tolist()
        plan.rotations.append(
            KeyRotation(self.req_id, self.group, blocks, source, target, list(self.tokens), list(self.again))
        )


def back_to_budget(
    req_id: str, group: int, blocks: RequestBlocks, computed_tokens: int, report: Report | None
) -> Action | None:
    """The action that brings a request back to its budget; None if it is not over its trigger.

    Args:
        req_id, group: as for `Action`.
        blocks: of the request in that group.
        computed_tokens: tokens whose step is done.
        report: statistics of its blocks; None: its oldest go first. Workers choose tokens by their own sums.
    """
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
        reads=blocks.resident,
        writes=candidates[:keep],
        config=blocks.config,
        length=computed_tokens - blocks.holes * blocks.block_size,
        first=int(np.searchsorted(blocks.resident, candidates[0])),
        position=computed_tokens - 1,
    )
