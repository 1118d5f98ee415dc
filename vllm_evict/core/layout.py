"""Assigns KV heads of all layers to KV groups and to head slots of their pages."""

from dataclasses import dataclass

import numpy as np

from .arrange import Arrangement, Place


@dataclass(frozen=True)
class Layout:
    """KV groups of split heads or layers. Pages of all groups have one width, so one pool serves all groups.

    Attributes:
        groups: for each KV group the name of its class (see `KVPolicyConfig.classes`).
        width: head slots of a page, the same on all ranks.
        places: places[rank][layer], in the order of the layer's heads; their groups count over both classes.
        order: int64 [layers, kv_heads], new place -> KV head of the model; None if heads keep their order.
    """

    groups: tuple[str, ...]
    width: int
    places: tuple[tuple[tuple[Place, ...], ...], ...]
    order: np.ndarray | None = None

    @classmethod
    def of_classes(cls, arranged: Arrangement, names: tuple[str, str]) -> "Layout":
        """Lay out retrieval and streaming heads, each class in one or more groups."""
        groups = tuple(name for name, count in zip(names, arranged.groups) for _ in range(count))
        first_group = (0, arranged.groups[0])
        places = tuple(
            tuple(
                tuple(
                    place._replace(group=first_group[which] + place.group)
                    for which, place in enumerate(layer)
                    if place.heads
                )
                for layer in rank
            )
            for rank in arranged.places
        )
        return cls(groups, arranged.width, places, arranged.order)

    @classmethod
    def of_layers(cls, names: tuple[str, ...], layers: int, kv_heads: int, ranks: int) -> "Layout":
        """Cut layers into bands of successive layers, whose sizes differ by at most one; `kv_heads` is of one rank."""
        ends = [layers * (band + 1) // len(names) for band in range(len(names))]
        rank, first = [], 0
        for band, end in enumerate(ends):
            rank += [(Place(band, (layer - first) * kv_heads, kv_heads),) for layer in range(first, end)]
            first = end
        width = max(np.diff([0, *ends])) * kv_heads
        return cls(names, int(width), (tuple(rank),) * ranks)

    @classmethod
    def of_heads(cls, names: tuple[str, ...], layers: int, kv_heads: int, ranks: int) -> "Layout":
        """Deal the heads of each layer to all groups, whose sizes differ by at most one; `kv_heads` is of one rank."""
        ends = [kv_heads * (band + 1) // len(names) for band in range(len(names))]
        counts = np.diff([0, *ends]).tolist()
        rank = tuple(
            tuple(Place(band, layer * heads, heads) for band, heads in enumerate(counts)) for layer in range(layers)
        )
        return cls(names, layers * max(counts), (rank,) * ranks)
