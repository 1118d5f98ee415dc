"""SnapKV: the mass of the last queries, pooled over neighbours."""

import numpy as np

from .base import BUDGET_OPTIONS, REDUCTIONS, TOKEN_OPTIONS, Blocks, Policy


class SnapKV(Policy):
    """A block weighs the largest mass among the candidates at most `kernel // 2` blocks away, itself one of them.

    Protected blocks are no neighbours: sinks would lend theirs their mass.
    """

    name = "snapkv"
    paper = "Li et al., SnapKV: LLM Knows What You are Looking for Before Generation, NeurIPS 2024, arXiv:2404.14469"
    measures = frozenset({"mass"})
    weighs = True
    options = BUDGET_OPTIONS | TOKEN_OPTIONS | REDUCTIONS | {"window", "kernel"}
    defaults = {**Policy.defaults, "accumulate": "last", "window": 32, "kernel": 3}

    def importance(self, blocks: Blocks) -> np.ndarray:
        index, mass = blocks.index, blocks["mass"]
        pooled = mass.copy()
        # The n-th next candidate is at least n blocks away.
        for n in range(1, min(blocks.config.kernel // 2, len(index) - 1) + 1):
            near = index[n:] - index[:-n] <= blocks.config.kernel // 2
            np.maximum(pooled[:-n], mass[n:], out=pooled[:-n], where=near)
            np.maximum(pooled[n:], mass[:-n], out=pooled[n:], where=near)
        return pooled
