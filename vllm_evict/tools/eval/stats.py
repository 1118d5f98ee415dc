"""Intervals of scores, and tests of differences."""

import itertools
import math
from collections.abc import Sequence

import numpy as np

ALPHA = 0.05
RESAMPLES = 4000
#: Share of right answers, or of a perplexity, from which on a difference matters.
MATTERS = 0.1
#: Fewest prompts in which a test can tell such a difference: 6 of them, all one way, have p = 0.03, and 5 have 0.06.
FEWEST = 60
#: Up to this number of differences all sign patterns are tried.
EXACT = 12


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """95 % percentile interval of a mean; that of one value is unbounded."""
    scores = np.asarray(values, dtype=float)
    if len(scores) < 2:
        return -math.inf, math.inf
    picks = np.random.default_rng(0).integers(len(scores), size=(RESAMPLES, len(scores)))
    low, high = np.quantile(scores[picks].mean(1), [0.025, 0.975])
    return float(low), float(high)


def interval(scores: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a mean score: Wilson's if every score is 0 or 1, else by bootstrap."""
    if all(s in (0, 1) for s in scores):
        return wilson(sum(scores), len(scores))
    return bootstrap(scores)


def p_value(differences: Sequence[float]) -> float:
    """Two-sided p of "the differences are as likely up as down": paired sign-flip test.

    For scores of 0 and 1 it is McNemar's exact test. Differences of 0 are left out; 1.0 if no other is left.
    """
    d = np.array([x for x in differences if x], dtype=float)
    if not len(d):
        return 1.0
    observed = abs(d.sum()) - 1e-12
    if len(d) <= EXACT:
        signs = np.array(list(itertools.product((1, -1), repeat=len(d))))
        return float((np.abs(signs @ d) >= observed).mean())
    if np.all(np.abs(d) == abs(d[0])):
        fewer, n = min((d > 0).sum(), (d < 0).sum()), len(d)
        return min(1.0, 2 * sum(math.comb(n, k) for k in range(fewer + 1)) / 2**n)
    signs = np.random.default_rng(0).choice((1, -1), size=(RESAMPLES, len(d)))
    return float(((np.abs(signs @ d) >= observed).sum() + 1) / (RESAMPLES + 1))


def kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """Kendall's tau-b of two orders of the same things: 1 for the same, -1 for the reverse; NaN without an order."""
    signs = [np.sign(np.subtract.outer(x, x))[np.triu_indices(len(x), 1)] for x in (first, second)]
    norm = math.sqrt(math.prod(np.count_nonzero(sign) for sign in signs))
    return float((signs[0] * signs[1]).sum() / norm) if norm else math.nan


def wilson(right: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of the share `right` of `n` (Wilson, 1927, which holds at 0 and 1 and for small n)."""
    z2 = 1.959964**2
    share = right / n
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2) / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)
