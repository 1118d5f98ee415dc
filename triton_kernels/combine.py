"""The second launch of decode kernels: splits become outputs and LSEs, logarithms of granules become mass."""

import triton
import triton.language as tl

from .tiles import LN_2, granules_of, with_sinks

MAX_SPLITS = 128
SPLIT_TILE = 16  # splits that are combined at once
# Padded numbers of splits. The number of splits differs between steps, and each padded number is a compiled variant.
PADDED_SPLITS = (8, 32, MAX_SPLITS)
# Blocks and heads that a program of the second launch adds up at once. Heads one by one would be a chain of loads.
MASS_TILE = 128
MAX_MEMBERS = 16
# The same for tokens.
TOKEN_TILE = 512
MAX_TOKEN_MEMBERS = 4

# Without `maxnreg` ptxas takes 40 registers on sm_90, and `_combine` spills with 64/8 heads of 64.
COMBINE_OPTIONS = {"num_warps": 4, "maxnreg": 128}
# As `decode_mass.ATTEND_SIZES`.
COMBINE_SIZES = ["heads", "heads_out", "capacity", "splits", "measured", "chunks", "stride_mr", "stride_mh"]


def padded_splits(splits: int) -> int:
    return next((size for size in PADDED_SPLITS if size >= splits), triton.next_power_of_2(splits))


@triton.jit
def _lse_of(stats, at, valid, splits, sinks, head, HAS_SINKS: tl.constexpr, PADDED_SPLITS: tl.constexpr):
    """Return the LSEs (log2) of rows `at` of the splits' statistics, of query heads `head`, with their sinks; -inf for
    rows that are not `valid`."""
    split = tl.arange(0, PADDED_SPLITS)
    where = stats + (at[:, None] * splits + split[None, :]) * 2
    there = valid[:, None] & (split < splits)[None, :]
    top = tl.load(where, mask=there, other=float("-inf"))
    total = tl.load(where + 1, mask=there, other=0.0)
    highest = tl.max(top, 1)
    # An empty split has the maximum -inf and the sum 0, and so has a row of empty splits. NaN stays.
    parts = tl.where(total != 0, total * tl.exp2(top - highest[:, None]), 0.0)
    log = highest + tl.log2(tl.sum(parts, 1))
    if HAS_SINKS:
        log = with_sinks(log, sinks, head, valid)
    return log


@triton.jit(do_not_specialize=COMBINE_SIZES)
def _combine(
    starts, rows, weights, value_scale,
    lens, partial, stats, granule_logs, output, lse, out, sinks, stride_ot, stride_oh, stride_lt, stride_lh,
    heads, heads_out, capacity, splits, measured, chunks, stride_mr, stride_mh,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, PADDED_SPLITS: tl.constexpr, SPLIT_TILE: tl.constexpr, MASS_TILE: tl.constexpr,
    MEMBERS: tl.constexpr, HAS_LSE: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    combine_splits(
        tl.program_id(1), starts, rows, weights, value_scale,
        lens, partial, stats, granule_logs, output, lse, out, sinks, stride_ot, stride_oh, stride_lt, stride_lh,
        heads, heads_out, capacity, splits, measured, chunks, stride_mr, stride_mh,
        HEAD_DIM, DIM, BLOCK_SIZE, TOKENS, PARTS, HAS_WEIGHTS, PADDED_SPLITS, SPLIT_TILE, MASS_TILE, MEMBERS, HAS_LSE,
        HAS_SINKS,
    )  # fmt: skip


@triton.jit
def combine_splits(
    role, starts, rows, weights, value_scale,
    lens, partial, stats, granule_logs, output, lse, out, sinks, stride_ot, stride_oh, stride_lt, stride_lh,
    heads, heads_out, capacity, splits, measured, chunks, stride_mr, stride_mh,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, PADDED_SPLITS: tl.constexpr, SPLIT_TILE: tl.constexpr, MASS_TILE: tl.constexpr,
    MEMBERS: tl.constexpr, HAS_LSE: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one request. Roles below `heads` write output and LSE of a head, other roles the mass of
    some blocks; a token is a block of one token."""
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + n).to(tl.int64)
    if row >= 0:
        token = tl.load(starts + row).to(tl.int64)
        if role < heads:
            at = n * heads + role
            one = tl.arange(0, 1)
            log = _lse_of(stats, at + one, one == 0, splits, sinks, role + one, HAS_SINKS, PADDED_SPLITS)
            dim = tl.arange(0, DIM)
            acc = tl.zeros([DIM], tl.float32)
            for start in range(0, splits, SPLIT_TILE):
                split = start + tl.arange(0, SPLIT_TILE)
                where = at * splits + split
                top = tl.load(stats + where * 2, mask=split < splits, other=float("-inf"))
                used = top > float("-inf")  # an empty split has not written its output
                part = tl.load(
                    partial + where[:, None] * HEAD_DIM + dim[None, :],
                    mask=used[:, None] & (dim < HEAD_DIM)[None, :],
                    other=0.0,
                )
                acc += tl.sum(part * tl.where(used, tl.exp2(top - log), 0.0)[:, None], 0)
            acc = tl.where(log == log, acc, log)  # a split of NaN alone has the maximum -inf too
            where = output + token * stride_ot + role * stride_oh + dim
            tl.store(where, (acc * value_scale).to(output.dtype.element_ty), mask=dim < HEAD_DIM)
            if HAS_LSE:
                tl.store(lse + token * stride_lt + role * stride_lh + one, log * LN_2)
        else:
            weight = tl.full([], 1.0, tl.float32)
            if HAS_WEIGHTS:
                weight = tl.load(weights + token)
            out_head = (role - heads) // chunks
            first = (role - heads) % chunks * MASS_TILE
            block = first + tl.arange(0, MASS_TILE)
            count = granules_of(tl.load(lens + row), BLOCK_SIZE, TOKENS, PARTS)
            if weight == 0.0:
                count = 0
            mine = (block < measured) & (block * PARTS < count)
            if first * PARTS < count:
                mass = tl.zeros([MASS_TILE], tl.float32)
                for start in range(0, heads_out, MEMBERS):
                    member = start + tl.arange(0, MEMBERS)
                    head = out_head * heads_out + member
                    at = n * heads + head
                    log = _lse_of(stats, at, member < heads_out, splits, sinks, head, HAS_SINKS, PADDED_SPLITS)
                    for part in range(PARTS):
                        granule = block * PARTS + part
                        there = (member < heads_out)[:, None] & (mine & (granule < count))[None, :]
                        where = granule_logs + at[:, None] * capacity + granule[None, :]
                        held = tl.load(where, mask=there, other=float("-inf"))
                        mass += tl.sum(tl.where(there, tl.exp2(held - log[:, None]), 0.0), 0)
                where = out + row * stride_mr + out_head * stride_mh + block
                tl.store(where, tl.load(where, mask=mine) + mass * weight, mask=mine)
