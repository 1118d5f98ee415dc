"""Scores of blocks by signs of keys: by a few queries, and by many at once (`sign_scores`, `tile_scores` in
`compute.kernels.signs`).
"""

import torch
import triton
import triton.language as tl

from .tiles import require, soft_capped

#: Tokens whose signs of one dimension are one word (`compute.kernels.signs.WORD`).
WORD = tl.constexpr(16)
#: Sign bits of two numbers in bfloat16, and -1 twice: 0x8000 and 0xbf80.
SIGN_BITS, MINUS_ONES = tl.constexpr(-0x7FFF8000), tl.constexpr(-0x407F4080)


@triton.jit
def indexed(numbers, written, block, here, pool):
    """Return the places of logical blocks in the index."""
    number = tl.load(numbers + block, mask=here, other=-1)
    physical = tl.load(written + block, mask=here, other=0)
    return tl.where(number >= 0, pool + number, physical).to(tl.int64)


@triton.jit
def of_part(part, kv_head, count, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return the query, the head and whether there is one, for `ROWS` of a row's queries and heads of a KV head."""
    item = part * ROWS + tl.arange(0, ROWS)
    nth = item // GROUP
    return nth, kv_head * GROUP + item % GROUP, nth < count


@triton.jit
def _queried(queries, valid, start, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Return some dimensions of queries: [ROWS, DIM]."""
    dim = start + tl.arange(0, DIM)
    return tl.load(queries[:, None] + dim[None, :], mask=valid[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _signs(own, at, start, here, HEAD_DIM: tl.constexpr, BLOCKS: tl.constexpr, DIM: tl.constexpr):
    """Return 1 and -1 for the signs of 16 tokens of each block in some dimensions: bfloat16 [WORD * BLOCKS, DIM].

    Words lie from `own + at` on, one for each dimension; tokens vary slowest. Two dimensions are made at once: a bit
    becomes the sign of 1, whose bits are 0x3f80.
    """
    token, pair = tl.arange(0, WORD), start // 2 + tl.arange(0, DIM // 2)
    pairs = (own + at).to(tl.pointer_type(tl.int32))[:, None] + pair[None, :]
    words = tl.load(pairs, mask=here[:, None] & (pair < HEAD_DIM // 2)[None, :], other=0)
    both = ((words[None, :, :] << (15 - token)[:, None, None]) & SIGN_BITS) ^ MINUS_ONES
    signs = tl.join(both.to(tl.int16), (both >> 16).to(tl.int16))
    return tl.reshape(signs, [WORD * BLOCKS, DIM]).to(tl.bfloat16, bitcast=True)


@triton.jit
def _lengths(own, of_words, here, HEAD_DIM: tl.constexpr):
    """Return what the signs of 16 tokens of each block are multiplied by: float32 [WORD, BLOCKS]."""
    of_tokens = own[None, :] + HEAD_DIM + of_words * WORD + tl.arange(0, WORD)[:, None]
    return tl.load(of_tokens, mask=here[None, :], other=0).to(tl.bfloat16, bitcast=True).to(tl.float32)


@triton.jit
def _centre(own, start, here, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Return some dimensions of the centre of each block: bfloat16 [BLOCKS, DIM]."""
    dim = start + tl.arange(0, DIM)
    within = here[:, None] & (dim < HEAD_DIM)[None, :]
    return tl.load(own[:, None] + dim[None, :], mask=within, other=0).to(tl.bfloat16, bitcast=True)


@triton.jit(do_not_specialize=["base", "queries", "parts", "least", "scale", "stride_t", "stride_w", "pool", "width"])
def sign_logits(
    query, index, numbers, written, logs, slots, chooses, full, counts, base, queries, parts, least, tokens, out_rows,
    scale, stride_t, stride_h, stride_w, pool, width, heads, kv_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WORDS: tl.constexpr, TOKENS: tl.constexpr, SOFT_CAP: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Write the logarithm (base 2) of what a block may draw, of each query and head.

    If `TILES`, of rows with `least` queries or more, for which a block's best token stands. Else of the others.
    """
    at, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    row, kv_head = base + at, tl.program_id(1)
    asked, slot = tl.load(counts + row), tl.load(slots + row).to(tl.int64)
    nth, head, valid = of_part(part, kv_head, asked, GROUP, ROWS)
    its = (asked >= least) == TILES and part * ROWS < asked * GROUP
    if slot >= 0 and tl.load(chooses + row) != 0 and its:
        queried = query + (tl.load(tokens + row) + nth).to(tl.int64) * stride_t + head * stride_h
        numbers += slot * width
        written += tl.load(out_rows + row).to(tl.int64) * stride_w
        target = logs + ((at.to(tl.int64) * queries + nth) * heads + head)[:, None] * width
        count = tl.load(full + row)
        if HEAD_DIM <= DIM:
            q = _queried(queried, valid, 0, HEAD_DIM, DIM)
        for first in range(tl.program_id(2) * BLOCKS, count, tl.num_programs(2) * BLOCKS):
            block = first + tl.arange(0, BLOCKS)
            here = block < count
            own = index + (indexed(numbers, written, block, here, pool) * kv_heads + kv_head) * WORDS
            centred = tl.zeros([ROWS, BLOCKS], tl.float32)
            top, total = tl.full([ROWS, BLOCKS], float("-inf"), tl.float32), tl.zeros([ROWS, BLOCKS], tl.float32)
            for start in range(0, HEAD_DIM, DIM):
                if HEAD_DIM > DIM:
                    q = _queried(queried, valid, start, HEAD_DIM, DIM)
                centre = _centre(own, start, here, HEAD_DIM, DIM).to(q.dtype)
                centred = tl.dot(q, tl.trans(centre), centred, input_precision="ieee")
            for of_words in range(0, TOKENS // WORD):
                products = tl.zeros([ROWS, WORD * BLOCKS], tl.float32)
                for start in range(0, HEAD_DIM, DIM):
                    if HEAD_DIM > DIM:
                        q = _queried(queried, valid, start, HEAD_DIM, DIM)
                    signs = _signs(own, HEAD_DIM + TOKENS + of_words * HEAD_DIM, start, here, HEAD_DIM, BLOCKS, DIM)
                    products = tl.dot(q, tl.trans(signs.to(q.dtype)), products, input_precision="ieee")
                lengths = _lengths(own, of_words, here, HEAD_DIM)
                reached = tl.reshape(products, [ROWS, WORD, BLOCKS]) * lengths[None, :, :]
                logits = soft_capped((centred[:, None, :] + reached) * scale, SOFT_CAP)
                higher = tl.maximum(top, tl.max(logits, 1))
                if not TILES:
                    total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(logits - higher[:, None, :]), 1)
                top = higher
            log = top if TILES else top + tl.log2(total)
            tl.store(target + block[None, :], log, mask=valid[:, None] & here[None, :])


def store_signs(index: torch.Tensor, blocks: torch.Tensor, keys: torch.Tensor) -> None:
    """`compute.kernels.signs.store_signs` on a device, in one launch."""
    count, kv_heads, tokens, dims = keys.shape
    require(keys.stride(3) == 1 and index.is_contiguous(), "keys must have a dense last dimension, and index be dense")
    if count:
        _store_signs[(count, kv_heads)](
            index, blocks, keys, *keys.stride()[:3], kv_heads,
            HEAD_DIM=dims, WORDS=index.shape[2], TOKENS=tokens, DIM=triton.next_power_of_2(dims), num_warps=4,
        )  # fmt: skip


@triton.jit
def _store_signs(
    index, blocks, keys, stride_b, stride_h, stride_t, kv_heads,
    HEAD_DIM: tl.constexpr, WORDS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Write the signs of one block's keys of a KV head."""
    at, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim, token = tl.arange(0, DIM), tl.arange(0, WORD)
    inside = dim < HEAD_DIM
    own = index + (tl.load(blocks + at) * kv_heads + kv_head) * WORDS
    lines = keys + at * stride_b + kv_head * stride_h + token[:, None] * stride_t + dim[None, :]
    total = tl.zeros([DIM], tl.float32)
    for first in range(0, TOKENS, WORD):
        total += tl.sum(tl.load(lines + first * stride_t, mask=inside[None, :], other=0.0).to(tl.float32), 0)
    bits = bits_of_bfloat16(total / TOKENS)
    tl.store(own + dim, bits.to(tl.int16), mask=inside)
    centre = (bits << 16).to(tl.float32, bitcast=True)
    for first in range(0, TOKENS, WORD):
        wide = tl.load(lines + first * stride_t, mask=inside[None, :], other=0.0).to(tl.float32)
        rest = tl.where(inside[None, :], wide - centre[None, :], 0.0)
        scales = bits_of_bfloat16(tl.sum(tl.abs(rest), 1) / HEAD_DIM)
        tl.store(own + HEAD_DIM + first + token, scales.to(tl.int16))
        words = tl.sum((rest >= 0).to(tl.int32) << token[:, None], 0)
        tl.store(own + HEAD_DIM + TOKENS + first // WORD * HEAD_DIM + dim, words.to(tl.int16), mask=inside)


@triton.jit
def bits_of_bfloat16(numbers):
    """Round float32 to bfloat16, half to even, and return its bits: int32. Triton's interpreter would cut them off."""
    bits = numbers.to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
