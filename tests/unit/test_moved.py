"""Queries that have moved since their rows chose."""

import pytest
import torch

from vllm_evict.compute.kernels.moved import moved
from vllm_evict.compute.kernels.reach import ReachRows


def rows_of(slots, chooses, starts):
    ints = [torch.tensor(each, dtype=torch.int32) for each in (starts, [1] * len(starts), slots, chooses)]
    other = torch.zeros(len(starts), dtype=torch.int32)
    known = *ints[:2], *[other] * 6, ints[2], other, ints[3]
    return ReachRows(*known, torch.zeros(4, 4, dtype=torch.int32), 9, most=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_choose_again_when_the_mean_cosine_of_their_heads_is_small(dtype):
    """Of padding, of a tile, of a row that has to choose, of rows whose query stayed, turned a little, turned, is NaN."""
    generator = torch.Generator().manual_seed(0)
    asked = torch.randn(5, 6, 16, generator=generator).bfloat16()
    before = asked.clone()
    query = torch.randn(8, 6, 16, generator=generator).to(dtype)
    for token, slot, turn in ((3, 1, 0.0), (4, 2, 0.5), (5, 3, 4.0)):
        query[token] = (3 * asked[slot] + 3 * turn * torch.randn(6, 16, generator=generator)).to(dtype)
    query[6] = torch.nan
    rows = rows_of([-1, 7, 0, 1, 2, 3, 4], [0, 1, 1, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6])
    assert moved(rows, query, asked, 0.6).tolist() == [0, 1, 1, 0, 0, 1, 1]
    assert torch.equal(asked[[0, 3]], query[[2, 5]].bfloat16())
    assert torch.equal(asked[[1, 2]], before[[1, 2]]) and asked[4].isnan().all()
