"""Measures where the time of a decode step goes: vLLM's scheduler and runner, projections, attention, the plugin.

    python benchmarks/where.py [--requests 16] [--cases stock h2o]

Every case is a process of its own, in which --requests requests decode together, at their budget. "stock" has no
plugin, and prompts as short as the budget, so that all cases attend to as many tokens. Functions are timed from inside,
and each time is exclusive: that of a function without that of others in the table. The engine has one OpenMP thread by
default, so that no thread waits for another. Times are CPU times; the JSON has wall time too.

Writes a Markdown table and a JSON with hardware, versions, command and each step's times to --out.
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engines import decoding, make_llm, random_prompts, scheduler_of
from models import Shape, make_model
from pressure import CHUNK
from reports import choose_cases, in_child, progress, publish, run_script

#: CPU time of the process, and wall time, by their names in the report.
CLOCKS = {"cpu_seconds": time.process_time, "seconds": time.perf_counter}
#: Functions by the object that has them; what is left of a step is `front`: vLLM's front end and engine loop.
PARTS = {
    "schedule": "scheduler: plan",
    "update": "scheduler: outputs, decisions",
    "runner": "runner: inputs, metadata, tokens",
    "begin": "plugin: plan",
    "view": "plugin: view",
    "end": "plugin: sums, reports",
    "model": "model: norms, rotary, activations",
    "projections": "projections",
    "attention": "attention outside the plugin's kernel",
    "decode": "attention, plugin's kernel",
    "sample": "logits' sampler",
    "front": "front end, engine loop",
}


class Exclusive:
    """Exclusive times of functions, step by step.

    Attributes:
        steps: {clock: {part: seconds}} of each step.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, dict[str, float]]] = []
        self._stack = ["front"]
        self._taken = {clock: defaultdict(float) for clock in CLOCKS}
        self._since = {clock: now() for clock, now in CLOCKS.items()}

    def _turn(self) -> None:
        """Count the time until now for the innermost part."""
        for clock, now in CLOCKS.items():
            at = now()
            self._taken[clock][self._stack[-1]] += at - self._since[clock]
            self._since[clock] = at

    def timed(self, part: str, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._turn()
            self._stack.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._turn()
                self._stack.pop()

        return call

    def wrap(self, part: str, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, self.timed(part, getattr(owner, name)))

    def step(self) -> None:
        """End a step: times until now belong to it."""
        self._turn()
        self.steps.append(self._taken)
        self._taken = {clock: defaultdict(float) for clock in CLOCKS}


def watch(llm: Any, stock: bool) -> Exclusive:
    """Time an engine's parts."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    found, scheduler = Exclusive(), scheduler_of(llm)
    found.wrap("schedule", scheduler, "schedule")
    found.wrap("update", scheduler, "update_from_output")
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    runner = worker.model_runner
    found.wrap("runner", runner, "execute_model", "sample_tokens")
    found.wrap("sample", runner, "_sample")
    found.wrap("model", runner, "_model_forward")
    for module in runner.model.modules():
        if isinstance(module, (LinearBase, LogitsProcessor)):
            found.wrap("projections", module, "forward")
        elif hasattr(module, "impl"):
            found.wrap("attention", module, "forward")
    if not stock:
        runtime = worker.kv_evict
        found.wrap("begin", runtime, "begin")
        found.wrap("end", runtime, "end")
        for group in runtime.groups:
            found.wrap("view", group, "view")
        found.wrap("decode", runtime.ops, "decode")
    return found


def cases(options: argparse.Namespace) -> dict[str, dict | None]:
    sizes = {"sink": 32, "recent": 64, "buffer": 0, "budget": options.budget}
    window = {"name": "sink-window", "sink": 32, "recent": options.budget - 32 - options.block_size}
    return {"stock": None, "sink-window": window, "h2o": {"name": "h2o", **sizes}}


def where_child(spec: dict) -> dict:
    """One case, in a process of its own."""
    options, policy = argparse.Namespace(**spec["options"]), spec["policy"]
    count, size = options.requests, options.block_size
    prompt = options.budget - options.steps // 2 if policy is None else options.prompt
    tokens = 2 * options.steps + count * -(-prompt // CHUNK) + 8
    blocks = count * (-(-(prompt + tokens) // size) + 1)
    llm = make_llm(
        spec["model"],
        policy,
        max_model_len=prompt + tokens,
        block_size=size,
        kv_cache_memory_bytes=blocks * size * Shape(**spec["shape"]).kv_bytes_per_token(),
        max_num_seqs=count,
        max_num_batched_tokens=CHUNK,
        enable_prefix_caching=False,
    )
    prompts = random_prompts(count, prompt, spec["shape"]["vocab"])
    with decoding(llm, prompts, tokens):
        found = watch(llm, stock=policy is None)
        for _ in range(options.steps):
            llm.llm_engine.step()
            found.step()
    rounded = [
        {clock: {part: round(each, 6) for part, each in step[clock].items()} for clock in CLOCKS}
        for step in found.steps
    ]
    return {clock: [step[clock] for step in rounded[1:]] for clock in CLOCKS}


def where(options: argparse.Namespace, model: Path, shape: Shape) -> dict:
    """All cases in turn. Returns each step's times by case, rounds one after the other."""
    chosen = {name: policy for name, policy in cases(options).items() if name in options.cases}
    runs: dict[str, dict[str, list]] = {name: {clock: [] for clock in CLOCKS} for name in chosen}
    with progress() as bar:
        task = bar.add_task("", total=len(chosen) * options.rounds)
        for _ in range(options.rounds):
            for name, policy in chosen.items():
                bar.update(task, description=name)
                spec = {"model": str(model), "policy": policy, "shape": asdict(shape), "options": vars(options)}
                run = in_child("where", spec, {"VLLM_PLUGINS": ""} if policy is None else {})
                for clock in CLOCKS:
                    runs[name][clock] += run[clock]
                bar.advance(task)
    return {"policies": chosen, "runs": runs}


def median(run: dict, part: str) -> float:
    """Median of all steps, in ms of CPU time."""
    return 1e3 * statistics.median(step.get(part, 0.0) for step in run["cpu_seconds"])


def table(report: dict) -> str:
    runs = report["runs"]
    lines = [f"| part | {' | '.join(f'{name}, ms' for name in runs)} |", "|---|" + "---:|" * len(runs)]
    for part, words in PARTS.items():
        values = [median(run, part) for run in runs.values()]
        lines.append(f"| {words} | {' | '.join(f'{value:.2f}' if value else '' for value in values)} |")
    totals = [1e3 * statistics.median(sum(step.values()) for step in run["cpu_seconds"]) for run in runs.values()]
    lines.append(f"| a step | {' | '.join(f'{total:.2f}' for total in totals)} |")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=16, help="requests that decode together")
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of each prompt, under policies")
    parser.add_argument("--budget", type=int, default=320, help="tokens that a request keeps")
    parser.add_argument("--steps", type=int, default=128, help="decode steps timed in a row")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="only these")
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads of the engine")
    parser.add_argument("--out", default="out/where")
    options = parser.parse_args()
    options.cases = choose_cases(parser, options.cases, cases(options))
    return options


def main() -> None:
    options = parse_arguments()
    shape = Shape(layers=4, hidden=256, heads=4, kv_heads=4, head_dim=64, intermediate=704)
    with tempfile.TemporaryDirectory() as folder:
        report = where(options, make_model(folder, shape), shape)
    title = f"{options.requests} requests decode at {options.budget} tokens each: CPU ms of a step, median"
    publish(options, "where", title, table, report)


if __name__ == "__main__":
    run_script(main, where=where_child)
