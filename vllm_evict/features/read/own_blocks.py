"""Attention of a prompt's tiles to their own tokens, which the choice among blocks before them is measured against."""

import numpy as np
import torch

from ...compute.kernels.logits import logits_of, soft_capped
from ...compute.kernels.reach import SCRATCH
from ...compute.probes import LayerCall
from ...compute.transfer import to_device


class OwnBlocks:
    """Blocks from a tile's first token on, which its queries attend to beside the blocks that are scored.

    Args:
        rows: int64 [R], rows of the block table.
        starts, counts: int [R], first query of each tile, and its queries.
        lengths: int [R], tokens up to the tile's end.
        block_size: tokens.
        device: of the tables and caches to come.
    """

    def __init__(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        lengths: np.ndarray,
        block_size: int,
        device: torch.device,
    ) -> None:
        before, blocks = (lengths - counts)[:, None], -(-lengths // block_size)[:, None]
        full = before // block_size
        own = np.minimum(full + np.arange((blocks - full).max()), blocks - 1)
        queries = np.minimum(np.arange(counts.max()), counts[:, None] - 1)  # tiles with fewer have their last one again
        places = np.arange(own.shape[1] * block_size)
        hidden = places > (before - full * block_size + queries)[..., None]
        of_tiles = rows[:, None], own, starts[:, None] + queries, hidden
        self._rows, self._blocks, self._queries, self._hidden = (to_device(each, device) for each in of_tiles)

    def logits(self, call: LayerCall, table: torch.Tensor) -> torch.Tensor:
        """Return the logit of all own tokens together for each query of the step; of no tile, of no token.

        Keys and values of as many tiles at once are read as `SCRATCH` has room for.

        Args:
            call: of a layer, whose cache has the step's tokens.
            table: int32 [R', W], physical blocks.

        Returns:
            float32 [T, H]
        """
        soft_cap, sinks = logits_of(call.layer).values()
        own = torch.full(call.query.shape[:2], -torch.inf, device=call.query.device)
        # Keys and logits, each twice in float32.
        at_once = max(SCRATCH // (16 * self._blocks.shape[1] * call.kv_cache[0].numel()), 1)
        of_tiles = (each.split(at_once) for each in (self._rows, self._blocks, self._queries, self._hidden))
        for rows, places, queries, hidden in zip(*of_tiles):
            blocks = table[rows, places]
            keys, _ = call.ops.read(call.layer, call.kv_cache, blocks.flatten().long(), False)
            keys = keys.float().unflatten(0, blocks.shape).transpose(1, 2).flatten(2, 3)  # [r, Hkv, N, D]
            query = call.query[queries].float().unflatten(2, (keys.shape[1], -1)) * call.layer.impl.scale
            logits = soft_capped(torch.einsum("rqhgd,rhnd->rqhgn", query, keys), soft_cap)
            logits = logits.masked_fill(hidden[:, :, None, None], -torch.inf)
            own.index_put_((queries,), logits.logsumexp(-1).flatten(2))
        return own if sinks is None else torch.logaddexp(own, sinks.float())
