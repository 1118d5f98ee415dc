"""Attention mass of each block or token beside a stock kernel, from queries, paged keys and the kernel's LSE."""

import torch
import triton
import triton.language as tl

from ..compute.kernels.logits import soft_capped as capped
from ..compute.kernels.mass import _per_block
from .tiles import MIN_ROWS, TILE_BYTES, check_cache, check_int32, check_logits, require, soft_capped, tile_of

MAX_ROWS = 64  # query rows of one tl.dot, the least M of Hopper's wgmma
# Tensor cores have no exact float32 product, so float32 tiles have to fit the registers of more threads.
FLOAT32_TILE_BYTES = 8 * 1024
FLOAT32_WARPS = 8
LOG2_E = 1.4426950408889634


def mass_from_lse(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    lse: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    per_token: bool = False,
    weights: torch.Tensor | None = None,
    last: torch.Tensor | None = None,
    lse_base_2: bool = False,
    rows_per_tile: int | None = None,
    warps: int | None = None,
    stages: int = 3,
    soft_cap: float = 0.0,
) -> None:
    """Compute the sums of `compute.kernels.mass.block_mass` from the LSE of each query, on a device.

    ``out[r, k, j] += sum(weights[i] * exp(scale * q . k_t - lse[i, h]))`` over the request's queries i, the query heads
    h of KV head k and the tokens t of its j-th block that query i sees.

    A program has some blocks of a request and a row of `out`. It holds a tile of keys and goes over the queries that
    see the tile, so keys are read once. Each sum has one writer: the same input gives the same bits. One launch, which
    reads nothing on the host and allocates nothing.

    Args:
        query: [T, H, D] float32, bfloat16 or float16, rotated, last dimension contiguous.
        key_cache: [num_blocks, Hkv, bs, D] of the query's dtype or float8_e4m3fn, any strides but a contiguous D.
        lse: float32 [T, H], any strides: logarithm of each row's sum of exponentials over the resident keys that it
            sees, and its sink if it has one. FlashAttention returns the transpose, FlashInfer base 2.
        block_table, query_start_loc, seq_lens, out, per_token, weights: as for `block_mass`.
        scale: factor on the scores before the softmax, times the scale of quantised keys.
        last: int32 [R]: only the last last[r] queries of a request count, which makes windows cheap; None: all.
        lse_base_2: whether `lse` is a logarithm of base 2.
        rows_per_tile: query rows (queries times G) at once, a power of two from 16; None chooses.
        warps, stages: launch options; None chooses.
        soft_cap: as for `block_mass`; a constant of the compiled kernel.

    Bytes moved: seq_len * Hkv * D * itemsize of keys, once. Queries that count, H * D * itemsize each, and their LSE
    are read again for each tile of keys (at most 128 tokens), from L2. Work is 2 * H * D for each query and key.
    """
    check_cache(query, key_cache)
    check_int32(block_table=block_table, query_start_loc=query_start_loc, seq_lens=seq_lens)
    tokens, heads, head_dim = query.shape
    _, kv_heads, block_size, _ = key_cache.shape
    requests, width = block_table.shape
    require(block_table.stride(1) == 1, "block_table must have dense rows")
    require(len(seq_lens) == requests == len(query_start_loc) - 1, "R must agree")
    require(lse.dtype == torch.float32 and lse.shape == (tokens, heads), "lse must be float32 [T, H]")
    require(out.dtype == torch.float32 and out.dim() == 3 and out.stride(2) == 1, "out must be float32 [R, H, W]")
    require(len(out) == requests and out.shape[1] in (1, kv_heads), "out must be [R, Hkv or 1, Wout]")
    require(weights is None or weights.dtype == torch.float32, "weights must be float32")
    check_logits(query, soft_cap, None)
    if last is not None:
        check_int32(last=last)
    if not requests or not tokens:
        return
    group, out_heads, exact = heads // kv_heads, out.shape[1], query.dtype == torch.float32
    if rows_per_tile is None:  # by the mean chunk, since the longest one is known only on the device
        rows_per_tile = min(max(triton.next_power_of_2(triton.cdiv(tokens, requests) * group), MIN_ROWS), MAX_ROWS)
        rows_per_tile = MIN_ROWS if exact else rows_per_tile
    tile = tile_of(head_dim, block_size, query.dtype, FLOAT32_TILE_BYTES if exact else TILE_BYTES)
    entry = 1 if per_token else block_size  # tokens
    measured = min(width * block_size // entry, out.shape[2])
    _mass_from_lse[(triton.cdiv(measured * entry, block_size * tile.granules), out_heads, requests)](
        query, key_cache, lse, block_table, query_start_loc, seq_lens, weights, last, out,
        scale * LOG2_E, 1.0 if lse_base_2 else LOG2_E, measured,
        query.stride(0), query.stride(1), *key_cache.stride()[:3], *lse.stride(), block_table.stride(0),
        *out.stride()[:2],
        HEAD_DIM=head_dim, DIM=tile.dim, BLOCK_SIZE=block_size, TOKENS=tile.tokens, PARTS=tile.parts,
        GRANULES=tile.granules, GROUP=group, KV_HEADS_OUT=kv_heads // out_heads, ROWS=rows_per_tile,
        HAS_WEIGHTS=weights is not None, HAS_LAST=last is not None, PER_TOKEN=per_token, SOFT_CAP=soft_cap * LOG2_E,
        num_warps=warps or (FLOAT32_WARPS if exact else 4), num_stages=stages,
    )  # fmt: skip


# Not specialised for the tokens and the width of a step (see `decode_mass.ATTEND_SIZES`).
@triton.jit(do_not_specialize=["measured", "stride_lt", "stride_lh", "stride_table", "stride_mr", "stride_mh"])
def _mass_from_lse(
    query, keys, lse, table, starts, lens, weights, last, out, scale, lse_scale, measured,
    stride_qt, stride_qh, stride_kb, stride_kh, stride_kn, stride_lt, stride_lh, stride_table, stride_mr, stride_mh,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr,
    GRANULES: tl.constexpr, GROUP: tl.constexpr, KV_HEADS_OUT: tl.constexpr, ROWS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, HAS_LAST: tl.constexpr, PER_TOKEN: tl.constexpr, SOFT_CAP: tl.constexpr,
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
            earliest = tl.maximum(first_block * BLOCK_SIZE + part * TOKENS - before, queries - looked_at)
            sums = tl.zeros([GRANULES * TOKENS], tl.float32)
            for each in range(KV_HEADS_OUT):
                kv_head = out_head * KV_HEADS_OUT + each
                slot = page * stride_kb + kv_head * stride_kh + place * stride_kn
                there = held[:, None] & (dim < HEAD_DIM)[None, :]
                k = tl.load(keys + slot[:, None] + dim[None, :], mask=there, other=0.0).to(query.dtype.element_ty)
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
                    q = tl.load(
                        query + token[:, None] * stride_qt + head[:, None] * stride_qh + dim[None, :],
                        mask=counts[:, None] & (dim < HEAD_DIM)[None, :],
                        other=0.0,
                    )
                    log = tl.load(lse + token * stride_lt + head * stride_lh, mask=counts, other=0.0) * lse_scale
                    scores = soft_capped(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, SOFT_CAP)
                    scores -= log[:, None]
                    seen = counts[:, None] & held[None, :] & (position[None, :] <= before + number[:, None])
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


def mass_from_lse_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    lse: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    per_token: bool = False,
    weights: torch.Tensor | None = None,
    last: torch.Tensor | None = None,
    lse_base_2: bool = False,
    soft_cap: float = 0.0,
) -> None:
    """`mass_from_lse` in plain torch, in the dtype of `out`."""
    _, kv_heads, block_size, _ = key_cache.shape
    group = query.shape[1] // kv_heads
    starts = query_start_loc.tolist()
    lse = lse.to(out.dtype) / (LOG2_E if lse_base_2 else 1.0)
    for r, seq_len in enumerate(seq_lens.tolist()):
        begin, end = starts[r], starts[r + 1]
        if last is not None:
            begin = max(begin, end - int(last[r]))
        if begin >= end:
            continue
        blocks = -(-seq_len // block_size)
        keys = key_cache[block_table[r, :blocks].long()].transpose(0, 1).flatten(1, 2)[:, :seq_len].to(out.dtype)
        heads = query[begin:end].to(out.dtype).unflatten(1, (kv_heads, group))
        scores = capped(torch.einsum("qkgd,ktd->kgqt", heads, keys) * scale, soft_cap)
        logs = lse[begin:end].unflatten(1, (kv_heads, group)).permute(1, 2, 0)
        rows = torch.arange(begin, end, device=query.device)
        hidden = torch.arange(seq_len, device=query.device) > (seq_len - starts[r + 1] + rows)[:, None]
        mass = (scores - logs[..., None]).exp().masked_fill(hidden, 0)
        if weights is not None:
            mass = mass * weights[begin:end, None]
        mass = mass.sum((1, 2))
        mass = mass if per_token else _per_block(mass, block_size)
        out[r, :, : mass.shape[1]] += mass if out.shape[1] > 1 else mass.sum(0)
