"""Rows whose queries have moved since they chose, so that they choose again."""

import torch

from .reach import ReachRows


def moved(rows: ReachRows, query: torch.Tensor, asked: torch.Tensor, least: float) -> torch.Tensor:
    """Return which rows choose in a layer: those that have to, and those whose query has moved.

    A query has moved if the cosine of a head's query with the one by which the row chose last is below `least`, in the
    mean over heads. Of several queries of a row the first one counts. Queries of rows that choose are noted.

    Args:
        rows: see `ReachRows`; `chooses` has those that have to. Rows of slots that `asked` lacks stay as they are.
        query: [T, H, D].
        asked: bfloat16 [slots, H, D], the queries by which each slot chose last; updated.
        least: cosine.

    Returns:
        int32 [R]
    """
    if query.device.type == "cpu":
        return moved_reference(rows, query, asked, least)
    from ...triton_kernels.moved import moved as on_device

    return on_device(rows, query, asked, least)


def moved_reference(rows: ReachRows, query: torch.Tensor, asked: torch.Tensor, least: float) -> torch.Tensor:
    """`moved` in plain torch."""
    known = (rows.slots >= 0) & (rows.slots < len(asked))
    slots, chooses = rows.slots[known].long(), rows.chooses[known] != 0
    now, before = query[rows.queries[known].long()], asked[slots]
    alike = torch.cosine_similarity(now.float(), before.float(), -1).mean(-1)
    chooses |= ~(alike >= least)  # of a query that is NaN, too
    asked[slots] = now.bfloat16().where(chooses[:, None, None], before)
    return rows.chooses.masked_scatter(known, chooses.int())
