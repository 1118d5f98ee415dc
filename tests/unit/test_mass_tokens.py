"""`block_mass` by token, packed keys, and arguments that are refused."""

import itertools
import logging
import subprocess
import sys
from types import SimpleNamespace

import packing
import pytest
import test_mass
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_mass import (
    BF16,
    DECODE,
    E4M3,
    E5M2,
    F16,
    F32,
    ISAS,
    MIXED,
    SHAPES,
    Batch,
    assert_close,
    each_isa,
    needs_extension,
)

from vllm_evict.compute.attention.cpu import CPUOps
from vllm_evict.compute.kernels import mass
from vllm_evict.compute.kernels.mass import (
    block_mass,
    pack_keys,
    pack_values,
    unpack_keys,
    unpack_values,
)
from vllm_evict.compute.kernels.paged import PagedAttention

seed = test_mass.seed


# ---- Each token's mass


@each_isa
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sum_heads", [False, True])
def test_each_tokens_mass_matches_the_reference(isa, shape, sum_heads):
    heads, dim, block_size, dtype, layout, (query_lens, seq_lens) = shape
    batch = Batch(query_lens, seq_lens, heads, dim, block_size, dtype, layout)
    batch.weights = torch.rand(sum(query_lens)) * (torch.rand(sum(query_lens)) < 0.7)
    rows = 1 if sum_heads else None
    mass = batch.run(isa, rows, per_token=True)
    assert_close(mass, batch.reference(rows, per_token=True))
    assert_close(batch.per_block(mass), batch.run(isa, rows))
    assert_close(batch.per_block(batch.reference(rows, per_token=True)), batch.reference(rows))
    per_request = torch.stack([part.sum() for part in batch.weights.split(query_lens)])
    assert_close(mass.sum((1, 2)), per_request * heads[0])


@st.composite
def requests(draw):
    """Queries and resident tokens of some requests, the first not without."""
    lens = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 150)), min_size=1, max_size=5))
    query_lens, earlier = zip(*lens, strict=True)
    return [query_lens[0] + 1, *query_lens[1:]], [a + b + (i == 0) for i, (a, b) in enumerate(zip(query_lens, earlier))]


@each_isa
@settings(max_examples=40, deadline=None)
@given(
    lens=requests(),
    group=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    dim=st.integers(1, 40),
    groups_of_16=st.integers(1, 8),
    kind=st.sampled_from([(F32, "vec"), (F16, "vec16"), (BF16, "vec"), (BF16, "amx")]),
    seed=st.integers(0, 1000),
)
def test_each_tokens_mass_of_random_batches(isa, lens, group, kv_heads, dim, groups_of_16, kind, seed):
    heads = group * kv_heads, kv_heads
    batch = Batch(*lens, heads, 2 * dim, 16 * groups_of_16, *kind, seed=seed)
    batch.weights = torch.rand(sum(lens[0]), generator=torch.Generator().manual_seed(seed))
    mass = batch.run(isa, per_token=True)
    assert_close(mass, batch.reference(per_token=True))
    assert_close(batch.per_block(mass), batch.run(isa))


