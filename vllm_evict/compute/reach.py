"""Layers reach blocks of the host: prompts read all of them, and each layer of a decode those that its query wants.

A request over its budget has sinks, a room and recent blocks on the device, and all blocks after its sinks on the host.
Its room has what each layer has read last: before a layer decodes, it brings the blocks that it chooses (`choosing.py`)
into the room. A chunk of a prompt attends to all blocks: those that the device lacks are copied to staging pages, which
lie behind the pool's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..config import KVPolicyConfig
from ..core.host_pool import READ_ON_HOST, Reached, RoomOf
from ..core.mechanisms.staging import staging_blocks
from .choosing import Chooser, Choosing
from .holes import Start
from .host_copies import HostCopies
from .index import BlockIndex
from .kernels.reach import copy_blocks
from .probes import LayerCall
from .shape import Shape
from .source import StepSource
from .step_batch import StepBatch
from .store import Store
from .transfer import stashed, to_device


class Reach(Choosing):
    """The source of one KV group some of whose requests have blocks on the host.

    Args:
        config: policy of the group's heads.
        shape: sizes of the group.
        store: KV cache of the group.
        index: of its blocks.
        host: has the host blocks, once memory is allocated.
    """

    whose, prompts = "requests that read blocks of the host", "prompts longer than their budget"
    beside_graphs = ", but for requests that read the host"

    def __init__(self, config: KVPolicyConfig, shape: Shape, store: Store, index: BlockIndex, host: HostCopies) -> None:
        limits = config.limits(shape.block_size, shape.max_model_len)
        assert limits is not None  # it would be stock's
        super().__init__(config, shape, store, index, limits.room)
        self._host, self.staging = host, staging_blocks(shape.max_model_len, shape.block_size)
        self.outgrowing: set[str] = set()
        #: `_numbers` on the host.
        self._on_host = np.full((shape.max_requests, shape.max_blocks), -1, np.int32)

    @classmethod
    def described(cls, sources: Sequence[Any]) -> str:
        return super().described(sources) + f", and prompts {sources[0].staging} pages behind the pool's blocks"

    def begin(self, start: Start) -> None:
        """Forget requests that ended or start over. The next turn of a session goes on with what it has."""
        self._started = start.started if self.loads else frozenset()
        self.outgrowing -= start.gone
        self.outgrowing.update(each for each, n in start.prompts.items() if self._config.outgrows(self.block_size, n))
        for req_id in start.gone | start.resumed if self._of else ():
            if req_id in self._of:
                self._forget(req_id)
        if (told := Reached.within(start.plan)) is None:
            return
        for req_id, there in told.blocks.items():
            if (its := self._of.get(req_id)) is None:
                its = self._of[req_id] = self._new(told.rooms[req_id])
            self._on_host[its.slot, list(there)] = list(there.values())
            self._numbers[its.slot] = to_device(self._on_host[its.slot], self._device)
            self._steps_of[its.slot] = 0

    def _new(self, room: RoomOf) -> Chooser:
        its = super()._new(room)
        self._on_host[its.slot] = -1
        return its

    def replays(self, batch: StepBatch) -> None:
        """Note what the step fills; its index is computed when a layer may ask for it."""
        self.index.note(batch.filled(self.block_size, self._started))

    def step(self, batch: StepBatch) -> StepSource:
        if self.index.is_late and not self._of:  # nothing is paid before a request has blocks on the host
            self.replays(batch)
            return StepSource(batch.lens)
        self.index.catch_up()
        return super().step(batch)

    def rewrite(self, batch: StepBatch, table: torch.Tensor, lens: torch.Tensor) -> None:
        """Set what decodes read. Bring all blocks of prompts to the device, and name them in the table."""
        super().rewrite(batch, table, lens)
        prompts = [row for row in np.flatnonzero(~batch.decodes).tolist() if batch.req_ids[row] in self._of]
        if not prompts:
            return
        pages: list[torch.Tensor] = []
        numbers: list[np.ndarray] = []
        tokens, free = batch.resident_tokens.copy(), self._pool
        for row in prompts:
            its, length = self._of[batch.req_ids[row]], int(batch.seq_lens[row])
            blocks = -(-length // self.block_size)
            its_table = batch.written[row, :blocks].clone()
            its_numbers = self._on_host[its.slot, :blocks]
            on_host = np.flatnonzero(its_numbers >= 0)
            room = slice(its.room.first, its.room.first + its.room.blocks)
            absent = on_host[on_host >= room.stop]
            its_table[to_device(absent, self._device)] = torch.arange(
                free, free + len(absent), dtype=torch.int32, device=self._device
            )
            free += len(absent)
            pages.append(its_table[to_device(on_host, self._device)])
            numbers.append(its_numbers[on_host])
            table[row, :blocks], lens[row], tokens[row] = its_table, length, length
            its_room = torch.arange(room.start, room.stop, dtype=torch.int32, device=self._device)
            self._held[:, its.slot, : its.room.blocks] = its_room
            self._steps_of[its.slot] = 0
        assert free <= self._pool + self.staging, "prompts of a step need more staging pages than there are"
        batch.resident_tokens, batch.longest = tokens, int(tokens.max())
        to, of = torch.cat(pages), to_device(np.concatenate(numbers), self._device)
        for page, host in zip(self._store.pages(drafting=False), self._host.blocks.own):
            copy_blocks(page, host, to, of)

    def hidden(self, req_ids: Sequence[str]) -> list[tuple[int, range]]:
        """Return the rooms (`Source.hidden`), in which a drafter's layers have nothing."""
        rooms = ((row, self._of[req_id].room) for row, req_id in enumerate(req_ids) if req_id in self._of)
        return [(row, range(room.first, room.first + room.blocks)) for row, room in rooms]

    def _choosing_rows(self, batch: StepBatch) -> np.ndarray:
        its = np.fromiter((req_id in self._of for req_id in batch.req_ids), bool, len(batch.req_ids))
        return np.flatnonzero(its & batch.decodes)

    def _blocks(self, batch: StepBatch, table: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
        return batch.seq_lens, batch.written

    def _host_pages(self, call: LayerCall) -> torch.Tensor:
        return self._host.blocks.own[call.place]

    def told(self) -> Mapping[str, Any]:
        """Return what decodes have read on the host."""
        told, self._choosers = self._choosers, []
        if not told:
            return {}
        counts = stashed(self.counts).numpy()
        self.counts.zero_()
        return {READ_ON_HOST: {req_id: counts[self._of[req_id].slot] for req_id in told}}
