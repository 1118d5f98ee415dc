"""Tables of answers by trained models, from the raw rows in benchmarks/results/quality/real.

    python benchmarks/real.py                       prints the tables of docs/results.md
    python benchmarks/real.py out/real smollm2      first keeps the rows of `vllm-evict eval --out out/real`

A file has one line with what all of its rows share (model, machine, versions, engine), then a line for each answer.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from reports import RESULTS

from vllm_evict.tools.eval.stats import interval

FOLDER = RESULTS / "quality/real"
#: Fields of a row that differ between the answers of one file.
OWN = ("task", "length", "index", "policy", "budget", "setting", "seed", "prompt_sha256", "expected", "answer", "score")
OWN += ("prompt_tokens", "output_tokens", "peak_blocks", "evicted_tokens", "time")
#: Fields of a run that every file tells.
SHARED = ("chat", "block_size", "engine", "hardware", "versions")
Row = dict[str, Any]


def keep(source: Path, name: str) -> None:
    """Write the rows of a results folder of `vllm-evict eval`, sorted, as the file of a model."""
    rows = [json.loads(line) for line in (source / "rows.jsonl").read_text().splitlines()]
    shared = {field: rows[0][field] for field in SHARED} | {"model": Path(rows[0]["model"]).name}
    rows.sort(key=lambda row: (row["task"], row["length"], row["policy"], str(row["budget"]), row["index"]))
    lines = [shared, *({field: row[field] for field in OWN} for row in rows)]
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def cell(rows: Iterable[Row]) -> str:
    """Return the score of some rows in %, the interval around it (95 %), and their number."""
    scores = [row["score"] for row in rows]
    if not scores:
        return "not run"
    low, high = interval(scores)
    return f"{sum(scores) / len(scores):.0%} ({low:.0%} to {high:.0%}), n = {len(scores)}".replace("%", " %")


def table(file: Path) -> str:
    """Return the table of a model: a row for each task and policy, a column for each budget."""
    shared, *rows = map(json.loads, file.read_text().splitlines())
    budgets = sorted({row["budget"] for row in rows if row["budget"]})
    lines = [
        f"{shared['model']}; {shared['hardware']['cores']} cores of {shared['hardware']['cpu']}, vLLM "
        f"{shared['versions']['vllm']}",
        "",
        f"| task, tokens | policy | {' | '.join(f'{budget:.0%}'.replace('%', ' %') for budget in budgets)} |",
        "|---" * (2 + len(budgets)) + "|",
    ]
    for task, length in dict.fromkeys((row["task"], row["length"]) for row in rows):
        its = [row for row in rows if (row["task"], row["length"]) == (task, length)]
        for policy in sorted({row["policy"] for row in its}, key=lambda name: (name != "full", name)):
            of_policy = [row for row in its if row["policy"] == policy]
            if policy == "full":
                cells = [f"{cell(of_policy)}, with all of the cache", *[""] * (len(budgets) - 1)]
            else:
                cells = [cell(row for row in of_policy if row["budget"] == budget) for budget in budgets]
            lines.append(f"| `{task.rpartition('/')[2]}`, {length:,} | `{policy}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    if len(sys.argv) == 3:
        keep(Path(sys.argv[1]), sys.argv[2])
    print("\n\n".join(map(table, sorted(FOLDER.glob("*.jsonl")))))


if __name__ == "__main__":
    main()
