"""Writes prompts as people have them, for `vllm-evict tune`: tasks on parts of essays, chats about them, tasks without.

    make models
    python benchmarks/asked.py models/essays my.jsonl [--characters 2400]
    python benchmarks/asked.py --keep tune smollm2      keeps the rows of a run of `tune`, of its folder
    python benchmarks/asked.py --table smollm2          prints the table of docs/safe.md

`data/asked.txt` has the tasks. Each that has a text gets another part of an essay.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from reports import RESULTS

from vllm_evict.tools.tune.audited import MEASURES
from vllm_evict.tools.tune.run import figure_of

#: Runs of `tune` on trained models.
FOLDER = RESULTS / "quality/real/tuned"
#: What the rows of a run share, and fields of each.
SHARED = ("engine", "hardware", "versions", "chat")
OWN = (
    "policy",
    "policy_config",
    "budget",
    "part",
    "asked",
    "skipped",
    "lost",
    "kept",
    "memory",
    "peak",
    "lengths",
    "seconds",
)
TASKS = Path(__file__).parent / "data/asked.txt"


def passages(folder: Path, characters: int) -> Iterator[str]:
    """Yield parts of all essays in turn, the first of each, then the second of each, and so on."""
    essays = [path.read_text() for path in sorted(folder.glob("*.txt"))]
    for begin in range(0, max(map(len, essays), default=0), characters):
        for essay in essays:
            part = essay[begin : begin + characters]
            if len(part) == characters:
                yield part[part.index(" ") + 1 :].strip()


def prompts(folder: Path, characters: int) -> Iterator[dict]:
    """Yield a row of JSONL for each task."""
    texts = passages(folder, characters)
    for line in TASKS.read_text().splitlines():
        kind, _, task = line.partition(": ")
        if kind == "passage":
            yield {"prompt": f"{next(texts)}\n\n{task}"}
        elif kind == "chat":
            first, *rest = task.split(" | ")
            said = [f"{first}\n\n{next(texts)}", *rest]
            yield {"messages": [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]}
        elif kind == "alone":
            yield {"prompt": task}


def keep(run: Path, name: str) -> None:
    """Write the rows of a run of `tune`, after a line of what they share."""
    rows = [json.loads(line) for line in (run / "tune.jsonl").read_text().splitlines()]
    shared = {field: rows[0][field] for field in SHARED} | {"model": Path(rows[0]["model"]).name}
    lines = [shared, *({field: row[field] for field in OWN} for row in rows)]
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def table(name: str) -> str:
    """Return the table of a run: the control, then budgets that were searched, then those that were to be confirmed."""
    _, *rows = map(json.loads, (FOLDER / f"{name}.jsonl").read_text().splitlines())
    lines = [f"| policy | budget | half | memory | peak | {' | '.join(MEASURES)} |", "|---|---:|---|" + "---:|" * 5]
    parts = ("control", "search", "confirm")
    for row in sorted(rows, key=lambda row: (parts.index(row["part"]), row["policy"], row["budget"] or 0)):
        budget = "all" if row["budget"] is None else f"{row['budget']:.0%}"
        cells = [f"`{row['policy']}`", budget, row["part"], f"{row['memory']:.0%}", f"{row['peak']:.0%}"]
        for measure in MEASURES:
            figure = figure_of(row, measure)
            low, high = figure.interval
            said = (
                f"{figure.share:.1%} of {figure.n}"
                if measure == "tokens"
                else f"{sum(figure.scores):.0f} of {figure.n}"
            )
            cells.append(f"{said} ({low:.2f}-{high:.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("essays", type=Path, nargs="?", help="folder with .txt files")
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--characters", type=int, default=2400, help="of a part of an essay")
    parser.add_argument("--keep", nargs=2, metavar=("RUN", "NAME"))
    parser.add_argument("--table", metavar="NAME")
    args = parser.parse_args()
    if args.keep:
        keep(Path(args.keep[0]), args.keep[1])
    if args.table:
        print(table(args.table))
    if args.out:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in prompts(args.essays, args.characters)))


if __name__ == "__main__":
    main()
