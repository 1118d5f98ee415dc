"""`compute.kernels.put` for a whole batch in one launch."""

import torch
import triton
import triton.language as tl

from ..compute.kernels.put import put_reference  # noqa: F401  (the reference)
from .tiles import check_int32, require

CHUNK = 512  # tokens that a program takes


def put(pages: torch.Tensor, table: torch.Tensor, mass: torch.Tensor, lens: torch.Tensor) -> None:
    """`compute.kernels.put.put` on a device. Last dimensions are contiguous. Mass past a request's end is not read.

    One launch, with a program for each row and `CHUNK` of its tokens, in all heads. Each number has one writer, since
    requests share no page. It reads nothing on the host and allocates nothing, so a CUDA graph can capture it.
    """
    check_int32(table=table, lens=lens)
    for name, tensor in (("pages", pages), ("mass", mass)):
        require(tensor.dtype == torch.float32 and tensor.dim() == 3, f"{name} must be float32, of three dimensions")
        require(tensor.stride(2) == 1, f"{name} must be dense in its last dimension")
    rows, heads, tokens = mass.shape
    require(pages.shape[1] == heads and len(table) == len(lens) == rows, "H and R must agree")
    require(table.stride(1) == 1 and tokens >= table.shape[1] * pages.shape[2], "mass must be [R, H, W * bs]")
    if not rows or not heads or not tokens:
        return
    _put[(rows, triton.cdiv(table.shape[1] * pages.shape[2], CHUNK))](
        pages, table, mass, lens, *pages.stride()[:2], table.stride(0), *mass.stride()[:2], heads,
        BLOCK_SIZE=pages.shape[2], CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip


# Not specialised for the width of a step, or for layers that differ in heads (see `decode_mass.ATTEND_SIZES`).
@triton.jit(do_not_specialize=["stride_table", "stride_mr", "stride_mh", "heads"])
def _put(
    pages, table, mass, lens, stride_p, stride_ph, stride_table, stride_mr, stride_mh, heads,
    BLOCK_SIZE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    seq_len = tl.load(lens + row)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    if tl.program_id(1) * CHUNK < seq_len:
        here = token < seq_len
        page = tl.load(table + row * stride_table + token // BLOCK_SIZE, mask=here, other=0).to(tl.int64)
        measured = here & (page > 0)
        for head in range(heads):
            source = mass + row * stride_mr + head * stride_mh + token
            new = tl.load(source, mask=measured, other=0.0)
            tl.store(source, tl.zeros([CHUNK], tl.float32), mask=measured)
            target = pages + page * stride_p + head * stride_ph + token % BLOCK_SIZE
            tl.store(target, tl.load(target, mask=measured, other=0.0) + new, mask=measured)
