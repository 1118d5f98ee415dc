"""Counts a model's layers with attention and their KV heads, by its configuration, and gives heads their places."""

from typing import Any

from ...config import KVPolicyConfig
from ...core.arrange import arrange
from ...core.layout import Layout


def kv_heads(model: Any) -> list[int]:
    """Return the KV heads of each layer with attention, on all ranks together, in the order of the layers.

    Models by neural architecture search have layers without attention, and layers that differ in heads. Policies that
    split heads or layers, or choose layers, count these layers. For hybrids all layers are listed, since such policies
    are refused there.

    Args:
        model: vLLM's `ModelConfig`.
    """
    architecture, layers = model.model_arch_config, range(model.get_total_num_hidden_layers())
    if model.has_noops:  # Nemotron-NAS
        attention = [block.attention for block in model.hf_config.block_configs]
        heads = architecture.total_num_attention_heads
        return [heads // each.n_heads_in_group for each in attention if not each.no_op]
    # vLLM 0.32 and newer: fields in which layers differ.
    unlike = getattr(architecture, "per_layer_overrides", None) or [{}] * len(layers)
    return [unlike[layer].get("total_num_kv_heads", model.get_total_num_kv_heads()) for layer in layers]


def layout(vllm_config: Any, config: KVPolicyConfig) -> Layout | None:
    """Return the KV group and slot of each KV head under the policy; None if all heads are in one KV group."""
    names = tuple(config.classes)
    if len(names) < 2:
        return None
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if config.allocator.splits == "classes":
        retrieval, streaming = names
        return Layout.of_classes(arrange(config.head_pattern.retrieval, ranks), (retrieval, streaming))
    heads = kv_heads(vllm_config.model_config)  # of all layers alike (see `capabilities`)
    make = Layout.of_layers if config.allocator.splits == "layers" else Layout.of_heads
    return make(names, len(heads), max(heads[0] // ranks, 1), ranks)
