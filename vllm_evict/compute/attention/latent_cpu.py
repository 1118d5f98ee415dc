"""`BackendOps` of multi-head latent attention (MLA) on a CPU."""

from dataclasses import replace

import torch

from ..kernels.mass import AMX_TOKENS, block_mass, kernel_path, pack_keys
from ..probes import LayerCall, MassTarget
from .arguments import paged
from .latent import Latents


class LatentOps(Latents):
    """Mass comes from the kernel for keys of a CPU."""

    beside = "block_mass"

    def mass(self, call: LayerCall, measured: MassTarget) -> None:
        """Run `block_mass` on a packed copy of the latents, whose mass is never by token."""
        assert measured.out is not None
        kv_cache, metadata, rows = call.kv_cache, call.metadata, len(measured.out)
        lens = metadata.seq_lens[:rows]
        tiles = kv_cache.dtype == torch.bfloat16 and kernel_path() == "amx_bf16" and kv_cache.shape[1] % AMX_TOKENS == 0
        layout = "amx" if tiles else "vec"
        keys, table = _packed(kv_cache, metadata.block_table[:rows], lens, layout)
        block_mass(replace(paged(call, measured, lens, keys, layout=layout), block_table=table))


def _packed(
    kv_cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys of a batch's resident blocks, packed for `block_mass`, and the block table that names them."""
    width = -(-int(lens.max()) // kv_cache.shape[1])
    used = torch.arange(width) * kv_cache.shape[1] < lens[:, None]
    blocks, places = torch.where(used, table[:, :width], 0).unique(return_inverse=True)
    return pack_keys(kv_cache[blocks.long()].unsqueeze(1), layout), places.int()
