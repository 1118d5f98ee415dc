"""Every supported release has all that vllm_evict relies on in vLLM (see the package `guard`). Sources are read only."""

import ast
import builtins
import importlib
import inspect
import json
from pathlib import Path

import pytest
import vllm
from guard import snapshot, source
from guard.check import complaints, extract, imported, own, replaced, touched
from guard.invariants import INVARIANTS
from guard.names import CALLED, COMPLETE, REPLACED
from guard.snapshot import OURS
from guard.source import Edited, Sources

from vllm_evict.integration.start import versions

#: Modules of vLLM that can't be imported without its CUDA libraries.
NEEDS_A_GPU = ("vllm.v1.attention.backends.flashinfer", "vllm.vllm_flash_attn.flash_attn_interface")
SCHEDULER = "vllm.v1.core.sched.scheduler"


@pytest.fixture(scope="module")
def installed():
    return Sources(Path(vllm.__file__).parent)


@pytest.fixture(scope="module")
def taken(installed):
    return extract(installed, OURS)


def test_all_holds_in_the_installed_release(installed, taken):
    lines = complaints(taken, snapshot.version_of(installed), OURS)
    assert not lines, f"vLLM {vllm.__version__} differs from what vllm_evict relies on\n" + "\n".join(lines)


@pytest.mark.parametrize("version", versions.CHECKED)
def test_all_holds_in_the_release(version, taken):
    known = snapshot.load(version)
    for part, facts in taken.items():
        assert known[part].keys() == facts.keys(), "the tables or imports were changed: take the facts anew"
    lines = complaints(known, version, OURS)
    assert not lines, f"vLLM {version} (or facts.json) differs\n" + "\n".join(lines)


def test_there_are_facts_of_each_tested_release_and_of_no_other():
    assert json.loads(snapshot.FACTS.read_text())["releases"] == list(versions.CHECKED)


def test_digests_are_of_the_tested_releases_and_of_the_tables():
    known = json.loads(versions.TOUCHED.read_text())
    functions, anew = known["functions"], "the tables were changed: take the facts anew"
    assert known["releases"] == list(versions.CHECKED)
    assert functions.keys() == touched(), anew
    assert known["files"].keys() == set().union(*(function["in"] for function in functions.values())), anew
    for column, version in enumerate(versions.CHECKED):
        there = {where for where, function in functions.items() if function["code"][column]}
        assert there >= {where for where, each in snapshot.load(version)["functions"].items() if each}, anew


def test_the_installed_release_has_the_digests_that_are_known(installed):
    known, version = json.loads(versions.TOUCHED.read_text()), snapshot.version_of(installed)
    column = known["releases"].index(version)
    for where, function in known["functions"].items():
        installed.visited.clear()
        assert versions.digest(installed, where) == function["code"][column], where
        assert installed.visited <= {*function["in"]}, where
    assert {module: installed.digest(module) for module in known["files"]} == {
        module: digests[column] for module, digests in known["files"].items()
    }


def written_here(value):
    """Facts with their code as this Python writes it: 3.10 puts tuples into parentheses."""
    if isinstance(value, dict):
        return {key: written_here(item) for key, item in value.items()}
    if isinstance(value, list):
        return [written_here(item) for item in value]
    try:
        return ast.unparse(ast.parse(value))
    except (SyntaxError, TypeError):
        return value


def test_the_installed_release_is_what_its_facts_say(installed, taken):
    known = snapshot.load(snapshot.version_of(installed))
    assert written_here(known) == written_here(taken), (
        "this vLLM is another one, or facts.json is older than the tables"
    )


def test_functions_have_the_parameters_that_their_sources_say(taken):
    """Decorators and re-exports of the sources are resolved as Python resolves them."""
    compared = 0
    for where, known in taken["functions"].items():
        module, _, name = where.partition(":")
        if module in NEEDS_A_GPU:
            continue
        function = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        names = [name for name in inspect.signature(inspect.unwrap(function)).parameters if name not in ("self", "cls")]
        assert names == list(source.signature(known["parameters"]).parameters), where
        compared += 1
    assert compared > 100


