"""`decode_mass`: every kernel this CPU runs against the reference in float64, and who attends to what in an engine."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_mass import BF16, F16, F32, each_isa, needs_extension

from vllm_evict.compute.attention import cpu
from vllm_evict.compute.kernels import decode
from vllm_evict.compute.kernels.decode import (
    decode_classes,
    decode_classes_reference,
    decode_mass,
    decode_mass_reference,
)
from vllm_evict.compute.kernels.mass import block_mass, pack_keys
from vllm_evict.compute.kernels.paged import PagedAttention
from vllm_evict.compute.sums import RunningSums
from vllm_evict.compute.work import StepWork
from vllm_evict.core.plan import Scoring


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
        pages[:, :, :block_size] = pack_keys(pages[:, :, :block_size].contiguous(), layout)
        pages = pages.to(dtype)
        self.keys, self.values = pages[:, :, :block_size], pages[:, :, block_size:]
        queries = queries or [1 if row % 2 == 0 else min(length, 3) for row, length in enumerate(seq_lens)]
        self.starts = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32)
        self.query = torch.randn(sum(queries), heads[0] + 1, dim, generator=random).to(dtype)[:, 1:]
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
SHAPES = [  # heads, dim, block size, dtype
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
]
TOLERANCE = {F32: 3e-6, F16: 1e-3, BF16: 8e-3}  # of the output: its own rounding


@each_isa
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sum_heads", [False, True])
def test_matches_the_reference(isa, shape, sum_heads):
    heads, dim, block_size, dtype = shape
    batch = Batch(LENGTHS, heads, dim, block_size, dtype)
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
    heads, dim, block_size, dtype = shape
    batch = Batch(LENGTHS, heads, dim, block_size, dtype, queries=QUERIES)
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
def test_large_scores_and_foreign_nans(isa, queries):
    """Scores in the hundreds neither overflow nor vanish, and nothing behind the last token counts."""
    batch = Batch([1100, 1, 45], magnitude=12.0, queries=queries)
    expected = batch.run(decode_mass_reference, None, torch.float64)
    for row, length in ((0, 1100), (2, 45)):
        block, used = int(batch.table[row, length // 32]), length % 32
        batch.values[block, :, used:] = torch.nan
        batch.keys[block].view(2, 64, 32)[..., used:] = torch.nan
    output, mass = batch.run(isa=isa)
    torch.testing.assert_close(output, expected[0], rtol=1e-4, atol=4e-4 if queries else 1e-4)
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
    heads, dim, block_size, dtype = shape
    batch = Batch(LENGTHS, heads, dim, block_size, dtype)
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
    dtype=st.sampled_from([F32, F16, BF16]),
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
    with pytest.raises(ValueError, match="mass must be as wide as the longest request has tokens"):
        decode_mass(batch.attention(out[..., :1199], per_token=True), batch.rows, output)


@needs_extension
def test_each_tokens_mass_has_the_same_bits_for_any_number_of_threads(set_threads):
    batch, layer = Batch(LENGTHS), Classes()
    results = []
    for count in (1, 3):
        set_threads(count)
        out = layer.new_out(per_token=True)
        results.append([*batch.run(per_token=True), layer.run(out=out, per_token=True), *out])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("function", [decode_classes, decode_classes_reference])
def test_each_tokens_mass_of_classes_is_that_of_each_alone(function):
    layer = Classes()
    out = layer.new_out(per_token=True)
    layer.run(function, out=out, per_token=True)
    for each, mass in zip(layer.classes, out):
        torch.testing.assert_close(mass, each.run(per_token=True)[1], rtol=3e-6, atol=3e-8)


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
        arguments = layer, batch.query.contiguous(), pages, metadata
        mass, decoded = torch.zeros_like(expected), torch.zeros_like(expected)
        cpu.CPUOps.mass(*arguments, weights, mass, **options)
        output = torch.empty_like(batch.query)
        cpu.CPUOps.decode(*arguments, output, batch.rows, batch.seq_lens, None, decoded, **options)
        torch.testing.assert_close(mass, expected, rtol=3e-6, atol=3e-8)
        torch.testing.assert_close(decoded, expected, rtol=3e-6, atol=3e-8)


# ---- Refusals


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_extension), False])
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
def test_bad_arguments_are_refused(monkeypatch, compiled, change, error, message):
    if not compiled:
        monkeypatch.setattr(decode, "_C_cpu", None)
    batch = Batch(LENGTHS)
    change(batch)
    with pytest.raises(error, match=message):
        batch.run()


# ---- Heads in slices and classes


@each_isa
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_heads_may_be_slices_of_what_others_use(isa, dtype):
    """Pages, query and output of some of a layer's heads: as dense copies, to the bit, and the rest is not touched."""
    batch = Batch(LENGTHS, (6, 3), dtype=dtype)
    dense, sliced = Batch(LENGTHS, (6, 3), dtype=dtype), Batch(LENGTHS, (6, 3), dtype=dtype)
    for kv_heads in (slice(0, 1), slice(1, 3), slice(2, 3)):
        heads = slice(2 * kv_heads.start, 2 * kv_heads.stop)
        pages = torch.cat((batch.keys, batch.values), 2)
        dense.keys, dense.values = pages[:, kv_heads].clone().split(32, 2)
        dense.query = batch.query[:, heads].clone()
        dense.heads = sliced.heads = dense.query.shape[1], dense.keys.shape[1]
        others = torch.full_like(pages, torch.nan)
        others[:, kv_heads] = pages[:, kv_heads]
        sliced.keys, sliced.values = (half[:, kv_heads] for half in others.split(32, 2))
        query = torch.full_like(batch.query, torch.nan)
        query[:, heads] = batch.query[:, heads]
        sliced.query = query[:, heads]
        whole = torch.full_like(query, 7.0)
        output, mass = dense.run(isa=isa)
        _, its_mass = sliced.run(isa=isa, output=whole[:, heads])
        assert torch.equal(whole[:, heads], output) and torch.equal(its_mass, mass)
        whole[:, heads] = 7.0
        assert (whole == 7).all()
        masses = []
        for each in (dense, sliced):
            masses.append(torch.zeros_like(mass))
            block_mass(each.attention(masses[-1]), isa=isa)
        assert torch.equal(*masses) and masses[0].isfinite().all()


