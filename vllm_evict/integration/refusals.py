"""Refuses models and settings that the plugin does not serve, at start, by name, with the way around."""

import os
from collections.abc import Collection
from typing import Any, NamedTuple

import vllm.envs as envs
from vllm.platforms import current_platform
from vllm.v1.executor.abstract import Executor

from ..compute.attention.ops import FP8_NAMES, LATENT, OPS, WHOLE_LAYERS
from ..config import KVPolicyConfig, KVPolicyError
from ..environment import decode_kernel
from ..policies import QUERIED, RUNNING
from . import connectors

#: Attention backends that work behind a view, except those of MLA (`LATENT`).
BACKENDS = tuple(name for name in OPS if name not in LATENT)
#: Those of them that run on a GPU.
DEVICE_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
#: Attention backends of multi-head latent attention (MLA) that run on a GPU.
LATENT_DEVICE_BACKENDS = LATENT[1:]
#: Device -> KV cache dtypes that its backends' ops read.
SCORED_DTYPES = {
    "cpu": ("auto", "float16", "bfloat16", "float32"),
    "cuda": ("auto", "float16", "bfloat16", "float32", *FP8_NAMES),
}
#: Methods of speculative decoding whose drafters have no layers.
DRAFTERS = ("ngram", "suffix")
#: The least compute capability that the plugin's kernels were compiled for (GPUs before Ampere have too little shared
#: memory), and the least for which Triton compiles kernels that read float8_e4m3 (Ada).
LEAST_CAPABILITY, FP8_CAPABILITY = (8, 0), (8, 9)
_CHOOSE = (
    f"policies run on CPU_ATTN, and on a GPU on {', '.join(DEVICE_BACKENDS[:-1])} and {DEVICE_BACKENDS[-1]} (tested "
    "without a GPU only); set {setting} to one of these, or leave --kv-policy out"
)
_CHOOSE_LATENT = (
    f"policies run MLA on {', '.join(LATENT)} (those of a GPU tested without one); set {{setting}} to one of these, or "
    "leave --kv-policy out"
)
_WHOLE = (
    "it plans for all heads of a layer, and this policy splits them; set {setting} to "
    f"{' or '.join(backend for backend in DEVICE_BACKENDS if backend not in WHOLE_LAYERS)}"
)


def check_config(vllm_config: Any, config: KVPolicyConfig) -> None:
    """Refuse engines that a policy cannot run in.

    Raises:
        KVPolicyError: naming the model or setting, and what to do instead.
    """
    decode_kernel()
    for refused, what, instead in _settings(vllm_config, config):
        if refused:
            raise _refusal(config, what, instead)


def _refusal(config: KVPolicyConfig, what: str, instead: str) -> KVPolicyError:
    return KVPolicyError(f"KV policy {config.name!r} can't be used with {what}: {instead}")


