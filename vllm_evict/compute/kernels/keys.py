"""Scores of KV blocks from their keys and values alone: no query is needed, and nothing is kept between decisions."""

import torch

from ...policies import CACHED
from .alike import last_alike


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
            scores[name] = _redundancy(units)
    return scores


def _redundancy(units: torch.Tensor) -> torch.Tensor:
    """float32 [H, T] for normalised keys [H, T, D].

    A key's similarities to all keys add up to its product with the sum of all keys. Taken out of them are its own, and
    those to keys whose last one it is.
    """
    last = last_alike(units)
    count = units.shape[1]
    spared = (units * units.gather(1, last[..., None].expand_as(units))).sum(-1)
    # One that is alike to none is its own last.
    spared = torch.where(last == torch.arange(count, device=last.device), 0.0, spared)
    taken = units.square().sum(-1).scatter_add(1, last, spared)
    total = (units * units.sum(1, keepdim=True)).sum(-1)
    return ((total - taken) / count).softmax(1)
