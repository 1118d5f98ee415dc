"""Raw timings and answers in benchmarks/results: the tables that pages show of them."""

import csv
import importlib
import json
from pathlib import Path
from statistics import median

import pytest

from vllm_evict.compute.kernels.codes import packed_bytes

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
    assert getattr(pressure, table)(report) in (ROOT / "docs/results.md").read_text()


@pytest.mark.parametrize("name", ["mha", "small", "compile", "bfloat16", "amx", "amx-mla", "prompt", "prompt-60000"])
def test_rows_of_other_loads_are_those_of_their_files(to_json, name):
    from reports import spread

    report = json.loads((ROOT / f"benchmarks/results/performance/pressure-{name}.json").read_text())
    ratios = report["ratios"]["seconds"]
    cells = [spread(ratios[policy], ".2f") for policy in ("sink-window", "h2o")]
    if len(ratios["h2o"]) == 1:
        cells = [cell.partition(" ")[0] for cell in cells]
    assert f"| {cells[0]} | {cells[1]} |" in (ROOT / "docs/results.md").read_text()


@pytest.mark.parametrize("name", ["burst", "burst-long"])
def test_what_waits_is_that_of_its_file(to_json, name):
    import burst

    report = json.loads((ROOT / f"benchmarks/results/performance/{name}.json").read_text())
    assert burst.table(report) in (ROOT / "docs/results.md").read_text()


@pytest.mark.parametrize("name", ["16384", "60000", "hybrid-16384", "hybrid-60000"])
def test_times_of_prompts_that_read_less_are_those_of_their_files(name):
    report = json.loads((ROOT / f"benchmarks/results/performance/pressure-read-{name}.json").read_text())
    stock, less = (median(run["cpu_seconds"] for run in runs) for runs in report["runs"].values())
    said = f"{stock / less:.2f} times ({stock:.1f} / {less:.1f} s)"
    assert said in " ".join((ROOT / "docs/reach.md").read_text().split())


def test_the_cost_of_the_host_beside_dropping_is_that_of_its_file():
    runs = json.loads((ROOT / "benchmarks/results/performance/load-exact.json").read_text())["runs"]
    page = " ".join((ROOT / "docs/reach.md").read_text().split())
    for name, said in (("", "gives {} and {} of the throughput of `h2o`"), (" by boxes", "{} and {} by boxes")):
        those = runs[f"full, reached{name}, budget"]
        pairs = zip(runs["h2o ema, budget"], those, strict=True)
        assert said.format(*(f"{h2o['cpu_seconds'] / own['cpu_seconds']:.2f}" for h2o, own in pairs)) in page
        assert all(all(run["found"]) for run in those)
        assert " | {:.1f}, {:.1f} | ".format(*(run["cpu_seconds"] for run in those)) in page


def test_the_table_past_the_models_context_is_that_of_its_file(to_json):
    import endless

    report = json.loads((ROOT / "benchmarks/results/performance/endless.json").read_text())
    assert endless.table(report) in (ROOT / "docs/results.md").read_text()


def test_the_table_of_a_step_is_that_of_its_file(to_json):
    import where

    report = json.loads((ROOT / "benchmarks/results/performance/where.json").read_text())
    assert "| a step | 6.30 | 6.29 | 6.33 |" in where.table(report).splitlines()
    said = "takes 6.30 ms of CPU in stock vLLM, 6.29 under `sink-window` and 6.33 under `h2o`"
    assert said in " ".join((ROOT / "docs/results.md").read_text().split())


@pytest.mark.parametrize("name", ["duo", "duo-prompts"])
def test_tables_of_streaming_heads_are_those_of_their_files(to_json, name):
    import duo

    report = json.loads((ROOT / f"benchmarks/results/performance/{name}.json").read_text())
    assert duo.latency_table(report) in (ROOT / "docs/results.md").read_text()


def test_the_workers_part_of_a_step_is_that_of_its_file(to_json):
    import host

    head, _, *rows = (
        [cell.strip() for cell in row.split("|")[1:-1]]
        for row in host.table(json.loads((ROOT / "benchmarks/results/performance/host.json").read_text())).splitlines()
    )
    full, sink_window, h2o = (
        sum(float(row[head.index(part)].split(" / ")[0]) for part in ("begin", "graph", "view", "end"))
        for row in rows[1:]
    )
    said = (
        f"{full:.2f} ms of CPU time of a step under `full`, {sink_window:.2f} under `sink-window` and {h2o:.2f} under"
    )
    assert said in " ".join((ROOT / "docs/results.md").read_text().split())


def test_the_table_of_what_audits_cost_is_that_of_its_file(to_json):
    import audit

    report = json.loads((ROOT / "benchmarks/results/performance/audit.json").read_text())
    page = (ROOT / "docs/safe.md").read_text()
    assert audit.table_of_costs(report) in page and report["conditions"]["command"] in page


def test_the_table_of_decisions_on_a_model_s_keys_is_that_of_its_file(to_json):
    import decide

    report = json.loads((ROOT / "benchmarks/results/performance/decide-model.json").read_text())
    assert decide.table(report).split("\n\n")[1] in (ROOT / "docs/results.md").read_text()


