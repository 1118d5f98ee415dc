"""Base class of `BackendOps` of multi-head latent attention (MLA): one cached vector a token, which all heads read."""

from collections.abc import Callable
from typing import Any

import torch

from .fp8 import FP8, FP8_NAMES, cache_scales, scaled
from .ops import BackendOps, BatchMetadata, Fit


class LatentMetadata(BatchMetadata):
    """The backend's metadata with the batch's views, which it keeps for decodes and prefills apart."""

    def build(self, builder: Any, stock: Callable[[], Any], common: Any, needed: bool, in_graph: bool) -> Any:
        metadata = stock()
        metadata.block_table, metadata.seq_lens = common.block_table_tensor, common.seq_lens
        return metadata

    def rewritten(self, metadata: Any) -> None:
        """Do as `BatchMetadata.rewritten` says. FLASHINFER_MLA keeps rows of queries, and AMX_MLA a place for each
        token.
        """
        for part in (metadata.decode, metadata.prefill):
            if hasattr(part, "flattened_block_table"):
                part.query_len = 0
            if (places := getattr(part, "req_to_token", None)) is not None:
                size = places.shape[1] // part.block_table.shape[1]
                of_blocks = part.block_table[..., None] * size + torch.arange(size, dtype=torch.int32)
                places.copy_(of_blocks.flatten(1))


class Latents(BackendOps):
    """`BackendOps` of MLA, less `mass`.

    A cache is [num_blocks, block_size, C + R]: of each token the normalised latent, then the rotated key that all heads
    share. Its keys are these vectors. Queries come absorbed into the latent space: [T, H, C + R]. There are no values:
    the latent is both. The backend's own kernels attend to all requests; mass is always measured beside them.
    """

    batch: BatchMetadata = LatentMetadata()
    heads_dim = 0
    decodes_measured = False
    splits_blocks = True
    whole_blocks = ("FLASH_ATTN_MLA", "TRITON_MLA")
    mass_of = BackendOps.mass_of

    def fit(self, layer: Any) -> Fit:
        if layer.kv_cache_dtype in ("auto", "float16", "bfloat16", "float32", *FP8_NAMES):
            return Fit()
        return Fit(f"packs its latents as {layer.kv_cache_dtype}, which the score pass can't read")

    def read(
        self, layer: Any, kv_cache: torch.Tensor, blocks: torch.Tensor, values: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        keys = stored_latents(kv_cache)[blocks].unsqueeze(1)
        keys = scaled(keys, cache_scales(layer, keys)[0])
        return keys, keys[..., : layer.kv_lora_rank] if values else None


def stored_latents(kv_cache: torch.Tensor) -> torch.Tensor:
    """Return a cache of bytes as fp8, others as they are."""
    return kv_cache.view(FP8) if kv_cache.dtype == torch.uint8 else kv_cache
