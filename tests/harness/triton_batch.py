"""Random arguments of Triton kernels, for their tests: under Triton's interpreter, or on a GPU where there is one."""

import itertools
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402

from vllm_evict.compute.kernels.decode import decode_mass_reference  # noqa: E402
from vllm_evict.compute.kernels.mass import pack_keys  # noqa: E402
from vllm_evict.compute.kernels.paged import DecodeShape, PagedAttention  # noqa: E402
from vllm_evict.triton_kernels.decode_mass import decode_mass, plan_decode  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
#: `pytestmark` of these tests.
WHERE_KERNELS_RUN = [
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
    """Give Triton 3.9's interpreter what it lacks."""
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

    def attention(self, mass=None, **options) -> PagedAttention:
        lists, values = (self.table, self.starts, self.seq_lens), (self.values, self.value_scale)
        return PagedAttention(self.query, self.keys, *lists, self.kernel_scale, *values, mass=mass, **options)

    def real_attention(self, mass=None, **options) -> PagedAttention:
        """Return the numbers that an fp8 cache stands for."""
        stands_for = {"key_cache": self.real_keys, "scale": self.scale, "value_cache": self.real_values}
        return replace(self.attention(mass, **options), value_scale=1.0, **stands_for)

    def plan(self, **options):
        shape = len(self.rows), self.heads, self.kv_heads, self.query.shape[2], self.block_size, self.table.shape[1]
        return plan_decode(DecodeShape(*shape, self.query.dtype, DEVICE), **options)

    def decode(self, rows_of_mass=None, per_token=False, plan=None, **options):
        output = torch.full_like(self.query, 7.0)
        lse = torch.full(self.query.shape[:2], 7.0, device=DEVICE)
        out = self.new_out(rows_of_mass or self.kv_heads, per_token=per_token) if rows_of_mass != 0 else None
        attention = self.attention(out, **{"weights": self.weights, "per_token": per_token} | options)
        decode_mass(attention, self.rows, output, lse=lse, plan=plan)
        return output, out, lse

    def decode_reference(self, rows_of_mass=None, per_token=False, **logits):
        output = torch.full_like(self.query, 7.0).cpu()
        out = self.new_out(rows_of_mass or self.kv_heads, torch.float64, per_token).cpu()
        attention = on_cpu(self.real_attention(out, weights=self.weights, per_token=per_token, **logits))
        decode_mass_reference(attention, self.rows.cpu(), output)
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


def beyond_2_to_the_31(axis, dim, make=Batch) -> tuple[Batch, Batch]:
    """Two batches alike, the second in a cache whose blocks or heads (`axis`) are 2**30 elements apart.

    Strides of 2**30 fit 32 bits, twice that does not. Only pages that are used take memory (on a GPU, 4 GiB).
    """
    far, block_size, heads = 2**30 + 64, 16, 3
    page = heads * block_size * 2 * dim
    try:
        memory = torch.empty(2 * far + 3 * page, dtype=F16, device=DEVICE)
    except RuntimeError as error:
        pytest.skip(f"no 4 GiB of addresses: {error}")
    near, batch = (make([1, 2], [24, 24], (heads, heads), dim, block_size, F16) for _ in range(2))
    strides = (far, block_size * 2 * dim) if axis == "block" else (block_size * 2 * dim, far)
    cache = torch.as_strided(memory, (3, heads, block_size, 2 * dim), (*strides, 2 * dim, 1))
    near.table[1] = near.table[0]
    batch.table[:, :2] = ints([0, 2])
    for block, source in zip((0, 2), near.table[0].tolist()):
        cache[block] = torch.cat((near.keys[source], near.values[source]), -1)
    batch.keys, batch.values = cache.split(dim, -1)
    return near, batch


def on_cpu(attention: PagedAttention) -> PagedAttention:
    """The same for CPU kernels: tensors on the host, keys packed."""
    values = {each.name: getattr(attention, each.name) for each in fields(attention)}
    tensors = {name: value.cpu() for name, value in values.items() if isinstance(value, torch.Tensor)}
    return replace(attention, **tensors | {"key_cache": pack_keys(tensors["key_cache"])})


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


# ---- What decode kernels of any language do: `batch.decode` runs one; `by` may have `per_token`


def check_without_mass(batch):
    """The output does not depend on whether mass is measured, nor on weights."""
    output, mass, lse = batch.decode(weights=None)
    assert torch.equal(batch.decode(0)[0], output) and torch.equal(batch.decode(0)[2], lse)
    batch.weights = torch.zeros_like(batch.weights)
    output_, unweighed, lse_ = batch.decode()
    assert torch.equal(output_, output) and torch.equal(lse_, lse)
    assert (unweighed == 0.25).all() and not torch.equal(mass, unweighed)


def check_mass_adds_up(batch):
    """To the query heads of a KV head."""
    _, mass, _ = batch.decode(weights=None)
    expected = torch.zeros(len(batch.seq_lens), batch.kv_heads)
    expected[batch.rows.cpu().long()] = batch.heads // batch.kv_heads
    assert_close((mass - 0.25).sum(2), expected, 2e-5)


def check_large_scores(batch, tolerance, **by):
    """They neither overflow nor vanish."""
    output, mass, _ = batch.decode(**by)
    expected, expected_mass = batch.decode_reference(**by)
    assert_close(output, expected, tolerance)
    assert_close(mass, expected_mass, 1e-4)


def check_nan_keys(batch, splits, tokens, **by):
    """Keys of NaN at these tokens of the last request and KV head: its output and mass are NaN, no other's are."""
    plan = batch.plan(splits=splits, **by)
    clean = batch.decode(plan=plan, **by)
    request, length = len(batch.seq_lens) - 1, int(batch.seq_lens[-1])
    batch.weights[-1] = 1
    for token in tokens:
        batch.keys[batch.table[request, token // 16].long(), -1, token % 16, 3] = torch.nan
    output, mass, lse = batch.decode(plan=plan, **by)
    expected, expected_mass = batch.decode_reference(**by)
    entries, group = length if by.get("per_token") else -(-length // 16), batch.heads // batch.kv_heads
    for got in output[-1, -group:], expected[-1, -group:], lse[-1, -group:]:
        assert got.isnan().all()
    for got in mass[request, -1, :entries], expected_mass[request, -1, :entries]:
        assert got.isnan().all()
    for got, want in zip((output, lse), (clean[0], clean[2])):
        assert torch.equal(got[:-1], want[:-1]) and torch.equal(got[-1, :-group], want[-1, :-group])
    assert torch.equal(mass[:request], clean[1][:request])


def check_no_tokens(batch):
    """A request without tokens gets zeros."""
    batch.seq_lens = torch.zeros_like(batch.seq_lens)
    output, mass, lse = batch.decode()
    assert not output.any() and (mass == 0.25).all() and (lse == -torch.inf).all()


def check_captured(batch, decode, **by):
    """`decode(attention, rows, output, lse=, plan=)` replays from a CUDA graph."""
    if not ON_GPU:
        pytest.skip("CUDA graphs need a GPU")
    plan = batch.plan(**by)
    expected = batch.decode(plan=plan, **by)
    output, lse, out = torch.empty_like(batch.query), torch.empty_like(expected[2]), batch.new_out(batch.kv_heads, **by)
    attention = batch.attention(out, weights=batch.weights, **by)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(attention, batch.rows, output, lse=lse, plan=plan)
    out.fill_(0.25)
    graph.replay()
    tokens = batch.starts[batch.rows.long()].long()
    assert torch.equal(out, expected[1])
    assert torch.equal(output[tokens], expected[0][tokens]) and torch.equal(lse[tokens], expected[2][tokens])
