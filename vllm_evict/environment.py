"""Environment variables of the plugin."""

import os

from .config import KVPolicyError


def poison_mode() -> bool:
    """Whether VLLM_EVICT_POISON=1: workers fill freed blocks with NaN, so that tests see a read after free."""
    return os.environ.get("VLLM_EVICT_POISON", "0") == "1"


def decode_kernel() -> str | None:
    """VLLM_EVICT_DECODE: the decode kernel of requests with holes; None if unset: the plugin's kernel for the device.

    "stock" is vLLM's own kernel, with attention mass measured beside it. "triton" and "cuda" are the plugin's kernels
    behind a GPU backend, where unset means "triton". Elsewhere the log says that the variable is ignored (see
    `integration.layers.ignored_settings`).

    Raises:
        KVPolicyError: the variable has another value.
    """
    name = os.environ.get("VLLM_EVICT_DECODE")
    if name not in (None, "stock", "triton", "cuda"):
        raise KVPolicyError(f"VLLM_EVICT_DECODE must be stock, triton or cuda, not {name!r}")
    return name
