"""A step's mass into running sums: the CPU's path and the Triton kernel against the reference."""

import importlib.util

import pytest
import torch

from vllm_evict.compute.kernels import fold as on_cpu
from vllm_evict.compute.kernels.mass import _C_cpu

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def triton_fold(*args):
    from vllm_evict.triton_kernels.fold import fold

    fold(*args)


without_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
#: Requests, heads, resident blocks, logical blocks.
SHAPES = [(1, 1, 1, 1), (3, 1, 7, 20), (5, 4, 300, 600), (2, 3, 256, 256)]
BY = pytest.mark.parametrize(
    "fold", [on_cpu.fold, pytest.param(triton_fold, marks=without_triton)], ids=["cpu", "triton"]
)


def batch(rows, heads, width, blocks):
    """Sums of more requests than there are rows, some of which are not measured; the last dimension of some is wider."""
    random = torch.Generator().manual_seed(rows)
    sums = torch.rand(rows + 2, heads, blocks + 3, generator=random)[:, :, :blocks]
    slots = torch.randperm(rows + 2, generator=random)[:rows].int()
    slots[1::3] = -1
    logical = torch.full((rows, width + 5), 77777, dtype=torch.int32)[:, :width]
    mass = torch.rand(rows, heads, width + 2, generator=random)[:, :, :width]
    for row in range(rows):
        held = width if row == 0 else width // 2
        logical[row, :held] = torch.randperm(blocks, generator=random)[:held].sort().values.int()
        logical[row, held:] = -1
        mass[row, :, held:] = 0
    return [tensor.to(DEVICE) for tensor in (sums, slots, mass, logical)]


def expected(sums, slots, mass, logical, kept):
    want = sums.clone()
    for row, slot in enumerate(slots.tolist()):
        for place, block in enumerate(logical[row].tolist()):
            if slot >= 0 and block >= 0:
                factor = 1.0 if kept is None else kept[row]
                want[slot, :, block] = factor * want[slot, :, block] + mass[row, :, place]
    return want


@BY
@pytest.mark.parametrize("decays", [False, True])
@pytest.mark.parametrize("measured", ["some", "all"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_get_their_blocks_mass(fold, shape, decays, measured):
    sums, slots, mass, logical = batch(*shape)
    if measured == "all":
        slots = torch.arange(len(slots), dtype=torch.int32, device=slots.device).flip(0)
    kept = torch.linspace(0.5, 1, len(slots), device=sums.device) if decays else None
    want = expected(sums, slots, mass, logical, kept)
    reference = sums.clone()
    on_cpu.fold_reference(reference, slots, mass, logical, kept)
    fold(sums, slots, mass, logical, kept)
    torch.testing.assert_close(sums, want)
    torch.testing.assert_close(reference, want)


@pytest.mark.parametrize(
    "fold", [on_cpu.fold, on_cpu.fold_reference, pytest.param(triton_fold, marks=without_triton)],
    ids=["cpu", "reference", "triton"],
)  # fmt: skip
def test_blocks_past_the_sums_are_left_out(fold):
    wide = torch.zeros(1, 1, 8, device=DEVICE)
    slots, logical = (torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in ([0], [[3, 4]]))
    fold(wide[:, :, :4], slots, torch.ones(1, 1, 2, device=DEVICE), logical)
    assert wide.flatten().tolist() == [0, 0, 0, 1, 0, 0, 0, 0]


@pytest.mark.skipif(_C_cpu is None, reason="the C++ extension is not built")
def test_the_extension_refuses_what_it_cannot_read():
    sums, slots, mass, logical = (tensor.cpu() for tensor in batch(3, 1, 7, 20))
    for change, message in (
        ({"slots": slots + len(sums)}, "slots must be rows of sums"),
        ({"slots": slots[:2]}, "the same number of rows"),
        ({"logical": logical[:, :3]}, "logical its width"),
        ({"kept": torch.ones(2)}, "the same number of rows"),
    ):
        given = {"sums": sums, "slots": slots, "mass": mass, "logical": logical, "kept": None} | change
        with pytest.raises(ValueError, match=message):
            _C_cpu.fold(*given.values())
    with pytest.raises(TypeError, match="slots must be int32"):
        _C_cpu.fold(sums, slots.long(), mass, logical, None)


@without_triton
@pytest.mark.parametrize(
    "change, error, message",
    [
        ({0: torch.zeros(3, 2, 20)}, ValueError, "heads of mass"),
        ({1: torch.zeros(3, dtype=torch.int64)}, TypeError, "slots must be int32"),
        ({1: torch.zeros(2, dtype=torch.int32)}, ValueError, "R must agree"),
        ({2: torch.zeros(3, 1, 7, dtype=torch.float64)}, ValueError, "mass must be float32"),
        ({3: torch.zeros(3, 8, dtype=torch.int32)}, ValueError, r"logical must be \[R, W\]"),
        ({4: torch.ones(6)[::2]}, ValueError, "kept must be dense"),
    ],
)
def test_bad_arguments_are_refused(change, error, message):
    arguments = [*batch(3, 1, 7, 20), None]
    for index, value in change.items():
        arguments[index] = value
    with pytest.raises(error, match=message):
        triton_fold(*arguments)
