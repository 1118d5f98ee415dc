"""Cuts prefix hits to the length that the pool can hold, with holes only in KV groups that may have them."""

import bisect
import math
from typing import Any, NamedTuple

from vllm.v1.request import Request

from .view import EngineView


class Hit(NamedTuple):
    """A prefix hit, as vLLM's `_get_local_prefix_cache_hit` returns it.

    Attributes:
        blocks: vLLM's `KVCacheBlocks`, of all KV groups.
        tokens: length of the hit.
        boundary, diverged: vLLM's own.
    """

    blocks: Any
    tokens: int
    boundary: int
    diverged: bool


class Hits:
    """Cuts the hits of one scheduler.

    vLLM plans its pool by the bounds of policies. A prefix that other requests left in the cache may be longer than the
    pool, and a request that needs it whole would wait for ever.

    Args:
        scheduler: an `EvictionMixin`.
    """

    def __init__(self, scheduler: EngineView) -> None:
        self._scheduler, self._cache = scheduler, scheduler.kv_cache_manager
        self._managers, self.room = scheduler.kv_managers, scheduler.room

    def cut(self, request: Request, hit: Hit) -> Hit:
        """Return the hit of a request, cut so that the pool can hold it beside the first chunk."""
        most = self._scheduler.mechanisms.passed("limit_hit", self._longest_hit(request), request)
        blocks = self._managers[0].residents[request.request_id]
        limited = blocks.limits is not None
        # A request that starts with pure tokens is a shadow: it has to compute the tokens after these.
        if not blocks.started and blocks.pure_tokens is not None:
            most, limited = blocks.pure_tokens, True
        alone = len(self._managers) + len(self.room.others) == 1
        if alone and hit.tokens > most and limited:
            return hit._replace(blocks=self._cache.truncate_computed_blocks(hit.blocks, most), tokens=most)
        return hit if alone or not hit.tokens else self._jointly(request, hit, most, limited)

    def _jointly(self, request: Request, hit: Hit, most: int, limited: bool) -> Hit:
        """Return a hit in several KV groups, cut to what the pool can hold, with holes only where they may be."""
        groups, tokens = self._scheduler.blocks_of(request.request_id), hit.tokens
        found, room = list(hit.blocks.blocks), tokens
        if limited and tokens > most:
            room = most  # of a shorter prefix, streaming heads and sliding windows need other blocks
        while True:
            # Heads that keep everything need every block of the prefix.
            parts = [found[manager.kv_cache_group_id] for manager in self._managers]
            holes = [next((i for i, block in enumerate(part) if block.is_null), None) for part in parts]
            ends = [end for end, blocks in zip(holes, groups) if end is not None and blocks.limits is None]
            room = min([room, *(end * groups[0].block_size for end in ends)])
            if room == tokens:
                break
            cached, tokens, _ = self._cache.coordinator.find_longest_cache_hit(request.block_hashes, room)
            found, room = list(cached), tokens
        if tokens > most:
            for manager, blocks in zip(self._managers, groups):
                if blocks.limits:
                    group = manager.kv_cache_group_id
                    found[group] = manager.without_middle(found[group])
        return hit._replace(blocks=self._cache.create_kv_cache_blocks(tuple(found)), tokens=tokens)

    def _longest_hit(self, request: Request) -> int:
        """Return the tokens of a cached prefix that an otherwise empty pool can hold beside the other blocks."""
        longest, block_size = self.longest_table(request), self._managers[0].block_size
        pool, whole = self.room.left(longest, hit=True), math.ceil(longest / block_size)
        groups = list(zip(self._managers, self._scheduler.blocks_of(request.request_id)))

        def most_held(hit: int) -> int:
            return sum(blocks.most(whole, manager.in_flight, hit) for manager, blocks in groups)

        return max(bisect.bisect_right(range(whole + 1), pool, key=most_held) - 1, 0) * block_size

    def longest_table(self, request: Request) -> int:
        """Return the tokens for which a request may have slots at most."""
        return self.room.slots(self.longest(request), self._scheduler.max_model_len)

    def longest(self, request: Request) -> int:
        """Return the tokens that a request may grow to; a session grows by turns."""
        most = self._scheduler.max_model_len
        return int(most if request.resumable else min(request.num_prompt_tokens + request.max_tokens, most))
