"""Random choice: the control of every score."""

import numpy as np

from ..config.fields import KEEPING, READ
from ..config.options import Option, whole
from .base import Blocks, Policy

SEED = Option("seed", whole(below=1 << 63), 0, "seed of the hash that weighs blocks")


class Random(Policy):
    """Weighs a block by a hash of `seed`, the request's prompt and the block: the same in every run and decision."""

    name = "random"
    by_prompt = control = True
    declares = (*KEEPING, *READ, SEED)

    def importance(self, blocks: Blocks) -> np.ndarray:
        with np.errstate(over="ignore"):
            stream = _splitmix(_splitmix(np.array([blocks.config.seed], np.uint64)) + np.uint64(blocks.key))
            return _splitmix(stream + blocks.index.astype(np.uint64)) >> np.uint64(11)


def _splitmix(state: np.ndarray) -> np.ndarray:
    """SplitMix64 (Steele et al., OOPSLA 2014): uint64 [n] -> uint64 [n]. Wraps around."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
