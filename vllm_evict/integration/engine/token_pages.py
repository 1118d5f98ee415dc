"""Keeps sums by token within the memory that workers set aside for them, whatever requests share."""

import math
import time
from typing import NamedTuple

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request

from ...config import KVPolicyConfig
from ...core.blocks import RequestBlocks
from ...core.mechanisms import Mechanism
from ...policies import RUNNING
from ..start.versions import waiting_with_blocks
from .hits import Hit
from .managers import EvictableManager
from .spec import most_held
from .view import EngineView


class Shared:
    """State of a request: blocks of the prefix that it may start with and that other requests hold, in each group."""

    blocks: tuple[int, ...] = ()


class _Group(NamedTuple):
    """A KV group that is measured by token, and the pages that workers set aside for it (`compute.mass.TokenMass`)."""

    manager: EvictableManager
    most: int


class TokenPages(Mechanism):
    """Admits requests, cuts their prefixes and preempts them such that their pages fit what is set aside.

    A measured request has a page of sums for each of its blocks, also for those that it shares. Set aside are pages for
    requests at their bounds, and no more than the pool has blocks. Without sharing no more can be in use. A prefix that
    a request under another policy has published may be longer than a bound, and its blocks are in the pool once.

    Args:
        scheduler: an `EvictionMixin`.
    """

    def __init__(self, scheduler: EngineView) -> None:
        super().__init__(scheduler)
        self._scheduler, self._cache = scheduler, scheduler.kv_cache_manager
        blocks, requests = self._cache.block_pool.num_gpu_blocks, scheduler.max_num_running_reqs
        parts = [
            (manager, scheduler.kv_policy.of_class(manager.kv_cache_spec.head_class))
            for manager in scheduler.kv_managers
        ]
        self._groups = [
            _Group(manager, min(blocks, requests * most_held(scheduler.vllm_config, part, manager.block_size)))
            for manager, part in parts
            if _is_by_token(part)
        ]
        #: Requests that were preempted for the step being planned.
        self._preempted: set[str] = set()

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return any(map(_is_by_token, config.classes.values()))

    def before_schedule(self) -> None:
        """Preempt requests, the last one first, until pages are there for all that the step may begin.

        One that runs alone has pages for all that it may hold. Beside it sessions between two turns start over.
        """
        scheduler, self._preempted = self._scheduler, set()
        growth = math.ceil(scheduler.max_in_flight_tokens / self._groups[0].manager.block_size) + len(scheduler.running)
        while any(self._exceeds(group, growth) for group in self._groups):
            if measured := [each for each in scheduler.running[1:] if self._is_measured(each)]:
                last = measured[-1]
                if scheduler.policy == SchedulingPolicy.PRIORITY:
                    last = max(measured, key=lambda each: (each.priority, each.arrival_time))
                scheduler.running.remove(last)
                scheduler._preempt_request(last, time.monotonic())
                self._preempted.add(last.request_id)
                continue
            sessions = [each for each in waiting_with_blocks(scheduler) if self._is_measured(each)]
            if not (sessions := [each for each in sessions if not each.num_in_flight_tokens]):
                return
            scheduler.admission.start_over(sessions[-1])

    def on_hit(self, request: Request, hit: Hit) -> Hit:
        blocks = self._scheduler.blocks_of(request.request_id)
        taken = [hit.blocks.blocks[manager.kv_cache_group_id] for manager, _ in self._groups]
        blocks[0].of(Shared).blocks = tuple(sum(block.ref_cnt > 0 for block in each) for each in taken)
        return hit

    def limit_hit(self, request: Request, most: int) -> int:
        """Return the tokens of a prefix for which a request alone has pages, its first chunk's beside them."""
        for manager, pages in self._groups:
            if manager.residents[request.request_id].measured:
                most = min(most, max(pages - manager.in_flight, 0) * manager.block_size)
        return most

    def limit_tokens(self, request: Request, computed_tokens: int, new_tokens: int) -> int:
        """Return `new_tokens`, or 0 for a request that would start and finds too few pages."""
        first = self._scheduler.residents[request.request_id]
        if first.started or not new_tokens:
            return new_tokens
        if request.request_id in self._preempted:  # vLLM's runner has to hear of it first
            return 0
        shared = first.of(Shared).blocks or (0,) * len(self._groups)
        for group, of_others in zip(self._groups, shared):
            manager, blocks = group.manager, group.manager.residents[request.request_id]
            if not blocks.measured:
                continue
            in_use, bound = self._pages(group)
            needed = self._most(group, request, blocks, math.ceil(computed_tokens / manager.block_size))
            if in_use and min(bound + needed, in_use + of_others + self._scheduler.free_blocks) > group.most:
                return 0
        return new_tokens

    def _is_measured(self, request: Request) -> bool:
        return any(manager.residents[request.request_id].measured for manager, _ in self._groups)

    def _exceeds(self, group: _Group, growth: int) -> bool:
        """Return whether a group's pages may not suffice for a step in which requests begin `growth` blocks."""
        growth = min(self._scheduler.free_blocks, growth)
        if sum(group.manager.held.values()) + growth <= group.most:  # those of other policies included
            return False
        in_use, bound = self._pages(group)
        return min(bound, in_use + growth) > group.most

    def _pages(self, group: _Group) -> tuple[int, int]:
        """Return the pages of all requests, the step being planned included, and the most that they may have."""
        in_use = bound = 0
        for req_id, blocks in group.manager.residents.items():
            if blocks.measured and (table := group.manager.req_to_blocks.get(req_id)):
                held = blocks.held(len(table))
                in_use += held
                bound += self._most(group, self._scheduler.requests[req_id], blocks, held)
        return in_use, bound

    def _most(self, group: _Group, request: Request, blocks: RequestBlocks, there: int) -> int:
        """Return the most blocks that a request may hold in a group until it is decided on; it holds `there` now."""
        whole = math.ceil(self._scheduler.hits.longest_table(request) / group.manager.block_size)
        return blocks.most(whole, group.manager.in_flight, there)


def _is_by_token(part: KVPolicyConfig) -> bool:
    return part.granularity == "token" and bool(part.statistics & RUNNING)
