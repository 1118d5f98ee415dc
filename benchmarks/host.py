"""Measures the host time of policies in each step of a large batch: scheduler, and worker without its kernels.

    python benchmarks/host.py [--requests 256] [--cases stock h2o]

Every case is a process of its own: --requests requests decode in one engine with one small layer. Each step's time in
the plugin's functions is measured; in "stock", with VLLM_PLUGINS empty, the time of vLLM's own scheduler. `view` builds
views and `end` folds sums: torch does this on a CPU, and kernels on a GPU. A CPU has no full CUDA graphs. So each step
makes the choice among graphs (`graph`) as on a device, and times it separately.

Times are CPU times of the engine's thread; the JSON has wall time too. Other load on the machine changes both, and so
does the clock of the processor: "added to stock" is the median of --rounds, each beside its own stock. Neither changes
the number of Python calls of the scheduler, which COUNTED more steps give.
Writes a Markdown table and a JSON with hardware, versions, command and each step's times to --out.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from engines import decoding, make_llm, random_prompts, scheduler_of
from models import Shape, make_model
from reports import choose_cases, in_child, progress, publish, run_script, spread

from vllm_evict.compute.graphs import Attends

#: Most tokens of a step.
CHUNK = 8192
#: Steps whose calls are counted, after those that are timed.
COUNTED = 32
SCHEDULER, WORKER = ("schedule", "update"), ("begin", "graph", "view", "end")
#: CPU time of the thread, and wall time, by their names in the report.
CLOCKS = {"cpu_seconds": time.thread_time, "seconds": time.perf_counter}


def cases(options: argparse.Namespace) -> dict[str, dict | None]:
    """Name -> policy, which keeps half of a prompt; under pressure at least a quarter."""
    half, quarter = {"budget": options.prompt // 2}, {"budget": options.prompt // 4, "when": "pressure"}
    small = {"sink": 32, "recent": 64}
    return {
        "stock": None,
        "full": {"name": "full"},
        "sink-window": {"name": "sink-window", **half},
        "h2o": {"name": "h2o", **half, **small},
        "snapkv": {"name": "snapkv", **half, **small},
        "h2o, pressure": {"name": "h2o", **quarter, **small},
        "sink-window, pressure": {"name": "sink-window", **quarter},
    }


class Stopwatch:
    """Time in functions, step by step.

    Attributes:
        steps: {clock: {function: seconds}} of each step.
    """

    def __init__(self) -> None:
        self._taken = self._empty()
        self.steps: list[dict[str, dict[str, float]]] = []

    @staticmethod
    def _empty() -> dict[str, dict[str, float]]:
        return {clock: defaultdict(float) for clock in CLOCKS}

    def timed(self, name: str, function: Callable) -> Callable:
        """Wrap a function, so that its time is counted under a name, which may have several functions."""

        def call(*args: Any, **kwargs: Any) -> Any:
            starts = {clock: now() for clock, now in CLOCKS.items()}
            try:
                return function(*args, **kwargs)
            finally:
                for clock, now in CLOCKS.items():
                    self._taken[clock][name] += now() - starts[clock]

        return call

    def step(self) -> None:
        """End a step: times until now belong to it."""
        self.steps.append(self._taken)
        self._taken = self._empty()

    def seconds(self, clock: str) -> dict[str, list[float]]:
        """Seconds of each step by function, on one clock."""
        names = dict.fromkeys(name for step in self.steps for name in step[clock])
        return {name: [step[clock][name] for step in self.steps] for name in names}


def watch(llm: Any, stock: bool) -> Stopwatch:
    """Time an engine's scheduler and worker."""
    watch, scheduler = Stopwatch(), scheduler_of(llm)
    scheduler.schedule = watch.timed("schedule", scheduler.schedule)
    scheduler.update_from_output = watch.timed("update", scheduler.update_from_output)
    if stock:
        return watch
    runtime = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.kv_evict
    begin, graph = watch.timed("begin", runtime.begin), watch.timed("graph", lambda: runtime.graph)

    def begun(scheduler_output: Any) -> None:
        begin(scheduler_output)
        with roomy_graphs(runtime):
            graph()

    runtime.begin, runtime.end = begun, watch.timed("end", runtime.end)
    for group in runtime.groups:
        group.view = watch.timed("view", group.view)
    return watch


