"""Triton kernels against their torch references: under Triton's interpreter, or on a GPU where there is one."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402

from vllm_evict.attention.compact import compact_reference as packed_compact_reference  # noqa: E402
from vllm_evict.attention.compact import is_ordered  # noqa: E402
from vllm_evict.attention.decode import decode_classes_reference, decode_mass_reference  # noqa: E402
from vllm_evict.attention.mass import block_mass_reference, pack_keys  # noqa: E402
from vllm_evict.triton_kernels.compact import compact, compact_reference, plan_compact  # noqa: E402
from vllm_evict.triton_kernels.decode_classes import decode_classes, plan_classes  # noqa: E402
from vllm_evict.triton_kernels.decode_mass import decode_mass, plan_decode  # noqa: E402
from vllm_evict.triton_kernels.mass_from_lse import mass_from_lse, mass_from_lse_reference  # noqa: E402
from vllm_evict.triton_kernels.query_lse import query_lse, query_lse_reference  # noqa: E402
from vllm_evict.triton_kernels.resident_view import resident_view, resident_view_reference  # noqa: E402
from vllm_evict.triton_kernels.select import select, select_reference  # noqa: E402
from vllm_evict.triton_kernels.tiles import tile_of  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = [
    pytest.mark.skipif(
        not ON_GPU and not triton.knobs.runtime.interpret, reason="no GPU, and triton without TRITON_INTERPRET"
    ),
    # numpy's, where padding gives log2(0) and -inf - -inf, which kernels mask.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
FP8 = torch.float8_e4m3fn
HEAD_MAJOR, TOKEN_MAJOR = KVCacheLayout.LBHNC, KVCacheLayout.LBNHC
#: Of an output, by its own rounding and that of the probabilities before they meet the values.
TOLERANCE = {F32: 3e-6, F16: 2e-3, BF16: 1.6e-2}


@pytest.fixture(autouse=True)
def interpreter_gaps(monkeypatch):
    """What Triton 3.9's interpreter lacks."""
    if ON_GPU:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot, copy = InterpreterBuilder.create_dot, torch.UntypedStorage.copy_

    def upcast(handle):
        """It multiplies the bits of bfloat16 as integers. A tensor core multiplies exactly and adds in float32."""
        if handle.dtype.scalar != triton.language.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), triton.language.float32)

    def copy_(storage, source, *options):
        """It copies what a kernel wrote onto itself, which would touch all of a cache of gigabytes."""
        return storage if source.data_ptr() == storage.data_ptr() else copy(storage, source, *options)

    monkeypatch.setattr(
        InterpreterBuilder, "create_dot", lambda self, a, b, *rest: dot(self, upcast(a), upcast(b), *rest)
    )
    monkeypatch.setattr(torch.UntypedStorage, "copy_", copy_)


