"""Environment variables of the plugin."""

import os

from .config import KVPolicyError


def poison_mode() -> bool:
    """Return whether workers fill freed blocks with NaN, which shows reads after frees (VLLM_EVICT_POISON=1, tests)."""
    return os.environ.get("VLLM_EVICT_POISON", "0") == "1"


def decode_kernel() -> str | None:
    """VLLM_EVICT_DECODE: the kernel that decodes requests with holes; None: the plugin's kernel for the device.

    With "stock" vLLM's own kernel decodes, and mass is measured beside it. Behind a GPU backend "triton" (the same as
    None) and "cuda" name a kernel of the plugin. Elsewhere these two have no effect, and the log names the kernel that
    decodes (`integration.start.describe.ignored_settings`).

    Raises:
        KVPolicyError: the value is none of these.
    """
    name = os.environ.get("VLLM_EVICT_DECODE")
    if name not in (None, "stock", "triton", "cuda"):
        raise KVPolicyError(f"VLLM_EVICT_DECODE got {name!r}; expected stock, triton or cuda")
    return name
