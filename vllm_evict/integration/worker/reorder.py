"""Puts heads in another order: permutes the weights of attention projections while vLLM loads them.

Attention does not depend on the order of its KV heads, if query heads, keys, values and the input of the output
projection have the same order. Tensors are permuted whole, before vLLM cuts them for a tensor-parallel rank, so a head
may move to another rank.

Attention modules in which anything else depends on a head's place are refused by name. So are load formats that bypass
the weight loaders: a model partly in the new order would run, and give wrong answers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
import vllm.model_executor.model_loader.base_loader as base_loader
from torch import nn
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.parameter import BlockQuantScaleParameter

from ...config import KVPolicyError
from ..seams import replaces

#: Advice: formats that use the weight loaders, or need no weights.
FORMATS = "use --load-format auto, safetensors, pt or dummy"
#: Backends that pass new weights to a running server through the weight loaders.
TRANSFERS = ("nccl", "ipc")
#: Attention modules whose projection has q, k and v of each KV head side by side. Their weights come in one tensor, so
#: the loader can't tell.
INTERLEAVED = ("InternLM2Attention",)

#: Pairs (parameter, shard) without a loaded weight so far. An output projection's one shard is "".
Awaited = set[tuple[str, str]]


class HeadOrder(NamedTuple):
    """The weights of q, k or v, or of the output projection's input.

    Attributes:
        size: elements of a head.
        order: int64 [heads], new place -> old head.
    """

    size: int
    order: torch.Tensor


@contextmanager
def reordering(vllm_config: VllmConfig, order: np.ndarray) -> Iterator[None]:
    """Put the heads of the model that is loaded in this context in another order.

    Weights that are loaded again later get this order too.

    Args:
        vllm_config: the worker's.
        order: int64 [layers, kv_heads], new place -> KV head of the checkpoint, a permutation a layer. Query heads
            follow their KV head. Layers whose order is unchanged are not touched.

    Raises:
        KVPolicyError: naming a layer that can't be reordered, or a way of loading that bypasses the weight loaders.
    """
    if vllm_config.lora_config is not None:
        raise KVPolicyError(
            "KV heads can't be split with LoRA, whose adapters are trained for the heads' own order: "
            "leave --enable-lora out"
        )
    transfer = vllm_config.weight_transfer_config
    if transfer is not None and transfer.backend not in TRANSFERS:
        raise KVPolicyError(
            f"KV heads can't be split with weights that {transfer.backend!r} transfers, past their loaders: use "
            f"{' or '.join(TRANSFERS)} as the backend of --weight-transfer-config"
        )
    load_format = str(vllm_config.load_config.load_format)
    models: list[Awaited] = []
    with wrap_loaders.during(base_loader, models, vllm_config, order):
        yield
    if not models:
        raise KVPolicyError(
            f"KV heads can't be split: --load-format {load_format} builds models in its own way; {FORMATS}"
        )
    if models[0] and load_format != "dummy":
        name, shard = min(models[0])
        raise KVPolicyError(
            f"KV heads can't be split: --load-format {load_format} did not load {name}{shard and f' ({shard})'} "
            f"through its weight loader; {FORMATS}"
        )


@replaces(
    "vllm.model_executor.model_loader.base_loader:initialize_model",
    why="weight loaders of a model are wrapped before any weight is loaded; replaced while the model is loaded",
    remove_when="vLLM calls plugins between the making of a model and the loading of its weights",
)
def wrap_loaders(
    initialize: Callable[..., nn.Module], models: list[Awaited], vllm_config: VllmConfig, order: np.ndarray
) -> Callable[..., nn.Module]:
    def initialize_model(*args: Any, **kwargs: Any) -> nn.Module:
        if models:
            raise KVPolicyError("KV heads can't be split where a second model is loaded with the first")
        model = initialize(*args, **kwargs)
        models.append(_wrap(model, vllm_config, order))
        return model

    return initialize_model


@replaces(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.reload_weights",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.reload_weights",
    why="a runner whose model has its heads in another order refuses weights that bypass the weight loaders",
    remove_when="all weights pass weight loaders",
)
def guard_reload(reload_weights: Callable[..., Any]) -> Callable[..., Any]:
    # Workers reload weights by the runner's method, and so do extensions of workers.
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_reload(*args, **kwargs)
        return reload_weights(*args, **kwargs)

    return checked


def check_reload(weights_iterator: Any = None, weights_path: Any = None, is_checkpoint_format: bool = True) -> None:
    """Check the arguments of vLLM's `reload_weights`, for a model whose heads are in another order.

    Raises:
        KVPolicyError: the weights would bypass the weight loaders.
    """
    if not is_checkpoint_format:
        raise KVPolicyError(
            "weights in kernel format have their heads in the checkpoint's order, and this policy has them in another: "
            "reload with is_checkpoint_format=True"
        )


def _wrap(model: nn.Module, vllm_config: VllmConfig, order: np.ndarray) -> Awaited:
    """Wrap the weight loaders of all layers whose order changes; returns the weights that they have to load."""
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    if len(layers) != len(order):
        raise KVPolicyError(f"the heads of {len(order)} layers can't be split: the model has {len(layers)}")
    awaited: Awaited = set()
    for (name, attention), kv_order in zip(layers.items(), order):
        if (kv_order == np.arange(len(kv_order))).all():
            continue
        (qkv_name, qkv), (out_name, out) = _projections(model, name, attention)
        heads, kv_heads = qkv.total_num_heads, qkv.total_num_kv_heads
        if kv_heads != len(kv_order):
            raise _refusal(name, f"it has {kv_heads} KV heads, not {len(kv_order)}")
        group = heads // kv_heads
        keys = torch.tensor(kv_order, dtype=torch.int64, device="cpu")
        queries = (keys[:, None] * group + torch.arange(group, device="cpu")).flatten()
        size, v_size = qkv.head_size, qkv.v_head_size
        parts = {"q": HeadOrder(size, queries), "k": HeadOrder(size, keys), "v": HeadOrder(v_size, keys)}
        _wrap_linear(qkv_name, qkv, "output_dim", parts, awaited)
        _wrap_linear(out_name, out, "input_dim", {"": HeadOrder(v_size, queries)}, awaited)
    return awaited


def _projections(model: nn.Module, name: str, attention: Any) -> list[tuple[str, Any]]:
    """Return the names and modules of a layer's QKVParallelLinear and RowParallelLinear.

    Checks that nothing else in the module depends on the order of heads.

    Raises:
        KVPolicyError: naming the layer.
    """
    if type(attention) is not Attention:
        raise _refusal(name, f"it is a {type(attention).__name__} layer")
    path, _, own_name = name.rpartition(".")
    parent: Any = None
    with suppress(AttributeError):
        parent = model.get_submodule(path)
    if not hasattr(parent, own_name) or getattr(parent, own_name) is not attention:
        raise _refusal(name, f"the model has no module {path} that it belongs to")
    if any(cls.__name__ in INTERLEAVED for cls in type(parent).__mro__):
        raise _refusal(name, f"{type(parent).__name__} holds q, k and v of each head side by side")
    linears: list[tuple[str, Any]] = []
    for cls in (QKVParallelLinear, RowParallelLinear):
        found = [(f"{path}.{child_name}", child) for child_name, child in parent.named_children() if type(child) is cls]
        if len(found) != 1:
            raise _refusal(name, f"{path} has {len(found)} {cls.__name__} layers, not one")
        linears += found
    qkv, out = linears[0][1], linears[1][1]
    # If gates share the projection, it has more query heads than the attention layer.
    if (qkv.num_heads, qkv.num_kv_heads) != (attention.num_heads, attention.num_kv_heads):
        raise _refusal(name, f"{path} projects {qkv.num_heads} + {qkv.num_kv_heads} heads for it")
    if out.input_size != qkv.total_num_heads * qkv.v_head_size:
        raise _refusal(name, f"{path} has no output projection of {qkv.total_num_heads * qkv.v_head_size} inputs")
    if attention.has_sink or getattr(attention.impl, "alibi_slopes", None) is not None:
        raise _refusal(name, "it has a sink or an ALiBi slope for each head")
    for child, weight in attention.state_dict().items():
        if weight.numel() > 1:
            raise _refusal(name, f"its {child} has {weight.numel()} values")
    for child_name, child in parent.named_modules():
        if any(child is module for known in (qkv, out, attention) for module in known.modules()):
            continue
        for weight_name, weight in _own_weights(child):
            per_head = type(child).__name__.endswith("Norm") and tuple(weight.shape) == (qkv.head_size,)
            if weight.numel() > 1 and not per_head:
                full = ".".join(filter(None, (path, child_name, weight_name)))
                raise _refusal(name, f"{full} of shape {list(weight.shape)} may depend on the order of heads")
    return linears


def _own_weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of a module in checkpoints, without its children and without caches such as rotary embeddings'."""
    yield from module.named_parameters(recurse=False)
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def _wrap_linear(
    prefix: str,
    linear: QKVParallelLinear | RowParallelLinear,
    dim: str,
    parts: dict[str, HeadOrder],
    awaited: Awaited,
) -> None:
    """Wrap the weight loaders of a projection's parameters, so that they permute heads.

    Args:
        prefix: the projection's name.
        dim: attribute of the parameters with the dimension along which heads lie: `output_dim` or `input_dim`.
        parts: shards along this dimension, in order.
        awaited: gets the shards that have to be loaded; the loader removes loaded ones.

    Raises:
        KVPolicyError: naming a parameter that can't be permuted.
    """
    loader = _out_loader if isinstance(linear, RowParallelLinear) else _qkv_loader
    for name, parameter in linear.named_parameters():
        full = f"{prefix}.{name}"
        if "." in name:
            raise _refusal(full, "it transforms the projection's weights")
        if getattr(parameter, dim, None) is None:
            continue
        load: Any = getattr(parameter, "weight_loader", None)
        if getattr(load, "__func__", None) not in (type(linear).weight_loader, type(linear).weight_loader_v2):
            raise _refusal(full, "it is quantized while it is loaded, or in another way of its own")
        if getattr(parameter, "is_sharded_weight", False):
            raise _refusal(full, "its checkpoint is cut for tensor-parallel ranks already")
        if dim == "input_dim" and name.endswith("g_idx"):
            raise _refusal(full, "it is quantized in groups of inputs in an order of their own (GPTQ's g_idx)")
        if isinstance(parameter, BlockQuantScaleParameter):
            block = (getattr(linear, "weight_block_size", None) or (0, 0))[dim == "input_dim"]
            for part in parts.values():
                if not block or part.size % block:
                    raise _refusal(full, f"it has a scale for {block} rows or columns, a head has {part.size}")
        awaited.update((full, shard) for shard in parts)
        loader.on(parameter, full, dim, parts, awaited)
    # vLLM made these copies when it built the model, and reloads weights through them: make them again.
    record_metadata_for_reloading(linear)


