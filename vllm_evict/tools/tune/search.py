"""Which budget meets a target: a search on one half of the prompts, and a confirmation on the other. No engine here."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from ..eval.stats import wilson

#: Of a 95 % interval: standard errors on each side.
Z = 1.959964
#: Standard errors that four of five estimates reach: a number of prompts that is needed confirms that often.
POWER = 0.841621
#: Budgets that the second half of the prompts may confirm, from the one that the search finds upwards.
CHAIN = 3


@dataclass(frozen=True)
class Figure:
    """Scores of the audited answers of one policy and budget.

    Attributes:
        scores: of each answer, from 0 to 1; answers of requests that lost no block do not count.
        skipped: answers that were not audited.
    """

    scores: tuple[float, ...]
    skipped: int = 0

    @property
    def n(self) -> int:
        return len(self.scores)

    @property
    def share(self) -> float:
        """The mean; 1 if no request lost a block."""
        return fmean(self.scores) if self.scores else 1.0

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the mean, Wilson's; it is wider than need be for scores between 0 and 1."""
        return wilson(sum(self.scores), self.n) if self.scores else (0.0, 1.0)

    @property
    def lost_nothing(self) -> bool:
        """Whether no request lost a block, so that no answer can have changed. Answers that were skipped may have."""
        return not self.scores and not self.skipped

    def meets(self, target: float) -> bool:
        """Return whether the share is at least the target."""
        return self.lost_nothing or (self.n > 0 and self.share >= target)

    def confirms(self, target: float) -> bool:
        """Return whether the share is at least the target, beyond chance."""
        return self.lost_nothing or self.interval[0] >= target

    def needed(self, target: float) -> int | None:
        """Return how many answers with this share confirm a target four times of five; None if no number would."""
        if not self.n or self.share <= target:
            return None
        # Wilson's bound is at the target where the share is Z standard errors, taken at the target, away from it.
        distance = Z * math.sqrt(target * (1 - target)) + POWER * math.sqrt(self.share * (1 - self.share))
        return math.ceil((distance / (self.share - target)) ** 2)


def least(target: float) -> int:
    """Return how many answers confirm a target if all of them are right."""
    return Figure((1.0,)).needed(target) or 0


def smallest(count: int, meets: Callable[[int], bool]) -> int | None:
    """Return the index at which a rising curve begins to meet a target, by bisection; None if its end does not.

    A curve that is not monotone may do so at several indices. The result is one of them: `meets` was called for it and,
    if it is not 0, for the one before it.

    Args:
        count: of indices.
        meets: measures one index.
    """
    below, above = -1, count
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if meets(middle) else (middle, above)
    return above if above < count else None


def most_measured(count: int) -> int:
    """Return the most indices that `smallest` measures."""
    return count.bit_length()


def chain(found: int, count: int) -> list[int]:
    """Return the indices to confirm, in order: downwards, to the one that the search found."""
    return list(range(min(found + CHAIN, count) - 1, found - 1, -1))


def confirmed(indices: Sequence[int], confirms: Callable[[int], bool]) -> int | None:
    """Return the last index before the first that is not confirmed; None if there is none.

    The order does not depend on the prompts that confirm. So the chance that they confirm any budget below the target
    is that of a single interval, however many are tried (a fixed sequence of tests).
    """
    last = None
    for index in indices:
        if not confirms(index):
            break
        last = index
    return last
