"""Pictures of one setting's rows: needle heat maps, quality against budget, quality against throughput."""

import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from .rows import Row
from .summary import Line, labelled, mean_share, memory_words, one_setting, summarise

SHARES = "viridis"


def draw_all(rows: Sequence[Row], folder: Path) -> dict[str, Path]:
    """Draw every picture that the rows have data for.

    Args:
        rows: of one setting.
        folder: where the PNG files go.

    Returns:
        Caption -> file.

    Raises:
        EvalError: the rows are of several settings.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    setting = one_setting(rows)
    rows = [row | {"turn": None} for row in labelled(rows)]  # pictures take all turns of a session together
    stem = "-".join(filter(None, (rows[0]["setting"], rows[0].get("haystack"))))
    made: dict[str, Path] = {}

    def save(figure: Any, caption: str, name: str) -> None:
        path = folder / f"{stem}-{name}.png"
        figure.savefig(path, dpi=120, bbox_inches="tight", facecolor="white")
        pyplot.close(figure)
        made[caption] = path

    by_length, overall = summarise(rows), summarise(rows, by_length=False)
    if any(not line.is_full for line in by_length):
        save(budgets(pyplot, by_length), f"Quality against budget ({setting})", "quality")
    if any(line.tokens_per_s for line in overall):
        save(pareto(pyplot, overall), f"Quality against throughput ({setting})", "pareto")
    for task in dict.fromkeys(row["task"] for row in rows if row["depth"] is not None):
        figure = heat_map(pyplot, [row for row in rows if row["task"] == task])
        save(figure, f"{task}: depth of the needle by length ({setting})", f"needles-{task.replace('/', '-')}")
    return made


def styles(lines: Sequence[Line]) -> dict[str, dict[str, Any]]:
    """Colour, marker and line of each policy: black for `full`, else ten colours, repeated with other lines."""
    names = list(dict.fromkeys(line.policy for line in lines if not line.is_full))
    full = {line.policy: {"color": "black", "marker": "*", "ls": "-"} for line in lines if line.is_full}
    looks = [("o", "-"), ("s", "--"), ("^", ":")]
    found = {}
    for i, name in enumerate(names):
        marker, line = looks[i // 10 % len(looks)]
        found[name] = {"color": f"C{i % 10}", "marker": marker, "ls": line}
    return full | found


def budgets(pyplot: Any, lines: Sequence[Line]) -> Any:
    """Quality against budget, a panel for each task and length; `full` is a horizontal line, bands and bars are 95 %.

    A task has a row of panels, by length. With one length tasks stand side by side.
    """
    tasks = list(dict.fromkeys(x.task for x in lines))
    lengths = sorted({x.length for x in lines}, key=lambda length: length or 0)
    panels = [(task, length) for task in tasks for length in lengths]
    wide = len(lengths) if len(lengths) > 1 else min(3, len(tasks))
    high = math.ceil(len(panels) / wide)
    figure, axes = pyplot.subplots(high, wide, figsize=(3.4 * wide + 1, 2.6 * high + 0.6), squeeze=False)
    style = styles(lines)
    # Bars of many policies would hide each other; the table has all intervals.
    bars = len(style) <= 6
    for axis, (task, length) in zip(axes.flat, panels):
        here = [x for x in lines if x.task == task and x.length == length]
        for line in here:
            if line.is_full:
                axis.axhline(line.score, color="black", lw=1.5, label="full")
                if math.isfinite(line.high):
                    axis.axhspan(line.low, line.high, color="black", alpha=0.08, lw=0)
        for policy in dict.fromkeys(x.policy for x in here if not x.is_full):
            found = sorted((x for x in here if x.policy == policy and _tokens(x)), key=lambda x: _tokens(x) or 0)
            if found:
                look = {"ms": 4, "capsize": 2, "lw": 1.2, "label": policy, **style[policy]}
                at = [_tokens(x) for x in found], [x.score for x in found]
                axis.errorbar(*at, _bars(found) if bars else None, **look)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axis.set_title(f"{task}, {length:,} tokens" if length else task, fontsize=9)
        axis.set_xlabel("budget, tokens", fontsize=8)
        axis.grid(alpha=0.25)
        _quality_axis(axis, here)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    _legend(figure, axes)
    figure.tight_layout()
    return figure


def pareto(pyplot: Any, lines: Sequence[Line]) -> Any:
    """Quality against throughput, a panel for each task; the stairs are the `frontier`.

    Throughput is a multiple of that of `full` at equal memory; without such figures, tokens per second.
    """
    equal = any(x.pool_tokens_per_s for x in lines)

    def speed(line: Line) -> float | None:
        return line.speed if equal else line.tokens_per_s

    lines = [x for x in lines if speed(x)]
    tasks = list(dict.fromkeys(x.task for x in lines))
    figure, axes = pyplot.subplots(1, len(tasks), figsize=(3.8 * len(tasks) + 0.6, 3.6), squeeze=False)
    style = styles(lines)
    for task, axis in zip(tasks, axes[0], strict=True):
        here = [x for x in lines if x.task == task]
        for line in here:
            look = {**style[line.policy], "ls": "none", "lw": 1, "ms": 10 if line.is_full else 5}
            at = speed(line), line.score
            axis.errorbar(*at, _bars([line]), label=line.policy, **look)
            axis.annotate(line.memory, at, (5, 4), textcoords="offset points", fontsize=7)
        front = frontier(here, speed)
        axis.step([speed(x) for x in front], [x.score for x in front], where="pre", color="grey", lw=0.8, ls=":")
        axis.set_title(task, fontsize=9)
        axis.set_xlabel("tokens per second, times full at equal memory" if equal else "tokens per second")
        axis.grid(alpha=0.25)
        _quality_axis(axis, here)
    _legend(figure, axes)
    figure.tight_layout()
    return figure


def frontier(lines: Sequence[Line], speed: Callable[[Line], Any]) -> list[Line]:
    """Return the lines that no other line beats in both quality and speed, slowest first."""
    better = (lambda a, b: a < b) if lines and lines[0].perplexity else (lambda a, b: a > b)
    front: list[Line] = []
    for line in sorted(lines, key=speed, reverse=True):
        if not front or better(line.score, front[-1].score):
            front.append(line)
    return front[::-1]


def heat_map(pyplot: Any, rows: Sequence[Row]) -> Any:
    """Return the share of right answers by depth and length, one panel for each policy (across: its budgets)."""
    policies = sorted({row["policy"] for row in rows}, key=lambda p: (p.split()[0] != "full", p))
    sizes = sorted({row["budget"] for row in rows if row["budget"] is not None}, key=lambda b: (b < 1, b))
    depths, lengths = sorted({r["depth"] for r in rows}), sorted({r["length"] for r in rows})
    # One policy a row; with one budget, five.
    wide = len(sizes) if len(sizes) > 1 else min(5, len(policies))
    panels: list[tuple[str, Any] | None] = []
    for policy in policies:
        own = [None] if all(r["budget"] is None for r in rows if r["policy"] == policy) else sizes
        panels += [(policy, budget) for budget in own]
        if len(sizes) > 1:
            panels += [None] * (wide - len(own))
    high = math.ceil(len(panels) / wide)
    size = 1.3 + (0.7 * len(lengths) + 0.5) * wide, (0.32 * len(depths) + 0.9) * high
    figure, axes = pyplot.subplots(high, wide, figsize=size, squeeze=False)
    picture = None
    for axis, panel in zip_longest(axes.flat, panels):
        policy, budget = panel or ("", None)
        here = [row for row in rows if row["policy"] == policy and row["budget"] == budget]
        if not here:
            axis.set_visible(False)
            continue
        grid = [[_share(here, depth, length) for length in lengths] for depth in depths]
        picture = axis.imshow(grid, vmin=0, vmax=1, cmap=SHARES, aspect="auto")
        held = memory_words(policy, budget, mean_share(here))
        axis.set_title(policy if held in ("", "all") else f"{policy}, {held}", fontsize=8)
        axis.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], fontsize=7, rotation=30)
        axis.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths], fontsize=7)
    axes[0][0].set_ylabel("depth", fontsize=8)
    figure.tight_layout()
    figure.colorbar(picture, ax=axes, shrink=0.6, label="share of right answers")
    return figure


def _share(rows: Sequence[Row], depth: float, length: int) -> float:
    scores = [row["score"] for row in rows if row["depth"] == depth and row["length"] == length]
    return sum(scores) / len(scores) if scores else math.nan


def _tokens(line: Line) -> float | None:
    """Return a budget in tokens; if the budget in tokens is not known, a ratio is taken of the length."""
    if line.share is not None:
        return line.share * line.length if line.length else None
    if line.budget_tokens:
        return line.budget_tokens
    if isinstance(line.budget, float):
        return line.budget * line.length if line.length else None
    return line.budget


def _bars(lines: Sequence[Line]) -> list[list[float]]:
    """Return the lengths of error bars down and up; 0 where an interval is unbounded."""
    finite = [math.isfinite(x.high) for x in lines]
    down = [max(0.0, x.score - x.low) if ok else 0.0 for x, ok in zip(lines, finite, strict=True)]
    up = [max(0.0, x.high - x.score) if ok else 0.0 for x, ok in zip(lines, finite, strict=True)]
    return [down, up]


def _quality_axis(axis: Any, lines: Sequence[Line]) -> None:
    if lines and lines[0].perplexity:
        axis.set_ylabel("perplexity (less is better)", fontsize=8)
        return
    axis.set_ylim(-0.04, 1.04)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.set_ylabel("right answers", fontsize=8)


def _legend(figure: Any, axes: Any) -> None:
    found: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": 6}
    figure.legend(found.values(), found.keys(), fontsize=8, frameon=False, **place)