@replaces(
    "vllm.model_executor.layers.linear:QKVParallelLinear.weight_loader",
    "vllm.model_executor.layers.linear:QKVParallelLinear.weight_loader_v2",
    why="query, key and value heads are permuted as their weights are loaded",
    remove_when="vLLM's weight loaders take an order of heads",
)
def _qkv_loader(
    load: MethodType, name: str, dim: str, parts: dict[str, HeadOrder], awaited: Awaited
) -> Callable[..., None]:
    def permuted(self: nn.Module, param: Any, loaded_weight: torch.Tensor, loaded_shard_id: str | None = None) -> None:
        # Without a shard id q, k and v come in one tensor. vLLM cuts it and calls its own loader, not this one.
        shards = tuple(parts) if loaded_shard_id is None else (loaded_shard_id,)
        wanted = [parts[shard] for shard in shards]
        permuted_weight = _permute(name, loaded_weight, getattr(param, dim, None), wanted)
        load.__func__(self, param, permuted_weight, loaded_shard_id)
        awaited.difference_update((name, shard) for shard in shards)

    return _method(permuted, load)


@replaces(
    "vllm.model_executor.layers.linear:RowParallelLinear.weight_loader",
    "vllm.model_executor.layers.linear:RowParallelLinear.weight_loader_v2",
    why="the output projection's inputs are permuted as its weights are loaded",
    remove_when="vLLM's weight loaders take an order of heads",
)
def _out_loader(
    load: MethodType, name: str, dim: str, parts: dict[str, HeadOrder], awaited: Awaited
) -> Callable[..., None]:
    def permuted(self: nn.Module, param: Any, loaded_weight: torch.Tensor) -> None:
        load.__func__(self, param, _permute(name, loaded_weight, getattr(param, dim, None), list(parts.values())))
        awaited.discard((name, ""))

    return _method(permuted, load)


