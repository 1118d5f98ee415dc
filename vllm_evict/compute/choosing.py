"""Layers read a part of the blocks of a request: those that their query wants.

An index stands for each full block (`index.py`). Before a layer attends, it scores all full blocks of a row with its
own query, and attends to sinks, the best blocks and recent blocks.

Each tensor-parallel rank chooses for its own heads: nothing is lost, so ranks need not agree.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ..config import KVPolicyConfig
from ..core.host_pool import RoomOf
from .index import BlockIndex
from .kernels.logits import learned_sinks, logits_of
from .kernels.moved import moved
from .kernels.reach import OF_ROWS, SCRATCH, ReachRows, ReachState, copy_blocks, reach
from .needs import MIB, Needs
from .parts import Capacity
from .probes import LayerCall
from .shape import Shape
from .source import Source, StepSource
from .step_batch import StepBatch
from .store import Store
from .transfer import to_device

#: Numbers of int32 in 16 bytes: kernels for a device are compiled again for memory that is aligned to less.
ALIGNED = 4


@dataclass(slots=True)
class Chooser:
    """Facts of a request that chooses.

    Attributes:
        slot: its row in arrays of slots.
        room: its room.
    """

    slot: int
    room: RoomOf


class Choosing(Source, ABC):
    """The source of one KV group whose layers choose what they read of some requests.

    Args:
        config: policy of the group's heads.
        shape: sizes of the group.
        store: KV cache of the group.
        index: of its blocks.
        room: blocks of the largest room.

    Attributes:
        dense: places of layers that read all resident blocks.
        counts: int32 [slots, 3], what layers of decodes have read on the host (see `core.host_pool.COUNTED`).
    """

    reads_all = False

    def __init__(self, config: KVPolicyConfig, shape: Shape, store: Store, index: BlockIndex, room: int) -> None:
        self._config, self._store, self._device, self.block_size = config, store, shape.device, shape.block_size
        self.index, (self._leads, self.dense) = index, config.reading(shape.of_places)
        self._of: dict[str, Chooser] = {}
        self._slots = list(range(shape.max_requests))
        rooms = shape.layers, shape.max_requests, aligned(room)
        #: int32 [layers, slots, room], the logical block in each block of a room, the step that read it last, and the
        #: chosen blocks of the pool.
        self._held, self._read, self._picked = (
            torch.full(rooms, -1, dtype=torch.int32, device=self._device) for _ in range(3)
        )
        #: float32 [slots, blocks], what the last layer that scored blocks made of them.
        self._scores = torch.zeros((shape.max_requests, shape.max_blocks), device=self._device)
        #: int32 [slots, blocks], the host block of each logical block, -1: it is in the pool alone.
        self._numbers = torch.full_like(self._scores, -1, dtype=torch.int32)
        #: Of each slot [slots, 4]: the first block of its room, its blocks, recent blocks, and blocks that it chooses.
        self._sizes = np.zeros((shape.max_requests, 4), np.int32)
        #: Of each slot: full blocks when it chose last, steps that have read the choice (0: it has to choose), and the
        #: step that chose.
        self._full, self._steps_of, self._chose = np.zeros((3, shape.max_requests), np.int32)
        #: bfloat16 [layers, slots, numbers], the queries by which requests chose last in each layer, if a choice stands
        #: until queries move (see `kernels.moved`); and rows as they chose in the last layer that leads.
        self._asked: torch.Tensor | None = None
        if config.holds_until:
            numbers = shape.queries // (shape.step_tokens * shape.itemsize)
            sizes = shape.layers, shape.max_requests, numbers
            self._asked = torch.zeros(sizes, dtype=torch.bfloat16, device=self._device)
        self._moved: ReachRows | None = None
        #: Place of a layer, and the layer -> what it chooses among.
        self._states: dict[tuple[int, int], ReachState] = {}
        self._steps = 0
        #: Requests that start with the step, if a connector may have loaded blocks of them.
        self._started: Set[str] = frozenset()
        #: Rows of the step that choose, if `decodes` is False.
        self._made: ReachRows | None = None
        #: Blocks of the pool.
        self._pool = 0
        self.counts = torch.zeros((shape.max_requests, 3), dtype=torch.int32, device=self._device)
        #: Requests that have chosen in the step.
        self._choosers: list[str] = []

    @abstractmethod
    def _choosing_rows(self, batch: StepBatch) -> np.ndarray:
        """Return the rows that choose what they read: int64 [R]."""

    @abstractmethod
    def _blocks(self, batch: StepBatch, table: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
        """Return the tokens that rows choose among, int32 [R], and the blocks of the pool that have them: [R, W]."""

    @abstractmethod
    def _host_pages(self, call: LayerCall) -> torch.Tensor:
        """Return the host blocks of a layer: [blocks, ...]."""

    @classmethod
    def described(cls, sources: Sequence[Any]) -> str:
        return f"; the index of keys and choices take {-(-sum(source.kept_bytes for source in sources) // MIB)} MiB"

    @property
    def kept_bytes(self) -> int:
        """Bytes of the index, of rooms and of what requests have chosen."""
        own = self._held, self._read, self._picked, self._scores, self._numbers, self.counts, self._asked
        return self.index.kept_bytes + sum(each.nbytes for each in own if each is not None)

    @property
    def requests(self) -> Iterable[str]:
        """Requests that choose."""
        return self._of.keys()

    def bytes_beside(self, keys: int, dtype: torch.dtype) -> int:
        return self.index.bytes_beside(keys, dtype)

    def needs(self, shape: Shape) -> Needs:
        """Return the scratch of a layer's choice, and what the index of blocks that fill is made of."""
        return Needs(step=2 * SCRATCH + 4 * shape.queries)

    def allocate(self, capacity: Capacity) -> None:
        """Allocate the index of all blocks of the pool and of the host."""
        self._pool = capacity.blocks
        self._states.clear()
        self.index.allocate(capacity.blocks, capacity.host_blocks, late=capacity.ahead and not self.writes)

    def fits_graph(self, requests: Set[str]) -> bool:
        """Return whether no request chooses (`Source.fits_graph`): layers choose outside of graphs."""
        return not self.writes and self._of.keys().isdisjoint(requests)

    def _new(self, room: RoomOf) -> Chooser:
        if (more := aligned(room.blocks) - self._held.shape[2]) > 0:
            self._states.clear()
            self._held, self._read, self._picked = (
                functional.pad(each, (0, more), value=-1) for each in (self._held, self._read, self._picked)
            )
        slot = self._slots.pop()
        self._held[:, slot] = self._read[:, slot] = -1
        chosen = self._config.chosen(room.blocks, room.first, room.recent, self.block_size)
        self._sizes[slot] = room.first, room.blocks, room.recent, chosen
        return Chooser(slot, room)

    def _forget(self, req_id: str) -> None:
        self._slots.append(self._of.pop(req_id).slot)

    def rewrite(self, batch: StepBatch, table: torch.Tensor, lens: torch.Tensor) -> None:
        """Set the lengths of rows to what they choose, if the backend's kernel attends for them."""
        if self.decodes or not len(rows := self._choosing_rows(batch)):
            return
        self._made, unread = self.kernel_rows(batch, rows, table)
        batch.resident_tokens = batch.resident_tokens.copy()
        batch.resident_tokens[rows] -= unread
        batch.longest = int(batch.resident_tokens.max())
        lens.index_add_(0, *(to_device(each, self._device) for each in (rows, -unread)))

    def step(self, batch: StepBatch) -> StepSource:
        rows, filled = self._choosing_rows(batch), batch.filled(self.block_size, self._started)
        if filled is None and not len(rows):
            return super().step(batch)
        if not self.decodes:
            queried = int(batch.starts[rows + 1].max()) if len(rows) else 0
            return ChosenInPlace(self, self._made if len(rows) else None, filled, batch, queried)
        return ChosenApart(self, rows, filled, batch)

    def read(self, call: LayerCall, rows: ReachRows, table: torch.Tensor) -> None:
        """Choose what rows read in one layer, bring it to the device, and write it into the table."""
        leads = call.place in self._leads
        self._reach(call, rows, table, leads, self._sinks(call, rows) if leads else None)

    def _reach(
        self, call: LayerCall, rows: ReachRows, table: torch.Tensor, leads: bool, sinks: torch.Tensor | None
    ) -> None:
        """Launch `kernels.reach.reach` for one layer."""
        if self._asked is not None and rows.most:
            if leads:
                heads, dims = call.query.shape[1:]
                asked = self._asked[call.place, :, : heads * dims].unflatten(1, (heads, dims))
                self._moved = replace(rows, chooses=moved(rows, call.query, asked, self._config.holds_until))
            rows = self._moved or rows
        host = self._host_pages(call)
        reach(rows, self._state(call), call.query, call.kv_cache, host, table, sinks, self._steps, leads)

    def _state(self, call: LayerCall) -> ReachState:
        """Return what a layer chooses among."""
        place, key = call.place, (call.place, id(call.layer))
        if (state := self._states.get(key)) is None:
            state = self._states[key] = ReachState(
                self.index.of_layers[place],
                self._numbers,
                self._held[place],
                self._read[place],
                self._picked[place],
                self._scores,
                self.counts,
                call.layer.impl.scale,
                logits_of(call.layer)["soft_cap"],
                self._config.fetch,
            )
        return state

    def _sinks(self, call: LayerCall, rows: ReachRows) -> torch.Tensor | None:
        """Return the logits of what queries attend to beside the blocks that are scored, as `reach` has them."""
        return learned_sinks(call.layer)

    def warm_up(self, call: LayerCall, table: torch.Tensor) -> None:
        """Launch the kernels of one layer, for a row of padding. See `_variants`."""
        padding = np.full(1, -1)
        call = replace(call, kv_cache=self._store.pages()[call.place])
        for most, sinks in self._variants(call):
            rows = self._rows(dict.fromkeys(OF_ROWS, padding), table, most)
            for leads in {True, self._config.leaders == 1}:
                self._reach(call, rows, table, leads, sinks)
        self._moved = None
        copy_blocks(self._host_pages(call), call.kv_cache, rows.queries, rows.queries)
        null = torch.zeros(2, dtype=torch.int64, device=self._device)  # layers never read the index of this block
        self.index.fill(call, null)

    def _variants(self, call: LayerCall) -> list[tuple[int, torch.Tensor | None]]:
        """Return the queries of a row for which kernels are compiled apart, and the sinks that they have."""
        return [(1, learned_sinks(call.layer))]

    def reads(self, place: int) -> bool:
        """Return whether a layer chooses blocks, or scores them for others."""
        return place in self._leads or place not in self.dense

    def last_read(self, req_id: str, place: int) -> list[int]:
        """Return the blocks of the host that a request's last decode has read in one layer, ascending."""
        held, read = (each[place, self._of[req_id].slot] for each in (self._held, self._read))
        chose = int(self._chose[self._of[req_id].slot])
        return sorted(held[read == (chose if self._asked is None else max(int(read.max()), chose))].tolist())

    def kernel_rows(self, batch: StepBatch, rows: np.ndarray, table: torch.Tensor) -> tuple[ReachRows, np.ndarray]:
        """Return what the kernel knows of rows that read a part of their blocks, and resident tokens they leave out.

        A row chooses every `hold` steps, or in each layer when its query has moved; and when it starts a block, or when
        blocks of it have moved. It scores the blocks
        that verified tokens have filled, and reads all later ones. Where the host does not know how many drafts were
        accepted, it takes the least number of full blocks and the most tokens.

        Args:
            batch: of the step.
            rows: int64 [R].
            table: int32 [R', W], resident blocks.

        Returns:
            The rows, and int32 [R], a multiple of a block's tokens.
        """
        self._steps += 1
        tokens, written = self._blocks(batch, table)
        known, unread = self._choices(batch, rows, tokens)
        most = int(known["query_counts"].max()) if known["chooses"].any() or self._asked is not None else 0
        return self._rows(known, written, most), unread.astype(np.int32)

    def _rows(self, known: Mapping[str, np.ndarray], written: torch.Tensor, most: int) -> ReachRows:
        """Return rows of numbers on the host, which go to the device by one copy.

        Args:
            known: int [R] for each of `OF_ROWS`.
            written, most: see `ReachRows`.
        """
        count = len(known["slots"])
        padded = np.zeros((len(OF_ROWS), aligned(count)), np.int32)
        for line, name in zip(padded, OF_ROWS):
            line[:count] = known[name]
        made = to_device(padded, self._device)[:, :count].unbind()
        return ReachRows(**dict(zip(OF_ROWS, made)), written=written, pool=self._pool, most=most)

    def _choices(
        self, batch: StepBatch, rows: np.ndarray, tokens: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return `OF_ROWS` of rows that decode, int [R] each, and tokens that they leave out.

        Args:
            batch: of the step.
            rows: int64 [R].
            tokens: int32 [R'], that rows of the batch choose among.
        """
        slots = np.array([self._of[batch.req_ids[row]].slot for row in rows.tolist()], np.int64)
        first, room, recent, chosen = self._sizes[slots].T
        lengths, counts, size = tokens[rows], batch.queries[rows], self.block_size
        sure = lengths - counts if batch.slack is None else lengths - counts - batch.slack[rows]
        full, blocks, steps = sure // size, -(-lengths // size), self._steps_of[slots]
        chooses = (steps % self._config.holds == 0) | (full != self._full[slots])
        self._full[slots], self._steps_of[slots] = full, np.where(chooses, 1, steps + 1)
        self._chose[slots[chooses]] = self._steps
        may_choose = rows[chooses] if self._asked is None else rows
        self._choosers = [batch.req_ids[row] for row in may_choose.tolist()]
        end = full + 1 - recent
        unread = batch.resident_tokens[rows] - lengths + (end - first - chosen) * size
        known = {
            "queries": batch.starts[rows],
            "query_counts": counts,
            "full": full,
            "blocks": blocks,
            "first": first,
            "end": end,
            "chosen": chosen,
            "rooms": room,
            "slots": slots,
            "out_rows": rows,
            "chooses": chooses,
        }
        return known, unread


class ChosenInPlace(StepSource):
    """Tables and lengths that layers of one step read. One table serves all layers in turn: each writes its choice
    into it.

    The table is that of the backend's metadata, so a layer writes it before the backend's kernel attends.

    Args:
        choosing: of the KV group.
        rows: that choose; None: no row does.
        filled: physical blocks that the step fills; None: it fills none.
        batch: of the step.
        queried: see `StepSource`.
    """

    is_plain = False
    in_place = True

    def __init__(
        self,
        choosing: Choosing,
        rows: ReachRows | None,
        filled: torch.Tensor | None,
        batch: StepBatch,
        queried: int = 0,
    ) -> None:
        super().__init__(batch.lens)
        self.queried = queried
        self._choosing, self._filled, self._rows, self._table = choosing, filled, rows, batch.table
        #: Places whose layer has chosen. Layers that share its cache read its choice.
        self._chosen: set[int] = set()

    def table(self, call: LayerCall) -> tuple[Any, torch.Tensor]:
        """Compute the index of blocks that filled, choose and fetch for the layer, and write what it reads."""
        again = call.place in self._chosen
        self._chosen.add(call.place)
        if call.stored and not again:
            self.fill(call)
        if self._rows is not None and self._choosing.reads(call.place):
            rows = self._rows
            if again:
                rows = replace(rows, chooses=torch.zeros_like(rows.chooses), most=0)
            self._choosing.read(call, rows, self._table)
            call.rewritten()
        return super().table(call)

    def fill(self, call: LayerCall) -> None:
        if self._filled is not None:
            self._choosing.index.fill(call, self._filled)


class ChosenApart(ChosenInPlace):
    """The same where the plugin's kernel attends for rows that choose, by a table of its own.

    Args:
        choosing, filled, batch: as of `ChosenInPlace`.
        rows: int64 [R], rows that choose.
    """

    in_place = False

    def __init__(self, choosing: Choosing, rows: np.ndarray, filled: torch.Tensor | None, batch: StepBatch) -> None:
        super().__init__(choosing, None, filled, batch)
        self.rows = rows
        self._metadata: tuple[Any, Any] = (None, None)
        if not len(rows):
            return
        self._rows, unread = choosing.kernel_rows(batch, rows, batch.table)
        # Rows beside them that the plugin's kernel attends for have no more blocks than the resident ones.
        count, table = len(batch.resident_tokens), batch.table
        width = -(-int((batch.resident_tokens[rows] - unread).max()) // choosing.block_size)
        self._table = torch.zeros((count, max(width, table.shape[1])), dtype=torch.int32)
        self._table[:, : table.shape[1]] = table[:count]
        self._lens = batch.lens[:count].index_add(0, torch.from_numpy(rows), torch.from_numpy(-unread))

    def table(self, call: LayerCall) -> tuple[Any, torch.Tensor]:
        """Return the table and lengths that the plugin's kernel reads, as `ChosenInPlace` does."""
        plain = super().table(call)
        if self._rows is None or call.place in self._choosing.dense:
            return plain
        if self._metadata[0] is not call.metadata:
            read = copy(call.metadata)
            read.block_table = self._table
            self._metadata = call.metadata, read
        return self._metadata[1], self._lens


def aligned(count: int) -> int:
    """Return a number of int32, or a larger one, that fills whole 16 bytes."""
    return -(-count // ALIGNED) * ALIGNED
