"""The evaluation harness: tasks, metrics, statistics, resumption, reports, bad input, and runs through vLLM."""

import base64
import csv
import gc
import hashlib
import importlib.util
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from engine import V2
from oracle.model import DenseLlama

from vllm_evict.eval import EvalError, backends, cli, external, report, rows, stats, summary, tasks, words
from vllm_evict.eval.policies import contenders, parse_budgets, servers, split_list
from vllm_evict.eval.prompts import Prompts
from vllm_evict.eval.run import Plan, run
from vllm_evict.eval.score import METRICS, rouge_l, score

pytestmark = pytest.mark.skipif(V2, reason="nothing of it depends on the model runner, and the interpreter is slow")

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data" / "eval"
NEEDLE = ROOT / "examples" / "needle" / "model"
ENGINE = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}

needle_model = pytest.mark.skipif(not (NEEDLE / "model.safetensors").exists(), reason=f"no model in {NEEDLE}")


def words_of(text):
    return len(text.split())


def sample_of(task, length=300, depth=0.5, index=0, seed=0, count=words_of):
    return tasks.make(task, length, depth, index, seed, count, words.Filler())


def expecting(*answers, metric="contains", classes=()):
    return tasks.Sample("t", "", "", answers, metric, 1, 1, classes=classes)


# --- tasks -----------------------------------------------------------------------------------------------------------


def solve(task, text, question):
    """What a careful reader answers, by reading the facts in the text: written apart from the generators."""
    key = re.fullmatch(r"recall the (?:code|list) of (.+)\.", question)[1]
    codes = dict(re.findall(r"the code of (\w+) is (\d{4})\.", text))
    if task == "kv":
        return dict(re.findall(r"(\w+) = (\d{4})", text))[key]
    if task == "twostage":
        first, second = key.split(" plus ")
        return codes[words.NUMBERS[words.NUMBERS.index(first) + words.NUMBERS.index(second)]]
    if task == "vt":
        return codes[dict(re.findall(r"the code of (\w+) equals (\w+)\.", text))[key]]
    if task == "copy":
        return dict(re.findall(r"the list of (\w+) is ([a-z ]+)\.", text))[key]
    return codes[key]


FACTS = {"niah": 1, "multikey": 8, "kv": 1, "twostage": 6, "vt": 3, "copy": 0}


@pytest.mark.parametrize("task", FACTS)
def test_the_question_can_be_answered_from_the_text_and_only_so(task):
    for index in range(8):
        sample = sample_of(task, index=index)
        assert sample.answers == (solve(task, sample.context, sample.question),)
        assert score(f" {sample.answers[0]}", sample) == 1.0 and score(" 0000", sample) == 0.0
        assert len(re.findall(r"the code of \w+ is", sample.context)) == (FACTS[task] if task not in ("kv",) else 0)
        assert sample.context.count(sample.answers[0]) == 1, "the answer is told more than once"
        assert sample.text == f"{sample.context} {sample.question}"


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_the_fact_lies_where_it_should(depth):
    sample = sample_of("niah", length=1000, depth=depth)
    before = words_of(sample.context[: sample.context.index("the code of")])
    assert before / 1000 == pytest.approx(depth, abs=0.02)
    assert (sample.depth, sample.length, sample.metric) == (depth, 1000, "contains")


def test_documents_are_as_long_as_asked_and_facts_stand_between_sentences():
    for length in (64, 300, 1001):
        sample = sample_of("multikey", length=length, depth=0.4)
        assert words_of(sample.context) == length
        for fact in re.finditer(r"the code of \w+ is \d{4}\.", sample.context):
            assert fact.start() == 0 or sample.context[: fact.start()].endswith(". ")


def test_length_is_met_from_above_where_a_word_is_several_tokens():
    sample = sample_of("niah", length=500, count=len)
    assert 500 <= len(sample.context) < 520


def test_a_length_too_short_for_its_facts_is_refused():
    with pytest.raises(EvalError, match=r"length 20 is too short for task 'multikey'"):
        sample_of("multikey", length=20)


def test_text_has_passages_that_return():
    sample = sample_of("ppl", length=600)
    found = [p for p in sample.context.split(". ") if len(p.split()) == 16 and p.split()[0] in words.ITEMS]
    assert len(found) == 8 and len(set(found)) == 4
    half = len(sample.context) // 2
    assert all(sample.context.index(p) < half < sample.context.rindex(p) for p in found)
    assert (sample.question, sample.answers, sample.metric, sample.depth) == ("", (), tasks.NLL, None)


@pytest.mark.parametrize("task", tasks.TASKS)
def test_documents_depend_on_what_identifies_them_and_nothing_else(task):
    same = sample_of(task)
    assert same == sample_of(task) and same.sha256 == sample_of(task).sha256
    others = [
        sample_of(task, seed=1),
        sample_of(task, index=1),
        sample_of(task, depth=0.25),
        sample_of(task, length=310),
    ]
    assert len({same.sha256, *(other.sha256 for other in others)}) == 5


@pytest.fixture
def needle_data(monkeypatch):
    """examples/needle/data.py, which trained the needle model."""
    monkeypatch.syspath_prepend(NEEDLE.parent)
    return importlib.import_module("data")


@needle_model
def test_the_language_is_the_one_the_needle_model_was_trained_on(needle_data):
    prompts = Prompts(str(NEEDLE))
    assert prompts.tokenizer.get_vocab() == {token: i for i, token in enumerate(needle_data.vocabulary())}
    for seed in range(3):
        text = words.join(["the", *words.Filler()(np.random.default_rng(seed), 200)])
        ids = words.Filler().ids(np.random.default_rng(seed), 200)
        assert prompts.tokenizer(text, add_special_tokens=False)["input_ids"][1:] == ids.tolist()
    for task in tasks.TASKS:
        sample = sample_of(task, length=256, count=prompts.count)
        ids = prompts.ids(sample)
        assert prompts.tokenizer.unk_token_id not in ids
        assert prompts.count(sample.context) == 256
        assert len(ids) == 256 + (
            len(prompts.tokenizer(f" {sample.question}")["input_ids"]) + 1 if sample.question else 0
        )


def test_training_data_stay_what_they_were(needle_data):
    """A changed word, order or draw anywhere below would make another model of the same recipe."""
    documents = needle_data.Documents(needle_data.build_tokenizer(4608))
    ids, answers = needle_data.training_batch(documents, np.random.default_rng(0), 8, 512)
    digest = hashlib.sha256(ids.tobytes() + answers.tobytes()).hexdigest()
    assert digest == "85b25d862a75d5f6f3ea743345249fcc15c5ea782c5df844157c980d9b55ff91"


