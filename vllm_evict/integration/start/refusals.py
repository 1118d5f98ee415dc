"""Refuses models and settings that the plugin does not serve, at start, by name, with the way around."""

from collections.abc import Collection
from typing import Any

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.executor.abstract import Executor

from ...compute.attention.ops import FP8_NAMES, LATENT, OPS, WHOLE_LAYERS
from ...config import KVPolicyConfig, KVPolicyError
from ...environment import decode_kernel
from . import advice, attending, combinations, speculation, windows

logger = init_logger("vllm.evict")

#: Attention backends that work behind a view, except those of MLA (`LATENT`).
BACKENDS = tuple(name for name in OPS if name not in LATENT)
#: Those of them that run on a GPU.
DEVICE_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
#: Attention backends of multi-head latent attention (MLA) that run on a GPU.
LATENT_DEVICE_BACKENDS = LATENT[2:]
#: Those of them whose kernels read blocks of a few sizes; the others read any multiple of 16, or do so on most GPUs.
FEW_SIZES = ("FLASHINFER",)
#: Device -> KV cache dtypes that its backends' ops read, beside the model's own.
SCORED_DTYPES = {
    "cpu": ("auto", "float16", "bfloat16"),
    "cuda": ("auto", *FP8_NAMES),
}
#: The least compute capability that the plugin's kernels were compiled for (GPUs before Ampere have too little shared
#: memory), and the least for which Triton compiles kernels that read float8_e4m3 (Ada).
LEAST_CAPABILITY, FP8_CAPABILITY = (8, 0), (8, 9)


class Refused(KVPolicyError):
    """What a policy cannot be used with. The first refusal is the message; `messages` has all of them."""

    def __init__(self, *messages: str) -> None:
        super().__init__(messages[0])
        self.messages = messages


def check_config(vllm_config: Any, config: KVPolicyConfig) -> KVPolicyConfig:
    """Refuse engines that a policy cannot run in.

    Returns:
        The configuration. If its user did not say what requests may pick, it lists the policies that can run here, and
        a line of the log names the others.

    Raises:
        Refused: naming each model or setting, and what to do instead.
    """
    decode_kernel()
    asked = config if config.allow is not None else config.replace(allow=())
    _refuse(config, _settings(vllm_config, asked))
    left_out: dict[str, list[str]] = {}
    for name in sorted(config.allowed) if config.allow is None else ():
        if (refusal := _first(vllm_config, config.replace(allow=(name,)))) is not None:
            left_out.setdefault(refusal[0], []).append(name)
    if not left_out:
        return config
    reasons = "; ".join(f"{', '.join(names)}, which can't be used with {what}" for what, names in left_out.items())
    logger.info("KV policy %s: requests may not pick %s", config.name, reasons)
    return config.replace(allow=tuple(sorted(config.allowed.difference(*left_out.values()))))


def _refuse(config: KVPolicyConfig, refusals: list[combinations.Refusal]) -> None:
    """Raise one error for all refusals that apply."""
    messages = [str(_refusal(config, what, instead)) for refused, what, instead in refusals if refused]
    if messages:
        raise Refused(*dict.fromkeys(messages))


def _first(vllm_config: Any, config: KVPolicyConfig) -> tuple[str, str] | None:
    """What the first refusal of a configuration names, and what to do instead; None if there is none."""
    return next(((what, instead) for refused, what, instead in _settings(vllm_config, config) if refused), None)


def _refusal(config: KVPolicyConfig, what: str, instead: str) -> KVPolicyError:
    return KVPolicyError(f"KV policy {config.name!r} can't be used with {what}: {instead}")


