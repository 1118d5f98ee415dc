"""PagedEviction: evicts the block with the lowest value-to-key ratio whenever a block fills."""

import numpy as np

from ..config.allocators import ALLOCATION
from ..config.fields import KEEPING, READ, REDUCTION
from ..config.options import having
from .base import Blocks, Policy


class PagedEviction(Policy):
    """Weighs a block by ||V|| / ||K||, averaged over its tokens.

    Without a buffer each block that fills evicts one block. The prompt follows the same rule in whole blocks, where the
    paper drops single tokens before it lays them out in blocks.
    """

    name = "pagedeviction"
    paper = "Chitty-Venkata et al., PagedEviction: Structured Block-wise KV Cache Pruning ..., 2025, arXiv:2509.04377"
    measures = frozenset({"value_key_ratio"})
    declares = (*having(KEEPING, buffer=0, sink=0, recent=0), *READ, *REDUCTION, *ALLOCATION)

    def importance(self, blocks: Blocks) -> np.ndarray:
        return blocks["value_key_ratio"]
