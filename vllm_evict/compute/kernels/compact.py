"""Compaction: gathers the kept tokens of each KV head into fewer blocks."""

from collections.abc import Sequence

import torch

from .mass import AMX_DIMS, AMX_TOKENS, _C_cpu

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # bytes of an element -> dtype of its copy


def compact(
    caches: Sequence[torch.Tensor],
    source: torch.Tensor,
    keep: torch.Tensor,
    target: torch.Tensor,
    starts: torch.Tensor | None = None,
    *,
    layout: str = "vec",
    isa: str | None = None,
) -> None:
    """Copy the kept tokens of each layer and KV head, keys and values, into the first slots of other blocks.

    Slot j of a request is the j-th token in its blocks of `target`. It gets the bytes of token ``keep[layer, head, j]``
    of `source`. Slots behind the last kept token keep their contents, and so do blocks that are only in `source`.

    A block may be in `source` and `target` of one request. If the index of each such block in `source` is at or before
    its index in `target` (`is_ordered`), tokens move directly: kept tokens ascend, so token ``keep[j] >= j`` is read
    before slot j is written. Otherwise each head's tokens go through scratch memory, which moves twice the bytes.

    Args:
        caches: L tensors [num_blocks, Hkv, 2 * bs, D] on the CPU, one for each layer, keys before values, packed as
            `layout` says. One shape, one dtype of 1, 2 or 4 bytes; blocks and heads may lie anywhere (strides 0 and 1).
        source: int32 [n], physical blocks of each request in logical order. Requests may share them.
        keep: int32 [L or 1, Hkv, kept], ascending places of tokens among the n * bs of their request's source; 1: the
            same in all layers. Last dimension contiguous.
        target: int32 [m], physical blocks, m * bs >= kept for each request. Each block once. No block may be a source
            of another request, in this call or elsewhere, since its readers would find the moved tokens.
        starts: int32 [3, R + 1], offsets of R requests in `source`, in the last dimension of `keep`, and in `target`;
            None for one request.
        layout: "vec", "vec16" or "amx" (bfloat16 or 1 byte), as for `block_mass`.
        isa: "avx512" (needs VBMI2) or "portable" to force a kernel; None takes the fastest on this CPU.

    Raises:
        ValueError: a shape, stride, offset, block id, token, layout or `isa` is wrong. Nothing is written then.
        TypeError: a dtype is unsupported.

    Bytes moved: 2 * L * Hkv * kept * 2 * D * itemsize, read and written. Keys are read in whole lines of a block, even
    if few of its tokens stay. Scratch: 2 * m * bs * D * itemsize for each thread.
    """
    if _C_cpu is None:
        compact_reference(caches, source, keep, target, starts, layout=layout)
    else:
        _C_cpu.compact(list(caches), source, keep, target, starts, layout, isa)


def compact_reference(
    caches: Sequence[torch.Tensor],
    source: torch.Tensor,
    keep: torch.Tensor,
    target: torch.Tensor,
    starts: torch.Tensor | None = None,
    *,
    layout: str = "vec",
) -> None:
    """`compact` in plain torch. Arguments are not checked."""
    _, kv_heads, rows, dim = caches[0].shape
    block_size = rows // 2
    places = _places(block_size, dim, layout)
    for blocks, tokens, targets in requests_of(source, keep, target, starts):
        slots = torch.arange(tokens.shape[2])
        for layer, cache in enumerate(caches):
            cache = cache.view(WORDS[cache.element_size()])
            for head in range(kv_heads):
                kept = tokens[layer if len(tokens) > 1 else 0, head].long()
                held = cache[blocks.long(), head].flatten(1)  # a copy, since source and target may overlap
                page = cache[targets.long(), head].flatten(1)
                moved = held[kept[:, None] // block_size, places[kept % block_size]]
                page[slots[:, None] // block_size, places[slots % block_size]] = moved
                cache[targets.long(), head] = page.view(len(targets), rows, dim)


def is_ordered(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Return whether tokens of one request can move directly: see `compact`. source, target: ints [n] and [m]."""
    places = {block: place for place, block in enumerate(source.tolist())}
    return all(places.get(block, 0) <= place for place, block in enumerate(target.tolist()))


def _places(block_size: int, dim: int, layout: str) -> torch.Tensor:
    """Return the offsets of each token's key and value elements in a block and head: int64 [bs, 2 * D]."""
    token, element = torch.arange(block_size)[:, None], torch.arange(dim)[None, :]
    keys, values = element * block_size + token, token * dim + element
    if layout == "amx":
        keys = token // AMX_TOKENS * AMX_TOKENS * dim + element // 2 * 2 * AMX_TOKENS + token % AMX_TOKENS * 2
        keys = keys + element % 2
        values = element // AMX_DIMS * AMX_DIMS * block_size + token // 2 * 2 * AMX_DIMS + element % AMX_DIMS * 2
        values = values + token % 2
    return torch.cat((keys, block_size * dim + values), 1)


def requests_of(source, keep, target, starts):
    """Split `source`, `keep` and `target` by request."""
    if starts is None:
        return [(source, keep, target)]
    parts = (tensor.split(row.diff().tolist(), -1) for tensor, row in zip((source, keep, target), starts))
    return list(zip(*parts))
