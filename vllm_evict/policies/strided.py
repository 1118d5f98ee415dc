"""Strided memory: keeps blocks at strides that grow exponentially with age."""

import numpy as np

from ..config.fields import KEEPING, READ
from .base import Blocks, Policy


class Strided(Policy):
    """Weighs block *i* by its stride, the largest power of two that divides *i*, over its age in blocks.

    Every second block goes first, from the oldest on, then every second of the rest. At age *a* one block in about *a*
    times a constant stays, the pattern of dilated attention (Ding et al., LongNet, 2023, arXiv:2307.02486).
    """

    name = "strided"
    declares = (*KEEPING, *READ)

    def importance(self, blocks: Blocks) -> np.ndarray:
        stride = np.where(blocks.index > 0, blocks.index & -blocks.index, 1 << 62)
        return stride / (blocks.count - blocks.index)
