"""What the plugin's kernels do in one step, beside the stock attention kernel or in its place."""

from functools import partial
from typing import Any

import numpy as np
import torch

from .sums import MassStep
from .transfer import to_device


class OwnWork:
    """One step's decodes that the plugin attends to itself, and what it measures; the same for all layers.

    A request that lacks nothing stays with the stock kernel, so that its output is stock's to the byte. One that has
    holes is decoded by a kernel that yields output and mass in one read; queries of its prefill are measured beside.

    Args:
        mass: what is measured; None if nothing.
        rows: int64 [n], batch rows of one query each that the plugin attends to.
        query_start_loc: int32 [R + 1].
        seq_lens: int32 [R], resident tokens.

    Attributes:
        seq_lens: as given.
        is_all: whether no query is left for the stock kernel.
        stock_lens: int32 [R], lengths for the stock kernel: 1 for each of `rows`, which it need not read.
    """

    def __init__(
        self, mass: MassStep | None, rows: np.ndarray, query_start_loc: np.ndarray, seq_lens: torch.Tensor
    ) -> None:
        self.mass = mass
        self.is_all = len(rows) == query_start_loc[-1]
        self._rows = to_device(rows.astype(np.int32), seq_lens.device)
        self.seq_lens = self.stock_lens = seq_lens
        self._stock_weights = None if mass is None else mass.weights
        if not len(rows):
            return
        self.stock_lens = seq_lens.clone().index_fill_(0, self._rows.long(), 1)
        if mass is not None and not self.is_all:
            ones = np.ones(query_start_loc[-1], np.float32)
            weights = ones if mass.host_weights is None else mass.host_weights.copy()
            weights[query_start_loc[rows]] = 0
            self._stock_weights = to_device(weights, seq_lens.device)

    def do(self, passes: Any, layer: Any, query: Any, kv_cache: Any, metadata: Any, output: Any) -> None:
        """One layer's share, after the stock kernel's (see `attention.backend.Passes`)."""

        def weigh(weights: torch.Tensor | None, out: torch.Tensor | None) -> None:
            if len(self._rows):
                passes.decode(layer, query, kv_cache, metadata, output, self._rows, self.seq_lens, weights, out)
            if out is not None and not self.is_all:
                passes.mass(layer, query, kv_cache, metadata, self._stock_weights, out)

        if self.mass is None:
            weigh(None, None)
        else:
            self.mass.add(weigh, partial(passes.mass_of, layer, query, kv_cache, metadata))
