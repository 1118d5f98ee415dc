"""Times the Triton kernels on a GPU, each beside a device-to-device copy of the same run.

    python benchmarks/gpu/kernels.py [--tokens 8192] [--rounds 5] [--json FILE]
    TRITON_INTERPRET=1 python benchmarks/gpu/kernels.py --dry-run

Each round times all variants of a case one after the other, as replays of CUDA graphs over caches larger than L2, so
that a round's ratios share its clocks. Caches are token-major, as FlashAttention's and Triton's in vLLM, or head-major
with --head-major. A copy of N bytes moves 2 N bytes, each call into a target of its own. A kernel's bytes are the bytes
that it has to move, and "of a copy" is its bandwidth over the copy's. `read` adds up all words, since kernels of
attention write almost nothing.

decode: `decode_mass` without mass, with mass of blocks and of tokens; beside a kernel of vLLM's, `query_lse` and
`mass_from_lse` (half the bytes: keys). Where vllm_evict._C_cuda is built, its `decode_mass` too, with bulk copies and
with cp.async. fp8: the same over caches in fp8, with queries in bfloat16. latents: the two passes beside an MLA
backend's kernel. chunk: `query_lse` and `mass_from_lse` for 2,048 queries, in TFLOP/s, because compute bounds them.
classes: `decode_classes` of half the KV heads with all tokens and half with 384, and `decode_mass` of each in turn.
reach: what a layer of a decode does that reads an eighth of its blocks by signs of keys: choose, and attend to these;
beside the attention to all. tiles: the choices of a layer for a chunk of 2,048 queries in tiles of 32, by signs and by
boxes, in TFLOP/s of the products of queries and keys, which `query_lse` computes. fetch: blocks that a layer copies
from pinned host memory, and back, beside copies by CUDA.
compact: a request of 8 to 32 layers whose heads keep half of its tokens each, in one launch and through scratch.

Without a GPU it prints a line and exits with status 0. --dry-run measures nothing: each variant runs once, on tiny
shapes, under Triton's interpreter too.
"""

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

