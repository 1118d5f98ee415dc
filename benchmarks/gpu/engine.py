"""Whole vLLM engines on a GPU, stock and with policies in turn: what eviction gains, and what it costs.

    python benchmarks/gpu/engine.py [--rows armed step] [--rounds 3] [--seconds 540] [--out out/gpu/engine.json]
    python benchmarks/gpu/engine.py --plot out/gpu/*.json      pictures of what was measured, to docs/performance
    python benchmarks/gpu/engine.py --dry-run                  all of it on tiny models, on the CPU engine

Models have the shape of a published one and weights that vLLM makes up, so nothing is downloaded. Rows:

armed     a policy that never has to evict, over stock, tokens/s; then one whose requests could outgrow the budget, so
          that running sums are kept, and do not. Llama-3.1-8B, 64 requests of 2,048 + 512 tokens, in a pool for all.
paper     h2o at 20 % of the context over stock, tokens/s. Llama-2-7B, 64 requests of 2,048 + 2,048 tokens, in the KV
          pool that a card of 24 GB leaves beside the weights (`engine_sizes.card_blocks`).
pressure  h2o, snapkv and sink-window at an eighth of the context over stock, tokens/s. Llama-3.1-8B, 32 requests of
          8,192 + 1,024 tokens in a pool for a quarter of them.
latency   a decode step at growing context, of one request and of 8 (as far as their cache fits), stock and policies
          that keep 4,096 tokens. Llama-3.1-8B.
step      h2o, a decode step of 256 requests: device time of what the plugin launches beside attention (torch's profiler),
          and calls that make the host wait for the device. Llama-3.1-8B.

Each engine is a process of its own. Those of a row stay up together where they fit into the GPU's memory, and work by
turns; else each is started for its turn and ended after it. Rounds alternate in order, and a ratio compares two runs of
one round. Stock runs without the plugin and with whatever CUDA graphs vLLM chooses for it, unless --cudagraph-mode says
the same for all. A row is an error if a policy that should have acted did not.

Time, by estimate, not measured: an engine takes about 75 s to start (imports, torch.compile, graph capture), later ones
of a run about 35 s, since compiled kernels are found again. With that the rows take, in minutes, for the first round and
each further one: armed 3.5 and 0.6; paper 5.5 and 4; pressure 5 and 1.7; latency 6 and 6 (the engines do not fit
together); step 2 and 0.3. --seconds is a limit: rows and rounds that would not fit any more are left out and said to be,
and the engine that is up when it is reached is ended. Calls of less than nine minutes each: `--rows armed step`, `--rows
paper`, `--rows pressure`, `--rows latency`.

Writes a JSON with all rounds, versions and the GPU's name and driver to --out, after every row, and what engines log
beside it. Where there is no GPU it says so and leaves with status 0; it leaves with 1 if a row failed. --dry-run measures
nothing: figures of tiny models on a CPU are never held against what is wanted. Its engines share one process, for speed,
but with --processes.
"""

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

sys.path += [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from engine_sizes import GIB, ITEMSIZE, LLAMA_2_7B, LLAMA_3_1_8B, card_blocks, load_blocks, parameters
from models import Shape, write_config
from pressure import ENVIRONMENT, ratios, spread

TINY = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=32, intermediate=96, vocab=256)
STOCK = "stock"
#: Memory of an engine beside weights and KV pool: activations, CUDA graphs, libraries.
OVERHEAD = 6 * GIB
#: Most of a GPU's memory that engines take together.
FILL = 0.93
#: Seconds of a row's first round, starts of its engines included, by estimate.
ESTIMATES = {"armed": 210, "paper": 330, "pressure": 300, "latency": 360, "step": 120}
AT_LEAST, AT_MOST = ">=", "<="


