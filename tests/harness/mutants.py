"""Faults seeded into the package one by one, each of which the push lanes have to find.

    python tests/harness/mutants.py                # all of them, about half an hour on 2 cores
    python tests/harness/mutants.py --only holes   # those whose name contains a word

Each mutant is a copy of the package with one line changed. Its tests run until the first one fails. A mutant that
survives ends the run with status 1. `test_load_scheduler.py` keeps the list applicable.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from faults import MUTANTS

ROOT = Path(__file__).parents[2]
#: Seconds after which a mutant's tests count as failed: it hangs.
PATIENCE = 600
#: The test that each fault still has its line, which no mutant has.
STALE = "test_seeded_faults_still_apply"


def source(mutant):
    """Text of the mutant's file with its fault.

    Raises:
        ValueError: the line to change does not stand there once.
    """
    text = (ROOT / "vllm_evict" / mutant.file).read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(
            f"mutant {mutant.name!r}: {mutant.file} has its line {text.count(mutant.old)} times; expected once; "
            "write the line as it stands now"
        )
    return text.replace(mutant.old, mutant.new)


def found_by(mutant):
    """The first of the mutant's tests that fails, and seconds until then; None if none fails."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*", "out", "build", "dist"))
        (Path(folder) / "vllm_evict" / mutant.file).write_text(source(mutant))
        for test in mutant.tests:
            name, *choice = test.split()
            pytest = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-m", "not nightly"]
            pytest += ["--deselect", f"tests/loads/test_load_scheduler.py::{STALE}"]
            (file,) = Path(folder).glob(f"tests/*/test_{name}.py")
            options = {"env": {**os.environ, "PYTHONPATH": folder}, "capture_output": True, "timeout": PATIENCE}
            try:
                done = subprocess.run([*pytest, file, *choice], cwd=folder, **options)
            except subprocess.TimeoutExpired:
                return f"{test} (hangs)", time.monotonic() - start
            if done.returncode < 0:
                return f"{test} (ends the process: signal {-done.returncode})", time.monotonic() - start
            if done.returncode == 1:
                line = next(line for line in done.stdout.decode().splitlines() if line.startswith(("FAILED", "ERROR")))
                return line.split()[1], time.monotonic() - start
            assert done.returncode == 0, done.stdout.decode()[-2000:]
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a word of their names")
    options = parser.parse_args()
    survivors = 0
    for mutant in MUTANTS:
        if options.only not in mutant.name:
            continue
        finding = found_by(mutant)
        survivors += finding is None
        what = "SURVIVES " + ", ".join(mutant.tests) if finding is None else f"{finding[1]:.0f} s, {finding[0]}"
        print(f"{mutant.name}: {what}", flush=True)
    return survivors > 0


if __name__ == "__main__":
    sys.exit(main())
