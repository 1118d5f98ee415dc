"""LSE of query rows over paged keys, for stock kernels that do not return it; `mass_from_lse` needs it."""

import torch
import triton
import triton.language as tl

from ..compute.kernels.logits import soft_capped as capped
from ..compute.kernels.paged import PagedAttention
from .mass_from_lse import FLOAT32_TILE_BYTES, FLOAT32_WARPS, MAX_ROWS
from .tiles import (
    LN_2,
    LOG2_E,
    MIN_ROWS,
    TILE_BYTES,
    check_attention,
    converted,
    products_by_parts,
    require,
    soft_capped,
    tile_of,
    with_sinks,
)


def query_lse(attention: PagedAttention, lse: torch.Tensor, *, longest: int | None = None) -> None:
    """Write the natural logarithm of sum(exp(scale * q . k_t)) over the resident keys that each query row sees.

    Logits may have a soft cap, and a row's sum its sink's exponential.

    A program holds some query rows of one request and KV head and goes over the keys, or over a part of them. One
    launch, which reads nothing on the host and allocates nothing.

    Args:
        attention: its values and mass are not read. Rows of queries of weight 0 are not written. A program with such
            rows alone reads no keys. The soft cap is a constant of the compiled kernel.
        lse: float32 [T, H], any strides. Or [S, T, H], which gets the logarithms of S parts of each program's keys,
            -inf where a row sees none of the part: their logsumexp is the LSE. Parts are for few rows over many keys.
        longest: an upper bound of the queries of a request; None takes T.

    Raises:
        ValueError: a shape or stride is wrong, or there are sinks and several parts.
        TypeError: a dtype is unsupported.

    Bytes moved: seq_len * Hkv * D * itemsize of keys for each 64 rows (queries times G), from L2 after the first 64.
    Work is 2 * H * D for each query and key that it sees.
    """
    check_attention(attention, attention.key_cache)
    query, key_cache, weights, sinks = attention.query, attention.key_cache, attention.weights, attention.sinks
    ahead = attention.ahead
    tokens, heads, head_dim = query.shape
    _, kv_heads, block_size, _ = key_cache.shape
    requests = len(attention.block_table)
    parts = lse if lse.dim() == 3 else lse[None]
    splits = len(parts)
    fits = lse.dtype == torch.float32 and parts.shape == (splits, tokens, heads)
    require(fits, "lse must be float32 [T, H] or [S, T, H]")
    require(splits == 1 or sinks is None, "lse must be of all keys where there are sinks")
    if not requests or not tokens:
        return
    group, exact = heads // kv_heads, query.dtype == torch.float32
    longest = (tokens if longest is None else min(longest, tokens)) * group
    rows = MIN_ROWS if exact else min(max(triton.next_power_of_2(longest), MIN_ROWS), MAX_ROWS)
    tile = tile_of(head_dim, block_size, query.dtype, FLOAT32_TILE_BYTES if exact else TILE_BYTES)
    _query_lse[(triton.cdiv(longest, rows) * splits, kv_heads, requests)](
        query, key_cache, attention.block_table, attention.query_start_loc, attention.seq_lens, weights, ahead,
        sinks, parts,
        attention.scale * LOG2_E, splits, query.stride(0), query.stride(1), *key_cache.stride()[:3], *parts.stride(),
        attention.block_table.stride(0),
        HEAD_DIM=head_dim, DIM=tile.dim, BLOCK_SIZE=block_size, TOKENS=tile.tokens, PARTS=tile.parts,
        GRANULES=tile.granules, GROUP=group, ROWS=rows, HAS_WEIGHTS=weights is not None,
        HAS_AHEAD=ahead is not None, HAS_SINKS=sinks is not None, SOFT_CAP=attention.soft_cap * LOG2_E,
        num_warps=FLOAT32_WARPS if exact else 4, num_stages=3,
    )  # fmt: skip


