"""Adds one layer's mass to the mass of the layers before it."""

import torch


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
    """Set `mass` to mass + layer, or to the maximum of both, then zero `layer`.

    A tested row adds counts instead: 1 for each block that draws more than 1 / len for each of its tokens, else 0. NaN
    stays NaN in sums, maxima and counts.

    Args:
        mass: float32 [R, H or 1, W], by resident block; with 1 row heads are summed.
        layer: float32 [R, H, W], 0 past the end of a row.
        lens: int32 [R], resident tokens.
        block_size: tokens.
        maximise: whether the maximum is taken instead of the sum.
        tested: int32 [R], not 0 for tested rows, whose `layer` has one query; None: no row is tested.
        share: factor on the mass of tested rows.

    On a device it is one launch that allocates nothing. Bytes moved for each resident block: 8 * H, and 8 for each row
    of `mass`.
    """
    if mass.device.type != "cpu":
        from ...triton_kernels.take import take as on_device

        on_device(mass, layer, lens, block_size, maximise=maximise, tested=tested, share=share)
    else:
        take_reference(mass, layer, lens, block_size, maximise=maximise, tested=tested, share=share)


def take_reference(
    mass: torch.Tensor,
    layer: torch.Tensor,
    lens: torch.Tensor,
    block_size: int,
    *,
    maximise: bool = False,
    tested: torch.Tensor | None = None,
    share: float = 1.0,
) -> None:
    """`take` in plain torch."""
    new = layer
    if tested is not None:
        places = torch.arange(layer.shape[2], device=layer.device)
        tokens = (lens[:, None] - places * block_size).clamp(0, block_size)
        counts = layer * share * lens[:, None, None] > tokens[:, None]
        new = torch.where(tested[:, None, None] != 0, counts.float() + 0 * layer, layer)
    if mass.shape[1] == 1 < layer.shape[1]:
        new = new.sum(1, keepdim=True)
    torch.maximum(mass, new, out=mass) if maximise else mass.add_(new)
    layer.zero_()
