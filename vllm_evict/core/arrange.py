"""Where each KV head lies: its tensor-parallel rank, its KV group, and its head slot in the group's pages.

A layer's retrieval heads come first on each rank, its streaming heads after them. Successive layers' heads of a class
lie one after the other in the pages of a group. All groups have pages of one width, because all take their blocks from
one pool; slots that no head fills are lost. Needs numpy alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from ..config.gates import HeadsError

#: Groups that a class is cut into at most. A group has block tables of its own, and attention calls.
MOST_GROUPS = 8
#: Share of empty head slots that is as good as none. Beyond it more groups are tried.
PADDING = 0.05


class Place(NamedTuple):
    """Where a layer's heads of one class lie on one rank.

    Attributes:
        group: index among the groups of the class.
        first: head slot of the first head in the group's pages.
        heads: how many; 0 if the layer has none of the class on this rank.
    """

    group: int
    first: int
    heads: int


@dataclass(frozen=True)
class Arrangement:
    """The places of all KV heads.

    Attributes:
        order: int64 [layers, kv_heads], new place -> old KV head, a permutation a layer.
        width: head slots of a page, the same for all groups and ranks.
        groups: number of groups of retrieval heads, and of streaming heads.
        places: places[rank][layer] is (retrieval, streaming).
    """

    order: np.ndarray
    width: int
    groups: tuple[int, int]
    places: tuple[tuple[tuple[Place, Place], ...], ...]

    @property
    def padding(self) -> float:
        """Share of the head slots of all groups that are empty, on the rank with most of them."""
        return max(self._empty(rank, (0, 1)) for rank in self.places)

    @property
    def retrieval_padding(self) -> float:
        """Share of the retrieval groups' head slots that are empty, on the rank with most of them: they hold the most
        blocks. 0 without retrieval heads."""
        return max(self._empty(rank, (0,)) for rank in self.places)

    def _empty(self, rank: tuple[tuple[Place, Place], ...], classes: tuple[int, ...]) -> float:
        slots = self.width * sum(self.groups[which] for which in classes)
        return _empty(slots, sum(layer[which].heads for layer in rank for which in classes))


def arrange(retrieval: np.ndarray, ranks: int = 1) -> Arrangement:
    """Spread both classes of heads over ranks, and cut the layers into groups.

    On each rank a layer has as many retrieval heads as on any other, or one more or less. The number of groups is the
    smallest with which at most `PADDING` of all slots and of the retrieval groups' slots is empty; where there is none,
    the one that wastes least.

    Args:
        retrieval: bool [layers, kv_heads].
        ranks: tensor-parallel size. Ranks beyond the number of heads hold copies, as in vLLM: rank r of R holds place
            r // (R / kv_heads).

    Raises:
        HeadsError: no heads, or they can't be divided among the ranks.
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
    """Order of the heads -> int64 [layers, kv_heads], and retrieval heads -> int64 [rank, layer]."""
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
    """Width, and for each class the layers at which its groups end, from heads int64 [class, rank, layer]."""
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
    return best[1:]


def _even_cuts(counts: np.ndarray) -> Iterator[tuple[int, list[int]]]:
    """For each number of groups the cut at layers whose largest group is smallest: (its size, ends of the groups).

    Args:
        counts: heads of one class, int64 [rank, layer]. Without any there is one cut, into no groups.
    """
    # Groups end behind layers that have heads on some rank, so that none is empty.
    ends = np.flatnonzero(counts.any(axis=0)) + 1
    if not len(ends):
        yield 0, []
        return
    before = np.concatenate([np.zeros((len(counts), 1), dtype=np.int64), counts.cumsum(axis=1)[:, ends - 1]], axis=1)
    # [i, j]: heads of the layers between end i and end j, on the rank with most of them
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
    """Places of one class on one rank, from heads int64 [layer] and the layers at which groups end."""
    places, group, filled = [], 0, 0
    for layer, heads in enumerate(counts.tolist()):
        if group + 1 < len(cut) and layer == cut[group]:
            group, filled = group + 1, 0
        places.append(Place(group, filled, heads))
        filled += heads
    return places


def _empty(slots: int, used: int) -> float:
    return float((slots - used) / slots) if slots else 0.0
