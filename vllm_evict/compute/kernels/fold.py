"""Adds a step's mass to the running sums of its requests."""

import torch

from .mass import _C_cpu


def fold(
    sums: torch.Tensor, slots: torch.Tensor, mass: torch.Tensor, logical: torch.Tensor, kept: torch.Tensor | None = None
) -> None:
    """Set sums[slots[r], :, logical[r, w]] to kept[r] * itself + mass[r, :, w].

    Args:
        sums: float32 [S, H, B], by logical block.
        slots: int32 [R], row of `sums` for each row of the batch; -1 if the row is not measured. No slot occurs twice.
        mass: float32 [R, H, W], by resident block; 0 past the end.
        logical: int32 [R, W], logical index of each resident block, -1 past the end. Blocks past the sums are left out.
        kept: float32 [R], or None for ones. Sums of evicted blocks stay; nothing reads them.

    On a device it is one launch that reads nothing on the host. Bytes moved: 4 * W * (1 + 3 * H) for each row.
    """
    if sums.device.type != "cpu":
        from ...triton_kernels.fold import fold as on_device

        on_device(sums, slots, mass, logical, kept)
    elif _C_cpu is None:
        fold_reference(sums, slots, mass, logical, kept)
    else:
        _C_cpu.fold(sums, slots, mass, logical, kept)


def fold_reference(
    sums: torch.Tensor, slots: torch.Tensor, mass: torch.Tensor, logical: torch.Tensor, kept: torch.Tensor | None = None
) -> None:
    """`fold` in plain torch."""
    row, place = ((logical >= 0) & (logical < sums.shape[2]) & (slots >= 0)[:, None]).nonzero(as_tuple=True)
    slot, block = slots[row].long(), logical[row, place].long()
    new = mass[row, :, place]
    if kept is not None:
        new = new + kept[row, None] * sums[slot, :, block]
    else:
        new = new + sums[slot, :, block]
    sums[slot, :, block] = new
