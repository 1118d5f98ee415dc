"""Windows, and chunks of local attention, that no request of the server can outgrow are full attention."""

from functools import partial
from types import SimpleNamespace

import pytest
import test_device_backends
import test_reach
import test_read
from drafting import NGRAM, speculative
from engine import random_requests
from oracle.logits import DenseLogits, make_tiny
from oracle.model import DenseLlama
from oracle.tiny import make_tiny_llama
from parity import assert_like_oracle
from test_device_backends import BLOCK, POLICIES, on
from test_refusals import LLAMA4, engine_config, with_config
from test_sliding_devices import check_evictions
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention
from vllm.model_executor.models import llama
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_evict.config import KVPolicyError
from vllm_evict.integration.engine.start_up import start_up_line
from vllm_evict.integration.start import windows

backend, server = test_device_backends.backend, test_device_backends.server
LONGEST, SHORT = 1024, 48
H2O = {"name": "h2o", "budget": 192, "buffer": 64, "sink": 32, "recent": 64}


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A model with a window of 1,024 tokens in all three layers, and 2,048 tokens of context."""
    return make_tiny_llama(tmp_path_factory.mktemp("windows") / "long", layers=3, windows=[LONGEST] * 3)


@pytest.fixture
def layers_of(monkeypatch):
    """Makes the next model's layers with windows of these sizes, or with chunks: negative sizes."""

    def make(sizes):
        def layer(*args, prefix, per_layer_sliding_window=None, attn_type=None, **kwargs):
            size = sizes[int(prefix.split(".")[2])]
            if size < 0:
                return ChunkedLocalAttention(*args, attention_chunk_size=-size, prefix=prefix, **kwargs)
            return Attention(*args, per_layer_sliding_window=size or None, prefix=prefix, **kwargs)

        monkeypatch.setattr(llama, "Attention", layer)

    return make


def dense_of(path, seen):
    """The oracle, in whose layers queries see so many tokens; None: all."""
    dense = DenseLlama(path)
    dense.windows = list(seen)
    dense.full = [layer for layer, window in enumerate(seen) if window is None]
    return dense


def check_like_oracle(server, dense):
    answered = server.answered(random_requests((500, 80), (90, 220)))
    assert sum(assert_like_oracle(dense, *request, H2O) for request in answered) > 12
    server.assert_nothing_left()


@pytest.mark.both_runners
def test_a_model_whose_window_covers_the_servers_length_loses_blocks(engine, long):
    """A window as Phi-4-mini has one; the user has lowered the server's length to it here."""
    server = engine(H2O, model=long, max_model_len=LONGEST)
    assert [len(group.layer_names) for group in server.scheduler.kv_cache_config.kv_cache_groups] == [3]
    check_like_oracle(server, dense_of(long, [None] * 3))
    with pytest.raises(KVPolicyError, match="sliding-window attention in all layers.*nothing to evict"):
        engine(H2O, model=long, max_model_len=LONGEST + 1)


MIXED = {
    "longer-and-shorter": ([LONGEST, SHORT, 4096, SHORT], [None, SHORT, None, SHORT]),
    "longer-beside-full": ([LONGEST, 0, 0, SHORT], [None, None, None, SHORT]),
    "chunks": ([-LONGEST, 0, -4096, 0], [None] * 4),
    "chunks-beside-windows": ([-LONGEST, SHORT, 0, SHORT], [None, SHORT, None, SHORT]),
}


@pytest.mark.parametrize("name", MIXED)
def test_each_layer_counts_by_its_own_window(engine, tmp_path, layers_of, name):
    sizes, seen = MIXED[name]
    model = make_tiny_llama(tmp_path / "model", layers=4)
    layers_of(sizes)
    server = engine(H2O, model=model, max_model_len=LONGEST, max_num_batched_tokens=192)
    names = sorted(layer for group in server.worker.kv_evict.names for layer in group)
    assert [int(layer.split(".")[2]) for layer in names] == [i for i, window in enumerate(seen) if window is None]
    if len(server.worker.kv_evict.groups) == 1:
        check_like_oracle(server, dense_of(model, seen))


@pytest.mark.oracle("chunks of local attention")
@pytest.mark.both_runners
def test_shorter_chunks_keep_their_blocks_themselves(engine, tmp_path, poisoned):
    """Llama 4's, of 64 tokens. What was computed over holes is hit by no one."""
    model = make_tiny(tmp_path / "model", "llama4_text")
    server = engine({**H2O, "allow": ["full"]}, model=model, max_num_batched_tokens=192)
    assert {type(manager).__name__ for manager in server.all_managers} == {"ChunkManager", "EvictableManager"}
    assert ", beside 1 with chunks of local attention, managed by vLLM" in start_up_line(server.scheduler)
    dense, prompt = DenseLogits(model), random_requests((500, 80))[0]
    check_like_oracle(server, dense)
    for hit in (False, True):
        asked = {"max_tokens": 8, "logprobs": 0, "extra_args": {"kv_policy": "full"}}
        ((tokens, output, trace),) = server.answered([(prompt[0], asked)])
        assert output.num_cached_tokens >= 448 if hit else 0 < output.num_cached_tokens < 448
        assert assert_like_oracle(dense, tokens, output, trace, {"name": "full"}) == 0
    server.assert_nothing_left()


CHECKS = {"host": test_reach.check_classes, "decodes": test_read.check_classes}
# A tile of the first prompt has two blocks whose shares differ by 0.02 %, less than table sums are rounded by: kernels and
# plain torch choose the one, the oracle, which adds in float64, the other.
CHECKS["prompts"] = partial(test_read.check_classes, read_prompts=256, seed=2)


