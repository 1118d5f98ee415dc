"""benchmarks/gpu/check.py on the CPU engine: that it finds nothing wrong here, and that it says so where something is."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path += [str(FOLDER), str(FOLDER / "gpu")]  # behind tests/, which has an engine.py too

import check  # noqa: E402
import check_child  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402


@pytest.fixture
def here(monkeypatch):
    """Engines are in this very process, which takes seconds; but for stock, which is without the plugin."""
    elsewhere = check.Check._run

    def run(self, case, given):
        if case.check == "stock":
            return elsewhere(self, case, given)
        for name, value in case.environment.items():
            monkeypatch.setenv(name, value)
        try:
            result = check_child.run(check.specification(case, given))
        finally:
            cleanup_dist_env_and_memory()
        return check.judged(case, json.loads(json.dumps(result)))

    monkeypatch.setattr(check.Check, "_run", run)


@pytest.fixture
def run(tmp_path, capsys):
    """Outcomes by case, the status and what was printed."""

    def checked(*arguments):
        out, status = tmp_path / "check.json", 0
        try:
            check.main([*arguments, "--out", str(out)])
        except SystemExit as left:
            status = left.code
        report = json.loads(out.read_text())
        outcomes = {outcome["case"]: outcome for outcome in report["cases"]}
        return SimpleNamespace(report=report, outcomes=outcomes, status=status, said=capsys.readouterr().out)

    return checked


def only(monkeypatch, *cases):
    monkeypatch.setattr(check, "CASES", list(cases))


def case(name):
    return next(each for each in check.CASES if each.name == name)


# ---- engines


def test_nothing_is_wrong_here(run, here):
    """`full` brings along what it is compared with."""
    names = ("full", "h2o", "oracle", "context")
    done = run("--cases", *names)
    assert list(done.outcomes) == [f"CPU_ATTN eager {name}" for name in ("stock", *names)]
    assert {outcome["status"] for outcome in done.outcomes.values()} == {check.OK} and done.status == 0, done.said
    stock, full, h2o, oracle, context = (outcome["found"] for outcome in done.outcomes.values())
    assert stock["steady"] and len(stock["said"]["tokens"]) == 12
    assert full["same_tokens"] == 12 and full["largest_difference"] == 0
    assert h2o["evicted_blocks"] == 12 * 26 and h2o["cached_tokens"] > 0 and h2o["blocks_at_end"] <= 9
    assert oracle["decisions"] > 1 and oracle["mean_error"] < 0.05 < oracle["without_eviction"]
    assert context["moves"] > 1 and 2 * context["mean_error"] < context["without_moves"]
    facts = done.outcomes["CPU_ATTN eager h2o"]["facts"]
    assert facts["attention_backend"] == "CPU_ATTN" and facts["plugin_loaded"]
    assert done.report["hardware"] and done.report["versions"]["vllm"] and "check.py" not in done.report["versions"]
    assert done.said.count("OK ") == 5 and "5 OK, 0 FAIL, 0 skipped" in done.said


def test_what_is_wrong_is_said(run, here, monkeypatch):
    """Requests that lose nothing, needles that should not be found, and a prefix cache that is not there."""
    lenient = case("h2o").policy | {"budget": check.TOKENS}
    wanted = case("h2o").wanted | {"found": (0, 3)}
    only(monkeypatch, replace(case("h2o"), policy=lenient, wanted=wanted, load={"cached": False}))
    done = run()
    (outcome,) = done.outcomes.values()
    assert outcome["status"] == check.FAIL and done.status == 1 and "FAIL     CPU_ATTN eager h2o" in done.said
    for reason in (
        "12 of 12 requests lost no block",
        "the scheduler decided nothing",
        "found: 12 of 12 needles, 0 to 3 are right",
        "the prefix cache was never hit",
    ):
        assert reason in outcome["reason"]
    assert outcome["found"]["evicted_blocks"] == 0


def test_a_case_that_fails_takes_no_other_with_it(run, monkeypatch, tmp_path):
    """An engine that refuses, a process that dies, one that hangs; the kernels' tests still run."""
    child = tmp_path / "check_child.py"
    child.write_text(
        "import json, os, runpy, sys, time\n"
        "check = json.load(open(sys.argv[1]))['check']\n"
        "if check == 'dies': os.abort()\n"
        "if check == 'hangs': print('here', flush=True); time.sleep(600)\n"
        f"runpy.run_path({str(check.CHILD)!r}, run_name='__main__')\n"
    )
    monkeypatch.setattr(check, "CHILD", child)
    monkeypatch.setattr(check, "KERNELS", ("test_fold.py",))
    refused = replace(case("h2o"), name="refused", policy={"name": "h2o", "budget": 1, "sink": 64})
    hangs = check.Case("hangs", "hangs", limit=1)
    only(monkeypatch, check.Case("dies", "dies"), hangs, refused, check.Case("kernels", "kernels"))
    done = run("--cases", "dies", "hangs", "refused", "kernels", "--jobs", "2")
    reasons = {name.split()[-1]: outcome["reason"] for name, outcome in done.outcomes.items()}
    status = {name.split()[-1]: outcome["status"] for name, outcome in done.outcomes.items()}
    assert status == dict.fromkeys(("dies", "hangs", "refused"), check.FAIL) | {"kernels": check.OK}, reasons
    assert "its process died, status -6" in reasons["dies"]
    assert reasons["hangs"] == "it took more than 1 s; the last it said: here"
    assert reasons["refused"].startswith("KVPolicyError: ")
    assert done.outcomes["kernels"]["found"]["passed"] > 3 and done.status == 1


