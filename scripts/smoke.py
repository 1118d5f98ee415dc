"""Checks an installation of vllm_evict outside of a checkout. Prints the failed check, or one line if all pass.

    python scripts/smoke.py                 the pure part, without torch and vLLM
    python scripts/smoke.py --extension     the C++ extension too, with torch

A checkout on sys.path fails the first check. What an installation has to have follows from the checkout of this script:
its `pyproject.toml`, `configs/`, `triton_kernels/` and `vllm_evict/`.
"""

import argparse
import ast
import importlib.util
import subprocess
import sys
import sysconfig
from collections.abc import Container
from importlib import metadata
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

CHECKOUT = Path(__file__).resolve().parents[1]
checked = 0


def entry_points(checkout: Path) -> set[tuple[str, str, str]]:
    """Return group, name and value of each entry point that a checkout's pyproject.toml declares."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    return {(group, name, value) for group, points in groups.items() for name, value in points.items()}


def presets_of(checkout: Path, policies: Container[str]) -> set[str]:
    """Return the names of a checkout's presets that a wheel has.

    The file of a policy's own name is no preset, and a preset of `duo` names a file of gates that a wheel lacks.
    """
    names = {path.stem for path in (checkout / "configs").glob("*.yaml")}
    return {name for name in names if name not in policies and not name.startswith("duo")}


def kernels_of(checkout: Path) -> set[str]:
    """Return the names of a checkout's Triton kernels."""
    return {path.stem for path in (checkout / "triton_kernels").glob("[!_]*.py")}


def files_of(package: Path) -> set[str]:
    """Return the paths of a package's modules and data, relative to its folder, without the Triton kernels."""
    found = [path.relative_to(package) for suffix in ("py", "json", "typed") for path in package.rglob(f"*.{suffix}")]
    return {path.as_posix() for path in found if path.parts[0] != "triton_kernels"}


def defines(value: str) -> bool:
    """Return whether the module of an entry point (`module:name`) has that name. The module is not imported."""
    module, _, name = value.partition(":")
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return False
    if spec is None or spec.origin is None:
        return False
    for node in ast.parse(Path(spec.origin).read_text()).body:
        names = [alias.asname or alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        if name in names or (isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name):
            return True
    return False


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

    check("every module of the checkout", files_of(package) == files_of(CHECKOUT / "vllm_evict"))
    points = {(point.group, point.name, point.value) for point in metadata.distribution("vllm-evict").entry_points}
    check("the entry points of pyproject.toml", points == entry_points(CHECKOUT))
    for group, name, value in sorted(points):
        check(f"entry point {name} of {group}: {value}", defines(value))

    expected = presets_of(CHECKOUT, POLICIES)
    check(f"{len(expected)} presets, in the package", set(presets()) == expected)
    names = {path.name for path in (package / "configs").iterdir() if path.stem[:2] != "__"}
    check("no file that only a checkout needs", names == {f"{name}.yaml" for name in {*expected, *POLICIES} - {"duo"}})
    needed = {"lserve": {"gates": str(CHECKOUT / "configs/heads/needle")}}
    valid = (vllm_evict.KVPolicyConfig.parse({"name": name, **needed.get(name, {})}) for name in presets())
    check("every preset is valid", all(each.name for each in valid))
    listed = command("policies")
    check(f"{len(POLICIES)} policies and the presets are listed", all(n in listed for n in [*POLICIES, *expected]))
    check("a preset's fields are printed", "pressure" in command("policies", "h2o-pressure"))
    check("--version", command("--version") == f"vllm-evict {version}\n")

    check("Triton kernels, in the package", kernels_of(package) == kernels_of(CHECKOUT))
    found = [importlib.util.find_spec(f"vllm_evict.triton_kernels.{name}") for name in kernels_of(package)]
    check("Triton kernels can be imported", all(found))
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
