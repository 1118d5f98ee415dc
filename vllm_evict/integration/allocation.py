"""The KV cache manager: no class of ours can be named in its place.

Between an allocation that fails and what vLLM does then, preempt or let wait, is no hook; and it tells what a request
has published from the blocks that it holds.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any


def before_giving_up(cache: Any, make_room: Callable[..., bool]) -> None:
    """Let `make_room` free blocks where the pool has too few, and allocate again if it did.

    Args:
        cache: vLLM's `KVCacheManager`, of one scheduler.
        make_room: called with the request, the blocks that its next chunk takes (0: those that managers were asked for
            last), the blocks that vLLM reserves for others, the cached blocks that the request is about to take, and
            whether vLLM keeps its watermark free; returns whether there is room now.
    """
    allocate = cache.allocate_slots
    if hasattr(allocate, "__wrapped__"):
        return

    def chunk(request: Any, tokens: int, hit: Any, new_computed: int) -> int:
        computed = request.num_computed_tokens + new_computed
        end = computed + tokens
        return cache.coordinator.get_num_blocks_to_allocate(request.request_id, end, hit, 0, computed, computed, end)

    @wraps(allocate)
    def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        hit = kwargs.get("new_computed_blocks") or cache.empty_kv_cache_blocks
        # vLLM looks at the whole prompt first, by its cap for sliding windows, and then at the next chunk. Room for the
        # one may not be room for the other.
        both = kwargs.get("full_sequence_must_fit", False)
        while (blocks := allocate(request, num_new_tokens, *args, **kwargs)) is None and make_room(
            request,
            chunk=lambda: (
                chunk(request, num_new_tokens, hit.blocks, kwargs.get("num_new_computed_tokens", 0)) if both else 0
            ),
            reserved=kwargs.get("reserved_blocks", 0),
            hit=hit.blocks,
            watermark=kwargs.get("has_scheduled_reqs", True),
        ):
            pass
        return blocks

    cache.allocate_slots = allocate_slots


def count_published(cache: Any, published: Callable[[Any], int | None]) -> None:
    """Let `published` say how many tokens of a request are in the prefix cache, which vLLM reports as written to it.

    Args:
        cache: vLLM's `KVCacheManager`, of one scheduler.
        published: request -> tokens; None: vLLM's own count is right.
    """
    estimate = cache.estimate_cached_tokens

    @wraps(estimate)
    def estimate_cached_tokens(request: Any) -> int:
        tokens = published(request)
        return estimate(request) if tokens is None else tokens

    cache.estimate_cached_tokens = estimate_cached_tokens
