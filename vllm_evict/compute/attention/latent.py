"""`BackendOps` of multi-head latent attention (MLA): one cached vector a token, which all query heads read."""

from collections.abc import Callable
from typing import Any

import torch

from ..kernels.mass import block_mass, pack_keys
from ..kernels.paged import PagedAttention
from ..kernels.queries import Queries
from .device import FP8
from .ops import FP8_NAMES, WithoutScratch

#: Attribute of a backend's metadata that holds vLLM's `CommonAttentionMetadata` of the step, with views.
COMMON = "kv_evict_common"


class LatentOps(WithoutScratch):
    """`BackendOps` of MLA on a CPU.

    A cache is [num_blocks, block_size, C + R]: of each token the normalised latent, then the rotated key that all heads
    share. Its keys are these vectors. Queries come absorbed into the latent space: [T, H, C + R]. There are no values:
    the latent is both. The backend's own kernels attend to all requests; mass is always measured beside them.
    """

    heads_dim = 0
    beside = "block_mass"

    @staticmethod
    def unreadable(layer: Any) -> str | None:
        """See `BackendOps.unreadable`."""
        if layer.kv_cache_dtype in ("auto", "float16", "bfloat16", "float32", *FP8_NAMES):
            return None
        return f"packs its latents as {layer.kv_cache_dtype}, which the score pass can't read"

    @staticmethod
    def can_decode(layer: Any) -> bool:
        """Return False: the backend's kernel decodes."""
        return False

    @staticmethod
    def metadata(builder: Any, stock: Callable[[], Any], common: Any, needed: bool, in_graph: bool) -> Any:
        """Return the backend's metadata with the views, which it keeps for decodes and prefills apart."""
        metadata = stock()
        setattr(metadata, COMMON, common)
        return metadata

    @staticmethod
    def kv_heads(kv_cache: torch.Tensor) -> int:
        return 1

    @staticmethod
    def mass(
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        weights: torch.Tensor | None,
        out: torch.Tensor,
        last: torch.Tensor | None = None,
    ) -> None:
        """See `BackendOps.mass`; runs `block_mass` on a packed copy of the latents."""
        common, rows = getattr(metadata, COMMON), len(out)
        lens, starts = common.seq_lens[:rows], common.query_start_loc[: rows + 1]
        keys, table = _packed(kv_cache, common.block_table_tensor[:rows], lens)
        query = query[: metadata.num_actual_tokens]
        block_mass(PagedAttention(query, keys, table, starts, lens, layer.impl.scale, mass=out, weights=weights))

    @staticmethod
    def mass_of(
        layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, queries: Queries, width: int
    ) -> torch.Tensor:
        """See `BackendOps.mass_of`; runs `block_mass` on a packed copy of the latents."""
        out = torch.zeros(len(queries.tokens), 1, width)
        keys, table = _packed(kv_cache, getattr(metadata, COMMON).block_table_tensor[queries.rows], queries.lens)
        numbers = torch.arange(len(queries.tokens) + 1, dtype=torch.int32)
        own = query[queries.tokens]
        block_mass(PagedAttention(own, keys, table, numbers, queries.lens, layer.impl.scale, mass=out))
        return out.div_(query.shape[1])

    @staticmethod
    def read(
        layer: Any, kv_cache: torch.Tensor, blocks: torch.Tensor, values: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `BackendOps.read`. An fp8 cache gives float32, multiplied by its scale."""
        keys = (kv_cache.view(FP8) if kv_cache.dtype == torch.uint8 else kv_cache)[blocks].unsqueeze(1)
        keys = keys.float().mul_(layer._k_scale_float) if keys.dtype == FP8 else keys
        return keys, keys[..., : layer.kv_lora_rank] if values else None


class DeviceLatentOps(LatentOps):
    """`BackendOps` of MLA on a device: statistics of keys, without mass."""

    compiles = True


def _packed(kv_cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys of a batch's resident blocks, packed for `block_mass`, and the block table that names them."""
    width = -(-int(lens.max()) // kv_cache.shape[1])
    used = torch.arange(width) * kv_cache.shape[1] < lens[:, None]
    blocks, places = torch.where(used, table[:, :width], 0).unique(return_inverse=True)
    return pack_keys(kv_cache[blocks.long()].unsqueeze(1)), places.int()
