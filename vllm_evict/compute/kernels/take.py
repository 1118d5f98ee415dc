"""One layer's mass into what the layers before it drew."""

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
    """mass = mass + layer, or the larger of both; `layer` is zeros afterwards.

    Of rows that are tested counts go in, in the place of mass: 1 where a block draws more than 1 / len for each of its
    tokens, 0 elsewhere. NaN stays NaN, as a sum, a maximum and a count.

    Args:
        mass: float32 [R, H or 1, W], of resident blocks; 1: heads are summed up.
        layer: float32 [R, H, W], 0 past the end of a row.
        lens: int32 [R], resident tokens.
        block_size: tokens.
        maximise: whether the larger one stays.
        tested: int32 [R], not 0 where a row is tested; None: none is. Its `layer` is of one query.
        share: factor on the mass of rows that are tested.

    On a device it is one launch, which allocates nothing. Bytes moved: 8 * H for each resident block, and as much for
    each row of `mass`.
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
