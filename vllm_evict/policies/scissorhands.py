"""Scissorhands: keeps blocks that were pivotal to many recent queries (persistence of importance)."""

import numpy as np

from ..config.allocators import ALLOCATION
from ..config.fields import KEEPING, REDUCTION, WINDOW
from .base import Blocks, Policy


class Scissorhands(Policy):
    """Weighs a block by how often it drew more than its share of attention from one of the last `window` queries.

    For a query that sees t tokens the share of a block is 1/t for each of its tokens. Each query, KV head (averaged
    over its query heads) and layer counts once.
    """

    name = "scissorhands"
    paper = "Liu et al., Scissorhands: Exploiting the Persistence of Importance ..., NeurIPS 2023, arXiv:2305.17118"
    measures = frozenset({"pivots"})
    weighs = True
    declares = (*KEEPING, *REDUCTION, WINDOW.having(256), *ALLOCATION)
    fixed = {"accumulate": "last"}

    def importance(self, blocks: Blocks) -> np.ndarray:
        return blocks["pivots"]
