"""Attention mass of each block or token beside a stock kernel, from queries, paged keys and the kernel's LSE."""

import torch
import triton
import triton.language as tl

from ..compute.kernels.logits import soft_capped as capped
from ..compute.kernels.mass import per_block
from ..compute.kernels.paged import PagedAttention
from .tiles import (
    LOG2_E,
    MIN_ROWS,
    TILE_BYTES,
    capability_of,
    check_attention,
    check_int32,
    converted,
    products_by_parts,
    require,
    soft_capped,
    tile_of,
)

MAX_ROWS = 64  # query rows of one tl.dot, the least M of Hopper's wgmma
# Tensor cores have no exact float32 product, so float32 tiles have to fit the registers of more threads.
FLOAT32_TILE_BYTES = 8 * 1024
FLOAT32_WARPS = 8
# On data-centre Blackwell a tile of 64 rows comes out of tensor memory, and takes all registers of four warps.
BLACKWELL_WARPS = 8


def mass_from_lse(attention: PagedAttention, lse: torch.Tensor, *, last: torch.Tensor | None = None) -> None:
    """Compute the sums of `compute.kernels.mass.block_mass` from the LSE of each query, on a device.

    ``mass[r, k, j] += sum(weights[i] * exp(scale * q . k_t - lse[i, h]))`` over the request's queries i, the query
    heads h of KV head k and the tokens t of its j-th block that query i sees; a soft cap bends the scaled product.

    A program has some blocks of a request and a row of the mass. It holds a tile of keys and goes over the queries that
    see the tile, so keys are read once. Each sum has one writer: the same input gives the same bits. One launch, which
    reads nothing on the host and allocates nothing.

    Args:
        attention: its values and sinks are not read. The soft cap is a constant of the compiled kernel.
        lse: float32 [T, H], any strides: logarithm of each row's sum of exponentials over the resident keys that it
            sees, and its sink if it has one. FlashAttention returns the transpose.
        last: int32 [R]: only the last last[r] queries of a request count, which makes windows cheap; None: all.

    Bytes moved: seq_len * Hkv * D * itemsize of keys, once. Queries that count, H * D * itemsize each, and their LSE
    are read again for each tile of keys (at most 128 tokens), from L2. Work is 2 * H * D for each query and key.
    """
    check_attention(attention, attention.key_cache)
    query, key_cache, out, weights = attention.query, attention.key_cache, attention.mass, attention.weights
    ahead = attention.ahead
    require(out is not None, "mass_from_lse needs mass")
    tokens, heads, head_dim = query.shape
    _, kv_heads, block_size, _ = key_cache.shape
    requests, width = attention.block_table.shape
    require(lse.dtype == torch.float32 and lse.shape == (tokens, heads), "lse must be float32 [T, H]")
    if last is not None:
        check_int32(last=last)
    if not requests or not tokens:
        return
    group, out_heads, exact = heads // kv_heads, out.shape[1], query.dtype == torch.float32
    # by the mean chunk, since the longest one is known only on the device
    rows = min(max(triton.next_power_of_2(triton.cdiv(tokens, requests) * group), MIN_ROWS), MAX_ROWS)
    rows = MIN_ROWS if exact else rows
    tile = tile_of(head_dim, block_size, query.dtype, FLOAT32_TILE_BYTES if exact else TILE_BYTES)
    many = rows == MAX_ROWS and capability_of(query.device)[0] == 10
    entry = 1 if attention.per_token else block_size  # tokens
    measured = min(width * block_size // entry, out.shape[2])
    _mass_from_lse[(triton.cdiv(measured * entry, block_size * tile.granules), out_heads, requests)](
        query, key_cache, lse, attention.block_table, attention.query_start_loc, attention.seq_lens, weights, ahead,
        last, out,
        attention.scale * LOG2_E, measured,
        query.stride(0), query.stride(1), *key_cache.stride()[:3], *lse.stride(), attention.block_table.stride(0),
        *out.stride()[:2],
        HEAD_DIM=head_dim, DIM=tile.dim, BLOCK_SIZE=block_size, TOKENS=tile.tokens, PARTS=tile.parts,
        GRANULES=tile.granules, GROUP=group, KV_HEADS_OUT=kv_heads // out_heads, ROWS=rows,
        HAS_WEIGHTS=weights is not None, HAS_AHEAD=ahead is not None, HAS_LAST=last is not None,
        PER_TOKEN=attention.per_token,
        SOFT_CAP=attention.soft_cap * LOG2_E,
        num_warps=FLOAT32_WARPS if exact else BLACKWELL_WARPS if many else 4, num_stages=3,
    )  # fmt: skip


# Not specialised for the tokens and the width of a step (see `decode_mass.ATTEND_SIZES`).
@triton.jit(do_not_specialize=["measured", "stride_lt", "stride_lh", "stride_table", "stride_mr", "stride_mh"])
def _mass_from_lse(
    query, keys, lse, table, starts, lens, weights, ahead, last, out, scale, measured,
    stride_qt, stride_qh, stride_kb, stride_kh, stride_kn, stride_lt, stride_lh, stride_table, stride_mr, stride_mh,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr,
    GRANULES: tl.constexpr, GROUP: tl.constexpr, KV_HEADS_OUT: tl.constexpr, ROWS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, HAS_AHEAD: tl.constexpr, HAS_LAST: tl.constexpr, PER_TOKEN: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Measure some blocks of one request and row of `out`. Exponents have base 2."""
    first_block = tl.program_id(0) * GRANULES
    out_head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    start = tl.load(starts + row).to(tl.int64)
    queries = tl.load(starts + row + 1) - start.to(tl.int32)
    seq_len = tl.load(lens + row)
    looked_at = queries
    if HAS_LAST:
        looked_at = tl.minimum(tl.load(last + row), queries)
    before = seq_len - queries  # the first query's position
    if (looked_at > 0) & (first_block * BLOCK_SIZE < seq_len):
        lane = tl.arange(0, GRANULES * TOKENS)
        dim = tl.arange(0, DIM)
        block = first_block + lane // TOKENS
        sink = out + row * stride_mr + out_head * stride_mh
        mass = tl.zeros([GRANULES], tl.float32)
        for part in range(PARTS):
            place = part * TOKENS + lane % TOKENS
            position = block * BLOCK_SIZE + place
            held = (place < BLOCK_SIZE) & (position < seq_len)
            page = tl.load(table + row * stride_table + block, mask=held, other=0).to(tl.int64)
            # The first query that sees a key of the tile.
            earliest = queries - looked_at
            if not HAS_AHEAD:
                earliest = tl.maximum(first_block * BLOCK_SIZE + part * TOKENS - before, earliest)
            sums = tl.zeros([GRANULES * TOKENS], tl.float32)
            for each in range(KV_HEADS_OUT):
                kv_head = out_head * KV_HEADS_OUT + each
                slot = page * stride_kb + kv_head * stride_kh + place * stride_kn
                if HEAD_DIM <= DIM:
                    there = held[:, None] & (dim < HEAD_DIM)[None, :]
                    k = tl.load(keys + slot[:, None] + dim[None, :], mask=there, other=0.0)
                    k = converted(k, query.dtype.element_ty)
                for at in range(tl.maximum(earliest, 0) * GROUP, queries * GROUP, ROWS):
                    index = at + tl.arange(0, ROWS)
                    number = index // GROUP
                    head = kv_head * GROUP + index % GROUP
                    counts = number < queries
                    weight = counts.to(tl.float32)
                    if HAS_WEIGHTS:
                        weight = tl.load(weights + start + number, mask=counts, other=0.0)
                        counts = counts & (weight != 0.0)
                    token = start + number
                    if HEAD_DIM <= DIM:
                        q = tl.load(
                            query + token[:, None] * stride_qt + head[:, None] * stride_qh + dim[None, :],
                            mask=counts[:, None] & (dim < HEAD_DIM)[None, :],
                            other=0.0,
                        )
                        products = tl.dot(q, tl.trans(k), input_precision="ieee")
                    else:
                        rows = query + token * stride_qt + head * stride_qh
                        products = products_by_parts(rows, counts, keys + slot, held, HEAD_DIM, DIM)
                    log = tl.load(lse + token * stride_lt + head * stride_lh, mask=counts, other=0.0)
                    scores = soft_capped(products * scale, SOFT_CAP)
                    scores -= log[:, None] * 1.4426950408889634  # to base 2
                    latest = before + number
                    if HAS_AHEAD:
                        latest += tl.load(ahead + token, mask=counts, other=0)
                    seen = counts[:, None] & held[None, :] & (position[None, :] <= latest[:, None])
                    sums += tl.sum(tl.where(seen, tl.exp2(scores), 0.0) * weight[:, None], 0)
            if PER_TOKEN:
                mine = held & (position < measured)
                tl.store(sink + position, tl.load(sink + position, mask=mine) + sums, mask=mine)
            else:
                mass += tl.sum(tl.reshape(sums, [GRANULES, TOKENS]), 1)
        if not PER_TOKEN:
            index = first_block + tl.arange(0, GRANULES)
            mine = (index < measured) & (index * BLOCK_SIZE < seq_len)
            tl.store(sink + index, tl.load(sink + index, mask=mine) + mass, mask=mine)


def mass_from_lse_reference(attention: PagedAttention, lse: torch.Tensor, *, last: torch.Tensor | None = None) -> None:
    """`mass_from_lse` in plain torch, in the dtype of the mass."""
    query, out, weights = attention.query, attention.mass, attention.weights
    _, kv_heads, block_size, _ = attention.key_cache.shape
    starts = attention.query_start_loc.tolist()
    lse = lse.to(out.dtype)
    for r, seq_len in enumerate(attention.seq_lens.tolist()):
        begin, end = starts[r], starts[r + 1]
        if last is not None:
            begin = max(begin, end - int(last[r]))
        if begin >= end:
            continue
        blocks = attention.block_table[r, : -(-seq_len // block_size)].long()
        keys = attention.key_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :seq_len].to(out.dtype)
        heads = query[begin:end].to(out.dtype).unflatten(1, (kv_heads, attention.group))
        scores = capped(torch.einsum("qkgd,ktd->kgqt", heads, keys) * attention.scale, attention.soft_cap)
        logs = lse[begin:end].unflatten(1, (kv_heads, attention.group)).permute(1, 2, 0)
        rows = torch.arange(begin, end, device=query.device)
        seen = seq_len - starts[r + 1] + rows + (0 if attention.ahead is None else attention.ahead[rows])
        hidden = torch.arange(seq_len, device=query.device) > seen[:, None]
        mass = (scores - logs[..., None]).exp().masked_fill(hidden, 0)
        if weights is not None:
            mass = mass * weights[begin:end, None]
        mass = mass.sum((1, 2))
        mass = mass if attention.per_token else per_block(mass, block_size)
        out[r, :, : mass.shape[1]] += mass if out.shape[1] > 1 else mass.sum(0)
