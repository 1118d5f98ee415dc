"""PagedEviction: when a block fills, the resident block with the lowest value-to-key ratio goes."""

import numpy as np

from ..config.fields import KEEPING, REDUCTION
from ..config.options import having
from .base import Blocks, Policy


class PagedEviction(Policy):
    """A block weighs the mean over its tokens of ||V|| / ||K||.

    Without a buffer one block goes for each that fills. A prompt is evicted by the same rule, in whole blocks; the
    paper drops single tokens of it before they are laid out in blocks.
    """

    name = "pagedeviction"
    paper = "Chitty-Venkata et al., PagedEviction: Structured Block-wise KV Cache Pruning ..., 2025, arXiv:2509.04377"
    measures = frozenset({"value_key_ratio"})
    declares = (*having(KEEPING, buffer=0, sink=0, recent=0), *REDUCTION)

    def importance(self, blocks: Blocks) -> np.ndarray:
        return blocks["value_key_ratio"]
