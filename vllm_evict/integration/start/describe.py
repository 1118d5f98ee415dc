"""Lines of the log that say, when the engine starts, what the policy does and which kernels do it."""

from typing import TYPE_CHECKING, Any

from ...config import KVPolicyConfig
from ...core.mechanisms.pressure import Pressure
from ...environment import decode_kernel
from ...policies import RUNNING
from . import versions, windows
from .capabilities.server import DEVICE_BACKENDS, UNLIKE

if TYPE_CHECKING:
    from ...compute.runtime import EvictionRuntime


def facts(config: KVPolicyConfig, held: str, vllm_config: Any) -> str:
    """Return what the start-up line says first, which a configuration tells without layers.

    Args:
        config: the server's policy.
        held: what requests hold, by `what_is_held` or `held_before_layers`.
        vllm_config: the server's.
    """
    return (
        f"KV policy {_described(config)}; requests may use {', '.join(sorted(config.allowed))}{held}"
        f"; model runner V{2 if vllm_config.use_v2_model_runner else 1}"
        f"{', async scheduling' if vllm_config.scheduler_config.async_scheduling else ''}"
    )


def held_before_layers(config: KVPolicyConfig, vllm_config: Any) -> str | None:
    """Return what requests hold, where a configuration tells it; None where that takes layers.

    Layers tell the number of KV groups of split heads and beside other layers, and the size of blocks, if neither the
    user nor vLLM's configuration did.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    sized = cache.user_specified_block_size or not versions.layers_size_blocks(vllm_config.device_config.device_type)
    if len(config.classes) > 1 or model.is_hybrid or windows.slide(vllm_config) or not sized:
        return None
    bound = config.bound(cache.block_size, model.max_model_len)
    return what_is_held(config, bound, cache.block_size, Pressure.serves(config))


def what_is_held(config: KVPolicyConfig, bound: int | None, block_size: int, pressure: bool) -> str:
    """Return what a request of the longest prompt holds between steps; under pressure what any keeps."""
    if not bound:
        return " and hold all their blocks"
    held = f" and hold {bound} blocks of {block_size} tokens"
    if pressure and isinstance(config.budget, float):
        least = config.limits(block_size, 1)
        assert least is not None  # there is a bound
        share = f"{100 * config.budget:g} % of their prompts"
        held = f" and keep {share}, at least {least.bound} blocks of {block_size} tokens,"
    held += " when the pool runs out" * pressure
    return held + ", under full all their blocks" * ("full" in config.allowed and config.name != "full")


def kernels_line(vllm_config: Any, config: KVPolicyConfig, runtime: "EvictionRuntime", backend: str) -> str:
    """Return one line: the kernels that attend and measure on a worker, after `layers.settle`."""
    kernel, measures = f"{backend}'s own kernel", bool(config.statistics & RUNNING)
    line = f"KV policy {config.name}: {kernel} attends to all requests"
    named = _decoded(runtime, measures)
    if runtime.groups[0].decodes and named:
        does = "attends for" if runtime.batch.takes_prompts else "decodes"
        line = f"KV policy {config.name}: the plugin's kernel {does} {' and '.join(named)}"
        line += ", output and mass in one read" if measures else f"; {kernel} attends to all others"
    sources = [group.source for group in runtime.groups]
    for kind in dict.fromkeys(type(source) for source in sources):
        line += kind.described([source for source in sources if type(source) is kind])
    if measures:
        line += f"; beside {kernel} mass comes from {runtime.ops.beside}"
    graphs = vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
    if graphs and all(source.fits_graph(set()) for source in sources):
        line += "; decodes replay full CUDA graphs" + "".join({source.beside_graphs for source in sources})
        if measures and runtime.measures_in_graphs is not None:
            line += f", of measured requests up to {runtime.groups[0].shape.graph_tokens} resident tokens"
        elif measures:
            line += ", except decodes of measured requests"
    return line


def _decoded(runtime: "EvictionRuntime", measures: bool) -> list[str]:
    """Return the requests that the plugin's kernel attends for, where it can."""
    named = ["requests with holes"] if runtime.decodes_lacking else []
    if measures and runtime.decodes_measured:
        named.append("measured requests")
    elif measures and runtime.ops.decodes_measured and not named:
        named.append("measured requests with holes")
    sources = [group.source for group in runtime.groups]
    said = [source.whose for source in sources if source.decodes]
    said += [source.prompts for source in sources if runtime.batch.takes_prompts]
    return [*named, *dict.fromkeys(filter(None, said))]


def ignored_settings(runtime: "EvictionRuntime", backend: str) -> str | None:
    """Return a warning if VLLM_EVICT_DECODE names a kernel and another one decodes, after `layers.settle`; None if not.

    `kernels.decode_cuda` logs whether CUDA C++ can run behind a GPU backend.
    """
    kernel = decode_kernel()
    decodes, on_device = runtime.groups[0].decodes, backend in (*DEVICE_BACKENDS, *UNLIKE)
    if kernel in (None, "stock") or (on_device and decodes):
        return None
    why = "the plugin's kernels do not support its layers" if on_device else "it names a kernel for GPU backends"
    instead = "the plugin's kernel in C++ decodes for policies" if decodes else f"{backend}'s own kernel decodes"
    return f"VLLM_EVICT_DECODE={kernel} has no effect behind {backend}: {why}; {instead}"


def _described(config: KVPolicyConfig) -> str:
    """Return its name and options, for the start-up line."""
    hidden = {"pattern", "retrieval"} | config.idle
    options = {field: getattr(config, field) for field in sorted(config.policy.options - hidden)}
    text = config.name + "".join(f" {field}={value}" for field, value in options.items() if value is not None)
    return text if config.retrieval is None else f"{text} retrieval=({_described(config.retrieval)})"
