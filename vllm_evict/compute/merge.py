"""Merging instead of dropping: a token that goes leaves its key and value to the token most like it that stays."""

import math

import torch

from ..config import KVPolicyConfig


class Merger:
    """Merges one request's evicted tokens into kept ones, head by head.

    - `d2o`: an evicted token is merged if the cosine similarity of its key to the kept key most like it reaches a
      threshold: at the first decision the mean of all these similarities, then their exponential mean (`merge_decay`).
      Weights are exp(similarity), e for the kept token itself. Wan et al., D2O, 2024, arXiv:2406.13035, section 3.3; a
      decision here takes many tokens where the paper's takes one, so its similarities count by their mean.
    - `ems`: of the evicted tokens the most important, as many as stay, are merged if that similarity reaches
      `merge_threshold`; all others are dropped. Weights are importance, or equal where a policy's importance is no
      weight. After the evict-then-merge of Li et al., EMS, 2024, arXiv:2412.08521; its global-local score is not here,
      the policy's own is used.

    Only tokens that were candidates are merged into: sinks and recent tokens may lie in blocks that others read.
    """

    def __init__(self) -> None:
        #: (layer, head) -> threshold of d2o.
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
        """Kept keys and values of one layer with what was merged into them.

        Args:
            config: of the request.
            layer: its number, by which thresholds are remembered.
            keys, values: [Hkv, count, D], of all candidates; computed in float32.
            importance: float64 [Hkv, count].
            keep: int64 [Hkv, kept], ascending.

        Returns:
            float32 [Hkv, kept, D] each.
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
        # Tokens that go and that are not merged take part with weight 0: which they are is not known on the host.
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
        """Of d2o, a scalar on the keys' device."""
        mean, before = likeness.double().mean(), self._thresholds.get(at)
        new = mean if before is None else decay * mean + (1 - decay) * before
        self._thresholds[at] = new
        return new.float()


def _added(x: torch.Tensor, into: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """x with rows added at places `into` (int64), always in one order: on a device `index_put_` sorts them first."""
    if x.device.type == "cpu":
        return x.index_add_(0, into, more)
    return x.index_put_((into,), more, accumulate=True)
