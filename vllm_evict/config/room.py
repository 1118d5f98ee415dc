"""Room of a pool for one request. The engine knows it, and tells the front end."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Beside:
    """Blocks that a request holds in a KV group of windows, chunks or states, in flight included.

    Attributes:
        block_size: tokens.
        more: blocks beside those of its tokens.
        most: blocks of a request of any length; None if each token has its place.
        copied: blocks on top, if it starts from a cached prefix: a copy of the state there.
    """

    block_size: int
    more: int = 0
    most: int | None = None
    copied: int = 0

    def blocks(self, tokens: int, hit: bool = False) -> int:
        """Return the most blocks that a request of so many tokens holds; `hit`: it starts from a cached prefix."""
        blocks = math.ceil(tokens / self.block_size) + self.more
        return (blocks if self.most is None else min(blocks, self.most)) + hit * self.copied


@dataclass(frozen=True, slots=True)
class Room:
    """Sizes of one engine's pool.

    Attributes:
        block_size: tokens of a block in the KV groups that may have holes.
        pool: blocks, without vLLM's null block.
        groups: number of KV groups that may have holes.
        in_flight: blocks that steps in flight add to a request in each of them.
        ahead: most tokens that a request has slots for after its last one, for drafts.
        others: the other KV groups.
    """

    block_size: int
    pool: int
    groups: int
    in_flight: int
    ahead: int = 0
    others: tuple[Beside, ...] = ()

    def beside(self, tokens: int, hit: bool = False) -> int:
        """Return the most blocks that a request of so many tokens holds in the other groups."""
        return sum(other.blocks(tokens, hit) for other in self.others)

    def left(self, tokens: int, hit: bool = False) -> int:
        """Return the blocks of an otherwise empty pool for the groups with holes of a request of so many tokens."""
        return self.pool - self.beside(tokens, hit)

    def slots(self, tokens: int, max_model_len: int) -> int:
        """Return the tokens for which a request that may grow to so many tokens may have slots at most."""
        return min(tokens + self.ahead, max_model_len)
