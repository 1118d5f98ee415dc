"""Prints the tables of answers of docs/results.md from the files in benchmarks/results/quality.

    python benchmarks/answers.py

A cell has right answers, or shares, at 10, 25 and 50 % of the cache. `make quality` measures the files.
"""

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from reports import RESULTS

NEEDLES = ("niah", "multikey", "twostage", "vt")
LAST = "accumulate=last window=16"
ONE_SET = "granularity=token sets=all"
BUDGETS = ("10%", "25%", "50%")
#: Columns of reach.csv that tell policies apart.
REACHED = ("length", "budget", "sink", "recent", "hold")
#: Tokens of a block, and indexes as shares of its keys and values, in the embedded model (64 dimensions, bfloat16). The
#: rows of reach.csv chose by signs; `bits` became the default after them.
BLOCK, INDEXES = 32, {"signs": 448 / 8192, "bits": 648 / 8192}
Scores = dict[tuple[str, str], dict[str, float]]
Telling = Callable[[dict[str, float]], str]


def scores(name: str, length: str = "2048") -> Scores:
    """Return the scores of a file by (policy, budget) and task."""
    found: Scores = {}
    with (RESULTS / f"quality/{name}.csv").open() as file:
        for row in csv.DictReader(file):
            if row["length"] == length:
                found.setdefault((row["policy"], row["budget"]), {})[row["task"]] = float(row["score"])
    return found


def right(its: dict[str, float], tasks: Sequence[str] = NEEDLES) -> str:
    """Return how many answers to 100 prompts of each task are right."""
    return str(round(sum(100 * its[task] for task in tasks)))


def percent(task: str) -> Telling:
    return lambda its: f"{100 * its[task]:.0f}"


def cell(
    found: Scores, policy: str, told: Callable[[dict[str, float]], str] = right, budgets: Sequence = BUDGETS
) -> str:
    """Return a policy's figures at each budget; `full` has one."""
    if policy == "full":
        return told(found["full", "all"])
    return " / ".join(told(found[policy, budget]) for budget in budgets)


def rows(head: str, lines: Iterable[Sequence[str]]) -> str:
    columns = head.count("|") - 1
    return "\n".join([head, "|---" * columns + "|", *(f"| {' | '.join(line)} |" for line in lines)])


def title(policy: str) -> str:
    return f"`{policy}`" if " " not in policy else f"`{policy.split()[0]}`, last 16"


def policies() -> str:
    before, longer, aware = scores("agnostic"), scores("agnostic-4096", "4096"), scores("aware")
    return rows(
        "| policy | before the question, of 400 | the same, 4,096 tokens | perplexity | question in sight, of 300 |",
        (
            (
                title(policy),
                cell(before, policy),
                cell(longer, policy, budgets=BUDGETS[:2]),
                cell(before, policy, lambda its: f"{its['ppl']:.2f}"),
                cell(aware, policy, lambda its: right(its, NEEDLES[:3]), BUDGETS[:2]),
            )
            for policy in dict.fromkeys(policy for policy, _ in before)
        ),
    )


def steps() -> str:
    several, counts = scores("aggregates"), scores("counts")
    return rows(
        "| policy | `chain`, % | `classify`, % | `count`, % |",
        (
            (
                title(policy),
                cell(several, policy, percent("chain")),
                cell(several, policy, percent("classify")),
                cell(counts, policy, percent("count")),
            )
            for policy in dict.fromkeys(policy for policy, _ in several)
        ),
    )


def tokens() -> str:
    """Return what blocks, a set of tokens for each head, and one set for all heads keep."""
    before, aware = scores("agnostic") | scores("tokens") | scores("kvzip"), scores("aware") | scores("tokens-aware")
    ways = [
        (f"h2o {LAST}", f"h2o granularity=token {LAST}", f"h2o {ONE_SET} {LAST}"),
        ("snapkv", "snapkv granularity=token kernel=7", f"snapkv {ONE_SET} kernel=7"),
        *((name, f"{name} granularity=token", f"{name} {ONE_SET}") for name in ("tova", "keydiff", "rkv", "kvzip")),
    ]
    lines = []
    for way in ways:
        known = all((policy, "10%") in aware for policy in way)
        seen = " / ".join(right(aware[policy, "10%"], NEEDLES[:3]) for policy in way) if known else "not run"
        lines.append((title(way[0]), *(cell(before, policy) for policy in way), seen))
    head = "| score | blocks, of 400 | a set for each head | one set | question in sight, of 300, at 10 %: all three |"
    return rows(head, lines)


