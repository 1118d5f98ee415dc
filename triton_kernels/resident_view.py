"""Block tables without holes, for a whole batch in one launch."""

import torch
import triton
import triton.language as tl

from ..attention.view import resident_view_reference  # noqa: F401  (the reference)
from .tiles import check_int32, require

# Entries that a program takes at once: 64k tokens in blocks of 16 need no second round, 16 registers a thread.
MAX_CHUNK = 4096


def resident_view(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    out_table: torch.Tensor,
    out_lens: torch.Tensor,
    out_logical: torch.Tensor | None = None,
    *,
    chunk: int | None = None,
) -> None:
    """Squeeze the holes out of each row of `block_table`, keeping the order (`attention.view.resident_view`).

    One launch, one program a row. It reads nothing on the host and allocates nothing, so a CUDA graph can capture it.
    Rows may be padding: a length of 0 gives zeros, and no length is below 0.

    Args:
        block_table: int32 [R, W], row stride arbitrary. Of row r the first ceil(seq_lens[r] / block_size) entries
            count; 0, vLLM's null block, is a hole.
        seq_lens: int32 [R], tokens including evicted ones, at most W * block_size.
        block_size: tokens.
        out_table: int32 [R, Wout], gets the resident blocks, then zeros. Blocks beyond Wout are dropped.
        out_lens: int32 [R], gets the resident tokens.
        out_logical: int32 [R, Wlogical] or None, gets the place in `block_table` of each resident block, then -1.
        chunk: entries in a round, a power of two; None chooses.

    The outputs must not overlap the inputs. Bytes moved: 4 for each entry up to a row's length, 4 * (Wout + Wlogical)
    for each row, 8 for its lengths.
    """
    outputs = {"out_table": out_table} if out_logical is None else {"out_table": out_table, "out_logical": out_logical}
    check_int32(block_table=block_table, seq_lens=seq_lens, out_lens=out_lens, **outputs)
    require(block_size > 0, "block_size must be positive")
    for name, tensor in {"block_table": block_table, **outputs}.items():
        require(tensor.dim() == 2 and tensor.stride(1) == 1, f"{name} must be 2-dimensional with dense rows")
        require(len(tensor) == len(seq_lens) == len(out_lens), "tables and lengths must have the same number of rows")
    require(seq_lens.is_contiguous() and out_lens.is_contiguous(), "lengths must be contiguous")
    if not len(seq_lens):
        return
    widest = max(tensor.shape[1] for tensor in (block_table, *outputs.values()))
    chunk = chunk or min(triton.next_power_of_2(widest), MAX_CHUNK)
    logical = out_table if out_logical is None else out_logical
    _resident_view[(len(seq_lens),)](
        block_table, seq_lens, out_table, out_lens, logical,
        block_table.stride(0), out_table.stride(0), logical.stride(0), out_table.shape[1], logical.shape[1],
        BLOCK_SIZE=block_size, HAS_LOGICAL=out_logical is not None, CHUNK=chunk, num_warps=8 if chunk > 1024 else 4,
    )  # fmt: skip


@triton.jit
def _resident_view(
    table, lens, out_table, out_lens, out_logical,
    stride_table, stride_out, stride_logical, out_width, logical_width,
    BLOCK_SIZE: tl.constexpr, HAS_LOGICAL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    table += row * stride_table
    out_table += row * stride_out
    out_logical += row * stride_logical
    seq_len = tl.load(lens + row)
    blocks = tl.cdiv(seq_len, BLOCK_SIZE)
    kept = 0
    for start in range(0, blocks, CHUNK):
        index = start + tl.arange(0, CHUNK)
        block = tl.load(table + index, mask=index < blocks, other=0)
        held = (block != 0).to(tl.int32)
        place = kept + tl.cumsum(held, 0) - held
        tl.store(out_table + place, block, mask=(block != 0) & (place < out_width))
        if HAS_LOGICAL:
            tl.store(out_logical + place, index, mask=(block != 0) & (place < logical_width))
        kept += tl.sum(held, 0)
    tl.store(out_lens + row, tl.maximum(seq_len - BLOCK_SIZE * (blocks - kept), 0))
    for start in range(kept, out_width, CHUNK):
        index = start + tl.arange(0, CHUNK)
        tl.store(out_table + index, tl.zeros([CHUNK], tl.int32), mask=index < out_width)
    if HAS_LOGICAL:
        for start in range(kept, logical_width, CHUNK):
            index = start + tl.arange(0, CHUNK)
            tl.store(out_logical + index, tl.full([CHUNK], -1, tl.int32), mask=index < logical_width)
