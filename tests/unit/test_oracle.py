"""The oracle itself, against transformers and against figures worked out by hand."""

import json
import math
from statistics import fmean

import pytest
import torch
from oracle.model import DenseLlama
from oracle.replay import Config, Request, generate, margin, replay, select
from oracle.tiny import make_tiny_llama

SHAPES = [
    dict(),
    dict(kv_heads=4),
    dict(kv_heads=1, head_dim=64, layers=3),
    dict(hidden=96, heads=6, kv_heads=3, head_dim=80, tie=True, seed=5),
]


def random_ids(n, vocab=256, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (n,), generator=gen).tolist()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(path):
    return DenseLlama(path)


class FixedAttention:
    """Stands in for a model: token t draws attention as `draw[t]`, from anyone.

    draw: [T], or [L, H, T] to tell layers and query heads apart.
    """

    def __init__(self, draw, kv_heads=1):
        draw = torch.as_tensor(draw, dtype=torch.float64)
        self.draw = draw.expand(1, 1, -1) if draw.dim() == 1 else draw
        self.kv_heads, self.full = kv_heads, slice(None)

    def new_cache(self):
        return None

    def forward(self, ids, cache, mask, want_probs=False):
        p = self.draw[:, :, None, : mask.shape[1]] * mask  # [L, H, Q, N]
        return torch.zeros(len(ids), 1), p / p.sum(-1, keepdim=True)


def run(draw, steps, start=0, kv_heads=1, **config):
    """A finished `Request` over `FixedAttention`; returns it."""
    request = Request(FixedAttention(draw, kv_heads), Config(**config), [0] * start)
    for c in steps:
        request.step([0] * c)
    return request


# The model


