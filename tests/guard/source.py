"""Reads Python sources by their syntax tree, without importing them: of releases that cannot be installed here, too.

Code is compared with patterns that are code themselves, in which `...` stands for anything:

    self.coordinator.cache_blocks(request, ...)     a call with `request` first, whatever follows
    outputs, finished = parent.get_outputs(...)     an assignment
    stats.record(..., engine_idx=...)               a call that passes `engine_idx` by keyword
"""

import ast
import copy
import hashlib
import inspect
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
ASSIGNMENTS = (ast.Assign, ast.AnnAssign)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
#: Fields of a syntax tree that say nothing about the code's meaning.
IGNORED_FIELDS = {"ctx", "kind", "type_comment", "type_ignores"}


class Found(NamedTuple):
    """A definition, and the module that holds it (not always the one that exports it)."""

    module: str
    name: str
    node: Definition


class Sources:
    """The sources of one package.

    Args:
        path: a wheel, the package's directory, or the directory that it lies in.
        package: its name.
    """

    def __init__(self, path: Path | str, package: str = "vllm") -> None:
        path = Path(path)
        self._package = package
        self._root = path if path.suffix == ".whl" or path.name != package else path.parent
        self._wheel = zipfile.ZipFile(path) if path.suffix == ".whl" else None
        self._trees: dict[str, ast.Module | None] = {}
        self._texts: dict[str, str] = {}

    def text(self, module: str) -> str | None:
        """Source of a module; None if there is none of that name."""
        base = module.replace(".", "/")
        for name in (f"{base}.py", f"{base}/__init__.py"):
            try:
                data = self._wheel.read(name) if self._wheel else (self._root / name).read_bytes()
            except (KeyError, OSError):
                continue
            return data.decode()
        return None

    def tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            text = self.text(module)
            self._texts[module] = text or ""
            self._trees[module] = None if text is None else ast.parse(text)
        return self._trees[module]

    def modules(self) -> Iterator[tuple[str, ast.Module]]:
        """(name without the package's, syntax tree) of each module of a package in a directory."""
        for path in sorted((self._root / self._package).rglob("*.py")):
            parts = path.relative_to(self._root / self._package).with_suffix("").parts
            yield ".".join(part for part in parts if part != "__init__"), ast.parse(path.read_text())

    def find(self, module: str, name: str) -> Found | None:
        """What `from module import name` gives; with dots in `name`, something inside it.

        Re-exports are followed. Classes are searched with their bases, functions for what is defined in them.
        """
        first, *rest = name.split(".")
        found = self._export(module, first, set())
        for part in rest:
            found = found and self._member(found, part)
        return found

    def bases(self, found: Found) -> Iterator[Found]:
        """A class and its bases, as far as they lie in these sources, nearest first."""
        yield found
        for base in getattr(found.node, "bases", ()):
            while isinstance(base, ast.Subscript):
                base = base.value
            if (parent := self.find(found.module, ast.unparse(base))) and isinstance(parent.node, ast.ClassDef):
                yield from self.bases(parent)

    def body_digest(self, found: Found) -> str:
        """Fingerprint of a function's code; comments, docstring and blank lines do not count."""
        node = found.node
        lines = self._texts[found.module].splitlines()[node.lineno - 1 : node.end_lineno]
        if ast.get_docstring(node, clean=False) is not None:
            doc = node.body[0]
            del lines[doc.lineno - node.lineno : doc.end_lineno - node.lineno + 1]
        code = (line.strip() for line in lines)
        text = "\n".join(line for line in code if line and not line.startswith("#"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def _export(self, module: str, name: str, seen: set[str]) -> Found | None:
        tree = self.tree(module)
        if tree is None or module in seen:
            return None
        seen.add(module)
        if (node := _defined(tree.body, name)) is not None:
            return Found(module, name, node)
        for statement in _statements(tree.body):
            for alias in statement.names if isinstance(statement, ast.ImportFrom) else ():
                if alias.name == "*" or name == (alias.asname or alias.name):
                    original = name if alias.name == "*" else alias.name
                    if found := self._export(self._imported(module, statement), original, seen):
                        return found
        return None

    def _imported(self, module: str, statement: ast.ImportFrom) -> str:
        """Absolute name of the module of a `from ... import`."""
        if not statement.level:
            return statement.module
        is_package = self._is_package(module)
        parts = module.split(".")
        parts = parts[: len(parts) - statement.level + is_package]
        return ".".join([*parts, statement.module] if statement.module else parts)

    def _is_package(self, module: str) -> bool:
        name = module.replace(".", "/") + "/__init__.py"
        return name in self._wheel.NameToInfo if self._wheel else (self._root / name).exists()

    def _member(self, found: Found, name: str) -> Found | None:
        if isinstance(found.node, FUNCTIONS):
            node = _defined(list(ast.walk(found.node))[1:], name)
            return node and Found(found.module, f"{found.name}.{name}", node)
        for cls in self.bases(found):
            if (node := _defined(getattr(cls.node, "body", ()), name)) is not None:
                return Found(cls.module, f"{cls.name}.{name}", node)
        return None


def _statements(body: list[ast.AST]) -> Iterator[ast.AST]:
    """The statements of a module or class, those under `if`, `else` and `try` included."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.Try)):
            yield from _statements(statement.body)
            yield from _statements(statement.orelse)


def _defined(body: list[ast.AST], name: str) -> Definition | None:
    """The statement that defines `name`, the last one if there are several (overloads come first)."""
    result = None
    for statement in _statements(body):
        if name in _names(statement):
            result = statement
    return result


def _names(statement: ast.AST) -> list[str]:
    """Names that a statement defines."""
    if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
        return [statement.name]
    return _targets(statement) if isinstance(statement, ASSIGNMENTS) else []


def _targets(statement: ast.Assign | ast.AnnAssign) -> list[str]:
    """Names that an assignment binds, as written: `x`, `self.x`."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    targets = [part for target in targets for part in getattr(target, "elts", [target])]
    return [ast.unparse(target) for target in targets]


def decorators(node: Definition) -> list[str]:
    return [ast.unparse(decorator) for decorator in getattr(node, "decorator_list", ())]


def abstract_methods(sources: Sources, found: Found) -> list[str]:
    """Names of the methods that a subclass has to define."""
    methods: dict[str, bool] = {}
    for cls in sources.bases(found):
        for node in cls.node.body:
            if isinstance(node, FUNCTIONS):
                methods.setdefault(node.name, any("abstractmethod" in name for name in decorators(node)))
    return sorted(name for name, abstract in methods.items() if abstract)


def takes_attributes(sources: Sources, found: Found) -> bool:
    """Whether instances of a class can be given attributes that it does not know."""
    for cls in sources.bases(found):
        closed = any("slots=True" in name or "frozen=True" in name for name in decorators(cls.node))
        slots = _defined(cls.node.body, "__slots__") is not None
        foreign = any("Struct" in ast.unparse(base) or "NamedTuple" in ast.unparse(base) for base in cls.node.bases)
        if closed or slots or foreign:
            return False
    return True


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Parameters of a function without their annotations, as code; without `self` or `cls`."""
    arguments = copy.deepcopy(node.args)
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    first = (arguments.posonlyargs or arguments.args)[:1]
    if first and first[0].arg in ("self", "cls"):
        (arguments.posonlyargs or arguments.args).pop(0)
    return ast.unparse(arguments)


def signature(text: str) -> inspect.Signature:
    """`parameters`, to bind calls to."""
    arguments = ast.parse(f"def f({text}): 0").body[0].args
    kinds = inspect.Parameter
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    result = []
    for index, argument in enumerate(positional):
        kind = kinds.POSITIONAL_ONLY if index < len(arguments.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD
        result.append(kinds(argument.arg, kind, default=kinds.empty if index < required else None))
    if arguments.vararg:
        result.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        default = kinds.empty if default is None else None
        result.append(kinds(argument.arg, kinds.KEYWORD_ONLY, default=default))
    if arguments.kwarg:
        result.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(result)


def positional(text: str) -> list[str]:
    """Names of the parameters `text` that may be given by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, parameter in signature(text).parameters.items() if parameter.kind in kinds]


def binds(text: str, positional: int, keywords: list[str]) -> str | None:
    """Why a call does not fit the parameters `text`; None if it does."""
    try:
        signature(text).bind(*range(positional), **dict.fromkeys(keywords))
    except TypeError as error:
        return str(error)
    return None


@cache
def pattern(code: str) -> ast.AST:
    """A pattern (see the module's docstring)."""
    (statement,) = ast.parse(code).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def find_all(node: ast.AST, patterns: tuple[str, ...]) -> list[str | None]:
    """The code that matches each pattern, each one after the one before it; None from the first that is missing on."""
    nodes = sorted((child for child in ast.walk(node) if hasattr(child, "lineno")), key=_place)
    evidence: list[str | None] = []
    start = (0, 0)
    for code in patterns:
        match = next((n for n in nodes if _place(n) > start and matches(pattern(code), n)), None)
        evidence.append(match and ast.unparse(match))
        start = _place(match) if match else (10**9, 0)
    return evidence


def _place(node: ast.AST) -> tuple[int, int]:
    return node.lineno, node.col_offset


def matches(wanted: object, actual: object) -> bool:
    """Whether code fits a pattern."""
    if isinstance(wanted, ast.Constant) and wanted.value is ...:
        return True
    if isinstance(wanted, list):
        return isinstance(actual, list) and _matches_list(wanted, actual)
    if not isinstance(wanted, ast.AST):
        return wanted == actual
    if isinstance(wanted, ast.Assign) and isinstance(actual, ast.AnnAssign):
        return matches(wanted.targets, [actual.target]) and matches(wanted.value, actual.value)
    if type(wanted) is not type(actual):
        return False
    if isinstance(wanted, ast.Call):
        return _matches_call(wanted, actual)
    fields = (field for field in wanted._fields if field not in IGNORED_FIELDS)
    return all(matches(getattr(wanted, field), getattr(actual, field)) for field in fields)


def _matches_list(wanted: list, actual: list) -> bool:
    if wanted and _is_rest(wanted[-1]):
        wanted, actual = wanted[:-1], actual[: len(wanted) - 1]
    return len(wanted) == len(actual) and all(map(matches, wanted, actual))


def _matches_call(wanted: ast.Call, actual: ast.Call) -> bool:
    if not (matches(wanted.func, actual.func) and _matches_list(wanted.args, actual.args)):
        return False
    given = {keyword.arg: keyword.value for keyword in actual.keywords}
    named = {keyword.arg: keyword.value for keyword in wanted.keywords}
    more = bool(wanted.args) and _is_rest(wanted.args[-1])
    if not (named.keys() <= given.keys() if more else named.keys() == given.keys()):
        return False
    return all(matches(value, given[name]) for name, value in named.items())


def _is_rest(node: object) -> bool:
    """`...` as the last of several items: any number of them. As a statement, it is an expression of its own."""
    node = node.value if isinstance(node, ast.Expr) else node
    return isinstance(node, ast.Constant) and node.value is ...
