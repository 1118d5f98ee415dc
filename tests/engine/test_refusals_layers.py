"""Layers, backends and KV caches that a policy cannot serve are refused at start, by name."""

import logging
from types import SimpleNamespace

import pytest
import torch
from engine import exactly
from oracle.tiny import write_tokenizer
from test_refusals import H2O, UNMEASURED, engine_config, refusal, with_config
from test_refusals_backends import PER_KIND, RUN_ON, SERVED, plain_config
from transformers import AutoConfig
from vllm.config import CUDAGraphMode, ModelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_evict.compute.attention.backends import ops_for
from vllm_evict.compute.compose import compose
from vllm_evict.compute.graphs import Attends
from vllm_evict.compute.holes import Holes
from vllm_evict.compute.kernels.mass import kernel_path
from vllm_evict.compute.runtime import EvictionRuntime
from vllm_evict.compute.shape import Shape
from vllm_evict.compute.source import Source
from vllm_evict.config import KVPolicyConfig, KVPolicyError
from vllm_evict.integration.start import drafters
from vllm_evict.integration.start.capabilities import of_layers, refuse
from vllm_evict.integration.start.describe import ignored_settings, kernels_line
from vllm_evict.integration.worker import layers

SERVER = SimpleNamespace(
    cache_config=SimpleNamespace(enable_prefix_caching=True, cache_dtype="fp8"),
    model_config=SimpleNamespace(use_mla=False, dtype=torch.bfloat16),
    kv_transfer_config=None,
)
# --- models ----------------------------------------------------------------------------------------------------------


def test_keys_and_values_of_unlike_sizes_are_kept_in_whole_blocks(tmp_path):
    """By the configuration of MiMo-V2, with no weights beside it; what the message advises is served."""
    config = AutoConfig.for_model("mimo_v2_flash", architectures=["MiMoV2FlashForCausalLM"])
    config.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 256, 2048)
    what = "keys of 192 and values of 128 dimensions, of which no kernel of the plugin gathers tokens: "
    with pytest.raises(KVPolicyError, match=f"{what}set granularity: block$"):
        EngineArgs(str(tmp_path), kv_policy={**H2O, "granularity": "token"}).create_engine_config()
    EngineArgs(str(tmp_path), kv_policy={**H2O, "granularity": "block"}).create_engine_config()


# --- layers ----------------------------------------------------------------------------------------------------------


def layer(backend="CPU_ATTN", **impl):
    return SimpleNamespace(
        impl=SimpleNamespace(**impl),
        attn_backend=SimpleNamespace(get_name=lambda: backend),
        sliding_window=None,
        kv_sharing_target_layer_name=None,
    )


KEEPS_ALL = {"name": "full", "allow": []}


@pytest.mark.parametrize(
    "impl, what", [({"alibi_slopes": [0.5]}, "ALiBi"), ({"chunk_lookback": 1}, "chunks of positions")]
)
def test_attention_that_counts_places_of_the_table_is_refused_by_layer(impl, what):
    """Policies that evict, and servers whose requests may pick one, measure or not."""
    for policy in (H2O, UNMEASURED, {"name": "full"}):
        message = refusal(
            of_layers.check_layer, "model.layers.3.attn", layer(**impl), KVPolicyConfig.parse(policy), plain_config()
        )
        assert f"{what}, which model.layers.3.attn has" in message and '{"name": "full", "allow": []}' in message
    of_layers.check_layer("model.layers.3.attn", layer(**impl), KVPolicyConfig.parse(KEEPS_ALL), plain_config())


@pytest.mark.parametrize(
    "impl", [{}, dict(alibi_slopes=None), dict(logits_soft_cap=50.0), dict(sinks=[0.1]), dict(chunk_lookback=-1)]
)
def test_attention_that_it_knows_is_served(impl):
    of_layers.check_layer("attn", layer(**impl), KVPolicyConfig.parse(H2O), plain_config())


