"""Makes the tables and the pictures of a run of peers (run.py), some of which docs/results.md has.

python benchmarks/peers/table.py [out/peers/peers.json] [--publish]
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from reports import RESULTS, to_json

from vllm_evict.tools.eval.stats import ALPHA, p_value

DOCS = Path(__file__).parents[2] / "docs"
TITLES = {"vllm": "vLLM", "openvino": "OpenVINO GenAI", "kvpress": "kvpress"}
#: Cases of `vllm` that are vLLM's own; the others are this project's.
OWN = ("stock", "--", "prefix caching")
#: Part of a run -> its file in benchmarks/results/performance.
FILES = {
    "load": "peers-load.json",
    "bfloat16": "peers-bfloat16.json",
    "fp8": "peers-fp8.json",
    "needles": "peers-answers.json",
    "served": "peers-served.json",
}
#: Title of a row, kvpress' case, ours, and whether both keep the same tokens by construction; else why not.
SAME = "same"
METHODS: list[tuple[str, str | None, str | None, str]] = [
    ("nothing evicted", "none", "full", SAME),
    ("Knorm", "Knorm", "knorm", SAME),
    ("KeyDiff", "KeyDiff", "keydiff", SAME),
    ("SnapKV, window 32, no pooling", "SnapKV", "snapkv", SAME),
    ("attention per query: ObservedAttention, `h2o` by `mean`", "ObservedAttention", "h2o, mean", SAME),
    ("StreamingLLM", "StreamingLLM", "sink-window", SAME),
    (
        "DuoAttention, half of the heads",
        "DuoAttention",
        "duo",
        "there the window stays; ours moves on",
    ),
    ("TOVA", "TOVA", "tova", "there all heads of a layer keep one set; ours has a set for each head"),
    (
        "KVzip",
        "KVzip",
        "kvzip",
        "there heads of a layer share its budget, and an instruction precedes the repetition",
    ),
    (
        "SnapKV, pooled",
        "SnapKV, its defaults",
        "snapkv, one set",
        "there means over 5 tokens, window 64, a set for each head; ours has the largest of 7, one set for all",
    ),
    ("ExpectedAttention", "ExpectedAttention", None, "no policy of ours"),
    ("CriticalKV on SnapKV", "CriticalKV", None, "no policy of ours"),
    ("R-KV", None, "rkv", "no press of kvpress"),
]
#: With the question in sight: OpenVINO's case, ours, and the difference.
AWARE: list[tuple[str, str | None, str | None, str]] = [
    ("nothing evicted", "full", "full, aware", SAME),
    (
        "attention, summed",
        "SUM",
        "h2o, aware",
        "there from the prompt's last 8 queries on, a set of blocks for each layer; ours from the first on, one set",
    ),
    (
        "attention, summed, by lifetime",
        "NORM_SUM",
        "h2o mean, aware",
        "the same",
    ),
    ("attention of the last 8 queries", None, "snapkv, aware", "what OpenVINO's sums begin with"),
    ("R-KV", "ADAPTIVE_RKV", "rkv, aware", "there by share of attention, then by unlike blocks; ours as in the paper"),
]


def spread(values: Sequence[float], form: str) -> str:
    """Median (each round), or the value of a single round."""
    median = f"{statistics.median(values):{form}}"
    return median if len(values) == 1 else f"{median} ({', '.join(f'{value:{form}}' for value in values)})"


def grouped(rows: list[dict], requests: int | None = None) -> dict[str, list[dict]]:
    """Rows by case, in the order of their first appearance."""
    found: dict[str, list[dict]] = {}
    for row in rows:
        if requests is None or row.get("requests", requests) == requests:
            found.setdefault(row["case"], []).append(row)
    return found


def rate(row: dict, clock: str = "seconds") -> float:
    return row["output_tokens"] / row[clock]


def title_of(peer: str, case: str) -> str:
    return "vllm_evict" if peer == "vllm" and not case.startswith(OWN) else TITLES[peer]


def load_table(rows_of: dict[str, list[dict]], missing: dict[str, str], requests: int | None = None) -> str:
    """Throughput, time to first token and memory of one number of requests; right answers where prompts ask."""
    asked = any("right" in row for rows in rows_of.values() for row in rows)
    lines = [
        f"| peer | case |{' right answers |' if asked else ''} output tokens/s (rounds) | a second of CPU "
        "| first token, s: median / last | peak of KV, MiB | requests at once | preemptions |",
        f"|---|---|{'---:|' if asked else ''}---:|---:|---:|---:|---:|---:|",
    ]
    blank = " |" * (6 if asked else 5)
    for peer, rows in rows_of.items():
        for case, runs in grouped(rows, requests).items():
            title = title_of(peer, case)
            wrong = next((run["error"] for run in runs if "error" in run), None)
            if wrong:
                lines.append(f"| {title} | `{case}` | not run: {escaped(wrong)} |{blank}")
                continue

            def median(key: str, runs: list[dict] = runs) -> float:
                return statistics.median(run[key] for run in runs)

            first = statistics.median(statistics.median(run["first"]) for run in runs)
            last = statistics.median(max(run["first"]) for run in runs)
            lost = "not counted" if runs[0]["preemptions"] is None else f"{median('preemptions'):.0f}"
            right = " / ".join(
                dict.fromkeys(f"{run['right'].count('1')} of {len(run['right'])}" for run in runs if asked)
            )
            lines.append(
                f"| {title} | `{case}` |{f' {right} |' if asked else ''} {spread([rate(run) for run in runs], '.0f')} "
                f"| {statistics.median(rate(run, 'cpu_seconds') for run in runs):.0f} | {first:.2f} / {last:.2f} "
                f"| {median('peak_kv_bytes') / 2**20:.1f} | {median('at_once'):.0f} | {lost} |"
            )
    lines += [f"| {TITLES[peer]} | | not run: {escaped(why)} |{blank}" for peer, why in missing.items()]
    return "\n".join(lines)


def escaped(text: str) -> str:
    """Text of others in a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


