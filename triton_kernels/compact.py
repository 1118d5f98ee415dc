"""Compaction for all layers of a KV group in one launch."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from ..compute.kernels.compact import requests_of
from ..compute.transfer import to_device
from .tiles import check_int32, require

WORD = 4  # bytes
# Bytes that a program reads before it writes: 32 registers of each thread.
CHUNK_BYTES = 32 * 1024
WARPS = 8
# Scratch that is allocated if none is given, or that of one layer if it takes more.
SCRATCH_BYTES = 64 * 2**20


class CompactPlan(NamedTuple):
    """Addresses of the caches of a group's layers, which must not move afterwards.

    Attributes:
        pages: int64 [L], addresses, on the device.
        shape: shape of each cache, [num_blocks, Hkv, bs, C].
        words: words of 4 bytes in a token's row.
        strides: strides of blocks, heads and tokens, in words.
        aligned: whether rows begin at multiples of 16 bytes.
    """

    pages: torch.Tensor
    shape: torch.Size
    words: int
    strides: tuple[int, int, int]
    aligned: bool


def plan_compact(caches: Sequence[torch.Tensor]) -> CompactPlan:
    """Make a plan for L caches [num_blocks, Hkv, bs, C] of one shape, dtype and strides."""
    require(len(caches) > 0, "caches must hold at least one layer")
    one = caches[0]
    like = [cache.dtype == one.dtype and cache.shape == one.shape for cache in caches]
    require(
        one.dim() == 4 and one.stride(3) == 1 and all(like), "caches must be [num_blocks, Hkv, bs, C], C contiguous"
    )
    require(all(cache.stride() == one.stride() for cache in caches), "caches must have the same strides")
    row, *strides = (count * one.element_size() for count in (one.shape[3], *one.stride()[:3]))
    places = [row, *strides, *(cache.data_ptr() for cache in caches)]
    require(all(place % WORD == 0 for place in places), "rows of caches must be whole words of 4 bytes")
    pages = to_device(np.array([cache.data_ptr() for cache in caches], np.int64), one.device)
    aligned = all(place % 16 == 0 for place in places[1:])
    return CompactPlan(pages, one.shape, row // WORD, tuple(stride // WORD for stride in strides), aligned)


def compact(
    caches: Sequence[torch.Tensor],
    source: torch.Tensor,
    keep: torch.Tensor,
    target: torch.Tensor,
    starts: torch.Tensor | None = None,
    *,
    ordered: bool = False,
    scratch: torch.Tensor | None = None,
    plan: CompactPlan | None = None,
) -> None:
    """`compute.kernels.compact.compact` on caches with strides in place of packings, on a device.

    With `ordered` it is one launch, with a program for each request, layer and head. A program goes through the slots
    in ascending order and reads each chunk before it writes the chunk. Without `ordered` tokens go through scratch
    memory, some layers at a time, in two launches each time.

    With a plan, and `ordered` or scratch, it allocates nothing and reads nothing on the host.

    Args:
        caches: L tensors [num_blocks, Hkv, bs, C], one for each layer, of one shape, dtype and strides; C contiguous,
            a token's keys and values. C and all strides are multiples of 4 bytes.
        source, keep, target, starts: as for `compute.kernels.compact.compact`, on the device; rows of `starts` dense.
        ordered: whether `compute.kernels.compact.is_ordered` holds for each request. Not checked.
        scratch: int32, dense, of at least Hkv * kept * C * itemsize / 4 elements. The more layers fit, the fewer
            launches. None allocates, unless `ordered`.
        plan: from `plan_compact(caches)`; None makes one.

    Bytes moved: 2 * L * Hkv * kept * C * itemsize, read and written, twice that without `ordered`; beside them 8 for
    each token of a layer and head.
    """
    plan = plan_compact(caches) if plan is None else plan
    require(len(caches) == len(plan.pages) and caches[0].shape == plan.shape, "plan must be for these caches")
    check_int32(source=source, keep=keep, target=target)
    layers, kv_heads, kept = len(caches), plan.shape[1], keep.shape[-1]
    require(
        keep.dim() == 3 and len(keep) in (1, layers) and keep.shape[1] == kv_heads and keep.stride(2) == 1,
        "keep must be [L or 1, Hkv, kept] with dense rows",
    )
    require(source.is_contiguous() and target.is_contiguous(), "source and target must be dense")
    if starts is not None:
        check_int32(starts=starts)
        require(starts.dim() == 2 and len(starts) == 3 and starts.stride(1) == 1, "starts must be [3, R + 1]")
    requests = 1 if starts is None else starts.shape[1] - 1
    if not requests or not kept:
        return
    dim = triton.next_power_of_2(plan.words)
    chunk = max(CHUNK_BYTES // (WORD * dim), 1)
    tensors = plan.pages, source, keep, target, starts
    strides = (
        kept, kv_heads, keep.stride(0) if len(keep) > 1 else 0, keep.stride(1),
        0 if starts is None else starts.stride(0), *plan.strides,
    )  # fmt: skip
    options = {"BLOCK_SIZE": plan.shape[2], "WORDS": plan.words, "DIM": dim, "CHUNK": chunk, "num_warps": WARPS}
    if ordered:
        _compact[(layers * kv_heads, 1, requests)](
            *tensors, plan.pages, 0, *strides, FROM_CACHE=True, TO_CACHE=True, ALIGNED=plan.aligned, **options
        )
        return
    layer_words = kv_heads * kept * plan.words
    if scratch is None:
        at_once = min(max(SCRATCH_BYTES // (WORD * layer_words), 1), layers)
        scratch = torch.empty(at_once * layer_words, dtype=torch.int32, device=keep.device)
    check_int32(scratch=scratch)
    at_once = scratch.numel() // layer_words
    require(scratch.is_contiguous() and at_once > 0, "scratch must be dense and hold one layer's tokens")
    for first in range(0, layers, at_once):
        grid = min(at_once, layers - first) * kv_heads, triton.cdiv(kept, chunk), requests
        for out in (True, False):
            _compact[grid](
                *tensors, scratch, first, *strides, FROM_CACHE=out, TO_CACHE=not out, ALIGNED=plan.aligned, **options
            )


# Not specialised for the tokens of a request (see `decode_mass.ATTEND_SIZES`).
@triton.jit(do_not_specialize=["first_layer", "all_kept", "stride_kl", "stride_kh"])
def _compact(
    pages, source, keep, target, starts, scratch, first_layer, all_kept, kv_heads, stride_kl, stride_kh, stride_starts,
    stride_b, stride_h, stride_n,
    FROM_CACHE: tl.constexpr, TO_CACHE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WORDS: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Copy chunks of one request's tokens in one layer and head, from cache or scratch to scratch or cache."""
    unit = tl.program_id(0).to(tl.int64)
    request = tl.program_id(2)
    layer = first_layer + unit // kv_heads
    head = unit % kv_heads
    first = 0
    kept = all_kept
    if starts is not None:
        source += tl.load(starts + request)
        target += tl.load(starts + 2 * stride_starts + request)
        first = tl.load(starts + stride_starts + request)
        kept = tl.load(starts + stride_starts + request + 1) - first
    keep += layer * stride_kl + head * stride_kh + first
    cache = tl.load(pages + layer).to(tl.pointer_type(tl.int32)) + head * stride_h
    if ALIGNED:
        cache = tl.multiple_of(cache, 16)
    aside = scratch + (unit * all_kept + first) * WORDS
    word = tl.arange(0, DIM)
    # If tokens move within the cache, one program goes through all chunks. Otherwise each program has one chunk.
    for start in range(tl.program_id(1) * CHUNK, kept, tl.num_programs(1) * CHUNK):
        slot = start + tl.arange(0, CHUNK)
        there = (slot < kept)[:, None] & (word < WORDS)[None, :]
        if FROM_CACHE:
            token = tl.load(keep + slot, mask=slot < kept, other=0)
            block = tl.load(source + token // BLOCK_SIZE, mask=slot < kept, other=0).to(tl.int64)
            at = cache + block * stride_b + token % BLOCK_SIZE * stride_n
        else:
            at = aside + slot * WORDS
        held = tl.load(at[:, None] + word[None, :], mask=there, other=0)
        if FROM_CACHE and TO_CACHE:
            tl.debug_barrier()  # all threads read this chunk before any thread writes it
        if TO_CACHE:
            block = tl.load(target + slot // BLOCK_SIZE, mask=slot < kept, other=0).to(tl.int64)
            to = cache + block * stride_b + slot % BLOCK_SIZE * stride_n
        else:
            to = aside + slot * WORDS
        tl.store(to[:, None] + word[None, :], held, mask=there)


def compact_reference(
    caches: Sequence[torch.Tensor],
    source: torch.Tensor,
    keep: torch.Tensor,
    target: torch.Tensor,
    starts: torch.Tensor | None = None,
) -> None:
    """`compact` in plain torch."""
    _, kv_heads, block_size, _ = caches[0].shape
    heads = torch.arange(kv_heads, device=keep.device)[:, None]
    for blocks, tokens, targets in requests_of(source, keep, target, starts):
        slots = torch.arange(tokens.shape[2], device=keep.device)
        for layer, cache in enumerate(caches):
            rows = cache.view(torch.uint8)
            kept = tokens[layer if len(tokens) > 1 else 0].long()
            held = rows[blocks[kept // block_size].long(), heads, kept % block_size]  # a copy, as blocks may overlap
            rows[targets[slots // block_size].long(), heads, slots % block_size] = held
