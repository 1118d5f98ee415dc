"""Blocks that one layer of decodes reads, wherever they live: scored, fetched from the host, named in a table.

They are scored by signs of their keys (`signs`) or by Quest's boxes (`bounds`). One choice serves all heads of a layer.
"""

from typing import NamedTuple

import torch

from .bounds import bound_scores
from .mass import _C_cpu
from .signs import sign_scores


class ReachRows(NamedTuple):
    """Rows of a step that read blocks of the host, the same for all layers.

    All but `written` and `pool` are int32 [R], contiguous.

    Attributes:
        queries: token of each row's query.
        full: full blocks, which are scored; one block follows them, which the step writes.
        first, end: the blocks between are candidates; the others are always read.
        chosen: candidates that a row reads; no more than its room has.
        rooms: blocks of its room, the first ones from `first` on.
        slots: row of each request in `numbers`, `held`, `read` and `picked`.
        out_rows: row of each request in `written` and in the table.
        chooses: whether it chooses; 0: it reads what it has chosen last, and has started no block since.
        written: int32 [R', W], of each logical block its block of the pool.
        pool: place in the index of the first host block.
    """

    queries: torch.Tensor
    full: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor
    chosen: torch.Tensor
    rooms: torch.Tensor
    slots: torch.Tensor
    out_rows: torch.Tensor
    chooses: torch.Tensor
    written: torch.Tensor
    pool: int


def reach(
    rows: ReachRows,
    query: torch.Tensor,
    index: torch.Tensor,
    numbers: torch.Tensor,
    held: torch.Tensor,
    read: torch.Tensor,
    picked: torch.Tensor,
    cache: torch.Tensor,
    host: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    step: int = 0,
    isa: str | None = None,
) -> tuple[int, int]:
    """Choose the blocks that each row reads in one layer, bring those of the host into its room, and name them.

    A block that is in the room already stays where it is. Others take the places that were read longest ago.

    Args:
        rows: see `ReachRows`.
        query: [T, H, D].
        index: [n, Hkv, X] of `signs.key_signs`, or of `bounds.key_bounds` as boxes: of blocks of the pool, and from
            `rows.pool` on of the host.
        numbers: int32 [slots, W], the host block of each logical block; -1: it is in the pool alone.
        held, read: int32 [slots, n], the logical block in each block of the layer's rooms, and the step that read it
            last; both are updated.
        picked: int32 [slots, n], the chosen blocks of the pool, the best one first; updated.
        cache, host: [blocks, ...], pages of the layer in the pool and on the host.
        table: int32 [R', W'], block table of the layer; its rows get what is read.
        scale, soft_cap, sinks: of the layer's attention (see `logits`); sinks are float32 [H].
        step: number of the step, above those before.
        isa: see `mass.block_mass`.

    Returns:
        Blocks of the host that rows chose, and how many of them were in the room.

    Raises:
        ValueError: a shape is wrong, or an index out of range.
        TypeError: a dtype is wrong.
    """
    args = rows, query, index, numbers, held, read, picked, cache, host, table, scale, soft_cap, sinks, step
    return reach_reference(*args) if _C_cpu is None else _C_cpu.reach(*args, isa)


def reach_reference(
    rows: ReachRows,
    query: torch.Tensor,
    index: torch.Tensor,
    numbers: torch.Tensor,
    held: torch.Tensor,
    read: torch.Tensor,
    picked: torch.Tensor,
    cache: torch.Tensor,
    host: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    step: int = 0,
) -> tuple[int, int]:
    """`reach` in plain torch, row by row."""
    from_host = in_room = 0
    for row in range(len(rows.queries)):
        token, full, first, end, chosen, room, slot, out_row, chooses = (int(each[row]) for each in rows[:9])
        written, on_host = rows.written[out_row], numbers[slot]
        if chooses:
            own = index[torch.where(on_host[:full] >= 0, rows.pool + on_host[:full], written[:full]).long()]
            score = sign_scores if index.dtype == torch.int16 else bound_scores
            scores = score(query[token : token + 1], own, scale, soft_cap, sinks)[first:end]
            blocks = (scores.sort(descending=True, stable=True).indices[:chosen] + first).tolist()
            wanted = [block for block in blocks if on_host[block] >= 0]
            places = {int(block): place for place, block in enumerate(held[slot, :room]) if block in wanted}
            from_host, in_room = from_host + len(wanted), in_room + len(places)
            free = [place for place in range(room) if place not in places.values()]
            free.sort(key=lambda place: int(read[slot, place]))
            for block in wanted:
                if block not in places:
                    places[block] = place = free.pop(0)
                    cache[written[first + place]] = host[on_host[block]]
                    held[slot, place] = block
                read[slot, places[block]] = step
            at = [first + places[block] if block in places else block for block in blocks]
            picked[slot, :chosen] = written[at]
        reads = torch.cat((written[:first], picked[slot, :chosen], written[end : full + 1]))
        table[out_row, : len(reads)] = reads
    return from_host, in_room
