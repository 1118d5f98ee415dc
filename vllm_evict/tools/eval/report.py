"""Writes the results of a run: a table in the terminal, CSV, Markdown, pictures, and one HTML page."""

import base64
import csv
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from . import EvalError
from .pictures import draw_all
from .rows import FILE, Row, read
from .stats import FEWEST, MATTERS
from .summary import Line, columns, conditions, rankings, setting_of, settings_of, summarise, words

NOTES = [
    "Brackets are 95 % intervals: Wilson's for shares of right answers, bootstrap for others. "
    "The difference from full is taken on the same prompts. Within noise means that a paired sign-flip test "
    "(McNemar's exact test for right and wrong answers) cannot tell the difference from chance, p ≥ 0.05. A real "
    "difference may still exist: more prompts show smaller ones. Too few prompts to tell means the same of fewer than "
    f"{FEWEST} prompts, or of a difference of {MATTERS:.0%} and more, which such a test could not exclude.",
    "Tokens kept is the budget of a request in whole blocks, and of a ratio its share of the prompt. A raised ratio is "
    "more than its own blocks: a budget has at least the blocks of sinks, recent tokens and a choice.",
    "Peak blocks and evicted tokens are per request. Tokens/s counts prompt and answer tokens of the batch that a "
    "request ran in; first token is the time from a request's arrival, waiting included. Means over requests.",
    "Tokens/s are measured in a pool that is never short, where eviction gains nothing. × full is the throughput at "
    "equal memory, as a multiple of that of full: of one batch, in a pool with room for the budget and a chunk of each "
    "request (for the longest prompt if that is more), once for each length.",
]
SETTINGS = {
    "agnostic": "Decisions over the context do not see the question: prompts are prefilled in chunks, the context ends "
    "with a chunk, and the question is in the next.",
    "aware": "Decisions see the question: the whole prompt is one chunk, and the first decision follows it.",
    "turns": "Several questions about one document, one after the other in a session: the first question comes as "
    "in agnostic; later ones come when the policy has evicted after the turns before, whose answers are in the cache. "
    "A line for each turn; pictures take all.",
    "served": "The server makes the chunks: decisions over the last chunk see the question, all others do not.",
}


def load(folder: Path) -> list[Row]:
    """Return the rows of a results folder, without a half-written last line.

    Raises:
        EvalError: the folder has no rows, or the file is damaged.
    """
    path = folder / FILE
    if not path.exists():
        raise EvalError(f"no results in {folder}: {FILE} is not there")
    rows, _ = read(path)
    if not rows:
        raise EvalError(f"no results in {folder}: {FILE} has no whole row")
    return rows


def write(rows: Sequence[Row], folder: Path, console: Console) -> list[Path]:
    """Write every report of these rows and print the table.

    Args:
        rows: of any number of settings; each gets a table and pictures of its own.
        folder: the folder of rows.jsonl.
        console: prints the table.

    Returns:
        The written files.
    """
    lines = summarise(rows)
    parts: list[tuple[str, list[Line], dict[str, Path]]] = []
    for setting in settings_of(rows):
        own = [row for row in rows if setting_of(row) == setting]
        parts.append((setting, [x for x in lines if x.setting == setting], draw_all(own, folder)))
    files = {
        "summary.csv": _csv(lines),
        "summary.md": _markdown(rows, parts),
        "report.html": _html(rows, parts),
    }
    for setting, of_setting, _ in parts:
        console.print(terminal_table(setting, of_setting, console.width))
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    pictures = [path for _, _, made in parts for path in made.values()]
    return [folder / name for name in files] + pictures


#: Columns that are left out in a narrow terminal; the files have them.
WIDE = ("n", "peak blocks", "evicted tokens", "first token s", "tokens/s")


def terminal_table(setting: str, lines: Sequence[Line], width: int) -> Table:
    """Return the lines of one setting, for a terminal of `width` columns."""
    table = Table(title=f"Quality, {setting}", title_justify="left", header_style="bold", pad_edge=False)
    hidden = WIDE if width < 190 else ()
    shown = [{k: v for k, v in words(line).items() if k not in hidden} for line in lines]
    for name in shown[0]:
        side: Literal["left", "right"] = "left" if name in ("task", "policy", "") else "right"
        # Policies with options have long names, and verdicts several words.
        wraps = name in ("policy", "")
        table.add_column(name, justify=side, no_wrap=not wraps, min_width=11 if wraps else None, overflow="fold")
    marks = {"worse": "red", "better": "green"}
    last = None
    for line, row in zip(lines, shown, strict=True):
        if last and (line.task, line.length) != last:
            table.add_section()
        last = line.task, line.length
        table.add_row(
            *row.values(),
            style="bold" if line.is_full else marks.get(line.verdict, "dim" if line.p is not None else ""),
        )
    return table


