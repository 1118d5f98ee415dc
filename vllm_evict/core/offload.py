"""Copies of blocks between a device and the host."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from .plan import Order


@dataclass(frozen=True, slots=True)
class Copy(Order):
    """Copies one block between a device and the host.

    Attributes:
        kind: `spill`, from the device to the host; `fetch`, back; `poison`, the host block is filled with NaN (tests).
        physical: block of the device.
        number: block of the host.
    """

    kind: str
    physical: int
    number: int


def runs(copies: Iterable[Copy]) -> Iterator[tuple[str, list[Copy]]]:
    """Yield successive copies of one kind, and the kind. Of those to one block the last one stays.

    A host block may be dropped, and written again, by one plan.
    """
    for kind, run in groupby(copies, key=lambda copy: copy.kind):
        to = {copy.physical if kind == "fetch" else copy.number: copy for copy in run}
        yield kind, list(to.values())
