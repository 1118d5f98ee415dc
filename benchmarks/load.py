"""Measures requests that keep coming, more than the pool can hold: stock vLLM, eviction under pressure or to a budget.

    python benchmarks/load.py [--rounds 3] [--load 2] [--cases "h2o last, pressure"]

"pressure" admits waiting requests (`admit: true`); "waiting" evicts for running ones alone, the default.

Every request hides a number in a text of its own, asks for it, and generates more tokens after the answer. So the table
shows lost answers beside throughput. The model is examples/needle/model, which finds every needle with full attention.

Load: in a pool without limit requests would hold `--load` times the pool's blocks, on average. They arrive at random
times (Poisson), the same for all cases of a round. The clock of arrivals counts engine steps. So a lifetime in steps,
the load and all counts are the same on any machine. With `--clock seconds` the clock is CPU time. If an engine has no
requests, the clock jumps to the next arrival.

Each case is a process of its own, cases run in turn, and a ratio compares two runs of one round. Each round has its own
documents and arrivals. The budget of "budget" cases is the mean number of blocks that a request held in the round's
runs under pressure, the largest of these runs. "recomputed": tokens scheduled beyond one pass over prompts and outputs.

Writes a Markdown table and a JSON with hardware, versions, command and all raw figures to --out.
"""

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from engines import greedy, make_llm, preemptions, run_batch, scheduler_of
from reports import choose_cases, in_child, progress, publish, run_script, spread

MODEL = Path(__file__).resolve().parents[1] / "examples" / "needle" / "model"
KV_NUMBERS = 2 * 4 * 2 * 64  # a token: keys and values, layers, KV heads, head size
#: Bytes of a number, by dtype.
DTYPES = {"bfloat16": 2, "float32": 4}
QUESTION = 8  # tokens of a question and of the chat template after it
CHUNK = 512  # most tokens of a step
#: Durations of a case, by their names in `Run`.
CLOCKS = ("seconds", "cpu_seconds", "steps")


@dataclass
class Run:
    """All requests on one engine, from the first arrival to the last token."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    #: Steps of the engine, and steps that the arrivals' clock skipped without requests.
    steps: int = 0
    idle: float = 0.0
    output_tokens: int = 0
    scheduled_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    evicted_blocks: int = 0
    peak_blocks: int = 0
    peak_requests: int = 0
    #: Blocks in use over running requests, both summed over steps.
    residency: float = 0.0
    #: Time from arrival to last token of each request, in order of arrival.
    latency_steps: list[float] = field(default_factory=list)
    latency_cpu_seconds: list[float] = field(default_factory=list)
    #: Whether the answer of each request holds the number.
    found: list[bool] = field(default_factory=list)


# ---- requests


def arrivals(options: argparse.Namespace, seed: int) -> list[float]:
    """Arrival of each request, on the arrivals' clock.

    Arrivals are uniform over the time that this number of requests takes at the mean spacing, like a Poisson process
    with a given number of arrivals. So the load is the same in every round.
    """
    generator = np.random.default_rng([seed, options.requests])
    return np.sort(generator.random(options.requests) * options.requests * spacing(options)).tolist()


def spacing(options: argparse.Namespace) -> float:
    """Mean time between arrivals, so that requests in a pool without limit hold `--load` times the pool."""
    prompt = options.context + QUESTION
    steps = math.ceil(prompt / CHUNK) + options.output
    blocks = (prompt + options.output / 2) / options.block_size  # on average; prefill takes no time beside decode
    apart = steps * blocks / (options.load * options.pool_blocks)
    return apart * options.step_seconds if options.clock == "seconds" else apart


def needles(options: argparse.Namespace, seed: int) -> tuple[Any, list[tuple[Any, list[int]]]]:
    """Tokenizer; samples with their token ids. Depths cover the text evenly, in random order."""
    from vllm_evict.tools.eval import tasks, words
    from vllm_evict.tools.eval.prompts import Prompts

    prompts, filler = Prompts(str(MODEL)), words.Filler()
    depths = np.random.default_rng(seed).permutation((np.arange(options.requests) + 0.5) / options.requests)
    batch = []
    for index, depth in enumerate(depths.tolist()):
        sample = tasks.make("niah", options.context, depth, index, seed, prompts.count, filler)
        batch.append((sample, prompts.ids(sample)))
    assert all(len(ids) == options.context + QUESTION for _, ids in batch), "prompts are not as long as they should be"
    return prompts.tokenizer, batch


def has_found(tokenizer: Any, sample: Any, token_ids: list[int]) -> bool:
    """Whether the answer is right, up to the model's end mark."""
    from vllm_evict.tools.eval.score import score

    token_ids = token_ids[: sample.max_tokens]
    end = tokenizer.eos_token_id
    return score(tokenizer.decode(token_ids[: token_ids.index(end)] if end in token_ids else token_ids), sample) == 1


