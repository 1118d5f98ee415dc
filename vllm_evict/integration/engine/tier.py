"""The part of the scheduler about blocks on the host: evicted blocks move there and back."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from ...config import KVPolicyConfig
from ...core.actions import Action, Evict, Swap
from ...core.blocks import RequestBlocks
from ...core.host import HostPool
from ...core.mechanisms import Again
from ...core.plan import EvictionPlan, HostTrouble
from ..start.attending import kv_heads
from .spec import host_blocks
from .tally import Tally

if TYPE_CHECKING:
    from .managers import EvictableManager

logger = init_logger("vllm.evict")


class TierMixin:
    """Needs the rest of `EvictionMixin`.

    Attributes:
        host_pool: None if evicted blocks are dropped.
        again: None if no prompt's last tokens are ever computed again.
    """

    kv_policy: KVPolicyConfig
    kv_managers: "list[EvictableManager]"
    tally: Tally
    host_pool: HostPool | None
    again: Again | None
    _plan: EvictionPlan
    _poison: bool
    #: Whether evicted blocks are watched until the pool hands them out.
    _lingers = False

    def _host_pool(self) -> HostPool | None:
        """Host blocks for what requests lose."""
        if self.kv_policy.evict != "host":
            return None
        if self.kv_policy.recall == "none" and self.kv_policy.preempt != "host":
            logger.warning(
                "evict: 'host' got recall: 'none'; expected 'quest'; evicted blocks are copied to the host and never "
                "come back; set recall: quest or evict: drop"
            )
        # vLLM's scheduler knows the spec of one layer, and layers may differ in KV heads.
        spec = self.kv_cache_config.kv_cache_groups[self.kv_managers[0].kv_cache_group_id].kv_cache_spec
        ranks = self.vllm_config.parallel_config.tensor_parallel_size
        heads = sum(max(of_layer // ranks, 1) for of_layer in kv_heads(self.vllm_config.model_config))
        size = spec.page_size_bytes // spec.num_kv_heads * heads
        #: Evicted block that the pool has not handed out since -> whose it was, and the logical block. No more entries
        #: than the pool has blocks.
        self._lingering: dict[int, tuple[RequestBlocks, int]] = {}
        self._host_block_bytes = size * ranks
        return HostPool(host_blocks(self.vllm_config, self.kv_policy, size), self._poison)

    def _may_linger(self) -> bool:
        """Whether evicted blocks are the last that the pool hands out.

        With a prefix cache they are the first: cached blocks, which have no copy on the host, are worth more. vLLM
        0.29 does not tell what the pool hands out.
        """
        pool = self.kv_cache_manager.block_pool
        watched = hasattr(pool, "unpin_blocks") and not self.defer_block_free  # vLLM frees later, and watches nothing
        return self.kv_policy.recall != "none" and not pool.enable_caching and watched

    def _reused(self, block: KVCacheBlock) -> None:
        self._lingering.pop(block.block_id, None)

    def _still_there(self, resident: RequestBlocks, logical: int) -> KVCacheBlock | None:
        """The block of the pool that still holds what it held when the request lost it; None if there is none."""
        number, block_hash = resident.left[logical]
        block = self.kv_cache_manager.block_pool.blocks[number]
        if block_hash is None:
            whose, which = self._lingering.get(number, (None, -1))
            return block if whose is resident and which == logical else None
        return block if block.block_hash == block_hash else None

    def _spill(self, action: Action, resident: RequestBlocks, leaving: list[int]) -> None:
        """Keep the content of blocks that an action evicts, `leaving` of the device."""
        pool, before = self.host_pool, resident.state.spilled_blocks
        coming = [resident.host[block] for block in action.returns.tolist()] if isinstance(action, Swap) else ()
        lost = action.holes.tolist()
        for loser in pool.spill(self._plan, action.req_id, action.group, resident, lost, leaving, coming):
            self.tally.host(loser.policy, dropped=1)
        self.tally.host(resident.policy, spilled=resident.state.spilled_blocks - before)
        for index, number in zip(lost, leaving):
            if index not in resident.host:
                continue
            block_hash = self.kv_cache_manager.block_pool.blocks[number].block_hash
            resident.left[index] = number, block_hash
            if self._lingers:
                self._lingering[number] = resident, index

    @property
    def spare_blocks(self) -> int:
        cache, in_flight = self.kv_cache_manager, self.kv_managers[0].in_flight + len(self.running)
        return max(self.free_blocks - cache.watermark_blocks - in_flight, 0)

    def _afforded(self, action: Swap) -> Swap:
        """The part of a swap that the pool has room for.

        No request is preempted for a swap: what comes back takes blocks that the swap frees, and blocks that the
        requests which run do not need for what they may have in flight. No block goes for one that can't come.
        """
        manager, cache = self.kv_managers[action.group], self.kv_cache_manager
        spare = self.spare_blocks
        returns, holes = len(action.returns), []
        come = min(max(returns - len(action.holes), 0), spare)
        spare -= come
        for block, physical in zip(action.holes.tolist(), manager.blocks_at(action.req_id, action.holes)):
            shared = cache.block_pool.blocks[physical].ref_cnt > 1
            if come == returns:
                break
            if shared and not spare:  # other requests keep it
                continue
            holes.append(block)
            spare, come = spare - shared, come + 1
        return replace(action, holes=np.array(sorted(holes), np.int64), returns=action.returns[:come])

    def _bring_back(self, action: Swap, resident: RequestBlocks) -> None:
        """Do the second half of a swap."""
        manager, blocks = self.kv_managers[action.group], action.returns.tolist()
        found = {logical: self._still_there(resident, logical) for logical in blocks}
        there = {logical: block for logical, block in found.items() if block is not None}
        for logical in blocks:
            del resident.left[logical]
        back = manager.bring_back(action.req_id, blocks, there)
        resident.recall(np.sort(action.returns), action.again)
        if action.again:
            manager.note(action.req_id)  # it may hold more than its trigger, and its table does not grow
        self._plan.groups[action.group].fill_holes(action.req_id, back)
        # A published block is never poisoned.
        intact = [logical for logical, block in there.items() if block.block_hash is not None or not self._poison]
        self.host_pool.fetch(self._plan, action.req_id, action.group, resident, blocks, list(back.values()), intact)
        self._plan.poison = [block for block in self._plan.poison if block not in back.values()]
        resident.state.still_there_blocks += len(there)
        self.tally.host(resident.policy, recalled=len(blocks), still_there=len(there))

    def _lose_host(self, trouble: HostTrouble) -> None:
        """Go on without the host, where blocks could not be written or read: all host blocks are dropped.

        Blocks that did not come back become holes; workers take them for holes already.
        """
        pool = self.host_pool
        if pool.blocks:
            logger.warning(
                "host blocks can't be written or read (%s); expected a disk that works; from now on evicted blocks are "
                "dropped, and requests go on without them; mend host_path, and start the server again",
                trouble.why,
            )
        for loser in pool.close():
            self.tally.host(loser.policy, dropped=1)
        self.tally.host(self.kv_policy.name, failed=1)
        manager = self.kv_managers[0]
        for req_id, block in trouble.missing:
            resident = manager.residents.get(req_id)
            if resident is not None and block in resident.resident:  # a session may be between two turns
                self.apply(Evict(req_id, 0, np.array([block], np.int64)))

    def rewind(self, request: Request, computed_tokens: int | None) -> None:
        """Have the tokens of a request from so many on computed again with the next step; None undoes it.

        Nothing of the request is in flight, and no token was sampled after what is computed again.
        """
        req_id = request.request_id
        if computed_tokens is not None:
            self._rewound[req_id] = request.num_computed_tokens
            request.num_computed_tokens = self._plan.rewound[req_id] = computed_tokens
            for manager in self.kv_managers:
                manager.note(req_id)  # its table does not grow in the step to come
            self.tally.host(self.residents[req_id].policy, again=1)
            self.residents[req_id].state.asked_again += 1
        elif (before := self._rewound.pop(req_id, None)) is not None:
            request.num_computed_tokens = before
            del self._plan.rewound[req_id]
            self.tally.host(self.residents[req_id].policy, again=-1)
            self.residents[req_id].state.asked_again -= 1

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        tokens = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        return self.again.shorten(request, num_computed_tokens, tokens)
