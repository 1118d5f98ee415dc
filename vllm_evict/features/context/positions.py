"""Rotary embeddings of a loaded model: rows for positions past its context, and the rotation of keys.

A request under a policy with a `context` never looks further back than that, but its positions grow for ever, and
rotary embeddings need a row for each. At start each layer's rotated keys are compared with the keys that its module
computes.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

from ...compute.kernels.rotate import Rotation
from ...config import KVPolicyError
from ...integration.seams import replaces

#: Positions at which keys of one layer are compared: near positions differ in fast dimensions, far ones in slow.
COMPARED = (0, 1, 17, 1000, 1 << 16)
#: Number of random hidden states whose keys are compared.
SAMPLES = 8
#: Allowed difference, relative to the largest key of each dimension, in roundings of the keys' dtype. A dimension that
#: is rotated by a wrong angle differs by about 1.
ROUNDINGS = 8


def rotations(
    vllm_config: VllmConfig, model: torch.nn.Module, layers: Mapping[str, Attention]
) -> dict[Attention, Rotation]:
    """Return the rotation of each layer's keys. Each embedding gets rows for all positions up to `max_model_len`.

    Each layer's rotation is compared with the keys that the layer's own attention module computes at other positions.

    Raises:
        KVPolicyError: naming a layer whose keys can't be rotated, or differ from those that its module computes.
    """
    parents = {id(child): module for module in model.modules() for child in module.children()}
    known: dict[int, Rotation] = {}
    found = {}
    for name, layer in layers.items():
        module = parents.get(id(layer))
        rotary = getattr(module, "rotary_emb", None)
        if not isinstance(rotary, RotaryEmbeddingBase):
            kind = type(module).__name__ if rotary is None else type(rotary).__name__
            raise _refusal(name, f"has no rotary embedding beside it by which keys can be rotated ({kind})")
        if id(rotary) not in known:
            known[id(rotary)] = _extended(name, rotary, vllm_config.model_config.max_model_len)
        found[layer] = known[id(rotary)]
        _compare(name, layer, module, found[layer], vllm_config)
    return found


def _refusal(name: str, why: str) -> KVPolicyError:
    return KVPolicyError(f"context: {name} {why}: leave context out for this model")


def _compare(name: str, layer: Attention, module: torch.nn.Module, rotation: Rotation, vllm_config: VllmConfig) -> None:
    """Check that rotated keys of a layer equal the keys that its module computes at later positions, and values too.

    A rotation turns the leading dimensions of a key. A module may rotate other dimensions or none, rotate in some
    layers only, or scale keys by position.

    Raises:
        KVPolicyError: keys or values differ, or the module can't be called alone.
    """
    model = vllm_config.model_config
    last = model.max_model_len - 1
    places = torch.tensor(sorted({min(position, last) for position in COMPARED}))
    states = torch.randn(SAMPLES, model.get_hidden_size(), generator=torch.Generator().manual_seed(0))
    device = rotation.frequencies.device
    hidden = states.to(device, model.dtype).repeat(len(places), 1)
    try:
        keys, values = _captured(layer, module, places.repeat_interleave(SAMPLES).to(device), hidden)
    except Exception as error:
        what = " ".join(f"{type(module).__name__}: {type(error).__name__}: {error}".split())
        raise _refusal(name, f"can't compute keys at other positions when it is called alone ({what})") from error
    allowed = ROUNDINGS * torch.finfo(keys.dtype).eps
    # [positions, samples, Hkv, D]
    keys, values = (each.float().unflatten(0, (len(places), SAMPLES)) for each in (keys, values))
    turned = rotation(keys[:-1].transpose(1, 2), places.diff().to(device)).transpose(1, 2)
    off = _difference(turned, keys[1:], keys)
    # vLLM computes the angles of its rows in float32.
    if not (off <= allowed + places[1:].to(device) * 2.0**-22).all():
        why = f"({type(module).__name__}) computes other keys at later positions than rotated ones, by {off.max():.0%}"
        raise _refusal(name, why)
    if not (_difference(values[:-1], values[1:], values) <= allowed).all():
        raise _refusal(name, f"({type(module).__name__}) computes other values at later positions")


def _difference(these: torch.Tensor, those: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """Return the largest difference at each position, relative to each dimension's largest number; float32 [positions].

    NaN where a number is NaN.
    """
    largest = of.abs().amax((0, 1)).clamp(min=torch.finfo(of.dtype).tiny)
    return ((these - those).abs() / largest).flatten(1).amax(1)


class _Captured(Exception):
    """Ends the call of an attention module where its attention layer would begin."""


def _captured(
    layer: Attention, module: torch.nn.Module, positions: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that a module passes to its attention layer: [T, Hkv, D] each.

    The call ends there: it needs no metadata, cache or other rank.

    Args:
        layer: gets keys and values.
        module: computes them.
        positions: int64 [T].
        hidden: [T, hidden size], the module's input.
    """
    captured: list[torch.Tensor] = []
    arguments = {}
    for name, parameter in inspect.signature(module.forward).parameters.items():
        if name.startswith("position"):
            arguments[name] = positions
        elif name == "hidden_states":
            arguments[name] = hidden
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            arguments[name] = None
    # Adapters have no state before the first step. Rotation does not depend on the weights of the projection.
    adapted = [child for child in module.modules() if hasattr(child, "base_layer")]
    with ExitStack() as stack, suppress(_Captured):
        stack.enter_context(_capture.during(layer, captured, layer, len(positions)))
        for child in adapted:
            stack.enter_context(_without_adapter.during(child, child.base_layer))
        # Without this, compiled parts would be compiled for this one call.
        with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
            module(**arguments)
    if not captured:
        raise RuntimeError("it did not call its attention layer")
    return captured[0], captured[1]


