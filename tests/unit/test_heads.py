"""Head files, what either class holds, the dense model by head class, profiling, training and the command."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_evict.config import HeadGates, HeadPattern, HeadsError
from vllm_evict.tools.eval.prompts import Prompts
from vllm_evict.tools.eval.tasks import make
from vllm_evict.tools.eval.words import Filler
from vllm_evict.tools.heads import dense
from vllm_evict.tools.heads.passkeys import Passkeys, Reader
from vllm_evict.tools.heads.show import Geometry, context_for

ROOT = Path(__file__).parents[2]
PATTERNS = ROOT / "configs" / "heads"
LLAMA_2, LLAMA_3 = PATTERNS / "Llama-2-7B-32K-Instruct", PATTERNS / "Llama-3-8B-Instruct-Gradient-1048k"
NEEDLE = ROOT / "examples" / "needle" / "model"

needle_model = pytest.mark.skipif(not (NEEDLE / "model.safetensors").exists(), reason=f"no model in {NEEDLE}")


def written(folder, text, config='{"sink_size": 4, "recent_size": 8}', name="heads.tsv"):
    (folder / name).write_text(text)
    if config is not None:
        (folder / "config.json").write_text(config)
    return folder / name


def gates_of(*rows, sink=4, recent=8):
    return HeadGates(np.array(rows, dtype=float), sink, recent)


# --- files -----------------------------------------------------------------------------------------------------------


def test_published_patterns_are_read_as_they_are():
    for folder, shape, least in ((LLAMA_2, (32, 32), -0.00140380859375), (LLAMA_3, (32, 8), -0.00023555755615234375)):
        gates = HeadGates.read(folder, shape)
        raw = np.loadtxt(folder / "full_attention_heads.tsv")
        assert raw.min() == least, "the file was changed"
        assert (gates.sink, gates.recent) == (128, 256)
        assert gates.gates.min() == 0 and gates.gates.max() == 1
        np.testing.assert_array_equal(gates.gates, raw.clip(0, 1))
        assert HeadGates.read(folder / "full_attention_heads.tsv").gates.shape == shape
    assert int(HeadPattern.read(LLAMA_2, sparsity=0.75).retrieval.sum()) == 256
    assert int(HeadPattern.read(LLAMA_3, sparsity=0.5).retrieval.sum()) == 128
    by_value = HeadPattern.read(LLAMA_3, threshold=0.5).retrieval
    assert by_value[0].tolist() == [True, True, True, False, False, True, False, False]
    assert sorted(set(by_value.sum(1).tolist())) == [2, 4, 5, 6, 7, 8], "layers differ, one keeps all"


def test_gates_stray_by_a_little(tmp_path):
    gates = HeadGates.read(written(tmp_path, "-0.0014\t1.002\n0.25\t1e-3\n"))
    assert gates.gates.tolist() == [[0, 1], [0.25, 0.001]]
    assert (gates.sink, gates.recent) == (4, 8)


@pytest.mark.parametrize(
    "text, config, words",
    [
        ("0.5\t-0.2\n", None, "the gate of layer 0, KV head 1 is -0.2, not in [0, 1]"),
        ("0.5\n7\n", None, "the gate of layer 1, KV head 0 is 7, not in [0, 1]"),
        ("0.5\tnan\n", None, "KV head 1 is nan"),
        ("0.5\tinf\n", None, "KV head 1 is inf"),
        ("0.5\t0.5\n0.5\n", None, "layer 1 has 1 KV heads, layer 0 has 2"),
        ("0.5\tyes\n", None, "layer 0 has something that is no number: '0.5\\tyes'"),
        ("0.5,0.5\n", None, "no number: '0.5,0.5'"),
        ("\n\n", None, "is empty"),
        ("0.5\n", "", "config.json is missing"),
        ("0.5\n", "sink", "config.json is not JSON"),
        ("0.5\n", "[1, 2]", "sink_size must be a number of tokens of at least 0, it has none"),
        ("0.5\n", '{"sink_size": 4}', "recent_size must be a number of tokens of at least 1, it has none"),
        ("0.5\n", '{"sink_size": -1, "recent_size": 4}', "sink_size must be a number of tokens of at least 0, not -1"),
        ("0.5\n", '{"sink_size": true, "recent_size": 4}', "not True"),
        ("0.5\n", '{"sink_size": 1, "recent_size": 0}', "recent_size must be a number of tokens of at least 1, not 0"),
        ("0.5\n", '{"sink_size": 1, "recent_size": "8"}', "not '8'"),
    ],
)
def test_bad_files_get_one_clear_message(tmp_path, text, config, words):
    sizes = '{"sink_size": 4, "recent_size": 8}' if config is None else config or None
    with pytest.raises(HeadsError) as caught:
        HeadGates.read(written(tmp_path, text, sizes))
    assert words in str(caught.value) and str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_of_another_model_and_no_files(tmp_path):
    with pytest.raises(HeadsError, match=r"32 layers x 8 KV heads, the model has 4 x 2"):
        HeadGates.read(LLAMA_3, (4, 2))
    with pytest.raises(HeadsError, match=r"none\.tsv: No such file"):
        HeadGates.read(tmp_path / "none.tsv")
    with pytest.raises(HeadsError, match=r"full_attention_heads\.tsv: No such file"):
        HeadGates.read(tmp_path)
    (tmp_path / "binary.tsv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HeadsError, match="is no text"):
        HeadGates.read(tmp_path / "binary.tsv")


def test_written_files_are_read_again(tmp_path):
    gates = gates_of([0.123456, 1.0], [0.0, 0.5], sink=3, recent=5)
    gates.save(tmp_path / "new" / "heads.tsv")
    again = HeadGates.read(tmp_path / "new" / "heads.tsv", (2, 2))
    np.testing.assert_array_equal(again.gates, gates.gates)
    assert (again.sink, again.recent) == (3, 5)
    assert json.loads((tmp_path / "new" / "config.json").read_text()) == {"sink_size": 3, "recent_size": 5}
    pattern = again.pattern(0.5)
    pattern.save(tmp_path / "split" / "heads.tsv")
    np.testing.assert_array_equal(HeadPattern.read(tmp_path / "split" / "heads.tsv").retrieval, pattern.retrieval)


def test_saving_destroys_nothing(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(HeadsError, match="choose a folder of its own for heads.tsv"):
        gates_of([1.0]).save(model / "heads.tsv")
    assert (model / "config.json").read_text() == '{"model_type": "llama"}' and not (model / "heads.tsv").exists()
    gates_of([1.0], sink=4).save(tmp_path / "a.tsv")
    gates_of([0.0], sink=4).save(tmp_path / "b.tsv")
    with pytest.raises(HeadsError, match=r"has sink 4 and recent 8 for a\.tsv, not 5 and 8"):
        gates_of([0.0], sink=5).save(tmp_path / "b.tsv")
    assert HeadGates.read(tmp_path / "b.tsv").sink == 4
    gates_of([0.0], sink=5).save(tmp_path / "alone" / "b.tsv")
    gates_of([0.0], sink=6).save(tmp_path / "alone" / "b.tsv")
    assert HeadGates.read(tmp_path / "alone" / "b.tsv").sink == 6
    for path, words in ((tmp_path, "is a folder"), (tmp_path / "config.json", "name another file")):
        with pytest.raises(HeadsError, match=words):
            gates_of([1.0]).save(path)


# --- classes ---------------------------------------------------------------------------------------------------------


def test_threshold_and_sparsity():
    gates = gates_of([0.1, 0.5, 0.9], [0.4, 0.49, 1.0])
    split = lambda **how: gates.pattern(**how).retrieval.astype(int).tolist()  # noqa: E731
    assert split() == split(threshold=0.5) == [[0, 1, 1], [0, 0, 1]]
    assert split(threshold=0.0) == split(sparsity=0.0) == [[1, 1, 1], [1, 1, 1]]
    assert split(threshold=0.95) == [[0, 0, 0], [0, 0, 1]]
    assert split(sparsity=0.5) == [[0, 1, 1], [0, 0, 1]]
    assert split(sparsity=1 / 3) == [[0, 1, 1], [0, 1, 1]]
    assert split(sparsity=1.0) == [[0, 0, 0], [0, 0, 0]]
    # A share that is no number of heads: the nearest one, halves stream.
    assert [gates.pattern(sparsity=s).retrieval.sum() for s in (0.07, 0.25, 0.26, 0.92)] == [6, 4, 4, 0]
    assert gates.pattern(0.5).inverted.retrieval.astype(int).tolist() == [[1, 0, 0], [1, 1, 0]]
    assert gates.pattern(0.5).share == 0.5


def test_equal_gates_still_give_the_share():
    ones = gates_of([1, 1, 1, 1], [1, 1, 1, 1])
    assert ones.pattern(sparsity=0.5).retrieval.tolist() == [[True] * 4, [False] * 4]
    mixed = gates_of([0, 1, 0, 1], [1, 0, 0, 0])
    assert mixed.pattern(sparsity=0.5).retrieval.astype(int).tolist() == [[1, 1, 0, 1], [1, 0, 0, 0]]
    assert mixed.pattern(sparsity=0.75).retrieval.astype(int).tolist() == [[0, 1, 0, 1], [0, 0, 0, 0]]
    # Llama 3 has 82 gates of exactly 1, more than a quarter of 256.
    assert (HeadGates.read(LLAMA_3).gates == 1).sum() == 82
    assert HeadPattern.read(LLAMA_3, sparsity=0.75).retrieval.sum() == 64


@pytest.mark.parametrize("how", [{"threshold": -0.1}, {"threshold": 2}, {"sparsity": 1.5}, {"sparsity": float("nan")}])
def test_what_is_no_share_is_refused(how):
    with pytest.raises(HeadsError, match=f"{next(iter(how))} must be between 0 and 1"):
        gates_of([0.5]).pattern(**how)


def test_threshold_and_sparsity_exclude_each_other():
    with pytest.raises(HeadsError, match="not by both"):
        gates_of([0.5]).pattern(threshold=0.5, sparsity=0.5)


# --- arithmetic ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens, block, held",
    [
        (1, 16, (1, 1)),
        (384, 16, (24, 24)),  # 128 + 256: nothing between them yet
        (385, 16, (25, 25)),  # the first middle block still holds recent tokens
        (400, 16, (25, 24)),  # and now it does not: 8 blocks of sinks, 16 of the window
        (401, 16, (26, 25)),  # a window that ends within a block reaches into 17
        (4096, 16, (256, 24)),
        (4096, 1, (4096, 384)),
        (4100, 32, (129, 13)),
    ],
)
def test_blocks_by_hand(tokens, block, held):
    assert HeadPattern(np.ones((1, 1), dtype=bool), 128, 256).blocks(tokens, block) == held


def test_blocks_by_counting():
    for sink, recent in ((0, 1), (3, 5), (16, 16), (20, 7)):
        pattern = HeadPattern(np.array([[True, False, False]]), sink, recent)
        for block in (1, 4, 16):
            for tokens in range(90):
                kept = {t // block for t in range(tokens) if t < sink or t >= tokens - recent}
                every = {t // block for t in range(tokens)}
                assert pattern.blocks(tokens, block) == (len(every), len(kept)), (sink, recent, block, tokens)
                assert pattern.head_blocks(tokens, block) == len(every) + 2 * len(kept)


def test_saving_with_all_and_no_retrieval_heads():
    everything = HeadPattern(np.ones((2, 2), dtype=bool), 128, 256)
    assert everything.saving(4096) == 1
    assert everything.inverted.saving(4096) == pytest.approx(4096 / 384)
    half = HeadPattern(np.array([[True, True], [False, False]]), 128, 256)
    assert half.saving(4096) == pytest.approx(2 * 4096 / (4096 + 384))


def test_published_memory_follows_by_arithmetic():
    """2.55x (MHA, 25 % retrieval) and 1.67x (GQA, 50 %) are of weights and KV cache together, in 16 bits."""
    mha, gqa = HeadPattern.read(LLAMA_2, sparsity=0.75), HeadPattern.read(LLAMA_3, sparsity=0.5)
    # The cache alone nears 4 and 2.
    assert [round(mha.saving(n), 2) for n in (4096, 32768, 131072)] == [3.12, 3.86, 3.97]
    assert [round(gqa.saving(n), 2) for n in (4096, 32768, 131072)] == [1.83, 1.98, 1.99]
    seven, eight = Geometry(128, 2, 13_476_831_232), Geometry(128, 2, 16_060_522_496)
    assert seven.cache(32 * 32) == 512 << 10 and eight.cache(32 * 8) == 128 << 10  # bytes a token
    for pattern, geometry, ratio, around in ((mha, seven, 2.55, 112_000), (gqa, eight, 1.67, 499_500)):
        tokens = context_for(pattern, geometry, ratio)
        assert tokens == pytest.approx(around, rel=0.005)
        full = geometry.weights + geometry.cache(pattern.retrieval.size * tokens)
        assert full / (geometry.weights + geometry.cache(pattern.head_blocks(tokens))) == pytest.approx(ratio, abs=1e-4)
        assert full < 85e9  # what one GPU of 80 GiB holds
    assert context_for(gqa, eight, 2.0) is None


# --- the dense model -------------------------------------------------------------------------------------------------


def projections(tokens, heads=4, kv_heads=2, dim=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(1, heads, tokens, dim, generator=g, dtype=torch.float64)
    k, v = (torch.randn(1, kv_heads, tokens, dim, generator=g, dtype=torch.float64) for _ in "kv")
    return q, k, v


def masked(q, k, v, scale, mask):
    """Attention with a mask [heads, tokens, tokens], written out."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return (q @ k.transpose(2, 3) * scale).masked_fill(~mask, -torch.inf).softmax(-1) @ v


