"""Key norm: keys of low norm draw attention, and stay. No attention is measured."""

import numpy as np

from .base import BUDGET_OPTIONS, REDUCTIONS, TOKEN_OPTIONS, Blocks, Policy


class KNorm(Policy):
    name = "knorm"
    paper = "Devoto et al., A Simple and Effective L2 Norm-Based Strategy ..., EMNLP 2024, arXiv:2406.11430"
    measures = frozenset({"key_norm"})
    options = BUDGET_OPTIONS | TOKEN_OPTIONS | REDUCTIONS

    def importance(self, blocks: Blocks) -> np.ndarray:
        return -blocks["key_norm"]
