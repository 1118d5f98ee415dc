"""The protocol and the clock of all runners of benchmarks/peers. Needs the standard library only.

    python peer_NAME.py load|bfloat16|served|needles CASES.json RESULT.json CASE [CASE ...]

A runner reads the cases (cases.py has the format), runs those named, one after the other, and writes a JSON of
`{"versions": {...}, "rows": [...]}`. A row of `needles` has the answers of one case at one budget, in the order of the
prompts; a row of the other parts is a `Load`. A case that the peer refuses is a row with `error`.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


@dataclass
class Load:
    """One batch, timed from its first request to its last token.

    Attributes:
        case: name.
        requests: that came at once.
        seconds, cpu_seconds: wall time, and CPU time of the process.
        output_tokens: of all requests.
        first: seconds to the first token of each request.
        peak_kv_bytes: most bytes of keys and values that were held at once.
        at_once: most requests that ran at once.
        preemptions: requests that lost their cache and were computed again; None if the peer does not count.
        answers: token ids of the first tokens of each request, of `served` alone.
    """

    case: str
    requests: int
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    output_tokens: int = 0
    first: list[float] = field(default_factory=list)
    peak_kv_bytes: int = 0
    at_once: int = 0
    preemptions: int | None = None
    answers: list[list[int]] | None = None

    def keep(self, outputs: list[list[int]], spec: dict) -> None:
        """Take the outputs' tokens, and their beginnings as answers where the prompts are questions."""
        self.output_tokens = sum(map(len, outputs))
        if "answer" in spec:
            self.answers = [tokens[: spec["answer"]] for tokens in outputs]


class Clock:
    """Wall and CPU time since it was made."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def stop(self, load: Load) -> Load:
        load.seconds, load.cpu_seconds = self.seconds, time.process_time() - self.cpu
        return load

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.wall


def versions(*packages: str) -> dict[str, str]:
    """Installed versions; packages that are missing are left out."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def one_line(error: BaseException) -> str:
    """An error's own words, at most 300 characters, without paths."""
    words = " ".join(str(error).split()) or type(error).__name__
    return " ".join(word if word.count("/") < 2 else Path(word).name for word in words.split())[:300]


def main(
    load: Callable[[str, dict], Iterable[Load]],
    needles: Callable[[list[str], dict], Iterable[dict[str, Any]]],
    packages: tuple[str, ...],
) -> None:
    """Run what the command line names, and write the result.

    Args:
        load: of a case's name and a part of the cases: a `Load` for each number of requests in its `batches`.
        needles: of cases' names and `cases["needles"]`: rows `{"case", "setting", "budget", "answers"}`.
        packages: whose versions are part of the result.
    """
    what, cases, out, *names = sys.argv[1:]
    spec, rows = json.loads(Path(cases).read_text()), []
    if what == "needles":
        rows += needles(names, spec["needles"])
    else:
        for name in names:
            try:
                rows += [asdict(row) for row in load(name, spec[what])]
            except Exception as error:  # a peer's own refusal is a result
                rows.append({"case": name, "error": one_line(error)})
    Path(out).write_text(json.dumps({"versions": versions(*packages), "rows": rows}))
