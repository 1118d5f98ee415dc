"""Patches of what vLLM calls for each request of each step: they are there only where a mechanism needs them.

vLLM has no hook between a failed allocation and the preemption or wait that follows. It publishes the blocks that a
step fills where it allocates their slots. And it counts the published tokens of a request by the blocks that the
request still holds. No configuration can name the class of its `KVCacheManager`, or of its `BlockPool`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from ...config import KVPolicyConfig
from ...core.mechanisms import Mechanism
from ...core.mechanisms.base import decodes, verified
from ...core.plan import EvictionPlan
from .managers import FROM_HOST
from .view import EngineView


def before_giving_up(cache: Any, make_room: Callable[..., bool]) -> None:
    """Call `make_room` when the pool has too few blocks, and allocate again if it made room.

    Args:
        cache: vLLM's `KVCacheManager`, of one scheduler.
        make_room: called with the request, the blocks that it wants, the blocks that vLLM reserves for others, the
            cached blocks that the request is about to take, and whether vLLM keeps its watermark free; returns whether
            there is room now.
    """
    allocate, count, wanted = cache.allocate_slots, cache.coordinator.get_num_blocks_to_allocate, 0

    @wraps(count)
    def get_num_blocks_to_allocate(*args: Any, **kwargs: Any) -> int:
        nonlocal wanted
        wanted = count(*args, **kwargs)
        return wanted

    def chunk(request: Any, tokens: int, hit: Any, new_computed: int, lookahead: int) -> int:
        computed = request.num_computed_tokens + new_computed
        end = computed + tokens
        slots = min(end + lookahead, cache.max_model_len)
        return int(count(request.request_id, slots, hit, 0, computed, computed, end))

    @wraps(allocate)
    def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        hit = kwargs.get("new_computed_blocks") or cache.empty_kv_cache_blocks
        # vLLM checks room for the whole prompt first, by its cap for sliding windows, then for the next chunk. Each
        # check may fail alone.
        both = kwargs.get("full_sequence_must_fit", False)
        ahead = kwargs.get("num_new_computed_tokens", 0), kwargs.get("num_lookahead_tokens", 0)
        while (blocks := allocate(request, num_new_tokens, *args, **kwargs)) is None and make_room(
            request,
            wanted=max(wanted, chunk(request, num_new_tokens, hit.blocks, *ahead) if both else 0),
            reserved=kwargs.get("reserved_blocks", 0),
            hit=hit.blocks,
            watermark=kwargs.get("has_scheduled_reqs", True),
        ):
            pass
        return blocks

    cache.allocate_slots = allocate_slots
    cache.coordinator.get_num_blocks_to_allocate = get_num_blocks_to_allocate


def take_from_host(cache: Any) -> None:
    """Give a request that starts new blocks of the pool in the place of each `FROM_HOST` among its cached blocks.

    Its other cached blocks are held meanwhile, in all KV groups: the next free blocks may be among them.

    Args:
        cache: vLLM's `KVCacheManager`, of one scheduler.
    """
    allocate, pool = cache.coordinator.allocate_new_computed_blocks, cache.block_pool

    @wraps(allocate)
    def allocate_new_computed_blocks(request_id: str, new_computed_blocks: Any, *args: Any, **kwargs: Any) -> None:
        hits = [block for blocks in new_computed_blocks for block in blocks if not block.is_null]
        if missing := sum(block is FROM_HOST for block in hits):
            held = [block for block in hits if block is not FROM_HOST]
            pool.touch(held)
            new = pool.get_new_blocks(missing)
            # vLLM takes all of them out of the free queue again.
            pool.free_blocks([*new, *reversed(held)])
            its = iter(new)
            new_computed_blocks = tuple(
                [next(its) if block is FROM_HOST else block for block in blocks] for blocks in new_computed_blocks
            )
        allocate(request_id, new_computed_blocks, *args, **kwargs)

    cache.coordinator.allocate_new_computed_blocks = allocate_new_computed_blocks


class Reads(Mechanism):
    """Notes each step of a request before the blocks that it fills are published (`RequestBlocks.note_step`).

    A request that is admitted with the same step could hit them.

    Args:
        scheduler: an `EvictionMixin`.
    """

    def __init__(self, scheduler: EngineView) -> None:
        super().__init__(scheduler)
        cache, residents = scheduler.kv_cache_manager, scheduler.residents
        allocate = cache.allocate_slots

        @wraps(allocate)
        def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
            if residents[request.request_id].state.pure_tokens is not None:  # nothing can end its purity again
                return allocate(request, num_new_tokens, *args, **kwargs)
            hit = kwargs.get("num_new_computed_tokens", 0) + kwargs.get("num_external_computed_tokens", 0)
            groups, first = scheduler.blocks_of(request.request_id), request.num_computed_tokens + hit
            for blocks in groups:
                blocks.note_step(first, verified(request, first, num_new_tokens), decodes(request, first))
            allocated = allocate(request, num_new_tokens, *args, **kwargs)
            if allocated is None:  # there is no such step
                groups[0].pure_tokens = None
            return allocated

        cache.allocate_slots = allocate_slots

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return config.sparse_heads or config.reaches

    def on_scheduled(self, plan: EvictionPlan, tokens: Mapping[str, int]) -> None:
        for req_id in [req_id for req_id, count in tokens.items() if count == 1]:
            request = self.view.requests[req_id]
            if not decodes(request, request.num_computed_tokens - 1):  # vLLM counts the step's tokens already
                plan.prompts.add(req_id)


def note_published(pool: Any, published: Callable[[Any, int, Sequence[Any]], None]) -> None:
    """Call `published` as soon as others can hit tokens of a request in any KV group.

    All that vLLM publishes of a request passes here: whole blocks, of groups whose blocks may differ in size, states,
    and the end of a prompt that fills a block in part.

    Args:
        pool: vLLM's `BlockPool`, of one scheduler.
        published: called with the request, the leading tokens that others can hit, and the blocks that have become
            hits of these, while vLLM plans the step that computes the last of the tokens.
    """
    whole, part = pool.cache_full_blocks, pool.cache_partial_block

    @wraps(whole)
    def cache_full_blocks(
        request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int, block_size: int, *args: Any, **kw: Any
    ) -> None:
        whole(request, blocks, num_cached_blocks, num_full_blocks, block_size, *args, **kw)
        published(request, num_full_blocks * block_size, blocks[num_cached_blocks:num_full_blocks])

    @wraps(part)
    def cache_partial_block(request: Any, block: Any, num_tokens: int, *args: Any, **kw: Any) -> Any:
        published(request, num_tokens, [block])
        return part(request, block, num_tokens, *args, **kw)

    pool.cache_full_blocks, pool.cache_partial_block = cache_full_blocks, cache_partial_block


def limit_tokens(scheduler: Any, limits: Sequence[Callable[[Any, int, int], int]]) -> None:
    """Have each of `limits` bound the tokens that a request computes in a step (see `Mechanism.limit_tokens`)."""
    if not limits:
        return
    reserve = scheduler._reserve_prefill_lookahead

    @wraps(reserve)
    def _reserve_prefill_lookahead(request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        tokens: int = reserve(request, num_computed_tokens, num_new_tokens)
        for limit in limits:
            tokens = limit(request, num_computed_tokens, tokens)
        return tokens

    scheduler._reserve_prefill_lookahead = _reserve_prefill_lookahead


def count_published(cache: Any, published: Callable[[Any], int | None]) -> None:
    """Count a request's published tokens by `published`; vLLM reports them as written to the prefix cache.

    Args:
        cache: vLLM's `KVCacheManager`, of one scheduler.
        published: request -> tokens; None where vLLM's own count is right.
    """
    estimate = cache.estimate_cached_tokens

    @wraps(estimate)
    def estimate_cached_tokens(request: Any) -> int:
        tokens = published(request)
        return estimate(request) if tokens is None else tokens

    cache.estimate_cached_tokens = estimate_cached_tokens
