"""Measures throughput in a KV pool that is too small: stock vLLM and each policy on the same requests and pool.

    python benchmarks/pressure.py [--rounds 3] [--cases stock sink-window]     throughput under memory pressure
    python benchmarks/pressure.py --model hybrid                               the same of a hybrid, or of latents (mla)
    python benchmarks/pressure.py --step                                       cost of running sums in a decode step

Throughput: every case is a process of its own, cases run in turn, and a ratio compares two runs of the same round; the
table shows medians over rounds. "stock" runs with VLLM_PLUGINS empty, so that the plugin is not loaded. Start-up and
warm-up are not timed. --step times decode steps in one engine, alternately: of measured requests (h2o) and others
(sink-window) at their budget, whose difference is the running sums; of requests before their first eviction; and of
vLLM's own kernel.

On a shared machine threads wait for each other and wall time says little: use --threads 1 and the ratio by CPU time,
which counts this process only.

Writes a Markdown table and a JSON with hardware, versions, command and all raw timings to --out.
"""

import argparse
import os
import statistics
import tempfile
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from engines import CLOCKS, Run, decoding, make_llm, random_prompts, run_batch, timed_steps
from load import DTYPES
from models import OTHERS, Shape, make_model, write_other
from reports import choose_cases, in_child, progress, publish, run_script, spread

#: Most tokens of a step.
CHUNK = 2048


# ---- throughput under pressure


