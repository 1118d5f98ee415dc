"""Profiles of heads, trained gates, and the command for both."""

import sys

import numpy as np
import pytest
import test_heads
from test_heads import LLAMA_2, LLAMA_3, NEEDLE, PATTERNS, needle_model

from vllm_evict.config import HeadGates, HeadsError
from vllm_evict.tools import cli
from vllm_evict.tools.heads import dense
from vllm_evict.tools.heads.passkeys import Passkeys, Reader
from vllm_evict.tools.heads.profile import profile
from vllm_evict.tools.heads.train import train

needle, hand_built = test_heads.needle, test_heads.hand_built


# --- profile and train -----------------------------------------------------------------------------------------------

SMALL = {"lengths": (192, 256), "passkeys": 4, "sink": 4, "recent": 32, "progress": False}


def test_training_finds_the_head_that_was_written(hand_built, tmp_path):
    gates = train(*hand_built, tmp_path / "heads.tsv", steps=60, lr=0.05, **SMALL)
    assert gates.gates[3, 0] == gates.gates.max() > 0.5, gates.gates  # the look-up
    pattern = gates.pattern()
    assert pattern.retrieval[:2].sum() == 0, gates.gates  # previous tokens and topics are near
    np.testing.assert_allclose(HeadGates.read(tmp_path / "heads.tsv", (4, 2)).gates, gates.gates, atol=1e-6)
    documents = map(Passkeys(Reader(hand_built[1]), 1, (256, 256), seed=9), range(12))
    documents = [d for d in documents if d.facts[0][0] >= 4 and d.facts[0][-1] < d.predicting[0] - 32]
    assert len(documents) >= 8
    right = lambda p: sum(dense.answers_right(hand_built[0], documents, dense.PatternHeads(p)))  # noqa: E731
    assert right(pattern) == len(documents) and right(pattern.inverted) == 0


def test_profile_finds_the_head_that_was_written(hand_built, tmp_path):
    scores = profile(*hand_built, tmp_path / "heads.tsv", samples=3, **SMALL)
    assert scores.gates.shape == (4, 2) and scores.gates[3, 0] == scores.gates.max() > 0.5, scores.gates
    assert scores.gates[:2].max() < 0.1
    np.testing.assert_allclose(HeadGates.read(tmp_path / "heads.tsv").gates, scores.gates, atol=1e-6)
    with pytest.raises(HeadsError, match="use longer documents"):
        profile(*hand_built, tmp_path / "far" / "heads.tsv", samples=1, **{**SMALL, "recent": 512, "sink": 4})


def test_a_stopped_run_goes_on_where_it_was(hand_built, tmp_path, monkeypatch):
    wanted = train(*hand_built, tmp_path / "whole" / "heads.tsv", steps=6, **SMALL)
    hidden, calls = dense.hidden_states, []

    def stops(*args):
        calls.append(args)
        if len(calls) > 6:  # in the fourth step: each takes two
            raise KeyboardInterrupt
        return hidden(*args)

    out = tmp_path / "stopped" / "heads.tsv"
    monkeypatch.setattr(dense, "hidden_states", stops)
    with pytest.raises(KeyboardInterrupt):
        train(*hand_built, out, steps=6, save_every=0, **SMALL)
    assert not out.exists()
    monkeypatch.setattr(dense, "hidden_states", hidden)
    with pytest.raises(HeadsError, match=r"of a run with l1 0\.05: remove it, or give the same options"):
        train(*hand_built, out, steps=6, l1=0.5, **SMALL)
    found = train(*hand_built, out, steps=6, save_every=0, **SMALL)
    np.testing.assert_array_equal(found.gates, wanted.gates)
    assert wanted.gates.min() < 1


def test_recomputed_activations_change_nothing(hand_built, tmp_path):
    kept = train(*hand_built, tmp_path / "kept" / "heads.tsv", steps=4, **SMALL)
    again = train(*hand_built, tmp_path / "again" / "heads.tsv", steps=4, recompute=True, **SMALL)
    np.testing.assert_allclose(again.gates, kept.gates, atol=1e-5)
    assert not hand_built[0].is_gradient_checkpointing and not hand_built[0].base_model.layers[0].training


