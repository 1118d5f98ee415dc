"""The arguments that all attention kernels share: queries, paged cache and measured mass of one layer and step."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Queries of one layer, the paged keys and values that they attend to, and the mass to be measured.

    Query i of request r sees positions 0 .. seq_lens[r] - q_len[r] + i, and `ahead`. Query head h reads KV head h // G,
    G = H / Hkv.
    ``mass[r, k, j] += sum(weights[i] * p[i, h, t])`` over the request's queries i, the G query heads h of KV head k and
    the tokens t of its j-th block; p is the softmax probability. With one row in `mass`, KV heads are summed as well.
    The increments of a row of `mass` sum to G (or H) times the sum of the request's weights, less the shares of sinks.
    With `per_token`, ``mass[r, k, t]`` gets the mass of the t-th resident token, in the order of the block table.

    Attributes:
        query: [T, H, D] float32, bfloat16 or float16, rotated, last dimension contiguous.
        key_cache: [num_blocks, Hkv, bs, D], this step's keys included. On a CPU of the query's dtypes, float8_e4m3fn or
            float8_e5m2, bs a multiple of 16, D even; strides of blocks and heads are arbitrary, and the bs * D elements
            of one block and head are contiguous, packed as `layout` says. On a device of the query's dtype or
            float8_e4m3fn, with any strides but a contiguous D.
        block_table: int32 [R, W], row stride arbitrary. The first ceil(seq_lens[r] / bs) entries of row r are physical
            blocks in order, without holes (see `resident_view`).
        query_start_loc: int32 [R + 1], offsets of the requests in `query`.
        seq_lens: int32 [R], resident tokens, this step's queries included.
        scale: factor on products before the softmax, times the scale of quantised keys.
        value_cache: as `key_cache`, for kernels that attend; on a CPU with the strides of `key_cache`.
        value_scale: factor on quantised values.
        soft_cap: cap of scaled products before the softmax (see `logits.soft_capped`); 0: none.
        sinks: [H], logits of learned sinks (see `logits.probabilities`), float32 on a CPU; None: none.
        layout: how vLLM's CPU kernels pack a block. "vec" and "vec16": element (t, d) of the keys at d * bs + t, of the
            values at t * D + d. "amx" (bfloat16 and float8): of the keys at
            t // 16 * 16 * D + d // 2 * 32 + t % 16 * 2 + d % 2, of the values at
            d // 16 * 16 * bs + t // 2 * 32 + d % 16 * 2 + t % 2.
        mass: float32 [R, Hkv or 1, Wout], last dimension contiguous, other strides arbitrary. Wout is at least the
            number of blocks (with `per_token`, of tokens) of the longest request. Entries past a request's end stay.
            None: no mass is measured.
        weights: float32 [T], or None for ones. Queries of weight 0 add no mass.
        per_token: whether entries of `mass` are tokens instead of blocks.
        ahead: int32 [T], how many positions after its own each query sees too (see `compute.images`), for kernels on a
            device that do not attend; None: none.
    """

    query: torch.Tensor
    key_cache: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    scale: float
    value_cache: torch.Tensor | None = None
    value_scale: float = 1.0
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
    layout: str = "vec"
    mass: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    per_token: bool = False
    ahead: torch.Tensor | None = None

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.query.shape[1] // self.key_cache.shape[1]


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """Sizes from which the plan of a decode kernel follows, for some heads of a layer.

    Attributes:
        rows: most requests of a launch.
        heads, kv_heads, head_dim: of the layer, or of one class of its heads.
        block_size: tokens.
        max_blocks: most blocks of a request.
        dtype, device: of the query.
    """

    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    max_blocks: int
    dtype: torch.dtype
    device: torch.device | str

    @classmethod
    def of(cls, attention: PagedAttention, rows: int, max_blocks: int | None = None) -> "DecodeShape":
        """Return the sizes for so many requests of a batch, each as wide as the block table if `max_blocks` is None."""
        query, (_, kv_heads, block_size, _) = attention.query, attention.key_cache.shape
        blocks = attention.block_table.shape[1] if max_blocks is None else max_blocks
        return cls(rows, query.shape[1], kv_heads, query.shape[2], block_size, blocks, query.dtype, query.device)


def require(valid: bool, sentence: str | None) -> None:
    """Raise a ValueError with the sentence if an argument of a kernel is not valid."""
    if not valid:
        raise ValueError(sentence)
