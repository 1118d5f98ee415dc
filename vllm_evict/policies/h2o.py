"""H2O: keeps heavy hitters, the blocks whose keys have drawn the most attention so far."""

import numpy as np

from ..config.allocators import ALLOCATION
from ..config.fields import KEEPING, MASS, PER_TOKEN
from .base import Blocks, Policy


class H2O(Policy):
    name = "h2o"
    paper = "Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference, NeurIPS 2023, arXiv:2306.14048"
    measures = frozenset({"mass"})
    weighs = True
    declares = (*KEEPING, *PER_TOKEN, *MASS, *ALLOCATION)

    def importance(self, blocks: Blocks) -> np.ndarray:
        return blocks["mass"]
