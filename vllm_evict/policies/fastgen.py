"""FastGen: at the end of the prompt each class of heads gets the cheapest policy that keeps most of its attention."""

import numpy as np

from ..config.fields import BANDS, KEEPING, REDUCTION, WINDOW
from ..config.options import Option, real, without
from .base import Blocks, Policy

RECOVERY = Option(
    "recovery", real(gt=0, le=1), 0.95, "share of the attention mass that the policy chosen for a KV group has to keep"
)


class FastGen(Policy):
    """Each layer's heads are dealt to `bands` KV groups. Until the prompt is computed they keep everything; then the
    mass of its last `window` queries says what a group keeps: sinks and recent tokens (`sink-window`), the most
    important blocks of its budget (`h2o`), or all (`full`), the first of these with the share `recovery` of it.

    The paper's special tokens are the sinks here; it has a policy for punctuation, which blocks of tokens do not tell.
    """

    name = "fastgen"
    paper = "Ge et al., Model Tells You What to Discard: Adaptive KV Cache Compression ..., ICLR 2024, arXiv:2310.01801"
    splits = "heads"
    profiles = True
    measures = frozenset({"mass"})
    declares = (*without(KEEPING, "when", "context"), *REDUCTION, WINDOW, BANDS, RECOVERY)
    fixed = {"accumulate": "last"}
    triggers = ("budget",)

    def importance(self, blocks: Blocks) -> np.ndarray:
        return blocks["mass"]

    @staticmethod
    def choose(mass: np.ndarray, protected: np.ndarray, budget: int, recovery: float) -> str:
        """The name of the policy that a group of heads gets.

        Args:
            mass: float64 [n], of all blocks of the prompt.
            protected: bool [n], those that hold sinks or recent tokens.
            budget: blocks.
            recovery: share of the mass that has to be kept.
        """
        wanted = recovery * mass.sum()
        kept = mass[protected].sum()
        if kept >= wanted:
            return "sink-window"
        others = np.sort(mass[~protected])[::-1]
        kept += others[: max(budget - int(protected.sum()), 0)].sum()
        return "h2o" if kept >= wanted else "full"
