"""Attention mass of each block or token, computed beside vLLM's fused CPU attention.

Fused attention kernels do not return probabilities, which scores from accumulated attention need (H2O: Zhang et al.,
NeurIPS 2023, arXiv:2306.14048). So this module makes one more pass over the keys after attention. By the split softmax
of FlashDecoding one pass is enough: for a block with maximum m_b and sum l_b = sum(exp(s - m_b)) the mass is
l_b * exp(m_b - m) / l, where m = max(m_b) and l = sum(l_b * exp(m_b - m)).
"""

import logging

import torch

from .logits import probabilities, soft_capped

try:
    from vllm_evict import _C_cpu  # type: ignore[attr-defined]  # compiled

    _missing = ""
except ImportError as error:  # not built (see setup.py), or built for another torch
    _C_cpu = None
    _missing = str(error)

logger = logging.getLogger("vllm_evict")

LAYOUTS = ("vec", "vec16", "amx")
KEY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
AMX_TOKENS = 16  # tokens in one group of the "amx" layout of keys
AMX_DIMS = 16  # elements in one group of the "amx" layout of values

_warned = False


def block_mass(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    per_token: bool = False,
    weights: torch.Tensor | None = None,
    layout: str = "vec",
    isa: str | None = None,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Add to `out` the softmax mass that each query puts on each block, or on each token.

    Query i of request r sees positions 0 .. seq_lens[r] - q_len[r] + i. Query head h reads KV head h // G.
    ``out[r, k, j] += sum(weights[i] * p[i, h, t])`` over the request's queries i, the G query heads h of KV head k and
    the tokens t of its j-th block. With one row in `out`, KV heads are summed as well. The increments of a row of `out`
    sum to G (or H) times the sum of the request's weights, less the shares of sinks. With `per_token`,
    ``out[r, k, t]`` gets the mass of the t-th resident token, in the order of the request's block table.

    A NaN key makes all mass of each query that sees it NaN. Slots past a request's last token may hold anything.

    Sums are float32 in a fixed order: the same input gives the same bits for any number of threads.
    `torch.get_num_threads()` threads run.

    Args:
        query: [T, H, D] float32, bfloat16 or float16 on the CPU, rotated, last dimension contiguous.
        key_cache: [num_blocks, Hkv, bs, D], of the same dtypes, bs a multiple of 16, D even; this step's keys included.
            Strides of blocks and heads are arbitrary. The bs * D elements of one block and head are contiguous, packed
            as `layout` says.
        block_table: int32 [R, W], row stride arbitrary. The first ceil(seq_lens[r] / bs) entries of row r are physical
            blocks in order, without holes (see `resident_view`).
        query_start_loc: int32 [R + 1], offsets of the requests in `query`.
        seq_lens: int32 [R], resident tokens, this step's queries included.
        scale: factor on the scores before the softmax.
        out: float32 [R, Hkv or 1, Wout], last dimension contiguous, other strides arbitrary. Wout is at least the
            number of blocks (with `per_token`, of tokens) of the longest request. Entries past a request's end stay.
        per_token: whether entries of `out` are tokens instead of blocks.
        weights: float32 [T], or None for ones. Queries of weight 0 cost nothing.
        layout: how vLLM's CPU kernels pack a block's keys. "vec" and "vec16": element (t, d) at d * bs + t. "amx"
            (bfloat16): at t // 16 * 16 * D + d // 2 * 32 + t % 16 * 2 + d % 2.
        isa: "avx512_bf16", "avx512", "avx2" or "portable" to force a kernel; None takes the fastest on this CPU.
            "avx512_bf16" multiplies bfloat16 queries and keys by the CPU's own instruction, twice as fast.
        soft_cap: cap of scaled scores before the softmax (see `logits.soft_capped`); 0: none.
        sinks: float32 [H], logits of learned sinks (see `logits.probabilities`); None: none.

    Raises:
        ValueError: a shape, stride, block id, length, layout or `isa` is wrong.
        TypeError: a dtype is unsupported.

    Bytes moved: a row is a query of one head. Each 64 rows of a request that share a KV head (in a decode all of them,
    up to G = 64) read its resident keys once: seq_len * D * itemsize. Scratch takes 8 bytes for each row and tile of 8
    to 32 tokens, in cache. With `per_token` it takes 4 bytes for each row and token, written and read once, for as many
    rows at a time as fit into 8 MiB.
    """
    tensors = query, key_cache, block_table, query_start_loc, seq_lens
    if _C_cpu is None:
        _warn_once()
        options = {"weights": weights, "layout": layout, "soft_cap": soft_cap, "sinks": sinks}
        block_mass_reference(*tensors, scale, out, per_token=per_token, **options)
    else:
        _C_cpu.block_mass(*tensors, scale, out, per_token, weights, layout, isa, soft_cap, sinks)


def kernel_path(isa: str | None = None) -> str:
    """Return the kernel that `block_mass` runs: a value of its argument `isa`, or "torch reference".

    Raises:
        ValueError: this CPU cannot run `isa`, or it is unknown.
    """
    return "torch reference" if _C_cpu is None else _C_cpu.kernel_path(isa)


def block_mass_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    per_token: bool = False,
    weights: torch.Tensor | None = None,
    layout: str = "vec",
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """`block_mass` in plain torch, in the dtype of `out` (float32 or float64)."""
    _check(query, key_cache, block_table, query_start_loc, seq_lens, out, per_token, weights, layout, soft_cap, sinks)
    num_heads = query.shape[1]
    num_kv_heads, block_size = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    starts = query_start_loc.tolist()
    for r, seq_len in enumerate(seq_lens.tolist()):
        rows = torch.arange(starts[r], starts[r + 1])
        if weights is not None:
            rows = rows[weights[rows] != 0]
        if not len(rows):
            continue
        num_blocks = -(-seq_len // block_size)
        blocks = block_table[r, :num_blocks].long()
        last_seen = seq_len - starts[r + 1] + rows
        hidden = torch.arange(seq_len) > last_seen[:, None]
        for k in range(num_kv_heads):
            keys = unpack_keys(key_cache[blocks, k : k + 1], layout)
            keys = keys.flatten(0, 2)[:seq_len].to(out.dtype)
            heads = query[rows, k * group : (k + 1) * group].to(out.dtype)
            logits = soft_capped(heads.transpose(0, 1) @ keys.T * scale, soft_cap)  # [group, rows, seq_len]
            own = None if sinks is None else sinks[k * group : (k + 1) * group, None, None]
            mass = probabilities(logits.masked_fill(hidden, -torch.inf), own).sum(0)
            if weights is not None:
                mass = mass * weights[rows, None]
            mass = mass.sum(0) if per_token else _per_block(mass.sum(0), block_size)
            out[r, k if out.shape[1] > 1 else 0, : len(mass)] += mass


def _per_block(mass: torch.Tensor, block_size: int) -> torch.Tensor:
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
    groups = (block_size // AMX_TOKENS, AMX_TOKENS, head_dim // 2, 2)
    tiles = keys.reshape(num_blocks, num_heads, *groups).transpose(3, 4)
    return tiles.reshape(keys.shape)


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
    if layout == "amx" and dtype != torch.bfloat16:
        raise TypeError("layout 'amx' packs bfloat16 keys only")
    return layout != "amx"


def _warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        logger.warning("no vllm_evict._C_cpu (%s): attention mass runs in plain torch, many times slower", _missing)


def _check(query, key_cache, block_table, query_start_loc, seq_lens, out, per_token, weights, layout, soft_cap, sinks):
    """Raise ValueError or TypeError as the C++ kernel does, with the same texts."""
    for name, tensor in (("query", query), ("key_cache", key_cache)):
        if tensor.dtype not in KEY_DTYPES:
            raise TypeError(f"{name} must be float32, bfloat16 or float16")
    _is_vec(layout, key_cache.dtype)
    for name, tensor, dims in (
        ("block_table", block_table, 2),
        ("query_start_loc", query_start_loc, 1),
        ("seq_lens", seq_lens, 1),
    ):
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name} must be int32")
        _require(tensor.dim() == dims, f"{name} must be {dims}-dimensional")
    if out.dtype not in (torch.float32, torch.float64):
        raise TypeError("out must be float32")
    _require(out.dim() == 3, "out must be 3-dimensional")
    _require(query.dim() == 3, "query must be [T, H, D] with a contiguous last dimension")
    _require(
        key_cache.dim() == 4 and key_cache[0, 0].is_contiguous(),
        "key_cache must be [num_blocks, Hkv, bs, D], contiguous within a block and head",
    )
    num_tokens, num_heads, head_dim = query.shape
    num_blocks, num_kv_heads, block_size, key_dim = key_cache.shape
    _require(
        block_size % 16 == 0 and key_dim % 2 == 0,
        "key_cache must have bs a multiple of 16 and an even D",
    )
    _require(head_dim == key_dim, "query and key_cache must have the same D")
    _require(num_heads % num_kv_heads == 0, "query must have a multiple of key_cache's heads")
    num_requests = len(seq_lens)
    _require(
        len(block_table) == len(out) == num_requests and len(query_start_loc) == num_requests + 1,
        "block_table, seq_lens and out must have R rows, query_start_loc R + 1",
    )
    _require(out.shape[1] in (1, num_kv_heads), "out must have one row for each KV head or one for all")
    _require(weights is None or weights.shape == (num_tokens,), "weights must have T elements")
    if sinks is not None and sinks.dtype != torch.float32:
        raise TypeError("sinks must be float32")
    _require(sinks is None or sinks.shape == (num_heads,), "sinks must have H elements")
    _require(soft_cap >= 0, "soft_cap must be 0 (none) or positive")
    starts = [0, *query_start_loc.tolist(), num_tokens]
    _require(starts == sorted(starts), "query_start_loc must ascend within 0 and T")
    queries = query_start_loc.diff()
    for row, seq_len in zip(block_table[queries > 0], seq_lens[queries > 0].tolist(), strict=True):
        used = row[: -(-seq_len // block_size)]
        _require(
            len(used) * block_size >= seq_len and (per_token or seq_len <= out.shape[2] * block_size),
            "block_table and out must be as wide as the longest request has blocks",
        )
        _require(
            not per_token or seq_len <= out.shape[2],
            "out must be as wide as the longest request has tokens",
        )
        _require(
            bool(((used >= 0) & (used < num_blocks)).all()),
            "block_table must hold block ids of key_cache",
        )
    _require(bool((seq_lens >= queries).all()), "seq_lens must include the queries")


def _require(valid: bool, sentence: str) -> None:
    if not valid:
        raise ValueError(sentence)
