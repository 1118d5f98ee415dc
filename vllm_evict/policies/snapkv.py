"""SnapKV: keeps blocks by attention mass of the last queries, pooled over neighbours."""

import numpy as np

from ..config.allocators import ALLOCATION
from ..config.errors import shown
from ..config.fields import KEEPING, PER_TOKEN, REDUCTION, WINDOW
from ..config.options import Option, whole
from .base import Blocks, Policy


def _odd(kernel: int) -> int:
    if kernel % 2 == 0:
        raise ValueError(f"must be odd, not {shown(kernel)}")
    return kernel


KERNEL = Option("kernel", whole(1), 3, "blocks, or tokens with `token`, in the pooling kernel; odd", _odd)


class SnapKV(Policy):
    """Weighs a block by the largest mass of the candidates at most `kernel // 2` blocks away, itself included.

    Protected blocks are not pooled, so the mass of sinks does not spread to their neighbours.
    """

    name = "snapkv"
    paper = "Li et al., SnapKV: LLM Knows What You are Looking for Before Generation, NeurIPS 2024, arXiv:2404.14469"
    measures = frozenset({"mass"})
    weighs = True
    declares = (*KEEPING, *PER_TOKEN, *REDUCTION, WINDOW, KERNEL, *ALLOCATION)
    fixed = {"accumulate": "last"}

    def importance(self, blocks: Blocks) -> np.ndarray:
        index, mass = blocks.index, blocks["mass"]
        pooled = mass.copy()
        # The n-th next candidate is at least n blocks away.
        for n in range(1, min(blocks.config.kernel // 2, len(index) - 1) + 1):
            near = index[n:] - index[:-n] <= blocks.config.kernel // 2
            np.maximum(pooled[:-n], mass[n:], out=pooled[:-n], where=near)
            np.maximum(pooled[n:], mass[:-n], out=pooled[n:], where=near)
        return pooled
