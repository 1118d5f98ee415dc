"""fp8 caches: vLLM holds them as bytes, with a scale for a layer's keys and one for its values."""

from typing import Any

import torch

FP8 = torch.float8_e4m3fn
#: Dtypes of fp8 caches.
DTYPES = (FP8, torch.float8_e5m2)
#: vLLM's names of float8_e4m3fn caches, with one scale for a layer's keys and one for its values.
FP8_NAMES = ("fp8", "fp8_e4m3")
#: vLLM's names of all fp8 caches that are read on a CPU.
CPU_FP8_NAMES = (*FP8_NAMES, "fp8_e5m2")


def elements(layer: Any, kv_cache: torch.Tensor) -> torch.Tensor:
    """View a cache of bytes in the layer's fp8 dtype; return others as they are."""
    if kv_cache.dtype != torch.uint8:
        return kv_cache
    return kv_cache.view(torch.float8_e5m2 if layer.kv_cache_dtype == "fp8_e5m2" else FP8)


def dequantised(layer: Any, query: torch.Tensor) -> torch.Tensor:
    """Return a layer's query in the model's dtype, as kernels of the plugin take it."""
    return query if query.dtype != FP8 else query.to(layer.dtype) * layer._q_scale_float


def cache_scales(layer: Any, kv_cache: torch.Tensor) -> tuple[float, float]:
    """Return the scales of stored keys and of stored values, from vLLM's copies on the host."""
    if kv_cache.dtype not in (*DTYPES, torch.uint8):
        return 1.0, 1.0
    return layer._k_scale_float, layer._v_scale_float


def scales(layer: Any, kv_cache: torch.Tensor) -> tuple[float, float]:
    """Return the factors on scores and on values, for kernels that read a cache directly."""
    key_scale, value_scale = cache_scales(layer, kv_cache)
    return layer.impl.scale * key_scale, value_scale


def scaled(stored: torch.Tensor, scale: float) -> torch.Tensor:
    """Return keys or values with their scale applied: float32 if they are fp8."""
    return stored.float().mul_(scale) if stored.dtype in DTYPES else stored


def stored_as(content: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Convert keys or values to a cache's dtype. For fp8 they are divided by the scale, and clamped as in vLLM."""
    if dtype in DTYPES:
        largest = torch.finfo(dtype).max
        content = (content.float() / scale).clamp(-largest, largest)
    return content.to(dtype)
