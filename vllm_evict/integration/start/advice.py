"""Advice of refusals: settings that work on this server, by what vLLM makes of its other settings."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.utils.torch_utils import resolve_kv_cache_dtype_string
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

#: Dtypes of models that `--kv-cache-dtype` has a name for.
NAMED_DTYPES = ("float16", "bfloat16")


def cache_dtype(vllm_config: Any, given: str | None = None) -> str:
    """Return the KV cache dtype of full attention layers; `given`: in the place of the one that the server was given.

    Checkpoints may bring a dtype, which "auto" stands for: vLLM resolves it in the configuration or in the layers.
    """
    model = vllm_config.model_config
    dtype = vllm_config.cache_config.cache_dtype if given is None else resolve_kv_cache_dtype_string(given, model)
    scheme = getattr(getattr(vllm_config, "quant_config", None), "kv_cache_scheme", None)
    return "fp8" if dtype == "auto" and scheme is not None and not model.use_mla else dtype


def is_own_dtype(vllm_config: Any) -> bool:
    """Return whether full attention layers keep keys in the model's dtype."""
    return cache_dtype(vllm_config) in ("auto", _name_of_dtype(vllm_config))


def own_dtype(vllm_config: Any) -> str:
    """Return the setting with which a KV cache has the model's dtype."""
    if cache_dtype(vllm_config, "auto") == "auto":
        return "--kv-cache-dtype auto"
    name = _name_of_dtype(vllm_config)
    return f"--kv-cache-dtype {name}" if name in NAMED_DTYPES else "--dtype bfloat16 --kv-cache-dtype bfloat16"


def _name_of_dtype(vllm_config: Any) -> str:
    return str(vllm_config.model_config.dtype).removeprefix("torch.")


def head_size(model: Any) -> int:
    """Return the dimensions of the largest heads. Full attention of Gemma 4 has larger ones than the model's other
    layers.
    """
    text = model.hf_text_config
    # transformers 5 has what differs between layers in `per_layer_config`; older releases have a field for Gemma 4.
    kinds, of_layer = getattr(text, "layer_types", None) or (), getattr(text, "per_layer_config", None)
    full = [of_layer[i] for i, kind in enumerate(kinds) if kind == "full_attention"] if of_layer is not None else []
    sizes = (getattr(each, "head_dim", None) or 0 for each in full)
    return max(model.get_head_size(), getattr(text, "global_head_dim", None) or 0, *sizes)


def reads_whole(block_size: int, kernel_size: Any) -> bool:
    """Return whether kernels with blocks of `kernel_size`, or of multiples of it, read a pool's blocks whole."""
    return (is_any(kernel_size) and block_size % kernel_size.base == 0) or block_size == kernel_size


def is_any(kernel_size: Any) -> bool:
    """Return whether kernels read blocks of all multiples of a size."""
    return isinstance(kernel_size, MultipleOf)


def working(
    vllm_config: Any, backends: Iterable[str], reads: Callable[[Any], bool] = lambda kernel_size: True
) -> list[str]:
    """Those of some attention backends that vLLM takes for the model's full attention on this GPU.

    Args:
        vllm_config: of the server.
        backends: names.
        reads: of which sizes the blocks of their kernels have to be.
    """
    capability = current_platform.get_device_capability()
    return [name for name in backends if capability is None or _works(vllm_config, name, capability, reads)]


def _works(vllm_config: Any, name: str, capability: Any, reads: Callable[[Any], bool]) -> bool:
    try:
        backend = AttentionBackendEnum[name].get_class()
        with set_current_vllm_config(vllm_config):
            sizes = backend.get_supported_kernel_block_sizes()
            reasons = backend.validate_configuration(device_capability=capability, **_selector(vllm_config)._asdict())
    except (ImportError, OSError):
        return False
    return not reasons and any(map(reads, sizes))


def either(names: Sequence[str]) -> str:
    """Return the names of which one may be set."""
    return " or ".join(names) if names else "another one, of which this server has none: leave --kv-policy out"


def all_of(names: Sequence[str]) -> str:
    """Return the names in a sentence."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:]))) or "none that runs here"


def chosen(vllm_config: Any) -> str | None:
    """Return the attention backend that vLLM chooses on a GPU for full attention, if none is named; None: layers will
    tell.
    """
    if not current_platform.is_cuda():
        return None
    with contextlib.suppress(Exception):
        return taken(vllm_config, None)
    return None


def taken(vllm_config: Any, named: str | None) -> str:
    """Return the backend that vLLM takes on this device for full attention, as far as its configuration tells.

    Args:
        vllm_config: of the server.
        named: the backend that the configuration names; None: vLLM chooses one.

    Raises:
        ValueError: vLLM has none, or does not take the named one.
    """
    selected = None if named is None else AttentionBackendEnum[named]
    with set_current_vllm_config(vllm_config):
        path = current_platform.get_attn_backend_cls(selected, _selector(vllm_config), num_heads=None)
    return str(resolve_obj_by_qualname(path).get_name())


def takes_no_plan(vllm_config: Any) -> bool:
    """Return whether FlashInfer's kernels for all steps take block tables and lengths alone, and no plan of a step.

    TensorRT-LLM's do, which vLLM has on Blackwell in data centers, where nothing keeps it from them.
    """
    capability = current_platform.get_device_capability()
    if capability is None or capability.major != 10:
        return False
    with contextlib.suppress(ImportError, OSError), set_current_vllm_config(vllm_config):
        # Learned sinks need the same kernels, for prompts and for decodes.
        return bool(AttentionBackendEnum["FLASHINFER"].get_class().supports_sink())
    return False


def _selector(vllm_config: Any) -> AttentionSelectorConfig:
    model = vllm_config.model_config
    return AttentionSelectorConfig(
        head_size=head_size(model),
        dtype=model.dtype,
        kv_cache_dtype=cache_dtype(vllm_config),
        block_size=None,
        use_mla=model.use_mla,
        use_mm_prefix=model.is_mm_prefix_lm,
    )
