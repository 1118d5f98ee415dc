"""Evicted blocks that wait in host memory: which host block holds which, and what workers copy."""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from .blocks import RequestBlocks
from .plan import EvictionPlan, Order
from .residence import Offloaded, Saved


@dataclass(frozen=True, slots=True)
class Copy(Order):
    """Copies one block between a device and the host.

    Attributes:
        kind: `spill`, from the device to the host; `save`, the same of a preempted request; `fetch`, back; `poison`,
            the host block is filled with NaN (tests).
        physical: block of the device.
        number: block of the host.
        logical: block of the request, of a `spill`.
    """

    #: A preempted request may be saved with blocks that the same plan brings back.
    saves: ClassVar[bool] = True

    kind: str
    physical: int
    number: int
    logical: int = -1


class OffloadPool:
    """Host blocks of one engine, by number; all requests share them.

    A block that leaves a request takes a free host block. If none is free, the host block goes that was filled, or
    wanted by a query, longest ago: its content is dropped. Blocks of preempted requests are never dropped.

    Args:
        blocks: of the pool.
        poison: test mode: free host blocks are filled with NaN.
    """

    def __init__(self, blocks: int, poison: bool = False) -> None:
        self.blocks, self._poison = blocks, poison
        self._free = list(range(blocks - 1, -1, -1))
        #: Host block -> the request's blocks and the logical block that it holds, longest unwanted first.
        self._held: OrderedDict[int, tuple[RequestBlocks, int]] = OrderedDict()
        #: Host blocks of preempted requests.
        self._saved: set[int] = set()

    @property
    def free(self) -> int:
        """Host blocks that hold nothing."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Host blocks that hold something."""
        return len(self._held) + len(self._saved)

    def spill(
        self, plan: EvictionPlan, req_id: str, group: int, blocks: RequestBlocks, logical: Sequence[int],
        physical: Sequence[int], coming: Collection[int] = (),
    ) -> list[RequestBlocks]:  # fmt: skip
        """Keep blocks that a request loses.

        Args:
            plan: of the next step, in which workers copy them.
            req_id, group: id of the request, number of the KV group.
            blocks: the request's blocks in that group.
            logical, physical: the blocks.
            coming: host blocks that come back with this decision. They are not dropped for blocks that go for them.

        Returns:
            For each host block that was dropped for them, the blocks of the request that lost it.
        """
        dropped: list[RequestBlocks] = []
        if not self.blocks:
            return dropped
        for index, block in zip(logical, physical):
            if not self._free:
                oldest = next((number for number in self._held if number not in coming), None)
                if oldest is None:
                    blocks.state.counts["dropped"] += 1
                    dropped.append(blocks)
                    continue
                dropped.append(self._drop(oldest))
            number = self._free.pop()
            self._held[number] = blocks, index
            blocks.residence.host[index] = Offloaded(number)
            plan.orders.append(Copy(req_id, group, "spill", block, number, index))
            blocks.state.counts["spilled"] += 1
        return dropped

    def fetch(
        self, plan: EvictionPlan, req_id: str, group: int, blocks: RequestBlocks, logical: Sequence[int],
        physical: Sequence[int], intact: Collection[int] = (),
    ) -> None:  # fmt: skip
        """Bring blocks back into `physical` blocks of the device; arguments as for `spill`.

        `intact`: of `logical`, blocks that are not copied, as their content is still in the device's block.
        """
        numbers = [blocks.residence.host.pop(index).number for index in logical]
        for index, block, number in zip(logical, physical, numbers):
            if index not in intact:
                plan.orders.append(Copy(req_id, group, "fetch", block, number))
        blocks.state.counts["recalled"] += len(logical)
        self._give_back(plan, numbers)

    def save(
        self, plan: EvictionPlan, req_id: str, group: int, blocks: RequestBlocks, physical: dict[int, int],
        computed_tokens: int,
    ) -> list[RequestBlocks] | None:  # fmt: skip
        """Keep all blocks of a request that is preempted, if they fit beside those of other preempted requests.

        Evicted blocks of other requests are dropped for them, those first that were wanted longest ago.

        Args:
            plan, req_id, group, blocks: as for `spill`.
            physical: logical block -> block of the device, ascending, of all resident blocks.
            computed_tokens: tokens that they hold.

        Returns:
            As `spill`; None, with nothing changed, if they do not fit.
        """
        others = [number for number, (owner, _) in self._held.items() if owner is not blocks]
        missing = max(len(physical) - len(self._free), 0)
        if missing > len(others):
            return None
        dropped = [self._drop(number) for number in others[:missing]]
        saved = blocks.residence.saved = Saved(computed_tokens, {index: self._free.pop() for index in physical})
        self._saved.update(saved.numbers.values())
        for index, number in saved.numbers.items():
            plan.orders.append(Copy(req_id, group, "save", physical[index], number))
        return dropped

    def restore(self, plan: EvictionPlan, req_id: str, group: int, blocks: RequestBlocks, saved: Saved) -> None:
        """Bring the saved blocks of a request back into `Saved.coming`. Its other blocks came from elsewhere."""
        blocks.residence.saved = None
        for index, block in saved.coming.items():
            plan.orders.append(Copy(req_id, group, "fetch", block, saved.numbers[index]))
        self._give_back(plan, list(saved.numbers.values()))

    def close(self) -> list[RequestBlocks]:
        """Drop all blocks, and keep nothing any more.

        Returns:
            For each host block that was dropped, the blocks of the request that lost it.
        """
        losers = [blocks for blocks, _ in self._held.values()]
        for blocks, logical in self._held.values():
            del blocks.residence.host[logical]
            blocks.state.counts["dropped"] += 1
        self._held.clear()
        self._free, self.blocks = [], 0
        return losers

    def want(self, blocks: RequestBlocks, logical: Sequence[int]) -> None:
        """Have these host blocks of a request dropped last: queries want them."""
        for index in logical:
            self._held.move_to_end(blocks.residence.host[index].number)

    def release(self, plan: EvictionPlan, blocks: RequestBlocks) -> None:
        """Keep nothing of a request any more: it has ended, or starts over."""
        residence = blocks.residence
        saved = () if residence.saved is None else residence.saved.numbers.values()
        self._give_back(plan, [*(each.number for each in residence.host.values()), *saved])
        residence.host, residence.saved = {}, None

    def _drop(self, number: int) -> RequestBlocks:
        """Drop the content of a host block; return the blocks of the request that loses it."""
        loser, lost = self._held.pop(number)
        del loser.residence.host[lost]
        loser.state.counts["dropped"] += 1
        self._free.append(number)
        return loser

    def _give_back(self, plan: EvictionPlan, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._held.pop(number, None)
        self._saved.difference_update(numbers)
        self._free += reversed(numbers)
        if self._poison:
            plan.orders += [Copy("", 0, "poison", 0, number) for number in numbers]
