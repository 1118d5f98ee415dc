"""Seams of what vLLM calls for each request of each step: they are there only where a mechanism needs them.

vLLM has no hook between a failed allocation and the preemption or wait that follows. It publishes the blocks that a
step fills where it allocates their slots. And it counts the published tokens of a request by the blocks that the
request still holds. No configuration can name the class of its `KVCacheManager`, or of its `BlockPool`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ...config import KVPolicyConfig
from ...core.blocks import RequestBlocks
from ...core.mechanisms import Mechanism
from ...core.mechanisms.base import decodes, verified
from ...core.plan import EvictionPlan
from ..seams import replaces
from .managers import FROM_HOST
from .view import EngineView


class MakesRoom(Protocol):
    """Makes room in the pool, where vLLM's finds too little for a request."""

    def __call__(self, request: Any, *, wanted: int, reserved: int, hit: Any, watermark: bool) -> bool:
        """Return whether there is room now.

        Args:
            request: whose blocks vLLM allocates.
            wanted: blocks that it wants.
            reserved: blocks that vLLM reserves for others.
            hit: for each KV group, the cached blocks that the request is about to take.
            watermark: whether vLLM keeps its watermark free.
        """
        ...


class NotesSteps(Protocol):
    """Notes a request's step before vLLM publishes the blocks that the step fills.

    Attributes:
        residents: request -> its blocks. Steps are noted while their `pure_tokens` is None.
    """

    residents: Mapping[str, RequestBlocks]

    def note(self, request: Any, tokens: int, allocation: Mapping[str, Any]) -> None:
        """Note a step that computes so many tokens; `allocation` has the keyword arguments of `allocate_slots`."""
        ...

    def withdraw(self, request: Any) -> None:
        """Take back the note of a step that got no blocks."""
        ...


class Slots:
    """Has what mechanisms do where vLLM allocates blocks for a request's step. A mechanism adds its part as it is made.

    Args:
        cache: vLLM's `KVCacheManager`, of one scheduler.

    Attributes:
        notes: notes the step before its blocks are published; None: no mechanism does.
        make_room: called when the pool has too few blocks. vLLM allocates again if it made room.
        count: vLLM's own count of the blocks that a request wants.
        wanted: what it returned last.
        published: each called as soon as others can hit tokens of a request in any KV group, with the request, the
            leading tokens that others can hit, and the blocks that have become hits of these, while vLLM plans the step
            that computes the last of the tokens.
    """

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.notes: NotesSteps | None = None
        self.make_room: MakesRoom | None = None
        self.count: Callable[..., int] = cache.coordinator.get_num_blocks_to_allocate
        self.wanted = 0
        self.published: list[Callable[[Any, int, Sequence[Any]], None]] = []

    def replace(self) -> None:
        """Put the seams that mechanisms need into vLLM's manager. Called once, when all are made."""
        pool = self.cache.block_pool
        publish_whole.on(pool, self.published)
        publish_part.on(pool, self.published)
        if self.make_room is not None:
            note_wanted.on(self.cache.coordinator, self)
        if self.notes is not None or self.make_room is not None:
            allocate_slots.on(self.cache, self)

    def blocks_of_chunk(self, request: Any, tokens: int, hit: Any, new_computed: int = 0, lookahead: int = 0) -> int:
        """Return the blocks that a request lacks for a chunk of so many tokens."""
        computed = request.num_computed_tokens + new_computed
        end = computed + tokens
        slots = min(end + lookahead, self.cache.max_model_len)
        return int(self.count(request.request_id, slots, hit, 0, computed, computed, end))


@replaces(
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.get_num_blocks_to_allocate",
    why="tells how many blocks a request lacked in an allocation that failed",
    remove_when="a failed allocation says how many blocks it lacked",
)
def note_wanted(count: Callable[..., int], slots: Slots) -> Callable[..., int]:
    def get_num_blocks_to_allocate(*args: Any, **kwargs: Any) -> int:
        slots.wanted = wanted = count(*args, **kwargs)
        return wanted

    return get_num_blocks_to_allocate


@replaces(
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
    why="`when: pressure` makes room before vLLM preempts; a step that reads less is noted before it is published",
    remove_when="vLLM has hooks before an allocation, and between a failed one and the preemption that follows",
)
def allocate_slots(allocate: Callable[..., Any], slots: Slots) -> Callable[..., Any]:
    notes, make_room, empty = slots.notes, slots.make_room, slots.cache.empty_kv_cache_blocks

    def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        while True:
            noting = notes
            if noting is not None and noting.residents[request.request_id].state.pure_tokens is not None:
                noting = None  # nothing can end its purity again
            if noting is not None:
                noting.note(request, num_new_tokens, kwargs)
            if (blocks := allocate(request, num_new_tokens, *args, **kwargs)) is not None:
                return blocks
            if noting is not None:
                noting.withdraw(request)
            if make_room is None:
                return None
            hit = (kwargs.get("new_computed_blocks") or empty).blocks
            wanted = slots.wanted
            # vLLM checks room for the whole prompt first, by its cap for sliding windows, then for the next chunk. Each
            # check may fail alone.
            if kwargs.get("full_sequence_must_fit", False):
                ahead = kwargs.get("num_new_computed_tokens", 0), kwargs.get("num_lookahead_tokens", 0)
                wanted = max(wanted, slots.blocks_of_chunk(request, num_new_tokens, hit, *ahead))
            reserved, watermark = kwargs.get("reserved_blocks", 0), kwargs.get("has_scheduled_reqs", True)
            if not make_room(request, wanted=wanted, reserved=reserved, hit=hit, watermark=watermark):
                return None

    return allocate_slots


