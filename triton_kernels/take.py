"""`compute.kernels.take` for a whole batch in one launch."""

import torch
import triton
import triton.language as tl

from ..compute.kernels.take import take_reference  # noqa: F401  (the reference)
from .tiles import check_int32, require

CHUNK = 256  # blocks that a program takes


def take(
    mass: torch.Tensor,
    layer: torch.Tensor,
    lens: torch.Tensor,
    block_size: int,
    *,
    maximise: bool = False,
    tested: torch.Tensor | None = None,
    share: float = 1.0,
) -> None:
    """`compute.kernels.take.take` on a device. Last dimensions are contiguous. Entries past a row's end are not read.

    One launch, with a program for each row and `CHUNK` of its blocks, in all heads. Each number has one writer. Nothing
    is read on the host or allocated, so a CUDA graph can capture it.
    """
    check_int32(lens=lens) if tested is None else check_int32(lens=lens, tested=tested)
    for name, tensor in (("mass", mass), ("layer", layer)):
        require(tensor.dtype == torch.float32 and tensor.dim() == 3, f"{name} must be float32 [R, H, W]")
        require(tensor.stride(2) == 1, f"{name} must be dense in its last dimension")
    rows, heads, width = layer.shape
    require(len(mass) == len(lens) == rows and mass.shape[2] == width, "R and W must agree")
    require(mass.shape[1] in (1, heads) and (tested is None or len(tested) == rows), "mass must be [R, H or 1, W]")
    if not rows or not width or not heads:
        return
    _take[(rows, triton.cdiv(width, CHUNK))](
        mass, layer, lens, lens if tested is None else tested, share,
        *mass.stride()[:2], *layer.stride()[:2], width, heads,
        BLOCK_SIZE=block_size, ONE_HEAD=mass.shape[1] == 1, MAXIMISE=maximise, HAS_TESTED=tested is not None,
        CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip


@triton.jit
def _into(target, new, here, MAXIMISE: tl.constexpr):
    held = tl.load(target, mask=here, other=0.0)
    larger = tl.maximum(held, new, propagate_nan=tl.PropagateNan.ALL)
    tl.store(target, larger if MAXIMISE else held + new, mask=here)


# Not compiled anew for the width of a step, or for layers that differ in heads (see `decode_mass.ATTEND_SIZES`).
@triton.jit(do_not_specialize=["share", "stride_mr", "stride_mh", "stride_lr", "stride_lh", "width", "heads"])
def _take(
    mass, layer, lens, tested, share, stride_mr, stride_mh, stride_lr, stride_lh, width, heads,
    BLOCK_SIZE: tl.constexpr, ONE_HEAD: tl.constexpr, MAXIMISE: tl.constexpr, HAS_TESTED: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    seq_len = tl.load(lens + row)
    first = tl.program_id(1) * CHUNK
    if first * BLOCK_SIZE < seq_len:
        block = first + tl.arange(0, CHUNK)
        here = (block < width) & (block * BLOCK_SIZE < seq_len)
        tokens = tl.minimum(seq_len - block * BLOCK_SIZE, BLOCK_SIZE).to(tl.float32)
        total = tl.zeros([CHUNK], tl.float32)
        for head in range(heads):
            source = layer + row * stride_lr + head * stride_lh + block
            new = tl.load(source, mask=here, other=0.0)
            tl.store(source, tl.zeros([CHUNK], tl.float32), mask=here)
            if HAS_TESTED:
                counts = (new * share * seq_len.to(tl.float32) > tokens).to(tl.float32)
                new = tl.where(tl.load(tested + row) != 0, counts + 0 * new, new)  # NaN stays
            if ONE_HEAD:
                total += new
            else:
                _into(mass + row * stride_mr + head * stride_mh + block, new, here, MAXIMISE)
        if ONE_HEAD:
            _into(mass + row * stride_mr + block, total, here, MAXIMISE)