# --- metrics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer, sample, expected",
    [
        (" 4815", expecting("4815"), 1),
        ("The code of Paris is 4815.", expecting("4815"), 1),
        ("48151", expecting("4815"), 0),
        ("", expecting("4815"), 0),
        (" apple drum\nlamp.", expecting("apple drum lamp"), 1),
        (" apple lamp drum", expecting("apple drum lamp"), 0),
        ("1111 and 2222", expecting("1111", "2222", metric="string_match_all"), 1),
        ("1111 only", expecting("1111", "2222", metric="string_match_all"), 0.5),
        ("the SEINE", expecting("Seine", "Rhine", metric="string_match_part"), 1),
        ("the Thames", expecting("Seine", "Rhine", metric="string_match_part"), 0),
        ("The Seine, a river", expecting("the seine", metric="qa_f1"), 2 * (1 / 2) * 1 / (1 / 2 + 1)),
        ("no idea", expecting("the seine", metric="qa_f1"), 0),
        ("nothing", expecting("other", "nothing at all", metric="qa_f1"), 0.5),
        ("\nSeine\nQuestion: next", expecting("Seine", metric="qa_f1_first_line"), 1),
        ("Type: City", expecting("City", metric="classification_first_line", classes=("City", "Food")), 1),
        ("City or Food", expecting("City", metric="classification_first_line", classes=("City", "Food")), 0.5),
        ("Big City", expecting("Big City", metric="classification_first_line", classes=("City", "Big City")), 1),
        ("Type: Plant", expecting("City", metric="classification_first_line", classes=("City", "Food")), 0),
        ("Paragraph 12", expecting("Paragraph 12", metric="retrieval"), 1),
        ("12 or 13", expecting("Paragraph 12", metric="retrieval"), 0.5),
        ("Paragraph 1", expecting("Paragraph 12", metric="retrieval"), 0),
        ("段落3", expecting("段落3", metric="retrieval_zh"), 1),
        ("7", expecting("7", metric="count"), 1),
        ("7, no, 8", expecting("7", metric="count"), 0.5),
        ("many", expecting("7", metric="count"), 0),
        ("# comment\nreturn x", expecting("return x", metric="code_similarity"), 1),
        ("abcd", expecting("abxd", metric="code_similarity"), 0.75),
    ],
)
def test_metrics(answer, sample, expected):
    assert score(answer, sample) == pytest.approx(expected)


def test_rouge_l_by_hand():
    assert rouge_l("the cat sat", "the cat sat") == pytest.approx(1.0)
    # Common subsequence "police the gunman" of 3 words; 4 different words on both sides.
    assert rouge_l("police kill the gunman", "police killed the gunman") == pytest.approx(0.75)
    # By sentences: {a b} and {c}: 3 of 4 words here, 3 of 3 there.
    assert rouge_l("a b x. c", "a b. c") == pytest.approx(2 * 0.75 * 1 / 1.75)
    assert rouge_l("", "a b") == 0.0


def test_every_metric_is_reached():
    used = {"contains", "string_match_all", "string_match_part", *external.LONGBENCH_METRICS.values()}
    assert used == set(METRICS)


def test_chinese_needs_jieba(monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(EvalError, match="pip install jieba"):
        score("塞纳河", expecting("塞纳河", metric="qa_f1_zh"))


def test_perplexity_counts_the_second_half():
    assert backends.second_half_nll([None, -9.0, -1.0, -3.0]) == 2.0


# --- statistics ------------------------------------------------------------------------------------------------------


def test_wilson_by_published_values():
    assert stats.wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert stats.wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert stats.wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)  # Newcombe, 1998, table I


def test_bootstrap_covers_the_mean():
    rng, inside = np.random.default_rng(1), 0
    for _ in range(200):
        low, high = stats.bootstrap(rng.exponential(size=40))
        inside += low <= 1.0 <= high
    assert 0.87 <= inside / 200 <= 0.99
    assert stats.bootstrap([1.0]) == (-math.inf, math.inf)


def test_paired_differences():
    assert stats.p_value([0, 0, 0]) == 1.0
    assert stats.p_value([-1] * 5) == pytest.approx(2 / 32)  # McNemar's exact test, 5 to 0
    assert stats.p_value([-1] * 6) == pytest.approx(2 / 64)
    assert stats.p_value([-1] * 9 + [1] + [0] * 40) == pytest.approx(2 * 11 / 1024)
    assert stats.p_value([-1] * 30 + [1] * 2) == pytest.approx(2 * (1 + 32 + 496) / 2**32)
    assert stats.p_value(np.random.default_rng(0).normal(0, 1, 60)) > 0.05
    assert stats.p_value(np.random.default_rng(0).normal(1, 1, 60)) < 0.001


# --- policies and engines --------------------------------------------------------------------------------------------

SIZES = {"sink": 32, "recent": 32, "buffer": 0, "block_size": 32}


def test_the_whole_matrix_needs_one_engine():
    wanted = contenders("full,h2o,sink-window", parse_budgets("128,256,512,0.25"), **SIZES)
    assert [str(c) for c in wanted[:3]] == ["full", "h2o at 128", "h2o at 256"] and len(wanted) == 9
    ((server, served),) = servers(wanted, 4096, 32)
    assert served == wanted
    for contender in wanted:
        granted = server.for_request(contender.xargs, 2048, 32)
        assert granted.limits(32, 2048) == contender.config.limits(32, 2048)


def test_other_options_need_another_engine(tmp_path):
    (tmp_path / "h2o-mean.yaml").write_text("{name: h2o, budget: 2048, sink: 64, recent: 256, accumulate: mean}")
    text = f'full,h2o,{tmp_path}/h2o-mean.yaml,{{"name": "h2o", "sink": 32, "recent": 32, "accumulate": "last"}}'
    wanted = contenders(text, [512], **SIZES)
    assert [c.label for c in wanted] == ["full", "h2o", "h2o-mean", "h2o accumulate=last"]
    plan = servers(wanted, 4096, 32)
    assert [[c.label for c in served] for _, served in plan] == [["full", "h2o"], ["h2o-mean"], ["h2o accumulate=last"]]
    assert contenders(f"{tmp_path}/h2o-mean.yaml", [], **SIZES)[0].budget == 2048