# Not specialised for the tokens and the width of a step (see `decode_mass.ATTEND_SIZES`).
@triton.jit(do_not_specialize=["splits", "stride_ls", "stride_table"])
def _query_lse(
    query, keys, table, starts, lens, weights, ahead, sinks, lse, scale, splits,
    stride_qt, stride_qh, stride_kb, stride_kh, stride_kn, stride_ls, stride_lt, stride_lh, stride_table,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr,
    GRANULES: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    HAS_AHEAD: tl.constexpr, HAS_SINKS: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Compute the LSE of some query rows of one request and KV head, over a part of the keys. Exponents have base 2."""
    index = tl.program_id(0) // splits * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(0) % splits
    kv_head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    start = tl.load(starts + row).to(tl.int64)
    queries = tl.load(starts + row + 1) - start.to(tl.int32)
    seq_len = tl.load(lens + row)
    number = index // GROUP
    counts = number < queries
    token = start + number
    if HAS_WEIGHTS:
        counts = counts & (tl.load(weights + token, mask=counts, other=0.0) != 0.0)
    if tl.max(counts.to(tl.int32), 0) > 0:
        head = kv_head * GROUP + index % GROUP
        dim = tl.arange(0, DIM)
        of_rows = query + token * stride_qt + head * stride_qh
        if HEAD_DIM <= DIM:
            within = counts[:, None] & (dim < HEAD_DIM)[None, :]
            q = tl.load(of_rows[:, None] + dim[None, :], mask=within, other=0.0)
        position = seq_len - queries + number
        if HAS_AHEAD:
            position += tl.load(ahead + token, mask=counts, other=0)
        # The keys that the last row of the program sees.
        end = tl.minimum(tl.max(tl.where(counts, position, 0), 0) + 1, seq_len)
        blocks = tl.cdiv(end, BLOCK_SIZE)
        granules = (blocks - 1) * PARTS + tl.cdiv(end - (blocks - 1) * BLOCK_SIZE, TOKENS)
        lane = tl.arange(0, GRANULES * TOKENS)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        tiles = tl.cdiv(granules, GRANULES)
        share = tl.cdiv(tiles, splits)
        for tile in range(split * share, tl.minimum((split + 1) * share, tiles)):
            at = tile * GRANULES + lane // TOKENS
            block = at // PARTS
            place = at % PARTS * TOKENS + lane % TOKENS
            key_position = block * BLOCK_SIZE + place
            held = (place < BLOCK_SIZE) & (key_position < end)
            page = tl.load(table + row * stride_table + block, mask=held, other=0).to(tl.int64)
            slot = page * stride_kb + kv_head * stride_kh + place * stride_kn
            # Masked loads, since slots beyond the last token may hold NaN.
            if HEAD_DIM <= DIM:
                there = held[:, None] & (dim < HEAD_DIM)[None, :]
                k = tl.load(keys + slot[:, None] + dim[None, :], mask=there, other=0.0)
                products = tl.dot(q, tl.trans(converted(k, q.dtype)), input_precision="ieee")
            else:
                products = products_by_parts(of_rows, counts, keys + slot, held, HEAD_DIM, DIM)
            scores = soft_capped(products * scale, SOFT_CAP)
            seen = held[None, :] & (key_position[None, :] <= position[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            # Rows, padding included, see the first key, but may see none of a later part.
            higher = tl.maximum(top, tl.max(scores, 1))
            base = tl.where(higher > float("-inf"), higher, 0.0)
            total = total * tl.exp2(top - base) + tl.sum(tl.exp2(scores - base[:, None]), 1)
            top = higher
        log = top + tl.log2(total)
        if HAS_SINKS:
            log = with_sinks(log, sinks, head, counts)
        tl.store(lse + split * stride_ls + token * stride_lt + head * stride_lh, log * LN_2, mask=counts)


def query_lse_reference(attention: PagedAttention, lse: torch.Tensor) -> None:
    """`query_lse` in plain torch, in the dtype of `lse`."""
    query, weights, sinks = attention.query, attention.weights, attention.sinks
    _, kv_heads, block_size, _ = attention.key_cache.shape
    starts = attention.query_start_loc.tolist()
    for r, seq_len in enumerate(attention.seq_lens.tolist()):
        begin, end = starts[r], starts[r + 1]
        if begin == end:
            continue
        blocks = attention.block_table[r, : -(-seq_len // block_size)].long()
        keys = attention.key_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :seq_len].to(lse.dtype)
        heads = query[begin:end].to(lse.dtype).unflatten(1, (kv_heads, attention.group))
        scores = capped(torch.einsum("qkgd,ktd->qkgt", heads, keys) * attention.scale, attention.soft_cap)
        rows = torch.arange(begin, end, device=query.device)
        seen = seq_len - end + rows + (0 if attention.ahead is None else attention.ahead[begin:end])
        hidden = torch.arange(seq_len, device=query.device) > seen[:, None]
        logs = scores.masked_fill(hidden[:, None, None], -torch.inf).logsumexp(-1).flatten(1)
        if sinks is not None:
            logs = torch.logaddexp(logs, sinks.to(logs.dtype))
        written = rows if weights is None else rows[weights[begin:end] != 0]
        lse[written] = logs[written - begin]
