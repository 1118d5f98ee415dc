"""Pictures of what benchmarks/gpu/engine.py has measured: ratios to stock, and decode steps at growing context."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Rows whose lines are ratios to stock.
RATIOS = ("armed", "paper", "pressure")
STOCK = "stock"
DRY = "DRY RUN, nothing was measured: "


class NothingToDraw(ValueError):
    """The reports have no measured figures for a picture."""


def draw(reports: Sequence[Path], folder: Path, dry_run: bool = False) -> list[Path]:
    """Draw every picture that the reports have figures for.

    Args:
        reports: JSON files; of a row that several have, the last one's is taken.
        folder: where the PNG files go.
        dry_run: draw a dry run's figures too, and say so in the picture.

    Returns:
        The files.

    Raises:
        NothingToDraw: there are no figures, or a report is of a dry run.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows: dict[str, Any] = {}
    title = ""
    for path in reports:
        report = json.loads(path.read_text())
        if report["dry_run"] and not dry_run:
            raise NothingToDraw(f"{path} is of a dry run: it has no figures that mean anything")
        rows |= {name: row for name, row in report["rows"].items() if row.get("lines")}
        title = DRY if report["dry_run"] or title == DRY else report["gpu"]["name"] + ": "
    pictures = {"gpu-ratios.png": ratios(pyplot, rows, title), "gpu-latency.png": latency(pyplot, rows, title)}
    made = []
    for name, figure in pictures.items():
        if figure is not None:
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(folder / name, dpi=120, bbox_inches="tight", facecolor="white")
            pyplot.close(figure)
            made.append(folder / name)
    if not made:
        raise NothingToDraw(f"no row that can be drawn in {', '.join(map(str, reports))}")
    return made


def ratios(pyplot: Any, rows: dict[str, Any], title: str) -> Any:
    """A bar for each case, a dot for each round, and a mark at the target; None without such rows."""
    lines = [(name, line) for name in RATIOS for line in rows.get(name, {}).get("lines", ()) if line["case"] != STOCK]
    if not lines:
        return None
    figure, axis = pyplot.subplots(figsize=(6.5, 0.45 * len(lines) + 1.2))
    for place, (name, line) in enumerate(lines):
        axis.barh(place, line["value"], color=f"C{RATIOS.index(name)}", alpha=0.6)
        axis.plot(line["rounds"], [place] * len(line["rounds"]), "k.", ms=4)
        if line["wanted"] and title != DRY:
            axis.plot([line["wanted"][1]] * 2, [place - 0.4, place + 0.4], color="black", lw=1.5)
    axis.axvline(1, color="grey", lw=0.8, ls=":")
    axis.set_yticks(range(len(lines)), [f"{name}: {line['case']}" for name, line in lines], fontsize=8)
    axis.invert_yaxis()
    wanted = "" if title == DRY else "; black marks: wanted"
    axis.set_xlabel(f"tokens per second over stock (dots: rounds{wanted})", fontsize=8)
    axis.set_title(title + "ratios to stock vLLM", fontsize=9)
    return figure


def latency(pyplot: Any, rows: dict[str, Any], title: str) -> Any:
    """Milliseconds of a decode step by context: a panel a batch size, a curve a case; None without the row."""
    if "latency" not in rows:
        return None
    batches = rows["latency"]["load"]["contexts"]
    figure, axes = pyplot.subplots(1, len(batches), figsize=(4.2 * len(batches), 3.2), squeeze=False)
    for axis, (batch, contexts) in zip(axes[0], batches.items(), strict=True):
        for case, rounds in rows["latency"]["runs"].items():
            steps = [[each[f"batch {batch}"][str(context)]["seconds"] for each in rounds] for context in contexts]
            found = [[1e3 * statistics.median(seconds) for seconds in each] for each in steps]
            middle = [statistics.median(each) for each in found]
            down = [at - min(each) for at, each in zip(middle, found)]
            up = [max(each) - at for at, each in zip(middle, found)]
            look = {"color": "black", "ls": "--"} if case == STOCK else {}
            axis.errorbar(contexts, middle, [down, up], marker="o", ms=3, capsize=2, lw=1.2, label=case, **look)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k" if value >= 1024 else f"{value:g}")
        axis.set_ylim(bottom=0)
        axis.set_xlabel("context, tokens", fontsize=8)
        axis.set_ylabel("ms a decode step", fontsize=8)
        axis.set_title(f"batch of {batch}", fontsize=9)
        axis.grid(alpha=0.25)
    axes[0][0].legend(fontsize=8, frameon=False)
    figure.suptitle(title + "decode steps at growing context", fontsize=9)
    figure.tight_layout()
    return figure
