"""Full CUDA graphs of decode steps: the kernel that attends in a graph, and the memory that the graph reads and writes.

A graph replays captured launches on the memory of the capture. Tables, lengths, weights and mass therefore keep their
addresses from step to step, and the host fills them before each replay.
"""

from enum import Enum

import numpy as np
import torch

from .measure import MassBuffers
from .sums import RunningSums
from .tokens import TokenSums
from .transfer import to_device


class Attends(Enum):
    """The kernel that attends to all requests of a full graph."""

    #: The backend's kernel, through the view. It measures nothing.
    STOCK = "stock"
    #: The plugin's kernel, which computes output and mass in one read.
    OWN = "own"


class GraphMemory:
    """Memory of one KV group that all `Attends.OWN` graphs share.

    Args:
        requests: most requests in a batch.
        blocks: resident blocks of the longest request that such a graph takes.
        sums: the group's sums by block; None if there are none.
        tokens: the group's sums by token; None if there are none. With them a graph measures by token only.
        tests: whether queries may be tested for pivotal blocks.
        device: device of the KV cache.

    Attributes:
        rows: int32 [requests], the batch's rows, then -1.
        mass: buffers of mass by block; None if nothing is measured by block.
        tokens: buffers of mass by token; None if nothing is measured by token.
    """

    def __init__(
        self,
        requests: int,
        blocks: int,
        sums: RunningSums | None,
        tokens: TokenSums | None,
        tests: bool,
        device: torch.device,
    ) -> None:
        self.rows = torch.full((requests,), -1, dtype=torch.int32, device=device)
        self.mass: MassBuffers | None = None
        self.tokens = None if tokens is None else tokens.token_buffers(requests, blocks)
        if sums is not None and tokens is None:
            ones = torch.ones(requests, device=device)
            self.mass = sums.buffers(requests, blocks, torch.zeros_like(self.rows), ones, tests)
        self._live = 0

    @property
    def kept_bytes(self) -> int:
        each = (self.rows, *(self.mass or ()), *(self.tokens or ()))
        return sum(tensor.nbytes for tensor in each if isinstance(tensor, torch.Tensor))

    def use(self, live: int) -> None:
        """Set the number of requests in the batch. The other rows of a graph are padding."""
        if live != self._live:
            rows = np.arange(len(self.rows), dtype=np.int32)
            self.rows.copy_(to_device(np.where(rows < live, rows, -1).astype(np.int32), self.rows.device))
            self._live = live