def ints(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def cache_in(layout: KVCacheLayout, dtype, blocks, kv_heads, block_size, content, layers=2) -> torch.Tensor:
    """One layer's [B, H, N, C] of a cache that lies as vLLM's `layout` says, all NaN."""
    return caches_in(layout, dtype, blocks, kv_heads, block_size, content, layers)[layers - 1].fill_(torch.nan)


def caches_in(layout: KVCacheLayout, dtype, blocks, kv_heads, block_size, content, layers) -> torch.Tensor:
    """[L, B, H, N, C] of random bytes."""
    logical = (layers, blocks, kv_heads, block_size, content)
    physical = [logical[axis] for axis in layout.stride_order]
    random = torch.Generator().manual_seed(0)
    size = (*physical[:-1], physical[-1] * dtype.itemsize)
    memory = torch.randint(0, 256, size, dtype=torch.uint8, generator=random).to(DEVICE).view(dtype)
    return memory.permute([layout.stride_order.index(axis) for axis in range(5)])


class Batch:
    """Random arguments. All that no query may read is NaN: other blocks and layers, and what lies beyond last tokens.

    With `scales`, of keys and values, the cache is fp8.
    """

    def __init__(
        self,
        query_lens,
        seq_lens,
        heads=(4, 2),
        dim=64,
        block_size=16,
        dtype=F32,
        layout=HEAD_MAJOR,
        magnitude=1.0,
        scales=None,
    ):
        random = torch.Generator().manual_seed(0)
        self.heads, self.kv_heads = heads
        self.block_size, self.scale = block_size, dim**-0.5
        blocks = [-(-length // block_size) for length in seq_lens]
        pages = torch.full((sum(blocks) + 3, self.kv_heads, block_size, 2 * dim), torch.nan)
        ids = torch.randperm(len(pages), generator=random).int()
        self.table = torch.full((len(seq_lens), max(blocks) + 3), -1, dtype=torch.int32)
        for row, used, length in zip(self.table, ids.split([*blocks, 3]), seq_lens):
            row[: len(used)] = used
            keys = torch.randn(len(used) * block_size, self.kv_heads, 2 * dim, generator=random) * magnitude
            keys[length:] = torch.nan
            pages[used.long()] = keys.unflatten(0, (-1, block_size)).transpose(1, 2)
        cache = cache_in(layout, FP8 if scales else dtype, *pages.shape)
        cache.copy_(pages)
        self.keys, self.values = cache.split(dim, dim=-1)
        # What they stand for: references take it.
        self.real_keys, self.real_values, self.kernel_scale, self.value_scale = self.keys, self.values, self.scale, 1.0
        if scales:
            if ON_GPU and torch.cuda.get_device_capability() < (8, 9):
                pytest.skip("Triton has float8_e4m3fn from compute capability 8.9 on")
            key_scale, self.value_scale = scales
            self.kernel_scale *= key_scale
            self.real_keys, self.real_values = (x.float() * by for x, by in zip((self.keys, self.values), scales))
        tokens = sum(query_lens)
        query = torch.randn(tokens, self.heads + 1, dim, generator=random)
        self.query = query.to(DEVICE, dtype)[:, 1:]  # not dense
        self.table = self.table.to(DEVICE)[:, :-1]
        self.starts = ints([0, *itertools.accumulate(query_lens)])
        self.seq_lens = ints(seq_lens)
        self.rows = ints([row for row, length in enumerate(query_lens) if length == 1])
        self.weights = (torch.rand(tokens, generator=random) * (torch.rand(tokens, generator=random) < 0.7)).to(DEVICE)

    def new_out(self, rows, dtype=F32, per_token=False):
        """Sums that are there already; of blocks wider than need be, of tokens as wide as the longest request."""
        width = int(self.seq_lens.max()) if per_token else self.table.shape[1] + 1
        out = torch.full((len(self.seq_lens), rows, width + 1), 0.25, dtype=dtype, device=DEVICE)
        return out[:, :, :-1]

    def plan(self, **options):
        shape = len(self.rows), self.heads, self.kv_heads, self.query.shape[2], self.block_size, self.table.shape[1]
        return plan_decode(*shape, self.query.dtype, DEVICE, **options)

    def decode(self, rows_of_mass=None, per_token=False, **options):
        output = torch.full_like(self.query, 7.0)
        lse = torch.full(self.query.shape[:2], 7.0, device=DEVICE)
        out = self.new_out(rows_of_mass or self.kv_heads, per_token=per_token) if rows_of_mass != 0 else None
        options = {"weights": self.weights, "lse": lse, "per_token": per_token} | options
        decode_mass(
            *(self.query, self.keys, self.values, self.table, self.starts, self.seq_lens, self.rows),
            *(self.kernel_scale, output),
            value_scale=self.value_scale,
            out=out,
            **options,
        )
        return output, out, lse

    def decode_reference(self, rows_of_mass=None, per_token=False):
        output = torch.full_like(self.query, 7.0).cpu()
        out = self.new_out(rows_of_mass or self.kv_heads, torch.float64, per_token).cpu()
        caches = pack_keys(self.real_keys.cpu()), self.real_values
        arguments = self.query, *caches, self.table, self.starts, self.seq_lens, self.rows
        decode_mass_reference(
            *(tensor.cpu() for tensor in arguments),
            *(self.scale, output),
            out=out,
            per_token=per_token,
            weights=self.weights.cpu(),
        )
        return output, out

    def lse(self):
        """Of each query and head, over what it sees. float32 [T, H]."""
        result = torch.zeros(self.query.shape[:2], dtype=torch.float64)
        starts = self.starts.tolist()
        for r, seq_len in enumerate(self.seq_lens.tolist()):
            blocks = self.table[r, : -(-seq_len // self.block_size)].long()
            keys = self.real_keys[blocks].transpose(0, 1).flatten(1, 2)[:, :seq_len].double().cpu()
            keys = keys.repeat_interleave(self.heads // self.kv_heads, 0)
            query = self.query[starts[r] : starts[r + 1]].double().cpu()
            scores = torch.einsum("qhd,htd->qht", query, keys) * self.scale
            last = seq_len - len(query) + torch.arange(len(query))
            scores.masked_fill_((torch.arange(seq_len) > last[:, None])[:, None], -torch.inf)
            result[starts[r] : starts[r + 1]] = scores.logsumexp(-1)
        return result.float().to(DEVICE)


def assert_close(actual, expected, tolerance=3e-6):
    torch.testing.assert_close(actual.double().cpu(), expected.double().cpu(), rtol=tolerance, atol=tolerance)


DECODE = [1, 0, 3, 1, 1], [1, 20, 64, 48, 130]
PREFILL = [21, 1, 0, 40], [21, 33, 5, 75]
SHAPES = [  # heads, dim, block size, dtype, layout
    ((4, 2), 64, 16, F32, KVCacheLayout.LBHNC),
    ((4, 2), 64, 16, BF16, KVCacheLayout.LBNHC),
    ((4, 2), 64, 32, F16, KVCacheLayout.LHBNC),
    ((4, 4), 32, 16, BF16, KVCacheLayout.BLHNC),  # MHA
    ((2, 2), 80, 16, F32, KVCacheLayout.BLNHC),
    ((16, 1), 128, 16, BF16, KVCacheLayout.BHLNC),  # 16 query heads a KV head
    ((14, 2), 96, 64, F16, TOKEN_MAJOR),  # 7
    ((6, 2), 112, 48, BF16, TOKEN_MAJOR),  # a block that is no power of two
    ((3, 1), 256, 32, F32, HEAD_MAJOR),  # a tile of half a block
    ((8, 1), 256, 128, BF16, TOKEN_MAJOR),  # a quarter
    ((5, 1), 128, 176, F16, HEAD_MAJOR),  # blocks of two and three quarters of a tile
    ((4, 2), 128, 256, BF16, TOKEN_MAJOR),
]
BY = pytest.mark.parametrize("per_token", [False, True], ids=["blocks", "tokens"])
SHAPE_IDS = [f"{h}x{d}-bs{b}-{str(t)[6:]}-{o.name}" for h, d, b, t, o in SHAPES]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_IDS)
#: GQA with float32, bfloat16 and float16 queries, one head, an odd block, parts of blocks.
each_fp8_shape = pytest.mark.parametrize("shape", SHAPES[:4] + SHAPES[6:9], ids=SHAPE_IDS[:4] + SHAPE_IDS[6:9])


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
    """As if they were full of what they stand for: exactly, but for the rounding of probabilities and outputs."""
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
    batch = Batch(*DECODE, dtype=BF16)
    output, mass, lse = batch.decode(weights=None)
    assert torch.equal(batch.decode(0)[0], output) and torch.equal(batch.decode(0)[2], lse)
    batch.weights = torch.zeros_like(batch.weights)
    output_, unweighed, lse_ = batch.decode()
    assert torch.equal(output_, output) and torch.equal(lse_, lse)
    assert (unweighed == 0.25).all() and not torch.equal(mass, unweighed)


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
    batch = Batch(*DECODE, heads=(6, 2), dtype=BF16)
    _, mass, _ = batch.decode(weights=None)
    expected = torch.zeros(len(batch.seq_lens), 2)
    expected[batch.rows.cpu().long()] = 3
    assert_close((mass - 0.25).sum(2), expected, 2e-5)


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
    batch = Batch(*DECODE, magnitude=12.0)
    output, mass, _ = batch.decode(per_token=per_token)
    expected, expected_mass = batch.decode_reference(per_token=per_token)
    assert_close(output, expected, 1e-4)
    assert_close(mass, expected_mass, 1e-4)


def test_a_request_without_tokens_gets_zeros():
    batch = Batch([1], [16])
    batch.seq_lens = ints([0])
    output, mass, lse = batch.decode()
    assert not output.any() and (mass == 0.25).all() and (lse == -torch.inf).all()


@BY
def test_decode_captures_into_a_graph(per_token):
    if not ON_GPU:
        pytest.skip("CUDA graphs need a GPU")
    batch = Batch(*DECODE, dtype=BF16)
    plan = batch.plan(per_token=per_token)
    expected = batch.decode(per_token=per_token, plan=plan)
    output, lse = torch.empty_like(batch.query), torch.empty_like(expected[2])
    out = batch.new_out(batch.kv_heads, per_token=per_token)
    options = {"per_token": per_token, "weights": batch.weights, "lse": lse, "plan": plan}
    arguments = batch.query, batch.keys, batch.values, batch.table, batch.starts, batch.seq_lens, batch.rows
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_mass(*arguments, batch.scale, output, out=out, **options)
    out.fill_(0.25)
    graph.replay()
    tokens = batch.starts[batch.rows.long()].long()
    assert torch.equal(out, expected[1])
    assert torch.equal(output[tokens], expected[0][tokens]) and torch.equal(lse[tokens], expected[2][tokens])


def test_splits_fill_the_device_and_no_more():
    def splits(rows, kv_heads, tokens):
        return plan_decode(rows, 32, kv_heads, 128, 16, tokens // 16, BF16, "cpu").splits

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
        shape = len(self.classes[0].rows), self.group, self.kv_heads, self.query.shape[2], self.classes[0].block_size
        widths = [each.table.shape[1] for each in self.classes]
        return plan_classes(*shape, widths, self.query.dtype, DEVICE, **options)

    def arguments(self):
        first = self.classes[0]
        tables = self.of("table"), first.starts, self.of("seq_lens"), first.rows
        return self.query, self.of("keys"), self.of("values"), *tables, first.kernel_scale

    def decode(self, **options):
        output = torch.full_like(self.query, 7.0)
        lse = torch.full(self.query.shape[:2], 7.0, device=DEVICE)
        first = self.classes[0]
        options = {"lse": lse, "weights": first.weights, "value_scale": first.value_scale} | options
        decode_classes(*self.arguments(), output, **options)
        return output, options["lse"]


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
    query, _, _, tables, starts, lens, rows, _ = layer.arguments()
    keys, values = ([each.cpu() for each in layer.of(name)] for name in ("real_keys", "real_values"))
    lens, scale = [each.cpu() for each in lens], layer.classes[0].scale
    decode_classes_reference(
        *(query.cpu(), [pack_keys(each) for each in keys], values),
        *([table.cpu() for table in tables], starts.cpu(), lens, rows.cpu(), scale, expected),
        out=expected_out,
        per_token=per_token,
        weights=layer.classes[0].weights.cpu(),
    )
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
        layer.decode(out=[None])
    layer.classes[1].keys, layer.classes[1].values = layer.classes[1].keys.to(FP8), layer.classes[1].values.to(FP8)
    with pytest.raises(ValueError, match="caches of both classes must have one dtype"):
        layer.decode()


def test_splits_of_classes_are_of_one_length():
    def splits(rows, kv_heads, tokens):
        blocks = [count // 16 for count in tokens]
        return [plan.splits for plan in plan_classes(rows, 4, kv_heads, 128, 16, blocks, BF16, "cpu")]

    assert splits(1, (4, 4), (131_072, 384)) == [128, 1]  # 1,000 tokens each
    assert splits(1, (4, 4), (131_072, 131_072)) == [66, 66]  # those of 8 heads of one class
    assert splits(64, (4, 4), (131_072, 384)) == [3, 1]
    assert splits(512, (4, 4), (131_072, 384)) == [1, 1]


# ---- mass_from_lse


@each_shape
def test_mass_from_lse_matches_the_reference(shape):
    heads, dim, block_size, dtype, layout = shape
    batch = Batch(*PREFILL, heads, dim, block_size, dtype, layout)
    rows = heads[1] if SHAPES.index(shape) % 2 else 1
    arguments = batch.query, batch.keys, batch.lse(), batch.table, batch.starts, batch.seq_lens, batch.scale
    for options in ({}, {"weights": batch.weights}, {"weights": batch.weights, "last": ints([5, 3, 1, 17])}):
        out, expected = batch.new_out(rows), batch.new_out(rows, torch.float64)
        mass_from_lse(*arguments, out, **options)
        mass_from_lse_reference(*arguments, expected, **options)
        assert_close(out, expected, 1e-5)
        again = batch.new_out(rows)
        if options:
            mass_from_lse(*arguments, again, **options)
            assert torch.equal(again, out)


@each_shape
def test_mass_of_tokens_from_lse_matches_the_reference(shape):
    heads, dim, block_size, dtype, layout = shape
    batch = Batch(*PREFILL, heads, dim, block_size, dtype, layout)
    rows = heads[1] if SHAPES.index(shape) % 2 else 1
    arguments = batch.query, batch.keys, batch.lse(), batch.table, batch.starts, batch.seq_lens, batch.scale
    options = {"weights": batch.weights, "last": ints([5, 3, 1, 17]), "per_token": True}
    out, expected, again = (batch.new_out(rows, dtype, per_token=True) for dtype in (F32, F64, F32))
    mass_from_lse(*arguments, out, **options)
    mass_from_lse_reference(*arguments, expected, **options)
    assert_close(out, expected, 1e-5)
    mass_from_lse(*arguments, again, **options)
    assert torch.equal(again, out)


@BY
@each_fp8_shape
def test_mass_and_lse_are_read_off_fp8_keys(shape, per_token):
    batch = Batch(*PREFILL, *shape, scales=(0.75, 1.0))
    lse = torch.full(batch.query.shape[:2], 7.0, device=DEVICE)
    lists = batch.table, batch.starts, batch.seq_lens
    query_lse(batch.query, batch.keys, *lists, batch.kernel_scale, lse, longest=40)
    assert_close(lse, batch.lse(), 1e-5)
    out, expected = (batch.new_out(batch.kv_heads, dtype, per_token) for dtype in (F32, F64))
    options = {"weights": batch.weights, "per_token": per_token}
    mass_from_lse(batch.query, batch.keys, batch.lse(), *lists, batch.kernel_scale, out, **options)
    mass_from_lse_reference(batch.query, batch.real_keys, batch.lse(), *lists, batch.scale, expected, **options)
    assert_close(out, expected, 1e-5)


@BY
def test_mass_from_lse_is_that_of_block_mass(per_token):
    batch = Batch(*PREFILL)
    expected = batch.new_out(2, torch.float64, per_token).cpu()
    tensors = batch.query, pack_keys(batch.keys.cpu()), batch.table, batch.starts, batch.seq_lens
    options = {"weights": batch.weights.cpu(), "per_token": per_token}
    block_mass_reference(*(t.cpu() for t in tensors), batch.scale, expected, **options)
    arguments = batch.table, batch.starts, batch.seq_lens, batch.scale
    for lse, base_2 in ((batch.lse(), False), (batch.lse().T.contiguous().T * 1.4426950408889634, True)):
        out = batch.new_out(2, per_token=per_token)
        options = {"weights": batch.weights, "per_token": per_token, "lse_base_2": base_2, "rows_per_tile": 16}
        mass_from_lse(batch.query, batch.keys, lse, *arguments, out, **options)
        assert_close(out, expected, 1e-5)


def test_decode_gives_the_lse_that_mass_from_lse_takes():
    batch = Batch([1, 1], [50, 131], dtype=BF16)
    _, mass, lse = batch.decode()
    out = batch.new_out(2)
    tensors = batch.query, batch.keys, lse, batch.table, batch.starts, batch.seq_lens
    mass_from_lse(*tensors, batch.scale, out, weights=batch.weights)
    assert_close(out, mass, 1e-5)


# ---- query_lse


@each_shape
def test_query_lse_matches_the_reference(shape):
    batch = Batch(*PREFILL, *shape)
    arguments = batch.query, batch.keys, batch.table, batch.starts, batch.seq_lens, batch.scale
    for options in ({}, {"weights": batch.weights}):
        lse, expected = (torch.full(batch.query.shape[:2], 7.0, dtype=dtype, device=DEVICE) for dtype in (F32, F64))
        query_lse(*arguments, lse, longest=40, **options)
        query_lse_reference(*arguments, expected, **options)
        assert_close(lse, expected, 1e-5)
        if not options:
            assert_close(lse, batch.lse(), 1e-5)


def test_query_lse_of_long_chunks_and_strided_rows():
    """Several programs a request; `longest` may be left out, and only costs programs that do nothing."""
    batch = Batch([150, 2, 0, 70], [170, 300, 5, 70])
    lse = torch.full((batch.heads, len(batch.query)), 7.0, device=DEVICE).T
    query_lse(batch.query, batch.keys, batch.table, batch.starts, batch.seq_lens, batch.scale, lse)
    assert_close(lse, batch.lse(), 1e-5)


# ---- 64 bits


@pytest.mark.parametrize("axis", ["block", "head"])
def test_slots_beyond_2_to_the_31(axis):
    """Strides of 2**30 fit 32 bits, twice that does not. Only pages that are used take memory (on a GPU, 4 GiB)."""
    far, dim, block_size, heads = 2**30 + 64, 32, 16, 3
    page = heads * block_size * 2 * dim
    try:
        memory = torch.empty(2 * far + 3 * page, dtype=F16, device=DEVICE)
    except RuntimeError as error:
        pytest.skip(f"no 4 GiB of addresses: {error}")
    near, batch = (Batch([1, 2], [24, 24], (heads, heads), dim, block_size, F16) for _ in range(2))
    strides = (far, block_size * 2 * dim) if axis == "block" else (block_size * 2 * dim, far)
    cache = torch.as_strided(memory, (3, heads, block_size, 2 * dim), (*strides, 2 * dim, 1))
    near.table[1] = near.table[0]
    batch.table[:, :2] = ints([0, 2])
    for block, source in zip((0, 2), near.table[0].tolist()):
        cache[block] = torch.cat((near.keys[source], near.values[source]), -1)
    batch.keys, batch.values = cache.split(dim, -1)
    assert all(torch.equal(a, b) for a, b in zip(batch.decode(), near.decode(), strict=True))
    outs = []
    for each in (batch, near):
        outs.append(each.new_out(heads))
        tensors = each.query, each.keys, near.lse(), each.table, each.starts, each.seq_lens
        mass_from_lse(*tensors, each.scale, outs[-1])
    assert torch.equal(*outs)


# ---- compact


class Compaction:
    """Requests of some tokens, of which each layer and head keeps others, in caches of random bytes."""

    def __init__(self, tokens, kept, layout=HEAD_MAJOR, dtype=F32, heads=2, dim=32, block_size=16, shared=False):
        self.layers, self.block_size = 3, block_size
        self.blocks, self.targets = ([-(-count // block_size) for count in counts] for counts in (tokens, kept))
        used = sum(self.blocks) + sum(self.targets)
        self.cache = caches_in(layout, dtype, used + 2, heads, block_size, 2 * dim, self.layers)
        random = torch.Generator().manual_seed(1)
        ids = torch.randperm(used + 2, generator=random).int().to(DEVICE)
        self.source, self.target = ids[: sum(self.blocks)], ids[sum(self.blocks) : used]
        layers = 1 if shared else self.layers
        keep = [
            torch.stack([torch.randperm(length, generator=random)[:count].sort().values for _ in range(layers * heads)])
            for length, count in zip(tokens, kept)
        ]
        self.keep = torch.cat(keep, 1).int().unflatten(0, (layers, heads)).to(DEVICE)
        self.starts = ints([[0, *itertools.accumulate(counts)] for counts in (self.blocks, kept, self.targets)])

    def run(self, function=compact, **options):
        """The caches' bytes afterwards."""
        cache = torch.empty_strided(self.cache.shape, self.cache.stride(), dtype=self.cache.dtype, device=DEVICE)
        cache.view(torch.uint8).copy_(self.cache.view(torch.uint8))
        function(list(cache), self.source, self.keep, self.target, self.starts, **options)
        return cache.view(torch.uint8)


COMPACT = [150, 1, 64, 96], [70, 1, 0, 96]
COMPACT_SHAPES = [  # layout, dtype, heads, dim, block size, whether all layers keep the same
    (KVCacheLayout.LBHNC, F32, 2, 32, 16, False),
    (KVCacheLayout.LBNHC, BF16, 3, 64, 16, True),
    (KVCacheLayout.LHBNC, F16, 1, 80, 48, False),
    (KVCacheLayout.BLHNC, torch.float8_e4m3fn, 2, 128, 32, False),
    (KVCacheLayout.BLNHC, torch.uint8, 2, 34, 16, False),  # rows that are no multiples of 16 bytes
    (KVCacheLayout.BHLNC, BF16, 1, 256, 64, True),
]


@pytest.mark.parametrize("shape", COMPACT_SHAPES, ids=[f"{s[0].name}-{s[1]}-{s[3]}-bs{s[4]}" for s in COMPACT_SHAPES])
def test_compact_matches_the_reference(shape):
    batch = Compaction(*COMPACT, *shape)
    expected = batch.run(compact_reference)
    assert not torch.equal(expected, batch.cache.view(torch.uint8))
    assert torch.equal(batch.run(), expected)
    assert torch.equal(batch.run(ordered=True), expected)  # new blocks
    row = shape[2] * batch.keep.shape[2] * batch.cache[0, 0, 0, 0].view(torch.int32).numel()
    for layers in (1, 2):
        assert torch.equal(batch.run(scratch=torch.empty(layers * row + 3, dtype=torch.int32, device=DEVICE)), expected)


def test_compact_moves_what_the_packed_kernel_moves():
    batch = Compaction([100], [40], dtype=BF16)
    half = batch.cache.shape[-1] // 2
    packed = [torch.cat((pack_keys(layer[..., :half]), layer[..., half:]), 2) for layer in batch.cache.cpu()]
    batch.starts = None
    expected = batch.run().cpu().view(BF16)
    arguments = (tensor.cpu() for tensor in (batch.source, batch.keep, batch.target))
    packed_compact_reference(packed, *arguments)
    for layer, page in zip(expected, packed):
        assert torch.equal(pack_keys(layer[..., :half]).view(torch.int16), page[:, :, :16].view(torch.int16))
        assert torch.equal(layer[..., half:].view(torch.int16), page[:, :, 16:].view(torch.int16))


@pytest.mark.parametrize(
    ("places", "ordered"),
    [
        (lambda m: range(m), True),
        (lambda m: [*range(1, m), 0], False),
        (lambda m: range(12 - m, 12), False),
        (lambda m: [-1, *range(m - 1)], True),  # -1: a new block
        (lambda m: [0, -1, *range(2, m)], True),
    ],
)
def test_a_target_may_be_a_source(places, ordered):
    """In any order through scratch, and directly where the order allows."""
    for kept in (33, 64, 95):
        batch = Compaction([192], [kept], heads=1, dim=256, dtype=F32)  # 16 tokens a chunk
        new = batch.target[0]
        batch.target = torch.stack([new if place < 0 else batch.source[place] for place in places(-(-kept // 16))])
        assert is_ordered(batch.source.cpu(), batch.target.cpu()) == ordered
        expected = batch.run(compact_reference)
        assert torch.equal(batch.run(), expected)
        assert torch.equal(batch.run(ordered=True), expected) or not ordered


def test_a_plan_of_compact_is_for_its_caches():
    batch = Compaction(*COMPACT)
    plan = plan_compact(list(batch.cache))
    for wrong in (plan._replace(pages=plan.pages[:1]), plan_compact(list(batch.cache[:, 1:]))):
        with pytest.raises(ValueError, match="plan must be for"):
            batch.run(plan=wrong)
    cache = list(batch.cache.clone())
    compact(cache, batch.source, batch.keep, batch.target, batch.starts, plan=plan_compact(cache))
    assert torch.equal(torch.stack(cache).view(torch.uint8), batch.run())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"keep": lambda b: b.keep.long()}, TypeError, "keep must be int32"),
        ({"keep": lambda b: b.keep[:2]}, ValueError, r"keep must be \[L or 1"),
        ({"starts": lambda b: b.starts[:2]}, ValueError, r"starts must be \[3"),
        ({"source": lambda b: b.source.repeat(2)[::2]}, ValueError, "must be dense"),
        ({"cache": lambda b: b.cache.mT}, ValueError, "C contiguous"),
        ({"cache": lambda b: [*b.cache[:2], b.cache[2].mT.contiguous().mT]}, ValueError, "same strides"),
        ({"cache": lambda b: [*b.cache[:2], b.cache[2].half()]}, ValueError, "C contiguous"),
        ({"cache": lambda b: b.cache.to(torch.uint8)[..., :6]}, ValueError, "whole words"),
    ],
)
def test_compact_refuses(change, error, message):
    batch = Compaction(*COMPACT)
    for name, value in change.items():
        setattr(batch, name, value(batch))
    with pytest.raises(error, match=message):
        compact(list(batch.cache), batch.source, batch.keep, batch.target, batch.starts)
    with pytest.raises(ValueError, match="one layer's tokens"):
        Compaction(*COMPACT).run(scratch=ints([0] * 9))


# ---- resident_view


@pytest.mark.parametrize("chunk", [None, 16])
def test_view_matches_the_reference(chunk):
    random = torch.Generator().manual_seed(1)
    for block_size, rows, width in ((16, 5, 40), (32, 3, 1), (48, 4, 17)):
        lens = torch.randint(0, width * block_size + 1, (rows,), generator=random).int()
        lens[0] = 0
        table = torch.randint(1, 10**9, (rows, width + 2), generator=random).int()[:, :width]
        table[torch.rand(rows, width, generator=random) < 0.4] = 0
        for row, length in zip(table, lens.tolist(), strict=True):
            if length:
                row[-(-length // block_size) - 1] = 9
        results = []
        for function, device, options in (
            (resident_view, DEVICE, {"chunk": chunk}),
            (resident_view_reference, "cpu", {}),
        ):
            garbage = torch.full((2, rows, width + 5), 77, dtype=torch.int32, device=device)[:, :, : width + 2]
            out = garbage[0], torch.full((rows,), 77, dtype=torch.int32, device=device), garbage[1]
            function(table.to(device), lens.to(device), block_size, *out, **options)
            results.append([tensor.cpu() for tensor in out])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        only = torch.full_like(results[0][0], 77).to(DEVICE)
        resident_view(table.to(DEVICE), lens.to(DEVICE), block_size, only, torch.zeros_like(lens).to(DEVICE))
        assert torch.equal(only.cpu(), results[0][0])


def test_padding_rows_have_no_length_below_zero():
    lens, out = ints([7, 7]), ints([[7, 7], [7, 7]])
    resident_view(ints([[0, 0], [3, 0]]), ints([1, 16]), 16, out, lens)
    assert lens.tolist() == [0, 16] and out.tolist() == [[0, 0], [3, 0]]


# ---- select


@pytest.mark.parametrize("chunk", [None, 16])
def test_select_matches_the_reference(chunk):
    random = torch.Generator().manual_seed(2)
    width = 40 if chunk else 700
    scores = torch.randn(6, width + 3, generator=random)[:, :width]
    scores[1] = scores[1].round()  # ties, at the threshold too
    scores[2] = 0.0
    scores[2, ::2] = -0.0
    scores[3, 5:11] = torch.tensor([torch.nan, torch.inf, -torch.inf, -torch.nan, 1e-45, -1e-45])
    scores[4] = torch.nan
    first, last = ints([2, 0, 1, 0, 3, 7]), ints([width - 2, width, 30, width + 9, 39, 7])
    for k in ([5, 20, 9, 38, 7, 3], [0, 1, 99, width, -1, 0]):
        results = []
        for function, device, options in ((select, DEVICE, {"chunk": chunk}), (select_reference, "cpu", {})):
            out = [torch.full(shape, 77, dtype=torch.int32, device=device) for shape in ((6, 45), (6,))]
            function(*(tensor.to(device) for tensor in (scores, first, last, ints(k))), *out, **options)
            results.append([tensor.cpu() for tensor in out])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_equal_scores_go_from_the_oldest_on():
    victims, counts = ints([[7] * 4]), ints([7])
    select(torch.ones(1, 9, device=DEVICE), ints([2]), ints([8]), ints([3]), victims, counts)
    assert victims.tolist() == [[2, 3, 4, -1]] and counts.tolist() == [3]


# ---- arguments


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda b: setattr(b, "values", b.values.half()), TypeError, "one dtype"),
        (lambda b: setattr(b, "values", b.values.to(FP8)), TypeError, "one dtype.*or caches float8_e4m3fn"),
        (lambda b: setattr(b, "keys", b.keys.mT), ValueError, "contiguous|the query's D"),
        (lambda b: setattr(b, "seq_lens", b.seq_lens.long()), TypeError, "seq_lens must be int32"),
        (lambda b: setattr(b, "weights", b.weights.double()), ValueError, "weights must be float32"),
        (lambda b: setattr(b, "starts", b.starts[:-1]), ValueError, "R must agree"),
    ],
)
def test_bad_arguments_are_refused(change, error, message):
    batch = Batch(*DECODE)
    change(batch)
    with pytest.raises(error, match=message):
        batch.decode()


def test_a_plan_for_something_else_is_refused():
    batch = Batch(*DECODE)
    for plan in (Batch(*DECODE, dim=128).plan(), batch.plan(mass=False), batch.plan()._replace(splits=5)):
        with pytest.raises(ValueError, match="plan must be for"):
            batch.decode(plan=plan)
    with pytest.raises(ValueError, match="for tokens if they are wanted"):
        batch.decode(per_token=True, plan=batch.plan())


# ---- benchmark


@pytest.mark.skipif(ON_GPU, reason="there it measures")
def test_what_the_benchmark_times_runs(capsys):
    path = Path(__file__).parents[1] / "benchmarks/gpu/kernels.py"
    spec = importlib.util.spec_from_file_location("gpu_kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(["--dry-run"])
    ran = [line.split(" ")[0] for line in capsys.readouterr().out.splitlines()]
    assert {kind: ran.count(kind) for kind in ran} == {"decode": 6, "chunk": 4, "classes": 3, "compact": 3}


# ---- compiled


def test_compiles_for_hopper_without_spills_or_atomics(tmp_path):
    """What the interpreter does not see; ptxas comes with Triton, so no GPU is needed."""
    if sys.platform != "linux":
        pytest.skip("Triton has its ptxas on Linux only")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    script = Path(__file__).with_name("triton_compile.py")
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert {kernel["kernel"] for kernel in found} == {
        "_attend", "_attend_classes", "_combine", "_combine_classes", "_compact", "_fold", "_mass_from_lse", "_query_lse",
        "_resident_view", "_select",
    }  # fmt: skip
    direct, out, back = [kernel for kernel in found if kernel["kernel"] == "_compact"][:3]
    # Within the caches a barrier lies between reads and writes, which the interpreter does not need.
    assert direct["bar.sync"] == 1 and not out["bar.sync"] and not back["bar.sync"]
    assert direct["ld.global.v4"] and out["ld.global.v4"] and back["ld.global.v4"]
    reads_fp8 = {kernel["kernel"] for kernel in found if kernel["e4m3x2"]}
    assert reads_fp8 == {"_attend", "_attend_classes", "_mass_from_lse", "_query_lse"}
    for kernel in found:
        # Of fp8 ptxas puts up to two words aside rather than let fewer programs share an SM.
        assert kernel["spilled"] <= (8 if kernel["e4m3x2"] else 0) and not kernel["atom."], kernel
        if kernel["kernel"].startswith("_attend"):
            # Three programs on an SM: 65,536 registers, 227 KiB of shared memory, of which each takes 1 more. Two for
            # head size 256.
            programs = min(65536 // (kernel["registers"] * kernel["threads"]), 227 * 1024 // (kernel["shared"] + 1024))
            assert programs >= 2, kernel
