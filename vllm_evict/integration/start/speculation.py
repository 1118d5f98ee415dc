"""Refusals of what speculative decoding cannot be combined with."""

from typing import Any

from ...config import KVPolicyConfig
from . import drafters
from .combinations import Refusal, slides
from .fallback import use_v1

NGRAM = 'set "method": "ngram" in --speculative-config'
#: What stands beside plain full attention, or in its place -> methods with layers to set in place of a refused one.
LAYERED = {
    "latents (MLA)": ("mtp",),
    "states": ("mtp",),
    "sliding windows": ("eagle", "eagle3"),
}


def refused(vllm_config: Any, config: KVPolicyConfig) -> list[Refusal]:
    """What is refused on servers that speculate."""
    speculative, beside = vllm_config.speculative_config, "speculative decoding"
    if speculative is None:
        return []
    drafts, block_size = speculative.num_speculative_tokens, vllm_config.cache_config.block_size
    model, without = vllm_config.model_config, "leave --speculative-config out"
    served = (*drafters.WITHOUT_LAYERS, *drafters.WITH_LAYERS)
    return [
        (
            speculative.method not in served,
            f"{beside} by {speculative.method!r}",
            f'set "method" in --speculative-config to one of {", ".join(served)}, or {without}',
        ),
        *(_with_layers(vllm_config, config) if drafters.has_layers(vllm_config) else ()),
        (
            bool(vllm_config.use_v2_model_runner),
            f"{beside} on Model Runner V2",
            f"{use_v1(vllm_config)}, or {without}",
        ),
        (
            model.is_hybrid and bool(vllm_config.cache_config.enable_prefix_caching),
            f"{beside} and prefix caching of states, which no test runs: vLLM copies these states by kernels for GPUs",
            f"set --no-enable-prefix-caching, or {without}",
        ),
        (
            model.is_hybrid and config.granularity == "token",
            f"{beside} and granularity: token beside states, which no test runs",
            f"set granularity: block, or {without}",
        ),
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
        (config.selects, f"select and {beside}", f"leave select out, or {without}"),
    ]


def _with_layers(vllm_config: Any, config: KVPolicyConfig) -> list[Refusal]:
    """What is refused on servers whose drafter has layers."""
    speculative, other = vllm_config.speculative_config, _other(vllm_config)
    asynchronous = bool(vllm_config.scheduler_config.async_scheduling)
    drafter = f"speculative decoding by {speculative.method!r}"
    layered = " or ".join(LAYERED.get(other, ()))
    instead = f'set "method" in --speculative-config to {layered}, if the model has layers for it, or to ngram'
    return [
        (
            asynchronous and config.granularity == "token",
            f"{drafter} under async scheduling and granularity: token, because the host does not know there how many "
            "drafts of the step before were accepted, and which tokens it compacts depends on it",
            f"set --no-async-scheduling, or granularity: block, or {NGRAM}",
        ),
        (
            len(config.classes) > 1,
            f"{drafter}, whose layers have no heads of the policy's classes",
            f"use a policy for whole layers, such as h2o, snapkv or sink-window, or {NGRAM}",
        ),
        (
            config.granularity == "token" and other is not None,
            f"{drafter} and granularity: token beside {other}, which no test runs",
            "set granularity: block" + ("" if vllm_config.model_config.is_hybrid else f", or {NGRAM}"),
        ),
        (
            speculative.method == "draft_model" and other is not None,
            f"a draft model beside {other}, which vLLM 0.32.0 gives lengths or blocks that are not its own",
            instead,
        ),
        (
            speculative.method in ("eagle", "eagle3") and vllm_config.model_config.use_mla,
            f"{drafter} beside {other}, which no test runs",
            instead,
        ),
        (
            asynchronous and vllm_config.model_config.use_mla,
            f"{drafter} beside {other} under async scheduling, which no test runs",
            f"set --no-async-scheduling, or {NGRAM}",
        ),
        (
            bool(speculative.parallel_drafting),
            f"{drafter} in parallel, which no test runs",
            f'leave "parallel_drafting" out of --speculative-config, or {NGRAM}',
        ),
    ]


def _other(vllm_config: Any) -> str | None:
    """The key of `LAYERED` for a model; None: plain full attention."""
    model = vllm_config.model_config
    if model.use_mla or model.is_hybrid:
        return "latents (MLA)" if model.use_mla else "states"
    return "sliding windows" if slides(vllm_config) else None