def count_calls(llm: Any) -> list[int]:
    """Return the calls of Python functions in the scheduler, in each of COUNTED steps; ends the timing of `watch`."""
    scheduler, counted = scheduler_of(llm), []
    del scheduler.schedule, scheduler.update_from_output

    def count(frame: Any, event: str, argument: Any) -> None:
        counted[-1] += event == "call"

    def counting(function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            sys.setprofile(count)
            try:
                return function(*args, **kwargs)
            finally:
                sys.setprofile(None)

        return call

    scheduler.schedule, scheduler.update_from_output = map(counting, (scheduler.schedule, scheduler.update_from_output))
    for _ in range(COUNTED):
        counted.append(0)
        llm.llm_engine.step()
    return counted


@contextmanager
def roomy_graphs(runtime: Any) -> Iterator[None]:
    """In this context steps choose among full graphs as on a device, with room for requests of any length."""
    shapes = [group.shape for group in runtime.groups]
    for group in runtime.groups:
        group.shape = replace(group.shape, graph_blocks=group.shape.max_blocks)
    runtime.measures_in_graphs = Attends.OWN
    try:
        yield
    finally:
        runtime.measures_in_graphs = None
        for group, shape in zip(runtime.groups, shapes, strict=True):
            group.shape = shape


def host_child(spec: dict) -> dict:
    """One case, in a process of its own."""
    options = argparse.Namespace(**spec["options"])
    policy, count, size = spec["policy"], options.requests, options.block_size
    tokens = 2 * options.steps + COUNTED + count * options.prompt // CHUNK + 8
    blocks = count * -(-(options.prompt + tokens) // size) + 1
    if (policy or {}).get("when") == "pressure":  # a pool that runs out with the first blocks after the prompts
        blocks = count * (-(-options.prompt // size) + 1) + count // 4
    llm = make_llm(
        spec["model"],
        policy,
        max_model_len=options.prompt + tokens,
        block_size=size,
        num_gpu_blocks_override=blocks,
        kv_cache_memory_bytes=2 * blocks * size * Shape(**spec["shape"]).kv_bytes_per_token(),
        max_num_seqs=count,
        max_num_batched_tokens=CHUNK,
        enable_prefix_caching=False,
    )
    prompts = random_prompts(count, options.prompt, spec["shape"]["vocab"])
    with decoding(llm, prompts, tokens):
        stopwatch = watch(llm, stock=policy is None)
        for _ in range(options.steps):
            llm.llm_engine.step()
            stopwatch.step()
        calls = count_calls(llm)
    return {clock: stopwatch.seconds(clock) for clock in CLOCKS} | {"calls": calls}


def host(options: argparse.Namespace, model: Path, shape: Shape) -> dict:
    """All cases in turn, `--rounds` times. Returns each step's times, and calls, by case and round."""
    chosen = {name: policy for name, policy in cases(options).items() if name in options.cases}
    runs: dict[str, list[dict]] = {name: [] for name in chosen}
    with progress() as bar:
        task = bar.add_task("", total=len(chosen) * options.rounds)
        for number in range(options.rounds):
            for name, policy in chosen.items():
                bar.update(task, description=f"round {number + 1}, {name}")
                spec = {"model": str(model), "policy": policy, "shape": asdict(shape), "options": vars(options)}
                runs[name].append(in_child("host", spec, {"VLLM_PLUGINS": ""} if policy is None else {}))
                bar.advance(task)
    added_to_stock = {name: added(runs, name) for name in runs}
    return {"policies": chosen, "runs": runs, "added": added_to_stock, "options": vars(options)}


def added(runs: dict[str, list[dict]], case: str) -> list[float]:
    """Seconds that a case adds to stock vLLM's mean step, by CPU time, round by round."""
    return [whole(run) - whole(stock) for run, stock in zip(runs[case], runs["stock"], strict=True)]


def whole(run: dict) -> float:
    """Mean CPU seconds of a step in all that is timed."""
    return sum(map(statistics.mean, run["cpu_seconds"].values()))


def table(report: dict) -> str:
    parts = SCHEDULER + WORKER
    lines = [
        f"| case | {' | '.join(parts)} | added to stock (rounds) | calls of the scheduler a request |",
        "|---|" + "---|" * (len(parts) + 2),
    ]
    for name, rounds in report["runs"].items():
        cells = [cell([each for run in rounds for each in run["cpu_seconds"].get(part, ())]) for part in parts]
        calls = statistics.mean(rounds[0]["calls"]) / report["options"]["requests"]
        extra = spread([1e3 * seconds for seconds in report["added"][name]], ".2f")
        lines.append(f"| {name} | {' | '.join(cells)} | {extra} | {calls:.1f} |")
    return "\n".join(lines)


def cell(seconds: list[float]) -> str:
    """Mean, median and maximum of a step, in ms; empty without steps."""
    if not any(seconds):
        return ""
    return " / ".join(
        f"{1e3 * value:.2f}" for value in (statistics.mean(seconds), statistics.median(seconds), max(seconds))
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256, help="requests that decode together")
    parser.add_argument("--rounds", type=int, default=1, help="each case runs so often, all cases in turn")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=96, help="decode steps timed in a row; each fills blocks of some")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="only these; stock always runs, to compare with")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="OpenMP threads of the engine"
    )
    parser.add_argument("--out", type=Path, default=Path("out/host"))
    options = parser.parse_args()
    options.cases = choose_cases(parser, options.cases, cases(options))
    options.out = str(options.out)
    return options


def main() -> None:
    options = parse_arguments()
    shape = Shape(layers=1, hidden=64, heads=2, kv_heads=2, head_dim=32, intermediate=64, vocab=256)
    with tempfile.TemporaryDirectory() as folder:
        report = host(options, make_model(folder, shape), shape)
    title = (
        f"{options.requests} requests decode, {options.prompt:,} tokens of prompt each: CPU ms of the engine's thread "
        f"in a step: mean / median / most of {options.rounds * options.steps} steps"
    )
    publish(options, "host", title, table, report)


if __name__ == "__main__":
    run_script(main, host=host_child)
