"""`BackendOps` of multi-head latent attention (MLA) on a device."""

from dataclasses import replace
from typing import Any

import torch

from ..kernels.paged import PagedAttention
from ..probes import LayerCall, MassTarget
from .arguments import narrowed, paged
from .decoding import DeviceScratch
from .device import DeviceOps, slices_of
from .fp8 import FP8_NAMES
from .latent import Latents, stored_latents
from .ops import Fit

#: Bytes of the scratch for the mass of each slice.
SLICES_SCRATCH = 32 << 20


class SlicesScratch(DeviceScratch):
    """Scratch of `mass` alone.

    Args:
        heads_at_once: see `DeviceOps`.
    """

    def __init__(self, heads_at_once: int) -> None:
        super().__init__()
        self._heads_at_once = heads_at_once

    def size_for(
        self, requests: int, in_graphs: int, heads: int, block_size: int, longest: int, per_token: bool
    ) -> int:
        needed = 4 * requests * longest * slices_of(heads, self._heads_at_once)
        self.nbytes = min(needed, max(SLICES_SCRATCH, needed // max(requests, 1)))
        return 0


class DeviceLatentOps(Latents, DeviceOps):
    """Mass is measured by the plugin's Triton kernels. Nothing is read on the host.

    Beside prompts the one head of the cache stands for several KV heads, each with a slice of the query heads, so that
    more programs run at once.
    """

    heads_at_once = 16  # fewer heads make more programs

    def __init__(self) -> None:
        super().__init__(SlicesScratch(self.heads_at_once))

    def fit(self, layer: Any) -> Fit:
        if layer.kv_cache_dtype in ("auto", *FP8_NAMES) or str(layer.dtype) == f"torch.{layer.kv_cache_dtype}":
            return Fit()
        dtype, readable = layer.kv_cache_dtype, f"the model's own dtype, {', '.join(FP8_NAMES)}"
        return Fit(f"keeps its latents as {dtype}, which the score pass can't read (it reads {readable})")

    def warm_up_mass(self, call: LayerCall, measured: MassTarget) -> None:
        """Do as `DeviceOps.warm_up_mass` says. The cache is [num_blocks, 1, block_size, C + R]."""
        self.mass(replace(call, kv_cache=call.kv_cache.squeeze(1)), measured)

    def _arguments(self, call: LayerCall, measured: MassTarget, lens: torch.Tensor) -> PagedAttention:
        """Do as `DeviceOps._arguments` says. The block table is cut to the batch's longest request."""
        slices = slices_of(call.query.shape[1], self.heads_at_once) if call.metadata.max_query_len > 1 else 1
        keys = stored_latents(call.kv_cache).unsqueeze(1).expand(-1, slices, -1, -1)
        return narrowed(paged(call, measured, lens, keys), call.metadata)

    def _lse_of(self, attention: PagedAttention, longest: int) -> torch.Tensor:
        """Do as `DeviceOps._lse_of` says. Keys are read in parts, as decodes have few query rows and one head of
        keys.
        """
        from ...triton_kernels.decode_classes import splits_of
        from ...triton_kernels.decode_mass import programs_on
        from ...triton_kernels.mass_from_lse import MAX_ROWS
        from ...triton_kernels.query_lse import query_lse

        (tokens, heads, _), (requests, width) = attention.query.shape, attention.block_table.shape
        device = attention.query.device
        programs = requests * -(-min(longest, tokens) * heads // MAX_ROWS)
        (splits,) = splits_of(programs, [1], [width * attention.key_cache.shape[2]], programs_on(device))
        parts = torch.empty(splits, tokens, heads, dtype=torch.float32, device=device)
        query_lse(attention, parts, longest=longest)
        return parts[0] if splits == 1 else parts.logsumexp(0)
