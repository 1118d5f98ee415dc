"""The demo's own checks: what they let through, and what they do not. `make demo` runs the rest."""

import os
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


def results(demo):
    """What a good run gives: runs, needles found."""
    full = demo.Run(
        seconds=3.0,
        cpu_seconds=3.0,
        output_tokens=4096,
        preemptions=3,
        peak_blocks=191,
        peak_requests=5,
        evicted_blocks=0,
    )
    evicting = replace(full, preemptions=0, peak_requests=16, evicted_blocks=512)
    runs = {name: full if name == "full" else evicting for name in demo.POLICIES}
    return runs, {"full": 16, "sink-window": 3, "h2o": 3, demo.LAST: 10, demo.REACH: 15}


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


def test_a_good_run_passes(demo):
    demo.check(*results(demo))


@pytest.mark.parametrize(
    "policy, run, found, message",
    [
        ("full", {"evicted_blocks": 1}, 16, "full evicted something"),
        ("full", {"preemptions": 0}, 16, "the pool was large enough for full"),
        ("h2o", {"evicted_blocks": 0}, 3, "h2o evicted nothing"),
        ("sink-window", {"preemptions": 1}, 3, "sink-window did not fit into the pool"),
        ("full", {}, 14, "with all of its cache the model found only 14"),
        ("sink-window", {}, 10, r"do not fall: \[16, 10, 10\]"),
        ("full, host", {}, 10, "found no more needles"),
        ("full", {}, 15, None),
    ],
)
def test_a_run_that_shows_something_else_fails(demo, policy, run, found, message):
    runs, needles = results(demo)
    runs[policy], needles[policy] = replace(runs[policy], **run), found
    if message is None:
        return demo.check(runs, needles)
    with pytest.raises(demo.DemoError, match=message):
        demo.check(runs, needles)


def test_needles_are_as_long_as_they_say_and_an_answer_ends(demo):
    needles = demo.Needles()
    needle = needles.hide(0.5, 0)
    assert len(needle.ids) == demo.CONTEXT + demo.QUESTION
    encode, end = needles.prompts.tokenizer.encode, needles.prompts.tokenizer.eos_token_id
    right, other = encode(needle.sample.answers[0], add_special_tokens=False), encode("1234", add_special_tokens=False)
    assert needle.found_in(needles.answer([*right, end, *other]))
    assert not needle.found_in(needles.answer([*other, end, *right])), "what follows the answer counts"
