"""One layer's mass of each token into pages: the CPU's path and the Triton kernel against loops."""

import importlib.util

import pytest
import torch

from vllm_evict.compute.kernels import put as on_cpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def triton_put(*args):
    from vllm_evict.triton_kernels.put import put

    put(*args)


without_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
BY = pytest.mark.parametrize("put", [on_cpu.put, pytest.param(triton_put, marks=without_triton)], ids=["cpu", "triton"])
#: KV heads, block size, tokens of each request; negative: it is not measured.
SHAPES = [(1, 16, [5]), (2, 16, [40, -17, 1, 32]), (3, 24, [700, 0, 513, -600])]


def batch(heads, block_size, lens):
    """Pages in any order, of a slice of heads; a table and mass that are wider than the batch needs."""
    random = torch.Generator().manual_seed(len(lens))
    blocks = [-(-length // block_size) for length in lens]
    width = max(max(blocks), 1) + 1
    count = sum(each for each in blocks if each > 0)
    pages = torch.rand(count + 3, heads + 1, block_size, generator=random)[:, :heads]
    pages[0] = 0
    free = (torch.randperm(count + 2, generator=random) + 1).tolist()
    table = torch.zeros(len(lens), width + 2, dtype=torch.int32)[:, :width]
    mass = torch.zeros(len(lens), heads + 1, (width + 1) * block_size)[:, :heads]
    for row, (length, held) in enumerate(zip(lens, blocks)):
        if length > 0:
            table[row, :held] = torch.tensor([free.pop() for _ in range(held)])
            mass[row, :, :length] = torch.rand(heads, length, generator=random)
    lens = torch.tensor(lens, dtype=torch.int32).abs()
    return [each.to(DEVICE) for each in (pages, table, mass, lens)]


@BY
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_token_s_mass_goes_to_its_page(put, shape):
    pages, table, mass, lens = batch(*shape)
    block_size, want = shape[1], pages.clone()
    for row, length in enumerate(shape[2]):
        for token in range(length):
            want[table[row, token // block_size], :, token % block_size] += mass[row, :, token]
    put(pages, table, mass, lens)
    torch.testing.assert_close(pages, want, rtol=0, atol=0)
    assert not mass.any(), "the next layer starts from zeros"
    assert not pages[0].any(), "nobody's"


@without_triton
def test_what_does_not_fit_is_refused():
    pages, table, mass, lens = batch(2, 16, [40, 16])
    for wrong in ((pages, table, mass[:1]), (pages.double(), table, mass), (pages, table, mass[:, :, :16])):
        with pytest.raises(ValueError):
            triton_put(*wrong, lens)
    with pytest.raises(TypeError):
        triton_put(pages, table.long(), mass, lens)
