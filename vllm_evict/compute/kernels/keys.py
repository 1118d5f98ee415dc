"""Statistics of blocks and tokens from resident keys and values, without queries or state between decisions."""

import torch

from ...policies import CACHED
from .alike import last_alike


def key_scores(
    keys: torch.Tensor, values: torch.Tensor | None, length: int, statistics: frozenset[str]
) -> dict[str, torch.Tensor]:
    """Compute statistics of one request's resident blocks in one layer.

    They are means of `token_scores` over a block's tokens; redundancy is a sum.

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
    """Compute statistics of one request's resident tokens in one layer.

    - key_norm: ||K|| (Devoto et al., 2024, arXiv:2406.11430).
    - value_key_ratio: ||V|| / ||K|| (PagedEviction, arXiv:2509.04377).
    - key_diff: -cos(K, A), where A is the mean of all resident keys, each normalised (KeyDiff, arXiv:2504.15364).
    - redundancy: softmax_j(mean_i S_ij) over all resident tokens (R-KV, arXiv:2505.24133). S_ij is the cosine
      similarity of keys i and j. It is 0 for i = j, and for the last j that is alike to i (`ALIKE`), so the most recent
      of similar keys is not redundant.

    Args:
        keys, values: [n, Hkv, block_size, D], in logical order, of any float dtype; computed in float32. Only
            value_key_ratio reads values.
        length: resident tokens; the last block may be partly filled.
        statistics: names, some of `policies.CACHED`.

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
            lengths = values.transpose(0, 1).reshape(heads, -1, values.shape[3])[:, :length].float().norm(dim=-1)
            scores[name] = lengths / norms.clamp(min=1e-12)
        elif name == "key_diff":
            anchor = torch.nn.functional.normalize(units.mean(1), dim=-1)
            scores[name] = -(units @ anchor[..., None])[..., 0]
        else:
            scores[name] = _redundancy(units)
    return scores


def _redundancy(units: torch.Tensor) -> torch.Tensor:
    """Return redundancy, float32 [H, T], of normalised keys [H, T, D].

    The similarities of a key to all keys add up to its product with the sum of all keys. Subtracted are the product
    with itself, and those with keys whose last similar key it is.
    """
    last = last_alike(units)
    count = units.shape[1]
    spared = (units * units.gather(1, last[..., None].expand_as(units))).sum(-1)
    # `last_alike` returns a key's own index if no other key is alike.
    spared = torch.where(last == torch.arange(count, device=last.device), 0.0, spared)
    taken = units.square().sum(-1).scatter_add(1, last, spared)
    total = (units * units.sum(1, keepdim=True)).sum(-1)
    return ((total - taken) / count).softmax(1)
