"""TOVA: keeps what the last query before a decision attends to."""

import numpy as np

from ..config.allocators import ALLOCATION
from ..config.fields import KEEPING, PER_TOKEN, REDUCTION
from .base import Blocks, Policy


class TOVA(Policy):
    name = "tova"
    paper = "Oren et al., Transformers are Multi-State RNNs, EMNLP 2024, arXiv:2401.06104"
    measures = frozenset({"mass"})
    weighs = True
    declares = (*KEEPING, *PER_TOKEN, *REDUCTION, *ALLOCATION)
    fixed = {"accumulate": "last", "window": 1}

    def importance(self, blocks: Blocks) -> np.ndarray:
        return blocks["mass"]
