"""Eviction behind vLLM's FlashInfer backend, without a GPU: with stand-ins for the package (flash_infer.py).

On each kind of kernels that vLLM chooses by the device. Like test_device_backends.py, on both model runners.
"""

import pytest
import test_device_backends
import torch
from engine import V2, logprobs_of, random_prompt
from flash_infer import CAPABILITIES, FlashInfer
from flash_infer import backend as flashinfer
from oracle.model import DenseLlama
from parity import assert_like_oracle
from test_device_backends import BASE, BLOCK, POLICIES, on
from vllm import envs
from vllm.v1.attention import selector
from vllm.v1.attention.backends import registry

from vllm_evict.worker import sums, views

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
server, dense = test_device_backends.server, test_device_backends.dense


@pytest.fixture
def backend(request, monkeypatch):
    """vLLM's FlashInfer backend where the CPU platform asks for its own, on the kernels that the parameter says.

    They are "native", in either layout ("native-HND"), "xqa" or "trtllm".
    """
    from vllm_evict.triton_kernels.fold import fold
    from vllm_evict.triton_kernels.resident_view import resident_view

    kernels, _, layout = request.param.partition("-")
    package = FlashInfer(kernels)
    package.install(monkeypatch)
    if layout:
        monkeypatch.setattr(envs, "VLLM_KV_CACHE_LAYOUT", layout, raising=False)
    monkeypatch.setattr(views, "resident_view", resident_view)
    monkeypatch.setattr(sums, "fold", fold)
    name = f"{flashinfer.__name__}.FlashInferBackend"
    monkeypatch.setitem(registry._ATTN_OVERRIDES, registry.AttentionBackendEnum.CPU_ATTN, name)
    selector._cached_get_attn_backend.cache_clear()
    yield package
    selector._cached_get_attn_backend.cache_clear()


KERNELS = [on(name) for name in CAPABILITIES]


@pytest.mark.parametrize("backend", KERNELS, indirect=True)
def test_full_is_stock(server, backend):
    """To the byte; so is a budget that covers the sequence."""
    prompts = [random_prompt(70), random_prompt(20, 1)]
    stock, *others = (
        server(policy).generate(prompts, max_tokens=6, logprobs=0)
        for policy in (None, {"name": "full"}, {"name": "h2o", **BASE, "budget": 96})
    )
    for outputs in others:
        for one, other in zip(outputs, stock, strict=True):
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
            assert logprobs_of(one).tolist() == logprobs_of(other).tolist()


MATCHED = [on(kernels, name) for kernels in CAPABILITIES for name in ("h2o", "sink-window")]
MATCHED += [on("native-HND", "h2o"), on("trtllm", "keydiff"), on("native", "scissorhands")]


@pytest.mark.parametrize("backend, name", MATCHED, indirect=["backend"])
def test_evictions_and_logprobs_match_the_dense_oracle(server, backend, dense, name):
    """Of a prompt longer than the budget and a chunk, and of one that outgrows its budget while it decodes."""
    subject = server(POLICIES[name])
    lengths = [(100, 17), (61, 14)]
    requests = [(random_prompt(length), {"max_tokens": tokens, "logprobs": 0}) for length, tokens in lengths]
    outputs, traces = subject.traced(requests)
    for (prompt, _), output, trace in zip(requests, outputs, traces):
        evicted = assert_like_oracle(dense, prompt, output, trace, POLICIES[name], block_size=BLOCK)
        assert evicted > 0, "the policy never acted"
    assert subject.runtime.decodes
    subject.assert_nothing_left()
