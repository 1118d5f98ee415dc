"""Which function stands in for which kernel, and the memory that both see."""

import ctypes
import hashlib
import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

#: (module of vLLM, name of a kernel) -> digest of a kernel of this name -> a function that does the same.
STAND_INS: dict[tuple[str, str], dict[str, Callable]] = {}


def stands_for(module: str, kernel: str, *digests: str, **given: Any) -> Callable[[Callable], Callable]:
    """Register a function in the place of `vllm.v1.worker.MODULE.KERNEL`, for the kernels of these digests: vLLM's
    releases differ.

    The function takes the grid, those of the kernel's arguments that it names (`_ptr` at a name's end aside), and what is
    `given`. It returns NotImplemented, before it writes anything, for arguments that it leaves to the interpreter.
    """

    def register(stand_in: Callable) -> Callable:
        known = STAND_INS.setdefault((f"vllm.v1.worker.{module}", kernel), {})
        known |= dict.fromkeys(digests, partial(stand_in, **given))
        return stand_in

    return register


def parameters(stand_in: Callable) -> dict[str, inspect.Parameter]:
    """Name of a kernel's argument, without `_ptr` at its end -> the parameter of what stands in for the kernel."""
    _, *named = inspect.signature(stand_in).parameters.values()
    return {each.name.removesuffix("_ptr"): each for each in named}


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
            chosen[self.fn] = _choose(self)
        stand_in = chosen[self.fn]
        if stand_in is None or warmup or stand_in(grid, dict(zip(self.arg_names, args)) | kwargs) is NotImplemented:
            run(self, *args, grid=grid, warmup=warmup, **kwargs)

    launch.interpreted = run
    interpreter.InterpretedFunction.run = launch


def _choose(kernel: interpreter.InterpretedFunction) -> Callable[[tuple, dict], Any] | None:
    """Return what stands in for a kernel, as a function of the grid and the kernel's arguments by name."""
    known = STAND_INS.get((kernel.fn.__module__, kernel.fn.__name__))
    stand_in = known and known.get(digest_of(kernel.fn))
    if not stand_in:
        return None
    ours = parameters(stand_in)
    names = {name: ours[stem].name for name in kernel.arg_names if (stem := name.removesuffix("_ptr")) in ours}
    return lambda grid, given: stand_in(grid, **{names[each]: given[each] for each in names if each in given})


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
