"""One layer's mass of each token into the pages of its request's sums."""

import torch


def put(pages: torch.Tensor, table: torch.Tensor, mass: torch.Tensor, lens: torch.Tensor) -> None:
    """pages[table[r, t // bs], h, t % bs] += mass[r, h, t] for each request's tokens t; `mass` is zeros afterwards.

    Args:
        pages: float32 [P, H, bs]; page 0 is nobody's, and stays as it is.
        table: int32 [R, W], pages of each request's blocks; 0 where it is not measured. No two have the same page.
        mass: float32 [R, H, at least W * bs], 0 where a request is not measured, and past its end.
        lens: int32 [R], tokens.

    On a device it is one launch, which allocates nothing. Bytes moved: 16 * H a token, and 4.
    """
    if mass.device.type != "cpu":
        from ...triton_kernels.put import put as on_device

        on_device(pages, table, mass, lens)
    else:
        put_reference(pages, table, mass, lens)


def put_reference(pages: torch.Tensor, table: torch.Tensor, mass: torch.Tensor, lens: torch.Tensor) -> None:
    """`put` in plain torch. What lies past a request's end, zeros, may go to page 0."""
    block_size = pages.shape[2]
    mass = mass[:, :, : table.shape[1] * block_size]
    in_pages = mass.unflatten(2, (-1, block_size)).transpose(1, 2).flatten(0, 1)
    # Each page has one row of the batch, but for page 0, to which nothing but zeros is added.
    pages.index_add_(0, table.flatten(), in_pages)
    mass.zero_()
