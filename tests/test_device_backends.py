"""Eviction behind vLLM's attention backends for a device, without one: they take the CPU backend's place.

Kernels of the plugin, and vLLM's Triton kernels, run under Triton's interpreter; FlashAttention's compiled functions have
stand-ins (flash.py). The Triton backend runs on Model Runner V2 and, with VLLM_EVICT_TEST_RUNNER=v1-triton, on V1;
FlashAttention on both as they are. The interpreter takes a third of a second for a step of a few requests, so sequences
are short and blocks small.
"""

import json
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from engine import V2, logprobs_of, random_prompt
from flash import FlashAttention, reshape_and_cache_flash
from oracle.heads import replay_heads
from oracle.model import DenseLlama
from oracle.replay import Config
from oracle.tiny import make_tiny_llama
from oracle.tokens import replay_tokens
from parity import TOKEN_TIE, assert_like_oracle, assert_tokens_like_oracle
from vllm import envs
from vllm.config import CUDAGraphMode, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models import llama
from vllm.triton_utils import HAS_TRITON
from vllm.v1.attention import selector
from vllm.v1.attention.backends import flash_attn, registry

from vllm_evict.compute import sums, tokens, views
from vllm_evict.compute.attention import device
from vllm_evict.compute.attention.flash import FlashOps
from vllm_evict.compute.attention.triton import TritonOps
from vllm_evict.compute.kernels.compact import is_ordered
from vllm_evict.compute.kernels.paged import PagedAttention
from vllm_evict.compute.kernels.queries import Queries
from vllm_evict.compute.work import HeadSlice
from vllm_evict.integration import refusals, split
from vllm_evict.integration.backend import STEP_WORK, working_impl
from vllm_evict.integration.flash import capture_lse
from vllm_evict.triton_kernels import mass_from_lse

# numpy's, where a masked row divides 0 by 0.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
BLOCK = 16
BASE = {"budget": 64, "buffer": 0, "sink": 16, "recent": 16}
POLICIES = {
    "sink-window": {"name": "sink-window", **BASE},
    "h2o": {"name": "h2o", **BASE},
    "scissorhands": {"name": "scissorhands", **BASE, "window": 6},
    "keydiff": {"name": "keydiff", **BASE},
}


#: Versions of FlashAttention.
FLASH = {"fa2": 2, "fa3": 3, "fa4": 4}


def on(backend, *values):
    """Parameters of a test that runs on a backend, where that is to run."""
    wanted = HAS_TRITON if backend == "triton" else V2 or not HAS_TRITON
    skipped = pytest.mark.skipif(not wanted, reason=f"{backend} does not run with this VLLM_EVICT_TEST_RUNNER")
    return pytest.param(backend, *values, marks=skipped, id="-".join([backend, *map(str, values)]))


def before_graphs_are_settled(init):
    """V2 makes builders while full CUDA graphs may still come, so that schedules go to memory of the builder's own."""

    def made(self, *args):
        with patch.object(CUDAGraphMode, "has_full_cudagraphs", return_value=True):
            init(self, *args)
        assert self.use_full_cuda_graph

    return made


@pytest.fixture
def backend(request, monkeypatch):
    """A backend where the CPU platform asks for its own, and the kernels that make views and fold sums on a device.

    FlashAttention has the version that the parameter says, and its stand-in is the fixture's value.
    """
    from vllm_evict.triton_kernels.fold import fold
    from vllm_evict.triton_kernels.put import put
    from vllm_evict.triton_kernels.resident_view import resident_view
    from vllm_evict.triton_kernels.take import take

    flash = None
    if request.param == "triton":
        from vllm.v1.attention.backends import triton_attn

        name = f"{triton_attn.__name__}.TritonAttentionBackend"
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        # Its kernel with split keys would launch sixteen programs in the place of one.
        monkeypatch.setattr(triton_attn, "MIN_LAUNCH_GRID_SIZE_2D", 0)
    else:
        flash = FlashAttention(FLASH[request.param])
        flash.install(monkeypatch)
        name = f"{flash_attn.__name__}.FlashAttentionBackend"
        if flash.version == 2:
            monkeypatch.setattr(envs, "VLLM_KV_CACHE_LAYOUT", "HND", raising=False)
        if V2:
            builder = flash_attn.FlashAttentionMetadataBuilder
            monkeypatch.setattr(builder, "__init__", before_graphs_are_settled(builder.__init__))
    monkeypatch.setattr(views, "resident_view", resident_view)
    monkeypatch.setattr(sums, "fold", fold)
    monkeypatch.setattr(sums, "take", take)
    monkeypatch.setattr(device, "take", take)
    monkeypatch.setattr(tokens, "put", put)
    monkeypatch.setitem(registry._ATTN_OVERRIDES, registry.AttentionBackendEnum.CPU_ATTN, name)
    selector._cached_get_attn_backend.cache_clear()
    yield flash
    selector._cached_get_attn_backend.cache_clear()


