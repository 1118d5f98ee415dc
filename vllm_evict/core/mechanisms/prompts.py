"""`prompt: whole`: no block of a prompt goes before the prompt is computed."""

from collections.abc import Mapping
from dataclasses import replace

from ...config import KVPolicyConfig
from ..plan import EvictionPlan
from .base import Mechanism


class WholePrompts(Mechanism):
    """Notes the requests of a step that computes the end of their prompt."""

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return any(part.prompt == "whole" for part in config.classes.values())

    def on_scheduled(self, plan: EvictionPlan, tokens: Mapping[str, int]) -> None:
        """Note the ends of prompts, and have workers measure on for the next decision.

        Workers that count the last queries before a decision foresee the next decisions by the trigger. If no decision
        follows this step, they forget the last queries of the prompt.
        """
        for group, following in zip(self.view.groups, self.view.next_plan.groups):
            for req_id in tokens:
                request, blocks = self.view.requests[req_id], group.residents[req_id]
                waits = blocks.config.prompt == "whole" and not blocks.prompted
                if not waits or request.num_computed_tokens < request.num_prompt_tokens:
                    continue
                blocks.prompted = True
                group.note(req_id)
                if blocks.limits is None or blocks.scoring is None or blocks.scoring.trigger == blocks.limits.trigger:
                    continue
                blocks.scoring = replace(blocks.scoring, trigger=blocks.limits.trigger)
                if group.exceeds(req_id):
                    following.triggers[req_id] = blocks.limits.trigger
                else:
                    following.track[req_id], blocks.first_query = blocks.scoring, request.num_computed_tokens
