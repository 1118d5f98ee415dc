"""Blocks that one layer of decodes reads, wherever they live: scored, fetched from the host, named in a table.

They are scored by two bits for each number of their keys (`bits`), by signs of their keys (`signs`) or by Quest's boxes
(`bounds`), which the dtype of an index tells apart. One choice serves all heads of a layer; a layer may choose by the
scores of a layer before it.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import takewhile
from types import SimpleNamespace
from typing import Final

import torch

from .bits import bit_scores
from .bounds import bound_scores
from .mass import _C_cpu
from .signs import TILE_DIMS, TILE_QUERIES, sign_scores, tile_scores

#: Bytes of a device's scratch for logarithms, or more if four rows need more: it bounds the rows of one launch.
SCRATCH = 64 << 20
#: What scores blocks by an index of a dtype; boxes have the dtype of keys.
SCORES: Final[dict[torch.dtype, Callable[..., torch.Tensor]]] = {torch.uint8: bit_scores, torch.int16: sign_scores}


@dataclass(frozen=True, slots=True)
class ReachRows:
    """Rows of a step that read blocks of the host, the same for all layers.

    The fields before `written` are int32 [R], contiguous.

    Attributes:
        queries: token of each row's first query.
        query_counts: queries of each row, which follow one another: the first one, and those of drafts.
        full: full blocks, which are scored; blocks that the step may write follow them.
        blocks: all blocks.
        first, end: the blocks between are candidates; the others are always read.
        chosen: candidates that a row reads; no more than its room has.
        rooms: blocks of its room, the first ones from `first` on.
        slots: row of each request in the tensors of `ReachState`.
        out_rows: row of each request in `written` and in the table.
        chooses: whether it chooses; 0: it reads what it has chosen last, and has started no block since.
        written: int32 [R', W], of each logical block its block of the pool.
        pool: place in the index of the first host block.
        most: the largest of `query_counts`, or more; 0: no row chooses.
        many: rows, the first ones, that have so many; None: all of them.
        few: the largest of the other rows, or more.
    """

    queries: torch.Tensor
    query_counts: torch.Tensor
    full: torch.Tensor
    blocks: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor
    chosen: torch.Tensor
    rooms: torch.Tensor
    slots: torch.Tensor
    out_rows: torch.Tensor
    chooses: torch.Tensor
    written: torch.Tensor
    pool: int
    most: int = 1
    many: int | None = None
    few: int = 1

    def part(self, begin: int, end: int) -> "ReachRows":
        """Return the rows from `begin` to `end`, of which there may be fewer."""
        count = len(self.queries)
        if begin == 0 and end >= count:
            return self
        some = {name: getattr(self, name)[begin:end] for name in OF_ROWS}
        many = None if self.many is None else min(max(self.many - begin, 0), len(some["queries"]))
        return replace(self, **some, many=many)


#: Fields of `ReachRows` that have a number of each row.
OF_ROWS: Final = tuple(takewhile(lambda name: name != "written", (each.name for each in fields(ReachRows))))


@dataclass(frozen=True, slots=True)
class ReachState:
    """The blocks that one layer chooses among, and its choices, which stay from step to step.

    Attributes:
        index: [n, Hkv, X] of `codes.pack_keys`, of `signs.key_signs`, or of `bounds.key_boxes`: of blocks of the pool,
            and from `ReachRows.pool` on of the host.
        numbers: int32 [slots, W], the host block of each logical block; -1: it is in the pool alone.
        held, read: int32 [slots, n], the logical block in each block of the layer's rooms, and the step that read it
            last; both are updated.
        picked: int32 [slots, n], the chosen blocks of the pool, the best one first; updated.
        scores: float32 [slots, W], of full blocks; written if the layer leads, else read.
        counts: int32 [slots, 3], to which blocks of the host are added: those that came, those that were in the room,
            and those that `fetch` cut, as others were read in their place.
        scale, soft_cap: of the layer's attention (see `logits`).
        fetch: most blocks that come into a row's room; 0: any number.
    """

    index: torch.Tensor
    numbers: torch.Tensor
    held: torch.Tensor
    read: torch.Tensor
    picked: torch.Tensor
    scores: torch.Tensor
    counts: torch.Tensor
    scale: float
    soft_cap: float = 0.0
    fetch: int = 0


def reach(
    rows: ReachRows,
    state: ReachState,
    query: torch.Tensor,
    cache: torch.Tensor,
    host: torch.Tensor,
    table: torch.Tensor,
    sinks: torch.Tensor | None = None,
    step: int = 0,
    leads: bool = True,
    isa: str | None = None,
) -> None:
    """Choose the blocks that each row reads in one layer, bring those of the host into its room, and name them.

    Of several queries of a row the one counts that may pay a block the most attention. One choice serves all of them.
    A block that is in the room already stays where it is. Others take the places that were read longest ago. If more
    than `state.fetch` of them would come, the best blocks that are there already are read in place of the rest; if too
    few are there, more come.

    Args:
        rows: of the step.
        state: of the layer.
        query: [T, H, D].
        cache, host: [blocks, ...], pages of the layer in the pool and on the host.
        table: int32 [R', W'], block table of the layer; its rows get what is read.
        sinks: float32 [H], or [T, H]: of each query the logit of all that it attends to beside the blocks that are
            scored (see `logits`).
        step: number of the step, above those before.
        leads: whether the layer scores blocks itself.
        isa: see `mass.block_mass`.

    Raises:
        ValueError: a shape is wrong, or an index out of range.
        TypeError: a dtype is wrong.
    """
    if cache.device.type != "cpu":
        from ...triton_kernels.reach import reach as on_device

        on_device(rows, state, query, cache, host, table, sinks, step, leads)
    elif _C_cpu is None:
        reach_reference(rows, state, query, cache, host, table, sinks, step, leads)
    else:
        _C_cpu.reach(
            rows, query, state.index, state.numbers, state.held, state.read, state.picked, state.scores, state.counts,
            cache, host, table, state.scale, state.soft_cap, sinks, step, state.fetch, leads, isa,
        )  # fmt: skip


def reach_reference(
    rows: ReachRows,
    state: ReachState,
    query: torch.Tensor,
    cache: torch.Tensor,
    host: torch.Tensor,
    table: torch.Tensor,
    sinks: torch.Tensor | None = None,
    step: int = 0,
    leads: bool = True,
    tables: bool = True,
) -> None:
    """`reach` in plain torch, row by row; `tables` says what kernels it stands for (`signs.tile_scores`)."""
    index, scores, held, read, picked = state.index, state.scores, state.held, state.read, state.picked
    for row in range(len(rows.queries)):
        own = SimpleNamespace(**{name: int(getattr(rows, name)[row]) for name in OF_ROWS})
        slot, first, end = own.slots, own.first, own.end
        written, on_host = rows.written[own.out_rows], state.numbers[slot]
        if own.chooses:
            if leads:
                full = own.full
                its = index[torch.where(on_host[:full] >= 0, rows.pool + on_host[:full], written[:full]).long()]
                scores[slot, :full] = _row_scores(state, query, its, own.queries, own.query_counts, sinks, tables)
            order = scores[slot, first:end].sort(descending=True, stable=True).indices + first
            absent = (on_host[order] >= 0) & ~torch.isin(order, held[slot, : own.rooms].long())
            over = absent & (absent.cumsum(0) > state.fetch) if state.fetch else torch.zeros_like(absent)
            best = torch.cat((order[~over], order[over]))[: own.chosen].tolist()
            wanted = [block for block in best if on_host[block] >= 0]
            places = {int(block): place for place, block in enumerate(held[slot, : own.rooms]) if block in wanted}
            cut = sum(block not in best for block in order[: own.chosen].tolist())
            state.counts[slot] += torch.tensor([len(wanted) - len(places), len(places), cut])
            free = [place for place in range(own.rooms) if place not in places.values()]
            free.sort(key=lambda place: int(read[slot, place]))
            for block in wanted:
                if block not in places:
                    places[block] = place = free.pop(0)
                    cache[written[first + place]] = host[on_host[block]]
                    held[slot, place] = block
                read[slot, places[block]] = step
            at = [first + places[block] if block in places else block for block in best]
            picked[slot, : own.chosen] = written[at]
        reads = torch.cat((written[:first], picked[slot, : own.chosen], written[end : own.blocks]))
        table[own.out_rows, : len(reads)] = reads


def _row_scores(
    state: ReachState,
    query: torch.Tensor,
    index: torch.Tensor,
    token: int,
    count: int,
    sinks: torch.Tensor | None,
    tables: bool,
) -> torch.Tensor:
    """Return the scores of a row's full blocks, of which `index` has the index, by `count` queries from `token` on."""
    queries, score = query[token : token + count], SCORES.get(index.dtype, bound_scores)
    its = None if sinks is None else sinks.expand(len(query), -1)[token : token + count]
    if score is sign_scores and count >= TILE_QUERIES and query.shape[2] <= TILE_DIMS:
        return tile_scores(queries, index, state.scale, state.soft_cap, its, tables)
    score = partial(score, rounded=tables) if score is bit_scores else score
    of_each = [
        score(one, index, state.scale, state.soft_cap, None if its is None else its[i]) for i, one in enumerate(queries)
    ]
    return torch.stack(of_each).amax(0)


def copy_blocks(target: torch.Tensor, source: torch.Tensor, to: torch.Tensor, of: torch.Tensor) -> None:
    """Copy blocks between the host and the pool, in one layer.

    Args:
        target, source: [blocks, ...], pages of the layer. If one of them is on a device, the other is pinned.
        to, of: int32 [n], blocks of the target and of the source. Where `to` is negative, nothing is copied.

    Raises:
        ValueError: a shape is wrong, or a block out of range.
        TypeError: a dtype is wrong.
    """
    if to.device.type != "cpu":
        from ...triton_kernels.reach import copy_blocks as on_device

        on_device(target, source, to, of)
    elif _C_cpu is not None and target[0].is_contiguous() and source[0].is_contiguous():
        _C_cpu.copy_blocks(target, source, to, of)
    else:
        copy_reference(target, source, to, of)


def copy_reference(target: torch.Tensor, source: torch.Tensor, to: torch.Tensor, of: torch.Tensor) -> None:
    """`copy_blocks` in plain torch."""
    there = to >= 0
    target[to[there].long()] = source[of[there].long()]
