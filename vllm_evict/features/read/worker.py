"""Layers read a part of the blocks that a request has on the device: sinks, recent blocks, and what the query wants.

This is Quest (Tang et al., ICML 2024, arXiv:2406.10774): nothing is copied, and a room is only a number of blocks.
Layers that lead in a list are those of OmniKV (Hao et al., ICLR 2025), a choice that holds for some steps is that of
Recycled Attention (Xu et al., 2024).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ...compute.batch import Batch
from ...compute.choosing import Choosing
from ...compute.holes import Start
from ...compute.index import BlockIndex
from ...compute.kernels.reach import OF_ROWS, SCRATCH, ReachRows
from ...compute.kernels.signs import TILE_QUERIES
from ...compute.needs import Needs
from ...compute.probes import LayerCall
from ...compute.shape import Shape
from ...compute.step_batch import StepBatch
from ...compute.store import Store
from ...compute.tiles import Cut, cut
from ...config import KVPolicyConfig
from ...config.sizes import TILE
from ...core.host_pool import RoomOf
from .own_blocks import OwnBlocks


class Read(Choosing):
    """The source of one KV group whose layers read a part of requests with more resident blocks than `read`.

    An index of a block is computed in the step that fills it, and lives as long as its content. So a request that hits
    a cached prefix has the index of its blocks.
    """

    whose = "requests that read less"
    #: Own blocks of tiles in the step; None: it has no tiles.
    _own: OwnBlocks | None = None
    #: The batch of a step, and its rows that read less: layers that write the table change what it says of them.
    _of_batch: tuple[StepBatch | None, np.ndarray] = None, np.zeros(0, np.int64)

    def __init__(self, config: KVPolicyConfig, shape: Shape, store: Store) -> None:
        self.cuts, requests = bool(config.read_prompts), shape.max_requests
        if self.cuts:  # a chunk has at most two tiles more than its tokens fill
            tiles = shape.step_tokens // TILE + 2 * requests
            shape = replace(shape, max_requests=requests + tiles)
        blocks, sinks, recent = config.read_blocks(shape.block_size)
        self._room_of = RoomOf(sinks, blocks - sinks - recent, recent)
        prompts = config.read_blocks(shape.block_size, prompts=True)[0] if self.cuts else 0
        index = BlockIndex(config.index, store, shape)
        super().__init__(config, shape, store, index, max(self._room_of.blocks, prompts))
        #: Slots of tiles, which keep nothing from step to step.
        self._of_tiles, self._slots = self._slots[requests:], self._slots[:requests]

    @classmethod
    def described(cls, sources: Sequence[Any]) -> str:
        room, index = sources[0]._room_of, super().described(sources)
        stay = room.first + room.recent
        return f"; decodes read {stay + room.blocks} blocks at most, {stay} of them sinks and recent blocks{index}"

    @property
    def writes(self) -> bool:
        return not self.decodes

    def needs(self, shape: Shape) -> Needs:
        """Return what a choice needs, and what a tile's logarithms take beyond `SCRATCH`."""
        needs, of_token = super().needs(shape), shape.step_tokens * shape.head_size * shape.itemsize
        logs = 4 * TILE * shape.max_blocks * (shape.queries // of_token) if self.cuts else 0
        return needs._replace(step=needs.step + max(logs - SCRATCH, 0))

    def cut(self, metadata: Any, batch: Batch) -> Cut | None:
        if not self.cuts:
            return None
        return cut(metadata, batch, self._config.read_blocks(self.block_size, prompts=True)[0] * self.block_size, TILE)

    def begin(self, start: Start) -> None:
        """Choose anew for requests that ended, started, or lost blocks."""
        for req_id in (start.gone | start.started | start.changed) & self._of.keys():
            self._forget(req_id)

    def _choosing_rows(self, batch: StepBatch) -> np.ndarray:
        if self._of_batch[0] is not batch:
            sure = batch.resident_tokens - batch.drafts - (0 if batch.slack is None else batch.slack)
            less = self._config.reads_less(batch.decodes, sure, self.block_size)
            self._of_batch = batch, np.flatnonzero(less)
        return self._of_batch[1]

    def kernel_rows(self, batch: StepBatch, rows: np.ndarray, table: torch.Tensor) -> tuple[ReachRows, np.ndarray]:
        req_ids = [batch.req_ids[row] for row in rows.tolist() if batch.decodes[row]]
        for req_id in req_ids:
            if req_id in self._of:
                continue
            if not self._slots:  # those of requests that wait, as sessions do between turns
                for other in self._of.keys() - set(req_ids):
                    self._forget(other)
            self._of[req_id] = self._new(self._room_of)
            self._steps_of[self._of[req_id].slot] = 0
        decodes = batch.decodes[rows]
        if decodes.all() or not decodes.any():
            return super().kernel_rows(batch, rows, table)
        order = np.argsort(decodes, kind="stable")  # tiles first: kernels have scratch for their queries alone
        made, unread = super().kernel_rows(batch, rows[order], table)
        made = replace(made, many=int((~decodes).sum()), few=int(batch.queries[rows[decodes]].max()))
        return made, unread[np.argsort(order)]

    def _choices(
        self, batch: StepBatch, rows: np.ndarray, tokens: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Choose as `Choosing._choices` says. Rows of prompts are tiles."""
        tiles, self._own = ~batch.decodes[rows], None
        if not tiles.any():
            return super()._choices(batch, rows, tokens)
        known, unread = {name: np.zeros(len(rows), np.int64) for name in OF_ROWS}, np.zeros(len(rows), np.int64)
        for some, choices in (~tiles, super()._choices), (tiles, self._choices_of_tiles):
            its, unread[some] = choices(batch, rows[some], tokens)
            for name in OF_ROWS:
                known[name][some] = its[name]
        return known, unread

    def _choices_of_tiles(
        self, batch: StepBatch, rows: np.ndarray, tokens: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return what `_choices` does for tiles: each chooses among the blocks before its own, once in each layer."""
        read, sinks, recent = self._config.read_blocks(self.block_size, prompts=True)
        counts, lengths, slots = batch.queries[rows], tokens[rows], self._of_tiles[: len(rows)]
        full, blocks = (lengths - counts) // self.block_size, -(-lengths // self.block_size)
        end = full + 1 - recent
        chosen = read - sinks - (blocks - end)
        known = {
            "queries": batch.starts[rows],
            "query_counts": counts,
            "full": full,
            "blocks": blocks,
            "first": np.full_like(full, sinks),
            "end": end,
            "chosen": chosen,
            "rooms": chosen,
            "slots": np.array(slots),
            "out_rows": rows,
            "chooses": np.ones_like(full),
        }
        if (many := counts >= TILE_QUERIES).any():
            starts = batch.starts[rows[many]]
            self._own = OwnBlocks(rows[many], starts, counts[many], lengths[many], self.block_size, self._device)
        return known, (blocks - read) * self.block_size

    def _variants(self, call: LayerCall) -> list[tuple[int, torch.Tensor | None]]:
        own = torch.zeros(call.query.shape[:2], device=self._device)
        return [*super()._variants(call), *([(TILE, own)] if self.cuts else [])]

    def _sinks(self, call: LayerCall, rows: ReachRows) -> torch.Tensor | None:
        return super()._sinks(call, rows) if self._own is None else self._own.logits(call, rows.written)

    def _blocks(self, batch: StepBatch, table: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
        # Layers write their choices into the table that the backend's kernel reads.
        return batch.resident_tokens, table if self.decodes else table.clone()

    def _host_pages(self, call: LayerCall) -> torch.Tensor:
        return call.kv_cache[:0]
