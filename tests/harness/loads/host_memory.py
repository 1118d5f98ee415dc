"""Host blocks of an engine: the scheduler's books of them, and NaN in those that hold nothing."""

import torch
from parts import part_of

from loads.pages import numbers
from vllm_evict.compute.offload import Offload
from vllm_evict.compute.reach import Reach
from vllm_evict.integration.engine.offloading import Offloading


class HostMemory:
    """Looks at an engine whose evicted blocks wait on the host.

    Args:
        engine: one that fills freed blocks with NaN. Its host memory is filled with NaN now.
    """

    def __init__(self, engine):
        self.pool, self.scheduler = engine.scheduler.part(Offloading).pool, engine.scheduler
        host = part_of(engine.runtime, Offload).blocks
        self._pages = [numbers(page) for page in host.pages.own]
        self._tensors = [*self._pages, *host._bounds]
        self._reach = part_of(engine.runtime, Reach)
        if self._reach is not None:
            hosts = [index[self._reach._pool :] for index in self._reach._index]
            # The first numbers of signs are bfloat16.
            self._tensors += [it if it.is_floating_point() else it.view(torch.bfloat16)[..., :16] for it in hosts]
        if not self.pool.used:
            with torch.inference_mode():
                for each in self._tensors:
                    each.fill_(float("nan"))

    def check(self):
        """Each host block is free and NaN, or holds a number for each dimension of one block of one request."""
        pool, (manager,), held = self.pool, self.scheduler.kv_managers, {}
        for req_id, blocks in manager.residents.items():
            for logical, (number, *_) in blocks.residence.host.items():
                assert number not in held, f"host block {number} is for {held[number]} and for {req_id}"
                is_hole = blocks.residence.saved is not None or manager.req_to_blocks[req_id][logical].is_null
                is_hole |= blocks.config.reaches  # its room is on the host too
                assert is_hole, f"{req_id} has block {logical}, and on the host"
                held[number] = req_id
        preempted = [blocks.residence.saved for blocks in manager.residents.values() if blocks.residence.saved]
        saved = {number for each in preempted for number in each.numbers.values()}
        free = set(pool._free)
        assert held.keys() == pool._held.keys() and saved == pool._saved
        assert len(free) == len(pool._free) == pool.blocks - len(held) - len(saved)
        assert not (free | saved) & held.keys() and not free & saved, "host blocks are free and held"
        # The next plan writes these.
        coming = {copy.number for copy in self.scheduler.next_plan.orders}
        for each in self._tensors:
            is_nan = torch.isnan(each).flatten(1)
            for number in free - coming:
                assert is_nan[number].all(), f"host block {number} is free, and holds numbers"
            for number in held.keys() - coming:
                assert not is_nan[number].any(), f"host block {number} of {held[number]} holds NaN"
        for each in self._pages:
            assert not torch.isnan(each[sorted(saved - coming)]).any(), "a host block of a preempted request holds NaN"

    def unread(self):
        """Return the blocks of the pool in rooms which some layer has not filled yet; it reads them only then."""
        (manager,), (group,) = self.scheduler.kv_managers, self.scheduler.next_plan.groups
        rooms = {req_id: (room, None) for req_id, room in group.rooms.items()}
        rooms |= {req_id: (its.room, its.slot) for req_id, its in (self._reach._of if self._reach else {}).items()}
        found = set()
        for req_id, (room, slot) in rooms.items():
            for place, block in enumerate(manager.req_to_blocks.get(req_id, ())[room.first : room.first + room.blocks]):
                if slot is None or (self._reach._held[:, slot, place] < 0).any():
                    found.add(block.block_id)
        return found

    def check_end(self):
        """All is free."""
        assert not self.pool.used and sorted(self.pool._free) == list(range(self.pool.blocks)), "host blocks are lost"
