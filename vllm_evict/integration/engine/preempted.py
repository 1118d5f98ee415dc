"""Preempted requests whose blocks wait on the host: they go on where they were, instead of being computed again."""

import math
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request

from ...config import KVPolicyConfig
from ...core.blocks import RequestBlocks
from ...core.host import HostPool
from ...core.mechanisms.base import scores_prompt
from ...core.plan import EvictionPlan
from .managers import FROM_HOST
from .tally import Tally

if TYPE_CHECKING:
    from .managers import EvictableManager


class PreemptedMixin:
    """The part of the scheduler about `preempt: host`.

    A request that vLLM preempts gives back all blocks, and their bytes go to the host, if it has room for all of them.
    Its holes, its host blocks and its sums stay what they were. When vLLM admits it again, it gets a hit of the prefix
    cache that is no hit: a table with holes, blocks that are still in the prefix cache, and new blocks into which
    workers copy the bytes.
    """

    kv_policy: KVPolicyConfig
    kv_managers: "list[EvictableManager]"
    tally: Tally
    host_pool: HostPool | None
    _plan: EvictionPlan
    #: Whether the prefix cache is being reset: then what requests have computed is void.
    _resets = False

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        if self.kv_policy.preempt == "host" and request.num_computed_tokens:
            self._save(request)
        super()._preempt_request(request, *args, **kwargs)

    def _save(self, request: Request) -> None:
        """Save the blocks of a request that is about to be preempted.

        A step in flight may still write them. Workers copy them after it. Model Runner V2 forgets the log-probabilities
        of the prompt so far, so a request that asks for some is computed again.
        """
        (manager,), req_id, saved = self.kv_managers, request.request_id, None
        resident = manager.residents[req_id]
        if not (self._resets or resident.recalls.waits or scores_prompt(request)):
            computed, table = request.num_computed_tokens, manager.req_to_blocks[req_id]
            blocks = enumerate(table[: math.ceil(computed / manager.block_size)])
            physical = {index: block.block_id for index, block in blocks if not block.is_null}
            saved = self.host_pool.save(self._plan, req_id, manager.number, resident, physical, computed)
        if saved is None:
            self._count_recomputed(resident)
            return
        for loser in saved:
            self.tally.host(loser.policy, dropped=1)
        if request.num_in_flight_tokens and not resident.recalls.steps:
            resident.recalls.is_due = resident.recalls.answered  # the look that is in flight leads to nothing
        self._plan.groups[manager.number].parked.add(req_id)
        self.tally.host(resident.policy, saved=1)

    def _get_local_prefix_cache_hit(self, request: Request, *args: Any, **kwargs: Any) -> tuple[Any, int, int, bool]:
        blocks, tokens, boundary, diverged = super()._get_local_prefix_cache_hit(request, *args, **kwargs)
        resident = self.residents[request.request_id]
        if resident.saved is not None and not self._finds_room(request, resident):
            self._forget_saved(resident)
        if resident.saved is None:
            return blocks, tokens, boundary, diverged
        (manager,), saved = self.kv_managers, resident.saved
        # Blocks of pure tokens are in the prefix cache as long as no request took their place.
        pure = tokens if resident.pure_tokens is None else min(tokens, resident.pure_tokens)
        hit = blocks.blocks[manager.kv_cache_group_id][: pure // manager.block_size]
        table = [manager.block_pool.null_block] * math.ceil(saved.computed_tokens / manager.block_size)
        for index in saved.numbers:
            table[index] = hit[index] if index < len(hit) else FROM_HOST
        # At least one token is computed, for its logits.
        computed = min(saved.computed_tokens, request.num_tokens - 1)
        return self.kv_cache_manager.create_kv_cache_blocks((table,)), computed, 0, False

    def _finds_room(self, request: Request, resident: RequestBlocks) -> bool:
        """Whether the pool will have room for a request's saved blocks and for those of its next steps.

        An empty pool has to have it; if no request runs, the pool as it is, beside sessions that wait for a turn.
        """
        (manager,), numbers = self.kv_managers, resident.saved.numbers
        known = math.ceil(resident.saved.computed_tokens / manager.block_size)
        blocks = math.ceil(request.num_tokens / manager.block_size)
        if resident.bounded:
            blocks = min(blocks, max(resident.limits.bound, known) + manager.in_flight)
        # One block is vLLM's null block.
        room = manager.block_pool.num_gpu_blocks - 1 if self.running else self.free_blocks
        return len(numbers) + max(blocks - known, 0) <= room

    def _restore(self, plan: EvictionPlan, req_id: str, resident: RequestBlocks) -> None:
        """Order workers to bring the blocks of a request back that the step being planned starts again."""
        (manager,) = self.kv_managers
        coming = resident.saved.coming.values()
        self.host_pool.restore(plan, req_id, manager.number, resident)
        plan.poison = [block for block in plan.poison if block not in coming]
        plan.groups[manager.number].restored.add(req_id)
        resident.state.restored += 1
        self.tally.host(resident.policy, restored=1)

    def _forget_saved(self, resident: RequestBlocks) -> None:
        """Have a preempted request computed again after all."""
        self.host_pool.release(self._plan, resident)
        resident.restart()
        self._count_recomputed(resident)

    def _count_recomputed(self, resident: RequestBlocks) -> None:
        resident.state.recomputed += 1
        self.tally.host(resident.policy, recomputed=1)

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        # A turn may end with a token that was in flight when the session was preempted. vLLM starts it over.
        resident = self.residents[session.request_id]
        if resident.saved is not None:
            self._forget_saved(resident)
        super()._update_request_as_session(session, update)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Reset the prefix cache, and what preempted requests have computed: weights may have changed."""
        for resident in self.residents.values():
            if resident.saved is not None:
                self._forget_saved(resident)
        self._resets = True
        try:
            return super().reset_prefix_cache(*args, **kwargs)
        finally:
            self._resets = False