def test_full_alone_is_stock():
    ((server, _),) = servers(contenders("full", [128], **SIZES), 4096, 32)
    assert server.to_dict() == {"name": "full", "allow": None}


def duo(**options):
    """duo on the needle model's heads, as an entry of --policies."""
    return json.dumps({"name": "duo", "heads": str(ROOT / "configs/heads/needle"), **options})


HALF = {"name": "h2o", "budget": 0.5, "sink": 32, "recent": 32, "accumulate": "last"}
SPLIT = [duo(sparsity=0.5), duo(threshold=0.5), duo(sparsity=0.5, retrieval=HALF), duo(sparsity=0.5, retrieval="knorm")]
SWAPPED = '{"name": "duo", "pattern": ["11", "11", "00", "00"], "sink": 32, "recent": 64}'


def test_policies_that_split_heads_have_an_engine_each_and_a_share_for_a_budget():
    wanted = contenders(",".join(["full", "h2o", *SPLIT[:3], SWAPPED]), [0.25, 0.5], **SIZES)
    assert [(c.label, c.budget) for c in wanted] == [
        ("full", None),
        ("h2o", 0.25),
        ("h2o", 0.5),
        ("duo sparsity=0.5", None),
        ("duo threshold=0.5", None),
        ("duo sparsity=0.5 retrieval=h2o accumulate=last", None),
        ("duo pattern=3.3.0.0", None),
    ]
    plan = servers(wanted, 4096, 32)
    assert [served for _, served in plan] == [wanted[:3], *([c] for c in wanted[3:])]
    for server, served in plan:
        for contender in served:
            granted = server.for_request(contender.xargs, 2048, 32)
            assert {name: part.limits(32, 2048) for name, part in granted.classes.items()} == {
                name: part.limits(32, 2048) for name, part in contender.config.classes.items()
            }
    # 64 blocks; streaming heads keep one of sinks, two of the window and one that is begun. The threshold makes two
    # groups of three retrieval heads out of five.
    shares = [None] * 3 + [(64 + 4) / 128, 3 * (64 + 64 + 4) / (8 * 64), (32 + 4) / 128, (64 + 4) / 128]
    assert [c.share(2048, 32) for c in wanted] == shares
    assert wanted[3].share(2048, 32, ranks=4) == shares[3] and wanted[3].share(100, 32) == 1
    assert wanted[3].options["pattern"] == "0.0.3.3"
    # Over HTTP a name is enough.
    (served,) = contenders("duo", [128], **SIZES, pattern=("1",))
    assert (served.label, served.xargs) == ("duo", {"kv_policy": "duo"})


def own(name, **options):
    """A policy at the sizes that policies given by name have here, as an entry of --policies."""
    return json.dumps({"name": name, "sink": 32, "recent": 32, "buffer": 0, **options})


def test_policies_of_one_granularity_share_an_engine_and_each_number_of_bands_has_its_own():
    by_token = [own(name, granularity="token") for name in ("tova", "knorm", "keydiff", "rkv")]
    by_token.append(own("snapkv", granularity="token", kernel=7))
    shared = own("tova", granularity="token", sets="all")
    bands = [own("pyramidkv", bands=2), own("pyramidkv", bands=4, beta=4.0), own("adakv", bands=2)]
    wanted = contenders(",".join(["full", "snapkv", "tova", *by_token, shared, *bands]), [0.25, 256], **SIZES)
    plan = servers(wanted, 4096, 32)
    assert [sorted({c.label for c in served}) for _, served in plan] == [
        ["full", *sorted({c.label for c in wanted if c.label.endswith(("=token", "kernel=7"))})],
        ["snapkv", "tova"],
        ["tova granularity=token sets=all"],
        ["pyramidkv bands=2"],
        ["pyramidkv bands=4 beta=4.0"],
        ["adakv bands=2"],
    ]
    assert sum(len(served) for _, served in plan) == len(wanted) == 1 + 2 * 11
    for server, served in plan:
        for contender in served:
            granted = server.for_request(contender.xargs, 2048, 32)
            assert granted.to_dict() | {"allow": None} == contender.config.to_dict() | {"allow": None}
            assert contender.share(2048, 32) is None
    # Groups are made when a server starts: other policies are not for its requests, all of its budgets are.
    assert {name: server.allowed for name, server in ((s.name, s) for s, _ in plan) if server.policy.splits} == {
        name: {name, "full"} for name in ("pyramidkv", "adakv")
    }
    assert contenders("pyramidkv", [128], **SIZES)[0].xargs == {"kv_policy": "pyramidkv", "kv_budget": 128}


def test_lists():
    assert split_list('a, {"x": [1, {"y": 2}], "z": 3},b,') == ["a", '{"x": [1, {"y": 2}], "z": 3}', "b"]
    assert parse_budgets("128,0.25") == [128, 0.25]


# --- external benchmarks ---------------------------------------------------------------------------------------------


def test_ruler_as_its_scripts_write_it():
    multi, other, question = external.load("ruler", str(DATA / "ruler"))
    assert (multi.task, multi.metric, multi.max_tokens) == ("ruler/niah_multivalue", "string_match_all", 128)
    assert (multi.answers, multi.length, multi.question) == (("1111", "2222"), 64, "")
    assert multi.text.startswith("One of the special") and other.prefix.startswith(" The special magic")
    assert score("They are 1111.", multi) == 0.5
    assert (question.task, question.metric, question.max_tokens) == ("ruler/qa_1", "string_match_part", 32)
    assert score("The river Seine", question) == 1.0
    assert len(external.load("ruler", str(DATA / "ruler"), limit=1)) == 2, "a limit is for each file"


def test_ruler_with_context_and_question_apart():
    (sample,) = external.load("ruler", str(DATA / "ruler_hub.jsonl"))
    assert (sample.task, sample.max_tokens, sample.answers) == ("ruler/vt", 30, ("AAA", "BBB"))
    assert sample.text.endswith(
        "VAR BBB = VAR AAA. Question: Find all variables that are assigned the value 12345 in the text above."
    )
    assert sample.prefix == "Answer: the variables are:"


