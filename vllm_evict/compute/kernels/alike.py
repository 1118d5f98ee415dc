"""Finds the last similar key of each key (R-KV), without comparing all pairs if few comparisons are enough."""

from collections.abc import Iterator

import torch

from .mass import kernel_path

#: Cosine similarity above which two keys are alike.
ALIKE = 0.5
#: Rows and columns of a tile of products on the host.
ROWS, COLUMNS = 2048, 512
#: Most products at once on a device, which bounds their memory.
PAIRS = 1 << 24


def last_alike(units: torch.Tensor) -> torch.Tensor:
    """Return for each key the index of the last other key that is alike to it (`ALIKE`), or its own index.

    Args:
        units: float32 [H, T, D], keys of length 1. A key of length 0 is alike to no other.

    Returns:
        int64 [H, T].
    """
    if units.device.type != "cpu":
        return last_alike_dense(units)
    return torch.stack([_Search(head).last() for head in units]).long()


def last_alike_dense(units: torch.Tensor) -> torch.Tensor:
    """`last_alike` by all T^2 products, without a wait for the device."""
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
    """Search over one head's keys on the host.

    The first pass goes through columns from the last to the first, and compares each column with earlier rows that have
    no match yet. With many similar keys it compares few pairs, with none half of all pairs. Afterwards the rows without
    a match are alike to no later key. A key that is alike to such a row lies before it and has itself a match at that
    row or later, so the second pass compares only these keys.

    Tiles of products are bfloat16 if the CPU multiplies it several times faster. Rounding both keys changes a product
    by less than 2^-7, so products within that distance of `ALIKE` are computed again in float32.
    """

    def __init__(self, units: torch.Tensor) -> None:
        self._units = units
        quick = torch.bfloat16 if kernel_path() in ("amx_bf16", "avx512_bf16") else torch.float32
        self._quick = units.to(quick)
        # The bits of positive numbers, as integers, are in their order, and above those of negative ones. Reducing
        # integers is faster.
        self._bits = torch.int16 if quick == torch.bfloat16 else torch.int32
        self._perhaps = int(torch.tensor(ALIKE - 2**-7, dtype=quick).view(self._bits))
        self._places = torch.arange(len(units), dtype=torch.int32)
        self._numbers = torch.arange(1, max(ROWS, COLUMNS) + 1, dtype=torch.int16)
        #: -1 for keys without a match so far.
        self._last = torch.full_like(self._places, -1)

    def last(self) -> torch.Tensor:
        """Return `last_alike` of the head: int32 [T]."""
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
        """Note the last match of each row among ascending `columns`; `among`, bool [rows, columns], has the pairs."""
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
    """Yield parts from the last to the first. The first parts are small, since many keys find their match there."""
    size = COLUMNS // 8
    while len(places):
        yield places[-size:]
        places, size = places[:-size], min(2 * size, COLUMNS)
