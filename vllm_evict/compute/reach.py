"""Layers reach blocks of the host: prompts read all of them, and each layer of a decode those that its query wants.

A request over its budget has sinks, a room and recent blocks on the device, and all blocks after its sinks on the host.
The room is a run of its blocks whose content differs from layer to layer: what the layer has read last. An index stands
for each full block, wherever it lives: signs of its keys (`kernels.signs`), or a box of them (Quest: Tang et al., ICML
2024, arXiv:2406.10774). Before a layer decodes, it scores all full blocks of a row with its own query, brings the best
ones into the room, and attends to sinks, best blocks and recent blocks. A chunk of a prompt attends to all blocks:
those that the device lacks are copied to staging pages, which lie behind the pool's.

Each tensor-parallel rank chooses for its own heads: nothing is lost, so ranks need not agree.
"""

from collections.abc import Iterable, Sequence, Set
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ..config import KVPolicyConfig
from ..core.mechanisms.staging import staging_blocks
from ..core.offload import Copy, runs
from ..core.plan import RoomOf
from .holes import Start
from .kernels.bounds import key_bounds
from .kernels.logits import logits_of
from .kernels.reach import OF_ROWS, SCRATCH, ReachRows, copy_blocks, reach
from .kernels.signs import key_signs, store_signs
from .needs import Needs
from .offload import Offload
from .parts import Room
from .probes import LayerCall
from .shape import Shape
from .source import Source, StepSource
from .step_batch import StepBatch
from .store import Store
from .transfer import stashed, to_device