def test_layers_of_unknown_backends_are_refused():
    policy = KVPolicyConfig.parse(UNMEASURED)
    for backend in ("TRITON_FLASHINFER", "FLEX_ATTENTION", "FLASH_ATTN_DIFFKV"):
        assert refusal(of_layers.check_layer, "layer.7", layer(backend), policy, plain_config()) == (
            f"KV policy 'sink-window' can't be used with the attention backend {backend}, which layer.7 has: "
            f"set --attention-backend to one {RUN_ON}"
        )
    for backend in ("CPU_ATTN", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"):
        of_layers.check_layer("layer.7", layer(backend), policy, plain_config())
    unlike = plain_config(model_config__hf_text_config=SimpleNamespace(head_dim=192, v_head_dim=128))
    of_layers.check_layer("layer.7", layer("FLASH_ATTN_DIFFKV"), policy, unlike)


def test_layers_of_drafters_are_like_those_of_the_model(monkeypatch):
    monkeypatch.setattr(drafters, "Attention", SimpleNamespace)

    def of(name="CPU_ATTN", dtype="auto", target=None):
        backend, sharing = SimpleNamespace(get_name=lambda: name), {"kv_sharing_target_layer_name": target}
        return SimpleNamespace(attn_backend=backend, kv_cache_dtype=dtype, **sharing)

    drafters.check({"draft.0": of(), "draft.1": of(target="layers.3")}, of())
    for unlike, message in (
        (of("FLASH_ATTN"), 'has the attention backend FLASH_ATTN; .*; set "attention_backend": "CPU_ATTN"'),
        (of(dtype="fp8"), 'has the KV cache dtype \'fp8\'; .*; set "kv_cache_dtype": "auto"'),
        (torch.nn.Linear(1, 1), "is a Linear layer; .*; set another model"),
    ):
        with pytest.raises(KVPolicyError, match=f"^the drafter's layer draft.0 {message} in --speculative-config, or"):
            drafters.check({"draft.0": unlike}, of())


def test_full_attention_in_blocks_of_several_sizes_is_refused():
    policy = KVPolicyConfig.parse(H2O)
    assert of_layers.check_blocks(policy, {64}) == 64
    with pytest.raises(KVPolicyError, match="in blocks of 32 and 64 tokens: leave --kv-policy out"):
        of_layers.check_blocks(policy, {32, 64})


SPLIT = {
    "duo": {"name": "duo", "pattern": ["10", "01"], "sink": 16, "recent": 64},
    "pyramidkv": {"name": "pyramidkv", "budget": 512, "recent": 64},
    "adakv": {"name": "adakv", "budget": 512, "recent": 64},
}


@pytest.mark.parametrize("name", SPLIT)
def test_policies_that_split_heads_are_refused_where_plans_are_for_all_of_them(name):
    """When the backend was named, before anything is loaded; when vLLM has chosen it, by the first layer."""
    config, instead = KVPolicyConfig.parse(SPLIT[name]), "to FLASH_ATTN or TRITON_ATTN"
    for backend in (None, *SERVED):
        plain = plain_config(device_config__device_type="cuda", attention_config__backend=backend)
        named = getattr(backend, "name", "CPU_ATTN")
        if named != "FLASHINFER":
            refuse.check_config(plain, config)
            of_layers.check_layer("layer.7", layer(named), config, plain_config())
            continue
        why = "because the policy puts heads into pages of its own, while the backend plans for all heads of a layer: "
        why += (
            f"set --attention-backend {instead}, or use a policy for whole layers, such as h2o, snapkv or sink-window"
        )
        for where, check in {
            "": lambda: refuse.check_config(plain, config),
            ", which layer.7 has": lambda: of_layers.check_layer("layer.7", layer(named), config, plain_config()),
        }.items():
            what = f"KV policy {name!r} can't be used with the attention backend FLASHINFER{where}"
            assert refusal(check) == f"{what}, {why}"
    per_kind = {"full_attention": AttentionBackendEnum.FLASHINFER}
    plain = plain_config(device_config__device_type="cuda", attention_config__backend_per_kind=per_kind)
    with pytest.raises(KVPolicyError, match=f"set {PER_KIND} {instead}"):
        refuse.check_config(plain, config)


def kv_cache_of_one_group():
    spec = SimpleNamespace(block_size=32)
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["layer.2"], kv_cache_spec=spec)])


