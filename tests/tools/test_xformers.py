"""The Triton kernels against an independent one: paged split-K attention of xformers (the extra `xformers`).

It needs a GPU; or, in the place of one, the interpreter of a Triton that still has block pointers (before 3.9).
"""

import contextlib
import os
from types import SimpleNamespace

import pytest
import torch

os.environ.setdefault("XFORMERS_ENABLE_TRITON", "1")
triton = pytest.importorskip("triton")
fmha = pytest.importorskip("xformers.ops.fmha")

from triton_batch import F16, F32, ON_GPU, WHERE_KERNELS_RUN, Batch, interpreter_gaps  # noqa: E402
from xformers.ops.fmha.attn_bias import PagedBlockDiagonalPaddedKeysMask  # noqa: E402
from xformers.ops.fmha.triton_splitk import FwOp  # noqa: E402

from vllm_evict.triton_kernels.query_lse import query_lse  # noqa: E402

__all__ = ["interpreter_gaps"]
pytestmark = [
    *WHERE_KERNELS_RUN,
    pytest.mark.skipif(
        not hasattr(triton.language, "make_block_ptr"), reason="xformers' kernel has block pointers, this Triton none"
    ),
]
DTYPE, TOLERANCE = (F16, 2e-3) if ON_GPU else (F32, 3e-6)
#: Tokens of each request: of one block, of several, of whole ones. xformers wants pages of 64 and more.
LENGTHS = [5, 300, 128]


@pytest.fixture(autouse=True)
def taken_for_a_gpu(monkeypatch):
    if not ON_GPU:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        monkeypatch.setattr(torch.cuda, "device", lambda *_: contextlib.nullcontext())
        properties = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)


def attention(batch, table, lengths):
    """Output [R, H, D] and LSE [R, H] of one query a request over pages `table` [R, W]."""
    pages, group = len(batch.keys), batch.heads // batch.kv_heads
    query = batch.query.reshape(1, len(lengths), batch.kv_heads, group, -1)
    caches = []
    for cache in (batch.keys, batch.values):
        # It multiplies masked values by zero, which NaN does not outlive.
        dense = cache.nan_to_num().transpose(1, 2).reshape(1, pages * batch.block_size, batch.kv_heads, 1, -1)
        caches.append(dense.expand(-1, -1, -1, group, -1))
    mask = PagedBlockDiagonalPaddedKeysMask.from_seqlens(
        q_seqlen=[1] * len(lengths), kv_seqlen=lengths, block_tables=table, page_size=batch.block_size
    )
    mask = mask.to(query.device)
    output, context = FwOp.apply(fmha.Inputs(query, *caches, attn_bias=mask, scale=batch.scale), needs_gradient=True)
    # LSE comes as [1, Hkv, G, R].
    return output[0].flatten(1, 2), context.lse[0].flatten(0, 1).T.float()


@pytest.mark.parametrize("heads, dim, block_size", [((4, 2), 64, 64), ((2, 2), 128, 64), ((6, 2), 64, 128)])
def test_decode_and_its_mass_are_those_of_xformers(heads, dim, block_size):
    """A block's mass is what attention over that block alone weighs in the LSE of all."""
    batch = Batch([1] * len(LENGTHS), LENGTHS, heads, dim, block_size, DTYPE)
    batch.weights = torch.ones_like(batch.weights)
    table = batch.table.clamp(min=0).contiguous()
    want, want_lse = attention(batch, table, LENGTHS)
    output, out, lse = batch.decode()
    torch.testing.assert_close(output, want.to(DTYPE), rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=TOLERANCE)

    given = batch.new_out(batch.kv_heads)
    for place in range(max(-(-length // block_size) for length in LENGTHS)):
        tokens = [max(min(length - place * block_size, block_size), 0) for length in LENGTHS]
        rows = [row for row, count in enumerate(tokens) if count]
        alone = SimpleNamespace(**{**vars(batch), "query": batch.query[rows]})
        _, of_block = attention(alone, table[rows, place : place + 1].contiguous(), [tokens[row] for row in rows])
        mass = (of_block - want_lse[rows]).exp().unflatten(1, (batch.kv_heads, -1)).sum(2)
        torch.testing.assert_close(out[rows, :, place] - given[rows, :, place], mass, rtol=0, atol=4 * TOLERANCE)


def test_lse_of_queries_is_that_of_xformers():
    batch = Batch([1] * len(LENGTHS), LENGTHS, (4, 2), 64, 64, DTYPE)
    _, want = attention(batch, batch.table.clamp(min=0).contiguous(), LENGTHS)
    lse = torch.empty_like(want)
    query_lse(batch.attention(), lse, longest=1)
    torch.testing.assert_close(lse, want, rtol=0, atol=TOLERANCE)
