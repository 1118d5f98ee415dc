"""vllm_evict and vLLM: what it relies on is there in every tested release, and what it adds stays out of the way.

The first half reads sources (see the package `guard`), the second half runs the hooks. No engine is started.
"""

import argparse
import ast
import copy
import dataclasses
import functools
import importlib
import inspect
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import vllm
from guard import snapshot, source
from guard.check import complaints, extract, facts
from guard.source import Sources
from guard.touches import NO_TOUCH, TOUCHES
from prometheus_client import REGISTRY, Counter, Gauge
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs, get_kwargs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.utils.api_utils import get_non_default_args
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_evict import KVPolicyConfig, KVPolicyError
from vllm_evict.config import REQUEST_FIELDS, presets
from vllm_evict.core.usage import KVUsage
from vllm_evict.integration import arguments, frontend, plugin, versions
from vllm_evict.integration.carriers import EvictionOutput, EvictionOutputs, EvictionStats
from vllm_evict.integration.cpu_worker import CPUEvictionWorker
from vllm_evict.integration.late import when_imported
from vllm_evict.integration.metrics import COUNTERS
from vllm_evict.integration.scheduler import AsyncEvictionScheduler, EvictionScheduler

OURS = Sources(snapshot.OURS, "vllm_evict")
#: Parts of vllm_evict that run inside vLLM's processes and may import it at once.
INSIDE_VLLM = ("integration",)
#: Modules of vLLM that can't be imported without its CUDA libraries.
NEEDS_A_GPU = ("vllm.platforms.cuda", "vllm.v1.attention.backends.flashinfer")


@pytest.fixture(scope="module")
def installed():
    """Sources of the vLLM that runs here."""
    return Sources(Path(vllm.__file__).parent)


# What vllm_evict relies on, in every release


def broken(known):
    """Lines that say what of vLLM moved, what for it was needed, and by which of our modules."""
    return [
        f"{touch.where}: {line}\n    needed by {', '.join(touch.by)}: {touch.why or 'see the entries around it'}"
        for touch in TOUCHES
        for line in complaints(touch, known[touch.where], OURS)
    ]


def test_touches_hold_in_the_installed_release(installed):
    lines = broken(extract(installed))
    assert not lines, f"vLLM {vllm.__version__} differs from what vllm_evict relies on\n" + "\n".join(lines)


@pytest.mark.parametrize("version", versions.TESTED)
def test_touches_hold_in_the_release(version):
    known = snapshot.load(version)
    assert known.keys() == {touch.where for touch in TOUCHES}, "the table was changed: make the snapshots anew"
    lines = broken(known)
    assert not lines, f"vLLM {version} (or its snapshot, if the table was changed) differs\n" + "\n".join(lines)


def test_there_is_a_snapshot_of_each_tested_release_and_of_no_other():
    assert {path.stem for path in snapshot.SNAPSHOTS.iterdir()} == set(versions.TESTED)


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


def test_the_installed_release_is_what_its_snapshot_says(installed):
    version = snapshot.version_of(installed)
    known, taken = written_here(snapshot.load(version)), written_here(extract(installed))
    changed = {where: (known.get(where), taken[where]) for where in taken if known.get(where) != taken[where]}
    assert not changed, f"this vLLM is not the {version} of the snapshot, or the snapshot is older than the table"


def test_functions_of_the_installed_release_have_the_parameters_that_its_sources_say(installed):
    """What decorators and re-exports make of the sources, by asking Python."""
    compared = 0
    for touch in TOUCHES:
        known = facts(touch, installed)
        if "parameters" not in known or touch.module in NEEDS_A_GPU:
            continue
        module, _, name = (known["at"] if touch.moved else touch.where).partition(":")
        function = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        if isinstance(function, property):
            function = function.fget
        live = [name for name in inspect.signature(inspect.unwrap(function)).parameters if name not in ("self", "cls")]
        assert live == list(source.signature(known["parameters"]).parameters), touch.where
        compared += 1
    assert compared > 50


