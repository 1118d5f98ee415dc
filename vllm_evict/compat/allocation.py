"""The KV cache manager: between an allocation that fails and what vLLM does then, preempt or let wait, is no hook."""

from collections.abc import Callable
from functools import wraps
from typing import Any


def before_giving_up(cache: Any, make_room: Callable[[Any, int], bool]) -> None:
    """Let `make_room` free blocks where the pool has too few, and allocate again if it did.

    Args:
        cache: vLLM's `KVCacheManager`, of one scheduler.
        make_room: (request, blocks that vLLM reserves for others) -> whether there is room now.
    """
    allocate = cache.allocate_slots
    if hasattr(allocate, "__wrapped__"):
        return

    @wraps(allocate)
    def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = allocate(request, *args, **kwargs)
        if blocks is None and make_room(request, kwargs.get("reserved_blocks", 0)):
            blocks = allocate(request, *args, **kwargs)
        return blocks

    cache.allocate_slots = allocate_slots