@pytest.mark.oracle("chunks of local attention")
@pytest.mark.both_runners("host", "prompts")
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_layers_beside_shorter_chunks_choose_what_they_read(engine, tmp_path, poisoned, check):
    """On the host, or on the device alone."""
    model = make_tiny(tmp_path / "model", "llama4_text")
    check(engine, DenseLogits(model), model=model)
    if check is CHECKS["prompts"]:
        test_read.check_shorter(engine, model=model)


def test_prefixes_on_the_host_are_hits_beside_shorter_chunks(engine, tmp_path, poisoned):
    test_reach.check_agents(engine, 30, model=make_tiny(tmp_path / "model", "llama4_text"))


@pytest.mark.parametrize("backend", [on("triton"), on("fa3")], indirect=True)
def test_the_plugins_kernels_decode_such_layers(server, backend, long):
    check_evictions(lambda policy, **options: server(policy, max_model_len=LONGEST, **options), long, "h2o")


@pytest.mark.parametrize("backend", [on("triton")], indirect=True)
def test_beside_chunks_nothing_is_kept_for_full_graphs(server, backend, graphs, tmp_path):
    """vLLM captures none."""
    model = make_tiny(tmp_path / "model", "llama4_text")
    subject = server(POLICIES["h2o"], model=model, **graphs.options)
    assert not graphs.of(subject) and subject.worker.kv_evict.measures_in_graphs is None
    assert subject.runtime.shape.graph_blocks == 0
    answered = subject.answered(random_requests((150, 20)))
    like = dict(block_size=BLOCK, atol=1e-4)
    assert sum(assert_like_oracle(DenseLogits(model), *request, POLICIES["h2o"], **like) for request in answered) > 2
    subject.assert_nothing_left()


def test_backends_get_no_window(monkeypatch):
    """Those of FlashInfer plan for one window of all layers."""
    made = {
        name: SimpleNamespace(sliding_window=size, impl=SimpleNamespace(**impl))
        for name, size, impl in [
            ("cpu", 100, dict(sliding_window=100)),
            ("flashinfer", 100, dict(sliding_window=(99, 0), window_left=99)),
            ("triton", 100, dict(sliding_window=(99, 0), chunk_lookback=1)),
            ("short", 99, dict(sliding_window=(98, 0))),
            ("full", None, dict(sliding_window=(-1, -1))),
        ]
    }
    monkeypatch.setattr(windows, "get_layers_from_vllm_config", lambda *_: made)
    windows.widen(SimpleNamespace(model_config=SimpleNamespace(max_model_len=100)))
    assert vars(made["cpu"].impl) == {"sliding_window": -1}
    assert vars(made["flashinfer"].impl) == {"sliding_window": (-1, -1), "window_left": -1}
    assert vars(made["triton"].impl) == {"sliding_window": (-1, -1), "chunk_lookback": -1}
    assert vars(made["short"].impl) == {"sliding_window": (98, 0)} and made["short"].sliding_window == 99
    assert [layer.sliding_window for layer in made.values()] == [None, None, None, 99, None]


# --- by the configuration --------------------------------------------------------------------------------------------


def test_windows_that_hide_nothing_refuse_nothing(tmp_path):
    """Not in all layers, not in some, and not what is refused beside windows."""
    every = with_config(
        tmp_path / "every", architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=512
    )
    kinds = ["sliding_attention", "full_attention"]
    some = with_config(tmp_path / "some", sliding_window=512, layer_types=kinds)
    for model in (every, some):
        for policy in ({"name": "adakv"}, {"name": "kvzip"}, {**H2O, "evict": "host", "host": "64MiB"}):
            config = engine_config(model, policy, max_model_len=512, block_size=32)
            assert not windows.slide(config)
    with pytest.raises(KVPolicyError, match="sliding-window attention beside full attention"):
        engine_config(some, {"name": "adakv"}, max_model_len=513)


def test_chunks_that_hide_nothing_are_served(tmp_path):
    changes = dict(architectures=["Llama4ForCausalLM"], model_type="llama4_text", attention_chunk_size=512, **LLAMA4)
    model, by_token = with_config(tmp_path, **changes), {**H2O, "granularity": "token"}
    engine_config(model, by_token, max_model_len=512)
    engine_config(model, max_model_len=513)
    with pytest.raises(KVPolicyError, match="chunked-local attention layers.*: set --max-model-len 512 or less"):
        engine_config(model, by_token, max_model_len=513)


def test_settings_for_which_vllm_has_no_tables_of_chunks_are_refused_with_those_that_work(tmp_path, monkeypatch):
    changes = dict(architectures=["Llama4ForCausalLM"], model_type="llama4_text", attention_chunk_size=64, **LLAMA4)
    model, head = with_config(tmp_path / "model", **changes), with_config(tmp_path / "head", num_hidden_layers=1)
    for method, instead in (("eagle", 'set "method": "ngram" in'), ("draft_model", 'set "method": "ngram" in')):
        with pytest.raises(KVPolicyError, match=instead):
            engine_config(model, speculative_config=speculative(method, head))
    engine_config(model, speculative_config=NGRAM)
    monkeypatch.setenv(name := "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE", "0")
    with pytest.raises(KVPolicyError, match=f"hybrid KV cache manager switched off, .* one block table: set {name}=1$"):
        engine_config(model)
    monkeypatch.setenv(name, "1")
    engine_config(model)


def test_a_window_beside_the_prompt_is_refused_with_a_setting_that_is_served(tmp_path):
    """R-SWA (Unlimited-OCR)."""
    model = with_config(tmp_path, rswa_window=128)
    with pytest.raises(KVPolicyError, match="a sliding window, of which.*: set --hf-overrides.rswa_window null, with"):
        engine_config(model)
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    given = parser.parse_args(["--hf-overrides.rswa_window", "null"]).hf_overrides
    engine_config(model, hf_overrides=given)
