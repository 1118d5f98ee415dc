"""Layers read a part of the blocks that a request has on the device: sinks, recent blocks, and what the query wants.

It is `Reach` without a host, as in Quest (Tang et al., ICML 2024, arXiv:2406.10774): nothing is copied, and a request
has no room. Layers that lead in a list are those of OmniKV (Hao et al., ICLR 2025), a choice that holds for some steps
is that of Recycled Attention (Xu et al., 2024).
"""

from collections.abc import Sequence

import numpy as np
import torch

from ..core.plan import RoomOf
from .holes import Start
from .kernels.reach import ReachRows
from .probes import LayerCall
from .reach import Reach
from .shape import Shape
from .step_batch import StepBatch


class Read(Reach):
    """What layers of one KV group read of requests that have more resident blocks than `read`.

    An index of a block is computed in the step that fills it, and lives as long as its content. So a request that hits
    a cached prefix has the index of its blocks.
    """

    #: The batch of a step, and its rows that read less: layers that write the table change what it says of them.
    _of_batch: tuple[StepBatch | None, np.ndarray] = None, np.zeros(0, np.int64)

    @property
    def writes(self) -> bool:
        return not self.decodes

    def _room(self, shape: Shape) -> int:
        blocks, sinks, recent = self._config.read_blocks(shape.block_size)
        self._room_of = RoomOf(sinks, blocks - sinks - recent, recent)
        return self._room_of.blocks

    def begin(self, start: Start) -> None:
        """Choose anew for requests that ended, started, or lost blocks."""
        for req_id in (start.gone | start.started | start.changed) & self._of.keys():
            self._forget(req_id)

    def _forget(self, req_id: str) -> None:
        self._slots.append(self._of.pop(req_id).slot)

    def hidden(self, req_ids: Sequence[str]) -> list[tuple[int, range]]:
        return []

    def read_on_host(self) -> dict[str, np.ndarray]:
        return {}

    def _rows(self, batch: StepBatch) -> tuple[np.ndarray, np.ndarray]:
        if self._of_batch[0] is not batch:
            tokens = batch.queries if batch.verified is None else batch.verified
            held = batch.resident_tokens - (batch.queries - tokens) - (0 if batch.slack is None else batch.slack)
            less = self._config.reads_less(tokens, held, self.block_size)
            self._of_batch = batch, np.flatnonzero(less)
        return self._of_batch[1], np.zeros(0, np.int64)

    def rows(self, batch: StepBatch, rows: np.ndarray, table: torch.Tensor) -> tuple[ReachRows, np.ndarray]:
        req_ids = [batch.req_ids[row] for row in rows.tolist()]
        for req_id in req_ids:
            if req_id in self._of:
                continue
            if not self._slots:  # those of requests that wait, as sessions do between turns
                for other in self._of.keys() - set(req_ids):
                    self._forget(other)
            self._of[req_id] = self._new(self._room_of)
            self._steps_of[self._of[req_id].slot] = 0
        return super().rows(batch, rows, table)

    def _blocks(self, batch: StepBatch, table: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
        # Layers write their choices into the table that the backend's kernel reads.
        return batch.resident_tokens, table if self.decodes else table.clone()

    def _host_pages(self, call: LayerCall) -> torch.Tensor:
        return call.kv_cache[:0]
