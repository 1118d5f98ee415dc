"""Blocks that layers read on the host: the host memory of a worker double, and what has to hold of host blocks."""

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_evict.core.actions import Action
from vllm_evict.core.host_pool import Copy, Reached
from vllm_evict.core.mechanisms.staging import staging_blocks
from vllm_evict.core.plan import EvictionPlan
from vllm_evict.integration.engine.reaching import Reaching

from .contents import POISON, SALTS, Fault, Row

if TYPE_CHECKING:
    from .double import Worker


class HostTier:
    """Host memory of a worker double, with one KV group whose layers read it.

    Args:
        blocks: of the host.
        block: tokens.
        longest: tokens of the longest request.

    Attributes:
        memory: contents of host blocks, uint64 [blocks, block].
    """

    def __init__(self, blocks: int, block: int, longest: int) -> None:
        self.memory = np.full((blocks, block), POISON, np.uint64)
        self._staging, self._staged = staging_blocks(longest, block), 0

    def obey(self, plan: EvictionPlan, worker: "Worker") -> None:
        """Copy blocks in the plan's order."""
        self._staged = 0
        for copy in plan.orders:
            if not isinstance(copy, Copy):
                continue
            if copy.req_id:
                worker._alive(copy.req_id, "a copy")
            if copy.kind == "poison":
                self.memory[copy.number] = POISON
            elif copy.kind == "fetch":
                worker.memory[copy.physical] = self.memory[copy.number]
                worker.written.add(copy.physical)
                worker.counts.fetched += 1
            else:
                self.memory[copy.number] = worker.memory[copy.physical]
                worker.counts.spilled += 1

    def take(self, plan: EvictionPlan, worker: "Worker") -> None:
        """Note what requests have on the host from this step on, and their rooms."""
        (told,) = plan.groups
        reached = Reached.within(told)
        for req_id, there in reached.blocks.items() if reached else ():
            row = worker._alive(req_id, "blocks on the host")
            row.on_host.update(there)
            row.room = reached.rooms.get(req_id, row.room)
            if row.room is None:
                raise Fault("host", f"{req_id} has {there} on the host, and no room")

    def reads_less(self, row: Row, group: int, decodes: bool) -> bool:
        """Whether a step reads a part of a request's blocks."""
        return decodes and row.room is not None and 0 in row.tables[group]

    def bring(self, req_id: str, row: Row, group: int, end: int, decodes: bool, worker: "Worker") -> range:
        """Let a step read what its request has on the host; returns the blocks of the device that it does not read.

        A prompt reads all blocks, and leaves those of the room there. A decode may read any of them, and leaves
        others in each layer.
        """
        if row.room is None:
            return range(0)
        table, blocks = row.tables[group], -(-end // worker.block)
        room = range(row.room.first, row.room.first + row.room.blocks)
        holes = [at for at in range(blocks) if not table[at]]
        if missing := [at for at in (*holes, *room) if at not in row.on_host]:
            raise Fault("reads", f"{req_id}: blocks {missing} are neither on the device nor on the host: {table}")
        if holes and (holes[0] < room.stop or holes[-1] > blocks - 1 - row.room.recent):
            raise Fault("reads", f"{req_id}: holes {holes} of {blocks} blocks, beside {row.room}")
        there = {at: number for at, number in row.on_host.items() if at < blocks}
        same = (self.memory[list(there.values())] == row.expected[group][list(there)]).all(1)
        if not same.all():
            wrong = [each for each, right in zip(there.items(), same) if not right]
            raise Fault("reads", f"{req_id}: (logical, host) blocks {wrong} hold something else")
        of_room = np.array(table[room.start : room.stop])
        worker.written.update(of_room.tolist())
        if not decodes:
            self._staged += len(holes)
            if self._staged > self._staging:
                raise Fault("host", f"prompts of a step need {self._staged} staging pages of {self._staging}")
            worker.memory[of_room] = row.expected[group][room.start : room.stop]
            worker.counts.staged += len(holes)
            return range(0)
        worker.memory[of_room] = POISON + np.uint64(row.nonce)
        worker.counts.reached += 1
        return room


class HostInvariants:
    """The checks of a `Simulation` whose server has a host pool."""

    scheduler: Scheduler
    worker: "Worker"
    counts: Counter[str]
    #: See `_watch_host`.
    _cut: set[str]
    #: Medium -> what events told of each (KV group, hash): its parent and tokens, and how many blocks have it.
    _mirror: dict[str, dict[Any, list[Any]]]
    #: (KV group, hash) -> parent and tokens, as events of the pool told; of windows they do not tell.
    _parents: dict[Any, tuple[Any, list[int]]]

    def _check_host(self) -> None:
        """*host*: each host block is free, cached or used; requests use what the books say; hashes say what is there."""
        pool, manager, users = self.scheduler.part(Reaching).pool, self.evictable[0], Counter[int]()
        for req_id, resident in manager.residents.items():
            residence, table = resident.residence, manager.req_to_blocks.get(req_id, ())
            users.update(residence.host.values())
            row = self.worker.rows.get(req_id)
            if residence.host and (row is None or row.on_host != residence.host):
                raise Fault("host", f"{req_id}: the scheduler has {residence.host} on the host, worker: {row}")
            if absent := [at for at, block in enumerate(table) if block.is_null and at not in residence.host]:
                raise Fault("host", f"{req_id}: blocks {absent} are nowhere")
        free, unused = pool._free, pool._unused.keys()
        if users != pool._users or users.keys() & unused:
            raise Fault("host", f"requests use {users}, the books say {pool._users}; unused {list(unused)}")
        if sorted([*free, *users, *unused]) != list(range(pool.blocks)):
            raise Fault("host", f"of {pool.blocks} host blocks {free} are free, {users} used, {list(unused)} cached")
        if pool._numbers != {block_hash: number for number, block_hash in pool._hashes.items()}:
            raise Fault("host", f"hashes {pool._hashes}, numbers {pool._numbers}")
        coming = {copy.number for copy in self.scheduler.next_plan.orders if isinstance(copy, Copy)}
        for number, key in pool._hashes.items():
            if number in coming:
                continue
            meaning, salt = self._meaning.get(get_block_hash(key)), SALTS[get_group_id(key)]
            if meaning is None or (self.worker.host.memory[number] != meaning + salt).any():
                raise Fault("purity", f"host block {number} holds something else than its hash says")

    def _watch_host(self) -> None:
        """Note the requests of which the host had no room for all that they were to give, when they gave last."""
        reaching = self.scheduler.part(Reaching)
        before_apply = reaching.before_apply

        def watched(action: Action) -> Action | None:
            fits = before_apply(action)
            self._cut.discard(action.req_id)
            if fits is not action:
                self._cut.add(action.req_id)
            return fits

        reaching.before_apply = watched  # type: ignore[method-assign]

    def _watch_events(self) -> None:
        """Mirror the prefix caches of pool and host, as a router does."""
        self._mirror, self._parents = {"GPU": {}, "CPU": {}}, {}
        take = self.scheduler.kv_cache_manager.take_events

        def taken() -> list[Any]:
            events = take()
            for event in events:
                if isinstance(event, AllBlocksCleared):
                    self._mirror = {"GPU": {}, "CPU": {}}
                    continue
                known, parent = self._mirror[event.medium], getattr(event, "parent_block_hash", None)
                for at, each in enumerate(event.block_hashes):
                    key = event.group_idx, each
                    if isinstance(event, BlockStored):
                        tokens = event.token_ids[at * event.block_size : (at + 1) * event.block_size]
                        known.setdefault(key, [parent, tokens, 0])[2] += 1
                        if event.medium == "GPU" and len(event.token_ids) == len(event.block_hashes) * event.block_size:
                            self._parents[key] = parent, tokens
                        parent = each
                    elif key not in known:
                        raise Fault("events", f"{key} leaves {event.medium}, and was not there")
                    else:
                        known[key][2] -= 1
                        if not known[key][2]:
                            del known[key]
            return events

        self.scheduler.kv_cache_manager.take_events = taken  # type: ignore[method-assign]

    def _check_events(self) -> None:
        self.scheduler.kv_cache_manager.take_events()
        cache, host = self.scheduler.kv_cache_manager.block_pool, self.scheduler.part(Reaching).pool
        of_pool = {block.block_hash for block in cache.blocks if block.block_hash is not None}
        of_host = set(host._numbers) - of_pool  # each block is known of one medium
        for medium, hashes in (("GPU", of_pool), ("CPU", of_host)):
            there = {(get_group_id(each), maybe_convert_block_hash(get_block_hash(each))) for each in hashes}
            known = self._mirror[medium]
            if there != known.keys():
                raise Fault("events", f"{len(known)} blocks are known of {medium}, {len(there)} are there")
        for key, (parent, tokens, count) in self._mirror["CPU"].items():
            if count != 1:
                raise Fault("events", f"{key} came {count} times to the host")
            if (parent, tokens) != self._parents.get(key, (None, [])):
                raise Fault(
                    "events", f"{key} is of {tokens} after {parent}; in the pool it was {self._parents.get(key)}"
                )

    def _check_no_host_left(self) -> None:
        scheduler, pool = self.scheduler, self.scheduler.part(Reaching).pool
        if pool._users or pool.available != pool.blocks:
            raise Fault("left", f"host blocks {pool._users} are used, of {pool.blocks} {pool.available} can be had")
        if any(copy.req_id for copy in scheduler._plan.orders):
            raise Fault("left", f"of plans: {scheduler._plan.orders}")
        scheduler.reset_prefix_cache()
        if pool.used or pool._numbers or pool._hashes:
            raise Fault("left", f"{pool.used} host blocks hold something after a reset")
