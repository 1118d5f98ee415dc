"""Reads what the guard asks for in Python sources, also of releases that cannot be installed here: in their wheels.

Code is compared with patterns that are code themselves, in which `...` stands for anything:

    self.coordinator.cache_blocks(request, ...)     a call with `request` first, whatever follows
    outputs, finished = parent.get_outputs(...)     an assignment
    stats.record(..., engine_idx=...)               a call that passes `engine_idx` by keyword
"""

import ast
import copy
import inspect
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from vllm_evict.integration.start import sources
from vllm_evict.integration.start.sources import FUNCTIONS, Definition, Found, defined

#: Fields of a syntax tree that say nothing about the code's meaning.
IGNORED_FIELDS = {"ctx", "kind", "type_comment", "type_ignores"}


class Sources(sources.Sources):
    """The sources of one package, also in a wheel.

    Args:
        path: a wheel, the package's directory, or the directory that it lies in.
        package: its name.
    """

    def __init__(self, path: Path | str, package: str = "vllm") -> None:
        path = Path(path)
        super().__init__(path if path.suffix == ".whl" or path.name != package else path.parent)
        self._package = package
        self._wheel = zipfile.ZipFile(path) if path.suffix == ".whl" else None

    def modules(self) -> Iterator[tuple[str, ast.Module]]:
        """(name without the package's, syntax tree) of each module of a package in a directory."""
        for path in sorted((self._root / self._package).rglob("*.py")):
            parts = path.relative_to(self._root / self._package).with_suffix("").parts
            yield ".".join(part for part in parts if part != "__init__"), ast.parse(path.read_text())

    def _read(self, file: str) -> bytes | None:
        if not self._wheel:
            return super()._read(file)
        return self._wheel.read(file) if file in self._wheel.NameToInfo else None


class Edited(Sources):
    """Sources with `before` replaced by `after` in a module."""

    def __init__(self, original: Sources, module: str, before: str, after: str) -> None:
        super().__init__(original._root)
        assert original.text(module).count(before) == 1, "this edit is out of date"
        self._edit = module, before, after
        self._trees = {name: tree for name, tree in original._trees.items() if name != module}
        self._lines = {**original._lines}

    def text(self, name: str) -> str | None:
        module, before, after = self._edit
        text = super().text(name)
        return text.replace(before, after) if name == module else text


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
        slots = defined(cls.node.body, "__slots__") is not None
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
