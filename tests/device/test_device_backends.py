"""Eviction behind vLLM's attention backends for a device, without one: they take the CPU backend's place.

Kernels of the plugin, and vLLM's Triton kernels, run under Triton's interpreter; FlashAttention's compiled functions have
stand-ins (flash.py). The Triton backend runs on Model Runner V2 and, with VLLM_EVICT_TEST_RUNNER=v1-triton, on V1;
FlashAttention on both as they are. The interpreter takes a third of a second for a step of a few requests, so sequences
are short and blocks small.
"""

import json
from unittest.mock import patch

import numpy as np
import pytest
import torch
from engine import V2, assert_like_stock, logprobs_of, random_prompt
from flash import FlashAttention, reshape_and_cache_flash
from interpreter import in_place_of, use_kernels
from linear import zero_blocks
from oracle.heads import replay_heads
from oracle.hybrids import DenseHybrid, make_tiny_hybrid
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
from vllm.v1.attention.backends import flash_attn
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_evict.integration.start.capabilities import server as facts

# numpy's, where a masked row divides 0 by 0.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.minutes,
    pytest.mark.on_triton,
]
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
    use_kernels(monkeypatch)
    with in_place_of("CPU_ATTN", name):
        yield flash


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


@pytest.mark.both_runners("triton")
@pytest.mark.parametrize("backend", [on("triton"), on("fa3"), on("fa2")], indirect=True)
def test_full_is_stock(server):
    check_full_is_stock(server)


def check_full_is_stock(server, **options):
    """To the byte; so is a budget that covers the sequence, whose blocks are measured."""
    prompts = [random_prompt(70), random_prompt(20, 1)]
    assert_like_stock(server, prompts, {"name": "h2o", **BASE, "budget": 96}, max_tokens=6, **options)


#: Backends and policies.
MATCHED = [on("triton", name) for name in POLICIES]
MATCHED += [on("fa3", "h2o"), on("fa2", "keydiff"), on("fa4", "sink-window")]


@pytest.mark.oracle("full attention")
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


@pytest.fixture(scope="module")
def hybrid_model(tmp_path_factory):
    return make_tiny_hybrid(tmp_path_factory.mktemp("hybrid"), "falcon_h1")


@pytest.fixture
def hybrid(hybrid_model, monkeypatch):
    """A model with states. Where blocks are split vLLM's CPU engine clears others than the new ones."""
    monkeypatch.setattr(CPUModelRunner, "_zero_block_ids", zero_blocks)
    return hybrid_model


def check_hybrid(server, hybrid, name):
    """Chunks of prompts and decodes in blocks of 48 tokens, which kernels read as three: against the dense oracle."""
    size = 48
    policy = {"name": name, "budget": 3 * size, "buffer": 0, "sink": size, "recent": size, "allow": []}
    options = dict(block_size=size, max_model_len=480, max_num_batched_tokens=96, enable_prefix_caching=False)
    subject = server(policy, model=hybrid, **options)
    (layer, *_) = subject.runtime.layers
    assert layer.kv_cache.shape[2] == 16 and subject.manager.block_size == size
    requests = [(random_prompt(n, n), {"max_tokens": tokens, "logprobs": 0}) for n, tokens in ((200, 20), (130, 60))]
    for prompt, output, trace in subject.answered(requests):
        assert assert_like_oracle(DenseHybrid(hybrid), prompt, output, trace, policy, block_size=size, chunk=96) > 0
    subject.assert_nothing_left()


@pytest.mark.oracle("hybrids")
@pytest.mark.since("0.32", "it splits the block tables of all layers")
@pytest.mark.parametrize("backend", [on("fa4")], indirect=True)
def test_flash_attention_reads_smaller_blocks_than_a_hybrid_evicts(server, hybrid, poisoned, monkeypatch):
    """With heads of 256 on Blackwell it takes blocks of 128 tokens alone, here of 16."""
    cls = flash_attn.FlashAttentionBackend
    monkeypatch.setattr(cls, "get_supported_kernel_block_sizes", staticmethod(lambda *_: [16]))
    check_hybrid(server, hybrid, "h2o")


@pytest.mark.oracle("full attention")
@pytest.mark.parametrize("backend", [on("triton"), on("fa3")], indirect=True)
def test_a_request_outgrows_its_context(server, dense):
    """Its kept keys are turned where the device keeps them."""
    policy = {**POLICIES["h2o"], "context": 128}
    subject, prompt = server(policy, max_num_batched_tokens=32), random_prompt(130)
    (output,), (trace,) = subject.traced([(prompt, {"max_tokens": 20, "logprobs": 0})])
    assert subject.metrics()["moves", "h2o"] >= 2
    assert assert_like_oracle(dense, prompt, output, trace, policy, block_size=BLOCK, chunk=32) > 3
    subject.assert_nothing_left()


@pytest.mark.oracle("full attention")
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


@pytest.mark.oracle("full attention")
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
    monkeypatch.setitem(facts.READ_DTYPES, "cpu", facts.READ_DTYPES["cuda"])
    subject = server(POLICIES[name], kv_cache_dtype="fp8", enable_prefix_caching=False)
    for layer in get_layers_from_vllm_config(subject.core.vllm_config, Attention).values():
        assert layer.kv_cache.dtype == torch.uint8 and (layer.query_quant is not None) == ("q" in scales)
        for each, scale in scales.items():
            getattr(layer, f"_{each}_scale").fill_(scale)
            setattr(layer, f"_{each}_scale_float", scale)
        if hasattr(layer.impl, "bmm1_scale"):  # kept from dummy steps at start, which had scales of 1
            layer.impl.bmm1_scale = layer.impl.bmm2_scale = None
    prompt = random_prompt(100)
    (output,), (trace,) = subject.traced([(prompt, {"max_tokens": 12, "logprobs": 0})])
    dense = DenseLlama(tiny, fp8_scales=list(scales.values()))
    assert assert_like_oracle(dense, prompt, output, trace, POLICIES[name], block_size=BLOCK) > 0
    assert subject.runtime.decodes and any(
        cache.view(torch.float8_e4m3fn).isnan().any() for cache in subject.worker.model_runner.kv_caches
    )
    subject.assert_nothing_left()


def distinct_prompt(length, seed=0):
    """No token twice."""
    return np.random.default_rng(seed).permutation(256)[:length].tolist()
