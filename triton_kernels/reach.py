"""`compute.kernels.reach` for a whole batch: scores, choices, copies from the host, and a table written in place.

Grids follow from shapes alone, and lengths are read on the device: nothing waits for it.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from ..compute.kernels.codes import packed_tokens
from ..compute.kernels.logits import UNKNOWN
from ..compute.kernels.reach import SCRATCH, ReachRows, ReachState, copy_reference, reach_reference  # noqa: F401  (references)
from ..compute.kernels.signs import TILE_DIMS, TILE_QUERIES, tokens_of
from .reach_bits import bit_logits
from .reach_signs import indexed, of_part, sign_logits
from .tiles import DTYPES, LOG2_E, MIN_ROWS, check_int32, require, soft_capped, with_sinks

#: Blocks that a program scores at once; of signs and codes it has 16 tokens of each.
BOXES, SIGNED, CODED = 32, 16, 4
#: The same of tiles by signs. Queries and heads of a program, where there are many; of boxes half of them.
TILED, MANY = 8, 64
#: Elements of a key that are in registers at once, or half of them, or twice as many; blocks and places that other
#: programs take, numbers of a copy.
DIM, CHUNK, PLACES, COPIED = 64, 256, 64, 4096
#: Bytes of a block of a row in what its choice is made of and in the sort: two numbers, and twice one with its order.
OF_BLOCK = 8 + 2 * 12
#: The tokens of blocks, from an index of a dtype and dimensions. Boxes are of blocks of any size.
TOKENS_OF: dict[torch.dtype, Callable[[torch.Tensor, int], int]] = {
    torch.uint8: lambda index, dims: packed_tokens(index.shape[2], dims),
    torch.int16: tokens_of,
}
#: Programs that score, at most: each takes every n-th part of a row. Programs that copy one block.
SCORING, COPYING = 1024, 4
#: Score of a block with a logarithm that is not finite.
UNRANKED = tl.constexpr(UNKNOWN)


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
) -> None:
    """`compute.kernels.reach.reach` on a device. Rows with a negative slot are padding.

    Indices are not checked, which would wait for the device. `host` is pinned, and kernels read it in place. Seven
    launches (five where a layer does not lead; eight where rows are tiles) and a sort, two less without blocks of the
    host; one where no row chooses. Rows that score are launched as
    many at a time as `SCRATCH` has room for their logarithms. Scratch comes from torch's allocator.
    """
    _check(rows, state, query, table)
    numbers, held, read, written = state.numbers, state.held, state.read, rows.written
    width, most = numbers.shape[1], held.shape[1]
    own = None if sinks is None else sinks.expand(query.shape[:2])
    at_once = max(SCRATCH // (OF_BLOCK * width) // 4 * 4, 4)  # Triton compiles for rows that start at 16 bytes
    for first in range(0, len(rows.queries) if most else 0, at_once):
        some = rows.part(first, first + at_once)
        count, new = len(some.slots), query.new_empty
        # Of these nothing is used if no row chooses, and without blocks of the host all places in `held` are -1.
        places = picks = taken = held
        if rows.most:
            places, keys = new((count, width), dtype=torch.int32), new((count, width), dtype=torch.float32)
            _score(some, state, query, keys, places, own, leads)
            order = keys.sort(descending=True, stable=True).indices
            picks, fresh = (new((count, most), dtype=torch.int32) for _ in range(2))
            coming = new(count, dtype=torch.int32)
            _choose[(count,)](
                order, numbers, places, read, picks, fresh, coming, state.counts, some.slots, some.chooses, some.first,
                some.end, some.chosen, width, most, state.fetch or width, step, CHUNK=CHUNK, num_warps=4,
            )  # fmt: skip
        if rows.most and len(host):
            taken, to, of = (new((count, most), dtype=torch.int32) for _ in range(3))
            _take_places[(count, triton.cdiv(most, PLACES))](
                numbers, written, places, read, fresh, coming, taken, to, of, some.slots, some.chooses, some.first,
                some.rooms, some.out_rows, written.stride(0), width, most, PLACES=PLACES, num_warps=4,
            )  # fmt: skip
            copy_blocks(cache, host, to.view(-1), of.view(-1))
        _name[(count, triton.cdiv(max(table.shape[1], most), CHUNK))](
            table, numbers, written, places, held, read, state.picked, picks, taken, some.slots, some.chooses,
            some.blocks, some.first, some.end, some.chosen, some.out_rows, table.stride(0), written.stride(0), width,
            most, step, CHUNK=CHUNK, num_warps=4,
        )  # fmt: skip


def _check(rows: ReachRows, state: ReachState, query: torch.Tensor, table: torch.Tensor) -> None:
    numbers, held, read, picked, counts = state.numbers, state.held, state.read, state.picked, state.counts
    index, scores, written = state.index, state.scores, rows.written
    check_int32(numbers=numbers, held=held, read=read, picked=picked, counts=counts, table=table, written=written)
    heads, kv_heads, dims = query.shape[1], index.shape[1], query.shape[2]
    require(query.dtype in DTYPES and query.stride(2) == 1, "query must be [T, H, D] with a contiguous last dimension")
    require(
        heads % kv_heads == 0 and index.is_contiguous(), "index must be dense, and query have a multiple of its heads"
    )
    whole = index.dtype in TOKENS_OF or index.shape[2] % (2 * dims) == 0
    require(whole, "boxes must be [n, Hkv, boxes * 2 * D]")
    dense = held.stride() == read.stride() == picked.stride() == (held.shape[1], 1)
    require(dense, "held, read and picked must be dense")
    require(numbers.is_contiguous() and scores.shape == numbers.shape, "numbers and scores must be dense, of one shape")
    require(scores.is_contiguous() and scores.dtype == torch.float32, "scores must be float32 and dense")
    require(counts.is_contiguous() and counts.shape[1] == 3, "counts must be [slots, 3] and dense")
    require(table.stride(1) == written.stride(1) == 1, "tables must have dense rows")


def _score(
    rows: ReachRows,
    state: ReachState,
    query: torch.Tensor,
    keys: torch.Tensor,
    places: torch.Tensor,
    sinks: torch.Tensor | None,
    leads: bool,
) -> None:
    """Write what the choice of each row is made of.

    Args:
        rows: of which the first `many` have up to `most` queries, and the others up to `few`.
        keys: float32 [R, W], scores of candidates; of other blocks -inf.
        places: int32 [R, W], the place of each full block in the room; -1: it has none.
        sinks: [T, H].
    """
    index, held = state.index, state.held
    (count, width), most = keys.shape, held.shape[1]
    heads, kv_heads, dims = query.shape[1], index.shape[1], query.shape[2]
    group, tokens_in = heads // kv_heads, TOKENS_OF.get(index.dtype)
    has_sinks, of_token = (False, 0) if sinks is None else (True, sinks.stride(0))
    many = count if rows.many is None else rows.many
    for begin, end, queries in (0, many, rows.most), (many, count, rows.few):
        least, kernels = _scoring(index.dtype, dims, queries)
        at_once = max(SCRATCH // (4 * heads * width * queries), 1) if leads else count
        for first in range(begin, end, at_once):
            its = min(at_once, end - first)
            logs = query.new_empty((its * queries if leads else 0, heads, width), dtype=torch.float32)
            lse = query.new_empty((its * queries, heads), dtype=torch.float32)
            scored = rows.slots, rows.chooses, rows.full, rows.query_counts, first, queries
            for kernel, tiles, queried, items, own_blocks, dim, warps in kernels if leads else ():
                parts = triton.cdiv(queried * group, items)
                programs = max(min(triton.cdiv(width, own_blocks), SCORING // (its * parts * kv_heads)), 1)
                kernel[(its * parts, kv_heads, programs)](
                    query, index, state.numbers, rows.written, logs, *scored, parts, least, rows.queries, rows.out_rows,
                    state.scale * LOG2_E,
                    *query.stride()[:2], rows.written.stride(0), rows.pool, width, heads, kv_heads,
                    GROUP=group, HEAD_DIM=dims, WORDS=index.shape[2],
                    TOKENS=16 if tokens_in is None else tokens_in(index, dims),
                    SOFT_CAP=state.soft_cap * LOG2_E, TILES=tiles, ROWS=items, BLOCKS=own_blocks, DIM=dim,
                    num_warps=warps, num_stages=3 if tokens_in is None else 2,
                )  # fmt: skip
            if leads:
                _sums[(its * queries, heads)](
                    logs, lse, lse if sinks is None else sinks, *scored, rows.queries, of_token, width, heads,
                    HAS_SINKS=has_sinks, CHUNK=4 * CHUNK, num_warps=4,
                )  # fmt: skip
            _shares[(its, triton.cdiv(width, PLACES))](
                logs, lse, state.scores, keys, places, held, *scored, rows.first, rows.end, rows.rooms, width, heads,
                most, LEADS=leads, HEADS=MIN_ROWS, BLOCKS=PLACES, PLACES=PLACES, num_warps=4,
            )  # fmt: skip


def _scoring(of: torch.dtype, dims: int, queries: int) -> tuple[int, list[tuple[Any, bool, int, int, int, int, int]]]:
    """Return the least queries of a tile, and the kernels that score rows of up to `queries` by an index of a dtype.

    Each has whether its rows are tiles, their most queries, and what a program has at once: queries and heads, blocks,
    dimensions; warps.
    """
    if of != torch.int16:
        items = MANY // 2 if queries >= TILE_QUERIES else MIN_ROWS
        kernel, blocks = (bit_logits, CODED) if of == torch.uint8 else (box_logits, BOXES)
        return queries + 1, [(kernel, False, queries, items, blocks, DIM, 4)]
    least = TILE_QUERIES if dims <= TILE_DIMS else queries + 1
    dim = min(max(triton.next_power_of_2(dims), MIN_ROWS), 2 * DIM)
    kernels = [(sign_logits, False, min(queries, least - 1), MIN_ROWS, SIGNED, dim, 4)]
    if queries >= least:
        kernels.append((sign_logits, True, queries, MANY, TILED, dim, 4 if dims <= 2 * DIM else 8))
    return least, kernels


def copy_blocks(target: torch.Tensor, source: torch.Tensor, to: torch.Tensor, of: torch.Tensor) -> None:
    """`compute.kernels.reach.copy_blocks` where one of both is a device's. The other is pinned, and used in place.

    One launch, with a few programs for each block.
    """
    check_int32(to=to, of=of)
    require(len(to) == len(of) and target.shape[1:] == source.shape[1:], "to and of, and pages, must agree in shape")
    require(target.dtype == source.dtype, "pages must have one dtype")
    require(target.stride(-1) == source.stride(-1) == 1, "pages must have a dense last dimension")
    require(target.dim() in (3, 4), "pages must be [blocks, (heads,) tokens, numbers]")
    target, source = (pages if pages.dim() == 4 else pages.unsqueeze(1) for pages in (target, source))
    if len(to):
        _copy[(len(to), COPYING)](
            target, source, to, of, *target.stride()[:3], *source.stride()[:3],
            HEADS=target.shape[1], TOKENS=target.shape[2], NUMBERS=target.shape[3], CHUNK=COPIED, num_warps=8,
        )  # fmt: skip


# Not specialised for the widths and strides of a model's steps (see `decode_mass.ATTEND_SIZES`).
@triton.jit(do_not_specialize=["base", "queries", "parts", "least", "scale", "stride_t", "stride_w", "pool", "width"])
def box_logits(
    query, index, numbers, written, logs, slots, chooses, full, counts, base, queries, parts, least, tokens, out_rows,
    scale, stride_t, stride_h, stride_w, pool, width, heads, kv_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WORDS: tl.constexpr, TOKENS: tl.constexpr, SOFT_CAP: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Do the work of `reach_signs.sign_logits` for boxes, of which a block may have several. No row is a tile."""
    at = tl.program_id(0) // parts
    row, kv_head = base + at, tl.program_id(1)
    nth, head, valid = of_part(tl.program_id(0) % parts, kv_head, tl.load(counts + row), GROUP, ROWS)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0 and tl.load(chooses + row) != 0 and tl.load(counts + row) < least:
        own_query = query + (tl.load(tokens + row) + nth).to(tl.int64) * stride_t + head * stride_h
        numbers += slot * width
        written += tl.load(out_rows + row).to(tl.int64) * stride_w
        count = tl.load(full + row)
        for first in range(tl.program_id(2) * BLOCKS, count, tl.num_programs(2) * BLOCKS):
            block = first + tl.arange(0, BLOCKS)
            here = block < count
            own = index + (indexed(numbers, written, block, here, pool) * kv_heads + kv_head) * WORDS
            log = soft_capped(_of_boxes(own_query, valid, own, here, HEAD_DIM, ROWS, BLOCKS, DIM) * scale, SOFT_CAP)
            for box in range(2 * HEAD_DIM, WORDS, 2 * HEAD_DIM):
                other = _of_boxes(own_query, valid, own + box, here, HEAD_DIM, ROWS, BLOCKS, DIM) * scale
                other = soft_capped(other, SOFT_CAP)
                top = tl.maximum(log, other)
                log = top + tl.log2(tl.exp2(log - top) + tl.exp2(other - top))
            target = logs + ((at.to(tl.int64) * queries + nth) * heads + head)[:, None] * width + block[None, :]
            tl.store(target, log, mask=valid[:, None] & here[None, :])