def headlines(lines: Sequence[Line]) -> list[str]:
    """Return a sentence for each task, on its longest length.

    It has `full`, and each policy at its smallest budget and at the smallest budget from which on it is not worse than
    `full`.
    """
    said = []
    for task in dict.fromkeys(x.task for x in lines):
        longest = max(x.length or 0 for x in lines if x.task == task)
        here = [x for x in lines if x.task == task and (x.length or 0) == longest]
        full = next((x for x in here if x.is_full), None)
        parts = [f"full attention {full.quality}" if full else "full did not run, so nothing can be compared"]
        for policy in dict.fromkeys(x.policy for x in here if not x.is_full):
            own = sorted((x for x in here if x.policy == policy), key=lambda x: x.budget_tokens or x.budget or 0)
            parts.append(f"{policy} {own[0].quality} at a budget of {own[0].memory}")
            if full:
                equal = next((x for i, x in enumerate(own) if all(y.verdict != "worse" for y in own[i:])), None)
                if equal is None:
                    parts[-1] += " and worse than full at every budget tried"
                elif equal is own[0]:
                    parts[-1] += f", which {equal.n} prompts do not tell from full"
                else:
                    parts[-1] += f"; at {equal.memory} {equal.quality}, "
                    parts[-1] += f"which {equal.n} prompts do not tell from full"
        said.append(f"{task}{f' at {longest:,} tokens' if longest else ''}: " + "; ".join(parts) + ".")
    return said


def _csv(lines: Sequence[Line]) -> str:
    out = io.StringIO()
    rows = [columns(line) for line in lines]
    writer = csv.DictWriter(out, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _markdown(rows: Sequence[Row], parts: Sequence[tuple[str, list[Line], dict[str, Path]]]) -> str:
    text = ["# Quality under eviction", ""]
    for setting, lines, pictures in parts:
        text += [f"## Setting: {setting}", "", SETTINGS[setting.split(",")[0]], ""]
        text += [f"- {said}" for said in headlines(lines)] + [""]
        text += [f"![{caption}]({path.name})" for caption, path in pictures.items()] + [""]
        text += _markdown_table([words(line) for line in lines])
    if ranks := rankings([line for _, lines, _ in parts for line in lines]):
        text += ["## Ranking by haystack", "", *_markdown_table(ranks)]
    text += [*NOTES, ""] + [f"- {line}" for line in conditions(rows)]
    return "\n".join(text) + "\n"


def _markdown_table(rows: Sequence[dict[str, str]]) -> list[str]:
    head = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    return [*head, *("| " + " | ".join(row.values()) + " |" for row in rows), ""]


STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
figure { margin: 1.5rem 0; } figcaption { font-weight: 600; margin-bottom: .4rem; }
img { max-width: 100%; border-radius: 4px; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
table { display: block; overflow-x: auto; }
th, td { padding: .2rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--soft); }
th { position: sticky; top: 0; } .left { text-align: left; }
tr.full { font-weight: 600; } tr.worse { color: #c0392b; } tr.better { color: #1e8449; } tr.noise { opacity: .75; }
.small { font-size: 13px; opacity: .8; overflow-wrap: anywhere; }
"""


def _html(rows: Sequence[Row], parts: Sequence[tuple[str, list[Line], dict[str, Path]]]) -> str:
    models = ", ".join(sorted({row["model"] for row in rows}))
    body = [f"<h1>Quality under eviction</h1><p>{html.escape(models)}, {len(rows):,} requests</p>"]
    for setting, lines, pictures in parts:
        body += [f"<h2>Setting: {html.escape(setting)}</h2><p>{html.escape(SETTINGS[setting.split(',')[0]])}</p><ul>"]
        body += [f"<li>{html.escape(said)}</li>" for said in headlines(lines)] + ["</ul>"]
        body += [figure(caption, path) for caption, path in pictures.items()]
        body += ["<details open><summary>All figures</summary>", _html_table(lines), "</details>"]
    body += [f'<p class="small">{html.escape(note)}</p>' for note in NOTES]
    body += [f'<p class="small">{html.escape(line)}</p>' for line in conditions(rows)]
    return document("Quality under eviction", body)


def figure(caption: str, path: Path) -> str:
    """Return a picture for a page, with the PNG file in it."""
    data, words = base64.b64encode(path.read_bytes()).decode(), html.escape(caption)
    return f'<figure><figcaption>{words}</figcaption><img alt="{words}" src="data:image/png;base64,{data}"></figure>'


def document(title: str, body: Sequence[str]) -> str:
    """Return a page that needs no other file."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        + "\n".join(body)
        + "</body></html>\n"
    )


def _html_table(lines: Sequence[Line]) -> str:
    left = ("task", "policy", "")
    kinds = {"worse": "worse", "better": "better"}
    shown = [words(line) for line in lines]

    def cells(tag: str, values: Sequence[str]) -> str:
        named = zip(shown[0], values, strict=True)
        return "".join(
            f"<{tag}{' class=left' if name in left else ''}>{html.escape(value)}</{tag}>" for name, value in named
        )

    text = ["<table><thead><tr>", cells("th", list(shown[0])), "</tr></thead><tbody>"]
    for line, row in zip(lines, shown, strict=True):
        kind = "full" if line.is_full else kinds.get(line.verdict, "noise" * line.tested)
        text.append(f'<tr class="{kind}">{cells("td", list(row.values()))}</tr>')
    return "".join(text) + "</tbody></table>"