def test_longbench_with_its_own_prompts():
    found = {sample.task: sample for sample in external.load("longbench", str(DATA / "longbench" / "data"))}
    hotpot, trec = found["longbench/hotpotqa"], found["longbench/trec"]
    assert hotpot.text.startswith("Passages:\nPassage 1: The Seine") and hotpot.text.endswith("through Paris?\nAnswer:")
    assert (hotpot.max_tokens, hotpot.metric, hotpot.length) == (32, "qa_f1", 9)
    assert score("Seine", hotpot) == 1.0 and score("the river", hotpot) == pytest.approx(2 / 3)
    assert score("Individual\nQuestion: City", trec) == 1.0 and trec.classes[0] == "City"
    assert score("Paragraph 2", found["longbench/passage_retrieval_en"]) == 1.0


def test_two_stage_retrieval():
    (sample,) = external.load("2stageretr", str(DATA / "2stage.jsonl"))
    assert score("1 + 1 = 2, so the value is Navy.", sample) == 1.0 and score("2: teal", sample) == 0.0
    assert sample.task == "2stageretr" and sample.max_tokens == 200


def without(path, field, tmp_path):
    row = json.loads(path.read_text().splitlines()[0])
    del row[field]
    (tmp_path / path.name).write_text("{}\n" * 0 + json.dumps(row) + "\n")
    return str(tmp_path / path.name)


@pytest.mark.parametrize(
    "benchmark, path, field",
    [
        ("ruler", DATA / "ruler/qa_1/validation.jsonl", "outputs"),
        ("ruler", DATA / "ruler_hub.jsonl", "task"),
        ("longbench", DATA / "longbench/data/trec.jsonl", "answers"),
        ("longbench", DATA / "longbench/data/trec.jsonl", "dataset"),
        ("2stageretr", DATA / "2stage.jsonl", "prompt"),
    ],
)
def test_a_row_without_its_fields_is_named(benchmark, path, field, tmp_path):
    with pytest.raises(EvalError, match=rf"{path.name}, row 1 has no field '{field}'; it has: "):
        external.load(benchmark, without(path, field, tmp_path))


def test_other_faults_of_external_data(tmp_path):
    bad = tmp_path / "qa_1.jsonl"
    cases = {
        "": "no rows",
        "{": "row 1 is not JSON",
        "[1]": "row 1 is not an object",
        '{"input": "x", "outputs": []}': "'outputs' is empty",
        '{"input": 3, "outputs": ["x"]}': "'input' is int",
    }
    for text, message in cases.items():
        bad.write_text(text)
        with pytest.raises(EvalError, match=message):
            external.load("ruler", str(bad))
    with pytest.raises(EvalError, match="no such file"):
        external.load("ruler", str(tmp_path / "nothing.jsonl"))
    (tmp_path / "trec.jsonl").write_text((DATA / "longbench/data/trec.jsonl").read_text())
    with pytest.raises(EvalError, match=r"dataset2prompt.json"):
        external.load("longbench", str(tmp_path / "trec.jsonl"))


def test_the_hub_is_asked_through_datasets(monkeypatch):
    class Datasets:
        @staticmethod
        def load_dataset(name, config, split):
            assert (name, config, split) == ("simonjegou/ruler", "4096", "test")
            return [json.loads((DATA / "ruler_hub.jsonl").read_text())]

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    (sample,) = external.load("ruler", "hf:simonjegou/ruler/4096")
    assert sample.task == "ruler/vt"
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EvalError, match="pip install datasets"):
        external.load("ruler", "hf:simonjegou/ruler/4096")


# --- reports ---------------------------------------------------------------------------------------------------------


def row_of(policy="full", budget=None, task="niah", index=0, score=1.0, **fields):
    base = {
        **{"task": task, "setting": "agnostic", "chunk": 256, "length": 1024, "depth": 0.5, "index": index, "seed": 0},
        **{
            "policy": policy,
            "budget": budget,
            "policy_config": {"name": policy},
            "model": "m",
            "prompt_sha256": str(index),
        },
        **{"metric": "contains", "score": score, "budget_tokens": budget, "peak_blocks": 8, "evicted_tokens": 0},
        **{"ttft_s": 0.5, "tokens_per_s": 100.0, "versions": {"vllm": "0"}, "hardware": {"cpu": "c"}, "engine": {}},
    }
    return {**base, **fields, "key": f"{policy}{budget}{task}{index}{fields}"}


def test_a_difference_within_noise_is_shown_as_such():
    full = [row_of(index=i) for i in range(12)]
    noisy = [row_of("h2o", 128, index=i, score=float(i > 2)) for i in range(12)]
    worse = [row_of("sink-window", 128, index=i, score=float(i > 8)) for i in range(12)]
    lines = {line.policy: line for line in summary.summarise(full + noisy + worse)}
    assert (lines["full"].verdict, lines["full"].quality) == ("", "100% [76, 100]")
    assert (lines["h2o"].verdict, lines["h2o"].delta) == ("within noise", "-25")
    assert lines["h2o"].p == pytest.approx(0.25)
    assert lines["sink-window"].verdict == "worse" and lines["sink-window"].score == 0.25
    (alone,) = summary.summarise(noisy)
    assert alone.verdict == "no full to compare" and alone.difference is None


def test_perplexity_is_worse_when_it_is_more():
    full = [row_of(task="ppl", metric="nll", index=i, score=1.0 + 0.01 * i, depth=None) for i in range(8)]
    more = [row_of("h2o", 128, task="ppl", metric="nll", index=i, score=1.5 + 0.01 * i, depth=None) for i in range(8)]
    line = summary.summarise(full + more)[1]
    assert line.verdict == "worse" and line.score == pytest.approx(math.exp(1.535))
    assert line.low < line.score < line.high


def test_settings_and_options_are_never_mixed():
    mixed = [row_of(), row_of(setting="aware", chunk=None), row_of(chunk=512)]
    assert len(summary.summarise(mixed)) == 3
    with pytest.raises(EvalError, match="different settings are not put together: agnostic, chunks of 256; agnostic,"):
        summary.one_setting(mixed)
    other = {"name": "h2o", "sink": 64}
    variants = [row_of("h2o", 128, policy_config={"name": "h2o", "sink": 32}), row_of("h2o", 128, policy_config=other)]
    assert {line.policy for line in summary.summarise(variants)} == {"h2o sink=32", "h2o sink=64"}
    engines = [row_of(engine_args={"dtype": dtype}) for dtype in ("float32", "bfloat16")]
    engines.append(row_of("h2o", 128, score=0.0, engine_args={"dtype": "float32"}))
    lines = summary.summarise(engines)
    assert [line.policy for line in lines] == ["full dtype=bfloat16", "full dtype=float32", "h2o"]
    assert [line.is_full for line in lines] == [True, True, False] and lines[2].difference == -1.0