def answers_table(report: dict, peer: str, methods: list[tuple[str, str | None, str | None, str]]) -> str:
    """Right answers by budget, of a peer and of ours; `=`: the same prompts, `≈`: no difference beyond noise."""
    theirs, ours = grouped(report["needles"].get(peer, [])), grouped(report["needles"].get("vllm", []))
    budgets = list(report["sizes"]["budgets"])
    lines = [
        f"| method | {TITLES[peer]}: {' / '.join(budgets)} | vllm_evict: {' / '.join(budgets)} | agree | difference |",
        "|---|---:|---:|---|---|",
    ]
    for title, their, our, why in methods:
        left = _by_budget(theirs.get(their, [])) if their else {}
        right = _by_budget(ours.get(our, [])) if our else {}
        if not left and not right:
            continue
        marks = [_mark(left[b], right[b]) for b in left if b in right and left[b] and right[b]]
        cells = [_cell(side) for side in (left, right)]
        lines.append(f"| {title} | {cells[0]} | {cells[1]} | {' '.join(marks)} | {'' if why == SAME else why} |")
    if peer in report["missing"]:
        lines.append(f"| all of {TITLES[peer]} | not run: {escaped(report['missing'][peer])} | | | |")
    return "\n".join(lines)


def _by_budget(rows: list[dict]) -> dict[str | None, str]:
    """Right answers as a string of digits; one that ran no budget to its end has an empty string."""
    return {row.get("budget"): row.get("right", "") for row in rows}


def _cell(rights: dict[str | None, str]) -> str:
    return " / ".join(f"{each.count('1')} of {len(each)}" if each else "refused" for each in rights.values())


def _mark(left: str, right: str) -> str:
    if left == right:
        return "="
    differences = [int(a) - int(b) for a, b in zip(left, right, strict=True)]
    p = p_value(differences)
    return "≈" if p >= ALPHA else f"p = {p:.3f}"


