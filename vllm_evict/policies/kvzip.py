"""KVzip: keeps what the model attends to when it repeats its prompt, independent of later questions."""

import numpy as np

from ..config.fields import KEEPING, PER_TOKEN, REDUCTION, TIER
from ..config.options import Option, entries, names_of, whole, without
from .base import Blocks, Policy

CHUNK = Option("chunk", whole(1), 2048, "tokens of the prompt that are repeated at once")
INSTRUCTION = Option("instruction", entries(whole()), (), "token ids between the prompt and its repetition")


class KVzip(Policy):
    """Weighs a block by the attention mass that a reconstruction of the prompt puts on it.

    A token of a KV head weighs the largest share of attention that a query of the reconstruction pays to it, as in the
    paper. Blocks and tokens outside the reconstructed prompt weigh 0, so they go first.
    """

    name = "kvzip"
    paper = "Kim et al., KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction, 2025, arXiv:2505.23416"
    measures = frozenset({"mass"})
    reconstructs = True
    declares = (*without(KEEPING, "prompt", "context", *names_of(TIER)), *REDUCTION, *PER_TOKEN, CHUNK, INSTRUCTION)

    def importance(self, blocks: Blocks) -> np.ndarray:
        return blocks["mass"]
