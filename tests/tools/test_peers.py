"""benchmarks/peers: a dry run with vLLM alone, the tables and the picture of it, and the tables of docs/results.md."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "peers"


@pytest.fixture(scope="module")
def peers():
    """The modules `run` and `table`."""
    before, known = list(sys.path), set(sys.modules)
    sys.path[:0] = [str(FOLDER)]
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in ("run", "table")})
    sys.path[:] = before
    for name in set(sys.modules) - known:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(FOLDER):
            del sys.modules[name]


@pytest.fixture(scope="module")
def dry(peers, tmp_path_factory):
    """The JSON of a dry run where no peer has an environment, and where kvpress could not be installed."""
    out, environments = tmp_path_factory.mktemp("peers"), tmp_path_factory.mktemp("environments")
    folder = environments / ".venv-peers-kvpress"
    folder.mkdir()
    (folder / "unavailable").write_text("No matching distribution found for kvpress==0.5.5\n")
    peers.run.main(["--dry-run", "--rounds", "1", "--out", str(out), "--environments", str(environments)])
    return json.loads((out / "peers.json").read_text())


def test_a_dry_run_measures_what_it_can(dry):
    loads = {(row["case"], row.get("requests")): row for row in dry["load"]["vllm"]}
    for case in ("stock", "h2o"):
        for requests in (1, 2):
            row = loads[case, requests]
            assert row["output_tokens"] == 16 * requests and row["at_once"] == requests and row["preemptions"] == 0
            assert len(row["first"]) == requests and 0 < max(row["first"]) < row["seconds"]
            assert 0 < row["peak_kv_bytes"] <= 2048 * 8192
    # The same in bfloat16: half of the bytes, of all requests at once alone.
    half = {row["case"]: row for row in dry["bfloat16"]["vllm"]}
    assert {case: row["requests"] for case, row in half.items()} == {"stock": 2, "h2o": 2}
    assert half["stock"]["peak_kv_bytes"] * 2 == loads["stock", 2]["peak_kv_bytes"]
    served = {row["case"]: row for row in dry["served"]["vllm"]}
    assert set(served) == {"stock", "h2o"}
    for row in served.values():
        assert row["requests"] == 3 and row["output_tokens"] == 16 * 3 and "answers" not in row
    assert served["stock"]["right"].count("1") >= 2 and len(served["h2o"]["right"]) == 3
    # 144 tokens are five blocks of 256 KiB.
    assert loads["stock", 2]["peak_kv_bytes"] == 2 * 5 * 32 * 8192
    (keydiff,) = {row["case"] for row in dry["needles"]["vllm"]}
    assert keydiff == "keydiff"
    assert [row["budget"] for row in dry["needles"]["vllm"]] == ["10%", "25%", "50%"]
    assert all(set(row["right"]) <= {"0", "1"} and len(row["right"]) == 4 for row in dry["needles"]["vllm"])


def test_tables_name_what_did_not_run(peers, dry):
    table = peers.table.load_table(dry["load"], dry["missing"], 2)
    (refused,) = [line for line in table.splitlines() if "--kv-offloading-size" in line]
    assert "not run: " in refused
    assert "kvpress | | not run: cannot be installed here: No matching distribution found for kvpress==0.5.5" in table
    assert "OpenVINO GenAI | | not run: no environment: run make .venv-peers-openvino/.made" in table
    answers = peers.table.answers_table(dry, "kvpress", peers.table.METHODS)
    assert "| KeyDiff |  |" in answers and "all of kvpress | not run: " in answers


def test_the_picture_has_every_case_that_ran(peers, dry, tmp_path):
    peers.table.picture(dry, tmp_path / "peers.svg")
    drawn = (tmp_path / "peers.svg").read_text()
    assert "vllm_evict: h2o" in drawn and "vLLM: stock" in drawn and "offloading" not in drawn
    peers.table.answers_picture(dry, tmp_path / "answers.svg")
    drawn = (tmp_path / "answers.svg").read_text()
    assert all(f">{name}<" in drawn for name in ("h2o", "stock", "vllm_evict", "vLLM"))


def test_agreement_is_of_prompts(peers):
    mark = peers.table._mark
    assert mark("0110", "0110") == "=" and mark("0110", "1001") == "≈"
    assert mark("1" * 20, "0" * 20) == "p = 0.000"


def test_tables_of_the_page_are_those_of_the_file(peers):
    page, tables = (ROOT / "docs/results.md").read_text(), {}
    for name in peers.table.FILES.values():
        tables |= peers.table.tables(json.loads((ROOT / "benchmarks/results/performance" / name).read_text()))
    shown = [name for name in tables if f"<!-- {name} -->" in page]
    assert len(tables) == 13 and len(shown) == 6 and not [name for name in shown if tables[name] not in page]


def test_a_process_that_failed_leaves_its_answers_out(peers, dry):
    failed = {**dry, "needles": {**dry["needles"], "vllm": [{"case": "keydiff", "error": "killed"}]}}
    assert "| KeyDiff |  | refused |" in peers.table.answers_table(failed, "kvpress", peers.table.METHODS)
