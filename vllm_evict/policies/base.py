"""What a policy is: a score for each resident block. Everything else (when, how many, what is protected) is shared."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from ..config import KVPolicyConfig

#: Options of every policy that evicts.
BUDGET_OPTIONS = frozenset({"when", "budget", "buffer", "sink", "recent", "protect", "min_prompt", "context"})
#: Options of policies whose scores tell tokens apart, so that each KV head can keep its own (`granularity: token`).
TOKEN_OPTIONS = frozenset({"granularity", "sets", "merge", "merge_decay", "merge_threshold"})
#: Options of every policy that measures: how heads and layers become one score.
REDUCTIONS = frozenset({"heads", "layers"})
#: Options of policies that let attention mass add up as they are told.
MASS_OPTIONS = REDUCTIONS | {"accumulate", "decay", "window", "every"}

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
    config: "KVPolicyConfig"
    statistics: Mapping[str, np.ndarray]
    count: int
    key: int

    def __getitem__(self, statistic: str) -> np.ndarray:
        return self.statistics[statistic]


class Policy(ABC):
    """Base of all policies. A policy is stateless and shared by all requests that use it."""

    #: Name in configurations and requests.
    name: ClassVar[str]
    #: Where it comes from: authors, venue, arXiv id.
    paper: ClassVar[str] = ""
    #: Statistics that workers have to measure for it, of `RUNNING` and `CACHED`.
    measures: ClassVar[frozenset[str]] = frozenset()
    #: Whether its importance is a share of something, so that twice as much weighs twice; otherwise only an order.
    weighs: ClassVar[bool] = False
    #: Whether its recent window is simply what the budget leaves beside the sinks.
    window_is_the_budget: ClassVar[bool] = False
    #: Whether its statistics are those of a reconstruction of the prompt (see `core.reconstruction`). Until they are
    #: there a request keeps everything.
    reconstructs: ClassVar[bool] = False
    #: What gets KV groups, and so block tables, of its own: "classes" of heads, "bands" of layers, "heads" (each
    #: layer's are dealt to several groups), or nothing.
    splits: ClassVar[str] = ""
    #: Whether one budget is shared by all KV groups of a request.
    pools: ClassVar[bool] = False
    #: Whether it chooses another policy for each KV group when the prompt is computed (`policies.fastgen`).
    profiles: ClassVar[bool] = False
    #: Whether it looks at `Blocks.key`.
    by_prompt: ClassVar[bool] = False
    #: Fields of `KVPolicyConfig` that mean something to it.
    options: ClassVar[frozenset[str]] = BUDGET_OPTIONS
    #: Values of those fields where the user gives none, and of fields that the policy fixes.
    defaults: ClassVar[Mapping[str, Any]] = {"budget": 2048, "buffer": 128, "sink": 64, "recent": 256}

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
