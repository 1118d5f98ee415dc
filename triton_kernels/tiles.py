"""Shared by launchers: tile sizes, from shapes alone, since a CUDA graph replays captured launches for any lengths;
checks; soft caps and sinks."""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..compute.kernels.paged import PagedAttention, require

# Keys of one tile. Two tiles in flight with their values are 64 KiB of shared memory: three programs on a Hopper SM.
TILE_BYTES = 16 * 1024
MIN_TILE, MAX_TILE = 16, 128  # tokens; 16 is the least of tl.dot, and more than 128 only adds registers
# The largest head size that a tile has whole. Of wider heads (latents: 576) products add up over parts of this size.
MAX_DIM, PART_DIM = 256, 64
MIN_ROWS = 16  # query rows, the least of tl.dot
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)
FP8 = torch.float8_e4m3fn  # dtype that caches may have instead of the query's


class Tile(NamedTuple):
    """Tokens that a program reads at once: some whole blocks, or one part of a block.

    A *granule* is a block, or a part of a block that fills a tile. Blocks are padded to a power of two.

    Attributes:
        granules: granules of a tile, a power of two.
        tokens: tokens of a granule, padding included, a power of two.
        parts: granules of a block. `parts` or `granules` is 1.
        dim: head size, padded to a power of two. Padding is masked, never read. Above `MAX_DIM` `PART_DIM`.
    """

    granules: int
    tokens: int
    parts: int
    dim: int


def tile_of(head_dim: int, block_size: int, dtype: torch.dtype, tile_bytes: int = TILE_BYTES) -> Tile:
    """Return the tile for queries of `dtype`, to which keys and values are converted in registers."""
    if head_dim <= MAX_DIM:
        dim = max(triton.next_power_of_2(head_dim), MIN_TILE)
    else:  # half a tile, since registers also hold a pointer to each of its rows
        dim, tile_bytes = PART_DIM, tile_bytes // 2
    most = min(max(tile_bytes // (dim * dtype.itemsize), MIN_TILE), MAX_TILE)
    tokens = min(max(triton.next_power_of_2(block_size), MIN_TILE), most)
    return Tile(most // tokens if block_size <= most else 1, tokens, -(-block_size // tokens), dim)


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Return a GPU's compute capability, (9, 0) for Hopper; (0, 0) where kernels are interpreted."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def check_int32(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name} must be int32")


def check_cache(query: torch.Tensor, *caches: torch.Tensor) -> None:
    """Check a query [T, H, D] and caches [num_blocks, Hkv, bs, D] of its dtype or all float8_e4m3fn, with D contiguous
    and any other strides."""
    kept = {cache.dtype for cache in caches}
    if query.dtype not in DTYPES or kept not in ({query.dtype}, {FP8}):
        raise TypeError("query and caches must have one dtype, float32, bfloat16 or float16, or caches float8_e4m3fn")
    require(query.dim() == 3 and query.stride(2) == 1, "query must be [T, H, D] with a contiguous last dimension")
    for cache in caches:
        require(
            cache.dim() == 4 and cache.stride(3) == 1 and cache.shape[3] == query.shape[2],
            "caches must be [num_blocks, Hkv, bs, D] with the query's D, contiguous",
        )
        require(cache.shape == caches[0].shape, "caches must have the same shape")
        require(query.shape[1] % cache.shape[1] == 0, "query must have a multiple of the caches' heads")


def check_attention(attention: PagedAttention, *caches: torch.Tensor) -> None:
    """Check shapes and dtypes of all but the contents; `caches` are those that a kernel reads."""
    check_cache(attention.query, *caches)
    table, starts, lens = attention.block_table, attention.query_start_loc, attention.seq_lens
    check_int32(block_table=table, query_start_loc=starts, seq_lens=lens)
    require(table.stride(1) == 1, "block_table must have dense rows")
    require(len(lens) == len(table) == len(starts) - 1, "R must agree")
    mass, weights, sinks = attention.mass, attention.weights, attention.sinks
    require(weights is None or weights.dtype == torch.float32, "weights must be float32")
    if mass is not None:
        kind = mass.dtype == torch.float32 and mass.dim() == 3 and mass.stride(2) == 1
        require(kind, "mass must be float32 [R, H, W]")
        heads = attention.key_cache.shape[1]
        require(len(mass) == len(table) and mass.shape[1] in (1, heads), "mass must be [R, Hkv or 1, Wout]")
    require(attention.soft_cap >= 0, "soft_cap must be 0 (none) or positive")
    dense = sinks is None or (sinks.shape == (attention.query.shape[1],) and sinks.stride(0) == 1)
    require(dense, "sinks must be dense [H]")


@triton.jit
def granules_of(seq_len, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr):
    """Return the number of a request's granules with at least one token."""
    blocks = tl.cdiv(seq_len, BLOCK_SIZE)
    return (blocks - 1) * PARTS + tl.cdiv(seq_len - (blocks - 1) * BLOCK_SIZE, TOKENS)


@triton.jit
def converted(tile, dtype: tl.constexpr):
    """Convert a tile of a cache to the dtype of the queries, exactly.

    A GPU makes two float16 of two fp8 by one instruction. To make two bfloat16 of them it takes two slow instructions,
    or three fast ones by way of float32.
    """
    if tile.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        tile = tile.to(tl.float16).to(tl.float32)
    return tile.to(dtype)


@triton.jit
def products_by_parts(queries, counts, keys, held, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Multiply rows of queries and keys, of `HEAD_DIM` elements each, with `DIM` elements of each in registers.

    Args:
        queries, keys: pointers to the first elements of rows.
        counts, held: which rows are read; the others are zeros.
    """
    products = tl.zeros([queries.shape[0], keys.shape[0]], tl.float32)
    for first in range(0, HEAD_DIM, DIM):
        dim = first + tl.arange(0, DIM)
        within = (dim < HEAD_DIM)[None, :]
        q = tl.load(queries[:, None] + dim[None, :], mask=counts[:, None] & within, other=0.0)
        k = tl.load(keys[:, None] + dim[None, :], mask=held[:, None] & within, other=0.0)
        products = tl.dot(q, tl.trans(converted(k, q.dtype)), products, input_precision="ieee")
    return products


@triton.jit
def soft_capped(logits, SOFT_CAP: tl.constexpr):
    """`compute.kernels.logits.soft_capped` of float32 logits, of any base that `SOFT_CAP` has too."""
    if SOFT_CAP != 0.0:
        small = tl.exp2(tl.abs(logits) * (-2.8853900817779268 / SOFT_CAP))  # e ** (-2 |x| / cap), at most 1
        magnitude = SOFT_CAP * (1.0 - small) / (1.0 + small)
        logits = tl.where(logits < 0, -magnitude, magnitude)  # NaN stays
    return logits


@triton.jit
def with_sinks(log, sinks, head, valid):
    """Add the sinks of heads to sums of exponentials, both logarithms of base 2; rows without keys get their sink."""
    sink = tl.load(sinks + head, mask=valid, other=float("-inf")).to(tl.float32) * 1.4426950408889634
    top = tl.where(log > sink, log, sink)
    top = tl.where(top > float("-inf"), top, 0.0)
    return tl.where(log == log, top + tl.log2(tl.exp2(log - top) + tl.exp2(sink - top)), log)
