"""Statistics of blocks and tokens from resident keys and values, without queries or state between decisions."""

import torch

from ...policies import CACHED
from .alike import last_alike


def key_scores(
    keys: torch.Tensor,
    values: torch.Tensor | None,
    length: int,
    statistics: frozenset[str],
    verified: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Compute statistics of one request's resident blocks in one layer.

    They are means of `token_scores` over a block's tokens; redundancy is a sum.

    Args:
        keys, values, length, statistics, verified: as for `token_scores`.

    Returns:
        name -> float32 [Hkv, n]; 0 for blocks without tokens.
    """
    blocks, heads, block_size, _ = keys.shape
    full = blocks * block_size
    tokens = length if verified is None else verified
    counts = (tokens - torch.arange(blocks, device=keys.device) * block_size).clamp(1, block_size)
    scores = {}
    for name, of_tokens in token_scores(keys, values, length, statistics, verified).items():
        sums = torch.nn.functional.pad(of_tokens, (0, full - length)).view(heads, blocks, block_size).sum(-1)
        scores[name] = sums if name.endswith("redundancy") else sums / counts
    return scores


def token_scores(
    keys: torch.Tensor,
    values: torch.Tensor | None,
    length: int,
    statistics: frozenset[str],
    verified: torch.Tensor | None = None,
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
        statistics: names, some of `policies.CACHED`; with a minus the negative of what is above.
        verified: int32 [], the tokens among the first `length` that are taken into account, at least 1, where the
            device alone knows how many these are. What lies behind them may be anything. None: all of them are.

    Returns:
        name -> float32 [Hkv, length]; 0 past `verified`.
    """
    there = None if verified is None else torch.arange(length, device=keys.device) < verified

    def of_tokens(cached: torch.Tensor) -> torch.Tensor:
        flat = cached.transpose(0, 1).reshape(cached.shape[1], -1, cached.shape[3])[:, :length].float()
        return flat if there is None else torch.where(there[:, None], flat, 0.0)

    keys = of_tokens(keys)
    norms = keys.norm(dim=-1)
    units = keys / norms.clamp(min=1e-12)[..., None]
    scores: dict[str, torch.Tensor] = {}
    for statistic in statistics & CACHED:
        name = statistic.removeprefix("-")
        if name == "key_norm":
            score = norms
        elif name == "value_key_ratio":
            score = of_tokens(values).norm(dim=-1) / norms.clamp(min=1e-12)
        elif name == "key_diff":
            anchor = torch.nn.functional.normalize(units.mean(1), dim=-1)
            score = -(units @ anchor[..., None])[..., 0]
        elif name == "redundancy":
            score = _redundancy(units, there)
        else:
            raise KeyError(f"no score of keys and values is named {name!r}")
        scores[statistic] = score if name == statistic else -score
    return scores


def _redundancy(units: torch.Tensor, there: torch.Tensor | None) -> torch.Tensor:
    """Return redundancy, float32 [H, T], of normalised keys [H, T, D]; those that are not `there`, bool [T], are 0.

    The similarities of a key to all keys add up to its product with the sum of all keys. Subtracted are the product
    with itself, and those with keys whose last similar key it is.
    """
    last = last_alike(units)
    spared = (units * units.gather(1, last[..., None].expand_as(units))).sum(-1)
    # `last_alike` returns a key's own index if no other key is alike.
    spared = torch.where(last == torch.arange(last.shape[1], device=last.device), 0.0, spared)
    taken = units.square().sum(-1).scatter_add(1, last, spared)
    total = (units * units.sum(1, keepdim=True)).sum(-1)
    if there is None:
        return ((total - taken) / units.shape[1]).softmax(1)
    return ((total - taken) / there.sum()).masked_fill(~there, -torch.inf).softmax(1)
