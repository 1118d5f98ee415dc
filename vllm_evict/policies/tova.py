"""TOVA: what the last query before a decision attends to stays."""

import numpy as np

from .base import BUDGET_OPTIONS, REDUCTIONS, TOKEN_OPTIONS, Blocks, Policy


class TOVA(Policy):
    name = "tova"
    paper = "Oren et al., Transformers are Multi-State RNNs, EMNLP 2024, arXiv:2401.06104"
    measures = frozenset({"mass"})
    weighs = True
    options = BUDGET_OPTIONS | TOKEN_OPTIONS | REDUCTIONS
    defaults = {**Policy.defaults, "accumulate": "last", "window": 1}

    def importance(self, blocks: Blocks) -> np.ndarray:
        return blocks["mass"]
