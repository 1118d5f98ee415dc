"""Evicted blocks that wait in host memory: which host block holds which, and what workers copy."""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .plan import Copy, EvictionPlan

if TYPE_CHECKING:
    from .blocks import RequestBlocks

#: Of blocks that came back: below so many nothing is said of a request; then recall ends for it if more than half of
#: them left again at once.
FEW_RETURNS = 32
#: Most periods of `recall_every` decodes from one look to the next.
LONGEST_PAUSE = 32


@dataclass(slots=True)
class Recalls:
    """What recall has done for one request since it started, or since its turn began.

    Attributes:
        rounds: times that the last tokens of its prompt were computed again.
        waits: whether the last token of its prompt waits for scores of host blocks.
        answered: whether the last token of its prompt was computed, or is in flight.
        steps: decodes since its host blocks were looked at.
        is_due: whether they are looked at with the step that computes the last token of its prompt.
        returned, bounced: blocks that came back in decodes, and those of them that left again while they were to stay.
        in_a_row: looks of decodes that brought blocks back, since the last one that brought none.
    """

    rounds: int = 0
    waits: bool = False
    answered: bool = False
    steps: int = 0
    is_due: bool = False
    returned: int = 0
    bounced: int = 0
    in_a_row: int = 0

    @property
    def pause(self) -> int:
        """Periods of `recall_every` decodes to the next look: blocks that come back look after look may take turns."""
        return min(1 << max(self.in_a_row - 1, 0), LONGEST_PAUSE)

    @property
    def is_vain(self) -> bool:
        """Whether blocks leave again about as soon as they come back."""
        return self.returned >= FEW_RETURNS and 2 * self.bounced > self.returned


@dataclass(slots=True)
class Saved:
    """Where the blocks of a preempted request wait.

    Attributes:
        computed_tokens: tokens that they hold.
        numbers: logical block -> host block, ascending.
        coming: of these, logical block -> block of the device, once the request goes on and until workers hear of it.
    """

    computed_tokens: int
    numbers: dict[int, int]
    coming: dict[int, int] = field(default_factory=dict)


class HostPool:
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
    def used(self) -> int:
        """Host blocks that hold something."""
        return len(self._held) + len(self._saved)

    def spill(
        self, plan: EvictionPlan, req_id: str, group: int, blocks: "RequestBlocks", logical: Sequence[int],
        physical: Sequence[int], coming: Collection[int] = (),
    ) -> "list[RequestBlocks]":  # fmt: skip
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
                    blocks.state.dropped_blocks += 1
                    dropped.append(blocks)
                    continue
                dropped.append(self._drop(oldest))
            number = self._free.pop()
            self._held[number] = blocks, index
            blocks.host[index] = number
            plan.copies.append(Copy(req_id, group, "spill", block, number))
            blocks.state.spilled_blocks += 1
        return dropped

    def fetch(
        self, plan: EvictionPlan, req_id: str, group: int, blocks: "RequestBlocks", logical: Sequence[int],
        physical: Sequence[int], intact: Collection[int] = (),
    ) -> None:  # fmt: skip
        """Bring blocks back into `physical` blocks of the device; arguments as for `spill`.

        `intact`: of `logical`, blocks that are not copied, as their content is still in the device's block.
        """
        numbers = [blocks.host.pop(index) for index in logical]
        for index, block, number in zip(logical, physical, numbers):
            if index not in intact:
                plan.copies.append(Copy(req_id, group, "fetch", block, number))
        blocks.state.recalled_blocks += len(logical)
        self._give_back(plan, numbers)

    def save(
        self, plan: EvictionPlan, req_id: str, group: int, blocks: "RequestBlocks", physical: dict[int, int],
        computed_tokens: int,
    ) -> "list[RequestBlocks] | None":  # fmt: skip
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
        blocks.saved = Saved(computed_tokens, {index: self._free.pop() for index in physical})
        self._saved.update(blocks.saved.numbers.values())
        for index, number in blocks.saved.numbers.items():
            plan.copies.append(Copy(req_id, group, "save", physical[index], number))
        return dropped

    def restore(self, plan: EvictionPlan, req_id: str, group: int, blocks: "RequestBlocks") -> None:
        """Bring the blocks of a preempted request back into `Saved.coming`. Its other blocks came from elsewhere."""
        assert blocks.saved is not None
        saved, blocks.saved = blocks.saved, None
        for index, block in saved.coming.items():
            plan.copies.append(Copy(req_id, group, "fetch", block, saved.numbers[index]))
        self._give_back(plan, list(saved.numbers.values()))

    def close(self) -> list["RequestBlocks"]:
        """Keep nothing any more.

        Returns:
            For each host block that was dropped, the blocks of the request that lost it.
        """
        losers = [blocks for blocks, _ in self._held.values()]
        for blocks, logical in self._held.values():
            del blocks.host[logical]
            blocks.left.pop(logical, None)
            blocks.state.dropped_blocks += 1
        self._held.clear()
        self._free, self.blocks = [], 0
        return losers

    def want(self, blocks: "RequestBlocks", logical: Sequence[int]) -> None:
        """Queries want these host blocks of a request: they are dropped last."""
        for index in logical:
            self._held.move_to_end(blocks.host[index])

    def release(self, plan: EvictionPlan, blocks: "RequestBlocks") -> None:
        """A request has ended, or starts over: nothing of it is kept."""
        saved = () if blocks.saved is None else blocks.saved.numbers.values()
        self._give_back(plan, [*blocks.host.values(), *saved])
        blocks.host, blocks.left, blocks.saved = {}, {}, None

    def _drop(self, number: int) -> "RequestBlocks":
        """Drop the content of a host block; returns the blocks of the request that loses it."""
        loser, lost = self._held.pop(number)
        del loser.host[lost]
        loser.left.pop(lost, None)
        loser.state.dropped_blocks += 1
        self._free.append(number)
        return loser

    def _give_back(self, plan: EvictionPlan, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._held.pop(number, None)
        self._saved.difference_update(numbers)
        self._free += reversed(numbers)
        if self._poison:
            plan.copies += [Copy("", 0, "poison", 0, number) for number in numbers]
