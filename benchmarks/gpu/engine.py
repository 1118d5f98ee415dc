"""Measures whole vLLM engines on a GPU, stock and with policies in turn.

    python benchmarks/gpu/engine.py [--rows armed step] [--rounds 3] [--seconds 540] [--out out/gpu/engine.json]
    python benchmarks/gpu/engine.py --plot JSON ...            pictures of earlier measurements
    python benchmarks/gpu/engine.py --dry-run                  all rows on tiny models, on the CPU engine

Models have the shape of a published one and vLLM's dummy weights, so nothing is downloaded. Rows:

armed     a policy that never has to evict, over stock, tokens/s; then a policy whose requests could outgrow the budget
          and do not, so that running sums are kept. Llama-3.1-8B, 64 requests of 2,048 + 512 tokens (prompts are a
          token longer, for the second), in a pool for all.
paper     h2o at 20 % of the context over stock, tokens/s. Llama-2-7B, 64 requests of 2,048 + 2,048 tokens, in the KV
          pool that a card of 24 GB leaves beside the weights (`engine_sizes.card_blocks`).
pressure  h2o, snapkv, sink-window and reach (the rest on the host) at an eighth of the context over stock, tokens/s.
          Llama-3.1-8B, 32 requests of 8,192 + 1,024 tokens in a pool for a quarter of them.
latency   a decode step at growing context, of one request and of 8 (as far as their cache fits), stock, policies that
          keep 4,096 tokens, and decodes that read as many of all. Llama-3.1-8B.
step      h2o, a decode step of 256 requests: device time of the plugin's launches beside attention (by torch's
          profiler), and calls that make the host wait for the device. Llama-3.1-8B.

Each engine is a process of its own. Engines of a row start and stay up together if they fit into the GPU's memory, and
run alternately; otherwise each is started for its turn and ended after it. Every other round has the reverse order,
and a ratio compares two runs of one round. Stock runs without the plugin and with the CUDA graphs that vLLM chooses,
unless --cudagraph-mode sets one mode for all. A row is an error if a policy that should have evicted did not. Waits are
those that torch reports. For reports, which come with a step's output, a step waits on an event, as vLLM does for its
own output.

Time, estimated: the first engine of a machine takes some 75 s to start (imports, torch.compile, graph capture), later
ones some 35 s. Two that start at once, with OMP_NUM_THREADS=2 on 16 cores, were not ready after 100 s. The minutes of a
row, and of each further round, are:

    armed 3.5 and 0.6    paper 5.5 and 4    pressure 5 and 1.7    latency 6 and 6    step 2 and 0.3

--seconds is a limit: rows and rounds that do not fit are left out and named, and an engine that still runs at the end
is killed. Calls that take less than nine minutes: --rows armed step, --rows paper, --rows pressure and --rows latency.

Writes a JSON with all rounds, versions and the GPU's name and driver to --out, after every row, and the engines' logs
beside it. Without a GPU it prints a line and exits with status 0; if a row failed it exits with 1.

--dry-run measures nothing: figures of tiny models on a CPU are not compared with the targets. For speed its engines
share one process, unless --processes is given.
"""

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

