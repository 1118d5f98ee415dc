"""Eviction behind vLLM's FlashInfer backend, without a GPU: with stand-ins for the package (flash_infer.py).

On each kind of kernels that vLLM chooses by the device. Like test_device_backends.py, on both model runners.
"""

import pytest
import test_device_backends
import test_full_graphs
import test_reach_devices
import test_sliding_devices
import test_warmup
from engine import random_prompt
from flash_infer import CAPABILITIES, FlashInfer
from flash_infer import backend as flashinfer
from interpreter import in_place_of, use_kernels
from parity import assert_like_oracle
from test_device_backends import BASE, BLOCK, POLICIES, check_hybrid, on
from test_full_graphs import check_decodes_are_replayed, check_full_is_stock
from vllm import envs

from vllm_evict.integration.start import advice

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"), pytest.mark.minutes]
server, replaying = test_device_backends.server, test_full_graphs.replaying
hybrid_model, hybrid = test_device_backends.hybrid_model, test_device_backends.hybrid
#: A model some of whose layers have sliding windows.
sliding = test_sliding_devices.model
#: Names of what decodes for vLLM, in graphs.
DECODES = {"native": "flashinfer_decode", "xqa": "xqa", "trtllm": "trtllm_decode"}


@pytest.fixture
def backend(request, monkeypatch):
    """vLLM's FlashInfer backend where the CPU platform asks for its own, on the kernels that the parameter says.

    They are "native", in either layout ("native-HND"), "xqa" or "trtllm".
    """
    kernels, _, layout = request.param.partition("-")
    package = FlashInfer(kernels)
    package.install(monkeypatch)
    if layout:
        monkeypatch.setattr(envs, "VLLM_KV_CACHE_LAYOUT", layout, raising=False)
    use_kernels(monkeypatch)
    with in_place_of("CPU_ATTN", f"{flashinfer.__name__}.FlashInferBackend"):
        yield package


KERNELS = [on(name) for name in CAPABILITIES]
#: Those that plan by lengths on the host, and those that take no plan.
FEW = [on("native"), on("trtllm")]


@pytest.mark.parametrize("backend", KERNELS, indirect=True)
def test_full_is_stock(server, backend):
    test_device_backends.check_full_is_stock(server)


#: Layouts of caches, heads or tokens first.
LAYOUTS = {"native": "LBNHC", "native-HND": "LBHNC", "xqa": "LBNHC", "trtllm": "LBHNC"}
MATCHED = [on("native", "sink-window"), *(on(kernels, "h2o") for kernels in CAPABILITIES)]
MATCHED += [on("native-HND", "h2o"), on("trtllm", "keydiff"), on("native", "scissorhands")]


@pytest.mark.oracle("full attention")
@pytest.mark.parametrize("backend, name", MATCHED, indirect=["backend"])
def test_evictions_and_logprobs_match_the_dense_oracle(request, server, backend, dense, name):
    """Of a prompt longer than the budget and a chunk, and of one that outgrows its budget while it decodes."""
    subject = server(POLICIES[name])
    layout = subject.core.vllm_config.cache_config.kv_cache_layout
    assert layout == LAYOUTS[request.node.callspec.id.removesuffix(f"-{name}")]
    lengths = [(100, 17), (61, 14)]
    requests = [(random_prompt(length), {"max_tokens": tokens, "logprobs": 0}) for length, tokens in lengths]
    for prompt, output, trace in subject.answered(requests):
        evicted = assert_like_oracle(dense, prompt, output, trace, POLICIES[name], block_size=BLOCK)
        assert evicted > 0, "the policy never acted"
    assert subject.runtime.decodes
    subject.assert_nothing_left()


HYBRIDS = [on("native", "h2o"), on("xqa", "h2o"), on("trtllm", "scissorhands")]


@pytest.mark.oracle("hybrids")
@pytest.mark.since("0.32", "it splits the block tables of all layers")
@pytest.mark.parametrize("backend, name", HYBRIDS, indirect=["backend"])
def test_kernels_read_smaller_blocks_than_a_hybrid_evicts(server, hybrid, poisoned, name):
    check_hybrid(server, hybrid, name)


