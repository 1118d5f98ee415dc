"""vLLM's Triton kernels on a CPU, under Triton's interpreter: Model Runner V2, and V1 with backends of a device.

Import this before vLLM (`VLLM_EVICT_TEST_RUNNER=v2` or `v1-triton` does it in conftest.py).
"""

import os


def use_interpreter() -> None:
    """The plugin's own Triton kernels under the interpreter. vLLM's stay off: without a driver it leaves Triton alone."""
    os.environ.setdefault("TRITON_INTERPRET", "1")


def use_model_runner_v2() -> None:
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    use_vllm_kernels()


def use_model_runner_v1() -> None:
    """With vLLM's kernels, where V2 would be the default."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    # V1 compiles a function of its sampler's, and Inductor would ask the driver below for more.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    use_vllm_kernels()


def use_vllm_kernels() -> None:
    """vLLM's Triton kernels too."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends
    from triton.backends.compiler import BaseBackend
    from triton.backends.driver import DriverBase

    class CPUDriver(DriverBase):
        """Says that it is there; the interpreter asks a driver for nothing else."""

        @classmethod
        def is_active(cls) -> bool:
            return True

    # vLLM runs its kernels on a CPU if Triton has a backend of this name.
    backends["cpu"] = type(next(iter(backends.values())))(BaseBackend, CPUDriver)
