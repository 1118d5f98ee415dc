"""Soft caps and sinks in Triton's kernels, against their torch references: under the interpreter, or on a GPU."""

import pytest
import torch

pytest.importorskip("triton")

from test_logits_kernels import TOKENS, WAYS, sinks_of
from test_triton_decode import Classes
from triton_batch import (
    BF16,
    DECODE,
    DEVICE,
    F16,
    F32,
    F64,
    PREFILL,
    TOLERANCE,
    WHERE_KERNELS_RUN,
    Batch,
    assert_close,
    interpreter_gaps,  # noqa: F401
    ints,
)

from vllm_evict.triton_kernels.decode_mass import decode_mass
from vllm_evict.triton_kernels.mass_from_lse import mass_from_lse, mass_from_lse_reference
from vllm_evict.triton_kernels.query_lse import query_lse, query_lse_reference

pytestmark = WHERE_KERNELS_RUN
#: Query and KV heads, dimensions, block size, dtype; the last has one query head a KV head.
SHAPES = pytest.mark.parametrize(
    "shape", [((4, 2), 64, 16, F32), ((14, 2), 96, 64, BF16), ((2, 2), 80, 16, F16)], ids=str
)


def on_device(sinks, dtype=F32):
    return None if sinks is None else sinks.to(DEVICE, dtype)


@SHAPES
@WAYS
@TOKENS
def test_decodes(shape, soft_cap, has_sinks, per_token):
    """One split and many; the LSE includes sinks, so that it is `mass_from_lse`'s."""
    batch = Batch(*DECODE, *shape, magnitude=2.0)
    sinks = sinks_of(batch.heads, has_sinks)
    own = on_device(sinks, batch.query.dtype)  # the model's dtype
    sinks = None if sinks is None else own.float().cpu()
    expected, expected_mass = batch.decode_reference(None, per_token, soft_cap=soft_cap, sinks=sinks)
    for splits in (1, 3):
        plan = batch.plan(splits=splits, per_token=per_token)
        output, mass, lse = batch.decode(None, per_token, plan=plan, soft_cap=soft_cap, sinks=own)
        assert_close(output, expected, TOLERANCE[batch.query.dtype])
        assert_close(mass, expected_mass, 5e-6)
        tokens = batch.starts[batch.rows.long()].long()
        wanted = torch.full(lse.shape, 7.0, dtype=F64, device=DEVICE)
        query_lse_reference(batch.attention(soft_cap=soft_cap, sinks=own), wanted)
        assert_close(lse[tokens], wanted[tokens], 5e-6)


@SHAPES
@WAYS
@TOKENS
def test_mass_beside_a_kernel(shape, soft_cap, has_sinks, per_token):
    batch = Batch(*PREFILL, *shape, magnitude=2.0)
    own = on_device(sinks_of(batch.heads, has_sinks), batch.query.dtype)
    logits = {"soft_cap": soft_cap, "sinks": own}
    lse, wanted = (torch.full(batch.query.shape[:2], 7.0, dtype=dtype, device=DEVICE) for dtype in (F32, F64))
    query_lse(batch.attention(**logits), lse, longest=40)
    query_lse_reference(batch.attention(**logits), wanted)
    assert_close(lse, wanted, 1e-5)
    out, expected = (batch.new_out(batch.kv_heads, dtype, per_token) for dtype in (F32, F64))
    options, last = {"weights": batch.weights, "per_token": per_token, **logits}, ints([5, 3, 1, 17])
    mass_from_lse(batch.attention(out, **options), lse, last=last)
    mass_from_lse_reference(batch.attention(expected, **options), wanted, last=last)
    assert_close(out, expected, 1e-5)


@WAYS
@TOKENS
def test_classes_are_decoded_as_each_alone(soft_cap, has_sinks, per_token):
    layer = Classes()
    plans, sinks = layer.plans(splits=(3, 1), per_token=per_token), on_device(sinks_of(sum(layer.heads), has_sinks))
    out = [each.new_out(each.kv_heads, F32, per_token) for each in layer.classes]
    output, lse = layer.decode(out=out, per_token=per_token, plans=plans, soft_cap=soft_cap, sinks=sinks)
    parts = output.split(layer.heads, 1), lse.split(layer.heads, 1), out
    own = [None] * 2 if sinks is None else sinks.split(layer.heads)
    for each, part, its_lse, mass, plan, its in zip(layer.classes, *parts, plans, own):
        alone = each.decode(None, per_token, plan=plan, soft_cap=soft_cap, sinks=its)
        assert torch.equal(part, alone[0]) and torch.equal(mass, alone[1]) and torch.equal(its_lse, alone[2])


@pytest.mark.parametrize("wrong", [{"sinks": torch.zeros(3, device=DEVICE)}, {"soft_cap": -1.0}], ids=str)
def test_bad_arguments_are_refused(wrong):
    batch = Batch(*DECODE)
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
        decode_mass(batch.attention(**wrong), batch.rows, torch.empty_like(batch.query))
