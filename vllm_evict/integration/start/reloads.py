"""Tells the scheduler that weights have changed. vLLM changes them in its workers, past the scheduler.

What has been computed outlives vLLM's pool on the host, and as scores. vLLM leaves it to its users to reset the prefix
cache after weights changed. Nothing is said where the scheduler is not the plugin's.
"""

from collections.abc import Callable
from typing import Any

from ..seams import replaces

#: Calls of workers that change no weights. Any other may, those of a worker extension and functions above all.
READS = {
    "compute_weight_checksums",
    "get_model_inspection",
    "init_weight_transfer_engine",
    "release_late_interaction_query_cache",
    "shutdown_weight_transfer_engine",
    "synchronize_device",
}


@replaces(
    "vllm.v1.engine.core:EngineCore.add_lora",
    at_import=True,
    why="the scheduler hears of an adapter that is loaded again, maybe with other weights",
    remove_when="vLLM tells its scheduler of adapters",
)
def add_lora(add: Callable[..., bool]) -> Callable[..., bool]:
    def add_lora(self: Any, lora_request: Any) -> bool:
        try:
            return bool(add(self, lora_request))
        finally:  # ranks may have loaded it before one failed
            _scheduler(self, "adapter_loaded")(lora_request)

    return add_lora


@replaces(
    "vllm.v1.engine.core:EngineCore.collective_rpc",
    at_import=True,
    why="the scheduler hears of calls of workers that may change weights",
    remove_when="vLLM tells its scheduler that weights changed",
)
def collective_rpc(call: Callable[..., Any]) -> Callable[..., Any]:
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(self, method, *args, **kwargs)
        finally:
            if method not in READS:
                _scheduler(self, "weights_changed")()

    return collective_rpc


def _scheduler(core: Any, method: str) -> Callable[..., None]:
    """Return a method of an engine's scheduler; a function that does nothing if it has none."""
    found: Callable[..., None] = getattr(getattr(core, "scheduler", None), method, lambda *args: None)
    return found
