"""The attention that blocks may draw by their keys at two bits a number (`codes`)."""

import torch

from .codes import CODES, GROUP, packed_bytes, packed_tokens, parts_of
from .logits import block_scores

#: Steps each way to which a CPU's kernels round what a query's numbers are for the codes of a group.
WEIGHTS = 127


def bit_logits(query: torch.Tensor, packed: torch.Tensor, rounded: bool = True) -> torch.Tensor:
    """Return the products of queries with the keys of blocks: float32 [Hkv, Q, n, tokens].

    A product is that of the query with the group's middles, and the sum of weight * (code - 1.5) over channels, where a
    weight is the query's number times the channel's step.

    Args:
        query: float32 [Hkv, Q, D], scaled.
        packed: uint8 [n, Hkv, X] of `codes.pack_keys`.
        rounded: whether weights are rounded to a 127th of the largest one of a query and a group, as kernels for CPUs
            do, which multiply whole numbers.
    """
    dims, products = query.shape[2], []
    whole = packed_tokens(packed.shape[-1], dims) // GROUP * packed_bytes(GROUP, dims)
    for some in packed.split((whole, packed.shape[-1] - whole), -1):
        if not some.shape[-1]:
            continue
        middles, steps, codes = parts_of(some, dims)
        weights = torch.einsum("hqd,nhcd->hqncd", query, steps)
        if rounded:
            unit = weights.abs().amax(-1, keepdim=True) / WEIGHTS
            weights = (weights / unit).nan_to_num(0).round() * unit
        own = torch.einsum("hqncd,nhctd->hqnct", weights, codes - (CODES - 1) / 2)
        products.append((own + torch.einsum("hqd,nhcd->hqnc", query, middles)[..., None]).flatten(3))
    return torch.cat(products, -1)


def bit_scores(
    query: torch.Tensor,
    packed: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    rounded: bool = True,
) -> torch.Tensor:
    """Return the attention that one query may pay to each block, summed up over heads: float32 [n].

    Args:
        query: [H, D].
        packed: uint8 [n, Hkv, X] of `codes.pack_keys`.
        scale, soft_cap, sinks: as for `bounds.bound_scores`.
        rounded: see `bit_logits`.
    """
    heads = query.float().unflatten(0, (packed.shape[1], -1)) * scale  # [Hkv, G, D]
    own = None if sinks is None else sinks.view(*heads.shape[:2], 1)
    return block_scores(bit_logits(heads, packed, rounded), soft_cap, own)