def test_a_share_stands_where_a_budget_would():
    def rows_of(entry, budgets=(), **fields):
        (contender,) = contenders(entry, budgets, **SIZES)
        config, share = contender.options, contender.share(1024, 32)
        return [row_of(contender.label, contender.budget, policy_config=config, share=share, **fields)]

    found = rows_of(SPLIT[0], evicted_tokens=448) + rows_of(SPLIT[2]) + rows_of("h2o", [0.25], score=0.0) + [row_of()]
    lines = {line.policy: line for line in summary.summarise(found)}
    assert {name: line.memory for name, line in lines.items()} == {
        "full": "all",
        "h2o": "25%",
        "duo sparsity=0.5": "56%",
        "duo sparsity=0.5 retrieval=h2o accumulate=last": "31%",
    }
    assert not lines["duo sparsity=0.5"].is_full and lines["duo sparsity=0.5"].verdict == "within noise"
    assert summary.columns(lines["duo sparsity=0.5"])["budget"] == "56%"
    said = report.headlines(list(lines.values()))
    assert "duo sparsity=0.5 100% [21, 100] at a budget of 56%, which 1 prompts do not tell from full" in said[0]
    # Over HTTP nobody says how much that is.
    (line,) = summary.summarise([row_of("duo")])
    assert line.memory == "" and not line.is_full
    # What differs tells variants apart, and only what is needed of it.
    same = [row_of("a", policy_config=contenders(entry, [], **SIZES)[0].options) for entry in SPLIT[:2]]
    assert {line.policy for line in summary.summarise(same)} == {
        "a sparsity=0.5 threshold=None",
        "a sparsity=None threshold=0.5",
    }
    policies = [row_of("a", policy_config=contenders(entry, [], **SIZES)[0].options) for entry in SPLIT[2:]]
    assert all("retrieval.name=" in line.policy for line in summary.summarise(policies))


def results():
    """Rows of two settings with every kind of task."""
    found = []
    for setting, chunk in (("agnostic", 256), ("aware", None)):
        policies = [("full", [None]), ("h2o", [128, 0.25]), ("sink-window", [128, 0.25]), ("duo", [None])]
        for policy, budgets in policies:
            for budget in budgets:
                for i in range(4):
                    fields = {"setting": setting, "chunk": chunk, "depth": i / 3}
                    fields |= {"share": 0.5} if policy == "duo" else {}
                    found.append(row_of(policy, budget, index=i, score=float(policy == "full" or i == 0), **fields))
                    if chunk:
                        fields["depth"] = None
                        found.append(row_of(policy, budget, "ppl", i, 1.0 + i / 9, metric="nll", **fields))
    return found


def test_reports_are_written_and_self_contained(tmp_path, capsys):
    (tmp_path / rows.FILE).write_text("".join(json.dumps(row) + "\n" for row in results()))
    cli.app(["plot", str(tmp_path)], standalone_mode=False)
    said = capsys.readouterr().out
    assert "Quality, agnostic, chunks of 256" in said and "Quality, aware" in said and "sink-window" in said
    with (tmp_path / "summary.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 18 and table[0]["policy"] == "full" and float(table[0]["score"]) == 1.0
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r'(src|href)="(?!data:)', page) and "<script" not in page and "@import" not in page
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert len(pictures) == 6  # quality and Pareto of each setting, niah's depths
    assert all(base64.b64decode(p).startswith(b"\x89PNG") for p in pictures)
    said = [f"{policy} 25% [5, 70] at a budget of {held}" for policy, held in (("duo", "50%"), ("h2o", "25%"))]
    chance = ", which 4 prompts do not tell from full"
    assert "; ".join(["full attention 100% [51, 100]", *(part + chance for part in said)]) in page
    text = (tmp_path / "summary.md").read_text()
    for name in re.findall(r"\]\(([^)]+\.png)\)", text):
        assert (tmp_path / name).exists()


def test_a_frontier_has_what_nothing_else_beats():
    def line(name, speed, quality):
        return summary.summarise([row_of(name, 128, tokens_per_s=speed, score=quality)])[0]

    from vllm_evict.eval.pictures import frontier

    slow, fast, beaten = line("slow", 10.0, 1.0), line("fast", 30.0, 0.0), line("beaten", 5.0, 0.0)
    assert frontier([beaten, fast, slow]) == [slow, fast]


# --- results on disk -------------------------------------------------------------------------------------------------


def test_a_half_written_line_is_dropped_and_nothing_else(tmp_path):
    path = tmp_path / rows.FILE
    whole = [json.dumps(row_of(index=i)) + "\n" for i in range(3)]
    path.write_text("".join(whole) + whole[0][:50])
    store = rows.Rows(tmp_path, "m")
    assert store.mended and len(store.rows) == 3 and path.read_text() == "".join(whole)
    store.append([row_of(index=3)])
    assert not rows.Rows(tmp_path, "m").mended and len(rows.Rows(tmp_path, "m").rows) == 4


def test_a_last_line_that_only_lacks_its_end_is_kept(tmp_path):
    (tmp_path / rows.FILE).write_text(json.dumps(row_of()))
    store = rows.Rows(tmp_path, "m")
    store.append([row_of(index=1)])
    assert not store.mended and len(rows.Rows(tmp_path, "m").rows) == 2


def test_damage_elsewhere_is_left_to_the_user(tmp_path):
    (tmp_path / rows.FILE).write_text("{half\n" + json.dumps(row_of()) + "\n")
    with pytest.raises(EvalError, match=r"rows.jsonl, line 1 is no row of results"):
        rows.Rows(tmp_path, "m")
    assert (tmp_path / rows.FILE).read_text().startswith("{half\n")


# --- through vLLM ----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def collected_once(monkeypatch):
    """Engines collect the whole heap nine times between start and end: half a second each."""
    monkeypatch.setattr(gc, "collect", lambda *args: 0)


def offline_plan(model, out, **changes):
    plan = {"tasks": ("niah", "ppl"), "policies": "full,h2o,sink-window", "budgets": (128,), "lengths": (512,)}
    plan |= {"depths": (0.0, 1.0), "samples": 1, "engine_args": ENGINE}
    return Plan(model=str(model), out=out, **(plan | changes))