# ---- one case


def engine_for(options: argparse.Namespace, policy: Any, **more: Any) -> Any:
    """The engine of all cases."""
    settings = {
        "dtype": options.dtype,
        "max_model_len": options.context + QUESTION + options.output,
        "block_size": options.block_size,
        "num_gpu_blocks_override": options.pool_blocks,
        "kv_cache_memory_bytes": options.pool_blocks * options.block_size * KV_NUMBERS * DTYPES[options.dtype],
        "max_num_seqs": options.at_once,
        "max_num_batched_tokens": CHUNK,
        "enable_prefix_caching": False,
    }
    return make_llm(MODEL, policy, **settings | more)


def load_child(spec: dict) -> dict:
    """One case of one round, in a process of its own."""
    options, seed = argparse.Namespace(**spec["options"]), spec["round"]
    tokenizer, batch = needles(options, seed)
    llm = engine_for(options, spec["policy"])
    run_batch(llm, [ids[::-1] for _, ids in batch[:2]], 8)
    outputs: dict[int, list[int]] = {}
    run = run_load(llm, [ids for _, ids in batch], arrivals(options, seed), options.output, options.clock, outputs)
    run.found = [has_found(tokenizer, sample, outputs[index]) for index, (sample, _) in enumerate(batch)]
    return asdict(run)


def run_load(
    llm: Any, prompts: list[list[int]], times: list[float], output_tokens: int, clock: str, outputs: dict,
    on_end: Callable[[], Any] = lambda: None,
) -> Run:  # fmt: skip
    """Step the engine, and add each request at its arrival.

    Args:
        llm: from `make_llm`.
        prompts: token ids.
        times: of arrival, ascending, in steps or seconds.
        output_tokens: of each request.
        clock: "steps" or "seconds" (of CPU).
        outputs: gets the tokens of each request.
        on_end: called after the last token; its time does not count.
    """
    scheduler, engine = scheduler_of(llm), llm.llm_engine
    pool = scheduler.kv_cache_manager.block_pool
    usable, preempted = pool.get_num_free_blocks(), preemptions(llm)
    run, held, running = Run(), 0, 0
    schedule = scheduler.schedule

    def counting(*args: Any, **kwargs: Any) -> Any:
        planned = schedule(*args, **kwargs)
        run.scheduled_tokens += planned.total_num_scheduled_tokens
        return planned

    scheduler.schedule = counting
    start, cpu_start = time.perf_counter(), time.process_time()

    def now(kind: str) -> float:
        return run.idle * (kind == clock) + (run.steps if kind == "steps" else time.process_time() - cpu_start)

    came: dict[int, dict[str, float]] = {}
    latencies: dict[int, dict[str, float]] = {}
    while len(latencies) < len(prompts):
        if not engine.has_unfinished_requests():
            run.idle += max(times[len(came)] - now(clock), 0)
        while len(came) < len(prompts) and times[len(came)] <= now(clock):
            index = len(came)
            # A request that is added between two steps arrived while the last one ran.
            came[index] = {kind: times[index] if kind == clock else now(kind) for kind in ("steps", "seconds")}
            engine.add_request(str(index), {"prompt_token_ids": prompts[index]}, greedy(output_tokens))
        finished = engine.step()
        run.steps += 1
        used = usable - pool.get_num_free_blocks()
        held, running = held + used, running + len(scheduler.running)
        run.peak_blocks = max(run.peak_blocks, used)
        run.peak_requests = max(run.peak_requests, len(scheduler.running))
        for output in finished:
            index = int(output.request_id)
            outputs[index] = list(output.outputs[0].token_ids)
            latencies[index] = {kind: now(kind) - then for kind, then in came[index].items()}
            run.output_tokens += len(outputs[index])
            usage = getattr(output, "kv_usage", None)
            run.evicted_blocks += usage.evicted_blocks if usage else 0
    run.seconds, run.cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    scheduler.schedule = schedule
    on_end()
    assert pool.get_num_free_blocks() == usable, "blocks were lost"
    run.preemptions = preemptions(llm) - preempted
    # vLLM never computes the last token of a request.
    run.recomputed_tokens = run.scheduled_tokens - sum(map(len, prompts)) - run.output_tokens + len(prompts)
    run.residency = held / running
    run.latency_steps = [latencies[index]["steps"] for index in range(len(prompts))]
    run.latency_cpu_seconds = [latencies[index]["seconds"] for index in range(len(prompts))]
    return run