def cases(options: argparse.Namespace) -> dict[str, dict | None]:
    """Name -> policy. h2o keeps as many tokens as sink-window, and decides as often."""
    window = {"name": "sink-window", "sink": 32, "recent": 256}
    h2o = {"name": "h2o", "sink": 32, "recent": 64, "buffer": 0}
    kept = {**h2o, "budget": window["sink"] + window["recent"] + options.block_size}
    # Of prompts that read less than everything by it.
    read = {"full, prompts read 4096": {"name": "full", "read": 4096, "read_prompts": 4096}}
    return {
        "stock": None,
        "full": {"name": "full"},
        **(read if options.prompt > 4096 else {}),
        "sink-window": window,
        "h2o": kept,
        # Prompts by vLLM's kernel, and a score pass beside it.
        "h2o, exact": {**kept, "exact": True},
        "full, on the host": {**kept, "name": "full", "evict": "host", "host": "1GiB"},
        "h2o, never evicting": {**h2o, "budget": options.prompt + options.output},
        # Of a Llama alone. Half of the heads keep everything, the others as many tokens as sink-window.
        "duo": {**window, "name": "duo", "pattern": ["10" * (options.kv_heads // 2)] * options.layers},
    }


def pressure_child(spec: dict) -> dict:
    """One case of one round, in a process of its own."""
    options = argparse.Namespace(**spec["options"])
    split = (spec["policy"] or {}).get("name") == "duo"  # blocks hold half of the heads, so more of them fit
    memory = options.pool * Shape(**spec["shape"]).kv_bytes_per_token(DTYPES[options.dtype])
    own: dict[str, Any] = {}
    if options.model in OTHERS:  # the number of blocks alone says how large the pool is
        own, memory = {"load_format": "dummy"}, 4 << 30
    llm = make_llm(
        spec["model"],
        spec["policy"],
        max_model_len=options.prompt + options.output,
        block_size=options.block_size,
        num_gpu_blocks_override=None if split else options.pool // options.block_size,
        kv_cache_memory_bytes=memory,
        **own,
        dtype=options.dtype,
        max_num_seqs=options.requests,
        max_num_batched_tokens=CHUNK,
        long_prefill_token_threshold=options.chunk,
        enable_prefix_caching=False,
        enforce_eager=not options.compile,
    )
    vocab = spec["shape"]["vocab"]
    run_batch(llm, random_prompts(options.requests, options.prompt // 8, vocab, seed=1), options.output // 8)
    return asdict(run_batch(llm, random_prompts(options.requests, options.prompt, vocab), options.output))


def pressure(options: argparse.Namespace, model: Path, shape: Shape) -> dict:
    """All cases in turn, `--rounds` times. Returns raw results by case, one a round."""
    chosen = {name: policy for name, policy in cases(options).items() if name in options.cases}
    results: dict[str, list[dict]] = {name: [] for name in chosen}
    with progress() as bar:
        task = bar.add_task("", total=options.rounds * len(chosen))
        for number in range(options.rounds):
            for name, policy in chosen.items():
                bar.update(task, description=f"round {number + 1}, {name}")
                spec = {"model": str(model), "policy": policy, "shape": asdict(shape), "options": vars(options)}
                result = in_child("pressure", spec, {"VLLM_PLUGINS": ""} if policy is None else {})
                results[name].append(result)
                run = Run(**result)
                bar.console.print(
                    f"round {number + 1}  {name:<20} {run.seconds:7.1f} s  {run.cpu_seconds:7.1f} s of CPU"
                    f"  {run.tokens_per_second:7.1f} output tokens/s",
                    soft_wrap=True,
                )
                bar.advance(task)
    return {"policies": chosen, "runs": results, "ratios": {clock: ratios(results, clock) for clock in CLOCKS}}


def ratios(results: dict[str, list[dict]], clock: str) -> dict[str, list[float]]:
    """Throughput of each case over stock's, round by round."""
    stock = [run[clock] for run in results["stock"]]
    return {name: [base / run[clock] for base, run in zip(stock, runs, strict=True)] for name, runs in results.items()}


def pressure_table(report: dict) -> str:
    lines = [
        "| policy | ratio to stock (rounds) | by CPU time | output tokens/s | requests at once | peak blocks "
        "| evicted blocks | preemptions |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, raw in report["runs"].items():
        runs = [Run(**run) for run in raw]

        def median(key: str, runs: list[Run] = runs) -> float:
            return statistics.median(getattr(run, key) for run in runs)

        wall, cpu = (spread(report["ratios"][clock][name], ".2f") for clock in CLOCKS)
        lines.append(
            f"| {name} | {wall} | {cpu} | {median('tokens_per_second'):.0f} | {median('peak_requests'):.0f} "
            f"| {median('peak_blocks'):.0f} | {median('evicted_blocks'):.0f} | {median('preemptions'):.0f} |"
        )
    return "\n".join(lines)


# ---- running sums in a decode step

#: Cases of a decode step: the request's policy, and whether its prompt exceeds the budget.
STEP_CASES = {
    "stock kernel": ("full", False),
    "h2o before its first eviction": ("h2o", False),
    "sink-window": ("sink-window", True),
    "h2o": ("h2o", True),
}


def step_child(spec: dict) -> dict:
    """Decode steps of one batch size: for each round and case, the seconds and CPU seconds of every step."""
    options, batch = argparse.Namespace(**spec["options"]), spec["batch"]
    budget, block_size = options.resident, options.block_size
    # The first requests decode while the last ones' prompts are computed.
    tokens = options.steps + batch * (budget // CHUNK + 2)
    longest = budget + 1 + tokens
    blocks = -(-(batch * (longest + block_size) + 2 * CHUNK) // block_size)
    llm = make_llm(
        spec["model"],
        {"name": "h2o", "budget": budget, "buffer": 0, "sink": 32, "recent": 64, "allow": ["full", "sink-window"]},
        max_model_len=longest,
        block_size=block_size,
        num_gpu_blocks_override=blocks,
        kv_cache_memory_bytes=blocks * block_size * Shape(**spec["shape"]).kv_bytes_per_token(),
        max_num_seqs=batch,
        max_num_batched_tokens=CHUNK,
        enable_prefix_caching=False,
    )
    vocab = spec["shape"]["vocab"]
    short = random_prompts(batch, budget - tokens, vocab)
    long = random_prompts(batch, budget + 1, vocab)
    timings: dict[str, list[dict]] = {case: [] for case in STEP_CASES}
    decode_steps(llm, short[:1], "full", longest, steps=2)
    for number in range(options.rounds):
        for case in STEP_CASES if number % 2 else reversed(STEP_CASES):
            policy, evicts = STEP_CASES[case]
            steps = decode_steps(llm, long if evicts else short, policy, tokens, options.steps)
            timings[case].append(steps)
    return timings


def decode_steps(llm: Any, prompts: list[list[int]], policy: str, max_tokens: int, steps: int) -> dict:
    """Seconds and CPU seconds of each of `steps` steps in which all requests decode."""
    with decoding(llm, prompts, max_tokens, extra_args={"kv_policy": policy}):
        return timed_steps(llm, steps)


def step(options: argparse.Namespace, model: Path, shape: Shape) -> dict:
    """Share of running sums in a decode step, by batch size, each in a process of its own."""
    runs = {}
    with progress() as bar:
        task = bar.add_task("", total=len(options.batches))
        for batch in options.batches:
            bar.update(task, description=f"decode steps of {batch} x {options.resident} tokens")
            spec = {"model": str(model), "batch": batch, "shape": asdict(shape), "options": vars(options)}
            runs[str(batch)] = in_child("step", spec)
            bar.advance(task)
    taken = {clock: {batch: shares(timings, clock) for batch, timings in runs.items()} for clock in CLOCKS}
    return {"runs": runs, "shares": taken}


def shares(timings: dict[str, list[dict]], clock: str) -> list[float]:
    """(with sums - without) / with, of the mean step, round by round; includes decisions and reports."""
    pairs = zip(timings["h2o"], timings["sink-window"], strict=True)
    return [1 - statistics.mean(without[clock]) / statistics.mean(with_sums[clock]) for with_sums, without in pairs]


def step_table(report: dict) -> str:
    names = list(STEP_CASES)
    lines = [
        "| requests | " + " | ".join(f"{name}, ms" for name in names) + " | share that is sums (rounds) "
        "| by CPU time |",
        "|---|" + "---|" * (len(names) + 2),
    ]
    for batch, timings in report["runs"].items():
        ms = [1e3 * statistics.median(statistics.mean(run["seconds"]) for run in timings[name]) for name in names]
        wall, cpu = (spread(report["shares"][clock][batch], ".1%") for clock in CLOCKS)
        cells = " | ".join(f"{value:.2f}" for value in ms)
        lines.append(f"| {batch} | {cells} | {wall} | {cpu} |")
    return "\n".join(lines)


# ---- processes, reports, command line


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", action="store_true", help="time decode steps with and without running sums instead")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default="out/pressure")
    parser.add_argument("--block-size", type=int, help="default: 32; 16 with latents, which AMX_MLA does not take")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="OpenMP threads of the engine"
    )
    group = parser.add_argument_group("throughput")
    group.add_argument(
        "--model", choices=("llama", *OTHERS), default="llama", help="Falcon-H1 and DeepSeek V3: dummy weights"
    )
    group.add_argument("--requests", type=int, default=16)
    group.add_argument("--prompt", type=int, default=2000, help="tokens of each prompt")
    group.add_argument("--output", type=int, default=500, help="tokens generated for each")
    group.add_argument("--pool", type=int, default=8192, help="tokens that the KV pool holds")
    group.add_argument("--chunk", type=int, default=0, help="most tokens of a prompt in a step; 0: as many as fit")
    group.add_argument("--dtype", choices=DTYPES, default="float32", help="of the model and its KV cache")
    group.add_argument("--compile", action="store_true", help="the model is compiled, as vLLM does by default")
    group.add_argument("--cases", nargs="+", metavar="CASE", help="only these; stock always runs, to compare with")
    group = parser.add_argument_group("--step")
    group.add_argument("--resident", type=int, default=4096, help="resident tokens of each request")
    group.add_argument("--batches", type=int, nargs="+", default=[1, 16], help="requests that decode together")
    group.add_argument("--steps", type=int, default=32, help="decode steps timed in a row")
    group = parser.add_argument_group("model (random weights)")
    for size in fields(Shape):
        group.add_argument(f"--{size.name.replace('_', '-')}", type=int, default=size.default)
    options = parser.parse_args()
    options.block_size = options.block_size or (OTHERS[options.model][2] if options.model in OTHERS else 0) or 32
    # Split heads are refused beside states and latents, prompts that read less with latents; the host is a Llama's.
    without = {"llama": set(), "hybrid": {"pattern", "evict"}}.get(options.model, {"pattern", "evict", "read_prompts"})
    known = [name for name, policy in cases(options).items() if not without & set(policy or ())]
    options.cases = choose_cases(parser, options.cases, known)
    if options.model in OTHERS and options.step:
        parser.error("--step is measured of a Llama; leave --model out")
    return options


def main() -> None:
    options = parse_arguments()
    shape = Shape(**{size.name: getattr(options, size.name) for size in fields(Shape)})
    with tempfile.TemporaryDirectory() as folder:
        other = options.model in OTHERS
        model = write_other(folder, options.model, shape) if other else make_model(folder, shape)
        report = (step if options.step else pressure)(options, model, shape)
    if options.step:
        title = f"Decode steps at {options.resident:,} resident tokens a request, with and without running sums"
        publish(options, "step", title, step_table, report)
    else:
        lengths = f"{options.prompt:,} + {options.output} tokens"
        title = (
            f"{options.requests} requests of {lengths} in a pool of {options.pool:,} tokens, "
            f"{options.layers}-layer {options.model} in {options.dtype}"
        )
        publish(options, "pressure", title, pressure_table, report)


if __name__ == "__main__":
    run_script(main, pressure=pressure_child, step=step_child)
