"""`block_mass`: every kernel this CPU runs against the reference in float64."""

import contextlib
import itertools

import pytest
import torch

from vllm_evict.compute.kernels import mass
from vllm_evict.compute.kernels.mass import (
    block_mass,
    block_mass_reference,
    pack_keys,
    unpack_keys,
)
from vllm_evict.compute.kernels.paged import PagedAttention


def kernels() -> list[str]:
    if mass._C_cpu is None:
        return []
    found = []
    for isa in ("amx_bf16", "avx512_bf16", "avx512", "avx2", "portable"):
        with contextlib.suppress(ValueError):
            found.append(mass.kernel_path(isa))
    return found


ISAS = kernels()
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: Dtypes of queries that meet fp8 caches.
QUERIES_OF = {E4M3: BF16, E5M2: F32}
needs_extension = pytest.mark.skipif(not ISAS, reason="vllm_evict._C_cpu is not built")
each_isa = pytest.mark.parametrize("isa", ISAS)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Batch:
    """Random arguments of block_mass. Blocks are scattered, and pages hold values too."""

    def __init__(
        self,
        query_lens,
        seq_lens,
        heads=(4, 2),
        dim=64,
        block_size=32,
        dtype=F32,
        layout="vec",
        magnitude=1.0,
        seed=0,
    ):
        random = torch.Generator().manual_seed(seed)
        self.num_heads, self.num_kv_heads = heads
        self.block_size, self.layout, self.scale = block_size, layout, dim**-0.5
        self.blocks = [-(-length // block_size) for length in seq_lens]
        num_blocks = sum(self.blocks) + 7
        page = torch.randn(num_blocks, heads[1], 2 * block_size, dim, generator=random).to(dtype)
        self.key_cache = page[:, :, :block_size]
        keys = torch.randn(num_blocks, heads[1], block_size, dim, generator=random) * magnitude
        self.key_cache.copy_(pack_keys(keys.to(dtype), layout))
        tokens = sum(query_lens)
        query = torch.randn(tokens + 3, heads[0] + 1, dim, generator=random).to(QUERIES_OF.get(dtype, dtype))
        self.query = query[:tokens, 1:]  # neither dense nor at the beginning
        self.starts = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32)
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
        ids = torch.randperm(num_blocks, generator=random).int()
        self.table = torch.full((len(seq_lens), max(self.blocks) + 5), -1, dtype=torch.int32)
        self.table = self.table[:, :-2]
        for row, used in zip(self.table, ids.split([*self.blocks, 7]), strict=False):
            row[: len(used)] = used
        self.weights = None

    def attention(self, mass, per_token=False, **logits) -> PagedAttention:
        lists, measured = (self.table, self.starts, self.seq_lens), {"mass": mass, "per_token": per_token}
        options = {"layout": self.layout, "weights": self.weights, **measured, **logits}
        return PagedAttention(self.query, self.key_cache, *lists, self.scale, **options)

    def new_out(self, rows=None, dtype=F32, per_token=False) -> torch.Tensor:
        width = int(self.seq_lens.max()) if per_token else max(self.blocks)
        return torch.zeros(len(self.seq_lens), rows or self.num_kv_heads, width + 1, dtype=dtype)

    def run(self, isa=None, rows=None, per_token=False) -> torch.Tensor:
        out = self.new_out(rows, per_token=per_token)
        block_mass(self.attention(out, per_token), isa=isa)
        return out

    def reference(self, rows=None, per_token=False) -> torch.Tensor:
        out = self.new_out(rows, torch.float64, per_token)
        block_mass_reference(self.attention(out, per_token))
        return out

    def per_block(self, mass) -> torch.Tensor:
        """Sums over blocks of mass of each token, in the shape of `run`."""
        width = (max(self.blocks) + 1) * self.block_size
        padded = torch.nn.functional.pad(mass, (0, width - mass.shape[2]))
        return padded.view(*mass.shape[:2], -1, self.block_size).sum(3)


def assert_close(actual, expected, tolerance=3e-6):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance * 1e-2)


