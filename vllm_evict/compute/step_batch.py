"""The batch of one step, as a KV group sees it."""

from collections.abc import Set
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.plan import GroupPlan
from .batch import Batch
from .holes import Holes
from .tiles import Cut
from .transfer import to_device


class Row(NamedTuple):
    """Resident blocks of one request.

    Attributes:
        logical: int64 [n], logical blocks, ascending.
        physical: int32 [n], their physical blocks.
        length: tokens in them; at most so many, with `verified`.
        verified: int32 [], tokens in them as the device knows them; None: `length`.
    """

    logical: np.ndarray
    physical: torch.Tensor
    length: int
    verified: torch.Tensor | None = None


class StepBatch:
    """The batch of one step: lengths on the host, and all else once `see` has run.

    Args:
        batch: as all KV groups see it.
        plan: of the KV group.
        holes: of the KV group.
        metadata: vLLM's `CommonAttentionMetadata` of the group.
        in_graph: whether the step replays a full graph, on memory that the host fills now.
        cut: the batch with rows cut, in place of `metadata`; a request then has several rows.

    Attributes:
        req_ids: requests, in row order.
        starts: int32 [R + 1], first query of each row.
        queries: int32 [R], their number.
        decodes: bool [R], rows of requests that decode: one query of a verified token, and those of drafts after it.
        seq_lens: int32 [R], tokens with holes: position of the last query + 1. They may be too large by `slack`.
        lengths: int32 [R], the same as the device knows them.
        resident_tokens: int32 [R], from `seq_lens`.
        longest: the largest of them.
        verified: int64 [R], leading queries of each row that are of verified tokens; None: all of them are.
        slack: int64 [R], tokens by which `seq_lens` may be too large; None: they are right.
        written: int32 [at least R, W], vLLM's block tables with holes.
        table: int32 [at least R, W], resident blocks.
        lens: int32 [R], resident tokens as the device knows them.
        logical: int32 [R, W], logical index of each resident block, -1 past the end.
        rows: request that reports -> its resident blocks: at least those of verified tokens.
    """

    def __init__(
        self,
        batch: Batch,
        plan: GroupPlan,
        holes: Holes,
        metadata: Any,
        in_graph: bool = False,
        cut: Cut | None = None,
    ) -> None:
        metadata = metadata if cut is None else cut.metadata
        self._holes, self._metadata = holes, metadata
        self.req_ids = batch.req_ids if cut is None else [batch.req_ids[row] for row in cut.rows.tolist()]
        self.plan, self.in_graph = plan, in_graph
        self.seq_lens = metadata.seq_lens_cpu_upper_bound[: len(self.req_ids)].numpy()
        self.resident_tokens = holes.resident_tokens(self.req_ids, self.seq_lens)
        self.longest = int(self.resident_tokens.max())
        self.starts: np.ndarray = metadata.query_start_loc_cpu[: len(self.req_ids) + 1].numpy()
        self.queries, self.written = np.diff(self.starts), metadata.block_table_tensor
        self.verified, slack = batch.verified_queries(self.queries) if cut is None else cut.verified, batch.slack()
        self.slack = slack if cut is None or slack is None else slack[cut.rows]
        verified = self.queries if self.verified is None else self.verified
        self.decodes = batch.decodes(verified) if cut is None else cut.decodes
        self.rows: dict[str, Row] = {}

    @property
    def drafts(self) -> np.ndarray:
        """The number of queries of drafts in each row: int [R]."""
        return np.zeros_like(self.queries) if self.verified is None else self.queries - self.verified

    @property
    def ends(self) -> np.ndarray:
        """End of each row's queries of verified tokens; drafts follow them: [R]."""
        return self.starts[1:] if self.verified is None else self.starts[:-1] + self.verified

    def see(self, table: torch.Tensor, lens: torch.Tensor, logical: torch.Tensor, block_size: int) -> None:
        """Take what layers read, as the attributes have it; `logical` may be wider."""
        metadata, rows = self._metadata, len(self.req_ids)
        self.lengths = metadata.seq_lens[:rows]
        self.table, self.lens = table, lens
        self.logical = logical[:, : max(-(-self.longest // block_size), 1)]
        places = {req_id: row for row, req_id in enumerate(self.req_ids)} if self.plan.report else {}
        for req_id in self.plan.report:
            self.rows[req_id] = self._row(req_id, places[req_id], block_size)

    def filled(self, block_size: int, loaded: Set[str] = frozenset()) -> torch.Tensor | None:
        """Return the physical blocks that the step fills, with drafts or without: int64 [n]; None: it fills none.

        Where lengths may be too large, blocks that the step may fill are among them.

        Args:
            block_size: tokens.
            loaded: requests that start with blocks which a connector may have filled; these count.
        """
        ends = self.seq_lens // block_size
        firsts = (self.seq_lens - self.queries - (0 if self.slack is None else self.slack)) // block_size
        if loaded:
            firsts[[row for row, req_id in enumerate(self.req_ids) if req_id in loaded]] = 0
        counts = ends - firsts
        if not counts.any():
            return None
        rows = np.repeat(np.arange(len(counts)), counts)
        places = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(firsts, counts)
        rows, places = (to_device(each.astype(np.int64), self.written.device) for each in (rows, places))
        return self.written[rows, places].long()

    def _row(self, req_id: str, row: int, block_size: int) -> Row:
        """Return the resident blocks of one request."""
        drafts = int(self.starts[row + 1] - self.ends[row])
        length = int(self.resident_tokens[row]) - drafts
        index = self._holes.resident(req_id, -(-length // block_size))
        verified = self.lens[row] - drafts if self.slack is not None and self.slack[row] else None
        return Row(index, self.table[row, : len(index)], length, verified)
