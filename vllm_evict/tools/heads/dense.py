"""A transformers model whose KV heads attend by class, for training, profiling and checks.

A whole document is one pass without a KV cache. A mask hides from streaming heads what a cache of sinks and recent
tokens would not hold. Supported are models of transformers whose attention goes through `AttentionInterface` and is
plain causal in every layer.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from ...config.gates import HeadPattern, HeadsError
from .passkeys import Document

NAME = "vllm_evict_heads"


class HeadAttention(Protocol):
    """Attention of all layers."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attend in one layer.

        Args:
            layer: index of the layer.
            query: [batch, heads, tokens, dim].
            key, value: [batch, kv_heads, tokens, dim].
            scale: factor on the scores before the softmax.

        Returns:
            Of the shape of `query`.
        """
        ...


def per_query_head(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Repeat KV heads for the query heads that share them: [batch, kv_heads, ...] -> [batch, heads, ...]."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def full(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention. Shapes are those of `HeadAttention.attend`."""
    key, value = per_query_head(key, query), per_query_head(value, query)
    return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)


def visible(queries: torch.Tensor, keys: torch.Tensor, sink: int, recent: int) -> torch.Tensor:
    """Return the mask of streaming heads, bool [n, m], for positions of queries [n] and keys [m]."""
    distance = queries[:, None] - keys[None]
    return (distance >= 0) & ((keys < sink) | (distance < recent))


def streaming(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, sink: int, recent: int
) -> torch.Tensor:
    """Attend to sinks and recent tokens, in time linear in tokens. Shapes are those of `HeadAttention.attend`."""
    key, value = per_query_head(key, query), per_query_head(value, query)
    tokens, chunk, out = query.shape[2], max(256, recent), []
    positions = torch.arange(tokens, device=query.device)
    for start in range(0, tokens, chunk):
        end = min(start + chunk, tokens)
        first = max(0, start - recent + 1)
        seen = torch.cat([positions[: min(sink, first)], positions[first:end]])
        mask = visible(positions[start:end], seen, sink, recent)
        part = query[:, :, start:end], key[:, :, seen], value[:, :, seen]
        out.append(scaled_dot_product_attention(*part, attn_mask=mask, scale=scale))
    return torch.cat(out, dim=2)


class FullHeads:
    """Full attention in all heads."""

    def attend(self, layer, query, key, value, scale):
        return full(query, key, value, scale)


@dataclass
class PatternHeads:
    """Full attention in retrieval heads, streaming attention in streaming heads."""

    pattern: HeadPattern

    def attend(self, layer, query, key, value, scale):
        retrieval = torch.from_numpy(self.pattern.retrieval[layer]).to(query.device)
        of_query = per_query_head(retrieval[None], query)[0]
        out = torch.empty_like(query)
        if retrieval.any():
            out[:, of_query] = full(query[:, of_query], key[:, retrieval], value[:, retrieval], scale)
        if not retrieval.all():
            part = query[:, ~of_query], key[:, ~retrieval], value[:, ~retrieval]
            out[:, ~of_query] = streaming(*part, scale, self.pattern.sink, self.pattern.recent)
        return out


@dataclass
class GatedHeads:
    """gate x full + (1 - gate) x streaming attention, with trainable float gates [layers, kv_heads]."""

    gates: torch.Tensor
    sink: int
    recent: int

    def attend(self, layer, query, key, value, scale):
        gate = per_query_head(self.gates[layer][None], query)[:, :, None, None].to(query.dtype)
        narrow = streaming(query, key, value, scale, self.sink, self.recent)
        return narrow + gate * (full(query, key, value, scale) - narrow)


