"""Reduces numbers of KV heads and layers to one number."""

from collections.abc import Sequence

import numpy as np
import torch

from .transfer import to_device


class Reduction:
    """Reduces numbers of layers head by head, and then numbers of heads.

    Layers may differ in their KV heads. A mean over heads then divides by the mean number of heads, so each head weighs
    the same. A maximum over heads compares a head that some layers lack by its mean over the layers that have it.

    Args:
        heads: KV heads of each layer, those of other stages of a pipeline included.
        of_heads, of_layers: "sum", "mean" or "max".

    Attributes:
        maximises_heads, maximises_layers: whether heads, or layers, are reduced by their maximum.
        scale: factor on what sums give, by which they become means.
    """

    def __init__(self, heads: Sequence[int], of_heads: str, of_layers: str) -> None:
        self.maximises_heads, self.maximises_layers = of_heads == "max", of_layers == "max"
        self.scale = 1.0
        if of_heads == "mean":
            self.scale /= sum(heads) / len(heads)
        if of_layers == "mean":
            self.scale /= len(heads)
        #: Layers over the layers that have a head: float64 [most heads of a layer]; None: all layers have all heads.
        self._lacked: np.ndarray | None = None
        if self.maximises_heads and not self.maximises_layers and len(set(heads)) > 1:
            having = (np.arange(max(heads)) < np.array(heads)[:, None]).sum(0)
            self._lacked = len(heads) / having

    @property
    def is_by_head(self) -> bool:
        """Whether heads have to stay apart until all layers are reduced."""
        return self.maximises_heads or self.maximises_layers

    def of_heads(self, values: torch.Tensor) -> torch.Tensor:
        """Reduce float64 [H, n], reduced over layers, to [n]; `scale` is left to the caller."""
        if not self.maximises_heads:
            return values.sum(0)
        if self._lacked is not None and len(values) > 1:
            values = values * to_device(self._lacked[: len(values)], values.device)[:, None]
        return values.amax(0)
