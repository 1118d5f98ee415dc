"""KeyDiff: keeps keys that differ most from the average key. Measures no attention."""

import numpy as np

from ..config.allocators import ALLOCATION
from ..config.fields import KEEPING, PER_TOKEN, READ, REDUCTION
from .base import Blocks, Policy


class KeyDiff(Policy):
    name = "keydiff"
    paper = "Park et al., KeyDiff: Key Similarity-Based KV Cache Eviction ..., 2025, arXiv:2504.15364"
    measures = frozenset({"key_diff"})
    declares = (*KEEPING, *READ, *PER_TOKEN, *REDUCTION, *ALLOCATION)

    def importance(self, blocks: Blocks) -> np.ndarray:
        return blocks["key_diff"]
