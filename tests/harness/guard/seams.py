"""Reads from the sources of vllm_evict what it replaces in vLLM, as `integration/seams.py` has it declared.

cd tests/harness
python -m guard.seams           prints the table of docs/seams.md
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

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
