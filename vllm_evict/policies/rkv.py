"""R-KV: attention mass of the last queries against redundancy of keys."""

import numpy as np

from .base import BUDGET_OPTIONS, REDUCTIONS, TOKEN_OPTIONS, Blocks, Policy


class RKV(Policy):
    """A block weighs mix · mass − (1 − mix) · redundancy, both as shares of all candidates'."""

    name = "rkv"
    paper = "Cai et al., R-KV: Redundancy-aware KV Cache Compression for Reasoning Models, 2025, arXiv:2505.24133"
    measures = frozenset({"mass", "redundancy"})
    options = BUDGET_OPTIONS | TOKEN_OPTIONS | REDUCTIONS | {"window", "mix"}
    defaults = {**Policy.defaults, "accumulate": "last", "window": 8, "mix": 0.1}

    def importance(self, blocks: Blocks) -> np.ndarray:
        mix = blocks.config.mix
        return mix * _share(blocks["mass"]) - (1 - mix) * _share(blocks["redundancy"])


def _share(values: np.ndarray) -> np.ndarray:
    return values / max(values.sum(), np.finfo(np.float64).tiny)
