"""Measures the scheduler without a model: many requests, long requests, and what grows with them.

    python benchmarks/scale.py [--cases stock h2o] [--rounds 3] [--pictures docs/pictures]

vLLM's scheduler under each policy plans steps, and a made-up worker answers them: a token for each request that
generates, random scores for each report that the plan asks for. At each point of two axes, requests and tokens of each,
all requests decode together, and these are measured:

- *step*: `schedule` and `update_from_output` of a step in which every request decodes: median and 99th percentile;
- *admission*, *end*: `add_request` and `finish_requests` of one request;
- *choice*, *application*: a decision on one request; *spill*: of that, what it takes to note copies to the host;
- *operations*: bytecodes of a step, and of an end; other load on the machine does not change them;
- *bytes*: of the plugin's Python objects and arrays in the scheduler, by `sys.getsizeof`.

Times are CPU times of the thread. All cases take turns of TURN steps at a point, each in a process of its own,
--rounds times, and "added to stock" is the median of the turns' differences. Along an axis, what is measured grows as
its size to some power: the exponent of a fit by least squares, over the upper points of the axis. The curve over
budgets has a step's time under `h2o` at one load.

Writes a Markdown table and a JSON with hardware, versions and command to --out.
"""

import argparse
import gc
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests/harness"))

import numpy as np
from loads.engines import make_hasher, make_scheduler
from loads.program import HEADS, LAYERS, TOKEN_BYTES, Settings
from reports import choose_cases, progress, publish
from vllm import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_evict.config.gates import FILE, HeadGates
from vllm_evict.core.mechanisms import budget, shared
from vllm_evict.core.plan import PLAN, REPORTS, Report
from vllm_evict.integration.engine.reaching import Reaching
from vllm_evict.integration.engine.scheduler import EvictionMixin

BLOCK, CHUNK = 32, 8192
#: Tokens of each request on the axis of requests, and requests and tokens of one point more.
TOKENS, MANY = 4096, (64, 131_072)
REQUESTS = (1, 16, 64, 256, 1024)
LENGTHS = (4096, 16_384, 65_536, 262_144, 1_000_000)
#: Requests and tokens of the curve over budgets.
LOAD = (64, 4096)
BUDGETS = tuple(range(256, 2049, 128))
#: Packages whose objects all requests share.
SHARED = ("vllm_evict.config", "vllm_evict.policies")
#: Requests of a point that end one by one, at most.
ENDS = 64
#: Steps of a case before the next one has its turn.
TURN = 16


def cases(folder: str) -> dict[str, dict | None]:
    """Name -> policy. A folder gets the gates of `duo`: every second head streams."""
    gates = np.arange(LAYERS * HEADS).reshape(LAYERS, HEADS) % 2
    file = Path(folder, FILE)
    HeadGates(gates.astype(float), 128, 256).save(file)
    sizes = {"budget": 2048, "sink": 32, "recent": 64}
    host = {"evict": "host", "host": 2 * MANY[0] * MANY[1] * TOKEN_BYTES}
    return {
        "stock": None,
        "full": {"name": "full"},
        "sink-window": {"name": "sink-window", "budget": 2048},
        "h2o": {"name": "h2o", **sizes},
        "full, host": {"name": "full", **sizes, **host},
        "duo": {"name": "duo", "gates": str(file)},
        "adakv": {"name": "adakv", **sizes, "bands": 2},
    }


