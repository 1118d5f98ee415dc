"""Write what the plugin relies on of one release of vLLM to snapshots/<version>.json.

    cd tests
    python -m guard.snapshot PATH VERSION

PATH is a wheel of vLLM, or a directory that holds its package (site-packages, for the one that is installed). Nothing
of it is imported. With the snapshot committed, tests/test_guard.py checks a release that cannot be installed where it
runs. Make them all anew after every change of `names` or `invariants`. Exits with 1 and says why if one does not hold.
"""

import ast
import json
import sys
from pathlib import Path

from .check import Facts, complaints, extract
from .source import Sources

SNAPSHOTS = Path(__file__).with_name("snapshots")
OURS = Sources(Path(__file__).parents[2] / "vllm_evict", "vllm_evict")


def load(version: str) -> Facts:
    return json.loads((SNAPSHOTS / f"{version}.json").read_text())


def version_of(sources: Sources) -> str:
    """The release that some sources of vLLM belong to."""
    return ast.literal_eval(sources.find("vllm._version", "__version__").node.value)


def main(path: str, version: str) -> int:
    sources = Sources(path)
    if version_of(sources) != version:
        print(f"{path} holds vLLM {version_of(sources)}, not {version}")
        return 1
    known = extract(sources, OURS)
    (SNAPSHOTS / f"{version}.json").write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    broken = complaints(known, version, OURS)
    print(*broken, sep="\n" if broken else "")
    return 1 if broken else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
