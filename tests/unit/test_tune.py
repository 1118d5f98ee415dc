"""`vllm-evict tune` without an engine: search and statistics, prompts, what is refused, and what is not measured again."""

import json
import queue
import re
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from evaluation import NEEDLE

from vllm_evict import cli
from vllm_evict.tools.eval import EvalError, progress, questions
from vllm_evict.tools.eval.backends import engine_config
from vllm_evict.tools.eval.prompts import Prompts
from vllm_evict.tools.tune import audited
from vllm_evict.tools.tune import report as tuned
from vllm_evict.tools.tune import run as tune
from vllm_evict.tools.tune.audited import Audit
from vllm_evict.tools.tune.search import CHAIN, Figure, chain, confirmed, most_measured, smallest

# --- search ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7, 19, 20])
def test_bisection_finds_where_a_rising_curve_meets_the_target(count):
    for first in range(count + 1):  # `count`: nothing meets it
        measured = []
        found = smallest(count, lambda index: measured.append(index) or index >= first)
        assert found == (first if first < count else None)
        assert len(measured) == len(set(measured)) <= most_measured(count)


def test_bisection_of_a_curve_that_is_not_monotone_ends_where_it_rises():
    rng = np.random.default_rng(0)
    for _ in range(200):
        meets = rng.random(19) < 0.5
        measured = set()
        found = smallest(19, lambda index: measured.add(index) or meets[index])
        if found is None:
            assert not meets[18] and 18 in measured
        else:
            assert meets[found] and found in measured
            assert found == 0 or (not meets[found - 1] and found - 1 in measured)


def test_a_budget_is_confirmed_from_above_until_one_is_not():
    assert CHAIN == 3 and chain(4, 19) == [6, 5, 4] and chain(17, 19) == [18, 17] and chain(0, 1) == [0]
    for passes, expected in (([], None), ([6], 6), ([6, 5], 5), ([6, 5, 4], 4), ([5, 4], None), ([6, 4], 6)):
        asked = []
        assert confirmed([6, 5, 4], lambda index: asked.append(index) or index in passes) == expected
        assert asked == [6, 5, 4][: len(asked)]


def test_whatever_the_search_finds_a_false_confirmation_is_as_rare_as_of_one_interval():
    """Four budgets just below the target, confirmed in a fixed order: 2.5 % and not four times as much."""
    rng = np.random.default_rng(1)
    runs = 2000
    false = sum(
        confirmed(chain(1, 4), lambda _: Figure(tuple(1.0 * (rng.random(200) < 0.899))).confirms(0.9)) is not None
        for _ in range(runs)
    )
    assert false / runs < 0.04


def figure(right, n):
    return Figure((1.0,) * right + (0.0,) * (n - right))


@pytest.mark.parametrize(
    "right, n, target", [(30, 30, 0.95), (29, 30, 0.9), (198, 200, 0.95), (9, 10, 0.5), (1, 1, 0.98)]
)
def test_so_many_answers_as_are_needed_confirm_four_times_of_five(right, n, target):
    needed = figure(right, n).needed(target)
    drawn = np.random.default_rng(0).binomial(needed, right / n, 2000)
    often = np.mean([figure(int(count), needed).confirms(target) for count in drawn])
    assert often == 1 if right == n else 0.7 < often < 0.9
    scale = 10_000 // n
    assert figure(right * scale, n * scale).confirms(target)


def test_no_number_of_answers_confirms_a_target_that_they_miss():
    assert figure(18, 20).needed(0.95) is None and figure(19, 20).needed(0.95) is None


def test_no_answers_meet_a_target_only_if_no_request_lost_blocks():
    none, unheard = Figure(()), Figure((), skipped=7)
    assert none.meets(0.95) and none.confirms(0.95) and none.needed(0.95) is None
    assert not unheard.meets(0.95) and not unheard.confirms(0.95) and unheard.needed(0.95) is None


