"""The demo's models and prompts, and its own checks: which runs pass. `make demo` runs the rest."""

import itertools
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    monkeypatch.setattr(sys, "path", list(sys.path))
    import demo

    return demo


FOUND = {
    "needle": {"full": 16, "sink-window": 3, "h2o": 3, "h2o last 16": 10, "full, host": 15},
    "smollm2": {"stock": 6, "full, host": 5, "tova": 4, "snapkv": 1, "h2o-pressure": 2},
    "gemma": {"stock": 6, "full, host": 6, "tova": 4, "snapkv": 1},
}


def results(demo, model):
    """Return the output of a good run: the demo on a model, runs, needles found."""
    whole = demo.Run(
        seconds=3.0,
        cpu_seconds=3.0,
        output_tokens=4096,
        preemptions=3,
        peak_blocks=191,
        peak_requests=5,
        evicted_blocks=0,
    )
    evicting = replace(whole, preemptions=0, peak_requests=16, evicted_blocks=512)
    show = demo.named(model)
    runs = {name: evicting if index else whole for index, name in enumerate(show.policies)}
    return show, runs, dict(FOUND[model])


def test_the_offline_example():
    """On the embedded model: one request by the engine's policy, one by its own."""
    example = Path(__file__).parents[2] / "examples/offline.py"
    # Engines of the tests do not compile; the example's does, as a user's.
    environment = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    command = [sys.executable, example]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr
    first, second = (line for line in done.stdout.splitlines() if "KVUsage" in line)
    assert "policy='h2o', budget_tokens=512" in first and "policy='sink-window', budget_tokens=384" in second
    assert "evicted_blocks=0" not in done.stdout


@pytest.mark.parametrize("model", FOUND)
def test_a_good_run_passes(demo, model):
    demo.check(*results(demo, model))


@pytest.mark.parametrize(
    "model, policy, run, found, message",
    [
        ("needle", "full", {"evicted_blocks": 1}, 16, "full evicted something"),
        ("needle", "full", {"preemptions": 0}, 16, "the pool was large enough for full"),
        ("needle", "h2o", {"evicted_blocks": 0}, 3, "h2o evicted nothing"),
        ("needle", "sink-window", {"preemptions": 1}, 3, "sink-window did not fit into the pool"),
        ("needle", "full", {}, 14, "with all of its cache the model found only 14"),
        ("needle", "sink-window", {}, 10, r"do not fall: \[16, 10, 10\]"),
        ("needle", "full, host", {}, 10, "found no more needles"),
        ("needle", "full", {}, 15, None),
        ("smollm2", "h2o-pressure", {"evicted_blocks": 0}, 2, "h2o-pressure evicted nothing"),
        ("gemma", "stock", {"preemptions": 0}, 6, None),
        ("smollm2", "stock", {}, 3, "the model found only 3"),
        ("smollm2", "full, host", {}, 3, "lost half of the needles of stock: 3, 6"),
        ("smollm2", "tova", {}, 0, None),
    ],
)
def test_a_run_that_shows_something_else_fails(demo, model, policy, run, found, message):
    show, runs, needles = results(demo, model)
    runs[policy], needles[policy] = replace(runs[policy], **run), found
    if message is None:
        return demo.check(show, runs, needles)
    with pytest.raises(demo.DemoError, match=message):
        demo.check(show, runs, needles)


def test_needles_are_as_long_as_they_say_and_an_answer_ends(demo):
    show = demo.named("needle")
    needles = show.prompts(show)
    (needle,) = needles.batch(1)
    assert len(needle.ids) == show.length
    encode, end = needles.prompts.tokenizer.encode, needles.prompts.tokenizer.eos_token_id
    right, other = encode(needle.sample.answers[0], add_special_tokens=False), encode("1234", add_special_tokens=False)
    assert needle.found_in(needles.answer([*right, end, *other]))
    assert not needle.found_in(needles.answer([*other, end, *right])), "what follows the answer counts"
    assert needles.talk(needle).needle is needle


def test_trained_models_are_asked_about_essays(demo, tmp_path, monkeypatch):
    """The texts are made here, and the embedded model's tokenizer stands in for a trained one's."""
    import shows

    words = ["".join(letters) for letters in itertools.product("bdfgklmn", "aeiou", "rstv", "aeiou")]
    text = " ".join(" ".join(words[i : i + 8]).capitalize() + "." for i in range(0, len(words), 4))
    (tmp_path / shows.Essays.about).write_text(f"{text}\n")
    monkeypatch.setattr(shows.Essays, "folder", tmp_path)
    show = replace(demo.named("smollm2"), model=demo.named("needle").model)
    needles = show.prompts(show)
    batch = needles.batch(4, first=2)
    assert all(show.length - 300 < len(needle.ids) <= show.length for needle in batch)
    depths = [needle.sample.context.index(needle.sample.answers[0]) for needle in batch]
    assert depths == sorted(depths) and {needle.sample.index for needle in batch} == {2, 3, 4, 5}
    assert batch[0].found_in(f" {batch[0].sample.answers[0]}.") and not batch[0].found_in("1234567")
    talk = needles.talk(batch[0])
    assert talk.text == f"{text}\n\n{talk.end}" and talk.needle is None


def test_a_trained_model_is_made_before_it_is_shown(demo, monkeypatch):
    from scripts.models import SOURCES

    commands, rc = [], 0
    monkeypatch.setattr(
        demo.subprocess, "run", lambda command: commands.append(command) or subprocess.CompletedProcess(command, rc)
    )
    demo.fetch(demo.named("needle"))
    assert not commands, "the embedded model is fetched"
    for name in ("smollm2", "gemma"):
        show = demo.named(name)
        assert show.model == Path(__file__).parents[2] / "models" / SOURCES[name].folder
        demo.fetch(show)
        assert commands.pop()[1:] == [str(Path(__file__).parents[2] / "scripts/models.py"), name, "essays"]
    rc = 1
    with pytest.raises(demo.DemoError, match="there is no gemma-3-270m to show"):
        demo.fetch(show)


def test_an_unknown_model_gets_one_message(tmp_path):
    script = Path(__file__).parents[2] / "examples/demo.py"
    command = [sys.executable, script, "--model", "essays", "--out", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = " ".join(done.stdout.split())
    assert done.returncode == 1 and not done.stderr, done.stderr
    assert "MODEL got essays; expected smollm2 or gemma" in said and "no MODEL for the embedded one" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "target, said", [("demo", None), ("demo MODEL=gemma", "gemma"), ("external", "examples/needle/model")]
)
def test_make_names_the_model(target, said):
    environment = {name: value for name, value in os.environ.items() if name not in ("MODEL", "MAKEFLAGS", "MFLAGS")}
    command = ["make", "-n", "-o", ".venv/.ready", *target.split()]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    assert ("--model" in done.stdout) == (said is not None)
    assert said is None or re.search(f'--model ["]?{said}["]? ?', done.stdout)
