"""vLLM's attention backends that a policy runs on, by name: all of them, in one place."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backend import Passes

#: Name of a backend -> module and class of its `Passes`. Imported when it is used: a CPU installation may lack Triton.
PASSES = {
    "CPU_ATTN": ("cpu", "CPUPasses"),
    "FLASH_ATTN": ("flash", "FlashPasses"),
    "TRITON_ATTN": ("triton", "TritonPasses"),
}


def passes_for(backend: str) -> "Passes":
    """What is done beside or instead of a backend's kernel; with its own scratch, for the layers of one engine."""
    module, name = PASSES[backend]
    return getattr(import_module(f".{module}", __package__), name)()
