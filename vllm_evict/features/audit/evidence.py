"""Evidence about a share that holds at any time: one may look after each answer, for as long as a server runs."""

import functools
import math
from typing import Any

import numpy as np

#: Most of all servers that meet a bound of which chance says, at any time, that they miss it.
CHANCE = 0.05
#: Shares below a bound that evidence is collected for.
ALTERNATIVES = 24
#: Fewest answers on which a share is judged.
FEWEST = 30
#: Share of prompts that have to have the lengths that a promise was measured on.
ALIKE = 0.8


def evidence_below(right: Any, n: Any, bound: float) -> Any:
    """Return how strongly `right` of `n` say that a share is below a bound, as a logarithm.

    The evidence is a mean of likelihood ratios, of shares below the bound to the bound. Of a share that is at the bound
    or above, it ever exceeds log(1 / a) with a probability of at most a, after however many answers (Ville, 1939).

    Args:
        right: answers that count; a number, or an array of any shape.
        n: all answers, as `right`.
        bound: 0 to 1.

    Returns:
        float64, of the shape of `right`.
    """
    if not 0 < bound < 1:
        return np.where(bound == 1, np.where(np.asarray(n) > right, math.inf, -math.inf), -math.inf)[()]
    of_right, of_wrong = _ratios(bound)
    ratios = np.multiply.outer(right, of_right) + np.multiply.outer(np.subtract(n, right), of_wrong)
    return np.logaddexp.reduce(ratios, axis=-1) - math.log(len(of_right))


@functools.lru_cache(maxsize=64)
def _ratios(bound: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the logarithms of ratios for each share below a bound: of an answer that counts, and of another one."""
    # Shares of other answers, from the bound's own up to 1, each by the same factor above the one before.
    others = (1 - bound) ** (1 - np.arange(1, ALTERNATIVES) / ALTERNATIVES)
    return np.log((1 - others) / bound), np.log(others / (1 - bound))


def evidence_above(right: Any, n: Any, bound: float) -> Any:
    """Return how strongly `right` of `n` say that a share is above a bound (see `evidence_below`)."""
    return evidence_below(np.subtract(n, right), n, 1 - bound)


def interval(right: float, n: int) -> tuple[float, float]:
    """Return the interval that has the share of `right` of `n` answers so far: at all times at once, with 95 %."""
    strong, ends = math.log(2 / CHANCE), []
    for end, evidence in ((0.0, evidence_above), (1.0, evidence_below)):
        inside, outside = right / n, end
        for _ in range(24):
            middle = (inside + outside) / 2
            inside, outside = (inside, middle) if evidence(right, n, middle) >= strong else (middle, outside)
        ends.append(end if inside == end else outside)
    return ends[0], ends[1]


class Watched:
    """A share that is watched for as long as a server runs: whether it stays at a bound or above.

    Once the answers since the last verdict say beyond chance that the share is below the bound, or above it, that is
    the verdict, and answers count anew: so a long good time hides no bad one. A share that never is below the bound
    gets a wrong verdict with a probability of at most `CHANCE`, over all verdicts.

    Args:
        bound: 0 to 1.

    Attributes:
        kept: whether the last verdict was that the share is at the bound or above; True before the first.
        right, n: answers since the last verdict: those that count, and all.
    """

    def __init__(self, bound: float) -> None:
        self.bound, self.kept = bound, True
        self._verdicts, self._judged = 0, False
        self.restart()

    def restart(self) -> None:
        """Count answers anew."""
        self.right, self.n, self._judged = 0, 0, False

    def add(self, right: bool) -> bool | None:
        """Count an answer.

        Returns:
            The verdict that follows from it: whether the share is kept; None: there is none. The counts of a verdict
            stay until the next call.
        """
        if self._judged:
            self.restart()
        self.right, self.n = self.right + bool(right), self.n + 1
        if self.n < FEWEST:
            return None
        # The chances of all verdicts add up to `CHANCE`.
        strong = math.log((self._verdicts + 1) * (self._verdicts + 2) / CHANCE)
        evidence = evidence_above if right else evidence_below
        if evidence(self.right, self.n, self.bound) < strong:
            return None
        self._verdicts, self._judged, self.kept = self._verdicts + 1, True, bool(right)
        return self.kept


class Promise:
    """That a share of answers is identical, on traffic like that on which it was measured.

    It is withdrawn when audits say that the share is missed, or when prompts get other lengths. It is renewed when
    audits of later answers confirm the share, or when prompts of the measured lengths come back.

    Args:
        target: share of identical answers.
        range: tokens of the prompts that it was measured on, the shortest and the longest; None: of any.

    Attributes:
        target: the share of identical answers.
        watched: the share of prompts in `range`.
        left: whether prompts have other lengths.
    """

    def __init__(self, target: float, range: tuple[int, int] | None) -> None:
        self.target, self.watched, self.left = Watched(target), Watched(ALIKE), False
        self.range = range or (0, 0)
        #: Whether the promise is about prompts in `range`: until audits confirm it for others.
        self._of_range = range is not None

    @property
    def kept(self) -> bool:
        return self.target.kept and not self.left

    def draw(self, tokens: int) -> bool | None:
        """Count the prompt of an answer; return whether prompts have the measured lengths, if that has changed."""
        alike = self.watched.add(self.range[0] <= tokens <= self.range[1]) if self._of_range else None
        if alike is None or alike is not self.left:
            return None
        self.left = not alike
        self.target.restart()  # earlier answers say nothing of this traffic
        return alike

    def audit(self, identical: bool) -> bool | None:
        """Count an audit; return True if it renews the promise, False if it is the one that misses it, else None."""
        known, kept = self.target.kept, self.kept
        verdict = self.target.add(identical)
        if verdict and self.left:
            self.left = self._of_range = False
        if verdict:
            return None if kept else True
        return False if verdict is False and known else None
