"""FlashAttention's LSE: its kernels return it at no cost, and vLLM's backend does not ask for it.

Needed until an option of vLLM's backend returns it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

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
    _wrap(import_module(MODULES[backend]))
    captured: list[torch.Tensor] = []
    _captured = captured
    try:
        yield captured
    finally:
        _captured = None


def _wrap(module: ModuleType) -> None:
    """Wrap the function that a module's backend calls by its name; once."""
    attend = module.flash_attn_varlen_func
    if getattr(attend, "kv_evict_captures_lse", False):
        return

    @wraps(attend)
    def with_lse(*args: Any, **kwargs: Any) -> Any:
        if _captured is None:
            return attend(*args, **kwargs)
        output, lse = attend(*args, **kwargs, return_softmax_lse=True)
        _captured.append(lse)
        return output

    vars(with_lse)["kv_evict_captures_lse"] = True
    vars(module)["flash_attn_varlen_func"] = with_lse