DECODE = [1] * 5, [1, 31, 64, 100, 333]
PREFILL = [70, 33], [70, 100]
MIXED = [1, 0, 130, 1, 2], [50, 20, 200, 7, 2]

SHAPES = [  # heads, dim, block size, dtype, layout, batch
    ((4, 2), 64, 32, F32, "vec", MIXED),
    ((4, 2), 64, 32, BF16, "vec", MIXED),
    ((4, 2), 64, 32, F16, "vec", MIXED),
    ((4, 2), 64, 32, BF16, "amx", MIXED),
    ((3, 3), 32, 16, F32, "vec", DECODE),  # MHA
    ((3, 3), 128, 64, BF16, "amx", PREFILL),
    ((5, 1), 80, 16, F32, "vec16", MIXED),  # MQA
    ((5, 1), 80, 16, BF16, "amx", DECODE),
    ((16, 1), 96, 128, F16, "vec", DECODE),
    ((6, 1), 112, 48, BF16, "vec", PREFILL),
    ((14, 2), 128, 128, F32, "vec", DECODE),  # 7 query heads a KV head
    ((6, 2), 256, 64, F32, "vec", PREFILL),
    ((4, 2), 256, 16, BF16, "amx", MIXED),
    ((4, 2), 512, 32, BF16, "vec", MIXED),  # Gemma 4
    ((4, 2), 512, 32, BF16, "amx", DECODE),
    ((71, 1), 64, 64, F32, "vec", MIXED),  # more heads than rows in a pass
    ((71, 1), 64, 64, BF16, "amx", MIXED),
    ((6, 1), 96, 48, BF16, "amx", PREFILL),  # one vector of tokens at a time, and rows that fill no tile
    ((7, 1), 32, 32, BF16, "amx", MIXED),
    ((2, 2), 128, 32, F16, "vec", DECODE),
    ((8, 1), 128, 16, F16, "vec16", PREFILL),
    ((9, 3), 18, 80, F32, "vec", MIXED),  # no whole vectors
    ((4, 1), 38, 144, F32, "vec", PREFILL),
    ((4, 2), 64, 32, E4M3, "vec", MIXED),
    ((14, 2), 128, 48, E4M3, "vec", PREFILL),
    ((5, 1), 96, 64, E5M2, "vec", MIXED),
    ((4, 2), 64, 32, E4M3, "amx", MIXED),
    ((6, 1), 96, 48, E5M2, "amx", PREFILL),
]


@each_isa
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sum_heads", [False, True])
def test_matches_reference(isa, shape, sum_heads):
    heads, dim, block_size, dtype, layout, (query_lens, seq_lens) = shape
    batch = Batch(query_lens, seq_lens, heads, dim, block_size, dtype, layout)
    batch.weights = torch.rand(sum(query_lens)) * (torch.rand(sum(query_lens)) < 0.7)
    rows = 1 if sum_heads else None
    assert_close(batch.run(isa, rows), batch.reference(rows))


@each_isa
@pytest.mark.parametrize("layout, dtype", [("vec", F32), ("amx", BF16)])
def test_long_prefill_in_many_passes(isa, layout, dtype):
    batch = Batch([1500], [1700], heads=(4, 1), dim=32, dtype=dtype, layout=layout)
    assert_close(batch.run(isa), batch.reference())


@each_isa
def test_a_known_case(isa):
    # Scores 0 and log(3): a quarter and three quarters, in two blocks.
    keys = torch.zeros(3, 1, 16, 2)
    keys[2, 0, 0] = torch.tensor([1.0, 1.0])
    query = torch.full((1, 1, 2), torch.tensor(3.0).log())
    out = torch.tensor([[[10.0, 20.0]]])
    lists = ([[1, 2]], [0, 1], [17])
    lists = (torch.tensor(each, dtype=torch.int32) for each in lists)
    block_mass(PagedAttention(query, pack_keys(keys), *lists, 0.5, mass=out), isa=isa)
    assert_close(out, torch.tensor([[[10 + 16 / 19, 20 + 3 / 19]]]), 1e-6)


