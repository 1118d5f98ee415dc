"""The order by which workers rotate keys."""

from dataclasses import dataclass

from ...core.actions import Work


@dataclass(frozen=True, slots=True)
class KeyRotation(Work):
    """Rotates keys of a request's blocks to later positions, to close the gaps that evicted blocks left.

    A block of `target`, which gets rotated keys and values, is its own source or a new block.

    Attributes:
        blocks: logical blocks of `source`.
        tokens: for each block the distance in positions from where its keys were computed to where they go.
        again: for each block whether an earlier plan has rotated its keys.
    """

    blocks: list[int]
    tokens: list[int]
    again: list[bool]