def published_table() -> str:
    """Figures of others, on their machines."""
    lines = [
        "| peer (cited, not run) | setup | full: tokens/s, at once | evicting: tokens/s, at once | ratio |",
        "|---|---|---:|---:|---:|",
    ]
    for row in json.loads(Path(__file__).with_name("published.json").read_text()):
        full, evicting = row["full"], row["evicting"]
        ratio = evicting["tokens_per_second"] / full["tokens_per_second"]
        cells = [f"{side['tokens_per_second']:,.0f}, {side['at_once'] or '?'}" for side in (full, evicting)]
        setup = f"{row['setup']}; {evicting['what']}. {row['source']}"
        lines.append(f"| {row['peer']} | {setup} | {cells[0]} | {cells[1]} | {ratio:.2f} |")
    return "\n".join(lines)


def setup(report: dict) -> str:
    """Hardware, versions and command, as one paragraph."""
    facts = report["conditions"]
    hardware = ", ".join(f"{key} {value}" for key, value in facts["hardware"].items())
    versions = "; ".join(
        f"{TITLES[peer]}: " + ", ".join(f"{name} {number}" for name, number in found.items())
        for peer, found in report["versions"].items()
        if found
    )
    return (
        f"Hardware: {hardware}. Versions: {versions}. Threads of each peer: {report['threads']}; rounds: "
        f"{report['rounds']}; load average at the end: {report['load average']}. Command: `{facts['command']}` "
        f"({report['minutes']} minutes)."
    )


def tables(report: dict) -> dict[str, str]:
    """Name -> Markdown, of the parts that ran."""
    most, missing, found = report["sizes"]["requests"], report["missing"], {"published": published_table()}
    found |= {f"setup of {part}": setup(report) for part in FILES if part in report}
    if "served" in report:
        found["needles in a small pool"] = load_table(report["served"], missing)
    if "load" in report:
        found[f"{most} requests"] = load_table(report["load"], missing, most)
        found["1 request"] = load_table(report["load"], missing, 1)
    if "bfloat16" in report:
        found[f"{most} requests in bfloat16"] = load_table(report["bfloat16"], missing)
    if "fp8" in report:
        found["caches of 8 bits"] = load_table(report["fp8"], missing)
    if "needles" in report:
        found["answers before the question"] = answers_table(report, "kvpress", METHODS)
        found["answers with the question in sight"] = answers_table(report, "openvino", AWARE)
    return found


#: Who -> color and marker.
STYLES = {
    "vllm_evict": ("#c0392b", "o"),
    "vLLM": ("#7f8c8d", "s"),
    "OpenVINO GenAI": ("#2e86c1", "^"),
    "kvpress": ("#27ae60", "D"),
}


