"""FlashAttention's LSE: its kernels return it at no cost, and vLLM's backend does not ask for it.

Needed until an option of vLLM's backend returns it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import vllm.v1.attention.backends.flash_attn as flash_attn

#: The list that gets LSEs; None outside `capture_lse`.
_captured: list[torch.Tensor] | None = None


@contextmanager
def capture_lse() -> Iterator[list[torch.Tensor]]:
    """In this context each call of FlashAttention by vLLM's backend adds its LSE, float32 [H, T], to the list."""
    global _captured
    _wrap()
    captured: list[torch.Tensor] = []
    _captured = captured
    try:
        yield captured
    finally:
        _captured = None


def _wrap() -> None:
    """Wrap the function that the backend calls by its name; once."""
    attend = flash_attn.flash_attn_varlen_func
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
    flash_attn.flash_attn_varlen_func = with_lse
