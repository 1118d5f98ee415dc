"""vLLM's attention backends on a device: where keys and values lie, for what runs beside a kernel or in its place."""

from collections.abc import Sequence
from typing import Any

import torch

from ..worker.work import Share
from .queries import Queries


class DevicePasses:
    """What `attention.backend` needs of a backend on a device (its `Passes`), with our Triton kernels.

    Shapes: query and output [T, H, D], the query rotated; kv_cache [num_blocks, Hkv, block_size, 2 * D], a token's K
    before its V, in any of vLLM's layouts; metadata is the backend's, made through the resident view. Rows that vLLM
    pads a batch with are left out. Nothing is read on the host. Single tokens are neither measured nor moved
    (`refusals.BY_TOKEN`).

    vLLM does not ask its kernels for their LSE, so the mass beside them takes a pass of its own for it.
    """

    heads_dim = 1
    beside = "query_lse and mass_from_lse"

    def __init__(self) -> None:
        #: Scratch of `decode_mass`, by shape and requests. Layers run one after the other, so they share it.
        self._plans: dict[tuple[Any, ...], Any] = {}

    @staticmethod
    def unreadable(layer: Any) -> str | None:
        """What keeps the score pass from reading a layer's keys, as the end of a sentence; None if nothing does."""
        if layer.kv_cache_torch_dtype != layer.dtype:
            kept = str(layer.kv_cache_torch_dtype).removeprefix("torch.")
            return f"keeps its keys as {kept}, not in the model's own dtype, which the score pass can't read"
        if not 16 <= layer.impl.head_size <= 256:
            return f"has heads of size {layer.impl.head_size}, which the score pass can't read (it reads 16 to 256)"
        return None

    def can_decode(self, layer: Any) -> bool:
        """Whether `decode` computes what the layer's own kernel does."""
        impl = layer.impl
        plain = impl.alibi_slopes is None and not impl.logits_soft_cap and impl.sinks is None
        return plain and self.unreadable(layer) is None

    @staticmethod
    def kv_heads(kv_cache: torch.Tensor) -> int:
        return kv_cache.shape[1]

    def mass(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        weights: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Add the mass of queries that the stock kernel has attended to (see `mass_from_lse`)."""
        from ..triton_kernels.mass_from_lse import mass_from_lse
        from ..triton_kernels.query_lse import query_lse

        keys, _ = _halves(kv_cache)
        query = query[: metadata.num_actual_tokens]
        table, starts, lens = _rows(metadata, len(out))
        scale = layer.impl.scale
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        query_lse(query, keys, table, starts, lens, scale, lse, longest=metadata.max_query_len, weights=weights)
        mass_from_lse(query, keys, lse, table, starts, lens, scale, out, weights=weights)

    def mass_of(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        queries: Queries,
        width: int,
    ) -> torch.Tensor:
        """Mass of n queries one by one, the mean over a KV head's query heads. float32 [n, Hkv, width]"""
        keys, values = _halves(kv_cache)
        query = query[queries.tokens]
        numbers = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device)
        out = torch.zeros(len(query), keys.shape[1], width, device=query.device)
        self._decode_mass(
            *(query, keys, values, metadata.block_table[queries.rows, :width], numbers, queries.lens, numbers[:-1]),
            *(layer.impl.scale, torch.empty_like(query), out, None),
        )
        return out.mul_(keys.shape[1] / query.shape[1])

    def decode(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        weights: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> None:
        """Attend for requests `rows` of one token each, and add their mass (see `decode_mass`)."""
        keys, values = _halves(kv_cache)
        tokens = metadata.num_actual_tokens
        query = query[:tokens]
        table, starts, _ = _rows(metadata, len(seq_lens))
        # As wide as the longest request, not as the longest there may be: scratch is.
        table = table[:, : -(-metadata.max_seq_len // keys.shape[2])]
        self._decode_mass(
            *(query, keys, values, table, starts, seq_lens, rows, layer.impl.scale),
            *(output[:tokens].view(query.shape), out, weights),
        )

    def decode_together(
        self,
        layer: Any,
        query: torch.Tensor,
        shares: Sequence[Share],
        output: torch.Tensor,
        weights: torch.Tensor | None,
        outs: Sequence[torch.Tensor | None],
    ) -> None:
        """`decode` for heads in several KV groups, one after the other, into their slices of `output` [T, H, D]."""
        first = 0
        for share, out in zip(shares, outs):
            attended = output[:, first : first + share.query.shape[1]]
            first += share.query.shape[1]
            work = share.work
            self.decode(
                *(layer, share.query, share.kv_cache, share.metadata, attended, work.rows, work.seq_lens, weights, out)
            )

    @staticmethod
    def read(
        layer: Any, kv_cache: torch.Tensor, blocks: torch.Tensor, values: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Copies of the keys, and values if wanted, of physical `blocks` (int64 [n]), [n, Hkv, block_size, D] each."""
        packed_keys, packed_values = _halves(kv_cache)
        return packed_keys[blocks], packed_values[blocks] if values else None

    def _decode_mass(self, query, keys, values, table, starts, lens, rows, scale, output, out, weights) -> None:
        from ..triton_kernels.decode_mass import decode_mass

        plan = self._plan(query, keys, len(rows), table.shape[1], out is not None)
        decode_mass(query, keys, values, table, starts, lens, rows, scale, output, out=out, weights=weights, plan=plan)

    def _plan(self, query: torch.Tensor, keys: torch.Tensor, rows: int, width: int, mass: bool) -> Any:
        """Scratch for at least so many rows and blocks: the same memory from layer to layer and step to step.

        Powers of two, so that a batch that grows by one does not take new scratch each time.
        """
        import triton

        from ..triton_kernels.decode_mass import plan_decode

        shape = query.shape[1], keys.shape[1], query.shape[2], keys.shape[2]
        key = *shape, query.dtype, triton.next_power_of_2(rows)
        plan = self._plans.get(key)
        if plan is None or plan.max_blocks < width or (mass and plan.granules is None):
            width = triton.next_power_of_2(max(width, plan.max_blocks if plan else 1))
            mass = mass or (plan is not None and plan.granules is not None)
            self._plans[key] = plan = plan_decode(key[-1], *shape, width, query.dtype, query.device, mass=mass)
        return plan


def _rows(metadata: Any, requests: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Block table, offsets of queries and lengths of a batch's requests, without rows of padding."""
    return metadata.block_table[:requests], metadata.query_start_loc[: requests + 1], metadata.seq_lens[:requests]


def _halves(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [num_blocks, Hkv, block_size, D] of a cache, with its strides."""
    keys, values = kv_cache.split(kv_cache.shape[3] // 2, dim=3)
    return keys, values
