"""`compute.kernels.view` for a whole batch and all KV groups in one launch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..compute.kernels.view import View, resident_view_reference  # noqa: F401  (the reference)
from .tiles import check_int32, require

# Most entries that a program reads at once: 64k tokens in blocks of 16, 16 registers a thread.
MAX_CHUNK = 4096


def resident_view(
    block_tables: Sequence[torch.Tensor],
    seq_lens: torch.Tensor,
    block_size: int,
    views: Sequence[View | None],
    *,
    chunk: int | None = None,
) -> None:
    """`compute.kernels.view.resident_view` on a device, for all groups in one launch.

    There is one program for each row and KV group; programs of a skipped group end at once. Nothing is read on the host
    or allocated, so a CUDA graph can capture the launch. A row of padding has length 0 and gives zeros. The kernel is
    compiled once for each number of groups, for any width and any skipped groups.

    Args:
        block_tables, seq_lens, block_size: as for `compute.kernels.view.resident_view`.
        views: for each group its view, or None to skip the group. All views have one width, and all or none have
            logical indices. Blocks beyond the width are dropped.
        chunk: entries that a program reads at once, a power of two; None chooses.
    """
    require(block_size > 0, "block_size must be positive")
    require(len(block_tables) == len(views), "views must be one for each block table")
    made = [view for view in views if view is not None]
    if not made or not len(seq_lens):
        return
    rows, width, has_logical = len(seq_lens), made[0].table.shape[1], made[0].logical is not None
    check_int32(seq_lens=seq_lens)
    for table in block_tables:
        check_int32(block_table=table)
        require(table.dim() == 2 and table.stride(1) == 1, "block tables must be 2-dimensional with dense rows")
        require(len(table) == rows, "block tables and seq_lens must have the same number of rows")
    for view in made:
        require((view.logical is not None) == has_logical, "all views must have logical indices, or none")
        logical = view.logical if has_logical else view.table
        check_int32(out_table=view.table, out_lens=view.lens, out_logical=logical)
        require(view.table.shape == logical.shape == (rows, width), "views must be [R, W], of one width")
        strides = view.table.stride()
        require(logical.stride() == strides == (strides[0], 1), "rows of a view must lie alike, and be dense")
        require(seq_lens.is_contiguous() and view.lens.is_contiguous(), "lengths must be contiguous")
        require(len(view.lens) == rows, "views must have a length for each row")
    chunk = chunk or min(triton.next_power_of_2(max(table.shape[1] for table in block_tables)), MAX_CHUNK)
    # A skipped group gets another group's view as a placeholder, which its programs do not write.
    tables, lens, logical = zip(*((view or made[0]) for view in views))
    _resident_view[(len(seq_lens), len(views))](
        tuple(block_tables), seq_lens, tables, lens, logical if has_logical else tables,
        tuple(table.stride(0) for table in block_tables), tuple(table.stride(0) for table in tables),
        sum(1 << group for group, view in enumerate(views) if view is not None), width,
        BLOCK_SIZE=block_size, HAS_LOGICAL=has_logical, CHUNK=chunk, num_warps=8 if chunk > 1024 else 4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["wanted", "width"])
def _resident_view(
    tables, lens, out_tables, out_lens, out_logicals, strides, out_strides, wanted, width,
    BLOCK_SIZE: tl.constexpr, HAS_LOGICAL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    if (wanted >> group) & 1 == 0:
        return
    table, out_table, out_len, out_logical = tables[0], out_tables[0], out_lens[0], out_logicals[0]
    stride, out_stride = strides[0], out_strides[0]
    for other in tl.static_range(1, len(tables)):
        table = tl.where(group == other, tables[other], table)
        out_table = tl.where(group == other, out_tables[other], out_table)
        out_len = tl.where(group == other, out_lens[other], out_len)
        out_logical = tl.where(group == other, out_logicals[other], out_logical)
        stride = tl.where(group == other, strides[other], stride)
        out_stride = tl.where(group == other, out_strides[other], out_stride)
    row = tl.program_id(0).to(tl.int64)
    table += row * stride
    out_table += row * out_stride
    out_logical += row * out_stride
    seq_len = tl.load(lens + row)
    blocks = tl.cdiv(seq_len, BLOCK_SIZE)
    kept = 0
    for start in range(0, blocks, CHUNK):
        index = start + tl.arange(0, CHUNK)
        block = tl.load(table + index, mask=index < blocks, other=0)
        held = (block != 0).to(tl.int32)
        place = kept + tl.cumsum(held, 0) - held
        here = (block != 0) & (place < width)
        tl.store(out_table + place, block, mask=here)
        if HAS_LOGICAL:
            tl.store(out_logical + place, index, mask=here)
        kept += tl.sum(held, 0)
    tl.store(out_len + row, tl.maximum(seq_len - BLOCK_SIZE * (blocks - kept), 0))
    for start in range(kept, width, CHUNK):
        index = start + tl.arange(0, CHUNK)
        tl.store(out_table + index, tl.zeros([CHUNK], tl.int32), mask=index < width)
        if HAS_LOGICAL:
            tl.store(out_logical + index, tl.full([CHUNK], -1, tl.int32), mask=index < width)