def plots() -> Any:
    """matplotlib's pyplot, for pictures that are the same each time."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "peers", "font.size": 9})
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plots().close(figure)


def answers_picture(report: dict, path: Path) -> None:
    """Right answers over throughput of one load. The corner is stock vLLM, which attends to everything."""
    plt = plots()
    figure, axis = plt.subplots(figsize=(7.5, 4.2), layout="tight")
    full, points = None, []
    for peer, rows in report["served"].items():
        for case, runs in grouped(rows).items():
            if any("error" in run for run in runs):
                continue
            speed = statistics.median(map(rate, runs))
            right = statistics.median(100 * run["right"].count("1") / len(run["right"]) for run in runs)
            points.append((title_of(peer, case), case, speed, right))
            full = (speed, right) if case == "stock" else full
    farthest = max((speed for _, _, speed, _ in points), default=0)
    for group, case, speed, right in points:
        color, marker = STYLES[group]
        axis.scatter(speed, right, s=45, color=color, marker=marker, label=group, zorder=3)
        # Points of a group that lie side by side share a label.
        near = [
            name for its, name, x, y in points if its == group and abs(x - speed) < farthest / 25 and abs(y - right) < 4
        ]
        if case == near[0]:
            beside = {"xytext": (5, 14), "ha": "right"} if speed > 0.95 * farthest else {"xytext": (5, 5)}
            text = ", ".join(near)
            axis.annotate(text, (speed, right), textcoords="offset points", fontsize=8, color=color, **beside)
    if full:
        axis.axvline(full[0], color="#bbbbbb", linestyle=":", zorder=1)
        axis.axhline(full[1], color="#bbbbbb", linestyle=":", zorder=1)
    axis.set(xlabel="output tokens a second", ylabel="right answers, %", ylim=(-6, 116), xlim=(0, None))
    axis.margins(x=0.15)
    axis.spines[["top", "right"]].set_visible(False)
    entries = dict(zip(*reversed(axis.get_legend_handles_labels())))
    axis.legend(entries.values(), entries, loc="center left", frameon=False)
    save(figure, path)


def picture(report: dict, path: Path) -> None:
    """Throughput over the peak of KV, at the larger number of requests."""
    plt = plots()
    points: list[tuple[str, str, float, float]] = []
    for peer, rows in report["load"].items():
        for case, runs in grouped(rows, report["sizes"]["requests"]).items():
            if not any("error" in run for run in runs):
                held = statistics.median(run["peak_kv_bytes"] for run in runs) / 2**20
                cpu = statistics.median(rate(run, "cpu_seconds") for run in runs)
                points.append((title_of(peer, case), case, held, cpu))
    points.sort(key=lambda point: point[3])
    figure, (speed, memory) = plt.subplots(1, 2, figsize=(9, 0.6 + 0.27 * len(points)), sharey=True, layout="tight")
    places = range(len(points))
    for axis, column, words in ((speed, 3, "output tokens a second of CPU"), (memory, 2, "peak of KV, MiB")):
        bars = axis.barh(places, [point[column] for point in points], color=[STYLES[point[0]][0] for point in points])
        axis.bar_label(bars, fmt="%.0f", padding=2, fontsize=8)
        axis.set_xlabel(words)
        axis.margins(x=0.14)
        axis.spines[["top", "right"]].set_visible(False)
    speed.set_yticks(places, [f"{group}: {case}" for group, case, *_ in points])
    sizes = report["sizes"]
    figure.suptitle(f"{sizes['requests']} requests of {sizes['prompt']:,} + {sizes['output']} tokens", fontsize=10)
    save(figure, path)


def published(page: str, report: dict) -> str:
    """Return the page with new tables in the places that it has for them, between two comments with a table's name."""
    for name, table in tables(report).items():
        pattern = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)"
        page, count = re.subn(pattern, lambda found: f"{found[1]}{table}\n{found[2]}", page, flags=re.DOTALL)
        if count > 1:
            raise ValueError(f"docs/results.md got {count} places for the table {name!r}; expected one at most")
    return page


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, nargs="?", default=Path("out/peers/peers.json"))
    parser.add_argument("--publish", action="store_true", help="into docs/ and results/ too")
    options = parser.parse_args(arguments)
    report: dict[str, Any] = json.loads(options.report.read_text())
    text = "\n\n".join(f"**{name}**\n\n{table}" for name, table in tables(report).items())
    options.report.with_suffix(".md").write_text(text + "\n")
    pictures = {"load": ("peers.svg", picture), "served": ("answers.svg", answers_picture)}
    pictures = {part: drawn for part, drawn in pictures.items() if part in report}
    for name, draw in pictures.values():
        draw(report, options.report.with_name(name))
    if options.publish:
        page = DOCS / "results.md"
        page.write_text(text := published(page.read_text(), report))
        for name, draw in pictures.values():
            if name in text:
                draw(report, DOCS / "pictures" / name)
        for part, name in FILES.items():
            if part in report:
                rest = {key: value for key, value in report.items() if key not in FILES.keys() - {part}}
                (RESULTS / "performance" / name).write_text(to_json(rest) + "\n")
    print(text)


if __name__ == "__main__":
    main()
