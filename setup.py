"""Builds the optional extensions; the metadata is in pyproject.toml.

With VLLM_EVICT_NO_EXT=1 none is built. With VLLM_EVICT_BUILD_CUDA=1 the CUDA kernels have to build, with 0 they are not
built. If it is unset, they are built if there are nvcc and a CUDA torch.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as error:
    torch, BuildExtension = None, build_ext
    no_torch = error

# Both folders are beside the package in a checkout, and inside it in a wheel. `triton_kernels` must not be installed at
# the top level (see triton_kernels/__init__.py).
TRITON_KERNELS = "vllm_evict.triton_kernels"
# Presets without those of duo, which name a file of gates that only a checkout has.
CONFIGS = "vllm_evict.configs"
CUDA = "vllm_evict._C_cuda"
# Machine code for A100 and Hopper, and PTX for later GPUs.
CUDA_TARGETS = (
    "arch=compute_80,code=sm_80",
    "arch=compute_90a,code=sm_90a",
    "arch=compute_90,code=compute_90",
)


def cpu_extensions() -> list[Extension]:
    if torch is None:
        print(f"vllm-evict: no C++ extension: {no_torch}")
        return []
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
    return [extension]


def cuda_extensions() -> list[Extension]:
    """Return a library for ctypes that nvcc builds alone, without torch or Python."""
    asked = os.environ.get("VLLM_EVICT_BUILD_CUDA")
    if asked not in (None, "0", "1"):
        raise SystemExit(f"VLLM_EVICT_BUILD_CUDA must be 0 or 1, not {asked!r}")
    on_cuda = torch is not None and torch.version.cuda is not None
    if asked == "0" or (asked is None and not (on_cuda and nvcc())):
        return []
    if nvcc() is None:
        raise SystemExit("VLLM_EVICT_BUILD_CUDA=1 needs nvcc, in PATH or CUDA_HOME/bin; Triton's kernels need none")
    folder = Path("csrc/cuda")
    headers = [str(path) for path in sorted(folder.iterdir()) if path.suffix != ".cu"]
    return [Extension(CUDA, [str(folder / "decode_mass.cu")], depends=headers, optional=asked is None)]


def nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")


class OptionalBuild(BuildExtension):
    def build_extensions(self):
        every = self.extensions
        self.extensions = [extension for extension in every if extension.name != CUDA]
        try:
            if self.extensions:
                super().build_extensions()
        except Exception as error:  # torch raises many types for a missing or failing compiler
            print(f"vllm-evict: no C++ extension: {error}")
        finally:
            self.extensions = every
        for extension in every:
            if extension.name == CUDA:
                self.build_cuda(extension)

    def build_cuda(self, extension: Extension) -> None:
        path = Path(self.get_ext_fullpath(extension.name))
        path.parent.mkdir(parents=True, exist_ok=True)
        targets = [word for target in CUDA_TARGETS for word in ("-gencode", target)]
        flags = ["-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
        try:
            subprocess.run([nvcc(), *flags, *targets, "-o", str(path), *extension.sources], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            if not extension.optional:
                raise SystemExit(f"vllm-evict: the CUDA kernels did not build: {error}") from None
            print(f"vllm-evict: no CUDA extension, Triton's kernels run: {error}")


def extensions() -> list[Extension]:
    if os.environ.get("VLLM_EVICT_NO_EXT") == "1":
        print("vllm-evict: no C++ extension: VLLM_EVICT_NO_EXT=1")
        return []
    return cpu_extensions() + cuda_extensions()


def version() -> dict[str, str]:
    """Return the argument `version` of `setup` if setuptools-scm is not installed (pip with --no-build-isolation).

    It comes from PKG-INFO in an sdist, and otherwise from `fallback_version` in pyproject.toml.
    """
    if importlib.util.find_spec("setuptools_scm"):
        return {}
    for file, pattern in (("PKG-INFO", r"^Version: (.+)$"), ("pyproject.toml", r'^fallback_version = "(.+)"')):
        if Path(file).exists() and (found := re.search(pattern, Path(file).read_text(), re.MULTILINE)):
            return {"version": found[1]}
    raise SystemExit("pyproject.toml got no fallback_version; expected one under [tool.setuptools_scm]")


setup(
    **version(),
    packages=[
        *find_packages(include=["vllm_evict", "vllm_evict.*"], exclude=[TRITON_KERNELS]),
        TRITON_KERNELS,
        CONFIGS,
    ],
    package_dir={TRITON_KERNELS: "triton_kernels", CONFIGS: "configs"},
    package_data={
        "vllm_evict": ["py.typed"],
        "vllm_evict.integration.start": ["touched.json"],
        "vllm_evict.tools.show": ["page.css", "page.js"],
        CONFIGS: ["*.yaml"],
    },
    # A checkout alone has the first: in a wheel it would replace triton_kernels/__init__.py, and hide its modules.
    exclude_package_data={"vllm_evict": ["triton_kernels/*"], CONFIGS: ["duo*"]},
    ext_modules=extensions(),
    cmdclass={"build_ext": OptionalBuild},
)
