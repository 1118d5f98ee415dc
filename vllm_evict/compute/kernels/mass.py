"""Attention mass of each block or token, computed beside vLLM's fused CPU attention.

Fused attention kernels do not return probabilities, which scores from accumulated attention need (H2O: Zhang et al.,
NeurIPS 2023, arXiv:2306.14048). So this module makes one more pass over the keys after attention. By the split softmax
of FlashDecoding one pass is enough: for a block with maximum m_b and sum l_b = sum(exp(s - m_b)) the mass is
l_b * exp(m_b - m) / l, where m = max(m_b) and l = sum(l_b * exp(m_b - m)).
"""

import logging

import torch

from .logits import probabilities, soft_capped
from .paged import PagedAttention

try:
    from vllm_evict import _C_cpu  # type: ignore[attr-defined]  # compiled

    _missing = ""
except ImportError as error:  # not built (see setup.py), or built for another torch
    _C_cpu = None
    _missing = str(error)

logger = logging.getLogger("vllm.evict")

LAYOUTS = ("vec", "vec16", "amx")
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
PAIRS = {torch.bfloat16: torch.int32, **dict.fromkeys(FP8_DTYPES, torch.int16)}  # of the "amx" layout -> their pairs
AMX_TOKENS = 16  # tokens in one group of the "amx" layout of keys
AMX_DIMS = 16  # elements in one group of the "amx" layout of values

_warned = False


def block_mass(attention: PagedAttention, *, isa: str | None = None) -> None:
    """Add to `attention.mass` the softmax mass that each query puts on each block, or on each token.

    A NaN key makes all mass of each query that sees it NaN; of float8_e4m3fn it counts as 480, as in vLLM's kernels.
    Slots past a request's last token may hold anything.

    Sums are float32 in a fixed order: the same input gives the same bits for any number of threads.
    `torch.get_num_threads()` threads run.

    Args:
        attention: on the CPU; its values are not read. Queries of weight 0 cost nothing.
        isa: "amx_bf16", "avx512_bf16", "avx512", "avx2" or "portable" to force a kernel; None takes the fastest on
            this CPU. "avx512_bf16" multiplies bfloat16 queries and keys by the CPU's own instruction, twice as fast.
            "amx_bf16" multiplies tiles of them if keys are packed for it, D is a multiple of 32, and a pass over the
            keys of a KV head has 16 query rows or more.

    Raises:
        ValueError: a shape, stride, block id, length, layout or `isa` is wrong.
        TypeError: a dtype is unsupported.

    Bytes moved: a row is a query of one head. Each 64 rows of a request that share a KV head (in a decode all of them,
    up to G = 64) read its resident keys once: seq_len * D * itemsize. Scratch takes 8 bytes for each row and tile of 8
    to 32 tokens, in cache. With `per_token` it takes 4 bytes for each row and token, written and read once, for as many
    rows at a time as fit into 8 MiB.
    """
    if _C_cpu is None:
        _warn_once()
        block_mass_reference(attention)
    else:
        _C_cpu.block_mass(attention, isa)


def kernel_path(isa: str | None = None) -> str:
    """Return the kernel that `block_mass` runs: a value of its argument `isa`, or "torch reference".

    Raises:
        ValueError: this CPU cannot run `isa`, or it is unknown.
    """
    return "torch reference" if _C_cpu is None else _C_cpu.kernel_path(isa)


