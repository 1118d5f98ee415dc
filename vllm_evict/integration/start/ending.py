"""Tells a scheduler that its engine is about to end."""

from collections.abc import Callable
from typing import Any

from ..seams import replaces


@replaces(
    "vllm.v1.engine.core:EngineCoreProc._handle_shutdown",
    at_import=True,
    why="the scheduler hears that its engine drains its requests, and begins nothing new",
    remove_when="vLLM tells its scheduler of a shutdown",
)
def handle_shutdown(handle: Callable[..., bool]) -> Callable[..., bool]:
    def handled(self: Any) -> bool:
        if not self.is_running() and (end := getattr(self.scheduler, "end", None)) is not None:
            end()
        return handle(self)

    return handled
