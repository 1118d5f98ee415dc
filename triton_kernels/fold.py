"""`compute.kernels.fold` for a whole batch in one launch."""

import torch
import triton
import triton.language as tl

from ..compute.kernels.fold import fold_reference  # noqa: F401  (the reference)
from .tiles import check_int32, require

CHUNK = 256  # blocks that a program takes


def fold(
    sums: torch.Tensor,
    slots: torch.Tensor,
    mass: torch.Tensor,
    logical: torch.Tensor,
    kept: torch.Tensor | None = None,
) -> None:
    """`compute.kernels.fold.fold` on a device. Last dimensions are contiguous, and indices from B on are skipped.

    One launch, with a program for each row and `CHUNK` of its blocks. Each number has one writer, since rows have
    different slots and a row's logical indices differ. It reads nothing on the host and allocates nothing.
    """
    check_int32(slots=slots, logical=logical)
    rows, heads, width = mass.shape
    for name, tensor in (("sums", sums), ("mass", mass), ("kept", kept)):
        require(tensor is None or tensor.dtype == torch.float32, f"{name} must be float32")
        require(tensor is None or tensor.stride(-1) == 1, f"{name} must be dense in its last dimension")
    require(logical.shape == (rows, width) and logical.stride(1) == 1, "logical must be [R, W] with dense rows")
    require(len(slots) == rows and (kept is None or len(kept) == rows), "R must agree")
    require(sums.dim() == 3 and sums.shape[1] == heads, "sums must be [S, H, B] with the heads of mass")
    if not rows or not width:
        return
    _fold[(rows, triton.cdiv(width, CHUNK))](
        sums, slots, mass, logical, sums if kept is None else kept,
        *sums.stride()[:2], *mass.stride()[:2], logical.stride(0), width, sums.shape[2], heads,
        HAS_KEPT=kept is not None, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip


# Not specialised for the width of a step (see `decode_mass.ATTEND_SIZES`).
@triton.jit(do_not_specialize=["stride_row", "stride_mass_head", "stride_logical", "width"])
def _fold(
    sums, slots, mass, logical, kept,
    stride_slot, stride_sums_head, stride_row, stride_mass_head, stride_logical, width, blocks, heads,
    HAS_KEPT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    place = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    if slot >= 0:
        block = tl.load(logical + row * stride_logical + place, mask=place < width, other=-1)
        here = (block >= 0) & (block < blocks)
        factor = 1.0
        if HAS_KEPT:
            factor = tl.load(kept + row)
        for head in range(heads):
            new = tl.load(mass + row * stride_row + head * stride_mass_head + place, mask=here, other=0.0)
            target = sums + slot * stride_slot + head * stride_sums_head + block
            tl.store(target, factor * tl.load(target, mask=here, other=0.0) + new, mask=here)
