"""Measures the time of `compact` on the CPU, beside a memcpy of as many bytes.

    python benchmarks/compact.py [--threads 1] [--tokens 4096] [--isa portable] [--json FILE]

One request has a KV group whose pages exceed the CPU's caches; every layer and head keeps its own random tokens. "new"
writes into other blocks, "in place" directly into the request's first blocks, "scratch" into its last blocks, which
moves each token twice. Each round runs all three, so that its ratios share the speed of the machine, which varies.
Prints JSON with medians of rounds, and the least and the greatest.
"""

import argparse
import platform
import statistics
import sys
import time

import torch
from reports import hardware, to_json

from vllm_evict.compute.kernels.compact import compact

LAYERS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 4, 128, 32


def seconds(run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(dtype: torch.dtype, tokens: int, fraction: float, rounds: int, isa: str | None) -> dict:
    kept, blocks = int(tokens * fraction), tokens // BLOCK_SIZE
    targets = -(-kept // BLOCK_SIZE)
    size = (blocks + targets, KV_HEADS, 2 * BLOCK_SIZE, HEAD_DIM)
    caches = [torch.zeros(size, dtype=dtype) for _ in range(LAYERS)]
    ids = torch.randperm(blocks + targets, dtype=torch.int32)
    source, new = ids[:blocks], ids[blocks:]
    keep = torch.rand(LAYERS, KV_HEADS, tokens).argsort(-1)[..., :kept].sort(-1).values.int()
    read = torch.zeros(LAYERS * KV_HEADS * kept * 2 * HEAD_DIM, dtype=dtype)
    written = torch.zeros_like(read)
    ways = {
        "memcpy": lambda: written.copy_(read),
        "new": lambda: compact(caches, source, keep, new, isa=isa),
        "in place": lambda: compact(caches, source, keep, source[:targets], isa=isa),
        "scratch": lambda: compact(caches, source, keep, source[blocks - targets :], isa=isa),
    }
    times = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, run in ways.items():
            taken = seconds(run)
            if number:  # the first call warms up
                times[name].append(taken)
    result = {
        "dtype": str(dtype)[6:],
        "kept": kept,
        "bytes read and written": 2 * read.numel() * read.element_size(),
    }
    for name, each in times.items():
        ratios = [a / b for a, b in zip(each, times["memcpy"])]
        result[name] = {
            "ns a kept token": round(statistics.median(each) / kept * 1e9),
            "GB/s": round(result["bytes read and written"] / statistics.median(each) / 1e9, 2),
            "times memcpy": [round(x, 2) for x in (statistics.median(ratios), min(ratios), max(ratios))],
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="resident tokens, a multiple of 32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--isa", choices=("avx512", "portable"), help="default: the best of this CPU")
    parser.add_argument("--json", help="where the result goes as well")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    report = {
        "hardware": hardware(),
        "versions": f"python {platform.python_version()}, torch {torch.__version__}",
        "command": f"python {' '.join(sys.argv)}",
        "threads": torch.get_num_threads(),
        "note": "the machine's speed varies: compare within a row",
        "shape": f"{LAYERS} layers of {KV_HEADS} KV heads of {HEAD_DIM}, blocks of {BLOCK_SIZE}, layout vec",
        "tokens": options.tokens,
        "times memcpy": "median, least, greatest of the rounds",
        "rows": [
            measure(dtype, options.tokens, fraction, options.rounds, options.isa)
            for dtype in (torch.float32, torch.bfloat16)
            for fraction in (0.1, 0.5, 0.9)
        ],
    }
    text = to_json(report)
    print(text)
    if options.json:
        with open(options.json, "w") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
