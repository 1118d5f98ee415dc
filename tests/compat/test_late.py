"""Hooks that wait for a module of vLLM to be imported (integration/start/late.py)."""

import argparse
import importlib
import sys

import pytest

from vllm_evict.integration.start.late import when_imported


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
