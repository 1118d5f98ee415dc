"""Blocks that one layer of decodes reads, wherever they live: scored by boxes, fetched from the host, named in a table.

Boxes are Quest's (`bounds`); one choice serves all heads of a layer.
"""

from typing import NamedTuple

import torch

from .bounds import bound_scores
from .mass import _C_cpu


class ReachRows(NamedTuple):
    """Rows of a step that choose, the same for all layers; int32, contiguous.

    Attributes:
        queries: [R], token of each row's query.
        full: [R], full blocks, which are scored.
        first, end: [R], the blocks between are candidates.
        chosen: [R], candidates that a row reads; no more than its room has.
        slots: [R], row of each request in `held` and `read`.
        out_rows: [R], row of each request in the table.
        places: [R, W], of each logical block the place of its box.
        numbers: [R, W], its block of the host; -1: it is in the pool alone.
        physical: [R, W], its block of the pool, if it is in the pool alone.
        rooms: [R, n], blocks of the pool that are each row's room; -1 past its end.
    """

    queries: torch.Tensor
    full: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor
    chosen: torch.Tensor
    slots: torch.Tensor
    out_rows: torch.Tensor
    places: torch.Tensor
    numbers: torch.Tensor
    physical: torch.Tensor
    rooms: torch.Tensor


def reach(
    rows: ReachRows,
    query: torch.Tensor,
    boxes: torch.Tensor,
    held: torch.Tensor,
    read: torch.Tensor,
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
        boxes: [n, Hkv, 2 * D] of `bounds.key_bounds`.
        held, read: int32 [slots, n], the logical block in each block of the layer's rooms, and the step that read it
            last; both are updated.
        cache, host: [blocks, ...], pages of the layer in the pool and on the host.
        table: int32 [R', W'], block table of the layer; entries from `first` on get what the row reads.
        scale, soft_cap, sinks: of the layer's attention (see `logits`); sinks are float32 [H].
        step: number of the step, above those before.
        isa: see `mass.block_mass`.

    Returns:
        Blocks of the host that rows read, and how many of them were in the room.

    Raises:
        ValueError: a shape is wrong, or an index out of range.
        TypeError: a dtype is wrong.
    """
    args = rows, query, boxes, held, read, cache, host, table, scale, soft_cap, sinks, step
    return reach_reference(*args) if _C_cpu is None else _C_cpu.reach(*args, isa)


def reach_reference(
    rows: ReachRows,
    query: torch.Tensor,
    boxes: torch.Tensor,
    held: torch.Tensor,
    read: torch.Tensor,
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
        token, full, first, end, chosen, slot, out_row = (int(each[row]) for each in rows[:7])
        own = boxes[rows.places[row, :full].long()]
        scores = bound_scores(query[token : token + 1], own, scale, soft_cap, sinks)[first:end]
        blocks = scores.sort(descending=True, stable=True).indices[:chosen] + first
        room, wanted = rows.rooms[row], [int(block) for block in blocks if rows.numbers[row, block] >= 0]
        places = {int(block): place for place, block in enumerate(held[slot]) if block in wanted}
        from_host, in_room = from_host + len(wanted), in_room + len(places)
        free = [place for place in range(len(room)) if room[place] >= 0 and place not in places.values()]
        free.sort(key=lambda place: int(read[slot, place]))
        for block in wanted:
            if block not in places:
                places[block] = place = free.pop(0)
                cache[room[place]] = host[rows.numbers[row, block]]
                held[slot, place] = block
            read[slot, places[block]] = step
        pages = [int(room[places[int(b)]]) if int(b) in places else int(rows.physical[row, b]) for b in blocks]
        table[out_row, first : first + chosen] = torch.tensor(pages, dtype=torch.int32)
    return from_host, in_room