class Classes:
    """A layer whose heads fall into classes: one query, and for each class pages, block tables and lengths.

    `outputs` is how many outputs a call is given.
    """

    outputs = 2

    def __init__(self, kv_heads=(2, 3), group=2, dim=64, block_sizes=(32, 32), dtype=F32, queries=None):
        random = torch.Generator().manual_seed(1)
        lens = LENGTHS, [min(length, 5 + 70 * (length > 300)) for length in LENGTHS]
        self.classes = [
            Batch(lengths, (group * heads, heads), dim, block_size, dtype, queries=queries)
            for lengths, heads, block_size in zip(lens, kv_heads, block_sizes)
        ]
        first = self.classes[0]
        total = group * sum(kv_heads)
        self.query = torch.randn(len(first.query), total + 1, dim, generator=random).to(dtype)[:, :total]
        self.heads = [group * heads for heads in kv_heads]
        self.weights = torch.rand(len(first.query)) * (torch.rand(len(first.query)) < 0.7)
        for each, query in zip(self.classes, self.query.split(self.heads, 1)):
            each.query, each.weights = query, self.weights
            each.starts, each.rows = first.starts, first.rows

    def new_out(self, dtype=F32, rows=None, per_token=False):
        widths = [int(each.seq_lens.max()) if per_token else each.table.shape[1] for each in self.classes]
        return [
            torch.zeros(len(LENGTHS), rows or each.heads[1], width, dtype=dtype)
            for each, width in zip(self.classes, widths)
        ]

    def run(self, function=decode_classes, out=None, isa=None, sinks=None, **options):
        output = torch.full(self.query.shape, 7.0, dtype=self.query.dtype)
        own = [None] * len(self.classes) if sinks is None else sinks.split(self.heads)
        classes = [
            each.attention(mass, query, sinks=its, **options)
            for each, mass, query, its in zip(
                self.classes, out or [None] * len(self.classes), self.query.split(self.heads, 1), own
            )
        ]
        how = {} if function is decode_classes_reference else {"isa": isa}
        function(classes, self.classes[0].rows, output.split(self.heads, 1)[: self.outputs], **how)
        return output


