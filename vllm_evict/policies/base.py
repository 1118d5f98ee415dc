"""Base class of policies. A policy gives each candidate block an importance; all other rules are shared."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..config import KVPolicyConfig
from ..config.fields import KEEPING, MASS, PER_TOKEN, REDUCTION
from ..config.options import names_of
from ..config.registry import Declaration

#: Names of fields: of all policies that evict, of policies with token granularity, of policies that measure, and of
#: policies whose users choose how attention mass adds up.
BUDGET_OPTIONS, TOKEN_OPTIONS, REDUCTIONS, MASS_OPTIONS = map(names_of, (KEEPING, PER_TOKEN, REDUCTION, MASS))

#: Statistics that add up over queries, step by step. A policy measures at most one of them.
RUNNING = frozenset({"mass", "pivots"})
#: Statistics of resident keys and values, computed when a decision is due (see `compute.kernels.keys`). A minus makes
#: a statistic negative, for policies that keep the least: a maximum over heads or layers takes the largest number.
CACHED = frozenset(
    sign + name for name in ("key_norm", "key_diff", "value_key_ratio", "redundancy") for sign in ("", "-")
)
#: The largest share of attention that the last query of a step may pay to a block, by bounds of its keys, summed up
#: over heads and layers (see `compute.kernels.bounds`).
KEY_BOUND = "key_bound"
#: Statistics of the step's last query and of resident keys, computed while layers run when a decision is due.
QUERIED = frozenset({KEY_BOUND})


@dataclass(frozen=True, slots=True)
class Blocks:
    """Candidates of one decision: the resident blocks of a request outside sinks and recent window.

    With token granularity the candidates are tokens of one KV head, and `index` has their positions.

    Attributes:
        index: int64 [n], logical blocks, ascending (0 holds the first tokens).
        config: the request's policy and its fields.
        statistics: name -> float64 [n], for each name in `Policy.measures`.
        count: logical blocks of the request so far, holes included.
        key: hash of the request's prompt, the same in every run; 0 unless the policy is `by_prompt`.
    """

    index: np.ndarray
    config: KVPolicyConfig
    statistics: Mapping[str, np.ndarray]
    count: int
    key: int

    def __getitem__(self, statistic: str) -> np.ndarray:
        return self.statistics[statistic]


class Policy(Declaration, ABC):
    """Base class of policies. A policy is stateless, and shared by all requests under it."""

    #: Statistics that the policy needs, of `RUNNING`, `CACHED` and `QUERIED`.
    measures: ClassVar[frozenset[str]] = frozenset()
    #: Whether importance is additive: twice the importance weighs twice as much. If False it is only an order.
    weighs: ClassVar[bool] = False
    #: Whether the policy reads `Blocks.key`.
    by_prompt: ClassVar[bool] = False

    @abstractmethod
    def importance(self, blocks: Blocks) -> np.ndarray:
        """Score the candidates. Lower values are evicted first; of equal values the oldest.

        Args:
            blocks: the n candidates.

        Returns:
            [n], of any real dtype.
        """

    @property
    def triggers(self) -> tuple[str, ...]:
        """Values of `when` that the policy supports. Pressure needs scores in any step, so only statistics that add
        up support it."""
        due = self.measures & (CACHED | QUERIED) or self.reconstructs
        return ("budget",) if due else ("budget", "pressure")

    def cost(self, importance: np.ndarray) -> np.ndarray:
        """Turn importance into costs that compare between requests.

        Args:
            importance: [n], of all candidates of one request.

        Returns:
            float64 [n], costs that add up to 1: shares of the importance if it `weighs`, else linear in the rank.
        """
        if self.weighs and (total := importance.sum()) > 0:
            return importance / total
        rank = np.empty(len(importance))
        rank[np.argsort(importance, kind="stable")] = np.arange(len(importance))
        return (2 * rank + 1) / max(len(importance), 1) ** 2
