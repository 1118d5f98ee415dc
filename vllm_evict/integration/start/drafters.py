"""Drafters with layers: draft models, EAGLE, MTP, DFlash and DSpark. Their layers stand in KV groups with the model's.

So these layers lose the blocks that the model's layers lose. They read through views too, and nothing of them is
measured. The model verifies drafts, so holes in a drafter's cache change the number of accepted drafts and no token.
Layers of drafters with sliding windows stay vLLM's, as those of the model do.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention, MLAAttention

from ...config import KVPolicyError

#: Methods of speculative decoding whose drafter has no layers.
WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix")
#: Methods that draft all tokens of a step in one pass -> the drafter's architecture that tests run.
IN_PARALLEL = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}
#: Methods that are served on Model Runner V2 alone.
ON_V2 = ("ngram_gpu", *IN_PARALLEL)
#: Methods whose drafter has layers that the plugin serves.
WITH_LAYERS = ("draft_model", "eagle", "eagle3", "mtp", *IN_PARALLEL)
#: Backends of states that take rejected drafts back on vLLM's CPU engine: gated delta rule (Qwen3-Next, Qwen3.5).
TAKEN_BACK = ("GDN_ATTN",)
#: Attribute of a drafter's layer. Policies work on layers without it.
DRAFTS = "kv_evict_drafts"


def has_layers(vllm_config: Any) -> bool:
    """Return whether the server's drafter has layers, of a kind that is served."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method in WITH_LAYERS


def lookahead(vllm_config: Any) -> int:
    """Return the tokens after those of a step for which a request gets blocks, because the drafter computes them."""
    return vllm_config.num_lookahead_tokens if has_layers(vllm_config) else 0


def mark(vllm_config: Any, model: torch.nn.Module, layers: Mapping[str, Any]) -> dict[str, Any]:
    """Mark the drafter's layers without windows: those of `layers`, name -> layer, that are no modules of the model.

    Returns them.
    """
    if not has_layers(vllm_config):
        return {}
    own = set(model.modules())
    drafting = {
        name: layer
        for name, layer in layers.items()
        if layer not in own and getattr(layer, "sliding_window", None) is None
    }
    for layer in drafting.values():
        setattr(layer, DRAFTS, True)
    return drafting


def check(drafting: Mapping[str, Any], model_layer: Any) -> None:
    """Refuse drafters whose layers cannot share the blocks of the model's layers.

    Args:
        drafting: name -> layer of the drafter.
        model_layer: any full attention layer of the model.

    Raises:
        KVPolicyError: naming the layer.
    """
    for name, layer in drafting.items():
        if (unlike := _unlike(layer, model_layer)) is not None:
            what, instead = unlike
            raise KVPolicyError(
                f"the drafter's layer {name} {what}; expected full attention like that of the model's layers; "
                f"{instead} in --speculative-config, or leave that out"
            )


def check_groups(drafting: Collection[str], groups: Sequence[Sequence[str]]) -> None:
    """Refuse drafters with a layer that stands in no KV group with layers of the model: it would lose no blocks.

    Args:
        drafting: names of layers of the drafter that have caches.
        groups: names of the layers of each KV group with a full attention layer of the model.

    Raises:
        KVPolicyError: naming the layer.
    """
    held = {name for group in groups for name in group}
    for name in drafting:
        if name not in held:
            raise KVPolicyError(
                f"the drafter's layer {name} has a KV group of its own; expected keys and values of the model's sizes, "
                "so that it stands beside full attention layers of the model; set another model, or "
                '"method": "ngram", in --speculative-config'
            )


def check_states(vllm_config: Any, layers: Mapping[str, Any]) -> None:
    """Refuse speculation beside states that vLLM does not take back where drafts are rejected.

    Args:
        layers: name -> layer with states.

    Raises:
        KVPolicyError: naming the layer and its states.
    """
    checked = vllm_config.speculative_config is not None and vllm_config.device_config.device_type == "cpu"
    for name, layer in layers.items() if checked else ():
        if (states := layer.get_attn_backend().get_name()) not in TAKEN_BACK:
            raise KVPolicyError(
                f"speculative decoding beside {name} got states of {states}; expected {' or '.join(TAKEN_BACK)}, whose "
                "states take rejected drafts back on vLLM's CPU engine; leave --speculative-config out"
            )


def _unlike(layer: Any, model_layer: Any) -> tuple[str, str] | None:
    """Return how a drafter's layer differs from a layer of the model, and what to set instead; None if it does not."""
    if type(layer) not in (Attention, MLAAttention) or type(layer) is not type(model_layer):
        return f"is a {type(layer).__name__} layer", "set another model"
    backend, wanted = layer.attn_backend.get_name(), model_layer.attn_backend.get_name()
    if backend != wanted:
        return f"has the attention backend {backend}", f'set "attention_backend": "{wanted}"'
    if layer.kv_cache_dtype != model_layer.kv_cache_dtype:
        return (
            f"has the KV cache dtype {layer.kv_cache_dtype!r}",
            f'set "kv_cache_dtype": "{model_layer.kv_cache_dtype}"',
        )
    return None