@pytest.mark.oracle("full attention")
@pytest.mark.both_runners("trtllm-stock")
@pytest.mark.parametrize("backend, kernel", [on("trtllm", "stock"), on("trtllm", "triton")], indirect=["backend"])
def test_split_heads_need_a_table_and_lengths_alone(server, backend, dense, tmp_path, monkeypatch, kernel):
    """TensorRT-LLM's kernels, which take no plan for all heads of a layer, compute prompts, and decodes or not."""
    monkeypatch.setattr(advice, "takes_no_plan", lambda _: True)
    monkeypatch.setenv("VLLM_EVICT_DECODE", kernel)
    test_device_backends.check_split_heads(server, dense, tmp_path)
    assert set(backend.calls) == {"trtllm_decode", "trtllm_context"}


@pytest.mark.both_runners("native")
@pytest.mark.parametrize("backend", KERNELS, indirect=True)
def test_batches_of_chunks_and_decodes_under_several_policies(server, backend, dense):
    """Requests come one after the other and share a prefix; some are decoded by vLLM's kernel, some by the plugin's."""
    subject = server({**POLICIES["h2o"], "allow": ["sink-window", "full"]}, enable_prefix_caching=True)
    prefix, names = random_prompt(32, 9), ["sink-window", "h2o", "full", "h2o"]
    requests = [
        (prefix + random_prompt(40 + 45 * i, i), {"max_tokens": 12, "logprobs": 0, "extra_args": {"kv_policy": name}})
        for i, name in enumerate(names)
    ]
    (first,), _ = subject.traced([([*prefix, 1], {"max_tokens": 1})])
    assert first.kv_usage.evicted_blocks == 0
    outputs, traces = subject.traced(requests)
    for name, (prompt, _), output, trace in zip(names, requests, outputs, traces):
        assert trace.start == 32, "the prefix was to be hit"
        policy = {**BASE, **POLICIES.get(name, {"name": name})}
        evicted = assert_like_oracle(dense, prompt, output, trace, policy, block_size=BLOCK)
        assert (evicted > 0) == (name != "full")
    assert backend.mixed > 2, "batches were to be mixed"
    kernels = {"native": {"plan", "prefill", "decode"}, "xqa": {"plan", "prefill", "xqa"}}
    assert set(backend.calls) == kernels.get(backend.kernels, {"trtllm_decode", "trtllm_context"})
    subject.assert_nothing_left()


@pytest.mark.parametrize("backend", KERNELS, indirect=True)
def test_nothing_is_planned_where_the_plugin_decodes_all(server, backend, monkeypatch):
    subject = server(POLICIES["h2o"])
    backend.calls.clear()  # of dummy steps at start
    (output,) = subject.generate([random_prompt(90)], max_tokens=12)
    assert output.kv_usage.evicted_blocks > 0
    chunks = 2 * 2  # of two layers
    native = {"plan": 2, "prefill": chunks}
    assert backend.calls == {"native": native, "xqa": native, "trtllm": {"trtllm_context": chunks}}[backend.kernels]


@pytest.mark.both_runners("trtllm")
@pytest.mark.parametrize("backend", FEW, indirect=True)
def test_lengths_on_the_host_are_exact_two_steps_ahead(server, backend, async_stays):
    """Under async scheduling a step is built before its tokens are known; the stand-in compares lengths in each."""
    names, tokens = ["sink-window", "h2o", "full"], []
    for ahead in (True, False):
        subject = server({**POLICIES["sink-window"], "allow": names[1:]}, async_scheduling=ahead)
        assert (subject.core.batch_queue_size == 2) == ahead
        for i, name in enumerate(names):
            subject.add(random_prompt(100 - 25 * i, i), name, max_tokens=24, extra_args={"kv_policy": name})
        done = subject.run()
        assert [done[name].kv_usage.evicted_blocks > 0 for name in names] == [True, True, False]
        tokens.append(done["full"].outputs[0].token_ids)
        subject.assert_nothing_left()
    assert tokens[0] == tokens[1] and backend.mixed


