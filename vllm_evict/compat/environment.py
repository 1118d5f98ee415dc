"""Environment variables of the plugin."""

import os

from ..config import KVPolicyError


def poison_mode() -> bool:
    """VLLM_EVICT_POISON=1: freed blocks are filled with NaN, so that a read after free cannot stay unseen (tests)."""
    return os.environ.get("VLLM_EVICT_POISON", "0") == "1"


def decode_kernel() -> str:
    """VLLM_EVICT_DECODE: which kernel decodes behind a GPU backend, "triton" (the default) or "cuda".

    Raises:
        KVPolicyError: it is neither.
    """
    name = os.environ.get("VLLM_EVICT_DECODE", "triton")
    if name not in ("triton", "cuda"):
        raise KVPolicyError(f"VLLM_EVICT_DECODE must be triton or cuda, not {name!r}")
    return name
