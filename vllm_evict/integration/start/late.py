"""Runs an action when a module has been imported, without importing it."""

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call `action(module)` when the module `name` has been executed; at once if it already has.

    A module takes one action. vLLM calls platform plugins while its own modules are being imported. Importing these
    modules from there would be circular, and some are half executed.
    """
    module = sys.modules.get(name)
    if module is None:
        sys.meta_path.insert(0, _Finder(name, action))
    elif getattr(module.__spec__, "_initializing", False):
        _await(module.__spec__, action)
    else:
        action(module)


class _Finder:
    """Finds one module by the other finders, and arranges the action."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name, self._action = name, action

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            _await(spec, self._action)
        return spec


def _await(spec: Any, action: Callable[[ModuleType], None]) -> None:
    """Act when importlib clears the mark that it sets on a spec while the module is executed."""

    class Awaited(type(spec)):  # type: ignore[misc]  # a spec is of its finder's class
        @property
        def _initializing(self) -> bool:
            return self.__dict__.get("_executing", False)

        @_initializing.setter
        def _initializing(self, executing: bool) -> None:
            self.__dict__["_executing"] = executing
            if executing:
                return
            if self.name in sys.modules:
                action(sys.modules[self.name])
            else:
                when_imported(self.name, action)  # the import failed; another import may follow

    executing = spec.__dict__.pop("_initializing", False)
    spec.__class__ = Awaited
    spec.__dict__["_executing"] = executing
