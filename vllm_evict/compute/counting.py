"""Which queries of a step count in running sums, and with what weight.

Both follow from the positions of queries. Lengths that the host knows give them as arrays. Where steps are planned
before the drafts of the step in flight are verified, the device alone has the lengths, and the same formula runs there.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from .transfer import to_device


class Counting(NamedTuple):
    """The rule of each row by which queries of a step count: numpy arrays, or tensors of one device.

    Attributes:
        every, window, start: int64 [R], of `Scoring`; a window of 0 is none.
        limit: int64 [R], tokens of a table of as many blocks as lead to no decision, holes included.
        drafts: int64 [R], queries of drafts at the end of each row.
        first, last: int64 [R], first and last query of each row.
        row: int64 [T], row of each query.
        back: int64 [T], distance of each query from the end of its row's verified tokens; 0 or less for queries that do
            not count: those of drafts, and of rows that are not measured.
        base, share: float64 [R], factor of a query's weight for each query that counts after it, and of all weights.
    """

    every: Any
    window: Any
    start: Any
    limit: Any
    drafts: Any
    first: Any
    last: Any
    row: Any
    back: Any
    base: Any
    share: Any

    @classmethod
    def of(
        cls,
        every: np.ndarray,
        window: np.ndarray,
        start: np.ndarray,
        limit: np.ndarray,
        decay: np.ndarray,
        lens: np.ndarray,
        verified: np.ndarray,
        measured: np.ndarray,
    ) -> "Counting":
        """Return the rules of a batch.

        Its rows have `lens` queries, `verified` of them of verified tokens, and `measured` of them count. All are [R]:
        `decay` float64, of `Scoring`; the others int64 and int32.
        """
        row, ends = np.repeat(np.arange(len(lens)), lens), np.cumsum(lens)
        back = (measured + ends - lens)[row] - np.arange(len(row))
        base, share = np.where(decay > 0, decay, 1.0), np.where(decay > 0, 1 - decay, 1.0)
        return cls(every, window, start, limit, lens - verified, ends - lens, ends - 1, row, back, base, share)

    def at_most(self, slack: np.ndarray | None) -> "Counting":
        """Return rules by which, with lengths too large by at most `slack` (int64 [R]), each query counts that may.

        A query that is in the window is in it by such lengths, too.
        """
        return self if slack is None else self._replace(every=np.where(slack > 0, 1, self.every))

    def to(self, device: torch.device) -> "Counting":
        """Return the rules on a device, by two copies that are queued with the step's kernels."""
        whole, real = self[:-2], self[-2:]
        moved = to_device(np.concatenate(whole), device).split([len(each) for each in whole])
        return Counting(*moved, *to_device(np.stack(real), device))

    def weights(self, lengths: Any) -> tuple[Any, Any]:
        """Return the weight of each query, float64 [T], and the number of queries that count in each row, int64 [R].

        Args:
            lengths: int64 [R], tokens with holes: position of the last query + 1.
        """
        row, ends = self.row, lengths - self.drafts
        position = ends[row] - self.back
        # The last query before a decision: the last one of this step, or one that begins the block too many.
        newest = self.limit + (ends - 1 - self.limit) * (ends > self.limit)
        in_window = (position > (newest - self.window)[row]) & (position <= newest[row])
        counts = (self.back > 0) & (position % self.every[row] == 0) & (position >= self.start[row])
        counts = counts & (in_window | (self.window == 0)[row])
        upto = counts.cumsum(0)
        counted = upto[self.last] - upto[self.first] + counts[self.first]
        return self.share[row] * self.base[row] ** (upto[self.last][row] - upto) * counts, counted


def all_of(rows: np.ndarray, lens: np.ndarray) -> np.ndarray:
    """Return 1 for all queries of some rows, and 0 for the others: float32 [T]. `lens`: queries of each row."""
    out = np.zeros(len(lens), np.float32)
    out[rows] = 1
    return np.repeat(out, lens)
