"""Managers of a KV group's blocks: bound allocation by the policy, publish pure blocks only, free evicted blocks."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    MambaManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)
from vllm.v1.request import Request

from ...config import Beside
from ...core.blocks import RequestBlocks
from ..seams import become, replaces
from ..start import versions

#: In what vLLM takes for a hit of the prefix cache: a block that comes from the host, into one that is free.
FROM_HOST = KVCacheBlock(-1)


def hole_aware(manager: Any) -> Any:
    """Make a subclass of a manager of vLLM, for KV groups of requests that may have holes, in this group or another.

    It publishes pure blocks only. It is no mixin: with a second base it could not become the class of a manager that
    vLLM has made.
    """

    @replaces(
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager",
        "vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager",
        "vllm.v1.core.single_type_kv_cache_manager:ChunkedLocalAttentionManager",
        methods="cache_blocks",
        why="publishes pure blocks only; a manager that vLLM has made becomes one of this class",
        remove_when="specs of vLLM's own classes may have managers of plugins",
    )
    class HoleAware(manager):
        #: Blocks of all requests, in this group; in a group with holes if this one has none.
        residents: dict[str, RequestBlocks]
        #: Whether the group publishes whole blocks alone: no states, and no block that a prompt's end fills in part.
        whole_blocks = False

        def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
            # Blocks computed after the first eviction, or by a decode that reads less, saw a reduced context, so they
            # do not match their hash.
            req_id = request.request_id
            resident = self.residents.get(req_id)
            if resident is not None and (pure := resident.state.pure_tokens) is not None:
                num_tokens = min(num_tokens, pure)
            # vLLM asks for each request of each step, and few of them have filled a block.
            if not self.whole_blocks or num_tokens // self.block_size > self.num_cached_block.get(req_id, 0):
                super().cache_blocks(request, num_tokens, *args, **kwargs)

        def publish_end(self, request: Request) -> None:
            """Publish what a hit needs at the last pure block of a request, if vLLM has not done so."""

        def needed(self, request_id: str, tokens: int) -> list[int]:
            """Return the published blocks of a request that a hit of its first tokens needs, or of one block less.

            A prompt that is sent again computes its last token; beside a drafter's layers a hit drops its last block.
            """
            end = tokens // self.block_size
            first = self.get_num_skipped_tokens(end * self.block_size) // self.block_size - 1
            blocks = self.req_to_blocks.get(request_id, ())[max(first, 0) : end]
            return [block.block_id for block in blocks if block.block_hash is not None]

    return HoleAware


@replaces(
    "vllm.v1.core.single_type_kv_cache_manager:MambaManager",
    methods="cache_blocks",
    why="publishes states of pure tokens only; a manager that vLLM has made becomes one of this class",
    remove_when="specs of vLLM's own classes may have managers of plugins",
)
class StateManager(hole_aware(MambaManager)):  # type: ignore[misc]  # a class made at import
    """vLLM's manager for states (Mamba, linear attention, short convolutions), beside layers that may have holes."""

    @property
    def beside(self) -> Beside:
        """Return what a request holds: without a prefix those blocks of which vLLM sizes its pool."""
        if self.mamba_cache_mode != "align":
            return Beside(self.block_size, self.num_speculative_blocks)
        most = 2 + self.num_speculative_blocks + self.kv_cache_spec.num_prefill_checkpoint_blocks
        return Beside(self.block_size, self.num_speculative_blocks, most, copied=1)

    def publish_end(self, request: Request) -> None:
        """Publish the state after the last pure token, where it is the state of a whole block.

        Where requests keep few states (`--prefix-cache-retention-interval`), vLLM publishes the state at the end of the
        prompt, which this request may not reach pure.
        """
        req_id = request.request_id
        blocks, pure = self.req_to_blocks[req_id], self.residents[req_id].pure_tokens
        last = pure // self.block_size - 1
        if pure % self.block_size or not 0 <= last < len(blocks) or blocks[last].block_hash is not None:
            return
        self.block_pool.cache_full_blocks(request, blocks, last, last + 1, self.block_size, self.kv_cache_group_id)

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        # A state of impure tokens has no pure part. States of pure tokens were published with their steps: after the
        # last pure token the block may hold a later state, and vLLM's checkpoint of the step is a later one.
        resident = self.residents.get(request.request_id)
        if resident is None or resident.pure_tokens is None or num_tokens <= resident.pure_tokens:
            super().cache_blocks(request, num_tokens, *args, **kwargs)


