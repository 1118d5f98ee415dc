"""What a policy is: a score for each resident block. Everything else (when, how many, what is protected) is shared."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..config import KVPolicyConfig
from ..config.fields import KEEPING, MASS, PER_TOKEN, REDUCTION
from ..config.options import names_of
from ..config.registry import Declaration

#: Names of fields: of every policy that evicts, of policies that tell tokens apart, of policies that measure, and of
#: policies that let attention mass add up as users say.
BUDGET_OPTIONS, TOKEN_OPTIONS, REDUCTIONS, MASS_OPTIONS = map(names_of, (KEEPING, PER_TOKEN, REDUCTION, MASS))

#: Statistics that add up over queries, step by step; a policy uses one of them at most.
RUNNING = frozenset({"mass", "pivots"})
#: Statistics of resident keys and values, computed only when a decision is due (see `kernels.keys`).
CACHED = frozenset({"key_norm", "key_diff", "value_key_ratio", "redundancy"})


@dataclass(frozen=True, slots=True)
class Blocks:
    """The candidates of one decision: resident blocks of one request, outside sinks and recent window.

    Attributes:
        index: int64 [n], logical block index in the request, ascending (0 holds the first tokens).
        config: options of the request's policy.
        statistics: name -> float64 [n], what the policy measures.
        count: blocks of the request so far, holes included; the newest is `count - 1`.
        key: a number of the request's prompt, the same in every run; 0 unless the policy is `by_prompt`.
    """

    index: np.ndarray
    config: KVPolicyConfig
    statistics: Mapping[str, np.ndarray]
    count: int
    key: int

    def __getitem__(self, statistic: str) -> np.ndarray:
        return self.statistics[statistic]


class Policy(Declaration, ABC):
    """Base of all policies. A policy is stateless and shared by all requests that use it."""

    #: Statistics that workers have to measure for it, of `RUNNING` and `CACHED`.
    measures: ClassVar[frozenset[str]] = frozenset()
    #: Whether its importance is a share of something, so that twice as much weighs twice; otherwise only an order.
    weighs: ClassVar[bool] = False
    #: Whether one budget is shared by all KV groups of a request.
    pools: ClassVar[bool] = False
    #: Whether it looks at `Blocks.key`.
    by_prompt: ClassVar[bool] = False

    @abstractmethod
    def importance(self, blocks: Blocks) -> np.ndarray:
        """Score the candidates; the lowest go first, ties from the oldest on.

        Args:
            blocks: the candidates, arrays of length n.

        Returns:
            Array of length n, any real dtype.
        """

    @property
    def triggers(self) -> tuple[str, ...]:
        """Values of `when`. Under pressure scores have to be at hand in any step, so they have to add up."""
        return ("budget",) if self.measures & CACHED or self.reconstructs else ("budget", "pressure")

    def cost(self, importance: np.ndarray) -> np.ndarray:
        """What each candidate's loss takes from its request, to be compared with other requests' losses.

        Args:
            importance: [n], of all candidates of one request.

        Returns:
            float64 [n], shares that add up to 1. Where importance is no more than an order, they rise evenly with it.
        """
        if self.weighs and (total := importance.sum()) > 0:
            return importance / total
        rank = np.empty(len(importance))
        rank[np.argsort(importance, kind="stable")] = np.arange(len(importance))
        return (2 * rank + 1) / max(len(importance), 1) ** 2
