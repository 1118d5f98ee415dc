"""`vllm-evict tune` in an engine: it finds the budgets of the needle tables, and its flag does what it said."""

import csv
import json
import shlex

import pytest
from evaluation import ENGINE, NEEDLE, ROOT, collected_once, needle_model, sample_of  # noqa: F401

from vllm_evict.config import KVPolicyConfig
from vllm_evict.tools.eval import EvalError
from vllm_evict.tools.eval.policies import Contender
from vllm_evict.tools.eval.prompts import Prompts
from vllm_evict.tools.eval.questions import halves, load
from vllm_evict.tools.tune import report as tuned
from vllm_evict.tools.tune import run as tune
from vllm_evict.tools.tune.audited import AuditedEngine

#: As in the tables: decisions over the context do not see the question, which comes in the chunk after it.
CHUNKED = ENGINE | {"dtype": "bfloat16", "block_size": 32, "max_model_len": 4096, "long_prefill_token_threshold": 256}
CHUNKED |= {"max_num_batched_tokens": 16 * 256, "kv_cache_memory_bytes": 128 << 20}
SIZES = {"sink": 32, "recent": 32, "buffer": 0}
BUDGETS = (0.1, 0.25, 0.5)
DEPTHS = (0.17, 0.33, 0.47, 0.61, 0.79)
TARGET = 0.3
COUNT = 40


@pytest.fixture(scope="module")
def needles(tmp_path_factory):
    """File of prompts of the tables: texts of 2,048 tokens with one needle."""
    path, prompts = tmp_path_factory.mktemp("tune") / "needles.jsonl", Prompts(str(NEEDLE))
    each = COUNT // len(DEPTHS)
    asked = (sample_of("niah", 2048, depth, i, count=prompts.count) for depth in DEPTHS for i in range(each))
    path.write_text("".join(json.dumps({"prompt": sample.text, "output_tokens": 16}) + "\n" for sample in asked))
    return path


def implied(policy):
    """The smallest of the budgets at which the tables of docs/results.md find enough needles."""
    with (ROOT / "benchmarks/results/quality/agnostic.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["task"] == "niah" and row["policy"] == policy]
    return min(int(row["budget"][:-1]) / 100 for row in rows if float(row["score"]) >= TARGET)


@needle_model
def test_the_budget_is_that_of_the_needle_tables_and_the_flag_does_what_it_says(needles, tmp_path, monkeypatch):
    """Full attention answers all of them, so answers that it gives are those that find the needle."""
    plan = tune.TuneOptions(
        prompts=needles,
        out=tmp_path,
        model=str(NEEDLE),
        target=TARGET,
        policies=json.dumps({"name": "keydiff", **SIZES}),
        budgets=BUDGETS,
        engine_args=CHUNKED,
    )
    result = tune.run(plan, print)
    assert result.control["kept"]["identical"] == [1.0] * COUNT
    assert not any(row["skipped"] for row in result.rows)
    searched = [row for row in result.rows if row["part"] == tune.SEARCH]
    assert min(row["budget"] for row in searched if result.figure(row).share >= TARGET) == implied("keydiff") == 0.25
    # So few prompts confirm that budget or the next one.
    assert result.best.confirmed and result.best.contender.budget in (0.25, 0.5)
    # The flag, served: its audits are within its interval, on the prompts that it was not confirmed on.
    words = shlex.split(tuned.flag(result, result.best))
    policy = KVPolicyConfig.parse(words[1])
    assert words[0] == "--kv-policy" and (policy.audit, policy.target) == (0.01, TARGET)
    questions = load(needles, 16)
    engine = AuditedEngine(str(NEEDLE), policy, Prompts(str(NEEDLE)), batch=16, block_size=32, engine_args=CHUNKED)
    try:
        own = Contender("the server's", policy)
        monkeypatch.setattr(Contender, "xargs", {})
        audit = engine.ask(own, halves(questions)[0], "served", lambda done: None)
    finally:
        engine.close()
    low, high = result.figure(result.best.row).interval
    assert low <= sum(audit.lost["identical"]) / len(audit.lost["identical"]) <= high
    assert len(audit.lost["identical"]) == COUNT // 2 and abs(audit.memory - result.best.row["memory"]) < 0.02


@needle_model
@pytest.mark.parametrize(
    "policy, more, message",
    [
        ('h2o,{"name": "adakv", "budget": 0.5}', {}, "KV policy 'adakv' can't be used with audit, because"),
        (
            "h2o",
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "'full' can't be used with speculative decoding and audit: leave audit out",
        ),
    ],
)
def test_what_audits_do_not_support_is_refused_before_anything_runs(
    needles, tmp_path, monkeypatch, policy, more, message
):
    monkeypatch.setattr(tune, "AuditedEngine", lambda *args, **options: pytest.fail("an engine was started"))
    plan = tune.TuneOptions(
        prompts=needles, out=tmp_path, model=str(NEEDLE), policies=policy, max_tokens=16, engine_args=CHUNKED | more
    )
    with pytest.raises(EvalError, match=message):
        tune.run(plan, print)
