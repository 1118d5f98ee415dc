"""Host blocks that layers read, and copies of them. Requests with the same content share one host block."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from .blocks import RequestBlocks
from .plan import EvictionPlan, Order, Payload

#: Attribute of a `ModelRunnerOutput` that holds what layers of decodes have read on the host, request -> int32 [3], by
#: `COUNTED`; absent without any.
READ_ON_HOST = "kv_evict_read_on_host"
#: What is counted of blocks that a layer has chosen on the host: those that it copied into the room, those that were
#: there, and those that the bound `fetch` cut.
COUNTED = ("fetched", "in_room", "cut")


@dataclass(frozen=True, slots=True)
class Copy(Order):
    """Copies one block between a device and the host.

    Attributes:
        kind: `spill`, from the device to the host; `fetch`, back; `poison`, the host block is filled with NaN (tests).
        physical: block of the device.
        number: block of the host.
    """

    kind: str
    physical: int
    number: int


class RoomOf(NamedTuple):
    """The device blocks of a request into which workers bring what its layers read from the host.

    Attributes:
        first: its first logical block; blocks before it are sinks.
        blocks: their number.
        recent: blocks at the end of the request that layers always read.
    """

    first: int
    blocks: int
    recent: int


@dataclass(slots=True)
class Reached(Payload):
    """Blocks of the host that layers read from a step on.

    Attributes:
        rooms: request -> its room, whose blocks hold what workers choose from this step on.
        blocks: request -> {logical block: host block}.
    """

    feature = "host"

    rooms: dict[str, RoomOf] = field(default_factory=dict)
    blocks: dict[str, dict[int, int]] = field(default_factory=dict)


def runs(copies: Iterable[Copy]) -> Iterator[tuple[str, list[Copy]]]:
    """Yield successive copies of one kind, and the kind. Of those to one block the last one stays.

    A host block may be dropped, and written again, by one plan.
    """
    for kind, run in groupby(copies, key=lambda copy: copy.kind):
        to = {copy.physical if kind == "fetch" else copy.number: copy for copy in run}
        yield kind, list(to.values())


class HostPool:
    """Host blocks of one engine, by number.

    A block of pure tokens has a hash, under which other requests find it: a prefix that requests share is there once.
    It stays when no request uses it any more, until its room is needed: the block that was used longest ago goes first.
    What a request uses is never dropped.

    Args:
        blocks: of the pool.
        poison: test mode: free host blocks are filled with NaN.
    """

    def __init__(self, blocks: int, poison: bool = False) -> None:
        self.blocks, self._poison = blocks, poison
        self._free = list(range(blocks - 1, -1, -1))
        #: Host block -> requests that use it, one at least.
        self._users: dict[int, int] = {}
        #: Host blocks that no request uses, the one that was used longest ago first.
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._numbers: dict[Hashable, int] = {}
        self._hashes: dict[int, Hashable] = {}
        #: Hashes that came to the host (True) or left it, in this order, since they were last taken; None: not noted.
        self.moved: list[tuple[Hashable, bool]] | None = None

    @property
    def available(self) -> int:
        """Host blocks that no request uses."""
        return len(self._free) + len(self._unused)

    @property
    def used(self) -> int:
        """Host blocks that hold something."""
        return self.blocks - len(self._free)

    @property
    def unused(self) -> int:
        """Host blocks that hold something, and that no request uses."""
        return len(self._unused)

    def find(self, block_hash: Hashable) -> int | None:
        """Return the host block with this hash; None if there is none."""
        return self._numbers.get(block_hash)

    def fitting(self, hashes: Sequence[Hashable]) -> int:
        """Return how many of some blocks, from the first one on, a request can use: those that are there take no room.

        Args:
            hashes: of each block; None: it has none.
        """
        left = self.available
        for count, block_hash in enumerate(hashes):
            number = self.find(block_hash)
            left -= number is None or number in self._unused
            if left < 0:
                return count
        return len(hashes)

    def spill(
        self, plan: EvictionPlan, req_id: str, group: int, blocks: RequestBlocks, logical: Sequence[int],
        physical: Sequence[int], hashes: Sequence[Hashable],
    ) -> None:  # fmt: skip
        """Put blocks of a request on the host, which has room for them (`fitting`); those that are there are shared.

        Args:
            plan: of the next step, in which workers copy them.
            req_id, group: id of the request, number of the KV group.
            blocks: the request's blocks in that group.
            logical, physical: the blocks.
            hashes: of each block; None: it has none.
        """
        shared = [(index, number) for index, each in zip(logical, hashes) if (number := self.find(each)) is not None]
        for _, number in shared:
            self.use(number)
        there = dict(shared)
        for index, block, block_hash in zip(logical, physical, hashes):
            if index not in there:
                there[index] = self._copy(plan, req_id, group, block, block_hash)
                self.use(there[index])
                blocks.state.counts["spilled"] += 1
        self.give(plan, req_id, group, blocks, there)

    def give(self, plan: EvictionPlan, req_id: str, group: int, blocks: RequestBlocks, there: dict[int, int]) -> None:
        """Note that a request has {logical block: host block}, which it uses, and tell workers so."""
        blocks.residence.host |= there
        Reached.add_to(plan.groups[group]).blocks.setdefault(req_id, {}).update(there)

    def keep(self, plan: EvictionPlan, group: int, block_hash: Hashable, physical: int) -> int | None:
        """Keep a block that no request needs, until its room is needed.

        Returns:
            Its host block; None: there is no room.
        """
        number = self.find(block_hash)
        if number is None and self.available:
            number = self._copy(plan, "", group, physical, block_hash)
            self._unused[number] = None
        elif number is not None and number in self._unused:
            self._unused.move_to_end(number)
        return number

    def use(self, number: int) -> None:
        """Note that one more request uses a host block."""
        self._unused.pop(number, None)
        self._users[number] = self._users.get(number, 0) + 1

    def leave(self, plan: EvictionPlan, numbers: Sequence[int]) -> None:
        """Note that a request uses host blocks no more; the last of them are the first whose room is taken."""
        for number in reversed(numbers):
            self._users[number] -= 1
            if self._users[number]:
                continue
            del self._users[number]
            if number in self._hashes:
                self._unused[number] = None
            else:
                self._give_back(plan, number)

    def release(self, plan: EvictionPlan, blocks: RequestBlocks) -> None:
        """Keep what a request had only for others: it has ended, or starts over."""
        host, blocks.residence.host = blocks.residence.host, {}
        self.leave(plan, [host[index] for index in sorted(host)])

    def forget(self, plan: EvictionPlan) -> None:
        """Forget all hashes: what host blocks hold is of no use to a request that starts now."""
        unused, self._unused = self._unused, OrderedDict()
        self._note(self._numbers, False)
        self._numbers.clear()
        self._hashes.clear()
        for number in unused:
            self._give_back(plan, number)

    def _copy(self, plan: EvictionPlan, req_id: str, group: int, physical: int, block_hash: Hashable) -> int:
        """Have workers copy a block to the host; return its host block."""
        if not self._free:
            dropped, _ = self._unused.popitem(last=False)
            gone = self._hashes.pop(dropped)
            self._note([gone], False)
            del self._numbers[gone]
            self._free.append(dropped)
        number = self._free.pop()
        if block_hash is not None:
            self._numbers[block_hash], self._hashes[number] = number, block_hash
            self._note([block_hash], True)
        # What other requests may use is copied though the request ends in the same step.
        plan.orders.append(Copy("" if block_hash is not None else req_id, group, "spill", physical, number))
        return number

    def _note(self, hashes: Iterable[Hashable], there: bool) -> None:
        if self.moved is not None:
            self.moved += [(each, there) for each in hashes]

    def _give_back(self, plan: EvictionPlan, number: int) -> None:
        self._free.append(number)
        if self._poison:
            plan.orders.append(Copy("", 0, "poison", 0, number))
