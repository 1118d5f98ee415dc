"""Results on disk: one JSON object a line, safe once written, and never computed twice."""

import hashlib
import json
from pathlib import Path
from typing import Any

from . import EvalError

FILE = "rows.jsonl"
Row = dict[str, Any]

#: Fields that identify a row; rows with the same key ask the same policy the same question. Some rows have
#: further ones: those of sessions the turn and the depths of all turns' facts, those of other haystacks than `grammar`
#: the haystack.
KEY = (
    *("model", "backend", "chat", "task", "prompt", "length", "depth", "index", "seed"),
    *("setting", "chunk", "policy_config", "budget", "engine_args"),
)
FURTHER = ("turn", "depths", "haystack")


def key_of(row: Row) -> str:
    values = [row.get(name) for name in KEY] + [row[name] for name in FURTHER if name in row]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def read(path: Path) -> tuple[list[Row], int | None]:
    """Return the rows of a file, and the start of its last line if that is half written (None if it is whole).

    Raises:
        EvalError: a line in the middle is not a row.
    """
    rows, start, half = [], 0, None
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not {"key", "model", "task", "policy", "setting", "score"} <= row.keys():
                raise ValueError("not a row of results")
            rows.append(row)
        except ValueError as error:
            if number < len(lines) or line.endswith(b"\n"):
                words = f"{path}, line {number} is no row of results ({error}): mend or move the file"
                raise EvalError(words) from None
            half = start
        start += len(line)
    return rows, half


class ResultRows:
    """The rows of a results folder, for appending.

    A half-written last line of a killed run is removed; then `mended` is True.

    Args:
        folder: created if it is missing.
        model: evaluated model; a folder holds the rows of one model.
        file: name of the file in the folder.

    Raises:
        EvalError: the folder holds another model's rows, or is damaged.
    """

    def __init__(self, folder: Path, model: str, file: str = FILE):
        self.path = folder / file
        self.rows: list[Row] = []
        self.mended = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EvalError(f"{folder}: {error.strerror or error}") from None
        if self.path.exists():
            self._take_over()
        others = {row["model"] for row in self.rows} - {model}
        if others:
            raise EvalError(f"{folder} holds rows of {', '.join(sorted(others))}: give another --out for {model}")
        self.done = {row["key"] for row in self.rows}

    def _take_over(self) -> None:
        self.rows, half = read(self.path)
        with self.path.open("r+b") as file:
            if half is not None:
                file.truncate(half)
                self.mended = True
            file.seek(0, 2)
            if file.tell():
                file.seek(-1, 2)
                if file.read(1) != b"\n":
                    file.write(b"\n")

    def append(self, rows: list[Row]) -> None:
        """Append rows to the file."""
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        self.rows += rows
        self.done |= {row["key"] for row in rows}
