"""Full CUDA graphs of decode steps: which kernel attends in one, and the memory that it reads and writes.

A graph replays launches that were captured once, on the memory of that time. So what changes from step to step, tables,
lengths, weights and mass, lies where it lay when the graph was captured; the host fills it before each replay.
"""

from enum import Enum

import numpy as np
import torch

from .sums import MassBuffers, RunningSums
from .tokens import TokenSums
from .transfer import to_device


class Attends(Enum):
    """Which kernel attends in a full graph, to all requests of its batch."""

    #: The backend's own, through the view. Nothing is measured.
    STOCK = "stock"
    #: The plugin's, output and mass in one read.
    OWN = "own"


class GraphMemory:
    """What graphs in which the plugin's kernel attends share, of one KV group.

    Args:
        requests: most in a batch.
        blocks: resident blocks of the longest request that such a graph takes.
        sums: what measures by block; None if nothing does.
        tokens: what measures by token, and in graphs nothing else does; None if nothing does.
        tests: whether queries may be tested for pivotal blocks.
        device: where the KV cache is.

    Attributes:
        rows: int32 [requests], the batch's rows, then -1.
        mass: what is measured by block; None if nothing is.
        tokens: what is measured by token; None if nothing is.
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
        """The batch has so many requests; the rest of a graph's rows is padding."""
        if live != self._live:
            rows = np.arange(len(self.rows), dtype=np.int32)
            self.rows.copy_(to_device(np.where(rows < live, rows, -1).astype(np.int32), self.rows.device))
            self._live = live
