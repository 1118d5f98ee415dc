"""The holes of a KV group's requests: a worker's replay of what plans say."""

from collections.abc import Mapping, Set
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..core.plan import GroupPlan
from ..core.residence import HOLE


class Start(NamedTuple):
    """News of one KV group with which a step begins.

    Attributes:
        plan: of the group.
        gone: requests that ended or were preempted.
        resumed: preempted requests that start again.
        started: requests that start, those in `resumed` included.
        changed: requests of which the plan fills holes, or leaves some.
        holes: holes of the group, those of `plan` included.
        prompts: request that is new -> tokens of its prompt.
    """

    plan: GroupPlan
    gone: Set[str]
    resumed: Set[str]
    started: Set[str]
    changed: Set[str]
    holes: "Holes"
    prompts: Mapping[str, int] = MappingProxyType({})


class Holes:
    """Holes of the requests of one KV group.

    Args:
        block_size: tokens.

    Attributes:
        of_request: request -> its holes, logical blocks; requests without holes are left out.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.of_request: dict[str, set[int]] = {}
        #: Requests of a batch, in row order, and the tokens in the holes of each.
        self._lacks: tuple[list[str], np.ndarray] = ([], np.empty(0, np.int32))

    def begin(self, scheduler_output: Any, plan: GroupPlan, number: int) -> Start:
        """Apply the plan of a step.

        Args:
            scheduler_output: vLLM's `SchedulerOutput`.
            plan: of the KV group.
            number: index of the group among all of vLLM's KV groups.

        Returns:
            What begins with the step, for the parts of the group.
        """
        changed: set[str] = set()
        for req_id, blocks in plan.changes.items():
            holes = self.of_request.setdefault(req_id, set())
            others = {block for block, physical in blocks.items() if (physical == HOLE) != (block in holes)}
            holes ^= others
            if others:
                changed.add(req_id)
            if not holes:
                del self.of_request[req_id]
        gone = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        cached = scheduler_output.scheduled_cached_reqs
        resumed = cached.resumed_req_ids
        tables = {new.req_id: new.block_ids for new in scheduler_output.scheduled_new_reqs}
        if resumed:
            tables |= {req_id: ids for req_id, ids in zip(cached.req_ids, cached.new_block_ids) if req_id in resumed}
        for req_id in gone | tables.keys():
            self.of_request.pop(req_id, None)
        for req_id, block_ids in tables.items():
            # The table of a started request has all its holes: those of a session's former turns and of this plan, or
            # those of a cached prefix.
            if HOLE in block_ids[number]:
                self.of_request[req_id] = set(np.flatnonzero(np.equal(block_ids[number], HOLE)).tolist())
        if gone or tables or changed:
            self._lacks = [], self._lacks[1][:0]
        prompts = {new.req_id: len(new.prompt_token_ids or ()) for new in scheduler_output.scheduled_new_reqs}
        return Start(plan, gone, resumed, tables.keys(), changed, self, prompts)

    def of(self, req_id: str) -> Set[int]:
        """Return a request's holes, logical blocks."""
        return self.of_request.get(req_id, frozenset())

    def count(self, req_id: str) -> int:
        """Return the number of a request's holes."""
        return len(self.of(req_id))

    def lacking(self, req_ids: list[str]) -> np.ndarray:
        """Return the tokens in the holes of each row: int32 [R]. Cached until batch or holes change."""
        if self._lacks[0] != req_ids:
            tokens = (self.count(req_id) * self._block_size for req_id in req_ids)
            self._lacks = list(req_ids), np.fromiter(tokens, np.int32, len(req_ids))
        return self._lacks[1]

    def resident_tokens(self, req_ids: list[str], seq_lens: np.ndarray) -> np.ndarray:
        """Return the resident tokens of each row, int32 [R], from the lengths with holes."""
        return seq_lens - self.lacking(req_ids) if self.of_request else seq_lens

    def resident(self, req_id: str, blocks: int) -> np.ndarray:
        """Return a request's first `blocks` resident logical blocks, ascending: int64 [blocks]."""
        holes = self.of(req_id)
        is_resident = np.ones(blocks + len(holes), bool)
        is_resident[list(holes)] = False
        return np.flatnonzero(is_resident)
