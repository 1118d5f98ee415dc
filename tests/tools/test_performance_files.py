"""Raw timings and answers in benchmarks/results: the tables that pages show of them."""

import csv
import importlib
import json
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def to_json(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from reports import to_json

    return to_json


def test_nothing_is_lost(to_json):
    samples = [[index / 7, index] for index in range(300)]
    runs = [{"samples": samples, "name": "ä", "none": None, "empty": [], "nested": {"x" * 100: [{"y" * 90: 1}]}}] * 2
    text = to_json({"runs": runs, 4096: {"short": [{}, True, 1e-9]}})
    assert json.loads(text) == {"runs": runs, "4096": {"short": [{}, True, 1e-9]}}


@pytest.mark.parametrize("name, table", [("pressure", "pressure_table"), ("step", "step_table")])
def test_tables_of_the_page_are_those_of_the_files(to_json, name, table):
    import pressure

    report = json.loads((ROOT / f"benchmarks/results/performance/{name}.json").read_text())
    assert getattr(pressure, table)(report) in (ROOT / "docs/performance.md").read_text()


@pytest.mark.parametrize("name", ["mha", "small", "compile", "bfloat16", "amx", "amx-mla", "prompt", "prompt-60000"])
def test_rows_of_other_loads_are_those_of_their_files(to_json, name):
    from reports import spread

    report = json.loads((ROOT / f"benchmarks/results/performance/pressure-{name}.json").read_text())
    ratios = report["ratios"]["seconds"]
    cells = [spread(ratios[policy], ".2f") for policy in ("sink-window", "h2o")]
    if len(ratios["h2o"]) == 1:
        cells = [cell.partition(" ")[0] for cell in cells]
    assert f"| {cells[0]} | {cells[1]} |" in (ROOT / "docs/performance.md").read_text()


def test_the_table_past_the_models_context_is_that_of_its_file(to_json):
    import endless

    report = json.loads((ROOT / "benchmarks/results/performance/endless.json").read_text())
    assert endless.table(report) in (ROOT / "docs/quality.md").read_text()


def test_the_table_of_a_step_is_that_of_its_file(to_json):
    import where

    report = json.loads((ROOT / "benchmarks/results/performance/where.json").read_text())
    assert where.table(report) in (ROOT / "docs/performance.md").read_text()


@pytest.mark.parametrize("name, module, table", [("host", "host", "table"), ("duo", "duo", "latency_table")])
def test_tables_of_other_benchmarks_are_those_of_their_files(to_json, name, module, table):
    report = json.loads((ROOT / f"benchmarks/results/performance/{name}.json").read_text())
    assert getattr(importlib.import_module(module), table)(report) in (ROOT / "docs/performance.md").read_text()


def test_the_table_of_decisions_on_a_model_s_keys_is_that_of_its_file(to_json):
    import decide

    report = json.loads((ROOT / "benchmarks/results/performance/decide-model.json").read_text())
    assert decide.table(report).split("\n\n")[1] in (ROOT / "docs/performance.md").read_text()


@pytest.mark.parametrize(
    "name, module, page",
    [("check", "check", "limits"), ("kernels", "kernels", "kernels"), ("pressure", "engine_rows", "performance")],
)
def test_tables_of_a_gpu_are_those_of_their_files(to_json, monkeypatch, name, module, page):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks/gpu"))
    report = json.loads((ROOT / f"benchmarks/results/performance/gpu-{name}.json").read_text())
    assert report["gpu"]["name"] == "NVIDIA H200"
    table = importlib.import_module(module).table(report["rows"]["pressure"] if name == "pressure" else report)
    assert table in (ROOT / f"docs/{page}.md").read_text()


def rows_of(name):
    with (ROOT / f"benchmarks/results/quality/{name}.csv").open() as file:
        return list(csv.DictReader(file))


def answers(name, length="2048"):
    """(policy, budget) -> task -> score, of a file in results/quality."""
    found = {}
    for row in rows_of(name):
        if row["length"] == length:
            found.setdefault((row["policy"], row["budget"]), {})[row["task"]] = float(row["score"])
    return found


NEEDLES = ("niah", "multikey", "twostage", "vt")


def right(scores, tasks=NEEDLES):
    """Right answers of some times 100."""
    return str(round(sum(100 * scores[task] for task in tasks)))


ONE_SET = "granularity=token sets=all"
#: Decodes that attend to a tenth of 4,096 tokens.
SELECT = "full select=416 select_sink=32 select_recent=32"
#: File -> the table's first cells, and the policies of its sums.
SUMS = {
    "kvzip": [("", ("kvzip", "kvzip granularity=token", f"kvzip {ONE_SET}"))],
    "merging": [
        (
            f"{title} | ",
            [policy.replace(" merge", f" {merge}").replace("  ", " ") for merge in ("", "merge=d2o", "merge=ems")],
        )
        for title, policy in (
            ("`h2o`, last 16, one set", f"h2o {ONE_SET} merge accumulate=last window=16"),
            ("`snapkv`, one set", f"snapkv {ONE_SET} merge kernel=7"),
            ("`rkv`, a set for each head", "rkv granularity=token merge"),
        )
    ],
    "tokens": [
        (f"{title} | ", (policy, f"{token} granularity=token{rest}", f"{token} {ONE_SET}{rest}"))
        for title, policy, token, rest in (
            ("`h2o`, last 16", "h2o accumulate=last window=16", "h2o", " accumulate=last window=16"),
            ("`snapkv`", "snapkv", "snapkv", " kernel=7"),
            *((f"`{name}`", name, name, "") for name in ("tova", "keydiff", "rkv", "knorm")),
        )
    ],
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_answers_are_those_of_the_files(name):
    page = (ROOT / "docs/quality.md").read_text().replace(" ↑", "").replace(" ↓", "")
    found = answers("agnostic") | answers(name)
    for begin, policies in SUMS[name]:
        for budget in ("10%", "25%", "50%"):
            sums = " | ".join(right(found[policy.rstrip(), budget]) for policy in policies)
            assert f"| {begin}{budget} | {sums} |" in page, (begin, budget, sums)


@pytest.mark.parametrize(
    "name, blocks, length, budget, tasks",
    [
        ("tokens-aware", "aware", "2048", "10%", NEEDLES[:3]),
        ("tokens-4096", "agnostic-4096", "4096", "25%", NEEDLES[:2]),
    ],
)
def test_sums_of_one_budget_are_those_of_the_files(name, blocks, length, budget, tasks):
    page = (ROOT / "docs/quality.md").read_text().replace(" ↑", "").replace(" ↓", "")
    found = answers(blocks, length) | answers(name, length)
    for begin, policies in SUMS["tokens"]:
        sums = " | ".join(right(found[policy.rstrip(), budget], tasks) for policy in policies)
        assert f"| {begin}{sums} |" in page, (begin, sums)


@pytest.mark.parametrize("name", ["duo", "protect", "counts"])
def test_cells_are_those_of_the_files(name):
    """Shares of right answers, or perplexity, with intervals; ≈ where a cell is within noise of `full`."""
    cells = {}
    for row in rows_of(name):
        score, low, high = (float(row[each]) for each in ("score", "low", "high"))
        if row["task"] == "ppl":
            cell = f"{score:.2f} [{low:.2f}, {high:.2f}]"
        else:
            cell = f"{100 * score:.0f}% [{100 * low:.0f}, {100 * high:.0f}]"
        cell += " ≈" * (row["verdict"] == "within noise")
        cells.setdefault((row["policy"], row["budget"], row["length"]), []).append(cell)
    page = (ROOT / "docs/quality.md").read_text()
    for (policy, budget, _), its in cells.items():
        assert f"| {policy} | {budget} | {' | '.join(its)} |" in page, (policy, budget, its)


def test_sums_of_what_comes_back_are_those_of_the_file():
    found, asked = Counter(), Counter()
    for row in rows_of("papers"):
        key = row["setting"], row["policy"], row["budget"]
        found[key] += int(row["right"])
        asked[key] += int(row["of"])
    page = (ROOT / "docs/quality.md").read_text()
    settings = ("agnostic", "aware", "turns")
    asks = [f"{setting}, of {asked[setting, 'full', 'all']:,}" for setting in settings]
    assert f"| policy | {' | '.join(asks)} |" in page
    recalled = "evict=host recall=quest"
    means = f"sink-window {recalled} recall_bounds=mean"
    policies = {f"`{policy}`": policy for policy in ("h2o", "snapkv", "sink-window")}
    policies |= {f"`{policy}`, recalled": f"{policy} {recalled}" for policy in ("h2o", "sink-window")}
    policies |= {"`sink-window`, recalled by means": means}
    rows = {title: [(policy, budget) for budget in ("0.1", "0.2", "0.3", "0.5")] for title, policy in policies.items()}
    rows |= {"`full`": [("full", "all")]}
    rows |= {
        title: [
            (f"full select={tokens} select_sink=32 select_recent=32 {rest}", "all") for tokens in (224, 416, 608, 1024)
        ]
        for title, rest in (
            ("Quest: `select` in each layer", "dense_layers=0"),
            ("OmniKV: `select`, `filter_layers: [2]`", "filter_layers=[2]"),
        )
    }
    for title, parts in rows.items():
        cells = [" / ".join(f"{found[(setting, *part)]:,}" for part in parts) for setting in settings]
        assert f"| {title} | {' | '.join(cells)} |" in page, (title, cells)


def test_sums_of_what_comes_back_with_4096_tokens_are_those_of_the_file():
    found = Counter()
    for row in rows_of("papers-4096"):
        found[row["setting"].split(",")[0], row["policy"], row["budget"]] += round(100 * float(row["score"]))
    lines = (ROOT / "docs/quality.md").read_text().splitlines()
    for title, policy, budgets in (
        ("`full`", "full", ["all"]),
        ("`h2o`", "h2o", ["10%", "25%"]),
        ("`snapkv`", "snapkv", ["10%", "25%"]),
        ("`h2o`, recalled", "h2o evict=host recall=quest", ["10%", "25%"]),
        ("Quest: `select` in each layer, a tenth", f"{SELECT} dense_layers=0", ["all"]),
        ("OmniKV: `select`, `filter_layers: [2]`, a tenth", f"{SELECT} filter_layers=[2]", ["all"]),
    ):
        cells = [
            " / ".join(str(found[setting, policy, budget]) for budget in budgets) for setting in ("agnostic", "aware")
        ]
        assert f"| {title} | {' | '.join(cells)} |" in lines, (title, cells)


def test_the_order_with_4096_tokens_is_as_like_as_the_page_says():
    from vllm_evict.eval.stats import kendall

    short, long = answers("agnostic"), answers("agnostic-4096", "4096")
    orders = []
    for budget in ("10%", "25%"):
        policies = [policy for policy, its in long if its == budget]
        means = [[sum(each[policy, budget][task] for task in NEEDLES) for policy in policies] for each in (short, long)]
        orders.append(f"{kendall(*means):.2f}")
    said = f"is {orders[0]} at a tenth and {orders[1]} at a quarter"
    assert said in " ".join((ROOT / "docs/quality.md").read_text().split())


def test_answers_by_traffic_are_those_of_the_files():
    page = (ROOT / "docs/choosing.md").read_text()
    cells, peaks = {}, {}
    for row in rows_of("documents"):
        cells.setdefault(row["policy"], {})[row["task"]] = round(float(row["score"]) * int(row["n"]))
        peaks[row["policy"]] = float(row["peak_blocks"])
    for policy, its in cells.items():
        its = [its[task] for task in NEEDLES]
        assert f"| `{policy}` | {' | '.join(map(str, its))} | {sum(its)} | {peaks[policy]:.0f} |" in page, (policy, its)
    files = sorted((ROOT / "benchmarks/results/quality/traffic").glob("*.json"))
    for file in files:
        report = json.loads(file.read_text())
        found = []
        for asked in (report[name] for name in ("agents", "shared") if name in report):
            cached, tokens = (sum(each[name] for each in asked) for name in ("cached_tokens", "prompt_tokens"))
            found.append(f"{sum(each['right'] for each in asked):.0f} of {len(asked)} | {100 * cached / tokens:.0f} %")
        assert not found or f"| `{report['policy']}` | {report['pool']:,} | {' | '.join(found)} |" in page, (
            file.stem,
            found,
        )
    (long,) = (report["long"] for report in map(json.loads, map(Path.read_text, files)) if "long" in report)
    assert {(each["prompt_tokens"], each["peak"]) for each in long} == {(520, 1184)} and "held 1,184 tokens" in page


def test_an_agents_turn_carries_the_conversation(to_json):
    """benchmarks/traffic.py against a client that answers with what is right for the first turn only."""
    import traffic

    class Client:
        asked = []

        def ask(self, messages, sample, **more):
            self.asked.append((messages[:], sample))
            right = sample.answers[0] if len(messages) == 1 else "?"
            return {"right": float(right != "?"), "text": right, "peak": 32, "evicted": 0} | dict.fromkeys(
                ("prompt_tokens", "cached_tokens"), len(messages)
            )

    found = traffic.agents(Client(), 1)
    assert len(found) == 20 and traffic.told(found).startswith("5 of 20 right, 80 of 80 prompt tokens from the prefix")
    last = [messages for messages, sample in Client.asked if sample.turn == 4]
    assert len(last) == 5 and all(
        [each["role"] for each in messages] == ["user", "assistant"] * 3 + ["user"] for messages in last
    )
    asked = {sample.question for _, sample in Client.asked}
    assert len(asked) > 4 and all(messages[-1]["content"] in asked for messages in last)
