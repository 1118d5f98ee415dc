"""Triton's `decode_mass` and `decode_classes` against their torch references: under the interpreter, or on a GPU."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton_batch import (
    BF16,
    BY,
    DECODE,
    DEVICE,
    F16,
    F32,
    F64,
    FP8,
    HEAD_MAJOR,
    SHAPES,
    TOKEN_MAJOR,
    TOLERANCE,
    WHERE_KERNELS_RUN,
    Batch,
    assert_close,
    cache_in,
    check_captured,
    check_large_scores,
    check_mass_adds_up,
    check_nan_keys,
    check_no_tokens,
    check_without_mass,
    each_fp8_shape,
    each_shape,
    interpreter_gaps,  # noqa: F401
    ints,
    on_cpu,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_evict.compute.attention.device import DeviceOps
from vllm_evict.compute.kernels.decode import decode_classes_reference
from vllm_evict.compute.kernels.paged import DecodeShape
from vllm_evict.compute.probes import LayerCall, MassTarget
from vllm_evict.compute.work import HeadSlice
from vllm_evict.triton_kernels.decode_classes import decode_classes, plan_classes
from vllm_evict.triton_kernels.decode_mass import decode_mass, plan_decode
from vllm_evict.triton_kernels.tiles import tile_of

pytestmark = WHERE_KERNELS_RUN


def test_caches_lie_as_vllm_lays_them():
    strides = {layout.name: cache_in(layout, F32, 3, 5, 16, 8, layers=2).stride() for layout in KVCacheLayout}
    assert strides == {
        "LBHNC": (640, 128, 8, 1),
        "LBNHC": (640, 8, 40, 1),
        "LHBNC": (128, 384, 8, 1),
        "BLHNC": (1280, 128, 8, 1),
        "BLNHC": (1280, 8, 40, 1),
        "BHLNC": (1280, 256, 8, 1),
    }


# ---- decode_mass


@BY
@each_shape
def test_decode_matches_the_reference(shape, per_token):
    heads, dim, block_size, dtype, layout = shape
    batch = Batch(*DECODE, heads, dim, block_size, dtype, layout)
    # Of every other shape heads are summed, and there are more splits than some requests have tiles.
    rows = 1 if SHAPES.index(shape) % 2 else None
    plan = batch.plan(splits=3 if rows else None, per_token=per_token)
    output, mass, lse = batch.decode(rows, per_token, plan=plan)
    expected, expected_mass = batch.decode_reference(rows, per_token)
    assert_close(output, expected, TOLERANCE[dtype])
    assert_close(mass, expected_mass)
    tokens = batch.starts[batch.rows.long()].long()
    assert_close(lse[tokens], batch.lse()[tokens])
    others = torch.ones(len(output), dtype=torch.bool, device=DEVICE).index_fill(0, tokens, False)
    assert (output[others] == 7).all() and (lse[others] == 7).all()


@BY
@each_fp8_shape
def test_decode_reads_fp8_caches(shape, per_token):
    """Quantised caches count as the numbers that they stand for: exactly, but for the rounding of probabilities and
    outputs.
    """
    batch = Batch(*DECODE, *shape, scales=(0.75, 2.5))
    plan = batch.plan(splits=3, per_token=per_token)
    output, mass, lse = batch.decode(None, per_token, plan=plan)
    expected, expected_mass = batch.decode_reference(None, per_token)
    # By the size of values: of one query head they are neither rounded nor are probabilities.
    assert_close(output / batch.value_scale, expected / batch.value_scale, TOLERANCE[shape[3]])
    assert_close(mass, expected_mass, 5e-6)
    tokens = batch.starts[batch.rows.long()].long()
    assert_close(lse[tokens], batch.lse()[tokens], 5e-6)


def test_decode_without_mass_is_the_same():
    check_without_mass(Batch(*DECODE, dtype=BF16))


def test_decode_by_token_is_the_same_but_for_its_mass():
    """Output and LSE to the bit; a plan for tokens does for blocks."""
    batch = Batch(*DECODE, dtype=BF16, block_size=48, dim=80)
    plan = batch.plan(per_token=True)
    output, mass, lse = batch.decode(plan=plan)
    output_, of_tokens, lse_ = batch.decode(per_token=True, plan=plan)
    assert torch.equal(output_, output) and torch.equal(lse_, lse)
    of_tokens = torch.nn.functional.pad(of_tokens - 0.25, (0, -of_tokens.shape[2] % 48))
    of_blocks = of_tokens.unflatten(2, (-1, 48)).sum(3)
    assert_close(of_blocks, mass[:, :, : of_blocks.shape[2]] - 0.25)
    batch.weights.zero_()
    assert (batch.decode(per_token=True)[1] == 0.25).all()


def test_mass_adds_up_to_the_queries():
    check_mass_adds_up(Batch(*DECODE, heads=(6, 2), dtype=BF16))


@BY
def test_decode_is_deterministic_and_its_scratch_may_hold_anything(per_token):
    batch = Batch(*DECODE, dtype=F16)
    plan = batch.plan(splits=2, per_token=per_token)
    results = []
    for poison in (torch.nan, torch.inf, 0.0):
        for scratch in (plan.partial, plan.stats, plan.granules):
            scratch.fill_(poison)
        results.append(batch.decode(per_token=per_token, plan=plan))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_with_one_number_of_splits_other_requests_change_no_bit():
    batch = Batch(*DECODE)
    plan = batch.plan(splits=2)
    output, mass, _ = batch.decode(plan=plan)
    row = int(batch.rows[-1])
    batch.rows = ints([-1, row])  # -1: padding of a captured batch
    alone, its_mass, _ = batch.decode(plan=plan)
    token = int(batch.starts[row])
    assert torch.equal(alone[token], output[token]) and torch.equal(its_mass[row], mass[row])
    assert (alone[:token] == 7).all() and (its_mass[:row] == 0.25).all()


@BY
def test_large_scores_neither_overflow_nor_vanish(per_token):
    check_large_scores(Batch(*DECODE, magnitude=12.0), 1e-4, per_token=per_token)


@BY
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("tokens", [[70], range(48), range(130)], ids=["token", "split", "all"])
def test_nan_keys_give_nan_output_and_mass(per_token, splits, tokens):
    for heads, dim in (((4, 2), 64), ((2, 2), 80), ((16, 1), 128)):
        check_nan_keys(Batch(*DECODE, heads=heads, dim=dim), splits, tokens, per_token=per_token)


def test_a_request_without_tokens_gets_zeros():
    check_no_tokens(Batch([1], [16]))


@BY
def test_decode_captures_into_a_graph(per_token):
    check_captured(Batch(*DECODE, dtype=BF16), decode_mass, per_token=per_token)


def test_splits_fill_the_device_and_no_more():
    def splits(rows, kv_heads, tokens):
        return plan_decode(DecodeShape(rows, 32, kv_heads, 128, 16, tokens // 16, BF16, "cpu")).splits

    assert splits(1, 8, 131_072) == 66  # 4 programs on each of 132 SMs
    assert splits(1, 1, 131_072) == 128
    assert splits(1, 8, 1024) == 4  # 256 tokens each
    assert splits(64, 8, 131_072) == 2
    assert splits(512, 8, 131_072) == 1


@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 128, 176, 256])
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 112, 128, 192, 256])
def test_tiles_are_whole_granules_of_whole_blocks(block_size, dim):
    for dtype in (F32, BF16):
        tile = tile_of(dim, block_size, dtype)
        assert dim <= tile.dim < 2 * dim and 1 in (tile.granules, tile.parts)
        assert tile.parts * tile.tokens >= block_size > (tile.parts - 1) * tile.tokens
        assert 16 <= tile.granules * tile.tokens <= 128
        assert tile.granules * tile.tokens * tile.dim * dtype.itemsize <= 16 * 1024


# ---- decode_classes


class Classes:
    """Two classes of heads: the first long, the second of few tokens, in a cache of another layout."""

    def __init__(self, kv_heads=(1, 2), group=2, dim=64, block_size=16, dtype=F32, layout=HEAD_MAJOR, scales=None):
        query_lens, long = DECODE
        short = [max(min(length, 37), 1) for length in long]
        self.classes = [
            Batch(query_lens, lens, (group * heads, heads), dim, block_size, dtype, layout, scales=scales)
            for lens, heads, layout in zip((long, short), kv_heads, (layout, TOKEN_MAJOR))
        ]
        first = self.classes[0]
        self.group, self.kv_heads, self.heads = group, kv_heads, [group * heads for heads in kv_heads]
        random = torch.Generator().manual_seed(1)
        query = torch.randn(len(first.query), sum(self.heads) + 1, dim, generator=random)
        self.query = query.to(DEVICE, dtype)[:, :-1]
        for each, its in zip(self.classes, self.query.split(self.heads, 1)):
            each.query, each.weights = its, first.weights

    def of(self, name):
        return [getattr(each, name) for each in self.classes]

    def plans(self, **options):
        rows, dims, block_size = len(self.classes[0].rows), self.query.shape[2], self.classes[0].block_size
        widths = [each.table.shape[1] for each in self.classes]
        shapes = [
            DecodeShape(rows, self.group * heads, heads, dims, block_size, width, self.query.dtype, DEVICE)
            for heads, width in zip(self.kv_heads, widths)
        ]
        return plan_classes(shapes, **options)

    def decode(self, out=None, plans=None, sinks=None, **options):
        output = torch.full_like(self.query, 7.0)
        lse = torch.full(self.query.shape[:2], 7.0, device=DEVICE)
        own = [None] * 2 if sinks is None else sinks.split(self.heads)
        classes = [
            each.attention(mass, weights=each.weights, sinks=its, **options)
            for each, mass, its in zip(self.classes, out or [None] * 2, own)
        ]
        decode_classes(
            classes, self.classes[0].rows, output.split(self.heads, 1), lses=lse.split(self.heads, 1), plans=plans
        )
        return output, lse


CLASSES = [  # KV heads, group, dim, block size, dtype, layout, scales
    ((1, 2), 2, 64, 16, F32, HEAD_MAJOR),
    ((2, 1), 4, 128, 64, BF16, TOKEN_MAJOR),
    ((1, 1), 1, 80, 48, F16, HEAD_MAJOR),
    ((1, 2), 7, 256, 128, BF16, HEAD_MAJOR),
    ((2, 1), 4, 128, 16, BF16, HEAD_MAJOR, (0.75, 0.5)),
]
CLASS_IDS = [f"{k}x{g}-{d}-bs{b}-{str(t)[6:]}" + "-fp8" * len(more) for k, g, d, b, t, _, *more in CLASSES]


@pytest.mark.parametrize("shape", CLASSES, ids=CLASS_IDS)
@BY
def test_classes_match_the_reference_and_each_alone(shape, per_token):
    layer = Classes(*shape)
    plans = layer.plans(splits=(3, 1), per_token=per_token)
    out = [each.new_out(heads, F32, per_token) for each, heads in zip(layer.classes, (1, layer.kv_heads[1]))]
    output, lse = layer.decode(out=out, per_token=per_token, plans=plans)
    parts = output.split(layer.heads, 1), lse.split(layer.heads, 1), out
    for each, part, its_lse, mass, plan in zip(layer.classes, *parts, plans):
        alone = each.decode(mass.shape[1], per_token, plan=plan)
        assert torch.equal(part, alone[0]) and torch.equal(mass, alone[1]) and torch.equal(its_lse, alone[2])
    expected = torch.full_like(layer.query, 7.0).cpu()
    expected_out = [each.new_out(mass.shape[1], F64, per_token).cpu() for each, mass in zip(layer.classes, out)]
    classes = [
        on_cpu(each.real_attention(mass, weights=each.weights, per_token=per_token))
        for each, mass in zip(layer.classes, expected_out)
    ]
    decode_classes_reference(classes, layer.classes[0].rows.cpu(), expected.split(layer.heads, 1))
    assert_close(output, expected, TOLERANCE[shape[4]])
    for mass, wanted in zip(out, expected_out):
        assert_close(mass, wanted)


def test_one_class_may_do_without_mass():
    layer = Classes(dtype=BF16)
    out = [each.new_out(each.kv_heads) for each in layer.classes]
    output, lse = layer.decode(out=out)
    for wanted in ([out[0], None], [None, out[1]], None):
        again = [
            each.new_out(each.kv_heads) if mass is not None else None
            for each, mass in zip(layer.classes, wanted or [None] * 2)
        ]
        output_, lse_ = layer.decode(out=again if wanted else None)
        assert torch.equal(output_, output) and torch.equal(lse_, lse)
        assert all(mass is None or torch.equal(mass, full) for mass, full in zip(again, out))
    with pytest.raises(ValueError, match="of two classes"):
        decode_classes([layer.classes[0].attention()], layer.classes[0].rows, [output])
    layer.classes[1].keys, layer.classes[1].values = layer.classes[1].keys.to(FP8), layer.classes[1].values.to(FP8)
    with pytest.raises(ValueError, match="caches of both classes must have one dtype"):
        layer.decode()


def test_splits_of_classes_are_of_one_length():
    def splits(rows, kv_heads, tokens):
        blocks = [count // 16 for count in tokens]
        shapes = [DecodeShape(rows, 4 * n, n, 128, 16, most, BF16, "cpu") for n, most in zip(kv_heads, blocks)]
        return [plan.splits for plan in plan_classes(shapes)]

    assert splits(1, (4, 4), (131_072, 384)) == [128, 1]  # 1,000 tokens each
    assert splits(1, (4, 4), (131_072, 131_072)) == [66, 66]  # those of 8 heads of one class
    assert splits(64, (4, 4), (131_072, 384)) == [3, 1]
    assert splits(512, (4, 4), (131_072, 384)) == [1, 1]


# ---- behind a backend


@BY
@pytest.mark.parametrize("classes", [1, 2])
def test_where_scratch_has_no_room_for_all_some_are_decoded_at_a_time(classes, per_token):
    layer = Classes()
    parts, shares = layer.classes[:classes], []
    a_layer = SimpleNamespace(impl=SimpleNamespace(scale=parts[0].scale, head_size=parts[0].keys.shape[3]))
    query = layer.query[:, : sum(layer.heads[:classes])]
    for each in parts:
        keys, width = each.keys, 2 * each.keys.shape[3]
        cache = keys.as_strided((*keys.shape[:3], width), keys.stride(), keys.storage_offset())
        metadata = SimpleNamespace(
            block_table=each.table, query_start_loc=each.starts, seq_lens=each.seq_lens, num_actual_tokens=len(query),
            max_seq_len=int(each.seq_lens.max()),
        )  # fmt: skip
        work = SimpleNamespace(rows=each.rows, seq_lens=each.seq_lens)
        shares.append(HeadSlice(work, LayerCall(None, a_layer, 0, each.query, cache, metadata)))

    def decoded(scratch):
        ops = DeviceOps()
        ops.scratch.nbytes = scratch
        outs = [each.new_out(each.kv_heads, F32, per_token) for each in parts]
        output = torch.full_like(query, 7.0)
        for share, its in zip(shares, output.split(layer.heads[:classes], 1)):
            share.call.ops, share.call.output = ops, its
        measured = [MassTarget(out, parts[0].weights, per_token) for out in outs]
        if classes == 2:
            ops.decode_together(shares, measured)
        else:
            ops.decode(shares[0].call, *vars(shares[0].work).values(), measured[0])
        ((_, at_once),) = ops.decoding._plans.values()
        return at_once, output, outs

    _, output, outs = decoded(64 << 20)
    rows = len(parts[0].rows)
    one = sum(each.nbytes for plan in layer.plans(per_token=per_token)[:classes] for each in plan[3:6]) // rows
    for scratch, expected in ((64 << 20, range(rows, 2 * rows)), (3 * one, range(2, rows)), (0, [1])):
        at_once, some, some_outs = decoded(scratch)
        assert at_once in expected
        assert_close(some, output, TOLERANCE[F32])
        for mass, whole in zip(some_outs, outs):
            assert_close(mass, whole)
