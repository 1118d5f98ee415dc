"""Decode attention that also computes the attention mass of each block or token, from one read of keys and values.

It applies the identity of `mass` to each tile of keys. This is the contract of all decode kernels: C++ runs here, and
`triton_kernels.decode_mass` and `decode_cuda` document their differences.
"""

from collections.abc import Sequence

import torch

from .logits import probabilities, soft_capped
from .mass import _C_cpu, _check, _per_block, _require, unpack_keys


def decode_mass(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    output: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    per_token: bool = False,
    weights: torch.Tensor | None = None,
    layout: str = "vec",
    isa: str | None = None,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attend for requests that decode one token: write `output`, and add the mass of their queries to `out`.

    A request's output depends on nothing but its own query, keys and values, to the bit: keys are read in pieces of 512
    tokens, for any batch and number of threads, and combined in order. A NaN key makes the output and the mass of query
    heads that see it NaN.

    Args:
        query: [T, H, D] as for `block_mass`, D a multiple of 16.
        key_cache, value_cache: [num_blocks, Hkv, bs, D], of one dtype, with the same strides. Keys are packed as
            `layout` says; values lie in rows of D.
        block_table, query_start_loc, seq_lens: as for `block_mass`.
        rows: int32 [n], rows of the requests to decode. Each has one token.
        scale: factor on the scores before the softmax.
        output: [T, H, D], of the query's dtype. Other requests' rows keep their contents.
        out: float32 [R, Hkv or 1, Wout], as for `block_mass`; None: no mass.
        per_token: as for `block_mass`.
        weights: float32 [T], or None for ones. A token of weight 0 gets its output and adds no mass.
        layout: "vec" or "vec16".
        isa, soft_cap, sinks: as for `block_mass`.

    Raises:
        ValueError: a shape, stride, block id, length, layout or `isa` is wrong.
        TypeError: a dtype is unsupported.

    Bytes moved: each resident key and value of a row once, 2 * seq_len * Hkv * D * itemsize. Statistics take 8 bytes
    for each query head and tile of 8 to 32 tokens, and with `per_token` 4 bytes for each query head and token.
    """
    tensors = query, key_cache, value_cache, block_table, query_start_loc, seq_lens, rows
    if _C_cpu is None:
        options = {"weights": weights, "layout": layout, "soft_cap": soft_cap, "sinks": sinks}
        decode_mass_reference(*tensors, scale, output, out=out, per_token=per_token, **options)
    else:
        _C_cpu.decode_mass(*tensors, scale, output, out, per_token, weights, layout, isa, soft_cap, sinks)


def decode_classes(
    query: torch.Tensor,
    key_caches: Sequence[torch.Tensor],
    value_caches: Sequence[torch.Tensor],
    block_tables: Sequence[torch.Tensor],
    query_start_loc: torch.Tensor,
    seq_lens: Sequence[torch.Tensor],
    rows: torch.Tensor,
    scale: float,
    output: torch.Tensor,
    *,
    out: Sequence[torch.Tensor | None] | None = None,
    per_token: bool = False,
    weights: torch.Tensor | None = None,
    layout: str = "vec",
    isa: str | None = None,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """`decode_mass` in one call for a layer whose KV heads form classes, each with a block table of its own.

    Examples are the retrieval and streaming heads of DuoAttention. Threads share the work of all classes, so a short
    class leaves none idle. Output and mass are those of `decode_mass` on each class alone, to the bit.

    Args:
        query: [T, H, D] as for `decode_mass`. H = G * the sum of all classes' KV heads, in the order of classes.
        key_caches, value_caches: for each class [num_blocks, Hkv of the class, bs, D] as for `decode_mass`. Only D has
            to agree between classes.
        block_tables, seq_lens: for each class, as for `decode_mass`.
        query_start_loc, rows, scale, per_token, weights, layout, isa, soft_cap, sinks: as for `decode_mass`, shared by
            all classes.
        output: [T, H, D], of the query's dtype, heads as in `query`.
        out: for each class float32 [R, Hkv of the class or 1, Wout] or None; None: no mass.

    Raises and bytes moved: as `decode_mass`, for each class.
    """
    tensors = query, list(key_caches), list(value_caches), list(block_tables), query_start_loc, list(seq_lens), rows
    out = None if out is None else list(out)
    if _C_cpu is None:
        options = {"weights": weights, "layout": layout, "soft_cap": soft_cap, "sinks": sinks}
        decode_classes_reference(*tensors, scale, output, out=out, per_token=per_token, **options)
    else:
        _C_cpu.decode_classes(*tensors, scale, output, out, per_token, weights, layout, isa, soft_cap, sinks)


def decode_mass_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    output: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    per_token: bool = False,
    weights: torch.Tensor | None = None,
    layout: str = "vec",
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """`decode_mass` in plain torch, computed in float32 (float64 if `out` is)."""
    num_requests, num_kv_heads, block_size = len(seq_lens), key_cache.shape[1], key_cache.shape[2]
    width = block_table.shape[1] * (block_size if per_token else 1)
    mass = torch.zeros(num_requests, 1, width) if out is None else out
    _check(query, key_cache, block_table, query_start_loc, seq_lens, mass, per_token, weights, layout, soft_cap, sinks)
    readable = layout != "amx" and query.shape[2] % 16 == 0
    _require(readable, "decode_mass needs layout vec or vec16 and D a multiple of 16")
    if value_cache.dtype != key_cache.dtype or output.dtype != query.dtype:
        raise TypeError("value_cache must have key_cache's dtype, output that of query")
    group = query.shape[1] // num_kv_heads
    starts = query_start_loc.tolist()
    for row in rows.tolist():
        _require(starts[row + 1] - starts[row] == 1, "rows must be requests of one token")
        token, seq_len = starts[row], int(seq_lens[row])
        num_blocks = -(-seq_len // block_size)
        blocks = block_table[row, :num_blocks].long()
        keys = unpack_keys(key_cache[blocks], layout).transpose(0, 1).flatten(1, 2)[:, :seq_len].to(mass.dtype)
        values = value_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :seq_len].to(mass.dtype)
        heads = query[token].to(mass.dtype).view(num_kv_heads, group, -1)
        logits = soft_capped(heads @ keys.transpose(1, 2) * scale, soft_cap)
        own = None if sinks is None else sinks.view(num_kv_heads, group, 1)
        probs = probabilities(logits, own)  # [Hkv, group, seq_len]
        output[token] = (probs @ values).flatten(0, 1).to(output.dtype)
        weight = 1.0 if weights is None else float(weights[token])
        if out is not None and weight:
            more = probs.sum(1) * weight
            more = more if per_token else _per_block(more, block_size)
            out[row, :, : more.shape[1]] += more if out.shape[1] > 1 else more.sum(0)


def decode_classes_reference(
    query: torch.Tensor,
    key_caches: Sequence[torch.Tensor],
    value_caches: Sequence[torch.Tensor],
    block_tables: Sequence[torch.Tensor],
    query_start_loc: torch.Tensor,
    seq_lens: Sequence[torch.Tensor],
    rows: torch.Tensor,
    scale: float,
    output: torch.Tensor,
    *,
    out: Sequence[torch.Tensor | None] | None = None,
    per_token: bool = False,
    weights: torch.Tensor | None = None,
    layout: str = "vec",
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """`decode_classes` in plain torch: `decode_mass_reference` of each class's heads."""
    out = [None] * len(key_caches) if out is None else out
    _require(
        len({len(parts) for parts in (key_caches, value_caches, block_tables, seq_lens, out)}) == 1,
        "caches, block_tables, seq_lens and out must have one entry for each class",
    )
    kv_heads = [keys.shape[1] for keys in key_caches]
    heads = query.shape[1]
    _require(sum(kv_heads) > 0 and heads % sum(kv_heads) == 0, "query must have a multiple of all classes' KV heads")
    split = [count * heads // sum(kv_heads) for count in kv_heads]
    per_class = query.split(split, 1), key_caches, value_caches, block_tables, seq_lens, output.split(split, 1), out
    own = [None] * len(split) if sinks is None else sinks.split(split)
    for queries, keys, values, table, lens, outputs, mass, its in zip(*per_class, own):
        decode_mass_reference(
            *(queries, keys, values, table, query_start_loc, lens, rows, scale, outputs),
            out=mass,
            per_token=per_token,
            weights=weights,
            layout=layout,
            soft_cap=soft_cap,
            sinks=its,
        )