def _settings(vllm_config: Any, config: KVPolicyConfig) -> list[tuple[bool, str, str]]:
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    without = "leave --kv-policy out for this model"
    # ROCm calls its device cuda too, and one of its backends FLASH_ATTN.
    platform = "rocm" if current_platform.is_rocm() else vllm_config.device_config.device_type
    backend, setting = _named_backend(vllm_config.attention_config, model.use_mla)
    text = model.hf_text_config
    fp8 = " or fp8 (fp8_e4m3)" if platform == "cuda" else ""
    # The plugin's kernels compute scores, and decode split heads.
    has_kernels = platform == "cuda" and bool(config.statistics or len(config.classes) > 1)
    capability = tuple((current_platform.get_device_capability() if has_kernels else None) or FP8_CAPABILITY)
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
        *_sparse(text),
        *(_latent(vllm_config, config, platform) if model.use_mla else ()),
        (
            model.is_attention_free,
            "Mamba or linear attention in all layers, whose states do not grow",
            "there is nothing to evict; leave --kv-policy out for this model",
        ),
        *(_beside_states(vllm_config, config) if model.is_hybrid else ()),
        (model.is_encoder_decoder, "encoder-decoder models", without),
        (
            model.is_mm_prefix_lm,
            "non-causal attention over images",
            "set --language-model-only, which serves text alone, or leave --kv-policy out for this model",
        ),
        (model.is_diffusion, "models with non-causal attention", without),
        (
            getattr(text, "attention_chunk_size", None) is not None,
            "chunked-local attention layers, which recycle their blocks themselves",
            without,
        ),
        (
            config.context is not None and model.uses_mrope,
            "a context and rotary positions of several dimensions (M-RoPE), which count no tokens",
            "leave context out for this model",
        ),
        (model.rswa_window is not None, "layers that attend to their prompt and a sliding window", without),
        *(_beside(vllm_config, config, WINDOWS, cache.sliding_window is None) if _slides(model, cache) else ()),
        (
            backend not in (None, *_backends(model.use_mla, platform)),
            f"the attention backend {backend}",
            (_CHOOSE_LATENT if model.use_mla else _CHOOSE).format(setting=setting),
        ),
        (
            platform == "cuda" and backend in WHOLE_LAYERS and len(config.classes) > 1,
            f"the attention backend {backend}",
            _WHOLE.format(setting=setting),
        ),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "context parallelism",
            "set --decode-context-parallel-size 1 and --prefill-context-parallel-size 1",
        ),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism", "use --tensor-parallel-size instead"),
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
        *_speculation(vllm_config, config),
        *_connected(vllm_config, config),
        (vllm_config.ec_transfer_config is not None, "an encoder-cache connector", "leave --ec-transfer-config out"),
        (cache.kv_sharing_fast_prefill, "fast prefill over shared KV", "leave --kv-sharing-fast-prefill out"),
        (
            (config.statistics or config.context or config.recall != "none" or config.select)
            and cache.cache_dtype not in SCORED_DTYPES.get(platform, ("auto",)),
            f"KV cache dtype {cache.cache_dtype!r}, which the plugin can't read on vLLM's {platform} engine",
            f'use --kv-cache-dtype auto{fp8}, or a policy without scores and context with "allow": [] (sink-window)',
        ),
        (
            capability < LEAST_CAPABILITY,
            gpu,
            'kernels that score or split heads need 8.0 (Ampere) or newer; use sink-window with "allow": []',
        ),
        (
            cache.cache_dtype in FP8_NAMES and capability < FP8_CAPABILITY,
            f"KV cache dtype {cache.cache_dtype!r} on {gpu}",
            "Triton has its numbers from 8.9 on; use --kv-cache-dtype auto",
        ),
        (
            (config.statistics or config.context) and set(cache.kv_cache_dtype_skip_layers) - {"sliding_window"},
            "KV cache dtypes that differ between layers",
            "leave --kv-cache-dtype-skip-layers out",
        ),
        (
            config.reconstructs and not cache.enable_prefix_caching,
            "prefix caching off while requests may use kvzip, which reconstructs prompts from it",
            "leave --no-enable-prefix-caching out, or kvzip",
        ),
        *_tier(vllm_config, config),
        *_selection(vllm_config, config, platform),
        (
            vllm_config.scheduler_config.scheduler_cls is not None,
            "a scheduler class of your own",
            "leave --scheduler-cls out; eviction needs its own",
        ),
    ]


def _tier(vllm_config: Any, config: KVPolicyConfig) -> list[tuple[bool, str, str]]:
    """What is refused where evicted blocks go to the host."""
    if config.evict != "host":
        return []
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    drop = "set evict: drop"
    return [
        (
            _slides(vllm_config.model_config, vllm_config.cache_config),
            "evict: host and layers with sliding windows, whose blocks are gone when tokens are computed again",
            drop,
        ),
        (
            vllm_config.model_config.is_hybrid,
            "evict: host and layers with states, which can't compute tokens again",
            drop,
        ),
        (vllm_config.parallel_config.tensor_parallel_size > 1, "evict: host and tensor parallelism", drop),
        (
            config.host > memory,
            f"host: {config.host} bytes on a machine of {memory}",
            "set less than the machine has, beside what the model takes",
        ),
    ]