@dataclass
class MassHeads:
    """Full attention that measures the attention mass of answers on their facts.

    Attributes:
        document: document with answers and facts.
        sink, recent: tokens. A query does not count if its fact has a token in the sinks or in the query's window.
        mass: layer -> float32 [heads], attention mass on the fact, averaged over the queries that count.
    """

    document: Document
    sink: int
    recent: int
    mass: dict[int, torch.Tensor] = field(default_factory=dict)

    def attend(self, layer, query, key, value, scale):
        found = []
        for positions, fact in zip(self.document.answers, self.document.facts):
            positions = positions[(positions - fact[-1] >= self.recent) & (fact[0] >= self.sink)]
            if len(positions):
                positions, fact = (torch.from_numpy(x).to(query.device) for x in (positions, fact))
                scores = query[0, :, positions].float() @ per_query_head(key, query)[0].float().transpose(1, 2) * scale
                after = torch.arange(key.shape[2], device=query.device)[None] > positions[:, None]
                shares = scores.masked_fill(after, -torch.inf).softmax(-1)
                found.append(shares[:, :, fact].sum(-1))  # [heads, queries]
        if found:
            self.mass[layer] = torch.cat(found, dim=1).mean(1).cpu()
        return full(query, key, value, scale)


def _forward(module, query, key, value, attention_mask, scaling=None, heads: HeadAttention | None = None, **kwargs):
    if heads is None or attention_mask is not None or kwargs.get("sliding_window") is not None:
        raise HeadsError(f"{type(module).__name__} is not plain causal attention; expected that in every layer")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return heads.attend(module.layer_idx, query, key, value, scale).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _forward)
AttentionMaskInterface.register(NAME, sdpa_mask)


def load(path: str | Path, device: str = "") -> tuple[Any, Any]:
    """Load a model with frozen weights, and its tokenizer: in float32 on CPU, in the model's own dtype elsewhere.

    Args:
        path: directory or Hub name.
        device: torch's name of the device; empty: a GPU if there is one.

    Raises:
        HeadsError: there is no such model.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if torch.device(device).type == "cpu" else "auto"
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=NAME, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise HeadsError(f"no model at {path}: {' '.join(str(error).split())}") from None
    return model.to(device).eval().requires_grad_(False), tokenizer


def shape(config: Any) -> tuple[int, int]:
    """Return (layers, kv_heads) of a transformers config."""
    config = config.get_text_config()
    return config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def lengths_for(model: Any, lengths: tuple[int, int] | None = None) -> tuple[int, int]:
    """Return the fewest and most tokens of documents: `lengths`, or 1,000 to 32,000 within the model's context.

    Raises:
        HeadsError: `lengths` exceed the model's context.
    """
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    if lengths is None:
        most = min(32000, context - context // 16)  # lengths of documents are approximate
        return min(1000, most), most
    if lengths[1] > context:
        raise HeadsError(f"lengths up to {lengths[1]} exceed the model's context of {context} tokens")
    return lengths


def read_config(path: str | Path) -> Any:
    """Read a model's transformers config.

    Raises:
        HeadsError: there is no config.
    """
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise HeadsError(f"no model at {path}: {' '.join(str(error).split())}") from None


def hidden_states(model: Any, document: Document, heads: HeadAttention) -> torch.Tensor:
    """Return the last hidden states of the positions that predict answers: float32 [n, hidden]."""
    ids = torch.from_numpy(document.ids)[None].to(model.device)
    hidden = model.base_model(input_ids=ids, use_cache=False, heads=heads).last_hidden_state
    return hidden[0, torch.from_numpy(document.predicting).to(hidden.device)].float()


@contextmanager
def recomputed(model: Any) -> Iterator[None]:
    """Keep only the inputs of decoder layers for the backward pass, which computes the layers again."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:  # not their modules, so that dropout stays off
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
        model.gradient_checkpointing_disable()


@torch.inference_mode()
def answers_right(model: Any, documents: Iterable[Document], heads: HeadAttention) -> list[bool]:
    """Return for each document whether the model answers all its questions without an error.

    One pass over the right answers is enough: under greedy decoding the model generates an answer if and only if it
    predicts each token from the right prefix.
    """
    right = []
    for document in documents:
        said = model.lm_head(hidden_states(model, document, heads).to(model.dtype)).argmax(-1).cpu().numpy()
        right.append(bool(np.all(said == document.ids[document.predicting + 1])))
    return right