@pytest.mark.parametrize("setting, count", [("agnostic", 3), ("agnostic", 1), ("aware", 3)])
def test_a_setting_is_what_it_says(tiny, setting, count):
    """Whether a decision over the context could have seen the question, at the scheduler. vLLM does not cut the prompt of
    a request that is alone, so that one is asked twice."""
    (contender,) = contenders("h2o", [128], **SIZES)
    prompts = Prompts(str(tiny))
    samples = [sample_of("niah", 512, 0.5, i, count=prompts.count) for i in range(count)]
    assert [prompts.count(sample.context) for sample in samples] == [512] * count
    ((server, _),) = servers([contender], 2048, 32)
    backend = backends.Offline(
        str(tiny), server, setting, prompts, chunk=128, batch=3, block_size=32, engine_args=ENGINE
    )
    try:
        steps = recorded_steps(backend)
        answers = backend.answer(samples, contender)
    finally:
        backend.close()
    assert len(steps) == max(count, 2) and len(answers) == count
    for taken, answer in zip(steps.values(), answers):
        question = answer.prompt_tokens - 512
        assert 0 < question < 16
        prefill = [128] * 4 + [question] if setting == "agnostic" else [512 + question]
        assert taken[: len(prefill)] == prefill and set(taken[len(prefill) :]) == {1}
        # At most the budget and a chunk, or the whole prompt.
        assert answer.peak_blocks == {"agnostic": 8, "aware": 17}[setting]
        assert answer.evicted_tokens >= 512 - 128 and answer.budget_tokens == 128
        assert answer.tokens_per_s > 0 and answer.ttft_s > 0


def recorded_steps(backend):
    """Request -> tokens of each of its steps, as the scheduler plans them."""
    scheduler, steps = backend.llm.llm_engine.engine_core.engine_core.scheduler, {}
    schedule = scheduler.schedule

    def recorded(*args):
        output = schedule(*args)
        for request, tokens in output.num_scheduled_tokens.items():
            steps.setdefault(request, []).append(tokens)
        return output

    scheduler.schedule = recorded
    return steps


@pytest.mark.parametrize("setting", ["agnostic", "aware"])
@pytest.mark.parametrize("granularity", ["block", "token"])
def test_contexts_are_reconstructed_before_the_question_is_there(tiny, setting, granularity):
    """Each of them once; then prompts are computed from their first token, and evicted from chunk by chunk."""
    policy = json.dumps({"name": "kvzip", "sink": 32, "recent": 32, "buffer": 0, "granularity": granularity})
    wanted = contenders(policy, [128, 160], **SIZES)
    prompts = Prompts(str(tiny))
    samples = [sample_of("niah", 512, 0.5, i, count=prompts.count) for i in range(3)]
    ((server, served),) = servers(wanted, 2048, 32)
    assert served == wanted and server.allowed == {"kvzip"}
    backend = backends.Offline(
        str(tiny), server, setting, prompts, chunk=128, batch=3, block_size=32, engine_args=ENGINE
    )
    try:
        steps, answers = recorded_steps(backend), [backend.answer(samples, contender) for contender in wanted]
        with pytest.raises(EvalError, match="2048 tokens .max_model_len. have no room for a context of 18.. and its rep"):
            backend.answer([sample_of("niah", 1860, 0.5, count=prompts.count)], wanted[0])
    finally:
        backend.close()
    question = answers[0][0].prompt_tokens - 512
    context = 512 if setting == "agnostic" else 512 + question
    repeated = [sum(taken) for request, taken in steps.items() if request.startswith("reconstruct")]
    assert repeated == [context + context % 32] * 3, "all that is not in whole blocks of the context"
    asked = [taken for request, taken in steps.items() if not request.startswith("reconstruct")]
    assert len(asked) == 3 + 3 + 3 and [len(set(map(str, asked[i : i + 3]))) for i in (0, 3, 6)] == [1, 1, 1]
    prefill = [128] * 4 + [question] if setting == "agnostic" else [512 + question]
    assert all(taken[: len(prefill)] == prefill for taken in asked[3:])
    # A context by itself is computed in chunks of any size: nothing is evicted before all of it is there.
    for taken in asked[:3]:
        decoded = taken.count(1)
        assert sum(taken[:-decoded]) == context and decoded > 8
    for contender, of_budget in zip(wanted, answers, strict=True):
        for answer in of_budget:
            assert answer.evicted_tokens >= 512 - contender.budget and answer.budget_tokens == contender.budget
            # At most the budget and a chunk, or the whole prompt.
            assert answer.peak_blocks == {"agnostic": contender.budget / 32 + 4, "aware": 17}[setting]


def test_a_run_its_columns_and_its_resumption(tiny, tmp_path, monkeypatch):
    plan, said = offline_plan(tiny, tmp_path), []
    first = run(plan, said.append)
    assert len(first) == 3 * (2 + 2) and not said
    full, h2o = (next(r for r in first if (r["policy"], r["task"]) == (p, "niah")) for p in ("full", "h2o"))
    assert (full["evicted_tokens"], full["budget_tokens"]) == (0, None)
    assert h2o["evicted_tokens"] >= 384 and h2o["budget_tokens"] == 128 and h2o["peak_blocks"] < full["peak_blocks"]
    assert full["prompt_sha256"] == h2o["prompt_sha256"] and h2o["policy_config"]["sink"] == 32
    for field in (
        "seed",
        "versions",
        "engine",
        "hardware",
        "server_policy",
        "answer",
        "expected",
        "time",
        "tokens_per_s",
    ):
        assert h2o[field] is not None
    ppl = {r["policy"]: r["score"] for r in first if r["task"] == "ppl" and r["index"] == 0}
    assert 0 < ppl["full"] != ppl["sink-window"], "eviction left no trace in the text's probabilities"

    # A kill in the middle of a row, and a new start.
    path = tmp_path / rows.FILE
    before = path.read_text().splitlines()
    path.write_text("\n".join(before[:-3]) + "\n" + before[-3][:40])
    again = run(plan, said.append)
    assert said == [
        f"{path}: its last line was only half written, and is dropped",
        f"{path}: 9 of 12 rows are there already",
    ]
    assert path.read_text().splitlines()[:-3] == before[:-3]
    answers = [{r["key"]: (r["answer"], r["prompt_sha256"]) for r in found} for found in (first, again)]
    assert answers[0] == answers[1] and len(again) == 12

    # Nothing left to do starts no engine; another model's rows do not mix.
    monkeypatch.setattr(backends.Offline, "__init__", lambda *a, **k: pytest.fail("an engine was started"))
    assert len(run(plan, said.append)) == 12
    with pytest.raises(EvalError, match=r"holds rows of .*: give another --out"):
        rows.Rows(tmp_path, "other")


