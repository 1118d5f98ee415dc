"""Refuses layers that a policy cannot serve by their sizes and attributes, of which no configuration tells."""

from collections.abc import Collection, Mapping
from typing import Any

from ....config import KVPolicyConfig, KVPolicyError
from ....config.features import ANY, OFF_THE_HOST
from .refuse import Refusal, check_layers, refuse
from .server import Layers


def check_blocks(config: KVPolicyConfig, block_sizes: Collection[int]) -> int:
    """Refuse models whose full attention layers differ in the sizes of their blocks.

    Args:
        block_sizes: tokens, of full attention layers, as vLLM will make them.

    Returns:
        The size of all blocks.

    Raises:
        KVPolicyError: naming the sizes.
    """
    if len(block_sizes) > 1:
        sizes = " and ".join(map(str, sorted(block_sizes)))
        refuse(config, [Refusal(f"full attention layers in blocks of {sizes} tokens", ANY.instead)])
    return next(iter(block_sizes))


def check_groups(config: KVPolicyConfig, groups: int) -> None:
    """Refuse models for whose full attention layers vLLM makes several KV groups, where only one has a host.

    Raises:
        KVPolicyError: naming their number.
    """
    if config.reaches and groups > 1:
        refuse(config, [Refusal(f"evict: host and {groups} KV groups of full attention layers", OFF_THE_HOST)])


def check_layer(name: str, layer: Any, config: KVPolicyConfig, vllm_config: Any) -> None:
    """Refuse full attention layers whose blocks cannot be evicted or scored.

    Raises:
        Refused: naming the layer.
    """
    counted = {
        "ALiBi": getattr(layer.impl, "alibi_slopes", None) is not None,
        "chunks of positions": getattr(layer.impl, "chunk_lookback", -1) >= 0,
    }
    counts = next((what for what, has in counted.items() if has), "")
    of_layer = Layers(backend=layer.attn_backend.get_name(), counts=counts, whose=f", which {name} has")
    check_layers(vllm_config, config, of_layer)


def check_alike(layers: Mapping[str, Any], heads: list[int]) -> None:
    """Refuse models whose heads can't be split, because layers differ or heads have values of their own.

    Args:
        layers: name -> layer.
        heads: KV heads of each layer on a rank, by the configuration.

    Raises:
        KVPolicyError: naming two layers, or what differs from the configuration.
    """
    found = [layer.num_kv_heads for layer in layers.values()]
    if found != heads:
        raise KVPolicyError(
            f"heads can't be split: the model has attention layers of {found} KV heads; expected {heads} by its "
            "configuration; use a policy for whole layers, such as h2o, snapkv or sink-window"
        )
    for name, layer in layers.items():
        for attribute, what in (("alibi_slopes", "ALiBi slopes"), ("sinks", "learned attention sinks")):
            if getattr(layer.impl, attribute, None) is not None:
                raise KVPolicyError(f"heads can't be split: {name} has {what} for each head; leave --kv-policy out")
        for child, weight in layer.state_dict().items():
            if weight.numel() > 1:
                raise KVPolicyError(f"heads can't be split: {name} has {weight.numel()} values in its {child}")
    first = next(iter(layers))
    alike = ("num_heads", "num_kv_heads", "head_size", "head_size_v", "kv_cache_dtype", "attn_backend")
    for name, layer in layers.items():
        for attribute in alike:
            if getattr(layer, attribute) != getattr(layers[first], attribute):
                raise KVPolicyError(f"heads can't be split: {name} and {first} differ in {attribute}")
