"""What cannot be served right is refused at start: by name, with what to do instead, and only with a policy."""

import json
import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import vllm
from oracle.tiny import make_tiny_llama
from vllm.config import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.executor.abstract import Executor

from vllm_evict.compute.attention.ops import ops_for
from vllm_evict.compute.kernels.mass import kernel_path
from vllm_evict.compute.runtime import EvictionRuntime
from vllm_evict.config import KVPolicyConfig, KVPolicyError
from vllm_evict.integration import layers, refusals

#: vLLM 0.32 has one of this name, which cannot be made without Ray.
RayDistributedExecutor = type("RayDistributedExecutor", (Executor,), {})
H2O = {"name": "h2o", "budget": 512, "recent": 64}
UNMEASURED = {"name": "sink-window", "budget": 512, "allow": []}


def engine_config(model, policy=H2O, **arguments):
    arguments = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, **arguments}
    return EngineArgs(model=str(model), kv_policy=policy, **arguments).create_engine_config()


def with_config(path, **changes):
    """The tiny Llama's directory with another config.json: enough for all that is decided before weights are read."""
    make_tiny_llama(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


LLAMA4 = dict(num_local_experts=1, num_experts_per_tok=1, interleave_moe_layer_step=1)
EXPERTS = dict(num_local_experts=2, num_experts_per_tok=1)
WHISPER = dict(encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
MODELS = {
    "sliding window": (
        dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=64),
        "sliding-window attention in all layers",
    ),
    "a window in each layer": (
        dict(
            architectures=["Gemma3ForCausalLM"],
            model_type="gemma3_text",
            sliding_window=64,
            layer_types=["sliding_attention", "sliding_attention"],
        ),
        "sliding-window attention in all layers",
    ),
    "chunked attention": (
        dict(architectures=["Llama4ForCausalLM"], model_type="llama4_text", attention_chunk_size=128, **LLAMA4),
        "chunked-local attention",
    ),
    "MLA": (
        dict(
            architectures=["DeepseekV2ForCausalLM"],
            model_type="deepseek_v2",
            kv_lora_rank=16,
            q_lora_rank=None,
            qk_nope_head_dim=16,
            qk_rope_head_dim=16,
            v_head_dim=16,
            n_routed_experts=2,
            first_k_dense_replace=2,
            moe_intermediate_size=32,
        ),
        "multi-head latent attention",
    ),
    "Mamba": (
        dict(
            architectures=["MambaForCausalLM"],
            model_type="mamba",
            state_size=16,
            conv_kernel=4,
            expand=2,
            time_step_rank=4,
        ),
        "Mamba",
    ),
    "hybrid": (
        dict(
            architectures=["JambaForCausalLM"],
            model_type="jamba",
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_expand=2,
            num_experts=1,
        ),
        "hybrid layers",
    ),
    "encoder-decoder": (
        dict(
            architectures=["WhisperForConditionalGeneration"],
            model_type="whisper",
            d_model=64,
            max_source_positions=64,
            max_target_positions=1024,
            **WHISPER,
        ),
        "encoder-decoder",
    ),
    "encoder": (dict(architectures=["BertModel"], model_type="bert"), "pooling"),
    "classifier": (dict(architectures=["LlamaForSequenceClassification"], num_labels=2), "pooling"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_cannot_be_served_are_refused_by_what_they_have(tmp_path, name):
    changes, what = MODELS[name]
    model = with_config(tmp_path, **changes)
    for policy in (H2O, UNMEASURED):
        with pytest.raises(KVPolicyError) as refused:
            engine_config(model, policy)
        message = str(refused.value)
        assert f"KV policy {policy['name']!r} can't be used with " in message and what in message
        assert "leave --kv-policy out" in message and "\n" not in message
    stock = engine_config(model, None)
    assert stock.scheduler_config.scheduler_cls is None, "without a policy the plugin must not mind"


#: Settings and policies that layers with sliding windows leave no room for.
BESIDE_WINDOWS = {
    "without vLLM's hybrid KV cache manager": (
        H2O,
        dict(disable_hybrid_kv_cache_manager=True),
        "leave --disable-hybrid-kv-cache-manager out",
    ),
    "puts heads into pages": (
        {"name": "pyramidkv", "budget": 512, "recent": 64},
        {},
        "use a policy for whole layers, such as h2o, snapkv or sink-window",
    ),
    "to repeat a prompt": ({"name": "kvzip", "budget": 512, "recent": 64}, {}, "leave kvzip out"),
    "to repeat a prompt by a request": ({**H2O, "allow": ["kvzip"]}, {}, "leave kvzip out"),
}


@pytest.mark.parametrize("what", BESIDE_WINDOWS)
def test_what_cannot_be_served_beside_sliding_windows_is_refused_by_name(tmp_path, what):
    policy, arguments, instead = BESIDE_WINDOWS[what]
    windows = with_config(tmp_path / "windows", sliding_window=64, layer_types=["sliding_attention", "full_attention"])
    full = with_config(tmp_path / "full", sliding_window=64, layer_types=["full_attention"] * 2)
    with pytest.raises(KVPolicyError) as refused:
        engine_config(windows, policy, **arguments)
    message = str(refused.value)
    assert f"KV policy {policy['name']!r} can't be used with sliding-window attention beside full attention" in message
    assert what.removesuffix(" by a request") in message and f": {instead}" in message and "\n" not in message
    engine_config(windows, H2O)
    engine_config(full, policy, **arguments)
    engine_config(windows, policy, **arguments, disable_sliding_window=True, max_model_len=64, block_size=32)


def test_no_context_with_positions_of_several_dimensions(tmp_path):
    """Those of a picture are fewer than its tokens."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    several = with_config(tmp_path, rope_parameters=rope)
    with pytest.raises(KVPolicyError, match=r"several dimensions \(M-RoPE\).*: leave context out for this model"):
        engine_config(several, {**H2O, "context": "model"}, max_num_batched_tokens=256)
    assert engine_config(several).model_config.uses_mrope, "without a context they are served"


def test_no_context_beside_sliding_windows(tmp_path):
    """Some models (Cohere2, EXAONE 4) turn keys in layers with windows only, and have the embedding in all."""
    windows = with_config(tmp_path, sliding_window=64, layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(KVPolicyError, match="only layers with windows may have positions: leave context out"):
        engine_config(windows, {**H2O, "context": "model"}, max_num_batched_tokens=256)


SETTINGS = {
    "pipeline parallelism": (dict(pipeline_parallel_size=2), "use --tensor-parallel-size"),
    "speculative decoding": (
        dict(speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}),
        "leave --speculative-config out",
    ),
    "KV connector": (
        dict(kv_transfer_config={"kv_connector": "ExampleConnector", "kv_role": "kv_both"}),
        "leave --kv-transfer-config and --kv-offloading-size out",
    ),
    "encoder-cache connector": (
        dict(ec_transfer_config={"ec_connector": "ExampleConnector", "ec_role": "ec_both"}),
        "leave --ec-transfer-config out",
    ),
    "fast prefill": (dict(kv_sharing_fast_prefill=True), "leave --kv-sharing-fast-prefill out"),
    "KV cache dtype 'fp8_e5m2'": (dict(kv_cache_dtype="fp8_e5m2"), "--kv-cache-dtype auto"),
    "KV cache dtype 'fp8', which the plugin can't read on vLLM's cpu engine": (
        dict(kv_cache_dtype="fp8"),
        "--kv-cache-dtype auto, or",
    ),
    "scheduler class": (dict(scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler"), "leave --scheduler-cls out"),
    "worker class 'my.Worker'": (dict(worker_cls="my.Worker"), "leave --worker-cls out"),
    "pooling": (dict(runner="pooling"), "leave --kv-policy out"),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_settings_that_cannot_be_served_are_refused_by_name(tiny, what):
    arguments, instead = SETTINGS[what]
    with pytest.raises(KVPolicyError) as refused:
        engine_config(tiny, **arguments)
    message = str(refused.value)
    assert what in message and instead in message and "\n" not in message


def plain_config(**changes):
    """What `check_config` looks at, of an engine that can be served."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(),
            runner_type="generate",
            use_mla=False,
            is_hybrid=False,
            has_inner_state=False,
            is_attention_free=False,
            is_encoder_decoder=False,
            is_mm_prefix_lm=False,
            is_diffusion=False,
            rswa_window=None,
            get_sliding_window=lambda: None,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
            use_ubatching=False,
            data_parallel_size=2,
            distributed_executor_backend="mp",
        ),
        cache_config=SimpleNamespace(
            kv_sharing_fast_prefill=False, cache_dtype="auto", kv_cache_dtype_skip_layers=[], sliding_window=None
        ),
        scheduler_config=SimpleNamespace(scheduler_cls=None, disable_hybrid_kv_cache_manager=False),
        device_config=SimpleNamespace(device_type="cpu"),
        attention_config=SimpleNamespace(backend=None, backend_per_kind={}),
        speculative_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
    )
    for path, value in changes.items():
        part, field = path.split("__")
        setattr(getattr(config, part), field, value)
    return config


#: Backends of a GPU that policies run on.
SERVED = [AttentionBackendEnum[name] for name in ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")]
#: What vLLM itself refuses on a CPU, or switches off there.
NOT_ON_A_CPU = {
    "vLLM's xpu engine": dict(device_config__device_type="xpu"),
    "the attention backend FLEX_ATTENTION: policies run on": dict(
        device_config__device_type="cuda", attention_config__backend=AttentionBackendEnum.FLEX_ATTENTION
    ),
    "the attention backend CPU_ATTN: policies run on": dict(
        device_config__device_type="cuda", attention_config__backend=AttentionBackendEnum.CPU_ATTN
    ),
    "layers that attend to their prompt and a sliding window": dict(model_config__rswa_window=128),
    "context parallelism": dict(parallel_config__decode_context_parallel_size=2),
    "context parallelism: set --decode": dict(parallel_config__prefill_context_parallel_size=2),
    "dual-batch overlap or microbatches": dict(parallel_config__use_ubatching=True),
    "data parallelism under an external launcher": dict(
        parallel_config__distributed_executor_backend="external_launcher"
    ),
    "vLLM's older Ray executor, which runs steps past the worker: unset VLLM_USE_RAY_V2_EXECUTOR_BACKEND": dict(
        parallel_config__distributed_executor_backend=type("Own", (RayDistributedExecutor,), {})
    ),
    "non-causal attention over images: set --language-model-only": dict(model_config__is_mm_prefix_lm=True),
    "models with non-causal attention": dict(model_config__is_diffusion=True),
    "Mamba, linear-attention": dict(model_config__is_attention_free=True),
}


@pytest.mark.parametrize("what", NOT_ON_A_CPU)
def test_what_this_engine_cannot_even_be_asked_for_is_refused_too(what):
    refusals.check_config(plain_config(), KVPolicyConfig.parse(H2O))
    with pytest.raises(KVPolicyError) as refused:
        refusals.check_config(plain_config(**NOT_ON_A_CPU[what]), KVPolicyConfig.parse(H2O))
    message = str(refused.value)
    assert what in message and ("leave" in message or "set --" in message or "unset " in message)


@pytest.mark.parametrize("backend", [None, *SERVED])
def test_a_gpu_may_have_what_vllm_chooses(backend, monkeypatch):
    """What that is, only layers say; batch-invariant kernels, and ROCm's, are none of ours."""
    served = plain_config(device_config__device_type="cuda", attention_config__backend=backend)
    refusals.check_config(served, KVPolicyConfig.parse(H2O))
    monkeypatch.setattr(refusals.envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    refusals.check_config(plain_config(), KVPolicyConfig.parse(H2O))
    with pytest.raises(KVPolicyError, match="VLLM_BATCH_INVARIANT.*: unset it"):
        refusals.check_config(served, KVPolicyConfig.parse(H2O))
    monkeypatch.setattr(refusals, "current_platform", SimpleNamespace(is_rocm=lambda: True))
    with pytest.raises(KVPolicyError, match="vLLM's rocm engine"):
        refusals.check_config(served, KVPolicyConfig.parse(H2O))


def test_the_rust_front_end_is_refused(tiny, monkeypatch):
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(KVPolicyError, match="Rust front end.*: unset VLLM_USE_RUST_FRONTEND$"):
        engine_config(tiny)
    assert engine_config(tiny, None).scheduler_config.scheduler_cls is None


RUN_ON = "policies run on CPU_ATTN, and on a GPU on FLASH_ATTN, FLASHINFER and TRITON_ATTN (tested without a GPU only)"
PER_KIND = "--attention-config.backend_per_kind.full_attention"


@pytest.mark.parametrize(
    "setting, arguments",
    {
        "--attention-backend": dict(attention_backend="FLEX_ATTENTION"),
        "--attention-backend ": dict(attention_config={"backend": "flex_attention"}),
        PER_KIND: dict(attention_config={"backend_per_kind": {"full_attention": "FLEX_ATTENTION"}}),
        f"{PER_KIND} ": dict(
            attention_config={"backend": "TRITON_ATTN", "backend_per_kind": {"full_attention": "FLEX_ATTENTION"}}
        ),
    }.items(),
)
def test_a_backend_named_by_somebody_is_refused_before_anything_is_loaded(tiny, setting, arguments):
    with pytest.raises(KVPolicyError) as refused:
        engine_config(tiny, **arguments)
    assert str(refused.value) == (
        f"KV policy 'h2o' can't be used with the attention backend FLEX_ATTENTION: {RUN_ON}; set {setting.strip()} to one of "
        "these, or leave --kv-policy out"
    )
    engine_config(tiny, None, **arguments)


@pytest.mark.parametrize(
    "attention",
    [
        {"backend": "CPU_ATTN"},
        {"backend": "auto"},
        {"backend": "FLASH_ATTN"},
        {"backend": "FLASHINFER"},
        {"backend": "FLEX_ATTENTION", "backend_per_kind": {"full_attention": "TRITON_ATTN"}},
        {"backend_per_kind": {"sliding_window": "FLEX_ATTENTION"}},
    ],
)
def test_backends_that_plain_layers_may_have_can_be_named(tiny, attention):
    assert engine_config(tiny, attention_config=attention).scheduler_config.scheduler_cls


def test_every_entry_refuses_on_its_own(monkeypatch):
    """No entry of the list hides behind another: each is looked at, and each names what to do."""
    entries = refusals._settings(plain_config(), KVPolicyConfig.parse(H2O))
    assert len(entries) > 12 and not any(refused for refused, *_ in entries)
    for index, (_, what, instead) in enumerate(entries):
        alone = [(i == index, *entry[1:]) for i, entry in enumerate(entries)]
        monkeypatch.setattr(refusals, "_settings", lambda *_, alone=alone: alone)
        with pytest.raises(KVPolicyError) as refused:
            refusals.check_config(None, KVPolicyConfig.parse(H2O))
        assert what in str(refused.value) and instead in str(refused.value)


def test_a_policy_without_scores_may_have_any_kv_dtype(tiny):
    assert engine_config(tiny, UNMEASURED, kv_cache_dtype="fp8_e5m2").scheduler_config.scheduler_cls
    with pytest.raises(KVPolicyError, match='"allow": \\[\\]'):
        engine_config(tiny, {"name": "sink-window", "budget": 512}, kv_cache_dtype="fp8_e5m2")


@pytest.mark.parametrize("backend", [None, *SERVED])
def test_a_gpu_may_keep_fp8_with_one_scale_for_a_layer(backend):
    """Which backend there will be, layers say; other kinds of quantised caches, and layers that differ, are refused."""

    def check(name, policy=H2O, skipped=()):
        config = plain_config(
            device_config__device_type="cuda",
            attention_config__backend=backend,
            cache_config__cache_dtype=name,
            cache_config__kv_cache_dtype_skip_layers=list(skipped),
        )
        refusals.check_config(config, KVPolicyConfig.parse(policy))

    for name in ("auto", "bfloat16", "fp8", "fp8_e4m3"):
        check(name)
    for name in ("fp8_e5m2", "fp8_inc", "fp8_per_token_head", "int8_per_token_head", "nvfp4", "turboquant_k8v4"):
        with pytest.raises(KVPolicyError, match=rf"'{name}'.* cuda engine: use --kv-cache-dtype auto or fp8 \("):
            check(name)
        check(name, UNMEASURED)
    check("fp8", skipped=["sliding_window"])
    check("fp8", UNMEASURED, ["0"])
    with pytest.raises(KVPolicyError, match="differ between layers: leave --kv-cache-dtype-skip-layers out"):
        check("fp8", skipped=["0", "sliding_window"])


@pytest.mark.parametrize("capability, served", [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_kernels_read_fp8_from_ada_on(monkeypatch, capability, served):
    """Triton compiles none that do for Ampere; nobody's kernel reads it for policies without scores but vLLM's."""
    platform = SimpleNamespace(is_rocm=lambda: False, get_device_capability=lambda: DeviceCapability(*capability))
    monkeypatch.setattr(refusals, "current_platform", platform)
    config = plain_config(device_config__device_type="cuda", cache_config__cache_dtype="fp8")
    for policy in (H2O, {"name": "duo", "pattern": ["10"]}):
        with nullcontext() if served else pytest.raises(KVPolicyError, match=r"'fp8' on a GPU of .* 8\.0: .* 8\.9"):
            refusals.check_config(config, KVPolicyConfig.parse(policy))
    refusals.check_config(config, KVPolicyConfig.parse(UNMEASURED))


@pytest.mark.parametrize(
    "policy, served", [(H2O, False), ({"name": "duo", "pattern": ["10"]}, False), (UNMEASURED, True)]
)
def test_kernels_are_for_ampere_and_newer(monkeypatch, policy, served):
    platform = SimpleNamespace(is_rocm=lambda: False, get_device_capability=lambda: DeviceCapability(7, 5))
    monkeypatch.setattr(refusals, "current_platform", platform)
    config = plain_config(device_config__device_type="cuda")
    with nullcontext() if served else pytest.raises(KVPolicyError, match=r"a GPU of compute capability 7\.5: .* 8\.0"):
        refusals.check_config(config, KVPolicyConfig.parse(policy))


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "0.33.0rc1", "1.0"])
def test_another_vllm_is_refused_with_what_to_install(tiny, monkeypatch, version):
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(KVPolicyError) as refused:
        engine_config(tiny)
    message = str(refused.value)
    assert version in message and "vllm==0.32.0" in message and "leave --kv-policy out" in message
    assert engine_config(tiny, None).scheduler_config.scheduler_cls is None


def test_a_budget_too_small_for_the_blocks_is_refused_at_start(tiny):
    with pytest.raises(KVPolicyError, match="budget 512 is too small for blocks of 512"):
        engine_config(tiny, block_size=512)


def test_an_instruction_that_the_model_does_not_know_is_refused_at_start(tiny):
    """The engine would end with the first prompt that is repeated."""
    policy = {"name": "kvzip", "budget": 512, "instruction": [7, 255]}
    assert engine_config(tiny, policy).scheduler_config.scheduler_cls
    with pytest.raises(KVPolicyError, match="instruction: 256 is no token of the model, whose ids are below 256"):
        engine_config(tiny, {**policy, "instruction": [7, 256]})


@pytest.mark.parametrize("additional", ["[1]", 5])
def test_a_policy_needs_an_additional_config_that_can_carry_it(tiny, additional):
    with pytest.raises(KVPolicyError, match="additional_config got .*; expected a dict"):
        engine_config(tiny, additional_config=additional)


def test_two_policies_that_differ_are_refused(tiny):
    with pytest.raises(KVPolicyError, match="two different KV policies"):
        engine_config(tiny, "h2o", additional_config={"kv_policy": "sink-window"})
    same = engine_config(tiny, "h2o", additional_config={"kv_policy": {"name": "h2o"}, "mine": 1})
    assert same.additional_config["mine"] == 1 and same.additional_config["kv_policy"]["name"] == "h2o"


@pytest.mark.parametrize("policy", [{"name": "h3o"}, {"name": "h2o", "budget": -1}, "missing.yaml", 3])
def test_a_policy_that_is_none_is_refused_by_every_way_in(tiny, policy):
    with pytest.raises(KVPolicyError):
        engine_config(tiny, policy)
    with pytest.raises(KVPolicyError):
        engine_config(tiny, None, additional_config={"kv_policy": policy})


# --- layers ----------------------------------------------------------------------------------------------------------


def layer(backend="CPU_ATTN", **impl):
    return SimpleNamespace(
        impl=SimpleNamespace(**impl),
        attn_backend=SimpleNamespace(get_name=lambda: backend),
        sliding_window=None,
        kv_sharing_target_layer_name=None,
    )


@pytest.mark.parametrize(
    "impl, what",
    [
        (dict(alibi_slopes=[0.5]), "ALiBi"),
        (dict(logits_soft_cap=50.0), "soft cap"),
        (dict(sinks=[0.1]), "learned attention sinks"),
    ],
)
def test_attention_that_the_score_pass_does_not_know_is_refused_by_layer(impl, what):
    with pytest.raises(KVPolicyError) as refused:
        refusals.check_layer("model.layers.3.attn", layer(**impl), KVPolicyConfig.parse(H2O))
    message = str(refused.value)
    assert "model.layers.3.attn" in message and what in message and '"allow": []' in message
    refusals.check_layer("model.layers.3.attn", layer(**impl), KVPolicyConfig.parse(UNMEASURED))


@pytest.mark.parametrize(
    "impl", [{}, dict(logits_soft_cap=0), dict(logits_soft_cap=0.0, alibi_slopes=None, sinks=None)]
)
def test_plain_attention_is_served(impl):
    refusals.check_layer("attn", layer(**impl), KVPolicyConfig.parse(H2O))


def test_layers_of_unknown_backends_are_refused():
    policy = KVPolicyConfig.parse(UNMEASURED)
    for backend in ("TRITON_FLASHINFER", "FLEX_ATTENTION", "FLASH_ATTN_DIFFKV"):
        with pytest.raises(KVPolicyError) as refused:
            refusals.check_layer("layer.7", layer(backend), policy)
        assert str(refused.value) == (
            f"KV policy 'sink-window' can't be used with the attention backend {backend}, which layer.7 has: {RUN_ON}; "
            "set --attention-backend to one of these, or leave --kv-policy out"
        )
    for backend in ("CPU_ATTN", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"):
        refusals.check_layer("layer.7", layer(backend), policy)


def test_layers_that_share_a_cache_are_refused():
    """With windows or without: nobody's table may change under them."""
    shares = layer()
    shares.kv_sharing_target_layer_name = "layer.1"
    with pytest.raises(KVPolicyError, match=r"^layer.7 shares the cache of layer.1: leave --kv-policy out$"):
        refusals.check_cache("layer.7", shares)
    refusals.check_cache("layer.7", layer())


def test_caches_of_several_shapes_are_refused():
    policy = KVPolicyConfig.parse(H2O)
    refusals.check_pages(policy, {32}, {4096})
    for sizes, pages in (({32, 64}, {4096}), ({32}, {4096, 8192})):
        with pytest.raises(KVPolicyError, match="with and without sliding windows whose caches differ") as refused:
            refusals.check_pages(policy, sizes, pages)
        assert "leave --kv-policy out" in str(refused.value)


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
            refusals.check_config(plain, config)
            refusals.check_layer("layer.7", layer(named), config)
            continue
        why = "plans for all heads of a layer, and this policy splits them; set --attention-backend " + instead
        for where, check in {
            "": lambda: refusals.check_config(plain, config),
            ", which layer.7 has": lambda: refusals.check_layer("layer.7", layer(named), config),
        }.items():
            with pytest.raises(KVPolicyError) as refused:
                check()
            what = f"KV policy {name!r} can't be used with the attention backend FLASHINFER{where}"
            assert str(refused.value) == f"{what}: it {why}"
    per_kind = {"full_attention": AttentionBackendEnum.FLASHINFER}
    plain = plain_config(device_config__device_type="cuda", attention_config__backend_per_kind=per_kind)
    with pytest.raises(KVPolicyError, match=f"set {PER_KIND} {instead}"):
        refusals.check_config(plain, config)


def kv_cache_of_one_group():
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["layer.2"])])


def test_key_layouts_that_the_score_pass_cannot_read_are_refused(monkeypatch):
    plain = {"alibi_slopes": None, "logits_soft_cap": 0, "sinks": None, "is_fp8_kv_cache": False, "head_size": 64}
    backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
    cpu_layer = SimpleNamespace(isa="neon", impl=SimpleNamespace(**plain), attn_backend=backend, kv_cache_dtype="fp8")
    cpu_layer.sliding_window = None
    found = {"layer.2": cpu_layer}
    monkeypatch.setattr(layers, "get_layers_from_vllm_config", lambda *_: found)
    group = SimpleNamespace(decodes=None)
    runtime, given = EvictionRuntime([group], ops_for("CPU_ATTN"), names=[["layer.2"]]), kv_cache_of_one_group()
    with pytest.raises(KVPolicyError, match=r"layer.2 packs its keys for 'neon'.*vec.*sink-window"):
        layers.settle(None, KVPolicyConfig.parse(H2O), runtime, given)
    layers.settle(None, KVPolicyConfig.parse(UNMEASURED), runtime, given)
    assert group.decodes is False
    found["layer.2"].isa = "vec"
    layers.settle(None, KVPolicyConfig.parse(H2O), runtime, given)
    assert group.decodes is (kernel_path() not in ("torch reference", "portable"))
    for field, value in {
        "alibi_slopes": [1.0],
        "logits_soft_cap": 30.0,
        "is_fp8_kv_cache": True,
        "head_size": 72,
    }.items():
        found["layer.2"].impl = SimpleNamespace(**{**plain, field: value})
        layers.settle(None, KVPolicyConfig.parse(UNMEASURED), runtime, given)
        assert group.decodes is False
    found["layer.2"].impl = SimpleNamespace(**{**plain, "is_fp8_kv_cache": True})
    with pytest.raises(KVPolicyError, match=r"layer.2 keeps its keys as fp8.*on a CPU.*sink-window"):
        layers.settle(None, KVPolicyConfig.parse(H2O), runtime, given)


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
    found.sliding_window = None
    monkeypatch.setattr(layers, "get_layers_from_vllm_config", lambda *_: {"layer.2": found})
    group = SimpleNamespace(decodes=None)
    runtime, given = EvictionRuntime([group], ops_for(name), names=[["layer.2"]]), kv_cache_of_one_group()

    def settle(policy, dtype=torch.bfloat16, named="auto", **changed):
        found.impl, found.kv_cache_torch_dtype = SimpleNamespace(**{**plain, **changed}), dtype
        found.kv_cache_dtype = named
        layers.settle(None, KVPolicyConfig.parse(policy), runtime, given)
        return group.decodes

    assert settle(H2O)
    with pytest.raises(KVPolicyError, match=r"layer.2 keeps its keys as float16.*sink-window"):
        settle(H2O, torch.float16, "float16")
    for size in (8, 512):
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
    for changed in ({"alibi_slopes": [1.0]}, {"logits_soft_cap": 30.0}, {"sinks": [1.0]}, other):
        assert not settle(UNMEASURED, **changed)
    monkeypatch.setenv("VLLM_EVICT_DECODE", "stock")
    assert not settle(H2O)


WHO = {
    ("CPU_ATTN", False): ("requests with holes", "requests with holes"),
    ("FLASH_ATTN", False): ("measured requests", ""),
    ("FLASHINFER", False): ("measured requests", ""),
    ("FLASH_ATTN", True): ("requests with holes and measured requests", "requests with holes"),
}


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("backend, split", WHO)
def test_the_log_says_which_kernels_attend_and_measure(monkeypatch, backend, split, measured, decodes):
    found = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: backend), sliding_window=None)
    monkeypatch.setattr(layers, "get_layers_from_vllm_config", lambda *_: {"layer.2": found})
    ops, group = ops_for(backend), SimpleNamespace(decodes=decodes, graph_tokens=4096)
    policy = KVPolicyConfig.parse(H2O if measured else UNMEASURED)

    def line(mode, in_graphs=False):
        config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))
        return layers.described(config, policy, EvictionRuntime([group], ops, ["pages"] * split, in_graphs))

    told, own = line(CUDAGraphMode.NONE), WHO[backend, split][not measured] if decodes else ""
    assert f"{backend}'s own kernel" in told and "graphs" not in told
    assert (f"the plugin's kernel decodes {own}" in told) == bool(own)
    assert ("attends to all requests" in told) != bool(own)
    assert ("output and mass in one read" in told) == (bool(own) and measured)
    assert (f"mass comes from {ops.beside}" in told) == measured
    assert line(CUDAGraphMode.PIECEWISE) == told
    replayed = "; decodes replay full CUDA graphs"
    assert (
        line(CUDAGraphMode.FULL_AND_PIECEWISE) == told + replayed + ", except decodes of measured requests" * measured
    )
    longest = ", of measured requests up to 4096 resident tokens" * measured
    assert line(CUDAGraphMode.FULL_AND_PIECEWISE, True) == told + replayed + longest


