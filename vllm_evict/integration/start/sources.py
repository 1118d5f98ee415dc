"""Reads vLLM's Python sources by their syntax tree, without importing them."""

import ast
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
ASSIGNMENTS = (ast.Assign, ast.AnnAssign)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class Found(NamedTuple):
    """A definition, and the module that holds it (not always the one that exports it)."""

    module: str
    name: str
    node: Definition


class Sources:
    """The sources of packages.

    Args:
        root: the directory that the packages lie in.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._trees: dict[str, ast.Module | None] = {}
        self._lines: dict[str, list[str]] = {}
        #: Modules that were asked for, also those that are not there.
        self.visited: set[str] = set()

    def text(self, module: str) -> str | None:
        """Return the source of a module; None if there is none of that name."""
        found = self._file(module)
        return found and found[1].decode()

    def file(self, module: str) -> str:
        """Return the path of a module's file, from the root on."""
        found = self._file(module)
        return found[0] if found else module

    def digest(self, module: str) -> str | None:
        """Return the fingerprint of a module's file; None if there is none."""
        text = self.text(module)
        return None if text is None else _digest(text)

    def tree(self, module: str) -> ast.Module | None:
        self.visited.add(module)
        if module not in self._trees:
            text = self.text(module)
            self._lines[module] = (text or "").splitlines()
            self._trees[module] = None if text is None else ast.parse(text)
        return self._trees[module]

    def find(self, module: str, name: str) -> Found | None:
        """Return what `from module import name` gives; with dots in `name`, something inside it.

        Re-exports are followed. Classes are searched with their bases, functions for what is defined in them.
        """
        first, *rest = name.split(".")
        found = self._export(module, first, set())
        for part in rest:
            found = found and self._member(found, part)
        return found

    def bases(self, found: Found) -> Iterator[Found]:
        """Yield a class and its bases, as far as they lie in these sources, nearest first."""
        yield found
        for base in getattr(found.node, "bases", ()):
            while isinstance(base, ast.Subscript):
                base = base.value
            if (parent := self.find(found.module, ast.unparse(base))) and isinstance(parent.node, ast.ClassDef):
                yield from self.bases(parent)

    def body_digest(self, found: Found) -> str:
        """Return the fingerprint of a function's code; comments, docstring and blank lines do not count."""
        node: Any = found.node
        first = min(each.lineno for each in (node, *node.decorator_list))
        lines = self._lines[found.module][first - 1 : node.end_lineno]
        if ast.get_docstring(node, clean=False) is not None:
            doc = node.body[0]
            del lines[doc.lineno - first : doc.end_lineno - first + 1]
        code = (line.strip() for line in lines)
        return _digest("\n".join(line for line in code if line and not line.startswith("#")))

    def _export(self, module: str, name: str, seen: set[str]) -> Found | None:
        tree = self.tree(module)
        if tree is None or module in seen:
            return None
        seen.add(module)
        if (node := defined(tree.body, name)) is not None:
            return Found(module, name, node)
        for statement in _statements(tree.body):
            for alias in statement.names if isinstance(statement, ast.ImportFrom) else ():
                if alias.name == "*" or name == (alias.asname or alias.name):
                    original = name if alias.name == "*" else alias.name
                    if found := self._export(self._imported(module, statement), original, seen):
                        return found
        return None

    def _imported(self, module: str, statement: ast.ImportFrom) -> str:
        """Return the absolute name of the module of a `from ... import`."""
        if not statement.level:
            return str(statement.module)
        is_package = self.file(module).endswith("/__init__.py")
        parts = module.split(".")
        parts = parts[: len(parts) - statement.level + is_package]
        return ".".join([*parts, statement.module] if statement.module else parts)

    def _file(self, module: str) -> tuple[str, bytes] | None:
        base = module.replace(".", "/")
        for file in (f"{base}.py", f"{base}/__init__.py"):
            if (data := self._read(file)) is not None:
                return file, data
        return None

    def _read(self, file: str) -> bytes | None:
        try:
            return (self._root / file).read_bytes()
        except OSError:
            return None

    def _member(self, found: Found, name: str) -> Found | None:
        if isinstance(found.node, FUNCTIONS):
            node = defined(list(ast.walk(found.node))[1:], name)
            return None if node is None else Found(found.module, f"{found.name}.{name}", node)
        for cls in self.bases(found):
            if (node := defined(getattr(cls.node, "body", []), name)) is not None:
                return Found(cls.module, f"{cls.name}.{name}", node)
        return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _statements(body: Iterable[ast.AST]) -> Iterator[Any]:
    """Yield the statements of a module or class, those under `if`, `else` and `try` included."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.Try)):
            yield from _statements(statement.body)
            yield from _statements(statement.orelse)


def defined(body: Iterable[ast.AST], name: str) -> Definition | None:
    """Return the statement that defines `name`, the last one if there are several (overloads come first)."""
    result: Any = None
    for statement in _statements(body):
        if name in _names(statement):
            result = statement
    return result


def _names(statement: ast.AST) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
        return [statement.name]
    return _targets(statement) if isinstance(statement, ASSIGNMENTS) else []


def _targets(statement: ast.Assign | ast.AnnAssign) -> list[str]:
    """Return the names that an assignment binds, as written: `x`, `self.x`."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    targets = [part for target in targets for part in getattr(target, "elts", [target])]
    return [ast.unparse(target) for target in targets]
