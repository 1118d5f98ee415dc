"""`when: pressure`: nothing goes until the pool runs out; then blocks of running requests do, before vLLM preempts."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from ..compat.allocation import before_giving_up
from .manager import EvictableManager, SlidingManager
from .plan import GroupPlan, Reports
from .residency import NO_BLOCKS

if TYPE_CHECKING:
    from .scheduler import EvictionMixin

logger = init_logger("vllm.evict")

#: Steps after which the scores of a request are asked for again while the pool is short of blocks.
SCORES_STAY_FRESH = 8


class Pressure:
    """Frees blocks where vLLM's `KVCacheManager.allocate_slots` finds too few.

    Args:
        scheduler: whose requests hold the blocks.
        managers: of its KV groups that may have holes.
        beside: of its KV groups with sliding windows, which take blocks out of the same pool.
    """

    def __init__(
        self, scheduler: "EvictionMixin", managers: Sequence[EvictableManager], beside: Sequence[SlidingManager] = ()
    ) -> None:
        self._scheduler, self._managers, self._all = scheduler, managers, [*managers, *beside]
        self._cache = scheduler.kv_cache_manager
        before_giving_up(self._cache, self.make_room)
        parts = scheduler.kv_policy.classes.values()
        self._buffer = max(part.buffer for part in parts if part.when == "pressure")
        self._warned = False

    def ask_for_scores(self, manager: EvictableManager, plan: GroupPlan, output: SchedulerOutput) -> None:
        """While the pool may run out before long: have requests report that may be evicted from.

        At once if they never did, then every few steps.
        """
        scheduler, pool = self._scheduler, self._cache.block_pool
        enough = max(pool.num_gpu_blocks // 4, 2 * len(scheduler.running))
        if not scheduler.waiting and pool.get_num_free_blocks() >= enough:
            return
        for req_id in output.num_scheduled_tokens:
            resident = manager.residents[req_id]
            if not resident.measured or not resident.under_pressure:
                continue
            if resident.report is None or scheduler.current_step - resident.asked_at >= SCORES_STAY_FRESH:
                plan.report[req_id] = resident.config.policy.measures
                plan.asked[req_id] = resident.incarnation
                resident.asked_at = scheduler.current_step

    def take_scores(self, manager: EvictableManager, plan: GroupPlan, reports: Reports) -> None:
        """Keep what was asked for in case the pool runs out."""
        for req_id, incarnation in plan.asked.items():
            resident = manager.residents.get(req_id)
            if resident is None or resident.incarnation != incarnation:
                continue
            if req_id in reports:
                resident.report = reports[req_id]
            else:
                self._scheduler.miss(req_id, resident)

    def make_room(self, request: Request, reserved_blocks: int) -> bool:
        """Free blocks of running requests, as many as `request` lacked just now; whether that was possible.

        Args:
            request: whose allocation failed.
            reserved_blocks: of the pool, that it may not take.
        """
        missing = sum(manager.wanted for manager in self._all) + reserved_blocks
        missing -= self._cache.block_pool.get_num_free_blocks()
        if request.status != RequestStatus.RUNNING:
            missing += self._cache.watermark_blocks
        if missing > 0 and self._relieve(missing):
            return True
        if request.status == RequestStatus.RUNNING and not self._warned:
            self._warned = True
            logger.warning(
                "KV policy %s: requests are at their budgets and the pool is full, so vLLM preempts; a smaller budget "
                "or --max-num-seqs would avoid it. Said once.",
                self._scheduler.kv_policy.name,
            )
        return False

    def _relieve(self, missing: int) -> bool:
        """Free `missing` blocks, the least important of all requests first; nothing if it can't.

        And some more, so that requests are not compared anew in each step.
        """
        # Sessions between two turns hold blocks too.
        requests = [*self._scheduler.running, *self._scheduler.kv_holding_waiting]
        holders = [(manager, request) for request in requests for manager in self._managers]
        offers = [self.offer(*holder) for holder in holders]
        left = [spare for *_, spare in offers]
        if sum(left) < missing:
            return False
        owner = np.repeat(np.arange(len(offers)), [len(blocks) for blocks, *_ in offers])
        block = np.concatenate([blocks for blocks, *_ in offers])
        victims: list[list[int]] = [[] for _ in offers]
        wanted, freed = missing + self._reserve(), 0
        for at in ascending(np.concatenate([cost for _, cost, _ in offers]), 2 * wanted):
            (manager, request), index = holders[owner[at]], int(block[at])
            # A shared block stays in use by others: its loss would gain nothing.
            if left[owner[at]] and manager.req_to_blocks[request.request_id][index].ref_cnt == 1:
                victims[owner[at]].append(index)
                left[owner[at]] -= 1
                freed += 1
                if freed == wanted:
                    break
        if freed < missing:
            return False
        for (manager, request), chosen in zip(holders, victims):
            if chosen:
                self._scheduler.make_holes(request, manager, np.sort(np.array(chosen, np.int64)))
        return True

    def _reserve(self) -> int:
        """Blocks that are freed beyond what is missing: the buffer, or what decodes begin while scores stay fresh."""
        tokens = max(self._buffer, SCORES_STAY_FRESH * len(self._scheduler.running) * len(self._managers))
        return math.ceil(tokens / self._managers[0].block_size)

    def offer(self, manager: EvictableManager, request: Request) -> tuple[np.ndarray, np.ndarray, int]:
        """Blocks that may go of a request in this step, their costs, and how many (see `Residency.offer`)."""
        resident = manager.residents[request.request_id]
        # Blocks of the step being planned may be published already: they must not see a reduced context.
        published = max(each.published_tokens(request.request_id) for each in self._managers)
        if not resident.started or not resident.under_pressure or published > request.num_computed_tokens:
            return NO_BLOCKS, np.empty(0), 0
        return resident.offer(request.num_computed_tokens - request.num_in_flight_tokens)


def ascending(values: np.ndarray, few: int) -> Iterator[int]:
    """Indices in the order of a stable argsort. Sorts about `few`, and more only when they are asked for."""
    done = 0
    while done < len(values):
        least = np.arange(len(values))
        if few < len(values):
            least = np.flatnonzero(values <= np.partition(values, few)[few])
        order = least[np.argsort(values[least], kind="stable")]
        yield from order[done:].tolist()
        done, few = len(order), 4 * len(order)
