"""`decode_mass`: every kernel this CPU runs against the reference in float64."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_mass import BF16, E4M3, E5M2, F16, F32, QUERIES_OF, each_isa, needs_extension

from vllm_evict.compute.attention import cpu
from vllm_evict.compute.kernels import decode
from vllm_evict.compute.kernels.decode import (
    decode_mass,
    decode_mass_reference,
)
from vllm_evict.compute.kernels.mass import block_mass, pack_keys, pack_values, unpack_keys, unpack_values
from vllm_evict.compute.kernels.paged import PagedAttention
from vllm_evict.compute.probes import LayerCall, MassTarget


class Batch:
    """Random arguments of decode_mass for rows 0, 2, ..., which have one query; the others have up to 3.

    `queries` gives other numbers of queries.
    """

    def __init__(
        self, seq_lens, heads=(4, 2), dim=64, block_size=32, dtype=F32, layout="vec", magnitude=1.0, queries=None
    ):
        random = torch.Generator().manual_seed(0)
        self.layout, self.scale, self.heads = layout, dim**-0.5, heads
        blocks = [-(-length // block_size) for length in seq_lens]
        pages = torch.randn(sum(blocks) + 3, heads[1], 2 * block_size, dim, generator=random) * magnitude
        pages = pages.to(dtype)
        pages[:, :, :block_size] = pack_keys(pages[:, :, :block_size].contiguous(), layout)
        pages[:, :, block_size:] = pack_values(pages[:, :, block_size:].contiguous(), layout)
        self.keys, self.values = pages[:, :, :block_size], pages[:, :, block_size:]
        queries = queries or [1 if row % 2 == 0 else min(length, 3) for row, length in enumerate(seq_lens)]
        self.starts = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32)
        self.query = torch.randn(sum(queries), heads[0] + 1, dim, generator=random).to(QUERIES_OF.get(dtype, dtype))
        self.query = self.query[:, 1:]
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
        self.rows = torch.arange(0, len(seq_lens), 2, dtype=torch.int32)
        self.table = torch.full((len(seq_lens), max(blocks) + 2), -1, dtype=torch.int32)
        ids = torch.randperm(len(pages), generator=random).int()
        for row, used in zip(self.table, ids.split([*blocks, 3]), strict=False):
            row[: len(used)] = used
        self.weights = None

    def attention(self, mass=None, query=None, **options):
        lists, query = (self.table, self.starts, self.seq_lens), self.query if query is None else query
        options = {"layout": self.layout, "weights": self.weights, **options}
        return PagedAttention(query, self.keys, *lists, self.scale, self.values, mass=mass, **options)

    def run(self, function=decode_mass, rows_of_mass=None, dtype=F32, output=None, isa=None, **options):
        if output is None:
            output = torch.full(self.query.shape, 7.0, dtype=self.query.dtype)
        width = int(self.seq_lens.max()) if options.get("per_token") else self.table.shape[1]
        shape = len(self.seq_lens), rows_of_mass or self.heads[1], width
        out = torch.zeros(shape, dtype=dtype) if rows_of_mass != 0 else None
        how = {} if function is decode_mass_reference else {"isa": isa}
        function(self.attention(out, **options), self.rows, output, **how)
        return output, out


LENGTHS = [1, 9, 31, 1, 64, 2, 333, 40, 1200]
#: Of prompts: all queries of some, the last ones of others, in one pass over the keys and in several.
QUERIES = [1, 2, 31, 1, 40, 2, 333, 3, 70]
SHAPES = [  # heads, dim, block size, dtype, layout
    ((4, 2), 64, 32, F32),
    ((4, 2), 64, 32, BF16),
    ((4, 2), 64, 32, F16),
    ((3, 3), 32, 16, F32),  # MHA
    ((5, 1), 80, 16, BF16),  # MQA
    ((16, 1), 96, 128, F16),
    ((14, 2), 128, 128, F32),  # 7 query heads a KV head
    ((6, 1), 112, 48, BF16),
    ((12, 4), 256, 64, F32),
    ((71, 1), 64, 64, BF16),
    ((2, 2), 16, 32, F32),
    ((4, 2), 64, 32, BF16, "amx"),
    ((5, 1), 112, 48, BF16, "amx"),
    ((12, 4), 256, 64, BF16, "amx"),
    ((4, 2), 512, 32, F32),  # Gemma 4
    ((4, 2), 512, 32, BF16, "amx"),
    ((4, 2), 64, 32, E4M3),
    ((14, 2), 128, 48, E4M3),
    ((5, 1), 96, 64, E5M2),
    ((4, 2), 64, 32, E4M3, "amx"),
    ((5, 1), 96, 48, E5M2, "amx"),
]
TOLERANCE = {F32: 3e-6, F16: 1e-3, BF16: 8e-3}  # of the output: its own rounding
TOLERANCE |= {kept: TOLERANCE[query] for kept, query in QUERIES_OF.items()}


@each_isa
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sum_heads", [False, True])
def test_matches_the_reference(isa, shape, sum_heads):
    dtype = shape[3]
    batch = Batch(LENGTHS, *shape)
    batch.weights = torch.rand(len(batch.query)) * (torch.rand(len(batch.query)) < 0.7)
    rows = 1 if sum_heads else None
    output, mass = batch.run(isa=isa, rows_of_mass=rows)
    expected, expected_mass = batch.run(decode_mass_reference, rows, torch.float64)
    torch.testing.assert_close(output, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(mass.double(), expected_mass, rtol=3e-6, atol=3e-8)
    others = [token for row in range(1, len(LENGTHS), 2) for token in range(*batch.starts[row : row + 2].tolist())]
    assert (output[others] == 7).all()


@each_isa
def test_the_mass_is_that_of_block_mass(isa):
    batch = Batch(LENGTHS)
    batch.weights = torch.zeros(len(batch.query))
    batch.weights[batch.starts[batch.rows].long()] = 1
    mass = torch.zeros(len(LENGTHS), 2, batch.table.shape[1])
    block_mass(batch.attention(mass), isa=isa)
    torch.testing.assert_close(batch.run(isa=isa)[1], mass, rtol=2e-6, atol=1e-8)


@each_isa
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prompts_match_the_reference(isa, shape):
    """By block and by token, where some queries have no weight; rows of one query beside them."""
    dtype = shape[3]
    batch = Batch(LENGTHS, *shape, queries=QUERIES)
    batch.weights = torch.rand(len(batch.query)) * (torch.rand(len(batch.query)) < 0.7)
    batch.weights[: -len(batch.query) // 3] = 0
    for per_token in False, True:
        output, mass = batch.run(isa=isa, per_token=per_token)
        expected, expected_mass = batch.run(decode_mass_reference, None, torch.float64, per_token=per_token)
        torch.testing.assert_close(output, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        torch.testing.assert_close(mass.double(), expected_mass, rtol=5e-6, atol=1e-7)
        assert mass.any() and (expected[int(batch.starts[1]) : int(batch.starts[2])] == 7).all()
        assert torch.equal(output, batch.run(isa=isa, rows_of_mass=0, per_token=per_token)[0])


@each_isa
@pytest.mark.parametrize("layout", ["vec", "amx"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_scales_multiply_what_fp8_caches_hold(isa, dtype, layout):
    """Prompts and decodes, over all finite numbers of the dtype, with sinks."""
    batch = Batch(LENGTHS, (6, 2), dtype=dtype, layout=layout, queries=QUERIES)
    for part in batch.keys, batch.values:
        numbers = torch.arange(part.numel(), dtype=torch.int64).mul(40503).remainder(256).to(torch.uint8).view(dtype)
        finite = numbers.float().isfinite() & (numbers.float().abs() < 1e3)
        part.copy_(torch.where(finite, numbers.float(), 0.25).to(dtype).view(part.shape))
    batch.scale *= 0.01
    how = {"value_scale": 0.375, "sinks": torch.linspace(-2, 3, 6)}
    output, mass = batch.run(isa=isa, **how)
    expected, expected_mass = batch.run(decode_mass_reference, None, torch.float64, **how)
    largest = batch.values.float().abs().max().item() * 0.375
    torch.testing.assert_close(output, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * largest)
    torch.testing.assert_close(mass.double(), expected_mass, rtol=1e-4, atol=1e-5)


@each_isa
@pytest.mark.parametrize("sum_heads", [False, True])
def test_prompts_with_soft_caps_and_sinks_match_the_reference(isa, sum_heads):
    batch = Batch(LENGTHS, (6, 2), magnitude=4.0, queries=QUERIES)
    how = {"soft_cap": 20.0, "sinks": torch.linspace(-2, 3, 6)}
    output, mass = batch.run(isa=isa, rows_of_mass=1 if sum_heads else None, **how)
    expected, expected_mass = batch.run(decode_mass_reference, 1 if sum_heads else None, torch.float64, **how)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mass.double(), expected_mass, rtol=1e-4, atol=1e-5)


@each_isa
@pytest.mark.parametrize("per_token", [False, True], ids=["blocks", "tokens"])
def test_a_nan_key_shows_in_the_queries_that_see_it_and_in_no_mass_of_weight_0(isa, per_token):
    batch = Batch([90, 1, 64], queries=[60, 1, 64])
    batch.weights = torch.ones(len(batch.query))
    batch.weights[50:60] = 0
    batch.keys[batch.table[0, 2], 1].view(64, 32)[7, 85 - 64] = torch.nan  # the last five queries see it
    output, mass = batch.run(isa=isa, per_token=per_token)
    assert output[55:60, 2:].isnan().all() and output[:55].isfinite().all() and output[:, :2].isfinite().all()
    assert mass.isfinite().all()
    batch.weights[57] = 1
    mass = batch.run(isa=isa, per_token=per_token)[1]
    assert mass[0, 1].isnan().any() and mass[0, 0].isfinite().all() and mass[1:].isfinite().all()


@each_isa
@pytest.mark.parametrize("queries", [None, [1100, 1, 45], [200, 1, 30]], ids=["decodes", "all", "last"])
@pytest.mark.parametrize("layout", ["vec", "amx"])
def test_large_scores_and_foreign_nans(isa, queries, layout):
    """Scores in the hundreds neither overflow nor vanish, and nothing behind the last token counts."""
    dtype = BF16 if layout == "amx" else F32
    batch = Batch([1100, 1, 45], magnitude=12.0, queries=queries, dtype=dtype, layout=layout)
    expected = batch.run(decode_mass_reference, None, torch.float64)
    for row, length in ((0, 1100), (2, 45)):
        block, used = batch.table[row, length // 32 : length // 32 + 1].long(), length % 32
        keys = unpack_keys(batch.keys[block], layout).clone()
        values = unpack_values(batch.values[block], layout).clone()
        keys[:, :, used:] = values[:, :, used:] = torch.nan
        batch.keys[block], batch.values[block] = pack_keys(keys, layout), pack_values(values, layout)
    output, mass = batch.run(isa=isa)
    apart = (TOLERANCE[BF16],) * 2 if layout == "amx" else (1e-4, 4e-4 if queries else 1e-4)
    torch.testing.assert_close(output, expected[0], rtol=apart[0], atol=apart[1])
    torch.testing.assert_close(mass.double(), expected[1], rtol=1e-4, atol=1e-6)


@each_isa
@pytest.mark.parametrize("per_token", [False, True], ids=["blocks", "tokens"])
@pytest.mark.parametrize("length", [1, 45, 1100])
def test_a_nan_key_gives_nan_output_and_mass(isa, per_token, length):
    """Of the heads that see it, though its value is a number; in any of the pieces that threads share."""
    for dtype, token in itertools.product((F32, BF16, F16), {0, length // 2, length - 1}):
        batch = Batch([333, 2, length], dtype=dtype)
        clean = batch.run(isa=isa, per_token=per_token)
        batch.keys[batch.table[2, token // 32], 1].view(64, 32)[7, token % 32] = torch.nan
        output, mass = batch.run(isa=isa, per_token=per_token)
        expected = batch.run(decode_mass_reference, None, torch.float64, per_token=per_token)
        entries = length if per_token else -(-length // 32)
        for got in output, expected[0]:
            assert got[-1, 2:].isnan().all() and got[-1, :2].isfinite().all() and got[:-1].isfinite().all()
        for got in mass, expected[1]:
            assert got[2, 1, :entries].isnan().all() and got[2, 0].isfinite().all() and got[:2].isfinite().all()
        assert torch.equal(output[:-1], clean[0][:-1]) and torch.equal(mass[:2], clean[1][:2])


@needs_extension
@pytest.mark.parametrize("queries", [None, QUERIES], ids=["decodes", "prompts"])
def test_neither_threads_nor_other_requests_change_a_bit(set_threads, queries):
    batch = Batch(LENGTHS, queries=queries)
    whole = batch.run()
    set_threads(1 if torch.get_num_threads() > 1 else 3)
    assert all(torch.equal(a, b) for a, b in zip(batch.run(), whole, strict=True))
    batch.rows = torch.tensor([8], dtype=torch.int32)
    output, mass = batch.run()
    tokens = slice(*batch.starts[8:].tolist())
    assert torch.equal(output[tokens], whole[0][tokens]) and torch.equal(mass[8], whole[1][8])


@each_isa
@pytest.mark.parametrize("queries", [None, QUERIES], ids=["decodes", "prompts"])
def test_without_mass_the_output_is_the_same(isa, queries):
    batch = Batch(LENGTHS, queries=queries)
    assert torch.equal(batch.run(isa=isa)[0], batch.run(isa=isa, rows_of_mass=0)[0])
    batch.weights = torch.zeros(len(batch.query))
    output, mass = batch.run(isa=isa)
    assert torch.equal(output, batch.run(isa=isa, rows_of_mass=0)[0]) and not mass.any()


# ---- Each token's mass


def per_block(mass, block_size):
    padded = torch.nn.functional.pad(mass, (0, -mass.shape[2] % block_size))
    return padded.view(*mass.shape[:2], -1, block_size).sum(3)


@each_isa
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sum_heads", [False, True])
def test_each_tokens_mass_matches_the_reference(isa, shape, sum_heads):
    heads, _, block_size = shape[:3]
    batch = Batch(LENGTHS, *shape)
    batch.weights = torch.rand(len(batch.query)) * (torch.rand(len(batch.query)) < 0.7)
    rows = 1 if sum_heads else None
    output, mass = batch.run(isa=isa, rows_of_mass=rows, per_token=True)
    _, expected = batch.run(decode_mass_reference, rows, torch.float64, per_token=True)
    torch.testing.assert_close(mass.double(), expected, rtol=3e-6, atol=3e-8)
    other_output, blocks = batch.run(isa=isa, rows_of_mass=rows)
    assert torch.equal(output, other_output)
    sums = per_block(mass, block_size)
    torch.testing.assert_close(sums, blocks[..., : sums.shape[2]], rtol=3e-6, atol=3e-8)
    weights = torch.zeros(len(LENGTHS))
    weights[batch.rows] = batch.weights[batch.starts[batch.rows].long()]
    torch.testing.assert_close(mass.sum((1, 2)), weights * heads[0], rtol=3e-6, atol=3e-8)


@each_isa
@settings(max_examples=30, deadline=None)
@given(
    lens=st.lists(st.integers(1, 1100), min_size=1, max_size=5),
    group=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    dim=st.integers(1, 6),
    groups_of_16=st.integers(1, 8),
    dtype=st.sampled_from([F32, F16, BF16, E4M3, E5M2]),
)
def test_each_tokens_mass_of_random_batches(isa, lens, group, kv_heads, dim, groups_of_16, dtype):
    batch = Batch(lens, (group * kv_heads, kv_heads), 16 * dim, 16 * groups_of_16, dtype)
    mass = batch.run(isa=isa, per_token=True)[1]
    expected = batch.run(decode_mass_reference, None, torch.float64, per_token=True)[1]
    torch.testing.assert_close(mass.double(), expected, rtol=4e-6, atol=3e-8)


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_extension), False])
def test_out_of_each_token_may_be_slices(monkeypatch, compiled):
    if not compiled:
        monkeypatch.setattr(decode, "_C_cpu", None)
    batch = Batch(LENGTHS)
    expected = batch.run(per_token=True)[1]
    large = torch.full((len(LENGTHS) + 2, 5, 1300), 7.0)
    out = large[1:-1, 2:4, 50:1250]
    output = torch.empty_like(batch.query)
    decode_mass(batch.attention(out, per_token=True), batch.rows, output)
    torch.testing.assert_close(out - 7, expected, rtol=1e-4, atol=2e-6)
    for row in batch.rows.tolist():
        out[row, :, : LENGTHS[row]] = 7
    assert (large == 7).all()
    if compiled:
        with pytest.raises(ValueError, match="mass must be as wide as the longest request has tokens"):
            decode_mass(batch.attention(out[..., :1199], per_token=True), batch.rows, output)


def test_the_backend_passes_it_on():
    """`CPUOps.mass` and `decode`: blocks by default, tokens on demand."""
    batch = Batch(LENGTHS)
    names = "block_table", "query_start_loc", "seq_lens"
    metadata = SimpleNamespace(**dict(zip(names, (batch.table, batch.starts, batch.seq_lens))))
    metadata.num_actual_tokens = len(batch.query)
    layer = SimpleNamespace(isa="vec", impl=SimpleNamespace(scale=batch.scale))
    pages = torch.cat((batch.keys, batch.values), 2).view(len(batch.keys), 2, 32, -1)
    weights = torch.zeros(len(batch.query))
    weights[batch.starts[batch.rows].long()] = 1
    for options in ({}, {"per_token": True}):
        expected = batch.run(**options)[1]
        output = torch.empty_like(batch.query)
        call = LayerCall(cpu.CPUOps(), layer, 0, batch.query.contiguous(), pages, metadata, output)
        mass, decoded = torch.zeros_like(expected), torch.zeros_like(expected)
        cpu.CPUOps().mass(call, MassTarget(mass, weights, **options))
        cpu.CPUOps().decode(call, batch.rows, batch.seq_lens, MassTarget(decoded, **options))
        torch.testing.assert_close(mass, expected, rtol=3e-6, atol=3e-8)
        torch.testing.assert_close(decoded, expected, rtol=3e-6, atol=3e-8)


# ---- Refusals


@needs_extension
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda b: setattr(b, "rows", torch.tensor([9], dtype=torch.int32)), ValueError, "requests of the batch"),
        (lambda b: setattr(b, "layout", "amx"), (ValueError, TypeError), "amx|vec"),
        (lambda b: b.table.__setitem__((0, 0), 999), ValueError, "block ids"),
        (lambda b: setattr(b, "values", b.values.double()), TypeError, "value_cache"),
        (lambda b: setattr(b, "seq_lens", b.seq_lens.long()), TypeError, "int32"),
    ],
)
def test_bad_arguments_are_refused(change, error, message):
    batch = Batch(LENGTHS)
    change(batch)
    with pytest.raises(error, match=message):
        batch.run()
