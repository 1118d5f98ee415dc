"""Result of a run of `tune`: a table in the terminal, a picture, one HTML page, a JSON file, and the flag to use."""

import html
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...config import KVPolicyConfig
from ..eval.policies import budget_words
from ..eval.report import document, figure
from ..eval.rows import Row
from .audited import MEASURES
from .run import CONFIRM, CONTROL, SEARCH, Outcome, Result
from .search import Figure

#: Share of the answers that the flag has audited.
AUDIT = 0.01
#: Fields of rows that a picture has on its axes -> their words.
SHARES = {
    "memory": "share of its cache that a request's budget holds",
    "peak": "most of its cache that a request held at once",
}
#: Columns of words.
LEFT = ("policy", "half", "")
NOTES = (
    "Full attention scored each answer again (an audit). Answers of requests that lost no block count in the control "
    "alone, which is full attention on all prompts: what rounding and batches change.",
    "Budgets were searched on one half of the prompts. The other half confirms, from a larger budget downwards: a "
    "budget is confirmed if the lower ends of its interval, and of those above it, reach the target. Intervals are "
    "95 % (Wilson's). One policy that misses the target is confirmed in at most 2.5 % of runs; the best of several "
    "policies has more chances.",
    "Memory is the share of its tokens that a request's budget holds. Peak is the most that it held at once: chunks of "
    "its prompt and the field buffer come on top. Both are means over requests. Throughput was not measured; "
    "vllm-evict eval measures it.",
)


def write(result: Result, console: Console) -> list[Path]:
    """Write all files, and print the table and the flag.

    Returns:
        The written files.
    """
    out, lines = result.args.out, list(verdict(result))
    picture = draw(result, out / "tune.png")
    files = {
        "tune.json": json.dumps(summary(result), indent=1, ensure_ascii=False) + "\n",
        "tune.html": page(result, lines, picture),
    }
    for name, text in files.items():
        (out / name).write_text(text, encoding="utf-8")
    console.print(table(result))
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return [*(out / name for name in files), picture]


def flag(result: Result, outcome: Outcome) -> str:
    """Return the flag that serves an outcome, and audits some of the answers."""
    config = outcome.contender.config
    plain = KVPolicyConfig.parse({"name": config.name, "budget": config.budget}).to_dict()
    fields = {k: v for k, v in config.to_dict().items() if k in config.given and k != "allow" and v != plain.get(k)}
    fields = {"name": config.name, "budget": config.budget, **fields, "audit": AUDIT}
    if result.args.budget_bytes is None and result.args.measure == "identical":
        fields["target"] = result.target
        if lengths := result.control.get("lengths"):
            fields["tuned"] = lengths
    return f"--kv-policy {shlex.quote(json.dumps(fields))}"


def verdict(result: Result) -> Iterator[str]:
    """Yield what to do, in sentences, and the flag."""
    best, target = result.best, f"{result.target:g}"
    if best is None:
        yield (
            f"No budget that was tried takes blocks and meets {target}: take larger ones, other policies or a lower "
            "target."
        )
        return
    row = best.row
    held = f"{row['memory']:.0%} of the cache, at most {row['peak']:.0%} at once"
    said = f"{best.contender} ({held}): {_counted(result, row)}"
    if result.args.budget_bytes is not None:
        yield f"The best with {result.args.budget_bytes:,} bytes a request is {said}. Serve it with"
    elif best.confirmed:
        yield f"{said}, so {target} is confirmed. Serve it with"
    else:
        yield f"{said}: {words(result, best)}. To serve it all the same,"
    yield f"  {flag(result, best)}"
    if result.args.url:
        yield "and the other fields of your server's policy, which requests had here too."