@each_isa
@pytest.mark.parametrize("shape", [((2, 3), 2, 64, (32, 32), F32), ((1, 4), 7, 128, (64, 16), BF16)], ids=str)
def test_classes_are_decoded_as_each_alone(isa, shape):
    layer = Classes(*shape)
    out = layer.new_out()
    output = layer.run(isa=isa, out=out)
    for each, part, mass in zip(layer.classes, output.split(layer.heads, 1), out):
        alone = each.run(isa=isa)
        assert torch.equal(part, alone[0]) and torch.equal(mass, alone[1])


@needs_extension
@pytest.mark.parametrize("queries", [None, [1, 2, 5, 1, 5, 2, 60, 3, 70]], ids=["decodes", "prompts"])
def test_classes_match_the_reference_on_any_number_of_threads(set_threads, queries):
    layer = Classes(queries=queries)
    out, expected_out = layer.new_out(rows=1), layer.new_out(torch.float64, rows=1)
    output, expected = layer.run(out=out), layer.run(decode_classes_reference, out=expected_out)
    torch.testing.assert_close(output, expected, rtol=3e-6, atol=3e-6)
    for mass, wanted in zip(out, expected_out):
        torch.testing.assert_close(mass.double(), wanted, rtol=3e-6, atol=1e-7 if queries else 3e-8)
    for count in (1, 3):
        set_threads(count)
        only_first = [layer.new_out(rows=1)[0], None]
        assert torch.equal(layer.run(out=only_first), output) and torch.equal(only_first[0], out[0])
        assert torch.equal(layer.run(), output)


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_extension), False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layer: layer.classes[1].table.__setitem__((0, 0), 999), "block ids"),
        (lambda layer: setattr(layer, "outputs", 1), "one entry for each class"),
    ],
)
def test_bad_classes_are_refused(monkeypatch, compiled, change, message):
    if not compiled:
        monkeypatch.setattr(decode, "_C_cpu", None)
    layer = Classes((2, 3), group=1)
    change(layer)
    with pytest.raises(ValueError, match=message):
        layer.run()


# ---- Who attends to what


def work_of(rows, q_lens, weights=None, lens=None):
    starts = np.concatenate(([0], np.cumsum(q_lens))).astype(np.int32)
    lens = torch.tensor(lens or [50] * len(q_lens), dtype=torch.int32)
    sums = RunningSums(4, 1, 1, 8, 32, "sum", "sum")
    logical = torch.arange(8, dtype=torch.int32).expand(len(q_lens), 8)
    mass = None
    if weights is not None:
        for name in weights:
            sums.start(name, Scoring("sum", 0.9, 1, 1, 100))
        mass = sums.step([f"r{i}" for i in range(len(q_lens))], starts, lens.numpy(), logical, lens)
    return StepWork(mass, np.array(rows, np.int64), starts, lens)


class Recorder:
    def __init__(self):
        self.calls = []

    def kv_heads(self, kv_cache):
        return 1

    def mass(self, layer, query, kv_cache, metadata, weights, out, last=None):
        self.calls.append(("mass", *(None if each is None else each.tolist() for each in (weights, last))))

    def mass_of(self, layer, query, kv_cache, metadata, queries, out):
        self.calls.append(("mass_of", queries.tokens.tolist()))

    def decode(self, layer, query, kv_cache, metadata, output, rows, seq_lens, weights, out):
        self.calls.append(("decode", rows.tolist(), None if weights is None else weights.tolist(), out is not None))