def _settings(vllm_config: Any, config: KVPolicyConfig) -> list[tuple[bool, str, str]]:
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    without = "leave --kv-policy out for this model"
    # ROCm calls its device cuda too, and one of its backends FLASH_ATTN.
    platform = "rocm" if current_platform.is_rocm() else vllm_config.device_config.device_type
    splits = len(config.classes) > 1
    dtype, reads = advice.cache_dtype(vllm_config), combinations.reads_keys(config)
    text = model.hf_text_config
    # The plugin's kernels compute scores, and decode split heads.
    has_kernels = platform == "cuda" and bool(config.statistics or splits)
    capability = tuple((current_platform.get_device_capability() if has_kernels else None) or FP8_CAPABILITY)
    fp8 = " or fp8 (fp8_e4m3)" if platform == "cuda" and capability >= FP8_CAPABILITY else ""
    gpu = f"a GPU of compute capability {'.'.join(map(str, capability))}"
    return [
        (
            platform not in ("cpu", "cuda"),
            f"vLLM's {platform} engine in this release",
            "it serves on vLLM's CPU and CUDA engines; leave --kv-policy out here",
        ),
        (
            platform == "cuda" and envs.VLLM_BATCH_INVARIANT,
            "VLLM_BATCH_INVARIANT, because the plugin's decode kernel splits keys by the size of the batch",
            "unset it, or leave --kv-policy out",
        ),
        (
            envs.VLLM_USE_RUST_FRONTEND,
            "vLLM's Rust front end, which does not check the fields of requests and has no metrics of eviction",
            "unset VLLM_USE_RUST_FRONTEND",
        ),
        (model.runner_type == "pooling", "pooling models", "they keep no cache between steps; leave --kv-policy out"),
        *combinations.sparse(text),
        *combinations.split(attending.kv_heads(model), config),
        *combinations.distances(config, "ALiBi" if model.uses_alibi else ""),
        *(combinations.latent(vllm_config, config) if model.use_mla else combinations.unlike(text)),
        (
            model.is_attention_free,
            "Mamba or linear attention in all layers, whose states do not grow",
            "there is nothing to evict; leave --kv-policy out for this model",
        ),
        *(combinations.beside_states(vllm_config, config) if model.is_hybrid else ()),
        (model.is_encoder_decoder, "encoder-decoder models", without),
        (
            model.is_mm_prefix_lm,
            "non-causal attention over images",
            "set --language-model-only, which serves text alone, or leave --kv-policy out for this model",
        ),
        (model.is_diffusion, "models with non-causal attention", without),
        (
            windows.bounds(getattr(text, "attention_chunk_size", None), vllm_config),
            "chunked-local attention layers, which recycle their blocks themselves",
            without,
        ),
        (
            config.context is not None and model.uses_mrope,
            "a context and rotary positions of several dimensions (M-RoPE), which count no tokens",
            "leave context out for this model",
        ),
        (model.rswa_window is not None, "layers that attend to their prompt and a sliding window", without),
        *(
            combinations.beside(vllm_config, config, combinations.WINDOWS, cache.sliding_window is None)
            if combinations.slides(vllm_config)
            else ()
        ),
        *_of_backend(vllm_config, config, platform),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "context parallelism",
            "set --decode-context-parallel-size 1 and --prefill-context-parallel-size 1",
        ),
        *combinations.stages(vllm_config, config),
        (parallel.use_ubatching, "dual-batch overlap or microbatches", "leave --enable-dbo and --ubatch-size out"),
        (
            parallel.data_parallel_size > 1 and parallel.distributed_executor_backend == "external_launcher",
            "data parallelism under an external launcher, where a rank without requests runs the model too",
            "leave data_parallel_size out, or serve with --data-parallel-size",
        ),
        (
            _past_the_worker(vllm_config),
            "vLLM's older Ray executor, which runs steps past the worker",
            "unset VLLM_USE_RAY_V2_EXECUTOR_BACKEND, or set it to 1",
        ),
        *speculation.refused(vllm_config, config),
        *combinations.connected(vllm_config, config),
        (vllm_config.ec_transfer_config is not None, "an encoder-cache connector", "leave --ec-transfer-config out"),
        (
            cache.kv_sharing_fast_prefill,
            "fast prefill over shared caches, where most queries of a prompt skip the layers that share, and count in "
            "no score",
            "leave --kv-sharing-fast-prefill out",
        ),
        (
            reads
            and dtype not in SCORED_DTYPES.get(platform, ("auto",))
            and not (dtype in advice.NAMED_DTYPES and advice.is_own_dtype(vllm_config)),
            f"KV cache dtype {dtype!r}, which the plugin can't read on vLLM's {platform} engine",
            f"use {advice.own_dtype(vllm_config)}{fp8}, or {combinations.UNREAD}",
        ),
        (
            capability < LEAST_CAPABILITY,
            gpu,
            f"kernels that score or split heads need 8.0 (Ampere) or newer; {combinations.UNSCORED}",
        ),
        (
            dtype in FP8_NAMES and capability < FP8_CAPABILITY,
            f"KV cache dtype {dtype!r} on {gpu}",
            f"Triton has its numbers from 8.9 on; use {advice.own_dtype(vllm_config)}",
        ),
        (
            reads and set(cache.kv_cache_dtype_skip_layers) - {"sliding_window"},
            "KV cache dtypes that differ between layers",
            "leave --kv-cache-dtype-skip-layers out",
        ),
        *combinations.heads(model, config, platform),
        (
            config.reconstructs and not cache.enable_prefix_caching,
            "prefix caching off while requests may use kvzip, which reconstructs prompts from it",
            "leave --no-enable-prefix-caching out, or kvzip",
        ),
        *combinations.tier(vllm_config, config, platform),
        *combinations.selection(vllm_config, config, platform),
        (
            vllm_config.scheduler_config.scheduler_cls is not None,
            "a scheduler class of your own",
            "leave --scheduler-cls out; eviction needs its own",
        ),
    ]


