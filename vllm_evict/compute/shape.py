"""Sizes of one KV group on a worker."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one KV group on a worker.

    Attributes:
        block_size: tokens.
        max_requests: most requests at once.
        max_model_len: tokens.
        kv_heads: most KV heads of a layer, on this rank and in this KV group.
        layers: number of layers, of this rank and KV group.
        device: device of block tables and KV cache.
        heads: KV heads of each layer whose values add up, those of other stages of a pipeline included; empty:
            `kv_heads` in each of `layers`.
        places: for each place in the group the layer of the model; empty: one for each of `layers`.
        graph_blocks: resident blocks of the longest request in a full graph that measures.
        graph_queries: most queries of a request in a full graph: its last token's, and one for each draft.
        most_held: most blocks that a request holds; None: the blocks of `max_model_len` tokens.
        head_size, itemsize: elements of a key in the widest layer of the model, and bytes of an element.
        queries: bytes of the queries of that layer in the largest step.
        step_tokens: most tokens of a step.
    """

    block_size: int
    max_requests: int
    max_model_len: int
    kv_heads: int
    layers: int
    device: torch.device = CPU
    heads: Sequence[int] = ()
    places: Sequence[int] = ()
    graph_blocks: int = 0
    graph_queries: int = 1
    most_held: int | None = None
    head_size: int = 0
    itemsize: int = 0
    queries: int = 0
    step_tokens: int = 0

    @property
    def max_blocks(self) -> int:
        """Most logical blocks of a request."""
        return -(-self.max_model_len // self.block_size) + 1

    @property
    def held_blocks(self) -> int:
        """Most blocks that a request holds."""
        return min(self.most_held or self.max_blocks, self.max_blocks)

    @property
    def blocks(self) -> int:
        """Blocks that requests hold if they share none."""
        return self.max_requests * self.held_blocks

    @property
    def tokens(self) -> int:
        """Tokens of the longest request, times the KV heads of a layer."""
        return self.held_blocks * self.block_size * self.kv_heads

    @property
    def keys(self) -> int:
        """Elements of the longest request's keys in one layer."""
        return self.tokens * self.head_size

    @property
    def graph_tokens(self) -> int:
        """Resident tokens of the longest request in a full graph that measures."""
        return min(self.graph_blocks, self.max_blocks) * self.block_size

    @property
    def of_layers(self) -> Sequence[int]:
        """KV heads of each layer whose values add up."""
        return self.heads or [self.kv_heads] * self.layers

    @property
    def of_places(self) -> Sequence[int]:
        """Layer of the model at each place in the group."""
        return self.places or range(self.layers)
