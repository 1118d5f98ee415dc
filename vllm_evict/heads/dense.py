"""A transformers model whose KV heads attend by class: what training, profiling and checks compute with.

Nothing is evicted here and no KV cache is kept: a whole document is one pass, and a streaming head does not see what a
cache of sinks and recent tokens would not hold. It works for models of transformers whose attention goes through
`AttentionInterface` and is plain causal in every layer.
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

from ..config.gates import HeadPattern, HeadsError
from .passkeys import Document

NAME = "vllm_evict_heads"


class Heads(Protocol):
    """How one layer attends."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """query [batch, heads, tokens, dim], key and value [batch, kv_heads, tokens, dim] -> as query."""
        ...


def per_query_head(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """KV heads repeated for the query heads that share them: [batch, kv_heads, ...] -> [batch, heads, ...]."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def full(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention; shapes as `Heads.attend`."""
    key, value = per_query_head(key, query), per_query_head(value, query)
    return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)


def visible(queries: torch.Tensor, keys: torch.Tensor, sink: int, recent: int) -> torch.Tensor:
    """What streaming heads see, for positions [n] and [m] -> bool [n, m]: sinks and the last `recent` tokens."""
    distance = queries[:, None] - keys[None]
    return (distance >= 0) & ((keys < sink) | (distance < recent))


def streaming(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, sink: int, recent: int
) -> torch.Tensor:
    """Attention to sinks and recent tokens, in chunks of queries: linear in the tokens; shapes as `Heads.attend`."""
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
    """All heads attend to everything."""

    def attend(self, layer, query, key, value, scale):
        return full(query, key, value, scale)


@dataclass
class PatternHeads:
    """Retrieval heads attend to everything, streaming heads to sinks and recent tokens."""

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
    """gate x full + (1 - gate) x streaming attention, with float gates [layers, kv_heads] that may be trained."""

    gates: torch.Tensor
    sink: int
    recent: int

    def attend(self, layer, query, key, value, scale):
        gate = per_query_head(self.gates[layer][None], query)[:, :, None, None].to(query.dtype)
        narrow = streaming(query, key, value, scale, self.sink, self.recent)
        return narrow + gate * (full(query, key, value, scale) - narrow)


@dataclass
class MassHeads:
    """Full attention that notes what answers look at.

    Attributes:
        document: whose answers and facts.
        sink, recent: facts with a token in the sinks, or in the window of a query, do not count for this query.
        mass: layer -> float32 [heads], attention mass on the fact, the mean over the answer's queries that count.
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


def _forward(module, query, key, value, attention_mask, scaling=None, heads: Heads | None = None, **kwargs):
    if heads is None or attention_mask is not None or kwargs.get("sliding_window") is not None:
        raise HeadsError(f"{type(module).__name__} is not plain causal attention: its heads cannot be told apart")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return heads.attend(module.layer_idx, query, key, value, scale).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _forward)
AttentionMaskInterface.register(NAME, sdpa_mask)


def load(path: str | Path, device: str = "") -> tuple[Any, Any]:
    """A model with frozen weights, and its tokenizer: float32 on CPU, the model's own dtype elsewhere.

    Args:
        path: directory or Hub name.
        device: as torch names it; empty: a GPU if there is one.

    Raises:
        HeadsError: there is no such model.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if torch.device(device).type == "cpu" else "auto"
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=NAME)
    except (OSError, ValueError) as error:
        raise HeadsError(f"no model at {path}: {' '.join(str(error).split())}") from None
    return model.to(device).eval().requires_grad_(False), tokenizer


def shape(config: Any) -> tuple[int, int]:
    """(layers, kv_heads) of a transformers config."""
    config = config.get_text_config()
    return config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def lengths_for(model: Any, lengths: tuple[int, int] | None = None) -> tuple[int, int]:
    """Fewest and most tokens of the documents for a model; if none are given, 1,000 to 32,000 as far as they fit.

    Raises:
        HeadsError: the documents would be longer than the model's context.
    """
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    if lengths is None:
        most = min(32000, context - context // 16)  # a document of n tokens has about n
        return min(1000, most), most
    if lengths[1] > context:
        raise HeadsError(f"lengths up to {lengths[1]} exceed the model's context of {context} tokens")
    return lengths


def read_config(path: str | Path) -> Any:
    """A model's transformers config.

    Raises:
        HeadsError: there is none.
    """
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise HeadsError(f"no model at {path}: {' '.join(str(error).split())}") from None


def hidden_states(model: Any, document: Document, heads: Heads) -> torch.Tensor:
    """Last hidden states that predict answers -> float32 [n, hidden]."""
    ids = torch.from_numpy(document.ids)[None].to(model.device)
    hidden = model.base_model(input_ids=ids, use_cache=False, heads=heads).last_hidden_state
    return hidden[0, torch.from_numpy(document.predicting).to(hidden.device)].float()


@contextmanager
def recomputed(model: Any) -> Iterator[None]:
    """Keep only what goes into each decoder layer for the backward pass, and compute the layer again there."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:  # not what is in them: nothing may drop out
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
        model.gradient_checkpointing_disable()


@torch.inference_mode()
def answers_right(model: Any, documents: Iterable[Document], heads: Heads) -> list[bool]:
    """Which documents a model answers without an error, every question of them.

    With greedy decoding a right prefix is what the model would have said, so one pass over the right answer decides as
    generation would.
    """
    right = []
    for document in documents:
        said = model.lm_head(hidden_states(model, document, heads).to(model.dtype)).argmax(-1).cpu().numpy()
        right.append(bool(np.all(said == document.ids[document.predicting + 1])))
    return right
