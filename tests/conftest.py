"""Fixtures: tiny models, and vLLM engines in this very process, so that tests see scheduler, manager and worker.

Tests of the lane `engine` run on Model Runner V2, those of other lanes on V1. VLLM_EVICT_TEST_RUNNER=v1 or v2 names another;
with v1-triton it is V1, with vLLM's Triton kernels under the interpreter, for files marked `on_triton`.
"""

import gc
import importlib.util
import logging
import os
import sys
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import pytest
from packaging.version import Version

GARBAGE = 2**30
#: Folders of the lane `engine`.
ON_V2 = {"engine", "models", "serving"}


def pytest_configure(config):
    # Workers of -n inherit it.
    if "VLLM_EVICT_TEST_RUNNER" not in os.environ:
        folders = {part for argument in config.args for part in Path(argument.partition("::")[0]).parts}
        os.environ["VLLM_EVICT_TEST_RUNNER"] = "v2" if folders & ON_V2 else "v1"
    from preparation import prepare

    # With -n the first process only deals tests out to others, and needs neither torch nor vLLM.
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        prepare()


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config, items):
    _check_ids(config, items)
    for item in items:
        marker = item.get_closest_marker("nightly")
        if marker and marker.kwargs and item.callspec.id in marker.kwargs["push"]:
            item.own_markers.remove(marker)
        for marker in item.iter_markers("since"):
            _skip_before(item, *marker.args, **marker.kwargs)
        for marker in [each for each in item.own_markers if each.name in ("both_runners", "v1")]:
            if (
                marker.args and item.callspec.id not in marker.args
            ):  # those of model runners stay on the cases that they name
                item.own_markers.remove(marker)
    parts = [], []
    for item in items:
        parts[_is_left_out(item, os.environ["VLLM_EVICT_TEST_RUNNER"])].append(item)
    items[:], left_out = parts
    config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: item.get_closest_marker("minutes") is None)  # begun first


def _is_left_out(item, runner):
    """Whether a test is for the other runner alone, or is the same without vLLM's Triton kernels."""
    if runner == "v1-triton" and item.path.parent.name == "device":
        return not hasattr(item, "callspec") or item.callspec.params.get("backend") != "triton"
    return runner == "v2" and item.get_closest_marker("v1") is not None


def _skip_before(item, release, why, kind=""):
    if kind in item.name and Version(version("vllm")) < Version(release):
        item.add_marker(pytest.mark.skip(reason=f"vLLM before {release}: {why}"))


def _check_ids(config, items):
    """Each case that a marker names exists: a test whose cases got other names would silently not run on one runner, or
    never.
    """
    if any("::" in arg for arg in config.args):
        return
    named, found, runner = {}, {}, os.environ["VLLM_EVICT_TEST_RUNNER"]
    for item in items:
        for marker in item.iter_markers():
            ids = marker.kwargs.get("push") or marker.args
            # Some tests have cases for one runner alone.
            if ids and marker.name in ("nightly", *(("both_runners", "v1") if runner == "v2" else ())):
                test = marker.name, item.nodeid.split("[")[0]
                named[test] = set(ids)
                found.setdefault(test, set()).add(item.callspec.id)
    unknown = {" of ".join(test): sorted(ids - found[test]) for test, ids in named.items() if ids - found[test]}
    if unknown:
        raise pytest.UsageError(f"markers got names of no case: {unknown}; expected ids of the test's parameters")


#: Engines that end thaw what is frozen.
no_thaw = patch("gc.unfreeze")


def pytest_collection_finish():
    # vLLM looks at each model class that it does not know yet in a new process, which imports all of vLLM.
    if "vllm" in sys.modules:
        from vllm.model_executor.models import registry

        registry._run_in_subprocess = lambda look: look()
        import engine

        setattr(engine.CpuPlatform, engine.REGISTER, engine._register_kernels_once)
        if engine.V2:
            import stand_ins

            stand_ins.use_torch()
    # A million objects of vLLM's and torch's modules, which the garbage collector traversed half a second each time.
    gc.freeze()
    no_thaw.start()
    # Steps make objects faster than the collector finds garbage among them; engines collect when they end.
    gc.set_threshold(50_000)