sys.path += [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from machine import the_gpu
from reports import command, to_json

from vllm_evict.compute.kernels.paged import PagedAttention

SHAPES = [  # requests, query heads, KV heads, head size, block size
    (1, 32, 8, 128, 16),
    (16, 32, 8, 128, 16),
    (64, 32, 8, 128, 16),
    (64, 32, 8, 128, 128),
    (64, 28, 4, 128, 16),
    (16, 32, 32, 128, 16),
    (16, 16, 1, 256, 16),
]
CLASSES = [(1, 32, 8, 128, 16), (16, 32, 8, 128, 16), (64, 32, 8, 128, 16)]
CHUNKS = [(1, 32, 8, 128, 16), (1, 28, 4, 128, 16)]
FP8 = [(1, 32, 8, 128, 16), (64, 32, 8, 128, 16), (16, 32, 32, 128, 16)]
LATENTS = [(1, 128, 1, 576, 64), (64, 128, 1, 576, 64), (64, 16, 1, 576, 64)]
TINY = [(2, 4, 2, 32, 16)]
TINY_LATENTS = [(2, 4, 1, 288, 16)]
SHORT, CHUNK, LAYERS = 384, 2048, (8, 32)
# The calls of one graph use these caches in turn: together several times an H200's 50 MiB of L2.
LEAST_BYTES = 512 * 2**20
MAX_CACHES = 32
REPLAYS = 20
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
        plan = plan_decode(*shape, DTYPE, case.device, per_token=per_token)
        calls = [
            lambda its=its: decode_mass(its, case.rows, output, lse=lse, plan=plan)
            for its in case.attentions(query, mass=mass, per_token=per_token)
        ]
        return Variant(calls, 2 * case.keys_bytes, plan.splits)

    def beside(kernel, mass=None):
        calls = [lambda its=its: kernel(its) for its in case.attentions(query, mass=mass)]
        return Variant(calls, case.keys_bytes)

    def in_cuda(bulk, mass=None):
        plan = decode_cuda.plan_decode(*shape, DTYPE, case.device, bulk=bulk)
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
    """What measures mass beside a backend's kernel. Each has to read the latents once.

    `query_lse` is timed with the sum of its splits.
    """
    from vllm_evict.compute.attention.latent import DeviceLatentOps
    from vllm_evict.triton_kernels.mass_from_lse import mass_from_lse

    query, lse = case.random(case.requests, case.heads, case.dim), case.zeros(case.requests, case.heads)
    its, lse_of = case.attentions(query, mass=case.zeros(case.requests, 1, case.width)), DeviceLatentOps().lse_of
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
    group, kv_heads = long.heads // long.kv_heads, [case.kv_heads for case in both]
    plans = plan_classes(long.requests, group, kv_heads, *shape, [case.width for case in both], DTYPE, long.device)
    alone = [
        plan_decode(case.requests, case.heads, case.kv_heads, *shape, case.width, DTYPE, case.device) for case in both
    ]
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
    from vllm_evict.compute.kernels.reach import OF_ROWS, ReachRows
    from vllm_evict.compute.kernels.signs import key_signs
    from vllm_evict.triton_kernels.decode_mass import decode_mass, plan_decode
    from vllm_evict.triton_kernels.reach import reach

    count, width, read = case.requests, case.width, max(case.width // 8, 4)
    query, output = case.random(count, case.heads, case.dim), case.random(count, case.heads, case.dim)
    keys = key_signs(case.random(64, case.kv_heads, case.block_size, case.dim))
    indices = [keys[torch.randint(64, (count * width,), device=case.device)] for _ in range(2)]
    known = torch.zeros((OF_ROWS, -(-count // 4) * 4), dtype=torch.int32, device=case.device)
    for number, value in enumerate((0, 1, width - 1, width, 1, width - 1, read - 2, 0, 0, 0, 1)):
        known[number] = value
    for number in (0, 8, 9):  # the query, slot and row of each request
        known[number] = case.ints(known.shape[1])
    rows = ReachRows(*known[:, :count].unbind(), case.table, count * width)
    nothing = [torch.full((count, width), -1, dtype=torch.int32, device=case.device) for _ in range(4)]
    state = *nothing, case.zeros(count, width), case.zeros(count, 3).int()
    table, lens = torch.zeros_like(case.table), torch.full_like(case.lens, read * case.block_size)
    shape = count, case.heads, case.kv_heads, case.dim, case.block_size
    of_all, of_best = (plan_decode(*shape, blocks, DTYPE, case.device) for blocks in (width, read))

    def choose(cache, index):
        reach(rows, query, index, *state, cache, cache[:0].contiguous(), table, case.scale, step=1)

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
    from vllm_evict.compute.kernels.reach import OF_ROWS, ReachRows
    from vllm_evict.compute.kernels.signs import key_signs
    from vllm_evict.config.sizes import TILE
    from vllm_evict.triton_kernels.reach import reach

    size, count = min(TILE, queries), max(queries // TILE, 1)
    query, read = case.random(queries, case.heads, case.dim), max(case.width // 8, 4)
    known = torch.zeros((OF_ROWS, -(-count // 4) * 4), dtype=torch.int32, device=case.device)
    numbers = case.ints(known.shape[1])
    full = (case.tokens - queries + size * numbers) // case.block_size
    each = size * numbers, size, full, full + -(-size // case.block_size), 1, full, read - 2, 0, numbers, numbers, 1
    for number, value in enumerate(each):
        known[number] = value
    written = case.table[:1].expand(count, -1).contiguous()
    rows = ReachRows(*known[:, :count].unbind(), written, case.width, size)
    nothing = [torch.full((count, case.width), -1, dtype=torch.int32, device=case.device) for _ in range(4)]
    state, table = (*nothing, case.zeros(count, case.width), case.zeros(count, 3).int()), torch.zeros_like(written)
    keys = case.random(case.width, case.kv_heads, case.block_size, case.dim)

    def choose(index):
        cache = case.caches[0]
        reach(rows, query, index, *state, cache, cache[:0].contiguous(), table, case.scale, step=1)

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


def graph_of(calls) -> torch.cuda.CUDAGraph:
    """Capture all calls in one graph, after compiling and running them."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Time of one call: the mean over replays."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / (REPLAYS * calls)


class Times:
    """Times of a case's variants, in milliseconds, round by round."""

    def __init__(self, variants: dict[str, Variant], rounds: int) -> None:
        self.variants = variants
        self.rounds: dict[str, list[float]] = {name: [] for name in variants}
        graphs = {name: graph_of(variant.calls) for name, variant in variants.items()}
        for number in range(rounds):
            # Every other round runs backwards, so that no variant is always first.
            for name in list(graphs)[:: 1 if number % 2 == 0 else -1]:
                self.rounds[name].append(milliseconds(graphs[name], len(variants[name].calls)))

    def times(self, name: str, other: str) -> float:
        """A variant's time over another's."""
        return statistics.median(a / b for a, b in zip(self.rounds[name], self.rounds[other]))

    def of_a_copy(self, name: str) -> float:
        """A variant's bandwidth over the copy's."""
        return self.variants[name].bytes / self.variants["copy"].bytes / self.times(name, "copy")

    def per_second(self, name: str, amount: float) -> float:
        """Rate of an amount that one call handles."""
        return amount / statistics.median(self.rounds[name]) * 1e3

    def bandwidth(self, name: str) -> str:
        return f"{self.per_second(name, self.variants[name].bytes) / 1e9:.0f} GB/s ({self.of_a_copy(name):.0%})"


def of_decode(times: Times) -> str:
    in_cuda = [name for name in times.variants if name.startswith(IN_CUDA)]
    return (
        f"{times.variants['decode'].splits} splits: read {times.bandwidth('read')}, "
        f"decode {times.bandwidth('decode')}, with mass of blocks "
        f"{times.bandwidth('of blocks')}, which costs "
        f"{times.times('of blocks', 'decode') - 1:+.1%}, of tokens {times.times('of tokens', 'decode') - 1:+.1%}; "
        f"query_lse {times.bandwidth('query_lse')}, mass_from_lse {times.bandwidth('mass_from_lse')}"
        + "".join(f"; {name} {times.bandwidth(name)}" for name in in_cuda)
    )


def table(report: dict[str, Any]) -> str:
    """Return a Markdown table of decodes: bandwidth in GB/s, and its share of the read's."""
    rows = [row for row in report["rows"] if row["kind"] in ("decode", "fp8")]
    columns = {"decode": "alone", "of blocks": "mass of blocks", "of tokens": "mass of tokens"}
    columns |= {f"{IN_CUDA}bulk": "CUDA C++", f"{IN_CUDA}bulk, of blocks": "CUDA C++, mass of blocks"}
    columns = {name: said for name, said in columns.items() if any(name in row["milliseconds"] for row in rows)}
    lines = [f"| requests × heads/KV heads × size, block | tokens | read | {' | '.join(columns.values())} |"]
    lines.append("|---" * 2 + "|---:" * (1 + len(columns)) + "|")
    for row in rows:
        times = row["milliseconds"].items()
        speed = {name: row["bytes"][name] / statistics.median(its) / 1e6 for name, its in times}
        cells = [f"{speed[name]:,.0f} ({speed[name] / speed['read']:.0%})" if name in speed else "" for name in columns]
        lines.append(f"| {_named(row)} | {row['tokens']:,} | {speed['read']:,.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_reach(report: dict[str, Any]) -> str:
    """Return a Markdown table of layers that read an eighth of their blocks: times of one layer in microseconds."""
    names = "attend to all", "choose", "choose and attend"
    lines = [f"| requests × heads/KV heads × size, block | tokens | {' | '.join(names)} | of attending to all |"]
    lines.append("|---" * 2 + "|---:" * (1 + len(names)) + "|")
    for row in report["rows"]:
        if row["kind"] == "reach":
            took = [1e3 * statistics.median(row["milliseconds"][name]) for name in names]
            cells = [*(f"{its:,.0f}" for its in took), f"{took[2] / took[0]:.0%}"]
            lines.append(f"| {_named(row)} | {row['tokens']:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _named(row: dict[str, Any]) -> str:
    requests, heads, kv_heads, dim, block_size = row["shape"]
    return f"{requests} × {heads}/{kv_heads} × {dim}, {block_size}{', fp8' if row['kind'] == 'fp8' else ''}"


def of_latents(times: Times) -> str:
    return f"query_lse {times.bandwidth('query_lse')}, mass_from_lse {times.bandwidth('mass_from_lse')}"


def of_chunk(times: Times, work: float) -> str:
    return ", ".join(
        f"{said} {times.per_second(name, work) / 1e12:.0f} TFLOP/s ({times.of_a_copy(name):.0%} of a copy)"
        for name, said in (("query_lse", "query_lse"), ("of blocks", "mass of blocks"), ("of tokens", "of tokens"))
    )


def of_tiles(times: Times, work: float) -> str:
    return ", ".join(f"{name} {times.per_second(name, work) / 1e12:.0f} TFLOP/s" for name in times.variants)


def of_classes(times: Times) -> str:
    return f"together {times.bandwidth('together')}, {times.times('together', 'in turn'):.0%} of the time in turn"


def of_choices(times: Times) -> str:
    return (
        f"choose {times.bandwidth('choose')}, attend to all {times.bandwidth('attend to all')}, choose and attend in "
        f"{times.times('choose and attend', 'attend to all'):.0%} of its time"
    )


def of_fetches(times: Times) -> str:
    return ", ".join(f"{name} {times.bandwidth(name)}" for name in times.variants if name != "copy")


def of_moves(times: Times) -> str:
    return f"ordered {times.bandwidth('ordered')}, through scratch {times.bandwidth('through scratch')}"


#: Kind -> its shapes, and function that says what came of one.
KINDS: dict[str, tuple[list[tuple[int, ...]], Callable[..., str]]] = {
    "decode": (SHAPES, of_decode),
    "fp8": (FP8, of_decode),
    "latents": (LATENTS, of_latents),
    "chunk": (CHUNKS, of_chunk),
    "classes": (CLASSES, of_classes),
    "reach": (CLASSES, of_choices),
    "tiles": (CHUNKS, of_tiles),
    "fetch": (CLASSES[1:2], of_fetches),
    "compact": (CHUNKS, of_moves),
}


def cases(tokens: list[int], device: str, tiny: bool, kinds: Collection[str] = KINDS):
    """Cases: (kind, shape, tokens, variants, words about their times)."""
    short, queries, layers = (37, 20, (2, 2)) if tiny else (SHORT, CHUNK, LAYERS)

    def of(shape, length, **options):
        return Case(shape, length, device, **options)

    def in_halves(shape, length):
        half = shape[0], shape[1] // 2, shape[2] // 2, *shape[3:]
        return classes(of(half, length), of(half, min(short, length)))

    made: dict[str, Callable[..., dict[str, Variant]]] = {
        "decode": lambda *its: decode(of(*its)),
        "fp8": lambda *its: decode(of(*its, kept=torch.float8_e4m3fn)),
        "latents": lambda *its: latents(of(*its, parts=1)),
        "chunk": lambda *its: chunk(of(*its), queries),
        "classes": in_halves,
        "reach": lambda *its: choices(of(*its)),
        "tiles": lambda *its: tiles(of(*its), queries),
        "fetch": lambda *its: fetches(of(*its)),
        "compact": lambda shape, length: moves(of((1, *shape[1:]), length), *layers),
    }
    for kind, (shapes, said) in KINDS.items():
        if kind not in kinds:
            continue
        for shape, length in itertools.product(
            (TINY_LATENTS if kind == "latents" else TINY) if tiny else shapes, tokens
        ):
            if kind not in ("chunk", "tiles"):
                yield kind, shape, length, made[kind](shape, length), said
            elif length >= queries:
                work = 2 * shape[1] * shape[3] * queries * (length - (queries - 1) / 2)
                yield kind, shape, length, made[kind](shape, length), partial(said, work=work)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192], help="resident tokens of a request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--kinds", nargs="+", choices=list(KINDS), metavar="KIND", help=f"only these: {', '.join(KINDS)}"
    )
    parser.add_argument("--json", type=Path, help="file for all rounds")
    parser.add_argument("--head-major", action="store_true", help="a block has all tokens of a head side by side")
    parser.add_argument("--dry-run", action="store_true", help="run each variant once, on tiny shapes")
    options = parser.parse_args(arguments)
    Case.token_major, kinds = not options.head_major, options.kinds or KINDS
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.dry_run:
        for kind, shape, tokens, variants, _ in cases([70], device, tiny=True, kinds=kinds):
            for name, variant in variants.items():
                variant.calls[0]()
                print(f"{kind} of {tokens} tokens, {shape}: {name} runs, {variant.bytes} bytes")
        return
    if not torch.cuda.is_available():
        print("no GPU here: nothing was measured")
        sys.exit(0)
    print(f"{torch.cuda.get_device_name()}, bfloat16 where no row says fp8, medians of {options.rounds} rounds")
    print("in brackets: of a copy")
    print("requests x heads/KV heads x head size, block | tokens")
    report = {"gpu": the_gpu(), "torch": torch.__version__, "triton": triton.__version__, "command": command()}
    report["rows"] = []
    for kind, shape, tokens, variants, said in cases(options.tokens, "cuda", tiny=False, kinds=kinds):
        times = Times(variants, options.rounds)
        moved = {name: variant.bytes for name, variant in variants.items()}
        row = {"kind": kind, "shape": shape, "tokens": tokens, "bytes": moved, "milliseconds": times.rounds}
        report["rows"].append(row)
        requests, heads, kv_heads, dim, block_size = shape
        print(f"{kind} {requests} x {heads}/{kv_heads} x {dim}, {block_size} | {tokens} | {said(times)}", flush=True)
        if options.json:  # after each case, so that a call that is ended keeps what it measured
            options.json.write_text(to_json(report) + "\n")
        del times, variants, said
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