@dataclass(frozen=True)
class Work:
    """One call of `engine_child.Engine` in each round."""

    method: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What a row runs: an engine, the cases that differ in their policy alone, and their work.

    Attributes:
        blocks: of the KV pool.
        tokens: most of a request.
        requests: most at once.
        chunk: most tokens of a step.
        warm_up: not timed.
        work: name -> work, the same for all cases.
        facts: of the load, for the report.
    """

    shape: Shape
    dtype: str
    block_size: int
    blocks: int
    tokens: int
    requests: int
    chunk: int
    cases: dict[str, dict[str, Any] | None]
    warm_up: Work
    work: dict[str, Work]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def pool_bytes(self) -> int:
        return self.blocks * self.block_size * self.shape.kv_bytes_per_token(torch.empty(0, dtype=self.type).itemsize)

    @property
    def type(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def memory(self) -> int:
        """Of one engine, on a GPU."""
        return parameters(self.shape) * ITEMSIZE + self.pool_bytes + OVERHEAD


@dataclass
class Line:
    """One figure, and what it should be.

    Attributes:
        value: median over rounds.
        rounds: each round's; empty where there is none of its own.
        wanted: (AT_LEAST or AT_MOST, limit), or None.
        met: None where nothing is wanted, and in a dry run.
        counts: of the case, medians.
    """

    case: str
    figure: str
    value: float | None
    rounds: list[float] = field(default_factory=list)
    wanted: tuple[str, float] | None = None
    met: bool | None = None
    counts: dict[str, float] = field(default_factory=dict)

    def judge(self, dry_run: bool) -> "Line":
        if self.wanted is not None and not dry_run and self.value is not None:
            how, limit = self.wanted
            self.met = self.value >= limit if how == AT_LEAST else self.value <= limit
        return self

    def said(self, dry_run: bool) -> str:
        value = "not measured" if self.value is None else f"{self.value:.4g}"
        text = f"{self.case}: {self.figure} {value}"
        if len(self.rounds) > 1:
            text += f" ({', '.join(f'{each:.4g}' for each in self.rounds)})"
        if self.wanted is not None:
            verdict = "dry run, not compared" if dry_run else {True: "met", False: "missed", None: "unknown"}[self.met]
            text += f", wanted {self.wanted[0]} {self.wanted[1]:g}: {verdict}"
        counts = ", ".join(f"{value:,.6g} {name.replace('_', ' ')}" for name, value in self.counts.items())
        return text + (f" | {counts}" if counts else "")


class RowError(RuntimeError):
    """A row whose figures would not mean what they say."""


def require(valid: bool, sentence: str) -> None:
    if not valid:
        raise RowError(sentence)


# ---- rows: what they run

#: Results of a case: a list of rounds, each {name of work: what the engine answered}.
Runs = dict[str, list[dict[str, Any]]]


def batches(shape: Shape, dtype: str, blocks: int, size: int, load: tuple[int, int, int], **rest: Any) -> Plan:
    """All requests at once, from first to last token."""
    requests, prompt, output = load
    batch = {"requests": requests, "prompt": prompt, "output": output}
    few = {"requests": max(requests // 4, 2), "prompt": prompt, "output": max(output // 8, 2), "seed": 1}
    common = {"tokens": prompt + output, "requests": requests, "warm_up": Work("batch", few)}
    facts = batch | {"pool_blocks": blocks, "block_size": size}
    return Plan(shape, dtype, size, blocks, **common, work={"batch": Work("batch", batch)}, facts=facts, **rest)


def armed(tiny: bool, memory: int | None) -> Plan:
    requests, prompt, output, size = (4, 96, 32, 32) if tiny else (64, 2048, 512, 16)
    sizes = {"name": "h2o", "buffer": 0, "sink": size, "recent": size}
    cases = {
        STOCK: None,
        "h2o that can't outgrow its budget": sizes | {"budget": prompt + output + size},
        # A token more than the budget, which is never computed: the last one is sampled and that is all.
        "h2o that could": sizes | {"budget": prompt + output},
    }
    blocks = load_blocks(requests, prompt + 1 + output, size)
    shape, dtype, chunk = (TINY, "float32", 64) if tiny else (LLAMA_3_1_8B, "bfloat16", 8192)
    return batches(shape, dtype, blocks, size, (requests, prompt + 1, output), chunk=chunk, cases=cases)


def paper(tiny: bool, memory: int | None) -> Plan:
    requests, prompt, output, size = (6, 320, 320, 32) if tiny else (64, 2048, 2048, 16)
    budget = (prompt + output) // 5 // size * size
    # As in the paper: half of it heavy hitters, half recent tokens, no sinks.
    policy = {"name": "h2o", "budget": budget, "buffer": 0, "sink": 0, "recent": budget // 2 // size * size}
    shape = replace(TINY, kv_heads=4) if tiny else LLAMA_2_7B
    blocks = load_blocks(2, prompt + output, size) if tiny else card_blocks(LLAMA_2_7B, size)
    rest = {"chunk": 64 if tiny else 2048, "cases": {STOCK: None, "h2o": policy}}
    return batches(shape, "float32" if tiny else "float16", blocks, size, (requests, prompt, output), **rest)


def pressure(tiny: bool, memory: int | None) -> Plan:
    requests, prompt, output, size = (6, 640, 128, 32) if tiny else (32, 8192, 1024, 16)
    sink, recent = (size, size) if tiny else (64, 256)
    budget = (prompt + output) // 8 // size * size
    scored = {"budget": budget, "buffer": 0, "sink": sink, "recent": recent}
    cases = {
        STOCK: None,
        "h2o": {"name": "h2o", **scored},
        "snapkv": {"name": "snapkv", **scored},
        # As many blocks: it keeps sinks, window and the block that is being written.
        "sink-window": {"name": "sink-window", "sink": sink, "recent": budget - sink - size},
    }
    blocks = load_blocks(requests, prompt + output, size, 1 / 4)
    shape, dtype, chunk = (TINY, "float32", 64) if tiny else (LLAMA_3_1_8B, "bfloat16", 8192)
    return batches(shape, dtype, blocks, size, (requests, prompt, output), chunk=chunk, cases=cases)


def latency(tiny: bool, memory: int | None) -> Plan:
    size, steps, sizes = (32, 8, (1, 2)) if tiny else (16, 48, (1, 8))
    contexts = [128, 256, 512] if tiny else [4096 << n for n in range(6)]
    budget, sink = (128, 32) if tiny else (4096, 64)
    shape, dtype, chunk = (TINY, "float32", 64) if tiny else (LLAMA_3_1_8B, "bfloat16", 8192)
    room = None
    if memory is not None:
        room = (memory * FILL - parameters(shape) * ITEMSIZE - OVERHEAD) / shape.kv_bytes_per_token(ITEMSIZE)
    # While the last prompt is computed the first request decodes: as many tokens as there are chunks, and some.
    spare = size + 2 * steps + max(sizes) * (max(contexts) // chunk + 2)
    fits = lambda batch: [each for each in contexts if room is None or batch * (each + spare) <= room]  # noqa: E731
    chosen = {batch: fits(batch) for batch in sizes if fits(batch)}
    require(bool(chosen), f"no context fits into this GPU's memory: the shortest is {contexts[0]} tokens")
    work = {
        f"batch {batch}": Work("latency", {"batch": batch, "contexts": found, "steps": steps})
        for batch, found in chosen.items()
    }
    tokens = max(max(found) for found in chosen.values()) + spare
    blocks = max(load_blocks(batch, max(found) + spare, size) for batch, found in chosen.items())
    cases = {
        STOCK: None,
        "h2o": {"name": "h2o", "budget": budget, "buffer": 0, "sink": sink, "recent": budget // 16 // size * size or size},
        "sink-window": {"name": "sink-window", "sink": sink, "recent": budget - sink - size},
    }
    warm = Work("latency", {"batch": max(chosen), "contexts": contexts[:1], "steps": 2, "seed": 1})
    facts = {"contexts": {str(batch): found for batch, found in chosen.items()}, "budget": budget, "pool_blocks": blocks}
    return Plan(
        shape, dtype, size, blocks, tokens, max(chosen), chunk, cases=cases, warm_up=warm, work=work, facts=facts
    )


def step(tiny: bool, memory: int | None) -> Plan:
    batch, size, budget, buffer = (4, 32, 128, 32) if tiny else (256, 16, 1024, 128)
    shape, dtype, chunk = (TINY, "float32", 64) if tiny else (LLAMA_3_1_8B, "bfloat16", 8192)
    sink, recent = (32, 32) if tiny else (64, 256)
    policy = {"name": "h2o", "budget": budget, "buffer": buffer, "sink": sink, "recent": recent}
    # From one decision of a request to its next: what is timed has as many as any other steps.
    steps, prompt = buffer + size, budget + buffer + 1
    tokens = prompt + 3 * steps + batch * (-(-prompt // chunk) + 1) + 64
    blocks = load_blocks(batch, budget + buffer + 2 * size, size) + 2 * chunk // size
    warm = Work("latency", {"batch": max(batch // 8, 1), "contexts": [budget + buffer], "steps": 2, "seed": 1})
    work = {"step": Work("step", {"batch": batch, "prompt": prompt, "steps": steps})}
    facts = {"batch": batch, "budget": budget, "buffer": buffer, "steps": steps, "pool_blocks": blocks}
    return Plan(
        *(shape, dtype, size, blocks, tokens, batch, chunk),
        **{"cases": {"h2o": policy}, "warm_up": warm, "work": work, "facts": facts},
    )


# ---- rows: what their figures say

#: What is said of a batch beside its ratio.
COUNTS = (
    "tokens_per_second",
    "evicted_blocks",
    "decisions",
    "preemptions",
    "recomputed_tokens",
    "peak_requests",
    "peak_blocks",
    "measured_requests",
    "own_decode_steps",
    "prefill_seconds",
    "seconds",
)


def over_stock(runs: Runs, wanted: dict[str, float]) -> list[Line]:
    """Tokens/s of each case over stock's, round by round."""
    plain = {case: [each["batch"] for each in rounds] for case, rounds in runs.items()}
    lines = []
    for case, found in ratios(plain, "seconds").items():
        counts = {name: statistics.median(run[name] for run in plain[case]) for name in COUNTS}
        limit = (AT_LEAST, wanted[case]) if case in wanted else None
        lines.append(Line(case, "tokens/s over stock", statistics.median(found), found, limit, counts=counts))
    return lines


