"""The evaluation harness over HTTP, and vLLM with a policy under the LM Evaluation Harness."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from evaluation import DATA, NEEDLE, ROOT, needle_model, sample_of
from ports import reserve_port

from vllm_evict.tools.eval import EvalError, rows, summary
from vllm_evict.tools.eval.prompts import Prompts
from vllm_evict.tools.eval.run import RunOptions, run
from vllm_evict.tools.tune import run as tune


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """URL of `vllm serve` of the needle model."""
    keeper, port = reserve_port()
    policy = '{"name": "h2o", "budget": 256, "sink": 32, "recent": 32, "buffer": 0, "allow": ["full", "sink-window"], '
    policy += '"audit": 1}'
    command = [
        Path(sys.executable).parent / "vllm",
        "serve",
        NEEDLE,
        "--served-model-name",
        "needle",
        "--port",
        str(port),
    ]
    command += ["--kv-policy", policy, "--block-size", "32", "--kv-cache-memory-bytes", str(64 << 20)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-batched-tokens", "128"]
    # Its own defaults would change answers, and keep them from being audited.
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 1.5, "repetition_penalty": 1.3}
    command += ["--max-num-seqs", "8", "--override-generation-config", json.dumps(penalties)]
    log = tmp_path_factory.mktemp("serve") / "log"
    with log.open("w") as out:
        process = subprocess.Popen(list(map(str, command)), stdout=out, stderr=out, start_new_session=True)
    for _ in range(600):
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
            break
        except OSError:
            time.sleep(0.5)
    yield f"http://127.0.0.1:{port}/v1"
    keeper.close()
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


@needle_model
def test_over_http(server, tmp_path):
    plan = RunOptions(
        **{"model": "needle", "url": server, "out": tmp_path, "tasks": ("niah", "ppl"), "lengths": (512,), "batch": 4},
        **{"policies": "full,sink-window", "budgets": (128, 0.25), "depths": (0.3, 0.5), "samples": 2},
    )
    found = run(plan, print)
    lines = {(line.task, line.policy, line.budget): line for line in summary.summarise(found)}
    assert {line.setting for line in lines.values()} == {"served"}
    assert lines["niah", "full", None].score == 1.0 and lines["niah", "sink-window", 128].score == 0.0
    assert lines["ppl", "full", None].score < lines["ppl", "sink-window", 128].score
    row = next(r for r in found if r["task"] == "niah")
    assert row["ttft_s"] > 0 and row["tokens_per_s"] > 0 and row["prompt_tokens"] > 512
    # What the server says of each request.
    assert (row["budget_tokens"], row["evicted_tokens"], row["block_size"], row["backend"]) == (None, 0, 32, "http")
    assert row["peak_blocks"] == -(-(row["prompt_tokens"] + row["output_tokens"] - 1) // 32)
    kept = {budget: lines["niah", "sink-window", budget] for budget in (128, 0.25)}
    assert {budget: line.budget_tokens for budget, line in kept.items()} == {128: 128, 0.25: 160}
    assert min(line.evicted_tokens for line in kept.values()) > 300 and not any(line.raised for line in kept.values())
    assert kept[128].peak_blocks < row["peak_blocks"]
    assert row["versions"]["vllm"].startswith("0.")
    # The server's chunks are of 128 tokens, as is said here, so the question comes after the context was evicted.
    known = {"settings": ("agnostic",), "chunk": 128, "tokenizer": str(NEEDLE), "tasks": ("niah",)}
    chunked = [r for r in run(RunOptions(**(plan.__dict__ | known)), print) if r["setting"] == "agnostic"]
    assert len(chunked) == 12 and {r["prompt_tokens"] for r in chunked} == {512 + 8}
    before = (tmp_path / rows.FILE).read_text()
    with pytest.raises(
        EvalError, match=r"refuses h2o at 512: kv_budget 512 comes to 512 tokens .* above the server's 256"
    ):
        run(RunOptions(**(plan.__dict__ | {"policies": "full,h2o", "budgets": (512,)})), print)
    assert (tmp_path / rows.FILE).read_text() == before, "rows were lost"
    both = run(
        RunOptions(**(plan.__dict__ | known | {"settings": ("agnostic", "served"), "seed": 1, "samples": 1})), print
    )
    assert {r["setting"] for r in both if r["seed"] == 1} == {"agnostic", "served"}
    outside = (f"ruler={DATA}/ruler_hub.jsonl", f"2stageretr={DATA}/2stage.jsonl")
    other = [
        r for r in run(RunOptions(**(plan.__dict__ | {"tasks": outside, "budgets": (128,)})), print) if r["prompt"]
    ]
    assert {(r["task"], r["policy"]) for r in other} == {
        (task, policy) for task in ("ruler/vt", "2stageretr") for policy in ("full", "sink-window")
    }
    assert all(r["output_tokens"] > 0 and r["depth"] is None for r in other)
    with pytest.raises(EvalError, match="serves needle, not 'other'"):
        run(RunOptions(**(plan.__dict__ | {"model": "other"})), print)


@needle_model
def test_a_server_that_audits_is_tuned(server, tmp_path):
    """The same prompts in an engine of this process give the same counts."""
    prompts, path = Prompts(str(NEEDLE)), tmp_path / "my.jsonl"
    samples = [sample_of("niah", 512, (i + 0.5) / 20, i, count=prompts.count) for i in range(20)]
    chats = [{"messages": [{"role": "user", "content": sample.text}]} for sample in samples[::2]]
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in [*chats, *({"prompt": sample.text} for sample in samples[1::2])])
    )
    common = {"prompts": path, "target": 0.5, "max_tokens": 8, "batch": 4}
    plan = tune.TuneOptions(
        out=tmp_path / "served", url=server, policies="h2o,sink-window", budgets=(128, 192), **common
    )
    result = tune.run(plan, print)
    assert result.model == "needle" and result.control["kept"]["identical"] == [1.0] * 20
    served = {(row["policy"], row["budget"], row["part"]): row for row in result.rows}
    assert {row["asked"] for row in served.values()} == {10, 20} and not any(row["skipped"] for row in served.values())
    assert 0.2 < served["h2o", 128, "search"]["memory"] < 0.3
    engine = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "max_num_batched_tokens": 128}
    engine |= {"block_size": 32, "kv_cache_memory_bytes": 64 << 20}
    here = [{"name": "h2o", "sink": 32, "recent": 32, "buffer": 0}, {"name": "sink-window", "sink": 32}]
    plan = tune.TuneOptions(
        out=tmp_path / "here",
        model=str(NEEDLE),
        policies=",".join(map(json.dumps, here)),
        budgets=(128, 192),
        engine_args=engine,
        **common,
    )
    compared = 0
    for row in tune.run(plan, print).rows:
        key = (row["policy_config"]["name"], row["budget"], row["part"])
        if key in served:
            compared += 1
            for kept in ("lost", "kept"):
                assert sum(row[kept].get("identical", ())) == sum(served[key][kept].get("identical", ())), key
            assert row["memory"] == pytest.approx(served[key]["memory"])
    assert compared >= 4
    long = tmp_path / "long.jsonl"
    long.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("short", samples[0].text * 3)))
    for changes, message in (
        ({"policies": "keydiff"}, "does not allow 'keydiff'; expected some of full, h2o, sink-window"),
        ({"model": "other"}, "serves needle, not 'other'"),
        ({"budgets": (128, 512), "policies": "h2o"}, "refuses h2o at 512, .*my.jsonl, row .* above the server's 256"),
        ({"prompts": long, "policies": "h2o"}, "refuses h2o at 128, .*long.jsonl, row 2: .* maximum context length"),
    ):
        with pytest.raises(EvalError, match=message):
            tune.run(
                tune.TuneOptions(
                    **({"out": tmp_path / "refused", "url": server, "budgets": (128,), **common} | changes)
                ),
                print,
            )


LM_EVAL_TASK = """\
task: needle
dataset_path: json
dataset_kwargs: {data_files: {test: needle.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["<|end|>"], do_sample: false, max_gen_toks: 16}
filter_list: [{name: stripped, filter: [{function: remove_whitespace}, {function: take_first}]}]
metric_list: [{metric: exact_match}]
"""
LM_EVAL_ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "block_size": 32}
LM_EVAL_ENGINE |= {"max_num_batched_tokens": 256, "kv_cache_memory_bytes": 64 << 20, "pretrained": str(NEEDLE)}


@needle_model
@pytest.mark.skipif(not importlib.util.find_spec("lm_eval"), reason="lm_eval is not installed")
@pytest.mark.parametrize(
    "given, right",
    [("full", 1.0), ("sink-window.yaml", 0.0), ({"name": "sink-window", "sink": 32, "recent": 96}, 0.0)],
    ids=["name", "file", "object"],
)
def test_lm_evaluation_harness(tmp_path, given, right):
    """Its vLLM model hands kv_policy on, whichever way its arguments are written."""
    prompts = Prompts(str(NEEDLE))
    samples = [sample_of("niah", 768, 0.5, i, count=prompts.count) for i in range(4)]
    lines = [json.dumps({"prompt": sample.text, "answer": sample.answers[0]}) + "\n" for sample in samples]
    (tmp_path / "needle.jsonl").write_text("".join(lines))
    (tmp_path / "needle.yaml").write_text(LM_EVAL_TASK)
    (tmp_path / "sink-window.yaml").write_text("{name: sink-window, sink: 32, recent: 96}")
    arguments = LM_EVAL_ENGINE | {"kv_policy": given}
    text = json.dumps(arguments) if isinstance(given, dict) else ",".join(f"{k}={v}" for k, v in arguments.items())
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "vllm", "--model_args", text, "--batch_size", "auto"]
    command += ["--tasks", "needle", "--include_path", ".", "--apply_chat_template", "--output_path", "results"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": path}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = (tmp_path / "results").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["needle"]["exact_match,stripped"] == right