@each_isa
def test_tokens_are_in_the_order_of_the_block_table(isa):
    # Of 40 tokens, each weighs e times as much as the one before.
    keys = torch.zeros(4, 1, 16, 2)
    table = torch.tensor([[3, 0, 2]], dtype=torch.int32)
    for position in range(40):
        keys[table[0, position // 16], 0, position % 16, 0] = position
    query, out = torch.tensor([[[1.0, 0.0]]]), torch.zeros(1, 1, 42)
    out[..., 40:] = 5
    lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
    block_mass(PagedAttention(query, pack_keys(keys), table, *lens, 1.0, mass=out, per_token=True), isa=isa)
    assert_close(out[0, 0, :40], torch.arange(40.0).softmax(0), 1e-5)
    assert (out[0, 0, 40:] == 5).all()


@pytest.mark.parametrize("built", [pytest.param(True, marks=needs_extension), False])
def test_out_may_be_slices_of_a_larger_tensor(monkeypatch, built):
    if not built:
        monkeypatch.setattr(mass, "_C_cpu", None)
    batch = Batch(*MIXED)
    expected = batch.run(per_token=True)
    longest = int(batch.seq_lens.max())
    large = torch.full((2, 9, 3, longest + 20), 7.0)
    out = large[1, 1:6, 1:, 9 : 9 + longest]  # as wide as the longest request, no wider
    assert out.shape[:2] == expected.shape[:2]
    block_mass(batch.attention(out, per_token=True))
    assert_close(out - 7, expected[..., :-1], 1e-4)
    for row, seq_len in zip(out, batch.seq_lens.tolist(), strict=True):
        row[:, :seq_len] = 7
    assert (large == 7).all()


@needs_extension
@pytest.mark.parametrize("lens", [([430], [140_000]), ([70, 1], [40_000, 90_000])])
def test_long_requests_take_fewer_rows_at_a_time(lens):
    batch = Batch(*lens, heads=(2, 2), dim=2)
    mass = batch.run(per_token=True)
    assert_close(batch.per_block(mass), batch.run(), 2e-5)
    assert_close(mass.sum(2), torch.tensor(lens[0])[:, None].expand(-1, 2), 1e-5)


@each_isa
@pytest.mark.parametrize("layout,dtype", [("vec", F32), ("amx", BF16)])
def test_tokens_not_seen_get_no_mass(isa, layout, dtype):
    batch = Batch([1, 37], [45, 70], block_size=64, dtype=dtype, layout=layout)
    clean = batch.run(isa, per_token=True)
    keys = unpack_keys(batch.key_cache, layout).clone()
    keys[batch.table[0, 0], :, 45:] = torch.nan
    keys[batch.table[1, 1], :, 70 - 64 :] = torch.nan
    batch.key_cache.copy_(pack_keys(keys, layout))
    assert torch.equal(batch.run(isa, per_token=True), clean)
    batch.weights = torch.zeros(38)
    batch.weights[1] = 1  # sees 34 tokens of 70
    seen = batch.run(isa, per_token=True)[1]
    assert (seen[:, :34] > 0).all() and not seen[:, 34:].any()


@needs_extension
def test_each_tokens_mass_has_the_same_bits_for_any_number_of_threads(set_threads):
    for query_lens, seq_lens in (DECODE, MIXED, ([1, 1], [5000, 300]), ([300], [2000])):
        batch = Batch(query_lens, seq_lens)
        results = []
        for threads in (1, 2, 8):
            set_threads(threads)
            results.append((batch.run(per_token=True), batch.run(rows=1, per_token=True)))
        assert all(torch.equal(*pair) for result in results[1:] for pair in zip(result, results[0]))


@needs_extension
@pytest.mark.parametrize(
    "change,match",
    [
        ("b.width = 39", "mass must be as wide as the longest request has tokens"),
        ("b.table = b.table[:, :1]", "as wide as the longest request has blocks"),
    ],
)
def test_too_narrow_for_tokens(change, match):
    batch = Batch([3, 1], [40, 20])
    batch.width = 40
    block_mass(batch.attention(torch.zeros(2, 2, 40), per_token=True))
    exec(change, {}, {"b": batch})
    out = torch.zeros(2, 2, batch.width)
    with pytest.raises(ValueError, match=match):
        block_mass(batch.attention(out, per_token=True))
    assert not out.any()


# ---- Packing


@pytest.mark.parametrize("block_size, dim", [(48, 6), (16, 16), (16, 2)])
@pytest.mark.parametrize("layout,dtype", [("vec", F32), ("vec16", F16), ("amx", BF16), ("vec", E4M3), ("amx", E5M2)])
def test_packing(layout, dtype, block_size, dim):
    keys = torch.arange(2 * 3 * block_size * dim).reshape(2, 3, block_size, dim) % 251
    keys = keys.to(dtype)
    packed = pack_keys(keys, layout).float()
    assert torch.equal(unpack_keys(packed.to(dtype), layout).float(), keys.float())
    # A storage may begin anywhere, and tokens may be apart.
    moved = torch.zeros(1 + keys.numel(), dtype=dtype)[1:].view(keys.shape).copy_(keys)
    apart = torch.zeros(2, 3, block_size, dim + 1, dtype=dtype)[..., 1:].copy_(keys)
    assert all(torch.equal(pack_keys(each, layout).float(), packed) for each in (moved, apart))
    flat = packed[1, 2].flatten()
    for t, d in itertools.product(range(block_size), range(dim)):
        place = d * block_size + t
        if layout == "amx":
            place = t // 16 * 16 * dim + d // 2 * 32 + t % 16 * 2 + d % 2
        assert flat[place] == keys[1, 2, t, d].float()


@pytest.mark.parametrize("layout,dtype", [("vec", F32), ("vec", BF16), ("vec16", F16), ("amx", BF16)])
def test_packs_as_vllm_does(layout, dtype):
    keys, values = torch.randn(2, 4 * 32, 2, 64).to(dtype)
    cache = torch.zeros(4, 2, 32, 128, dtype=dtype)  # in each block and head first K, then V
    key_cache, value_cache = cache.view(4, 2, 64, 64).chunk(2, dim=2)
    packing.write(keys, values, key_cache, value_cache, torch.arange(4 * 32), layout)
    keys, values = (logical.view(4, 32, 2, 64).transpose(1, 2) for logical in (keys, values))
    assert torch.equal(unpack_keys(key_cache, layout), keys)
    assert torch.equal(pack_keys(keys, layout), key_cache)
    assert torch.equal(unpack_values(value_cache.contiguous(), layout), values)
    assert torch.equal(pack_values(values, layout), value_cache)
    layer = SimpleNamespace(isa=layout, kv_cache=cache)
    for got, want in zip(CPUOps().read(layer, layer.kv_cache, torch.tensor([2, 0])), (keys, values)):
        assert torch.equal(got, want[[2, 0]])


@pytest.mark.parametrize("layout, name", [("vec", "fp8"), ("vec", "fp8_e5m2"), ("amx", "fp8"), ("amx", "fp8_e5m2")])
def test_fp8_caches_are_read_and_written_as_vllm_does(layout, name):
    """Numbers that fp8 holds, since vLLM's kernel truncates and the plugin rounds."""
    layer = SimpleNamespace(isa=layout, kv_cache_dtype=name, _k_scale_float=0.5, _v_scale_float=2.0)
    exact = torch.randn(2, 4 * 32, 2, 64).to(E5M2 if name == "fp8_e5m2" else E4M3).to(BF16)
    keys, values = exact[0] * 0.5, exact[1] * 2.0
    cache = torch.zeros(4, 2, 32, 128, dtype=torch.uint8)
    halves = cache.view(4, 2, 64, 64).chunk(2, dim=2)
    scales = {"k_scale": 0.5, "v_scale": 2.0, "kv_cache_dtype": name}
    packing.write(keys, values, *halves, torch.arange(4 * 32), layout, **scales)
    held = [logical.view(4, 32, 2, 64).transpose(1, 2) for logical in (keys, values)]
    for got, want in zip(CPUOps().read(layer, cache, torch.tensor([2, 0])), held):
        assert torch.equal(got, want[[2, 0]].float())
    stored = CPUOps().stored_keys(None, cache)[[3, 1]]
    assert torch.equal(CPUOps().as_keys(layer, stored), held[0][[3, 1]].float())
    again = torch.zeros_like(cache)
    CPUOps().write(layer, again, torch.arange(4), *held)
    again[again == 0x80] = 0  # vLLM writes no negative zeros
    assert torch.equal(again, cache)


def invalid(change: str, error: type, match: str):
    return pytest.param(change, error, match, id=match.replace(" ", "-"))


@needs_extension
@pytest.mark.parametrize(
    "change,error,match",
    [
        invalid("b.query = b.query.double()", TypeError, "query must be float32"),
        invalid("b.query = b.query.to(torch.float8_e4m3fn)", TypeError, "query must be float32"),
        invalid("b.key_cache = b.key_cache.char()", TypeError, "key_cache must"),
        invalid("b.table = b.table.long()", TypeError, "block_table must be int32"),
        invalid("b.layout = 'nhd'", ValueError, "layout must be one of"),
        invalid("b.layout = 'amx'", TypeError, "packs bfloat16 and float8 keys only"),
        invalid("b.query = b.query[0]", ValueError, r"query must be \[T, H, D\]"),
        invalid("b.query = b.query[..., :30]", ValueError, "the same D"),
        invalid("b.query = b.query[:, :3]", ValueError, "multiple of key_cache's heads"),
        invalid("b.key_cache = b.key_cache.transpose(2, 3)", ValueError, "contiguous within"),
        invalid("b.key_cache = b.key_cache[:, :, :8]", ValueError, "bs a multiple of 16"),
        invalid("b.table = b.table[:1]", ValueError, "must have R rows"),
        invalid("b.table = b.table[:, :1]", ValueError, "as wide as the longest request"),
        invalid("b.table[0, 0] = 1000", ValueError, "block ids of key_cache"),
        invalid("b.table[0, 0] = -1", ValueError, "block ids of key_cache"),
        invalid("b.seq_lens[0] = 2", ValueError, "include the queries"),
        invalid("b.starts[1] = 100", ValueError, "ascend within 0 and T"),
        invalid("b.weights = torch.ones(3)", ValueError, "weights must have T elements"),
        invalid("b.num_kv_heads = 3", ValueError, "one row for each KV head or one for all"),
    ],
)
def test_invalid_arguments(change, error, match):
    batch = Batch([3, 1], [40, 20])
    exec(change, {"torch": torch}, {"b": batch})
    with pytest.raises(error, match=match):
        batch.run()


@needs_extension
def test_mass_has_to_be_given():
    with pytest.raises(ValueError, match="needs mass"):
        block_mass(Batch([3, 1], [40, 20]).attention(None))


@needs_extension
def test_unknown_isa():
    with pytest.raises(ValueError, match="isa must be"):
        mass.kernel_path("avx1024")
    assert mass.kernel_path() == ISAS[0]


def test_without_extension(monkeypatch, caplog):
    expected = Batch(*MIXED).reference()
    monkeypatch.setattr(mass, "_C_cpu", None)
    monkeypatch.setattr(mass, "_warned", False)
    with caplog.at_level(logging.WARNING, "vllm.evict"):
        assert_close(Batch(*MIXED).run(), expected)
        Batch(*MIXED).run()
    assert len(caplog.records) == 1
    assert mass.kernel_path() == "torch reference"


@needs_extension
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_one_openmp_runtime():
    program = (
        "import torch, vllm_evict._C_cpu\n"
        "lines = open('/proc/self/maps').read().split()\n"
        "print(len({line for line in lines if 'gomp' in line or 'iomp' in line}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "1", done.stderr
