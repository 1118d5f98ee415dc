"""Merges an evicted token's key and value into the kept token with the most similar key, instead of dropping them."""

import math

import torch

from ..config import KVPolicyConfig


class Merger:
    """Merges one request's evicted tokens into kept ones, head by head.

    Similarity is the cosine similarity of an evicted key to the most similar kept key.

    - `d2o`: an evicted token is merged if its similarity reaches a threshold. The threshold is the mean similarity at
      the first decision, then an exponential mean (`merge_decay`). Weights are exp(similarity), e for the kept token.
      Wan et al., D2O, 2024, arXiv:2406.13035, section 3.3. A decision here evicts many tokens where the paper's evicts
      one, so each decision counts by its mean similarity.
    - `ems`: at most as many evicted tokens as kept ones, the most important, are candidates for merging. One is merged
      if its similarity reaches `merge_threshold`. Weights are importance, or equal if some importance is not positive.
      After evict-then-merge of Li et al., EMS, 2024, arXiv:2412.08521, with the policy's score in place of the paper's.

    Sinks and recent tokens take in nothing, since other requests may read their blocks.
    """

    def __init__(self) -> None:
        #: (layer, head) -> threshold of d2o, a float64 scalar.
        self._thresholds: dict[tuple[int, int], torch.Tensor] = {}

    def merge(
        self,
        config: KVPolicyConfig,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        importance: torch.Tensor,
        keep: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge the candidates of one layer.

        Args:
            config: configuration of the request.
            layer: number of the layer, by which thresholds are remembered.
            keys, values: [Hkv, count, D], of all candidates; computed in float32.
            importance: float64 [Hkv, count].
            keep: int64 [Hkv, kept], indices of kept candidates, ascending.

        Returns:
            Keys and values of the kept candidates, float32 [Hkv, kept, D] each.
        """
        merged = [
            self._head(config, (layer, head), keys[head].float(), values[head].float(), importance[head], keep[head])
            for head in range(len(keys))
        ]
        return torch.stack([key for key, _ in merged]), torch.stack([value for _, value in merged])

    def _head(
        self,
        config: KVPolicyConfig,
        at: tuple[int, int],
        keys: torch.Tensor,
        values: torch.Tensor,
        importance: torch.Tensor,
        keep: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Evicted tokens that are not merged take part with weight 0, since the host does not know which they are.
        going = torch.ones(len(keys), device=keys.device).index_fill_(0, keep, 0).argsort(descending=True, stable=True)
        going = going[: len(keys) - len(keep)]
        if not len(going) or not len(keep):
            return keys[keep], values[keep]
        if config.merge == "ems":
            order = importance[going].argsort(stable=True)
            going = going[order[-len(keep) :].sort().values]
        units = torch.nn.functional.normalize(keys, dim=-1)
        likeness, into = (units[going] @ units[keep].T).max(1)
        if config.merge == "d2o":
            merges = likeness >= self._threshold(config.merge_decay, at, likeness)
            own, weights = torch.full_like(keep, math.e, dtype=torch.float32), likeness.exp()
        else:
            merges = likeness >= config.merge_threshold
            as_weights = torch.where((importance > 0).all(), importance, 1.0).float()
            own, weights = as_weights[keep], as_weights[going]
        weights = torch.where(merges, weights, 0.0)
        total = _added(own.clone(), into, weights)[:, None]
        return tuple(_added(x[keep] * own[:, None], into, x[going] * weights[:, None]) / total for x in (keys, values))

    def _threshold(self, decay: float, at: tuple[int, int], likeness: torch.Tensor) -> torch.Tensor:
        """Update the threshold of d2o, and return it: float32 scalar on the keys' device."""
        mean, before = likeness.double().mean(), self._thresholds.get(at)
        new = mean if before is None else decay * mean + (1 - decay) * before
        self._thresholds[at] = new
        return new.float()


def _added(x: torch.Tensor, into: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """Add rows to x at `into` (int64), in a fixed order: on a device `index_put_` sorts the indices first."""
    if x.device.type == "cpu":
        return x.index_add_(0, into, more)
    return x.index_put_((into,), more, accumulate=True)