def _method(loader: Callable[..., None], load: MethodType) -> MethodType:
    """Return a loader as a method of the layer: vLLM copies parameters, and replaces references to it in the copies."""
    return MethodType(wraps(load.__func__)(loader), load.__self__)


def _permute(name: str, tensor: torch.Tensor, dim: int | None, parts: list[HeadOrder]) -> torch.Tensor:
    """Return a checkpoint's tensor with its heads in their new places.

    Args:
        name: the parameter's, for messages.
        tensor: weights, or scales and zero points with fewer entries.
        dim: dimension along which heads lie. Tensors without it, or with one entry along it, are for all heads.
        parts: shards along it, in order.

    Raises:
        KVPolicyError: the entries of a head are no whole number.
    """
    if dim is None or dim >= tensor.ndim or tensor.shape[dim] == 1:
        return tensor
    entries, elements = tensor.shape[dim], sum(part.size * len(part.order) for part in parts)
    permuted, start = [], 0
    # Some 8-bit types support copies only.
    plain = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    for part in parts:
        each, rest = divmod(entries * part.size, elements)
        if not each or rest:
            raise _refusal(name, f"it is loaded with {entries} entries for {elements // part.size} heads")
        heads = plain.narrow(dim, start, each * len(part.order)).unflatten(dim, (len(part.order), each))
        permuted.append(heads.index_select(dim, part.order.to(tensor.device)).flatten(dim, dim + 1))
        start += each * len(part.order)
    return torch.cat(permuted, dim).view(tensor.dtype)


def _refusal(name: str, why: str) -> KVPolicyError:
    return KVPolicyError(f"{name} can't be split: {why}; leave the policy out for this model")
