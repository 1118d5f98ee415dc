"""scripts/borrow.py: which calls of compiled operations fit, and which requirements are met."""

import importlib.util
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

SOURCE = """
import torch
torch.ops._C.norm(out, x, epsilon=1e-6)
torch.ops._C.norm.default(out, x, 1e-6)
torch.ops._C.norm(out, x, 1e-6, scale)
torch.ops._C.norm(out, x)
torch.ops._C.norm(out, x, epsilon=1e-6, more=1)
torch.ops._C.norm(*args)
torch.ops.aten.add(x, x)
"""


@pytest.fixture
def borrow():
    path = Path(__file__).parents[2] / "scripts/borrow.py"
    spec = importlib.util.spec_from_file_location("borrow", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_calls_fit_a_schema_or_not(borrow):
    schema = torch._C.parse_schema("_C::norm(Tensor! out, Tensor x, float epsilon, *, bool fast=False) -> ()")
    calls = list(borrow.calls(SOURCE, "a.py"))
    assert {call.name for call in calls} == {"_C::norm"} and calls[0].where == "a.py:3"
    assert [borrow.fits(call, [schema]) for call in calls] == [True, True, False, False, False, True]


def test_requirements_that_the_donor_meets_have_to_be_met(borrow):
    donor = ["numpy", "torch==1.0", "not-there"]
    release = [f"numpy>={version('numpy')}", "torch==9.9", "not-there", "nvidia-new", 'x; python_version < "3"']
    assert borrow.unmet(release, donor) == ([], ["not-there", "nvidia-new"])
    assert borrow.unmet(["numpy>=99"], donor)[0] == ["numpy>=99"]