@replaces(
    "vllm.model_executor.layers.attention:Attention.forward",
    why="keys that a module computes are compared with rotated ones; replaced during one call at start",
    remove_when="vLLM's rotary embeddings tell how they rotate",
)
def _capture(
    forward: Callable[..., Any], captured: list[torch.Tensor], layer: Attention, tokens: int
) -> Callable[..., Any]:
    def capture(query: Any, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> None:
        captured.extend(each.reshape(tokens, layer.num_kv_heads, -1) for each in (key, value))
        raise _Captured

    return capture


@replaces(
    "vllm.lora.layers.column_parallel_linear:ColumnParallelLinearWithLoRA.forward",
    "vllm.lora.layers.replicated_linear:ReplicatedLinearWithLoRA.forward",
    "vllm.lora.layers.row_parallel_linear:RowParallelLinearWithLoRA.forward",
    why="keys are compared with rotated ones at start, when adapters have no state yet; replaced during that one call",
    remove_when="vLLM's rotary embeddings tell how they rotate",
)
def _without_adapter(forward: Callable[..., Any], base: torch.nn.Module) -> Callable[..., Any]:
    return base.forward


@replaces(
    "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbeddingBase._compute_inv_freq",
    why="the frequencies behind an embedding's rows are recorded while it computes them once more",
    remove_when="vLLM's rotary embeddings keep their frequencies",
)
def _record(compute: Callable[..., torch.Tensor], made: list[torch.Tensor]) -> Callable[..., torch.Tensor]:
    def recorded(*args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(compute(*args, **kwargs))
        return made[-1]

    return recorded


def _extended(name: str, rotary: RotaryEmbeddingBase, positions: int) -> Rotation:
    """Return the embedding's rotation; adds the rows that the embedding needs for so many positions."""
    rows, frequencies = _frequencies(rotary)
    steps = torch.tensor([1, len(rows) // 2, len(rows) - 1], dtype=torch.float64)
    scale = float(rows[0, 0])  # YaRN's
    # vLLM computes the angles of its rows in float32.
    allowed = 1e-5 + float(steps.max()) * 2.0**-22
    if not torch.allclose(rows[steps.long()].double(), scale * _rows(steps, frequencies), rtol=0, atol=allowed):
        raise _refusal(name, f"has a {type(rotary).__name__} whose angles don't grow evenly")
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
    """Return the embedding's own rows, float32 [n, R], and the angles per position behind them, float64 [R / 2]."""
    made: list[torch.Tensor] = []
    with torch.device("cpu"), _record.during(rotary, made):
        rows = rotary._compute_cos_sin_cache()
    # Linear scaling divides positions by the factor. There is one table, hence one factor.
    factors = getattr(rotary, "scaling_factors", [1.0])
    return rows, made[0].double() / factors[0]
