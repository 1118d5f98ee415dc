"""Takes what workers report. A block that only drafts have begun has no score before they are accepted."""

from collections.abc import Sequence

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from ...core.mechanisms.base import settled
from ...core.plan import REPORTS, EvictionPlan, Reports
from ...core.reports import Inbox
from .view import EngineView


class StepReports:
    """Takes the reports of steps, without blocks of drafts that the step has just accepted.

    Args:
        scheduler: an `EvictionMixin`.
    """

    def __init__(self, scheduler: EngineView) -> None:
        self._scheduler, self._inbox = scheduler, Inbox()
        #: Request -> drafts of it that the step that is done has accepted.
        self._accepted: dict[str, int] = {}

    def take(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput, plan: EvictionPlan) -> list[Reports]:
        """Return the sound reports that a plan asked for, for each KV group."""
        if self._scheduler.num_spec_tokens:
            self._accepted = _accepted(scheduler_output, output)
        reports = self._inbox.take(getattr(output, REPORTS, None), plan.groups, self._held)
        if not self._scheduler.num_spec_tokens:
            return reports
        requests = self._scheduler.requests
        # Where workers do not know how many drafts were accepted, they report some blocks of drafts.
        known = {
            req_id: self._scored_blocks(requests[req_id]) for each in reports for req_id in each if req_id in requests
        }
        return [{req_id: report.before(known.get(req_id)) for req_id, report in each.items()} for each in reports]

    def _held(self, group: int, req_id: str) -> np.ndarray | None:
        """Return the blocks of a request in a KV group for which a report has numbers; None if it has ended.

        These are the blocks that it holds, without blocks of steps in flight, and of accepted drafts alone.
        """
        # A request that has ended may still be known to vLLM, while a connector reads its blocks.
        blocks = self._scheduler.kv_managers[group].residents.get(req_id)
        if blocks is None:
            return None
        request = self._scheduler.requests[req_id]
        held = blocks.residence.before(settled(request))
        if self._scheduler.num_spec_tokens:
            held = held[: held.searchsorted(self._scored_blocks(request))]
        return held

    def _scored_blocks(self, request: Request) -> int:
        """Return the blocks of a request, holes included, without those that only drafts have begun in the step."""
        known = settled(request) - self._accepted.get(request.request_id, 0)
        return int(-(-max(known, 1) // self._scheduler.kv_managers[0].block_size))


def _accepted(scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> dict[str, int]:
    """Return for each request that had drafts in a step how many of them the step has accepted."""
    drafted: Sequence[str] = list(scheduler_output.scheduled_spec_decode_tokens)
    sampled, rows = output.sampled_token_ids, output.req_id_to_index
    return {req_id: max(len(sampled[rows[req_id]]) - 1, 0) for req_id in drafted if sampled and req_id in rows}