#: Changes of vLLM: (module, from, to, what the guard names).
EDITS = {
    "a replaced method is renamed": (SCHEDULER, "def make_stats(", "def collect_stats(", "Scheduler.make_stats"),
    "a replaced method takes one more": (
        SCHEDULER,
        "def add_request(self, request: Request) -> None:",
        "def add_request(self, request: Request, wave: int = 0) -> None:",
        "Scheduler.add_request",
    ),
    "a wrapped method gets its arguments in another order": (
        "vllm.v1.engine.output_processor",
        "        self,\n        engine_core_outputs: list[EngineCoreOutput],",
        "        self,\n        wave: int,\n        engine_core_outputs: list[EngineCoreOutput],",
        "OutputProcessor.process_outputs",
    ),
    "a called method renames a parameter": (
        "vllm.v1.worker.gpu.buffer_utils",
        "self, index: int, start: int, x: Iterable[int]",
        "self, index: int, offset: int, x: Iterable[int]",
        "StagedWriteTensor.stage_write",
    ),
    "a called method is gone": (
        "vllm.v1.core.block_pool",
        "def free_blocks(self",
        "def drop_blocks(self",
        "BlockPool.free_blocks",
    ),
    "a classmethod becomes a method": (
        "vllm.v1.attention.backend",
        "    @classmethod\n    def customize_spec(",
        "    def customize_spec(",
        "AttentionBackend.customize_spec",
    ),
    "an imported name moves away": (
        "vllm.v1.core.kv_cache_utils",
        "def resolve_block_hashes(",
        "def hashes_of_blocks(",
        "vllm.v1.core.kv_cache_utils:resolve_block_hashes: it is not there, and vllm_evict.integration.engine.managers",
    ),
    "a class gets slots": (
        "vllm.v1.core.sched.output",
        "@dataclass\nclass SchedulerOutput:",
        "@dataclass(slots=True)\nclass SchedulerOutput:",
        "SchedulerOutput",
    ),
    "a base gets an abstract method": (
        "vllm.v1.outputs",
        "class AsyncModelRunnerOutput(ABC):\n",
        "class AsyncModelRunnerOutput(ABC):\n    @abstractmethod\n    def cancel(self): ...\n\n",
        "_Reporting lacks cancel",
    ),
    "a statement of an invariant is gone": (
        "vllm.v1.core.block_pool",
        "blk.is_null or (block_mask is not None",
        "(block_mask is not None",
        "null blocks are never published",
    ),
    "statements of an invariant change places": (
        "vllm.v1.core.kv_cache_manager",
        "        new_blocks = self.coordinator.allocate_new_blocks(\n",
        "        self.coordinator.cache_blocks(request, num_tokens_to_cache)\n        return\n"
        "        new_blocks = self.allocate(\n",
        "tables grow before blocks are published",
    ),
    "the function of an invariant is gone": (
        "vllm.v1.worker.gpu.attn_utils",
        "def build_attn_metadata(",
        "def make_attn_metadata(",
        "V2: each KV group's metadata is built from its own table",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_change_of_vllm_is_found_and_named(edit, installed, taken):
    *change, named = EDITS[edit]
    lines = complaints(extract(Edited(installed, *change), OURS), snapshot.version_of(installed), OURS)
    assert any(named in line for line in lines) and len(lines) <= 3, lines


def test_an_invariant_counts_in_its_releases_only():
    names = {each.name for each in INVARIANTS}
    for version in versions.CHECKED:
        assert sorted(each.name for each in INVARIANTS if each.holds_in(version)) == sorted(names)
    known, others = snapshot.load("0.32.0"), [each.where for each in INVARIANTS if not each.holds_in("0.32.0")]
    assert {"_get_kv_cache_groups_uniform_page_size", "build_attn_metadata"} <= {
        where.rpartition(":")[2] for where in others
    }
    gone = dict.fromkeys(known["invariants"])
    lines = complaints({**known, "invariants": gone}, "0.32.0", OURS)
    assert len(lines) == len(names) and not any("kv_cache_planning" in line for line in lines)
    # A new release is held to the last forms.
    new, later = snapshot.load(versions.CHECKED[-1]), "0.99.0"
    assert not complaints(new, later, OURS) and len(complaints({**new, "invariants": gone}, later, OURS)) > 20


# The tables are complete


def test_the_tables_stay_small():
    """More than this is not read when vLLM changes. What a run tells anyway is no entry."""
    assert (
        len({place.where for place in replaced()} | CALLED.keys()) <= 158
        and len({each.name for each in INVARIANTS}) <= 34
    )


def test_what_the_tables_say_of_vllm_evict_is_there():
    for place in replaced():
        assert own(OURS, place) is not None, place
    for ours in COMPLETE.values():
        module, _, name = f"vllm_evict.{ours}".partition(":")
        assert OURS.find(module, name)
    assert "vllm.v1.core.sched.scheduler:Scheduler" in imported(OURS)


def test_each_method_that_calls_the_one_it_overrides_is_in_the_tables():
    known = {
        f"{ours.rpartition(':')[2].rpartition('.')[2]}.{name}"
        for by in REPLACED.values()
        for ours, names in by.items()
        for name in names.split()
    }
    for name, tree in OURS.modules():
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
        ours = {alias.name for node in imports for alias in node.names}
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and {ast.unparse(base) for base in node.bases} <= ours:
                ours.add(node.name)
        if not name.startswith("integration"):
            continue
        for cls in ast.walk(tree):
            bases = {ast.unparse(base).partition("[")[0] for base in getattr(cls, "bases", ())}
            if not isinstance(cls, ast.ClassDef) or (bases and bases <= ours | vars(builtins).keys()):
                continue  # what it overrides is the plugin's own, or Python's
            for node in ast.walk(cls):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "super()":
                    assert f"{cls.name}.{node.attr}" in known, f"{name}: declare {cls.name}.{node.attr} by `replaces`"
