"""Decides on all KV groups of a request together, for allocators whose KV groups share a budget (`ada`)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ...config import KVPolicyConfig
from ..actions import Action
from ..blocks import choose_jointly, over_shared_trigger
from ..plan import EvictionPlan, Payload, Reports
from .base import Mechanism, Step, settled


@dataclass(slots=True)
class SharedHoles(Payload):
    """Holes by which workers foresee the next decision, where KV groups differ in holes.

    Attributes:
        counts: request -> number of holes, in place of the group's own.
    """

    feature = "shared budget"

    counts: dict[str, int] = field(default_factory=dict)


class SharedBudget(Mechanism):
    """Takes the place of `Budget`."""

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return config.allocator.pools

    def plan(self, plan: EvictionPlan, step: Step) -> None:
        # If one KV group of a request grew, all its groups are due, provided that they exceed their triggers together.
        for req_id in dict.fromkeys(chain.from_iterable(step.over)):
            if over_shared_trigger([group.residents[req_id] for group in self.view.groups]):
                for group in self.view.groups:
                    self.note_due(plan, group, req_id)

    def decide(self, plan: EvictionPlan, reports: Sequence[Reports]) -> Iterable[Action]:
        for group, request, first in self.due(plan):
            if group.number or first.limits is None:
                continue  # the first group's turn decides on all groups
            req_id, of_groups = request.request_id, [each.get(request.request_id) for each in reports]
            if None in of_groups:
                of_groups = [None] * len(of_groups)  # groups with and without scores do not compare
            if self.waits_for(of_groups[0], req_id, first):
                continue
            held = [each.residents[req_id] for each in self.view.groups]
            chosen = choose_jointly(held, settled(request), of_groups)
            for number, victims in enumerate(chosen):
                if len(victims):
                    yield Action(req_id, number, victims)
            # Groups differ in holes. Workers foresee the next decision by the mean.
            missing = sum(map(len, chosen)) and sum(blocks.holes for blocks in held) // len(held)
            for told in self.view.next_plan.groups if missing else ():
                SharedHoles.add_to(told).counts[req_id] = missing
