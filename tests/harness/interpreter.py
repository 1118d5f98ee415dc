"""vLLM's Triton kernels on a CPU, under Triton's interpreter: Model Runner V2, and V1 with backends of a device.

Import this before vLLM (`VLLM_EVICT_TEST_RUNNER=v2` or `v1-triton` does it in preparation.py).
"""

import dataclasses
import functools
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from types import SimpleNamespace
from unittest.mock import patch

from packaging.version import Version


def use_interpreter() -> None:
    """The plugin's own Triton kernels under the interpreter. vLLM's stay off: without a driver it leaves Triton alone."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    _cut_its_overhead()


def use_model_runner_v2() -> None:
    """vLLM's own choice where Triton works, with stand-ins in the place of its kernels. Other processes have V1."""
    if Version(version("vllm")) < Version("0.32"):
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    use_vllm_kernels()
    import stand_ins

    stand_ins.install()


def use_model_runner_v1() -> None:
    """With vLLM's kernels, where V2 would be the default."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    # V1 compiles a function of its sampler's, and Inductor would ask the driver below for more.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    use_vllm_kernels()


def use_vllm_kernels() -> None:
    """vLLM's Triton kernels too."""
    os.environ["TRITON_INTERPRET"] = "1"
    _cut_its_overhead()
    from triton.backends import backends
    from triton.backends.compiler import BaseBackend
    from triton.backends.driver import DriverBase

    class CPUDriver(DriverBase):
        """Says that it is there; the interpreter asks a driver for nothing else. Modules whose kernels are autotuned
        make one when they are imported.
        """

        get_active_torch_device = get_benchmarker = get_current_target = map_python_to_cpp_type = lambda *_: None

        @classmethod
        def is_active(cls) -> bool:
            return True

    # vLLM runs its kernels on a CPU if Triton has a backend of this name.
    backends["cpu"] = type(next(iter(backends.values())))(BaseBackend, CPUDriver)


def use_kernels(monkeypatch) -> None:
    """Where the plugin runs other kernels on a CPU, those of a device make views, fold sums and take mass in."""
    from vllm_evict.compute import choosing, index, measure, reach, sums, tokens, views
    from vllm_evict.compute.attention import device
    from vllm_evict.triton_kernels import reach as reaching
    from vllm_evict.triton_kernels import reach_signs
    from vllm_evict.triton_kernels.fold import fold
    from vllm_evict.triton_kernels.put import put
    from vllm_evict.triton_kernels.resident_view import resident_view
    from vllm_evict.triton_kernels.take import take

    for module, kernel in (
        (views, resident_view),
        (sums, fold),
        (sums, take),
        (measure, take),
        (device, take),
        (tokens, put),
        (choosing, reaching.reach),
        (choosing, reaching.copy_blocks),
        (reach, reaching.copy_blocks),
        (index, reach_signs.store_signs),
    ):
        monkeypatch.setattr(module, kernel.__name__, kernel)


@contextmanager
def in_place_of(cpu_backend: str, backend: str) -> Iterator[None]:
    """Context in which vLLM takes a backend, a class by its path, where it asks for one of the CPU's."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends import registry

    selector._cached_get_attn_backend.cache_clear()
    with patch.dict(registry._ATTN_OVERRIDES, {registry.AttentionBackendEnum[cpu_backend]: backend}):
        yield
    selector._cached_get_attn_backend.cache_clear()


def _cut_its_overhead() -> None:
    """Work that the interpreter repeats is done once: it takes longer than the small kernels of tests. What they
    compute stays the interpreter's own."""
    import triton
    from triton import language
    from triton.runtime import interpreter

    # Written for this version; others do without.
    if not triton.__version__.startswith("3.9.") or getattr(interpreter._patch_lang, "once", False):
        return

    # In every launch, and in every call of a function inside of a kernel, the language's hundreds of members are patched
    # and restored. Nothing compiles kernels in a process that interprets them.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    patched = interpreter._LangPatchScope()
    interpreter._patch_lang = lambda fn: patched
    interpreter._patch_lang.once = True
    # Arguments are copied from a device and back. On a CPU each storage, a whole KV cache, would be copied onto itself.
    interpreter.GridExecutor._init_args_hst = lambda self, *args: args
    interpreter.GridExecutor._restore_args_dev = lambda self, *args: None
    # Sums of integers are computed again with 64 bits, and compared, for an assertion that is off.
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    _take_masks(interpreter)
    _cache_types(language.core, interpreter)


def _take_masks(interpreter) -> None:
    """A mask that numpy has made integers is one of booleans, as in a compiled kernel: vLLM's search for n-grams has
    one.
    """
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def create_masked_load(self, ptrs, mask, *args, **kwargs):
        mask.data = mask.data.astype(bool, copy=False)
        return load(self, ptrs, mask, *args, **kwargs)

    def create_masked_store(self, ptrs, value, mask, *args, **kwargs):
        mask.data = mask.data.astype(bool, copy=False)
        return store(self, ptrs, value, mask, *args, **kwargs)

    builder.create_masked_load, builder.create_masked_store = create_masked_load, create_masked_store


def _cache_types(core, interpreter) -> None:
    """Every operation makes a tensor, and a type with a shape: shapes and names that were seen before are kept."""
    read, numpy_types = interpreter._get_np_dtype, {}

    def get_np_dtype(dtype):
        if dtype.name not in numpy_types:
            numpy_types[dtype.name] = read(dtype)
        return numpy_types[dtype.name]

    def sizes(shape):
        """Of a tensor: how many elements, and its shape."""
        return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape])

    @functools.cache
    def known(shape, element):
        whole = core.tuple(list(shape))
        return whole, core.validate_block_shape(whole), f"<{whole}, {element}>", sizes(shape)

    def block_type(self, element_ty, shape):
        if not shape:
            raise TypeError("0d block_type is forbidden")
        shape = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        self.element_ty = element_ty
        self.shape, self.numel, self.name, self.sizes = known(shape, element_ty.name)

    def tensor(self, handle, type, scalar=sizes(())):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.sizes if type.is_block() else scalar

    interpreter._get_np_dtype = get_np_dtype
    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
