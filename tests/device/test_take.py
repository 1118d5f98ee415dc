"""One layer's mass into that of the layers before it: the CPU's path and the Triton kernel against loops."""

import importlib.util

import pytest
import torch

from vllm_evict.compute.kernels import take as on_cpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 16


def triton_take(*args, **options):
    from vllm_evict.triton_kernels.take import take

    take(*args, **options)


without_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
BY = pytest.mark.parametrize(
    "take", [on_cpu.take, pytest.param(triton_take, marks=without_triton)], ids=["cpu", "triton"]
)
#: KV heads, resident tokens of each request.
SHAPES = [(1, [5]), (2, [40, 16, 1, 33]), (3, [BLOCK * 300 - 7, 0, BLOCK * 256])]


def batch(heads, out_heads, lens):
    """Slices of larger tensors; what lies beyond a request's blocks is zero in `layer`, anything in `mass`."""
    random = torch.Generator().manual_seed(len(lens))
    width = -(-max(lens) // BLOCK)
    mass = torch.rand(len(lens), out_heads, width + 3, generator=random)[:, :, :width]
    layer = torch.rand(len(lens), heads + 1, width + 2, generator=random)[:, :heads, :width]
    for row, length in enumerate(lens):
        layer[row, :, -(-length // BLOCK) :] = 0
        # Half of the blocks draw about what is even.
        layer[row] *= 2 * 4 * BLOCK / max(length, 1)
    return mass.to(DEVICE), layer.to(DEVICE), torch.tensor(lens, dtype=torch.int32, device=DEVICE)


def expected(mass, layer, lens, maximise, tested, share):
    want = mass.clone()
    for row, length in enumerate(lens.tolist()):
        for block in range(-(-length // BLOCK)):
            new = layer[row, :, block]
            if tested is not None and tested[row]:
                tokens = min(length - block * BLOCK, BLOCK)
                new = torch.tensor([float(share * drawn * length > tokens) for drawn in new.tolist()], device=DEVICE)
            new = new.sum()[None] if mass.shape[1] == 1 else new
            held = mass[row, :, block]
            want[row, :, block] = torch.maximum(held, new) if maximise else held + new
    return want


@BY
@pytest.mark.parametrize("tests", [False, True])
@pytest.mark.parametrize("maximise, by_head", [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_maxima_and_counts(take, shape, maximise, by_head, tests):
    heads, lens = shape
    mass, layer, lens = batch(heads, heads if by_head else 1, lens)
    tested = torch.arange(len(lens), dtype=torch.int32, device=DEVICE).add(1).remainder(2) if tests else None
    want = expected(mass, layer, lens, maximise, tested, 0.25)
    assert not tests or 0 < (want - mass != 0).sum() < want.numel() or want.numel() < 3
    take(mass, layer, lens, BLOCK, maximise=maximise, tested=tested, share=0.25)
    torch.testing.assert_close(mass, want, rtol=1e-6, atol=1e-6)
    assert not layer.any(), "the next layer starts from zeros"


@BY
def test_what_is_just_even_does_not_count(take):
    """A quarter of each query's attention on each of four blocks."""
    mass, lens = torch.zeros(1, 1, 4, device=DEVICE), torch.tensor([64], dtype=torch.int32, device=DEVICE)
    layer = torch.tensor([[[1.0, 1.0, 1.001, 0.999]]], device=DEVICE)
    take(mass, layer, lens, BLOCK, tested=torch.ones_like(lens), share=0.25)
    assert mass.tolist() == [[[0, 0, 1, 0]]]


@BY
@pytest.mark.parametrize("maximise", [False, True])
@pytest.mark.parametrize("tests", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
def test_nan_stays(take, maximise, tests, heads):
    """Whichever of the layers it comes with."""
    mass, lens = torch.zeros(1, heads, 3, device=DEVICE), torch.tensor([48], dtype=torch.int32, device=DEVICE)
    for at in (1, 2, None):
        layer = torch.ones(1, 2, 3, device=DEVICE)
        if at is not None:
            layer[0, 1, at] = torch.nan
        take(mass, layer, lens, BLOCK, maximise=maximise, tested=torch.ones_like(lens) if tests else None)
    assert mass[0, -1].isnan().tolist() == [False, True, True] and not layer.any()
    assert heads == 1 or mass[0, 0].isfinite().all()


@without_triton
def test_what_does_not_fit_is_refused():
    mass, layer, lens = batch(2, 2, [40, 16])
    for wrong in ((mass[:, :, :2], layer), (mass[:1], layer), (mass.double(), layer), (mass.repeat(1, 2, 1), layer)):
        with pytest.raises(ValueError):
            triton_take(*wrong, lens, BLOCK)
    with pytest.raises(TypeError):
        triton_take(mass, layer, lens.long(), BLOCK)
