"""Queries that are measured one by one, for statistics that are not sums over queries."""

from collections.abc import Iterator
from typing import NamedTuple

import torch


class Queries(NamedTuple):
    """n queries of a batch.

    Attributes:
        tokens: int64 [n], indices among the batch's T queries.
        rows: int64 [n], rows of their requests.
        lens: int32 [n], resident tokens that each query sees.
        counts: float32 [n], 1, or 0 for a query that does not count after all; None: all count.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    lens: torch.Tensor
    counts: torch.Tensor | None = None

    def split(self, size: int) -> Iterator["Queries"]:
        """Yield successive parts of at most `size` queries."""
        for first in range(0, len(self.tokens), size):
            yield Queries(*(each if each is None else each[first : first + size] for each in self))
