"""How failing programs become short ones that still fail: those of the scheduler's load, and lists of anything."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from .program import Program, default_of, parsed


def fewest(items: list, fails: Callable[[list], bool]) -> list:
    """Return what is left of a list that fails once no part can be removed without which it fails, halves first."""
    size = len(items) // 2
    while size:
        for rest in _without(items, size):
            if rest and fails(rest):
                items = rest
                break
        else:
            size //= 2
    return items


def shrink_record(path: Path, command: list[str]) -> int:
    """Remove requests of a recorded program while it fails, and write the rest beside it.

    Args:
        path: JSON with a `program`, a list of requests.
        command: runs the file that is its last argument; it fails if the program does.

    Returns:
        0, the exit status.
    """
    record, smaller = json.loads(path.read_text()), path.with_suffix(".small.json")

    def fails(program: list) -> bool:
        smaller.write_text(json.dumps({**record, "program": program}))
        return subprocess.run([*command, str(smaller)], capture_output=True).returncode != 0

    program = fewest(record["program"], fails)
    smaller.write_text(json.dumps({**record, "program": program}, indent=1))
    print(f"{len(program)} of {len(record['program'])}: {smaller}")
    return 0


def _without(items: Any, size: int) -> Iterator[Any]:
    """Yield a sequence without each of its parts of a size."""
    for start in range(0, len(items), size):
        yield items[:start] + items[start + size :]


def shrink(program: Program, fails: Callable[[Program], bool], seconds: float = 60.0) -> Program:
    """A shorter program that still fails.

    Args:
        program: one that fails.
        fails: runs a program; whether it fails the same way.
        seconds: after which the shortest so far is returned.
    """
    end = time.monotonic() + seconds

    def better(candidates: Iterator[Program]) -> Program | None:
        for candidate in candidates:
            if time.monotonic() > end:
                return None
            if fails(candidate):
                return candidate
        return None

    while (shorter := better(_shorter(program))) is not None:
        program = shorter
    return program


def _shorter(program: Program) -> Iterator[Program]:
    """Programs that are a little simpler, the largest steps first."""
    settings, ops = program.settings, program.ops
    size = len(ops) // 2
    while size:
        for rest in _without(ops, size):
            yield Program(settings, rest)
        size //= 2
    for each in fields(settings):
        value, default = getattr(settings, each.name), default_of(each)
        if each.name != "policy" and value != default:
            for simpler in _simpler(value, default):
                yield Program(replace(settings, **{each.name: simpler}), ops)
    if settings.policy is not None:
        for policy in _simpler_policies(settings.policy):
            candidate = replace(settings, policy=policy)
            if parsed(candidate) is not None:
                yield Program(candidate, ops)
    for number, op in enumerate(ops):
        for each in fields(op):
            value, default = getattr(op, each.name), default_of(each)
            if each.name in ("do", "id") or value == default:
                continue
            for simpler in _simpler(value, default):
                yield Program(settings, (*ops[:number], replace(op, **{each.name: simpler}), *ops[number + 1 :]))


def _simpler(value: Any, default: Any) -> Iterator[Any]:
    yield default
    if isinstance(value, int) and not isinstance(value, bool):
        for step in (abs(value) // 2, abs(value) // 4, 1):
            smaller = value - step
            if step and smaller not in (default, value) and smaller > 0:
                yield smaller


def _simpler_policies(policy: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for option, value in policy.items():
        if option == "name":
            continue
        if option in ("allow", "merge", "granularity") or not isinstance(value, (int, list, dict)):
            yield {key: each for key, each in policy.items() if key != option}
        elif isinstance(value, dict):
            yield {key: each for key, each in policy.items() if key != option}
            for simpler in _simpler_policies(value):
                yield {**policy, option: simpler}
        elif isinstance(value, int) and not isinstance(value, bool):
            for smaller in (0, value // 2, value - 1):
                if 0 <= smaller < value:
                    yield {**policy, option: smaller}
    if policy.get("allow") != []:
        yield {**policy, "allow": []}
