"""Triton kernels over heads wider than a tile, as latents are, over parts of the keys, and over images."""

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
from vllm_evict.triton_kernels.query_lse import query_lse, query_lse_reference

pytestmark = WHERE_KERNELS_RUN


WIDE = [  # heads, dim, block size, dtype, layout: latents, wide heads, and such that are no multiple of a part
    ((20, 1), 576, 16, BF16, TOKEN_MAJOR),
    ((128, 1), 576, 64, F16, HEAD_MAJOR),
    ((4, 2), 272, 48, F32, TOKEN_MAJOR),
    ((8, 2), 512, 16, BF16, TOKEN_MAJOR),  # Gemma 4
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


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[8], WIDE[3]], ids=["narrow", "half a block", "wide"])
def test_queries_see_tokens_ahead_of_them(shape):
    """Queries see tokens after their own, as those of an image do: here queries 3 to 12 of the second request, and the
    last five of the last one.
    """
    batch = Batch([1, 30, 0, 9], [21, 50, 5, 75], *shape)
    ahead = ints([0] * len(batch.query))
    ahead[4:14], ahead[-5:] = torch.arange(9, -1, -1, device=DEVICE), torch.arange(4, -1, -1, device=DEVICE)
    lse, wanted = torch.full((2, *batch.query.shape[:2]), 7.0, dtype=F64, device=DEVICE).unbind()
    lse = lse.float()
    query_lse(batch.attention(ahead=ahead), lse)
    query_lse_reference(batch.attention(ahead=ahead), wanted)
    assert_close(lse, wanted, 1e-5)
    for options in ({}, {"per_token": True}, {"weights": batch.weights}):
        out, expected = (batch.new_out(1, dtype, "per_token" in options) for dtype in (F32, F64))
        mass_from_lse(batch.attention(out, ahead=ahead, **options), lse)
        mass_from_lse_reference(batch.attention(expected, ahead=ahead, **options), wanted)
        assert_close(out, expected, 1e-5)
    assert_close(out.sum() - 0.25 * out.numel(), batch.heads * batch.weights.sum(), 1e-4)


def test_wide_heads_are_not_decoded():
    with pytest.raises(ValueError, match="heads of at most 256"):
        Batch(*DECODE, *WIDE[0]).decode()
