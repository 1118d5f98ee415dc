"""Checks an installation of vllm_evict outside of a checkout. Prints the failed check, or one line if all pass.

    python scripts/smoke.py                 the pure part, without torch and vLLM
    python scripts/smoke.py --extension     the C++ extension too, with torch

A checkout on sys.path fails the first check.
"""

import argparse
import importlib.util
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

KERNELS = {
    "combine", "compact", "decode_classes", "decode_mass", "fold", "mass_from_lse", "put", "query_lse", "resident_view",
    "take", "tiles",
}  # fmt: skip
PRESETS = {"endless", "h2o-20", "h2o-last", "h2o-mean", "h2o-pressure", "snapkv-whole", "streaming-llm"}


checked = 0


def check(what: str, right: object) -> None:
    """Count a check. If it failed, print one line and exit with status 1."""
    global checked
    checked += 1
    if not right:
        raise SystemExit(f"smoke  failed: {what}")


def command(*arguments: str) -> str:
    """Run the installed command, which has to succeed, and return its output."""
    script = Path(sysconfig.get_path("scripts"), "vllm-evict")
    done = subprocess.run([str(script), *arguments], capture_output=True, text=True)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    check(f"vllm-evict {' '.join(arguments)}", done.returncode == 0)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--extension", action="store_true", help="the C++ extension has to be there, and compute")
    extension = parser.parse_args().extension

    sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() != Path(__file__).resolve().parent]
    import vllm_evict
    from vllm_evict.config import presets
    from vllm_evict.policies import POLICIES

    package = Path(vllm_evict.__file__).parent
    version = metadata.version("vllm-evict")
    check(f"vllm_evict {version} in {package}", "site-packages" in package.parts)
    check("its version is the distribution's", vllm_evict.__version__ == version)

    points = {(point.group, point.value) for point in metadata.distribution("vllm-evict").entry_points}
    for group, function in (("vllm.general_plugins", "register"), ("vllm.platform_plugins", "platform")):
        check(f"entry point of {group}", (group, f"vllm_evict.integration.plugin:{function}") in points)
    check("the module of the entry points", importlib.util.find_spec("vllm_evict.integration.plugin"))

    check(f"{len(PRESETS)} presets, in the package", set(presets()) == PRESETS)
    check("no preset that needs a file of a checkout", not list((package / "configs").glob("duo*")))
    check("every preset is valid", all(vllm_evict.KVPolicyConfig.parse(name).name for name in presets()))
    listed = command("policies")
    check(f"{len(POLICIES)} policies and the presets are listed", all(n in listed for n in [*POLICIES, *PRESETS]))
    check("a preset's fields are printed", "pressure" in command("policies", "h2o-pressure"))
    check("--version", command("--version") == f"vllm-evict {version}\n")

    modules = {path.stem for path in (package / "triton_kernels").glob("[!_]*.py")}
    check("Triton kernels, in the package", modules == KERNELS)
    found = {importlib.util.find_spec(f"vllm_evict.triton_kernels.{name}") for name in modules}
    check("Triton kernels can be imported", None not in found)
    check("no top-level triton_kernels", importlib.util.find_spec("triton_kernels") is None)

    found = importlib.util.find_spec("vllm_evict._C_cpu")
    check(f"C++ extension {'is there' if extension else 'is not there'}", bool(found) == extension)
    if extension:
        attention_mass()
    print(f"smoke  ok: {checked} checks of vllm-evict {version}, {'with' if extension else 'without'} C++ extension")


def attention_mass() -> None:
    """Measure one query on a block of 16 equal keys by the extension."""
    import torch

    from vllm_evict.compute.kernels.mass import block_mass, kernel_path
    from vllm_evict.compute.kernels.paged import PagedAttention

    check(f"attention mass by {kernel_path()}", kernel_path() != "torch reference")
    mass, offsets, length = torch.zeros(1, 1, 1), torch.tensor([0, 1]).int(), torch.tensor([16]).int()
    block = torch.zeros(1, 1, 16, 16), torch.zeros(1, 1).int()
    block_mass(PagedAttention(torch.zeros(1, 1, 16), *block, offsets, length, 1.0, mass=mass))
    check("the mass of one block is 1", abs(mass.item() - 1) < 1e-6)


if __name__ == "__main__":
    main()
