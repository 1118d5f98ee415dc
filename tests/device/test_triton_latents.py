"""Triton kernels over heads wider than a tile, as latents are, and over parts of the keys."""

import pytest
import torch

pytest.importorskip("triton")

from triton_batch import (
    BF16,
    DECODE,
    DEVICE,
    F16,
    F32,
    F64,
    HEAD_MAJOR,
    SHAPES,
    TOKEN_MAJOR,
    WHERE_KERNELS_RUN,
    Batch,
    assert_close,
    interpreter_gaps,  # noqa: F401
    ints,
)

from vllm_evict.triton_kernels.mass_from_lse import mass_from_lse, mass_from_lse_reference
from vllm_evict.triton_kernels.query_lse import query_lse

pytestmark = WHERE_KERNELS_RUN


WIDE = [  # heads, dim, block size, dtype, layout: latents, and heads that are no multiple of a part
    ((20, 1), 576, 16, BF16, TOKEN_MAJOR),
    ((128, 1), 576, 64, F16, HEAD_MAJOR),
    ((4, 2), 272, 48, F32, TOKEN_MAJOR),
]
each_wide_shape = pytest.mark.parametrize("shape", WIDE, ids=[f"{h}x{d}-bs{b}-{str(t)[6:]}" for h, d, b, t, _ in WIDE])
SHORT = [5, 1, 0, 9], [21, 33, 5, 75]


@each_wide_shape
def test_mass_and_lse_of_wide_heads_match_the_references(shape):
    batch, last = Batch(*SHORT, *shape), ints([5, 1, 1, 3])
    lse = torch.full(batch.query.shape[:2], 7.0, device=DEVICE)
    query_lse(batch.attention(), lse, longest=9)
    assert_close(lse, batch.lse(), 1e-5)
    for per_token in (False, True):
        options = {"weights": batch.weights, "per_token": per_token}
        out, expected, again = (batch.new_out(1, dtype, per_token) for dtype in (F32, F64, F32))
        mass_from_lse(batch.attention(out, **options), lse, last=last)
        mass_from_lse_reference(batch.attention(expected, **options), lse, last=last)
        assert_close(out, expected, 1e-5)
        mass_from_lse(batch.attention(again, **options), lse, last=last)
        assert torch.equal(again, out)


def test_mass_and_lse_of_wide_heads_are_read_off_fp8_keys():
    batch = Batch(*SHORT, *WIDE[0], scales=(0.75, 1.0))
    lse = torch.empty(batch.query.shape[:2], device=DEVICE)
    query_lse(batch.attention(), lse)
    assert_close(lse, batch.lse(), 1e-5)
    out, expected = (batch.new_out(1, dtype) for dtype in (F32, F64))
    mass_from_lse(batch.attention(out), lse)
    mass_from_lse_reference(batch.real_attention(expected), lse)
    assert_close(out, expected, 1e-5)


def test_a_nan_in_any_part_of_a_wide_key_gives_nan():
    for element in (0, 100, 271):
        batch = Batch(*SHORT, *WIDE[2])
        batch.keys[batch.table[3, 0].long(), 1, 7, element] = torch.nan
        lse, out = torch.zeros(batch.query.shape[:2], device=DEVICE), batch.new_out(2)
        query_lse(batch.attention(), lse)
        mass_from_lse(batch.attention(out), lse)
        assert lse[-9:, 2:].isnan().all() and not lse[:-9].isnan().any() and not lse[:, :2].isnan().any()
        assert out[3, 1, :2].isnan().all() and not out[:3].isnan().any() and not out[:, 0].isnan().any()


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[8], WIDE[0]], ids=["narrow", "half a block", "wide"])
def test_parts_of_the_keys_add_up_to_the_lse(shape):
    """Also where there are more parts than tiles, and where a row sees nothing of a part."""
    batch = Batch([1, 30, 0, 3], [21, 150, 5, 75], *shape)
    for parts in (1, 3, 40):
        lse = torch.full((parts, *batch.query.shape[:2]), 7.0, device=DEVICE)
        query_lse(batch.attention(), lse, longest=30)
        assert_close(lse.logsumexp(0), batch.lse(), 1e-5)
        assert (lse == -torch.inf).any() or parts < 40
    with pytest.raises(ValueError, match="all keys where there are sinks"):
        query_lse(batch.attention(sinks=torch.zeros(batch.heads, device=DEVICE)), lse)


def test_wide_heads_are_not_decoded():
    with pytest.raises(ValueError, match="heads of at most 256"):
        Batch(*DECODE, *WIDE[0]).decode()