# ---- without engines


def outcomes_of(monkeypatch, results, cases, *arguments, places=(("A", "eager"), ("B", "graphs")), jobs=2):
    """Of cases whose processes answer as `results` says, by title or by name."""
    monkeypatch.setattr(check, "unserved", lambda case: "")
    options = check.parse_arguments([*arguments])
    options.out = Path(os.devnull)
    ran = check.Check(options)

    def answer(case, given):
        return check.judged(case, results.get(case.title, results.get(case.name)))

    monkeypatch.setattr(ran, "_run", answer)
    ran.all(list(check.ordered(cases, list(places))), jobs)
    return {outcome["case"]: (outcome["status"], outcome["reason"]) for outcome in ran.outcomes}


FINE = {"found": {"found": 12}, "wrong": []}


def test_what_needs_a_case_that_failed_is_skipped(monkeypatch):
    cases = [case("stock"), case("full"), case("h2o")]
    results = {"A eager stock": {"error": "ValueError: no such kernel"}, "stock": FINE, "full": FINE, "h2o": FINE}
    found = outcomes_of(monkeypatch, results, cases)
    assert found["A eager stock"] == (check.SKIPPED, "stock vLLM fails: ValueError: no such kernel")
    assert found["A eager full"] == (check.SKIPPED, "stock is not there to compare with")
    others = ("A eager h2o", "B graphs stock", "B graphs full", "B graphs h2o")
    assert all(found[name] == (check.OK, "") for name in others) and len(found) == 6


def test_no_case_begins_when_time_is_over(monkeypatch):
    found = outcomes_of(monkeypatch, {}, [case("h2o")], "--seconds", "1")
    assert set(found.values()) == {(check.LEFT_OUT, "--seconds are over")}


def test_a_case_at_work_when_time_is_over_is_left_out(monkeypatch, tmp_path):
    options = check.parse_arguments(["--seconds", "0.5"])
    options.out, options.log = tmp_path / "check.json", tmp_path / "check.log"
    child = tmp_path / "child.py"
    child.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(check, "LEAST", 0)
    monkeypatch.setattr(check, "CHILD", child)
    ran = check.Check(options)
    ran.all([check.Case("slow", "slow")], 1)
    (outcome,) = ran.outcomes
    assert (outcome["status"], outcome["reason"]) == (check.LEFT_OUT, "ended: --seconds were over")


def test_the_most_telling_cases_come_first_behind_every_backend():
    places = [("FLASH_ATTN", "eager"), ("FLASH_ATTN", "graphs")]
    titles = [each.title for each in check.ordered(check.CASES, places)]
    first = [f"FLASH_ATTN {mode} {name}" for mode in ("eager", "graphs") for name in ("stock", "full", "h2o", "oracle")]
    assert titles[:8] == first and titles[8] == "kernels" and titles.count("kernels") == 1
    assert len(titles) == len(set(titles)) == 2 * (len(check.CASES) - 1) + 1


def test_policies_that_split_heads_are_no_case_of_flashinfer():
    duo = case("duo")
    assert check.unserved(replace(duo, backend="FLASHINFER")) == "policies that split heads are not for FLASHINFER"
    assert check.unserved(replace(duo, backend="FLASH_ATTN")) == ""


def test_backends_of_a_gpu(monkeypatch):
    """FlashInfer only where it is."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [place for place in check.places() if place[0] != "FLASHINFER"] == [
        (backend, mode) for backend in ("FLASH_ATTN", "TRITON_ATTN") for mode in ("eager", "graphs")
    ]
    monkeypatch.setattr(check, "find_spec", lambda name: name == "flashinfer")
    assert ("FLASHINFER", "graphs") in check.places()


def test_nothing_checked_is_no_success(run, monkeypatch):
    only(monkeypatch, case("h2o"))
    done = run("--seconds", "1")
    assert done.status == 1 and "left out, --seconds were over: CPU_ATTN eager h2o" in done.said


def test_as_a_command():
    command = [sys.executable, str(FOLDER / "gpu" / "check.py"), "--help"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert all(each.name in said for each in check.CASES)


@pytest.mark.parametrize("target", ["check-gpu", "bench-gpu"])
def test_a_python_without_the_plugin_is_told_what_to_install(tmp_path, target):
    """Before any set-up, the Python that make finds has none of the packages."""
    python = tmp_path / "bare"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["make", target, f"GPU_PYTHON={python}"], cwd=FOLDER.parent, capture_output=True, text=True, timeout=60
    )
    (line,) = [line for line in done.stderr.splitlines() if "GPU_PYTHON" in line]
    assert done.returncode == 2 and "has no torch, vllm, rich, vllm_evict; expected the Python of your vLLM" in line
    assert "Error" not in done.stderr.replace("make: ***", "").replace("Error 1", "")
