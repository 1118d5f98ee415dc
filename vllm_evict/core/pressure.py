"""`when: pressure`: nothing goes until the pool runs out; then blocks of running requests do, before vLLM preempts."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from .manager import EvictableManager
from .plan import GroupPlan, Reports
from .residency import NO_BLOCKS

if TYPE_CHECKING:
    from .scheduler import EvictionMixin

logger = init_logger("vllm.evict")

#: Steps after which the scores of a request are asked for again while the pool is short of blocks.
SCORES_STAY_FRESH = 8


class Pressure:
    """Takes the place of vLLM's `KVCacheManager.allocate_slots`.

    Args:
        scheduler: whose requests hold the blocks.
        managers: of its KV groups.
    """

    def __init__(self, scheduler: "EvictionMixin", managers: Sequence[EvictableManager]) -> None:
        self._scheduler, self._managers = scheduler, managers
        self._cache = scheduler.kv_cache_manager
        self._allocate = self._cache.allocate_slots
        self._cache.allocate_slots = self.allocate_slots
        parts = scheduler.kv_policy.classes.values()
        self._relief = max(part.buffer for part in parts if part.when == "pressure")
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

    @staticmethod
    def take_scores(manager: EvictableManager, plan: GroupPlan, reports: Reports) -> None:
        """Keep what was asked for in case the pool runs out."""
        for req_id, incarnation in plan.asked.items():
            resident = manager.residents.get(req_id)
            if resident is not None and resident.incarnation == incarnation and req_id in reports:
                resident.report = reports[req_id]

    def allocate_slots(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, which frees blocks of running requests before it gives up."""
        blocks = self._allocate(request, *args, **kwargs)
        if blocks is not None:
            return blocks
        missing = sum(manager.wanted for manager in self._managers) + kwargs.get("reserved_blocks", 0)
        missing -= self._cache.block_pool.get_num_free_blocks()
        if request.status != RequestStatus.RUNNING:
            missing += self._cache.watermark_blocks
        if missing > 0 and self._relieve(missing):
            return self._allocate(request, *args, **kwargs)
        if request.status == RequestStatus.RUNNING and not self._warned:
            self._warned = True
            logger.warning(
                "KV policy %s: requests are at their budgets and the pool is full, so vLLM preempts; a smaller budget "
                "or --max-num-seqs would avoid it. Said once.",
                self._scheduler.kv_policy.name,
            )
        return None

    def _relieve(self, missing: int) -> bool:
        """Free `missing` blocks and the buffer, the least important of all requests first; nothing if it can't."""
        offers = [
            (manager, request, *self.offer(manager, request))
            for request in self._scheduler.running
            for manager in self._managers
        ]
        offers = [offer for offer in offers if len(offer[2])]
        if sum(len(blocks) for *_, blocks, _ in offers) < missing:
            return False
        owner = np.repeat(np.arange(len(offers)), [len(blocks) for *_, blocks, _ in offers])
        block = np.concatenate([blocks for *_, blocks, _ in offers])
        order = np.argsort(np.concatenate([cost for *_, cost in offers]), kind="stable")
        victims: list[list[int]] = [[] for _ in offers]
        wanted = missing + math.ceil(self._relief / self._managers[0].block_size)
        freed = 0
        for at in order.tolist():
            manager, request, *_ = offers[owner[at]]
            # A shared block stays in use by others: its loss would gain nothing.
            if manager.req_to_blocks[request.request_id][block[at]].ref_cnt == 1:
                victims[owner[at]].append(int(block[at]))
                freed += 1
                if freed == wanted:
                    break
        if freed < missing:
            return False
        for (manager, request, *_), chosen in zip(offers, victims):
            if chosen:
                self._scheduler.make_holes(request, manager, np.sort(np.array(chosen, np.int64)))
        return True

    def offer(self, manager: EvictableManager, request: Request) -> tuple[np.ndarray, np.ndarray]:
        """Blocks that a running request can spare in this step, and their costs (see `Residency.offer`)."""
        resident = manager.residents[request.request_id]
        # Blocks of the step being planned may be published already: they must not see a reduced context.
        published = max(each.published_tokens(request.request_id) for each in self._managers)
        if not resident.started or not resident.under_pressure or published > request.num_computed_tokens:
            return NO_BLOCKS, NO_BLOCKS
        return resident.offer(request.num_computed_tokens - request.num_in_flight_tokens)
