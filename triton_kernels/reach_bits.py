"""Logarithms of blocks by keys at two bits a number (`compute.kernels.bits`), and the packing of keys on a device."""

import torch
import triton
import triton.language as tl

from .reach_signs import indexed, of_part
from .tiles import require, soft_capped

#: Tokens that share middles and steps, tokens whose codes of some channels are one line, and channels of a line
#: (`compute.kernels.codes`). The largest middle and the largest step, in multiples of their units.
SHARING, LINE, CHANNELS = tl.constexpr(32), tl.constexpr(16), tl.constexpr(16)
MIDDLES, STEPS = tl.constexpr(127.0), tl.constexpr(255.0)
#: Adding and taking away 1.5 * 2 ** 23 rounds a float32 that is much smaller, half to even.
ROUNDS = tl.constexpr(12582912.0)


@triton.jit
def _shifts():
    """Return by how many bits the codes of a line's channels are shifted within a token's word: int32 [CHANNELS]."""
    channel = tl.arange(0, CHANNELS)
    return channel % 4 * 8 + channel // 4 * 2


@triton.jit
def _codes(own, start, here, HEAD_DIM: tl.constexpr, BLOCKS: tl.constexpr, DIM: tl.constexpr):
    """Return the codes of 16 tokens of each block in some channels, less 1.5: float32 [BLOCKS, LINE, DIM].

    `own`: of each block, its line of the first channel.
    """
    token, line = tl.arange(0, LINE), tl.arange(0, DIM // CHANNELS) + start // CHANNELS
    words = (own.to(tl.pointer_type(tl.int32)))[:, None, None] + (line * LINE)[None, None, :] + token[None, :, None]
    within = here[:, None, None] & (line < HEAD_DIM // CHANNELS)[None, None, :]
    codes = (tl.load(words, mask=within, other=0)[:, :, :, None] >> _shifts()[None, None, None, :]) & 3
    return tl.reshape(codes, [BLOCKS, LINE, DIM]).to(tl.float32) - 1.5


@triton.jit
def _bytes(own, start, here, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Return some of `HEAD_DIM` bytes of each block, of the pointer's type: [BLOCKS, DIM]."""
    dim = start + tl.arange(0, DIM)
    return tl.load(own[:, None] + dim[None, :], mask=here[:, None] & (dim < HEAD_DIM)[None, :], other=0)


@triton.jit
def _queried(queries, valid, start, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Return some dimensions of queries: [ROWS, DIM]."""
    dim = start + tl.arange(0, DIM)
    return tl.load(queries[:, None] + dim[None, :], mask=valid[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)


@triton.jit(do_not_specialize=["base", "queries", "parts", "least", "scale", "stride_t", "stride_w", "pool", "width"])
def bit_logits(
    query, index, numbers, written, logs, slots, chooses, full, counts, base, queries, parts, least, tokens, out_rows,
    scale, stride_t, stride_h, stride_w, pool, width, heads, kv_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WORDS: tl.constexpr, TOKENS: tl.constexpr,
    SOFT_CAP: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Do the work of `reach_signs.sign_logits` for keys at two bits a number. No row is a tile.

    A group's middles count once for all of its tokens. Its steps times codes are multiples of a half, and rounded to
    the dtype of queries; their unit is multiplied in float32.
    """
    at, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    row, kv_head = base + at, tl.program_id(1)
    asked, slot = tl.load(counts + row), tl.load(slots + row).to(tl.int64)
    nth, head, valid = of_part(part, kv_head, asked, GROUP, ROWS)
    if slot >= 0 and tl.load(chooses + row) != 0 and asked < least and part * ROWS < asked * GROUP:
        queried = query + (tl.load(tokens + row) + nth).to(tl.int64) * stride_t + head * stride_h
        numbers += slot * width
        written += tl.load(out_rows + row).to(tl.int64) * stride_w
        target = logs + ((at.to(tl.int64) * queries + nth) * heads + head)[:, None] * width
        count = tl.load(full + row)
        for first in range(tl.program_id(2) * BLOCKS, count, tl.num_programs(2) * BLOCKS):
            block = first + tl.arange(0, BLOCKS)
            here = block < count
            own = index + (indexed(numbers, written, block, here, pool) * kv_heads + kv_head) * WORDS
            top, total = tl.full([ROWS, BLOCKS], float("-inf"), tl.float32), tl.zeros([ROWS, BLOCKS], tl.float32)
            for line in range(0, TOKENS // LINE):
                group = own + line // 2 * (SHARING * HEAD_DIM // 4 + 2 * HEAD_DIM + 8)
                numbers_at = tl.minimum(TOKENS - line // 2 * SHARING, SHARING) * HEAD_DIM // 4
                middles, lines = group + numbers_at, group + line % 2 * LINE * HEAD_DIM // 4
                units = (middles + 2 * HEAD_DIM).to(tl.pointer_type(tl.float32))
                centred = tl.zeros([ROWS, BLOCKS], tl.float32)
                products = tl.zeros([ROWS, BLOCKS * LINE], tl.float32)
                for start in range(0, HEAD_DIM, DIM):
                    q = _queried(queried, valid, start, HEAD_DIM, DIM)
                    middle = _bytes(middles.to(tl.pointer_type(tl.int8)), start, here, HEAD_DIM, DIM)
                    centred = tl.dot(q, tl.trans(middle.to(tl.float32).to(q.dtype)), centred, input_precision="ieee")
                    step = _bytes(middles + HEAD_DIM, start, here, HEAD_DIM, DIM).to(tl.float32)
                    rest = _codes(lines, start, here, HEAD_DIM, BLOCKS, DIM) * step[:, None, :]
                    rest = tl.reshape(rest.to(q.dtype), [BLOCKS * LINE, DIM])
                    products = tl.dot(q, tl.trans(rest), products, input_precision="ieee")
                centred *= tl.load(units, mask=here, other=0.0)[None, :]
                reached = tl.reshape(products, [ROWS, BLOCKS, LINE])
                reached *= tl.load(units + 1, mask=here, other=0.0)[None, :, None]
                logits = soft_capped((centred[:, :, None] + reached) * scale, SOFT_CAP)
                higher = tl.maximum(top, tl.max(logits, 2))
                total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(logits - higher[:, :, None]), 2)
                top = higher
            log = top + tl.log2(total)
            tl.store(target + block[None, :], log, mask=valid[:, None] & here[None, :])


def store_codes(index: torch.Tensor, blocks: torch.Tensor, keys: torch.Tensor) -> None:
    """`compute.kernels.codes.store_codes` on a device, in one launch."""
    count, kv_heads, tokens, dims = keys.shape
    require(keys.stride(3) == 1 and index.is_contiguous(), "keys must have a dense last dimension, and index be dense")
    if count:
        _store_codes[(count, kv_heads, triton.cdiv(tokens, SHARING.value))](
            index, blocks, keys, *keys.stride()[:3], kv_heads,
            HEAD_DIM=dims, WORDS=index.shape[2], TOKENS=tokens, DIM=triton.next_power_of_2(dims),
            num_warps=4 if dims <= 256 else 16,
        )  # fmt: skip


@triton.jit
def _store_codes(
    index, blocks, keys, stride_b, stride_h, stride_t, kv_heads,
    HEAD_DIM: tl.constexpr, WORDS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Write one group of a block's keys of a KV head."""
    at, kv_head, group = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    dim, token = tl.arange(0, DIM), group * SHARING + tl.arange(0, SHARING)
    inside, there = dim < HEAD_DIM, token < TOKENS
    own = index + (tl.load(blocks + at) * kv_heads + kv_head) * WORDS
    own += group * (SHARING * HEAD_DIM // 4 + 2 * HEAD_DIM + 8)
    lines = keys + at * stride_b + kv_head * stride_h + token[:, None] * stride_t + dim[None, :]
    wide = tl.load(lines, mask=there[:, None] & inside[None, :], other=0.0).to(tl.float32)
    least = tl.min(tl.where(there[:, None], wide, float("inf")), 0)
    most = tl.max(tl.where(there[:, None], wide, float("-inf")), 0)
    middle, step = least * 0.5 + most * 0.5, tl.div_rn(most - least, 3.0)
    of_middles = tl.div_rn(tl.max(tl.where(inside, tl.abs(middle), 0.0), 0), MIDDLES)
    of_steps = tl.div_rn(tl.max(tl.where(inside, step, 0.0), 0), STEPS)
    odd = tl.sum((((wide - wide) != 0.0) & there[:, None] & inside[None, :]).to(tl.int32))
    finite = (odd == 0) & (of_steps < float("inf"))
    middles = tl.where(finite & (of_middles > 0), _rounded(tl.div_rn(middle, tl.maximum(of_middles, 1e-45))), 0.0)
    steps = tl.where(finite & (of_steps > 0), tl.ceil(tl.div_rn(step, tl.maximum(of_steps, 1e-45))), 0.0)
    steps = tl.minimum(steps, STEPS)
    size = steps * of_steps
    rest = tl.div_rn(wide - (middles * of_middles)[None, :], tl.where(size > 0, size, 1.0)[None, :]) + 1.5
    codes = tl.minimum(tl.maximum(_rounded(tl.where((size > 0)[None, :] & finite, rest, 0.0)), 0.0), 3.0).to(tl.int32)
    codes = tl.reshape(tl.where(inside[None, :], codes, 0), [SHARING, DIM // CHANNELS, CHANNELS])
    words, line = tl.sum(codes << _shifts()[None, None, :], 2), tl.arange(0, DIM // CHANNELS)
    nth = tl.arange(0, SHARING)
    places = nth // LINE * (HEAD_DIM // CHANNELS * LINE) + nth % LINE
    target = own.to(tl.pointer_type(tl.int32)) + places[:, None] + (line * LINE)[None, :]
    tl.store(target, words, mask=there[:, None] & (line < HEAD_DIM // CHANNELS)[None, :])
    own += tl.minimum(TOKENS - group * SHARING, SHARING) * HEAD_DIM // 4
    tl.store(own.to(tl.pointer_type(tl.int8)) + dim, middles.to(tl.int8), mask=inside)
    tl.store(own + HEAD_DIM + dim, steps.to(tl.int32).to(tl.uint8), mask=inside)
    units = (own + 2 * HEAD_DIM).to(tl.pointer_type(tl.float32))
    tl.store(units, tl.where(finite, of_middles, float("nan")))
    tl.store(units + 1, tl.where(finite, of_steps, float("nan")))


@triton.jit
def _rounded(numbers):
    """Round to whole numbers, half to even."""
    return (numbers + ROUNDS) - ROUNDS