def test_key_layouts_that_the_score_pass_cannot_read_are_refused(monkeypatch):
    plain = {"alibi_slopes": None, "logits_soft_cap": 0, "sinks": None, "is_fp8_kv_cache": False, "head_size": 64}
    backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
    cpu_layer = SimpleNamespace(isa="neon", impl=SimpleNamespace(**plain), attn_backend=backend, kv_cache_dtype="fp8")
    cpu_layer.sliding_window = None
    found = {"layer.2": cpu_layer}
    monkeypatch.setattr(layers, "get_layers_from_vllm_config", lambda *_: found)
    group = SimpleNamespace(decodes=None, block_size=32, source=Source(), leave_out=lambda: None)
    runtime, given = EvictionRuntime([group], ops_for("CPU_ATTN"), names=[["layer.2"]]), kv_cache_of_one_group()
    with pytest.raises(KVPolicyError, match=r"layer.2 packs its keys for 'neon'.*vec.*sink-window"):
        layers.settle(SERVER, KVPolicyConfig.parse(H2O), runtime, given)
    layers.settle(SERVER, KVPolicyConfig.parse(UNMEASURED), runtime, given)
    assert group.decodes is False
    found["layer.2"].isa = "vec"
    layers.settle(SERVER, KVPolicyConfig.parse(H2O), runtime, given)
    decodes = kernel_path() not in ("torch reference", "portable")
    assert group.decodes is decodes and runtime.outruns and runtime.batch.takes_prompts
    found["layer.2"].isa = "amx"  # vLLM's kernel is faster for prompts, and where nothing is measured
    layers.settle(SERVER, KVPolicyConfig.parse(H2O), runtime, given)
    assert group.decodes is decodes and not runtime.outruns and not runtime.batch.takes_prompts
    for field, value in {"alibi_slopes": [1.0], "head_size": 72}.items():
        found["layer.2"].impl = SimpleNamespace(**{**plain, field: value})
        layers.settle(SERVER, KVPolicyConfig.parse(UNMEASURED), runtime, given)
        assert group.decodes is False
    found["layer.2"].impl = SimpleNamespace(**{**plain, "is_fp8_kv_cache": True})
    for found["layer.2"].kv_cache_dtype in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        layers.settle(SERVER, KVPolicyConfig.parse(H2O), runtime, given)
        assert group.decodes is decodes
    found["layer.2"].kv_cache_dtype = "int8_per_token_head"
    layers.settle(SERVER, KVPolicyConfig.parse(UNMEASURED), runtime, given)
    assert group.decodes is False
    why = r"layer.2 keeps its keys as int8_per_token_head.*fp8_e5m2\): use --kv-cache-dtype auto, or .*sink-window"
    with pytest.raises(KVPolicyError, match=why):
        layers.settle(SERVER, KVPolicyConfig.parse(H2O), runtime, given)


#: Backend on a device -> what its layers have besides, where they are plain, and where they are not.
BESIDES = {
    "FLASH_ATTN": ({"sliding_window": (-1, -1)}, {"sliding_window": (63, 0)}),
    "FLASHINFER": ({"sliding_window": (-1, -1)}, {"sliding_window": (63, 0)}),
    "TRITON_ATTN": ({"chunk_lookback": -1}, {"chunk_lookback": 1}),
}


