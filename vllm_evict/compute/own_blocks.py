"""What tiles of a prompt pay to their own tokens, beside which blocks before them count."""

import numpy as np
import torch

from .kernels.logits import logits_of, soft_capped
from .probes import LayerCall


class OwnBlocks:
    """Blocks from a tile's first token on, which its queries attend to beside the blocks that are scored.

    Args:
        rows: int64 [R], rows of the block table.
        starts, counts: int [R], first query of each tile, and its queries.
        lengths: int [R], tokens up to the tile's end.
        block_size: tokens.
    """

    def __init__(
        self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, lengths: np.ndarray, block_size: int
    ) -> None:
        before, blocks = (lengths - counts)[:, None], -(-lengths // block_size)[:, None]
        full = before // block_size
        own = np.minimum(full + np.arange((blocks - full).max()), blocks - 1)
        queries = np.minimum(np.arange(counts.max()), counts[:, None] - 1)  # tiles with fewer have their last one again
        places = np.arange(own.shape[1] * block_size)
        self._rows, self._blocks = (torch.from_numpy(each) for each in (rows[:, None], own))
        self._queries = torch.from_numpy(starts[:, None] + queries)
        self._hidden = torch.from_numpy(places > (before - full * block_size + queries)[..., None])

    def logits(self, call: LayerCall, table: torch.Tensor) -> torch.Tensor:
        """Return the logit of all own tokens together for each query of the step; of no tile, of no token.

        Args:
            call: of a layer, whose cache has the step's tokens.
            table: int32 [R', W], physical blocks.

        Returns:
            float32 [T, H]
        """
        blocks = table[self._rows, self._blocks]
        keys, _ = call.ops.read(call.layer, call.kv_cache, blocks.flatten().long(), False)
        keys = keys.float().unflatten(0, blocks.shape).transpose(1, 2).flatten(2, 3)  # [R, Hkv, N, D]
        query = call.query[self._queries].float().unflatten(2, (keys.shape[1], -1)) * call.layer.impl.scale
        soft_cap, sinks = logits_of(call.layer).values()
        logits = soft_capped(torch.einsum("rqhgd,rhnd->rqhgn", query, keys), soft_cap)
        own = logits.masked_fill(self._hidden[:, :, None, None], -torch.inf).logsumexp(-1).flatten(2)
        own = torch.full(call.query.shape[:2], -torch.inf).index_put_((self._queries,), own)
        return own if sinks is None else torch.logaddexp(own, sinks.float())
