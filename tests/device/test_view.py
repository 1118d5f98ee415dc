"""`resident_view`: the C++ function and the reference against plain Python."""

import pytest
import torch

from vllm_evict.compute.kernels import view
from vllm_evict.compute.kernels.view import View, resident_view, resident_view_reference

needs_extension = pytest.mark.skipif(view._C_cpu is None, reason="vllm_evict._C_cpu is not built")
functions = pytest.mark.parametrize(
    "function",
    [pytest.param(resident_view, marks=needs_extension), resident_view_reference],
    ids=["extension", "reference"],
)


def ints(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def outputs(rows, width):
    """Garbage, as buffers kept between steps hold; rows of the table are not dense."""
    table = torch.full((rows, width + 3), 77, dtype=torch.int32)[:, :width]
    return View(table, torch.full((rows,), 77, dtype=torch.int32), torch.full_like(table, 77))


@functions
def test_a_known_case(function):
    table = ints([[5, 0, 7, 0, 9], [3, 4, 0, 0, 0], [0, 0, 0, 0, 0], [0, 6, 8, 99, 0]])
    lens = ints([70, 32, 0, 41])
    out_table, out_lens, logical = view = outputs(4, 4)
    function([table], lens, 16, [view])
    assert out_table.tolist() == [[5, 7, 9, 0], [3, 4, 0, 0], [0, 0, 0, 0], [6, 8, 0, 0]]
    assert out_lens.tolist() == [38, 32, 0, 25]
    assert logical.tolist() == [[0, 2, 4, -1], [0, 1, -1, -1], [-1] * 4, [1, 2, -1, -1]]


def expected_view(row, seq_len, block_size):
    blocks = row[: -(-seq_len // block_size)]
    resident = [(block, j) for j, block in enumerate(blocks) if block]
    return resident, seq_len - block_size * (len(blocks) - len(resident))


@functions
@pytest.mark.parametrize("seed", range(30))
def test_random_tables(function, seed):
    random = torch.Generator().manual_seed(seed)
    rows, width = (int(n) for n in torch.randint(1, 40, (2,), generator=random))
    if seed == 0:
        rows, width = 70, 600  # large enough for several threads
    block_size = 16 << seed % 4
    lens = torch.randint(0, width * block_size + 1, (rows,), generator=random).int()
    table = torch.randint(1, 10**9, (rows, width + 2), generator=random).int()[:, :width]
    table[torch.rand(rows, width, generator=random) < seed % 10 / 9] = 0
    for row, seq_len in zip(table, lens.tolist(), strict=True):
        if seq_len:
            row[-(-seq_len // block_size) - 1] = 1 + seq_len
    before = table.clone()

    out_table, out_lens, logical = view = outputs(rows, width)
    only_table, only_lens, _ = outputs(rows, width)
    alone = torch.zeros(0, 0)  # of a group that has no view
    function([table, alone, table], lens, block_size, [view, None, View(only_table, only_lens)])

    assert torch.equal(table, before)
    assert torch.equal(only_table, out_table) and torch.equal(only_lens, out_lens)
    for r in range(rows):
        resident, length = expected_view(table[r].tolist(), int(lens[r]), block_size)
        padding = width - len(resident)
        assert out_table[r].tolist() == [block for block, _ in resident] + [0] * padding
        assert logical[r].tolist() == [j for _, j in resident] + [-1] * padding
        assert out_lens[r] == length


@needs_extension
@pytest.mark.parametrize(
    "change,error,match",
    [
        ({"table": torch.ones(2, 4)}, TypeError, "block_table must be int32"),
        ({"lens": ints([[1], [1]])}, ValueError, "seq_lens must be 1-dimensional"),
        ({"lens": ints([1, 1, 1])}, ValueError, "same number of rows"),
        ({"lens": ints([1, 65])}, ValueError, "what block_table's width holds"),
        ({"lens": ints([1, -1])}, ValueError, "what block_table's width holds"),
        ({"block_size": 0}, ValueError, "block_size must be positive"),
        ({"width": 3}, ValueError, "as wide as the longest row"),
    ],
)
def test_invalid_arguments(change, error, match):
    arguments = {"table": ints([[1, 2, 3, 4]] * 2), "lens": ints([64, 1]), "block_size": 16}
    arguments |= {"width": 4} | change
    view = outputs(2, arguments["width"])
    with pytest.raises(error, match=match):
        resident_view([arguments["table"]], arguments["lens"], arguments["block_size"], [view])


def test_reference_refuses_an_evicted_last_block():
    with pytest.raises(AssertionError, match="last block"):
        resident_view_reference([ints([[1, 0]])], ints([20]), 16, [outputs(1, 2)])
