"""Upper bounds of the device memory that parts of a KV group take, from the sizes of the group."""

from collections.abc import Iterable
from typing import NamedTuple

MIB = 1 << 20
#: Bytes kept for each token, layer and KV head: its sum, its position, and a copy of the sum for a decision that is
#: due. For a reconstructed prompt: the prompt's score, the request's score, and the position.
OF_TOKEN = 12
#: Bytes that statistics of keys and values, and merging, take for each element of a key: four float32 numbers.
OF_DIMENSION = 16
#: Bytes that work in pieces takes at most: pairs of keys (`kernels.alike`), tokens (`triton_kernels.compact`).
AT_A_TIME = 128 * MIB


class Needs(NamedTuple):
    """Upper bounds of device memory, in bytes.

    Attributes:
        step: bytes while layers run, beside their activations.
        between: bytes before the first layer or after the last one, for a short time.
        block: bytes for each block that requests hold.
        blocks: number of blocks that requests hold if they share none.
    """

    step: int = 0
    between: int = 0
    block: int = 0
    blocks: int = 0

    def left(self, available: int, block_bytes: int) -> int:
        """Return the bytes of `available` that are left for a pool with blocks of `block_bytes`."""
        blocks = available // (block_bytes + self.block) + 1
        return available - self.block * min(blocks, self.blocks)

    @classmethod
    def of_parts(cls, parts: Iterable["Needs"], blocks: int) -> "Needs":
        """Return the needs of a KV group whose requests hold `blocks` blocks, from the needs of its parts."""
        step, between, block, _ = zip(*parts)
        return cls(sum(step), max(between), max(block), blocks)

    @classmethod
    def of_groups(cls, groups: Iterable["Needs"]) -> "Needs":
        """Return the needs of a worker, from the needs of its KV groups."""
        step, between, block, blocks = zip(*groups)
        return cls(sum(step), max(between), sum(block), max(blocks))