def of_armed(plan: Plan, runs: Runs) -> list[Line]:
    _, never, could = plan.cases
    for case in (never, could):
        for run in (each["batch"] for each in runs[case]):
            require(run["evicted_blocks"] == 0, f"{case}: {run['evicted_blocks']} blocks were evicted, wanted none")
            sums = run["measured_requests"]
            require((sums > 0) == (case == could), f"{case}: running sums of {sums} requests")
    return over_stock(runs, {never: 0.98})


def of_paper(plan: Plan, runs: Runs) -> list[Line]:
    check_pressure(plan, runs)
    return over_stock(runs, {"h2o": 2.5})


def of_pressure(plan: Plan, runs: Runs) -> list[Line]:
    check_pressure(plan, runs)
    return over_stock(runs, {case: 5.0 for case in plan.cases if case != STOCK})


def check_pressure(plan: Plan, runs: Runs) -> None:
    """The pool was too small for stock, and policies did what they are for."""
    for case, rounds in runs.items():
        for run in (each["batch"] for each in rounds):
            if case == STOCK:
                served = f"stock had {run['peak_requests']} of {plan.requests} requests at once"
                require(run["peak_requests"] < plan.requests, f"{served}: the pool was not too small")
            else:
                check_acted(plan, case, run)


def check_acted(plan: Plan, case: str, counts: dict[str, Any]) -> None:
    require(counts["evicted_blocks"] > 0 and counts["decisions"] > 0, f"{case}: nothing was evicted")
    require(counts["own_decode_steps"] > 0, f"{case}: no step was decoded over a table with holes")
    measures = plan.cases[case]["name"] != "sink-window"
    sums = counts["measured_requests"]
    require((sums > 0) == measures, f"{case}: running sums of {sums} requests")