@pytest.mark.parametrize(
    ("rows", "q_lens", "measured", "is_all", "calls"),
    [
        ([0, 1], [1, 1], None, True, [("decode", [0, 1], None, False)]),
        ([0, 1], [1, 1], ["r0", "r1"], True, [("decode", [0, 1], None, True)]),
        ([0, 1], [1, 1], ["r1"], True, [("decode", [0, 1], [0, 1], True)]),
        ([1], [3, 1], ["r0", "r1"], False, [("decode", [1], None, True), ("mass", [1, 1, 1, 0], None)]),
        ([], [3, 1], ["r0", "r1"], False, [("mass", None, None)]),
        ([], [3, 2], ["r1"], False, [("mass", [0, 0, 0, 1, 1], [0, 2])]),
        ([1], [1, 1], None, False, [("decode", [1], None, False)]),
        ([0, 1], [3, 1], ["r0", "r1"], True, [("decode", [0, 1], None, True)]),
        ([0, 1], [3, 1], ["r0"], True, [("decode", [0, 1], [1, 1, 1, 0], True)]),
        ([0], [3, 2], ["r0", "r1"], False, [("decode", [0], None, True), ("mass", [0, 0, 0, 1, 1], None)]),
    ],
)
def test_work_is_divided(rows, q_lens, measured, is_all, calls):
    work, recorder = work_of(rows, q_lens, measured), Recorder()
    work.do(recorder, None, 0, torch.zeros(sum(q_lens), 2, 16), None, None, None)
    assert recorder.calls == calls and work.is_all == is_all
    assert work.stock_lens.tolist() == [length if row in rows else 50 for row, length in enumerate(q_lens)]


@needs_extension
@pytest.mark.parametrize("exact", [False, True])
def test_measured_requests_leave_the_stock_kernel(engine, monkeypatch, exact):
    """A request that may lose blocks is ours from its first token on; with `exact`, from its first hole on."""
    seen = []

    def watched(*args, **options):
        seen.append((args[1].tolist(), args[0].query_start_loc.diff().tolist()))
        return decode_mass(*args, **options)

    monkeypatch.setattr(cpu, "decode_mass", watched)
    server = engine({"name": "h2o", "budget": 96, "buffer": 32, "sink": 32, "recent": 32, "exact": exact})
    assert server.runtime.decodes
    server.generate([range(1, 40)], max_tokens=20)
    assert not seen
    server.generate([range(100, 199)], max_tokens=60)
    # 129 tokens are more than four blocks: the query at position 129 is the first over holes, that at 157 the last.
    layers = 2
    if exact:
        assert seen == [([0], [1])] * layers * (158 - 129)
    else:
        assert seen == [([0], [99])] * layers + [([0], [1])] * layers * (158 - 99)


@needs_extension
def test_prompts_beside_requests_that_are_not_measured_stay_with_the_stock_kernel(engine, monkeypatch):
    """vLLM's kernel cannot skip a prompt's queries, so it computes all prompts of such a step."""
    seen = []

    def watched(*args, **options):
        seen.append(args[0].query_start_loc.diff()[args[1].long()].tolist())
        return decode_mass(*args, **options)

    monkeypatch.setattr(cpu, "decode_mass", watched)
    policy = {"name": "h2o", "budget": 96, "buffer": 32, "sink": 32, "recent": 32, "exact": False, "allow": ["full"]}
    server = engine(policy)
    asked = [(range(1, 100), {"extra_args": {"kv_policy": "full"}}), (range(1, 100), {})]
    server.answered([(prompt, {"max_tokens": 60, **options}) for prompt, options in asked])
    assert seen and {length for lengths in seen for length in lengths} == {1}