def mask_of(tokens, sink, recent):
    return torch.tensor(
        [[j <= i and (j < sink or i - j < recent) for j in range(tokens)] for i in range(tokens)], dtype=torch.bool
    )


@pytest.mark.parametrize("tokens, sink, recent", [(1, 4, 8), (40, 4, 8), (300, 0, 1), (700, 5, 33), (600, 290, 300)])
def test_heads_by_class_are_masks(tokens, sink, recent):
    q, k, v = projections(tokens)
    causal, narrow = mask_of(tokens, 0, tokens), mask_of(tokens, sink, recent)
    every = masked(q, k, v, 0.3, causal)
    few = masked(q, k, v, 0.3, narrow)
    torch.testing.assert_close(dense.full(q, k, v, 0.3), every)
    torch.testing.assert_close(dense.streaming(q, k, v, 0.3, sink, recent), few)
    pattern = HeadPattern(np.array([[True, False], [False, True], [True, True], [False, False]]), sink, recent)
    for layer, wide in enumerate(pattern.retrieval.tolist()):
        mask = torch.stack([causal if wide[head // 2] else narrow for head in range(4)])
        torch.testing.assert_close(dense.PatternHeads(pattern).attend(layer, q, k, v, 0.3), masked(q, k, v, 0.3, mask))
    gates = torch.tensor([[0.25, 1.0]])
    blend = dense.GatedHeads(gates, sink, recent).attend(0, q, k, v, 0.3)
    torch.testing.assert_close(blend[:, :2], 0.25 * every[:, :2] + 0.75 * few[:, :2])
    torch.testing.assert_close(blend[:, 2:], every[:, 2:])


@pytest.fixture(scope="module")
def needle():
    return dense.load(NEEDLE, "cpu")


@pytest.fixture(scope="module")
def hand_built(tmp_path_factory):
    """The needle model before training: its heads are written by hand, so which of them retrieve is known."""
    path = tmp_path_factory.mktemp("hand-built")
    script = ROOT / "examples" / "needle" / "build.py"
    subprocess.run([sys.executable, script, path], check=True, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    return dense.load(path, "cpu")


@needle_model
def test_passkeys_know_their_answers_and_facts(needle):
    documents = Passkeys(Reader(needle[1]), 5, (300, 400), seed=3)
    text = needle[1].decode
    for document in (documents(0), documents(1)):
        assert 290 <= len(document.ids) <= 410
        assert len(document.answers) == len(document.facts) == 5
        for predicting, fact in zip(document.answers, document.facts):
            answer = text(document.ids[predicting + 1]).strip()
            assert len(answer) == 4 and text(document.ids[fact]).strip().endswith(f"is {answer}.")
            key = text(document.ids[fact]).split()[3]
            question = text(document.ids[: predicting[0] + 1], skip_special_tokens=True).rstrip()
            assert question.endswith(f"recall the code of {key}."), question[-60:]
            assert fact[-1] < document.answers[0][0]
    np.testing.assert_array_equal(documents(1).ids, Passkeys(Reader(needle[1]), 5, (300, 400), seed=3)(1).ids)
    assert not np.array_equal(documents(1).ids, Passkeys(Reader(needle[1]), 5, (300, 400), seed=4)(1).ids)


@needle_model
def test_passkeys_without_a_chat_template(needle):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(NEEDLE)
    tokenizer.chat_template = None
    document = Passkeys(Reader(tokenizer), 2, (200, 200))(0)
    for predicting, fact in zip(document.answers, document.facts):
        answer = tokenizer.decode(document.ids[predicting + 1]).strip()
        assert len(answer) == 4 and tokenizer.decode(document.ids[fact]).strip().endswith(f"is {answer}.")


@needle_model
@pytest.mark.parametrize(
    "count, lengths, words",
    [
        (0, (300, 400), "passkeys must be between 1 and"),
        (5, (400, 300), "fewest and the most"),
        (10, (50, 60), "too short"),
    ],
)
def test_passkeys_that_cannot_be(needle, count, lengths, words):
    with pytest.raises(HeadsError, match=words):
        Passkeys(Reader(needle[1]), count, lengths)


@needle_model
def test_full_attention_is_the_model_itself(needle):
    from transformers import AutoModelForCausalLM

    stock = AutoModelForCausalLM.from_pretrained(NEEDLE, dtype=torch.float32, attn_implementation="sdpa")
    document = Passkeys(Reader(needle[1]), 4, (300, 300))(0)
    with torch.no_grad():
        wanted = stock.base_model(torch.from_numpy(document.ids)[None]).last_hidden_state[0, document.predicting]
        all_retrieval = HeadPattern(np.ones((4, 2), dtype=bool), 4, 8)
        gates = torch.ones(4, 2)
        for heads in (dense.FullHeads(), dense.PatternHeads(all_retrieval), dense.GatedHeads(gates, 4, 8)):
            torch.testing.assert_close(dense.hidden_states(needle[0], document, heads), wanted, atol=2e-4, rtol=1e-4)
        # None of its heads sees the facts: everything differs.
        narrow = dense.hidden_states(needle[0], document, dense.PatternHeads(all_retrieval.inverted))
        assert (narrow - wanted).abs().max() > 0.1


@needle_model
def test_mass_is_that_of_the_attention_matrix(needle):
    from transformers import AutoModelForCausalLM

    eager = AutoModelForCausalLM.from_pretrained(NEEDLE, dtype=torch.float32, attn_implementation="eager")
    document = Passkeys(Reader(needle[1]), 6, (300, 300))(0)
    sink, recent = 16, 100
    heads = dense.MassHeads(document, sink, recent)
    dense.hidden_states(needle[0], document, heads)
    with torch.no_grad():
        maps = eager(torch.from_numpy(document.ids)[None], output_attentions=True).attentions
    counted = [
        (int(position), fact)
        for predicting, fact in zip(document.answers, document.facts)
        for position in predicting
        if fact.min() >= sink and position - fact.max() >= recent
    ]
    assert 0 < len(counted) < len(document.predicting), "this document has facts on both sides of the window"
    for layer, attention in enumerate(maps):
        wanted = torch.stack([attention[0, :, position, fact].sum(-1) for position, fact in counted]).mean(0)
        torch.testing.assert_close(heads.mass[layer], wanted, atol=1e-5, rtol=1e-4)


@needle_model
def test_pattern_of_the_needle_model_keeps_its_answers(needle):
    model, tokenizer = needle
    prompts, filler = Prompts(str(NEEDLE)), Filler()
    made = [
        make("multikey", n, d, i, 7, prompts.count, filler)
        for n in (512, 1024)
        for d in (0.2, 0.5, 0.8)
        for i in range(4)
    ]
    documents = [Reader(tokenizer).document(x.context, [(x.question, x.answers[0])]) for x in made]
    gates = HeadGates.read(PATTERNS / "needle", dense.shape(model.config))
    half, own = gates.pattern(sparsity=0.5), gates.pattern()
    assert half.retrieval.sum() == 4 and own.retrieval.sum() == 5
    right = lambda heads: sum(dense.answers_right(model, documents, heads))  # noqa: E731
    assert right(dense.FullHeads()) == 24
    assert right(dense.PatternHeads(half)) == 24
    assert right(dense.PatternHeads(own)) == 24
    assert right(dense.PatternHeads(half.inverted)) == 0
