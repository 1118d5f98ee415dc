"""The residence of each block of a request in one KV group: in the pool, on the host, or gone."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

NO_BLOCKS = np.empty(0, dtype=np.int64)
#: What a block table has at a hole, in place of a physical block: vLLM's null block.
HOLE = 0


@dataclass(slots=True)
class Residence:
    """The residence of one request in one KV group. Block indices are logical, so they never change.

    Attributes:
        block_size: tokens.
        known: number of blocks that have a state; later ones are new, and in the pool.
        pool: int64 [n], blocks in the pool below `known`, ascending.
        places: int64 [n], for each of `pool` the logical block at whose positions its keys are rotated: the block
            itself, or a later one after its keys were rotated. Before the first one it is the array of `pool`.
        host: block -> host block.
    """

    block_size: int
    known: int = 0
    pool: np.ndarray = field(default_factory=lambda: NO_BLOCKS)
    places: np.ndarray = field(default_factory=lambda: NO_BLOCKS)
    host: dict[int, int] = field(default_factory=dict)

    @property
    def holes(self) -> int:
        """Number of blocks that are not in the pool."""
        return self.known - len(self.pool)

    @property
    def absent(self) -> np.ndarray:
        """Blocks that are not in the pool, but on the host or gone: int64 [holes], ascending."""
        return np.setdiff1d(np.arange(self.known), self.pool)

    def learn(self, tokens: int) -> int:
        """Note that the blocks of so many tokens exist; return their number."""
        blocks = math.ceil(tokens / self.block_size)
        if blocks > self.known:
            new = np.arange(self.known, blocks)
            self._change(lambda those: np.concatenate((those, new)))
            self.known = blocks
        return blocks

    def _change(self, function: Callable[[np.ndarray], np.ndarray]) -> None:
        """Change `pool` and `places` alike."""
        pool = function(self.pool)
        self.places = pool if self.places is self.pool else function(self.places)
        self.pool = pool

    def adopt(self, there: np.ndarray, blocks: int) -> None:
        """Start with a cached prefix of so many blocks, of which those in `there`, int64 [k], are in the pool."""
        self.pool, self.places, self.known = there, there, blocks

    def before(self, tokens: int) -> np.ndarray:
        """Return the blocks of the pool that hold any of the first `tokens` tokens: int64 [n], ascending."""
        blocks = self.learn(tokens)
        return self.pool if blocks == self.known else self.pool[: self.pool.searchsorted(blocks)]

    def leave(self, blocks: np.ndarray) -> None:
        """Take blocks out of the pool: int64 [k], ascending, all of them there."""
        stays = np.ones(len(self.pool), bool)
        stays[self.pool.searchsorted(blocks)] = False
        self._change(lambda those: those[stays])

    def span(self, tokens: int) -> int:
        """Return the distance in tokens from the place of the first block in the pool to the newest token."""
        self.learn(tokens)
        return tokens - int(self.places[0]) * self.block_size if len(self.places) else 0

    def gaps(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Find the blocks with holes behind them, whose keys a rotation can bring to later positions.

        Returns:
            int64 [k], logical blocks, ascending; int64 [k], distance in blocks from each block to its new place;
            bool [k], whether its keys have been rotated before.
        """
        ends = np.arange(self.known - len(self.pool), self.known)
        can = ends > self.places
        blocks = self.pool[can]
        return blocks, ends[can] - blocks, self.places[can] > blocks

    def move_up(self) -> None:
        """Set the places of all blocks after a rotation: without gaps, up to the newest block."""
        self.places = np.arange(self.known - len(self.pool), self.known)