def block_mass_reference(attention: PagedAttention) -> None:
    """`block_mass` in plain torch, in the dtype of the mass (float32 or float64). Arguments are not checked."""
    mass, weights, sinks, group = attention.mass, attention.weights, attention.sinks, attention.group
    assert mass is not None, "block_mass needs mass"
    block_size = attention.key_cache.shape[2]
    starts = attention.query_start_loc.tolist()
    for r, seq_len in enumerate(attention.seq_lens.tolist()):
        rows = torch.arange(starts[r], starts[r + 1])
        if weights is not None:
            rows = rows[weights[rows] != 0]
        if not len(rows):
            continue
        num_blocks = -(-seq_len // block_size)
        blocks = attention.block_table[r, :num_blocks].long()
        last_seen = seq_len - starts[r + 1] + rows
        hidden = torch.arange(seq_len) > last_seen[:, None]
        for k in range(attention.key_cache.shape[1]):
            keys = unpack_keys(attention.key_cache[blocks, k : k + 1], attention.layout)
            keys = keys.flatten(0, 2)[:seq_len].to(mass.dtype)
            heads = attention.query[rows, k * group : (k + 1) * group].to(mass.dtype)
            logits = heads.transpose(0, 1) @ keys.T * attention.scale  # [group, rows, seq_len]
            logits = soft_capped(logits, attention.soft_cap).masked_fill(hidden, -torch.inf)
            own = None if sinks is None else sinks[k * group : (k + 1) * group, None, None]
            new = probabilities(logits, own).sum(0)
            if weights is not None:
                new = new * weights[rows, None]
            new = new.sum(0) if attention.per_token else per_block(new.sum(0), block_size)
            mass[r, k if mass.shape[1] > 1 else 0, : len(new)] += new


def per_block(mass: torch.Tensor, block_size: int) -> torch.Tensor:
    """Sums [..., blocks] of mass [..., tokens]."""
    padded = torch.nn.functional.pad(mass, (0, -mass.shape[-1] % block_size))
    return padded.unflatten(-1, (-1, block_size)).sum(-1)


def unpack_keys(key_cache: torch.Tensor, layout: str = "vec") -> torch.Tensor:
    """Unpack keys to [num_blocks, Hkv, bs, D] in plain order: a view for "vec", a copy for "amx"."""
    num_blocks, num_heads, block_size, head_dim = key_cache.shape
    if _is_vec(layout, key_cache.dtype):
        return key_cache.view(num_blocks, num_heads, head_dim, block_size).transpose(2, 3)
    groups = (block_size // AMX_TOKENS, head_dim // 2, AMX_TOKENS, 2)
    tiles = key_cache.view(num_blocks, num_heads, *groups).transpose(3, 4)
    return tiles.reshape(key_cache.shape)


def pack_keys(keys: torch.Tensor, layout: str = "vec") -> torch.Tensor:
    """Pack keys [num_blocks, Hkv, bs, D] contiguously: the inverse of `unpack_keys`."""
    num_blocks, num_heads, block_size, head_dim = keys.shape
    if _is_vec(layout, keys.dtype):
        return keys.transpose(2, 3).reshape(keys.shape).contiguous()
    # Pairs of elements stay together, and torch moves words several times faster.
    words = (keys.clone() if keys.storage_offset() % 2 else keys).contiguous().view(PAIRS[keys.dtype])
    groups = (block_size // AMX_TOKENS, AMX_TOKENS, head_dim // 2)
    tiles = words.view(num_blocks, num_heads, *groups).transpose(3, 4)
    return tiles.contiguous().view(words.shape).view(keys.dtype)


def unpack_values(value_cache: torch.Tensor, layout: str = "vec") -> torch.Tensor:
    """Unpack values to [num_blocks, Hkv, bs, D] in plain order.

    "vec" stores them in plain order. "amx" stores tiles of 16 elements with two tokens interleaved; unpacking copies.
    """
    num_blocks, num_heads, block_size, head_dim = value_cache.shape
    if _is_vec(layout, value_cache.dtype):
        return value_cache
    groups = (head_dim // AMX_DIMS, block_size // 2, AMX_DIMS, 2)
    tiles = value_cache.view(num_blocks, num_heads, *groups).permute(0, 1, 3, 5, 2, 4)
    return tiles.reshape(value_cache.shape)


def pack_values(values: torch.Tensor, layout: str = "vec") -> torch.Tensor:
    """Pack values [num_blocks, Hkv, bs, D] contiguously: the inverse of `unpack_values`."""
    num_blocks, num_heads, block_size, head_dim = values.shape
    if _is_vec(layout, values.dtype):
        return values.contiguous()
    groups = (block_size // 2, 2, head_dim // AMX_DIMS, AMX_DIMS)
    tiles = values.reshape(num_blocks, num_heads, *groups).permute(0, 1, 4, 2, 5, 3)
    return tiles.reshape(values.shape)


def _is_vec(layout: str, dtype: torch.dtype) -> bool:
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}")
    if layout == "amx" and dtype not in PAIRS:
        raise TypeError("layout 'amx' packs bfloat16 and float8 keys only")
    return layout != "amx"


def _warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        logger.warning("no vllm_evict._C_cpu (%s): attention mass runs in plain torch, many times slower", _missing)
