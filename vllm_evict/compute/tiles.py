"""Chunks of prompts cut into tiles: rows of their own for the backend, whose queries read the same blocks."""

from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch

from .batch import Batch
from .transfer import to_device


class Cut(NamedTuple):
    """A batch of which some rows are cut.

    Attributes:
        metadata: vLLM's `CommonAttentionMetadata` of R rows; its block table and lengths are copies.
        rows: int64 [R], the row of the batch that each of them is a part of.
        decodes: bool [R], whether that row decodes; it is whole then.
        verified: int [R], leading queries that are of verified tokens.
    """

    metadata: Any
    rows: np.ndarray
    decodes: np.ndarray
    verified: np.ndarray


def cut(metadata: Any, batch: Batch, least: int, tile: int) -> Cut | None:
    """Cut chunks of prompts that see more than `least` tokens: into their queries that see no more, and tiles.

    Tiles end at multiples of `tile` tokens of their request, and with the row. A row that decodes is whole.

    Args:
        metadata: vLLM's `CommonAttentionMetadata`.
        batch: of the step.
        least: tokens.
        tile: most queries of a tile.

    Returns:
        None: there is no such row.
    """
    live = len(batch.req_ids)
    ends = metadata.seq_lens_cpu_upper_bound[:live].numpy()
    counts = np.diff(metadata.query_start_loc_cpu[: live + 1].numpy())
    verified = batch.verified_queries(counts)
    verified = counts if verified is None else verified
    known = ends - counts + verified  # tokens before the row's drafts
    decodes = batch.decodes(verified)
    chunks = ~decodes & (known > least)
    if not chunks.any():
        return None
    rows, lens, queries = [], [], []
    for row, (end, count, is_cut) in enumerate(zip(ends.tolist(), counts.tolist(), chunks.tolist())):
        first, seams = end - count, [end]
        if is_cut:
            begin = max(first, least)
            seams = [least] * (first < least) + [*range(begin // tile * tile + tile, end, tile), end]
        rows += [row] * len(seams)
        lens += seams
        queries += np.diff([first, *seams]).tolist()
    of_rows, of_queries, device = np.array(rows), np.array(queries), metadata.seq_lens.device
    made, its = copy(metadata), to_device(of_rows, device)
    of_batch = np.concatenate(([0], np.cumsum(queries))).astype(np.int32)
    made.num_reqs, made.max_query_len = len(rows), max(queries)
    made.query_start_loc_cpu, made.query_start_loc = torch.from_numpy(of_batch), to_device(of_batch, device)
    made.seq_lens_cpu_upper_bound = torch.tensor(lens, dtype=torch.int32)
    made.seq_lens = metadata.seq_lens[its] - to_device((ends[of_rows] - lens).astype(np.int32), device)
    made.block_table_tensor = metadata.block_table_tensor[its]
    if metadata.is_prefilling is not None:
        made.is_prefilling = metadata.is_prefilling[torch.from_numpy(of_rows)]
    made._num_computed_tokens_cache = made._token_to_req_indices_cache = None
    its_drafts = np.clip(np.array(lens) - known[of_rows], 0, of_queries)
    return Cut(made, of_rows, decodes[of_rows], of_queries - its_drafts)
