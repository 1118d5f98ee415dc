"""`make external`: RULER and LongBench under policies by one command, tried on stand-ins."""

import json
import subprocess

from evaluation import DATA, ROOT, needle_model

from vllm_evict.tools.eval import rows

LONGBENCH = [file.stem for file in (DATA / "longbench" / "data").glob("*.jsonl")]


@needle_model
def test_external_benchmarks_run_by_one_command(tmp_path):
    """`make external` without a model of one's own, at one budget: a row and a cell for each sample, a report to the end."""
    engine = json.dumps({"enforce_eager": True, "max_model_len": 1024})
    options = f"--out {tmp_path} --budgets 0.25 --engine-args '{engine}'"
    done = subprocess.run(
        ["make", "-s", "external", f"EVAL_ARGS={options}"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [row for row in map(json.loads, (tmp_path / rows.FILE).read_text().splitlines()) if row["prompt"]]
    tasks = {"ruler/niah_multivalue", "ruler/qa_1", *(f"longbench/{name}" for name in LONGBENCH)}
    policies = {"full", "h2o", "snapkv", "tova", "keydiff", "sink-window", "full evict=host"}
    assert {(row["task"], row["policy"]) for row in found} == {(task, policy) for task in tasks for policy in policies}
    configs = {json.dumps(row["policy_config"], sort_keys=True) for row in found}
    assert len(configs) == len(policies) == 7
    told = (tmp_path / "summary.md").read_text() + (tmp_path / "report.html").read_text()
    assert all(told.count(task) >= 2 * len(policies) for task in tasks)
