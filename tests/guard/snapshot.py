"""Write what `touches` asks of one release of vLLM to snapshots/<version>.json.

    cd tests
    python -m guard.snapshot PATH VERSION

PATH is a wheel of vLLM, or a directory that holds its package (site-packages, for the one that is installed). Nothing
of it is imported. With the snapshot committed, tests/test_compat.py checks a release that cannot be installed where it
runs. Make them all anew after every change of `touches`. Exits with 1 and says why if a touch does not hold.
"""

import ast
import json
import sys
from pathlib import Path

from .check import Facts, complaints, extract
from .source import Sources
from .touches import TOUCHES

SNAPSHOTS = Path(__file__).with_name("snapshots")
#: The directory of the package vllm_evict.
OURS = Path(__file__).parents[2] / "vllm_evict"


def load(version: str) -> dict[str, Facts | None]:
    return json.loads((SNAPSHOTS / f"{version}.json").read_text())["touches"]


def version_of(sources: Sources) -> str:
    """The release that some sources of vLLM belong to."""
    return ast.literal_eval(sources.find("vllm._version", "__version__").node.value)


def main(path: str, version: str) -> int:
    sources = Sources(path)
    if version_of(sources) != version:
        print(f"{path} holds vLLM {version_of(sources)}, not {version}")
        return 1
    taken = extract(sources)
    text = json.dumps({"vllm": version, "touches": taken}, indent=1, sort_keys=True)
    (SNAPSHOTS / f"{version}.json").write_text(text + "\n")
    ours = Sources(OURS, "vllm_evict")
    broken = [(touch, line) for touch in TOUCHES for line in complaints(touch, taken[touch.where], ours)]
    for touch, line in broken:
        print(f"{touch.where}: {line}")
    return 1 if broken else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