@pytest.fixture
def view_launches(monkeypatch):
    """Grids of the kernel that makes views, in order."""
    from vllm_evict.triton_kernels import resident_view

    grids, kernel = [], resident_view._resident_view

    class Counted:
        def __getitem__(self, grid):
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(resident_view, "_resident_view", Counted())
    return grids


def steps_with_views(trace, decodes=False):
    """Steps of a request in which it lacked something in any KV group; all that were decodes too, if those have some."""
    holes = [any(evicted) for evicted in zip(*(group.evicted for group in trace.groups))]
    return sum(any(holes[:step]) or (decodes and count == 1) for step, count in enumerate(trace.steps))


@pytest.fixture
def server(engine, backend):
    def make(policy=None, **kwargs):
        options = dict(block_size=BLOCK, blocks=48, max_model_len=256, max_num_batched_tokens=64)
        return engine(policy, **{**options, **kwargs})

    return make


@pytest.fixture(scope="module")
def dense(tiny):
    return DenseLlama(tiny)


@pytest.mark.both_runners("triton")
@pytest.mark.parametrize("backend", [on("triton"), on("fa3"), on("fa2")], indirect=True)
def test_full_is_stock(server):
    """To the byte; so is a budget that covers the sequence, whose blocks are measured."""
    prompts = [random_prompt(70), random_prompt(20, 1)]
    stock, *others = (
        server(policy).generate(prompts, max_tokens=6, logprobs=0)
        for policy in (None, {"name": "full"}, {"name": "h2o", **BASE, "budget": 96})
    )
    for outputs in others:
        for one, other in zip(outputs, stock, strict=True):
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
            assert logprobs_of(one).tolist() == logprobs_of(other).tolist()


#: Backends and policies.
MATCHED = [on("triton", name) for name in POLICIES]
MATCHED += [on("fa3", "h2o"), on("fa2", "keydiff"), on("fa4", "sink-window")]


@pytest.mark.both_runners("triton-h2o", "fa3-h2o")
@pytest.mark.parametrize("backend, name", MATCHED, indirect=["backend"])
def test_evictions_and_logprobs_match_the_dense_oracle(server, backend, name, tmp_path, monkeypatch):
    """One prompt longer than the budget and a chunk, one that outgrows its budget while it decodes."""
    from vllm_evict.triton_kernels import query_lse

    if backend is not None:
        monkeypatch.setattr(query_lse, "query_lse", lambda *_, **__: pytest.fail("FlashAttention has its LSE"))
    # FlashAttention takes half precision only, its stand-in any. The interpreter can't multiply bfloat16.
    half = backend is not None and not V2
    model = make_tiny_llama(tmp_path / "model", dtype="float16" if half else "float32")
    subject = server(POLICIES[name], model=model, dtype="float16" if half else "float32")
    tolerances = {"atol": 2e-2, "tie": 1e-2} if half else {}
    lengths = [(100, 17), (61, 14)]
    requests = [(random_prompt(length), {"max_tokens": tokens, "logprobs": 0}) for length, tokens in lengths]
    outputs, traces = subject.traced(requests)
    dense = DenseLlama(model)
    for (prompt, _), output, trace in zip(requests, outputs, traces):
        policy = POLICIES[name]
        evicted = assert_like_oracle(dense, prompt, output, trace, policy, block_size=BLOCK, **tolerances)
        assert evicted > 0, "the policy never acted"
    assert subject.runtime.decodes
    if backend is not None:
        layout = subject.core.vllm_config.cache_config.kv_cache_layout
        assert layout == ("LBHNC" if backend.version == 2 else "LBNHC"), "heads or tokens first"
        # Every call of FlashAttention 3's kernel, and no other step, has a schedule.
        calls = backend.attended if backend.version == 3 else 0
        assert backend.attended and backend.scheduled == calls == 2 * backend.schedules
        assert (backend.asked > 0) == (name == "h2o"), "the LSE is asked for where mass is taken"
    subject.assert_nothing_left()


