"""Queries that are measured one by one, for statistics that are not sums over queries."""

from typing import NamedTuple

import torch


class Queries(NamedTuple):
    """n queries of a batch.

    Attributes:
        tokens: int64 [n], indices among the batch's T queries.
        rows: int64 [n], rows of their requests.
        lens: int32 [n], resident tokens that each query sees.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    lens: torch.Tensor
