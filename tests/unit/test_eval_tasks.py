"""The evaluation harness: tasks, metrics, statistics, external benchmarks."""

import hashlib
import importlib.util
import json
import math
import re
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from evaluation import DATA, NEEDLE, SECOND, THIRD, expecting, needle_model, sample_of, words_of

from vllm_evict.tools.eval import EvalError, backends, external, stats, tasks, words
from vllm_evict.tools.eval.prompts import Prompts
from vllm_evict.tools.eval.score import METRICS, rouge_l, score

# --- tasks -----------------------------------------------------------------------------------------------------------


def solve(task, text, question):
    """Answer as a careful reader does, by reading the facts in the text: written apart from the generators."""
    if task == "count":
        return words.NUMBERS[
            len(re.findall(rf" finds {re.fullmatch('how many times is (a .+) found.', question)[1]}", text))
        ]
    if task == "sort":
        told = re.findall(r"the code of \w+ is ([a-z]+)\b", text)
        return " ".join(sorted(told, key=words.NUMBERS.index))
    if task == "classify":
        new = set(question.removeprefix("what is ").removesuffix("?").split())
        shots = re.findall(r"(\w+): ([a-z ]+?)(?:\.| and )", text)
        (label,) = {label for label, example in shots if new & set(example.split())}
        return label
    key = re.fullmatch(r"recall the (?:code|list) of (.+)\.", question)[1]
    codes = dict(re.findall(r"the code of (\w+) is (\d{4})\b", text))
    if task == "chain":
        then = dict(re.findall(r"the code of (\w+) is \d{4}, recall (\w+)", text))
        walk = codes[key]
        while key := then.get(key):
            walk += f", recall {key} is {codes[key]}"
        return walk
    if task == "kv":
        return dict(re.findall(r"(\w+) = (\d{4})", text))[key]
    if task == "twostage":
        first, second = key.split(" plus ")
        return codes[words.NUMBERS[words.NUMBERS.index(first) + words.NUMBERS.index(second)]]
    if task == "vt":
        return codes[dict(re.findall(r"the code of (\w+) equals (\w+)\b", text))[key]]
    if task == "copy":
        return dict(re.findall(r"the list of (\w+) is ([a-z ]+?)(?:\.| and )", text))[key]
    return codes[key]


FACTS = {"niah": 1, "multikey": 8, "kv": 1, "twostage": 6, "vt": 3, "copy": 0}
AGGREGATES = ("chain", "count", "sort", "classify")


@pytest.mark.parametrize("task", FACTS)
def test_the_question_can_be_answered_from_the_text_and_only_so(task):
    for index in range(8):
        sample = sample_of(task, index=index)
        assert sample.answers == (solve(task, sample.context, sample.question),)
        assert score(f" {sample.answers[0]}", sample) == 1.0 and score(" 0000", sample) == 0.0
        assert len(re.findall(r"the code of \w+ is", sample.context)) == (FACTS[task] if task not in ("kv",) else 0)
        assert sample.context.count(sample.answers[0]) == 1, "the answer is told more than once"
        assert sample.text == f"{sample.context} {sample.question}"


@pytest.mark.parametrize("haystack", words.HAYSTACKS)
@pytest.mark.parametrize("task", ["multikey", "twostage", "vt", "copy", *AGGREGATES])
def test_facts_and_answers_are_the_same_in_every_haystack(task, haystack):
    for index in range(4):
        plain, sample = sample_of(task, 500, index=index), sample_of(task, 500, index=index, haystack=haystack)
        assert (sample.question, sample.answers) == (plain.question, plain.answers)
        assert sample.answers == (solve(task, sample.context, sample.question),)
        assert score(f" {sample.answers[0]}", sample) == 1.0 and words_of(sample.context) == 500
        assert (sample.sha256 == plain.sha256) == (haystack == "grammar")


def test_haystacks_are_what_they_say():
    text = {name: make()(np.random.default_rng(3), 3000) for name, make in words.HAYSTACKS.items()}
    marks = {name: [(i, word) for i, word in enumerate(found) if word in words.MARKS] for name, found in text.items()}
    assert sorted(text["shuffled"]) == sorted(text["grammar"]) and marks["shuffled"] == marks["grammar"]
    assert sum(a == b for a, b in zip(text["shuffled"], text["grammar"])) < 0.5 * 3000
    times = {name: Counter(found) for name, found in text.items()}
    assert times["grammar"]["the"] > 300 and max(n for w, n in times["uniform"].items() if w != ".") < 40
    stops = np.array([-1] + [i for i, word in enumerate(text["uniform"]) if word == "."])
    assert stops[-1] == 2999 and set(np.diff(stops)[1:]) == set(range(5, 14))
    sample = sample_of("multikey", 500, haystack="pairs")
    facts = r"the code of \w+ is \d{4}"
    assert len(re.findall(rf"{facts} and {facts}\.", sample.context)) == 4 and sample.context.count("the code of") == 8


def test_documents_stay_what_they_were():
    """A change here would make another set of prompts under the same seeds."""
    old = ("niah", "multikey", "kv", "twostage", "vt", "copy", "ppl")
    hashes = [sample_of(task, index=index).sha256 for task in old for index in range(2)]
    digest = hashlib.sha256("".join(hashes).encode()).hexdigest()
    assert digest == "7d5993340ee8e95de8a6d53fa9a81611763667e1fe908523c63320dbdd8a46d7"