@pytest.mark.both_runners("native-sink-window")
@pytest.mark.parametrize("backend, name", MATCHED[:4], indirect=["backend"])
def test_every_decode_is_replayed_from_a_full_graph(replaying, graphs, dense, backend, name):
    """vLLM's kernel on plans that are made anew before each replay, or the plugin's, for which none is."""
    check_decodes_are_replayed(replaying, graphs, dense, name, DECODES[backend.kernels])
    if backend.kernels == "native":
        assert backend.calls["fast_plan"] >= (20 if name == "sink-window" else 1)
    assert backend.calls["fast_plan"] == 0 or backend.kernels == "native"


@pytest.mark.parametrize("backend", [on("native")], indirect=True)
def test_decodes_beside_graphs_keep_no_memory_for_each_batch_size(replaying, graphs, dense, backend, monkeypatch):
    """Measured beside vLLM's kernel in a graph of four, since three are no size of one."""
    monkeypatch.setenv("VLLM_EVICT_DECODE", "stock")
    subject = replaying(POLICIES["h2o"])
    requests = [(random_prompt(length), {"max_tokens": 12, "logprobs": 0}) for length in (76, 61, 58)]
    for prompt, output, trace in subject.answered(requests):
        assert assert_like_oracle(dense, prompt, output, trace, POLICIES["h2o"], block_size=BLOCK)
    assert [1, 1, 1] in subject.steps and len(graphs.replayed) > 8
    assert sorted(backend.sizes) == [1, 2, 4], "sizes of graphs"
    subject.assert_nothing_left()


@pytest.mark.both_runners("trtllm")
@pytest.mark.parametrize("backend", FEW, indirect=True)
def test_full_is_stock_to_the_byte_in_full_graphs(replaying, graphs, backend):
    check_full_is_stock(replaying, graphs)


@pytest.mark.parametrize("backend", [on("native"), on("trtllm")], indirect=True)
def test_kernels_are_compiled_before_requests_come(server, backend):
    """FlashInfer takes half precision only, and tiles depend on it."""
    test_warmup.check_served(server, "h2o", "float16")


@pytest.mark.parametrize("backend, name", [on("trtllm", "h2o"), on("native", "keydiff")], indirect=["backend"])
def test_fp8_caches_match_the_dense_oracle(server, backend, tiny, monkeypatch, name):
    """Queries too, where vLLM quantises them for TensorRT-LLM's kernels."""
    scales = {"k": 0.3, "v": 0.6} | ({"q": 0.5} if backend.kernels == "trtllm" else {})
    test_device_backends.check_fp8_caches(server, tiny, monkeypatch, name, scales)
    assert backend.calls["trtllm_context"] or backend.calls["prefill"]


@pytest.mark.oracle("full attention")
@pytest.mark.both_runners("native-bound")
@pytest.mark.parametrize(
    "backend, fields", [on("native", "bound"), on("xqa", "bits"), on("trtllm", "bound")], indirect=["backend"]
)
def test_layers_reach_blocks_of_the_host(server, dense, poisoned, backend, fields):
    """Rows of tables, or indices of pages, are written by each layer."""
    test_reach_devices.check_answers(server, dense, test_reach_devices.FIELDS[fields])


@pytest.mark.oracle("sliding windows")
@pytest.mark.parametrize("backend", FEW, indirect=True)
def test_windows_beside_full_attention_match_the_dense_oracle(server, backend, sliding):
    """By plans and kernels of their own, which stay vLLM's."""
    test_sliding_devices.check_evictions(server, sliding, "h2o")


@pytest.mark.parametrize("backend", FEW, indirect=True)
def test_windows_beside_full_attention_are_replayed(replaying, graphs, backend, sliding):
    test_sliding_devices.check_decodes_are_replayed(replaying, graphs, sliding, "h2o", DECODES[backend.kernels])


@pytest.mark.parametrize("backend", [on("native")], indirect=True)
def test_full_is_stock_beside_windows(server, backend, sliding):
    test_device_backends.check_full_is_stock(server, model=sliding)
