"""Reads from the sources of vllm_evict what it replaces in vLLM, as `integration/seams.py` has it declared.

cd tests/harness
python -m guard.seams           prints the table of docs/seams.md
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from vllm_evict.integration.seams import HOMES

from .source import FUNCTIONS, Sources

OURS = Sources(Path(__file__).parents[3] / "vllm_evict", "vllm_evict")
DECORATORS = ("replaces", "extends")


class Declared(NamedTuple):
    """A declaration.

    Attributes:
        kind: one of `DECORATORS`.
        home: module of vllm_evict.
        name: of the function or class that is decorated, from the module on.
        ours: what takes the place, from the module on: a class, or the last function that a function defines; None if
            that returns what is defined elsewhere.
        places: see `Seam`.
        methods: of a class, those that it overrides.
        why, remove_when, at_import: see `replaces`.
    """

    kind: str
    home: str
    name: str
    ours: str | None
    places: tuple[str, ...]
    methods: tuple[str, ...]
    why: str
    remove_when: str
    at_import: bool

    @property
    def replaced(self) -> list[tuple[str, str]]:
        """Functions of vLLM that are replaced: ("module:Class" or "module:", name)."""
        if self.kind != "replaces" or self.ours is None:
            return []
        if self.methods:
            return [(place, method) for place in self.places for method in self.methods]
        pairs = (
            place.rpartition(".") if "." in place.rpartition(":")[2] else place.partition(":") for place in self.places
        )
        return [(before if between == "." else f"{before}:", name) for before, between, name in pairs]


@cache
def declared() -> list[Declared]:
    return [each for home, tree in OURS.modules() for each in _declared(home, tree, "")]


def _declared(home: str, parent: ast.AST, prefix: str) -> Iterator[Declared]:
    for node in ast.iter_child_nodes(parent):
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield from _declared(home, node, prefix)
            continue
        name = f"{prefix}{node.name}"
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and ast.unparse(call.func) in DECORATORS:
                given = {"methods": "", "at_import": False} | {
                    each.arg: ast.literal_eval(each.value) for each in call.keywords
                }
                yield Declared(
                    kind=ast.unparse(call.func),
                    home=home,
                    name=name,
                    ours=name if isinstance(node, ast.ClassDef) else _made(node, name),
                    places=tuple(ast.literal_eval(each) for each in call.args),
                    **given | {"methods": tuple(given["methods"].split())},
                )
        yield from _declared(home, node, f"{name}.")


def _made(node: ast.FunctionDef, name: str) -> str | None:
    inner = [each.name for each in node.body if isinstance(each, FUNCTIONS)]
    return f"{name}.{inner[-1]}" if inner else None


def replaced() -> dict[str, dict[str, str]]:
    """Class or module of vLLM -> ours -> the methods and functions that ours takes the place of."""
    found: dict[str, dict[str, str]] = {}
    for each in declared():
        for theirs, name in each.replaced:
            by = found.setdefault(theirs, {})
            ours = f"{each.home}:{each.ours}"
            by[ours] = f"{by[ours]} {name}" if ours in by else name
    return found


def table() -> str:
    """Return the tables of docs/seams.md: a row for each declaration, in the order of `HOMES`."""
    by_home: dict[str, list[Declared]] = {}
    for each in declared():
        by_home.setdefault(each.home, []).append(each)
    parts = []
    for at_import, title in ((True, "In every process"), (False, "In single objects")):
        rows = [each for home in HOMES for each in by_home.get(home, ()) if each.at_import == at_import]
        lines = [
            f"| {'<br>'.join(f'`{_short(place)}`' for place in each.places)} | {_ours(each)} | {each.why} | "
            f"{each.remove_when} |"
            for each in rows
        ]
        if lines:
            head = "| in vLLM | by | why | until |\n|---|---|---|---|"
            parts.append("\n".join([f"## {title}", "", head, *lines]))
    return "\n\n".join(parts) + "\n"


def _short(place: str) -> str:
    """Return the place without its module."""
    module, _, name = place.partition(":")
    return name or module


def _ours(each: Declared) -> str:
    methods = f": {', '.join(f'`{method}`' for method in each.methods)}" if each.methods else ""
    return f"`{each.home}.{each.name}`{methods}"


if __name__ == "__main__":
    print(table(), end="")
