"""Key bounds: keeps blocks by what attention the last query may pay them, by bounds of their keys."""

import numpy as np

from ..config.allocators import ALLOCATION
from ..config.fields import KEEPING, READ
from .base import KEY_BOUND, Blocks, Policy


class KeyBound(Policy):
    """Weighs a block by the largest share of attention that the last query of the step may pay it.

    The bounds are those of Quest, which evicts nothing: each query reads the blocks with the highest ones, which is the
    field `read` with `index: box`. This policy evicts by them, summed up over heads and layers.
    """

    name = "keybound"
    paper = "bounds of Tang et al., Quest: Query-Aware Sparsity ..., ICML 2024, arXiv:2406.10774"
    measures = frozenset({KEY_BOUND})
    weighs = True
    declares = (*KEEPING, *READ, *ALLOCATION)

    def importance(self, blocks: Blocks) -> np.ndarray:
        return blocks[KEY_BOUND]
