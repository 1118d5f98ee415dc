"""vLLM's attention backends that a policy runs on, by name: all of them, in one place."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backend import Passes

#: Name of a backend -> module and class of its `Passes`. Imported when it is used: a CPU installation may lack Triton.
PASSES = {
    "CPU_ATTN": ("cpu", "CPUPasses"),
    "FLASH_ATTN": ("flash", "FlashPasses"),
    "FLASHINFER": ("flashinfer", "FlashInferPasses"),
    "TRITON_ATTN": ("triton", "TritonPasses"),
}
#: Those whose metadata is made for all heads of a layer: policies that split heads are not for them.
WHOLE_LAYERS = ("FLASHINFER",)
#: vLLM's names of caches in float8_e4m3fn, with one scale for a layer's keys and one for its values.
FP8_NAMES = ("fp8", "fp8_e4m3")


def passes_for(backend: str) -> "Passes":
    """What is done beside or instead of a backend's kernel; with its own scratch, for the layers of one engine."""
    module, name = PASSES[backend]
    return getattr(import_module(f".{module}", __package__), name)()
