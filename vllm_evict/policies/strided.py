"""Strided memory: the newer a token, the finer what stays around it; strides grow exponentially with age."""

import numpy as np

from .base import Blocks, Policy


class Strided(Policy):
    """Block *i* weighs its stride, the largest power of two that divides *i*, over its age in blocks.

    Every second block goes first, from the oldest on, then every second of what is left: at age *a* one block in about
    *a* times a constant stays. The pattern is that of dilated attention (Ding et al., LongNet, 2023, arXiv:2307.02486).
    """

    name = "strided"

    def importance(self, blocks: Blocks) -> np.ndarray:
        stride = np.where(blocks.index > 0, blocks.index & -blocks.index, 1 << 62)
        return stride / (blocks.count - blocks.index)