def _selection(vllm_config: Any, config: KVPolicyConfig, platform: str) -> list[tuple[bool, str, str]]:
    """What is refused where decodes select blocks."""
    if not config.select:
        return []
    dense = "leave select out"
    return [
        (platform != "cpu", "select on a GPU, where no kernel selects blocks yet", dense),
        (
            _slides(vllm_config.model_config, vllm_config.cache_config),
            "select and layers with sliding windows, among which the first layers are not counted",
            dense,
        ),
        (vllm_config.parallel_config.tensor_parallel_size > 1, "select and tensor parallelism", dense),
    ]


def _speculation(vllm_config: Any, config: KVPolicyConfig) -> list[tuple[bool, str, str]]:
    """What is refused on servers that speculate."""
    speculative, beside = vllm_config.speculative_config, "speculative decoding"
    if speculative is None:
        return []
    drafts, block_size = speculative.num_speculative_tokens, vllm_config.cache_config.block_size
    model, without = vllm_config.model_config, "leave --speculative-config out"
    return [
        (
            speculative.method not in DRAFTERS,
            f"{beside} by {speculative.method!r}",
            f'set "method": "{DRAFTERS[0]}" in --speculative-config, or {without}',
        ),
        (
            bool(vllm_config.use_v2_model_runner),
            f"{beside} on Model Runner V2",
            f"set VLLM_USE_V2_MODEL_RUNNER=0, or {without}",
        ),
        (model.is_hybrid, f"{beside} and layers with states", without),
        (config.context is not None, f"a context and {beside}", f"leave context out, or {without}"),
        (
            config.reconstructs,
            f"kvzip and {beside}: prompts are repeated by requests that have no drafts",
            f'leave kvzip out of name and "allow", or {without}',
        ),
        (
            any(part.accumulate == "mean" and part.statistics for part in config.classes.values()),
            f"accumulate: mean and {beside}, where the queries of drafts do not count",
            f"set accumulate: sum, ema or last, or {without}",
        ),
        (
            block_size is not None and drafts >= block_size,
            f"{drafts} draft tokens in blocks of {block_size} tokens",
            f'set "num_speculative_tokens" in --speculative-config to less than {block_size}',
        ),
        (config.evict == "host", f"evict: host and {beside}", f"set evict: drop, or {without}"),
        (bool(config.select), f"select and {beside}", f"leave select out, or {without}"),
    ]


def _connected(vllm_config: Any, config: KVPolicyConfig) -> list[tuple[bool, str, str]]:
    """What is refused beside a KV connector."""
    if vllm_config.kv_transfer_config is None:
        return []
    slides = _slides(vllm_config.model_config, vllm_config.cache_config)
    name = vllm_config.kv_transfer_config.kv_connector
    return [
        *connectors.check(vllm_config, config),
        (
            slides,
            f"the KV connector {name} and layers with sliding windows, which no test runs",
            "leave --kv-transfer-config and --kv-offloading-size out",
        ),
        (
            vllm_config.speculative_config is not None,
            f"the KV connector {name} and speculative decoding",
            "leave --speculative-config out, or --kv-transfer-config and --kv-offloading-size",
        ),
        (
            vllm_config.model_config.use_mla or vllm_config.model_config.is_hybrid,
            f"the KV connector {name} and layers of latents or states",
            "leave --kv-transfer-config and --kv-offloading-size out",
        ),
        (bool(config.select), f"select and the KV connector {name}", "leave select out"),
    ]


def _past_the_worker(vllm_config: Any) -> bool:
    """Whether the executor calls the model runner itself, past the worker: vLLM 0.32 has one, 0.33 none."""
    executor = Executor.get_class(vllm_config)
    return any(base.__name__ == "RayDistributedExecutor" for base in executor.__mro__)


def _slides(model: Any, cache: Any) -> bool:
    """Whether some layers have sliding windows by the configuration; all have if the cache's configuration has one."""
    kinds = getattr(model.hf_text_config, "layer_types", None) or ()
    some = "sliding_attention" in kinds and model.get_sliding_window() is not None
    return some or cache.sliding_window is not None


