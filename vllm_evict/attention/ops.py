"""vLLM's attention backends that a policy runs on, by name: all of them, in one place."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backend import BackendOps

#: Name of a backend -> module and class of its `BackendOps`, imported when it is used: a CPU may have no Triton.
OPS = {
    "CPU_ATTN": ("cpu", "CPUOps"),
    "FLASH_ATTN": ("flash", "FlashOps"),
    "FLASHINFER": ("flashinfer", "FlashInferOps"),
    "TRITON_ATTN": ("triton", "TritonOps"),
}
#: Those whose metadata is made for all heads of a layer: policies that split heads are not for them.
WHOLE_LAYERS = ("FLASHINFER",)
#: vLLM's names of caches in float8_e4m3fn, with one scale for a layer's keys and one for its values.
FP8_NAMES = ("fp8", "fp8_e4m3")


def ops_for(backend: str) -> "BackendOps":
    """What is done beside or instead of a backend's kernel; with its own scratch, for the layers of one engine."""
    module, name = OPS[backend]
    return getattr(import_module(f".{module}", __package__), name)()
