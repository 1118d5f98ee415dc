"""Results on disk: one JSON object a line, never lost, and never done twice."""

import hashlib
import json
from pathlib import Path
from typing import Any

from . import EvalError

FILE = "rows.jsonl"
Row = dict[str, Any]

#: Fields that say which row it is; the same key is the same question to the same policy.
KEY = (
    *("model", "backend", "chat", "task", "prompt", "length", "depth", "index", "seed"),
    *("setting", "chunk", "policy_config", "budget", "engine_args"),
)


def key_of(row: Row) -> str:
    return hashlib.sha256(json.dumps([row.get(name) for name in KEY], sort_keys=True).encode()).hexdigest()


def read(path: Path) -> tuple[list[Row], int | None]:
    """Rows of a file, and where its last line starts if that was only half written (None if it is whole).

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


class Rows:
    """The rows of a results folder, for appending.

    A half-written last line, what a kill leaves, is cut off; `mended` says so.

    Args:
        folder: made if it is missing.
        model: what is evaluated; a folder holds one model's rows.

    Raises:
        EvalError: the folder holds another model's rows, or is damaged otherwise.
    """

    def __init__(self, folder: Path, model: str):
        self.path = folder / FILE
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
        """Write rows out; they are safe when this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        self.rows += rows
        self.done |= {row["key"] for row in rows}
