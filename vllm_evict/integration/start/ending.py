"""Tells a scheduler that its engine is about to end."""

import functools
from types import ModuleType
from typing import Any

from .late import once


def hook(module: ModuleType) -> None:
    """Have the scheduler hear of it where an engine core drains its requests, which vLLM tells no scheduler."""
    cls = module.EngineCoreProc
    handle = cls._handle_shutdown
    if not once(cls):
        return

    @functools.wraps(handle)
    def handled(self: Any) -> bool:
        if not self.is_running() and (end := getattr(self.scheduler, "end", None)) is not None:
            end()
        going_on: bool = handle(self)
        return going_on

    cls._handle_shutdown = handled