@pytest.mark.parametrize("kernel", ["triton", "cuda", "stock", None])
@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("backend", ["CPU_ATTN", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"])
def test_a_decode_kernel_that_is_not_run_is_one_line_that_says_what_is(monkeypatch, backend, decodes, kernel):
    found = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: backend), sliding_window=None)
    monkeypatch.setattr(layers, "get_layers_from_vllm_config", lambda *_: {"layer.2": found})
    runtime = SimpleNamespace(groups=[SimpleNamespace(decodes=decodes)])
    monkeypatch.delenv("VLLM_EVICT_DECODE", raising=False)
    if kernel is not None:
        monkeypatch.setenv("VLLM_EVICT_DECODE", kernel)
    line = layers.ignored_settings(None, runtime)
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
    instead = "the plugin's kernel in C++ decodes" if own else "CPU_ATTN's own kernel decodes"
    said = [line for line in lines if line.startswith("VLLM_EVICT_DECODE")]
    line = "VLLM_EVICT_DECODE=cuda has no effect behind CPU_ATTN: it names a kernel for GPU backends"
    assert said == ([] if kernel is None else [f"{line}; {instead} requests with holes"])


def test_a_decode_kernel_that_is_none_is_refused_before_anything_is_loaded(tiny, monkeypatch):
    monkeypatch.setenv("VLLM_EVICT_DECODE", "cutlass")
    with pytest.raises(KVPolicyError, match="VLLM_EVICT_DECODE got 'cutlass'; expected stock, triton or cuda"):
        engine_config(tiny)
    engine_config(tiny, None)


def test_a_model_with_alibi_is_refused_when_it_is_loaded(engine, tmp_path):
    """Nothing in the configuration says so; its layers do."""
    model = with_config(tmp_path, architectures=["BloomForCausalLM"], model_type="bloom", num_attention_heads=2)
    with pytest.raises(KVPolicyError, match="ALiBi slopes"):
        engine(H2O, model, load_format="dummy")
    server = engine(UNMEASURED, model, load_format="dummy")
    assert server.generate([list(range(200)) * 4], max_tokens=4)[0].kv_usage.evicted_blocks > 0


def test_blocks_that_the_backend_does_not_have_are_refused(engine):
    with pytest.raises(ValueError, match=r"(?i)block.size"):
        engine({**H2O, "budget": 160, "sink": 16}, block_size=16)
