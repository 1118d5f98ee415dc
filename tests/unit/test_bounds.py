"""Bounds of keys: no product of a query with a key of a block is above what its bounds let it be."""

import pytest
import torch

from vllm_evict.compute.kernels.bounds import bound_scores, bound_scores_reference, key_bounds

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_keys(shape, dtype, kind):
    """Keys of blocks: any, far from the origin, all alike, all zero, tiny, or along one axis."""
    torch.manual_seed(1)
    keys = torch.randn(shape)
    if kind == "far":
        keys = keys * 0.01 + 100 * torch.randn(shape[0], shape[1], 1, shape[3])
    elif kind == "alike":
        keys = keys[:, :, :1].expand(shape).clone()
    elif kind == "zero":
        keys = torch.zeros(shape)
    elif kind == "tiny":
        keys = keys * 1e-7
    elif kind == "axis":
        keys[..., 1:] = 0
    return keys.to(dtype)


def most(query, bounds):
    """Return the largest product that a block's bounds allow, in exact arithmetic (float64) on what is stored: loops
    alone.
    """
    query, bounds = [float(x) for x in query], [float(x) for x in bounds]
    dims = len(query)
    return sum(max(query[i] * bounds[i], query[i] * bounds[dims + i]) for i in range(dims))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", ["any", "far", "alike", "zero", "tiny", "axis"])
def test_no_product_is_above_its_bound(keys, dtype):
    """Also where a query points from the centre straight at the key that is farthest from it."""
    keys = make_keys((4, 2, 16, 8), dtype, keys)
    bounds = key_bounds(keys, 3 * 16 + 5)
    assert bounds.dtype == dtype and bounds.shape == (4, 2, 2 * 8)
    for block in range(4):
        for head in range(2):
            own = keys[block, head, : 5 if block == 3 else 16].double()
            centre = own.mean(0)
            worst = own[(own - centre).norm(dim=-1).argmax()] - centre
            for query in (*torch.randn(6, 8).double(), *own[:2], 1e3 * worst, -worst):
                product, bound = (own @ query).max().item(), most(query.tolist(), bounds[block, head].tolist())
                assert product <= bound + 1e-12 * max(abs(bound), abs(product)), (block, head)
                # Not by much either: within the diameter of the block.
                spread = (own[:, None] - own).norm(dim=-1).max() * query.norm() * 8**0.5
                assert bound <= product + 2.1 * spread + 0.1 * own.abs().max() * query.norm() + 1e-3


def test_scores_are_those_of_the_reference_and_bound_the_keys():
    torch.manual_seed(0)
    keys, query = torch.randn(5, 2, 8, 16), torch.randn(6, 16)
    bounds = key_bounds(keys, 4 * 8 + 3)
    for soft_cap, sinks in ((0.0, None), (3.0, torch.randn(6))):
        arguments = query, bounds, 0.25, soft_cap, sinks
        torch.testing.assert_close(bound_scores(*arguments), bound_scores_reference(*arguments))
