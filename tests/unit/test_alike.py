"""The last key alike to each (R-KV): a search on the host and all products on a device, against the definition."""

import pytest
import torch

from vllm_evict.compute.kernels import alike
from vllm_evict.compute.kernels.alike import last_alike, last_alike_dense
from vllm_evict.compute.kernels.keys import token_scores

HEADS, DIM = 2, 32


def towards(length, share):
    """Random keys, some of which lean to one direction."""
    return torch.randn(HEADS, length, DIM) + 2 * torch.randn(HEADS, 1, DIM) * share(torch.rand(HEADS, length, 1))


KEYS = {
    "random": lambda length: towards(length, torch.zeros_like),
    "alike": lambda length: towards(length, torch.ones_like),
    "half of them alike": lambda length: towards(length, lambda part: part > 0.5),
    "few alike": lambda length: towards(length, lambda part: part > 0.95),
    "the first ones alike": lambda length: towards(length, lambda part: torch.arange(length)[:, None] < length // 2),
    "the last ones alike": lambda length: towards(length, lambda part: torch.arange(length)[:, None] > length // 2),
    "twice the same": lambda length: torch.randn(HEADS, -(-length // 2), DIM).repeat(1, 2, 1)[:, :length],
    "without length": lambda length: torch.randn(HEADS, length, DIM) * (torch.rand(HEADS, length, 1) > 0.5),
}


@pytest.fixture(params=["bfloat16", "float32"])
def quick(request, monkeypatch):
    """A machine whose search multiplies in this dtype first."""
    monkeypatch.setattr(alike, "kernel_path", lambda: {"bfloat16": "avx512_bf16", "float32": "avx2"}[request.param])


def normalised(keys):
    return keys / keys.norm(dim=-1, keepdim=True).clamp(min=1e-12)


def by_definition(units):
    similar = (units.double() @ units.double().transpose(1, 2)).diagonal_scatter(
        torch.zeros(units.shape[:2]), dim1=1, dim2=2
    )
    last = torch.arange(units.shape[1]).repeat(len(units), 1)
    for head, i in (similar > 0.5).any(2).nonzero().tolist():
        last[head, i] = (similar[head, i] > 0.5).nonzero().max()
    return last, similar


@pytest.mark.parametrize("length", [1, 2, 31, 100, 257])
@pytest.mark.parametrize("kind", KEYS)
def test_the_last_is_found(monkeypatch, quick, kind, length):
    """Tiles are small here, so that there are many."""
    monkeypatch.setattr(alike, "ROWS", 24)
    monkeypatch.setattr(alike, "COLUMNS", 16)
    monkeypatch.setattr(alike, "PAIRS", 1000)
    torch.manual_seed(length)
    units = normalised(KEYS[kind](length))
    expected, _ = by_definition(units)
    assert torch.equal(last_alike(units), expected)
    assert torch.equal(last_alike_dense(units), expected)


@pytest.mark.parametrize("kind", ["random", "half of them alike", "the last ones alike"])
def test_the_last_is_found_in_tiles_as_they_are(quick, kind):
    torch.manual_seed(0)
    units = normalised(KEYS[kind](3 * alike.COLUMNS + alike.ROWS // 2 + 7))
    assert torch.equal(last_alike(units), last_alike_dense(units))


def test_rounding_decides_nothing(quick):
    """Of keys on either side of the threshold, closer to it than bfloat16 tells."""
    torch.manual_seed(0)
    count = 200
    anchor, other = normalised(torch.randn(2, DIM))
    other = normalised(other - (other @ anchor) * anchor)
    cosine = 0.5 + 1e-4 * torch.tensor([1.0, -1.0]).repeat(count // 2)
    rest = torch.randn(count, DIM)
    rest = normalised(rest - (rest @ anchor)[:, None] * anchor)
    units = (cosine[:, None] * anchor + (1 - cosine**2).sqrt()[:, None] * rest)[None]
    units = torch.cat((units, anchor[None, None]), 1)
    expected, similar = by_definition(units)
    assert torch.equal(last_alike(units), expected)
    rounded = (units.bfloat16().double() @ units.bfloat16().double().transpose(1, 2))[0, -1, :-1] > 0.5
    assert (rounded != (similar[0, -1, :-1] > 0.5)).any(), "rounded keys would do as well"


@pytest.mark.parametrize("kind", KEYS)
def test_redundancy_is_the_papers(quick, kind):
    """A softmax of mean similarities, without each key's own and without those of `last_alike`."""
    torch.manual_seed(1)
    length, block = 300, 20
    keys = KEYS[kind](length)
    last, similar = by_definition(normalised(keys))
    similar.scatter_(2, last[..., None], 0.0)
    expected = similar.mean(1).softmax(1)
    blocks = keys.view(HEADS, length // block, block, DIM).transpose(0, 1)
    scores = token_scores(blocks, None, length, frozenset({"redundancy"}))["redundancy"]
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=0)
