"""A stand-in for a device that this machine may lack: vLLM's configuration is then made as on a host with that device.

All decisions are vLLM's own code. The stand-in answers what vLLM asks a driver for, and is there in place of compiled
libraries that a vLLM for another device lacks. Nothing can be computed in a process with a stand-in.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

from ...integration.start import machine


@dataclass(frozen=True)
class Device:
    """Facts of a device, as its driver would tell them.

    Attributes:
        name: by the driver.
        capability: compute capability; None: no GPU of NVIDIA.
        gib: memory of one device; vLLM asks whether it is 70 GiB or more.
        processors: of one device.
        architecture: by AMD's name; "": it is none of AMD's.
    """

    name: str
    capability: tuple[int, int] | None = None
    gib: int = 0
    processors: int = 0
    architecture: str = ""


DEVICES = {
    "a100": Device("NVIDIA A100-SXM4-80GB", (8, 0), 80, 108),
    "h100": Device("NVIDIA H100 80GB HBM3", (9, 0), 80, 132),
    "h200": Device("NVIDIA H200", (9, 0), 140, 132),
    "b200": Device("NVIDIA B200", (10, 0), 179, 148),
    "gb200": Device("NVIDIA GB200", (10, 0), 184, 148),
    "l40s": Device("NVIDIA L40S", (8, 9), 44, 142),
    "l4": Device("NVIDIA L4", (8, 9), 22, 58),
    "a10": Device("NVIDIA A10", (8, 6), 22, 72),
    "rtx3090": Device("NVIDIA GeForce RTX 3090", (8, 6), 24, 82),
    "rtx4090": Device("NVIDIA GeForce RTX 4090", (8, 9), 24, 128),
    "rtx5090": Device("NVIDIA GeForce RTX 5090", (12, 0), 32, 170),
    "mi300": Device("AMD Instinct MI300X", (9, 4), 192, 304, architecture="gfx942"),
    "cpu": Device("cpu"),
}
#: GPUs of one host.
DEVICES_OF_HOST = 8
#: CUDA of the host.
CUDA_MAJOR = 13
#: Libraries that come with a vLLM for NVIDIA's GPUs, and Ray; those that are installed are imported as they are.
COMPILED = (
    "flashinfer",
    "flashinfer_cubin",
    "ray",
    "vllm._C_stable_libtorch",
    "vllm._flashmla_C",
    "vllm._flashmla_extension_C",
    "vllm._moe_C_stable_libtorch",
    "vllm.third_party.flashmla.flash_mla_interface",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
#: Libraries that prepare images. Modules of models import them; a host that serves the model has them.
PREPARING = ("torchvision",)
#: Whether Triton and FlashAttention 4 can run, as vLLM has found by the driver and the files of its wheel.
PRESENT = (
    "vllm.triton_utils.HAS_TRITON",
    "vllm.triton_utils.importing.HAS_TRITON",
    "vllm.vllm_flash_attn.flash_attn_interface.FA4_AVAILABLE",
)
#: Where vLLM asks a model's class what it supports.
INSPECTS = "vllm.model_executor.models.registry._run_in_subprocess"


def become(device: str) -> None:
    """Make a device of `DEVICES` vLLM's current platform, before anything else of vLLM is imported.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
    """
    facts = DEVICES[device]
    if facts.capability is not None:
        sys.meta_path.append(_Absent(COMPILED))
        # An empty list of devices hides those that this machine has.
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    from vllm import platforms

    platforms.current_platform = _cpu() if facts.capability is None else _gpu(facts)
    if facts.capability is not None:
        # The device is in another machine.
        machine.memory_bytes = lambda: sys.maxsize
        _with_kernels()
        _with_torch(facts)
    _inspect_here()


def _cpu() -> Any:
    from vllm.platforms.cpu import CpuPlatform

    return CpuPlatform()


def _gpu(facts: Device) -> Any:
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability, PlatformEnum

    assert facts.capability is not None
    capability = DeviceCapability(*facts.capability)

    class StandIn(CudaPlatformBase):
        """vLLM's own platform of NVIDIA's GPUs, without a driver to ask."""

        # AMD's is refused before anything else of its platform is asked for.
        _enum = PlatformEnum.ROCM if facts.architecture else PlatformEnum.CUDA

        @classmethod
        def import_kernels(cls) -> None:
            pass

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return capability

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return facts.name

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return facts.gib << 30

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

        @classmethod
        def device_count(cls) -> int:
            return DEVICES_OF_HOST

        def is_cumem_allocator_available(self) -> bool:
            return True

        @classmethod
        def get_cuda_runtime_major(cls) -> int:
            return CUDA_MAJOR

    return StandIn()


def _with_kernels() -> None:
    """Let vLLM find kernels that are compiled when they are first called."""
    with contextlib.suppress(ImportError):
        backends = importlib.import_module("triton.backends").backends
        # vLLM for CPUs takes a Triton with this backend alone.
        backends.setdefault("cpu", backends["nvidia"])
    for each in PRESENT:
        module, _, name = each.rpartition(".")
        setattr(importlib.import_module(module), name, True)


def _inspect_here() -> None:
    """Let vLLM import a model that it does not know yet in this process, which takes half the time of another process.

    vLLM asks the class of a model what it supports, once, and caches the answer on disk. It does so in another process,
    because CUDA must not be initialised in its own. Here is none. Libraries that prepare images
    change nothing about what a class supports.
    """
    module, _, name = INSPECTS.rpartition(".")
    registry = importlib.import_module(module)
    elsewhere = getattr(registry, name)
    # By now transformers knows which of them there are: it asks for their versions.
    sys.meta_path.append(_Absent(PREPARING))

    def here(inspect: Callable[[], Any]) -> Any:
        try:
            return inspect()
        except Exception:
            return elsewhere(inspect)

    setattr(registry, name, here)


def _with_torch(facts: Device) -> None:
    """Let torch describe the device, and make tensors on it that have no memory.

    Some of vLLM's modules ask for both as they are imported.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    assert facts.capability is not None
    properties = SimpleNamespace(
        name=facts.name,
        major=facts.capability[0],
        minor=facts.capability[1],
        total_memory=facts.gib << 30,
        multi_processor_count=facts.processors,
        is_integrated=False,
        gcnArchName=facts.architecture,
    )
    torch.cuda.get_device_properties = lambda *_, **__: properties
    namespace = type(torch.ops.aten)
    found, made = namespace.__getattr__, set[str]()

    def operator(self: Any, name: str) -> Any:
        """Return an operator of a compiled library. One that says what kernels support says that they do."""
        try:
            return found(self, name)
        except AttributeError:
            if name in made or name.startswith("__") or not re.match("_(moe_)?C", self.name):
                raise
        if "support" in name:
            return lambda *_, **__: True
        made.add(name)  # torch looks for it before it makes it
        for overload in ("", ".out"):
            torch.library.define(f"{self.name}::{name}{overload}", "() -> ()")
        return found(self, name)

    namespace.__getattr__ = operator

    class WithoutMemory(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
                kwargs = {**kwargs, "device": "meta"}
            return func(*args, **kwargs)

    WithoutMemory().__enter__()


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds libraries that no other finder finds; their modules have an empty class for every name.

    Args:
        libraries: names of packages and modules.
    """

    def __init__(self, libraries: Sequence[str]) -> None:
        self._libraries = libraries

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(name == library or name.startswith(f"{library}.") for library in self._libraries):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Any(type):
    """A class that has all names."""

    def __getattr__(cls, name: str) -> Any:
        return _named(name)


def _named(name: str) -> Any:
    """Return a class with a name. What it makes is false, as are answers of a Ray that was not started."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _Any(name, (), {"__bool__": lambda self: False})


class _Empty(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _named(name)