def _of_backend(vllm_config: Any, config: KVPolicyConfig, platform: str) -> list[combinations.Refusal]:
    """What is refused of the attention backend that is named for full attention or MLA.

    If none is named, vLLM chooses one, which may be asked for already. Else `check_layer` looks at the layers' own.
    """
    model, splits = vllm_config.model_config, len(config.classes) > 1
    backend, setting = named_backend(vllm_config.attention_config, model.use_mla)
    if backend is None and platform == "cuda" and (model.use_mla or model.is_hybrid or splits):
        backend = advice.chosen(vllm_config)
    what = f"the attention backend {backend}"
    if backend is None:
        return []
    if backend not in _backends(model.use_mla, platform):
        return [(True, what, _choose(vllm_config, model.use_mla, setting))]
    if platform != "cuda":
        return []
    if backend in WHOLE_LAYERS and splits:
        return [(True, what, _splitting(vllm_config, setting))]
    if backend in FEW_SIZES and model.is_hybrid:
        others = advice.either(advice.working(vllm_config, DEVICE_BACKENDS, advice.is_any))
        why = "beside states, as large as which vLLM makes blocks: its kernels read blocks of a few sizes"
        return [(True, f"{what} {why}", f"set {setting} to {others}")]
    return []


def _choose(vllm_config: Any, latent: bool, setting: str) -> str:
    """Advice: backends on which policies run, of which those of a GPU are the ones that run on this one."""
    on_gpu = list(LATENT_DEVICE_BACKENDS if latent else DEVICE_BACKENDS)
    on_gpu = on_gpu if vllm_config is None else advice.working(vllm_config, on_gpu)
    run = f"policies run MLA on {advice.all_of(LATENT[:2])}" if latent else "policies run on CPU_ATTN"
    return f"{run}, and on a GPU on {advice.all_of(on_gpu)}; set {setting} to one of these, or leave --kv-policy out"


def _splitting(vllm_config: Any, setting: str) -> str:
    """Advice: backends on which policies split heads."""
    backends = [backend for backend in DEVICE_BACKENDS if backend not in WHOLE_LAYERS]
    backends = backends if vllm_config is None else advice.working(vllm_config, backends)
    return f"it plans for all heads of a layer, and this policy splits them; set {setting} to {advice.either(backends)}"


def _past_the_worker(vllm_config: Any) -> bool:
    """Whether the executor calls the model runner itself, past the worker: vLLM 0.32 has one, 0.33 none."""
    executor = Executor.get_class(vllm_config)
    return any(base.__name__ == "RayDistributedExecutor" for base in executor.__mro__)


def _backends(latent: bool, platform: str) -> tuple[str, ...]:
    """Attention backends on which policies run."""
    if latent:
        return LATENT_DEVICE_BACKENDS if platform == "cuda" else LATENT
    return DEVICE_BACKENDS if platform == "cuda" else BACKENDS


def check_beside(vllm_config: Any, config: KVPolicyConfig, kind: combinations.Kind, others: bool) -> None:
    """Refuse policies and settings that do not work beside layers of a kind; `others`: whether some layers have full
    attention.

    Raises:
        KVPolicyError: naming the reason.
    """
    _refuse(config, combinations.beside(vllm_config, config, kind, others))


