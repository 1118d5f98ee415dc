"""Scores of blocks by many queries at once, as `compute.kernels.signs.tile_scores` has them."""

import triton
import triton.language as tl

from .tiles import soft_capped

#: Tokens whose signs of one dimension are one word (`compute.kernels.signs.WORD`).
WORD = tl.constexpr(16)


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
def signs_of(words, token, dtype: tl.constexpr):
    """Return 1 or -1 for each token's bit of some words: the bit becomes the sign of a float32."""
    bits = ((words.to(tl.int32) << (15 - token)) & 0x8000) ^ 0xBF80
    return (bits << 16).to(tl.float32, bitcast=True).to(dtype)


@triton.jit
def _part(queries, valid, start, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Return some dimensions of queries."""
    dim = start + tl.arange(0, DIM)
    return tl.load(queries[:, None] + dim[None, :], mask=valid[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)


@triton.jit(do_not_specialize=["base", "queries", "parts", "least", "scale", "stride_t", "stride_w", "pool", "width"])
def tile_logits(
    query, index, numbers, written, logs, slots, chooses, full, counts, base, queries, parts, least, tokens, out_rows,
    scale, stride_t, stride_h, stride_w, pool, width, heads, kv_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WORDS: tl.constexpr, SIGNED: tl.constexpr, TOKENS: tl.constexpr,
    SOFT_CAP: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Write the logit (base 2) of each block's best token, of each query and head of a tile.

    Arguments are those of `reach._logits`.
    """
    at, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    row, kv_head = base + at, tl.program_id(1)
    asked = tl.load(counts + row)
    nth, head, valid = of_part(part, kv_head, asked, GROUP, ROWS)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0 and tl.load(chooses + row) != 0 and asked >= least and part * ROWS < asked * GROUP:
        queried = query + (tl.load(tokens + row) + nth).to(tl.int64) * stride_t + head * stride_h
        numbers += slot * width
        written += tl.load(out_rows + row).to(tl.int64) * stride_w
        target = logs + ((at.to(tl.int64) * queries + nth) * heads + head)[:, None] * width
        count, token = tl.load(full + row), tl.arange(0, WORD)
        if HEAD_DIM <= DIM:
            q = _part(queried, valid, 0, HEAD_DIM, DIM)
        for first in range(tl.program_id(2) * BLOCKS, count, tl.num_programs(2) * BLOCKS):
            block = first + tl.arange(0, BLOCKS)
            here = block < count
            own = index + (indexed(numbers, written, block, here, pool) * kv_heads + kv_head) * WORDS
            centred, top = tl.zeros([ROWS, BLOCKS], tl.float32), tl.full([ROWS, BLOCKS], float("-inf"), tl.float32)
            for of_words in range(0, TOKENS // WORD):
                products = tl.zeros([ROWS, WORD * BLOCKS], tl.float32)
                for start in range(0, HEAD_DIM, DIM):
                    dim = start + tl.arange(0, DIM)
                    within = here[:, None] & (dim < HEAD_DIM)[None, :]
                    if HEAD_DIM > DIM:
                        q = _part(queried, valid, start, HEAD_DIM, DIM)
                    at_words = own[:, None] + HEAD_DIM + TOKENS + of_words * HEAD_DIM + dim[None, :]
                    words = tl.load(at_words, mask=within, other=0)
                    signs = signs_of(words[None, :, :], token[:, None, None], q.dtype)
                    signs = tl.trans(tl.reshape(signs, [WORD * BLOCKS, DIM]))
                    products = tl.dot(q, signs, products, input_precision="ieee")
                    if of_words == 0:
                        centre = tl.load(own[:, None] + dim[None, :], mask=within, other=0)
                        centre = tl.trans(centre.to(tl.bfloat16, bitcast=True).to(q.dtype))
                        centred = tl.dot(q, centre, centred, input_precision="ieee")
                of_tokens = own[None, :] + HEAD_DIM + of_words * WORD + token[:, None]
                lengths = tl.load(of_tokens, mask=here[None, :], other=0).to(tl.bfloat16, bitcast=True).to(tl.float32)
                reached = tl.reshape(products, [ROWS, WORD, BLOCKS]) * lengths[None, :, :]
                top = tl.maximum(top, tl.max(reached, 1))
            log = soft_capped((centred + top) * scale, SOFT_CAP)
            tl.store(target + block[None, :], log, mask=valid[:, None] & here[None, :])