@each_isa
def test_exponential(isa):
    # Each request has 16 scores of 0 in one block and a score x in another.
    x = torch.linspace(-60, 60, 4001)
    keys = torch.zeros(2, 1, 16, 2)
    keys[1, 0, 0, 0] = 1.0
    query = torch.stack([x, x], 1)[:, None]
    table = torch.tensor([[0, 1]], dtype=torch.int32).expand(len(x), 2)
    lens = torch.full((len(x),), 17, dtype=torch.int32)
    out = torch.zeros(len(x), 1, 2)
    starts = torch.arange(len(x) + 1, dtype=torch.int32)
    block_mass(PagedAttention(query, pack_keys(keys), table, starts, lens, 1.0, mass=out), isa=isa)
    error = (out[:, 0, 1] / out[:, 0, 0]).double() / (x.double().exp() / 16) - 1
    # A few units in the last place, and the rounding of the score itself.
    assert (error.abs() < 5e-7 + x.abs() * 1.5e-7).all()


@needs_extension
def test_adds_to_out():
    batch = Batch(*MIXED)
    start = torch.rand(batch.new_out().shape)
    out = start.clone()
    block_mass(batch.attention(out))
    assert_close(out, start + batch.run(), 1e-6)


@each_isa
@pytest.mark.parametrize("magnitude", [1e4, 1e-6])
@pytest.mark.parametrize("sign", [1, -1])
def test_extreme_scores(isa, magnitude, sign):
    batch = Batch([1, 20], [200, 50], dim=64, magnitude=magnitude)
    batch.scale *= sign
    out = batch.run(isa)
    assert out.isfinite().all()
    assert_close(out.sum(2), torch.tensor([[2.0, 2.0], [40.0, 40.0]]))


@each_isa
def test_huge_equal_scores(isa):
    # Every score is -1e4 or 1e4: the peak must be subtracted before the exponential.
    for score in (-1e4, 1e4):
        batch = Batch([1], [128], heads=(1, 1), dim=2)
        batch.query[:] = 1
        batch.key_cache[:] = score / 2
        batch.scale = 1.0
        assert_close(batch.run(isa)[0, 0], torch.tensor([0.25, 0.25, 0.25, 0.25, 0.0]))


