"""Measures the cost of token granularity on the engine: the time of compactions, and their share of a decode step.

    python benchmarks/tokens.py [--rounds 3] [--policies h2o snapkv] [--buffers 32 128 512]

Requests decode at their budget under each policy, block by block and token by token, with growing buffers (a decision
frees the buffer and a block). Each case is a process of its own, cases run in turn, and a ratio compares two runs of
the same round. The time of compactions is measured around the worker's call, and includes reading keys and choosing
tokens.

Writes a Markdown table and a JSON with hardware, versions, command and all raw timings to --out.
"""

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import asdict, fields
from pathlib import Path

from engines import decoding, make_llm, random_prompts, timed_steps
from models import Shape, make_model
from reports import in_child, progress, publish, run_script

from vllm_evict.core.actions import Compaction

GRANULARITIES = ("block", "token")


def child(spec: dict) -> dict:
    """Seconds of decode steps of all requests, seconds of their compactions, and tokens that these kept."""
    options = argparse.Namespace(**spec["options"])
    shape, policy = Shape(**spec["shape"]), spec["policy"]
    longest = options.budget + policy["buffer"] + options.steps + 4096
    blocks = -(-(options.requests * (options.budget + policy["buffer"] + 64) + 8192) // options.block_size)
    llm = make_llm(
        spec["model"],
        policy,
        max_model_len=longest,
        block_size=options.block_size,
        num_gpu_blocks_override=blocks,
        kv_cache_memory_bytes=blocks * options.block_size * shape.kv_bytes_per_token(),
        max_num_seqs=options.requests,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
    )
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    rearrange, spent = worker.kv_evict.rearrange, {"seconds": 0.0, "kept": 0, "compactions": 0}

    def timed(*args: object) -> None:
        plans = [order for order in worker.kv_evict.plan.orders if isinstance(order, Compaction)]
        start = time.perf_counter()
        rearrange(*args)
        if plans:
            spent["seconds"] += time.perf_counter() - start
            spent["kept"] += sum(len(plan.target) * options.block_size for plan in plans)
            spent["compactions"] += len(plans)

    worker.kv_evict.rearrange = timed
    prompts = random_prompts(options.requests, options.budget + policy["buffer"] + 64, shape.vocab)
    with decoding(llm, prompts, options.steps + 200):
        spent.update(seconds=0.0, kept=0, compactions=0)
        return {"steps": sum(timed_steps(llm, options.steps)["seconds"]), **spent}


def measure(options: argparse.Namespace, model: Path, shape: Shape) -> dict:
    """Every policy, buffer and granularity in turn, `--rounds` times."""
    runs: dict[str, list[dict]] = {}
    with progress() as bar:
        task = bar.add_task("", total=options.rounds * len(options.policies) * len(options.buffers) * 2)
        for number in range(options.rounds):
            for name in options.policies:
                for buffer in options.buffers:
                    pair = {}
                    for granularity in GRANULARITIES if number % 2 == 0 else reversed(GRANULARITIES):
                        bar.update(task, description=f"round {number + 1}, {name}, buffer {buffer}, {granularity}")
                        policy = {"name": name, "budget": options.budget, "buffer": buffer, "sink": 32, "recent": 64}
                        spec = {"model": str(model), "shape": asdict(shape), "options": vars(options)}
                        spec["policy"] = policy | {"granularity": granularity, "allow": []}
                        pair[granularity] = in_child("tokens", spec)
                        bar.advance(task)
                    runs.setdefault(f"{name} {buffer}", []).append(pair)
    return {"runs": runs}


def table(report: dict) -> str:
    steps = report["options"]["steps"]
    lines = [
        "| policy | buffer | decode step by block, ms | by token, ms | ratio (rounds) | compactions' share of it "
        "| us per compaction | ns per kept token |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, pairs in report["runs"].items():
        policy, buffer = name.split()
        ms = {g: statistics.median(1e3 * pair[g]["steps"] / steps for pair in pairs) for g in GRANULARITIES}
        ratios = [pair["token"]["steps"] / pair["block"]["steps"] for pair in pairs]
        tokens = [pair["token"] for pair in pairs]
        share = statistics.median(run["seconds"] / run["steps"] for run in tokens)
        each = statistics.median(1e6 * run["seconds"] / max(run["compactions"], 1) for run in tokens)
        per_token = statistics.median(1e9 * run["seconds"] / max(run["kept"], 1) for run in tokens)
        lines.append(
            f"| {policy} | {buffer} | {ms['block']:.2f} | {ms['token']:.2f} | {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f}-{max(ratios):.2f}) | {share:.1%} | {each:,.0f} | {per_token:,.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policies", nargs="+", default=["h2o", "snapkv", "knorm"])
    parser.add_argument("--buffers", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--budget", type=int, default=1024, help="tokens of each request")
    parser.add_argument("--steps", type=int, default=640, help="decode steps timed in a row")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="OpenMP threads")
    parser.add_argument("--out", default="out/tokens")
    group = parser.add_argument_group("model (random weights)")
    for size in fields(Shape):
        group.add_argument(f"--{size.name.replace('_', '-')}", type=int, default=size.default)
    options = parser.parse_args()
    shape = Shape(**{size.name: getattr(options, size.name) for size in fields(Shape)})
    with tempfile.TemporaryDirectory() as folder:
        report = measure(options, make_model(folder, shape), shape)
    title = f"{options.requests} requests that decode at a budget of {options.budget:,} tokens, by block and by token"
    publish(options, "tokens", title, table, report)


if __name__ == "__main__":
    run_script(main, tokens=child)
