"""Environment variables of the plugin."""

import os


def poison_mode() -> bool:
    """VLLM_EVICT_POISON=1: freed blocks are filled with NaN, so that a read after free cannot stay unseen (tests)."""
    return os.environ.get("VLLM_EVICT_POISON", "0") == "1"
