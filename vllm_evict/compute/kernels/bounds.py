"""Bounds of a block's keys, and what attention they let a block draw (Quest: Tang et al., ICML 2024)."""

import torch


def key_bounds(keys: torch.Tensor, length: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and largest value of each dimension of a block's keys.

    Args:
        keys: [n, Hkv, block_size, D].
        length: tokens in the blocks; the last one may be partly filled. None: all are full.

    Returns:
        Twice [n, Hkv, D], in the dtype of the keys.
    """
    low, high = keys.amin(2), keys.amax(2)
    if length is not None and (filled := length - (len(keys) - 1) * keys.shape[2]) < keys.shape[2]:
        low[-1], high[-1] = keys[-1, :, :filled].amin(1), keys[-1, :, :filled].amax(1)
    return low, high


def bound_scores(query: torch.Tensor, low: torch.Tensor, high: torch.Tensor, scale: float) -> torch.Tensor:
    """What attention some queries may pay to each block: the largest share of any of them, summed up over heads.

    A query's product with a key is at most the sum over dimensions of its larger product with the two bounds. Shares
    are the softmax of these products over all blocks, as if each block had one key that reaches them.

    Args:
        query: [Q, H, D], rotated.
        low, high: [n, Hkv, D] of `key_bounds`.
        scale: of the layer's attention.

    Returns:
        float32 [n]
    """
    kv_heads = low.shape[1]
    query = query.float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3) * scale  # [Hkv, G, Q, D]
    up = query.clamp(min=0)
    low, high = (bound.float().permute(1, 2, 0)[:, None] for bound in (low, high))  # [Hkv, 1, D, n]
    return (up @ high + (query - up) @ low).softmax(-1).amax(2).sum((0, 1))


def bound_scores_reference(query: torch.Tensor, low: torch.Tensor, high: torch.Tensor, scale: float) -> torch.Tensor:
    """`bound_scores`, one head, query and block at a time."""
    heads, kv_heads = query.shape[1], low.shape[1]
    scores = torch.zeros(len(low))
    for head in range(heads):
        kv_head, largest = head // (heads // kv_heads), torch.zeros(len(low))
        for q in query[:, head].float() * scale:
            bounds = zip(low[:, kv_head].float(), high[:, kv_head].float())
            products = [torch.maximum(q * a, q * b).sum() for a, b in bounds]
            largest = torch.maximum(largest, torch.stack(products).softmax(0))
        scores += largest
    return scores
