"""Has vLLM choose Model Runner V1 where a KV policy serves a feature on V1 alone."""

from collections.abc import Callable
from typing import Any

import vllm.envs as envs

from ...config import KVPolicyError
from ..seams import replaces
from . import versions
from .connectors import prefills_alone

#: What vLLM says that its Model Runner V1 lacks -> what to do instead; for other features: leave one of the two out.
INSTEAD = {"pipeline parallelism with async scheduling": "leave --async-scheduling out"}


@replaces(
    "vllm.config.vllm:VllmConfig._get_v2_model_runner_unsupported_features",
    at_import=True,
    why="vLLM chooses Model Runner V1, and logs why, if V2 lacks a feature of the server under its policy",
    remove_when="every supported vLLM serves speculation and stages on V2",
)
def unsupported_on_v2(lacking: Callable[..., list[str]]) -> Callable[..., list[str]]:
    def with_policy(self: Any) -> list[str]:
        return [*lacking(self), *on_v1_alone(self)]

    return with_policy


@replaces(
    "vllm.config.vllm:VllmConfig._validate_v1_model_runner",
    at_import=True,
    why="what V1 lacks is refused in words that say why a policy needs V1",
    remove_when="every supported vLLM serves speculation and stages on V2",
)
def validate_v1(validate: Callable[..., None]) -> Callable[..., None]:
    def validated(self: Any) -> None:
        needed, lacks = _served_on_v1_alone(self), self._get_v1_model_runner_unsupported_features()
        if needed and lacks:
            instead = [INSTEAD.get(feature, "leave one of the two out") for feature in lacks]
            raise KVPolicyError(
                f"{' and '.join(needed)} under a KV policy got {' and '.join(lacks)}; expected Model Runner V1, which "
                f"alone serves the former and does not support the latter; {', '.join(dict.fromkeys(instead))}"
            )
        validate(self)

    return validated


def on_v1_alone(vllm_config: Any) -> list[str]:
    """Features of a server because of which vLLM chooses Model Runner V1 under its KV policy.

    There are none if VLLM_USE_V2_MODEL_RUNNER is set: vLLM obeys it, and `capabilities` refuses the feature on V2 by
    name.
    """
    if envs.VLLM_USE_V2_MODEL_RUNNER is not None:
        return []
    return [f"{feature} under a KV policy" for feature in _served_on_v1_alone(vllm_config)]


def _served_on_v1_alone(vllm_config: Any) -> list[str]:
    """Features of a server that its KV policy serves on Model Runner V1 alone; without a policy there are none."""
    additional = vllm_config.additional_config
    if not isinstance(additional, dict) or additional.get("kv_policy") is None or prefills_alone(vllm_config):
        return []
    used = {
        "speculative decoding": vllm_config.speculative_config is not None,
        "pipeline parallelism": vllm_config.parallel_config.pipeline_parallel_size > 1,
    }
    return [feature for feature, is_used in used.items() if is_used and not versions.serves_on_v2()]


def use_v1(vllm_config: Any) -> str:
    """Return how a server on Model Runner V2 gets V1; some features of vLLM decide before the variable does."""
    if getattr(vllm_config, "watermark_config", None) is not None:
        return "leave --watermark-config out, which needs Model Runner V2"
    parallel, asynchronous = vllm_config.parallel_config, vllm_config.scheduler_config.async_scheduling
    without = ", leave --async-scheduling out" if parallel.pipeline_parallel_size > 1 and asynchronous else ""
    return f"set VLLM_USE_V2_MODEL_RUNNER=0{without}"
