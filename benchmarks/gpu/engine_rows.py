"""Rows of benchmarks/gpu/engine.py: what engines run, and the figures that this comes to."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from engine_child import ATTENTION
from engine_sizes import GIB, ITEMSIZE, LLAMA_2_7B, LLAMA_3_1_8B, card_blocks, load_blocks, parameters
from models import Shape
from pressure import ratios

TINY = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=32, intermediate=96, vocab=256)
STOCK = "stock"
#: Cases that lose nothing: blocks on the host that layers read there, and layers that read a part of what is resident.
REACH, READ = "reach", "read"
#: Memory of an engine beside weights and KV pool: activations, CUDA graphs, libraries.
OVERHEAD = 6 * GIB
#: Most of a GPU's memory that engines take together.
FILL = 0.93
AT_LEAST, AT_MOST = ">=", "<="


@dataclass(frozen=True)
class Work:
    """One call of `engine_child.Engine` in each round."""

    method: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """A row: an engine, the cases that differ in their policy alone, and their work.

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
        return self.blocks * self.block_size * self.shape.kv_bytes_per_token(getattr(torch, self.dtype).itemsize)

    @property
    def memory(self) -> int:
        """Of one engine, on a GPU."""
        return parameters(self.shape) * ITEMSIZE + self.pool_bytes + OVERHEAD


