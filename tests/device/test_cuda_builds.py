"""CUDA kernels are built by setup.py and compiled by nvcc."""

import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import setuptools
import torch
from setuptools import Distribution
from test_cuda_kernels import ROOT, SOURCE

# ---- built by setup.py


@pytest.fixture
def set_up(monkeypatch):
    """Runs setup.py: its names, and what it passed to setup()."""
    monkeypatch.chdir(ROOT)

    def run(cuda=None, nvcc="/bin/nvcc", **environment):
        passed = {}
        monkeypatch.setattr(setuptools, "setup", lambda **options: passed.update(options))
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(shutil, "which", lambda *_, **__: nvcc)
        monkeypatch.delenv("VLLM_EVICT_BUILD_CUDA", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        names = runpy.run_path("setup.py")
        return names, {each.name: each for each in passed["ext_modules"]}

    return run


def test_cuda_is_built_where_it_can_be_or_is_asked_for(set_up):
    def built(*args, **options):
        return {name: each.optional for name, each in set_up(*args, **options)[1].items()}

    cpu, cuda = {"vllm_evict._C_cpu": True}, "vllm_evict._C_cuda"
    assert built() == built("13.0", nvcc=None) == built("13.0", VLLM_EVICT_BUILD_CUDA="0") == cpu
    assert built("13.0") == cpu | {cuda: True}
    assert built(VLLM_EVICT_BUILD_CUDA="1") == cpu | {cuda: False}
    assert built("13.0", VLLM_EVICT_NO_EXT="1") == {}
    with pytest.raises(SystemExit, match="needs nvcc"):
        built(nvcc=None, VLLM_EVICT_NO_EXT="0", VLLM_EVICT_BUILD_CUDA="1")
    with pytest.raises(SystemExit, match="0 or 1, not 'yes'"):
        built(VLLM_EVICT_BUILD_CUDA="yes")


def test_a_build_that_fails_is_one_line_unless_it_was_asked_for(set_up, tmp_path, capfd):
    for asked in (False, True):
        names, built = set_up("13.0", nvcc=shutil.which("false"), **({"VLLM_EVICT_BUILD_CUDA": "1"} if asked else {}))
        command = names["OptionalBuild"](Distribution())
        command.get_ext_fullpath = lambda name: str(tmp_path / name)
        command.extensions = [built["vllm_evict._C_cuda"]]
        if not asked:
            command.build_extensions()
            (line,) = capfd.readouterr().out.splitlines()
            assert line.startswith("vllm-evict: no CUDA extension, Triton's kernels run: ")
            continue
        with pytest.raises(SystemExit, match="the CUDA kernels did not build"):
            command.build_extensions()


def test_a_source_distribution_has_the_kernels():
    """setup.py names what it builds on this machine; the manifest names the rest."""
    assert "graft csrc" in (ROOT / "MANIFEST.in").read_text().splitlines()


# ---- compiled by nvcc


@pytest.fixture(scope="module", params=["80", "90a", "100"])
def compiled(request, tmp_path_factory):
    """Return the words of ptxas on each kernel for an architecture, and its machine code if there is a disassembler."""
    nvcc = shutil.which("nvcc") or pytest.skip("no nvcc")
    path = tmp_path_factory.mktemp("nvcc") / "decode_mass.cubin"
    target = f"arch=compute_{request.param},code=sm_{request.param}"
    command = [nvcc, "-std=c++17", "-O3", "-gencode", target, "-Xptxas", "-v", "-Werror", "all-warnings", "-cubin"]
    said = subprocess.run([*command, "-o", path, SOURCE], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    kernels = {}
    for part in said.stderr.split("Compiling entry function")[1:]:
        name = re.search(r"(attend|combine)I\S*(Bf16|Half)E(?:Li(\d+)ELi(\d)ELb(\d))?", part).groups()
        numbers = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        registers = re.search(r"Used (\d+) registers", part)
        kernels[name] = (int(registers[1]), *map(int, numbers.groups()))
    return request.param, kernels, path


def test_kernels_compile_and_do_not_spill(compiled):
    arch, kernels, _ = compiled
    attend = {name: registers for name, (registers, *_) in kernels.items() if name[0] == "attend"}
    assert all(registers <= 128 for name, (registers, *_) in kernels.items() if name[0] == "combine"), kernels
    assert len(attend) == 2 * 5 * 2 and len(kernels) == len(attend) + 2
    assert all(spilled == [0, 0, 0] for _, *spilled in kernels.values()), kernels
    for (_, _, dim, tiles, bulk), registers in attend.items():
        # 65,536 registers for as many programs of 192 threads as a plan puts on an SM; CUDA gives them out by eights.
        together = 2 if tiles == "2" or dim == "256" else 3
        assert -(-registers // 8) * 8 * 192 * together <= 65_536, (dim, tiles, registers)
        if arch == "80" and bulk == "1":
            assert registers < 16  # nothing but the trap


def test_machine_code_has_the_instructions_that_were_meant(compiled):
    arch, _, path = compiled
    import triton

    cuobjdump = shutil.which("cuobjdump") or Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not Path(cuobjdump).exists():
        pytest.skip("no cuobjdump")
    dump = subprocess.run([cuobjdump, "-sass", path], capture_output=True, text=True, check=True).stdout
    for part in dump.split("Function : ")[1:]:
        name = part.split()[0]
        code = re.findall(r"/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_.]*)", part)
        assert not [each for each in code if re.match(r"LDL|STL|ATOM(?!S\.ARRIVE)|RED\.", each)], name
        bulk = "Lb1" in name
        if "attend" not in name or (arch == "80" and bulk):
            continue
        count = {
            each: sum(word.startswith(each) for word in code) for each in ("HMMA", "LDSM", "MOVM", "UBLKCP", "LDGSTS")
        }
        dim, tiles = map(int, re.search(r"Li(\d+)ELi(\d)E", name).groups())
        assert count["HMMA"] == 2 * dim // 16 * tiles and count["LDSM"] == 2 * dim // 16 and count["MOVM"] == 2 * tiles
        assert (count["UBLKCP"] > 0) == bulk and (count["LDGSTS"] > 0) != bulk, (name, count)
        assert all(word.endswith(".128") for word in code if word.startswith("LDGSTS")), name  # copies of 16 bytes