def of_latency(plan: Plan, runs: Runs) -> list[Line]:
    lines = []
    for name, work in plan.work.items():
        contexts = [str(context) for context in work.arguments["contexts"]]
        for case, rounds in runs.items():
            milliseconds = {}
            for context in contexts:
                found = [each[name][context] for each in rounds]
                if case != STOCK:
                    for counts in found:
                        check_acted(plan, case, counts)
                each_round = [1e3 * statistics.median(run["seconds"]) for run in found]
                milliseconds[context] = each_round
                counts = {key: found[0][key] for key in ("evicted_blocks", "decisions", "own_decode_steps")}
                figure = f"{name}, {int(context):,} tokens: ms a step"
                lines.append(Line(case, figure, statistics.median(each_round), each_round, counts=counts))
            of_rounds = [[ms[number] for ms in milliseconds.values()] for number in range(len(rounds))]
            growth = [max(each) / min(each) - 1 for each in of_rounds]
            limit = None if case == STOCK or len(contexts) < 2 else (AT_MOST, 0.10)
            lines.append(Line(case, f"{name}: slowest context over fastest, less 1", statistics.median(growth), growth, limit))
    return lines


def of_step(plan: Plan, runs: Runs) -> list[Line]:
    (case,) = plan.cases
    rounds = [each["step"] for each in runs[case]]
    for each in rounds:
        check_acted(plan, case, each["traced"])
        check_acted(plan, case, each["waits"])
        missing = {"begin", "view", "end", "attention"} - each["traced"]["parts"].keys()
        require(not missing, f"the profiler saw nothing of: {', '.join(sorted(missing))}")
    on_gpu = rounds[0]["waits"]["plugin"] is not None

    def a_step(key: str, attention: bool) -> list[float]:
        """Of one decode step: the sum over the plugin's parts, attention alone or all others."""
        return [
            sum(part[key] for name, part in each["traced"]["parts"].items() if (name == "attention") == attention)
            / each["traced"]["steps"]
            for each in rounds
        ]

    def line(figure: str, values: list[float], wanted: float | None = None, **counts: float) -> Line:
        limit = None if wanted is None else (AT_MOST, wanted)
        return Line(case, figure, statistics.median(values) if values else None, values, limit, counts=counts)

    device = a_step("device_us", False)
    if on_gpu:
        require(min(device) > 0, "the profiler saw no kernels of the plugin's: is it allowed to look at the GPU?")
    seen = {key: rounds[0]["traced"][key] for key in ("evicted_blocks", "decisions", "own_decode_steps")}
    seen |= {"launches a step": a_step("launches", False)[0], "steps": rounds[0]["traced"]["steps"]}
    waits = [sum(each["waits"]["plugin"].values()) for each in rounds] if on_gpu else []
    return [
        line("device us a step, view and bookkeeping", device if on_gpu else [], 30.0, **seen),
        line("waits for the device by the plugin", waits, 0.0),
        line("host us a step, view and bookkeeping", a_step("host_us", False)),
        line("device us a step, the plugin's attention", a_step("device_us", True) if on_gpu else []),
        line("ms a step", [1e3 * statistics.median(each["seconds"]) for each in rounds]),
    ]