@needle_model
@pytest.mark.parametrize("setting, length, budget", [("aware", 768, 128), ("agnostic", 1024, 256)])
def test_what_sees_the_needle_finds_it(tmp_path, setting, length, budget):
    """full > heavy hitters of the last queries > sinks and window, where the needle is far from both."""
    last = '{"name": "h2o", "sink": 32, "recent": 32, "buffer": 0, "accumulate": "last", "window": 16}'
    plan = offline_plan(
        NEEDLE,
        tmp_path,
        tasks=("niah",),
        policies=f"full,{last},sink-window",
        settings=(setting,),
        lengths=(length,),
        depths=(0.3, 0.5, 0.7),
        budgets=(budget,),
        samples=8,
        engine_args=ENGINE | {"max_model_len": 1152},
    )
    lines = {line.policy: line for line in summary.summarise(run(plan, print))}
    full, heavy, window = lines["full"], lines["h2o accumulate=last window=16"], lines["sink-window"]
    assert full.score == 1.0
    assert window.verdict == "worse" and window.score <= 0.1
    assert full.score > heavy.score > window.score + 0.1


@needle_model
def test_streaming_heads_lose_no_needle_that_retrieval_heads_keep(tmp_path):
    """Half of the cache, and as good as all of it; not so where the other half of the heads keeps everything."""
    plan = offline_plan(
        NEEDLE,
        tmp_path,
        tasks=("niah",),
        policies=f"full,{SPLIT[0]},{SWAPPED}",
        lengths=(1024,),
        depths=(0.3, 0.5, 0.7),
        samples=4,
        engine_args=ENGINE | {"max_model_len": 1152},
    )
    found = run(plan, print)
    score = {line.policy: line.score for line in summary.summarise(found)}
    assert score == {"full": 1.0, "duo sparsity=0.5": 1.0, "duo pattern=3.3.0.0": 0.0}
    full, split = (next(row for row in found if row["policy"] == policy) for policy in ("full", "duo sparsity=0.5"))
    assert (full["share"], split["share"], split["budget"]) == (None, (33 + 4) / 66, None)
    assert split["server_policy"]["pattern"] == split["policy_config"]["pattern"] == "0.0.3.3"
    # With the prompt's last chunk retrieval heads hold 32 of their 33 blocks, streaming heads 4 and a chunk of 8.
    assert full["peak_blocks"] == 33 and split["peak_blocks"] == (32 + 4 + 8) / 2
    assert split["evicted_tokens"] == (33 - 4) * 32 / 2


@needle_model
def test_heads_keep_needles_by_their_own_keys_at_the_same_memory(tmp_path):
    """Tokens of each head, by its own keys, find what blocks by the keys of all heads lose; bands run beside them."""
    plan = offline_plan(
        NEEDLE,
        tmp_path,
        tasks=("niah",),
        policies=f"full,keydiff,{own('keydiff', granularity='token')},{own('adakv')}",
        lengths=(1024,),
        depths=(0.3, 0.5, 0.7),
        budgets=(0.25,),
        samples=4,
        engine_args=ENGINE | {"max_model_len": 1152},
    )
    found = run(plan, print)
    score = {line.policy: line.score for line in summary.summarise(found)}
    assert score["full"] == 1.0 and score["keydiff granularity=token"] >= score["keydiff"] + 0.3
    of = {policy: [row for row in found if row["policy"] == policy] for policy in score}
    for row in of["keydiff"] + of["keydiff granularity=token"]:
        assert (row["budget_tokens"], row["peak_blocks"]) == (288, 9 + 8)
    for row in of["adakv"]:
        assert (row["budget_tokens"], row["server_policy"]["name"]) == (288, "adakv") and row["evicted_tokens"] > 0


@needle_model
def test_one_head_reads_the_fact_and_another_one_looks_at_it_before():
    """Why sets of tokens differ so much on this model, as docs/quality.md tells it. Dense attention, no eviction."""
    model, prompts, length = DenseLlama(NEEDLE), Prompts(str(NEEDLE)), 2048
    looks, answered = [], defaultdict(list)
    for index in range(3):
        sample = sample_of("niah", length, (0.17, 0.47, 0.61)[index], index, count=prompts.count)
        context, (answer,) = sample.context, sample.answers
        start = context.rindex("the code", 0, context.index(answer))
        fact = range(prompts.count(context[:start]), prompts.count(context[: context.index(answer) + len(answer)]))
        ids, right = prompts.ids(sample), prompts.tokenizer(f" {answer}", add_special_tokens=False)["input_ids"]
        cache, causal = model.new_cache(), torch.ones(len(ids) + len(right), len(ids) + len(right)).tril().bool()
        model.forward(ids[: length - 32], cache, causal[: length - 32, : length - 32])
        _, probs = model.forward(ids[length - 32 : length], cache, causal[length - 32 : length, :length], True)
        looks.append(probs[..., list(fact)].sum(-1).mean(2).unflatten(1, (2, 2)).mean(2) * length / len(fact))
        for layer, head in [(None, None), *np.ndindex(4, 2)]:
            mask = causal[length:].expand(4, 4, -1, -1).clone()
            if layer is not None:
                mask[layer, 2 * head : 2 * head + 2, :, list(fact)] = False
            logits, _ = model.forward(ids[length:] + right, list(cache), mask)
            answered[layer, head].append(logits[-len(right) - 1 : -1].argmax(-1).tolist() == right)
    assert [where for where, got in answered.items() if not all(got)] == [(3, 0)] and not any(answered[3, 0])
    looks = torch.stack(looks).mean(0)
    assert looks[3, 1] > 5 and looks.flatten()[:-1].max() < 2, "times its share of an even spread"


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory):
    """`vllm serve` of the needle model, started at once so that it comes up while other tests run: log and port."""
    if not (NEEDLE / "model.safetensors").exists():
        yield None
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    policy = '{"name": "h2o", "budget": 256, "sink": 32, "recent": 32, "buffer": 0, "allow": ["full", "sink-window"]}'
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
    command += [
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "1024",
        "--long-prefill-token-threshold",
        "128",
    ]
    log = tmp_path_factory.mktemp("serve") / "log"
    with log.open("w") as out:
        process = subprocess.Popen(list(map(str, command)), stdout=out, stderr=out, start_new_session=True)
    yield process, port, log
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