@pytest.mark.parametrize("name", BESIDES)
def test_caches_that_a_device_cannot_read_are_refused(monkeypatch, name):
    besides, other = BESIDES[name]
    plain = {"alibi_slopes": None, "logits_soft_cap": 0, "sinks": None, "head_size": 64, **besides}
    backend = SimpleNamespace(get_name=lambda: name)
    one = torch.ones(())
    found = SimpleNamespace(attn_backend=backend, dtype=torch.bfloat16, _q_scale=one, _k_scale=one, _v_scale=one)
    found.sliding_window, found.head_size, found.head_size_v = None, 64, 64
    monkeypatch.setattr(layers, "get_layers_from_vllm_config", lambda *_: {"layer.2": found})
    group = SimpleNamespace(decodes=None, block_size=32, source=Source(), leave_out=lambda: None)
    runtime, given = EvictionRuntime([group], ops_for(name), names=[["layer.2"]]), kv_cache_of_one_group()

    def settle(policy, dtype=torch.bfloat16, named="auto", **changed):
        found.impl, found.kv_cache_torch_dtype = SimpleNamespace(**{**plain, **changed}), dtype
        found.kv_cache_dtype = named
        layers.settle(SERVER, KVPolicyConfig.parse(policy), runtime, given)
        return group.decodes

    assert settle(H2O)
    with pytest.raises(KVPolicyError, match=r"layer.2 keeps its keys as float16.*sink-window"):
        settle(H2O, torch.float16, "float16")
    for size in (8, 520):
        with pytest.raises(KVPolicyError, match=rf"layer.2 has heads of size {size}.*sink-window"):
            settle(H2O, head_size=size)
        assert not settle(UNMEASURED, head_size=size)
    for fp8 in ("fp8", "fp8_e4m3"):
        assert settle(H2O, torch.uint8, fp8)
    for kind in ("fp8_e5m2", "fp8_per_token_head", "int8_per_token_head", "nvfp4"):
        with pytest.raises(KVPolicyError, match=rf"layer.2 keeps its keys as {kind}.*fp8, fp8_e4m3\).*sink-window"):
            settle(H2O, torch.uint8, kind)
        assert not settle(UNMEASURED, torch.uint8, kind)
    for scale in ("_q_scale", "_k_scale", "_v_scale"):
        setattr(found, scale, torch.ones(4))
        with pytest.raises(KVPolicyError, match="layer.2 has fp8 scales for each head.*sink-window"):
            settle(H2O, torch.uint8, "fp8")
        assert settle(H2O) and not settle(UNMEASURED, torch.uint8, "fp8")
        setattr(found, scale, one)
    for changed in ({"alibi_slopes": [1.0]}, other):
        assert not settle(UNMEASURED, **changed)
    for changed in ({"logits_soft_cap": 30.0}, {"sinks": [1.0]}):
        assert settle(H2O, **changed)
    monkeypatch.setenv("VLLM_EVICT_DECODE", "stock")
    assert not settle(H2O)


@pytest.mark.parametrize(
    "backend, fields, caching, connector, expected",
    [
        ("CPU_ATTN", {}, False, None, False),
        ("CPU_ATTN", {}, True, None, True),
        ("CPU_ATTN", {}, False, "offloads", True),
        ("CPU_ATTN", {"when": "pressure"}, False, None, True),
        ("CPU_ATTN", {"when": "pressure", "exact": False}, True, None, False),
        ("CPU_ATTN", {"exact": True}, False, None, True),
        ("FLASH_ATTN", {"when": "pressure"}, True, None, False),
        ("FLASH_ATTN", {"exact": True}, True, None, True),
    ],
)
def test_requests_whose_blocks_others_read_keep_the_stock_kernel(backend, fields, caching, connector, expected):
    config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=caching), kv_transfer_config=connector)
    assert layers._is_exact(config, KVPolicyConfig.parse({**H2O, **fields}), ops_for(backend)) == expected


#: Backend, whether heads are split, whether the plugin's kernel outruns the layers' -> requests that it attends for under
#: a policy that measures attention, and under another one.
WHO = {
    ("CPU_ATTN", False, True): ("requests with holes and measured requests", "requests with holes"),
    ("CPU_ATTN", False, False): ("measured requests", ""),
    ("FLASH_ATTN", False, False): ("measured requests", ""),
    ("FLASHINFER", False, False): ("measured requests", ""),
    ("FLASH_ATTN", True, False): ("requests with holes and measured requests", "requests with holes"),
}


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("backend, split, outruns", WHO)
def test_the_log_says_which_kernels_attend_and_measure(backend, split, outruns, measured, decodes):
    ops = ops_for(backend)
    group = SimpleNamespace(decodes=decodes, shape=SimpleNamespace(graph_tokens=4096), source=Source())
    policy = KVPolicyConfig.parse(H2O if measured else UNMEASURED)

    def line(mode, in_graphs=None):
        config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))
        runtime = EvictionRuntime([group], ops, ["pages"] * split, in_graphs)
        runtime.settle(decodes, outruns, exact=False)
        return kernels_line(config, policy, runtime, backend)

    told, own = line(CUDAGraphMode.NONE), WHO[backend, split, outruns][not measured] if decodes else ""
    assert f"{backend}'s own kernel" in told and "graphs" not in told
    does = "attends for" if outruns else "decodes"
    assert (f"the plugin's kernel {does} {own}" in told) == bool(own)
    assert ("attends to all requests" in told) != bool(own)
    assert ("output and mass in one read" in told) == (bool(own) and measured)
    assert (f"mass comes from {ops.beside}" in told) == measured
    assert line(CUDAGraphMode.PIECEWISE) == told
    replayed = "; decodes replay full CUDA graphs"
    assert (
        line(CUDAGraphMode.FULL_AND_PIECEWISE) == told + replayed + ", except decodes of measured requests" * measured
    )
    longest = ", of measured requests up to 4096 resident tokens" * measured
    assert line(CUDAGraphMode.FULL_AND_PIECEWISE, Attends.OWN) == told + replayed + longest


