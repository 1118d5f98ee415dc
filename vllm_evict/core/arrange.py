"""Assigns each KV head a tensor-parallel rank, a KV group, and a head slot in the group's pages.

On each rank the retrieval heads of a layer precede its streaming heads. In the pages of a group the heads of successive
layers follow one another. Pages of all groups have one width, since all groups take blocks from one pool; slots without
a head are padding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from ..config.gates import HeadsError

#: Most KV groups of one class of heads. Each group costs block tables and attention calls.
MOST_GROUPS = 8
#: Share of empty head slots that is accepted. `arrange` tries more groups for a larger share.
PADDING = 0.05


class Place(NamedTuple):
    """The place of successive KV heads of one layer on one rank.

    Attributes:
        group: index of the KV group; in an `Arrangement` among the groups of the class.
        first: head slot of the first head in the group's pages.
        heads: number of heads; 0 if the layer has no head of the class on this rank.
    """

    group: int
    first: int
    heads: int


@dataclass(frozen=True)
class Arrangement:
    """The places of all KV heads.

    Attributes:
        order: int64 [layers, kv_heads], new place -> KV head of the model; a permutation in each layer.
        width: head slots of a page, the same for all groups and ranks.
        groups: (number of retrieval groups, number of streaming groups).
        places: places[rank][layer] is (retrieval, streaming).
    """

    order: np.ndarray
    width: int
    groups: tuple[int, int]
    places: tuple[tuple[tuple[Place, Place], ...], ...]

    @property
    def padding(self) -> float:
        """Share of empty head slots in all groups, on the rank with the largest share."""
        return max(self._empty(rank, (0, 1)) for rank in self.places)

    @property
    def retrieval_padding(self) -> float:
        """Share of empty head slots in the retrieval groups, which hold most blocks, on the rank with the largest
        share; 0 without retrieval heads."""
        return max(self._empty(rank, (0,)) for rank in self.places)

    def _empty(self, rank: tuple[tuple[Place, Place], ...], classes: tuple[int, ...]) -> float:
        slots = self.width * sum(self.groups[which] for which in classes)
        return _empty(slots, sum(layer[which].heads for layer in rank for which in classes))


def arrange(retrieval: np.ndarray, ranks: int = 1) -> Arrangement:
    """Spread both classes of heads over ranks, and cut the layers into groups.

    Numbers of a layer's retrieval heads differ by at most one between ranks. The number of groups is the smallest whose
    share of empty slots is at most `PADDING`, over all groups and over the retrieval groups. If no number satisfies
    that, the number with the fewest empty slots is taken.

    Args:
        retrieval: bool [layers, kv_heads].
        ranks: tensor-parallel size R. If R exceeds the number of heads, rank r holds place r // (R / kv_heads), a copy,
            as in vLLM.

    Raises:
        HeadsError: the pattern has no heads, or the ranks do not divide the heads.
    """
    retrieval = np.asarray(retrieval, dtype=bool)
    if retrieval.ndim != 2 or not retrieval.size:
        raise HeadsError(f"a pattern has layers x KV heads, not the shape {retrieval.shape}")
    heads = retrieval.shape[1]
    if ranks < 1 or (heads % ranks and ranks % heads):
        raise HeadsError(f"{heads} KV heads can't be divided among {ranks} tensor-parallel ranks")
    distinct = min(ranks, heads)
    order, first = _order(retrieval, distinct)
    # [class, rank, layer]
    counts = np.stack([first, heads // distinct - first])
    width, cuts = _cuts(counts)
    places = [tuple(zip(*(_places(counts[which, rank], cuts[which]) for which in (0, 1)))) for rank in range(distinct)]
    return Arrangement(
        order,
        width,
        (len(cuts[0]), len(cuts[1])),
        tuple(places[rank * distinct // ranks] for rank in range(ranks)),
    )


def _order(retrieval: np.ndarray, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of heads, int64 [layers, kv_heads], and numbers of retrieval heads, int64 [ranks, layers]."""
    layers, heads = retrieval.shape
    order = np.empty((layers, heads), dtype=np.int64)
    counts = np.empty((ranks, layers), dtype=np.int64)
    so_far = np.zeros(ranks, dtype=np.int64)
    for layer, row in enumerate(retrieval):
        one_each, spare = divmod(int(row.sum()), ranks)
        share = np.full(ranks, one_each)
        share[np.argsort(so_far, kind="stable")[:spare]] += 1
        so_far += share
        counts[:, layer] = share
        keep, stream = np.flatnonzero(row), np.flatnonzero(~row)
        keep_ends, stream_ends = share.cumsum(), (heads // ranks - share).cumsum()
        order[layer] = np.concatenate(
            [part for pair in zip(np.split(keep, keep_ends[:-1]), np.split(stream, stream_ends[:-1])) for part in pair]
        )
    return order, counts


def _cuts(counts: np.ndarray) -> tuple[int, list[list[int]]]:
    """Return the page width and, for each class, the layers at which its groups end.

    Args:
        counts: numbers of heads, int64 [class, rank, layer].
    """
    options = [list(_even_cuts(of_class)) for of_class in counts]
    used = counts.sum(axis=2)  # [class, rank]
    best = None
    for (width_0, cut_0), (width_1, cut_1) in product(*options):
        width, groups = max(width_0, width_1), len(cut_0) + len(cut_1)
        padding = _empty(width * groups, used.sum(axis=0).min())
        retrieval_padding = _empty(width * len(cut_0), used[0].min())
        worst = max(padding, retrieval_padding)
        key = (0, groups, padding, worst) if worst <= PADDING else (1, worst, groups, padding)
        if best is None or key < best[0]:
            best = key, width, [cut_0, cut_1]
    assert best is not None  # a class has one cut at least
    return best[1:]


def _even_cuts(counts: np.ndarray) -> Iterator[tuple[int, list[int]]]:
    """Yield, for each number of groups, the cut with the smallest largest group: (size of that group, ends of groups).

    Args:
        counts: numbers of heads of one class, int64 [rank, layer]. A class without heads has one cut, into no groups.
    """
    # A group ends behind a layer that has heads on some rank, so no group is empty.
    ends = np.flatnonzero(counts.any(axis=0)) + 1
    if not len(ends):
        yield 0, []
        return
    before = np.concatenate([np.zeros((len(counts), 1), dtype=np.int64), counts.cumsum(axis=1)[:, ends - 1]], axis=1)
    # [i, j]: heads of the layers between end i and end j, on the rank with the largest number
    between = (before[:, None, :] - before[:, :, None]).max(axis=0)
    never = counts.sum() + 1
    between[np.tril_indices(len(between))] = never
    largest, cut_at = between[0], []
    for groups in range(1, min(MOST_GROUPS, len(ends)) + 1):
        if groups > 1:
            either = np.maximum(largest[:, None], between)
            cut_at.append(either.argmin(axis=0))
            largest = either.min(axis=0)
        cut, at = [], len(ends)
        for previous in (*reversed(cut_at), None):
            cut.append(int(ends[at - 1]))
            at = previous[at] if previous is not None else 0
        yield int(largest[-1]), cut[::-1]


def _places(counts: np.ndarray, cut: list[int]) -> list[Place]:
    """Return the places of one class on one rank, from numbers of heads, int64 [layer], and the ends of groups."""
    places, group, filled = [], 0, 0
    for layer, heads in enumerate(counts.tolist()):
        if group + 1 < len(cut) and layer == cut[group]:
            group, filled = group + 1, 0
        places.append(Place(group, filled, heads))
        filled += heads
    return places


def _empty(slots: int, used: int) -> float:
    return float((slots - used) / slots) if slots else 0.0
