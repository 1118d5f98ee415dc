"""R-KV: weighs attention mass of the last queries against redundancy of keys."""

import numpy as np

from ..config.allocators import ALLOCATION
from ..config.fields import KEEPING, PER_TOKEN, REDUCTION, WINDOW
from ..config.options import Option, real
from .base import Blocks, Policy

MIX = Option("mix", real(ge=0, le=1), 0.1, "weight of attention against redundancy of keys")


class RKV(Policy):
    """Weighs a block by mix · mass − (1 − mix) · redundancy, each divided by its sum over all candidates."""

    name = "rkv"
    paper = "Cai et al., R-KV: Redundancy-aware KV Cache Compression for Reasoning Models, 2025, arXiv:2505.24133"
    measures = frozenset({"mass", "-redundancy"})
    declares = (*KEEPING, *PER_TOKEN, *REDUCTION, WINDOW.having(8), MIX, *ALLOCATION)
    fixed = {"accumulate": "last"}

    def importance(self, blocks: Blocks) -> np.ndarray:
        mix = blocks.config.mix
        return mix * _share(blocks["mass"]) + (1 - mix) * _share(blocks["-redundancy"])


def _share(values: np.ndarray) -> np.ndarray:
    return values / max(abs(values.sum()), np.finfo(np.float64).tiny)
