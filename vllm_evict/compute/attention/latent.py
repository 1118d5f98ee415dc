"""`BackendOps` of multi-head latent attention (MLA): one cached vector a token, which all query heads read."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..kernels.mass import AMX_TOKENS, block_mass, kernel_path, pack_keys
from ..kernels.paged import PagedAttention
from ..probes import LayerCall, MassTarget
from .device import DeviceOps, narrowed
from .fp8 import FP8, cache_scales, scaled
from .ops import FP8_NAMES, BackendOps

#: Most query heads in a slice: fewer heads make more programs.
HEADS_AT_ONCE = 16
#: Bytes of the scratch for the mass of each slice.
SLICES_SCRATCH = 32 << 20


class Latents(BackendOps):
    """What `BackendOps` of MLA share.

    A cache is [num_blocks, block_size, C + R]: of each token the normalised latent, then the rotated key that all heads
    share. Its keys are these vectors. Queries come absorbed into the latent space: [T, H, C + R]. There are no values:
    the latent is both. The backend's own kernels attend to all requests; mass is always measured beside them.
    """

    heads_dim = 0
    decodes_measured = False
    splits_blocks = True
    whole_blocks = ("FLASH_ATTN_MLA", "TRITON_MLA")
    mass_of = BackendOps.mass_of

    def unreadable(self, layer: Any) -> str | None:
        if layer.kv_cache_dtype in ("auto", "float16", "bfloat16", "float32", *FP8_NAMES):
            return None
        return f"packs its latents as {layer.kv_cache_dtype}, which the score pass can't read"

    def can_decode(self, layer: Any) -> bool:
        return False

    def metadata(self, builder: Any, stock: Callable[[], Any], common: Any, needed: bool, in_graph: bool) -> Any:
        """Return the backend's metadata with the batch's views, which it keeps for decodes and prefills apart."""
        metadata = stock()
        metadata.block_table, metadata.seq_lens = common.block_table_tensor, common.seq_lens
        return metadata

    def rewritten(self, metadata: Any) -> None:
        """See `BackendOps.rewritten`. FLASHINFER_MLA keeps rows for each query, and AMX_MLA a place for each token."""
        for part in (metadata.decode, metadata.prefill):
            if hasattr(part, "flattened_block_table"):
                part.query_len = 0
            if (places := getattr(part, "req_to_token", None)) is not None:
                size = places.shape[1] // part.block_table.shape[1]
                of_blocks = part.block_table[..., None] * size + torch.arange(size, dtype=torch.int32)
                places.copy_(of_blocks.flatten(1))

    def kv_heads(self, kv_cache: torch.Tensor) -> int:
        return 1

    def read(
        self, layer: Any, kv_cache: torch.Tensor, blocks: torch.Tensor, values: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        keys = _stored(kv_cache)[blocks].unsqueeze(1)
        keys = scaled(keys, cache_scales(layer, keys)[0])
        return keys, keys[..., : layer.kv_lora_rank] if values else None


class LatentOps(Latents):
    """`BackendOps` of MLA on a CPU."""

    beside = "block_mass"

    def mass(self, call: LayerCall, measured: MassTarget) -> None:
        """Run `block_mass` on a packed copy of the latents, whose mass is never by token."""
        assert measured.out is not None
        kv_cache, metadata, rows = call.kv_cache, call.metadata, len(measured.out)
        lens = metadata.seq_lens[:rows]
        tiles = kv_cache.dtype == torch.bfloat16 and kernel_path() == "amx_bf16" and kv_cache.shape[1] % AMX_TOKENS == 0
        layout = "amx" if tiles else "vec"
        keys, table = _packed(kv_cache, metadata.block_table[:rows], lens, layout)
        block_mass(replace(self.paged(call, measured, lens, keys, layout=layout), block_table=table))


class DeviceLatentOps(Latents, DeviceOps):
    """`BackendOps` of MLA on a device, with the plugin's Triton kernels. Nothing is read on the host.

    Beside prompts the one head of the cache stands for several KV heads, each with a slice of the query heads, so that
    more programs run at once.
    """

    def unreadable(self, layer: Any) -> str | None:
        if layer.kv_cache_dtype in ("auto", *FP8_NAMES) or str(layer.dtype) == f"torch.{layer.kv_cache_dtype}":
            return None
        readable = f"the model's own dtype, {', '.join(FP8_NAMES)}"
        return f"keeps its latents as {layer.kv_cache_dtype}, which the score pass can't read (it reads {readable})"

    def scratch_for(
        self, requests: int, in_graphs: int, heads: int, block_size: int, longest: int, per_token: bool
    ) -> int:
        """See `BackendOps.scratch_for`: room for `mass` alone."""
        needed = 4 * requests * longest * self.slices(heads)
        self.scratch_bytes = min(needed, max(SLICES_SCRATCH, needed // max(requests, 1)))
        return 0

    def slices(self, heads: int) -> int:
        return next(each for each in range(1, heads + 1) if heads % each == 0 and heads // each <= HEADS_AT_ONCE)

    def warm_up_mass(self, call: LayerCall, measured: MassTarget) -> None:
        """See `DeviceOps.warm_up_mass`. The cache is [num_blocks, 1, block_size, C + R]."""
        self.mass(replace(call, kv_cache=call.kv_cache.squeeze(1)), measured)

    def arguments(self, call: LayerCall, measured: MassTarget, lens: torch.Tensor) -> PagedAttention:
        """See `DeviceOps.arguments`. The block table is cut to the batch's longest request."""
        slices = self.slices(call.query.shape[1]) if call.metadata.max_query_len > 1 else 1
        keys = _stored(call.kv_cache).unsqueeze(1).expand(-1, slices, -1, -1)
        return narrowed(self.paged(call, measured, lens, keys), call.metadata)

    def lse_of(self, attention: PagedAttention, longest: int) -> torch.Tensor:
        """See `DeviceOps.lse_of`. Keys are read in parts, as decodes have few query rows and one head of keys."""
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


def _stored(kv_cache: torch.Tensor) -> torch.Tensor:
    """Return a cache of bytes as fp8, others as they are."""
    return kv_cache.view(FP8) if kv_cache.dtype == torch.uint8 else kv_cache


def _packed(
    kv_cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys of a batch's resident blocks, packed for `block_mass`, and the block table that names them."""
    width = -(-int(lens.max()) // kv_cache.shape[1])
    used = torch.arange(width) * kv_cache.shape[1] < lens[:, None]
    blocks, places = torch.where(used, table[:, :width], 0).unique(return_inverse=True)
    return pack_keys(kv_cache[blocks.long()].unsqueeze(1), layout), places.int()
