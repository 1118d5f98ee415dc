"""Environment variables of the plugin."""

import os

from .config import KVPolicyError


def poison_mode() -> bool:
    """VLLM_EVICT_POISON=1: freed blocks are filled with NaN, so that a read after free cannot stay unseen (tests)."""
    return os.environ.get("VLLM_EVICT_POISON", "0") == "1"


def decode_kernel() -> str | None:
    """VLLM_EVICT_DECODE: what decodes requests that lack blocks; None: the plugin's kernel for the device.

    "stock" leaves them to vLLM's own kernel, with the mass taken beside it. Behind a GPU backend "triton" (what None is
    there) and "cuda" say which kernel of the plugin's; elsewhere the log says what decodes (see
    `integration.layers.ignored_settings`).

    Raises:
        KVPolicyError: it is none of these.
    """
    name = os.environ.get("VLLM_EVICT_DECODE")
    if name not in (None, "stock", "triton", "cuda"):
        raise KVPolicyError(f"VLLM_EVICT_DECODE must be stock, triton or cuda, not {name!r}")
    return name
