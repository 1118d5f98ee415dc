"""Evicted blocks that wait on the host: the host memory of a worker double, and what has to hold of host blocks."""

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
from parts import holes_of
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_evict.core.actions import Swap
from vllm_evict.core.plan import EvictionPlan
from vllm_evict.integration.engine.offloading import Offloading

from .contents import POISON, Fault

if TYPE_CHECKING:
    from .double import Worker


class HostTier:
    """Host memory of a worker double.

    Args:
        blocks: of the host.
        block: tokens.

    Attributes:
        memory: contents of host blocks, uint64 [blocks, block].
        held: host block -> request and logical block that it holds, as copies so far say.
        saved: those of preempted requests.
    """

    def __init__(self, blocks: int, block: int) -> None:
        self.memory = np.full((blocks, block), POISON, np.uint64)
        self.held: dict[int, tuple[str, int]] = {}
        self.saved: set[int] = set()

    def restored(self, req_id: str) -> None:
        """A request goes on: what it did not need to fetch is forgotten."""
        gone = {number for number in self.saved if self.held.get(number, ("",))[0] == req_id}
        self.held = {number: each for number, each in self.held.items() if number not in gone}
        self.saved -= gone

    def returned(self, req_id: str, logical: set[int]) -> None:
        """Blocks of a request came back without a copy."""
        gone = {(req_id, block) for block in logical}
        self.held = {number: each for number, each in self.held.items() if each not in gone}

    def forget(self, req_ids: set[str]) -> None:
        """Requests ended, or start over."""
        self.held = {number: each for number, each in self.held.items() if each[0] not in req_ids}

    def obey(self, plan: EvictionPlan, worker: "Worker") -> dict[tuple[str, int], dict[int, int]]:
        """Copy blocks in the plan's order; returns for requests and groups which logical blocks came, and where to."""
        where: dict[tuple[str, int], dict[int, int]] = {}
        came: dict[tuple[str, int], dict[int, int]] = {}
        for copy in plan.orders:
            if copy.kind == "poison":
                self.held.pop(copy.number, None)
                self.memory[copy.number] = POISON
                continue
            told, key, group = plan.groups[copy.group], (copy.req_id, copy.group), worker.groups[copy.group]
            waits = copy.req_id in told.parked or copy.req_id in told.restored
            row = worker.rows[copy.req_id] if waits else worker._alive(copy.req_id, "a copy")
            at = where.setdefault(key, {block: at for at, block in enumerate(row.tables[group]) if block})
            if copy.kind == "save":
                if copy.physical not in at:  # it was still there when it came back, and the worker was not told
                    holes = [block for block, number in enumerate(row.tables[group]) if not number]
                    same = [b for b in holes if (row.expected[group][b] == worker.memory[copy.physical]).all()]
                    at |= dict.fromkeys([copy.physical] if same else [], next(iter(same), -1))
                if copy.physical not in at or copy.req_id not in told.parked:
                    raise Fault("host", f"{copy.req_id} saves block {copy.physical}, it holds {row.tables[group]}")
                self.memory[copy.number] = worker.memory[copy.physical]
                self.held[copy.number] = copy.req_id, at[copy.physical]
                self.saved.add(copy.number)
                worker.counts.saved += 1
                continue
            self.saved.discard(copy.number)
            if copy.kind == "spill":
                if copy.physical not in at:
                    raise Fault("host", f"{copy.req_id} spills block {copy.physical}, it holds {row.tables[group]}")
                logical = at.pop(copy.physical)
                worker._same(copy.req_id, group, row, [logical], [copy.physical])
                self.memory[copy.number] = worker.memory[copy.physical]
                self.held[copy.number] = copy.req_id, logical
                came.get(key, {}).pop(logical, None)
                worker.counts.spilled += 1
                continue
            whose, logical = self.held.pop(copy.number, (None, -1))
            if copy.req_id in told.restored:
                if whose != copy.req_id:
                    raise Fault("host", f"{copy}: the host block is of {whose}")
                worker.memory[copy.physical] = self.memory[copy.number]
                worker.written.add(copy.physical)
                worker.counts.fetched += 1
                continue
            # A block that the host has no room for is not copied before others take its place.
            gone = at.get(copy.physical) in (None, *holes_of(plan.groups[copy.group].changes).get(copy.req_id, ()))
            if whose != copy.req_id or not (gone or copy.req_id in told.parked):
                raise Fault("host", f"{copy}: the host block is of {whose}, blocks of the request {at}")
            worker.memory[copy.physical] = self.memory[copy.number]
            worker._same(copy.req_id, group, row, [logical], [copy.physical])
            worker.written.add(copy.physical)
            at[copy.physical] = logical
            if copy.req_id not in told.parked:
                came.setdefault(key, {})[logical] = copy.physical
            worker.counts.fetched += 1
        return came

    def check_waiting(self, req_id: str, logical: list[int], numbers: list[int]) -> None:
        """Check that host blocks that are scored hold what the plan says."""
        held = [self.held.get(number) for number in numbers]
        if held != [(req_id, block) for block in logical] or logical != sorted(set(logical)):
            raise Fault("host", f"{req_id} waits for {logical} on {numbers}, which hold {held}")


