"""Triton kernels against their torch references: under Triton's interpreter, or on a GPU where there is one."""

import itertools

import pytest
import torch

triton = pytest.importorskip("triton")

from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402

from vllm_evict.attention.decode import decode_mass_reference  # noqa: E402
from vllm_evict.attention.mass import block_mass_reference, pack_keys  # noqa: E402
from vllm_evict.triton_kernels.decode_mass import decode_mass, plan_decode  # noqa: E402
from vllm_evict.triton_kernels.mass_from_lse import mass_from_lse, mass_from_lse_reference  # noqa: E402
from vllm_evict.triton_kernels.resident_view import resident_view, resident_view_reference  # noqa: E402
from vllm_evict.triton_kernels.select import select, select_reference  # noqa: E402
from vllm_evict.triton_kernels.tiles import tile_of  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = pytest.mark.skipif(
    not ON_GPU and not triton.knobs.runtime.interpret, reason="no GPU, and TRITON_INTERPRET was not set before triton"
)
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
HEAD_MAJOR, TOKEN_MAJOR = KVCacheLayout.LBHNC, KVCacheLayout.LBNHC
#: Of an output, by its own rounding and that of the probabilities before they meet the values.
TOLERANCE = {F32: 3e-6, F16: 2e-3, BF16: 1.6e-2}


@pytest.fixture(autouse=True)
def in_place(monkeypatch):
    """The interpreter copies what a kernel wrote back onto itself, which would touch all of a cache of gigabytes."""
    copy = torch.UntypedStorage.copy_

    def copy_(storage, source, *options):
        return storage if source.data_ptr() == storage.data_ptr() else copy(storage, source, *options)

    monkeypatch.setattr(torch.UntypedStorage, "copy_", copy_)


def ints(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def cache_in(layout: KVCacheLayout, blocks, kv_heads, block_size, content, layers=2) -> torch.Tensor:
    """One layer's [B, H, N, C] of an uninitialised cache that lies as vLLM's `layout` says."""
    logical = (layers, blocks, kv_heads, block_size, content)
    physical = torch.full([logical[axis] for axis in layout.stride_order], torch.nan, device=DEVICE)
    order = [layout.stride_order.index(axis) for axis in range(5)]
    return physical.permute(order)[layers - 1]


class Batch:
    """Random arguments. All that no query may read is NaN: other blocks and layers, and what lies beyond last tokens."""

    def __init__(
        self, query_lens, seq_lens, heads=(4, 2), dim=64, block_size=16, dtype=F32, layout=HEAD_MAJOR, magnitude=1.0
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
        cache = cache_in(layout, *pages.shape).to(dtype)  # keeps its strides
        cache.copy_(pages)
        self.keys, self.values = cache.split(dim, dim=-1)
        tokens = sum(query_lens)
        query = torch.randn(tokens, self.heads + 1, dim, generator=random)
        self.query = query.to(DEVICE, dtype)[:, 1:]  # not dense
        self.table = self.table.to(DEVICE)[:, :-1]
        self.starts = ints([0, *itertools.accumulate(query_lens)])
        self.seq_lens = ints(seq_lens)
        self.rows = ints([row for row, length in enumerate(query_lens) if length == 1])
        self.weights = (torch.rand(tokens, generator=random) * (torch.rand(tokens, generator=random) < 0.7)).to(DEVICE)

    def new_out(self, rows, dtype=F32):
        """Sums that are there already; wider than need be."""
        out = torch.full((len(self.seq_lens), rows, self.table.shape[1] + 2), 0.25, dtype=dtype, device=DEVICE)
        return out[:, :, :-1]

    def decode(self, rows_of_mass=None, **options):
        output = torch.full_like(self.query, 7.0)
        lse = torch.full(self.query.shape[:2], 7.0, device=DEVICE)
        out = self.new_out(rows_of_mass or self.kv_heads) if rows_of_mass != 0 else None
        options = {"weights": self.weights, "lse": lse} | options
        decode_mass(
            *(self.query, self.keys, self.values, self.table, self.starts, self.seq_lens, self.rows),
            *(self.scale, output),
            out=out,
            **options,
        )
        return output, out, lse

    def decode_reference(self, rows_of_mass=None):
        output = torch.full_like(self.query, 7.0).cpu()
        out = self.new_out(rows_of_mass or self.kv_heads, torch.float64).cpu()
        arguments = (
            self.query, pack_keys(self.keys.cpu()), self.values, self.table, self.starts, self.seq_lens, self.rows
        )  # fmt: skip
        decode_mass_reference(
            *(tensor.cpu() for tensor in arguments), self.scale, output, out=out, weights=self.weights.cpu()
        )
        return output, out

    def lse(self):
        """Of each query and head, over what it sees. float32 [T, H]."""
        result = torch.zeros(self.query.shape[:2], dtype=torch.float64)
        starts = self.starts.tolist()
        for r, seq_len in enumerate(self.seq_lens.tolist()):
            blocks = self.table[r, : -(-seq_len // self.block_size)].long()
            keys = self.keys[blocks].transpose(0, 1).flatten(1, 2)[:, :seq_len].double().cpu()
            keys = keys.repeat_interleave(self.heads // self.kv_heads, 0)
            query = self.query[starts[r] : starts[r + 1]].double().cpu()
            scores = torch.einsum("qhd,htd->qht", query, keys) * self.scale
            last = seq_len - len(query) + torch.arange(len(query))
            scores.masked_fill_((torch.arange(seq_len) > last[:, None])[:, None], -torch.inf)
            result[starts[r] : starts[r + 1]] = scores.logsumexp(-1)
        return result.float().to(DEVICE)


def assert_close(actual, expected, tolerance=3e-6):
    torch.testing.assert_close(actual.double().cpu(), expected.double().cpu(), rtol=tolerance, atol=tolerance)


DECODE = [1, 0, 1, 3, 1, 1], [1, 20, 77, 64, 48, 130]
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
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=[f"{h}x{d}-bs{b}-{str(t)[6:]}-{o.name}" for h, d, b, t, o in SHAPES])
sum_heads = pytest.mark.parametrize("sum_heads", [False, True], ids=["per KV head", "heads summed"])


# ---- decode_mass


@each_shape
@sum_heads
def test_decode_matches_the_reference(shape, sum_heads):
    heads, dim, block_size, dtype, layout = shape
    batch = Batch(*DECODE, heads, dim, block_size, dtype, layout)
    rows = 1 if sum_heads else None
    plan = plan_decode(
        len(batch.rows), *heads, dim, block_size, batch.table.shape[1], dtype, DEVICE, splits=3 if sum_heads else None
    )  # fmt: skip
    output, mass, lse = batch.decode(rows, plan=plan)
    expected, expected_mass = batch.decode_reference(rows)
    assert_close(output, expected, TOLERANCE[dtype])
    assert_close(mass, expected_mass)
    tokens = batch.starts[batch.rows.long()].long()
    assert_close(lse[tokens], batch.lse()[tokens])
    others = torch.ones(len(output), dtype=torch.bool, device=DEVICE).index_fill(0, tokens, False)
    assert (output[others] == 7).all() and (lse[others] == 7).all()