def _backends(latent: bool, platform: str) -> tuple[str, ...]:
    """Attention backends on which policies run."""
    if latent:
        return LATENT_DEVICE_BACKENDS if platform == "cuda" else LATENT
    return DEVICE_BACKENDS if platform == "cuda" else BACKENDS


def _sparse(text: Any) -> list[tuple[bool, str, str]]:
    """Refusals for models whose queries see few tokens, which an indexer chooses."""
    why = "whose indexer has a cache of its own that would have to lose the same blocks"
    reads = "they read few tokens of their cache already; leave --kv-policy out"
    return [
        (
            getattr(text, "index_topk", None) is not None,
            f"sparse attention (DSA), {why}",
            f"{reads}, and set --attention-config.hisparse_config to keep the cache in host memory",
        ),
        (
            getattr(text, "compress_ratios", None) is not None,
            f"compressed sparse attention (CSA), {why}",
            f"{reads}: the cache is compressed, too",
        ),
        (
            getattr(text, "sparse_attention_config", None) is not None,
            f"block-sparse attention (MSA), {why}",
            reads,
        ),
    ]


def _latent(vllm_config: Any, config: KVPolicyConfig, platform: str) -> list[tuple[bool, str, str]]:
    """Refusals for models with multi-head latent attention (MLA)."""
    latent = "multi-head latent attention (MLA)"
    return [
        (
            len(config.classes) > 1,
            f"{latent}, whose query heads all read one latent head, so that heads and layers can't be split",
            "use a policy for whole layers, such as h2o, snapkv or sink-window",
        ),
        (
            config.context is not None,
            f"a context and {latent}, which rotates a part of its keys only",
            "leave context out for this model",
        ),
        (
            config.reconstructs,
            f"{latent} while requests may use kvzip, which scores each KV head's own keys",
            "leave kvzip out; snapkv, h2o and keydiff need no second pass",
        ),
        (
            config.granularity == "token",
            f"granularity: token and {latent}, for which no kernel of the plugin gathers tokens",
            "set granularity: block",
        ),
        (
            config.evict == "host",
            f"evict: host and {latent}, whose blocks no test recalls yet",
            "set evict: drop",
        ),
        (
            bool(config.select),
            f"select and {latent}, for which no kernel of the plugin decodes",
            "leave select out",
        ),
        (
            bool(vllm_config.model_config.is_hybrid),
            f"{latent} beside linear attention, which no test runs yet",
            "leave --kv-policy out for this model",
        ),
        (
            vllm_config.speculative_config is not None,
            f"{latent} and speculative decoding, whose drafts it computes as chunks of a prompt",
            "leave --speculative-config out",
        ),
        (
            platform == "cuda" and bool(config.statistics & (RUNNING | QUERIED)),
            f"{latent} on a GPU while requests may use scores of attention: no kernel reads latents there",
            'use sink-window, strided, random, keydiff or knorm, and leave other policies out of "allow"',
        ),
    ]


class Kind(NamedTuple):
    """Layers without holes that stand beside full attention.

    Attributes:
        what: their name.
        alone: why a model of such layers alone is not served.
        positions: why keys of full attention can't be rotated beside them.
        lacks: what the prefix cache lacks to repeat a prompt.
    """

    what: str
    alone: str
    positions: str
    lacks: str


WINDOWS = Kind(
    "sliding-window attention",
    "which recycle their blocks themselves",
    "where only layers with windows may have positions",
    "blocks of windows",
)
STATES = Kind(
    "Mamba, linear attention or short convolutions",
    "whose states do not grow",
    "whose states keep the positions that keys lose",
    "states",
)