#: Name -> what it runs (tiny or not, bytes of GPU memory), and the lines that it comes to.
ROWS: dict[str, tuple[Callable[[bool, int | None], Plan], Callable[[Plan, Runs], list[Line]]]] = {
    "armed": (armed, of_armed),
    "paper": (paper, of_paper),
    "pressure": (pressure, of_pressure),
    "latency": (latency, of_latency),
    "step": (step, of_step),
}


# ---- engines


class Clock:
    """What is left of `--seconds`."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


class Process:
    """An engine in a process of its own; calls of `engine_child.Engine` are lines of JSON.

    Args:
        spec: of the engine.
        clock: the process is ended when it has run out.
        log: where the engine's output is added.

    Raises:
        RowError: from any call, if the engine failed or took too long; with the end of what it said.
    """

    def __init__(self, spec: dict[str, Any], clock: Clock, log: Path) -> None:
        environment = {**ENVIRONMENT, "VLLM_LOGGING_LEVEL": "INFO", **os.environ}
        if spec["policy"] is None:
            environment["VLLM_PLUGINS"] = ""
        log.parent.mkdir(parents=True, exist_ok=True)
        self.clock, self.case = clock, spec["case"]
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
            raise RowError(f"the engine of {self.case} is gone: the log has its last words") from None
        ready, _, _ = select.select([self.process.stdout], [], [], max(self.clock.left, 0))
        if not ready:
            self.process.kill()
            raise RowError(f"the engine of {self.case} was ended: --seconds were over")
        answer = self.process.stdout.readline()
        require(bool(answer), f"the engine of {self.case} died with status {self.process.wait()}: see the log")
        worked, result = json.loads(answer)
        require(worked, f"the engine of {self.case} failed:\n{result}")
        return result

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class Here:
    """An engine in this very process: for dry runs, in seconds."""

    def __init__(self, spec: dict[str, Any]) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from engine_child import Engine

        self.engine = Engine(spec)

    def call(self, method: str, **arguments: Any) -> Any:
        return json.loads(json.dumps(getattr(self.engine, method)(**arguments)))

    def close(self) -> None:
        self.engine.close()


def specification(plan: Plan, case: str, model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Of one engine: the same for all cases but for the policy."""
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
        # With the pool's bytes given this is only what has to be free at start, beside other engines.
        engine["gpu_memory_utilization"] = 0.05
        # Graphs for every batch that there can be; vLLM would capture up to 512 requests.
        graphs = {"max_cudagraph_capture_size": plan.requests}
        if options.cudagraph_mode:
            graphs["cudagraph_mode"] = options.cudagraph_mode
        engine["compilation_config"] = graphs
        if options.backend:
            engine["attention_config"] = {"backend": options.backend}
    return {"case": case, "model": model, "policy": plan.cases[case], "engine": engine, "vocab": plan.shape.vocab}


