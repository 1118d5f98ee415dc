"""Evicted blocks move to the host and back."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.outputs import ModelRunnerOutput

from ...core.actions import Action, Applied, Evict, Unload
from ...core.blocks import RequestBlocks
from ...core.mechanisms import Offload
from ...core.offload import OffloadPool
from ...core.plan import TROUBLE, Trouble
from ...core.residence import Where
from ...environment import poison_mode
from ..start.attending import kv_heads
from .spec import host_blocks
from .view import EngineView

logger = init_logger("vllm.evict")


class Offloading(Offload):
    """Copies what a request loses to the host, and brings blocks back that an action names.

    Args:
        scheduler: an `EvictionMixin`, with one KV group that may have holes.
    """

    def __init__(self, scheduler: EngineView) -> None:
        super().__init__(scheduler)
        config, vllm_config = scheduler.kv_policy, scheduler.vllm_config
        self._scheduler, self._cache = scheduler, scheduler.kv_cache_manager
        (self._manager,) = scheduler.kv_managers
        if config.recall == "none" and config.preempt != "host" and not config.reaches:
            logger.warning(
                "evict: 'host' got recall: 'none'; expected 'quest'; evicted blocks are copied to the host and never "
                "come back; set recall: quest or evict: drop"
            )
        # vLLM's scheduler knows the spec of one layer, and layers may differ in KV heads.
        spec = scheduler.kv_cache_config.kv_cache_groups[self._manager.kv_cache_group_id].kv_cache_spec
        ranks = vllm_config.parallel_config.tensor_parallel_size
        heads = sum(max(of_layer // ranks, 1) for of_layer in kv_heads(vllm_config.model_config))
        size = spec.page_size_bytes // spec.num_kv_heads * heads
        self.block_bytes, self._poison = size * ranks, poison_mode()
        self.pool = OffloadPool(host_blocks(vllm_config, config, size), self._poison)
        #: Evicted block that the pool has not handed out since -> whose it was, and the logical block. No more entries
        #: than the pool has blocks.
        self._lingering: dict[int, tuple[RequestBlocks, int]] = {}
        # Evicted blocks are the last that the pool hands out. With a prefix cache they are the first: cached blocks,
        # which have no copy on the host, are worth more. vLLM 0.29 does not tell what the pool hands out, and where it
        # frees later it watches nothing.
        pool = self._cache.block_pool
        watches = hasattr(pool, "unpin_blocks") and not scheduler.defer_block_free
        self._lingers = config.recall != "none" and not pool.enable_caching and watches
        if self._lingers:
            scheduler.frees_with(lambda blocks: pool.unpin_blocks(reversed(blocks), self._reused))

    @property
    def described(self) -> str:
        saves = self._scheduler.kv_policy.preempt == "host"
        return f"{self.pool.blocks} host blocks for what is evicted" + " and for preempted requests" * saves

    def _reused(self, block: KVCacheBlock) -> None:
        self._lingering.pop(block.block_id, None)

    def still_there(self, blocks: RequestBlocks, logical: int) -> KVCacheBlock | None:
        """Return the block of the pool that still holds what the request lost; None if there is none."""
        offloaded = blocks.residence.host[logical]
        block = self._cache.block_pool.blocks[offloaded.physical]
        if offloaded.block_hash is None:
            whose, which = self._lingering.get(offloaded.physical, (None, -1))
            return block if whose is blocks and which == logical else None
        return block if block.block_hash == offloaded.block_hash else None

    def before_apply(self, action: Action) -> Action | None:
        """Return the part of an action that the pool has room for.

        No request is preempted for what comes back: it takes blocks that the action frees, and blocks that the requests
        which run do not need for what they may have in flight. No block goes for one that can't come.
        """
        if isinstance(action, Unload) and len(action.holes) + len(action.writes) > self.pool.free:
            return None  # nothing is lost: the request keeps its blocks
        if not len(action.returns):
            return action
        returns, holes, spare = len(action.returns), [], self.view.spare_blocks
        come = min(max(returns - len(action.holes), 0), spare)
        spare -= come
        for block, physical in zip(action.holes.tolist(), self._manager.blocks_at(action.req_id, action.holes)):
            shared = self._cache.block_pool.blocks[physical].ref_cnt > 1
            if come == returns:
                break
            if shared and not spare:  # other requests keep it
                continue
            holes.append(block)
            spare, come = spare - shared, come + 1
        return replace(action, holes=np.array(sorted(holes), np.int64), returns=action.returns[:come]) if come else None

    def on_applied(self, applied: Applied) -> None:
        action, returns = applied.action, applied.action.returns.tolist()
        if len(action.holes):
            self._spill(applied, returns)
        if returns:
            self._bring_back(action, applied.blocks, returns)

    def _spill(self, applied: Applied, returns: Sequence[int]) -> None:
        """Keep the content of blocks that an action evicts."""
        action, blocks = applied.action, applied.blocks
        before, residence, lost = blocks.state.counts["spilled"], blocks.residence, action.holes.tolist()
        if isinstance(action, Unload):
            lost = action.writes.tolist() + lost
        leaving, coming = [applied.before[block] for block in lost], [residence.host[block].number for block in returns]
        plan = self.view.next_plan
        for loser in self.pool.spill(plan, action.req_id, action.group, blocks, lost, leaving, coming):
            self._scheduler.tally.add(loser.policy, dropped=1)
        self._scheduler.tally.add(blocks.policy, spilled=blocks.state.counts["spilled"] - before)
        for index, number in zip(lost, leaving):
            if (offloaded := residence.host.get(index)) is None:
                continue
            block_hash = self._cache.block_pool.blocks[number].block_hash
            residence.host[index] = offloaded._replace(physical=number, block_hash=block_hash)
            if self._lingers:
                self._lingering[number] = blocks, index

    def _bring_back(self, action: Action, blocks: RequestBlocks, returns: Sequence[int]) -> None:
        """Give a request its blocks of the host again."""
        found = {logical: self.still_there(blocks, logical) for logical in returns}
        there = {logical: block for logical, block in found.items() if block is not None}
        back = self._manager.bring_back(action.req_id, returns, there)
        plan = self.view.next_plan
        # A published block is never poisoned.
        intact = [logical for logical, block in there.items() if block.block_hash is not None or not self._poison]
        self.pool.fetch(plan, action.req_id, action.group, blocks, returns, list(back.values()), intact)
        plan.use(back.values())
        self._scheduler.tally.add(blocks.policy, recalled=len(returns))
        self.view.count(blocks, still_there=len(there))

    def before_stats(self) -> None:
        self._scheduler.tally.hold(self._scheduler.kv_policy.name, self.pool.used, self.block_bytes)

    def on_output(self, output: ModelRunnerOutput) -> None:
        if (trouble := getattr(output, TROUBLE, None)) is not None:
            self._lose(trouble)

    def _lose(self, trouble: Trouble) -> None:
        """Go on without the host, where blocks could not be written or read: all host blocks are dropped.

        Blocks that did not come back become holes; workers take them for holes already.
        """
        if self.pool.blocks:
            logger.warning(
                "host blocks can't be written or read (%s); expected a disk that works; from now on evicted blocks are "
                "dropped, and requests go on without them; mend host_path, and start the server again",
                trouble.why,
            )
        for loser in self.pool.close():
            self._scheduler.tally.add(loser.policy, dropped=1)
        self._scheduler.tally.add(self._scheduler.kv_policy.name, failed=1)
        for req_id, block in trouble.missing:
            blocks = self._manager.residents.get(req_id)
            if blocks is None or block >= blocks.residence.known:  # it has ended, or starts over
                continue
            if blocks.residence.where(block) is Where.POOL:  # a session may be between two turns
                self._scheduler.apply(Evict(req_id, 0, np.array([block], np.int64)))