class HostInvariants:
    """The checks of a `Simulation` whose server has a host pool."""

    scheduler: Scheduler
    worker: "Worker"
    counts: Counter[str]

    def _check_host(self) -> None:
        """*host*: each host block is free, or one request holds it for one hole; worker and scheduler agree whose it is.

        Blocks that came back are private, or published as they were.
        """
        pool, manager = self.scheduler.part(Offloading).pool, self.evictable[0]
        held: dict[int, tuple[str, int]] = {}
        for req_id, resident in manager.residents.items():
            table = manager.req_to_blocks.get(req_id, ())
            for logical, (number, *_) in resident.residence.host.items():
                there = resident.residence.saved is None and (logical >= len(table) or not table[logical].is_null)
                if number in held or there:
                    raise Fault("host", f"{req_id}: host block {number} for block {logical} of {len(table)}; {held}")
                held[number] = req_id, logical
                if pool._held.get(number) != (resident, logical):
                    raise Fault(
                        "host", f"{req_id}: host block {number} is for block {logical}, in the pool's books not"
                    )
            if resident.residence.saved is not None:
                if table or held.keys() & set(resident.residence.saved.numbers.values()):
                    raise Fault("host", f"{req_id} is saved on {resident.residence.saved.numbers}; {held}; {table}")
                held |= {number: (req_id, logical) for logical, number in resident.residence.saved.numbers.items()}
        free = pool._free
        if len(set(free)) < len(free) or held.keys() & set(free) or len(free) + len(held) != pool.blocks:
            raise Fault("host", f"of {pool.blocks} host blocks {free} are free, {sorted(held)} held")
        # A worker does not hear of a block that was dropped for one whose request ended before it was copied.
        if held.items() - self.worker.host.held.items():
            raise Fault("host", f"the scheduler's host blocks are {held}, the worker's {self.worker.host.held}")
        for req_id, row in self.worker.rows.items():
            # A worker hears with the next step that a session starts over, whose blocks are free by then.
            for logical in row.recalled if row.active and manager.req_to_blocks.get(req_id) else ():
                block = self.pool.blocks[row.tables[self.worker.groups[0]][logical]]
                if block.ref_cnt != 1 and block.block_hash is None:
                    raise Fault("host", f"{req_id}: block {logical} came back and is not private: {block}")

    def _watch_recalls(self) -> None:
        """*recall*: see that what came back since the last step leaves each running request the blocks that it needs.

        A request that is preempted in the next step for want of blocks would have been without the recall.
        """
        apply, allocate = self.scheduler.apply, self.cache.allocate_slots

        def applied(action: Any) -> None:
            before = self.pool.get_num_free_blocks()
            apply(action)
            if isinstance(action, Swap):
                self._taken += before - self.pool.get_num_free_blocks()

        def watched(request: Request, *args: Any, **kwargs: Any) -> Any:
            blocks, free = allocate(request, *args, **kwargs), self.pool.get_num_free_blocks()
            lacked = blocks is None and request.status == RequestStatus.RUNNING
            if lacked and self._taken > 0 and free + self._taken >= self.evictable[0].wanted:
                raise Fault("recall", f"{request.request_id} lacks blocks, recalls have taken {self._taken}")
            return blocks

        self.scheduler.apply, self.cache.allocate_slots = applied, watched

    def _check_no_host_left(self) -> None:
        scheduler, pool = self.scheduler, self.scheduler.part(Offloading).pool
        if pool.used or pool._saved or sorted(pool._free) != list(range(pool.blocks)) or self.worker.host.held:
            raise Fault("left", f"host blocks {pool._held}, {len(pool._free)} of {pool.blocks} are free")
        if scheduler._plan.rewound or any(copy.kind != "poison" for copy in scheduler._plan.orders):
            raise Fault("left", f"of plans: {scheduler._plan.rewound}, {scheduler._plan.orders}")
