"""The batch of one step, as all KV groups of a worker see it."""

from typing import Any

import numpy as np

from .graphs import Attends


class Batch:
    """The step's batch, shared by all KV groups of a worker."""

    def __init__(self, attended: set[Any] | None = None) -> None:
        #: Requests of the step, in row order.
        self.req_ids: list[str] = []
        #: Requests that the plugin's kernel attends for, in all groups: decodes, and prompts if `takes_prompts`.
        self.own: set[str] = set()
        #: Whether that kernel attends for several queries of a request.
        self.takes_prompts = False
        #: The full graph that this step replays or captures; None: no full graph.
        self.graph: Attends | None = None
        #: Requests of which the step computes one token that is no decode: a chunk of their prompt.
        self.prompts: set[str] = set()
        #: Request with drafts -> its leading queries in this step, which are of verified tokens; drafts follow them.
        #: None: the server does not speculate.
        self.verified: dict[str, int] | None = None
        #: Request -> drafts of it in the step before that may have been rejected, which the host does not know: its
        #: length on the host is too large by those. Empty: the host knows lengths.
        self.unsure: dict[str, int] = {}
        #: Layers whose attention has run in this step, or since this was last emptied (see `GroupRuntime.layers`).
        self.attended: set[Any] = set() if attended is None else attended
        self._rows: tuple[list[str], set[str], np.ndarray] = ([], set(), np.empty(0, bool))

    def own_rows(self) -> np.ndarray:
        """Return which rows of the batch are in `own`: bool [R]. Cached until batch or `own` changes."""
        req_ids, own, rows = self._rows
        if self.req_ids != req_ids or self.own != own:
            rows = np.fromiter((req_id in self.own for req_id in self.req_ids), bool, len(self.req_ids))
            self._rows = (list(self.req_ids), set(self.own), rows)
        return rows

    def own_now(self, queries: np.ndarray) -> np.ndarray:
        """Return the rows that the plugin's kernel attends for in this step, whose rows have `queries`: int64 [n].

        vLLM's kernel cannot skip the queries of a prompt. So prompts are among them only if all rows are.
        """
        own = self.own_rows()
        if self.takes_prompts and own.all():
            return np.arange(len(own))
        return np.flatnonzero(own & (queries == 1))

    def verified_queries(self, queries: np.ndarray) -> np.ndarray | None:
        """Return how many leading queries of each row are of verified tokens: int64 [R]; None: all of them are."""
        if self.verified is None:
            return None
        queries = queries.astype(np.int64)
        for row, req_id in enumerate(self.req_ids if self.verified else ()):
            queries[row] = min(queries[row], self.verified.get(req_id, queries[row]))
        return queries

    def decodes(self, verified: np.ndarray) -> np.ndarray:
        """Return which rows decode, by their queries of verified tokens: bool [R]. Drafts may follow one."""
        decodes: np.ndarray = verified == 1
        if self.prompts:
            decodes &= np.fromiter((req_id not in self.prompts for req_id in self.req_ids), bool, len(self.req_ids))
        return decodes

    def slack(self) -> np.ndarray | None:
        """Return by how much each row's length on the host may be too large: int64 [R], tokens; None: all are right."""
        if not self.unsure:
            return None
        slack = np.array([self.unsure.get(req_id, 0) for req_id in self.req_ids], np.int64)
        return slack if slack.any() else None