@triton.jit
def _of_boxes(
    queries, valid, own, here, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, DIM: tl.constexpr
):
    """Return the largest products of queries within boxes: [ROWS, BLOCKS]."""
    products = tl.zeros([ROWS, BLOCKS], tl.float32)
    for start in range(0, HEAD_DIM, DIM):
        dim = start + tl.arange(0, DIM)
        within = (dim < HEAD_DIM)[None, :]
        least = tl.load(own[:, None] + HEAD_DIM + dim[None, :], mask=here[:, None] & within, other=0.0)
        largest = tl.load(own[:, None] + dim[None, :], mask=here[:, None] & within, other=0.0)
        q = tl.load(queries[:, None] + dim[None, :], mask=valid[:, None] & within, other=0.0).to(tl.float32)
        above, below = tl.maximum(q, 0.0).to(least.dtype), tl.minimum(q, 0.0).to(least.dtype)
        products = tl.dot(above, tl.trans(largest), products, input_precision="ieee")
        products = tl.dot(below, tl.trans(least), products, input_precision="ieee")
    return products


@triton.jit
def _is_finite(logs):
    """Return whether numbers are neither NaN nor infinite."""
    return (logs > float("-inf")) & (logs < float("inf"))


@triton.jit(do_not_specialize=["base", "queries", "stride_s", "width"])
def _sums(
    logs, lse, sinks, slots, chooses, full, counts, base, queries, tokens, stride_s, width, heads,
    HAS_SINKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the logarithm of the sum over a row's blocks, and of the sink, of each query and head."""
    at, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, nth = base + at // queries, at % queries
    if tl.load(slots + row) >= 0 and tl.load(chooses + row) != 0 and nth < tl.load(counts + row):
        count = tl.load(full + row)
        top, total = tl.full([CHUNK], float("-inf"), tl.float32), tl.zeros([CHUNK], tl.float32)
        for first in range(0, count, CHUNK):
            block = first + tl.arange(0, CHUNK)
            log = tl.load(logs + (at * heads + head) * width + block, mask=block < count, other=float("-inf"))
            log = tl.where(_is_finite(log), log, float("-inf"))
            higher = tl.maximum(top, log)
            known = higher > float("-inf")
            total = tl.where(known, total * tl.exp2(top - higher) + tl.exp2(log - higher), total)
            top = higher
        highest = tl.max(top, 0)
        summed = highest + tl.log2(tl.sum(tl.where(top > float("-inf"), total * tl.exp2(top - highest), 0.0), 0))
        if HAS_SINKS:
            summed = with_sinks(summed, sinks + (tl.load(tokens + row) + nth) * stride_s, head, head >= 0)
        tl.store(lse + at * heads + head, summed)


@triton.jit(do_not_specialize=["base", "queries", "width", "most"])
def _shares(
    logs, lse, scores, keys, places, held, slots, chooses, full, counts, base, queries, starts, ends, rooms, width,
    heads, most,
    LEADS: tl.constexpr, HEADS: tl.constexpr, BLOCKS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Write scores, the same by candidates to be sorted, and each block's place in the room (-1: it has none)."""
    own = tl.program_id(0).to(tl.int64)
    row = base + own
    slot = tl.load(slots + row).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < width
    count = tl.load(full + row)
    if slot >= 0 and tl.load(chooses + row) != 0 and tl.program_id(1) * BLOCKS < count:
        here = block < count
        if LEADS:
            score = tl.full([BLOCKS], UNRANKED, tl.float32)
            for nth in range(tl.load(counts + row)):
                share, odd = tl.zeros([BLOCKS], tl.float32), tl.zeros([BLOCKS], tl.int32)
                for first in range(0, heads, HEADS):
                    head = first + tl.arange(0, HEADS)
                    log_at, valid = (own * queries + nth) * heads + head, head < heads
                    known = valid[:, None] & here[None, :]
                    log = tl.load(logs + log_at[:, None] * width + block[None, :], mask=known, other=float("-inf"))
                    finite = _is_finite(log)
                    odd += tl.sum((known & (finite == 0)).to(tl.int32), 0)
                    log = tl.where(finite, log - tl.load(lse + log_at, mask=valid, other=0.0)[:, None], float("-inf"))
                    share += tl.sum(tl.exp2(log), 0)
                score = tl.maximum(score, tl.where(odd > 0, UNRANKED, share))
            tl.store(scores + slot * width + block, score, mask=here)
        else:
            score = tl.load(scores + slot * width + block, mask=here, other=0.0)
        candidate = here & (block >= tl.load(starts + row)) & (block < tl.load(ends + row))
        tl.store(keys + row * width + block, tl.where(candidate, score, float("-inf")), mask=inside)
        place, room = tl.full([BLOCKS], -1, tl.int32), tl.load(rooms + row)
        for first in range(0, room, PLACES):
            at = first + tl.arange(0, PLACES)
            its = tl.load(held + slot * most + at, mask=at < room, other=-1)
            found = tl.where(its[None, :] == block[:, None], at[None, :], -1)
            place = tl.maximum(place, tl.max(found, 1))
        tl.store(places + row * width + block, place, mask=inside)
    else:
        tl.store(keys + row * width + block, tl.full([BLOCKS], float("-inf"), tl.float32), mask=inside)


@triton.jit(do_not_specialize=["width", "most", "fetch", "step"])
def _choose(
    order, numbers, places, read, picks, fresh, come, counts, slots, chooses, starts, ends, chosen,
    width, most, fetch, step, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write and count chosen blocks, and those of them that have to come; mark places whose block is read again."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0 and tl.load(chooses + row) != 0:
        start, end, wanted = tl.load(starts + row), tl.load(ends + row), tl.load(chosen + row)
        numbers += slot * width
        places += row * width
        absent = 0
        for first in range(start, end, CHUNK):
            block = first + tl.arange(0, CHUNK)
            number = tl.load(numbers + block, mask=block < end, other=-1)
            place = tl.load(places + block, mask=block < end, other=0)
            absent += tl.sum(((number >= 0) & (place < 0)).to(tl.int32), 0)
        count = end - start
        before_others = count - tl.maximum(absent - fetch, 0)
        passed, coming, there, cut = 0, 0, 0, 0
        for first in range(0, count, CHUNK):
            rank = first + tl.arange(0, CHUNK)
            block = tl.load(order + row * width + rank, mask=rank < count, other=0).to(tl.int32)
            number = tl.load(numbers + block, mask=rank < count, other=-1)
            place = tl.load(places + block, mask=rank < count, other=0)
            lacks = (number >= 0) & (place < 0)
            nth = passed + tl.cumsum(lacks.to(tl.int32), 0) - lacks.to(tl.int32)
            over = lacks & (nth >= fetch)
            position = tl.where(over, before_others + nth - fetch, rank - tl.maximum(nth - fetch, 0))
            takes = (rank < count) & (position < wanted)
            tl.store(picks + row * most + position, block, mask=takes)
            tl.store(fresh + row * most + nth, block, mask=takes & lacks)
            again = tl.zeros([CHUNK], tl.int32) + step
            held = takes & (number >= 0) & (place >= 0)
            tl.store(read + slot * most + place, again, mask=held)
            passed += tl.sum(lacks.to(tl.int32), 0)
            coming += tl.sum((takes & lacks).to(tl.int32), 0)
            there += tl.sum(held.to(tl.int32), 0)
            cut += tl.sum((over & (rank < wanted) & (position >= wanted)).to(tl.int32), 0)
        tl.store(come + row, coming)
        counts += slot * 3
        tl.store(counts, tl.load(counts) + coming)
        tl.store(counts + 1, tl.load(counts + 1) + there)
        tl.store(counts + 2, tl.load(counts + 2) + cut)


@triton.jit(do_not_specialize=["stride_w", "width", "most"])
def _take_places(
    numbers, written, places, read, fresh, come, taken, to, of, slots, chooses, starts, rooms, out_rows,
    stride_w, width, most, PLACES: tl.constexpr,
):  # fmt: skip
    """Give blocks that have to come the places that were read longest ago, and write the copies."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    place = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    if slot >= 0 and tl.load(chooses + row) != 0:
        room = tl.load(rooms + row)
        numbers += slot * width
        read += slot * most
        own, rank = tl.load(read + place, mask=place < room, other=0), tl.zeros([PLACES], tl.int32)
        for first in range(0, room, PLACES):
            other = first + tl.arange(0, PLACES)
            its = tl.load(read + other, mask=other < room, other=0)[None, :]
            longer = (its < own[:, None]) | ((its == own[:, None]) & (other[None, :] < place[:, None]))
            rank += tl.sum((longer & (other < room)[None, :]).to(tl.int32), 1)
        takes = (place < room) & (rank < tl.load(come + row))
        block = tl.load(fresh + row * most + rank, mask=takes, other=-1)
        tl.store(places + row * width + block, place, mask=takes)
        physical = written + tl.load(out_rows + row).to(tl.int64) * stride_w + tl.load(starts + row) + place
        tl.store(taken + row * most + place, block, mask=place < most)
        tl.store(to + row * most + place, tl.load(physical, mask=takes, other=-1), mask=place < most)
        tl.store(of + row * most + place, tl.load(numbers + block, mask=takes, other=-1), mask=place < most)
    else:
        tl.store(to + row * most + place, tl.full([PLACES], -1, tl.int32), mask=place < most)


@triton.jit
def _copy(
    target, source, to, of, target_p, target_h, target_t, source_p, source_h, source_t,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, NUMBERS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Copy one block."""
    there = tl.load(to + tl.program_id(0)).to(tl.int64)
    if there >= 0:
        target += there * target_p
        source += tl.load(of + tl.program_id(0)).to(tl.int64) * source_p
        for first in range(tl.program_id(1) * CHUNK, HEADS * TOKENS * NUMBERS, tl.num_programs(1) * CHUNK):
            at = first + tl.arange(0, CHUNK)
            here = at < HEADS * TOKENS * NUMBERS
            line, number = at // NUMBERS, at % NUMBERS
            head, token = line // TOKENS, line % TOKENS
            numbers = tl.load(source + head * source_h + token * source_t + number, mask=here)
            tl.store(target + head * target_h + token * target_t + number, numbers, mask=here)


@triton.jit(do_not_specialize=["stride_table", "stride_w", "width", "most", "step"])
def _name(
    table, numbers, written, places, held, read, picked, picks, taken, slots, chooses, blocks, starts, ends, chosen,
    out_rows, stride_table, stride_w, width, most, step, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write what rows read into the table, and note what their rooms hold now."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    if slot >= 0:
        out_row = tl.load(out_rows + row).to(tl.int64)
        start, end, wanted = tl.load(starts + row), tl.load(ends + row), tl.load(chosen + row)
        new = tl.load(chooses + row + tl.zeros([CHUNK], tl.int64)) != 0  # as many as places: masks have one shape
        written += out_row * stride_w
        came = tl.load(taken + row * most + at, mask=(at < most) & new, other=-1)
        tl.store(held + slot * most + at, came, mask=came >= 0)
        tl.store(read + slot * most + at, tl.zeros([CHUNK], tl.int32) + step, mask=came >= 0)
        picks_here = (at >= start) & (at < start + wanted)
        block = tl.load(picks + row * most + at - start, mask=picks_here & new, other=0)
        number = tl.load(numbers + slot * width + block, mask=picks_here & new, other=-1)
        place = tl.load(places + row * width + block, mask=picks_here & new, other=0)
        logical = tl.where(number >= 0, start + place, block)
        logical = tl.where(picks_here, logical, tl.where(at < start, at, end + at - start - wanted))
        within = at < start + wanted + tl.load(blocks + row) - end
        physical = tl.load(written + logical, mask=within & (new | (picks_here == 0)), other=0)
        own = picked + slot * most + at - start
        tl.store(own, physical, mask=picks_here & new)
        known = tl.load(own, mask=picks_here & (new == 0), other=0)
        tl.store(table + out_row * stride_table + at, tl.where(picks_here & (new == 0), known, physical), mask=within)
