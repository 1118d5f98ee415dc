"""Which function stands in for which kernel, and the memory that both see."""

import ctypes
import hashlib
import inspect
from collections.abc import Callable
from types import FunctionType

import numpy as np
import torch
from triton.runtime import interpreter

#: (module of vLLM, name of a kernel) -> a function that does the same, and the digest of the kernel that it was written for.
STAND_INS: dict[tuple[str, str], tuple[Callable, str]] = {}


def stands_for(module: str, kernel: str, digest: str) -> Callable[[Callable], Callable]:
    """Register a function in the place of `vllm.v1.worker.MODULE.KERNEL`, for the kernel of this digest.

    The function takes the grid and the kernel's arguments. It returns NotImplemented, before it writes anything, for
    arguments that it leaves to the interpreter.
    """

    def register(stand_in: Callable) -> Callable:
        STAND_INS[f"vllm.v1.worker.{module}", kernel] = stand_in, digest
        return stand_in

    return register


def digest_of(kernel: FunctionType) -> str:
    """Return a digest of the sources of a kernel and of the functions of vLLM's that it calls."""
    found, left = {}, [kernel]
    while left:
        function = left.pop()
        found[function.__module__, function.__name__] = inspect.getsource(function)
        called = [function.__globals__.get(name) for name in function.__code__.co_names]
        left += [
            each.fn
            for each in called
            if isinstance(each, interpreter.InterpretedFunction)
            and each.fn.__module__.startswith("vllm.")
            and (each.fn.__module__, each.fn.__name__) not in found
        ]
    return hashlib.sha256("".join(found[name] for name in sorted(found)).encode()).hexdigest()[:12]


def install() -> None:
    """Have kernels' launches call what stands in for them. Kernels of other digests are interpreted."""
    run, chosen = interpreter.InterpretedFunction.run, {}

    def launch(self, *args, grid, warmup, **kwargs):
        if self.fn not in chosen:
            stand_in, digest = STAND_INS.get((self.fn.__module__, self.fn.__name__), (None, ""))
            chosen[self.fn] = stand_in if stand_in and digest == digest_of(self.fn) else None
        stand_in = chosen[self.fn]
        if stand_in is not None and not warmup:
            given = {name: value for name, value in kwargs.items() if name not in ("num_warps", "num_stages")}
            if stand_in(grid, *args, **given) is not NotImplemented:
                return
        run(self, *args, grid=grid, warmup=warmup, **kwargs)

    launch.interpreted = run
    interpreter.InterpretedFunction.run = launch


def use_torch() -> None:
    """Have vLLM take the largest logits by torch, as it does on a CPU without Triton: its kernel fails in the interpreter."""
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False


def memory(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory from a tensor's first element on, as a kernel sees its pointer: [elements of the storage left]."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return tensor.as_strided((size,), (1,)).numpy()


def rows(tensor: torch.Tensor, count: int, stride: int, width: int) -> np.ndarray:
    """Return rows of a tensor's memory: [count, width]."""
    return tensor.as_strided((count, width), (stride, 1)).numpy()


def ints_at(address: int, count: int) -> np.ndarray:
    """Return int32 numbers at an address: [count]."""
    return np.frombuffer((ctypes.c_int32 * int(count)).from_address(int(address)), dtype=np.int32)