def duo() -> str:
    """Return right answers of 400 with 2,048 and with 4,096 tokens, and the share of the cache."""
    others = ("rkv", f"h2o {LAST}", "snapkv", "sink-window")
    lines = []
    for policy, *budgets in (
        ("full", "all", "all"),
        ("duo-needle", "53%", "52%"),
        (f"duo sparsity=0.5 retrieval=h2o {LAST}", "28%", "27%"),
        ("duo pattern=3.3.0.0", "53%", "52%"),
        *((policy, budget, budget) for policy in others for budget in ("53%", "29%")),
    ):
        its = [right(scores("duo", length)[policy, budget]) for length, budget in zip(("2048", "4096"), budgets)]
        lines.append((f"`{policy}`", " / ".join(dict.fromkeys(budgets)), *its))
    return rows("| policy | of the cache | 2,048 tokens, of 400 | 4,096 tokens, of 400 |", lines)


def asked() -> str:
    """Return sums of policies that evict, and of those that read what a query asks for, at 10, 20, 30 and 50 %."""
    found, total = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    with (RESULTS / "quality/papers.csv").open() as file:
        for row in csv.DictReader(file):
            key = row["setting"], row["policy"], row["budget"]
            found[key] += int(row["right"])
            total[key] += int(row["of"])
    dropping = {f"`{policy}`": policy for policy in ("h2o", "snapkv", "sink-window")}
    parts = {"`full`": [("full", "all")]}
    parts |= {name: [(policy, budget) for budget in ("0.1", "0.2", "0.3", "0.5")] for name, policy in dropping.items()}
    for name, rest in (
        ("Quest: `read` in each layer", "dense_layers=0"),
        ("OmniKV: `read`, `leaders: [2]`", "filter_layers=[2]"),
    ):
        parts[name] = [
            (f"full select={size} select_sink=32 select_recent=32 {rest}", "all") for size in (224, 416, 608, 1024)
        ]
    settings = ("agnostic", "aware", "turns")
    head = " | ".join(f"{setting}, of {total[setting, 'full', 'all']:,}" for setting in settings)
    return rows(
        f"| policy | {head} |",
        (
            (name, *(" / ".join(f"{found[(setting, *part)]:,}" for part in its) for setting in settings))
            for name, its in parts.items()
        ),
    )


def reached() -> str:
    """Return right answers where blocks wait on the host, in each setting, and what the device keeps of a prompt."""
    found: dict[tuple[int, ...], dict[str, list[int]]] = {}
    with (RESULTS / "quality/reach.csv").open() as file:
        for row in csv.DictReader(file):
            of_settings = found.setdefault(tuple(int(row[name]) for name in REACHED), {})
            its = of_settings.setdefault(row["setting"], [0, 0])
            its[:] = its[0] + int(row["right"]), its[1] + int(row["of"])
    settings = ("agnostic", "aware", "turns")
    lines = []
    for (length, budget, sink, recent, hold), of_settings in sorted(found.items()):
        of_length, held, sinks, last = (
            length // BLOCK,
            budget // BLOCK,
            sink // BLOCK,
            (recent + 2 * BLOCK - 2) // BLOCK,
        )
        cells = ["{:,} of {:,}".format(*of_settings[each]) if each in of_settings else "not run" for each in settings]
        blocks = f"{held} of {of_length + 1}: {sinks} + {held - sinks - last} + {last}"
        shares = [f"{(held + index * of_length) / (of_length + 1):.1%}" for index in INDEXES.values()]
        lines.append((f"{length:,}", blocks, str(hold), *shares, *cells))
    indexes = " | ".join(f"with `{index}`" for index in INDEXES)
    head = f"| tokens | blocks: sinks + room + recent | `hold` | {indexes} | {' | '.join(settings)} |"
    return rows(head, lines)


TABLES = (policies, steps, tokens, duo, asked, reached)


def main() -> None:
    print("\n\n".join(f"<!-- {table.__name__} -->\n{table()}" for table in TABLES))


if __name__ == "__main__":
    main()
