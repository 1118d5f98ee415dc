"""Moves blocks of requests to the host, where layers read them, and lets other requests start with these blocks."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    get_group_id,
    make_block_hash_with_group_id,
    resolve_block_hashes,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from ...config import NEVER
from ...core.actions import Action, Applied
from ...core.blocks import RequestBlocks
from ...core.host_pool import COUNTED, READ_ON_HOST, Copy, HostPool, Reached, RoomOf
from ...core.mechanisms import Metric, Staging
from ...core.mechanisms.staging import Arriving, room_to_come
from ...core.plan import EvictionPlan
from ...environment import poison_mode
from ..seams import replaces
from ..start.attending import kv_heads
from .allocation import take_from_host
from .hits import Hit
from .host_events import HostEvents
from .managers import FROM_HOST
from .outdated import Outdated
from .spec import alike_bytes, covers, host_blocks
from .view import EngineView


class Reaching(Staging):
    """Moves blocks to the host, and extends hits of the prefix cache by blocks that are there.

    A block goes to the host when its request is above its budget, or when the pool hands out a block of the prefix
    cache. A request whose prefix is longer than its budget starts with a room, and with holes whose blocks layers read
    on the host. A shorter prefix is copied to the device.

    Windows and states beside them publish far more blocks than hits need. Of these go to the host what hits need at the
    end of a prompt, where a request ended or read less for the first time, and where one has hit a prefix.

    Args:
        scheduler: an `EvictionMixin`, with one KV group.
    """

    metrics = {
        "spilled": Metric("blocks_spilled", "Evicted KV blocks that were copied to the host."),
        "hit": Metric("host_blocks_hit", "Blocks of requests' prefixes that the host had for them."),
        "fetched": Metric("host_blocks_fetched", "Host blocks that layers of decodes copied into rooms."),
        "in_room": Metric("host_blocks_in_room", "Host blocks that layers of decodes chose, and rooms had."),
        "cut": Metric("host_blocks_cut", "Host blocks in whose place layers read others, as fetch bounds them."),
        "used": Metric("host_blocks", "Host blocks that hold KV blocks, under the server's policy.", "gauge"),
        "unused": Metric("host_blocks_cached", "Of these, blocks that are kept as prefixes alone.", "gauge"),
        "bytes": Metric(
            "host_bytes", "Bytes of the host blocks that hold KV blocks, under the server's policy.", "gauge"
        ),
    }

    def __init__(self, scheduler: EngineView) -> None:
        super().__init__(scheduler)
        self._scheduler, self._cache = scheduler, scheduler.kv_cache_manager
        (self._manager,) = scheduler.kv_managers
        blocks, self.block_bytes = host_memory(scheduler)
        self.pool = HostPool(blocks, poison_mode())
        pool = self._cache.block_pool
        # A connector keeps prefixes itself, and one that loads on top of a prefix could come steps after the blocks
        # that it starts with.
        alike = pool.hash_block_size == self._manager.block_size
        self._caches = pool.enable_caching and alike and scheduler.connector is None
        self.finds = False
        groups = scheduler.kv_cache_config.kv_cache_groups
        own = groups[self._manager.kv_cache_group_id]
        #: Managers of other KV groups whose blocks go to the host, too: a copy of a block has all that is theirs.
        self._beside = [
            each for each in scheduler.other_managers if self._caches and covers(own, groups[each.kv_cache_group_id])
        ]
        #: Blocks of these groups that are worth host memory, while they are in the prefix cache.
        self._ends: set[int] = set()
        if self._caches:
            self._void = self.view.part(Outdated)
            self._void.before_handing_out.append(self._keep)
            find_on_host.on(pool, self)
            take_from_host.on(self._cache.coordinator, pool)
            if pool.enable_kv_cache_events:
                HostEvents(pool, self.pool)

    @property
    def described(self) -> str:
        config, size = self._scheduler.kv_policy, self._manager.block_size
        limits = config.limits(size, self._scheduler.max_model_len)
        assert limits is not None  # it would be stock's
        host, of_room = (-(-blocks * self.block_bytes // 2**20) for blocks in (self.pool.blocks, limits.room))
        blocks = f"{self.pool.blocks} host blocks of {self.block_bytes >> 10} KiB, {host} MiB in all"
        rooms = f"rooms of {limits.room} blocks at most"
        return f"layers read {blocks}, in {rooms}, {of_room} MiB of the pool for each request"

    def _keep(self, block: KVCacheBlock) -> None:
        """Keep the content of a block that leaves the prefix cache, as the pool hands the block out."""
        key, block_id = block.block_hash, block.block_id
        wanted = key is not None and (get_group_id(key) == self._manager.kv_cache_group_id or block_id in self._ends)
        # A block in use leaves the prefix cache because no step computes it, or because it is written next.
        if wanted and not block.ref_cnt and block_id not in self._void.blocks:
            self.pool.keep(self.view.next_plan, self._manager.number, key, block_id)
        self._ends.discard(block_id)

    def _hashes(self, request: Request, manager: Any) -> Sequence[Any]:
        """Return the hashes of a request's full blocks in one KV group."""
        if not self._caches:
            return ()
        return resolve_block_hashes(request.block_hashes, self._cache.block_pool.hash_block_size, manager.block_size)

    def _key(self, block_hash: Any) -> Hashable:
        """Return the key on the host of a block of the scheduler's own group."""
        return make_block_hash_with_group_id(block_hash, self._manager.kv_cache_group_id)

    def before_apply(self, action: Action) -> Action | None:
        """Have blocks that become holes go to the host: those that it has room for. A request keeps its other blocks.

        With the first of them go the blocks of its room, which stay on the device too.
        """
        blocks = self._manager.residents[action.req_id]
        if not blocks.config.reaches:
            return action
        action = replace(action, writes=room_to_come(blocks), ends_purity=False)
        there, fits = len(action.writes), self.pool.fitting(self._pure_keys(action))
        return replace(action, holes=action.holes[: fits - there]) if fits > there else None

    def _pure_keys(self, action: Action) -> list[Hashable]:
        """Return the keys of the blocks that an action moves; None for those that no other request may get."""
        blocks = self._manager.residents[action.req_id]
        hashes, pure = self._hashes(self._scheduler.requests[action.req_id], self._manager), blocks.pure_tokens
        pure = 0 if blocks.state.outdated else pure
        known = len(hashes) if pure is None else min(pure // blocks.block_size, len(hashes))
        return [self._key(hashes[index]) if index < known else None for index in _moved(action)]

    def on_applied(self, applied: Applied) -> None:
        super().on_applied(applied)
        action, blocks = applied.action, applied.blocks
        if not blocks.config.reaches:
            return
        if len(action.writes):
            Reached.add_to(self.view.next_plan.groups[action.group]).rooms[action.req_id] = room_of(blocks)
        moved, before = _moved(action), blocks.state.counts["spilled"]
        physical, keys = [applied.before[block] for block in moved], self._pure_keys(action)
        self.pool.spill(self.view.next_plan, action.req_id, action.group, blocks, moved, physical, keys)
        self._scheduler.tally.add(blocks.policy, spilled=blocks.state.counts["spilled"] - before)

    def on_hit(self, request: Request, hit: Hit) -> Hit:
        """Return the prefix that is on the device or on the host, if it is longer than what vLLM has found."""
        blocks, size = self._manager.residents[request.request_id], self._manager.block_size
        self.cancel_arrival(request.request_id)
        if not self._caches or request.skip_reading_prefix_cache or not blocks.config.reaches or blocks.state.outdated:
            return hit
        tables, found = self._find(request, request.num_tokens - 1)
        if len(found) * size <= hit.tokens or self._outdated(found):
            return hit
        holes, room = self._divide(blocks, len(found), self._most(request, blocks, found))
        beside = self._on_host_beside(request, tables)
        if (numbers := self._hold(request, found, (*room, *holes), beside)) is None:
            return hit
        from_host = sum(block is None for block, _ in found) + sum(map(len, beside.values()))
        self.arriving[request.request_id] = Arriving(numbers, beside, holes, room, from_host)
        table = [FROM_HOST if index in numbers else block for index, (block, _) in enumerate(found)]
        for index in holes:
            table[index] = self._cache.block_pool.null_block
        tables[self._manager.kv_cache_group_id] = table
        return hit._replace(blocks=self._cache.create_kv_cache_blocks(tuple(tables)), tokens=len(found) * size)

    def _find(self, request: Request, most: int) -> tuple[list[Any], list[tuple[KVCacheBlock | None, int | None]]]:
        """Return the longest prefix, of at most so many tokens, that is on the device or on the host.

        Returns:
            The blocks of each of vLLM's KV groups, and where those of the scheduler's group are: in the prefix cache,
            and on the host.
        """
        self.finds = True
        try:
            tables, _, _ = self._cache.coordinator.find_longest_cache_hit(request.block_hashes, most)
        finally:
            self.finds = False
        own = tables[self._manager.kv_cache_group_id]
        numbers = (self.pool.find(self._key(each)) for each in self._hashes(request, self._manager))
        return list(tables), [(None if block is FROM_HOST else block, number) for block, number in zip(own, numbers)]

    def _outdated(self, found: Sequence[tuple[KVCacheBlock | None, int | None]]) -> bool:
        """Return whether blocks of what `_find` found were computed before weights changed."""
        blocks = self.view.part(Outdated).blocks
        return bool(blocks) and any(block is not None and block.block_id in blocks for block, _ in found)

    def _on_host_beside(self, request: Request, tables: Sequence[Any]) -> dict[int, dict[int, int]]:
        """Return what other groups take from the host, of the blocks that `_find` found: as `Arriving.beside`."""
        beside = {}
        for manager in self._beside:
            group, hashes = manager.kv_cache_group_id, self._hashes(request, manager)
            numbers = (self.pool.find(make_block_hash_with_group_id(each, group)) for each in hashes)
            beside[group] = {
                index: number
                for index, (block, number) in enumerate(zip(tables[group], numbers))
                if block is FROM_HOST and number is not None
            }
        return beside

    def _most(self, request: Request, blocks: RequestBlocks, found: list[Any]) -> int:
        """Return the blocks of a prefix above which a request starts with holes."""
        limits = blocks.limits
        assert limits is not None  # it would be stock's
        if limits.trigger != NEVER:
            return limits.trigger
        # Blocks that other requests hold are shared.
        needed = sum(block is None or block.ref_cnt == 0 for block, _ in found)
        beside = self._scheduler.room.beside(request.num_tokens, hit=True)
        fits = needed + self._manager.in_flight + beside <= self.view.free_blocks
        return len(found) if fits else limits.budget

    def _divide(self, blocks: RequestBlocks, count: int, most: int) -> tuple[range, range]:
        """Return the holes and the room of a request that starts with `count` blocks, of which it may have `most`."""
        limits = blocks.limits
        assert limits is not None  # it would be stock's
        if count <= max(most, limits.budget):
            return range(0), range(0)
        first = limits.sink + limits.room
        return range(first, first + count - limits.budget), range(limits.sink, first)

    def _hold(
        self, request: Request, found: list[Any], on_host: Iterable[int], beside: Mapping[int, Mapping[int, int]]
    ) -> dict[int, int] | None:
        """Use the blocks of the host that a request starts with; those in `on_host` are copied there if they are not.

        `beside` has those of other groups, which are there.

        Returns:
            Logical block -> host block, ascending; None, with none in use, if the host has no room.
        """
        wanted, plan, hashes = set(on_host), self.view.next_plan, self._hashes(request, self._manager)
        numbers = {
            index: number
            for index, (block, number) in enumerate(found)
            if number is not None and (block is None or index in wanted)
        }
        used = [*numbers.values(), *(number for each in beside.values() for number in each.values())]
        for number in used:
            self.pool.use(number)
        for index in sorted(wanted - numbers.keys()):
            physical = found[index][0].block_id
            kept = (
                self.pool.keep(plan, self._manager.number, self._key(hashes[index]), physical)
                if self._settled(index, physical)
                else None
            )
            if kept is None:
                self.pool.leave(plan, used)
                return None
            self.pool.use(kept)
            used.append(kept)
            numbers[index] = kept
        return dict(sorted(numbers.items()))

    def _settled(self, logical: int, physical: int) -> bool:
        """Return whether a block of the prefix cache is computed by the steps before the one being planned."""
        block, end = self._cache.block_pool.blocks[physical], (logical + 1) * self._manager.block_size
        if block.ref_cnt == 0:
            return True
        tables = self._manager.req_to_blocks
        # Of the requests that have it, one that starts in this step counts what it hits as computed.
        computed = [
            each.num_computed_tokens
            for each in self._scheduler.running
            if block in tables.get(each.request_id, ())[logical : logical + 1]
        ]
        return min(computed, default=0) >= end

    def on_start(self, plan: EvictionPlan, req_id: str, blocks: Sequence[RequestBlocks]) -> None:
        """Order workers to bring what a request has on the device from the host, and to read the rest there."""
        (its,), manager, request = blocks, self._manager, self._scheduler.requests[req_id]
        if (arriving := self.arriving.pop(req_id, None)) is None:
            return
        numbers, room = arriving.numbers, arriving.room
        stay = {*room, *arriving.holes}
        fetched = [
            *((each, arriving.beside[each.kv_cache_group_id]) for each in self._beside),
            (manager, {index: number for index, number in numbers.items() if index not in stay}),
        ]
        for each, there in fetched:
            self._fetch(plan, request, each, there)
        if len(room):
            Reached.add_to(plan.groups[manager.number]).rooms[req_id] = room_of(its)
            plan.use(manager.blocks_at(req_id, np.array(room)))
            there = {index: numbers[index] for index in (*room, *arriving.holes)}
            self.pool.give(plan, req_id, manager.number, its, there)
        self.pool.leave(plan, [number for _, there in fetched for number in there.values()])
        self.view.count(its, hit=arriving.from_host)

    def _fetch(self, plan: EvictionPlan, request: Request, manager: Any, numbers: Mapping[int, int]) -> None:
        """Order workers to copy host blocks, {logical block: host block}, to a request's table, and publish them."""
        table = manager.req_to_blocks[request.request_id]
        there = {table[index].block_id: number for index, number in numbers.items() if not table[index].is_null}
        plan.use(there)
        plan.orders += [Copy("", self._manager.number, "fetch", block, number) for block, number in there.items()]
        first, end = min(numbers, default=0), max(numbers, default=-1) + 1
        self._cache.block_pool.cache_full_blocks(
            request, table, first, end, manager.block_size, manager.kv_cache_group_id,
            # vLLM has published the state at the end of a prompt.
            block_mask=[index in numbers and table[index].block_hash is None for index in range(first, end)],
        )  # fmt: skip

    def on_scheduled(self, plan: EvictionPlan, tokens: Mapping[str, int]) -> None:
        super().on_scheduled(plan, tokens)
        for req_id, count in tokens.items() if self._beside else ():
            request, its = self._scheduler.requests[req_id], self._manager.residents[req_id]
            first, prompt = request.num_computed_tokens - count, request.num_prompt_tokens
            if first in (its.first_query, its.pure_tokens):  # it starts, or reads less for the first time
                self._note_end(req_id, first)
            if first < prompt <= first + count:
                self._note_end(req_id, prompt)

    def on_free(self, request: Request) -> None:
        super().on_free(request)
        self._note_end(request.request_id, request.num_computed_tokens)

    def _note_end(self, req_id: str, tokens: int) -> None:
        """Note what other groups need for hits that end after so many tokens of a request."""
        for manager in self._beside:
            self._ends.update(manager.needed(req_id, tokens))

    def on_output(self, output: ModelRunnerOutput) -> None:
        """Count what layers have read on the host."""
        for req_id, counts in getattr(output, READ_ON_HOST, {}).items():
            if (blocks := self._manager.residents.get(req_id)) is not None:
                self.view.count(blocks, **dict(zip(COUNTED, counts.tolist(), strict=True)))

    def before_stats(self) -> None:
        name, used, unused = self._scheduler.kv_policy.name, self.pool.used, self.pool.unused
        self._scheduler.tally.hold(name, used=used, unused=unused, bytes=used * self.block_bytes)


@replaces(
    "vllm.v1.core.block_pool:BlockPool.get_cached_block",
    why="lookups of a prefix find blocks of the host, too: `FROM_HOST`",
    remove_when="a prefix of vLLM may have blocks outside of its pool",
)
def find_on_host(cached: Callable[..., list[KVCacheBlock] | None], reaching: Reaching) -> Callable[..., Any]:
    def found(block_hash: Any, kv_cache_group_ids: list[int]) -> list[KVCacheBlock] | None:
        blocks = cached(block_hash, kv_cache_group_ids)
        if blocks is not None or not reaching.finds:
            return blocks
        each = []
        for group in kv_cache_group_ids:
            if blocks := cached(block_hash, [group]):
                each += blocks
            elif reaching.pool.find(make_block_hash_with_group_id(block_hash, group)) is not None:
                each.append(FROM_HOST)
            else:
                return None
        return each

    return found


def _moved(action: Action) -> list[int]:
    return [*action.writes.tolist(), *action.holes.tolist()]


def room_of(blocks: RequestBlocks) -> RoomOf:
    """Return the room of a request, as workers hear of it."""
    limits = blocks.limits
    assert limits is not None  # it would be stock's
    return RoomOf(limits.sink, limits.room, limits.recent_blocks)


def host_memory(scheduler: EngineView) -> tuple[int, int]:
    """Return how many host blocks an engine has, and the bytes of each on all tensor-parallel ranks."""
    # vLLM's scheduler knows the spec of one layer, and layers may differ in KV heads.
    (manager,), vllm_config = scheduler.kv_managers, scheduler.vllm_config
    number = manager.kv_cache_group_id
    spec = scheduler.kv_cache_config.kv_cache_groups[number].kv_cache_spec
    ranks = vllm_config.parallel_config.tensor_parallel_size
    heads = sum(max(of_layer // ranks, 1) for of_layer in kv_heads(vllm_config.model_config))
    size = alike_bytes(vllm_config, scheduler.kv_cache_config, number)
    size = size or spec.page_size_bytes // spec.num_kv_heads * heads
    return host_blocks(vllm_config, scheduler.kv_policy, size, manager.block_size), size * ranks