@each_isa
@pytest.mark.parametrize(
    "layout,dtype", [("vec", F32), ("vec", BF16), ("vec", F16), ("amx", BF16), ("vec", E4M3), ("amx", E5M2)]
)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_foreign_blocks_and_unwritten_tails_do_not_matter(isa, layout, dtype, poison):
    batch = Batch([1, 37], [45, 70], block_size=64, dtype=dtype, layout=layout)
    clean = batch.run(isa)
    keys = unpack_keys(batch.key_cache, layout).clone()
    poisoned = torch.full(keys.shape, poison).to(dtype)
    for row, seq_len in zip(batch.table, batch.seq_lens.tolist(), strict=True):
        for first in range(0, seq_len, 64):
            block = row[first // 64]
            written = min(64, seq_len - first)
            poisoned[block, :, :written] = keys[block, :, :written]
    batch.key_cache.copy_(pack_keys(poisoned, layout))
    assert torch.equal(batch.run(isa), clean)
    assert_close(batch.reference(), clean)


@each_isa
def test_future_tokens_do_not_matter(isa):
    # The first of two queries must not see the second one's key.
    batch = Batch([2], [40])
    batch.weights = torch.tensor([1.0, 0.0])
    clean = batch.run(isa)
    keys = unpack_keys(batch.key_cache).clone()
    keys[batch.table[0, 1], :, 39 - 32] = torch.nan
    batch.key_cache.copy_(pack_keys(keys))
    assert torch.equal(batch.run(isa), clean)


@each_isa
@pytest.mark.parametrize("per_token", [False, True], ids=["blocks", "tokens"])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[3] != E4M3], ids=str)
def test_a_nan_key_gives_nan_mass(isa, shape, per_token):
    """To the queries that see it, all of their mass; to no other request or head."""
    heads, dim, block_size, dtype, layout, (query_lens, seq_lens) = shape
    batch = Batch(query_lens, seq_lens, heads, dim, block_size, dtype, layout)
    batch.weights = torch.rand(sum(query_lens))
    request, token = len(seq_lens) - 1, seq_lens[-1] - 1  # only the last query sees it
    keys = unpack_keys(batch.key_cache, layout).clone()
    keys[batch.table[request, token // block_size], -1, token % block_size, dim // 2] = torch.nan
    clean = batch.run(isa, per_token=per_token)
    batch.key_cache.copy_(pack_keys(keys, layout))
    mass, expected = batch.run(isa, per_token=per_token), batch.reference(per_token=per_token)
    entries = seq_lens[-1] if per_token else batch.blocks[-1]
    assert mass[request, -1, :entries].isnan().all() and expected[request, -1, :entries].isnan().all()
    mass[request, -1], expected[request, -1] = clean[request, -1], clean[request, -1].double()
    assert torch.equal(mass, clean)
    assert_close(mass, expected)


@each_isa
@pytest.mark.parametrize("layout", ["vec", "amx"])
def test_nan_of_e4m3_counts_as_480(isa, layout):
    """Caches have no such numbers, as vLLM's kernels write none: one such element of a key makes another score, and no
    NaN.
    """
    batch = Batch([1], [1], heads=(1, 1), dtype=E4M3, layout=layout)
    for number, score in ((torch.nan, 480.0), (-448.0, -448.0)):
        batch.key_cache[:] = torch.full(batch.key_cache.shape, 0.0).to(E4M3)
        keys = torch.zeros(batch.key_cache.shape).view(-1, 1, 32, 64)
        keys[:, :, 0, 5] = number
        batch.key_cache.copy_(pack_keys(keys.to(E4M3), layout))
        batch.query.zero_()[..., 5] = 2**-9
        sinks = torch.zeros(1)
        out = batch.new_out()
        block_mass(batch.attention(out, sinks=sinks), isa=isa)
        assert_close(out[0, 0, 0], torch.tensor(score * 2**-9 / 8).sigmoid(), 1e-5)


@each_isa
@pytest.mark.parametrize("layout, dtype", [("vec", F32), ("amx", BF16)])
def test_same_bits_for_any_number_of_threads(isa, layout, dtype, set_threads):
    long_decode = [1, 1], [5000, 300]
    for query_lens, seq_lens in (DECODE, PREFILL, MIXED, long_decode, ([300], [2000])):
        batch = Batch(query_lens, seq_lens, dtype=dtype, layout=layout)
        results = []
        for threads in (1, 2, 3, 8, 8):
            set_threads(threads)
            results.append((batch.run(isa), batch.run(isa, rows=1)))
        for result in results[1:]:
            assert torch.equal(result[0], results[0][0])
            assert torch.equal(result[1], results[0][1])


@each_isa
def test_weight_zero_is_skipped(isa):
    batch = Batch([3, 2], [40, 70])
    batch.weights = torch.tensor([0.5, 0.0, 2.0, 0.0, 0.0])
    batch.query[1] = torch.nan  # would show in the sums
    batch.table[1] = 10**6  # would be refused
    out = batch.run(isa)
    assert out[1].eq(0).all()
    assert_close(out[0].sum(1), torch.tensor([5.0, 5.0]))


@each_isa
def test_slots_past_32_bits(isa):
    # Block 2 begins 2^31 elements into a storage of which only its own pages are ever touched.
    stride = 1 << 30
    storage = torch.empty(2 * stride + 16 * 32, dtype=F16)
    cache = storage.as_strided((3, 1, 16, 32), (stride, 16 * 32, 32, 1))
    batch = Batch([1], [16], heads=(2, 1), dim=32, block_size=16, dtype=F16)
    expected = batch.run(isa)
    cache[2] = batch.key_cache[batch.table[0, 0]]
    batch.key_cache, batch.table = cache, torch.tensor([[2]], dtype=torch.int32)
    assert torch.equal(batch.run(isa), expected)
