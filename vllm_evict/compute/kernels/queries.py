"""Queries of a step that are measured one by one, where a sum over queries would not do."""

from typing import NamedTuple

import torch


class Queries(NamedTuple):
    """n queries of a batch.

    Attributes:
        tokens: int64 [n], their places among the batch's queries.
        rows: int64 [n], their requests' rows.
        lens: int32 [n], resident tokens that each sees.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    lens: torch.Tensor
