"""Scores of KV blocks from their keys and values alone: no query is needed, and nothing is kept between decisions."""

import torch

from ..policies import CACHED

#: Cosine similarity above which R-KV takes two keys for alike.
ALIKE = 0.5
#: Keys compared with all others at once: bounds the memory that redundancy takes.
ROWS = 512


def key_scores(
    keys: torch.Tensor, values: torch.Tensor | None, length: int, statistics: frozenset[str]
) -> dict[str, torch.Tensor]:
    """Statistics of one request's resident blocks in one layer, per KV head: means over a block's tokens of
    `token_scores`, for redundancy sums.

    Args:
        keys, values, length, statistics: as for `token_scores`.

    Returns:
        name -> float32 [Hkv, n].
    """
    blocks, heads, block_size, _ = keys.shape
    full = blocks * block_size
    counts = (length - torch.arange(blocks, device=keys.device) * block_size).clamp(max=block_size)
    scores = {}
    for name, of_tokens in token_scores(keys, values, length, statistics).items():
        sums = torch.nn.functional.pad(of_tokens, (0, full - length)).view(heads, blocks, block_size).sum(-1)
        scores[name] = sums if name == "redundancy" else sums / counts
    return scores


def token_scores(
    keys: torch.Tensor, values: torch.Tensor | None, length: int, statistics: frozenset[str]
) -> dict[str, torch.Tensor]:
    """Statistics of one request's resident tokens in one layer, per KV head.

    - key_norm: ||K|| (Devoto et al., 2024).
    - value_key_ratio: ||V|| / ||K|| (PagedEviction).
    - key_diff: -cos(K, A); A is the mean of all resident keys, each normalised (KeyDiff).
    - redundancy: softmax_j(mean_i S_ij), over all resident tokens. S_ij is the cosine similarity of keys i and j, 0 for
      i = j and for the last j that is alike to i (`ALIKE`): of keys that are alike, the most recent one is not
      redundant (R-KV).

    Args:
        keys, values: [n, Hkv, block_size, D], in logical order; any float dtype, computed in float32. Values are for
            value_key_ratio only.
        length: resident tokens; the last block may be partly filled.
        statistics: some of `policies.CACHED`.

    Returns:
        name -> float32 [Hkv, length].
    """
    heads, dim = keys.shape[1], keys.shape[3]
    keys = keys.transpose(0, 1).reshape(heads, -1, dim)[:, :length].float()
    norms = keys.norm(dim=-1)
    units = keys / norms.clamp(min=1e-12)[..., None]
    scores = {}
    for name in statistics & CACHED:
        if name == "key_norm":
            scores[name] = norms
        elif name == "value_key_ratio":
            lengths = values.transpose(0, 1).reshape(heads, -1, dim)[:, :length].float().norm(dim=-1)
            scores[name] = lengths / norms.clamp(min=1e-12)
        elif name == "key_diff":
            anchor = torch.nn.functional.normalize(units.mean(1), dim=-1)
            scores[name] = -(units @ anchor[..., None])[..., 0]
        else:
            scores[name] = torch.stack([_redundancy(head) for head in units])
    return scores


def _redundancy(units: torch.Tensor) -> torch.Tensor:
    """float32 [T] for normalised keys [T, D]; T^2 products."""
    places = torch.arange(1.0, len(units) + 1, device=units.device)
    total = torch.zeros(len(units), device=units.device)
    for first in range(0, len(units), ROWS):
        similar = units[first : first + ROWS] @ units.T
        similar.diagonal(first).zero_()
        # The place of the last key that is alike; the row's own, which is 0 already, if there is none.
        own = torch.arange(first, first + len(similar), device=units.device)
        last = (similar > ALIKE).mul(places).amax(1).long() - 1
        similar.scatter_(1, torch.where(last >= 0, last, own)[:, None], 0.0)
        total += similar.sum(0)
    return (total / len(units)).softmax(0)