def check_blocks(config: KVPolicyConfig, block_sizes: Collection[int]) -> int:
    """Refuse models whose full attention layers differ in the sizes of their blocks.

    Args:
        block_sizes: tokens, of full attention layers, as vLLM will make them.

    Returns:
        The size of all blocks.

    Raises:
        KVPolicyError: naming the sizes.
    """
    if len(block_sizes) > 1:
        sizes = " and ".join(map(str, sorted(block_sizes)))
        raise _refusal(
            config, f"full attention layers in blocks of {sizes} tokens", "leave --kv-policy out for this model"
        )
    return next(iter(block_sizes))


def named_backend(attention_config: Any, latent: bool) -> tuple[str | None, str]:
    """The backend that the configuration names for full attention, or MLA, and the setting; None if vLLM chooses one.

    vLLM chooses when it makes the layers, which `check_layer` checks. Layers of other kinds may have any backend.
    """
    kind = "mla_attention" if latent else "full_attention"
    if (backend := attention_config.backend_per_kind.get(kind)) is not None:
        return backend.name, f"--attention-config.backend_per_kind.{kind}"
    return getattr(attention_config.backend, "name", None), "--attention-backend"


def check_layer(name: str, layer: Any, config: KVPolicyConfig, vllm_config: Any = None) -> None:
    """Refuse full attention layers whose blocks cannot be evicted or scored; `vllm_config`: for what is advised.

    Raises:
        KVPolicyError: naming the layer.
    """
    check_backend(layer.attn_backend.get_name(), f"which {name} has", config, vllm_config)
    _refuse(
        config,
        combinations.distances(
            config,
            f"ALiBi, which {name} has" if getattr(layer.impl, "alibi_slopes", None) is not None else "",
            f"chunks of positions, which {name} has" if getattr(layer.impl, "chunk_lookback", -1) >= 0 else "",
        ),
    )


def check_backend(backend: str, whose: str, config: KVPolicyConfig, vllm_config: Any = None) -> None:
    """Refuse attention backends on which the policy does not run; `whose`: where the backend was found.

    Raises:
        KVPolicyError: naming the backend.
    """
    what, setting = f"the attention backend {backend}, {whose}", "--attention-backend"
    if backend not in OPS:
        raise _refusal(config, what, _choose(vllm_config, "MLA" in backend, setting))
    if backend in WHOLE_LAYERS and len(config.classes) > 1:
        raise _refusal(config, what, _splitting(vllm_config, setting))


def check_sharing(config: KVPolicyConfig) -> None:
    """Refuse policies that do not work where layers read other layers' caches.

    Raises:
        KVPolicyError: naming what of the policy does not.
    """
    _refuse(config, combinations.sharing(config))


def check_alike(layers: dict[str, Any], heads: list[int]) -> None:
    """Refuse models whose heads can't be split, because layers differ or heads have values of their own.

    Args:
        layers: name -> layer.
        heads: KV heads of each layer on a rank, by the configuration.

    Raises:
        KVPolicyError: naming two layers, or what differs from the configuration.
    """
    found = [layer.num_kv_heads for layer in layers.values()]
    if found != heads:
        raise KVPolicyError(
            f"heads can't be split: the model has attention layers of {found} KV heads; expected {heads} by its "
            "configuration; use a policy for whole layers, such as h2o, snapkv or sink-window"
        )
    for name, layer in layers.items():
        for attribute, what in (("alibi_slopes", "ALiBi slopes"), ("sinks", "learned attention sinks")):
            if getattr(layer.impl, attribute, None) is not None:
                raise KVPolicyError(f"heads can't be split: {name} has {what} for each head; leave --kv-policy out")
        for child, weight in layer.state_dict().items():
            if weight.numel() > 1:
                raise KVPolicyError(f"heads can't be split: {name} has {weight.numel()} values in its {child}")
    first = next(iter(layers))
    alike = ("num_heads", "num_kv_heads", "head_size", "head_size_v", "kv_cache_dtype", "attn_backend")
    for name, layer in layers.items():
        for attribute in alike:
            if getattr(layer, attribute) != getattr(layers[first], attribute):
                raise KVPolicyError(f"heads can't be split: {name} and {first} differ in {attribute}")