class Alone:
    """A scheduler whose worker is made up.

    Args:
        policy: as `KVPolicyConfig.parse` takes it; None: vLLM's own scheduler.
        requests: most at once.
        tokens: most of a request, generated ones included.
        chunk: most tokens of a step.
    """

    def __init__(self, policy: dict | None, requests: int, tokens: int, chunk: int = CHUNK) -> None:
        blocks = requests * (math.ceil(tokens / BLOCK) + 2)
        settings = Settings(policy, BLOCK, chunk, tokens, requests, blocks * (2 if policy else 1))
        self.scheduler: Any = make_scheduler(settings)
        self._chance, self._hasher = np.random.default_rng(0), make_hasher(BLOCK)

    def request(self, number: int, tokens: int) -> Request:
        """Make a request with a prompt of its own, whose blocks no other request hits."""
        params = SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True, detokenize=False)
        prompt = [number, *[0] * (tokens - 1)]
        return Request(f"request-{number}", prompt, params, None, arrival_time=number, block_hasher=self._hasher)

    def add(self, requests: int, tokens: int) -> list[float]:
        """Add requests, each a token longer than the one before, so that they fill blocks in different steps.

        Returns:
            Seconds that each takes.
        """
        made = [self.request(number, tokens + number % BLOCK) for number in range(requests)]
        return [_seconds(self.scheduler.add_request, each)[0] for each in made]

    def step(self) -> tuple[float, float]:
        """Run a step; return the seconds of `schedule` and of `update_from_output`."""
        planned, output = _seconds(self.scheduler.schedule)
        updated, _ = _seconds(self.scheduler.update_from_output, output, self._answer(output))
        return planned, updated

    def count_step(self, within: str = "") -> int:
        """Run a step; return the bytecodes of `schedule` and of `update_from_output` (see `operations`)."""
        planned, output = operations(self.scheduler.schedule, within=within)
        return planned + operations(self.scheduler.update_from_output, output, self._answer(output), within=within)[0]

    def to_decode(self) -> None:
        """Run steps until all requests decode, and each has had a block's worth of steps with all others."""
        while any(request.num_output_tokens < 2 for request in self.scheduler.requests.values()):
            self.step()
        for _ in range(BLOCK):
            self.step()

    def end(self, req_id: str) -> float:
        """End a request; return the seconds that it takes."""
        return _seconds(self.scheduler.finish_requests, req_id, RequestStatus.FINISHED_ABORTED)[0]

    def _answer(self, output: Any) -> ModelRunnerOutput:
        """Return what a worker would: tokens, and the reports that the plan asks for."""
        req_ids, requests = list(output.num_scheduled_tokens), self.scheduler.requests
        sampled = [[1] if _is_computed(requests[req_id]) else [] for req_id in req_ids]
        made = ModelRunnerOutput(req_ids, {req_id: row for row, req_id in enumerate(req_ids)}, sampled)
        if (plan := getattr(output, PLAN, None)) is not None:
            reports = [
                {req_id: self._report(manager, req_id, names) for req_id, names in told.report.items()}
                for manager, told in zip(self.scheduler.kv_managers, plan.groups)
            ]
            setattr(made, REPORTS, reports)
        return made

    def _report(self, manager: Any, req_id: str, names: frozenset[str]) -> Report:
        """Make up the report of one request, of its resident blocks."""
        residence = manager.residents[req_id].residence
        blocks = math.ceil(self.scheduler.requests[req_id].num_computed_tokens / BLOCK)
        index = np.concatenate((residence.pool, np.arange(residence.known, blocks)))
        return Report(index, {name: self._chance.random(len(index)) for name in names})


def _is_computed(request: Request) -> bool:
    return request.num_computed_tokens >= request.num_tokens


def _seconds(function: Callable, *args: Any) -> tuple[float, Any]:
    """CPU seconds of a call, and what it returns."""
    start = time.thread_time()
    result = function(*args)
    return time.thread_time() - start, result


@contextmanager
def watched(alone: Alone) -> Iterator[dict[str, list[float]]]:
    """Time each choice of blocks, each applied action, and what notes its copies, in this context."""
    taken: dict[str, list[float]] = defaultdict(list)

    def timed(owner: Any, name: str, part: str) -> Callable[[], None]:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            result = function(*args, **kwargs)
            taken[part].append(time.thread_time() - start)
            return result

        setattr(owner, name, call)
        return lambda: setattr(owner, name, function)

    scheduler = alone.scheduler
    undo = [timed(budget, "back_to_budget", "choice"), timed(shared, "choose_jointly", "choice")]
    undo.append(timed(scheduler, "apply", "application"))
    undo += [timed(part, "on_applied", "spill") for part in scheduler.mechanisms.of(Reaching)]
    try:
        yield taken
    finally:
        for each in undo:
            each()


