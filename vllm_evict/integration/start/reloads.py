"""Tells the scheduler that weights have changed. vLLM changes them in its workers, past the scheduler."""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from .late import once

#: Calls of workers that change no weights. Any other may, those of a worker extension and functions above all.
READS = {
    "compute_weight_checksums",
    "get_model_inspection",
    "init_weight_transfer_engine",
    "release_late_interaction_query_cache",
    "shutdown_weight_transfer_engine",
    "synchronize_device",
}


def hook(module: ModuleType) -> None:
    """Extend `vllm.v1.engine.core`; once. What has been computed outlives vLLM's pool on the host, and as scores.

    vLLM leaves it to its users to reset the prefix cache after weights changed, and does not tell its scheduler of
    adapters that are loaded again. Nothing is said where the scheduler is not the plugin's.
    """
    core = module.EngineCore
    if not once(core):
        return
    add, call = core.add_lora, core.collective_rpc

    @wraps(add)
    def add_lora(self: Any, lora_request: Any) -> bool:
        try:
            return bool(add(self, lora_request))
        finally:  # ranks may have loaded it before one failed
            _scheduler(self, "adapter_loaded")(lora_request)

    @wraps(call)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(self, method, *args, **kwargs)
        finally:
            if method not in READS:
                _scheduler(self, "weights_changed")()

    core.add_lora, core.collective_rpc = add_lora, collective_rpc


def _scheduler(core: Any, method: str) -> Callable[..., None]:
    """Return a method of an engine's scheduler; a function that does nothing if it has none."""
    found: Callable[..., None] = getattr(getattr(core, "scheduler", None), method, lambda *args: None)
    return found
