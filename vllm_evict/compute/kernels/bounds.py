"""Boxes around a block's keys, and an upper bound of the attention that the block draws by its box.

A box has the least and the largest value of each dimension (Quest: Tang et al., ICML 2024, arXiv:2406.10774).
"""

import torch

from .logits import block_scores

#: Most tokens of a box of an index.
BOXED = 32


def key_bounds(keys: torch.Tensor, length: int | None = None, verified: torch.Tensor | None = None) -> torch.Tensor:
    """Return the boxes of the keys of each block.

    Args:
        keys: [n, Hkv, block_size, D].
        length: tokens in the blocks; the last one may be partly filled. None: all are full.
        verified: int32 [], in place of `length` where the device alone knows it. What lies behind may be anything.
            Boxes of blocks without tokens are 0.

    Returns:
        [n, Hkv, 2 * D], largest values first, in the dtype of the keys.
    """
    if verified is not None:
        of_block = verified - torch.arange(len(keys), device=keys.device)[:, None, None, None] * keys.shape[2]
        there = torch.arange(keys.shape[2], device=keys.device)[:, None] < of_block
        return _boxes(torch.where(there, keys, torch.where(of_block > 0, keys[:, :, :1], 0)))
    bounds = _boxes(keys)
    if length is not None and (filled := length - (len(keys) - 1) * keys.shape[2]) < keys.shape[2]:
        bounds[-1:] = _boxes(keys[-1:, :, :filled])
    return bounds


def _boxes(keys: torch.Tensor) -> torch.Tensor:
    # On CPUs torch reduces float32 several times faster than narrower types.
    wide = keys.float() if keys.device.type == "cpu" else keys
    return torch.cat((wide.amax(2), wide.amin(2)), -1).to(keys.dtype)


def key_boxes(keys: torch.Tensor) -> torch.Tensor:
    """Return the boxes of up to `BOXED` tokens each of the keys of full blocks.

    A box of more tokens is so wide that it tells little.

    Args:
        keys: [n, Hkv, block_size, D].

    Returns:
        [n, Hkv, boxes * 2 * D], as of `key_bounds`, in the dtype of the keys.
    """
    return torch.cat([_boxes(each) for each in keys.split(BOXED, 2)], -1)


def bound_scores(
    query: torch.Tensor,
    bounds: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    there: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what attention one query may pay to each block, summed up over heads.

    The query's product with a key is at most the sum over dimensions of its larger product with the two bounds of a
    box. Shares are the softmax of these products over all boxes, as if each box had one key that reaches them. A
    soft cap rises with its argument, so capped products bound capped scores. A box with a number that is not finite
    gets `logits.UNKNOWN`.

    Args:
        query: [H, D], rotated.
        bounds: [n, Hkv, 2 * D] of `key_bounds`, or those of several boxes of each block (see `key_boxes`).
        scale: of the layer's attention.
        soft_cap, sinks: of the layer's attention (see `logits`); sinks are [H].
        there: bool [n], blocks with tokens; the others get 0. None: all have some.

    Returns:
        float32 [n]
    """
    heads = query.float().unflatten(0, (bounds.shape[1], -1)) * scale  # [Hkv, G, D]
    parts = torch.cat((heads.clamp(min=0), heads.clamp(max=0)), -1)
    boxes = bounds.float().unflatten(-1, (-1, 2 * query.shape[1]))
    products = torch.einsum("hgx,nhbx->hgnb", parts, boxes)
    own = None if sinks is None else sinks.view(*heads.shape[:2], 1)
    if there is None:
        return block_scores(products, soft_cap, own)
    return block_scores(products.masked_fill(~there[:, None], -torch.inf), soft_cap, own).masked_fill(~there, 0)


def bound_scores_reference(
    query: torch.Tensor,
    bounds: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`bound_scores`, one head and block at a time."""
    heads, kv_heads, dims = query.shape[0], bounds.shape[1], query.shape[1]
    scores = torch.zeros(len(bounds))
    for head, q in enumerate(query.float() * scale):
        boxes = bounds[:, head // (heads // kv_heads)].float()
        products = torch.stack([torch.maximum(q * box[:dims], q * box[dims:]).sum() for box in boxes])
        if soft_cap:
            products = soft_cap * torch.tanh(products / soft_cap)
        beside = 0.0 if sinks is None else sinks[head].exp()
        scores += products.exp() / (products.exp().sum() + beside)
    return scores