@pytest.mark.parametrize("backend", [on("triton"), on("fa3")], indirect=True)
def test_a_request_outgrows_its_context(server, dense):
    """Its kept keys are turned where the device keeps them."""
    policy = {**POLICIES["h2o"], "context": 128}
    subject, prompt = server(policy, max_num_batched_tokens=32), random_prompt(130)
    (output,), (trace,) = subject.traced([(prompt, {"max_tokens": 20, "logprobs": 0})])
    assert subject.metrics()["moves", "h2o"] >= 2
    assert assert_like_oracle(dense, prompt, output, trace, policy, block_size=BLOCK, chunk=32) > 3
    subject.assert_nothing_left()


@pytest.mark.parametrize(
    "backend, by_token",
    [on("triton", False), on("fa3", False), on("triton", True)],
    indirect=["backend"],
)
def test_split_heads_match_per_head_masks(server, dense, tmp_path, monkeypatch, view_launches, by_token):
    """Retrieval heads under h2o, by block or by token and merged, streaming heads with a window: each class has its own
    pages and block table; both are decoded by one call, and have their views from one launch."""
    from vllm_evict.triton_kernels import decode_classes

    calls, together = [], decode_classes.decode_classes
    monkeypatch.setattr(
        decode_classes, "decode_classes", lambda *args, **options: calls.append(args) or together(*args, **options)
    )
    _, trace = check_split_heads(server, dense, tmp_path, by_token)
    decodes = sum(count == 1 for count in trace.steps)
    assert len(calls) == 2 * decodes, "layers of two classes are decoded in one call, from the first hole on"
    assert view_launches == [(1, 2)] * steps_with_views(trace) and len(view_launches) >= decodes


def check_split_heads(server, dense, tmp_path, by_token=False, **engine):
    """One request, alone, against the dense oracle with masks for each head. Returns the engine and its trace."""
    pattern = np.array([[1, 0], [0, 1]])
    sink, recent = 16, 32
    np.savetxt(tmp_path / "heads.tsv", pattern.astype(float), delimiter="\t")
    (tmp_path / "config.json").write_text(json.dumps({"sink_size": sink, "recent_size": recent}))
    h2o = {"name": "h2o", **BASE, **({"granularity": "token", "merge": "d2o"} if by_token else {})}
    subject = server({"name": "duo", "gates": str(tmp_path / "heads.tsv"), "retrieval": h2o}, **engine)
    prompt, count = (distinct_prompt(90), 10) if by_token else (random_prompt(90), 20)
    (output,), (trace,) = subject.traced([(prompt, {"max_tokens": count, "logprobs": 0})])
    retrieval = Config("h2o", BLOCK, **BASE)
    streaming = Config("sink-window", BLOCK, budget=sink + recent + BLOCK, sink=sink, recent=recent)
    groups = [(retrieval, pattern.astype(bool)), (streaming, ~pattern.astype(bool))]
    tokens = [*prompt, *output.outputs[0].token_ids]
    if by_token:
        requests = replay_tokens(dense, tokens, trace.steps, groups, trace.start, merge=h2o)
        assert requests[0].closest > TOKEN_TIE and len(requests[0].kept) > 1
        replays = [request.replay for request in requests]
    else:
        replays = replay_heads(dense, tokens, trace.steps, groups, trace.start)
    for got, want in zip(trace.groups, replays, strict=True):
        assert got.evicted[:-1] == want.evicted[: len(trace.steps) - 1]
        assert sum(map(len, got.evicted)) > 0
    logprobs = torch.log_softmax(replays[0].logits.double(), -1)
    want = [logprobs[len(prompt) - 1 + i, token].item() for i, token in enumerate(output.outputs[0].token_ids)]
    np.testing.assert_allclose(logprobs_of(output), want, atol=2e-3)
    subject.assert_nothing_left()
    return subject, trace


@pytest.mark.parametrize("backend", [on("triton")], indirect=True)
def test_each_head_keeps_its_own_tokens(server, dense):
    """One request by heavy hitters and one by keys, in one batch."""
    policies = {name: {"name": name, **BASE, "granularity": "token"} for name in ("h2o", "keydiff")}
    subject = server({**policies["h2o"], "allow": ["keydiff"]})
    lengths = {"h2o": (100, 14), "keydiff": (94, 5)}
    requests = [
        (distinct_prompt(length), {"max_tokens": tokens, "logprobs": 0, "extra_args": {"kv_policy": name}})
        for name, (length, tokens) in lengths.items()
    ]
    outputs, traces = subject.traced(requests)
    for name, (prompt, _), output, trace in zip(lengths, requests, outputs, traces):
        (request,) = assert_tokens_like_oracle(dense, prompt, output, trace, policies[name], block_size=BLOCK)
        assert len(request.kept) > 1, "too few decisions"
        assert len({tuple(kept) for kept in request.kept[-1].values()}) > 1, "heads were to keep their own tokens"
    subject.assert_nothing_left()