def _beside(vllm_config: Any, config: KVPolicyConfig, kind: Kind, others: bool = True) -> list[tuple[bool, str, str]]:
    """Refusals for models with layers of a kind; `others`: whether some layers have full attention."""
    beside = f"{kind.what} beside full attention"
    return [
        (
            not others,
            f"{kind.what} in all layers, {kind.alone}",
            "there is nothing to evict; leave --kv-policy out for this model",
        ),
        (
            bool(vllm_config.scheduler_config.disable_hybrid_kv_cache_manager),
            f"{beside} without vLLM's hybrid KV cache manager: all layers share one block table then",
            "leave --disable-hybrid-kv-cache-manager out",
        ),
        (
            len(config.classes) > 1,
            f"{beside}, because it puts heads into pages that belong to no layer",
            "use a policy for whole layers, such as h2o, snapkv or sink-window",
        ),
        (config.context is not None, f"{beside}, {kind.positions}", "leave context out for this model"),
        (
            config.reconstructs,
            f"{beside}, where the prefix cache lacks {kind.lacks} to repeat a prompt",
            "leave kvzip out; snapkv, h2o and keydiff need no second pass",
        ),
    ]


def _beside_states(vllm_config: Any, config: KVPolicyConfig) -> list[tuple[bool, str, str]]:
    """Refusals for models with states. vLLM turns its hybrid manager off for some connectors, so these come first."""
    why = f"beside {STATES.what}, which no test has run"
    return [
        (vllm_config.speculative_config is not None, f"speculative decoding {why}", "leave --speculative-config out"),
        (bool(config.select), f"select {why}", "leave select out"),
        (
            vllm_config.kv_transfer_config is not None,
            f"a KV connector {why}",
            "leave --kv-transfer-config and --kv-offloading-size out",
        ),
        *_beside(vllm_config, config, STATES),
    ]


def check_beside(vllm_config: Any, config: KVPolicyConfig, kind: Kind, others: bool) -> None:
    """Refuse policies and settings that do not work beside layers of a kind; `others`: whether some layers have full
    attention.

    Raises:
        KVPolicyError: naming the reason.
    """
    for refused, what, instead in _beside(vllm_config, config, kind, others):
        if refused:
            raise _refusal(config, what, instead)


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


def _named_backend(attention_config: Any, latent: bool) -> tuple[str | None, str]:
    """The backend that the configuration names for full attention, or MLA, and the setting; None if vLLM chooses one.

    vLLM chooses when it makes the layers, which `check_layer` checks. Layers of other kinds may have any backend.
    """
    kind = "mla_attention" if latent else "full_attention"
    if (backend := attention_config.backend_per_kind.get(kind)) is not None:
        return backend.name, f"--attention-config.backend_per_kind.{kind}"
    return getattr(attention_config.backend, "name", None), "--attention-backend"


def check_layer(name: str, layer: Any, config: KVPolicyConfig) -> None:
    """Refuse full attention layers whose blocks cannot be evicted or scored.

    Raises:
        KVPolicyError: naming the layer.
    """
    impl = layer.impl
    backend = layer.attn_backend.get_name()
    what, setting = f"the attention backend {backend}, which {name} has", "--attention-backend"
    if backend not in OPS:
        raise _refusal(config, what, (_CHOOSE_LATENT if "MLA" in backend else _CHOOSE).format(setting=setting))
    if backend in WHOLE_LAYERS and len(config.classes) > 1:
        raise _refusal(config, what, _WHOLE.format(setting=setting))
    if not config.statistics & RUNNING:
        return
    for attribute, what in (
        ("alibi_slopes", "ALiBi slopes"),
        ("logits_soft_cap", "a soft cap on its logits"),
        ("sinks", "learned attention sinks"),
    ):
        value = getattr(impl, attribute, None)
        if value is not None and not (isinstance(value, (int, float)) and value == 0):
            raise KVPolicyError(
                f'{name} has {what}, which the score pass does not know: use sink-window with "allow": []'
            )


def check_cache(name: str, layer: Any) -> None:
    """Refuse layers, of any kind, without a cache of their own.

    Raises:
        KVPolicyError: naming the layer.
    """
    if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
        raise KVPolicyError(f"{name} shares the cache of {layer.kv_sharing_target_layer_name}: leave --kv-policy out")


def check_alike(layers: dict[str, Any]) -> None:
    """Refuse models whose heads can't be split, because layers differ or heads have values of their own.

    Raises:
        KVPolicyError: naming two layers.
    """
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