def words(result: Result, outcome: Outcome) -> str:
    """Return what became of a policy."""
    if outcome.row["part"] == SEARCH:
        return "" if result.args.budget_bytes is not None else f"below {result.target:g} at each budget"
    if result.args.budget_bytes is not None:
        return "the best"
    if outcome.confirmed:
        return "confirmed"
    if not result.figure(outcome.row).n:
        return nothing(result.figure(outcome.row))
    if outcome.needed is None:
        return f"not confirmed, {result.target:g} is not met"
    return f"not confirmed, {result.target:g} takes about {outcome.needed:,} prompts"


def nothing(figure: Figure) -> str:
    """Return why no answer counts."""
    return "no request loses blocks" if figure.lost_nothing else "not audited"


def _counted(result: Result, row: Row) -> str:
    """Return the figure of a row on the half that confirms: so many of so many, or a share of tokens."""
    counted = result.figure(row)
    if not counted.n:
        return nothing(counted)
    low, high = counted.interval
    said = f"{sum(counted.scores):.0f} of {counted.n} answers of the confirming half are {result.args.measure}"
    if result.args.measure == "tokens":
        said = f"{counted.share:.1%} of the tokens of {counted.n} answers of the confirming half agree"
    return f"{said} ({low:.3f} to {high:.3f})"


def cells(result: Result) -> list[dict[str, str]]:
    """Return the table: column -> words, for each row of the run; the control is the first."""
    became = {outcome.row["key"]: words(result, outcome) for outcome in result.outcomes}
    order = [CONTROL, SEARCH, CONFIRM]
    names = ["full", *dict.fromkeys(outcome.contender.label for outcome in result.outcomes)]
    shown = [row for row in result.rows if row["policy"] in names]
    shown.sort(key=lambda row: (names.index(row["policy"]), order.index(row["part"]), row["budget"] or 0))
    found = []
    for row in shown:
        of_row = {"policy": row["policy"], "budget": budget_words(row["budget"]), "half": row["part"]}
        of_row |= {"memory": f"{row['memory']:.0%}", "peak": f"{row['peak']:.0%}"}
        scores = row["kept" if row["part"] == CONTROL else "lost"]
        for measure in MEASURES:
            some = scores.get(measure) or ()
            of_row[measure] = f"{sum(some) / len(some):.3f}" if some else ""
        counted = result.figure(row)
        low, high = counted.interval
        of_row["95 %"] = f"{low:.3f}-{high:.3f}" if counted.n else ""
        skipped = sum(row["skipped"].values())
        of_row["answers"] = f"{counted.n} of {row['asked']}" + f", {skipped} not audited" * bool(skipped)
        found.append(of_row | {"": became.get(row["key"], "the control" if row["part"] == CONTROL else "")})
    return found


def table(result: Result) -> Table:
    """Return the table for a terminal."""
    shown = cells(result)
    made = Table(title=f"Audited answers, {result.model}", title_justify="left", header_style="bold", pad_edge=False)
    for name in shown[0]:
        made.add_column(name, justify="left" if name in LEFT else "right", no_wrap=name != "")
    last = None
    for row in shown:
        if last is not None and row["policy"] != last:
            made.add_section()
        last = row["policy"]
        made.add_row(*map(escape, row.values()), style="bold" if row[""] in ("confirmed", "the best") else "")
    return made


