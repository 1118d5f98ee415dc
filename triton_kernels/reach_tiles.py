"""Scores of blocks by many queries at once, as `compute.kernels.signs.tile_scores` has them."""

import triton
import triton.language as tl

from .tiles import soft_capped

#: Tokens whose signs of one dimension are one word, and steps each way that queries are rounded to
#: (`compute.kernels.signs.WORD`, `STEPS`).
WORD, STEPS = tl.constexpr(16), tl.constexpr(127)


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
def _rounded(queries, valid, steps, start, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Return queries as whole numbers of steps, half to even: bfloat16 has all of them."""
    dim = start + tl.arange(0, DIM)
    within = valid[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(queries[:, None] + dim[None, :], mask=within, other=0.0).to(tl.float32)
    return (q * steps[:, None] + 12582912.0 - 12582912.0).to(tl.bfloat16)


@triton.jit(do_not_specialize=["base", "queries", "parts", "least", "scale", "stride_t", "stride_w", "pool", "width"])
def tile_logits(
    query, index, numbers, written, logs, slots, chooses, full, counts, base, queries, parts, least, tokens, out_rows,
    scale, stride_t, stride_h, stride_w, pool, width, heads, kv_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WORDS: tl.constexpr, SIGNED: tl.constexpr, TOKENS: tl.constexpr,
    SOFT_CAP: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Write the logit (base 2) of each block's best token, of each query and head of a tile.

    Products of whole steps and signs are whole, and so exact in float32. Arguments are those of `reach._logits`.
    """
    at, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    row, kv_head = base + at, tl.program_id(1)
    asked = tl.load(counts + row)
    nth, head, valid = of_part(part, kv_head, asked, GROUP, ROWS)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0 and tl.load(chooses + row) != 0 and asked >= least and part * ROWS < asked * GROUP:
        queried = query + (tl.load(tokens + row) + nth).to(tl.int64) * stride_t + head * stride_h
        largest = tl.zeros([ROWS], tl.float32)
        for start in range(0, HEAD_DIM, DIM):
            dim = start + tl.arange(0, DIM)
            within = valid[:, None] & (dim < HEAD_DIM)[None, :]
            q = tl.load(queried[:, None] + dim[None, :], mask=within, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(q), 1))
        steps = tl.where(largest > 0, STEPS / largest, 0.0)
        of_step = largest / STEPS * scale
        numbers += slot * width
        written += tl.load(out_rows + row).to(tl.int64) * stride_w
        target = logs + ((at.to(tl.int64) * queries + nth) * heads + head)[:, None] * width
        count, token = tl.load(full + row), tl.arange(0, WORD)
        if HEAD_DIM <= DIM:
            q = _rounded(queried, valid, steps, 0, HEAD_DIM, DIM)
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
                        q = _rounded(queried, valid, steps, start, HEAD_DIM, DIM)
                    at_words = own[:, None] + HEAD_DIM + TOKENS + of_words * HEAD_DIM + dim[None, :]
                    words = tl.load(at_words, mask=within, other=0).to(tl.int32)
                    # A bit becomes the sign of 1 in bfloat16, whose bits are 0x3f80.
                    signs = ((words[None, :, :] << (15 - token)[:, None, None]) & 0x8000) ^ 0xBF80
                    signs = tl.reshape(signs.to(tl.int16), [WORD * BLOCKS, DIM]).to(tl.bfloat16, bitcast=True)
                    products = tl.dot(q, tl.trans(signs), products)
                    if of_words == 0:
                        centre = tl.load(own[:, None] + dim[None, :], mask=within, other=0)
                        centred = tl.dot(q, tl.trans(centre.to(tl.bfloat16, bitcast=True)), centred)
                of_tokens = own[None, :] + HEAD_DIM + of_words * WORD + token[:, None]
                lengths = tl.load(of_tokens, mask=here[None, :], other=0).to(tl.bfloat16, bitcast=True).to(tl.float32)
                reached = tl.reshape(products, [ROWS, WORD, BLOCKS]) * lengths[None, :, :]
                top = tl.maximum(top, tl.max(reached, 1))
            log = soft_capped((centred + top) * of_step[:, None], SOFT_CAP)
            tl.store(target + block[None, :], log, mask=valid[:, None] & here[None, :])
