"""Write what the plugin relies on of releases of vLLM to snapshots/<version>.json and vllm_evict/integration/start/touched.json.

    cd tests
    python -m guard.snapshot PATH...

A PATH is a wheel of vLLM, or a directory that holds its package (site-packages, for the one that is installed). Nothing
of it is imported. With the snapshot committed, tests/compat/test_guard.py checks a release that cannot be installed where it
runs. Make them all anew after every change of `names` or `invariants`. Exits with 1 and says why if one does not hold.
"""

import ast
import json
import re
import sys
from pathlib import Path

from packaging.version import Version

from vllm_evict.integration.start.versions import TOUCHED, digest

from .check import Facts, complaints, extract, touched
from .source import Sources

SNAPSHOTS = Path(__file__).with_name("snapshots")
OURS = Sources(Path(__file__).parents[3] / "vllm_evict", "vllm_evict")


def load(version: str) -> Facts:
    return json.loads((SNAPSHOTS / f"{version}.json").read_text())


def version_of(sources: Sources) -> str:
    """The release that some sources of vLLM belong to."""
    return ast.literal_eval(sources.find("vllm._version", "__version__").node.value)


def main(path: str) -> int:
    sources = Sources(path)
    version = version_of(sources).partition("+")[0]
    known = extract(sources, OURS)
    (SNAPSHOTS / f"{version}.json").write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    write_digests(sources, version)
    broken = complaints(known, version, OURS)
    print(version, "holds" if not broken else "does not hold:", *broken, sep="\n" if broken else " ")
    return 1 if broken else 0


def write_digests(sources: Sources, version: str) -> None:
    """The release's columns of touched.json; rows are those of the tables as they are now."""
    known = json.loads(TOUCHED.read_text()) if TOUCHED.exists() else {"releases": [], "files": {}, "functions": {}}
    releases = sorted({*known["releases"], version}, key=Version)

    def row(before: list[str | None] | None, here: str | None) -> list[str | None]:
        values = dict(zip(known["releases"], before or []))
        return [here if release == version else values.get(release) for release in releases]

    functions, files = {}, set()
    for where in sorted(touched()):
        before = known["functions"].get(where, {"in": [], "code": None})
        sources.visited.clear()
        code = digest(sources, where)
        functions[where] = {"in": sorted({*before["in"], *sources.visited}), "code": row(before["code"], code)}
        files |= {*functions[where]["in"]}
    known = {
        "files": {module: row(known["files"].get(module), sources.digest(module)) for module in sorted(files)},
        "functions": functions,
        "releases": releases,
    }
    rows = re.sub(r"\[[^]{]*\]", lambda row: json.dumps(json.loads(row[0])), json.dumps(known, indent=1))
    TOUCHED.write_text(rows + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(__doc__)
    sys.exit(max([main(path) for path in sys.argv[1:]]))
