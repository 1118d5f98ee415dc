"""Adds one layer's mass by token to the pages of running sums."""

import torch


def put(pages: torch.Tensor, table: torch.Tensor, mass: torch.Tensor, lens: torch.Tensor) -> None:
    """Add mass[r, h, t] to pages[table[r, t // bs], h, t % bs] for each token t of request r, then zero `mass`.

    Args:
        pages: float32 [P, H, bs]. Page 0 is the null page: never allocated, always zero.
        table: int32 [R, W], pages of each request's blocks; 0 for requests that are not measured. No other page occurs
            twice.
        mass: float32 [R, H, at least W * bs], 0 past a request's end and for requests that are not measured.
        lens: int32 [R], tokens.

    On a device it is one launch that allocates nothing. Bytes moved: 16 * H + 4 for each token.
    """
    if mass.device.type != "cpu":
        from ...triton_kernels.put import put as on_device

        on_device(pages, table, mass, lens)
    else:
        put_reference(pages, table, mass, lens)


def put_reference(pages: torch.Tensor, table: torch.Tensor, mass: torch.Tensor, lens: torch.Tensor) -> None:
    """`put` in plain torch."""
    block_size = pages.shape[2]
    mass = mass[:, :, : table.shape[1] * block_size]
    in_pages = mass.unflatten(2, (-1, block_size)).transpose(1, 2).flatten(0, 1)
    # Each page has one writer; page 0 gets only zeros, from entries past a request's end.
    pages.index_add_(0, table.flatten(), in_pages)
    mass.zero_()
