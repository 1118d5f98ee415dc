"""Attention layers of a loaded model: their backend behind the resident view.

vLLM asks each layer for its backend when it makes KV cache specs and metadata builders, both after the model is loaded.
Replacing it there touches one engine's layers and no registry, and works the same for every backend.
"""

from typing import Any

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from ..attention.backend import resident_backend, working_impl
from ..attention.cpu import KEY_LAYOUTS, CPUPasses
from ..config import KVPolicyConfig, KVPolicyError
from ..worker.runtime import EvictionRuntime
from . import refusals


def install(vllm_config: VllmConfig, config: KVPolicyConfig) -> EvictionRuntime:
    """Put all attention layers of the model behind one runtime.

    Raises:
        KVPolicyError: a layer cannot be served (see `refusals`).
    """
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    for name, layer in layers.items():
        if type(layer) is not Attention:
            raise KVPolicyError(f"{name} is a {type(layer).__name__} layer: KV policies need plain attention layers")
        refusals.check_layer(name, layer, config)
    # The block size is final here; it may not have been when the configuration was checked.
    config.limits(vllm_config.cache_config.block_size, vllm_config.model_config.max_model_len)
    first = next(iter(layers.values()))
    runtime = EvictionRuntime(
        config,
        block_size=vllm_config.cache_config.block_size,
        max_requests=vllm_config.scheduler_config.max_num_seqs,
        max_model_len=vllm_config.model_config.max_model_len,
        kv_heads=first.num_kv_heads,
        layers=len(layers),
        read=lambda blocks, values: (CPUPasses.read(layer, blocks, values) for layer in layers.values()),
    )
    backends: dict[type, type] = {}
    impls: dict[type, type] = {}
    for layer in layers.values():
        backend, impl = layer.attn_backend, type(layer.impl)
        if backend not in backends:
            backends[backend] = resident_backend(backend, runtime)
        layer.attn_backend = backends[backend]
        if impl not in impls:
            impls[impl] = working_impl(impl, CPUPasses)
        layer.impl.__class__ = impls[impl]
    return runtime


def settle(vllm_config: VllmConfig, config: KVPolicyConfig, runtime: EvictionRuntime) -> None:
    """Choose what attends to requests with holes; how keys are packed is known once metadata builders exist.

    Raises:
        KVPolicyError: the score pass cannot read a layer's keys; names the layout.
    """
    layers = get_layers_from_vllm_config(vllm_config, Attention)
    for name, layer in layers.items():
        if config.statistics and layer.isa not in KEY_LAYOUTS:
            raise KVPolicyError(
                f"{name} packs its keys for {layer.isa!r}, which the score pass can't read (it reads "
                f"{', '.join(KEY_LAYOUTS)}): use sink-window with \"allow\": []"
            )
    runtime.decodes = all(CPUPasses.can_decode(layer) for layer in layers.values())


def tensor_parallel_all_reduce(values: Any, maximise: bool) -> Any:
    """Sum or maximum of a tensor over tensor-parallel ranks; every rank gets the same."""
    group = get_tp_group()
    if group.world_size > 1:
        import torch.distributed as dist

        dist.all_reduce(values, dist.ReduceOp.MAX if maximise else dist.ReduceOp.SUM, group=group.cpu_group)
    return values
