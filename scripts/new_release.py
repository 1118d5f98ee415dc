"""Looks for a new release of vLLM, and reports what came of it; .github/workflows/new-vllm.yml runs it every day.

python scripts/new_release.py             print the newest release on the index, if the plugin does not know it
python scripts/new_release.py RELEASE     print a report on what ran: Markdown, from benchmarks/results/versions
"""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from packaging.version import Version

ROOT = Path(__file__).parents[1]


def newest(index: str, known: tuple[str, ...]) -> str:
    """Return the newest release in what `pip index versions` prints, or "" if it is not newer than the known ones."""
    (listed,) = re.findall(r"^Available versions: (.*)$", index, re.MULTILINE)
    release = max((Version(each) for each in listed.split(", ")), key=lambda each: (not each.is_prerelease, each))
    return "" if release.is_prerelease or release <= max(map(Version, known)) else str(release)


def known_releases(root: Path = ROOT) -> tuple[str, ...]:
    """Return the releases that the plugin serves; nothing of vLLM's has to be installed for that."""
    source = (root / "vllm_evict/integration/start/versions.py").read_text()
    (found,) = re.findall(r"^CHECKED = (\(.*?\))", source, re.MULTILINE)
    return ast.literal_eval(found)


def report(release: str, result: dict[str, Any] | None) -> str:
    """Return a report on a release, as Markdown.

    Args:
        release: of vLLM.
        result: the content of its file in benchmarks/results/versions; None if no test ran.
    """
    lines = [f"vLLM {release} is out.", ""]
    if result is None:
        return "\n".join(
            [*lines, "No test ran: its environment was not made, or no file came to its end. See the log."]
        )
    if "borrowed" in result:
        lines += [f"It has no wheel for CPUs; it ran on the compiled parts of {result['borrowed']['donor']}.", ""]
    lines += ["| Model Runner | files | passed | skipped | failed |", "|---|---:|---:|---:|---:|"]
    failed = []
    for runner, files in sorted(result["runs"].items(), reverse=True):
        entries = files.values()
        failed += [f"- {runner}: `{name}`" for entry in entries for name in entry["failed"]]
        counts = [sum(entry[count] for entry in entries) for count in ("passed", "skipped")]
        counts.append(sum(len(entry["failed"]) for entry in entries))
        lines.append(f"| {runner.upper()} | {len(files)} | {' | '.join(map(str, counts))} |")
    return "\n".join([*lines, "", "Failed:" if failed else "Nothing failed.", *failed])


def main(arguments: list[str]) -> None:
    if arguments:
        path = ROOT / f"benchmarks/results/versions/{arguments[0]}.json"
        print(report(arguments[0], json.loads(path.read_text()) if path.exists() else None))
        return
    command = [sys.executable, "-m", "pip", "index", "versions", "vllm"]
    found = newest(subprocess.run(command, capture_output=True, text=True, check=True).stdout, known_releases())
    if found:
        print(found)


if __name__ == "__main__":
    main(sys.argv[1:])