@pytest.mark.parametrize("backend", [on("fa2")], indirect=True)
def test_layers_with_other_numbers_of_query_heads_look_through_the_view_too(server, monkeypatch):
    """They have builders of their own, and V1 would put its own block table into what the first of them has built."""
    init = llama.LlamaAttention.__init__

    def wider(self, *args, num_heads, prefix, **kwargs):
        init(self, *args, num_heads=num_heads * (2 if ".layers.1." in prefix else 1), prefix=prefix, **kwargs)

    monkeypatch.setattr(llama.LlamaAttention, "__init__", wider)
    subject = server(POLICIES["sink-window"], load_format="dummy")
    assert len(subject.worker.model_runner.attn_groups[0]) == 2
    # Three chunks: the last is attended to by FlashAttention, over holes.
    (output,) = subject.generate([random_prompt(150)], max_tokens=4)
    assert output.kv_usage.evicted_blocks > 0


@pytest.mark.parametrize("backend, name", [on("triton", "h2o"), on("triton", "keydiff")], indirect=["backend"])
def test_fp8_caches_match_the_dense_oracle(server, tiny, monkeypatch, name):
    from vllm.v1.attention.backends import triton_attn

    # The interpreter would round some of them wrongly.
    monkeypatch.setattr(triton_attn, "triton_reshape_and_cache_flash", reshape_and_cache_flash)
    check_fp8_caches(server, tiny, monkeypatch, name, {"k": 0.3, "v": 0.6})


def check_fp8_caches(server, tiny, monkeypatch, name, scales):
    """Of scales that are not 1, on a platform that is taken for one that reads fp8; freed blocks are full of NaN."""
    monkeypatch.setenv("VLLM_EVICT_POISON", "1")
    monkeypatch.setitem(refusals.SCORED_DTYPES, "cpu", refusals.SCORED_DTYPES["cuda"])
    subject = server(POLICIES[name], kv_cache_dtype="fp8", enable_prefix_caching=False)
    for layer in get_layers_from_vllm_config(subject.core.vllm_config, Attention).values():
        assert layer.kv_cache.dtype == torch.uint8 and (layer.query_quant is not None) == ("q" in scales)
        for each, scale in scales.items():
            getattr(layer, f"_{each}_scale").fill_(scale)
            setattr(layer, f"_{each}_scale_float", scale)
    prompt = random_prompt(100)
    (output,), (trace,) = subject.traced([(prompt, {"max_tokens": 12, "logprobs": 0})])
    dense = DenseLlama(tiny, fp8_scales=list(scales.values()))
    assert assert_like_oracle(dense, prompt, output, trace, POLICIES[name], block_size=BLOCK) > 0
    assert subject.runtime.decodes and any(
        cache.view(torch.float8_e4m3fn).isnan().any() for cache in subject.worker.model_runner.kv_caches
    )
    subject.assert_nothing_left()


