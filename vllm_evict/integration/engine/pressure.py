"""Makes room in the pool, after a failed allocation and before a preemption, from blocks that requests can spare."""

from collections.abc import Sequence
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from ...core.actions import Action
from ...core.mechanisms import Pressure
from ...core.mechanisms.base import settled
from ...core.mechanisms.pressure import SCORES_STAY_FRESH
from ...core.plan import EvictionPlan, Reports
from ..start.versions import waiting_with_blocks
from .managers import FROM_HOST
from .shadows import ShadowRequests
from .view import EngineView

logger = init_logger("vllm.evict")

#: Preemptions after which a request takes no blocks from other requests: it waits until the pool has room.
MOST_TAKINGS = 2


class PoolRelief(Pressure):
    """Frees blocks where vLLM's `KVCacheManager.allocate_slots` finds too few.

    Args:
        scheduler: an `EvictionMixin`, whose requests hold the blocks.
    """

    def __init__(self, scheduler: EngineView) -> None:
        super().__init__(scheduler)
        self._scheduler, self._cache = scheduler, scheduler.kv_cache_manager
        scheduler.slots.make_room = self.make_room
        self._warned = self._said = False
        #: The waiting request that tried last to find room, how many others held blocks then, and the step.
        self._tried: tuple[str, int, int] | None = None
        self._tried_at = 0

    def decide(self, plan: EvictionPlan, reports: Sequence[Reports]) -> Sequence[Action]:
        if super().keep(plan, reports):
            self._tried = None  # offers may have changed: the waiting request may try again
        return ()

    def make_room(
        self,
        request: Request,
        *,
        wanted: int,
        reserved: int,
        hit: Sequence[Sequence[KVCacheBlock]],
        watermark: bool,
    ) -> bool:
        """Free as many blocks of other requests as `request` lacked in its failed allocation.

        Args:
            request: the request whose allocation failed.
            wanted: blocks that the request lacks, free ones of the pool included.
            reserved: blocks of the pool that the request may not take.
            hit: for each KV group, the cached blocks that the request is about to take.
            watermark: whether vLLM keeps its watermark free, if the request is waiting.

        Returns:
            Whether the pool has more free blocks now.
        """
        scheduler, runs = self._scheduler, request.status == RequestStatus.RUNNING
        if any(each.lent or each.owns(request.request_id) for each in scheduler.mechanisms.of(ShadowRequests)):
            # No request loses a block for a shadow. vLLM preempts the shadow first, and a waiting request comes once it
            # is withdrawn.
            return False
        missing = wanted + reserved - self._cache.block_pool.get_num_free_blocks()
        if not runs and watermark:
            missing += self._cache.watermark_blocks
        if missing > 0 and (runs or self._may_take(request)) and self._relieve(request, missing, hit):
            self._tried = None
            return True
        if runs and not self._warned:
            self._warned = True
            logger.warning(
                "KV policy %s: requests are at their budgets and the pool is full, so vLLM preempts; a smaller budget "
                "or --max-num-seqs would avoid it. Said once.",
                scheduler.kv_policy.name,
            )
        return False

    def _may_take(self, request: Request) -> bool:
        """Return whether a waiting request may take blocks, and find more room than when it tried last.

        One that holds blocks, such as a session whose next turn came, goes on as a running one does: vLLM can't preempt
        it, and others wait for its blocks. It may find more room if requests have ended, begun or reported since, or
        after `SCORES_STAY_FRESH` steps.
        """
        scheduler = self._scheduler
        if not self._admits and not scheduler.kv_managers[0].req_to_blocks.get(request.request_id):
            return False
        state = (request.request_id, len(scheduler.running), len(waiting_with_blocks(scheduler)))
        if state == self._tried and scheduler.current_step - self._tried_at < SCORES_STAY_FRESH:
            return False
        self._tried, self._tried_at = state, scheduler.current_step
        return True

    def _relieve(self, request: Request, missing: int, hit: Sequence[Sequence[KVCacheBlock]]) -> bool:
        """Free `missing` blocks for a request, or fewer; return whether the pool has more free blocks now."""
        if request.num_preemptions >= MOST_TAKINGS and request.status == RequestStatus.PREEMPTED:
            return False  # it took blocks twice, and lost its own work both times
        scheduler, by_priority = self._scheduler, self._scheduler.policy == SchedulingPolicy.PRIORITY
        # Freeing a cached block that the request is about to take would gain nothing: the request takes it again.
        kept = {block.block_id for blocks in hit for block in blocks}

        def frees(manager: Any, req_id: str, index: int) -> bool:
            block = manager.req_to_blocks[req_id][index]
            # Evicting a shared block would gain nothing: other requests still hold it.
            return block.ref_cnt == 1 and block.block_id not in kept

        # Sessions between two turns hold blocks too.
        givers = [*scheduler.running, *waiting_with_blocks(scheduler)]
        if by_priority:
            givers = [giver for giver in givers if giver.priority >= request.priority]
        # A waiting request can wait for scores, too.
        unscored = request.status == RequestStatus.RUNNING
        actions = self.choose(givers, missing, frees, taker=request, unscored=unscored, by_priority=by_priority)
        free, pool = scheduler.free_blocks, self._cache.block_pool
        # An action may take free blocks of the pool, such as those of the hit.
        taken = [block for blocks in hit for block in blocks if block is not FROM_HOST and not block.is_null]
        pool.touch(taken)
        for action in actions:
            if scheduler.apply(action):  # the host may have room for a part of it, which may free none
                self._note_fallen(action)
        pool.free_blocks(reversed(taken))
        return scheduler.free_blocks > free

    def _note_fallen(self, action: Action) -> None:
        """Count a request that is at its budget after an action, once, and log the first one."""
        scheduler, req_id = self._scheduler, action.req_id
        blocks = scheduler.kv_managers[action.group].residents[req_id]
        if blocks.state.counts["fallen"] or blocks.above_budget(settled(scheduler.requests[req_id])) > 0:
            return
        scheduler.count(blocks, fallen=1)
        if not self._said and blocks.limits is not None:
            self._said = True
            logger.warning(
                "KV policy %s: the pool ran out, and request %s is down to its budget, %d of the %d blocks that it "
                "filled: %s. A larger pool, a larger budget, fewer --max-num-seqs%s keep more. "
                "vllm:kv_evict_requests_at_budget_total counts such requests. Said once.",
                scheduler.kv_policy.name,
                req_id,
                blocks.limits.budget,
                blocks.residence.known,
                "the others wait on the host" if blocks.config.reaches else "the others are lost",
                " or admit: false" if self._admits else "",
            )
