"""Builds the optional C++ extension; the metadata is in pyproject.toml."""

import os

from setuptools import find_packages, setup

# Installed inside the package: vLLM looks for a top-level `triton_kernels` of another project. In a checkout the link
# vllm_evict/triton_kernels leads there, so that any checkout imports its own.
TRITON_KERNELS = "vllm_evict.triton_kernels"


def extension_options() -> dict:
    """What setup() needs to build `vllm_evict._C_cpu`; nothing, and a line why, where it cannot."""
    if os.environ.get("VLLM_EVICT_NO_EXT") == "1":
        print("vllm-evict: no C++ extension: VLLM_EVICT_NO_EXT=1")
        return {}
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError as error:
        print(f"vllm-evict: no C++ extension: {error}")
        return {}

    class OptionalBuild(BuildExtension):
        def build_extensions(self):
            try:
                super().build_extensions()
            except Exception as error:  # a missing or failing compiler: torch raises many types
                print(f"vllm-evict: no C++ extension: {error}")

    folder = "csrc/cpu"
    files = [f"{folder}/{name}" for name in sorted(os.listdir(folder))]
    extension = CppExtension(
        "vllm_evict._C_cpu",
        sources=[file for file in files if file.endswith(".cpp")],
        depends=[file for file in files if file.endswith(".h")],
        extra_compile_args=["-O3", "-g0", "-std=c++20", "-fopenmp", "-fvisibility=hidden"],
        extra_link_args=["-fopenmp"],
        optional=True,
    )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": OptionalBuild}}


setup(
    packages=[*find_packages(include=["vllm_evict", "vllm_evict.*"], exclude=[TRITON_KERNELS]), TRITON_KERNELS],
    package_dir={TRITON_KERNELS: "triton_kernels"},
    **extension_options(),
)
