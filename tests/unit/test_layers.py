"""Rooms of the package and what each may import, in functions and by name too; only `integration` and `tools` know
vLLM.
"""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "vllm_evict"
TRITON = PACKAGE.parent / "triton_kernels"

#: Room -> rooms that it may import. Modules beside the rooms belong to `config`. A feature's files are of several rooms.
MAY_IMPORT = {
    "config": set(),
    "policies": {"config"},
    "core": {"config", "policies"},
    "features.plan": {"config", "core"},
    "features.start": {"config"},
    "features.engine": {"config", "policies", "core", "features.plan", "integration.start", "integration.engine"},
    "features.worker": {"config", "policies", "core", "features.plan", "compute", "integration.start"},
    "compute": {"config", "policies", "core", "features.plan", "triton_kernels"},
    "triton_kernels": {"compute"},
    "integration": {"config", "policies", "core", "compute"},
    "integration.start": {"config", "policies", "core", "compute"},
    "integration.engine": {"config", "policies", "core", "features.plan", "integration.start"},
    "integration.worker": {
        *("config", "policies", "core", "features.plan", "compute", "integration.start", "integration.engine")
    },
    "integration.frontend": {"config", "core", "integration.start", "integration.engine"},
    "tools": {
        "config",
        "policies",
        "core",
        "features.engine",
        "compute",
        "integration",
        "integration.start",
        "integration.engine",
    },
}
BESIDE = {"": "config", "__init__": "integration", "cli": "tools", "plugin": "integration", "__main__": "tools"}
#: What all of `integration` declares its replacements by.
BESIDE["integration.seams"] = "integration.start"
#: File of a feature -> its room, if that is not named as the file.
OF_FEATURES = {
    "positions": "worker",
    "own_blocks": "worker",
    **dict.fromkeys(("answers", "evidence", "said", "verdicts"), "engine"),
}
#: Modules with a list of what features have; each may import the files of this room.
LISTS = {
    "integration.seams": "features.worker",
    "integration.engine.mechanisms": "features.engine",
    "integration.start.of_features": "features.start",
    "compute.compose": "features.worker",
    "integration.worker.step_parts": "features.worker",
}
#: Who may import vLLM, and torch.
KNOW_VLLM = {"integration", "tools", "features.start", "features.engine", "features.worker"}
NO_TORCH = ("config", "policies", "core", "features.plan", "features.start", "features.engine")


#: A kernel and its reference name each other.
CIRCLES = {"triton_kernels"}


def room_of(module):
    if module in BESIDE:
        return BESIDE[module]
    first, *rest = module.split(".")
    if first == "features" and len(rest) > 1:  # `features.kvzip.plan` is in the room `features.plan`
        return f"features.{OF_FEATURES.get(rest[1], rest[1])}"
    inner = f"{first}.{rest[0]}" if rest else first
    if inner in MAY_IMPORT:
        return inner
    return first if first in MAY_IMPORT else BESIDE.get(first, "config")


def files():
    for path in PACKAGE.rglob("*.py"):
        yield path, ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for path in TRITON.glob("*.py"):
        yield path, f"triton_kernels.{path.stem}"


MODULES = {module for _, module in files()}


def named_at_run_time(path):
    """The arguments of each call of `import_module` in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            yield node.args


def imports(path, module):
    """Modules that a file imports anywhere: (absolute name without the package's, whether it is ours)."""
    package = module.split(".")[:-1]
    for name in (args[0].value for args in named_at_run_time(path) if isinstance(args[0], ast.Constant)):
        dots = len(name) - len(name.lstrip("."))
        ours = bool(dots) or name.split(".")[0] == "vllm_evict"
        base = package[: len(package) - dots + 1] if dots else []
        yield ".".join([*base, name.lstrip(".").removeprefix("vllm_evict.")]), ours
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            ours = node.module.split(".")[0] == "vllm_evict"
            yield node.module.removeprefix("vllm_evict").lstrip("."), ours
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1], *filter(None, [node.module])]
            for alias in node.names:
                whole = ".".join([*base, alias.name])
                yield whole if whole in MODULES or not node.module else ".".join(base), True


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_rooms_import_only_what_they_may(room):
    seen = 0
    for path, module in files():
        if room_of(module) != room:
            continue
        for name, ours in imports(path, module):
            seen += 1
            if ours:
                other = room_of(name)
                # `integration` has, beside its rooms, what puts them together.
                may = {room, LISTS.get(module), *MAY_IMPORT[room]}
                assert other in may or other.startswith(f"{room}."), f"{module} imports {name}"
            elif name.split(".")[0] == "vllm":
                assert {room, room.split(".")[0]} & KNOW_VLLM, f"{module} imports {name}"
            elif name.split(".")[0] == "torch":
                assert room not in NO_TORCH, f"{module} imports {name}"
    assert seen > 3


#: Feature in a folder of its own -> fields of policies that no other part reads.
FIELDS = {"context": {"context"}, "audit": {"audit", "tuned"}, "kvzip": {"instruction"}, "read": {"read_prompts"}}
#: Who may read any field, and name what is told to go with what: configuration, and what was tried on which servers.
READ_ALL = ("config/", "integration/start/capabilities/", "tools/")