def draw(result: Result, path: Path) -> Path:
    """Draw answers against memory and peak: hollow marks were searched, filled ones are of the half that confirms."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made, axes = pyplot.subplots(1, 2, figsize=(11, 4.4), sharey=True)

    def mark(axis: Any, of: str, row: Row, **look: Any) -> None:
        counted = result.figure(row)
        low, high = counted.interval
        bars = [[max(counted.share - low, 0)], [max(high - counted.share, 0)]]
        axis.errorbar([row[of]], [counted.share], bars, lw=1, ls="none", **look)

    low, high = result.figure(result.control).interval
    for axis, (of, said) in zip(axes, SHARES.items()):
        axis.axhspan(low, high, color="black", alpha=0.08, lw=0, label="control, 95 %")
        mark(axis, of, result.control, color="black", marker="*", ms=12, label="full: the control")
        if result.args.budget_bytes is None:
            axis.axhline(result.target, color="grey", ls="--", lw=1, label=f"target {result.target:g}")
        for number, outcome in enumerate(result.outcomes):
            label, colour = outcome.contender.label, f"C{number % 10}"
            rows = [row for row in result.rows if row["policy"] == label and result.figure(row).n]
            searched = sorted((row for row in rows if row["part"] == SEARCH), key=lambda row: row[of])
            axis.plot(
                [row[of] for row in searched], [result.figure(row).share for row in searched], color=colour, lw=0.8
            )
            axis.plot([], [], color=colour, marker="o", label=label)
            for row in rows:
                mark(axis, of, row, color=colour, marker="o", mfc="white" if row["part"] == SEARCH else colour)
        axis.set_xlim(0, 1.03)
        axis.set_ylim(-0.04, 1.04)
        for each in (axis.xaxis, axis.yaxis):
            each.set_major_formatter(lambda value, _: f"{value:.0%}")
        axis.set_xlabel(said)
        axis.grid(alpha=0.25)
    axis = axes[0]
    axis.set_ylabel("tokens that agree" if result.args.measure == "tokens" else f"{result.args.measure} answers")
    made.legend(*axis.get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside upper center", ncols=3)
    made.savefig(path, dpi=120, bbox_inches="tight", facecolor="white")
    pyplot.close(made)
    return path


def summary(result: Result) -> dict[str, Any]:
    """Return the result for programs."""

    def of_row(row: Row) -> dict[str, Any]:
        counted = result.figure(row)
        low, high = counted.interval
        kept = ("policy", "budget", "part", "asked", "skipped", "memory", "peak")
        share = {"answers": counted.n, "share": counted.share, "low": low, "high": high}
        return {name: row[name] for name in kept} | share

    best, args = result.best, result.args
    return {
        "model": result.model,
        "prompts": str(args.prompts),
        "measure": args.measure,
        "target": None if args.budget_bytes is not None else result.target,
        "budget_bytes": args.budget_bytes,
        "control": of_row(result.control),
        "policies": [
            of_row(each.row) | {"confirmed": each.confirmed, "needed_prompts": each.needed, "flag": flag(result, each)}
            for each in result.outcomes
        ],
        "best": best and {"policy": best.contender.label, "budget": best.contender.budget, "flag": flag(result, best)},
        "confirmed": bool(best and best.confirmed),
        "about": {name: result.control[name] for name in ("engine", "versions", "hardware", "same", "time")},
    }


def page(result: Result, lines: list[str], picture: Path) -> str:
    """Return the page of a run."""
    title = f"KV budgets for {result.model}"
    shown, about = cells(result), result.control
    body = [f"<h1>{html.escape(title)}</h1><p>{html.escape(str(result.args.prompts))}, {about['asked']} prompts. "]
    body.append(f"Measured: {html.escape(result.args.measure)}, {html.escape(MEASURES[result.args.measure])}.</p>")
    for line in lines:
        text = html.escape(line.strip())
        body.append(f"<pre><code>{text}</code></pre>" if line.startswith(" ") else f"<p><b>{text}</b></p>")
    body.append(figure("Answers against memory and peak", picture))
    body.append(f"<table><thead><tr>{_row('th', {name: name for name in shown[0]})}</tr></thead><tbody>")
    body += [f"<tr>{_row('td', row)}</tr>" for row in shown]
    body.append("</tbody></table>")
    conditions = {name: about[name] for name in ("engine", "versions", "hardware")}
    body += [f'<p class="small">{html.escape(note)}</p>' for note in (*NOTES, json.dumps(conditions, default=str))]
    return document(title, body)


def _row(tag: str, values: dict[str, str]) -> str:
    cells = ((" class=left" if name in LEFT else "", html.escape(value)) for name, value in values.items())
    return "".join(f"<{tag}{side}>{value}</{tag}>" for side, value in cells)
