"""Prefix hits of requests: as long as the pool can hold them, with holes only where a KV group may have some."""

import bisect
import math
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request

if TYPE_CHECKING:
    from .managers import EvictableManager, SlidingManager


class HitsMixin:
    """The part of the scheduler that cuts hits of the prefix cache."""

    kv_managers: "list[EvictableManager]"
    sliding_managers: "list[SlidingManager]"

    def _get_local_prefix_cache_hit(self, request: Request, *args: Any, **kwargs: Any) -> tuple[Any, int, int, bool]:
        """The request's hit, as far as the pool can hold it beside the first chunk.

        vLLM plans its pool for requests that hold what their policy lets them; a prefix that other requests left in the
        cache may be longer, and a request that waits for more blocks than there are would wait for ever.
        """
        blocks, tokens, boundary, diverged = super()._get_local_prefix_cache_hit(request, *args, **kwargs)
        most, resident = self._longest_hit(request), self.residents[request.request_id]
        shadow = self.reconstructions is not None and self.reconstructions.is_shadow(request.request_id)
        if shadow:
            most = resident.pure_tokens  # what it repeats has to be computed
        if resident.config.context is not None:
            # The first decision comes once the steps in flight are done, and none of their queries may look too far.
            reach = max(resident.config.context - self.vllm_config.max_in_flight_tokens, 0)
            most = min(most, reach // resident.block_size * resident.block_size)
        alone = len(self.kv_managers) + len(self.sliding_managers) == 1
        if alone and tokens > most and (resident.limits or shadow):
            blocks, tokens = self.kv_cache_manager.truncate_computed_blocks(blocks, most), most
        if not alone and tokens:
            blocks, tokens = self._joint_hit(request, blocks, tokens, most)
        return blocks, tokens, boundary, diverged

    def _joint_hit(self, request: Request, blocks: Any, tokens: int, most: int) -> tuple[Any, int]:
        """A hit in several KV groups: as long as the pool can hold it, and with holes only where they are allowed."""
        residents = self._residents_of(request.request_id)
        find = self.kv_cache_manager.coordinator.find_longest_cache_hit
        found, room = list(blocks.blocks), tokens
        if residents[0].limits and tokens > most:
            room = most  # what streaming heads and sliding windows need of a shorter prefix are other blocks
        while True:
            # Heads that keep everything need everything.
            parts = [found[manager.kv_cache_group_id] for manager in self.kv_managers]
            ends = [next((i for i, block in enumerate(part) if block.is_null), None) for part in parts]
            ends = [end for end, resident in zip(ends, residents) if end is not None and resident.limits is None]
            room = min([room, *(end * self.kv_managers[0].block_size for end in ends)])
            if room == tokens:
                break
            hit, tokens, _ = find(request.block_hashes, room)
            found, room = list(hit), tokens
        if tokens > most:
            for manager, resident in zip(self.kv_managers, residents):
                if resident.limits:
                    group = manager.kv_cache_group_id
                    found[group] = manager.without_middle(found[group])
        return self.kv_cache_manager.create_kv_cache_blocks(tuple(found)), tokens

    def _longest_hit(self, request: Request) -> int:
        """Tokens of a cached prefix that an otherwise empty pool has room for beside the request's other blocks."""
        longest = self.max_model_len if request.resumable else self._longest(request)
        block_size, residents = self.kv_managers[0].block_size, self._residents_of(request.request_id)
        # One block is vLLM's null block.
        pool = self.kv_cache_manager.block_pool.num_gpu_blocks - 1
        pool -= sum(manager.most_blocks(longest) for manager in self.sliding_managers)
        whole = math.ceil(longest / block_size)

        def most_held(hit: int) -> int:
            """Blocks that the request holds at most, in all KV groups, if it takes `hit` blocks in each."""
            return sum(
                min(max(resident.limits.bound, hit) + manager.in_flight, whole) if resident.evictable else whole
                for manager, resident in zip(self.kv_managers, residents)
            )

        return max(bisect.bisect_right(range(whole + 1), pool, key=most_held) - 1, 0) * block_size

    def _longest(self, request: Request) -> int:
        """Tokens that a request may grow to."""
        return min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