@replaces(
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.allocate_new_computed_blocks",
    why="a request that starts gets new blocks of the pool in the place of each `FROM_HOST` among its cached blocks",
    remove_when="cached blocks of vLLM may lie outside of its pool",
)
def take_from_host(allocate: Callable[..., None], pool: Any) -> Callable[..., None]:
    # Its other cached blocks are held meanwhile, in all KV groups: the next free blocks may be among them.
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

    return allocate_new_computed_blocks


class Reads(Mechanism):
    """Notes each step of a request before the blocks that it fills are published (`RequestBlocks.note_step`).

    A request that is admitted with the same step could hit them.

    Args:
        scheduler: an `EvictionMixin`.

    Attributes:
        residents: the scheduler's.
    """

    def __init__(self, scheduler: EngineView) -> None:
        super().__init__(scheduler)
        self._scheduler, self.residents = scheduler, scheduler.residents
        scheduler.slots.notes = self

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return config.sparse_heads or config.reaches

    def note(self, request: Any, tokens: int, allocation: Mapping[str, Any]) -> None:
        hit = allocation.get("num_new_computed_tokens", 0) + allocation.get("num_external_computed_tokens", 0)
        first = request.num_computed_tokens + hit
        for blocks in self._scheduler.blocks_of(request.request_id):
            blocks.note_step(first, verified(request, first, tokens), decodes(request, first))

    def withdraw(self, request: Any) -> None:
        self._scheduler.blocks_of(request.request_id)[0].pure_tokens = None

    def on_scheduled(self, plan: EvictionPlan, tokens: Mapping[str, int]) -> None:
        for req_id in [req_id for req_id, count in tokens.items() if count == 1]:
            request = self.view.requests[req_id]
            if not decodes(request, request.num_computed_tokens - 1):  # vLLM counts the step's tokens already
                plan.prompts.add(req_id)


@replaces(
    "vllm.v1.core.block_pool:BlockPool.cache_full_blocks",
    why="tells which blocks others can hit, as soon as they can: of all KV groups, states too",
    remove_when="vLLM tells its scheduler what it publishes",
)
def publish_whole(publish: Callable[..., None], listeners: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def cache_full_blocks(
        request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int, block_size: int, *args: Any, **kw: Any
    ) -> None:
        publish(request, blocks, num_cached_blocks, num_full_blocks, block_size, *args, **kw)
        for published in listeners:
            published(request, num_full_blocks * block_size, blocks[num_cached_blocks:num_full_blocks])

    return cache_full_blocks


@replaces(
    "vllm.v1.core.block_pool:BlockPool.cache_partial_block",
    why="tells that others can hit the end of a prompt, which fills a block in part",
    remove_when="vLLM tells its scheduler what it publishes",
)
def publish_part(publish: Callable[..., Any], listeners: Sequence[Callable[..., None]]) -> Callable[..., Any]:
    def cache_partial_block(request: Any, block: Any, num_tokens: int, *args: Any, **kw: Any) -> Any:
        for published in listeners:
            published(request, num_tokens, [block])
        return publish(request, block, num_tokens, *args, **kw)

    return cache_partial_block


@replaces(
    "vllm.v1.core.sched.scheduler:Scheduler._reserve_prefill_lookahead",
    why="mechanisms bound the tokens that a request computes in a step (`Mechanism.limit_tokens`)",
    remove_when="vLLM has a hook that bounds a request's tokens",
)
def limit_tokens(reserve: Callable[..., int], limits: Sequence[Callable[[Any, int, int], int]]) -> Callable[..., int]:
    def _reserve_prefill_lookahead(request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        tokens: int = reserve(request, num_computed_tokens, num_new_tokens)
        for limit in limits:
            tokens = limit(request, num_computed_tokens, tokens)
        return tokens

    return _reserve_prefill_lookahead


@replaces(
    "vllm.v1.core.kv_cache_manager:KVCacheManager.estimate_cached_tokens",
    why="vLLM reports a request's published tokens as written to the prefix cache, and counts the blocks that are left",
    remove_when="vLLM counts tokens as it publishes them",
)
def count_published(estimate: Callable[[Any], int], published: Callable[[Any], int | None]) -> Callable[[Any], int]:
    # `published`: request -> tokens; None where vLLM's own count is right.
    def estimate_cached_tokens(request: Any) -> int:
        tokens = published(request)
        return estimate(request) if tokens is None else tokens

    return estimate_cached_tokens
