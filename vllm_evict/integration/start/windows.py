"""Finds layers whose sliding window, or chunk of local attention, holds every request; they become full attention."""

from typing import Any

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention, MLAAttention

from ..seams import extends


def bounds(tokens: int | None, vllm_config: Any) -> bool:
    """Return whether a window, or a chunk, of so many tokens hides any token of a request that the server accepts."""
    return tokens is not None and tokens < vllm_config.model_config.max_model_len


def slide(vllm_config: Any) -> bool:
    """Return whether some layers have windows, or chunks, that hide tokens, by the configuration."""
    model = vllm_config.model_config
    if chunks(vllm_config):
        return True
    kinds = getattr(model.hf_text_config, "layer_types", None) or ()
    some = model.get_sliding_window() if "sliding_attention" in kinds else None
    return bounds(some, vllm_config) or bounds(vllm_config.cache_config.sliding_window, vllm_config)


def chunks(vllm_config: Any) -> bool:
    """Return whether some layers have chunks of local attention that hide tokens, by the configuration."""
    return bounds(getattr(vllm_config.model_config.hf_text_config, "attention_chunk_size", None), vllm_config)


def recycles(layer: Any) -> bool:
    """Return whether a layer has a window or chunks, outside of which vLLM recycles its blocks."""
    return isinstance(layer, ChunkedLocalAttention) or layer.sliding_window is not None


@extends(
    "vllm.model_executor.layers.attention:ChunkedLocalAttention",
    why="a layer whose chunks hide nothing becomes full attention, on which policies work",
    remove_when="vLLM makes such layers of full attention itself",
)
def without_chunks(layer: Any) -> None:
    layer.attn_backend = layer.attn_backend.__base__  # whose builder does not cut requests into chunks
    layer.__class__ = Attention


def widen(vllm_config: VllmConfig) -> None:
    """Make full attention layers of layers whose window or chunk hides nothing, before vLLM asks for their specs.

    Policies then work on them. A view is shorter than its request, so kernels would hide nothing of it either.
    """
    for layer in get_layers_from_vllm_config(vllm_config, (Attention, MLAAttention)).values():
        if isinstance(layer, ChunkedLocalAttention) and not bounds(layer.attention_chunk_size, vllm_config):
            without_chunks.on(layer)
        if layer.sliding_window is None or bounds(layer.sliding_window, vllm_config):
            continue
        layer.sliding_window = None
        # What backends pass to their kernels where a layer has no window, and no chunks in its place (Rnj-1).
        for name in ("sliding_window", "window_left", "chunk_lookback"):
            if (before := getattr(layer.impl, name, None)) is not None:
                setattr(layer.impl, name, (-1,) * len(before) if isinstance(before, tuple) else -1)
