"""Key norm: keeps keys of low norm, which draw attention. Measures no attention."""

import numpy as np

from ..config.allocators import ALLOCATION
from ..config.fields import KEEPING, PER_TOKEN, READ, REDUCTION
from .base import Blocks, Policy


class KNorm(Policy):
    name = "knorm"
    paper = "Devoto et al., A Simple and Effective L2 Norm-Based Strategy ..., EMNLP 2024, arXiv:2406.11430"
    measures = frozenset({"-key_norm"})
    declares = (*KEEPING, *READ, *PER_TOKEN, *REDUCTION, *ALLOCATION)

    def importance(self, blocks: Blocks) -> np.ndarray:
        return blocks["-key_norm"]
