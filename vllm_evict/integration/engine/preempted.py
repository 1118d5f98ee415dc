"""Preempted requests whose blocks wait on the host: they go on where they were, instead of being computed again."""

import math
from collections.abc import Sequence

from vllm.v1.request import Request

from ...config import KVPolicyConfig
from ...core.blocks import RequestBlocks
from ...core.mechanisms import Mechanism
from ...core.mechanisms.base import scores_prompt
from ...core.mechanisms.recall import Recalled
from ...core.plan import EvictionPlan
from ...core.residence import Saved
from .hits import Hit
from .managers import FROM_HOST
from .offloading import Offloading
from .view import EngineView


class Preempted(Mechanism):
    """Saves the blocks of requests that vLLM preempts (`preempt: host`).

    A request that vLLM preempts gives back all blocks, and their bytes go to the host, if it has room for all of them.
    Its holes, its host blocks and its sums stay what they were. When vLLM admits it again, it gets a hit of the prefix
    cache that is no hit: a table with holes, blocks that are still in the prefix cache, and new blocks into which
    workers copy the bytes.

    Args:
        scheduler: an `EvictionMixin`, with one KV group that may have holes.
    """

    def __init__(self, scheduler: EngineView) -> None:
        super().__init__(scheduler)
        self._scheduler, self._offloading = scheduler, scheduler.part(Offloading)
        (self._manager,) = scheduler.kv_managers
        self._manager.expect_saved()

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return config.preempt == "host"

    def on_preempt(self, request: Request) -> None:
        """Save the blocks of a request that is about to be preempted.

        A step in flight may still write them. Workers copy them after it. Model Runner V2 forgets the log-probabilities
        of the prompt so far, so a request that asks for some is computed again.
        """
        if not request.num_computed_tokens:
            return
        manager, req_id, dropped = self._manager, request.request_id, None
        blocks, plan = manager.residents[req_id], self.view.next_plan
        recalls = blocks.of(Recalled).recalls
        if not (self._scheduler.resets or recalls.waits or scores_prompt(request)):
            computed, table = request.num_computed_tokens, manager.req_to_blocks[req_id]
            held = enumerate(table[: math.ceil(computed / manager.block_size)])
            physical = {index: block.block_id for index, block in held if not block.is_null}
            dropped = self._offloading.pool.save(plan, req_id, manager.number, blocks, physical, computed)
        if dropped is None:
            self.view.count(blocks, recomputed=1)
            return
        for loser in dropped:
            self._scheduler.tally.add(loser.policy, dropped=1)
        if request.num_in_flight_tokens and not recalls.steps:
            recalls.is_due = recalls.answered  # the look that is in flight leads to nothing
        plan.groups[manager.number].parked.add(req_id)
        self._scheduler.tally.add(blocks.policy, saved=1)

    def on_hit(self, request: Request, hit: Hit) -> Hit:
        blocks = self._manager.residents[request.request_id]
        if (saved := blocks.residence.saved) is None:
            return hit
        if not self._finds_room(request, blocks, saved):
            self._forget(blocks)
            return hit
        # Blocks of pure tokens are in the prefix cache as long as no request took their place.
        pure = hit.tokens if blocks.pure_tokens is None else min(hit.tokens, blocks.pure_tokens)
        cached = hit.blocks.blocks[self._manager.kv_cache_group_id][: pure // blocks.block_size]
        table = [self._manager.block_pool.null_block] * math.ceil(saved.computed_tokens / blocks.block_size)
        for index in saved.numbers:
            table[index] = cached[index] if index < len(cached) else FROM_HOST
        # At least one token is computed, for its logits.
        computed = min(saved.computed_tokens, request.num_tokens - 1)
        return Hit(self._scheduler.kv_cache_manager.create_kv_cache_blocks((table,)), computed, 0, False)

    def _finds_room(self, request: Request, blocks: RequestBlocks, saved: Saved) -> bool:
        """Return whether the pool will have room for a request's saved blocks and for those of its next steps.

        An empty pool has to have it; if no request runs, the pool as it is, beside sessions that wait for a turn.
        """
        manager = self._manager
        known = math.ceil(saved.computed_tokens / manager.block_size)
        most = blocks.most(math.ceil(request.num_tokens / manager.block_size), manager.in_flight, known)
        # One block is vLLM's null block.
        room = manager.block_pool.num_gpu_blocks - 1 if self._scheduler.running else self.view.free_blocks
        return len(saved.numbers) + max(most - known, 0) <= room

    def on_start(self, plan: EvictionPlan, req_id: str, blocks: Sequence[RequestBlocks]) -> bool:
        """Order workers to bring the blocks of a request back that goes on with the step being planned."""
        (its,), manager = blocks, self._manager
        if (saved := its.residence.saved) is not None:
            coming = saved.coming.values()
            self._offloading.pool.restore(plan, req_id, manager.number, its, saved)
            plan.use(coming)
            plan.groups[manager.number].restored.add(req_id)
            self.view.count(its, restored=1)
        return False

    def _forget(self, blocks: RequestBlocks) -> None:
        """Have a preempted request computed again after all."""
        self._offloading.release(blocks)
        blocks.restart()
        self.view.count(blocks, recomputed=1)

    def before_turn(self, session: Request) -> None:
        # A turn may end with a token that was in flight when the session was preempted. vLLM starts it over.
        blocks = self._manager.residents[session.request_id]
        if blocks.residence.saved is not None:
            self._forget(blocks)

    def on_reset(self) -> None:
        # Weights may have changed.
        for blocks in self._manager.residents.values():
            if blocks.residence.saved is not None:
                self._forget(blocks)
