"""Split-KV paged decode attention that also computes the mass of each block or token, from one read of K and V."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..compute.kernels.decode import decode_mass_reference  # noqa: F401  (the reference)
from ..compute.kernels.paged import DecodeShape, PagedAttention
from .combine import (
    COMBINE_OPTIONS,
    MASS_TILE,
    MAX_MEMBERS,
    MAX_SPLITS,
    MAX_TOKEN_MEMBERS,
    SPLIT_TILE,
    TOKEN_TILE,
    _combine,
    padded_splits,
)
from .tiles import (
    FP8,
    LOG2_E,
    MAX_DIM,
    MIN_ROWS,
    Tile,
    check_attention,
    check_int32,
    granules_of,
    require,
    soft_capped,
    tile_of,
)

HOPPER_SMS = 132  # H100 and H200 (SXM), for plans on a machine without a GPU
# Programs for each SM. Three run at once (72 KiB of shared memory, 150 registers a thread); the fourth fills gaps that
# short programs leave.
PROGRAMS_PER_SM = 4
MIN_SPLIT_TOKENS = 256  # a shorter split reads less than four tiles, and its fixed costs show

# Of the first launch. Page numbers of a tile, its keys and values, and their use take three stages; two are left for
# tiles in flight.
WARPS, STAGES = 4, 5

# Triton compiles a variant for an integer that is 1, one for multiples of 16, and one for all others. Sizes that differ
# between steps or layers are not specialised, so that requests do not wait for the compiler.
ATTEND_SIZES = ["stride_table", "kv_heads", "capacity", "splits"]


class DecodePlan(NamedTuple):
    """Launch sizes and scratch of `decode_mass`. They follow from shapes, so layers of one shape share a plan.

    Attributes:
        splits: pieces of a request's keys, of equal length within a request.
        tile: tile that a program reads at once.
        max_blocks: blocks of the longest request.
        partial: float32 [n, H, splits, D], outputs of splits, not normalised.
        stats: float32 [n, H, splits, 2], maxima (log2) and sums of splits.
        granules: float32 [n, H, max_blocks * tile.parts], log2 of each granule's sum of exponentials; for mass by token
            [n, H, max_blocks * block_size], scores (log2); None: no mass.
    """

    splits: int
    tile: Tile
    max_blocks: int
    partial: torch.Tensor
    stats: torch.Tensor
    granules: torch.Tensor | None


def plan_decode(
    shape: DecodeShape,
    *,
    mass: bool = True,
    per_token: bool = False,
    splits: int | None = None,
    take: Callable[..., torch.Tensor] = torch.empty,
) -> DecodePlan:
    """Make a plan for launches of up to these sizes. A program reads one split of one request and KV head.

    Args:
        shape: of the launches.
        mass, per_token: whether there is scratch for mass, and for mass by token (which serves blocks too).
        splits: None takes `PROGRAMS_PER_SM` programs for each SM, with at least `MIN_SPLIT_TOKENS` in a split of the
            longest request. The last bits of outputs depend on it, so a fixed number makes them independent of the
            batch.
        take: allocates scratch, called like `torch.empty`.
    """
    blocks = shape.max_blocks
    if splits is None:
        wanted = triton.cdiv(programs_on(shape.device), max(shape.rows * shape.kv_heads, 1))
        splits = max(min(wanted, triton.cdiv(blocks * shape.block_size, MIN_SPLIT_TOKENS), MAX_SPLITS), 1)
    tile = tile_of(shape.head_dim, shape.block_size, shape.dtype)

    def scratch(*sizes: int) -> torch.Tensor:
        return take(shape.rows, shape.heads, *sizes, dtype=torch.float32, device=shape.device)

    granules = scratch(blocks * _logs(tile, shape.block_size, per_token)) if mass else None
    return DecodePlan(splits, tile, blocks, scratch(splits, shape.head_dim), scratch(splits, 2), granules)


def _logs(tile: Tile, block_size: int, per_token: bool) -> int:
    """Return how many numbers the first launch stores for each block and query head."""
    return block_size if per_token else tile.parts


def programs_on(device: torch.device | str) -> int:
    """Return the number of programs that fill the device."""
    sms = HOPPER_SMS
    if torch.device(device).type == "cuda":
        sms = torch.cuda.get_device_properties(device).multi_processor_count
    return PROGRAMS_PER_SM * sms


def decode_mass(
    attention: PagedAttention,
    rows: torch.Tensor,
    output: torch.Tensor,
    *,
    lse: torch.Tensor | None = None,
    plan: DecodePlan | None = None,
) -> None:
    """`compute.kernels.decode.decode_mass` on caches with strides in place of packings, on a device.

    The first launch attends, with a program for each KV head, request and split. KV heads come first, since the heads
    of a block lie side by side in memory. The query heads of a KV head are the rows of one tl.dot, whose other rows
    are padding. For each block the launch stores log_b, the logarithm of the tile's sum of exponentials, so that
    mass_b = 2 ** (log_b - lse) for any later maximum. With `per_token` it stores scores: mass_t = 2 ** (score_t -
    lse). Queries in bfloat16 meet fp8 keys in float16, so their elements must be below 65,504.

    The second launch combines splits, and sinks, into output and LSE, and blocks or tokens into mass.

    Each number has one writer that adds in a fixed order: the same input and plan give the same bits. With a plan
    nothing is allocated or read on the host, so a CUDA graph can capture both launches.

    Args:
        attention: D is 16 to 256. Over fp8 caches D and the strides of values are even. The soft cap is a constant of
            the compiled kernel.
        rows: int32 [n], rows of the requests to decode, of one token each; -1 for padding, which costs nothing.
        output: [T, H, D] of the query's dtype, last dimension contiguous. Other requests' rows keep their contents.
        lse: float32 [T, H] or None; gets the natural logarithm of each row's sum of exponentials, its sink's included.
        plan: from `plan_decode`, for at least n rows and the blocks of the longest request; None makes one.

    Raises: as `compute.kernels.decode.decode_mass`, for shapes and dtypes; contents are not checked.

    Bytes moved for each request: 2 * seq_len * Hkv * D * itemsize of keys and values, once. Beside them, written and
    read: 4 * H * (D + 2) for each split and 4 * H for each block. With G query heads for each KV head and 2-byte caches
    the mass adds 2 * G / (bs * D) of the bytes, 0.8 % for G = 8, bs = 16, D = 128; with `per_token` bs times that.
    """
    check_arguments(attention, rows, output, lse)
    n, kv_heads = len(rows), attention.key_cache.shape[1]
    if not n:
        return
    if plan is None:
        measured = {"mass": attention.mass is not None, "per_token": attention.per_token}
        plan = plan_decode(DecodeShape.of(attention, n), **measured)
    launch = launch_of(attention, output, lse, plan, n)
    shared = attention.query_start_loc, rows, attention.weights
    _attend[(kv_heads, n, plan.splits)](
        *shared, attention.scale * LOG2_E, *launch.attend, *launch.attend_sizes, *launch.attend_shape,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    _combine[(n, launch.roles)](
        *shared, attention.value_scale, *launch.combine, *launch.combine_sizes, *launch.combine_shape, **COMBINE_OPTIONS
    )  # fmt: skip


class Launch(NamedTuple):
    """Arguments of both launches for some heads, in the order of `attend_split` and `combine_splits`."""

    attend: tuple  # tensors, and strides that do not differ between steps
    attend_sizes: tuple  # sizes that differ between steps or layers
    attend_shape: tuple  # constexprs
    combine: tuple
    combine_sizes: tuple
    combine_shape: tuple
    roles: int  # programs of the second launch for each request


def check_arguments(
    attention: PagedAttention, rows: torch.Tensor, output: torch.Tensor, lse: torch.Tensor | None
) -> None:
    require(attention.value_cache is not None, "decode_mass needs value_cache")
    check_attention(attention, attention.key_cache, attention.value_cache)
    check_int32(rows=rows)
    query = attention.query
    require(query.shape[2] <= MAX_DIM, f"query must have heads of at most {MAX_DIM}")
    require(
        output.shape == query.shape and output.dtype == query.dtype and output.stride(2) == 1,
        "output must be like query",
    )
    require(lse is None or lse.dtype == torch.float32, "lse must be float32")


def launch_of(
    attention: PagedAttention, output: torch.Tensor, lse: torch.Tensor | None, plan: DecodePlan, n: int
) -> Launch:
    """Return the arguments of both launches for the heads of the query, over n requests."""
    query, key_cache, value_cache = attention.query, attention.key_cache, attention.value_cache
    block_table, mass, sinks, per_token = attention.block_table, attention.mass, attention.sinks, attention.per_token
    _, heads, head_dim = query.shape
    _, kv_heads, block_size, _ = key_cache.shape
    tile, group, has_mass = plan.tile, heads // kv_heads, mass is not None
    room = 0 if plan.granules is None else plan.granules.shape[2]
    capacity = plan.max_blocks * _logs(tile, block_size, per_token) if has_mass else 0
    require(
        len(plan.partial) >= n
        and plan.partial.shape[1:] == (heads, plan.splits, head_dim)
        and tile == tile_of(head_dim, block_size, query.dtype)
        and room >= capacity,
        "plan must be for this shape, dtype, block size and at least n rows, and for tokens if they are wanted",
    )
    # The second launch combines tokens as blocks of one token.
    blocks = (1, 1, 1) if per_token else (block_size, tile.tokens, tile.parts)
    mass_tile, members = (TOKEN_TILE, MAX_TOKEN_MEMBERS) if per_token else (MASS_TILE, MAX_MEMBERS)
    entries = min(plan.max_blocks, block_table.shape[1]) * (block_size // blocks[0])
    measured = min(entries, mass.shape[2]) if has_mass else 0
    chunks = triton.cdiv(measured, mass_tile)
    out_heads = mass.shape[1] if has_mass else 0
    heads_out = heads // out_heads if out_heads else 1
    # Without mass, LSE or sinks their pointers are placeholders that no program reads.
    if value_cache.dtype == FP8:
        # Tensor cores take the values of neighbouring tokens from one register. Shared memory is read that way by 16
        # bits, so a pair of dimensions travels as an int16.
        even = not any(each % 2 for each in (head_dim, value_cache.storage_offset(), *value_cache.stride()[:3]))
        require(even, "value_cache must have an even head size, offset and strides, since it is float8_e4m3fn")
        value_cache = value_cache.view(torch.int16)
    granules, out = (plan.granules, mass) if has_mass else (plan.partial, plan.partial)
    logs, own = (plan.stats if each is None else each for each in (lse, sinks))
    scratch = attention.seq_lens, plan.partial, plan.stats, granules
    dims = head_dim, tile.dim
    return Launch(
        (
            *scratch, query, key_cache, value_cache, block_table, query.stride(0), query.stride(1),
            *key_cache.stride()[:3], *value_cache.stride()[:3],
        ),
        (block_table.stride(0), kv_heads, capacity, plan.splits),
        (
            *dims, block_size, tile.tokens, tile.parts, attention.weights is not None,
            group, max(triton.next_power_of_2(group), MIN_ROWS), tile.granules,
            attention.soft_cap * LOG2_E, per_token, has_mass,
        ),
        (
            *scratch, output, logs, out, own, output.stride(0), output.stride(1),
            *((0, 0) if lse is None else lse.stride()),
        ),
        (heads, heads_out, capacity, plan.splits, measured, chunks, *(out.stride()[:2] if has_mass else (0, 0))),
        (
            *dims, *blocks, attention.weights is not None, padded_splits(plan.splits), SPLIT_TILE, mass_tile,
            min(triton.next_power_of_2(heads_out), members), lse is not None, sinks is not None,
        ),
        heads + out_heads * chunks,
    )  # fmt: skip


@triton.jit
def elements_of(pairs, dtype: tl.constexpr):
    """Split int16 into two elements in fp8 each, of even and of odd dimensions."""
    even = (pairs & 0xFF).to(tl.int8).to(tl.float8e4nv, bitcast=True)
    odd = (pairs >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True)
    return even.to(dtype), odd.to(dtype)


@triton.jit(do_not_specialize=ATTEND_SIZES)
def _attend(
    starts, rows, weights, scale,
    lens, partial, stats, granule_logs, query, keys, values, table,
    stride_qt, stride_qh, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_table, kv_heads, capacity, splits,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, GRANULES: tl.constexpr,
    SOFT_CAP: tl.constexpr, PER_TOKEN: tl.constexpr, HAS_MASS: tl.constexpr,
):  # fmt: skip
    attend_split(
        tl.program_id(1), tl.program_id(0), tl.program_id(2),
        starts, rows, weights, scale, lens, partial, stats, granule_logs, query, keys, values, table,
        stride_qt, stride_qh, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
        stride_table, kv_heads, capacity, splits,
        HEAD_DIM, DIM, BLOCK_SIZE, TOKENS, PARTS, HAS_WEIGHTS, GROUP, ROWS, GRANULES, SOFT_CAP, PER_TOKEN, HAS_MASS,
    )  # fmt: skip


@triton.jit
def attend_split(
    n, kv_head, split, starts, rows, weights, scale,
    lens, partial, stats, granule_logs, query, keys, values, table,
    stride_qt, stride_qh, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_table, kv_heads, capacity, splits,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, GRANULES: tl.constexpr,
    SOFT_CAP: tl.constexpr, PER_TOKEN: tl.constexpr, HAS_MASS: tl.constexpr,
):  # fmt: skip
    """Attend to one split of one request and KV head. Exponents have base 2: `scale` includes log2(e)."""
    n = n.to(tl.int64)
    kv_head = kv_head.to(tl.int64)
    heads = kv_heads * GROUP
    row = tl.load(rows + n).to(tl.int64)
    if row >= 0:
        seq_len = tl.load(lens + row)
        token = tl.load(starts + row).to(tl.int64)
        weight = tl.full([], 1.0, tl.float32)
        if HAS_WEIGHTS:
            weight = tl.load(weights + token)

        member = tl.arange(0, ROWS)  # of the group
        dim = tl.arange(0, DIM)
        pair = tl.arange(0, DIM // 2)
        head = kv_head * GROUP + member
        here = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
        q = tl.load(query + token * stride_qt + head[:, None] * stride_qh + dim[None, :], mask=here, other=0.0)
        if keys.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
            q = q.to(tl.float16)  # fp8 becomes float16 by one instruction, and bfloat16 by several

        lane = tl.arange(0, GRANULES * TOKENS)
        granule = tl.arange(0, GRANULES)
        count = granules_of(seq_len, BLOCK_SIZE, TOKENS, PARTS)
        tiles = tl.cdiv(count, GRANULES)
        share = tl.cdiv(tiles, splits)
        first = split * share
        end = tl.minimum(first + share, tiles)
        kept = seq_len if PER_TOKEN else count
        kept = tl.where(weight != 0.0, tl.minimum(kept, capacity), 0)

        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        # Of values in pairs, the even dimensions have an accumulator of their own, and so do the odd ones.
        PAIRS: tl.constexpr = values.dtype.element_ty == tl.int16
        acc = tl.zeros([ROWS, DIM // 2 if PAIRS else DIM], tl.float32)
        odd = acc
        for tile in range(first, end):
            at = tile * GRANULES + lane // TOKENS
            block = at // PARTS
            place = at % PARTS * TOKENS + lane % TOKENS
            seen = (place < BLOCK_SIZE) & (block * BLOCK_SIZE + place < seq_len)
            # 64 bits, since a cache has more than 2**31 elements.
            page = tl.load(table + row * stride_table + block, mask=seen, other=0).to(tl.int64)
            there = seen[:, None] & (dim < HEAD_DIM)[None, :]
            # Masked loads, since slots beyond the last token may hold NaN.
            slot = page * stride_kb + kv_head * stride_kh + place * stride_kn
            k = tl.load(keys + slot[:, None] + dim[None, :], mask=there, other=0.0).to(q.dtype)
            slot = page * stride_vb + kv_head * stride_vh + place * stride_vn
            if PAIRS:
                there = seen[:, None] & (pair < HEAD_DIM // 2)[None, :]
                v, v_odd = elements_of(tl.load(values + slot[:, None] + pair[None, :], mask=there, other=0), q.dtype)
            else:
                v = tl.load(values + slot[:, None] + dim[None, :], mask=there, other=0.0).to(q.dtype)

            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            scores = tl.where(seen[None, :], soft_capped(scores * scale, SOFT_CAP), float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))  # finite: each tile has a token, unless all are NaN
            less = tl.exp2(top - higher)
            probs = tl.exp2(scores - higher[:, None])
            total = total * less + tl.sum(probs, 1)
            acc *= less[:, None]
            acc += tl.dot(probs.to(v.dtype), v, input_precision="ieee")
            if PAIRS:
                odd = odd * less[:, None] + tl.dot(probs.to(v.dtype), v_odd, input_precision="ieee")
            top = higher
            if HAS_MASS:
                if PER_TOKEN:
                    index = block * BLOCK_SIZE + place
                    mine = (member < GROUP)[:, None] & (seen & (index < kept))[None, :]
                    logs = scores
                else:
                    sums = tl.sum(tl.reshape(probs, [ROWS, GRANULES, TOKENS]), 2)
                    index = tile * GRANULES + granule
                    mine = (member < GROUP)[:, None] & (index < kept)[None, :]
                    logs = higher[:, None] + tl.log2(sums)
                where = (n * heads + head)[:, None] * capacity + index[None, :]
                tl.store(granule_logs + where, logs, mask=mine)

        where = (n * heads + head) * splits + split
        tl.store(stats + where * 2, top, mask=member < GROUP)
        tl.store(stats + where * 2 + 1, total, mask=member < GROUP)
        outputs = tl.interleave(acc, odd) if PAIRS else acc
        if first < end:
            tl.store(partial + where[:, None] * HEAD_DIM + dim[None, :], outputs, mask=here)