@pytest.mark.parametrize("n", [2, 5, 20, 200])
def test_agreement_of_tokens_confirms_by_answers_and_falsely_no_more_often_than_identical_answers(n):
    """Tokens of one answer are not independent, so their number does not narrow it."""
    rng = np.random.default_rng(0)
    # Most answers agree in all tokens, a few in half of them: 0.945 in the mean.
    drawn = np.where(rng.random((400, n)) < 0.89, 1.0, 0.5)
    assert np.mean([Figure(tuple(scores)).confirms(0.95) for scores in drawn]) < 0.025
    assert not Figure((1.0,) * 2).confirms(0.95) and Figure((1.0,) * 99 + (0.5,)).confirms(0.94)


# --- progress --------------------------------------------------------------------------------------------------------


def test_lines_go_on_while_nothing_new_is_done(monkeypatch):
    """An engine that starts, or a batch of long prompts, takes minutes."""
    monkeypatch.setattr(progress, "EVERY", 0.01)
    said = queue.Queue()
    run = progress.Progress(said.put, "prompt")
    try:
        run.total = 4
        run.begin("starting vLLM", told=True)
        lines = [said.get(timeout=10) for _ in range(3)]
        assert lines[0] == "starting vLLM" and {*lines[1:]} == {"starting vLLM: 0 of at most 4 prompts"}
        run.begin("h2o 25%, search")
        run.update(1)
        while not (line := said.get(timeout=10)).startswith(
            "h2o 25%, search: 1 of at most 4 prompts, at most 0 s left"
        ):
            assert "starting" in line or line == "h2o 25%, search: 0 of at most 4 prompts"
    finally:
        run.close()
    told = said.qsize()
    assert not run._thread.is_alive() and said.qsize() == told


# --- prompts ---------------------------------------------------------------------------------------------------------


