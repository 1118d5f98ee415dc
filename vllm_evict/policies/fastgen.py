"""FastGen: at the end of the prompt each group of heads gets the cheapest policy that keeps most of its attention."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from ..config.allocators import ALLOCATORS
from ..config.fields import KEEPING, REDUCTION, WINDOW
from ..config.options import Option, real, without
from .base import Blocks, Policy

RECOVERY = Option(
    "recovery", real(gt=0, le=1), 0.95, "share of the attention mass that the policy chosen for a KV group has to keep"
)
#: Fields that a chosen policy takes over, beside those of its own.
SIZES = ("sink", "recent", "protect", "buffer")


class FastGen(Policy):
    """Deals the heads of each layer to `bands` KV groups, and chooses a policy for each group.

    Until the prompt is computed all groups keep everything. Then a group gets the first of `sink-window`, `h2o` and
    `full` that keeps the share `recovery` of the attention mass of the last `window` queries.

    Sinks stand in for the paper's special tokens. The paper's policy for punctuation is missing, since blocks do not
    tell tokens apart.
    """

    name = "fastgen"
    paper = "Ge et al., Model Tells You What to Discard: Adaptive KV Cache Compression ..., ICLR 2024, arXiv:2310.01801"
    profiles: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "sink-window": SIZES,
        "h2o": (*SIZES, "budget", "accumulate", "window", "heads"),
        "full": (),
    }
    measures = frozenset({"mass"})
    declares = (
        *ALLOCATORS["heads"].fields((*without(KEEPING, "when", "admit", "prompt"), *REDUCTION, WINDOW)),
        RECOVERY,
    )
    fixed = {"accumulate": "last", "allocate": "heads"}
    triggers = ("budget",)

    def importance(self, blocks: Blocks) -> np.ndarray:
        return blocks["mass"]

    @staticmethod
    def choose(mass: np.ndarray, protected: np.ndarray, budget: int, recovery: float) -> str:
        """Choose the policy of a group of heads.

        Args:
            mass: float64 [n], attention mass of all blocks of the prompt.
            protected: bool [n], whether a block holds sinks or recent tokens.
            budget: blocks.
            recovery: share of the mass that the policy has to keep.

        Returns:
            One of `profiles`.
        """
        wanted = recovery * mass.sum()
        kept = mass[protected].sum()
        if kept >= wanted:
            return "sink-window"
        others = np.sort(mass[~protected])[::-1]
        kept += others[: max(budget - int(protected.sum()), 0)].sum()
        return "h2o" if kept >= wanted else "full"