@dataclass
class Line:
    """One figure and its target.

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
    """A row whose figures would be misleading."""


def require(valid: bool, sentence: str) -> None:
    if not valid:
        raise RowError(sentence)


# ---- rows: their loads

#: Results of a case: a list of rounds, each {name of work: the engine's answer}.
Runs = dict[str, list[dict[str, Any]]]


def batches(shape: Shape, dtype: str, blocks: int, size: int, load: tuple[int, int, int], **rest: Any) -> Plan:
    """Run all requests at once, from first to last token."""
    requests, prompt, output = load
    batch = {"requests": requests, "prompt": prompt, "output": output}
    few = {"requests": max(requests // 4, 2), "prompt": prompt, "output": max(output // 8, 2), "seed": 1}
    common = {"tokens": prompt + output, "requests": requests, "warm_up": Work("batch", few)}
    facts = batch | {"pool_blocks": blocks, "block_size": size}
    return Plan(shape, dtype, size, blocks, **common, work={"batch": Work("batch", batch)}, facts=facts, **rest)


def armed(tiny: bool, memory: int) -> Plan:
    requests, prompt, output, size = (4, 96, 32, 32) if tiny else (64, 2048, 512, 16)
    sizes = {"name": "h2o", "buffer": 0} | ({"sink": size, "recent": size} if tiny else {})
    cases = {
        STOCK: None,
        "h2o that can't outgrow its budget": sizes | {"budget": prompt + output + size},
        # A token more than the budget: the last token is sampled and never computed.
        "h2o that could": sizes | {"budget": prompt + output},
    }
    blocks = load_blocks(requests, prompt + 1 + output, size)
    shape, dtype, chunk = (TINY, "float32", 64) if tiny else (LLAMA_3_1_8B, "bfloat16", 8192)
    return batches(shape, dtype, blocks, size, (requests, prompt + 1, output), chunk=chunk, cases=cases)


def paper(tiny: bool, memory: int) -> Plan:
    requests, prompt, output, size = (6, 320, 320, 32) if tiny else (64, 2048, 2048, 16)
    budget = (prompt + output) // 5 // size * size
    # As in the paper: half of the budget heavy hitters, half recent tokens, no sinks.
    policy = {"name": "h2o", "budget": budget, "buffer": 0, "sink": 0, "recent": budget // 2 // size * size}
    shape = replace(TINY, kv_heads=4) if tiny else LLAMA_2_7B
    blocks = load_blocks(2, prompt + output, size) if tiny else card_blocks(LLAMA_2_7B, size)
    rest = {"chunk": 64 if tiny else 2048, "cases": {STOCK: None, "h2o": policy}}
    return batches(shape, "float32" if tiny else "float16", blocks, size, (requests, prompt, output), **rest)


def pressure(tiny: bool, memory: int) -> Plan:
    requests, prompt, output, size = (6, 640, 128, 32) if tiny else (32, 8192, 1024, 16)
    sink, recent = (size, size) if tiny else (64, 256)
    budget = (prompt + output) // 8 // size * size
    kept = {"budget": budget, "buffer": 0, "sink": sink, "recent": recent}
    cases = {
        STOCK: None,
        "h2o": {"name": "h2o", **kept},
        "snapkv": {"name": "snapkv", **kept},
        # As many blocks: sinks, window and the block that is being written.
        "sink-window": {"name": "sink-window", "sink": sink, "recent": budget - sink - size},
        REACH: {"name": "full", "evict": "host", "host": "1MiB" if tiny else "33GiB", **kept},
    }
    blocks = load_blocks(requests, prompt + output, size, 1 / 4)
    shape, dtype, chunk = (TINY, "float32", 64) if tiny else (LLAMA_3_1_8B, "bfloat16", 8192)
    return batches(shape, dtype, blocks, size, (requests, prompt, output), chunk=chunk, cases=cases)


def latency(tiny: bool, memory: int, contexts: Sequence[int] = ()) -> Plan:
    size, steps, sizes = (32, 8, (1, 2)) if tiny else (16, 48, (1, 8))
    contexts = contexts or ([128, 256, 512] if tiny else [4096 << n for n in range(6)])
    budget, sink = (128, 32) if tiny else (4096, 64)
    shape, dtype, chunk = (TINY, "float32", 64) if tiny else (LLAMA_3_1_8B, "bfloat16", 8192)
    room = (memory * FILL - parameters(shape) * ITEMSIZE - OVERHEAD) / shape.kv_bytes_per_token(ITEMSIZE)
    # While the last prompt is computed the first request decodes: a token a chunk, and some more.
    spare = size + 2 * steps + max(sizes) * (max(contexts) // chunk + 2)
    fits = lambda batch: [each for each in contexts if batch * (each + spare) <= room]  # noqa: E731
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
        "h2o": {"name": "h2o", "budget": budget, "buffer": 0, "sink": sink, "recent": 32 if tiny else 256},
        "sink-window": {"name": "sink-window", "sink": sink, "recent": budget - sink - size},
        READ: {"name": "full", "read": budget, "sink": sink, "recent": 32 if tiny else 256},
    }
    warm = Work("latency", {"batch": max(chosen), "contexts": contexts[:1], "steps": 2, "seed": 1})
    facts = {"contexts": {str(batch): found for batch, found in chosen.items()}}
    facts |= {"budget": budget, "pool_blocks": blocks, "block_size": size}
    return Plan(
        shape, dtype, size, blocks, tokens, max(chosen), chunk, cases=cases, warm_up=warm, work=work, facts=facts
    )


def step(tiny: bool, memory: int) -> Plan:
    batch, size, budget, buffer = (4, 32, 128, 32) if tiny else (256, 16, 1024, 128)
    shape, dtype, chunk = (TINY, "float32", 64) if tiny else (LLAMA_3_1_8B, "bfloat16", 8192)
    sink, recent = (32, 32) if tiny else (64, 256)
    policy = {"name": "h2o", "budget": budget, "buffer": buffer, "sink": sink, "recent": recent}
    # From one decision of a request to the next, so that the timed steps have the usual number of decisions.
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


# ---- rows: their figures

#: Figures of a batch beside its ratio.
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
    for case, run in ((case, run) for case, rounds in plain.items() for run in rounds):
        counts = run["evicted_blocks"], run["evicted_blocks_by_usage"]
        # An action that waits for room on the host is counted again.
        agree = counts[0] == counts[1] or case == REACH
        require(agree, f"{case}: {counts[0]} blocks evicted, {counts[1]} by the requests' own account")
        require(run["output_tokens"] == plain[STOCK][0]["output_tokens"], f"{case}: {run['output_tokens']} tokens")
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
    return over_stock(runs, {case: 5.0 for case in plan.cases if case not in (STOCK, REACH)})


def check_pressure(plan: Plan, runs: Runs) -> None:
    """Check that the pool was too small for stock, and that policies evicted."""
    for case, rounds in runs.items():
        for run in (each["batch"] for each in rounds):
            if case == STOCK:
                served = f"stock had {run['peak_requests']} of {plan.requests} requests at once"
                require(run["peak_requests"] < plan.requests, f"{served}: the pool was not too small")
            else:
                check_acted(plan, case, run)


def check_acted(plan: Plan, case: str, counts: dict[str, Any]) -> None:
    if case == READ:
        require(counts["evicted_blocks"] == 0, f"{case}: {counts['evicted_blocks']} blocks were evicted, wanted none")
        return
    require(counts["evicted_blocks"] > 0 and counts["decisions"] > 0, f"{case}: nothing was evicted")
    require(counts["steps_with_holes"] > 0, f"{case}: no step went over a table with holes")
    measures = plan.cases[case]["name"] not in ("sink-window", "full")
    require(not measures or counts["own_decode_steps"] > 0, f"{case}: no step was decoded by the plugin's kernel")
    sums = counts["measured_requests"]
    require((sums > 0) == measures, f"{case}: running sums of {sums} requests")


def table(row: dict[str, Any]) -> str:
    """Return a Markdown table of a row of batches, from its entry in a report."""
    lines = ["| case | tokens/s over stock | tokens/s | seconds | with prompts | requests at once | evicted blocks |"]
    lines.append("|---" + "|---:" * 6 + "|")
    for line in row["lines"]:
        counts = line["counts"]
        numbers = f"{line['value']:.2f}", f"{counts['tokens_per_second']:,.0f}", f"{counts['seconds']:.1f}"
        numbers += (
            f"{counts['prefill_seconds']:.1f}",
            f"{counts['peak_requests']:.0f}",
            f"{counts['evicted_blocks']:,.0f}",
        )
        lines.append(f"| {line['case']} | {' | '.join(numbers)} |")
    return "\n".join(lines)


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
            limit = None if case in (STOCK, READ) or len(contexts) < 2 else (AT_MOST, 0.10)
            figure = f"{name}: slowest context over fastest, less 1"
            lines.append(Line(case, figure, statistics.median(growth), growth, limit))
    return lines


def of_step(plan: Plan, runs: Runs) -> list[Line]:
    (case,) = plan.cases
    rounds = [each["step"] for each in runs[case]]
    for each in rounds:
        check_acted(plan, case, each["traced"])
        check_acted(plan, case, each["waits"])
        missing = {"begin", "view", "end"} - each["traced"]["parts"].keys()
        require(not missing, f"the profiler saw nothing of: {', '.join(sorted(missing))}")
    on_gpu = rounds[0]["waits"]["plugin"] is not None
    # Kernels of a full CUDA graph have no marks.
    marked = on_gpu and all(ATTENTION in each["traced"]["parts"] for each in rounds)

    def a_step(key: str, attention: bool) -> list[float]:
        """Time in one decode step: the sum over the plugin's parts, attention alone or all others."""
        return [
            sum(part[key] for name, part in each["traced"]["parts"].items() if (name == ATTENTION) == attention)
            / each["traced"]["steps"]
            for each in rounds
        ]

    def line(figure: str, values: list[float], wanted: float | None = None, **counts: float) -> Line:
        limit = None if wanted is None else (AT_MOST, wanted)
        return Line(case, figure, statistics.median(values) if values else None, values, limit, counts=counts)

    device = a_step("device_us", attention=False)
    if on_gpu:
        require(min(device) > 0, "the profiler saw no kernels of the plugin's: is it allowed to look at the GPU?")
    seen = {key: rounds[0]["traced"][key] for key in ("evicted_blocks", "decisions", "own_decode_steps")}
    seen |= {"launches a step": a_step("launches", attention=False)[0], "steps": rounds[0]["traced"]["steps"]}
    waits = [sum(each["waits"]["plugin"].values()) for each in rounds] if on_gpu else []
    return [
        line("device us a step, view and bookkeeping", device if on_gpu else [], 30.0, **seen),
        line("waits for the device by the plugin", waits, 0.0),
        line("host us a step, view and bookkeeping", a_step("host_us", attention=False)),
        line("device us a step, the plugin's attention", a_step("device_us", attention=True) if marked else []),
        line("ms a step", [1e3 * statistics.median(each["seconds"]) for each in rounds]),
    ]


#: Name -> function that makes the row's load (tiny or not, bytes of GPU memory), and function that makes its lines.
ROWS: dict[str, tuple[Callable[[bool, int], Plan], Callable[[Plan, Runs], list[Line]]]] = {
    "armed": (armed, of_armed),
    "paper": (paper, of_paper),
    "pressure": (pressure, of_pressure),
    "latency": (latency, of_latency),
    "step": (step, of_step),
}
