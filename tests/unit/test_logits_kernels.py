"""Soft caps and sinks in every kernel: references against the formulas, C++ against references, Triton against both."""

import math

import pytest
import test_decode
import test_decode_classes
import test_mass
import torch
from test_mass import BF16, F16, F32, MIXED, each_isa

from vllm_evict.compute.kernels.bounds import bound_scores, bound_scores_reference, key_bounds
from vllm_evict.compute.kernels.decode import decode_classes_reference, decode_mass_reference
from vllm_evict.compute.kernels.logits import probabilities, soft_capped
from vllm_evict.compute.kernels.mass import block_mass, block_mass_reference

F64 = torch.float64
#: Soft cap, and whether heads have sinks.
WAYS = pytest.mark.parametrize("soft_cap, has_sinks", [(1.5, False), (0.0, True), (30.0, True)])
TOKENS = pytest.mark.parametrize("per_token", [False, True], ids=["blocks", "tokens"])
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
PACKED = pytest.mark.parametrize("dtype, layout", [(F32, "vec"), (BF16, "vec"), (F16, "vec"), (BF16, "amx")], ids=str)


def sinks_of(heads, has_sinks=True):
    """One takes nothing, one takes all, the others something."""
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(5)) * 3
    sinks[0], sinks[-1] = -torch.inf, 90.0
    return sinks if has_sinks else None


def test_a_known_row():
    """Scores 0 and log(3), and a sink of log(4): an eighth, three eighths, and a half for no token."""
    scores = torch.tensor([[0.0, math.log(3)]])
    torch.testing.assert_close(probabilities(scores, torch.tensor([math.log(4)])), torch.tensor([[1 / 8, 3 / 8]]))
    torch.testing.assert_close(probabilities(scores), torch.tensor([[1 / 4, 3 / 4]]))
    capped = soft_capped(torch.tensor([0.0, 1.0, -1e9, 1e9]), 2.0)
    torch.testing.assert_close(capped, torch.tensor([0.0, 2 * math.tanh(0.5), -2.0, 2.0]))
    assert soft_capped(scores, 0.0) is scores