def hf_model(path):
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_match_transformers(tmp_path, shape):
    path = make_tiny_llama(tmp_path, **shape)
    ids = random_ids(200)
    with torch.no_grad():
        expected = hf_model(path)(torch.tensor([ids]), output_attentions=True)
    causal = torch.ones(200, 200, dtype=torch.bool).tril()
    model = DenseLlama(path)
    logits, probs = model.forward(ids, model.new_cache(), causal, want_probs=True)
    torch.testing.assert_close(logits, expected.logits[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(probs, torch.cat(expected.attentions), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("policy", ["sink-window", "h2o"])
def test_evicting_matches_transformers_with_the_mask(path, model, policy):
    """One masked transformers pass gives the logits of the whole replay."""
    ids, steps = random_ids(150), [40, 30, 30] + [1] * 50
    config = Config(policy, block_size=8, budget=32, buffer=16, sink=8, recent=8)
    result = replay(model, ids, steps, config)
    assert sum(map(len, result.evicted)) >= 10
    mask = torch.ones(150, 150, dtype=torch.bool).tril()
    done = 0
    for c, blocks in zip(steps, result.evicted):
        done += c
        for b in blocks:
            mask[done:, b * 8 : b * 8 + 8] = False
    hidden = torch.zeros(1, 1, 150, 150).masked_fill(~mask, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = hf_model(path)(torch.tensor([ids]), attention_mask=hidden).logits[0]
    torch.testing.assert_close(result.logits, expected, atol=1e-4, rtol=1e-4)


def test_double_precision_agrees(path, model):
    ids = random_ids(100)
    exact = replay(DenseLlama(path, torch.float64), ids, [100], Config())
    assert exact.logits.dtype == torch.float64
    single = replay(model, ids, [100], Config()).logits
    torch.testing.assert_close(single.double(), exact.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("steps, start", [([33, 47, 20], 0), ([1] * 100, 0), ([10, 50], 40)])
def test_chunks_compute_what_one_pass_does(model, steps, start):
    ids = random_ids(100)
    whole = replay(model, ids, [100], Config())
    parts = replay(model, ids, steps, Config(), start=start)
    torch.testing.assert_close(parts.logits, whole.logits[start:], atol=1e-4, rtol=1e-4)


# The fixture


def test_tiny_is_deterministic_by_seed(tmp_path):
    a, b, c = (make_tiny_llama(tmp_path / x, seed=s) for x, s in zip("abc", (1, 1, 2)))
    data = [(p / "model.safetensors").read_bytes() for p in (a, b, c)]
    assert data[0] == data[1] != data[2]
    bf16 = make_tiny_llama(tmp_path / "d", dtype="bfloat16")
    assert json.loads((bf16 / "config.json").read_text())["torch_dtype"] == "bfloat16"
    with pytest.raises(ValueError):
        make_tiny_llama(tmp_path / "e", head_dim=48)


@pytest.mark.parametrize("shape", SHAPES)
def test_tiny_attends_unevenly(tmp_path, shape):
    """Neither near-uniform nor saturated, and blocks come out distinct."""
    model = DenseLlama(make_tiny_llama(tmp_path, **shape))
    causal = torch.ones(300, 300, dtype=torch.bool).tril()
    _, probs = model.forward(random_ids(300), model.new_cache(), causal, want_probs=True)
    late = probs[:, :, 200:, :200]
    spread = late.log().std(-1).mean((1, 2))  # that of the logits, per layer
    assert (spread > 1.8).all() and (spread < 3.5).all()
    assert 0.1 < late.amax(-1).mean() < 0.5
    mass = late.sum((0, 1, 2)).unflatten(0, (-1, 8)).sum(1)
    assert mass.std() / mass.mean() > 0.1


def test_windows_are_masks_of_their_layers(tmp_path):
    """Whatever the mask says of other layers; their attention counts for nothing."""
    whole, windows = (
        DenseLlama(make_tiny_llama(tmp_path / str(size), windows=size and [size, 0])) for size in (None, 8)
    )
    assert windows.full == [1] and whole.full == [0, 1]
    ids, steps = random_ids(40), (25, 15)
    back = torch.arange(40)[:, None] - torch.arange(40)
    seen = torch.stack([(back >= 0) & (back < 8), (back >= 0) & (torch.arange(40) // 4 != 2)])
    caches, first = (whole.new_cache(), windows.new_cache()), 0
    for count in steps:
        rows, last = slice(first, first + count), first + count
        mask = seen[:, None, rows, :last].expand(-1, whole.heads, -1, -1)
        want, probs = whole.forward(ids[rows], caches[0], mask, want_probs=True)
        got, its_probs = windows.forward(ids[rows], caches[1], seen[1, rows, :last], want_probs=True)
        assert torch.equal(got, want) and torch.equal(its_probs, probs)
        first = last
    request = Request(windows, Config("h2o", 4))
    request.step(ids)
    alone = windows.forward(ids, windows.new_cache(), back >= 0, want_probs=True)[1][1]
    assert torch.allclose(request.sums[:, 0], alone[:, :, :4].double().sum((1, 2)).unflatten(0, (2, -1)).sum(1))


def test_tiny_tokenizer(path):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    assert tokenizer.encode("t5 t255  t17").ids == [5, 255, 17]
    assert tokenizer.decode([5, 255, 17]) == "t5 t255 t17"


# The choice of blocks


def test_sink_window_by_hand():
    """Blocks of 4, budget 4 blocks, trigger 6, sink block 0."""
    config = dict(block_size=4, budget=16, buffer=8, sink=3, recent=4)
    result = run([1] * 40, [1] * 40, policy="sink-window", **config).replay
    went = {n + 1: blocks for n, blocks in enumerate(result.evicted) if blocks}
    # The 25th token opens the 7th block; the 37th, with 3 gone, the 7th held one.
    assert went == {25: [1, 2, 3], 37: [4, 5, 6]}
    assert result.held[23] == [0, 1, 2, 3, 4, 5]
    assert result.held[24] == [0, 4, 5, 6]
    assert result.held[35] == [0, 4, 5, 6, 7, 8]
    assert result.held[36] == result.held[39] == [0, 7, 8, 9]
    assert [(d.step, d.n, d.candidates) for d in result.decisions] == [
        (24, 25, [1, 2, 3, 4]),
        (36, 37, [4, 5, 6, 7]),
    ]


def test_sink_window_prefill_chunk_ends_over_the_trigger():
    result = run([1] * 50, [30, 20], policy="sink-window", block_size=4, budget=16, buffer=8, sink=4).replay
    # 8 blocks after 30 tokens: 4 go. Then 0, 5, 6, 7 and 8 .. 12 are held: 5 go.
    assert result.evicted == [[1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert result.held == [[0, 5, 6, 7], [0, 10, 11, 12]]


def test_full_never_evicts():
    result = run([1] * 50, [50], policy="full", block_size=4, budget=4).replay
    assert result.held == [list(range(13))] and result.evicted == [[]]
    assert not result.decisions and margin(result) == math.inf


def chosen(importance, n, evicted=(), **config):
    values = dict(enumerate(importance))
    return select(values, n, set(evicted), Config(policy="h2o", block_size=4, **config))


def test_selection_trigger_and_budget():
    scores = [5, 1, 4, 2, 3]
    assert chosen(scores, 20, budget=20) is None  # 5 held, trigger 5
    assert chosen(scores, 20, budget=12, buffer=8) is None
    assert chosen(scores, 20, budget=12, buffer=4) == ([1, 3], [4, 2, 0])
    assert chosen(scores, 20, budget=9, buffer=1) == ([1, 3], [4, 2, 0])  # 3 and 3 blocks
    assert chosen(scores, 20, budget=12, sink=5) == ([3, 4], [2])  # sink: 0 and 1
    assert chosen(scores, 20, [1], budget=12) == ([3], [4, 2, 0])  # 4 held


def test_selection_protects_recent_tokens():
    scores = [5, 1, 4, 2, 3]
    assert chosen(scores, 20, budget=12, recent=1) == ([1, 3], [2, 0])
    assert chosen(scores, 20, budget=12, recent=4) == ([1, 3], [2, 0])
    assert chosen(scores, 20, budget=12, recent=5) == ([1, 2], [0])
    assert chosen(scores, 17, budget=12, recent=0) == ([1, 3], [2, 0])  # 4 is filling
    assert chosen(scores, 17, budget=12, recent=1) == ([1, 3], [2, 0])
    assert chosen(scores, 17, budget=12, recent=2) == ([1, 2], [0])
    assert chosen(scores, 20, budget=12, recent=16) == ([0], [])  # 2 wanted
    assert chosen(scores, 20, budget=12, recent=99) == ([], [])


def test_selection_breaks_ties_by_index():
    assert chosen([2, 1, 1, 1, 0], 20, budget=12, recent=4) == ([1, 2], [3, 0])


LAST = dict(policy="h2o", block_size=2, budget=4, buffer=2, accumulate="last", window=2)
DRAW = [1, 1, 3, 3, 1, 2, 1, 1, 1, 5, 1, 1]


@pytest.mark.parametrize("steps", [[1] * 11, [7, 4], [5, 2, 4], [3, 1, 3, 1, 3]])
def test_last_by_hand(steps):
    """Trigger 3 blocks: position 6 is one too many, then, with 2 gone, position 10.

    Queries 5 and 6 decide first; the keys they see draw 11 and 12 in all.
    Queries 9 and 10 decide next; without blocks 0 and 2 theirs draw 14 and 15.
    """
    first, second = run(DRAW, steps, **LAST).replay.decisions
    part = 1 / 11 + 1 / 12
    assert first.n == 7 and first.candidates == [0, 1, 2] and first.evicted == [0, 2]
    assert first.importance == pytest.approx({0: 2 * part, 1: 6 * part, 2: 3 * part, 3: 1 / 12})
    assert first.gap == pytest.approx(3 * part)
    assert first.relative_gap == pytest.approx(0.5)
    part = 1 / 14 + 1 / 15
    assert second.n == 11 and second.candidates == [1, 3, 4]
    assert second.importance == pytest.approx({1: 6 * part, 3: 2 * part, 4: 6 * part, 5: 1 / 15})
    assert second.evicted == [1, 3]  # 1 and 4 draw the same


@pytest.mark.parametrize("steps, queries", [([9], [7, 8]), ([5, 4], [7, 8]), ([6, 3], [5, 7, 8])])
def test_last_in_a_chunk_past_the_prediction(steps, queries):
    """Queries 5 and 6 are predicted to count; a chunk past them counts its last two."""
    (decision,) = run(DRAW, steps, **LAST).replay.decisions
    part = sum(1 / sum(DRAW[: p + 1]) for p in queries)
    assert decision.importance[1] == pytest.approx(6 * part)
    assert decision.importance[4] == pytest.approx(1 / sum(DRAW[:9]))  # from query 8
    assert decision.evicted == [0, 2, 3]


@pytest.mark.parametrize("heads", ["sum", "mean", "max"])
@pytest.mark.parametrize("layers", ["sum", "mean", "max"])
@pytest.mark.parametrize("accumulate", ["sum", "mean", "ema", "last"])
def test_first_decision_against_loops(model, accumulate, layers, heads):
    """The first decision's importance from one dense pass, one term at a time."""
    size, every, decay, window, start = 8, 3, 0.95, 20, 16
    ids, steps = random_ids(97), [30, 20] + [1] * 31
    config = Config(
        "h2o", size, budget=64, buffer=32, accumulate=accumulate, decay=decay,
        window=window, every=every, heads=heads, layers=layers,
    )  # fmt: skip
    (decision,) = replay(model, ids, steps, config, start=start).decisions
    assert decision.n == 97
    causal = torch.ones(97, 97, dtype=torch.bool).tril()
    probs = model.forward(ids, model.new_cache(), causal, want_probs=True)[1].double()
    queries = [p for p in range(start, 97) if p % every == 0]
    if accumulate == "last":
        queries = [p for p in queries if p > 96 - window]
    pick = {"sum": sum, "mean": fmean, "max": max}
    for b in (0, 3, 7, 11):
        tokens = range(b * size, b * size + size)
        by_head = []
        for g in range(2):
            total, first = 0.0, start
            for c in steps:
                by_layer = []
                for layer in range(2):
                    mass = 0.0
                    for i, p in enumerate(queries):
                        if first <= p < first + c:
                            weight = 1.0
                            if accumulate == "ema":
                                weight = (1 - decay) * decay ** (len(queries) - 1 - i)
                            rows = probs[layer, 2 * g : 2 * g + 2, p]
                            mass += weight * sum(rows[:, t].sum().item() for t in tokens)
                    by_layer.append(mass)
                total += pick[layers](by_layer)
                first += c
            by_head.append(total)
        value = pick[heads](by_head)
        if accumulate == "mean":
            value /= sum(sum(p >= t for p in queries) for t in tokens) / size
        assert decision.importance[b] == pytest.approx(value, rel=1e-4), b


# Whole replays


def test_eviction_shows_only_after_it(model):
    ids, steps = random_ids(120), [60] + [1] * 60
    full = replay(model, ids, steps, Config())
    config = Config("sink-window", block_size=8, budget=48, buffer=24, sink=8, recent=16)
    result = replay(model, ids, steps, config)
    first = result.decisions[0].n
    assert first == 73
    torch.testing.assert_close(result.logits[:first], full.logits[:first])
    assert ((result.logits - full.logits)[first:].abs().amax(1) > 1e-3).all()


def test_generate_is_replayed(model):
    prompt = random_ids(70)
    config = Config("h2o", block_size=8, budget=48, buffer=16, sink=8, recent=16)
    tokens, result = generate(model, prompt, [40, 30], 60, config)
    again = replay(model, prompt + tokens, [40, 30] + [1] * 59, config)
    assert len(tokens) == 60 and again.evicted == result.evicted
    assert again.logits[69:].argmax(1).tolist() == tokens
    assert 0 < margin(result) < math.inf
    assert margin(result) == min(d.relative_gap for d in result.decisions)
    for decision in result.decisions:
        kept = set(decision.candidates) - set(decision.evicted)
        low = max(decision.importance[b] for b in decision.evicted)
        assert decision.gap == min(decision.importance[b] for b in kept) - low
