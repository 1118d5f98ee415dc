"""A server's configuration under a context: its tokens, and requests longer than the model's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import vllm.envs as envs
from vllm.logger import init_logger

from ...config import KVPolicyConfig, KVPolicyError

logger = init_logger("vllm.evict")

#: vLLM takes a `max_model_len` above the model's own only if this is true.
ALLOW_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


def in_tokens(vllm_config: Any, config: KVPolicyConfig) -> KVPolicyConfig:
    """Return the config with `context` in tokens: "model" becomes the model's own.

    Raises:
        KVPolicyError: the context is longer than the model's own.
    """
    if config.context is None:
        return config
    longest, most = vllm_config.model_config.max_model_len, vllm_config.model_config.get_and_verify_max_len(None)
    context = most if config.context == "model" else config.context
    if context > most:
        raise KVPolicyError(f"context got {context}; expected at most {most}, which the model was made for")
    if longest <= context:
        logger.warning(
            "KV policy %s: its context of %d tokens has no effect, because --max-model-len is %d; raise the latter",
            config.name,
            context,
            longest,
        )
    return config.replace(context=context)


@contextmanager
def longer_than_the_model(config: KVPolicyConfig) -> Iterator[None]:
    """Let vLLM accept, under a policy with a `context`, a `max_model_len` above the model's own."""
    before = vars(envs).get(ALLOW_LONG)
    if config.context is not None:
        # vLLM reads the environment variable once and keeps its value, so set the value.
        vars(envs)[ALLOW_LONG] = True
    try:
        yield
    finally:
        if before is None:
            vars(envs).pop(ALLOW_LONG, None)
        else:
            vars(envs)[ALLOW_LONG] = before
