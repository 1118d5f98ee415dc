"""Attention that also computes the attention mass of each block or token, from one read of keys and values.

It applies the identity of `mass` to each tile of keys. This is the contract of all decode kernels: C++ runs here, for
decodes and prompts, and `triton_kernels.decode_mass` and `decode_cuda` document their differences.
"""

from collections.abc import Sequence

import torch

from .logits import probabilities, soft_capped
from .mass import _C_cpu, per_block, unpack_keys, unpack_values
from .paged import PagedAttention


def decode_mass(attention: PagedAttention, rows: torch.Tensor, output: torch.Tensor, *, isa: str | None = None) -> None:
    """Attend for some requests of a batch: write `output`, and add the mass of their queries to `attention.mass`.

    A request's output depends on nothing but its own queries, keys and values, to the bit, for any batch and number of
    threads. Keys of a request with one token are read in pieces of 512 tokens, which are combined in order. Keys of
    others are read in order, once for each 64 query rows that share a KV head. A NaN key makes the output and the mass
    of query heads that see it NaN.

    Args:
        attention: on the CPU, D a multiple of 16. A token of weight 0 gets its output.
        rows: int32 [n], rows of the requests to attend for. Each may have any number of tokens.
        output: [T, H, D], of the query's dtype. Other requests' rows keep their contents.
        isa: as for `block_mass`.

    Raises:
        ValueError: a shape, stride, block id, length, layout or `isa` is wrong.
        TypeError: a dtype is unsupported.

    Bytes moved by a decode: each resident key and value of a row once, 2 * seq_len * Hkv * D * itemsize. Statistics
    take 8 bytes for each query head and tile of 8 to 32 tokens, and with `per_token` 4 bytes for each query head and
    token.
    """
    decode_classes([attention], rows, [output], isa=isa)


def decode_classes(
    classes: Sequence[PagedAttention],
    rows: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    *,
    isa: str | None = None,
) -> None:
    """`decode_mass` in one call for a layer whose KV heads form classes, each with a block table of its own.

    Examples are the retrieval and streaming heads of DuoAttention. Threads share the work of all classes, so a short
    class leaves none idle. Output and mass are those of `decode_mass` on each class alone, to the bit.

    Args:
        classes: of each class its heads, their keys and values, block table, lengths and mass. The class's query may be
            a slice of heads of the layer's. Offsets of queries agree between classes.
        rows: as for `decode_mass`, shared by all classes.
        outputs: for each class [T, H of the class, D], of the query's dtype.
        isa: as for `block_mass`.

    Raises and bytes moved: as `decode_mass`, for each class.
    """
    if _C_cpu is None:
        decode_classes_reference(classes, rows, outputs)
    else:
        _C_cpu.decode_classes(list(classes), rows, list(outputs), isa)


def decode_mass_reference(attention: PagedAttention, rows: torch.Tensor, output: torch.Tensor) -> None:
    """`decode_mass` in plain torch, computed in float32 (float64 if the mass is). Arguments are not checked."""
    query, mass, weights, sinks = attention.query, attention.mass, attention.weights, attention.sinks
    value_cache = attention.value_cache
    assert value_cache is not None, "decode_mass needs value_cache"
    dtype = torch.float32 if mass is None else mass.dtype
    num_kv_heads, block_size = attention.key_cache.shape[1:3]
    starts = attention.query_start_loc.tolist()
    for row in rows.tolist():
        tokens, seq_len = torch.arange(starts[row], starts[row + 1]), int(attention.seq_lens[row])
        hidden = torch.arange(seq_len) > (seq_len - starts[row + 1] + tokens)[:, None]
        blocks = attention.block_table[row, : -(-seq_len // block_size)].long()
        keys = unpack_keys(attention.key_cache[blocks], attention.layout)
        values = unpack_values(value_cache[blocks], attention.layout)
        keys, values = (each.transpose(0, 1).flatten(1, 2)[:, None, :seq_len].to(dtype) for each in (keys, values))
        heads = query[tokens].to(dtype).unflatten(1, (num_kv_heads, -1)).movedim(0, 2)  # [Hkv, group, n, D]
        logits = soft_capped(heads @ keys.transpose(2, 3) * attention.scale, attention.soft_cap)
        own = None if sinks is None else sinks.view(num_kv_heads, attention.group, 1, 1)
        probs = probabilities(logits.masked_fill(hidden, -torch.inf), own)  # [Hkv, group, n, seq_len]
        output[tokens] = (probs @ values * attention.value_scale).movedim(2, 0).flatten(1, 2).to(output.dtype)
        weight = torch.ones(len(tokens), dtype=dtype) if weights is None else weights[tokens].to(dtype)
        if mass is not None and len(counted := weight.nonzero()[:, 0]):
            more = (probs[:, :, counted] * weight[counted, None]).sum((1, 2))
            more = more if attention.per_token else per_block(more, block_size)
            mass[row, :, : more.shape[1]] += more if mass.shape[1] > 1 else more.sum(0)


def decode_classes_reference(
    classes: Sequence[PagedAttention], rows: torch.Tensor, outputs: Sequence[torch.Tensor]
) -> None:
    """`decode_classes` in plain torch: `decode_mass_reference` of each class's heads."""
    for attention, output in zip(classes, outputs, strict=True):
        decode_mass_reference(attention, rows, output)
