"""Has vLLM take an attention backend that a KV policy can use, where its own choice is one that the policy cannot."""

from typing import Any

from vllm.logger import init_logger
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from ...config import KVPolicyConfig
from . import advice
from .capabilities.environments import OF_BACKENDS
from .capabilities.refuse import Refusal, refusals
from .capabilities.server import Server, kind_of, named_backend

logger = init_logger("vllm.evict")


def choose(vllm_config: Any, config: KVPolicyConfig) -> None:
    """Name an attention backend in vLLM's configuration, if none is named and vLLM would take a refused one.

    A line of the log tells. Nothing changes if no backend that vLLM takes on this device is served: `capabilities` then
    refuses vLLM's own choice.
    """
    named, _ = named_backend(vllm_config)
    refused = None if named is not None else _refusal(vllm_config, config)
    if refused is None:
        return
    attention, server = vllm_config.attention_config, Server(vllm_config, config)
    before, kind, own = attention.backend_per_kind, kind_of(vllm_config), server.backend
    for name in advice.working(vllm_config, server.backends):
        attention.backend_per_kind = {**before, kind: AttentionBackendEnum[name]}
        if _refusal(vllm_config, config) is None:
            logger.info(
                "KV policy %s: attention backend %s in place of vLLM's choice, %s: the policy can't be used with %s",
                *(config.name, name, own, refused.what),
            )
            return
    attention.backend_per_kind = before


def _refusal(vllm_config: Any, config: KVPolicyConfig) -> Refusal | None:
    """Return what the policy is refused for because of the attention backend; None: the backend serves it."""
    asked = config if config.allow is not None else config.replace(allow=())
    return next(refusals(Server(vllm_config, asked), OF_BACKENDS), None)