def pytest_unconfigure():
    no_thaw.stop()
    gc.unfreeze()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Path of a 2-layer GQA Llama with random weights, 2,048 tokens of context."""
    from oracle.tiny import make_tiny_llama

    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def model(tiny):
    """The model of `dense`; test files with models of their own override it."""
    return tiny


@pytest.fixture(scope="module")
def dense(model):
    """The oracle of `model`."""
    from oracle.model import DenseLlama

    return DenseLlama(model)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A model of five layers: each reads other blocks, and leaders have layers before, between and after them."""
    from oracle.tiny import make_tiny_llama

    return make_tiny_llama(tmp_path_factory.mktemp("deep"), layers=5)


@pytest.fixture(scope="module")
def stock(deep):
    """Answers of stock vLLM on `deep`; test files with models of their own override it."""
    from engine import Engine
    from loads.pages import Stock

    made = Engine(deep, block_size=32, max_model_len=1024, max_num_batched_tokens=1024, enable_prefix_caching=False)
    yield Stock(made)
    made.close()


@pytest.fixture(autouse=True)
def stale_views(monkeypatch):
    """The memory of views, written by one step, is garbage in the next: no block, and no place of one."""
    import torch

    from vllm_evict.compute.views import Views

    begin = Views.begin

    @torch.inference_mode()
    def spoiled(self):
        for view in self._memory.values():
            for each in view:
                each.fill_(GARBAGE)
        begin(self)

    monkeypatch.setattr(Views, "begin", spoiled)


@pytest.fixture
def poisoned(monkeypatch):
    """Freed blocks are full of NaN, in engines made in the test."""
    monkeypatch.setenv("VLLM_EVICT_POISON", "1")


@pytest.fixture
def engine(tiny):
    """Factory of in-process engines on the tiny model: `engine(kv_policy=..., **engine_args)`."""
    from engine import Engine

    engines = []

    def make(kv_policy=None, model=None, **kwargs):
        engines.append(Engine(model or tiny, kv_policy, **kwargs))
        return engines[-1]

    yield make
    for made in engines:
        made.close()


@pytest.fixture
def async_stays(monkeypatch):
    # Other fixtures replace the same method by the same `monkeypatch`, which undoes the last one first.
    from engine import leave_async

    leave_async(monkeypatch)


@pytest.fixture
def async_engine(engine, async_stays):
    """Like `engine`, with async scheduling."""

    def make(kv_policy=None, **kwargs):
        made = engine(kv_policy, async_scheduling=True, **kwargs)
        assert made.core.batch_queue_size == 2
        assert type(made.scheduler).__name__ == "AsyncEvictionScheduler"
        return made

    return make


@pytest.fixture
def ranked_engine(tiny):
    """Factory of engines of so many ranks. Each closes the one before: forks would have its process groups."""
    from engine import Engine
    from workers import Workers, forking

    made = []

    def make(policy, ranks=2, model=None, **kwargs):
        while made:
            made.pop().close()
        of_ranks = Workers if ranks > 1 else Engine
        made.append(of_ranks(model or tiny, policy, tensor_parallel_size=ranks, **kwargs))
        return made[-1]

    with forking():
        yield make
        for server in made:
            server.close()


@pytest.fixture
def complaints():
    """Warnings and errors of the plugin, as they come: list of (level, message)."""
    said, logger = [], logging.getLogger("vllm.evict")

    def listen(record):
        if record.levelno >= logging.WARNING:
            said.append((record.levelname, record.getMessage()))
        return True

    # vLLM configures its loggers anew with the first engine, and drops their handlers, but no filters.
    logger.addFilter(listen)
    yield said
    logger.removeFilter(listen)


@pytest.fixture
def set_threads():
    """Sets torch's threads, for this test."""
    import torch

    threads = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(threads)


@pytest.fixture
def script(monkeypatch):
    """Gives the module of benchmarks/`name`.py, with an empty command line: `script(name)`."""
    folder = Path(__file__).parents[1] / "benchmarks"

    def load(name):
        monkeypatch.syspath_prepend(str(folder))
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        monkeypatch.setattr(sys, "argv", [f"{name}.py"])
        return module

    return load


@pytest.fixture
def graphs(monkeypatch):
    """Full CUDA graphs for engines that ask for them: `engine(policy, **graphs.options)` (graphs.py)."""
    from graphs import FullGraphs

    made = FullGraphs()
    made.install(monkeypatch)
    return made
