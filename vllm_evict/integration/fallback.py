"""Has vLLM choose Model Runner V1 where a KV policy serves a feature on V1 alone."""

import functools
from types import ModuleType
from typing import Any

import vllm.envs as envs

from .late import once


def hook(module: ModuleType) -> None:
    """Extend `vllm.config.vllm`; once. vLLM chooses V1, and logs why, if V2 lacks a feature of the server."""
    cls = module.VllmConfig
    if not once(cls):
        return
    lacking = cls._get_v2_model_runner_unsupported_features

    @functools.wraps(lacking)
    def with_policy(self: Any) -> list[str]:
        return [*lacking(self), *on_v1_alone(self)]

    cls._get_v2_model_runner_unsupported_features = with_policy


def on_v1_alone(vllm_config: Any) -> list[str]:
    """Features of a server that its KV policy serves on Model Runner V1 alone.

    There are none without a policy. Nor are there any if VLLM_USE_V2_MODEL_RUNNER is set: vLLM obeys it, and
    `combinations` and `speculation` refuse the feature on V2 by name.
    """
    additional = vllm_config.additional_config
    has_policy = isinstance(additional, dict) and additional.get("kv_policy") is not None
    if not has_policy or envs.VLLM_USE_V2_MODEL_RUNNER is not None:
        return []
    used = {
        "speculative decoding": _drafts(vllm_config.speculative_config),
        "pipeline parallelism": vllm_config.parallel_config.pipeline_parallel_size > 1,
    }
    return [f"{feature} under a KV policy" for feature, is_used in used.items() if is_used]


def _drafts(speculative_config: Any) -> bool:
    """Whether the server drafts by a method that is served; `speculation` refuses the others by name."""
    from . import drafters  # imports vLLM's layers, and `vllm.config` comes before them

    served = (*drafters.WITHOUT_LAYERS, *drafters.WITH_LAYERS)
    return speculative_config is not None and speculative_config.method in served
