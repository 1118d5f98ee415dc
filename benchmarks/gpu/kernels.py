"""Times the Triton kernels on a GPU: decode_mass beside a device-to-device copy and beside itself without mass.

    python benchmarks/gpu/kernels.py [--tokens 8192] [--rounds 5] [--json FILE]

Each round times all variants of a shape one after the other, as replays of CUDA graphs over caches larger than L2, so
that a round's ratios share its clocks. A copy of N bytes reads and writes them: it moves 2 N, and decode_mass is held
against one that moves as many bytes as it must read. Where there is no GPU it says so and leaves with status 0.
Where vllm_evict._C_cuda is built, the CUDA decode_mass is timed beside Triton's, with bulk copies and with cp.async.
"""

import argparse
import itertools
import json
import statistics
import sys

import torch

SHAPES = [  # requests, query heads, KV heads, head size, block size
    (1, 32, 8, 128, 16),
    (16, 32, 8, 128, 16),
    (64, 32, 8, 128, 16),
    (64, 32, 8, 128, 128),
    (64, 28, 4, 128, 16),
    (16, 32, 32, 128, 16),
    (16, 16, 1, 256, 16),
]
# Caches that the replays of one graph go through in turn: together several times an H200's 50 MiB of L2.
LEAST_BYTES = 512 * 2**20
MAX_CACHES = 32
REPLAYS = 20


def graph_of(calls) -> torch.cuda.CUDAGraph:
    """All calls in one graph, compiled and warm."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Of one call: the mean over replays."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / (REPLAYS * calls)


def measure(requests, heads, kv_heads, dim, block_size, tokens, rounds) -> dict:
    from vllm_evict.attention import decode_cuda
    from vllm_evict.triton_kernels.decode_mass import decode_mass, plan_decode
    from vllm_evict.triton_kernels.mass_from_lse import mass_from_lse

    device, dtype = "cuda", torch.bfloat16
    width = -(-tokens // block_size)
    read = 2 * requests * tokens * kv_heads * dim * dtype.itemsize
    caches = min(max(-(-LEAST_BYTES // read), 2), MAX_CACHES)
    ints = {"dtype": torch.int32, "device": device}
    table = torch.randperm(requests * width, **ints).view(requests, width)
    starts, rows = torch.arange(requests + 1, **ints), torch.arange(requests, **ints)
    lens = torch.full((requests,), tokens, **ints)
    query = torch.randn(requests, heads, dim, dtype=dtype, device=device)
    output, out = torch.empty_like(query), torch.zeros(requests, kv_heads, width, device=device)
    lse = torch.empty(requests, heads, device=device)
    pages = [
        torch.randn(requests * width, kv_heads, block_size, 2 * dim, dtype=dtype, device=device) for _ in range(caches)
    ]
    plan = plan_decode(requests, heads, kv_heads, dim, block_size, width, dtype, device)
    scale = dim**-0.5

    def decode(cache, mass):
        arguments = table, starts, lens, rows, scale, output
        return lambda: decode_mass(query, *cache.split(dim, -1), *arguments, out=mass, lse=lse, plan=plan)

    def decode_in_cuda(cache, mass, plan):
        arguments = query, *cache.split(dim, -1), table, starts, lens, rows, scale, output
        return lambda: decode_cuda.decode_mass(*arguments, out=mass, lse=lse, plan=plan)

    def beside(cache):
        return lambda: mass_from_lse(query, cache.split(dim, -1)[0], lse, table, starts, lens, scale, out)

    def copy(cache):
        half = cache.flatten()[: cache.numel() // 2]
        return lambda: target.copy_(half)

    target = torch.empty(pages[0].numel() // 2, dtype=dtype, device=device)
    variants = {
        "copy": [copy(cache) for cache in pages],
        "decode": [decode(cache, None) for cache in pages],
        "decode_mass": [decode(cache, out) for cache in pages],
        "mass_from_lse": [beside(cache) for cache in pages],
    }
    ways = {}
    if decode_cuda.missing() is None and decode_cuda.refused(query, *pages[0].split(dim, -1)) is None:
        bulk = torch.cuda.get_device_capability() >= decode_cuda.BULK_CAPABILITY
        shape = requests, heads, kv_heads, dim, block_size, width, dtype, device
        ways = {"cp.async": False, **({"bulk": True} if bulk else {})}
        for way, bulk in ways.items():
            its = decode_cuda.plan_decode(*shape, bulk=bulk)
            variants[f"cuda {way} decode"] = [decode_in_cuda(cache, None, its) for cache in pages]
            variants[f"cuda {way} decode_mass"] = [decode_in_cuda(cache, out, its) for cache in pages]
    graphs = {name: graph_of(calls) for name, calls in variants.items()}
    times = {name: [] for name in graphs}
    for number in range(rounds):
        # Every other round backwards, so that none is always first.
        for name in list(graphs)[:: 1 if number % 2 == 0 else -1]:
            times[name].append(milliseconds(graphs[name], caches))
    ratio = lambda a, b: statistics.median(x / y for x, y in zip(times[a], times[b]))  # noqa: E731
    return {
        "shape": [requests, heads, kv_heads, dim, block_size],
        "tokens": tokens,
        "splits": plan.splits,
        "bytes": read,
        "milliseconds": times,
        "GB/s": read / statistics.median(times["decode_mass"]) / 1e6,
        "of a copy": ratio("copy", "decode_mass"),
        "mass costs": ratio("decode_mass", "decode") - 1,
        "beside costs": ratio("mass_from_lse", "decode"),
        "cuda": {
            way: {
                "of a copy": ratio("copy", f"cuda {way} decode_mass"),
                "mass costs": ratio(f"cuda {way} decode_mass", f"cuda {way} decode") - 1,
                "of triton": ratio(f"cuda {way} decode_mass", "decode_mass"),
            }
            for way in ways
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192], help="resident tokens of a request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="where all rounds go")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing was measured")
        sys.exit(0)
    print(f"{torch.cuda.get_device_name()}, bfloat16, medians of {options.rounds} rounds")
    print(
        "requests x heads/KV heads x head size, block | tokens | splits | GB/s | of a copy | mass costs | beside costs"
    )
    found = []
    for shape, tokens in itertools.product(SHAPES, options.tokens):
        found.append(row := measure(*shape, tokens, options.rounds))
        requests, heads, kv_heads, dim, block_size = shape
        print(
            f"{requests} x {heads}/{kv_heads} x {dim}, {block_size} | {tokens} | {row['splits']} | {row['GB/s']:.0f} | "
            f"{row['of a copy']:.0%} | {row['mass costs']:+.1%} | {row['beside costs']:.0%}",
            flush=True,
        )
        for way, its in row["cuda"].items():
            print(
                f"    in CUDA, {way}: {its['of a copy']:.0%} of a copy, mass costs {its['mass costs']:+.1%}, "
                f"{its['of triton']:.0%} of Triton's time",
                flush=True,
            )
        torch.cuda.empty_cache()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": found}, file, indent=1
            )


if __name__ == "__main__":
    main()
