"""Scissorhands: persistence of importance; what has been pivotal to many recent queries stays."""

import numpy as np

from ..config.fields import KEEPING, REDUCTION, WINDOW
from .base import Blocks, Policy


class Scissorhands(Policy):
    """A block weighs how often, among the last `window` queries, it drew more than its share of a query's attention.

    The share of a block is 1/t for each of its tokens, when the query sees t tokens. Every query, KV head (its query
    heads averaged) and layer counts for itself.
    """

    name = "scissorhands"
    paper = "Liu et al., Scissorhands: Exploiting the Persistence of Importance ..., NeurIPS 2023, arXiv:2305.17118"
    measures = frozenset({"pivots"})
    weighs = True
    declares = (*KEEPING, *REDUCTION, WINDOW.having(256))
    fixed = {"accumulate": "last"}

    def importance(self, blocks: Blocks) -> np.ndarray:
        return blocks["pivots"]