def write(path, *rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def test_prompts_are_text_or_messages_each_once(tmp_path):
    chat = [{"role": "user", "content": "hello"}]
    rows = [{"prompt": "one"}, {"messages": chat}, "\n", {"prompt": "one"}, {"prompt": "two", "output_tokens": 3}]
    found = questions.load(write(tmp_path / "my.jsonl", *rows), 16)
    assert [(each.prompt, each.max_tokens) for each in found] == [("one", 16), (chat, 16), ("two", 3)]
    assert found[0].messages == [{"role": "user", "content": "one"}] and found[1].messages == chat


def test_halves_do_not_depend_on_the_order_of_the_file():
    asked = [questions.Question(f"row {i}", f"prompt {i}", 8) for i in range(101)]
    first, second = questions.halves(asked)
    assert (len(first), len(second)) == (51, 50) and {*first, *second} == {*asked}
    assert questions.halves(asked[::-1]) == (first, second)
    assert 15 < sum(each in first for each in asked[:50]) < 35  # no stretch of the file is in one half


WRONG = {
    "no JSON": (["prompt\n"], "row 1 is not JSON"),
    "no object": (["[1]\n"], "row 1 is not an object"),
    "empty": ([], "got 0 prompts; expected 2 or more"),
    "one": ([{"prompt": "a"}, {"prompt": "a"}], "got 1 prompts; expected 2 or more"),
    "no prompt": (
        [{"prompt": "a"}, {"text": "b"}],
        r"row 2 has no field 'prompt' \(text\) or 'messages' \(of a chat\); it has: text",
    ),
    "no text": ([{"prompt": 3}], "row 1: field 'prompt' is int"),
    "blank": ([{"prompt": " "}], "row 1: its prompt is empty"),
    "no messages": ([{"messages": []}], "row 1: its messages are empty"),
    "a picture": (
        [{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}],
        "expected a role and a content",
    ),
    "no length": ([{"prompt": "a", "output_tokens": 0}], "output_tokens got 0; expected a number of tokens, 1 or more"),
}


@pytest.mark.parametrize("rows, message", WRONG.values(), ids=WRONG)
def test_a_wrong_file_of_prompts_is_one_message(tmp_path, rows, message):
    with pytest.raises(EvalError, match=message):
        questions.load(write(tmp_path / "my.jsonl", *rows), 16)


def test_a_file_that_is_no_text_or_not_there_is_one_message(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\n")
    with pytest.raises(EvalError, match="bytes is no text in UTF-8"):
        questions.load(tmp_path / "bytes", 16)
    with pytest.raises(EvalError, match="which is no file; expected JSONL"):
        questions.load(tmp_path / "none.jsonl", 16)


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(tmp_path):
    return write(tmp_path / "my.jsonl", *({"prompt": f"prompt {i}"} for i in range(400)))


@pytest.fixture
def fake(monkeypatch):
    """Engines that audit without one: `fake.right` has policy, budget -> share of right answers; `fake.ran` what ran."""

    class Fake:
        about = {"engine": {"block_size": 32}, "versions": {"vllm": "0"}, "hardware": None}
        bytes_per_token = 1024.0
        ran, started, control = [], [], 1.0

        def __init__(self, model, server, prompts, **options):
            Fake.started.append(server.name)

        @staticmethod
        def right(policy, budget):
            return budget >= 0.4

        def ask(self, contender, questions, salt, advance):
            Fake.ran.append((contender.label, contender.budget, len(questions)))
            advance(len(questions))
            full = contender.label == "full"
            share = Fake.control if full else Fake.right(contender.label, contender.budget)
            n = len(questions)
            scores = [1.0] * round(share * n) + [0.0] * (n - round(share * n))
            every = dict.fromkeys(audited.MEASURES, scores)
            held = contender.budget if isinstance(contender.budget, float) else 0.5
            return Audit({} if full else every, every if full else {}, Counter(), 1.0 if full else held, 1.0)

        def close(self):
            pass

    Fake.ran, Fake.started = [], []
    prompts = Prompts(str(NEEDLE))
    monkeypatch.setattr(tune, "Prompts", lambda *_: prompts)
    monkeypatch.setattr(tune, "AuditedEngine", Fake)
    sizes = SimpleNamespace(block_size=32, max_num_batched_tokens=2048, max_model_len=4096)
    known = SimpleNamespace(cache_config=sizes, scheduler_config=sizes, model_config=sizes)
    monkeypatch.setattr(
        tune, "engine_config", lambda model, _: known if model == str(NEEDLE) else engine_config(model, {})
    )
    return Fake


def plan(asked, **changes):
    return tune.TuneOptions(
        **{"prompts": asked, "out": asked.parent / "out", "model": str(NEEDLE), "policies": "h2o"} | changes
    )


def test_the_smallest_budget_is_found_confirmed_and_made_a_flag(asked, fake, capsys):
    result = tune.run(plan(asked), print)
    assert fake.ran[0] == ("full", None, 400) and {n for *_, n in fake.ran[1:]} == {200}
    (outcome,) = result.outcomes
    assert outcome.confirmed and outcome is result.best and outcome.contender.budget == 0.4
    fields = '{"name": "h2o", "budget": 0.4, "audit": 0.01, "target": 0.95}'
    assert tuned.flag(result, outcome) == f"--kv-policy '{fields}'"
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"starting vLLM on {NEEDLE} for full, h2o") and len(said) == 1 + len(fake.ran)
    assert said[1].startswith("full, control: 400 of 400 answers identical, 0 s")
    assert re.fullmatch(
        r"h2o at 50%, search: 200 of 200 answers identical of requests that lost .*, at most \d+ s left", said[2]
    )
    result.control["lengths"] = audited.alike([1000] * 90 + [5000])
    assert '"target": 0.95, "tuned": [800, 1250]}' in tuned.flag(result, outcome)
    # It goes on where it was stopped: nothing is measured again, nothing starts, and another target only reads.
    lines = (asked.parent / "out" / tune.FILE).read_text().splitlines(keepends=True)
    (asked.parent / "out" / tune.FILE).write_text("".join(lines[:4]) + lines[4][:40])
    before, fake.ran[:] = fake.ran[:], []
    again = tune.run(plan(asked), print)
    assert fake.ran == before[4:] and again.best.row["score"] == 1 and len(fake.started) == 2
    tune.run(plan(asked, target=0.9), print)
    assert fake.ran == before[4:] and len(fake.started) == 2
    with pytest.raises(EvalError, match="was measured with other prompts; expected the same, to go on there"):
        tune.run(plan(asked, max_tokens=9), print)
    with pytest.raises(EvalError, match="was measured with other batch;"):
        tune.run(plan(asked, batch=1), print)
    with pytest.raises(EvalError, match="was measured with other engine_args;"):
        tune.run(plan(asked, engine_args={"dtype": "float32"}), print)


@pytest.mark.parametrize(
    "right, budget, part, words",
    [
        (lambda policy, budget: 0.0, 0.95, "search", "below 0.95 at each budget"),
        (lambda policy, budget: 1.0, 0.05, "confirm", "confirmed"),
        (lambda policy, budget: min(1, 0.5 + budget), 0.5, "confirm", "confirmed"),
        # 0.955 of 200 answers cannot confirm 0.95.
        (lambda policy, budget: 0.955, 0.05, "confirm", r"not confirmed, 0.95 takes about \d\d,\d\d\d prompts"),
    ],
    ids=["nothing", "everything", "rising", "flat"],
)  # fmt: skip
def test_what_becomes_of_a_policy_is_said(asked, fake, monkeypatch, right, budget, part, words):
    monkeypatch.setattr(fake, "right", staticmethod(right))
    result = tune.run(plan(asked), print)
    (outcome,) = result.outcomes
    assert (outcome.contender.budget, outcome.row["part"]) == (budget, part)
    assert re.fullmatch(words, tuned.words(result, outcome))
    assert (result.best is None) == (part == "search")


def test_budgets_at_which_no_request_loses_blocks_stand_in_nobodys_way(asked, fake, monkeypatch):
    """They change no answer; alone they are no result."""
    ask = fake.ask

    def covered(self, contender, *args):
        audit = ask(self, contender, *args)
        if contender.label != "full" and contender.budget >= fake.covers:
            audit.kept, audit.lost = audit.lost, {}
        return audit

    monkeypatch.setattr(fake, "ask", covered)
    fake.covers = 0.5
    (outcome,) = tune.run(plan(asked), print).outcomes
    assert outcome.confirmed and outcome.contender.budget == 0.4
    fake.covers = 0.4
    result = tune.run(plan(asked, out=asked.parent / "other"), print)
    assert tuned.words(result, result.outcomes[0]) == "no request loses blocks" and result.best is None


@pytest.mark.parametrize("target, words", [(0.8, "confirmed"), (0.95, r"not confirmed, 0.95 takes about \d+ prompts")])
def test_budgets_at_which_few_requests_lose_blocks_are_no_advice(tmp_path, fake, monkeypatch, target, words):
    """The search finds 50 %, where all 20 of a half lose blocks and none changes. At larger budgets 4 of them do."""
    ask = fake.ask

    def some(self, contender, questions, *args):
        audit = ask(self, contender, questions, *args)
        if contender.label != "full" and contender.budget > 0.5:
            audit.kept = {name: scores[4:] for name, scores in audit.lost.items()}
            audit.lost = {name: scores[:4] for name, scores in audit.lost.items()}
        return audit

    monkeypatch.setattr(fake, "ask", some)
    monkeypatch.setattr(fake, "right", staticmethod(lambda policy, budget: budget >= 0.5))
    few = write(tmp_path / "few.jsonl", *({"prompt": f"prompt {i}"} for i in range(40)))
    result = tune.run(plan(few, target=target, budgets=(0.25, 0.5, 0.75, 0.9)), print)
    (outcome,) = result.outcomes
    assert outcome.contender.budget == 0.5 and re.fullmatch(words, tuned.words(result, outcome))
    assert '"budget": 0.5' in tuned.flag(result, result.best)


def test_a_larger_budget_that_fails_leaves_the_advice_at_the_one_found(asked, fake, monkeypatch):
    """It says how many prompts confirm both."""
    monkeypatch.setattr(
        fake, "right", staticmethod(lambda policy, budget: {0.4: 0.97, 0.45: 0.99, 0.5: 0.96}.get(budget, 0))
    )
    result = tune.run(plan(asked, budgets=(0.4, 0.45, 0.5)), print)
    (outcome,) = result.outcomes
    assert not outcome.confirmed and outcome.contender.budget == 0.4
    assert outcome.needed == 2 * figure(192, 200).needed(0.95)


def test_budgets_whose_answers_were_not_audited_meet_no_target(asked, fake, monkeypatch):
    ask = fake.ask

    def late(self, contender, questions, *args):
        audit = ask(self, contender, questions, *args)
        if contender.label != "full" and contender.budget < 0.5:
            audit.lost, audit.skipped = {}, Counter(late=len(questions))
        return audit

    monkeypatch.setattr(fake, "ask", late)
    (outcome,) = tune.run(plan(asked), print).outcomes
    assert outcome.confirmed and outcome.contender.budget == 0.5


def test_rows_of_a_policy_that_had_the_same_name_are_not_shown(asked, fake):
    for recent in (64, 128):
        (asked.parent / "mine.yaml").write_text(f"name: h2o\nrecent: {recent}\n")
        result = tune.run(plan(asked, policies=str(asked.parent / "mine.yaml")), print)
        assert {row["policy_config"].get("recent") for row in result.rows if row["policy"] != "full"} == {recent}


def test_a_flag_has_what_differs_from_the_policy_by_name(asked, fake):
    result = tune.run(plan(asked, policies='{"name": "snapkv", "prompt": "whole", "window": 32}'), print)
    fields = '{"name": "snapkv", "budget": 0.4, "prompt": "whole", "audit": 0.01, "target": 0.95}'
    assert tuned.flag(result, result.best) == f"--kv-policy '{fields}'"


def test_policies_are_compared_by_memory(asked, fake, monkeypatch):
    monkeypatch.setattr(
        fake, "right", staticmethod(lambda policy, budget: budget >= {"h2o": 0.6, "snapkv": 0.2}[policy])
    )
    result = tune.run(plan(asked, policies="h2o,full,snapkv"), print)
    assert [each.contender.budget for each in result.outcomes] == [0.6, 0.2]
    assert result.best.contender.label == "snapkv" and len(fake.started) == 1


def test_few_prompts_are_said_to_be_few(tmp_path, fake, capsys):
    few = write(tmp_path / "few.jsonl", *({"prompt": f"prompt {i}"} for i in range(60)))
    result = tune.run(plan(few), print)
    assert "60 prompts are too few to confirm 0.95" in capsys.readouterr().out
    (outcome,) = result.outcomes
    assert (outcome.contender.budget, outcome.needed, outcome.confirmed) == (0.4, 146, False)


def test_a_target_above_the_control_is_refused_with_the_controls_figure(asked, fake, monkeypatch):
    monkeypatch.setattr(fake, "control", 0.9)
    with pytest.raises(
        EvalError, match=r"--target got 0.95; expected at most 0.900, the control: of 400 answers .* identical"
    ):
        tune.run(plan(asked), print)
    assert len(fake.ran) == 1
    assert tune.run(plan(asked, target=0.85), print).best.confirmed


@pytest.mark.parametrize(
    "target, ways", [(0.95, "--measure unchanged or --measure tokens"), (0.97, "--measure unchanged")]
)
def test_a_control_below_the_target_names_the_measures_that_meet_it(fake, asked, monkeypatch, target, ways):
    ask = fake.ask

    def tied(self, *args):
        """Rounding decides some words of the control, and no token that full attention clearly would not give."""
        audit = ask(self, *args)
        audit.kept |= {"unchanged": [1.0] * 400, "tokens": [0.96] * 400}
        return audit

    monkeypatch.setattr(fake, "control", 0.7)
    monkeypatch.setattr(fake, "ask", tied)
    said = (
        f"By other measures the control is unchanged 1.000, tokens 0.960. Take {ways} or a lower target than {target}"
    )
    with pytest.raises(EvalError, match=f"identical .*, by rounding alone. {said}$"):
        tune.run(plan(asked, target=target), print)


def test_bytes_become_tokens_and_the_best_policy_is_the_other_halfs(asked, fake, monkeypatch):
    monkeypatch.setattr(fake, "right", staticmethod(lambda policy, budget: {"h2o": 0.6, "snapkv": 0.8}[policy]))
    result = tune.run(plan(asked, policies="h2o,snapkv", budget_bytes=300 << 10), print)
    assert fake.ran == [("full", None, 400), ("h2o", 288, 200), ("snapkv", 288, 200), ("snapkv", 288, 200)]
    assert result.best.contender.label == "snapkv" and result.best.row["part"] == "confirm"
    assert tuned.flag(result, result.best) == """--kv-policy '{"name": "snapkv", "budget": 288, "audit": 0.01}'"""
    with pytest.raises(EvalError, match="--budget-bytes got 1000; expected 32,768 or more: a block of 32 tokens"):
        tune.run(plan(asked, budget_bytes=1000), print)


def test_files_are_written_and_need_no_other(asked, fake, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["vllm-evict", "tune", "--model", str(NEEDLE), "--prompts", str(asked), "--policies"]
    )
    sys.argv += ["h2o", "--out", str(asked.parent / "out")]
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    said = capsys.readouterr().out
    assert (
        stopped.value.code == 0
        and "200 of 200 answers of the confirming half are identical (0.981 to 1.000), so 0.95 is confirmed" in said
    )
    page = (asked.parent / "out" / "tune.html").read_text()
    assert "data:image/png;base64," in page and 'src="http' not in page and "&quot;budget&quot;: 0.4" in page
    read = json.loads((asked.parent / "out" / "tune.json").read_text())
    assert read["confirmed"] and read["best"]["budget"] == 0.4 and read["control"]["share"] == 1
    assert f"  {read['best']['flag']}\n" in said


REFUSED = {
    "neither": ({"model": None}, "got neither --model nor --url"),
    "measure": ({"measure": "bleu"}, "--measure got 'bleu'; expected one of: identical, unchanged, tokens"),
    "target": ({"target": 1.0}, "--target got 1; expected a share above 0 and below 1"),
    "budgets": ({"budgets": (0.5, 128)}, "--budgets got none, or both"),
    "full": ({"policies": "full"}, "--policies got full alone, which is the control"),
    "two alike": (
        {"policies": '{"name": "h2o", "sink": 96},h2o'}, "--policies got two that are shown as 'h2o'; expected files"
    ),
    "unknown": ({"policies": "h3o"}, "--policies h3o:"),
    "bytes and target": ({"budget_bytes": 1, "target": 0.9}, "--budget-bytes got a --target too"),
    "batch": ({"batch": 0}, "--batch got 0; expected 1 or more"),
    "too long": ({"max_tokens": 5000}, r"my.jsonl, row 1: prompt and answer are \d+ \+ 5000 tokens, the model has \d+"),
    "model": ({"model": "/nowhere"}, "no model at /nowhere"),
    "tokens of a server": ({"url": "http://x/v1", "measure": "tokens"}, "a server got --measure tokens"),
    "bytes of a server": ({"url": "http://x/v1", "budget_bytes": 1}, "a server got --budget-bytes"),
    "files for a server": ({"url": "http://x/v1", "policies": "./my.yaml"}, "over HTTP a request picks a policy by name"),
    "no server": ({"url": "http://127.0.0.1:9/v1"}, "nothing answers at http://127.0.0.1:9/v1"),
}  # fmt: skip


@pytest.mark.parametrize("changes, message", REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_one_message_before_anything_starts(asked, fake, changes, message):
    with pytest.raises(EvalError, match=message):
        tune.run(plan(asked, **changes), print)
    assert not fake.started


METRICS = """# TYPE vllm:kv_evict_audit_share gauge
vllm:kv_evict_audit_share{engine="0",model_name="m",policy="full"} %s
vllm:kv_evict_audit_share{engine="0",model_name="m",policy="h2o"} %s
"""


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "audits no answers; expected a server that audits all, such as --kv-policy"),
        (METRICS % (0.01, 0.01), "audits 0.01 of its answers; expected a server that audits all"),
        (METRICS % (1, 1), "does not allow 'snapkv'; expected some of full, h2o: add it to the field allow"),
    ],
    ids=["none", "some", "another policy"],
)
def test_a_server_that_does_not_audit_all_or_allow_all_is_refused(asked, monkeypatch, text, message):
    class Answered:
        def __init__(self, url, model, **options):
            self.url, self.model, self.about = url, "m", {}

    class Reply:
        def raise_for_status(self):
            self.text = text
            return self

    monkeypatch.setattr(audited, "Http", Answered)
    monkeypatch.setattr(audited.httpx, "get", lambda url, timeout: Reply())
    with pytest.raises(EvalError, match=message):
        tune.run(plan(asked, url="http://x/v1", model=None, policies="h2o,snapkv"), print)
