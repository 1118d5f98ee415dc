"""Bounds of a block's keys, and what attention they let a block draw (Quest: Tang et al., ICML 2024)."""

import torch

from .logits import probabilities, soft_capped


def key_bounds(keys: torch.Tensor, length: int | None = None) -> torch.Tensor:
    """Largest and least value of each dimension of a block's keys.

    Args:
        keys: [n, Hkv, block_size, D].
        length: tokens in the blocks; the last one may be partly filled. None: all are full.

    Returns:
        [n, Hkv, 2 * D], largest values first, in the dtype of the keys.
    """
    bounds = torch.cat((keys.amax(2), keys.amin(2)), -1)
    if length is not None and (filled := length - (len(keys) - 1) * keys.shape[2]) < keys.shape[2]:
        bounds[-1] = torch.cat((keys[-1, :, :filled].amax(1), keys[-1, :, :filled].amin(1)), -1)
    return bounds


def bound_scores(
    query: torch.Tensor,
    bounds: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """What attention some queries may pay to each block: the largest share of any of them, summed up over heads.

    A query's product with a key is at most the sum over dimensions of its larger product with the two bounds. Shares
    are the softmax of these products over all blocks, as if each block had one key that reaches them. A soft cap rises
    with its argument, so capped products bound capped scores.

    Args:
        query: [Q, H, D], rotated.
        bounds: [n, Hkv, 2 * D] of `key_bounds`.
        scale: of the layer's attention.
        soft_cap, sinks: of the layer's attention (see `logits`); sinks are [H].

    Returns:
        float32 [n]
    """
    kv_heads = bounds.shape[1]
    query = query.float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3) * scale  # [Hkv, G, Q, D]
    query = torch.cat((query.clamp(min=0), query.clamp(max=0)), -1)
    products = query.flatten(1, 2) @ bounds.float().permute(1, 2, 0)  # [Hkv, G * Q, n]
    products = soft_capped(products, soft_cap).unflatten(1, query.shape[1:3])
    own = None if sinks is None else sinks.view(*query.shape[:2], 1, 1)
    return probabilities(products, own).amax(2).sum((0, 1))


def bound_scores_reference(
    query: torch.Tensor,
    bounds: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`bound_scores`, one head, query and block at a time."""
    heads, kv_heads = query.shape[1], bounds.shape[1]
    scores = torch.zeros(len(bounds))
    for head in range(heads):
        kv_head, largest = head // (heads // kv_heads), torch.zeros(len(bounds))
        for q in query[:, head].float() * scale:
            pairs = (block.float().chunk(2) for block in bounds[:, kv_head])
            products = torch.stack([torch.maximum(q * high, q * low).sum() for high, low in pairs])
            if soft_cap:
                products = soft_cap * torch.tanh(products / soft_cap)
            beside = 0.0 if sinks is None else sinks[head].exp()
            largest = torch.maximum(largest, products.exp() / (products.exp().sum() + beside))
        scores += largest
    return scores
