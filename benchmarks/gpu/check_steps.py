"""A record of the steps of one request, for a dense model that repeats them."""

from collections import defaultdict
from typing import Any


class Steps:
    """Records each step of one request: its tokens, holes and rotations of its plan, holes decided after it."""

    def __init__(self, scheduler: Any) -> None:
        from vllm_evict.core.plan import PLAN
        from vllm_evict.core.residence import HOLE
        from vllm_evict.features.context.plan import KeyRotation

        self._tokens: list[int] = []
        self._told: list[list[int]] = []
        self._moved: set[int] = set()
        self._decided: dict[int, list[int]] = defaultdict(list)
        schedule, apply = scheduler.schedule, scheduler.apply

        def watched_schedule(*args: Any, **kwargs: Any) -> Any:
            planned = schedule(*args, **kwargs)
            for req_id, tokens in planned.num_scheduled_tokens.items():
                self._tokens.append(tokens)
                plan = getattr(planned, PLAN)
                changes = plan.groups[0].changes.get(req_id, {})
                self._told.append([block for block, physical in changes.items() if physical == HOLE])
                if any(isinstance(order, KeyRotation) and order.req_id == req_id for order in plan.orders):
                    self._moved.add(len(self._told) - 1)
            return planned

        def watched_apply(action: Any) -> bool:
            request = scheduler.requests[action.req_id]
            done = request.num_computed_tokens - request.num_in_flight_tokens
            self._decided[done] += action.holes.tolist()
            return bool(apply(action))

        scheduler.schedule, scheduler.apply = watched_schedule, watched_apply

    def of_request(self, computed: int) -> tuple[list[int], list[list[int]], list[list[int]], set[int]]:
        """Steps up to a number of computed tokens; a step planned after the last token does not count."""
        counts, decided, done = [], [], 0
        for tokens in self._tokens:
            if done == computed:
                break
            done += tokens
            counts.append(tokens)
            decided.append(sorted(self._decided.get(done, [])))
        return counts, self._told[: len(counts)], decided, self._moved