sys.path += [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from engine_rows import FILL, REACH, READ, ROWS, STOCK, Plan, RowError, Runs, require
from machine import the_gpu
from models import write_config
from reports import ENVIRONMENT, to_json

NO_GPU = {"name": "none: a dry run", "free": 1 << 40, "shared": True}
#: Seconds of a row's first round, starts of its engines included, by estimate.
ESTIMATES = {"armed": 210, "paper": 330, "pressure": 300, "latency": 360, "step": 120}


class Clock:
    """The rest of `--seconds`."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


class Process:
    """An engine in a process of its own; calls of `engine_child.Engine` are lines of JSON.

    Args:
        spec: of the engine.
        clock: when it has run out the process is ended.
        log: file that gets the engine's output.

    Raises:
        RowError: from any call, if the engine failed or took too long; with the end of its output.
    """

    def __init__(self, spec: dict[str, Any], clock: Clock, log: Path) -> None:
        environment = {**ENVIRONMENT, "VLLM_LOGGING_LEVEL": "INFO", **os.environ}
        if spec["policy"] is None:
            environment["VLLM_PLUGINS"] = ""
        log.parent.mkdir(parents=True, exist_ok=True)
        self.clock, self.case, self.log = clock, spec["case"], log
        with log.open("a") as file:
            file.write(f"---- {spec['case']}\n")
            file.flush()
            command = [sys.executable, str(Path(__file__).with_name("engine_child.py"))]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": file}
            self.process = subprocess.Popen(command, env=environment, text=True, **pipes)
        try:
            self._ask(spec)
        except BaseException:
            self.close()
            raise

    def call(self, method: str, **arguments: Any) -> Any:
        return self._ask([method, arguments])

    def _ask(self, what: Any) -> Any:
        try:
            print(json.dumps(what), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise RowError(f"the engine of {self.case} is gone{self._last_words()}") from None
        ready, _, _ = select.select([self.process.stdout], [], [], max(self.clock.left, 0))
        if not ready:
            self.process.kill()
            raise RowError(f"the engine of {self.case} was ended: --seconds were over")
        answer = self.process.stdout.readline()
        if not answer:
            raise RowError(f"the engine of {self.case} died, status {self.process.wait()}{self._last_words()}")
        worked, result = json.loads(answer)
        require(worked, f"the engine of {self.case} failed:\n{result}")
        return result

    def _last_words(self) -> str:
        return f"; {self.log} ends with:\n{self.log.read_text()[-2000:]}"

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(min(20, max(self.clock.left, 0)))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class Here:
    """An engine in this process, for fast dry runs."""

    def __init__(self, spec: dict[str, Any]) -> None:
        for name, value in {**ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR"}.items():
            os.environ.setdefault(name, value)
        from engine_child import Engine

        self.engine = Engine(spec)

    def call(self, method: str, **arguments: Any) -> Any:
        return json.loads(json.dumps(getattr(self.engine, method)(**arguments)))

    def close(self) -> None:
        self.engine.close()


def specification(plan: Plan, case: str, model: str, options: argparse.Namespace) -> dict[str, Any]:
    """The specification of one engine; cases differ in the policy only."""
    engine = {
        "dtype": plan.dtype,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": plan.tokens,
        "block_size": plan.block_size,
        "kv_cache_memory_bytes": plan.pool_bytes,
        "max_num_seqs": plan.requests,
        "max_num_batched_tokens": plan.chunk,
        "enable_prefix_caching": False,
        "enforce_eager": options.dry_run,
    }
    if not options.dry_run:
        # The pool's bytes are given, so this is only the memory that has to be free at start.
        engine["gpu_memory_utilization"] = 0.05
        # Graphs for every batch size of the row; vLLM would capture up to 512 requests.
        graphs = {"max_cudagraph_capture_size": plan.requests}
        if options.cudagraph_mode:
            graphs["cudagraph_mode"] = options.cudagraph_mode
        engine["compilation_config"] = graphs
        if options.backend:
            engine["attention_config"] = {"backend": options.backend}
    return {"case": case, "model": model, "policy": plan.cases[case], "engine": engine, "vocab": plan.shape.vocab}


def measure(plan: Plan, options: argparse.Namespace, clock: Clock, gpu: dict[str, Any], row: dict[str, Any]) -> None:
    """Run all cases in turn, round by round.

    Args: plan: their loads. options: of the command line. clock: limits the rounds. gpu: from `the_gpu`. row: gets
        results as they come, so that a later failure loses none: `together`, facts of the engines (`engines`), raw
        results of the rounds that all cases have finished (`runs`), and of an unfinished round (`unfinished`).
    """
    together = gpu["shared"] and len(plan.cases) * plan.memory <= gpu["free"] * FILL
    facts: dict[str, dict] = {}
    runs: Runs = {case: [] for case in plan.cases}
    row |= {"together": together, "engines": facts, "runs": runs}
    in_this_process = options.dry_run and not options.processes
    with tempfile.TemporaryDirectory() as model, ExitStack() as up:
        write_config(model, replace(plan.shape, max_len=plan.tokens))

        @contextmanager
        def running(case: str) -> Iterator[Process | Here]:
            spec = specification(plan, case, model, options)
            engine = Here(spec) if in_this_process else Process(spec, clock, options.log)
            try:
                facts.setdefault(case, engine.call("facts"))
                check_facts(plan, dict(facts), alone=isinstance(engine, Process))
                engine.call(plan.warm_up.method, **plan.warm_up.arguments)
                yield engine
            finally:
                engine.close()

        engines = {}
        if together:
            with ThreadPoolExecutor(1 if in_this_process else len(plan.cases)) as pool:
                started = pool.map(lambda case: up.enter_context(running(case)), plan.cases)
                engines = dict(zip(plan.cases, started))
        for number in range(options.rounds):
            start = time.monotonic()
            row["unfinished"] = answers = {case: {} for case in plan.cases}
            for case in list(plan.cases)[:: 1 if number % 2 == 0 else -1]:
                with ExitStack() as turn:
                    engine = engines[case] if together else turn.enter_context(running(case))
                    for name, work in plan.work.items():
                        answers[case][name] = engine.call(work.method, **work.arguments)
            for case, answer in row.pop("unfinished").items():
                runs[case].append(answer)
            took = time.monotonic() - start
            if number + 1 < options.rounds and 1.2 * took > clock.left:
                print(f"  {number + 1} of {options.rounds} rounds: no time for another of {took:.0f} s", flush=True)
                break


def check_facts(plan: Plan, facts: dict[str, dict], alone: bool) -> None:
    """Check that engines differ in the policy only."""
    first = next(iter(facts.values()))
    for case, its in facts.items():
        pool = f"{case}: a pool of {its['pool_blocks']} blocks, {plan.blocks} were asked for"
        # An index and staging come out of the pool's memory.
        alike = case in (REACH, READ) or abs(its["pool_blocks"] - plan.blocks) <= plan.blocks // 100
        require(alike and its["pool_blocks"] <= plan.blocks * 1.01, pool)
        for what in ("device", "attention_backend", "model_runner", "async_scheduling", "block_size"):
            require(its[what] == first[what], f"{case}: {what} {its[what]}, other engines have {first[what]}")
        if alone:
            require(its["plugin_loaded"] == (case != STOCK), f"{case}: plugin loaded: {its['plugin_loaded']}")


# ---- reports


def run_row(name: str, options: argparse.Namespace, clock: Clock, gpu: dict[str, Any]) -> dict[str, Any]:
    """A row's plan, raw results and lines, or its error."""
    planned, lines_of = ROWS[name]
    start, row, errors = time.monotonic(), {}, []
    try:
        contexts = {"contexts": options.contexts} if name == "latency" and options.contexts else {}
        plan = planned(options.dry_run, int(gpu["free"] * options.share), **contexts)
        some = {STOCK, *(options.cases or plan.cases)}
        plan = replace(plan, cases={case: policy for case, policy in plan.cases.items() if case in some})
        row |= {"load": plan.facts, "shape": asdict(plan.shape), "dtype": plan.dtype}
        measure(plan, options, clock, gpu, row)
    except RowError as error:
        errors.append(str(error))
    for case, facts in row.get("engines", {}).items():
        print(
            f"  {case}: {facts['attention_backend']}, CUDA graphs {facts['cudagraph_mode']}, model runner "
            f"{facts['model_runner']}, pool of {facts['pool_blocks']:,} blocks of {facts['block_size']}"
        )
    # Rounds that all cases have finished count, even if a later round failed.
    if all(row.get("runs", {"": []}).values()):
        try:
            lines = [line.judge(options.dry_run) for line in lines_of(plan, row["runs"])]
            row["lines"] = [asdict(line) for line in lines]
            print(*(f"  {line.said(options.dry_run)}" for line in lines), sep="\n", flush=True)
        except RowError as error:
            errors.append(str(error))
    if errors:
        row["error"] = "; ".join(errors)
        print(f"  failed: {row['error']}", flush=True)
    return row | {"seconds": time.monotonic() - start}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = {"default": list(ROWS), "choices": list(ROWS), "metavar": "ROW", "help": ", ".join(ROWS)}
    parser.add_argument("--rows", nargs="+", **every)
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="only these beside stock, such as h2o")
    parser.add_argument("--contexts", nargs="+", type=int, metavar="TOKENS", help="of the row latency: only these")
    parser.add_argument("--share", type=float, default=1.0, help="of the GPU's memory that a row is planned for")
    parser.add_argument("--rounds", type=int, help="most rounds; default 3, but 1 of latency and in a dry run")
    parser.add_argument("--seconds", type=float, default=540, help="limit for all rows of this call")
    parser.add_argument("--out", type=Path, default=Path("out/gpu/engine.json"), help="JSON with all rounds")
    parser.add_argument("--backend", help="vLLM's attention backend, such as TRITON_ATTN; by default vLLM's choice")
    parser.add_argument("--cudagraph-mode", help="of all cases, such as PIECEWISE; by default vLLM's choice for each")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU engine: measures nothing")
    parser.add_argument("--processes", action="store_true", help="in a dry run too, each engine in its own process")
    parser.add_argument("--plot", type=Path, nargs="+", metavar="JSON", help="draw pictures of earlier results")
    pictures = "where --plot puts them; default out/gpu"
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help=pictures)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    if options.plot:
        from engine_plots import NothingToDraw, draw

        try:
            folder = options.pictures or Path("out/gpu")
            made = draw(options.plot, folder, options.dry_run)
        except (NothingToDraw, OSError) as error:
            sys.exit(str(error))
        print(f"written: {', '.join(map(str, made))}")
        return
    if not options.dry_run and not torch.cuda.is_available():
        print("no GPU here: nothing was measured")
        sys.exit(0)
    gpu = NO_GPU if options.dry_run else the_gpu()
    print(f"{gpu['name']}{', DRY RUN on tiny models: no figure means anything' if options.dry_run else ''}")
    options.log, clock, wanted_rounds = options.out.with_suffix(".log"), Clock(options.seconds), options.rounds
    options.out.parent.mkdir(parents=True, exist_ok=True)
    given = {name: value for name, value in vars(options).items() if name not in ("plot", "pictures")}
    report = {"dry_run": options.dry_run, "gpu": gpu, "command": " ".join(["python", *sys.argv])}
    report |= {"options": {name: str(v) if isinstance(v, Path) else v for name, v in given.items()}, "rows": {}}
    for name in options.rows:
        needs = 0 if options.dry_run or not report["rows"] else ESTIMATES[name]
        if clock.left < needs:
            print(f"{name}: left out, {clock.left:.0f} s are left of --seconds and it takes about {needs}")
            report["rows"][name] = {"left_out": True}
            continue
        print(name, flush=True)
        options.rounds = wanted_rounds or (1 if options.dry_run or name == "latency" else 3)
        report["rows"][name] = run_row(name, options, clock, gpu)
        options.out.write_text(to_json(report) + "\n")
    options.out.write_text(to_json(report) + "\n")
    print(f"written: {options.out}")
    if any("error" in row for row in report["rows"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