def measure(plan: Plan, options: argparse.Namespace, clock: Clock, gpu: dict[str, Any]) -> dict[str, Any]:
    """All cases in turn, round by round. Returns facts of the engines and the raw results, by case."""
    together = options.dry_run or len(plan.cases) * plan.memory <= gpu.get("free", 0) * FILL and gpu["shared"]
    facts: dict[str, dict] = {}
    runs: Runs = {case: [] for case in plan.cases}
    with tempfile.TemporaryDirectory() as model, ExitStack() as up:
        write_config(model, replace(plan.shape, max_len=plan.tokens))

        @contextmanager
        def running(case: str) -> Iterator[Process | Here]:
            spec = specification(plan, case, model, options)
            engine = Here(spec) if options.dry_run and not options.processes else Process(spec, clock, options.log)
            try:
                facts.setdefault(case, engine.call("facts"))
                check_facts(plan, facts, alone=isinstance(engine, Process))
                engine.call(plan.warm_up.method, **plan.warm_up.arguments)
                yield engine
            finally:
                engine.close()

        engines = {case: up.enter_context(running(case)) for case in plan.cases} if together else {}
        for number in range(options.rounds):
            start = time.monotonic()
            answers = {}
            for case in list(plan.cases)[:: 1 if number % 2 == 0 else -1]:
                with ExitStack() as turn:
                    engine = engines[case] if together else turn.enter_context(running(case))
                    calls = plan.work.items()
                    answers[case] = {name: engine.call(work.method, **work.arguments) for name, work in calls}
            for case, answer in answers.items():
                runs[case].append(answer)
            took = time.monotonic() - start
            if number + 1 < options.rounds and 1.2 * took > clock.left:
                print(f"  {number + 1} of {options.rounds} rounds: no time for another of {took:.0f} s", flush=True)
                break
    return {"together": together, "engines": facts, "runs": runs}


