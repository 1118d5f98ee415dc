"""KV caches as vLLM's kernel for CPUs packs them."""

import pytest
import torch


def write(keys, values, key_cache, value_cache, slots, layout, **options):
    """Write tokens into a cache with vLLM's kernel; skips a test where vLLM has none for this device, CPU or dtype."""
    ops = pytest.importorskip("vllm._custom_ops")
    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        pytest.skip("vLLM is built for another device")
    try:
        ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, layout, **options)
    except RuntimeError as error:
        if "Unsupported CPU attention configuration" not in str(error):
            raise
        pytest.skip(f"vLLM packs no cache like this on this CPU: {error}")