def test_the_log_says_that_decodes_which_read_less_are_the_plugins():
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE),
        cache_config=SimpleNamespace(block_size=32),
    )
    policy, store = KVPolicyConfig.parse({"name": "full", "read": 256}), SimpleNamespace(read=None)
    shape = Shape(32, 1, 4096, 1, 1)
    group = SimpleNamespace(decodes=True, shape=shape, source=compose(policy, shape, store, Holes(32)).source)
    group.source.index.of_layers = [torch.empty(3 << 20, dtype=torch.uint8)]
    runtime = EvictionRuntime([group], ops_for("CPU_ATTN"))
    runtime.settle(decodes=True, outruns=False, exact=False)
    told = kernels_line(config, policy, runtime, "CPU_ATTN")
    assert "the plugin's kernel decodes requests that read less; CPU_ATTN's own kernel attends to all others" in told
    assert "; decodes read 8 blocks at most" in told and "; the index of keys and choices take 4 MiB" in told


@pytest.mark.parametrize(
    "backend, own", [("CPU_ATTN", "requests with holes"), ("FLASH_ATTN", "measured requests with holes")]
)
def test_the_log_says_what_exact_leaves_to_the_plugin(backend, own):
    config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE))
    runtime = EvictionRuntime(
        [SimpleNamespace(decodes=True, shape=SimpleNamespace(graph_tokens=4096), source=Source())], ops_for(backend)
    )
    runtime.exact, runtime.outruns = True, backend == "CPU_ATTN"
    told = kernels_line(config, KVPolicyConfig.parse({**H2O, "exact": True}), runtime, backend)
    assert f" {own}, output and mass in one read" in told


@pytest.mark.parametrize("exact, graph", [(False, Attends.OWN), (True, None)])
def test_no_full_graph_decodes_exact_requests_beside_others(exact, graph):
    """In such a graph the plugin's kernel would decode a request that lost no block."""
    group = SimpleNamespace(
        decodes=True, source=Source(), measured={"a", "b"}, with_holes={"a": [1]}, shape=SimpleNamespace(graph_tokens=4096),
        fits_graphs=lambda requests: True,
    )  # fmt: skip
    runtime = EvictionRuntime([group], ops_for("FLASH_ATTN"), measures_in_graphs=Attends.OWN)
    runtime.exact, cached = exact, SimpleNamespace(num_computed_tokens=[40, 40], req_ids=["a", "b"])
    runtime.in_step, runtime.batch.own = True, runtime._own()
    runtime._scheduler_output = SimpleNamespace(
        num_scheduled_tokens={"a": 1, "b": 1}, scheduled_new_reqs=[], scheduled_cached_reqs=cached
    )
    assert runtime.graph is graph and runtime.batch.own == ({"a"} if exact else {"a", "b"})