def check_facts(plan: Plan, facts: dict[str, dict], alone: bool) -> None:
    """The engines differ in what they should and in nothing else."""
    first = next(iter(facts.values()))
    for case, its in facts.items():
        require(its["pool_blocks"] == plan.blocks, f"{case}: a pool of {its['pool_blocks']} blocks, not {plan.blocks}")
        for what in ("attention_backend", "model_runner", "async_scheduling", "versions", "device"):
            mine, other = ({k: v for k, v in each[what].items() if k != "vllm_evict"} if what == "versions" else each[what] for each in (its, first))
            require(mine == other, f"{case}: {what.replace('_', ' ')} {mine}, the others have {other}")
        if alone:
            require(its["plugin_loaded"] == (case != STOCK), f"{case}: plugin loaded: {its['plugin_loaded']}")


# ---- reports


def the_gpu() -> dict[str, Any]:
    """Name, driver and memory, without a context on it. `shared`: whether several processes may use it."""
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    fields = {"name": str, "driver_version": str, "memory.total": int, "memory.free": int, "compute_mode": str}
    command = ["nvidia-smi", "-i", index, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        name, driver, total, free, mode = (part.strip() for part in said.splitlines()[0].split(","))
        memory = {"total": int(total) * 2**20, "free": int(free) * 2**20}
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        print(f"nvidia-smi does not say what GPU this is ({error}): engines run one at a time")
        return {"name": "unknown", "driver": "unknown", "shared": False}
    return {"name": name, "driver": driver, **memory, "shared": mode == "Default"}


def run_row(name: str, options: argparse.Namespace, clock: Clock, gpu: dict[str, Any]) -> dict[str, Any]:
    """A row's plan, raw results and lines, or what went wrong with it."""
    planned, lines_of = ROWS[name]
    start, row = time.monotonic(), {}
    try:
        plan = planned(options.dry_run, gpu.get("free"))
        row = {"load": plan.facts, "shape": asdict(plan.shape), "dtype": plan.dtype}
        row |= measure(plan, options, clock, gpu)
        lines = [line.judge(options.dry_run) for line in lines_of(plan, row["runs"])]
        row["lines"] = [asdict(line) for line in lines]
        for case, facts in row["engines"].items():
            print(
                f"  {case}: {facts['attention_backend']}, CUDA graphs {facts['cudagraph_mode']}, model runner "
                f"{facts['model_runner']}, pool of {facts['pool_blocks']:,} blocks of {facts['block_size']}"
            )
        for line in lines:
            print(f"  {line.said(options.dry_run)}", flush=True)
    except RowError as error:
        row["error"] = str(error)
        print(f"  failed: {error}", flush=True)
    return row | {"seconds": time.monotonic() - start}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--rounds", type=int, help="at most; 3, but 1 of latency and in a dry run")
    parser.add_argument("--seconds", type=float, default=540, help="limit for all rows of this call")
    parser.add_argument("--out", type=Path, default=Path("out/gpu/engine.json"), help="JSON with all rounds")
    parser.add_argument("--backend", help="vLLM's attention backend, such as TRITON_ATTN; by default vLLM's choice")
    parser.add_argument("--cudagraph-mode", help="of all cases, such as PIECEWISE; by default vLLM's choice for each")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU engine: measures nothing")
    parser.add_argument("--processes", action="store_true", help="in a dry run too, each engine in its own process")
    parser.add_argument("--plot", type=Path, nargs="+", metavar="JSON", help="draw what earlier calls have measured")
    parser.add_argument("--pictures", type=Path, default=Path("docs/performance"), help="where --plot puts them")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    if options.plot:
        from engine_plots import draw

        sys.exit(draw(options.plot, options.pictures))
    if not options.dry_run and not torch.cuda.is_available():
        print("no GPU here: nothing was measured")
        sys.exit(0)
    gpu = {"name": "none: a dry run", "shared": True} if options.dry_run else the_gpu()
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
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {options.out}")
    if any("error" in row for row in report["rows"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
