"""Full CUDA graphs of decode steps: what attends and measures in a graph, and the rows that the graph reads.

A graph replays captured launches on the memory of the capture. Tables, lengths, weights and mass therefore keep their
addresses from step to step, and the host fills them before each replay. Probes have their own such memory.
"""

from enum import Enum

import numpy as np
import torch

from .transfer import to_device


class Attends(Enum):
    """Attends to all requests of a full graph."""

    #: The backend's kernel, through the view. Nothing is measured.
    STOCK = "stock"
    #: The plugin's kernel, which computes output and mass in one read. Each request has one query.
    OWN = "own"
    #: The backend's kernel, through the view. Kernels of the plugin measure mass beside it.
    BESIDE = "beside"


class GraphRows:
    """Rows of a batch, for all `Attends.OWN` graphs of one KV group.

    Args:
        requests: most requests in a batch.
        device: device of the KV cache.

    Attributes:
        rows: int32 [requests], the batch's rows, then -1; empty until `reserve`.
    """

    def __init__(self, requests: int, device: torch.device) -> None:
        self._requests, self._device, self._live = requests, device, 0
        self.rows = torch.empty(0, dtype=torch.int32, device=device)

    def reserve(self) -> None:
        """Allocate the rows, once."""
        if not len(self.rows):
            self.rows = torch.full((self._requests,), -1, dtype=torch.int32, device=self._device)

    def use(self, live: int) -> None:
        """Set the number of requests in the batch. The other rows of a graph are padding."""
        if live != self._live:
            rows = np.arange(len(self.rows), dtype=np.int32)
            self.rows.copy_(to_device(np.where(rows < live, rows, -1).astype(np.int32), self.rows.device))
            self._live = live
