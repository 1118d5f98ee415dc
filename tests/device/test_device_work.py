"""Operations of attention backends of a device on pages and queries, an operation at a time, without an engine.

Kernels of the plugin run under Triton's interpreter (test_device_backends.py has whole engines).
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backends import flash_attn

from vllm_evict.compute.attention.device import slices_of
from vllm_evict.compute.attention.flash import FlashOps
from vllm_evict.compute.attention.fp8 import dequantised
from vllm_evict.compute.attention.latent_cpu import LatentOps
from vllm_evict.compute.attention.latent_device import DeviceLatentOps
from vllm_evict.compute.attention.triton import TritonOps
from vllm_evict.compute.kernels.compact import is_ordered
from vllm_evict.compute.kernels.paged import PagedAttention
from vllm_evict.compute.kernels.queries import Queries
from vllm_evict.compute.probes import LayerCall, MassTarget
from vllm_evict.compute.work import HeadSlice
from vllm_evict.integration.seams import MARK
from vllm_evict.integration.worker import split
from vllm_evict.integration.worker.backend import STEP_WORK, working_impl
from vllm_evict.integration.worker.flash import capture_lse
from vllm_evict.triton_kernels import decode_classes, mass_from_lse

# numpy's, where a masked row divides 0 by 0.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
BLOCK = 16


class Layer(SimpleNamespace):
    """Has an identity, as modules have."""

    __hash__ = object.__hash__


def fp8_layer():
    scales = {"_q_scale_float": 0.5, "_k_scale_float": 0.3, "_v_scale_float": 1.7}
    return Layer(dtype=torch.float32, impl=SimpleNamespace(scale=0.2, head_size=32), **scales)


def fp8_pages(layer, heads, dim=32, blocks=7):
    """Bytes as vLLM hands them over, and what they stand for, [blocks, heads, BLOCK, 2 * dim] each."""
    random = torch.Generator().manual_seed(heads)
    pages = torch.randn(blocks, BLOCK, heads, 2 * dim, generator=random).to(torch.float8_e4m3fn).transpose(1, 2)
    keys, values = pages.float().chunk(2, 3)
    return pages.view(torch.uint8), torch.cat((keys * layer._k_scale_float, values * layer._v_scale_float), 3)


def test_fp8_pages_are_read_written_and_moved():
    layer, ops, blocks = fp8_layer(), TritonOps(), torch.tensor([5, 2])
    pages, real = fp8_pages(layer, 2)
    keys, values = ops.read(layer, pages, blocks)
    assert keys.dtype == torch.float32 and torch.equal(torch.cat((keys, values), 3), real[blocks])
    alone, nothing = ops.read(layer, pages, blocks, False)
    assert torch.equal(alone, keys) and nothing is None
    new = torch.linspace(-3, 3, keys.numel()).view(keys.shape)
    new[0, 0, 0, 0] = 1000.0
    ops.write(layer, pages, blocks, new.double(), values)
    keys_, values_ = ops.read(layer, pages, blocks)
    assert keys_[0, 0, 0, 0] == pytest.approx(448 * 0.3) and torch.equal(values_, values)
    keys_[0, 0, 0, 0] = new[0, 0, 0, 0] = 0.0
    # Half a step: 2 ** -4 of the number, or 2 ** -10 of the scale.
    torch.testing.assert_close(keys_, new, rtol=2**-4, atol=0.3 * 2**-10)
    keep, before = torch.arange(3, 3 + BLOCK, dtype=torch.int32).expand(1, 2, -1), pages.clone()
    source, target = torch.tensor([5, 2], dtype=torch.int32), torch.tensor([6], dtype=torch.int32)
    ops.compact(layer, [pages], source, keep.contiguous(), target)
    moved = before[source.long()].transpose(0, 1).flatten(1, 2)[:, 3 : 3 + BLOCK]
    assert torch.equal(pages[6], moved) and torch.equal(pages[:6], before[:6])


@pytest.mark.parametrize("per_token", [False, True], ids=["blocks", "tokens"])
def test_fp8_pages_and_queries_are_attended_to_as_what_they_stand_for(per_token):
    """Every pass, of quantised queries too, against itself on caches that are not quantised."""
    layer, ops = fp8_layer(), TritonOps()
    plain = SimpleNamespace(dtype=torch.float32, impl=layer.impl)
    pages, real = zip(fp8_pages(layer, 1), fp8_pages(layer, 2))
    quantised = torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(9)).to(torch.float8_e4m3fn)
    query = dequantised(layer, quantised)
    assert query.dtype == torch.float32 and torch.equal(query, quantised.float() * 0.5)
    assert dequantised(layer, query) is query
    table, starts = torch.tensor([[3, 1, 6], [0, 5, 2]], dtype=torch.int32), torch.tensor([0, 1, 4], dtype=torch.int32)
    lens, rows = torch.tensor([37, 20], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    metadata = SimpleNamespace(
        block_table=table, query_start_loc=starts, seq_lens=lens, num_actual_tokens=4, max_query_len=3, max_seq_len=37
    )
    queries = Queries(torch.tensor([0, 2]), torch.tensor([0, 1]), torch.tensor([37, 19], dtype=torch.int32))
    results = []
    for its, caches in ((layer, pages), (plain, real)):
        mass, decoded, output = (torch.zeros(2, 2, 3 * BLOCK), torch.zeros(2, 2, 3 * BLOCK), torch.zeros(4, 4, 32))
        call = LayerCall(ops, its, 0, query[:, 2:], caches[1], metadata, output)
        ops.mass(call, MassTarget(mass, per_token=per_token))
        ops.decode(call, rows, lens, MassTarget(decoded, per_token=per_token))
        of_each = ops.mass_of(call, queries, 3)
        together, out, work = (
            torch.zeros(4, 6, 32),
            torch.zeros(2, 1, 3 * BLOCK),
            SimpleNamespace(rows=rows, seq_lens=lens),
        )
        parts = zip(query.split([2, 4], 1), caches, together.split([2, 4], 1))
        shares = [HeadSlice(work, LayerCall(ops, its, 0, q, cache, metadata, to)) for q, cache, to in parts]
        ops.decode_together(shares, [MassTarget(each, per_token=per_token) for each in (out, None)])
        results.append((mass, decoded, output, of_each, together, out))
    for got, want in zip(*results, strict=True):
        assert want.any()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scratch", [0, 2 * 3, 2 * 2 * 3 * BLOCK], ids=["none", "one request", "all"])
@pytest.mark.parametrize("per_token", [False, True], ids=["blocks", "tokens"])
def test_a_sum_over_heads_is_that_of_the_heads(per_token, scratch, monkeypatch):
    """Heads are measured by programs of their own, for as many requests at once as the scratch takes."""
    layer, ops = fp8_layer(), TritonOps()
    layer = SimpleNamespace(dtype=torch.float32, impl=layer.impl)
    _, pages = fp8_pages(fp8_layer(), 2)
    query = torch.randn(7, 4, 32, generator=torch.Generator().manual_seed(9))
    table, starts = torch.tensor([[3, 1, 6], [0, 5, 2]], dtype=torch.int32), torch.tensor([0, 3, 7], dtype=torch.int32)
    lens, last = torch.tensor([37, 20], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)
    weights = torch.tensor([0.0, 0, 2, 0, 0, 1, 3])
    metadata = SimpleNamespace(
        block_table=table, query_start_loc=starts, seq_lens=lens, num_actual_tokens=7, max_query_len=4, max_seq_len=37
    )
    launches, launch = [], mass_from_lse.mass_from_lse

    def launched(*args, **options):
        launches.append((*args, options["last"]))
        launch(*args, **options)

    monkeypatch.setattr(mass_from_lse, "mass_from_lse", launched)
    width = 3 * BLOCK if per_token else 3
    one, each, all_of_it = torch.ones(2, 1, width), torch.zeros(2, 2, width), torch.zeros(2, 2, width)
    ops.scratch.nbytes = 4 * scratch * (BLOCK if per_token and scratch == 2 * 3 else 1)
    call = LayerCall(ops, layer, 0, query, pages, metadata)
    ops.mass(call, MassTarget(one, weights, per_token, last))
    heads = [len(one.mass) if one.mass.shape[1] == 2 else None for one, *_ in launches]
    assert heads == {0: [None], 2 * 3: [1, 1]}.get(scratch, [2])
    # Weights of 0 hide whether queries before the last ones are read.
    assert [its.tolist() for *_, its in launches] == ([[1], [2]] if scratch == 2 * 3 else [[1, 2]])
    ops.mass(call, MassTarget(each, weights, per_token, last))
    ops.mass(call, MassTarget(all_of_it, weights, per_token))
    assert each.any()
    torch.testing.assert_close(each, all_of_it, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one - 1, each.sum(1, keepdim=True), rtol=1e-5, atol=1e-5)


def test_a_graph_that_has_no_room_for_one_request_is_refused():
    """Memory that is allocated during a capture belongs to its graph. A plan on it would serve other steps too."""
    ops = TritonOps()
    ops.scratch.nbytes, ops.scratch.capturing = 4 * 2, True
    with pytest.raises(RuntimeError, match="a CUDA graph of 4 requests got 2 numbers of scratch memory; expected room"):
        ops.decoding._plan(
            lambda rows, take: take(3 * rows, dtype=torch.float32, device="cpu"), torch.device("cpu"), 4, "key"
        )
    assert not ops.decoding._plans


def test_split_heads_of_fp8_write_outputs_in_the_model_s_dtype(monkeypatch):
    """Stock kernels get the quantised query, ours what it stands for."""
    seen, layer = [], fp8_layer()

    class Impl:
        kv_evict_place = 0

        def do_kv_cache_update(self, *args):
            pass

        def forward(self, layer, query, key, value, kv_cache, metadata, output):
            seen.append(query.dtype)
            output.copy_(query.float() / 3)  # nothing that fp8 holds

    holder = SimpleNamespace(kv_cache=torch.zeros(1, 1, 16, 32))
    heads = [slice(i, i + 1) for i in range(2)]
    parts = [split.LayerPart(name, its, its, slice(0, 1), Impl(), holder, 1) for name, its in zip("ab", heads)]
    context = SimpleNamespace(
        attn_metadata=dict.fromkeys("ab", SimpleNamespace(slot_mapping=None, kv_evict_step_work=object()))
    )
    monkeypatch.setattr(split, "get_forward_context", lambda: context)
    monkeypatch.setattr(split, "do_together", lambda shares: seen.append(shares[0].call.query.dtype))
    query = torch.randn(3, 2, 16).to(torch.float8_e4m3fn)
    output = torch.zeros(3, 2, 16)
    split.split_impl(Impl, parts, TritonOps(), set())().forward(layer, query, query, query, None, context, output)
    assert seen == [torch.float32, query.dtype, query.dtype] and torch.equal(output, query.float() / 3)


def test_split_heads_put_zeros_out_where_no_request_is_served():
    """While vLLM profiles, as in stock backends, outputs are memory that no kernel has written."""
    output = torch.full((3, 2, 16), torch.nan)
    impl = split.split_impl(object, [], TritonOps(), set())()
    assert impl.forward(None, output, output, output, None, None, output) is output and not output.any()


def test_own_work_is_done_with_queries_in_the_model_s_dtype():
    seen, layer = [], fp8_layer()

    class Impl:
        kv_evict_place = 0

        def forward(self, layer, query, *args):
            seen.append(query)

    def do(call):
        seen.append(call.query)

    metadata = SimpleNamespace(**{STEP_WORK: SimpleNamespace(is_all=False, measures=False, precedes=False, do=do)})
    query = torch.randn(3, 2, 16).to(torch.float8_e4m3fn)
    working_impl(Impl, TritonOps(), set())().forward(layer, query, None, None, None, metadata, None)
    stock, own = seen
    assert stock is query and torch.equal(own, query.float() * 0.5)


@pytest.mark.parametrize(("target", "ordered"), [([9, 4], True), ([4, 9], True), ([2, 4], False)])
def test_tokens_move_within_a_layer_s_heads(target, ordered):
    """Of two layers in pages of one tensor, which others have a part in; in whatever order blocks are used again."""
    from vllm_evict.triton_kernels.compact import compact_reference

    source = torch.tensor([4, 7, 2], dtype=torch.int32)
    target = torch.tensor(target, dtype=torch.int32)
    assert is_ordered(source, target) == ordered
    random = torch.Generator().manual_seed(0)
    pages = torch.randn(10, 5, BLOCK, 2 * 256, generator=random)  # 16 tokens are moved at once
    keep = torch.rand(2, 2, 3 * BLOCK, generator=random).argsort(2)[..., : 2 * BLOCK].sort(2).values.int()
    expected, ops = pages.clone(), TritonOps()
    compact_reference([expected[:, :2], expected[:, 2:4]], source, keep, target)
    layer = SimpleNamespace(impl=SimpleNamespace(head_size=256))
    ops.compact(layer, [pages[:, :2], pages[:, 2:4]], source, keep, target)
    assert torch.equal(pages, expected)
    keys, values = ops.read(layer, expected[:, 2:4], target.long())
    ops.write(layer, pages[:, :2], target.long(), keys.double(), values)
    expected[target.long(), :2] = torch.cat((keys, values), 3)
    assert torch.equal(pages, expected)


def test_flash_attention_is_heard_only_where_its_lse_is_wanted(monkeypatch):
    """And where there is none, or of another shape, the pass of our own gives it."""
    from vllm_evict.triton_kernels.query_lse import query_lse_reference

    random = torch.Generator().manual_seed(0)
    query, cache = torch.randn(5, 4, 32, generator=random), torch.randn(3, 2, BLOCK, 64, generator=random)
    keys, table = cache[..., :32], torch.tensor([[2, 1]], dtype=torch.int32)
    rows = table, torch.tensor([0, 5], dtype=torch.int32), torch.tensor([30], dtype=torch.int32)
    expected, asked, given = torch.empty(5, 4), [], torch.randn(4, 5, generator=random)
    attention = PagedAttention(query, keys, *rows, 0.2)
    query_lse_reference(attention, expected)

    def kernel(return_softmax_lse=False):
        asked.append(return_softmax_lse)
        return ("output", given) if return_softmax_lse else "output"

    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", kernel, raising=False)
    monkeypatch.setattr(flash_attn, MARK, (), raising=False)  # another test may have put the seam in
    ops = FlashOps()
    ops.capture_lse = partial(capture_lse, "FLASH_ATTN")
    for heard in (given, torch.randn(5, 4, generator=random)):
        given = heard
        with ops.attending():
            assert flash_attn.flash_attn_varlen_func() == "output"
        assert flash_attn.flash_attn_varlen_func() == "output"
        lse = ops._lse_of(attention, 5)
        torch.testing.assert_close(lse, given.T if len(given) == 4 else expected)
        torch.testing.assert_close(ops._lse_of(attention, 5), expected)
    assert asked == [True, False] * 2
    for calls in (0, 2):  # as where vLLM attends to a prefix that all requests share by a call of its own
        given = torch.zeros(4, 5)
        with ops.attending():
            for _ in range(calls):
                flash_attn.flash_attn_varlen_func()
        torch.testing.assert_close(ops._lse_of(attention, 5), expected)
    ops._lse, sinks = torch.zeros(4, 5), torch.tensor([-1.0, 0, 3, 5])
    lse = ops._lse_of(replace(attention, sinks=sinks), 5)
    torch.testing.assert_close(lse, torch.logaddexp(expected, sinks))
    assert ops._lse is None, "whether FlashAttention's has sinks in it is not known"


class LatentBatch:
    """Latents as vLLM hands them over, in pages whose unused slots and blocks are NaN, and absorbed queries.

    `stored` is what the kernels of a device get, `pages` what it stands for.
    """

    def __init__(self, query_lens, seq_lens, heads, dims, block_size=BLOCK, fp8=False):
        random, blocks = torch.Generator().manual_seed(0), [-(-length // block_size) for length in seq_lens]
        self.table = torch.zeros(len(seq_lens) + 1, max(blocks) + 2, dtype=torch.int32)  # a row of padding
        pages, free = torch.full((sum(blocks) + 3, block_size, dims), torch.nan), 1
        for row, count, length in zip(self.table, blocks, seq_lens):
            row[:count] = torch.arange(free, free + count).flip(0)
            free += count
            slots = torch.randn(count * block_size, dims, generator=random)
            slots[length:] = torch.nan
            pages[row[:count].long()] = slots.unflatten(0, (count, block_size))
        self.layer = SimpleNamespace(impl=SimpleNamespace(scale=dims**-0.5, head_size=dims), kv_lora_rank=dims - 16)
        self.layer._k_scale_float, self.layer._v_scale_float = (0.5 if fp8 else 1.0), 1.0
        self.stored = pages.to(torch.float8_e4m3fn).view(torch.uint8) if fp8 else pages
        self.pages = self.stored.view(torch.float8_e4m3fn).float() * 0.5 if fp8 else pages
        tokens = sum(query_lens)
        self.query = torch.randn(tokens + 3, heads, dims, generator=random)  # rows of padding
        starts = torch.tensor([0, *query_lens, 0], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.metadata = SimpleNamespace(
            block_table=self.table, query_start_loc=starts, seq_lens=torch.tensor([*seq_lens, 0], dtype=torch.int32),
            num_actual_tokens=tokens, max_query_len=max(query_lens), max_seq_len=max(seq_lens),
        )  # fmt: skip
        self.weights = (torch.rand(tokens, generator=random) * (torch.rand(tokens, generator=random) < 0.7)).float()
        self.rows, self.width = len(seq_lens), max(blocks) + 1

    def mass(self, ops, cache, weights, last):
        out = torch.full((self.rows, 1, self.width), 0.25)
        ops.mass(LayerCall(ops, self.layer, 0, self.query, cache, self.metadata), MassTarget(out, weights, last=last))
        return out


MIXED, DECODES = ([3, 1, 0, 9], [21, 33, 5, 75]), ([1, 1, 1], [1, 20, 130])
LATENTS = {  # queries and lengths, heads, dims, tokens of a block, fp8
    "chunks beside decodes": (*MIXED, 20, 576),
    "small latents": (*MIXED, 4, 48),
    "decodes": (*DECODES, 40, 576, 64),
    "fp8": (*MIXED, 20, 272, BLOCK, True),
}


@pytest.mark.parametrize("what", LATENTS)
def test_mass_of_latents_is_that_of_the_cpu(what, monkeypatch):
    """Slices of heads are added up for as many requests at once as the scratch takes; keys are read in parts."""
    batch, cpu, last = LatentBatch(*LATENTS[what]), LatentOps(), None
    monkeypatch.setattr(decode_classes, "MIN_SPLIT_TOKENS", 32)
    if batch.metadata.max_query_len > 1:
        last = torch.tensor([3, 1, 1, 4], dtype=torch.int32)
        batch.weights[3 + 1 : -4] = 0
    ways = (0, None, None), (2 * batch.width, batch.weights, last), (1 << 20, batch.weights, None)
    for scratch, *measured in ways:
        ops = DeviceLatentOps()
        ops.scratch.nbytes = 4 * scratch
        got, want = batch.mass(ops, batch.stored, *measured), batch.mass(cpu, batch.pages, *measured)
        assert (want != 0.25).any()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    rows, starts = torch.tensor([0, len(batch.table) - 2]), batch.metadata.query_start_loc
    looked_at = Queries(starts[rows + 1].long() - 1, rows, batch.metadata.seq_lens[rows])
    each = [
        its.mass_of(LayerCall(its, batch.layer, 0, batch.query, cache, batch.metadata), looked_at, batch.width)
        for its, cache in ((ops, batch.stored), (cpu, batch.pages))
    ]
    torch.testing.assert_close(*each, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(each[0].sum((1, 2)), torch.ones(2))


@pytest.mark.parametrize(("heads", "slices"), [(128, 8), (16, 1), (20, 2), (17, 17), (1, 1)])
def test_slices_of_heads_are_equal(heads, slices):
    ops = DeviceLatentOps()
    assert slices_of(heads, ops.heads_at_once) == slices
    assert ops.scratch.size_for(3, 0, heads, 64, 100, False) == 0 and ops.scratch.nbytes == 4 * 3 * 100 * slices
    ops.scratch.size_for(0, 0, heads, 64, 100, False)
    assert ops.scratch.nbytes == 0


def test_latents_in_another_dtype_or_packed_are_not_read():
    layer = SimpleNamespace(kv_cache_dtype="auto", dtype=torch.bfloat16)
    readable = {"auto": True, "bfloat16": True, "fp8": True, "float16": False, "fp8_ds_mla": False}
    for layer.kv_cache_dtype, expected in readable.items():
        assert (DeviceLatentOps().fit(layer).unreadable is None) == expected
