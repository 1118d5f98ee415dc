"""Raw timings in docs/performance: the tables that pages show of them."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


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

    report = json.loads((ROOT / f"docs/performance/{name}.json").read_text())
    assert getattr(pressure, table)(report) in (ROOT / "docs/performance.md").read_text()


@pytest.mark.parametrize("name", ["mha", "small", "compile", "bfloat16", "prompt", "prompt-60000"])
def test_rows_of_other_loads_are_those_of_their_files(to_json, name):
    from reports import spread

    report = json.loads((ROOT / f"docs/performance/pressure-{name}.json").read_text())
    ratios = report["ratios"]["seconds"]
    cells = [spread(ratios[policy], ".2f") for policy in ("sink-window", "h2o")]
    if len(ratios["h2o"]) == 1:
        cells = [cell.partition(" ")[0] for cell in cells]
    assert f"| {cells[0]} | {cells[1]} |" in (ROOT / "docs/performance.md").read_text()


def test_the_table_past_the_models_context_is_that_of_its_file(to_json):
    import endless

    report = json.loads((ROOT / "docs/performance/endless.json").read_text())
    assert endless.table(report) in (ROOT / "docs/quality.md").read_text()


def test_the_table_of_a_step_is_that_of_its_file(to_json):
    import where

    report = json.loads((ROOT / "docs/performance/where.json").read_text())
    assert where.table(report) in (ROOT / "docs/performance.md").read_text()


@pytest.mark.parametrize("name, module, table", [("host", "host", "table"), ("duo", "duo", "latency_table")])
def test_tables_of_other_benchmarks_are_those_of_their_files(to_json, name, module, table):
    report = json.loads((ROOT / f"docs/performance/{name}.json").read_text())
    assert getattr(importlib.import_module(module), table)(report) in (ROOT / "docs/performance.md").read_text()


def test_the_table_of_decisions_on_a_model_s_keys_is_that_of_its_file(to_json):
    import decide

    report = json.loads((ROOT / "docs/performance/decide-model.json").read_text())
    assert decide.table(report).split("\n\n")[1] in (ROOT / "docs/performance.md").read_text()
