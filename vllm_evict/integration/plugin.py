"""Entry points by which vLLM finds the plugin."""

from . import seams
from .frontend import entrypoints, metrics, usage
from .start import arguments, ending, fallback, reloads, room

#: Modules whose seams are applied in every process. Without a policy they change nothing that vLLM does.
IN_EVERY_PROCESS = (arguments, fallback, reloads, ending, room, usage, metrics, entrypoints)
_registered = False


def register() -> None:
    """Entry point `vllm.general_plugins`: called in the API process, the engine core and every worker."""
    global _registered
    if not _registered:
        _registered = True
        seams.apply()


def platform() -> None:
    """Entry point `vllm.platform_plugins`: vLLM calls it first of all, and it declines to be a platform.

    vLLM loads general plugins inside `EngineArgs.__init__`, too late to add a keyword to it. It calls platform plugins
    while it is being imported.
    """
    register()
