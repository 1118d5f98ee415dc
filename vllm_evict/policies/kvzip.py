"""KVzip: what the model looks at when it repeats its prompt stays, whatever will be asked."""

import numpy as np

from ..config.fields import KEEPING, PER_TOKEN, REDUCTION
from ..config.options import Option, entries, whole, without
from .base import Blocks, Policy

CHUNK = Option("chunk", whole(1), 2048, "tokens of the prompt that are repeated at once")
INSTRUCTION = Option("instruction", entries(whole()), (), "token ids between the prompt and its repetition")


class KVzip(Policy):
    """A block weighs the attention mass that a reconstruction of the prompt puts on it; a token of a head the largest
    share of attention that a query of the reconstruction pays to it, as in the paper (see `worker.prompts`).

    What is no part of the reconstructed prompt weighs nothing, so it goes first, from the oldest on.
    """

    name = "kvzip"
    paper = "Kim et al., KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction, 2025, arXiv:2505.23416"
    measures = frozenset({"mass"})
    reconstructs = True
    declares = (*without(KEEPING, "context"), *REDUCTION, *PER_TOKEN, CHUNK, INSTRUCTION)

    def importance(self, blocks: Blocks) -> np.ndarray:
        return blocks["mass"]
