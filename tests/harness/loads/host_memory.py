"""Host blocks of an engine: the scheduler's books of them, and NaN in those that hold nothing."""

from collections import Counter

import torch
from parts import part_of

from loads.pages import numbers
from vllm_evict.compute.host_copies import HostCopies
from vllm_evict.compute.reach import Reach
from vllm_evict.core.host_pool import Reached
from vllm_evict.integration.engine.reaching import Reaching


def pool_of(scheduler):
    """Return the host blocks of a scheduler; None if it has none."""
    return next((each.pool for each in scheduler.mechanisms.of(Reaching)), None)


def _numbers_of(index):
    """Numbers of each kind of index that may be NaN: boxes, the first ones of signs, units of codes."""
    if index.is_floating_point():
        return index
    return index[..., -8:].view(torch.float32) if index.dtype == torch.uint8 else index.view(torch.bfloat16)[..., :16]


class HostMemory:
    """Looks at an engine whose layers read blocks on the host.

    Args:
        engine: one that fills freed blocks with NaN. Its host memory is filled with NaN now.
    """

    def __init__(self, engine):
        self.pool, self.scheduler = pool_of(engine.scheduler), engine.scheduler
        host = part_of(engine.runtime, HostCopies).blocks
        self._tensors = [numbers(page) for page in host.own]
        self._reach = part_of(engine.runtime, Reach)
        hosts = [index[self._reach._pool :] for index in self._reach.index.of_layers]
        self._tensors += [_numbers_of(index) for index in hosts]
        if not self.pool.used:
            with torch.inference_mode():
                for each in self._tensors:
                    each.fill_(float("nan"))

    def check(self):
        """Each host block is free and NaN, or holds a number for each dimension of a block."""
        pool = self.pool
        used, free = self._reached(), set(pool._free)
        assert len(free) == len(pool._free) == pool.blocks - len(used)
        assert not free & used, "host blocks are free and held"
        # The next plan writes these.
        coming = {copy.number for copy in self.scheduler.next_plan.orders}
        for each in self._tensors:
            is_nan = torch.isnan(each).flatten(1)
            for number in free - coming:
                assert is_nan[number].all(), f"host block {number} is free, and holds numbers"
            for number in used - coming:
                assert not is_nan[number].any(), f"host block {number} holds NaN"

    def _reached(self):
        """Return the host blocks that requests read, and those that wait for requests with their prefix."""
        pool, (manager,), users = self.pool, self.scheduler.kv_managers, Counter()
        # A session keeps the room of its first block on the host, where a budget that is a share has grown since.
        reached = Reached.within(self.scheduler.next_plan.groups[0])
        rooms = {req_id: its.room for req_id, its in self._reach._of.items()} | (reached.rooms if reached else {})
        for req_id, blocks in manager.residents.items():
            for logical, number in blocks.residence.host.items():
                in_room = 0 <= logical - rooms[req_id].first < rooms[req_id].blocks
                is_hole = manager.req_to_blocks[req_id][logical].is_null
                assert is_hole != in_room, f"{req_id} has block {logical}, and on the host"
                users[number] += 1
        assert users == pool._users and not users.keys() & pool._unused.keys()
        assert pool._numbers == {block_hash: number for number, block_hash in pool._hashes.items()}
        assert pool._unused.keys() <= pool._hashes.keys() <= users.keys() | pool._unused.keys()
        return {*users, *pool._unused}

    def unread(self, drafting=False):
        """Return the blocks of the pool in rooms which some layer has not filled yet; it reads them only then.

        `drafting`: those that a drafter's layers do not read: all of the rooms.
        """
        (manager,), (group,) = self.scheduler.kv_managers, self.scheduler.next_plan.groups
        reached = Reached.within(group)
        rooms = {req_id: (room, None) for req_id, room in reached.rooms.items()} if reached else {}
        rooms |= {req_id: (its.room, its.slot) for req_id, its in self._reach._of.items()}
        found = set()
        for req_id, (room, slot) in rooms.items():
            for place, block in enumerate(manager.req_to_blocks.get(req_id, ())[room.first : room.first + room.blocks]):
                if drafting or slot is None or (self._reach._held[:, slot, place] < 0).any():
                    found.add(block.block_id)
        return found

    def check_end(self):
        """All is free."""
        idle = [*self.pool._free, *self.pool._unused]
        assert sorted(idle) == list(range(self.pool.blocks)), "host blocks are lost"
