"""KVzip: what the model looks at when it repeats its prompt stays, whatever will be asked."""

import numpy as np

from .base import BUDGET_OPTIONS, REDUCTIONS, TOKEN_OPTIONS, Blocks, Policy


class KVzip(Policy):
    """A block weighs the attention mass that a reconstruction of the prompt puts on it; a token of a head the largest
    share of attention that a query of the reconstruction pays to it, as in the paper (see `worker.prompts`).

    What is no part of the reconstructed prompt weighs nothing, so it goes first, from the oldest on.
    """

    name = "kvzip"
    paper = "Kim et al., KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction, 2025, arXiv:2505.23416"
    measures = frozenset({"mass"})
    reconstructs = True
    options = (BUDGET_OPTIONS - {"context"}) | REDUCTIONS | TOKEN_OPTIONS | {"chunk", "instruction"}

    def importance(self, blocks: Blocks) -> np.ndarray:
        return blocks["mass"]
