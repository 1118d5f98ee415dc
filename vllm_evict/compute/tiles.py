"""Chunks of prompts cut into tiles: rows of their own for the backend, whose queries read the same blocks."""

from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch

from .transfer import to_device


class Cut(NamedTuple):
    """A batch of which some rows are cut.

    Attributes:
        metadata: vLLM's `CommonAttentionMetadata` of R rows; its block table and lengths are copies.
        rows: int64 [R], the row of the batch that each of them is a part of.
        chunks: int32 [R], queries of that row.
    """

    metadata: Any
    rows: np.ndarray
    chunks: np.ndarray


def cut(metadata: Any, live: int, least: int, tile: int) -> Cut | None:
    """Cut rows of several queries that see more than `least` tokens: into their queries that see no more, and tiles.

    Tiles end at multiples of `tile` tokens of their request, and with the chunk.

    Args:
        metadata: vLLM's `CommonAttentionMetadata`.
        live: rows that are no padding.
        least: tokens.
        tile: most queries of a tile.

    Returns:
        None: there is no such row.
    """
    starts = metadata.query_start_loc_cpu[: live + 1].numpy()
    ends, counts = metadata.seq_lens_cpu_upper_bound[:live].numpy(), np.diff(starts)
    if not ((counts > 1) & (ends > least)).any():
        return None
    rows, lens, queries = [], [], []
    for row, (end, count) in enumerate(zip(ends.tolist(), counts.tolist())):
        first, seams = end - count, [end]
        if count > 1 and end > least:
            begin = max(first, least)
            seams = [least] * (first < least) + [*range(begin // tile * tile + tile, end, tile), end]
        rows += [row] * len(seams)
        lens += seams
        queries += np.diff([first, *seams]).tolist()
    of_rows, device = np.array(rows), metadata.seq_lens.device
    made, its = copy(metadata), to_device(of_rows, device)
    of_batch = torch.from_numpy(np.concatenate(([0], np.cumsum(queries))).astype(np.int32))
    made.num_reqs, made.max_query_len = len(rows), max(queries)
    made.query_start_loc_cpu, made.query_start_loc = of_batch, of_batch.to(device)
    made.seq_lens_cpu_upper_bound = torch.tensor(lens, dtype=torch.int32)
    made.seq_lens = to_device(made.seq_lens_cpu_upper_bound.numpy(), device).clone()
    made.block_table_tensor = metadata.block_table_tensor[its]
    made.is_prefilling = metadata.is_prefilling if metadata.is_prefilling is None else metadata.is_prefilling[its]
    made._num_computed_tokens_cache = made._token_to_req_indices_cache = None
    return Cut(made, of_rows, counts[of_rows])
