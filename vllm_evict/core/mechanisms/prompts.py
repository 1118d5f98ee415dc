"""`prompt: whole`: no block of a prompt goes before the prompt is computed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...config import REGISTRY, KVPolicyConfig
from ..blocks import RequestBlocks
from ..plan import EvictionPlan
from .base import Mechanism, SchedulerView


class WholePrompts(Mechanism):
    """Notes the requests of a step that computes the end of their prompt.

    Args:
        view: the scheduler.
    """

    def __init__(self, view: SchedulerView) -> None:
        super().__init__(view)
        #: Whether any request so far keeps its prompt whole. A server under `full` may never have one.
        self._any = False

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return any(part.prompt == "whole" for part in config.classes.values()) or (
            config.takes_whole and any("prompt" in REGISTRY[name].options for name in config.allowed)
        )

    def on_start(self, plan: EvictionPlan, req_id: str, blocks: Sequence[RequestBlocks]) -> None:
        self._any = self._any or any(each.config.prompt == "whole" for each in blocks)

    def on_turn(self, req_id: str, blocks: Sequence[RequestBlocks]) -> None:
        self.on_start(self.view.next_plan, req_id, blocks)

    def on_scheduled(self, plan: EvictionPlan, tokens: Mapping[str, int]) -> None:
        """Note the ends of prompts, and have workers measure on for the next decision.

        Workers that count the last queries before a decision foresee the next decisions by the trigger. If no decision
        follows this step, they forget the last queries of the prompt.
        """
        if not self._any:
            return
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
