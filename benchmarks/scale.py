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
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from alone import BLOCK, CHUNK, measure, measure_in_turns
from loads.program import HEADS, LAYERS, TOKEN_BYTES
from reports import choose_cases, progress, publish

from vllm_evict.config.gates import FILE, HeadGates

#: Tokens of each request on the axis of requests, and requests and tokens of one point more.
TOKENS, MANY = 4096, (64, 131_072)
REQUESTS = (1, 16, 64, 256, 1024)
LENGTHS = (4096, 16_384, 65_536, 262_144, 1_000_000)
#: Requests and tokens of the curve over budgets.
LOAD = (64, 4096)
BUDGETS = tuple(range(256, 2049, 128))


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
    """Return tables of steps by requests, which docs/results.md has, of steps by tokens, and of bytes."""
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