# Edits of vLLM, and the touch that has to notice: (module, from, to, touch).
EDITS = {
    "a parameter is renamed": (
        "vllm.v1.worker.gpu.buffer_utils",
        "self, index: int, start: int, x: Iterable[int]",
        "self, index: int, offset: int, x: Iterable[int]",
        "vllm.v1.worker.gpu.buffer_utils:StagedWriteTensor.stage_write",
    ),
    "an overridden method takes one more": (
        "vllm.v1.core.sched.scheduler",
        "def add_request(self, request: Request) -> None:",
        "def add_request(self, request: Request, wave: int = 0) -> None:",
        "vllm.v1.core.sched.scheduler:Scheduler.add_request",
    ),
    "a wrapped method gets its arguments in another order": (
        "vllm.v1.engine.output_processor",
        "        self,\n        engine_core_outputs: list[EngineCoreOutput],",
        "        self,\n        wave: int,\n        engine_core_outputs: list[EngineCoreOutput],",
        "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
    ),
    "a keyword becomes positional": (
        "vllm.v1.core.kv_cache_coordinator",
        "num_tokens_main_model,\n                    apply_admission_cap=apply_admission_cap,",
        "num_tokens_main_model,\n                    apply_admission_cap,",
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.get_num_blocks_to_allocate",
    ),
    "blocks are published before they are allocated": (
        "vllm.v1.core.kv_cache_manager",
        "        new_blocks = self.coordinator.allocate_new_blocks(\n",
        "        self.coordinator.cache_blocks(request, num_tokens_to_cache)\n        return\n"
        "        new_blocks = self.allocate(\n",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
    ),
    "an attribute is renamed": (
        "vllm.v1.request",
        "self.num_in_flight_tokens = 0",
        "self.num_pending_tokens = 0",
        "vllm.v1.request:Request",
    ),
    "an attribute changes its type": (
        "vllm.v1.worker.gpu_input_batch",
        "block_ids: tuple[list[int], ...]",
        "block_ids: np.ndarray",
        "vllm.v1.worker.gpu_input_batch:CachedRequestState",
    ),
    "a property becomes a method, which is always true": (
        "vllm.config.model",
        "    @property\n    def is_hybrid(self)",
        "    def is_hybrid(self)",
        "vllm.config.model:ModelConfig",
    ),
    "a class gets slots": (
        "vllm.v1.core.sched.output",
        "@dataclass\nclass SchedulerOutput:",
        "@dataclass(slots=True)\nclass SchedulerOutput:",
        "vllm.v1.core.sched.output:SchedulerOutput",
    ),
    "a class loses its base": (
        "vllm.v1.core.sched.async_scheduler",
        "class AsyncScheduler(Scheduler):",
        "class AsyncScheduler(SchedulerInterface):",
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
    ),
    "a base gets an abstract method": (
        "vllm.v1.outputs",
        "class AsyncModelRunnerOutput(ABC):\n",
        "class AsyncModelRunnerOutput(ABC):\n    @abstractmethod\n    def cancel(self): ...\n\n",
        "vllm.v1.outputs:AsyncModelRunnerOutput",
    ),
    "a classmethod becomes a function": (
        "vllm.v1.kv_cache_spec_registry",
        "    @classmethod\n    def register(\n        cls,",
        "    @staticmethod\n    def register(",
        "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register",
    ),
    "a value changes": (
        "vllm.plugins",
        'DEFAULT_PLUGINS_GROUP = "vllm.general_plugins"',
        'DEFAULT_PLUGINS_GROUP = "vllm.plugins"',
        "vllm.plugins:DEFAULT_PLUGINS_GROUP",
    ),
    "layers that share a cache are told nothing of it": (
        "vllm.v1.worker.utils",
        "tgt_kv_cache_group.layer_names.append(layer_name)",
        "shared_layers.append(layer_name)",
        "vllm.v1.worker.utils:add_kv_sharing_layers_to_kv_cache_groups",
    ),
    "prefix hits are looked up in another order": (
        "vllm.v1.core.kv_cache_coordinator",
        "key=lambda g: not isinstance(g.spec, FullAttentionSpec)",
        "key=lambda g: (not isinstance(g.spec, FullAttentionSpec), len(g.group_ids))",
        "vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator.verify_and_split_kv_cache_groups",
    ),
    "a function moves away": (
        "vllm.v1.worker.gpu.attn_utils",
        "def get_kv_cache_spec(",
        "def _get_kv_cache_spec(",
        "vllm.v1.worker.gpu.attn_utils:get_kv_cache_spec",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_change_of_vllm_is_noticed(edit, installed):
    module, before, after, where = EDITS[edit]
    assert installed.text(module).count(before) == 1, "this edit is out of date"
    (touch,) = (touch for touch in TOUCHES if touch.where == where)
    assert not complaints(touch, facts(touch, installed), OURS)

    class Edited(Sources):
        def text(self, name):
            text = super().text(name)
            return text.replace(before, after) if name == module else text

    edited = Edited(Path(vllm.__file__).parent)
    assert complaints(touch, facts(touch, edited), OURS)


# The table is complete


def our_modules():
    """(name without the package, syntax tree) of each module of vllm_evict."""
    for path in sorted(snapshot.OURS.rglob("*.py")):
        if path.parent.name == "eval":
            continue  # a user of vLLM's public interface, like any other
        parts = path.relative_to(snapshot.OURS).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), ast.parse(path.read_text())


def imports_of_vllm(tree):
    """(module, name) of each import of vLLM in a syntax tree; the name is empty for a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "vllm")
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module.split(".")[0] == "vllm":
            yield from ((node.module, alias.name) for alias in node.names)


def test_each_import_of_vllm_is_in_the_table():
    users = {}
    for touch in TOUCHES:
        for place in filter(None, (touch.where, touch.moved)):
            module, _, name = place.partition(":")
            users.setdefault((module, name.split(".")[0]), set()).update(touch.by)
    for name, tree in our_modules():
        for imported in imports_of_vllm(tree):
            assert name in users.get(imported, ()), f"vllm_evict.{name} imports {imported}: add it to guard/touches"


def test_each_name_of_a_vllm_module_in_a_string_is_in_the_table():
    for name, tree in our_modules():
        for node in ast.walk(tree):
            text = getattr(node, "value", None)
            if isinstance(node, ast.Constant) and isinstance(text, str) and re.fullmatch(r"vllm(\.\w+)+", text):
                module, _, last = text.rpartition(".")
                touched = any(touch.where in (f"{text}:", f"{module}:{last}") for touch in TOUCHES)
                assert touched or text in NO_TOUCH, f"vllm_evict.{name} names {text}: add it to guard/touches"


def test_each_method_that_calls_the_one_it_overrides_is_in_the_table():
    known = {replacement for touch in TOUCHES for replacement in touch.replaced_by}
    for name, tree in our_modules():
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
        ours = {alias.name for node in imports for alias in node.names}
        for cls in ast.walk(tree):
            if not isinstance(cls, ast.ClassDef) or (cls.bases and {ast.unparse(b) for b in cls.bases} <= ours):
                continue  # what it overrides is the plugin's own
            for node in ast.walk(cls):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "super()":
                    overriding = f"{cls.name}.{node.attr}"
                    assert any(
                        replacement.startswith(f"vllm_evict.{name}:") and replacement.endswith(overriding)
                        for replacement in known
                    ), f"add what vllm_evict.{name}:{overriding} overrides to guard/touches"


def test_what_the_table_says_of_vllm_evict_is_there():
    names = {name for name, _ in our_modules()}
    for touch in TOUCHES:
        assert set(touch.by) <= names, touch.where
        for own in filter(None, (*touch.replaced_by, touch.implemented_by)):
            module, _, name = own.partition(":")
            assert OURS.find(module, name), f"{touch.where}: there is no {own}"


def test_vllm_is_imported_at_once_only_where_it_runs():
    for name, tree in our_modules():
        if name.split(".")[0] not in INSIDE_VLLM:
            at_once = [statement for statement in tree.body if list(imports_of_vllm(ast.Module([statement], [])))]
            functions = (ast.FunctionDef, ast.AsyncFunctionDef)
            assert all(isinstance(statement, functions) for statement in at_once), f"vllm_evict.{name}"


# Releases


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.33.0", "0.33.0+cu130"])
def test_tested_releases_are_accepted(version):
    versions.check(version)


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "0.33.0rc1", "0.32.1", "0.33.0.dev5+g4ba787e", "1.0.0"])
def test_other_releases_are_refused_and_the_message_says_what_to_install(version):
    with pytest.raises(KVPolicyError) as error:
        versions.check(version)
    assert version in str(error.value)
    for tested in versions.TESTED:
        assert f"vllm=={tested}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture
def warned(monkeypatch):
    """What the plugin warns of; what is said once can be said again."""
    for once in (versions._warn_not_run, frontend._warn_without_policy):
        once.cache_clear()
    lines = []
    # No handler: vLLM sets its loggers up anew when it configures an engine.
    monkeypatch.setattr(logging.getLogger("vllm.evict"), "warning", lambda text, *args: lines.append(text % args))
    return lambda: lines


@pytest.mark.parametrize("version, lines", [("0.32.0", 0), ("0.32.0+cpu", 0), ("0.33.0", 1), ("0.33.0+cu130", 1)])
def test_a_release_that_was_only_looked_at_is_said_once(warned, version, lines):
    versions.check(version)
    versions.check(version)
    wanted = f"checked against the sources of vLLM {version}, not run on it; it has been run on vLLM 0.32.0"
    assert len(warned()) == lines and all(wanted in line for line in warned())


def test_only_what_runs_here_is_said_to_have_been_run():
    assert {version.partition("+")[0] for version in [vllm.__version__]} == set(versions.RUN) <= set(versions.TESTED)


def test_an_untested_release_is_refused_only_when_a_policy_is_asked_for(tiny, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    EngineArgs(model=str(tiny)).create_engine_config()
    with pytest.raises(KVPolicyError, match=r"0\.34\.0.*vllm==0\.33\.0"):
        EngineArgs(model=str(tiny), kv_policy="h2o").create_engine_config()


# Hooks that wait for a module


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a throw-away module and returns its name: `module(source, name)`."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = set(sys.modules)

    def write(text, name="late_module"):
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        importlib.invalidate_caches()
        return name

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


class Calls(list):
    """An action for `when_imported` that notes how much of the module it saw."""

    def __call__(self, module):
        self.append(getattr(module, "DONE", "half executed"))


@pytest.mark.parametrize("name", ["late_module", "late_package.late_module"])
def test_an_action_waits_for_a_module_that_is_not_imported(module, name):
    finders = len(sys.meta_path)
    calls = Calls()
    when_imported(module("DONE = True", name), calls)
    assert not calls
    assert importlib.import_module(name).DONE
    assert calls == [True]
    importlib.import_module(name)
    assert calls == [True]
    assert len(sys.meta_path) == finders


def test_an_action_is_called_at_once_for_a_module_that_is_imported(module):
    calls = Calls()
    importlib.import_module(module("DONE = True"))
    when_imported("late_module", calls)
    assert calls == [True]


def test_an_action_waits_for_the_end_of_a_module_that_is_being_imported(module):
    calls = Calls()
    sys.modules["late_state"] = argparse.Namespace(calls=calls, when_imported=when_imported)
    name = module(
        "import late_state\n"
        "late_state.when_imported(__name__, late_state.calls)\n"
        "SO_FAR = list(late_state.calls)\n"
        "DONE = True"
    )
    assert importlib.import_module(name).SO_FAR == []
    assert calls == [True]


@pytest.fixture(params=["not imported", "being imported"])
def failing(request, module):
    """An action that waits for a module whose first import has failed, and the module's name."""
    calls = Calls()
    state = argparse.Namespace(calls=calls, when_imported=when_imported, fail=True)
    sys.modules["late_state"] = state
    wait = "late_state.when_imported(__name__, late_state.calls)"
    if request.param == "not imported":
        wait = "pass"
        when_imported("late_module", calls)
    name = module(f"import late_state\nif late_state.fail:\n    {wait}\n    raise RuntimeError('broken')\nDONE = True")
    with pytest.raises(RuntimeError, match="broken"):
        importlib.import_module(name)
    state.fail = False
    return calls, name


def test_an_import_that_fails_fails_as_ever(failing):
    calls, name = failing
    assert not calls
    assert importlib.import_module(name).DONE


def test_an_action_waits_for_an_import_that_does_not_fail(failing):
    calls, name = failing
    importlib.import_module(name)
    assert calls == [True]


def test_waiting_does_not_hide_that_a_module_does_not_exist(module):
    calls = Calls()
    when_imported("late_and_never", calls)
    with pytest.raises(ModuleNotFoundError, match="late_and_never"):
        importlib.import_module("late_and_never")
    assert not calls


def hooked_functions(module):
    """Functions of ours in the classes of a module of vLLM, by class and name."""
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    functions = {(cls, name): function for cls in classes for name, function in vars(cls).items()}
    is_ours = lambda f: getattr(f, "__globals__", {}).get("__name__", "").startswith("vllm_evict.")  # noqa: E731
    return {
        place: function
        for place, function in functions.items()
        if is_ours(getattr(function, "__func__", function))  # of a staticmethod or classmethod
    }


@pytest.mark.parametrize("name", plugin.HOOKS)
def test_hooks_are_applied_once(name):
    module = importlib.import_module(name)
    before = hooked_functions(module)
    assert before or module.EngineCoreOutputs is EvictionOutputs
    plugin.HOOKS[name](module)
    plugin.register()
    assert hooked_functions(module) == before


#: Of each hooked module: its classes, and their methods that are replaced.
HOOKED = {
    "vllm.entrypoints.anthropic.protocol": {"AnthropicUsage": ["__init__"]},
    "vllm.entrypoints.openai.chat_completion.protocol": {
        "ChatCompletionRequest": ["to_beam_search_params", "to_sampling_params"]
    },
    "vllm.entrypoints.openai.completion.protocol": {
        "CompletionRequest": ["to_beam_search_params", "to_sampling_params"]
    },
    "vllm.entrypoints.openai.responses.serving": {
        "OpenAIServingResponses": ["_generate_with_builtin_tools"],
        "ResponseUsage": ["__init__"],
    },
    "vllm.entrypoints.serve.engine.protocol": {"UsageInfo": ["__init__"]},
    "vllm.v1.engine.async_llm": {"AsyncLLM": ["generate", "_add_streaming_input_request"]},
    "vllm.v1.engine.input_processor": {"InputProcessor": ["process_inputs"]},
    "vllm.v1.engine.output_processor": {
        "OutputProcessor": ["process_outputs"],
        "RequestState": ["make_request_output", "_new_completion_output"],
    },
    "vllm.v1.metrics.loggers": {"StatLoggerManager": ["__init__", "record"]},
}


@pytest.fixture(params=HOOKED)
def traced(request, monkeypatch):
    """(module's name, module) as it is where a tracer has wrapped vLLM's own methods before the plugin hooks them."""
    monkeypatch.setattr(RequestOutput, "add", RequestOutput.add)  # hooked too; to be taken back
    module, classes = importlib.import_module(request.param), dict(vars(importlib.import_module(request.param)))
    for name, methods in HOOKED[request.param].items():
        wrapped = {}
        for method in methods:
            own = inspect.unwrap(getattr(getattr(module, name), method))
            wrapped[method] = functools.wraps(own)(lambda *args, own=own, **kwargs: own(*args, **kwargs))
        classes[name] = type(name, (getattr(module, name),), wrapped)
    return request.param, types.SimpleNamespace(**{name: classes[name] for name in classes if name[0] != "_"})


def test_a_tracer_that_came_first_switches_nothing_off(traced):
    name, module = traced
    places = [(getattr(module, cls), method) for cls, methods in HOOKED[name].items() for method in methods]
    theirs = [vars(cls)[method] for cls, method in places]
    plugin.HOOKS[name](module)
    hooked = [vars(cls)[method] for cls, method in places]
    assert [function.__wrapped__ for function in hooked] == theirs
    # Nor does one that came later make it hook again.
    cls, method = places[-1]
    later = functools.wraps(hooked[-1])(lambda *args, **kwargs: hooked[-1](*args, **kwargs))
    setattr(cls, method, later)
    plugin.HOOKS[name](module)
    assert vars(cls)[method] is later


def test_usage_and_counts_travel_beside_vllms_own_fields():
    """What an engine core sends is read by the front end with the plugin's fields, and as ever by vLLM's own types."""
    usage = KVUsage("h2o", 192, 7, 224, 3, 96)
    plain = EngineCoreOutput("b", [7], kv_transfer_params={"theirs": 1})
    outputs = [EvictionOutput.of(EngineCoreOutput("a", [5, 6], finish_reason=FinishReason.STOP), usage), plain]
    stats = EvictionStats(num_running_reqs=2, kv_connector_stats={"theirs": 2}, kv_evict={"h2o": {"evicted": 3}})
    sent = MsgpackEncoder().encode(EngineCoreOutputs(outputs=outputs, scheduler_stats=stats, timestamp=1.0))
    ours, theirs = MsgpackDecoder(EvictionOutputs).decode(sent), MsgpackDecoder(EngineCoreOutputs).decode(sent)
    assert [output.kv_usage for output in ours.outputs] == [usage, None] and ours.scheduler_stats == stats
    for read in (ours, theirs):
        assert [output.finish_reason for output in read.outputs] == [FinishReason.STOP, None]
        assert read.outputs[1].kv_transfer_params == {"theirs": 1} and read.timestamp == 1.0
        assert read.scheduler_stats.num_running_reqs == 2 and read.scheduler_stats.kv_connector_stats == {"theirs": 2}
    assert type(theirs.outputs[0]) is EngineCoreOutput and type(theirs.scheduler_stats) is SchedulerStats


# Without a policy, and with one


@pytest.fixture(scope="module")
def configured(tiny):
    """`configured(**engine_args)`: the engine configuration that they make."""
    return lambda **kwargs: EngineArgs(model=str(tiny), max_model_len=2048, **kwargs).create_engine_config()


def test_without_a_policy_everything_is_vllms_own(configured):
    config = configured()
    assert config.scheduler_config.scheduler_cls is None
    assert config.scheduler_config.get_scheduler_cls().__module__.startswith("vllm.")
    assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert config.additional_config == {}


@pytest.mark.parametrize("extra_args", [{"kv_policy": "h2o"}, {"kv_budget": 64}, {"kv_usage": 1}, {"kv_policy": "x"}])
def test_a_request_for_a_policy_where_there_is_none_is_said_once_and_served(configured, warned, extra_args):
    for _ in range(2):
        frontend._check_request(configured(), SamplingParams(extra_args=extra_args), 100)
    (line,) = warned()
    assert " or ".join(REQUEST_FIELDS) in line and "no KV policy" in line and "--kv-policy" in line


@pytest.mark.parametrize("extra_args", [None, {}, {"other": 1}, {"kv_buget": 1}])
def test_what_is_nothing_of_ours_is_not_said(configured, warned, extra_args):
    frontend._check_request(configured(), SamplingParams(extra_args=extra_args), 100)
    assert not warned()


def test_a_request_for_a_policy_where_there_is_one_is_not_said(configured, warned):
    frontend._check_request(configured(kv_policy="full"), SamplingParams(extra_args={"kv_policy": "h2o"}), 5000)
    assert not warned()


@pytest.mark.parametrize("make", [CompletionRequest, ChatCompletionRequest])
def test_beams_get_what_their_search_asks_of_the_policy_and_nothing_else(configured, make):
    asks = {"prompt": "t1"} if make is CompletionRequest else {"messages": [{"role": "user", "content": "t1"}]}
    prompt, params = {"prompt_token_ids": [1] * 100}, SamplingParams()
    served = configured(kv_policy={"name": "h2o", "budget": 1024})
    make(**asks, vllm_xargs={"kv_budget": 512, "other": 1}).to_beam_search_params(3, {})
    assert frontend._of_beam(served, prompt, params).extra_args == {"kv_budget": 512} and not params.extra_args
    assert frontend._of_beam(configured(), prompt, params) is params
    make(**asks, vllm_xargs={"kv_buget": 512}).to_beam_search_params(3, {})
    with pytest.raises(VLLMValidationError, match="'kv_buget'"):
        frontend._of_beam(served, prompt, params)
    # What comes next in the same task is no beam.
    make(**asks).to_sampling_params(3, {})
    assert frontend._of_beam(served, prompt, params) is params


def test_a_policy_travels_in_the_configuration_and_names_the_worker(configured):
    config = configured(kv_policy={"name": "h2o", "budget": 1024})
    policy = KVPolicyConfig.parse(config.additional_config["kv_policy"])
    assert policy == KVPolicyConfig(name="h2o", budget=1024)
    assert json.loads(json.dumps(config.additional_config)) == config.additional_config
    worker = resolve_obj_by_qualname(config.parallel_config.worker_cls)
    assert worker is CPUEvictionWorker and issubclass(worker, CPUWorker)


@pytest.mark.parametrize("asynchronous, expected", [(False, EvictionScheduler), (True, AsyncEvictionScheduler)])
def test_a_policy_names_the_scheduler(configured, asynchronous, expected):
    config = configured()
    own = AsyncScheduler if asynchronous else Scheduler
    config.scheduler_config.async_scheduling = asynchronous  # the CPU platform turns it off
    assert config.scheduler_config.get_scheduler_cls() is own
    plugin.activate(config, KVPolicyConfig(name="h2o"))
    scheduler = config.scheduler_config.get_scheduler_cls()
    assert scheduler is expected and issubclass(scheduler, own)


def test_additional_config_is_the_same_as_the_keyword(configured):
    policy = {"name": "h2o", "budget": 1024}
    keyword = configured(kv_policy=policy)
    for carried in (
        configured(additional_config={"kv_policy": policy, "other": 1}),
        configured(additional_config={"kv_policy": policy, "other": 1}, kv_policy=KVPolicyConfig.parse(policy)),
    ):
        assert carried.additional_config == {**keyword.additional_config, "other": 1}
        assert carried.scheduler_config.scheduler_cls == keyword.scheduler_config.scheduler_cls
        assert carried.parallel_config.worker_cls == keyword.parallel_config.worker_cls


def test_two_different_policies_are_refused(configured):
    with pytest.raises(KVPolicyError, match="two different KV policies"):
        configured(kv_policy="h2o", additional_config={"kv_policy": {"name": "sink-window"}})


def test_a_wrong_policy_is_refused_when_the_engine_is_configured(configured):
    with pytest.raises(KVPolicyError, match="unknown KV policy 'h3o'"):
        configured(kv_policy="h3o")


# The field


@dataclasses.dataclass
class LaterArgs(AsyncEngineArgs):
    """Made after the plugin has extended vLLM's classes, as others make theirs."""

    seats: int = 3


@pytest.fixture(params=[EngineArgs, AsyncEngineArgs, LaterArgs])
def arguments_class(request):
    return request.param


COPIES = {
    "replace": lambda args: dataclasses.replace(args, seed=7),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda args: pickle.loads(pickle.dumps(args)),
    # Nested configurations become dicts too, which vLLM does not take back.
    "asdict": lambda args: type(args)(args.model, kv_policy=dataclasses.asdict(args)["kv_policy"]),
    "vars": lambda args: type(args).from_cli_args(argparse.Namespace(**vars(args))),
    "fields": lambda args: type(args)(**{f.name: getattr(args, f.name) for f in dataclasses.fields(args)}),
}


@pytest.mark.parametrize("policy", ["sink-window", {"name": "h2o", "budget": 1024}, KVPolicyConfig(name="h2o")])
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_engine_arguments_keeps_the_policy(tiny, arguments_class, way, policy):
    copied = COPIES[way](arguments_class(model=str(tiny), kv_policy=policy))
    assert type(copied) is arguments_class and copied.kv_policy == policy


def test_the_policy_is_a_field_like_any_other(tiny, arguments_class):
    model = str(tiny)
    (field,) = [field for field in dataclasses.fields(arguments_class) if field.name == "kv_policy"]
    assert field.default is None and arguments_class.kv_policy is None and arguments_class(model).kv_policy is None
    parameter = inspect.signature(arguments_class).parameters["kv_policy"]
    assert parameter.kind == parameter.KEYWORD_ONLY and parameter.default is None
    without, given = arguments_class(model), arguments_class(model, kv_policy="h2o")
    assert given != without and given == arguments_class(model, kv_policy="h2o")
    assert "kv_policy='h2o'" in repr(given) and "kv_policy=None" in repr(without)
    if arguments_class is EngineArgs:  # what vLLM logs at start; its function takes no other class
        assert get_non_default_args(given)["kv_policy"] == "h2o" and "kv_policy" not in get_non_default_args(without)


def test_fields_of_vllms_own_come_where_they_came(tiny, arguments_class):
    """Positional arguments still mean what they meant."""
    own = [parameter for parameter in inspect.signature(arguments_class).parameters if parameter != "kv_policy"]
    assert own == [field.name for field in dataclasses.fields(arguments_class) if field.name != "kv_policy"]
    made = arguments_class(str(tiny), "a second value")
    assert (made.model, getattr(made, own[1]), made.kv_policy) == (str(tiny), "a second value", None)


def test_vllm_could_make_a_flag_of_the_fields_type():
    kwargs = get_kwargs(type("One", (), {"__dataclass_fields__": {"kv_policy": arguments._FIELD}}))["kv_policy"]
    assert kwargs["default"] is None
    assert kwargs["type"]("h2o") == "h2o" and kwargs["type"]('{"name": "h2o"}') == {"name": "h2o"}


def test_ray_serve_llm_takes_it_among_its_engine_kwargs(tiny):
    """What ray.llm's vllm_models.py and vllm_engine.py do, without Ray: sort keywords by field, make arguments and
    configuration in one process, send both to another, and read the arguments' `__dict__` there."""
    engine_kwargs = {"kv_policy": {"name": "adakv", "budget": 1024}, "max_model_len": 2048}
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert engine_kwargs.keys() <= known, "Unknown engine argument"
    made = AsyncEngineArgs(model=str(tiny), **engine_kwargs)
    args, config = pickle.loads(pickle.dumps((made, made.create_engine_config())))
    assert vars(args)["kv_policy"] == engine_kwargs["kv_policy"]
    assert config.additional_config["kv_policy"]["name"] == "adakv"
    assert config.parallel_config.worker_cls.startswith("vllm_evict.")
    again = dataclasses.replace(args).create_engine_config()
    assert again.additional_config == config.additional_config


@pytest.mark.parametrize(
    "policy",
    [
        *(preset for preset in presets() if preset != "endless"),  # whose budget is for larger contexts
        {"name": "sink-window", "budget": 512, "context": "model"},
        {"name": "adakv", "bands": 2},
        {"name": "duo", "pattern": ["10", "01"]},
    ],
)
def test_arguments_may_be_made_a_configuration_of_twice(tiny, policy):
    """Ray Data does, to look at it before the engine makes its own."""
    made = AsyncEngineArgs(model=str(tiny), kv_policy=policy, max_num_batched_tokens=256)
    first, second = made.create_engine_config(), made.create_engine_config()
    assert first.additional_config == second.additional_config
    assert first.scheduler_config.scheduler_cls == second.scheduler_config.scheduler_cls


def test_metrics_are_of_the_classes_that_vllms_own_have(tiny):
    """Under Ray they are Ray's, with its logger in the place of vLLM's Prometheus logger."""
    made = {}

    class Noted:
        def __init__(self, name, *args, **kwargs):
            made[name] = type(self)
            super().__init__(name, *args, **kwargs)

    class OwnCounter(Noted, Counter):
        pass

    class OwnGauge(Noted, Gauge):
        pass

    class Own(PrometheusStatLogger):
        _counter_cls, _gauge_cls = OwnCounter, OwnGauge

    config = EngineArgs(model=str(tiny), kv_policy="h2o").create_engine_config()
    config.cache_config.num_gpu_blocks = 8
    manager = StatLoggerManager(config, custom_stat_loggers=[Own])
    assert made["vllm:generation_tokens"] is OwnCounter and made["vllm:num_requests_running"] is OwnGauge
    ours = {name: cls for name, cls in made.items() if name.startswith("vllm:kv_evict")}
    assert ours == {**{name: OwnCounter for name, _ in COUNTERS.values()}, "vllm:kv_evict_blocks_resident": OwnGauge}
    manager.kv_evict_metrics.record({"h2o": {**dict.fromkeys(COUNTERS, 0), "evicted": 3, "resident": 2}}, 0)
    labels = {"model_name": config.model_config.served_model_name, "engine": "0", "policy": "h2o"}
    assert REGISTRY.get_sample_value("vllm:kv_evict_blocks_evicted_total", labels) == 3


# The flag


@pytest.fixture(scope="module")
def parser():
    """The server's parser of engine arguments."""
    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm serve"))


H2O = KVPolicyConfig(name="h2o", budget=2048)


@pytest.mark.parametrize(
    "arguments, policy",
    [
        ([], None),
        (["--kv-policy", "sink-window"], KVPolicyConfig(name="sink-window")),
        (["--kv_policy=h2o"], KVPolicyConfig(name="h2o")),
        (["--kv-policy", '{"name": "h2o", "budget": 2048}'], H2O),
        (["--kv-policy.name", "h2o", "--kv-policy.budget", "2048"], H2O),
        (["--kv-policy.name=h2o", "--kv-policy.budget=0.25"], KVPolicyConfig(name="h2o", budget=0.25)),
        (
            ["--kv-policy.name=tova", "--kv-policy.protect=false", "--kv-policy.min_prompt=99"],
            KVPolicyConfig(name="tova", protect=False, min_prompt=99),
        ),
        (["--kv-policy", "h2o.yaml"], H2O),
    ],
)
def test_the_flag_takes_what_users_write(parser, tmp_path, monkeypatch, arguments, policy):
    monkeypatch.chdir(tmp_path)
    Path("h2o.yaml").write_text("name: h2o\nbudget: 2048\n")
    namespace = parser.parse_args(["--model", str(tmp_path), *arguments])
    assert namespace.kv_policy == policy
    for cls in (EngineArgs, AsyncEngineArgs):
        assert cls.from_cli_args(namespace).kv_policy == policy


@pytest.mark.parametrize("key", ["kv-policy", "kv_policy"])
@pytest.mark.parametrize("written", ["h2o.yaml", '{"name": "h2o", "budget": 2048}', {"name": "h2o", "budget": 2048}])
def test_vllms_config_file_may_hold_it(parser, tmp_path, monkeypatch, key, written):
    monkeypatch.chdir(tmp_path)
    Path("h2o.yaml").write_text("name: h2o\nbudget: 2048\n")
    Path("serve.yaml").write_text(json.dumps({"model": str(tmp_path), key: written}))
    assert parser.parse_args(["--config", "serve.yaml"]).kv_policy == H2O
    # The command line comes after the file.
    assert parser.parse_args(["--config", "serve.yaml", "--kv-policy", "tova"]).kv_policy.name == "tova"


@pytest.mark.parametrize("none", [None, "", "None"])
def test_none_is_no_policy_as_of_vllms_flags(parser, tmp_path, none):
    """Templates of deployments leave a flag empty, or have null in a file."""
    (tmp_path / "serve.yaml").write_text(json.dumps({"kv-policy": none, "quantization": none}))
    for words in (["--config", str(tmp_path / "serve.yaml")], ["--kv-policy", none or "", "--quantization", ""]):
        namespace = parser.parse_args(words)
        assert namespace.kv_policy is None is namespace.quantization
        assert parser.parse_args([*words, "--kv-policy", "tova"]).kv_policy.name == "tova"


@pytest.mark.parametrize("key", ["kv-policy", "KV_POLICY", "kvPolicy"])
def test_a_policy_under_another_key_of_additional_config_is_refused(configured, key):
    """It would be no policy at all, and nobody would say so."""
    with pytest.raises(KVPolicyError, match=f"additional_config got the key '{key}'; expected 'kv_policy'"):
        configured(additional_config={key: "h2o"})


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--kv-policy", "h3o"], "unknown KV policy 'h3o': did you mean 'h2o'? Expected one of: "),
        (
            ["--kv-policy", '{"name": "h2o", "budgt": 1}'],
            "policy 'h2o' has no field 'budgt': did you mean 'budget'? Expected one of: ",
        ),
        (["--kv-policy.name", "h2o", "--kv-policy.budget", "-1"], "budget: must be a whole number of tokens above 0"),
        (["--kv-policy", '{"name": h2o}'], "not a JSON object"),
        (["--kv-policy", "nowhere.yaml"], "nowhere.yaml: No such file or directory"),
    ],
)
def test_a_wrong_flag_is_answered_in_one_line(parser, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args(arguments)
    assert stopped.value.code == 2
    *_, last = capsys.readouterr().err.strip().splitlines()
    assert last.startswith(f"vllm serve: error: argument --kv-policy: {message}")


def subcommands(parser, path=()):
    """(words of the command, its parser) for each command of a parser."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield " ".join(path), parser
    for action in nested:
        for name, subparser in action.choices.items():
            yield from subcommands(subparser, (*path, name))


def test_the_flag_is_on_every_command_that_takes_engine_arguments(monkeypatch):
    cli = importlib.import_module("vllm.entrypoints.cli.main")
    parsers = {}

    def stop_here(parser):
        parsers.update(subcommands(parser))
        sys.exit()

    monkeypatch.setattr(FlexibleArgumentParser, "parse_args", stop_here)
    # vLLM builds the parsers of `vllm bench` only if that is what was asked for.
    for command in ("serve", "bench"):
        monkeypatch.setattr(sys, "argv", ["vllm", command])
        with mock.patch.dict(os.environ), pytest.raises(SystemExit):
            cli.main()
    flags = {name: parser._option_string_actions for name, parser in parsers.items()}
    takes_engine_arguments = {name for name, known in flags.items() if "--max-model-len" in known}
    assert {"serve", "run-batch", "bench latency", "bench throughput"} <= takes_engine_arguments
    assert {name for name, known in flags.items() if "--kv-policy" in known} == takes_engine_arguments


# Fresh processes, in which nothing has imported the plugin yet

PREAMBLE = """
import json, sys
assert not [name for name in sys.modules if name.split(".")[0] in ("vllm", "vllm_evict")]
model, policy = sys.argv[1], {"name": "h2o", "budget": 1024}
def tell(value): print("RESULT", json.dumps(value))
"""

CASES = {
    "EngineArgs": """
from dataclasses import dataclass, replace
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
@dataclass
class Later(EngineArgs):
    pass
tell([replace(args(model=model, kv_policy=policy)).kv_policy for args in (AsyncEngineArgs, EngineArgs, Later)])
""",
    "LLM": """
from vllm import LLM
from vllm.v1.engine.llm_engine import LLMEngine
def stop_here(engine_args, **kwargs):
    tell([engine_args.kv_policy])
    sys.exit()
LLMEngine.from_engine_args = stop_here
LLM(model, kv_policy=policy)
""",
    "left out": """
from vllm import LLM, AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
try:
    LLM(model, kv_policy=policy)
except TypeError as error:
    keyword = str(error)
_, unknown = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_known_args(["--kv-policy", "h2o"])
tell([keyword, unknown, [name for name in sys.modules if name.startswith("vllm_evict")]])
""",
}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """What each of CASES tells, each from a process of its own; they run side by side."""
    model = tmp_path_factory.mktemp("model")
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    processes = {
        case: subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + code, str(model)],
            env={**environment, "VLLM_PLUGINS": ""} if case == "left out" else environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for case, code in CASES.items()
    }

    def result(case):
        output, errors = processes[case].communicate(timeout=300)
        told = [line for line in output.splitlines() if line.startswith("RESULT ")]
        assert len(told) == 1, errors[-3000:]
        return json.loads(told[0].removeprefix("RESULT "))

    yield result
    for process in processes.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("case, times", [("EngineArgs", 3), ("LLM", 1)])
def test_the_keyword_works_in_a_fresh_process(fresh, case, times):
    assert fresh(case) == [{"name": "h2o", "budget": 1024}] * times


def test_vllm_plugins_can_leave_it_out(fresh):
    keyword, unknown, imported = fresh("left out")
    assert "unexpected keyword argument 'kv_policy'" in keyword
    assert unknown == ["--kv-policy", "h2o"]
    assert imported == []
