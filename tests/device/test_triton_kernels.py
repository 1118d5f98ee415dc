"""Triton kernels beside those that decode, against their torch references: under the interpreter, or on a GPU."""

import importlib.util
import itertools
from pathlib import Path

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
    ON_GPU,
    PREFILL,
    SHAPES,
    WHERE_KERNELS_RUN,
    Batch,
    assert_close,
    beyond_2_to_the_31,
    caches_in,
    each_fp8_shape,
    each_shape,
    interpreter_gaps,  # noqa: F401
    ints,
    on_cpu,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_evict.compute.kernels.compact import compact_reference as packed_compact_reference
from vllm_evict.compute.kernels.compact import is_ordered
from vllm_evict.compute.kernels.mass import block_mass_reference, pack_keys
from vllm_evict.compute.kernels.view import View
from vllm_evict.triton_kernels.compact import compact, compact_reference, plan_compact
from vllm_evict.triton_kernels.mass_from_lse import mass_from_lse, mass_from_lse_reference
from vllm_evict.triton_kernels.query_lse import query_lse, query_lse_reference
from vllm_evict.triton_kernels.resident_view import resident_view, resident_view_reference

pytestmark = WHERE_KERNELS_RUN


# ---- mass_from_lse


@each_shape
def test_mass_from_lse_matches_the_reference(shape):
    heads, dim, block_size, dtype, layout = shape
    batch = Batch(*PREFILL, heads, dim, block_size, dtype, layout)
    rows = heads[1] if SHAPES.index(shape) % 2 else 1
    lse = batch.lse()
    for weights, last in ((None, None), (batch.weights, None), (batch.weights, ints([5, 3, 1, 17]))):
        out, expected, again = (batch.new_out(rows, dtype) for dtype in (F32, F64, F32))
        mass_from_lse(batch.attention(out, weights=weights), lse, last=last)
        mass_from_lse_reference(batch.attention(expected, weights=weights), lse, last=last)
        assert_close(out, expected, 1e-5)
        if weights is not None:
            mass_from_lse(batch.attention(again, weights=weights), lse, last=last)
            assert torch.equal(again, out)


@each_shape
def test_mass_of_tokens_from_lse_matches_the_reference(shape):
    heads, dim, block_size, dtype, layout = shape
    batch = Batch(*PREFILL, heads, dim, block_size, dtype, layout)
    rows = heads[1] if SHAPES.index(shape) % 2 else 1
    lse, last, options = batch.lse(), ints([5, 3, 1, 17]), {"weights": batch.weights, "per_token": True}
    out, expected, again = (batch.new_out(rows, dtype, per_token=True) for dtype in (F32, F64, F32))
    mass_from_lse(batch.attention(out, **options), lse, last=last)
    mass_from_lse_reference(batch.attention(expected, **options), lse, last=last)
    assert_close(out, expected, 1e-5)
    mass_from_lse(batch.attention(again, **options), lse, last=last)
    assert torch.equal(again, out)


@BY
@each_fp8_shape
def test_mass_and_lse_are_read_off_fp8_keys(shape, per_token):
    batch = Batch(*PREFILL, *shape, scales=(0.75, 1.0))
    lse = torch.full(batch.query.shape[:2], 7.0, device=DEVICE)
    query_lse(batch.attention(), lse, longest=40)
    assert_close(lse, batch.lse(), 1e-5)
    out, expected = (batch.new_out(batch.kv_heads, dtype, per_token) for dtype in (F32, F64))
    options = {"weights": batch.weights, "per_token": per_token}
    mass_from_lse(batch.attention(out, **options), batch.lse())
    mass_from_lse_reference(batch.real_attention(expected, **options), batch.lse())
    assert_close(out, expected, 1e-5)


@BY
def test_mass_from_lse_is_that_of_block_mass(per_token):
    batch = Batch(*PREFILL)
    expected, options = batch.new_out(2, F64, per_token).cpu(), {"weights": batch.weights, "per_token": per_token}
    block_mass_reference(on_cpu(batch.attention(expected, **options)))
    for lse in (batch.lse(), batch.lse().T.contiguous().T):  # as FlashAttention lays it out
        out = batch.new_out(2, per_token=per_token)
        mass_from_lse(batch.attention(out, **options), lse)
        assert_close(out, expected, 1e-5)


