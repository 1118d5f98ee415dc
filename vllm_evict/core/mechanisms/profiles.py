"""Chooses the policy of each KV group once the prompt is computed, for policies that do so (`policies.fastgen`)."""

from collections.abc import Iterable, Sequence

from ...config import KVPolicyConfig
from ...policies import POLICIES
from ..actions import Action
from ..blocks import RequestBlocks
from ..plan import EvictionPlan, Report, Reports
from .base import Mechanism, Step, settled


class Profiles(Mechanism):
    """Runs before `Budget`, which then evicts by the chosen policy."""

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return any(POLICIES[name].profiles for name in config.allowed)

    def plan(self, plan: EvictionPlan, step: Step) -> None:
        for group in self.view.groups:
            for req_id in step.tokens:
                blocks, request = group.residents[req_id], self.view.requests[req_id]
                waits = blocks.measured and blocks.config.policy.profiles
                if waits and request.num_computed_tokens >= request.num_prompt_tokens:
                    self.note_due(plan, group, req_id)

    def decide(self, plan: EvictionPlan, reports: Sequence[Reports]) -> Iterable[Action]:
        for group, request, blocks in self.due(plan):
            report = reports[group.number].get(request.request_id)
            if report is None or not blocks.config.policy.profiles:
                continue
            name = self._choose(blocks, report, settled(request))
            blocks.choose_policy(name, request.num_prompt_tokens)
            told, blocks.scoring = self.view.next_plan.groups[group.number], self.view.scoring_of(request, blocks)
            if blocks.scoring is None:
                told.untrack.add(request.request_id)
            else:
                told.track[request.request_id] = blocks.scoring
        return ()

    @staticmethod
    def _choose(blocks: RequestBlocks, report: Report, computed_tokens: int) -> str:
        """Return the name of the policy that the attention mass of a prompt's blocks chooses."""
        assert blocks.limits is not None  # a policy that chooses has a budget
        recent = max(computed_tokens - blocks.limits.recent, 0) // blocks.block_size
        protected = (report.index < blocks.limits.sink) | (report.index >= recent)
        name: str = blocks.config.policy.choose(
            report.statistics["mass"], protected, blocks.limits.budget, blocks.config.recovery
        )
        return name
