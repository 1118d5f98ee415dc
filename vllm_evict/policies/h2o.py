"""H2O: heavy hitters, the blocks whose keys have drawn the most attention so far, beside sinks and recent window."""

import numpy as np

from .base import BUDGET_OPTIONS, MASS_OPTIONS, TOKEN_OPTIONS, Blocks, Policy


class H2O(Policy):
    name = "h2o"
    paper = "Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference, NeurIPS 2023, arXiv:2306.14048"
    measures = frozenset({"mass"})
    weighs = True
    options = BUDGET_OPTIONS | TOKEN_OPTIONS | MASS_OPTIONS

    def importance(self, blocks: Blocks) -> np.ndarray:
        return blocks["mass"]
