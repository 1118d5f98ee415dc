"""FlashAttention's LSE, which vLLM's backend does not ask for."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any

import torch

from ..seams import extends

#: Backend -> the module of vLLM that has it, and calls FlashAttention by its name.
MODULES = {
    "FLASH_ATTN": "vllm.v1.attention.backends.flash_attn",
    "FLASH_ATTN_DIFFKV": "vllm.v1.attention.backends.flash_attn_diffkv",
}

#: The list that gets LSEs; None outside `capture_lse`.
_captured: list[torch.Tensor] | None = None


@contextmanager
def capture_lse(backend: str) -> Iterator[list[torch.Tensor]]:
    """In this context each call of FlashAttention by one of `MODULES` adds its LSE, float32 [H, T], to the list."""
    global _captured
    return_lse.once(import_module(MODULES[backend]))
    captured: list[torch.Tensor] = []
    _captured = captured
    try:
        yield captured
    finally:
        _captured = None


@extends(
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.flash_attn_diffkv",
    why="the kernels return the LSE at no cost, and vLLM's backend does not ask for it",
    remove_when="an option of vLLM's backend returns it",
)
def return_lse(module: Any) -> None:
    attend = module.flash_attn_varlen_func  # which a backend calls by this name

    @wraps(attend)
    def with_lse(*args: Any, **kwargs: Any) -> Any:
        if _captured is None:
            return attend(*args, **kwargs)
        output, lse = attend(*args, **kwargs, return_softmax_lse=True)
        _captured.append(lse)
        return output

    module.flash_attn_varlen_func = with_lse
