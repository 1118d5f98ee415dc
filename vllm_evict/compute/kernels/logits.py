"""From scaled products of queries and keys to probabilities: soft caps of logits, and learned sinks."""

from typing import Any

import torch

#: The score of a block whose logits are not all finite: below that of any other.
UNKNOWN = -1.0


def logits_of(layer: Any) -> dict[str, Any]:
    """Return a layer's arguments `soft_cap` and `sinks` of functions here and of kernels."""
    impl = layer.impl
    return {"soft_cap": float(getattr(impl, "logits_soft_cap", None) or 0), "sinks": getattr(impl, "sinks", None)}


def learned_sinks(layer: Any) -> torch.Tensor | None:
    """Return the logits of a layer's sinks, float32 [H]; None: it has none."""
    sinks: torch.Tensor | None = logits_of(layer)["sinks"]
    return None if sinks is None else sinks.float()


def soft_capped(logits: torch.Tensor, soft_cap: float) -> torch.Tensor:
    """Return `soft_cap * tanh(logits / soft_cap)` (Gemma 2: arXiv:2408.00118, section 2); 0: the logits as they are."""
    return logits if soft_cap == 0 else torch.tanh(logits / soft_cap) * soft_cap


def probabilities(logits: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Return the softmax over the last dimension.

    Args:
        logits: [..., tokens].
        sinks: learned sinks, which take their share of a row and belong to no token (gpt-oss: arXiv:2508.10925, section
            2.3). A logit for each row, of a shape that broadcasts to [..., 1]; None: rows have no sink.
    """
    if sinks is None:
        return logits.softmax(-1)
    sinks = sinks.to(logits.dtype).expand(*logits.shape[:-1], 1)
    return torch.cat((logits, sinks), -1).softmax(-1)[..., :-1]


def block_scores(logits: torch.Tensor, soft_cap: float, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Return the attention that each block may draw, summed up over heads: float32 [..., blocks].

    A block with a logit that is not finite takes nothing from other blocks, and has `UNKNOWN`.

    Args:
        logits: float32 [..., Hkv, G, blocks, tokens], not capped yet.
        soft_cap: see `soft_capped`.
        sinks: see `probabilities`.
    """
    unknown = ~logits.isfinite().all(-1, keepdim=True)
    shares = probabilities(soft_capped(logits, soft_cap).masked_fill(unknown, -torch.inf).flatten(-2), sinks)
    of_blocks = shares.unflatten(-1, logits.shape[-2:]).sum(-1).masked_fill(unknown[..., 0], torch.nan)
    return of_blocks.sum((-3, -2)).nan_to_num(UNKNOWN)
