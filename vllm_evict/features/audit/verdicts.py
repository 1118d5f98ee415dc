"""Verdicts of audits: how full attention scores an answer that a request got under its policy."""

from typing import NamedTuple

import numpy as np

from ...core.plan import Report
from ...core.reports import flaw

#: Nats by which full attention has to prefer a token of its own, so that an answer counts as changed: above what bf16
#: and the make-up of batches change by themselves.
CLEARLY = 0.5
#: Shares of its blocks that a request kept, as metrics name them -> their lower bound.
KEPT = {"50-100": 0.5, "25-50": 0.25, "10-25": 0.1, "0-10": 0.0}
#: Label of requests that lost no block: the control.
CONTROL = "all"


def kept_label(evicted: int, held: int, blocks: int) -> str:
    """Return the label of the share of its blocks that a request kept.

    Args:
        evicted: blocks that it lost, those before a restart included.
        held: blocks that it holds at its end.
        blocks: blocks that all its tokens fill; 0 if it holds none and nothing else is known.
    """
    if not evicted:
        return CONTROL
    return next(label for label, least in KEPT.items() if not least or (blocks and held >= least * blocks))


class Verdict(NamedTuple):
    """The judgement of full attention on one answer.

    Attributes:
        tokens: tokens of the answer.
        agreed: tokens that full attention prefers to all others, after the same tokens.
        first: index of the first other token; None if there is none, and the answer is what full attention gives.
        gap: nats by which full attention prefers its own tokens, summed over all tokens.
        changed: whether it prefers one of them by more than `CLEARLY`.
        surprise: nats, −log p(token) summed over tokens that full attention can sample too.
        expected: nats, the entropy before each of these, summed: the mean surprise of answers that full attention
            samples.
        outside: tokens that full attention cannot sample, since its top-k, top-p or min-p leaves them out.
    """

    tokens: int
    agreed: int
    first: int | None
    gap: float
    changed: bool
    surprise: float
    expected: float
    outside: int = 0

    @property
    def identical(self) -> bool:
        """Whether full attention, decoding greedily, gives the same answer."""
        return self.first is None

    @classmethod
    def of(cls, rows: np.ndarray) -> "Verdict":
        """Make it from scored rows.

        Args:
            rows: float32 [tokens, 5]: log p(token), log p of the likeliest token, tokens that are likelier, entropy of
                what can be sampled, whether the token can be.
        """
        own, best, likelier, entropy, inside = np.asarray(rows, np.float64).T
        others = np.flatnonzero(likelier > 0)
        gaps = best - own
        return cls(
            tokens=len(own),
            agreed=len(own) - len(others),
            first=int(others[0]) if len(others) else None,
            gap=float(gaps.sum()),
            changed=bool((gaps > CLEARLY).any()),
            surprise=float(-own @ inside),
            expected=float(entropy @ inside),
            outside=int(len(own) - inside.sum()),
        )


def missed_mass(report: Report | None, gone: np.ndarray) -> float | None:
    """Return the share of its attention that an answer pays, under full attention, to blocks that were gone at its end.

    Args:
        report: the mass that the answer's queries put on each block, over all heads and layers; None if it is missing.
        gone: int64 [n], logical blocks, ascending.

    Returns:
        0 to 1; None without a sound report.
    """
    if not len(gone):
        return 0.0
    if report is None or flaw(report, frozenset({"mass"}), gone) is not None:
        return None
    mass = report.statistics["mass"]
    total = float(mass.sum())
    return float(mass[report.index.searchsorted(gone)].sum()) / total if total > 0 else None
