"""Brings requests above their trigger back to their budget, by whole blocks or by tokens of each KV head."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ...config import KVPolicyConfig
from ..actions import Action, Judged, back_to_budget
from ..blocks import RequestBlocks
from ..plan import EvictionPlan, Reports
from .base import Due, Group, Mechanism, Step, settled


class Budget(Mechanism):
    """Decides on each KV group of a request separately."""

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return not config.allocator.pools

    def plan(self, plan: EvictionPlan, step: Step) -> None:
        for group, over in zip(self.view.groups, step.over):
            for req_id in over:
                self.note_due(plan, group, req_id)

    def decide(self, plan: EvictionPlan, reports: Sequence[Reports]) -> Iterable[Action]:
        for group, request, blocks in (*self.due(plan), *self._ended_turns(plan)):
            if blocks.config.policy.reconstructs:
                continue  # another mechanism decides, by scores of a separate pass
            report = reports[group.number].get(request.request_id)
            by_block = blocks.config.granularity == "block"
            if by_block and blocks.measured and self.waits_for(report, request.request_id, blocks):
                continue
            told = Judged.within(plan.groups[group.number])
            judged = 0 if told is None else told.numbers.get(request.request_id, 0)
            action = back_to_budget(request.request_id, group.number, blocks, settled(request), report, judged)
            if action is not None:
                yield action

    def _ended_turns(self, plan: EvictionPlan) -> Iterator[tuple[Group, Any, RequestBlocks]]:
        """Yield what `due` yields, of sessions whose turn ended with the step.

        These evict by block alone, as workers move content of requests in the batch only. A policy that profiles
        prompts (`profiles`) chooses first what a group keeps, while the request runs.
        """
        for group in self.view.groups:
            for req_id, incarnation in plan.notes(Due)[group.number].items():
                session, blocks = self.view.idle_session(req_id), group.residents.get(req_id)
                if session is None or blocks is None or blocks.incarnation != incarnation:
                    continue
                if not (blocks.config.moves_content or blocks.config.policy.profiles):
                    yield group, session, blocks
