"""Seats of requests: their slots on workers, `max_num_seqs` of them, in vLLM's runner and in the plugin's arrays."""

from typing import Any, Protocol

from vllm.v1.request import Request, RequestStatus

from ...core.blocks import RequestBlocks
from ..start.versions import queues_sessions_first, waiting_with_blocks


class _View(Protocol):
    """The part of an `EvictionMixin` that seats read."""

    residents: dict[str, RequestBlocks]
    running: list[Request]
    num_waiting_for_streaming_input: int
    max_num_running_reqs: int
    lora_config: Any
    ec_connector: Any


class Seats:
    """Lets no request start that has no seat.

    A session keeps its seat from turn to turn. vLLM admits requests by those that run and the sessions that wait for
    their next turn. A session whose next turn has come is in neither count until it runs, and a step may pass it over:
    its adapter is not among those of the step (`max_loras`), or its media are not there yet. Since vLLM 0.31 a step
    tries such sessions before all others.

    Args:
        scheduler: an `EvictionMixin`.
    """

    def __init__(self, scheduler: _View) -> None:
        self._scheduler = scheduler
        self._watches = (
            scheduler.lora_config is not None
            or scheduler.ec_connector is not None
            or not queues_sessions_first(scheduler)
        )
        #: Sessions that waited for their next turn to run when the step being planned began.
        self._sessions: list[Request] = []

    @property
    def limits(self) -> list[Any]:
        """Limits for `allocation.limit_tokens`; none where vLLM's own count is right."""
        return [self.limit_tokens] if self._watches else []

    @property
    def taken(self) -> int:
        """Seats of requests that run, and of all sessions."""
        scheduler, waits = self._scheduler, RequestStatus.WAITING
        come = sum(each.status == waits and self._is_seated(each) for each in self._sessions)
        return len(scheduler.running) + scheduler.num_waiting_for_streaming_input + come

    def before_schedule(self) -> None:
        """Note which sessions wait, before vLLM takes those that it passes over out of its queue."""
        if self._watches:
            self._sessions = waiting_with_blocks(self._scheduler)

    def limit_tokens(self, request: Request, computed_tokens: int, new_tokens: int) -> int:
        """Return `new_tokens`, or 0 for a request that would start and has no seat (see `Mechanism.limit_tokens`)."""
        if self._is_seated(request) or self.taken < self._scheduler.max_num_running_reqs:
            return new_tokens
        return 0

    def _is_seated(self, request: Request) -> bool:
        return self._scheduler.residents[request.request_id].started
