"""Closes position gaps when the oldest kept token would leave the context, by rotating kept keys."""

from collections.abc import Iterable, Sequence
from typing import Any

from ...config import KVPolicyConfig
from ...core.actions import Action, Applied
from ...core.blocks import RequestBlocks
from ...core.mechanisms import Mechanism, SchedulerView
from ...core.mechanisms.base import settled
from ...core.plan import EvictionPlan, Reports
from .plan import KeyRotation


class Context(Mechanism):
    """Rotates keys of a request whose oldest kept token would leave the context before the next decision.

    It runs after `Budget`, so no key of an evicted block is rotated.

    Args:
        view: the scheduler, whose `max_in_flight_tokens` are the most tokens of a request in flight.
    """

    def __init__(self, view: SchedulerView) -> None:
        super().__init__(view)
        self._in_flight_tokens = view.max_in_flight_tokens

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return config.context is not None

    def limit_hit(self, request: Any, most: int) -> int:
        """Limit a hit so that no query looks back further than the context until the first decision.

        That decision follows the steps in flight.
        """
        blocks = self.view.groups[0].residents[request.request_id]
        if blocks.config.context is None:
            return most
        reach = max(blocks.config.context - self._in_flight_tokens, 0)
        return min(most, reach // blocks.block_size * blocks.block_size)

    def decide(self, plan: EvictionPlan, reports: Sequence[Reports]) -> Iterable[Action]:
        for group, request, blocks in self.due(plan):
            if blocks.residence.span(settled(request)) + self._ahead(blocks) <= blocks.config.context:
                continue
            moving, distances, again = blocks.residence.gaps()
            if len(moving):
                whose, tokens = (request.request_id, group.number), (distances * group.block_size).tolist()
                work = KeyRotation(*whose, [], [], moving.tolist(), tokens, again.tolist())
                yield Action(*whose, reads=moving, writes=moving, work=work, must=True)

    def on_applied(self, applied: Applied) -> None:
        if isinstance(applied.action.work, KeyRotation):
            applied.blocks.residence.move_up()
            self.view.count(applied.blocks, moved=1)

    def _ahead(self, blocks: RequestBlocks) -> int:
        """Return the most tokens that a request computes between two decisions."""
        assert blocks.limits is not None  # a context needs a budget
        growth = (blocks.limits.trigger - blocks.limits.budget + 1) * blocks.block_size
        return growth + self._in_flight_tokens