# ---- all cases

#: All blocks wait on the host, and layers read there.
REACH = {"evict": "host", "host": "1GiB"}


def cases(options: argparse.Namespace) -> dict[str, dict | None]:
    """Name -> policy. Policies named "budget" get their budget from the runs under pressure before them."""
    kept = {"sink": 32, "recent": 64, "buffer": 0}
    h2o = {"name": "h2o", **kept}
    scored = {
        "h2o ema": {**h2o, "accumulate": "ema"},
        "h2o last": {**h2o, "accumulate": "last", "window": 16},
        "sink-window": {"name": "sink-window", "sink": 32, "buffer": 0},
    }
    others = {
        "h2o sum": h2o,
        "snapkv": {"name": "snapkv", **kept},
        "tova": {"name": "tova", **kept},
        "keydiff": {"name": "keydiff", **kept},
        "strided": {"name": "strided", **kept},
        "full, reached": {"name": "full", **kept, **REACH},
        "full, reached by boxes": {"name": "full", **kept, **REACH, "index": "box"},
    }
    chosen: dict[str, dict | None] = {"stock": None}
    for name, policy in scored.items():
        chosen[f"{name}, pressure"] = {**policy, "when": "pressure", "admit": True, "budget": options.floor}
        chosen[f"{name}, waiting"] = {**policy, "when": "pressure", "budget": options.floor}
    chosen["h2o ema, one read, pressure"] = {**chosen["h2o ema, pressure"], "exact": False}
    for name, policy in {**scored, **others}.items():
        chosen[f"{name}, budget"] = policy
    return chosen


def load(options: argparse.Namespace, on_round: Callable[[dict], Any]) -> None:
    """Run all cases in turn, `--rounds` times, and report raw results by case after each."""
    chosen = {name: policy for name, policy in cases(options).items() if name in options.cases}
    results: dict[str, list[dict]] = {name: [] for name in chosen}
    budgets = []
    with progress() as bar:
        task = bar.add_task("", total=options.rounds * len(chosen))
        for number in range(options.rounds):
            for name, policy in chosen.items():
                bar.update(task, description=f"round {number + 1}, {name}")
                if name.endswith(", budget"):
                    policy = {**policy, "budget": matching_budget(options, results, number)}
                    budgets += [policy["budget"]] if len(budgets) == number else []
                spec = {"policy": policy, "round": number, "options": vars(options)}
                result = in_child("load", spec, {"VLLM_PLUGINS": ""} if policy is None else {})
                results[name].append(result)
                run = Run(**result)
                bar.console.print(
                    f"round {number + 1}  {name:<22} {run.steps:6} steps  {run.seconds:6.1f} s  "
                    f"{run.cpu_seconds:6.1f} s of CPU  {run.preemptions:3.0f} preemptions  residency "
                    f"{run.residency:5.1f}  found {sum(run.found)}/{len(run.found)}",
                    soft_wrap=True,
                    highlight=False,
                )
                bar.advance(task)
            on_round({"policies": chosen, "budgets": budgets, "spacing": spacing(options), "runs": results})


