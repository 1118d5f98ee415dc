"""Keys at other positions: a rotary embedding turns them on from where they are."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rotation:
    """A rotary position embedding (Su et al., RoFormer, 2021, arXiv:2104.09864), as far as keys are turned by it.

    Attributes:
        frequencies: float64 [R / 2], angle of each pair of dimensions per position, on the device of the keys.
        neox: whether dimension i is paired with i + R / 2, or else 2 i with 2 i + 1.
    """

    frequencies: torch.Tensor
    neox: bool

    def __call__(self, keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Keys as they would be some positions later.

        An embedding that scales keys as well (YaRN) has done so already; dimensions from R on are not turned.

        Args:
            keys: [n, Hkv, block_size, D], blocks of rotated keys, of any float dtype.
            tokens: int64 [n], positions by which each block goes on.

        Returns:
            float32 [n, Hkv, block_size, D].
        """
        # Positions are large numbers, and their angles have to be right to a small part of a turn.
        angles = (tokens[:, None].double() * self.frequencies)[:, None, None]
        cos, sin = angles.cos().float(), angles.sin().float()
        turned = keys.to(torch.float32, copy=True)
        part = turned[..., : 2 * len(self.frequencies)]
        first, second = part.chunk(2, -1) if self.neox else (part[..., ::2], part[..., 1::2])
        one, other = first * cos - second * sin, second * cos + first * sin
        first.copy_(one)
        second.copy_(other)
        return turned
