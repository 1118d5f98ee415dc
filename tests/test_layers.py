"""Who imports whom: no module goes round in a circle, and packages build on those below them."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.v1_only
PACKAGE = Path(__file__).parent.parent / "vllm_evict"

#: From the bottom up. `compat`, where vLLM is touched, is beside them: `core`, `attention` and `worker` use its patches.
LAYERS = ["policies", "core", "kernels", "worker", "attention"]


def modules():
    for path in {*PACKAGE.rglob("*.py"), *PACKAGE.glob("triton_kernels/*.py")}:  # the latter is a link
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        yield name.removesuffix(".__init__"), path


def top_level(body):
    """Statements that run when a module is imported; what only type checkers see does not."""
    for statement in body:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            continue
        yield statement
        for block in ("body", "orelse", "handlers", "finalbody"):
            if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from top_level(getattr(statement, block, []))


def imported(name, path, known):
    """Modules of ours that a module imports when it is imported itself."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for statement in top_level(ast.parse(path.read_text()).body):
        if not isinstance(statement, ast.ImportFrom) or not statement.level:
            continue
        base = ".".join([*package[: len(package) - statement.level + 1], *filter(None, [statement.module])])
        yield from {f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in statement.names}


@pytest.fixture(scope="module")
def imports():
    known = dict(modules())
    found = {name: set(imported(name, path, known)) - {name} for name, path in known.items()}
    assert len(found) > 100 and sum(map(len, found.values())) > 200 and set().union(*found.values()) <= set(known)
    return found


def test_no_module_imports_itself_in_the_end(imports):
    order = list(TopologicalSorter(imports).static_order())  # raises CycleError, which names the circle
    assert set(order) == set(imports)


def test_packages_build_on_those_below_them(imports):
    place = {f"vllm_evict.{package}": index for index, package in enumerate(LAYERS)}
    for module, others in imports.items():
        mine = place.get(".".join(module.split(".")[:2]), -1)
        for other in others if mine >= 0 else ():
            theirs = place.get(".".join(other.split(".")[:2]), -1)
            assert theirs <= mine, f"{module} imports {other}"