def measure(
    policy: dict | None, requests: int, tokens: int, steps: int, pause: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """One point: median seconds of a step and of what happens to a request, and of a step mean, means of turns and 99th
    percentile; bytecodes of a step and of an end, bytes of the plugin's objects. `pause` is called before each turn.
    """
    alone = Alone(policy, requests, tokens + 2 * CHUNK)
    before = plugin_bytes(alone.scheduler) if policy else 0
    taken = {"admission": alone.add(requests, tokens)}
    alone.to_decode()
    gc.collect()
    gc.freeze()  # as vLLM's engine core does
    turns = []
    for _ in range(0, steps, TURN):
        pause()
        turns.append([sum(alone.step()) for _ in range(TURN)])
    taken["step"] = sum(turns, [])
    found: dict[str, Any] = {"turns": [statistics.mean(turn) for turn in turns]}
    found |= {"99th": float(np.percentile(taken["step"], 99)), "mean": statistics.mean(taken["step"])}
    if policy is not None:
        with watched(alone) as of_actions:
            for _ in range(steps):
                alone.step()
        taken |= of_actions
        found["bytes"] = plugin_bytes(alone.scheduler) - before
    counted = max(2 * BLOCK // requests, 1)  # some request fills a block in each, or in two of them
    found["operations"] = sum(alone.count_step() for _ in range(counted)) / counted
    found["operations of an end"] = operations(alone.end, "request-0")[0]
    taken["end"] = [alone.end(f"request-{number}") for number in range(1, min(requests, ENDS))] or [0.0]
    gc.unfreeze()
    return found | {part: statistics.median(seconds) for part, seconds in taken.items()}


def measure_in_turns(
    policies: dict[str, dict | None], requests: int, tokens: int, steps: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each case, and what `measure` returns of it. CPython specialises code for one case in each process."""
    fork, waiting = multiprocessing.get_context("fork"), {}
    for case, policy in policies.items():
        waiting[case], pipe = fork.Pipe()
        fork.Process(target=_measure_in_turns, args=(pipe, policy, requests, tokens, steps), daemon=True).start()
        waiting[case].recv()
    while waiting:
        for case, pipe in list(waiting.items()):
            pipe.send(None)
            if (found := pipe.recv()) is not None:
                del waiting[case]
                yield case, found


def _measure_in_turns(pipe: Any, *point: Any) -> None:
    def pause() -> None:
        pipe.send(None)
        pipe.recv()

    pipe.send(measure(*point, pause=pause))


def operations(function: Callable, *args: Any, within: str = "") -> tuple[int, Any]:
    """Bytecodes that a call runs in files of folder `within`, and what it returns."""
    count = 0

    def enter(frame: Any, event: str, argument: Any) -> Callable | None:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return trace if frame.f_code.co_filename.startswith(within) else None

    def trace(frame: Any, event: str, argument: Any) -> Callable:
        nonlocal count
        count += event == "opcode"
        return trace

    sys.settrace(enter)
    try:
        result = function(*args)
    finally:
        sys.settrace(None)
    return count, result


def plugin_bytes(scheduler: Any) -> int:
    """Bytes of the plugin's objects in a scheduler (`sys.getsizeof`), without vLLM's and what requests share."""
    todo: list[Any] = [*scheduler.mechanisms, scheduler.usages, scheduler.next_plan]
    for manager in scheduler.kv_managers:
        todo += [manager.residents, manager.changes]
    seen, taken = set(), 0
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, (type, str, EvictionMixin)):
            continue
        module = type(each).__module__
        own = module.startswith("vllm_evict") and not module.startswith(SHARED)
        if not own and not isinstance(each, (int, float, np.ndarray, dict, list, tuple, set, frozenset)):
            continue
        seen.add(id(each))
        taken += sys.getsizeof(each)
        if isinstance(each, dict):
            todo += [*each, *each.values()]
        elif isinstance(each, (list, tuple, set, frozenset)):
            todo += each
        if own:
            slots = (name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ()))
            todo += [getattr(each, name) for name in slots if hasattr(each, name)]
            todo += getattr(each, "__dict__", {}).values()
    return taken


def points() -> list[tuple[int, int]]:
    """Requests and tokens of each point."""
    return list(dict.fromkeys([*((each, TOKENS) for each in REQUESTS), *((1, each) for each in LENGTHS), MANY]))


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the power to which values grow with sizes."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def scale(options: argparse.Namespace, chosen: dict[str, dict | None]) -> dict:
    """Measure all points and the curve. Returns what each round measured, by point and case, and by budget."""
    runs: dict[str, dict[str, list[dict]]] = {name_of(*point): {case: [] for case in chosen} for point in points()}
    curve: dict[int, list[float]] = {size: [] for size in BUDGETS}
    with progress() as bar:
        task = bar.add_task("", total=(len(runs) * len(chosen) + len(BUDGETS)) * options.rounds)
        for point in points() * options.rounds:
            bar.update(task, description=name_of(*point))
            for case, found in measure_in_turns(chosen, *point, options.steps):
                runs[name_of(*point)][case].append(found)
                bar.advance(task)
        for size in BUDGETS * options.rounds:
            bar.update(task, description=f"budget {size}")
            policy = {"name": "h2o", "budget": size, "sink": 32, "recent": 64}
            curve[size].append(measure(policy, *LOAD, options.steps)["mean"])
            bar.advance(task)
    return {"policies": chosen, "runs": runs, "curve": curve}


def name_of(requests: int, tokens: int) -> str:
    return f"{requests} x {tokens}"


def median_of(rounds: list[dict], part: str) -> float:
    """Median of a part over rounds; 0 if it never happened."""
    return statistics.median(each.get(part, 0.0) for each in rounds)


def added(runs: dict[str, list[dict]], case: str) -> float:
    """Seconds that a case adds to stock vLLM's mean step: median of the turns' differences."""
    turns = [[turn for each in runs[name] for turn in each["turns"]] for name in (case, "stock")]
    return statistics.median(own - stock for own, stock in zip(*turns, strict=True))


def steps_table(report: dict, names: list[str]) -> list[str]:
    """A step at each point, and what it adds to stock."""
    lines = [f"| case | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for case in report["policies"]:
        cells = []
        for name in names:
            runs = report["runs"][name]
            step, slow = (1e3 * median_of(runs[case], part) for part in ("step", "99th"))
            cell = f"{step:.2f} / {slow:.2f}"
            if case != "stock":
                more = median_of(runs[case], "operations") / median_of(runs["stock"], "operations") - 1
                cell += f" ({1e3 * added(runs, case):+.2f}; {more:+.0%})"
            cells.append(cell)
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return lines


def events_table(report: dict, names: list[str]) -> list[str]:
    """Microseconds of what happens to one request."""
    parts = ("admission", "choice", "application", "spill", "end")
    lines = ["| point | case | " + " | ".join(parts) + " |", "|---|---|" + "---:|" * len(parts)]
    for name in names:
        for case, rounds in report["runs"][name].items():
            found = [1e6 * median_of(rounds, part) for part in parts]
            lines.append(f"| {name} | {case} | " + " | ".join(f"{each:,.0f}" if each else "" for each in found) + " |")
    return lines


def memory_table(report: dict, names: list[str]) -> list[str]:
    """Bytes of the plugin's objects at some points: of a request, and of each block that its tokens fill."""
    lines = [f"| case | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for case in report["policies"]:
        cells = []
        for name in names if case != "stock" else ():
            requests, tokens = map(int, name.split(" x "))
            taken = median_of(report["runs"][name][case], "bytes") / requests
            cells.append(f"{taken:,.0f}, {taken * BLOCK / tokens:.1f}")
        if cells:
            lines.append(f"| {case} | {' | '.join(cells)} |")
    return lines


def exponents(report: dict) -> dict[str, dict[str, float]]:
    """Case -> what grows, and along which axis -> exponent."""
    axes = {
        "requests": [f"{each} x {TOKENS}" for each in REQUESTS[1:]],
        "tokens": [f"1 x {each}" for each in LENGTHS[1:]],
    }
    parts = (
        "operations",
        "operations of an end",
        "bytes",
        "step",
        "admission",
        "choice",
        "application",
        "spill",
        "end",
    )
    found: dict[str, dict[str, float]] = {case: {} for case in report["policies"]}
    for case, by_axis in found.items():
        for axis, names in axes.items():
            sizes = [int(name.split(" x ")[axis == "tokens"]) for name in names]
            for part in parts:
                values = [median_of(report["runs"][name][case], part) for name in names]
                if all(values):
                    by_axis[f"{part}, by {axis}"] = exponent(sizes, values)
    return found


def exponents_table(report: dict) -> list[str]:
    parts = list(dict.fromkeys(part for parts in report["exponents"].values() for part in parts))
    cases = list(report["exponents"])
    lines = [f"| | {' | '.join(cases)} |", "|---|" + "---:|" * len(cases)]
    for part in parts:
        found = [report["exponents"][case].get(part) for case in cases]
        lines.append(f"| {part} | " + " | ".join("" if each is None else f"{each:.2f}" for each in found) + " |")
    return lines


def table(report: dict) -> str:
    requests, tokens, memory = page_tables(report)
    points = [name_of(REQUESTS[-2], TOKENS), name_of(*MANY), name_of(1, LENGTHS[-1])]
    curve = ", ".join(f"{name}: {1e3 * statistics.median(each):.2f}" for name, each in report["curve"].items())
    parts = {
        "A step, ms: median / 99th percentile (mean added to stock; bytecodes added), by requests x tokens": requests,
        "The same of one request": tokens,
        "What happens to one request, microseconds": events_table(report, points),
        "Bytes of the plugin's objects: of a request, and of each block that its tokens fill": memory,
        "Exponents of growth": exponents_table(report),
        "A step under `h2o`, ms, {} requests of {} tokens, by budget".format(*LOAD): [curve],
    }
    return "\n\n".join(f"{title}:\n\n" + "\n".join(lines) for title, lines in parts.items())


def page_tables(report: dict) -> list[list[str]]:
    """Return the tables of docs/results.md: steps by requests and by tokens, and bytes."""
    by_requests, by_tokens = [f"{each} x {TOKENS}" for each in REQUESTS], [f"1 x {each}" for each in LENGTHS]
    many = name_of(*MANY)
    return [
        steps_table(report, [*by_requests, many]),
        steps_table(report, by_tokens),
        memory_table(report, [*by_requests[-2:], many, by_tokens[-1]]),
    ]


def picture(report: dict, path: Path) -> None:
    """Draw a step along both axes, and its time by budget."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "scale", "font.size": 9})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.4), layout="tight")
    sides = [
        (REQUESTS, "{} x " + str(TOKENS), f"requests of {TOKENS:,} tokens"),
        (LENGTHS, "1 x {}", "tokens of one request"),
    ]
    for axis, (sizes, form, label) in zip(axes, sides):
        for case in report["policies"]:
            values = [1e3 * median_of(report["runs"][form.format(each)][case], "step") for each in sizes]
            axis.plot(
                sizes, values, marker="o", ms=3, lw=1.2, label=case, **({"color": "black"} if case == "stock" else {})
            )
        axis.set(xscale="log", yscale="log", xlabel=label, ylabel="ms a step")
        axis.grid(alpha=0.25)
    axes[0].legend(frameon=False, fontsize=8)
    axes[2].plot(list(report["curve"]), [1e3 * statistics.median(each) for each in report["curve"].values()], lw=1.2)
    axes[2].set(ylim=(0, None), xlabel="budget of h2o, tokens", ylabel="ms a step")
    axes[2].grid(alpha=0.25)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def parse_arguments(known: dict[str, dict | None]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="each case runs so often at a point, all cases in turn")
    parser.add_argument("--steps", type=int, default=96, help="steps of a round that are timed, whole turns")
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="only these; stock always runs, to compare with")
    parser.add_argument("--pictures", type=Path, help="folder that gets scale.svg")
    parser.add_argument("--out", type=Path, default=Path("out/scale"))
    options = parser.parse_args()
    options.cases, options.threads = choose_cases(parser, options.cases, known), 1
    return options


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        known = cases(folder)
        options = parse_arguments(known)
        report = scale(options, {name: known[name] for name in options.cases})
    report["policies"]["duo"] = {"name": "duo", "gates": "every second head streams"}
    report["exponents"] = exponents(report)
    if options.pictures:
        picture(report, options.pictures / "scale.svg")
    options.out, options.pictures = str(options.out), None
    title = f"The scheduler without a model, blocks of {BLOCK} tokens, chunks of {CHUNK:,}: CPU time of one thread"
    publish(options, "scale", title, table, report)


if __name__ == "__main__":
    main()
