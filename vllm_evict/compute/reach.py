"""Layers reach blocks of the host: prompts read all of them, and each layer of a decode those that its query wants.

A request over its budget has sinks, a room and recent blocks on the device, and all blocks after its sinks on the host.
The room is a run of its blocks whose content differs from layer to layer: what the layer has read last. A box of keys
stands for each full block, wherever it lives (Quest: Tang et al., ICML 2024, arXiv:2406.10774). Before a layer decodes,
it scores all full blocks of a row with its own query, brings the best ones into the room, and attends to sinks, best
blocks and recent blocks. A chunk of a prompt attends to all blocks: those that the device lacks are copied to staging
pages, which lie behind the pool's.

Each tensor-parallel rank chooses for its own heads: nothing is lost, so ranks need not agree.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..config import KVPolicyConfig
from ..core.mechanisms.reach import staging_blocks
from ..core.plan import Copy, RoomOf
from .holes import Start
from .kernels.bounds import key_bounds
from .kernels.logits import logits_of, probabilities, soft_capped
from .offload import Offload, empty_bounds
from .parts import Room
from .probes import LayerCall
from .shape import Shape
from .source import NO_ROWS, Source, StepSource
from .step_batch import StepBatch
from .store import Store
from .transfer import to_device


@dataclass(slots=True)
class _Reached:
    """What is known of a request with blocks on the host.

    Attributes:
        slot: its row in arrays of rooms.
        room: its room.
        chosen: blocks that a decode chooses.
        numbers: int64 [blocks], the host block of each logical block; -1: it is in the pool alone.
    """

    slot: int
    room: RoomOf
    chosen: int
    numbers: np.ndarray


class Reach(Source):
    """What layers of one KV group read of requests with blocks on the host.

    Args:
        config: policy of the group's heads.
        shape: sizes of the group.
        store: KV cache of the group.

    Attributes:
        host: the host blocks; set before memory is allocated.
        counts: blocks that layers of decodes chose on the host, and those of them that were in the room.
    """

    reads_all = False
    host: Offload

    def __init__(self, config: KVPolicyConfig, shape: Shape, store: Store) -> None:
        self._config, self._store, self._device, self.block_size = config, store, shape.device, shape.block_size
        self._most, self._layers, self._requests = shape.max_blocks, shape.layers, shape.max_requests
        self.staging = staging_blocks(shape.max_model_len, shape.block_size)
        self._bounds: list[torch.Tensor] = []
        self._of: dict[str, _Reached] = {}
        #: Rooms of the plan whose copies come next.
        self._rooms: dict[str, RoomOf] = {}
        self._slots = list(range(shape.max_requests))
        #: int64 [layers, requests, room], the logical block in each block of a room, and the step that read it last.
        self._held = self._read = np.full((self._layers, self._requests, 0), -1, np.int64)
        self._steps = 0
        self._pool = 0
        self.counts = {"chosen": 0, "from_host": 0, "in_room": 0, "of_step_before": 0}

    @property
    def kept_bytes(self) -> int:
        """Bytes of the bounds on their device."""
        return sum(bounds.nbytes for bounds in self._bounds)

    @property
    def requests(self) -> Iterable[str]:
        """Requests with blocks on the host."""
        return self._of.keys()

    def allocate(self, room: Room) -> None:
        """Allocate bounds for all blocks of the pool, and after them for those of the host."""
        self._pool = room.blocks
        self._bounds = empty_bounds(self._store, room.blocks + room.host_blocks, self._device, "box")

    def begin(self, start: Start) -> None:
        """Forget requests that ended or start over."""
        for req_id in (*start.gone, *start.started) if self._of else ():
            if (its := self._of.pop(req_id, None)) is not None:
                self._slots.append(its.slot)
        self._rooms = start.plan.rooms

    def copied(self, copies: Sequence[Copy]) -> None:
        """Note the blocks that are on the host from now on; their bounds go with them."""
        if poisoned := [self._pool + copy.number for copy in copies if copy.kind == "poison"]:
            for bounds in self._bounds:
                bounds[poisoned] = float("nan")
        spills = [copy for copy in copies if copy.kind == "spill"]
        for each in spills:
            if (its := self._of.get(each.req_id)) is None:
                its = self._of[each.req_id] = self._new(self._rooms[each.req_id])
            its.numbers[each.logical] = each.number
        if spills:
            there, numbers = ([getattr(copy, name) for copy in spills] for name in ("physical", "number"))
            for bounds in self._bounds:
                bounds[[self._pool + number for number in numbers]] = bounds[there]

    def _new(self, room: RoomOf) -> _Reached:
        if room.blocks > self._held.shape[2]:
            wider = np.full((self._layers, self._requests, room.blocks), -1, np.int64)
            wider[..., : self._held.shape[2]] = self._held
            self._held, self._read = wider, np.zeros(wider.shape, np.int64)
        slot = self._slots.pop()
        self._held[:, slot], self._read[:, slot] = -1, 0
        chosen = self._config.chosen(room.blocks, room.first, room.recent, self.block_size)
        return _Reached(slot, room, chosen, np.full(self._most, -1, np.int64))

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
            on_host = np.flatnonzero(its.numbers[:blocks] >= 0)
            room = slice(its.room.first, its.room.first + its.room.blocks)
            absent = on_host[on_host >= room.stop]
            its_table[to_device(absent, self._device)] = torch.arange(
                free, free + len(absent), dtype=torch.int32, device=self._device
            )
            free += len(absent)
            pages += its_table[to_device(on_host, self._device)].tolist()
            numbers += its.numbers[on_host].tolist()
            table[row, :blocks], lens[row], tokens[row] = its_table, length, length
            self._held[:, its.slot, : its.room.blocks] = np.arange(room.start, room.stop)
        assert free <= self._pool + self.staging, "prompts of a step need more staging pages than there are"
        batch.resident_tokens, batch.longest = tokens, int(tokens.max())
        self.host.blocks.pages.read(self._store.pages(), pages, numbers)

    def step(self, batch: StepBatch) -> StepSource:
        rows = [row for row, req_id in enumerate(batch.req_ids) if batch.queries[row] == 1 and req_id in self._of]
        filled = batch.filled(self.block_size)
        if filled is None and not rows:
            return super().step(batch)
        self._steps += 1
        return ReachStep(self, np.array(rows, np.int64), [self._of[batch.req_ids[row]] for row in rows], filled, batch)

    def fill(self, call: LayerCall, filled: torch.Tensor) -> None:
        """Compute the bounds of blocks that the step has filled, in one layer."""
        keys, _ = call.ops.read(call.layer, call.kv_cache, filled, False)
        self._bounds[call.place][filled] = key_bounds(keys)

    def bounds(self, place: int) -> torch.Tensor:
        """Return the bounds of a layer: [blocks of the pool + of the host, Hkv, 2 * D]."""
        return self._bounds[place]

    def fetch(
        self, place: int, slots: np.ndarray, logical: np.ndarray, numbers: np.ndarray, rooms: np.ndarray
    ) -> np.ndarray:
        """Bring blocks into the rooms of one layer.

        Args:
            place: of the layer.
            slots: int64 [R], of rows.
            logical, numbers: int64 [R, k], logical blocks that each row reads, and their host blocks; -1: none.
            rooms: int64 [R, n], physical blocks of each row's room, -1 past its end.

        Returns:
            int64 [R, k], the physical block that holds each of them.
        """
        held, read = self._held[place, slots], self._read[place, slots]
        held, read = held[:, : rooms.shape[1]], read[:, : rooms.shape[1]]
        wanted = np.where(numbers >= 0, logical, -2)
        same = wanted[:, :, None] == held[:, None, :]
        there, slot_of = same.any(2), same.argmax(2)
        missing = (numbers >= 0) & ~there
        self.counts["from_host"] += int((numbers >= 0).sum())
        self.counts["in_room"] += int(there.sum())
        if missing.any():
            # Blocks that were read longest ago give way. Blocks that this step reads stay.
            age = np.where(same.any(1), np.iinfo(np.int64).max, read)
            age[rooms < 0] = np.iinfo(np.int64).max
            order = age.argsort(1, kind="stable")
            rank = np.where(missing, missing.cumsum(1) - 1, 0)
            slot_of = np.where(missing, np.take_along_axis(order, rank, 1), slot_of)
        pages = np.take_along_axis(rooms, slot_of, 1)
        if missing.any():
            row, at = np.nonzero(missing)
            held[row, slot_of[row, at]] = logical[row, at]
            page, own = self._store.pages()[place], self.host.blocks.pages.own[place]
            page[pages[missing]] = own[numbers[missing]]
            self._held[place, slots, : rooms.shape[1]] = held
        row, at = np.nonzero(numbers >= 0)
        self._read[place, slots[row], slot_of[row, at]] = self._steps
        return pages


class ReachStep(StepSource):
    """What layers of one step read. One table serves all layers in turn: each writes its choice into it.

    Args:
        reach: of the KV group.
        rows: int64 [R], rows that choose.
        reached: of each of them.
        filled: physical blocks that the step fills.
        batch: of the step.
    """

    is_plain = False

    def __init__(
        self, reach: Reach, rows: np.ndarray, reached: Sequence[_Reached], filled: torch.Tensor | None, batch: StepBatch
    ) -> None:
        super().__init__(batch.lens)
        self._reach, self._filled, self.rows = reach, filled, rows
        self._metadata: tuple[Any, Any] = (None, None)
        if not len(rows):
            self.rows = NO_ROWS
            return
        size, lengths = reach.block_size, batch.seq_lens[rows].astype(np.int64)
        blocks = -(-lengths // size)
        full, device = int(blocks.max()) - 1, batch.table.device
        self._slots = np.array([its.slot for its in reached])
        first, room, recent = (np.array([its.room[i] for its in reached]) for i in range(3))
        chosen = np.array([its.chosen for its in reached])
        where = to_device(rows, device)
        table = batch.written[where].cpu().numpy().astype(np.int64)
        numbers = np.stack([its.numbers[:full] for its in reached])
        places = np.arange(full)
        #: Of each row and logical block: its block in the pool, its host block, and where its bounds are.
        self._table, self._numbers = table, numbers
        bounds = np.where(numbers >= 0, reach._pool + numbers, table[:, :full])
        bounds[places >= (blocks - 1)[:, None]] = 0
        self._bounds = to_device(bounds, device)
        self._there = to_device(places < (blocks - 1)[:, None], device)
        self._candidates = to_device((places >= first[:, None]) & (places < (blocks - recent)[:, None]), device)
        offsets = np.arange(int(room.max()))
        rooms = np.take_along_axis(table, first[:, None] + offsets, 1)
        self._rooms = np.where(offsets < room[:, None], rooms, -1)
        # What the table has of each row: sinks, what the layer chooses, recent blocks.
        self._chosen = int(chosen.max())
        self._is_chosen = np.arange(self._chosen) < chosen[:, None]
        width = int((first + chosen + recent).max())
        read = np.zeros((len(rows), width), np.int64)
        for row in range(len(rows)):
            read[row, : first[row]] = table[row, : first[row]]
            end = first[row] + chosen[row]
            read[row, end : end + recent[row]] = table[row, blocks[row] - recent[row] : blocks[row]]
        count = len(batch.resident_tokens)
        self._read = torch.zeros((count, max(width, batch.table.shape[1])), dtype=torch.int32, device=device)
        self._read[:, : batch.table.shape[1]] = batch.table[:count]
        self._read[where, :width] = to_device(read.astype(np.int32), device)
        row, at = np.nonzero(self._is_chosen)
        self._at = to_device(rows[row], device), to_device(first[row] + at, device)
        self._queries = to_device(batch.starts[rows].astype(np.int64), device)
        lens = (first + chosen + recent - 1) * size + (lengths - 1) % size + 1
        self._lens = batch.lens[:count].index_copy(0, where, to_device(lens.astype(np.int32), device))

    def table(self, call: LayerCall) -> tuple[Any, torch.Tensor]:
        """Compute the bounds of blocks that filled, choose and fetch for the layer; return what it reads."""
        if self._filled is not None:
            self._reach.fill(call, self._filled)
        if not len(self.rows):
            return super().table(call)
        logical = self._choose(call)
        row = np.arange(len(logical))[:, None]
        numbers = np.where(self._is_chosen, self._numbers[row, logical], -1)
        pages = self._reach.fetch(call.place, self._slots, logical, numbers, self._rooms)
        pages = np.where(numbers >= 0, pages, self._table[row, logical])
        self._read[self._at] = to_device(pages[self._is_chosen].astype(np.int32), self._read.device)
        if self._metadata[0] is not call.metadata:
            read = copy(call.metadata)
            read.block_table = self._read
            self._metadata = call.metadata, read
        return self._metadata[1], self._lens

    def _choose(self, call: LayerCall) -> np.ndarray:
        """Return the best logical blocks of each row in a layer: int64 [R, k]."""
        bounds = self._reach.bounds(call.place)[self._bounds].float()  # [R, W, Hkv, 2 * D]
        query = call.query[self._queries].float().unflatten(1, (bounds.shape[2], -1)) * call.layer.impl.scale
        query = torch.cat((query.clamp(min=0), query.clamp(max=0)), -1)  # [R, Hkv, G, 2 * D]
        logits = logits_of(call.layer)
        products = query @ bounds.permute(0, 2, 3, 1)  # [R, Hkv, G, W]
        products = soft_capped(products, logits["soft_cap"])
        products = products.masked_fill(~self._there[:, None, None], -torch.inf)
        sinks = logits["sinks"]
        own = None if sinks is None else sinks.view(*query.shape[1:3], 1)
        scores = probabilities(products, own).sum((1, 2)).masked_fill(~self._candidates, -torch.inf)
        return scores.topk(self._chosen, sorted=True).indices.cpu().numpy()