def fp8_layer():
    scales = {"_q_scale_float": 0.5, "_k_scale_float": 0.3, "_v_scale_float": 1.7}
    return SimpleNamespace(dtype=torch.float32, impl=SimpleNamespace(scale=0.2), **scales)


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
    query = ops.dequantised(layer, quantised)
    assert query.dtype == torch.float32 and torch.equal(query, quantised.float() * 0.5)
    assert ops.dequantised(layer, query) is query
    table, starts = torch.tensor([[3, 1, 6], [0, 5, 2]], dtype=torch.int32), torch.tensor([0, 1, 4], dtype=torch.int32)
    lens, rows = torch.tensor([37, 20], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    metadata = SimpleNamespace(
        block_table=table, query_start_loc=starts, seq_lens=lens, num_actual_tokens=4, max_query_len=3, max_seq_len=37
    )
    queries = Queries(torch.tensor([0, 2]), torch.tensor([0, 1]), torch.tensor([37, 19], dtype=torch.int32))
    results = []
    for its, caches in ((layer, pages), (plain, real)):
        mass, decoded, output = (torch.zeros(2, 2, 3 * BLOCK), torch.zeros(2, 2, 3 * BLOCK), torch.zeros(4, 4, 32))
        ops.mass(its, query[:, 2:], caches[1], metadata, None, mass, per_token)
        ops.decode(its, query[:, 2:], caches[1], metadata, output, rows, lens, None, decoded, per_token)
        of_each = ops.mass_of(its, query[:, 2:], caches[1], metadata, queries, 3)
        work = SimpleNamespace(rows=rows, seq_lens=lens)
        shares = [HeadSlice(work, 0, q, cache, metadata) for q, cache in zip(query.split([2, 4], 1), caches)]
        together, outs = torch.zeros(4, 6, 32), [torch.zeros(2, 1, 3 * BLOCK), None]
        ops.decode_together(its, query, shares, together, None, outs, per_token)
        results.append((mass, decoded, output, of_each, together, outs[0]))
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
    monkeypatch.setattr(
        mass_from_lse, "mass_from_lse", lambda *args, **options: launches.append(args) or launch(*args, **options)
    )
    width = 3 * BLOCK if per_token else 3
    one, each, all_of_it = torch.ones(2, 1, width), torch.zeros(2, 2, width), torch.zeros(2, 2, width)
    ops.scratch_bytes = 4 * scratch * (BLOCK if per_token and scratch == 2 * 3 else 1)
    ops.mass(layer, query, pages, metadata, weights, one, per_token, last)
    heads = [len(one.mass) if one.mass.shape[1] == 2 else None for one, _ in launches]
    assert heads == {0: [None], 2 * 3: [1, 1]}.get(scratch, [2])
    ops.mass(layer, query, pages, metadata, weights, each, per_token, last)
    ops.mass(layer, query, pages, metadata, weights, all_of_it, per_token)
    assert each.any()
    torch.testing.assert_close(each, all_of_it, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one - 1, each.sum(1, keepdim=True), rtol=1e-5, atol=1e-5)


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
    parts = [split.Part(name, its, its, slice(0, 1), Impl(), holder, 1) for name, its in zip("ab", heads)]
    context = SimpleNamespace(attn_metadata=dict.fromkeys("ab", SimpleNamespace(slot_mapping=None)))
    monkeypatch.setattr(split, "get_forward_context", lambda: context)
    monkeypatch.setattr(split, "do_together", lambda ops, layer, query, shares, output: seen.append(query.dtype))
    query = torch.randn(3, 2, 16).to(torch.float8_e4m3fn)
    output = torch.zeros(3, 2, 16)
    split.split_impl(Impl, parts, TritonOps())().forward(layer, query, query, query, None, context, output)
    assert seen == [torch.float32, query.dtype, query.dtype] and torch.equal(output, query.float() / 3)


def test_split_heads_put_zeros_out_where_nobody_is_served():
    """As stock backends do while vLLM profiles: outputs are memory that nobody has written."""
    output = torch.full((3, 2, 16), torch.nan)
    impl = split.split_impl(object, [], TritonOps())()
    assert impl.forward(None, output, output, output, None, None, output) is output and not output.any()


def test_own_work_is_done_with_queries_in_the_model_s_dtype():
    seen, layer = [], fp8_layer()

    class Impl:
        kv_evict_place = 0

        def forward(self, layer, query, *args):
            seen.append(query)

    def do(ops, layer, place, query, *args):
        seen.append(query)

    metadata = SimpleNamespace(**{STEP_WORK: SimpleNamespace(is_all=False, measures=False, do=do)})
    query = torch.randn(3, 2, 16).to(torch.float8_e4m3fn)
    working_impl(Impl, TritonOps())().forward(layer, query, None, None, None, metadata, None)
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
    ops.compact(None, [pages[:, :2], pages[:, 2:4]], source, keep, target)
    assert torch.equal(pages, expected)
    keys, values = ops.read(None, expected[:, 2:4], target.long())
    ops.write(None, pages[:, :2], target.long(), keys.double(), values)
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
    ops = FlashOps()
    ops.capture_lse = capture_lse
    for heard in (given, torch.randn(5, 4, generator=random)):
        given = heard
        with ops.attending():
            assert flash_attn.flash_attn_varlen_func() == "output"
        assert flash_attn.flash_attn_varlen_func() == "output"
        lse = ops.lse_of(attention, 5)
        torch.testing.assert_close(lse, given.T if len(given) == 4 else expected)
        torch.testing.assert_close(ops.lse_of(attention, 5), expected)
    assert asked == [True, False] * 2
    ops._lse, sinks = torch.zeros(4, 5), torch.tensor([-1.0, 0, 3, 5])
    lse = ops.lse_of(replace(attention, sinks=sinks), 5)
    torch.testing.assert_close(lse, torch.logaddexp(expected, sinks))
    assert ops._lse is None, "whether FlashAttention's has sinks in it is not known"


def distinct_prompt(length, seed=0):
    """No token twice."""
    return np.random.default_rng(seed).permutation(256)[:length].tolist()