#: Numbers of int32 in 16 bytes: kernels for a device are compiled again for memory that is aligned to less.
ALIGNED = 4
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
        dense: places of layers that read all resident blocks.
        counts: int32 [slots, 3], what layers of decodes have read on the host since `read_on_host` was last called (see
            `core.plan.COUNTED`).
    """

    reads_all = False
    host: Offload

    def __init__(self, config: KVPolicyConfig, shape: Shape, store: Store) -> None:
        self._config, self._store, self._device, self.block_size = config, store, shape.device, shape.block_size
        self.outgrowing: set[str] = set()
        self._leads, self.dense = config.reading(shape.of_places)
        self._of_keys = key_signs if config.index == "signs" else key_bounds
        #: Of each layer [blocks of the pool, then of the host; Hkv; X], what stands for them.
        self._index: list[torch.Tensor] = []
        self._of: dict[str, _Reached] = {}
        self._slots = list(range(shape.max_requests))
        rooms = shape.layers, shape.max_requests, aligned(self._room(shape))
        #: int32 [layers, slots, room], the logical block in each block of a room, the step that read it last, and the
        #: chosen blocks of the pool.
        self._held, self._read, self._picked = (
            torch.full(rooms, -1, dtype=torch.int32, device=self._device) for _ in range(3)
        )
        #: float32 [slots, blocks], what the last layer that scored blocks made of them.
        self._scores = torch.zeros((shape.max_requests, shape.max_blocks), device=self._device)
        #: int32 [slots, blocks], the host block of each logical block, -1: it is in the pool alone; and the same on the
        #: device.
        self._on_host = np.full((shape.max_requests, shape.max_blocks), -1, np.int32)
        self._numbers = to_device(self._on_host, self._device)
        #: Of each slot [slots, 4]: the first block of its room, its blocks, recent blocks, and blocks that it chooses.
        self._sizes = np.zeros((shape.max_requests, 4), np.int32)
        #: Of each slot: full blocks when it chose last, steps that have read the choice (0: it has to choose), and the
        #: step that chose.
        self._full, self._steps_of, self._chose = np.zeros((3, shape.max_requests), np.int32)
        self._steps = 0
        #: Requests that start with the step, if a connector may have loaded blocks of them.
        self._started: Set[str] = frozenset()
        #: Rows of the step that read blocks of the host, if `decodes` is False.
        self._made: ReachRows | None = None
        #: Blocks of the pool, after which come staging pages in the cache, and blocks of the host in the index.
        self._pool = 0
        #: On a device int64 [blocks of the pool], of which the first `_late_count` wait for their index, in any order.
        self._late, self._late_count = torch.empty(0, dtype=torch.int64), 0
        self.counts = torch.zeros((shape.max_requests, 3), dtype=torch.int32, device=self._device)
        #: Requests that have chosen in the step.
        self._choosing: list[str] = []

    def _room(self, shape: Shape) -> int:
        """Return the blocks of the largest room; set what staging takes."""
        self.staging = staging_blocks(shape.max_model_len, shape.block_size)
        limits = self._config.limits(shape.block_size, shape.max_model_len)
        assert limits is not None  # it would be stock's
        return limits.room

    @property
    def kept_bytes(self) -> int:
        """Bytes of the index on their device."""
        return self._late.nbytes + sum(index.nbytes for index in self._index)

    @property
    def requests(self) -> Iterable[str]:
        """Requests with blocks on the host."""
        return self._of.keys()

    def needs(self, shape: Shape) -> Needs:
        """Return the scratch of a layer's choice, and what the index of blocks that fill is made of."""
        return Needs(step=2 * SCRATCH + 4 * shape.queries)

    def allocate(self, room: Room) -> None:
        """Allocate the index of all blocks of the pool, and after them for those of the host."""
        self._pool = room.blocks
        none = torch.zeros(0, dtype=torch.int64, device=self._device)
        empty = [self._of_keys(keys) for keys, _ in self._store.read(none, False)]
        blocks = room.blocks + room.host_blocks
        self._index = [each.new_zeros((blocks, *each.shape[1:])) for each in empty]
        if room.ahead and not self.writes:
            self._late = torch.empty(room.blocks, dtype=torch.int64, device=self._device)

    def begin(self, start: Start) -> None:
        """Forget requests that ended or start over. The next turn of a session goes on with what it has."""
        self._started = start.started if self.loads else frozenset()
        self.outgrowing -= start.gone
        self.outgrowing.update(each for each, n in start.prompts.items() if self._config.outgrows(self.block_size, n))
        for req_id in start.gone | start.resumed if self._of else ():
            if (its := self._of.pop(req_id, None)) is not None:
                self._slots.append(its.slot)
        for req_id, there in start.plan.reached.items():
            if (its := self._of.get(req_id)) is None:
                its = self._of[req_id] = self._new(start.plan.rooms[req_id])
            self._on_host[its.slot, list(there)] = list(there.values())
            self._numbers[its.slot] = to_device(self._on_host[its.slot], self._device)
            self._steps_of[its.slot] = 0

    def fits_graph(self, requests: Set[str]) -> bool:
        """See `Source.fits_graph`. Layers of a request with blocks on the host choose outside of graphs."""
        return not self.writes and self._of.keys().isdisjoint(requests)

    def replays(self, batch: StepBatch) -> None:
        """Note what the step fills; its index is computed when a layer may ask for it."""
        if (filled := batch.filled(self.block_size, self._started)) is None:
            return
        count, self._late_count = self._late_count, self._late_count + len(filled)
        if self._late_count <= len(self._late):
            self._late[count : self._late_count] = filled
        else:
            torch.arange(len(self._late), out=self._late)
            self._late_count = len(self._late)

    def before_copies(self) -> None:
        """Compute the index of blocks that wait for it, layer by layer, as many at once as `SCRATCH` has room for."""
        if not self._late_count:
            return
        late, self._late_count = self._late[: self._late_count], 0
        at_once = max(SCRATCH // (4 * max(page[0].numel() for page in self._store.pages())), 1)
        for some in late.split(at_once):
            for index, (keys, _) in zip(self._index, self._store.read(some, False)):
                self._store_index(index, some, keys)

    def copied(self, copies: Sequence[Copy]) -> None:
        """Copy what stands for blocks that go to the host, or come from there, as the blocks are copied."""
        for kind, some in runs(copies):
            here = self._places([self._pool + copy.number for copy in some])
            there = self._places([copy.physical for copy in some])
            for index in self._index:
                if kind == "poison":
                    index[here] = float("nan") if index.is_floating_point() else NAN
                elif kind == "fetch":
                    index[there] = index[here]
                else:
                    index[here] = index[there]

    def _places(self, numbers: Sequence[int]) -> torch.Tensor:
        return to_device(np.array(numbers, np.int64), self._device)

    def _new(self, room: RoomOf) -> _Reached:
        if (more := aligned(room.blocks) - self._held.shape[2]) > 0:
            self._held, self._read, self._picked = (
                functional.pad(each, (0, more), value=-1) for each in (self._held, self._read, self._picked)
            )
        slot = self._slots.pop()
        self._held[:, slot] = self._read[:, slot] = -1
        self._on_host[slot] = -1
        chosen = self._config.chosen(room.blocks, room.first, room.recent, self.block_size)
        self._sizes[slot] = room.first, room.blocks, room.recent, chosen
        return _Reached(slot, room)

    def complete(self, batch: StepBatch, table: torch.Tensor, lens: torch.Tensor) -> None:
        """Bring all blocks of the step's prompts to the device, and name them in the table.

        Lengths of decodes become those that they read, if the backend's kernel attends for them.
        """
        pages: list[torch.Tensor] = []
        numbers: list[np.ndarray] = []
        rows, prompts = self._rows(batch)
        read = rows[:0] if self.decodes else rows
        if not len(prompts) and not len(read):
            return
        tokens, free = batch.resident_tokens.copy(), self._pool
        if len(read):
            self._made, unread = self.rows(batch, read, table)
            tokens[read] -= unread
            lens.index_add_(0, *(to_device(each, self._device) for each in (read, -unread)))
        for row in prompts.tolist():
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
        if pages:
            to, of = torch.cat(pages), to_device(np.concatenate(numbers), self._device)
            for place, page in enumerate(self._store.pages(drafting=False)):
                copy_blocks(page, self.host.blocks.pages_of(place), to, of)

    def hidden(self, req_ids: Sequence[str]) -> list[tuple[int, range]]:
        """See `Source.hidden`: rooms, in which a drafter's layers have nothing."""
        rooms = ((row, self._of[req_id].room) for row, req_id in enumerate(req_ids) if req_id in self._of)
        return [(row, range(room.first, room.first + room.blocks)) for row, room in rooms]

    def _rows(self, batch: StepBatch) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows with blocks on the host that choose what they read, int64 [R], and those that read all."""
        its = np.fromiter((req_id in self._of for req_id in batch.req_ids), bool, len(batch.req_ids))
        return np.flatnonzero(its & batch.decodes), np.flatnonzero(its & ~batch.decodes)

    def step(self, batch: StepBatch) -> StepSource:
        if len(self._late) and not self._of:  # nothing is paid before a request has blocks on the host
            self.replays(batch)
            return super().step(batch)
        self.before_copies()
        (rows, _), filled = self._rows(batch), batch.filled(self.block_size, self._started)
        if filled is None and not len(rows):
            return super().step(batch)
        if not self.decodes:
            queried = int(batch.starts[rows + 1].max()) if len(rows) else 0
            return ReachInPlace(self, self._made if len(rows) else None, filled, batch, queried)
        return ReachStep(self, rows, filled, batch)

    def fill(self, call: LayerCall, filled: torch.Tensor) -> None:
        """Compute the index of blocks that the step has filled, in one layer."""
        keys, _ = call.ops.read(call.layer, call.kv_cache, filled, False)
        self._store_index(self._index[call.place], filled, keys)

    def _store_index(self, index: torch.Tensor, blocks: torch.Tensor, keys: torch.Tensor) -> None:
        if self._config.index == "signs":
            store_signs(index, blocks, keys)
        else:
            index[blocks] = key_bounds(keys)

    def read(self, call: LayerCall, rows: ReachRows, table: torch.Tensor) -> None:
        """Choose what rows read in one layer, bring it to the device, and write it into the table."""
        leads = call.place in self._leads
        self._reach(call, rows, table, leads, self._sinks(call, rows) if leads else None)

    def _reach(
        self, call: LayerCall, rows: ReachRows, table: torch.Tensor, leads: bool, sinks: torch.Tensor | None
    ) -> None:
        """Launch `kernels.reach.reach` for one layer."""
        place, layer = call.place, call.layer
        reach(
            rows,
            call.query,
            self._index[place],
            self._numbers,
            self._held[place],
            self._read[place],
            self._picked[place],
            self._scores,
            self.counts,
            call.kv_cache,
            self._host_pages(call),
            table,
            layer.impl.scale,
            logits_of(layer)["soft_cap"],
            sinks,
            step=self._steps,
            fetch=self._config.fetch,
            leads=leads,
        )

    def _sinks(self, call: LayerCall, rows: ReachRows) -> torch.Tensor | None:
        """Return the logits of what queries attend to beside the blocks that are scored, as `reach` has them."""
        return _learned_sinks(call)

    def warm_up(self, call: LayerCall, table: torch.Tensor) -> None:
        """Launch the kernels of one layer, for a row of padding. See `_variants`."""
        padding = torch.full((OF_ROWS, ALIGNED), -1, dtype=torch.int32, device=self._device)[:, :1].unbind()
        call = replace(call, kv_cache=self._store.pages()[call.place])
        for most, sinks in self._variants(call):
            for leads in {True, self._config.leaders == 1}:
                self._reach(call, ReachRows._make((*padding, table, self._pool, most, 0, 1)), table, leads, sinks)
        copy_blocks(self._host_pages(call), call.kv_cache, padding[0], padding[0])
        null = torch.zeros(2, dtype=torch.int64, device=self._device)  # layers never read the index of this block
        self.fill(call, null)

    def _variants(self, call: LayerCall) -> list[tuple[int, torch.Tensor | None]]:
        """Return the queries of a row for which kernels are compiled apart, and the sinks that they have."""
        return [(1, _learned_sinks(call))]

    def read_on_host(self) -> dict[str, np.ndarray]:
        """See `Source.read_on_host`."""
        told, self._choosing = self._choosing, []
        if not told:
            return {}
        counts = stashed(self.counts).numpy()
        self.counts.zero_()
        return {req_id: counts[self._of[req_id].slot] for req_id in told}

    def _host_pages(self, call: LayerCall) -> torch.Tensor:
        """Return the host blocks of a layer: [blocks, ...]."""
        return self.host.blocks.pages_of(call.place)

    def reads(self, place: int) -> bool:
        """Return whether a layer chooses blocks, or scores them for others."""
        return place in self._leads or place not in self.dense

    def last_read(self, req_id: str, place: int) -> list[int]:
        """Return the blocks of the host that a request's last decode has read in one layer, ascending."""
        held, read = (each[place, self._of[req_id].slot] for each in (self._held, self._read))
        return sorted(held[read == int(self._chose[self._of[req_id].slot])].tolist())

    def _blocks(self, batch: StepBatch, table: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
        """Return the tokens that rows choose among, int32 [R], and the blocks of the pool that have them: [R, W]."""
        return batch.seq_lens, batch.written

    def rows(self, batch: StepBatch, rows: np.ndarray, table: torch.Tensor) -> tuple[ReachRows, np.ndarray]:
        """Return what the kernel knows of rows that read a part of their blocks, and resident tokens they leave out.

        A row chooses every `hold` steps, when it starts a block, and when blocks of it have moved. It scores the blocks
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
        padded = np.zeros((len(known), aligned(len(rows))), np.int32)
        padded[:, : len(rows)] = known
        made = to_device(padded, self._device)[:, : len(rows)].unbind()
        most = int(known[1].max()) if known[-1].any() else 0
        return ReachRows._make((*made, written, self._pool, most, 0, 1)), unread.astype(np.int32)

    def _choices(self, batch: StepBatch, rows: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first fields of `ReachRows` of rows that decode, [fields, R], and tokens that they leave out.

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
        chooses = (steps % self._config.hold == 0) | (full != self._full[slots])
        self._full[slots], self._steps_of[slots] = full, np.where(chooses, 1, steps + 1)
        self._chose[slots[chooses]] = self._steps
        self._choosing = [batch.req_ids[row] for row in rows[chooses].tolist()]
        end = full + 1 - recent
        unread = batch.resident_tokens[rows] - lengths + (end - first - chosen) * size
        known = batch.starts[rows], counts, full, blocks, first, end, chosen, room, slots, rows, chooses
        return np.array(known), unread


class ReachInPlace(StepSource):
    """What layers of one step read. One table serves all layers in turn: each writes its choice into it.

    The table is that of the backend's metadata, so a layer writes it before the backend's kernel attends.

    Args:
        reach: of the KV group.
        rows: that read blocks of the host; None: no row does.
        filled: physical blocks that the step fills; None: it fills none.
        batch: of the step.
        queried: see `StepSource`.
    """

    is_plain = False
    in_place = True

    def __init__(
        self, reach: Reach, rows: ReachRows | None, filled: torch.Tensor | None, batch: StepBatch, queried: int = 0
    ) -> None:
        super().__init__(batch.lens)
        self.queried = queried
        self._reach, self._filled, self._rows, self._table = reach, filled, rows, batch.table
        #: Places whose layer has chosen. Layers that share its cache read its choice.
        self._chosen: set[int] = set()

    def table(self, call: LayerCall) -> tuple[Any, torch.Tensor]:
        """Compute the index of blocks that filled, choose and fetch for the layer, and write what it reads."""
        again = call.place in self._chosen
        self._chosen.add(call.place)
        if call.stored and not again:
            self.fill(call)
        if self._rows is not None and self._reach.reads(call.place):
            rows = self._rows._replace(chooses=torch.zeros_like(self._rows.chooses), most=0) if again else self._rows
            self._reach.read(call, rows, self._table)
            call.rewritten()
        return super().table(call)

    def fill(self, call: LayerCall) -> None:
        if self._filled is not None:
            self._reach.fill(call, self._filled)


class ReachStep(ReachInPlace):
    """The same where the plugin's kernel attends for rows that read blocks of the host, by a table of its own.

    Args:
        reach, filled, batch: as of `ReachInPlace`.
        rows: int64 [R], rows that read blocks of the host.
    """

    in_place = False

    def __init__(self, reach: Reach, rows: np.ndarray, filled: torch.Tensor | None, batch: StepBatch) -> None:
        super().__init__(reach, None, filled, batch)
        self.rows = rows
        self._metadata: tuple[Any, Any] = (None, None)
        if not len(rows):
            return
        self._rows, unread = reach.rows(batch, rows, batch.table)
        # Rows beside them that the plugin's kernel attends for have no more blocks than the resident ones.
        count, table = len(batch.resident_tokens), batch.table
        width = -(-int((batch.resident_tokens[rows] - unread).max()) // reach.block_size)
        self._table = torch.zeros((count, max(width, table.shape[1])), dtype=torch.int32)
        self._table[:, : table.shape[1]] = table[:count]
        self._lens = batch.lens[:count].index_add(0, torch.from_numpy(rows), torch.from_numpy(-unread))

    def table(self, call: LayerCall) -> tuple[Any, torch.Tensor]:
        """As of `ReachInPlace`; returns what the plugin's kernel reads."""
        plain = super().table(call)
        if self._rows is None or call.place in self._reach.dense:
            return plain
        if self._metadata[0] is not call.metadata:
            read = copy(call.metadata)
            read.block_table = self._table
            self._metadata = call.metadata, read
        return self._metadata[1], self._lens


def _learned_sinks(call: LayerCall) -> torch.Tensor | None:
    """Return the sinks of a layer, float32 [H]."""
    sinks: torch.Tensor | None = logits_of(call.layer)["sinks"]
    return None if sinks is None else sinks.float()


def aligned(count: int) -> int:
    """Return a number of int32, or a larger one, that fills whole 16 bytes."""
    return -(-count // ALIGNED) * ALIGNED
