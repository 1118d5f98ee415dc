"""Fixtures: tiny models, and vLLM engines in this very process, so that tests see scheduler, manager and worker.

VLLM_EVICT_TEST_RUNNER=v2 runs the tests marked `both_runners` on Model Runner V2 (Triton's interpreter). With v1-triton it
is V1, with vLLM's Triton kernels under the interpreter, for files marked `on_triton`.
"""

import gc
import importlib.util
import logging
import sys
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import pytest
from packaging.version import Version
from preparation import RUNNER, prepare

GARBAGE = 2**30


def pytest_configure(config):
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
    if RUNNER == "v2":
        left_out = [item for item in items if _on_v2(item) is None]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
        for item in items:
            if _on_v2(item) == "nightly":
                item.add_marker("nightly")
    items.sort(key=lambda item: item.get_closest_marker("minutes") is None)  # begun first


def _skip_before(item, release, why, kind=""):
    if kind in item.name and Version(version("vllm")) < Version(release):
        item.add_marker(pytest.mark.skip(reason=f"vLLM before {release}: {why}"))


def _on_v2(item):
    """When a test runs on Model Runner V2: "push", "nightly" or None, by the cases that its marker `both_runners` names."""
    if (marker := item.get_closest_marker("both_runners")) is None:
        return None
    if not (marker.args or marker.kwargs) or item.callspec.id in marker.args:
        return "push"
    return "nightly" if item.callspec.id in marker.kwargs.get("nightly", ()) else None


def _check_ids(config, items):
    """Each case that a marker names exists: a test whose cases got other names would silently not run on V2, or never."""
    if any("::" in arg for arg in config.args):
        return
    named, found = {}, {}
    for item in items:
        for marker in item.iter_markers():
            # Some tests have cases for one runner alone.
            if marker.name in ("nightly", RUNNER == "v2" and "both_runners") and (
                ids := marker.kwargs.get("push") or (*marker.args, *marker.kwargs.get("nightly", ()))
            ):
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


@pytest.fixture(autouse=True)
def stale_views(monkeypatch):
    """What one step has written into the memory of views is garbage in the next: no block, and no place of one."""
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
def async_stays():
    from engine import async_as_asked

    with async_as_asked():
        yield


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