def names_of(feature):
    """Names of a feature's classes."""
    trees = (ast.parse(path.read_text()) for path in (PACKAGE / "features" / feature).glob("*.py"))
    return {node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize("feature", FIELDS)
def test_a_feature_is_a_folder(feature):
    """Its classes, its payload and its fields are named in its folder, and in lists of all features alone."""
    names, lists = names_of(feature), {f"{module.replace('.', '/')}.py" for module in LISTS}
    assert len(names) > 1
    for path, _ in files():
        place = path.relative_to(PACKAGE.parent).as_posix().removeprefix("vllm_evict/")
        if place.startswith((f"features/{feature}/", *READ_ALL)):
            continue
        if place in lists:
            continue
        text = path.read_text()
        nodes = list(ast.walk(ast.parse(text)))
        read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        named = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
        named |= {node.id for node in nodes if isinstance(node, ast.Name)}
        named |= {name for said in re.findall("`+([\\w.]+)", text) for name in said.split(".")}
        assert not (read | named) & names and not read & FIELDS[feature], place
        assert f"features.{feature}" not in text and f"features/{feature}" not in text, place


#: Feature -> what its name and fields are called in code, comments and docstrings.
WORDS = {
    "context": r"\.context\b|\ba context\b|`context`|KeyRotation",
    "audit": "audit",
    "kvzip": "kvzip|reconstruct",
    "read": "read_prompts",
}
#: Lines with these words outside of a feature's folder, by file. A count may fall alone.
OUTSIDE = {
    "context": {
        "compute/attention/flash.py": 1,
        "compute/attention/ops.py": 1,
        "integration/frontend/entrypoints.py": 1,
    },
    "audit": {},
    "kvzip": {
        "compute/compaction.py": 2,
        "compute/needs.py": 1,
        "core/blocks.py": 5,
        "core/mechanisms/budget.py": 1,
        "integration/engine/outdated.py": 1,
        "policies/__init__.py": 2,
        "policies/base.py": 1,
        "policies/duo.py": 2,
        "policies/kvzip.py": 8,
        "policies/outside.py": 2,
    },
    "read": {"policies/full.py": 2},
}


@pytest.mark.parametrize("feature", WORDS)
def test_words_of_a_feature_leave_the_rest(feature):
    """Words stand in the feature's folder, in configuration and in lists of all features; elsewhere no more than now."""
    found, lists = {}, {f"{module.replace('.', '/')}.py" for module in LISTS}
    for path, _ in files():
        place = path.relative_to(PACKAGE.parent).as_posix().removeprefix("vllm_evict/")
        if place in lists or place.startswith((f"features/{feature}/", *READ_ALL)):
            continue
        lines = path.read_text().splitlines()
        if count := sum(bool(re.search(WORDS[feature], line, re.IGNORECASE)) for line in lines):
            found[place] = count
    more = {place: count for place, count in found.items() if count > OUTSIDE[feature].get(place, 0)}
    assert not more, f"move these lines into features/{feature}/"
    assert found == OUTSIDE[feature], "fewer lines than before: set the counts in OUTSIDE to those found"


def test_no_modules_import_each_other():
    """No import circles inside rooms either; imports for types alone count too."""
    known = dict((module.removesuffix(".__init__"), path) for path, module in files())
    graph = {module: set() for module in known}
    for path, module in files():
        for name, ours in imports(path, module):
            name = name if name in known else name.rpartition(".")[0]
            if ours and name in known and name != module.removesuffix(".__init__"):
                graph[module.removesuffix(".__init__")].add(name)
    order = TopologicalSorter({module: others for module, others in graph.items() if room_of(module) not in CIRCLES})
    assert len(list(order.static_order())) > 100


def test_modules_named_at_run_time_are_vllms():
    """A name that is made up at run time hides an import of ours from this file: where vLLM is unknown there is none."""
    made = [
        module for path, module in files() for args in named_at_run_time(path) if not isinstance(args[0], ast.Constant)
    ]
    assert len(made) > 3 and all(room_of(module).split(".")[0] in ("integration", "tools") for module in made), made


def test_a_name_is_one_class():
    seen = {}
    for path, module in files():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                assert seen.setdefault(node.name, module) == module, f"{module} and {seen[node.name]}: {node.name}"
    assert len(seen) > 200


def test_core_runs_without_torch_and_vllm():
    """Code that decides is tested, and can be read, without code that computes."""
    check = (
        "import sys; sys.modules['torch'] = sys.modules['vllm'] = None\n"
        "import vllm_evict.core.mechanisms, vllm_evict.core.actions, vllm_evict.core.usage, vllm_evict.core.layout\n"
        "from vllm_evict import KVPolicyConfig; print(KVPolicyConfig.parse('h2o').limits(16, 4096).budget)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.stdout.strip() == "128", done.stderr


def test_modules_log_below_vllms_logger():
    """Lines of any other logger have no handler: vLLM's says where they go, and at which level."""
    named = {file.name: re.findall(r'logger = .*ogger\("(.+)"\)', file.read_text()) for file in PACKAGE.rglob("*.py")}
    named = {file: names for file, names in named.items() if names}
    assert len(named) > 15 and all(names == ["vllm.evict"] for names in named.values()), named
