"""What a policy is: a score for each resident block. Everything else (when, how many, what is protected) is shared."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

#: Options of every policy that evicts.
BUDGET_OPTIONS = frozenset({"budget", "buffer", "sink", "recent"})
#: Options of every policy that scores blocks by attention mass.
MASS_OPTIONS = frozenset({"accumulate", "decay", "window", "every", "heads", "layers"})


@dataclass(frozen=True, slots=True)
class Blocks:
    """The candidates of one decision: resident blocks of one request, outside sinks and recent window.

    Attributes:
        index: int64 [n], logical block index in the request, ascending (0 holds the first tokens).
        mass: float64 [n], attention mass accumulated as configured; None for policies that measure nothing.
    """

    index: np.ndarray
    mass: np.ndarray | None = None


class Policy(ABC):
    """Base of all policies. A policy is stateless and shared by all requests that use it."""

    #: Name in configurations and requests.
    name: ClassVar[str]
    #: Where it comes from: authors, venue, arXiv id.
    paper: ClassVar[str] = ""
    #: What workers have to measure for it: "mass" or nothing.
    measures: ClassVar[str | None] = None
    #: Whether its recent window is simply what the budget leaves beside the sinks.
    window_is_the_budget: ClassVar[bool] = False
    #: Fields of `KVPolicyConfig` that mean something to it.
    options: ClassVar[frozenset[str]] = BUDGET_OPTIONS
    #: Values of those fields where the user gives none.
    defaults: ClassVar[Mapping[str, Any]] = {"budget": 2048, "buffer": 128, "sink": 64, "recent": 256}

    @abstractmethod
    def importance(self, blocks: Blocks) -> np.ndarray:
        """Score the candidates; the lowest go first, ties from the oldest on.

        Args:
            blocks: the candidates, arrays of length n.

        Returns:
            Array of length n, any real dtype.
        """