@pytest.mark.parametrize("kernel", ["triton", "cuda", "stock", None])
@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("backend", ["CPU_ATTN", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"])
def test_a_decode_kernel_that_is_not_run_is_one_line_that_says_what_is(monkeypatch, backend, decodes, kernel):
    runtime = SimpleNamespace(groups=[SimpleNamespace(decodes=decodes)])
    monkeypatch.delenv("VLLM_EVICT_DECODE", raising=False)
    if kernel is not None:
        monkeypatch.setenv("VLLM_EVICT_DECODE", kernel)
    line = ignored_settings(runtime, backend)
    if kernel in ("stock", None) or (backend != "CPU_ATTN" and decodes):
        assert line is None
        return
    assert line.startswith(f"VLLM_EVICT_DECODE={kernel} has no effect behind {backend}: ") and "\n" not in line
    assert ("a kernel for GPU backends" in line) == (backend == "CPU_ATTN")
    assert ("the plugin's kernel in C++ decodes" in line) == decodes == ("own kernel decodes" not in line)


@pytest.mark.parametrize("kernel", ["cuda", None])
def test_a_decode_kernel_for_gpus_is_said_to_have_no_effect_on_a_cpu(engine, monkeypatch, kernel):
    lines = []
    monkeypatch.setattr(logging.getLogger("vllm.evict"), "warning", lines.append)
    monkeypatch.delenv("VLLM_EVICT_DECODE", raising=False)
    if kernel is not None:
        monkeypatch.setenv("VLLM_EVICT_DECODE", kernel)
    own = engine(H2O).runtime.decodes
    instead = "the plugin's kernel in C++ decodes for policies" if own else "CPU_ATTN's own kernel decodes"
    said = [line for line in lines if line.startswith("VLLM_EVICT_DECODE")]
    line = "VLLM_EVICT_DECODE=cuda has no effect behind CPU_ATTN: it names a kernel for GPU backends"
    assert said == ([] if kernel is None else [f"{line}; {instead}"])


def test_a_decode_kernel_that_is_none_is_refused_before_anything_is_loaded(tiny, monkeypatch):
    monkeypatch.setenv("VLLM_EVICT_DECODE", "cutlass")
    with pytest.raises(KVPolicyError, match="VLLM_EVICT_DECODE got 'cutlass'; expected stock, triton or cuda"):
        engine_config(tiny)
    engine_config(tiny, None)


ALIBI = {
    "bloom": dict(architectures=["BloomForCausalLM"], model_type="bloom", num_attention_heads=2),
    "by-name": dict(alibi=True),  # as Falcon's configurations have it
    "by-encoding": dict(position_encoding_type="alibi"),
}


@pytest.mark.parametrize("kind", ALIBI)
@pytest.mark.parametrize("policy", [H2O, UNMEASURED, {**H2O, "name": "keydiff"}, "keybound"], ids=str)
def test_policies_that_evict_are_refused_with_alibi_before_anything_is_loaded(tmp_path, kind, policy):
    """Over holes biases would count other distances than those of the text. `full` leaves the others to no request."""
    model = with_config(tmp_path, **ALIBI[kind])
    with pytest.raises(
        KVPolicyError, match=r'with ALiBi, which counts how far back.*use \{"name": "full", "allow": \[\]\}'
    ):
        engine_config(model, policy, block_size=32)
    for keeps_all in (KEEPS_ALL, "full"):
        (config,) = engine_config(model, keeps_all).additional_config.values()
        assert KVPolicyConfig.parse(config).allowed == {"full"}


def test_a_model_with_alibi_is_refused_by_its_layers_where_the_configuration_is_silent(engine, tmp_path, monkeypatch):
    """Baichuan's does not say so. `full` alone runs, to the byte."""
    model = with_config(tmp_path, **ALIBI["bloom"])
    monkeypatch.setattr(ModelConfig, "uses_alibi", False)
    with pytest.raises(KVPolicyError, match="with ALiBi, which .* has, which counts how far back"):
        engine(UNMEASURED, model, load_format="dummy")
    prompts = [list(range(200)) * 2]
    stock, kept = (
        exactly(engine(each, model, load_format="dummy").generate(prompts, max_tokens=4, logprobs=0))
        for each in (None, KEEPS_ALL)
    )
    assert stock == kept


def test_blocks_that_the_backend_does_not_have_are_refused(engine):
    with pytest.raises(ValueError, match=r"(?i)block.size"):
        engine({**H2O, "budget": 160, "sink": 16}, block_size=16)
