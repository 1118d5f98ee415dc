"""The calls that `kernels.py` times, by kind of case, on caches that together exceed a GPU's L2."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from vllm_evict.compute.kernels.paged import DecodeShape, PagedAttention

# The calls of one graph use these caches in turn: together several times an H200's 50 MiB of L2.
LEAST_BYTES = 512 * 2**20
MAX_CACHES = 32
DTYPE = torch.bfloat16


class Variant(NamedTuple):
    """A timed variant: equal calls on different memory, the bytes that one call has to move, and its splits."""

    calls: list[Callable[[], object]]
    bytes: int
    splits: int = 0


class Case:
    """Requests of `tokens` tokens each, in caches that together exceed L2."""

    token_major = True

    def __init__(self, shape, tokens: int, device: str, kept: torch.dtype = DTYPE, parts: int = 2) -> None:
        """Args: kept: dtype of the caches. parts: 2 for keys and values, 1 for latents, which are both."""
        self.requests, self.heads, self.kv_heads, self.dim, self.block_size = shape
        self.tokens, self.device, self.scale, self.kept = tokens, device, self.dim**-0.5, kept
        self.width = -(-tokens // self.block_size)
        self.keys_bytes = self.requests * tokens * self.kv_heads * self.dim * kept.itemsize
        count = min(max(-(-LEAST_BYTES // (parts * self.keys_bytes)), 2), MAX_CACHES) if device == "cuda" else 1
        page = (self.requests * self.width, self.kv_heads, self.block_size, parts * self.dim)
        self.caches = [self.pages(*page) for _ in range(count)]
        self.table = torch.randperm(page[0], device=device).int().view(self.requests, self.width)
        self.starts, self.rows = self.ints(self.requests + 1), self.ints(self.requests)
        self.lens = torch.full_like(self.rows, tokens)

    def pages(self, blocks: int, kv_heads: int, block_size: int, width: int) -> torch.Tensor:
        """Return a random cache [blocks, kv_heads, block_size, width], in vLLM's order of a block's memory."""
        if self.token_major:
            return self.random(blocks, block_size, kv_heads, width).to(self.kept).transpose(1, 2)
        return self.random(blocks, kv_heads, block_size, width).to(self.kept)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=DTYPE, device=self.device)

    def ints(self, count: int) -> torch.Tensor:
        return torch.arange(count, dtype=torch.int32, device=self.device)

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=self.device)

    def attentions(self, query: torch.Tensor, **fields: Any) -> list[PagedAttention]:
        """Return the arguments of kernels, for each cache."""
        parts = (cache.split(self.dim, -1) for cache in self.caches)
        lists = self.table, self.starts, self.lens
        return [replace(PagedAttention(query, keys, *lists, self.scale, *values), **fields) for keys, *values in parts]

    def copy(self, moved: int) -> Variant:
        """A copy that moves this number of bytes: it reads half and writes half."""
        sources = [words[: max(moved // 16, 1)] for words in self.words()]
        pairs = [(torch.empty_like(source), source) for source in sources]
        return Variant([lambda pair=pair: pair[0].copy_(pair[1]) for pair in pairs], 2 * sources[0].nbytes)

    def read(self, moved: int) -> Variant:
        """A sum that reads this number of bytes."""
        sources = [words[: max(moved // 8, 1)] for words in self.words()]
        return Variant([source.sum for source in sources], sources[0].nbytes)

    def words(self) -> list[torch.Tensor]:
        """Return the caches as int64 words, in the order of memory."""
        return [
            (cache.transpose(1, 2) if self.token_major else cache).flatten().view(torch.int64) for cache in self.caches
        ]


#: Names of variants of the CUDA kernel.
IN_CUDA = "CUDA, "


def decode(case: Case) -> dict[str, Variant]:
    from vllm_evict.compute.kernels import decode_cuda
    from vllm_evict.triton_kernels.decode_mass import decode_mass, plan_decode
    from vllm_evict.triton_kernels.mass_from_lse import mass_from_lse
    from vllm_evict.triton_kernels.query_lse import query_lse

    query, lse = case.random(case.requests, case.heads, case.dim), case.zeros(case.requests, case.heads)
    output = torch.empty_like(query)
    shape = case.requests, case.heads, case.kv_heads, case.dim, case.block_size, case.width

    def run(mass=None, per_token=False):
        plan = plan_decode(DecodeShape(*shape, DTYPE, case.device), per_token=per_token)
        calls = [
            lambda its=its: decode_mass(its, case.rows, output, lse=lse, plan=plan)
            for its in case.attentions(query, mass=mass, per_token=per_token)
        ]
        return Variant(calls, 2 * case.keys_bytes, plan.splits)

    def beside(kernel, mass=None):
        calls = [lambda its=its: kernel(its) for its in case.attentions(query, mass=mass)]
        return Variant(calls, case.keys_bytes)

    def in_cuda(bulk, mass=None):
        plan = decode_cuda.plan_decode(DecodeShape(*shape, DTYPE, case.device), bulk=bulk)
        calls = [
            lambda its=its: decode_cuda.decode_mass(its, case.rows, output, lse=lse, plan=plan)
            for its in case.attentions(query, mass=mass)
        ]
        return Variant(calls, 2 * case.keys_bytes)

    blocks, tokens = (case.zeros(case.requests, case.kv_heads, count) for count in (case.width, case.tokens))
    variants = {}
    if decode_cuda.missing() is None and decode_cuda.refused(case.attentions(query)[0]) is None:
        ways = {"cp.async": False, "bulk": True}
        if torch.cuda.get_device_capability() < decode_cuda.BULK_CAPABILITY:
            del ways["bulk"]
        for way, bulk in ways.items():
            variants |= {f"{IN_CUDA}{way}": in_cuda(bulk), f"{IN_CUDA}{way}, of blocks": in_cuda(bulk, blocks)}
    return variants | {
        "copy": case.copy(2 * case.keys_bytes),
        "read": case.read(2 * case.keys_bytes),
        "decode": run(),
        "of blocks": run(blocks),
        "of tokens": run(tokens, True),
        "query_lse": beside(lambda its: query_lse(its, lse, longest=1)),
        "mass_from_lse": beside(lambda its: mass_from_lse(its, lse), blocks),
    }


def chunk(case: Case, queries: int) -> dict[str, Variant]:
    from vllm_evict.triton_kernels.mass_from_lse import mass_from_lse
    from vllm_evict.triton_kernels.query_lse import query_lse

    query, lse = (
        case.random(case.requests * queries, case.heads, case.dim),
        case.zeros(case.requests * queries, case.heads),
    )
    starts = case.starts * queries
    blocks, tokens = (case.zeros(case.requests, case.kv_heads, count) for count in (case.width, case.tokens))

    def variant(kernel, **measured):
        attentions = case.attentions(query, query_start_loc=starts, **measured)
        return Variant([lambda its=its: kernel(its) for its in attentions], case.keys_bytes)

    def mass(out, per_token):
        return variant(lambda its: mass_from_lse(its, lse), mass=out, per_token=per_token)

    return {
        "copy": case.copy(case.keys_bytes),
        "query_lse": variant(lambda its: query_lse(its, lse, longest=queries)),
        "of blocks": mass(blocks, False),
        "of tokens": mass(tokens, True),
    }


def latents(case: Case) -> dict[str, Variant]:
    """Return the calls that measure mass beside a backend's kernel. Each has to read the latents once.

    `query_lse` is timed with the sum of its splits.
    """
    from vllm_evict.compute.attention.latent_device import DeviceLatentOps
    from vllm_evict.triton_kernels.mass_from_lse import mass_from_lse

    query, lse = case.random(case.requests, case.heads, case.dim), case.zeros(case.requests, case.heads)
    its, lse_of = case.attentions(query, mass=case.zeros(case.requests, 1, case.width)), DeviceLatentOps()._lse_of
    return {
        "copy": case.copy(case.keys_bytes),
        "query_lse": Variant([partial(lse_of, it, 1) for it in its], case.keys_bytes),
        "mass_from_lse": Variant([partial(mass_from_lse, it, lse) for it in its], case.keys_bytes),
    }


def classes(long: Case, short: Case) -> dict[str, Variant]:
    """Each has half of the KV heads."""
    from vllm_evict.triton_kernels.decode_classes import decode_classes, plan_classes
    from vllm_evict.triton_kernels.decode_mass import decode_mass, plan_decode

    both = long, short
    query = long.random(long.requests, 2 * long.heads, long.dim)
    output, outs = torch.empty_like(query), [case.zeros(case.requests, case.kv_heads, case.width) for case in both]
    shape = long.dim, long.block_size
    shapes = [
        DecodeShape(case.requests, case.heads, case.kv_heads, *shape, case.width, DTYPE, case.device) for case in both
    ]
    plans, alone = plan_classes(shapes), [plan_decode(each) for each in shapes]
    parts, attended = query.split(long.heads, 1), output.split(long.heads, 1)
    of_long, of_short = (case.attentions(its, mass=out) for case, its, out in zip(both, parts, outs))
    pairs = list(zip(of_long, itertools.cycle(of_short)))

    def together(pair):
        return lambda: decode_classes(pair, long.rows, attended, plans=plans)

    def in_turn(pair):
        def run():
            for case, its, written, plan in zip(both, pair, attended, alone):
                decode_mass(its, case.rows, written, plan=plan)

        return run

    moved = sum(2 * case.keys_bytes for case in both)
    return {
        "copy": long.copy(moved),
        "together": Variant([together(pair) for pair in pairs], moved),
        "in turn": Variant([in_turn(pair) for pair in pairs], moved),
    }


def moves(case: Case, least: int, most: int) -> dict[str, Variant]:
    """Move half of one request's tokens, different ones in each layer and head, into new blocks."""
    from vllm_evict.triton_kernels.compact import compact, plan_compact

    kept = case.tokens // 2
    targets = -(-kept // case.block_size)
    page = (case.width + targets, case.kv_heads, case.block_size, 2 * case.dim)
    layers = min(max(least, -(-LEAST_BYTES // (math.prod(page) * DTYPE.itemsize))), most)
    caches = [case.pages(*page) for _ in range(layers)]
    ids = torch.randperm(page[0], device=case.device).int()
    source, target = ids[: case.width].contiguous(), ids[case.width :].contiguous()
    order = torch.rand(layers, case.kv_heads, case.tokens, device=case.device).argsort(-1)
    keep = order[..., :kept].sort(-1).values.int()
    plan = plan_compact(caches)
    words = layers * case.kv_heads * kept * 2 * case.dim * DTYPE.itemsize // 4
    scratch = torch.empty(words, dtype=torch.int32, device=case.device)
    # Several pairs in turn, as few layers of a short request fit into L2.
    pairs = min(-(-LEAST_BYTES // (2 * scratch.nbytes)), MAX_CACHES) if case.device == "cuda" else 1
    copies = [(torch.empty_like(scratch), torch.empty_like(scratch)) for _ in range(pairs)]

    def variant(**options):
        return Variant([lambda: compact(caches, source, keep, target, plan=plan, **options)], 2 * scratch.nbytes)

    return {
        "copy": Variant([partial(to.copy_, its) for its, to in copies], 2 * scratch.nbytes),
        "ordered": variant(ordered=True),
        "through scratch": variant(scratch=scratch),
    }


def choices(case: Case) -> dict[str, Variant]:
    """Choose an eighth of the blocks, which are all on the device, and attend to them."""
    from vllm_evict.compute.kernels.reach import OF_ROWS, ReachRows, ReachState
    from vllm_evict.compute.kernels.signs import key_signs
    from vllm_evict.triton_kernels.decode_mass import decode_mass, plan_decode
    from vllm_evict.triton_kernels.reach import reach

    count, width, read = case.requests, case.width, max(case.width // 8, 4)
    query, output = case.random(count, case.heads, case.dim), case.random(count, case.heads, case.dim)
    keys = key_signs(case.random(64, case.kv_heads, case.block_size, case.dim))
    indices = [keys[torch.randint(64, (count * width,), device=case.device)] for _ in range(2)]
    known = torch.zeros((len(OF_ROWS), -(-count // 4) * 4), dtype=torch.int32, device=case.device)
    for number, value in enumerate((0, 1, width - 1, width, 1, width - 1, read - 2, 0, 0, 0, 1)):
        known[number] = value
    for number in (0, 8, 9):  # the query, slot and row of each request
        known[number] = case.ints(known.shape[1])
    rows = ReachRows(*known[:, :count].unbind(), case.table, count * width)
    nothing = [torch.full((count, width), -1, dtype=torch.int32, device=case.device) for _ in range(4)]
    state = *nothing, case.zeros(count, width), case.zeros(count, 3).int()
    table, lens = torch.zeros_like(case.table), torch.full_like(case.lens, read * case.block_size)
    shape = count, case.heads, case.kv_heads, case.dim, case.block_size
    of_all, of_best = (plan_decode(DecodeShape(*shape, blocks, DTYPE, case.device)) for blocks in (width, read))

    def choose(cache, index):
        its = ReachState(index, *state, case.scale)
        reach(rows, its, query, cache, cache[:0].contiguous(), table, step=1)

    def attend(its, plan):
        decode_mass(its, case.rows, output, plan=plan)

    def both(cache, index, its):
        choose(cache, index)
        attend(replace(its, block_table=table[:, :read], seq_lens=lens), of_best)

    its = case.attentions(query)
    pairs = [(cache, indices[number % 2]) for number, cache in enumerate(case.caches)]
    moved, of_index = 2 * case.keys_bytes, indices[0].nbytes
    return {
        "copy": case.copy(moved),
        "attend to all": Variant([partial(attend, each, of_all) for each in its], moved),
        "choose": Variant([partial(choose, *pair) for pair in pairs], of_index),
        "choose and attend": Variant(
            [partial(both, *pair, each) for pair, each in zip(pairs, its)], of_index + moved * read // width
        ),
    }


def tiles(case: Case, queries: int) -> dict[str, Variant]:
    """Choose an eighth of the blocks for each 32 queries of a chunk, beside the products of queries and keys alone."""
    from vllm_evict.compute.kernels.bounds import key_bounds
    from vllm_evict.compute.kernels.reach import OF_ROWS, ReachRows, ReachState
    from vllm_evict.compute.kernels.signs import key_signs
    from vllm_evict.config.sizes import TILE
    from vllm_evict.triton_kernels.reach import reach

    size, count = min(TILE, queries), max(queries // TILE, 1)
    query, read = case.random(queries, case.heads, case.dim), max(case.width // 8, 4)
    known = torch.zeros((len(OF_ROWS), -(-count // 4) * 4), dtype=torch.int32, device=case.device)
    numbers = case.ints(known.shape[1])
    full = (case.tokens - queries + size * numbers) // case.block_size
    each = size * numbers, size, full, full + -(-size // case.block_size), 1, full, read - 2, 0, numbers, numbers, 1
    for number, value in enumerate(each):
        known[number] = value
    written = case.table[:1].expand(count, -1).contiguous()
    rows = ReachRows(*known[:, :count].unbind(), written, case.width, most=size)
    nothing = [torch.full((count, case.width), -1, dtype=torch.int32, device=case.device) for _ in range(4)]
    state, table = (*nothing, case.zeros(count, case.width), case.zeros(count, 3).int()), torch.zeros_like(written)
    keys = case.random(case.width, case.kv_heads, case.block_size, case.dim)

    def choose(index):
        cache = case.caches[0]
        its = ReachState(index, *state, case.scale)
        reach(rows, its, query, cache, cache[:0].contiguous(), table, step=1)

    of_keys = {"by signs": key_signs(keys), "by boxes": key_bounds(keys)}
    made = {name: Variant([partial(choose, index)], index.nbytes) for name, index in of_keys.items()}
    return {"query_lse": chunk(case, queries)["query_lse"]} | made


def fetches(case: Case) -> dict[str, Variant]:
    """Copy an eighth of the blocks between pinned memory and the cache, in each direction."""
    from vllm_evict.compute.pinned import pinned
    from vllm_evict.triton_kernels.reach import copy_blocks

    cache, count = case.caches[0], max(case.requests * case.width // 8, 1)
    shape = count, *cache.shape[1:]
    host = pinned(shape, cache.dtype) if case.device == "cuda" else torch.zeros(shape, dtype=cache.dtype)
    dense = torch.zeros(shape, dtype=cache.dtype, device=case.device)
    there, here = (torch.randperm(of, device=case.device)[:count].int() for of in (len(cache), count))
    return {
        "copy": case.copy(2 * host.nbytes),
        "to the device": Variant([lambda: copy_blocks(cache, host, there, here)], host.nbytes),
        "to the host": Variant([lambda: copy_blocks(host, cache, here, there)], host.nbytes),
        "by CUDA, to the device": Variant([lambda: dense.copy_(host, non_blocking=True)], host.nbytes),
        "by CUDA, to the host": Variant([lambda: host.copy_(dense, non_blocking=True)], host.nbytes),
    }
