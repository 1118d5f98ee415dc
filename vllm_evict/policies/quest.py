"""Quest: keeps blocks by what attention the last query may pay them, by bounds of their keys."""

import numpy as np

from ..config.allocators import ALLOCATION
from ..config.fields import KEEPING, READ
from .base import KEY_BOUND, Blocks, Policy


class Quest(Policy):
    """Weighs a block by the largest share of attention that the last query of the step may pay it.

    The paper evicts nothing: each query reads the blocks with the highest bounds, which is the field `read`. This
    policy evicts by the same bounds, summed up over heads and layers.
    """

    name = "quest"
    paper = "Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context ..., ICML 2024, arXiv:2406.10774"
    measures = frozenset({KEY_BOUND})
    weighs = True
    declares = (*KEEPING, *READ, *ALLOCATION)

    def importance(self, blocks: Blocks) -> np.ndarray:
        return blocks[KEY_BOUND]
