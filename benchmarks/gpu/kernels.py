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
import statistics
import sys
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

sys.path += [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from machine import the_gpu
from reports import command, to_json
from variants import IN_CUDA, Case, Variant, choices, chunk, classes, decode, fetches, latents, moves, tiles

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
REPLAYS = 20


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