class SlidingManager(hole_aware(SlidingWindowManager)):  # type: ignore[misc]  # a class made at import
    """vLLM's manager for sliding windows, beside layers that may have holes."""

    @property
    def beside(self) -> Beside:
        """Return what a request holds."""
        return Beside(self.block_size, most=versions.most_in_window(self))

    def publish_end(self, request: Request) -> None:
        """Publish the blocks that a hit needs at the last pure block of a request: later blocks are never published.

        vLLM publishes the blocks that a hit needs at the end of the prompt, which this request may not reach pure.
        """
        req_id = request.request_id
        blocks, pure = self.req_to_blocks[req_id], self.residents[req_id].pure_tokens
        end = min(self.num_cached_block.get(req_id, 0), pure // self.block_size)
        first = max(end - self._contiguous_blocks_for_hit(self.sliding_window, self.block_size, False), 0)
        mask = [block.block_hash is None for block in blocks[first:end]]
        self.block_pool.cache_full_blocks(
            request, blocks, first, end, self.block_size, self.kv_cache_group_id, block_mask=mask
        )


class ChunkManager(hole_aware(ChunkedLocalAttentionManager)):  # type: ignore[misc]  # a class made at import
    """vLLM's manager for chunks of local attention, beside layers that may have holes. It publishes all pure blocks."""

    @property
    def beside(self) -> Beside:
        """Return what a request holds."""
        return Beside(self.block_size, most=versions.most_in_window(self))


#: vLLM's managers of KV groups without holes -> the plugin's.
BESIDE: dict[type, type] = {
    SlidingWindowManager: SlidingManager,
    ChunkedLocalAttentionManager: ChunkManager,
    MambaManager: StateManager,
}


def put_beside(manager: SingleTypeKVCacheManager, residents: dict[str, RequestBlocks]) -> None:
    """Turn one of vLLM's managers into the plugin's, with vLLM's own spec.

    Args:
        manager: of a type in `BESIDE`.
        residents: of a group with holes.
    """
    become(manager, BESIDE[type(manager)])
    manager.residents = residents


@replaces(
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager",
    methods="__init__ find_longest_cache_hit add_local_computed_blocks allocate_external_computed_blocks "
    "pop_blocks_for_free _cache_partial_tail_block",
    why="tables have holes; the plugin's KV cache specs are registered with it",
    remove_when="never: vLLM has managers of plugins",
)
class EvictableManager(FullAttentionManager):
    """vLLM's manager for full attention, with holes.

    A hole is vLLM's null block at the evicted block's place, so positions, slot mappings and prefix hashes stay
    vLLM's own. The scheduler decides; this class keeps tables, counts and the pool's blocks. No other class moves
    blocks of a request that runs, and what it moves is noted for the next plan as it is written into the table.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.residents: dict[str, RequestBlocks] = {}
        #: Number of this group among the KV groups that may have holes, in plans and reports.
        self.number = 0
        self.max_in_flight_tokens = self.room = 0
        #: Policy -> blocks that its requests hold.
        self.held: Counter[str] = Counter()
        #: Requests that were noted over their trigger since the last `take_over_trigger`, in this order.
        self._over_trigger: dict[str, None] = {}
        #: See `GroupPlan.changes`, of the next plan.
        self.changes: dict[str, dict[int, int]] = {}

    def bind(self, number: int, max_in_flight_tokens: int, give_back: Callable[[list[KVCacheBlock]], None]) -> None:
        """Set values that the scheduler knows and vLLM does not pass to managers.

        Args:
            number: of the group, in plans and reports.
            max_in_flight_tokens: most tokens of a request in flight, those of drafts included.
            give_back: frees blocks that a request lost, the last one first.
        """
        self.number, self.max_in_flight_tokens = number, max_in_flight_tokens
        self._give_back = give_back
        self.whole_blocks = self.block_size == self.block_pool.hash_block_size

    def begin_step(self, changes: bool, admits: bool) -> None:
        """Become the class whose methods answer in the next step what vLLM asks for each request of each step.

        Args:
            changes: whether any request so far may lose blocks, or read a part of them.
            admits: whether the step may admit requests.
        """
        kind = EvictableManager if not changes else AdmittingManager if admits else ChangingManager
        if type(self) is not kind:
            self.__class__ = kind
            # CPython looks attributes up more slowly in the dict that it makes of the old class' slots.
            self.__dict__ = {**self.__dict__}

    @property
    def in_flight(self) -> int:
        """Blocks that a request may hold on top while steps are in flight; a chunk may begin inside a block."""
        return math.ceil(self.max_in_flight_tokens / self.block_size) + 1

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        if kv_cache_spec.window is None:
            return super().find_longest_cache_hit(
                block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, *args, **kwargs
            )
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, kv_cache_spec.block_size)
        cached = [
            block_pool.get_cached_block(block_hash, kv_cache_group_ids)
            for block_hash in itertools.islice(hashes, max_length // kv_cache_spec.block_size)
        ]
        count, needed = longest_hit([bool(blocks) for blocks in cached], kv_cache_spec.sink, kv_cache_spec.window)
        null = block_pool.null_block
        hits = tuple(
            [blocks[group] if need else null for blocks, need in zip(cached, needed)]
            for group in range(len(kv_cache_group_ids))
        )
        return hits, count * kv_cache_spec.block_size

    def _cache_partial_tail_block(self, request: Request, num_tokens: int) -> None:
        # The tail of a pure prompt was published with its step. Later the block may be a hole, or have other tokens.
        resident = self.residents.get(request.request_id)
        if resident is None or resident.pure_tokens is None:
            super()._cache_partial_tail_block(request, num_tokens)

    def without_middle(self, hit: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
        """Return a cached prefix with holes where streaming heads need no blocks."""
        sink, window = self.kv_cache_spec.sink, self.kv_cache_spec.window
        if window is None or len(hit) <= sink + window:
            return list(hit)
        return [*hit[:sink], *[self._null_block] * (len(hit) - sink - window), *hit[-window:]]

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().add_local_computed_blocks(request_id, new_computed_blocks, num_local_computed_tokens, *args, **kwargs)
        there = np.flatnonzero([not block.is_null for block in new_computed_blocks])
        if len(there) < len(new_computed_blocks):
            # The prefix may end inside its last block.
            self.residents[request_id].adopt(there, len(new_computed_blocks), num_local_computed_tokens)

    def allocate_external_computed_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> None:
        super().allocate_external_computed_blocks(request_id, *args, **kwargs)
        self.count(request_id)

    def count(self, request_id: str) -> None:
        """Count the blocks that a request holds now, after its table grew."""
        if resident := self.residents.get(request_id):
            self._count(resident, resident.held(len(self.req_to_blocks[request_id])))

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        if resident := self.residents.get(request_id):
            self._count(resident, 0)
            resident.restart()
        self._over_trigger.pop(request_id, None)
        self.changes.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    def forget(self, request_id: str) -> RequestBlocks:
        """Forget a request that ends; a connector may still read its blocks."""
        resident = self.residents.pop(request_id)
        self._count(resident, 0)
        self._over_trigger.pop(request_id, None)
        self.changes.pop(request_id, None)
        return resident

    def published_tokens(self, request_id: str) -> int:
        """Return the tokens of a request in whole blocks of this group that other requests can hit, those that the step
        being planned computes included.
        """
        return self.num_cached_block.get(request_id, 0) * self.block_size

    def note(self, request_id: str) -> None:
        """Note a request that is over its trigger, after it grew or its limits changed."""
        resident = self.residents[request_id]
        # Drafts may take the table of a request over its trigger that cannot outgrow it.
        if resident.may_outgrow and resident.over_trigger(len(self.req_to_blocks[request_id])):
            self._over_trigger[request_id] = None

    def exceeds(self, request_id: str) -> bool:
        """Return whether a request holds more blocks than its trigger."""
        return self.residents[request_id].exceeds(len(self.req_to_blocks[request_id]))

    def take_over_trigger(self) -> list[str]:
        """Return, and forget, the requests that may be over their trigger when their step is done."""
        taken, self._over_trigger = list(self._over_trigger), {}
        return taken

    def take_changes(self) -> dict[str, dict[int, int]]:
        """Return, and forget, where blocks are now that were moved since the last plan (see `GroupPlan.changes`)."""
        taken, self.changes = self.changes, {}
        return taken

    def _place(self, request_id: str, blocks: Mapping[int, KVCacheBlock]) -> None:
        """Put blocks of the pool, or the null block, into a request's table: {logical block: block}."""
        table = self.req_to_blocks[request_id]
        for index, block in blocks.items():
            table[index] = block
            self.changes.setdefault(request_id, {})[index] = block.block_id

    def blocks_at(self, request_id: str, indices: np.ndarray) -> list[int]:
        """Return the physical blocks of a request at logical blocks `indices`, int64 [k]."""
        table = self.req_to_blocks[request_id]
        return [table[index].block_id for index in indices.tolist()]

    def rewrite(
        self, request_id: str, writes: np.ndarray, holes: np.ndarray, computed_tokens: int | None
    ) -> tuple[dict[int, int], list[KVCacheBlock], list[KVCacheBlock]] | None:
        """Put holes into a request's table, and private blocks at `writes`.

        Workers have to hear of it with the very next plan: the pool may hand out a freed block in that step. Private
        blocks are taken from the request, from its `holes` too, or from the pool.

        Args:
            request_id: a running request, or a session between two turns.
            writes: int64 [n], ascending logical blocks that workers write into, none of them a hole.
            holes: int64 [k], ascending logical blocks that are evicted, all after those of `writes`.
            computed_tokens: as for `RequestBlocks.evict`.

        Returns:
            Of each of `writes` and `holes` the physical block that it was; the blocks given back; and those of them
            that no other request holds. None, with nothing changed, if the pool has too few new blocks and other
            requests hold those of the request.
        """
        table, keep = self.req_to_blocks[request_id], len(writes)
        written, gone = writes.tolist(), holes.tolist()
        changed = written + gone
        before = [table[index] for index in changed]
        if (after := self._private(before, keep)) is None:
            return None
        moved = {index: new for index, old, new in zip(written, before, after) if new is not old}
        self._place(request_id, moved | dict.fromkeys(gone, self._null_block))
        resident = self.residents[request_id]
        if len(holes):
            resident.evict(holes, computed_tokens)
        kept = {block.block_id for block in after}
        given_back = [block for block in before if block.block_id not in kept]
        freed = [block for block in given_back if block.ref_cnt == 1]
        self._give_back(given_back)
        self._count(resident, resident.held_blocks - len(holes))
        return {index: block.block_id for index, block in zip(changed, before)}, given_back, freed

    def _private(self, blocks: Sequence[KVCacheBlock], count: int) -> list[KVCacheBlock] | None:
        """Return private blocks for the places of the first `count` of a request's `blocks`, all of which it may lose.

        They are private ones of `blocks`, then new ones of the pool; None if the pool has too few.
        """
        if not count:
            return []
        if not self._find_room(blocks, count - sum(map(_is_private, blocks))):
            return None
        own = [block for block in blocks if _is_private(block)][:count]
        targets = own + self.block_pool.get_new_blocks(count - len(own))
        # Private blocks stay where they are.
        staying = {block.block_id for block in blocks[:count] if block in targets}
        rest = [block for block in targets if block.block_id not in staying]
        return [block if block.block_id in staying else rest.pop(0) for block in blocks[:count]]

    def _find_room(self, blocks: Sequence[KVCacheBlock], copies: int) -> bool:
        """Make sure that the pool has `copies` new blocks, which a request needs in place of some of its own.

        If the pool has too few, the last of `blocks` that no other request holds leave the prefix cache, as many as are
        missing: these need no copy. So a request that shares no blocks always finds room.

        Returns:
            Whether there is room now. If not, nothing has changed.
        """
        missing = copies - self.block_pool.get_num_free_blocks()
        if missing <= 0:
            return True
        published = [block for block in blocks if block.ref_cnt == 1 and block.block_hash is not None]
        if len(published) < missing:
            return False
        for block in published[-missing:]:
            self.block_pool._maybe_evict_cached_block(block)
        return True

    def _count(self, resident: RequestBlocks, held: int) -> None:
        self.held[resident.policy] += held - resident.held_blocks
        resident.hold(held)


class ChangingManager(hole_aware(EvictableManager)):  # type: ignore[misc]  # a class made at import
    """The same while requests may lose blocks, or read a part of them."""


@replaces(
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager",
    methods="get_num_blocks_to_allocate",
    why="admission counts what a request will hold, in steps that may admit any",
    remove_when="never: vLLM has managers of plugins",
)
class AdmittingManager(ChangingManager):
    """The same in steps that may admit requests: those with limits are bounded by them (`RequestBlocks.to_start`)."""

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        *args: Any,
        apply_admission_cap: bool = False,
        **kwargs: Any,
    ) -> int:
        blocks = self.residents.get(request_id) if apply_admission_cap else None
        if blocks is not None:
            # A cached prefix, or one that a connector loads, may be longer than the bound.
            there = 0 if blocks.started else math.ceil(total_computed_tokens / self.block_size)
            whole = math.ceil(num_tokens / self.block_size)
            most = blocks.to_start(whole, self.in_flight, max(len(new_computed_blocks), there), self.room)
            num_tokens = min(num_tokens, most * self.block_size)
        return super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            total_computed_tokens,
            *args,
            apply_admission_cap=apply_admission_cap,
            **kwargs,
        )


def _is_private(block: KVCacheBlock) -> bool:
    """Return whether one request holds a block, and no other request can hit it."""
    return block.ref_cnt == 1 and block.block_hash is None


def longest_hit(there: Sequence[bool], sink: int, window: int) -> tuple[int, np.ndarray]:
    """Return the longest prefix whose first `sink` and last `window` blocks are cached.

    A request that takes it starts with holes in between, like a request that has computed the prefix and lost blocks.
    If all blocks are cached there are no holes, and blocks that the request computes next are pure.

    Args:
        there: [n], whether each block is cached.

    Returns:
        Number of blocks of the prefix, and which of them the request takes: bool [count].
    """
    absent = np.concatenate(([0], np.cumsum(~np.array(there, bool))))
    for count in range(len(there), 0, -1):
        last = max(count - window, min(sink, count))
        if absent[min(sink, count)] == 0 and absent[count] == absent[last]:
            needed = np.full(count, absent[count] == 0)
            needed[:sink] = needed[last:] = True
            return count, needed
    return 0, np.empty(0, bool)
