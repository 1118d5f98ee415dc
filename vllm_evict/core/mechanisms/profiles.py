"""Chooses the policy of each KV group once the prompt is computed, for policies that do so (`policies.fastgen`)."""

from collections.abc import Iterable, Sequence

from ...config import KVPolicyConfig
from ...policies import POLICIES
from ..actions import Action
from ..plan import EvictionPlan, Reports
from .base import Mechanism, Step, settled


class Profiles(Mechanism):
    """Runs before `Budget`, which then evicts by the chosen policy."""

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return any(POLICIES[name].profiles for name in config.allowed)

    def plan(self, plan: EvictionPlan, step: Step) -> None:
        for group, noted in zip(self.host.groups, plan.groups):
            for req_id in step.tokens:
                blocks, request = group.residents[req_id], self.host.requests[req_id]
                waits = blocks.measured and blocks.config.policy.profiles
                if waits and request.num_computed_tokens >= request.num_prompt_tokens:
                    noted.due[req_id] = blocks.incarnation
                    noted.report[req_id] = blocks.config.policy.measures

    def decide(self, plan: EvictionPlan, reports: Sequence[Reports]) -> Iterable[Action]:
        for group, request, blocks in self.due(plan):
            report = reports[group.number].get(request.request_id)
            if report is None or not blocks.config.policy.profiles:
                continue
            blocks.profile(report, settled(request), request.num_prompt_tokens)
            told, blocks.scoring = self.host.next_plan.groups[group.number], self.host.scoring_of(request, blocks)
            if blocks.scoring is None:
                told.untrack.add(request.request_id)
            else:
                told.track[request.request_id] = blocks.scoring
        return ()
