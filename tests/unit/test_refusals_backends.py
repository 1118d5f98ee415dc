"""Attention backends, devices and data types that policies do not run on are refused by name."""

from types import SimpleNamespace

import pytest
import torch
from test_refusals import H2O, UNMEASURED, RayDistributedExecutor, engine_config, refusal, with_config
from transformers import AutoConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_evict.compute.attention.fp8 import CPU_FP8_NAMES
from vllm_evict.config import KVPolicyConfig, KVPolicyError
from vllm_evict.integration.start.capabilities import environments, refuse, server


def plain_config(**changes):
    """Return the parts of a configuration that `check_config` looks at, of an engine that can be served."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(),
            architectures=["LlamaForCausalLM"],
            runner_type="generate",
            use_mla=False,
            is_hybrid=False,
            is_attention_free=False,
            is_encoder_decoder=False,
            is_mm_prefix_lm=False,
            is_diffusion=False,
            rswa_window=None,
            has_noops=False,
            uses_alibi=False,
            uses_mrope=False,
            is_moe=False,
            max_model_len=2048,
            model_arch_config=SimpleNamespace(),
            get_sliding_window=lambda: None,
            get_head_size=lambda: 64,
            dtype=torch.bfloat16,
            get_total_num_hidden_layers=lambda: 2,
            get_total_num_kv_heads=lambda: 2,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
            use_ubatching=False,
            data_parallel_size=2,
            data_parallel_size_local=1,
            tensor_parallel_size=1,
            distributed_executor_backend="mp",
        ),
        cache_config=SimpleNamespace(
            kv_sharing_fast_prefill=False,
            cache_dtype="auto",
            kv_cache_dtype_skip_layers=[],
            sliding_window=None,
            enable_prefix_caching=True,
            block_size=16,
        ),
        scheduler_config=SimpleNamespace(
            scheduler_cls=None,
            disable_hybrid_kv_cache_manager=False,
            async_scheduling=False,
            long_prefill_token_threshold=0,
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        attention_config=SimpleNamespace(backend=None, backend_per_kind={}),
        speculative_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        lora_config=None,
        use_v2_model_runner=False,
        max_concurrent_batches=1,
    )
    for path, value in changes.items():
        part, field = path.split("__")
        setattr(getattr(config, part), field, value)
    return config


#: Backends of a GPU that policies run on.
SERVED = [AttentionBackendEnum[name] for name in ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")]


def test_rays_older_executor_is_refused():
    """It runs steps past the worker."""
    own = plain_config(parallel_config__distributed_executor_backend=type("Own", (RayDistributedExecutor,), {}))
    message = refusal(refuse.check_config, own, KVPolicyConfig.parse(H2O))
    assert (
        "vLLM's older Ray executor, which runs steps past the worker: unset VLLM_USE_RAY_V2_EXECUTOR_BACKEND" in message
    )


def test_the_way_out_of_drafts_on_model_runner_v2_before_they_are_served_there(monkeypatch):
    monkeypatch.setattr("vllm_evict.integration.start.versions.serves_on_v2", lambda: False)
    served = plain_config()
    served.use_v2_model_runner = True
    served.speculative_config = drafts = SimpleNamespace(
        method="ngram", num_speculative_tokens=3, parallel_drafting=False
    )
    with pytest.raises(KVPolicyError, match="by 'ngram' on Model Runner V2.*: set VLLM_USE_V2_MODEL_RUNNER=0, or"):
        refuse.check_config(served, KVPolicyConfig.parse(H2O))
    drafts.method = "ngram_gpu"  # which V1 does not serve
    with pytest.raises(KVPolicyError, match="on Model Runner V2.*: leave --speculative-config out, or leave --kv"):
        refuse.check_config(served, KVPolicyConfig.parse(H2O))


@pytest.mark.parametrize("backend", [None, *SERVED])
def test_a_gpu_may_have_what_vllm_chooses(backend, monkeypatch):
    """Only layers say which backend it is; batch-invariant kernels, and ROCm's, are none of ours."""
    served = plain_config(device_config__device_type="cuda", attention_config__backend=backend)
    refuse.check_config(served, KVPolicyConfig.parse(H2O))
    monkeypatch.setattr(environments.envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    refuse.check_config(plain_config(), KVPolicyConfig.parse(H2O))
    with pytest.raises(KVPolicyError, match="VLLM_BATCH_INVARIANT.*: unset it"):
        refuse.check_config(served, KVPolicyConfig.parse(H2O))
    monkeypatch.setattr(server, "current_platform", SimpleNamespace(is_rocm=lambda: True))
    with pytest.raises(KVPolicyError, match="vLLM's rocm engine"):
        refuse.check_config(served, KVPolicyConfig.parse(H2O))


def test_the_rust_front_end_is_refused(tiny, monkeypatch):
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(
        KVPolicyError, match="Rust front end.*: unset VLLM_USE_RUST_FRONTEND, or leave --kv-policy out$"
    ):
        engine_config(tiny)
    assert engine_config(tiny, None).scheduler_config.scheduler_cls is None


RUN_ON = (
    "on which policies run: CPU_ATTN, and on a GPU FLASH_ATTN, FLASHINFER and TRITON_ATTN, or leave --kv-policy out"
)
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
    assert refusal(engine_config, tiny, **arguments) == (
        f"KV policy 'h2o' can't be used with the attention backend FLEX_ATTENTION: set {setting.strip()} to one "
        f"{RUN_ON}"
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


def test_a_policy_without_scores_may_have_any_kv_dtype(tiny):
    for policy in (UNMEASURED, {"name": "sink-window", "budget": 512}):
        assert engine_config(tiny, policy, kv_cache_dtype="fp8_inc").scheduler_config.scheduler_cls
    with pytest.raises(KVPolicyError, match='or use a policy without scores.*leave others out of "allow"'):
        engine_config(tiny, {"name": "sink-window", "allow": ["h2o"]}, kv_cache_dtype="fp8_inc")


@pytest.mark.parametrize("name", CPU_FP8_NAMES)
def test_policies_with_scores_may_have_fp8_on_a_cpu(tiny, name):
    assert engine_config(tiny, H2O, kv_cache_dtype=name).scheduler_config.scheduler_cls


CUDA = {"device_config__device_type": "cuda"}
#: What keeps policies that score from a server -> changes of `plain_config`.
UNSCORED = {
    "KV cache dtype 'nvfp4'": {**CUDA, "cache_config__cache_dtype": "nvfp4"},
    "KV cache dtypes that differ between layers": {**CUDA, "cache_config__kv_cache_dtype_skip_layers": ["0"]},
    "heads of 528 dimensions": {**CUDA, "model_config__hf_text_config": SimpleNamespace(global_head_dim=528)},
    "heads of 8 dimensions": {**CUDA, "model_config__get_head_size": lambda: 8},
}


@pytest.mark.parametrize("what", UNSCORED)
def test_what_nobody_asked_for_refuses_no_server(monkeypatch, what):
    """A server whose requests might pick what cannot run leaves it out, and says so in one line."""
    lines = []
    monkeypatch.setattr(refuse.logger, "info", lambda words, *values: lines.append(words % values))
    plain, scored = plain_config(**UNSCORED[what]), {"h2o", "tova", "snapkv", "rkv", "scissorhands"}
    for name in ("sink-window", "strided", "full"):
        policy = KVPolicyConfig.parse(name)
        served = refuse.check_config(plain, policy)
        (line,), lines[:] = list(lines), []
        assert served.allowed >= {"full", "sink-window", "strided"} and not served.allowed & scored
        assert line.startswith(f"KV policy {name}: requests may not pick h2o, ") and what in line
        assert KVPolicyConfig.parse(served.to_dict()).allowed == served.allowed
        with pytest.raises(KVPolicyError, match="kv_policy 'h2o' is not enabled here"):
            served.for_request({"kv_policy": "h2o"}, 1000, 32)
    # What was asked for is refused by name.
    for policy in ("h2o", {"name": "sink-window", "allow": ["h2o"]}, {"name": "full", "allow": ["tova", "random"]}):
        with pytest.raises(KVPolicyError, match=what):
            refuse.check_config(plain, KVPolicyConfig.parse(policy))
    assert not lines


def test_gemma_4s_full_attention_has_heads_that_no_kernel_decodes_on_a_gpu():
    """The configuration of another layer has 256 dimensions. Policies for whole layers start; on a CPU others do too."""
    kinds = ["sliding_attention", "full_attention"]
    text = AutoConfig.for_model("gemma4_text", num_hidden_layers=2, layer_types=kinds)
    plain = {"model_config__hf_text_config": text, "model_config__get_head_size": lambda: 256}
    policy = KVPolicyConfig.parse("h2o")
    assert refuse.check_config(plain_config(**plain, **CUDA), policy) is policy
    with pytest.raises(KVPolicyError, match="heads of 512 dimensions, .* while the plugin's kernels decode 16 to 256"):
        refuse.check_config(plain_config(**plain, **CUDA), KVPolicyConfig.parse({"name": "duo", "pattern": ["10"]}))


def test_a_server_that_can_run_all_policies_leaves_the_default_alone():
    for policy in ("sink-window", "h2o", "full", "h2o-pressure", {"name": "h2o", "allow": ["tova"]}):
        config = KVPolicyConfig.parse(policy)
        assert refuse.check_config(plain_config(), config) is config


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
        refuse.check_config(config, KVPolicyConfig.parse(policy))

    for name in ("auto", "bfloat16", "fp8", "fp8_e4m3"):
        check(name)
    for name in (
        "float16",
        "fp8_e5m2",
        "fp8_inc",
        "fp8_per_token_head",
        "int8_per_token_head",
        "nvfp4",
    ):
        with pytest.raises(KVPolicyError, match=rf"'{name}'.* cuda engine: use --kv-cache-dtype auto or fp8 \("):
            check(name)
        check(name, UNMEASURED)
    for policy in ({"name": "h2o"}, UNMEASURED):  # vLLM names the layers that it leaves as they are
        with pytest.raises(
            KVPolicyError, match=r"'turboquant_k8v4', which no backend .*: use --kv-cache-dtype auto or"
        ) as said:
            check("turboquant_k8v4", policy, ["0"])
        assert "skip-layers" not in str(said.value)
    check("fp8", skipped=["sliding_window"])
    check("fp8", UNMEASURED, ["0"])
    with pytest.raises(KVPolicyError, match="differ between layers: leave --kv-cache-dtype-skip-layers out"):
        check("fp8", skipped=["0", "sliding_window"])


#: Parts of config.json by which checkpoints bring the dtype of their KV cache: resolved by vLLM's configuration, or
#: by its layers.
SCHEME = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor", "symmetric": True}
BRINGING = {
    "by the configuration": {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": SCHEME},
    "by an older name": {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    "by layers": {
        **dict(quant_method="compressed-tensors", format="dense", config_groups={}, ignore=[]),
        "kv_cache_scheme": SCHEME,
    },
}


@pytest.mark.parametrize("brought", BRINGING)
@pytest.mark.parametrize("dtype, instead", {"bfloat16": "", "float32": "--dtype bfloat16 "}.items())
def test_a_dtype_that_a_checkpoint_brings_is_refused_with_one_that_works(
    tmp_path, monkeypatch, brought, dtype, instead
):
    """`auto` stands for it, before anything is loaded; and vLLM has no name for a cache in float32. Of a platform whose
    kernels read no fp8."""
    if dtype == "float32" and brought != "by layers":
        pytest.skip("vLLM takes such checkpoints in half precision alone")
    model = with_config(tmp_path, quantization_config=BRINGING[brought])
    assert engine_config(model, dtype=dtype).scheduler_config.scheduler_cls
    monkeypatch.setitem(server.READ_DTYPES, "cpu", ("auto", "float16", "bfloat16"))
    for given in ("auto", "fp8"):
        message = refusal(engine_config, model, dtype=dtype, kv_cache_dtype=given)
        assert (
            "which the plugin can't read on vLLM's cpu engine: use " + instead + "--kv-cache-dtype bfloat16, or"
            in message
        )
    assert engine_config(model, dtype="bfloat16", kv_cache_dtype="bfloat16").scheduler_config.scheduler_cls
    assert engine_config(model, UNMEASURED, dtype=dtype).scheduler_config.scheduler_cls
