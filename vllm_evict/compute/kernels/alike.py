"""The last key that is alike to each key (R-KV), without a look at all pairs where few are needed."""

from collections.abc import Iterator

import torch

from .mass import kernel_path

#: Cosine similarity above which R-KV takes two keys for alike.
ALIKE = 0.5
#: Keys on the host are compared in tiles of so many rows and columns.
ROWS, COLUMNS = 2048, 512
#: Products at once on a device: bounds the memory that they take.
PAIRS = 1 << 24


def last_alike(units: torch.Tensor) -> torch.Tensor:
    """For each key the index of the last other one that is alike to it (`ALIKE`); its own if there is none.

    Args:
        units: float32 [H, T, D], keys of length 1 (or 0: alike to none).

    Returns:
        int64 [H, T].
    """
    if units.device.type != "cpu":
        return last_alike_dense(units)
    return torch.stack([_Search(head).last() for head in units]).long()


def last_alike_dense(units: torch.Tensor) -> torch.Tensor:
    """`last_alike` by all T^2 products, of which nothing is read on the host."""
    heads, count, _ = units.shape
    places = torch.arange(count, dtype=torch.int32, device=units.device)
    size = max(1, PAIRS // (heads * count))
    last = []
    for first in range(0, count, size):
        rows = places[first : first + size, None]
        alike = (units[:, first : first + size] @ units.transpose(1, 2) > ALIKE) & (places != rows)
        latest = torch.where(alike, places, -1).amax(2)
        last.append(torch.where(latest < 0, rows[:, 0], latest))
    return torch.cat(last, 1).long()


class _Search:
    """Of one head's keys, on the host.

    Columns are gone through from the last to the first, by those rows before them that have found none yet: where many
    are alike, few pairs are looked at, and half of them where none are. What is left are keys that are alike to none
    after them. Whatever is alike to such a key is before it, and has found it or a later one: only those are compared.

    Tiles of products are made in bfloat16 where the CPU multiplies it several times faster. Rounding both keys changes
    a product by less than 2^-7: what may be alike by that is computed in float32, which decides.
    """

    def __init__(self, units: torch.Tensor) -> None:
        self._units = units
        quick = torch.bfloat16 if kernel_path() == "avx512_bf16" else torch.float32
        self._quick = units.to(quick)
        # Positive numbers are in the order of their bits, negative ones below them; integers are reduced faster.
        self._bits = torch.int16 if quick == torch.bfloat16 else torch.int32
        self._perhaps = int(torch.tensor(ALIKE - 2**-7, dtype=quick).view(self._bits))
        self._places = torch.arange(len(units), dtype=torch.int32)
        self._numbers = torch.arange(1, max(ROWS, COLUMNS) + 1, dtype=torch.int16)
        #: -1 as long as none is found.
        self._last = torch.full_like(self._places, -1)

    def last(self) -> torch.Tensor:
        """int32 [T]"""
        waiting, alone = self._places, []
        for columns in _from_the_end(self._places):
            before = int(torch.searchsorted(waiting, columns[0]))
            own, waiting = waiting[before:], waiting[:before]
            self._latest(own, columns, among=columns > own[:, None])
            for rows in _parts(waiting, ROWS):
                self._latest(rows, columns)
            alone.append(self._without(own))
            waiting = self._without(waiting)
        found = self._places[self._last >= 0]
        for columns in reversed(_parts(found, COLUMNS)):
            reach = self._last[columns].max()
            open_rows = self._without(torch.cat(alone))
            for rows in _parts(open_rows[(open_rows > columns[0]) & (open_rows <= reach)], ROWS):
                self._latest(rows, columns)
        return torch.where(self._last < 0, self._places, self._last)

    def _without(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[self._last[rows] < 0]

    def _latest(self, rows: torch.Tensor, columns: torch.Tensor, among: torch.Tensor | None = None) -> None:
        """Note for each of `rows` the last of `columns`, ascending, or `among` them, bool [rows, columns]."""
        tile = (self._quick.index_select(0, rows) @ self._quick.index_select(0, columns).T).view(self._bits)
        perhaps = (tile if among is None else torch.where(among, tile, 0)).amax(1) > self._perhaps
        if not perhaps.any():
            return
        rows = rows[perhaps]
        alike = self._units.index_select(0, rows) @ self._units.index_select(0, columns).T > ALIKE
        if among is not None:
            alike &= among[perhaps]
        latest = alike.to(torch.int16).mul_(self._numbers[: len(columns)]).amax(1)
        self._last[rows[latest > 0]] = columns[latest[latest > 0].int() - 1]


def _parts(places: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    return places.split(size) if len(places) else ()


def _from_the_end(places: torch.Tensor) -> Iterator[torch.Tensor]:
    """Parts, from the last on: the first ones are small, as many keys find theirs there."""
    size = COLUMNS // 8
    while len(places):
        yield places[-size:]
        places, size = places[:-size], min(2 * size, COLUMNS)