def test_decode_gives_the_lse_that_mass_from_lse_takes():
    batch = Batch([1, 1], [50, 131], dtype=BF16)
    _, mass, lse = batch.decode()
    out = batch.new_out(2)
    mass_from_lse(batch.attention(out, weights=batch.weights), lse)
    assert_close(out, mass, 1e-5)


@BY
@pytest.mark.parametrize("given", ["clean", "query_lse"])
def test_a_nan_key_gives_nan_mass_and_lse(per_token, given):
    """Given the LSE of a kernel that overlooked it, its own mass; with `query_lse`'s, of all that its queries see."""
    batch = Batch(*PREFILL)
    lse = batch.lse()
    request, token = 3, 70  # of 75 tokens and 40 queries: the last five see it
    batch.keys[batch.table[request, token // 16].long(), 1, token % 16, 9] = torch.nan
    if given == "query_lse":
        query_lse(batch.attention(), lse, longest=40)
        expected = torch.empty_like(lse)
        query_lse_reference(batch.attention(), expected)
        assert torch.equal(lse.isnan(), expected.isnan()) and lse.isnan().sum() == 5 * 2
    out, expected = (batch.new_out(2, dtype, per_token) for dtype in (F32, F64))
    mass_from_lse(batch.attention(out, per_token=per_token), lse)
    mass_from_lse_reference(batch.attention(expected, per_token=per_token), lse)
    assert out[request, 1, token if per_token else token // 16].isnan()
    assert not out[:, 0].isnan().any() and not out[:request].isnan().any()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


# ---- query_lse


@each_shape
def test_query_lse_matches_the_reference(shape):
    batch = Batch(*PREFILL, *shape)
    for options in ({}, {"weights": batch.weights}):
        lse, expected = (torch.full(batch.query.shape[:2], 7.0, dtype=dtype, device=DEVICE) for dtype in (F32, F64))
        query_lse(batch.attention(**options), lse, longest=40)
        query_lse_reference(batch.attention(**options), expected)
        assert_close(lse, expected, 1e-5)
        if not options:
            assert_close(lse, batch.lse(), 1e-5)


def test_query_lse_of_long_chunks_and_strided_rows():
    """Several programs a request; `longest` may be left out, and only costs programs that do nothing."""
    batch = Batch([150, 2, 0, 70], [170, 300, 5, 70])
    lse = torch.full((batch.heads, len(batch.query)), 7.0, device=DEVICE).T
    query_lse(batch.attention(), lse)
    assert_close(lse, batch.lse(), 1e-5)


# ---- 64 bits


@pytest.mark.parametrize("axis", ["block", "head"])
def test_slots_beyond_2_to_the_31(axis):
    near, batch = beyond_2_to_the_31(axis, 32)
    assert all(torch.equal(a, b) for a, b in zip(batch.decode(), near.decode(), strict=True))
    outs = []
    for each in (batch, near):
        outs.append(each.new_out(each.kv_heads))
        mass_from_lse(each.attention(outs[-1]), near.lse())
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


def garbage(rows, width, device=DEVICE):
    """A view as buffers kept between steps hold it; rows are not dense."""
    table, logical = torch.full((2, rows, width + 3), 77, dtype=torch.int32, device=device)[:, :, :width]
    return View(table, torch.full((rows,), 77, dtype=torch.int32, device=device), logical)


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_views_match_the_reference(groups, chunk):
    """Of groups with holes of their own, in tables of other widths; some groups are left alone."""
    random = torch.Generator().manual_seed(groups)
    for block_size, rows, width in ((16, 5, 40), (32, 3, 1), (48, 4, 17)):
        lens = torch.randint(0, width * block_size + 1, (rows,), generator=random).int()
        lens[0] = 0
        tables = []
        for group in range(groups):
            table = torch.randint(1, 10**9, (rows, width + 2 + group), generator=random).int()[:, : width + group]
            table[torch.rand(table.shape, generator=random) < 0.2 * (group + 1)] = 0
            for row, length in zip(table, lens.tolist(), strict=True):
                if length:
                    row[-(-length // block_size) - 1] = 9 + group
            tables.append(table)
        for alone in {0, 1} if groups > 1 else {None}:
            results = []
            for function, device, options in (
                (resident_view, DEVICE, {"chunk": chunk}),
                (resident_view_reference, "cpu", {}),
            ):
                views = [None if group == alone else garbage(rows, width + 2, device) for group in range(groups)]
                function([table.to(device) for table in tables], lens.to(device), block_size, views, **options)
                results.append([tensor.cpu() for view in views if view for tensor in view])
            assert len(results[0]) == 3 * (groups - (alone is not None))
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
            only = [None if view is None else view._replace(logical=None) for view in views]
            only = [view and View(torch.full_like(view.table, 77).to(DEVICE), view.lens.to(DEVICE)) for view in only]
            resident_view([table.to(DEVICE) for table in tables], lens.to(DEVICE), block_size, only)
            for view, expected in zip(only, views):
                assert view is None or torch.equal(view.table.cpu(), expected.table)


def test_views_are_written_no_further_than_they_are_wide():
    """Even where more is resident, which is wrong."""
    view = garbage(2, 8)
    cut = View(view.table[:, :3], view.lens, view.logical[:, :3])
    resident_view([ints([[5, 0, 6, 0, 7, 0, 0, 8], [4, 0, 0, 0, 0, 0, 0, 0]])], ints([128, 9]), 16, [cut])
    assert view.table.tolist() == [[5, 6, 7] + [77] * 5, [4, 0, 0] + [77] * 5]
    assert view.logical.tolist() == [[0, 2, 4] + [77] * 5, [0, -1, -1] + [77] * 5]
    assert view.lens.tolist() == [64, 9]


def test_padding_rows_have_no_length_below_zero():
    view = View(ints([[7, 7], [7, 7]]), ints([7, 7]))
    resident_view([ints([[0, 0], [3, 0]])], ints([1, 16]), 16, [view])
    assert view.lens.tolist() == [0, 16] and view.table.tolist() == [[0, 0], [3, 0]]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tables": [ints([[1, 2]])] * 2}, ValueError, "one for each block table"),
        ({"tables": [ints([[1, 2]]).long()]}, TypeError, "block_table must be int32"),
        ({"tables": [ints([[1, 2], [3, 4]])]}, ValueError, "same number of rows"),
        ({"tables": [ints([[1, 2]]).mT]}, ValueError, "dense rows"),
        ({"views": [garbage(2, 2)]}, ValueError, r"\[R, W\], of one width"),
        ({"tables": [ints([[1, 2]])] * 2, "views": [garbage(1, 2), garbage(1, 3)]}, ValueError, "of one width"),
        ({"views": [garbage(1, 2)._replace(logical=ints([[1, 2]]))]}, ValueError, "must lie alike"),
        ({"views": [garbage(1, 2)._replace(lens=ints([1, 2]))]}, ValueError, "a length for each row"),
        (
            {"tables": [ints([[1, 2]])] * 2, "views": [garbage(1, 2), garbage(1, 2)._replace(logical=None)]},
            ValueError,
            "or none",
        ),
    ],
)
def test_view_refuses(change, error, message):
    arguments = {"tables": [ints([[1, 2]])], "views": [garbage(1, 2)]} | change
    with pytest.raises(error, match=message):
        resident_view(arguments["tables"], ints([20]), 16, arguments["views"])


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


def test_values_in_fp8_that_are_no_pairs_are_refused():
    for heads in ((4, 2), (2, 2)):
        with pytest.raises(ValueError, match="value_cache must have an even head size"):
            Batch(*DECODE, heads=heads, dim=33, scales=(0.5, 0.25)).decode()


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
    path = Path(__file__).parents[2] / "benchmarks/gpu/kernels.py"
    spec = importlib.util.spec_from_file_location("gpu_kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(["--dry-run"])
    ran = [line.split(" ")[0] for line in capsys.readouterr().out.splitlines()]
    counts = {"decode": 7, "fp8": 7, "latents": 3, "chunk": 4, "classes": 3, "compact": 3}
    counts |= {"reach": 4, "tiles": 3, "fetch": 5}
    assert {kind: ran.count(kind) for kind in ran} == counts
