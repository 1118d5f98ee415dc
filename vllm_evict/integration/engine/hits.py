"""Cuts prefix hits to the length that the pool can hold, with holes only in KV groups that may have them."""

import bisect
import math
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request

if TYPE_CHECKING:
    from .managers import EvictableManager, SlidingManager, StateManager


class HitsMixin:
    """The part of the scheduler that cuts hits of the prefix cache."""

    kv_managers: "list[EvictableManager]"
    other_managers: "list[SlidingManager | StateManager]"

    def _get_local_prefix_cache_hit(self, request: Request, *args: Any, **kwargs: Any) -> tuple[Any, int, int, bool]:
        """The request's hit, cut so that the pool can hold it beside the first chunk.

        vLLM plans its pool by the bounds of policies. A prefix that other requests left in the cache may be longer than
        the pool, and a request that needs it whole would wait for ever.
        """
        blocks, tokens, boundary, diverged = super()._get_local_prefix_cache_hit(request, *args, **kwargs)
        most, resident = self._longest_hit(request), self.residents[request.request_id]
        shadow = self.reconstructions is not None and self.reconstructions.is_shadow(request.request_id)
        if shadow:
            most = resident.pure_tokens  # the repeated tokens have to be computed
        if resident.config.context is not None:
            # The first decision follows the steps in flight, and no query of them may look back further than the
            # context.
            reach = max(resident.config.context - self.vllm_config.max_in_flight_tokens, 0)
            most = min(most, reach // resident.block_size * resident.block_size)
        alone = len(self.kv_managers) + len(self.other_managers) == 1
        if alone and tokens > most and (resident.limits or shadow):
            blocks, tokens = self.kv_cache_manager.truncate_computed_blocks(blocks, most), most
        if not alone and tokens:
            blocks, tokens = self._joint_hit(request, blocks, tokens, most)
        return blocks, tokens, boundary, diverged

    def _joint_hit(self, request: Request, blocks: Any, tokens: int, most: int) -> tuple[Any, int]:
        """A hit in several KV groups, cut to the length that the pool can hold, with holes only where allowed."""
        residents = self._residents_of(request.request_id)
        find = self.kv_cache_manager.coordinator.find_longest_cache_hit
        found, room = list(blocks.blocks), tokens
        if residents[0].limits and tokens > most:
            room = most  # of a shorter prefix, streaming heads and sliding windows need other blocks
        while True:
            # Heads that keep everything need every block of the prefix.
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
        longest = self._longest_table(request)
        block_size, residents = self.kv_managers[0].block_size, self._residents_of(request.request_id)
        pool, whole = self._room_for(longest), math.ceil(longest / block_size)

        def most_held(hit: int) -> int:
            """Blocks that the request holds at most, in all KV groups, if it takes `hit` blocks in each."""
            return sum(
                min(max(resident.limits.bound, hit) + manager.in_flight, whole) if resident.bounded else whole
                for manager, resident in zip(self.kv_managers, residents)
            )

        return max(bisect.bisect_right(range(whole + 1), pool, key=most_held) - 1, 0) * block_size

    def _room_for(self, longest: int) -> int:
        """Blocks of an otherwise empty pool for the KV groups with holes of a request of so many tokens."""
        # One block is vLLM's null block.
        pool = self.kv_cache_manager.block_pool.num_gpu_blocks - 1
        return pool - sum(manager.most_blocks(longest) for manager in self.other_managers)

    def _longest_table(self, request: Request) -> int:
        """Tokens for which a request may have slots at most."""
        longest = self.max_model_len if request.resumable else self._longest(request)
        # Drafts may go beyond max_tokens, and a drafter with layers beyond drafts.
        return min(longest + self.num_spec_tokens + self.num_lookahead_tokens, self.max_model_len)

    def _longest(self, request: Request) -> int:
        """Tokens that a request may grow to."""
        return min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
