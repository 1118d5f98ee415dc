"""Layers reach blocks of the host: prompts read all of them, and each layer of a decode those that its query wants.

A request over its budget has sinks, a room and recent blocks on the device, and all blocks after its sinks on the host.
The room is a run of its blocks whose content differs from layer to layer: what the layer has read last. An index stands
for each full block, wherever it lives: signs of its keys (`kernels.signs`), or a box of them (Quest: Tang et al., ICML
2024, arXiv:2406.10774). Before a layer decodes, it scores all full blocks of a row with its own query, brings the best
ones into the room, and attends to sinks, best blocks and recent blocks. A chunk of a prompt attends to all blocks:
those that the device lacks are copied to staging pages, which lie behind the pool's.

Each tensor-parallel rank chooses for its own heads: nothing is lost, so ranks need not agree.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ..config import KVPolicyConfig
from ..core.mechanisms.reach import staging_blocks
from ..core.offload import Copy
from ..core.plan import RoomOf
from .holes import Start
from .kernels.bounds import key_bounds
from .kernels.logits import logits_of
from .kernels.reach import ReachRows, reach
from .kernels.signs import key_signs
from .offload import Offload
from .parts import Room
from .probes import LayerCall
from .shape import Shape
from .source import Source, StepSource
from .step_batch import StepBatch
from .store import Store
from .transfer import to_device

#: The bits of a NaN in bfloat16.
NAN = 0x7FC0


@dataclass(slots=True)
class _Reached:
    """What is known of a request with blocks on the host.

    Attributes:
        slot: its row in arrays of slots.
        room: its room.
    """

    slot: int
    room: RoomOf


class Reach(Source):
    """What layers of one KV group read of requests with blocks on the host.

    Args:
        config: policy of the group's heads.
        shape: sizes of the group.
        store: KV cache of the group.

    Attributes:
        host: the host blocks; set before memory is allocated.
        counts: `from_host`, blocks of the host that layers of decodes have read; `in_room`, those of them that were
            in the room.
    """

    reads_all = False
    host: Offload

    def __init__(self, config: KVPolicyConfig, shape: Shape, store: Store) -> None:
        self._config, self._store, self._device, self.block_size = config, store, shape.device, shape.block_size
        self.staging = staging_blocks(shape.max_model_len, shape.block_size)
        self._of_keys = key_signs if config.index == "signs" else key_bounds
        #: Of each layer [blocks of the pool, then of the host; Hkv; X], what stands for them.
        self._index: list[torch.Tensor] = []
        self._of: dict[str, _Reached] = {}
        #: Rooms of the plan whose copies come next.
        self._rooms: dict[str, RoomOf] = {}
        self._slots = list(range(shape.max_requests))
        #: int32 [layers, slots, room], the logical block in each block of a room, the step that read it last, and the
        #: chosen blocks of the pool.
        self._held = self._read = self._picked = torch.full(
            (shape.layers, shape.max_requests, 0), -1, dtype=torch.int32
        )
        #: int32 [slots, blocks], the host block of each logical block; -1: it is in the pool alone.
        self._numbers = torch.full((shape.max_requests, shape.max_blocks), -1, dtype=torch.int32)
        #: Of each slot [slots, 4]: the first block of its room, its blocks, recent blocks, and blocks that it chooses.
        self._sizes = np.zeros((shape.max_requests, 4), np.int32)
        #: Of each slot: full blocks when it chose last, steps that have read the choice (0: it has to choose), and the
        #: step that chose.
        self._full, self._steps_of, self._chose = np.zeros((3, shape.max_requests), np.int32)
        self._steps = 0
        #: Blocks of the pool, after which come staging pages in the cache, and blocks of the host in the index.
        self._pool = 0
        self.counts = Counter[str]()

    @property
    def kept_bytes(self) -> int:
        """Bytes of the index on their device."""
        return sum(index.nbytes for index in self._index)

    @property
    def requests(self) -> Iterable[str]:
        """Requests with blocks on the host."""
        return self._of.keys()

    def allocate(self, room: Room) -> None:
        """Allocate the index of all blocks of the pool, and after them for those of the host."""
        self._pool = room.blocks
        none = torch.zeros(0, dtype=torch.int64, device=self._device)
        empty = [self._of_keys(keys) for keys, _ in self._store.read(none, False)]
        blocks = room.blocks + room.host_blocks
        self._index = [each.new_zeros((blocks, *each.shape[1:])) for each in empty]

    def begin(self, start: Start) -> None:
        """Forget requests that ended or start over. The next turn of a session goes on with what it has."""
        for req_id in start.gone | start.resumed if self._of else ():
            if (its := self._of.pop(req_id, None)) is not None:
                self._slots.append(its.slot)
        self._rooms = start.plan.rooms

    def copied(self, copies: Sequence[Copy]) -> None:
        """Note the blocks that are on the host from now on; their index goes with them."""
        if poisoned := [self._pool + copy.number for copy in copies if copy.kind == "poison"]:
            for index in self._index:
                index[poisoned] = float("nan") if index.is_floating_point() else NAN
        spills = [copy for copy in copies if copy.kind == "spill"]
        numbers = self._numbers.numpy()
        for each in spills:
            if (its := self._of.get(each.req_id)) is None:
                its = self._of[each.req_id] = self._new(self._rooms[each.req_id])
            numbers[its.slot, each.logical] = each.number
            self._steps_of[its.slot] = 0
        if spills:
            there, here = (torch.tensor([getattr(copy, name) for copy in spills]) for name in ("physical", "number"))
            for index in self._index:
                index[self._pool + here] = index[there]

    def _new(self, room: RoomOf) -> _Reached:
        if (more := room.blocks - self._held.shape[2]) > 0:
            self._held, self._read, self._picked = (
                functional.pad(each, (0, more), value=-1) for each in (self._held, self._read, self._picked)
            )
        slot = self._slots.pop()
        self._held[:, slot] = self._read[:, slot] = -1
        self._numbers[slot] = -1
        chosen = self._config.chosen(room.blocks, room.first, room.recent, self.block_size)
        self._sizes[slot] = room.first, room.blocks, room.recent, chosen
        return _Reached(slot, room)

    def complete(self, batch: StepBatch, table: torch.Tensor, lens: torch.Tensor) -> None:
        """Bring all blocks of the step's prompts to the device, and name them in the table."""
        pages: list[int] = []
        numbers: list[int] = []
        rows = [row for row, req_id in enumerate(batch.req_ids) if batch.queries[row] > 1 and req_id in self._of]
        if not rows:
            return
        tokens, free = batch.resident_tokens.copy(), self._pool
        for row in rows:
            its, length = self._of[batch.req_ids[row]], int(batch.seq_lens[row])
            blocks = -(-length // self.block_size)
            its_table = batch.written[row, :blocks].clone()
            its_numbers = self._numbers[its.slot, :blocks].numpy()
            on_host = np.flatnonzero(its_numbers >= 0)
            room = slice(its.room.first, its.room.first + its.room.blocks)
            absent = on_host[on_host >= room.stop]
            its_table[to_device(absent, self._device)] = torch.arange(
                free, free + len(absent), dtype=torch.int32, device=self._device
            )
            free += len(absent)
            pages += its_table[to_device(on_host, self._device)].tolist()
            numbers += its_numbers[on_host].tolist()
            table[row, :blocks], lens[row], tokens[row] = its_table, length, length
            self._held[:, its.slot, : its.room.blocks] = torch.arange(room.start, room.stop, dtype=torch.int32)
            self._steps_of[its.slot] = 0
        assert free <= self._pool + self.staging, "prompts of a step need more staging pages than there are"
        batch.resident_tokens, batch.longest = tokens, int(tokens.max())
        self.host.blocks.pages.read(self._store.pages(), pages, numbers)

    def step(self, batch: StepBatch) -> StepSource:
        rows = [row for row, req_id in enumerate(batch.req_ids) if batch.queries[row] == 1 and req_id in self._of]
        filled = batch.filled(self.block_size)
        if filled is None and not rows:
            return super().step(batch)
        self._steps += 1
        return ReachStep(self, np.array(rows, np.int64), filled, batch)

    def fill(self, call: LayerCall, filled: torch.Tensor) -> None:
        """Compute the index of blocks that the step has filled, in one layer."""
        keys, _ = call.ops.read(call.layer, call.kv_cache, filled, False)
        self._index[call.place][filled] = self._of_keys(keys)

    def read(self, call: LayerCall, rows: ReachRows, table: torch.Tensor) -> None:
        """Choose what rows read in one layer, bring it to the device, and write it into the table."""
        place, layer, logits = call.place, call.layer, logits_of(call.layer)
        if logits["sinks"] is not None:
            logits["sinks"] = logits["sinks"].float()
        from_host, in_room = reach(
            rows,
            call.query,
            self._index[place],
            self._numbers,
            self._held[place],
            self._read[place],
            self._picked[place],
            call.kv_cache,
            self.host.blocks.pages_of(place),
            table,
            layer.impl.scale,
            **logits,
            step=self._steps,
        )
        self.counts["from_host"] += from_host
        self.counts["in_room"] += in_room

    def last_read(self, req_id: str, place: int) -> list[int]:
        """Return the blocks of the host that a request's last decode has read in one layer, ascending."""
        held, read = (each[place, self._of[req_id].slot] for each in (self._held, self._read))
        return sorted(held[read == int(self._chose[self._of[req_id].slot])].tolist())

    def rows(self, batch: StepBatch, rows: np.ndarray) -> tuple[ReachRows, np.ndarray]:
        """Return what the kernel knows of rows that read blocks of the host, int64 [R], and the tokens that each reads.

        A row chooses every `hold` steps, when it starts a block, and when blocks of it have moved.
        """
        slots = np.array([self._of[batch.req_ids[row]].slot for row in rows.tolist()])
        first, room, recent, chosen = self._sizes[slots].T
        last = batch.seq_lens[rows] - 1
        full, steps = last // self.block_size, self._steps_of[slots]
        chooses = (steps % self._config.hold == 0) | (full != self._full[slots])
        self._full[slots], self._steps_of[slots] = full, np.where(chooses, 1, steps + 1)
        self._chose[slots[chooses]] = self._steps
        tokens = (first + chosen + recent - 1) * self.block_size + last % self.block_size + 1
        known = batch.starts[rows], full, first, full + 1 - recent, chosen, room, slots, rows, chooses
        made = torch.from_numpy(np.array(known, np.int32)).unbind()
        return ReachRows._make((*made, batch.written, self._pool)), tokens


class ReachStep(StepSource):
    """What layers of one step read. One table serves all layers in turn: each writes its choice into it.

    Args:
        reach: of the KV group.
        rows: int64 [R], rows that choose.
        filled: physical blocks that the step fills; None: it fills none.
        batch: of the step.
    """

    is_plain = False

    def __init__(self, reach: Reach, rows: np.ndarray, filled: torch.Tensor | None, batch: StepBatch) -> None:
        super().__init__(batch.lens)
        self._reach, self._filled, self.rows = reach, filled, rows
        self._metadata: tuple[Any, Any] = (None, None)
        if not len(rows):
            return
        self._rows, tokens = reach.rows(batch, rows)
        # Rows beside them that the plugin's kernel attends for have no more blocks than the resident ones.
        count, table = len(batch.resident_tokens), batch.table
        width = -(-int(tokens.max()) // reach.block_size)
        self._table = torch.zeros((count, max(width, table.shape[1])), dtype=torch.int32)
        self._table[:, : table.shape[1]] = table[:count]
        self._lens = batch.lens[:count].index_copy(0, torch.from_numpy(rows), torch.from_numpy(tokens))

    def table(self, call: LayerCall) -> tuple[Any, torch.Tensor]:
        """Compute the index of blocks that filled, choose and fetch for the layer; return what it reads."""
        if self._filled is not None:
            self._reach.fill(call, self._filled)
        if not len(self.rows):
            return super().table(call)
        self._reach.read(call, self._rows, self._table)
        if self._metadata[0] is not call.metadata:
            read = copy(call.metadata)
            read.block_table = self._table
            self._metadata = call.metadata, read
        return self._metadata[1], self._lens
