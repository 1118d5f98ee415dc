"""Bounds of keys: no product of a query with a key of a block is above what its bounds let it be."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_evict.compute.kernels.bounds import bound_scores, bound_scores_reference, bounds_width, key_bounds
from vllm_evict.compute.offload import OffloadedBlocks, empty_bounds
from vllm_evict.config import KVPolicyConfig

KINDS = ["box", "sphere", "mean"]
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


def most(query, bounds, kind):
    """What a block's bounds let a product be, in exact arithmetic (float64) on what is stored: loops alone."""
    query, bounds = [float(x) for x in query], [float(x) for x in bounds]
    dims = len(query)
    if kind == "box":
        return sum(max(query[i] * bounds[i], query[i] * bounds[dims + i]) for i in range(dims))
    length = sum(x * x for x in query) ** 0.5
    return sum(query[i] * bounds[i] for i in range(dims)) + length * bounds[dims]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", ["any", "far", "alike", "zero", "tiny", "axis"])
@pytest.mark.parametrize("kind", ["box", "sphere"])
def test_no_product_is_above_its_bound(kind, keys, dtype):
    """Also where a query points from the centre straight at the key that is farthest from it."""
    keys = make_keys((4, 2, 16, 8), dtype, keys)
    bounds = key_bounds(keys, 3 * 16 + 5, kind)
    assert bounds.dtype == dtype and bounds.shape == (4, 2, bounds_width(kind, 8))
    for block in range(4):
        for head in range(2):
            own = keys[block, head, : 5 if block == 3 else 16].double()
            centre = own.mean(0)
            worst = own[(own - centre).norm(dim=-1).argmax()] - centre
            for query in (*torch.randn(6, 8).double(), *own[:2], 1e3 * worst, -worst):
                product, bound = (own @ query).max().item(), most(query.tolist(), bounds[block, head].tolist(), kind)
                assert product <= bound + 1e-12 * max(abs(bound), abs(product)), (block, head)
                # Not by much either: within the diameter of the block.
                spread = (own[:, None] - own).norm(dim=-1).max() * query.norm() * 8**0.5
                assert bound <= product + 2.1 * spread + 0.1 * own.abs().max() * query.norm() + 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_the_reference(kind):
    torch.manual_seed(0)
    keys, query = torch.randn(5, 2, 8, 16), torch.randn(7, 6, 16)
    bounds = key_bounds(keys, 4 * 8 + 3, kind)
    for soft_cap, sinks in ((0.0, None), (3.0, torch.randn(6))):
        arguments = query, bounds, 0.25, soft_cap, sinks
        torch.testing.assert_close(bound_scores(*arguments), bound_scores_reference(*arguments))


def test_a_sphere_that_is_smaller_than_its_keys_would_be_seen():
    """The radius counts: without it the farthest key of a block is above the bound."""
    keys = make_keys((1, 1, 16, 8), torch.float32, "any")
    bounds = key_bounds(keys, None, "sphere")
    bounds[..., -1] *= 0.9
    own, centre = keys[0, 0].double(), keys[0, 0].double().mean(0)
    query = own[(own - centre).norm(dim=-1).argmax()] - centre
    assert (own @ query).max().item() > most(query.tolist(), bounds[0, 0].tolist(), "sphere")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mean_is_the_centre_of_a_sphere_and_bounds_nothing(dtype):
    """Its product with a query is the mean product of the block's keys, and some key's product is above it."""
    keys = make_keys((4, 2, 16, 8), dtype, "any")
    means = key_bounds(keys, 3 * 16 + 5, "mean")
    assert torch.equal(means, key_bounds(keys, 3 * 16 + 5, "sphere")[..., :-1])
    assert means.shape == (4, 2, bounds_width("mean", 8))
    own, query = keys[3, 1, :5].double(), torch.randn(8).double()
    product = means[3, 1].double() @ query
    torch.testing.assert_close(product, (own @ query).mean(), rtol=0, atol=10 * torch.finfo(dtype).eps)
    assert (own @ query).max() > product


def test_spheres_take_half_the_memory_and_means_one_number_less():
    store = SimpleNamespace(read=lambda blocks, values: [(torch.zeros(len(blocks), 2, 16, 64), None)] * 3)
    sizes = [sum(e.nbytes for e in empty_bounds(store, 10, torch.device("cpu"), kind)) for kind in KINDS]
    assert sizes == [3 * 10 * 2 * numbers * 4 for numbers in (128, 65, 64)]


@pytest.mark.parametrize("kind", KINDS)
def test_resident_blocks_and_host_blocks_are_bounded_alike(kind):
    """A block has one bound, whether it is on the device or was copied to the host."""
    torch.manual_seed(0)
    page = torch.randn(6, 2, 4, 8)
    store = SimpleNamespace(
        pages=lambda: [page],
        read=lambda blocks, values: [(page[blocks], None)],
    )
    host = OffloadedBlocks(store, 4, torch.device("cpu"), kind)
    host._spill([5, 2], [0, 3], True)
    both = host.bounds_beside(page[[5, 2]], 8, 0, torch.from_numpy(np.array([0, 3])))
    assert torch.equal(both[:2], both[2:]) and both.shape == (4, 2, bounds_width(kind, 8))


def test_the_fields_are_the_policy_s():
    config = KVPolicyConfig.parse(
        {"name": "keydiff", "evict": "host", "host": "1GiB", "recall": "quest", "recall_bounds": "sphere"}
    )
    assert (config.recall_bounds, config.select_bounds) == ("sphere", "box")
    with pytest.raises(ValueError, match="select_bounds: decodes attend to all resident tokens: it needs select"):
        KVPolicyConfig.parse({"name": "full", "select_bounds": "sphere"})
    with pytest.raises(ValueError, match="recall_bounds: blocks on the host never come back: it needs recall: quest"):
        KVPolicyConfig.parse({"name": "h2o", "evict": "host", "host": "1GiB", "recall_bounds": "sphere"})
