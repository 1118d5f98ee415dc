"""Rotates computed keys to later positions by a rotary embedding."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rotation:
    """The rotation of a rotary position embedding (Su et al., RoFormer, 2021, arXiv:2104.09864).

    Attributes:
        frequencies: float64 [R / 2], angle of each pair of dimensions per position, on the device of the keys.
        neox: whether dimension i is paired with i + R / 2. If False, 2 i is paired with 2 i + 1.
    """

    frequencies: torch.Tensor
    neox: bool

    def __call__(self, keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Rotate keys to later positions.

        Dimensions from R on stay. Scaling by the embedding (YaRN) stays as well, since stored keys have it already.

        Args:
            keys: [n, Hkv, block_size, D], keys as the model stored them, of any float dtype.
            tokens: int64 [n], distance in positions for each block.

        Returns:
            float32 [n, Hkv, block_size, D].
        """
        # float64: distances are large, and an angle has to be exact to a small part of a turn.
        angles = (tokens[:, None].double() * self.frequencies)[:, None, None]
        cos, sin = angles.cos().float(), angles.sin().float()
        turned = keys.to(torch.float32, copy=True)
        part = turned[..., : 2 * len(self.frequencies)]
        first, second = part.chunk(2, -1) if self.neox else (part[..., ::2], part[..., 1::2])
        one, other = first * cos - second * sin, second * cos + first * sin
        first.copy_(one)
        second.copy_(other)
        return turned
