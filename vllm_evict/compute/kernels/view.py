"""Views: block tables without holes, for attention kernels."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .mass import _C_cpu


class View(NamedTuple):
    """Output of `resident_view` for one KV group.

    Attributes:
        table: int32 [R, W], the resident blocks of each row, then zeros.
        lens: int32 [R], resident tokens.
        logical: int32 [R, W], the index in the block table of each resident block, then -1; None: not written.
    """

    table: torch.Tensor
    lens: torch.Tensor
    logical: torch.Tensor | None = None

    def of_rows(self, rows: int) -> "View":
        """Return the first rows of the memory."""
        return View(self.table[:rows], self.lens[:rows], None if self.logical is None else self.logical[:rows])

    def of_width(self, width: int) -> "View":
        """Return the first columns of the memory."""
        return View(self.table[:, :width], self.lens, None if self.logical is None else self.logical[:, :width])


def resident_view(
    block_tables: Sequence[torch.Tensor], seq_lens: torch.Tensor, block_size: int, views: Sequence[View | None]
) -> None:
    """Write the views of some KV groups: each row of a block table without its holes, in order.

    Args:
        block_tables: for each group int32 [R, W], row stride arbitrary. The first ceil(seq_lens[r] / block_size)
            entries of row r are physical blocks, or 0 (vLLM's null block) for a hole. The last of them is no hole.
            Later entries are ignored.
        seq_lens: int32 [R], tokens with evicted ones; the same in all groups.
        block_size: tokens.
        views: for each group its view, at least as wide as the longest resident row; None: the group is skipped.

    Raises:
        ValueError: a shape, length or width is wrong.
        TypeError: a dtype is not int32.

    Views must not overlap the inputs. Bytes moved for each group: 4 for each entry up to a row's length, 8 * R * the
    view's width. On a device it is one launch for all groups, which does not check contents.
    """
    if seq_lens.device.type != "cpu":
        from ...triton_kernels.resident_view import resident_view as on_device

        on_device(block_tables, seq_lens, block_size, views)
    elif _C_cpu is None:
        resident_view_reference(block_tables, seq_lens, block_size, views)
    else:
        for block_table, view in zip(block_tables, views, strict=True):
            if view is not None:
                _C_cpu.resident_view(block_table, seq_lens, block_size, *view)


def resident_view_reference(
    block_tables: Sequence[torch.Tensor], seq_lens: torch.Tensor, block_size: int, views: Sequence[View | None]
) -> None:
    """`resident_view` in plain torch. Arguments are not checked."""
    for block_table, view in zip(block_tables, views, strict=True):
        if view is not None:
            _squeeze(block_table, seq_lens, block_size, *view)


def _squeeze(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    out_table: torch.Tensor,
    out_lens: torch.Tensor,
    out_logical: torch.Tensor | None,
) -> None:
    out_table.zero_()
    if out_logical is not None:
        out_logical.fill_(-1)
    for r, seq_len in enumerate(seq_lens.tolist()):
        row = block_table[r, : -(-seq_len // block_size)]
        assert seq_len == 0 or row[-1] != 0, "the last block of a request is never evicted"
        logical = row.nonzero().flatten()
        kept = len(logical)
        out_table[r, :kept] = row[logical]
        out_lens[r] = seq_len - block_size * (len(row) - kept)
        if out_logical is not None:
            out_logical[r, :kept] = logical