@WAYS
@TOKENS
def test_references_are_the_formulas(soft_cap, has_sinks, per_token):
    """By loops over queries and heads of one request."""
    batch = test_mass.Batch([3], [70], heads=(4, 2))
    sinks, out = sinks_of(4, has_sinks), batch.new_out(dtype=F64, per_token=per_token)
    block_mass_reference(batch.attention(out, per_token, soft_cap=soft_cap, sinks=sinks))
    keys = batch.key_cache[batch.table[0, :3].long()].reshape(3, 2, 64, 32).transpose(2, 3)
    keys = keys.transpose(0, 1).reshape(2, 96, 64).double()
    want = torch.zeros(2, 96, dtype=F64)
    for number, query in enumerate(batch.query.double()):
        for head in range(4):
            scores = [float(query[head] @ key) * batch.scale for key in keys[head // 2, : 68 + number]]
            if soft_cap:
                scores = [soft_cap * math.tanh(score / soft_cap) for score in scores]
            total = sum(map(math.exp, scores)) + (math.exp(sinks[head]) if has_sinks else 0.0)
            for token, score in enumerate(scores):
                want[head // 2, token] += math.exp(score) / total
    want = want[:, :70] if per_token else want.unflatten(1, (3, 32)).sum(2)
    torch.testing.assert_close(out[0, :, : want.shape[1]], want, rtol=1e-6, atol=1e-9)


@each_isa
@WAYS
@TOKENS
@DTYPES
def test_mass_on_a_cpu(isa, soft_cap, has_sinks, per_token, dtype):
    for heads, layout in (((6, 2), "vec"), ((3, 1), "vec"), ((4, 4), "amx")):
        if layout == "amx" and dtype != BF16:
            continue
        batch = test_mass.Batch(*MIXED, heads=heads, dtype=dtype, layout=layout, magnitude=3.0)
        batch.weights = torch.rand(len(batch.query))
        logits = {"soft_cap": soft_cap, "sinks": sinks_of(heads[0], has_sinks)}
        out, expected = batch.new_out(per_token=per_token), batch.new_out(dtype=F64, per_token=per_token)
        block_mass(batch.attention(out, per_token, **logits), isa=isa)
        block_mass_reference(batch.attention(expected, per_token, **logits))
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-7)


@each_isa
@WAYS
@TOKENS
@PACKED
def test_decodes_on_a_cpu(isa, soft_cap, has_sinks, per_token, dtype, layout):
    """Pieces, threads and rows of few and many heads; classes are each alone, to the bit."""
    for heads in ((4, 2), (7, 1)):
        batch = test_decode.Batch(test_decode.LENGTHS, heads, dtype=dtype, layout=layout, magnitude=3.0)
        batch.weights = torch.rand(len(batch.query))
        logits = {"soft_cap": soft_cap, "sinks": sinks_of(heads[0], has_sinks), "per_token": per_token}
        output, mass = batch.run(isa=isa, **logits)
        expected, expected_mass = batch.run(decode_mass_reference, None, F64, **logits)
        tolerance = max(test_decode.TOLERANCE[dtype], 1e-5)
        torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(mass.double(), expected_mass, rtol=1e-5, atol=1e-7)
        assert torch.equal(batch.run(isa=isa, rows_of_mass=0, **logits)[0], output)
    layer = test_decode_classes.Classes(dtype=dtype, layout=layout)
    sinks, out = sinks_of(sum(layer.heads), has_sinks), layer.new_out(per_token=per_token)
    output = layer.run(isa=isa, out=out, per_token=per_token, soft_cap=soft_cap, sinks=sinks)
    own = [None] * 2 if sinks is None else sinks.split(layer.heads)
    for each, part, mass, its in zip(layer.classes, output.split(layer.heads, 1), out, own):
        alone = each.run(isa=isa, soft_cap=soft_cap, sinks=its, per_token=per_token)
        assert torch.equal(part, alone[0]) and torch.equal(mass, alone[1])
    expected = layer.new_out(F64, per_token=per_token)
    layer.run(decode_classes_reference, out=expected, per_token=per_token, soft_cap=soft_cap, sinks=sinks)
    for mass, want in zip(out, expected):
        torch.testing.assert_close(mass.double(), want, rtol=1e-5, atol=1e-7)


@each_isa
def test_a_nan_key_stays_nan(isa):
    batch = test_decode.Batch([45], heads=(2, 1))
    batch.keys[batch.table[0, 1], 0].view(64, 32)[7, 3] = torch.nan
    for way in ({"soft_cap": 2.0}, {"sinks": torch.tensor([1.0, 50.0])}):
        output, mass = batch.run(isa=isa, **way)
        assert output[0].isnan().all() and mass[0, 0, :2].isnan().all()


@test_mass.needs_extension
@pytest.mark.parametrize(
    "wrong, error, message",
    [
        ({"sinks": torch.zeros(3)}, ValueError, "sinks must have H elements"),
        ({"sinks": torch.zeros(4, dtype=F64)}, TypeError, "sinks must be float32"),
        ({"soft_cap": -1.0}, ValueError, "soft_cap must be 0"),
    ],
)
def test_bad_arguments_are_refused(wrong, error, message):
    with pytest.raises(error, match=message):
        test_decode.Batch([45]).run(**wrong)


@WAYS
def test_bounds_of_blocks_have_shares_of_the_whole_row(soft_cap, has_sinks):
    torch.manual_seed(0)
    keys, query, sinks = torch.randn(5, 2, 8, 16), torch.randn(6, 16), sinks_of(6, has_sinks)
    arguments = query, key_bounds(keys), 0.25, soft_cap, sinks
    torch.testing.assert_close(bound_scores(*arguments), bound_scores_reference(*arguments))
