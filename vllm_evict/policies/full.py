"""Full attention: keep everything. Stock vLLM, and the baseline of every comparison."""

import numpy as np

from .base import Blocks, Policy


class Full(Policy):
    name = "full"
    options = frozenset()
    defaults = {}

    def importance(self, blocks: Blocks) -> np.ndarray:
        return np.full(len(blocks.index), np.inf)