def matching_budget(options: argparse.Namespace, results: dict[str, list[dict]], number: int) -> int:
    """A budget in tokens that is at least the mean of requests under pressure in this round."""
    under_pressure = [runs[number]["residency"] for name, runs in results.items() if name.endswith(", pressure")]
    return math.ceil(max(under_pressure)) * options.block_size


def table(report: dict) -> str:
    lines = [
        "| case | throughput by steps (rounds) | by CPU time | by wall time | steps | output tokens/s of CPU "
        "| preemptions | recomputed tokens | latency p50 / p99, steps | s of CPU | blocks held, mean | peak requests "
        "| evicted blocks | needles |",
        "|---|" + "---|" * 13,
    ]
    for name, raw in report["runs"].items():
        runs = [Run(**run) for run in raw]

        def median(value: Any, runs: list[Run] = runs) -> float:
            return statistics.median(map(value, runs))

        def percentiles(key: str, form: str) -> str:
            of = lambda percent: median(lambda run: float(np.percentile(getattr(run, key), percent)))  # noqa: E731
            return f"{of(50):{form}} / {of(99):{form}}"

        steps, cpu, wall = (
            spread(ratios(report["runs"], name, clock), ".2f") for clock in ("steps", "cpu_seconds", "seconds")
        )
        found, asked = sum(sum(run.found) for run in runs), sum(len(run.found) for run in runs)
        lines.append(
            f"| {name} | {steps} | {cpu} | {wall} | {median(lambda r: r.steps):.0f} "
            f"| {median(lambda r: r.output_tokens / r.cpu_seconds):.0f} | {median(lambda r: r.preemptions):.0f} "
            f"| {median(lambda r: r.recomputed_tokens):.0f} | {percentiles('latency_steps', '.0f')} "
            f"| {percentiles('latency_cpu_seconds', '.1f')} | {median(lambda r: r.residency):.1f} "
            f"| {median(lambda r: r.peak_requests):.0f} | {median(lambda r: r.evicted_blocks):.0f} "
            f"| {found}/{asked} ({', '.join(str(sum(run.found)) for run in runs)}) |"
        )
    return "\n".join(lines)


def ratios(results: dict[str, list[dict]], name: str, clock: str) -> list[float]:
    """Throughput of a case over stock's, round by round."""
    return [stock[clock] / run[clock] for stock, run in zip(results["stock"], results[name], strict=True)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default="out/load")
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads of the engine; the model is tiny")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="float32 on CPUs without AVX512-BF16")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--pool-blocks", type=int, default=384)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--context", type=int, default=2048, help="tokens of each text")
    parser.add_argument("--output", type=int, default=768, help="tokens generated for each")
    parser.add_argument(
        "--load", type=float, default=2.0, help="blocks that requests would hold without a limit, in pools"
    )
    parser.add_argument("--floor", type=int, default=256, help="tokens that a request keeps under pressure")
    parser.add_argument("--at-once", type=int, default=24, help="most requests at once (--max-num-seqs)")
    parser.add_argument("--clock", choices=("steps", "seconds"), default="steps", help="clock of arrivals")
    parser.add_argument("--step-seconds", type=float, default=0.005, help="seconds of a step, for --clock seconds")
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="only these; stock always runs, to compare with")
    options = parser.parse_args()
    options.cases = choose_cases(parser, options.cases, cases(options))
    budget = any(name.endswith(", budget") for name in options.cases)
    if budget and not any(name.endswith(", pressure") for name in options.cases):
        parser.error("a case with a budget takes it from a case under pressure: choose one of these as well")
    return options


def main() -> None:
    options = parse_arguments()
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    title = (
        f"{options.requests} requests of {options.context + QUESTION:,} + {options.output:,} tokens, one every "
        f"{spacing(options):.3g} {options.clock}: {options.load:g} times what a pool of {options.pool_blocks} blocks "
        "holds"
    )
    load(options, lambda report: publish(options, "load", title, table, report))


if __name__ == "__main__":
    run_script(main, load=load_child)
