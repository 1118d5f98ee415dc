"""`compute.kernels.moved` in one launch."""

import torch
import triton
import triton.language as tl

from ..compute.kernels.moved import moved_reference  # noqa: F401  (the reference)
from ..compute.kernels.reach import ReachRows
from .reach_signs import bits_of_bfloat16
from .tiles import DTYPES, require

#: Elements of queries that a program has at once, at least one head's.
TAKEN = 4096


def moved(rows: ReachRows, query: torch.Tensor, asked: torch.Tensor, least: float) -> torch.Tensor:
    """`compute.kernels.moved.moved` on a device, with a program for each row."""
    slots, heads, dims = asked.shape
    require(query.dtype in DTYPES and query.stride(2) == 1, "query must be [T, H, D] with a contiguous last dimension")
    require(
        asked.dtype == torch.bfloat16 and asked.stride(2) == 1, "asked must be bfloat16, dense in its last dimension"
    )
    require(query.shape[1:] == asked.shape[1:], "query and asked must agree in heads and dimensions")
    chooses, dim = torch.empty_like(rows.chooses), triton.next_power_of_2(dims)
    _moved[(len(chooses),)](
        query, asked, rows.queries, rows.slots, rows.chooses, chooses, least, slots, *query.stride()[:2],
        *asked.stride()[:2], HEADS=heads, HEAD_DIM=dims, DIM=dim, AT_ONCE=max(TAKEN // dim, 1), num_warps=4,
    )  # fmt: skip
    return chooses


@triton.jit(do_not_specialize=["least", "slots", "stride_t"])
def _moved(
    query, asked, tokens, of_rows, have_to, chooses, least, slots, stride_t, stride_h, stride_s, stride_k,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot, must = tl.load(of_rows + row).to(tl.int64), tl.load(have_to + row)
    if (slot >= 0) & (slot < slots):
        dim, nth = tl.arange(0, DIM), tl.arange(0, AT_ONCE)
        queried = query + tl.load(tokens + row).to(tl.int64) * stride_t + dim[None, :]
        known, alike = asked + slot * stride_s + dim[None, :], tl.zeros([AT_ONCE], tl.float32)
        for first in range(0, HEADS, AT_ONCE):
            head = first + nth
            inside = (head < HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
            now = tl.load(queried + head[:, None] * stride_h, mask=inside, other=0.0).to(tl.float32)
            then = tl.load(known + head[:, None] * stride_k, mask=inside, other=0.0).to(tl.float32)
            sizes = tl.sqrt(tl.sum(now * now, 1)) * tl.sqrt(tl.sum(then * then, 1))
            alike += tl.sum(now * then, 1) / tl.where(sizes > 1e-8, sizes, 1e-8)
        must = tl.where(tl.sum(alike, 0) / HEADS >= least, must, 1)
        for first in range(0, HEADS, AT_ONCE):
            head = first + nth
            inside = (head < HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
            now = tl.load(queried + head[:, None] * stride_h, mask=inside, other=0.0).to(tl.float32)
            target = (known + head[:, None] * stride_k).to(tl.pointer_type(tl.int16))
            tl.store(target, bits_of_bfloat16(now).to(tl.int16), mask=inside & (must != 0))
    tl.store(chooses + row, must)