@pytest.mark.parametrize("turns", [1, 4, tasks.MOST_TURNS])
@pytest.mark.parametrize("task", tasks.SEVERAL)
def test_a_document_answers_as_many_questions_as_asked_for_each_about_a_fact_at_its_depth(task, turns):
    depths = np.linspace(0.1, 0.9, turns).tolist()
    for index in range(4):
        first = sample_of(task, 2000, depths[0], index, later=depths[1:])
        assert [(turn.turn, turn.depth) for turn in first.turns] == list(enumerate(depths, 1))
        assert len({turn.question for turn in first.turns}) == len({turn.sha256 for turn in first.turns}) == turns
        for turn, depth in zip(first.turns, depths):
            assert turn.context == first.context and turn.answers == (solve(task, first.context, turn.question),)
            (answer,) = turn.answers
            assert first.context.count(answer) == 1
            assert words_of(first.context[: first.context.index(answer)]) / 2000 == pytest.approx(depth, abs=0.06)
        if turns == 1:
            assert replace(first, turn=None) == sample_of(task, 2000, depths[0], index)


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
    second, known = Prompts(str(SECOND)), needle_data.vocabulary(words.QUESTIONS)
    for other in (second, Prompts(str(THIRD))):
        assert other.tokenizer.get_vocab() == {token: i for i, token in enumerate(known)}
    assert known[: len(needle_data.vocabulary())] == needle_data.vocabulary()
    for task in tasks.TASKS:
        prompts = second if task in AGGREGATES else Prompts(str(NEEDLE))
        sample = sample_of(task, length=256, count=prompts.count)
        ids = prompts.ids(sample)
        assert prompts.tokenizer.unk_token_id not in ids
        assert prompts.count(sample.context) == 256
        assert len(ids) == 256 + (
            len(prompts.tokenizer(f" {sample.question}")["input_ids"]) + 1 if sample.question else 0
        )


@needle_model
def test_turns_have_the_form_that_the_needle_model_was_trained_on(needle_data):
    prompts, chat = Prompts(str(NEEDLE)), needle_data.Documents(needle_data.build_tokenizer(4608))
    first = sample_of("vt", length=256, count=prompts.count, later=[0.3, 0.8])
    said = [prompts.ids(turn) + chat.encode(turn.answers[0]) for turn in first.turns]
    expected, _ = chat.chat([(turn.question, turn.answers[0]) for turn in first.turns])
    assert [*sum(said, [])[256:], needle_data.END] == expected
    bare = Prompts(str(NEEDLE), chat=False)
    second = bare.tokenizer(f" {first.later[0].question}", add_special_tokens=False)["input_ids"]
    assert bare.ids(first.later[0]) == second


@pytest.mark.parametrize(
    "kind, digest",
    [
        ("needles", "85b25d862a75d5f6f3ea743345249fcc15c5ea782c5df844157c980d9b55ff91"),
        ("aggregates", "82def8522bad4446046272b5b967830853df7146bb7f198662f47742cf00b2e2"),
        ("counts", "f00fc7b6deb2b46893fbefbbc53a3c7a5be421c5e7c401e8c3aec64fa157ad88"),
    ],
)
def test_training_data_stay_what_they_were(needle_data, kind, digest):
    """A changed word, order or draw anywhere below would make another model of the same recipe."""
    documents = needle_data.Documents(needle_data.build_tokenizer(4608, needle_data.MIXTURES[kind][1]))
    ids, answers = needle_data.training_batch(documents, np.random.default_rng(0), 8, 512, kind)
    assert hashlib.sha256(ids.tobytes() + answers.tobytes()).hexdigest() == digest


@needle_model
def test_the_third_model_counts_before_its_training_which_leaves_what_weighs_mentions(needle_data):
    build, evaluate = (importlib.import_module(name) for name in ("build", "evaluate"))
    model, documents = build.build(kind="counts").eval(), needle_data.Documents(Prompts(str(THIRD)).tokenizer)
    ids, answer = evaluate.sample(documents, "count", 512, 0.5, 0, 16)
    assert evaluate.answers_right(evaluate.logits_of(model, ids, None), ids, answer).float().mean() >= 0.8
    trained = build.LlamaForCausalLM.from_pretrained(THIRD, dtype=model.dtype)
    parts = [build.fixed(each, "counts") for each in (model, trained)]
    assert len(parts[0]) == 6 and not build.fixed(model, "aggregates")
    for (built, part), (kept, _) in zip(*parts):
        torch.testing.assert_close(kept[part], built[part], rtol=0, atol=0.02)
    assert not torch.allclose(model.lm_head.weight, trained.lm_head.weight, atol=0.02)


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
        (" 4815, recall rome is 2310", expecting("4815, recall rome is 2310", metric="steps"), 1),
        (" 4815, recall oslo is 2310", expecting("4815, recall rome is 2310", metric="steps"), 2 / 5),
        (" 4815,", expecting("4815, recall rome is 2310", metric="steps"), 1 / 5),
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
    used = {"contains", "steps", "string_match_all", "string_match_part", *external.LONGBENCH_METRICS.values()}
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


def test_orders_by_hand():
    assert stats.kendall([1, 2, 3], [10, 20, 30]) == 1.0 and stats.kendall([1, 2, 3], [3, 2, 1]) == -1.0
    assert stats.kendall([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)
    assert stats.kendall([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / math.sqrt(2 * 3))
    assert math.isnan(stats.kendall([1, 1], [1, 2]))


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