@needle_model
def test_over_http(server, tmp_path):
    process, port, log = server
    for _ in range(600):
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
            break
        except OSError:
            time.sleep(0.5)
    url = f"http://127.0.0.1:{port}/v1"
    plan = Plan(
        **{"model": "needle", "url": url, "out": tmp_path, "tasks": ("niah", "ppl"), "lengths": (512,), "batch": 4},
        **{"policies": "full,sink-window", "budgets": (128, 0.25), "depths": (0.3, 0.5), "samples": 2},
    )
    found = run(plan, print)
    lines = {(line.task, line.policy, line.budget): line for line in summary.summarise(found)}
    assert {line.setting for line in lines.values()} == {"served"}
    assert lines["niah", "full", None].score == 1.0 and lines["niah", "sink-window", 128].score == 0.0
    assert lines["ppl", "full", None].score < lines["ppl", "sink-window", 128].score
    row = next(r for r in found if r["task"] == "niah")
    assert row["ttft_s"] > 0 and row["tokens_per_s"] > 0 and row["prompt_tokens"] > 512
    assert (row["peak_blocks"], row["evicted_tokens"], row["backend"]) == (None, None, "http")
    assert row["versions"]["vllm"].startswith("0.")
    # The server's chunks are of 128 tokens, as is said here, so the question comes after the context was evicted.
    known = {"settings": ("agnostic",), "chunk": 128, "tokenizer": str(NEEDLE), "tasks": ("niah",)}
    chunked = [r for r in run(Plan(**(plan.__dict__ | known)), print) if r["setting"] == "agnostic"]
    assert len(chunked) == 12 and {r["prompt_tokens"] for r in chunked} == {512 + 8}
    before = (tmp_path / rows.FILE).read_text()
    with pytest.raises(EvalError, match=r"refuses h2o at 512: kv_budget 512 is 512 tokens .* above the server's 256"):
        run(Plan(**(plan.__dict__ | {"policies": "full,h2o", "budgets": (512,)})), print)
    assert (tmp_path / rows.FILE).read_text() == before, "rows were lost"
    both = run(Plan(**(plan.__dict__ | known | {"settings": ("agnostic", "served"), "seed": 1, "samples": 1})), print)
    assert {r["setting"] for r in both if r["seed"] == 1} == {"agnostic", "served"}
    outside = (f"ruler={DATA}/ruler_hub.jsonl", f"2stageretr={DATA}/2stage.jsonl")
    other = [r for r in run(Plan(**(plan.__dict__ | {"tasks": outside, "budgets": (128,)})), print) if r["prompt"]]
    assert {(r["task"], r["policy"]) for r in other} == {
        (task, policy) for task in ("ruler/vt", "2stageretr") for policy in ("full", "sink-window")
    }
    assert all(r["output_tokens"] > 0 and r["depth"] is None for r in other)
    with pytest.raises(EvalError, match="serves needle, not 'other'"):
        run(Plan(**(plan.__dict__ | {"model": "other"})), print)


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


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "/no/such/model"], "no model at /no/such/model"),
        (["--tasks", "niah,nope"], "unknown task 'nope'; there are: niah, multikey, kv"),
        (["--tasks", "ruler"], "benchmark 'ruler' needs its data: ruler=FILE"),
        (["--tasks", "nope=x"], "unknown benchmark 'nope'; there are: ruler, longbench"),
        (["--tasks", f"ruler={DATA}/ruler"], "so no chunk ends before the question): --settings aware, served"),
        (["--tasks", "ppl", "--settings", "aware"], "ppl cannot be aware (it has no question"),
        (["--tasks", "ruler=/no/file", "--settings", "served"], "/no/file: no such file"),
        (["--policies", "full,h20"], "unknown KV policy 'h20'; choose one of: h2o"),
        (["--policies", "h2o", "--budgets", "64"], "budget 64 leaves nothing to choose"),
        (["--policies", "full,duo"], "--policies duo: policy 'duo' needs heads: the path of a file of gates"),
        (["--policies", SPLIT[0], "--block-size", "16"], "configs/heads/needle has 4 layers x 2 KV heads, the model"),
        (["--budgets", "much"], "budget 'much' is no number"),
        (["--budgets", "1.5"], "budget: must be a whole number"),
        (["--lengths", "1000"], "length 1000 is no multiple of the prefill chunk of 256"),
        (["--lengths", "long"], "--lengths must be numbers"),
        (["--depths", "2"], "depths are shares"),
        (["--settings", "blind"], "unknown setting 'blind'; choose from: agnostic, aware, served"),
        (["--engine-args", "{"], "--engine-args is not JSON"),
        (["--lengths", "4096", "--engine-args", json.dumps(ENGINE)], "prompt and answer are .* take a shorter length"),
        (["--engine-args", '{"no_such": 1}'], "vLLM does not start on"),
        (["--url", "http://127.0.0.1:9/v1"], "nothing answers at http://127.0.0.1:9/v1"),
        (
            ["--url", "http://127.0.0.1:9/v1", "--policies", '{"name": "h2o"}'],
            "over HTTP a request picks a policy by name",
        ),
        (["--url", "http://127.0.0.1:9/v1", "--settings", "agnostic"], "agnostic over HTTP has to count exactly"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line(tiny, tmp_path, monkeypatch, capsys, arguments, message):
    base = ["--model", str(tiny), "--out", str(tmp_path), "--tasks", "niah", "--lengths", "512", "--budgets", "128"]
    monkeypatch.setattr(sys, "argv", ["vllm-evict", "eval", *base, *arguments])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert (
        exit.value.code == 2
        and last.startswith("vllm-evict: ")
        and re.search(re.escape(message).replace(r"\.\*", ".*"), last)
    )


def test_nothing_to_plot(tmp_path, monkeypatch, capsys):
    for prepare, message in ((lambda: None, "is not there"), ((tmp_path / rows.FILE).touch, "has no whole row")):
        prepare()
        monkeypatch.setattr(sys, "argv", ["vllm-evict", "plot", str(tmp_path)])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        assert exit.value.code == 2 and message in capsys.readouterr().err
