"""Eviction behind vLLM's Triton attention backend, without a GPU: it takes the CPU backend's place, under the interpreter.

On Model Runner V2 and, with VLLM_EVICT_TEST_RUNNER=v1-triton, on V1. The interpreter takes a third of a second for a
step of a few requests, so sequences are short and blocks small.
"""

import json

import numpy as np
import pytest
import torch
from engine import V2, logprobs_of, random_prompt
from oracle.heads import replay_heads
from oracle.model import DenseLlama
from oracle.replay import Config
from oracle.tokens import replay_tokens
from parity import TOKEN_TIE, assert_like_oracle, assert_tokens_like_oracle
from vllm.triton_utils import HAS_TRITON
from vllm.v1.attention import selector
from vllm.v1.attention.backends import registry

from vllm_evict.attention.compact import is_ordered
from vllm_evict.attention.triton import TritonPasses
from vllm_evict.worker import runtime

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="vLLM's Triton kernels run with VLLM_EVICT_TEST_RUNNER=v2 or v1-triton"),
    # numpy's, where a masked row divides 0 by 0.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
BLOCK = 16
BASE = {"budget": 64, "buffer": 0, "sink": 16, "recent": 16}
POLICIES = {
    "sink-window": {"name": "sink-window", **BASE},
    "h2o": {"name": "h2o", **BASE},
    "scissorhands": {"name": "scissorhands", **BASE, "window": 6},
    "keydiff": {"name": "keydiff", **BASE},
}


@pytest.fixture(autouse=True)
def triton_backend(monkeypatch):
    """vLLM's Triton backend where the CPU platform asks for its own, and the kernel that makes views on a device."""
    from vllm.v1.attention.backends import triton_attn

    from vllm_evict.triton_kernels.resident_view import resident_view

    monkeypatch.setattr(runtime, "resident_view", resident_view)
    name = f"{triton_attn.__name__}.TritonAttentionBackend"
    monkeypatch.setitem(registry._ATTN_OVERRIDES, registry.AttentionBackendEnum.CPU_ATTN, name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    # Its kernel with split keys would launch sixteen programs in the place of one.
    monkeypatch.setattr(triton_attn, "MIN_LAUNCH_GRID_SIZE_2D", 0)
    selector._cached_get_attn_backend.cache_clear()
    yield
    selector._cached_get_attn_backend.cache_clear()


@pytest.fixture
def server(engine):
    def make(policy=None, **kwargs):
        options = dict(block_size=BLOCK, blocks=48, max_model_len=256, max_num_batched_tokens=64)
        return engine(policy, **{**options, **kwargs})

    return make


@pytest.fixture(scope="module")
def dense(tiny):
    return DenseLlama(tiny)


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


@pytest.mark.parametrize("name", POLICIES if V2 else ["h2o"])
def test_evictions_and_logprobs_match_the_dense_oracle(server, dense, name):
    """One prompt longer than the budget and a chunk, one that outgrows its budget while it decodes."""
    subject = server(POLICIES[name])
    lengths = [(100, 17), (61, 14)]
    requests = [(random_prompt(length), {"max_tokens": tokens, "logprobs": 0}) for length, tokens in lengths]
    outputs, traces = subject.traced(requests)
    for (prompt, _), output, trace in zip(requests, outputs, traces):
        evicted = assert_like_oracle(dense, prompt, output, trace, POLICIES[name], block_size=BLOCK)
        assert evicted > 0, "the policy never acted"
    assert subject.runtime.decodes
    subject.assert_nothing_left()


@pytest.mark.parametrize("by_token", [False, True] if V2 else [False])
def test_split_heads_match_per_head_masks(server, dense, tmp_path, monkeypatch, by_token):
    """Retrieval heads under h2o, by block or by token and merged, streaming heads with a window: each class has its own
    pages and block table; both are decoded by one call."""
    from vllm_evict.triton_kernels import decode_classes

    calls, together = [], decode_classes.decode_classes
    monkeypatch.setattr(
        decode_classes, "decode_classes", lambda *args, **options: calls.append(args) or together(*args, **options)
    )
    pattern = np.array([[1, 0], [0, 1]])
    sink, recent = 16, 32
    np.savetxt(tmp_path / "heads.tsv", pattern.astype(float), delimiter="\t")
    (tmp_path / "config.json").write_text(json.dumps({"sink_size": sink, "recent_size": recent}))
    h2o = {"name": "h2o", **BASE, **({"granularity": "token", "merge": "d2o"} if by_token else {})}
    subject = server({"name": "duo", "heads": str(tmp_path / "heads.tsv"), "retrieval": h2o})
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
    decodes = sum(count == 1 for count in trace.steps)
    assert len(calls) == 2 * decodes, "layers of two classes are decoded in one call, from the first hole on"
    subject.assert_nothing_left()


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
    expected, passes = pages.clone(), TritonPasses()
    compact_reference([expected[:, :2], expected[:, 2:4]], source, keep, target)
    passes.compact(None, [pages[:, :2], pages[:, 2:4]], source, keep, target)
    assert torch.equal(pages, expected)
    keys, values = passes.read(None, expected[:, 2:4], target.long())
    passes.write(None, pages[:, :2], target.long(), keys.double(), values)
    expected[target.long(), :2] = torch.cat((keys, values), 3)
    assert torch.equal(pages, expected)


def distinct_prompt(length, seed=0):
    """No token twice."""
    return np.random.default_rng(seed).permutation(256)[:length].tolist()
