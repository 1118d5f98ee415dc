"""Bounds of a block's keys, and what attention they let a block draw.

A box has the least and the largest value of each dimension (Quest: Tang et al., ICML 2024, arXiv:2406.10774). A sphere
has a centre and a radius, as the bounding volumes of ArkVale (Chen et al., NeurIPS 2024), in half the memory. A mean is
the centre alone and bounds nothing: it is here to be compared with (representative tokens are those of InfLLM, Xiao et
al., NeurIPS 2024, arXiv:2402.04617).
"""

import torch

from .logits import probabilities, soft_capped

#: Of a float32 distance, relative: what its sum over dimensions may have been rounded down by.
_SLACK = 1e-6
#: A query's share is multiplied by FADING to the power of its distance in tokens to the last query. An answer depends
#: most on the last queries of a question, and blocks that earlier queries attend to would take their blocks' room.
FADING = 0.95


def bounds_width(kind: str, dims: int) -> int:
    """Return the numbers of one block's bounds, `box`, `sphere` or `mean`, for one KV head of so many dimensions."""
    return {"box": 2 * dims, "sphere": dims + 1, "mean": dims}[kind]


def key_bounds(
    keys: torch.Tensor, length: int | None = None, kind: str = "box", verified: torch.Tensor | None = None
) -> torch.Tensor:
    """Bounds of the keys of each block.

    Args:
        keys: [n, Hkv, block_size, D].
        length: tokens in the blocks; the last one may be partly filled. None: all are full.
        kind: `box`, `sphere` or `mean`.
        verified: int32 [], in place of `length` where the device alone knows it; of boxes only. What lies behind may be
            anything. Bounds of blocks without tokens are 0.

    Returns:
        [n, Hkv, 2 * D], largest values first; or [n, Hkv, D + 1], the centre and then the radius, rounded up; or
        [n, Hkv, D], the centre alone; in the dtype of the keys.
    """
    if verified is not None:
        of_block = verified - torch.arange(len(keys), device=keys.device)[:, None, None, None] * keys.shape[2]
        there = torch.arange(keys.shape[2], device=keys.device)[:, None] < of_block
        return _boxes(torch.where(there, keys, torch.where(of_block > 0, keys[:, :, :1], 0)))
    of_kind = {"box": _boxes, "sphere": _spheres, "mean": _means}[kind]
    bounds = of_kind(keys)
    if length is not None and (filled := length - (len(keys) - 1) * keys.shape[2]) < keys.shape[2]:
        bounds[-1:] = of_kind(keys[-1:, :, :filled])
    return bounds


def _boxes(keys: torch.Tensor) -> torch.Tensor:
    # On CPUs torch reduces float32 several times faster than narrower types.
    wide = keys.float() if keys.device.type == "cpu" else keys
    return torch.cat((wide.amax(2), wide.amin(2)), -1).to(keys.dtype)


def _means(keys: torch.Tensor) -> torch.Tensor:
    return keys.float().mean(2).to(keys.dtype)


def _spheres(keys: torch.Tensor) -> torch.Tensor:
    """Spheres around the mean of the keys, as it is stored."""
    centre, info = _means(keys), torch.finfo(keys.dtype)
    radius = torch.linalg.vector_norm(keys.float() - centre.float().unsqueeze(2), dim=-1).amax(2)
    radius = radius * (1 + max(info.eps, _SLACK)) + info.smallest_normal
    return torch.cat((centre, radius.to(keys.dtype).unsqueeze(-1)), -1)


def bound_scores(
    query: torch.Tensor,
    bounds: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    there: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what attention some queries may pay to each block: the largest share of any of them, summed up over heads.

    Shares are weighted by FADING: that of the last query counts whole.

    A query's product with a key is at most the sum over dimensions of its larger product with the two bounds of a box;
    or its product with the centre of a sphere, plus its length times the radius. Its product with a mean is no bound.
    Shares are the softmax of these products over all blocks, as if each block had one key that reaches them. A soft cap
    rises with its argument, so capped products bound capped scores.

    Args:
        query: [Q, H, D], rotated, of tokens that follow one another.
        bounds: [n, Hkv, X] of `key_bounds`; X is 2 * D for boxes, D + 1 for spheres, D for means.
        scale: of the layer's attention.
        soft_cap, sinks: of the layer's attention (see `logits`); sinks are [H].
        there: bool [n], blocks with tokens; the others get 0. None: all have some.

    Returns:
        float32 [n]
    """
    kv_heads = bounds.shape[1]
    query = query.float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3) * scale  # [Hkv, G, Q, D]
    if bounds.shape[2] == query.shape[3] + 1:
        query = torch.cat((query, torch.linalg.vector_norm(query, dim=-1, keepdim=True)), -1)
    elif bounds.shape[2] > query.shape[3]:
        query = torch.cat((query.clamp(min=0), query.clamp(max=0)), -1)
    products = query.flatten(1, 2) @ bounds.float().permute(1, 2, 0)  # [Hkv, G * Q, n]
    products = soft_capped(products, soft_cap).unflatten(1, query.shape[1:3])
    if there is not None:
        products = products.masked_fill(~there, -torch.inf)
    own = None if sinks is None else sinks.view(*query.shape[:2], 1, 1)
    shares, count = probabilities(products, own), query.shape[2]
    if count > 1:  # a decode that selects scores in each layer, with one query
        shares = shares * FADING ** torch.arange(count - 1, -1, -1, device=query.device).unsqueeze(1)
    return shares.amax(2).sum((0, 1))


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
        for before, q in zip(reversed(range(len(query))), query[:, head].float() * scale):
            products = torch.stack([_product(q, block) for block in bounds[:, kv_head].float()])
            if soft_cap:
                products = soft_cap * torch.tanh(products / soft_cap)
            beside = 0.0 if sinks is None else sinks[head].exp()
            share = products.exp() / (products.exp().sum() + beside)
            largest = torch.maximum(largest, 0.95**before * share)
        scores += largest
    return scores


def _product(query: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Return the largest product of a query [D] within bounds, [2 * D] or [D + 1], or that with a mean, [D]."""
    dims = len(query)
    if len(bounds) <= dims + 1:
        radius = bounds[dims:].sum()  # a mean has none
        return sum(query[i] * bounds[i] for i in range(dims)) + query.pow(2).sum().sqrt() * radius
    return torch.maximum(query * bounds[:dims], query * bounds[dims:]).sum()