@pytest.mark.parametrize(
    "options, words",
    [
        ({"steps": 0}, "steps must be at least 1, not 0"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"recent": 0}, "recent must be at least 1"),
        ({"lengths": (200, 9000)}, "lengths up to 9000 exceed the model's context of 4608 tokens"),
    ],
)
def test_training_refuses(hand_built, tmp_path, options, words):
    with pytest.raises(HeadsError, match=words):
        train(*hand_built, tmp_path / "heads.tsv", **{**SMALL, **options})


def test_lengths_that_fit(hand_built):
    assert dense.lengths_for(hand_built[0]) == (1000, 4320)  # of 4,608
    assert dense.lengths_for(hand_built[0], (10, 4608)) == (10, 4608)


def test_sliding_windows_are_refused(hand_built):
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        **{"vocab_size": 600, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 64, "head_dim": 16},
    )
    model = MistralForCausalLM._from_config(config, attn_implementation=dense.NAME)
    document = Passkeys(Reader(hand_built[1]), 2, (200, 200))(0)
    with pytest.raises(HeadsError, match="MistralAttention is not plain causal attention"):
        dense.hidden_states(model, document, dense.FullHeads())


# --- the command -----------------------------------------------------------------------------------------------------


def command(monkeypatch, capsys, *args):
    """Runs `vllm-evict heads ...` -> (exit status, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["vllm-evict", "heads", *map(str, args)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def test_show(monkeypatch, capsys, tmp_path):
    options = ("--sparsity", 0.75, "--head-dim", 128, "--weights", "13.48e9", "--ratio", 2.55)
    code, out, _ = command(monkeypatch, capsys, "show", LLAMA_2, *options, "--png", tmp_path / "a" / "map.png")
    assert code == 0
    assert "256 retrieval and 768 streaming of 1024 KV heads (25% retrieval)" in out
    lines = {line.split()[0]: line for line in out.splitlines() if line.split()}
    assert lines["31"].count("●") == 16 and lines["31"].split()[-2:] == ["16", "16"]
    assert "3.12x less" in out and "3.86x less" in out and "3.97x less" in out and "2.67x less" in out
    assert "2.55x less from 111,9" in out
    assert (tmp_path / "a" / "map.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = command(monkeypatch, capsys, "show", LLAMA_3)
    assert code == 0 and "208 retrieval and 48 streaming of 256 KV heads" in out


@needle_model
def test_show_with_a_model(monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, "show", PATTERNS / "needle", "--model", NEEDLE, "--contexts", "4096")
    assert code == 0 and "8.00 MiB" in out and "with weights" in out
    code, _, err = command(monkeypatch, capsys, "show", LLAMA_3, "--model", NEEDLE)
    assert code == 2 and "32 layers x 8 KV heads, the model has 4 x 2" in err


@needle_model
def test_profile_and_train_from_the_command_line(monkeypatch, capsys, tmp_path):
    sizes = ("--model", NEEDLE, "--lengths", "200,256", "--passkeys", 4, "--sink", 4, "--recent", 32)
    for name, more in (("profile", ("--samples", 2)), ("train", ("--steps", 2))):
        file = tmp_path / name / "heads.tsv"
        code, out, _ = command(monkeypatch, capsys, name, "--out", file, *sizes, *more)
        assert code == 0 and "retrieval" in out, name
        assert (HeadGates.read(file, (4, 2)).sink, HeadGates.read(file).recent) == (4, 32)


@pytest.mark.parametrize(
    "args, words",
    [
        (("show", "nothing.tsv"), "nothing.tsv: No such file"),
        (("show", LLAMA_3, "--sparsity", "2"), "sparsity must be between 0 and 1, not 2.0"),
        (("show", LLAMA_3, "--sparsity", "0.5", "--threshold", "0.5"), "not by both"),
        (("show", LLAMA_3, "--ratio", "2"), "--ratio needs bytes"),
        (("show", LLAMA_3, "--contexts", "4k"), "--contexts must be whole numbers above 0"),
        (("show", LLAMA_3, "--model", "no/such"), "no model at no/such"),
        (("train", "--model", "no/such", "--out", "x.tsv"), "no model at no/such"),
        (("train", "--model", "no/such", "--out", "x.tsv", "--lengths", "a"), "--lengths must be whole numbers"),
        (("profile", "--model", "no/such", "--out", "x.tsv", "--lengths", "1,2,3"), "the fewest and the most tokens"),
    ],
)
def test_mistakes_are_one_line(monkeypatch, capsys, args, words):
    code, _, err = command(monkeypatch, capsys, *args)
    assert code == 2 and words in err and err.count("\n") == 1 and err.startswith("vllm-evict: ")
