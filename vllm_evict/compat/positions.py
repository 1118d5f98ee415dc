"""Rotary positions of a loaded model: how its keys are turned on, and positions past those it was made for.

A request under a policy with a `context` never looks further back than that, but its positions grow for ever: rotary
embeddings need a row for each.
"""

from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

from ..config import KVPolicyConfig, KVPolicyError
from ..kernels.rotate import Rotation

logger = init_logger("vllm.evict")

#: Attributes by which vLLM's attention modules say that a layer, or all of them, does without rotary positions.
WITHOUT = {"use_rope": False, "use_rotary": False, "nope": True}


def in_tokens(vllm_config: VllmConfig, config: KVPolicyConfig) -> KVPolicyConfig:
    """The config with the model's own context, in tokens, where it says "model".

    Raises:
        KVPolicyError: it says more than the model has.
    """
    if config.context is None:
        return config
    longest, most = vllm_config.model_config.max_model_len, vllm_config.model_config.get_and_verify_max_len(None)
    context = most if config.context == "model" else config.context
    if context > most:
        raise KVPolicyError(f"context: the model was made for {most} tokens, not for {context}")
    if longest <= context:
        logger.warning(
            "KV policy %s: its context of %d tokens changes nothing, as no request may outgrow --max-model-len %d",
            config.name,
            context,
            longest,
        )
    return config.model_copy(update={"context": context})


def rotations(model: torch.nn.Module, layers: Mapping[str, Attention], positions: int) -> dict[Attention, Rotation]:
    """How keys of each layer are turned on; and see to it that all `positions` have a row in its embedding.

    Raises:
        KVPolicyError: naming a layer whose keys can't be turned.
    """
    embeddings = _embeddings(model)
    known: dict[int, Rotation] = {}
    found = {}
    for name, layer in layers.items():
        rotary, why = embeddings.get(id(layer), (None, "has no rotary embedding beside it"))
        if rotary is None:
            raise KVPolicyError(f"context: {name} {why}: leave context out for this model")
        if id(rotary) not in known:
            known[id(rotary)] = _extended(name, rotary, positions)
        found[layer] = known[id(rotary)]
    return found


def _embeddings(model: torch.nn.Module) -> dict[int, tuple[RotaryEmbeddingBase | None, str]]:
    """Attention layer, by identity -> the embedding of the module that it is part of; or None, and why."""
    found = {}
    for module in model.modules():
        for child in module.children():
            if isinstance(child, Attention):
                found[id(child)] = _of(module)
    return found


def _of(module: torch.nn.Module) -> tuple[RotaryEmbeddingBase | None, str]:
    rotary, kind = getattr(module, "rotary_emb", None), type(module).__name__
    if any(getattr(module, name, not value) is value for name, value in WITHOUT.items()):
        return None, f"({kind}) does without rotary positions"
    if not isinstance(rotary, RotaryEmbeddingBase):
        return None, f"({kind}) has no rotary embedding whose keys can be turned on ({type(rotary).__name__})"
    if isinstance(rotary, MRotaryEmbedding):
        return None, f"({kind}) has positions of several dimensions ({type(rotary).__name__})"
    return rotary, ""


def _extended(name: str, rotary: RotaryEmbeddingBase, positions: int) -> Rotation:
    """The embedding's rotation; rows that it lacks for so many positions are added to it."""
    rows, frequencies = _frequencies(rotary)
    steps = torch.tensor([1, len(rows) // 2, len(rows) - 1], dtype=torch.float64)
    scale = float(rows[0, 0])  # YaRN's
    # Angles of vLLM's rows are products in float32.
    allowed = 1e-5 + float(steps.max()) * 2.0**-22
    if not torch.allclose(rows[steps.long()].double(), scale * _rows(steps, frequencies), rtol=0, atol=allowed):
        kind = type(rotary).__name__
        raise KVPolicyError(
            f"context: {name}: angles of its {kind} don't grow evenly: leave context out for this model"
        )
    cache = rotary.cos_sin_cache
    if len(cache) < positions:
        more = scale * _rows(torch.arange(len(cache), positions, dtype=torch.float64), frequencies)
        rotary.register_buffer("cos_sin_cache", torch.cat((cache, more.to(cache))), persistent=False)
    return Rotation(frequencies.to(cache.device), rotary.is_neox_style)


def _rows(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Cosines and sines, float64 [n, R]."""
    angles = positions[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1)


def _frequencies(rotary: RotaryEmbeddingBase) -> tuple[torch.Tensor, torch.Tensor]:
    """Its rows as it makes them, float32 [n, R], and the angles per position that they are made of, float64 [R / 2]."""
    made: list[torch.Tensor] = []
    compute = rotary._compute_inv_freq

    def heard(*args: Any) -> torch.Tensor:
        made.append(compute(*args))
        return made[-1]

    with torch.device("cpu"):
        rotary._compute_inv_freq = heard
        try:
            rows = rotary._compute_cos_sin_cache()
        finally:
            del rotary._compute_inv_freq
    # Positions are divided by it (linear scaling); one factor only, as there is one table.
    factors = getattr(rotary, "scaling_factors", [1.0])
    return rows, made[0].double() / factors[0]
