"""Write what the plugin relies on of releases of vLLM to facts.json and vllm_evict/integration/start/touched.json.

    cd tests/harness
    python -m guard.snapshot PATH...

A PATH is a wheel of vLLM, or a directory that holds its package (site-packages, for the one that is installed). Nothing
of it is imported. With the facts committed, tests/compat/test_guard.py checks releases that cannot be installed where it
runs. Take them from the wheels of all releases after a change of `names` or `invariants`. Exits with 1 and says why if
one does not hold.

facts.json maps each fact to what releases have: version -> what is true from that release on.
"""

import ast
import json
import re
import sys
from pathlib import Path

from packaging.version import Version

from vllm_evict.integration.start.versions import TOUCHED, digest

from .check import Facts, complaints, extract, touched
from .seams import OURS
from .source import Sources

FACTS = Path(__file__).with_name("facts.json")


def load(version: str) -> Facts:
    """Return the facts of a release, as `check.extract` takes them."""
    known = json.loads(FACTS.read_text())
    return {part: _in_release(facts, version) for part, facts in known.items() if part != "releases"}


def _in_release(facts: Facts, version: str) -> Facts:
    """Return each fact that is known of a release, with its value there."""
    found = {}
    for name, since in facts.items():
        if begun := [each for each in since if Version(each) <= Version(version)]:
            found[name] = since[begun[-1]]
    return found


def write_facts(taken: Facts, version: str) -> None:
    """Put a release's facts into facts.json. Facts that no table asks for any more go."""
    known = json.loads(FACTS.read_text()) if FACTS.exists() else {"releases": []}
    others = {each: load(each) for each in known["releases"]}
    of_releases = {**others, version: taken}
    releases = sorted(of_releases, key=Version)
    written: Facts = {"releases": releases}
    for part, facts in taken.items():
        written[part] = {}
        for name in facts:
            written[part][name] = since = {}
            for release in releases:
                there = of_releases[release][part]
                if name in there and (not since or there[name] != since[[*since][-1]]):
                    since[release] = there[name]
    parts = [f' "{part}": {_lines(facts)}' for part, facts in written.items()]
    FACTS.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def _lines(facts: Facts | list[str]) -> str:
    """Return JSON with a fact a line."""
    if isinstance(facts, list):
        return json.dumps(facts)
    return "{\n" + ",\n".join(f"  {json.dumps(name)}: {json.dumps(since)}" for name, since in facts.items()) + "\n }"


def version_of(sources: Sources) -> str:
    """The release that some sources of vLLM belong to."""
    return ast.literal_eval(sources.find("vllm._version", "__version__").node.value)


def main(path: str) -> int:
    sources = Sources(path)
    version = version_of(sources).partition("+")[0]
    known = extract(sources, OURS)
    write_facts(known, version)
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