@pytest.mark.parametrize(
    "name, table, page",
    [
        ("check", "check.table", "limits"),
        ("kernels", "kernels.table", "results"),
        ("kernels", "kernels.table_of_reach", "reach"),
        ("pressure", "engine_rows.table", "results"),
    ],
)
def test_tables_of_a_gpu_are_those_of_their_files(to_json, monkeypatch, name, table, page):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks/gpu"))
    report = json.loads((ROOT / f"benchmarks/results/performance/gpu-{name}.json").read_text())
    assert report["gpu"]["name"] == "NVIDIA H200"
    module, _, function = table.partition(".")
    made = getattr(importlib.import_module(module), function)(
        report["rows"]["pressure"] if name == "pressure" else report
    )
    assert made in (ROOT / f"docs/{page}.md").read_text()


def rows_of(name):
    with (ROOT / f"benchmarks/results/quality/{name}.csv").open() as file:
        return list(csv.DictReader(file))


def test_tables_of_answers_are_those_of_the_files(to_json):
    import answers

    page = (ROOT / "docs/results.md").read_text()
    assert len(answers.TABLES) == 6
    assert not [table for table in answers.TABLES if f"<!-- {table.__name__} -->\n{table()}\n" not in page]
    cache = answers.BLOCK * 64 * 2 * 2
    assert answers.INDEXES["bits"] == packed_bytes(answers.BLOCK, 64) / cache


def test_tables_of_trained_models_are_those_of_the_files(to_json):
    import essays
    import real

    results, reach = ((ROOT / "docs" / page).read_text() for page in ("results.md", "reach.md"))
    assert all(real.table(file) in results for file in real.FOLDER.glob("*.jsonl"))
    if found := essays.by_setting(essays.read(essays.RAW)):
        assert not [table for table in essays.TABLES if f"<!-- {table.__name__} -->\n{table(found)}\n" not in reach]


def test_answers_by_traffic_are_those_of_the_files():
    page = (ROOT / "docs/index.md").read_text()
    cells, peaks = {}, {}
    for row in rows_of("documents"):
        cells.setdefault(row["policy"], {})[row["task"]] = round(float(row["score"]) * int(row["n"]))
        peaks[row["policy"]] = float(row["peak_blocks"])
    for policy, its in cells.items():
        its = [its[task] for task in ("niah", "multikey", "twostage", "vt")]
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


def test_the_tables_of_the_scheduler_are_those_of_their_file(to_json):
    import scale

    report = json.loads((ROOT / "benchmarks/results/performance/scale.json").read_text())
    page, (requests, _, memory) = (ROOT / "docs/results.md").read_text(), scale.page_tables(report)
    assert "\n".join(requests) in page
    page = " ".join(page.split())
    taken = {row.split("|")[1].strip(): row.split("|")[2:-1] for row in memory[2:]}
    of_blocks = [cell.split(", ")[1].strip() for cell in taken.pop("full, host")]
    ends = [sorted(int(row[at].split(", ")[0].replace(",", "")) for row in taken.values()) for at in (0, -1)]
    said = "{:,} to {:,} bytes of a request of 4,096 tokens, and {:,} to {:,} bytes of one of a million tokens".format
    assert said(*(its[at] for its in ends for at in (0, -1))) in page
    assert f"{of_blocks[0]} to {of_blocks[-1]} bytes for each block" in page


@pytest.mark.parametrize(
    "name, ours, theirs, requests, form, said",
    [
        ("fp8", "h2o, fp8", "stock", 48, ".1f", "{} times as many tokens as stock vLLM in float32 (rounds: {})"),
        (
            "fp8",
            "h2o, fp8",
            "--kv-cache-dtype fp8",
            48,
            ".1f",
            "{} times those of an fp8 cache that keeps all tokens ({})",
        ),
        ("fp8", "h2o, fp8", "NORM_SUM", 48, ".2f", "{} of those of OpenVINO ({})"),
        ("one", "h2o", "stock", 16, ".2f", "medians of {} times stock's ({})"),
        ("one", "h2o", "NORM_SUM", 16, ".2f", "and {} of OpenVINO's ({})"),
        ("one", "h2o", "stock", 1, ".2f", "`h2o` gives {} of stock's tokens ({})"),
        ("one", "h2o", "full", 1, ".2f", "and {} of those of OpenVINO without eviction ({})"),
        ("one-amx", "h2o", "stock", 16, ".2f", "`h2o` gives 16 requests {} times stock's tokens ({})"),
        ("one-amx", "h2o", "NORM_SUM", 16, ".2f", "which are {} of OpenVINO's ({})"),
        ("one-amx", "h2o", "stock", 1, ".2f", "one request {} of stock's ({})"),
    ],
)
def test_ratios_to_peers_are_those_of_their_files(name, ours, theirs, requests, form, said):
    report, rates = json.loads((ROOT / f"benchmarks/results/performance/peers-{name}.json").read_text()), {}
    for rows in report["fp8" if name == "fp8" else "load"].values():
        for row in rows:
            if row["requests"] == requests:
                rates.setdefault(row["case"], []).append(row["output_tokens"] / row["seconds"])
    ratios = [mine / its for mine, its in zip(rates[ours], rates[theirs], strict=True)]
    said = said.format(f"{median(ratios):{form}}", ", ".join(f"{each:{form}}" for each in ratios))
    assert said in " ".join((ROOT / "docs/results.md").read_text().split())


def test_the_table_of_a_tuned_model_is_that_of_its_file(to_json):
    import asked

    table = asked.table("smollm2")
    assert (
        f"<!-- tuned -->\n{table}\n<!-- end -->\n" in (ROOT / "docs/safe.md").read_text()
        and len(table.splitlines()) > 3
    )
