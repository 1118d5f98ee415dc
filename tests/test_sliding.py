"""Models some of whose layers have sliding windows: full attention layers lose blocks, windows stay vLLM's own."""

import numpy as np
import pytest
import test_poison
import torch
from engine import V2, logprobs_of, random_prompt
from oracle.heads import replay_heads
from oracle.model import DenseLlama
from oracle.tiny import make_tiny_llama
from parity import assert_like_oracle, assert_logprobs, oracle_config

BLOCK, WINDOW = 32, 48
#: Name -> the window of each layer, 0 for none, and the KV groups that vLLM makes of them: layers of each.
LAYOUTS = {
    "windows-first": ([WINDOW, WINDOW, WINDOW, 0], [[0], [1], [2], [3]]),
    "full-first": ([0, WINDOW, WINDOW], [[0], [1], [2]]),
    "in-turn": ([WINDOW, 0, WINDOW, 0], [[0, 2], [1, 3]]),
    "padded": ([WINDOW, 0, WINDOW, WINDOW, 0], [[0, 3], [2], [1, 4]]),
    "two-full": ([WINDOW, 0, 0], [[0], [1], [2]]),
    "two-full-first": ([0, WINDOW, 0], [[0], [2], [1]]),
}
BASE = {"budget": 192, "buffer": 64, "sink": 32, "recent": 64}
POLICIES = {
    "sink-window": {"name": "sink-window", **BASE},
    "h2o": {"name": "h2o", **BASE},
    "h2o-max": {"name": "h2o", **BASE, "heads": "max", "layers": "max"},
    "scissorhands": {"name": "scissorhands", **BASE, "window": 48},
    "snapkv": {"name": "snapkv", **BASE, "window": 24, "kernel": 5},
    "rkv": {"name": "rkv", **BASE, "window": 12, "mix": 0.5},
    "keydiff": {"name": "keydiff", **BASE},
    "pagedeviction": {"name": "pagedeviction", "budget": 192},
}
CASES = [(layout, name) for layout in LAYOUTS for name in ("sink-window", "h2o")]
CASES += [("in-turn", name) for name in POLICIES if name not in ("sink-window", "h2o")]
if V2:
    CASES = [("windows-first", "h2o"), ("in-turn", "sink-window"), ("two-full", "h2o"), ("in-turn", "keydiff")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directory of a tiny Llama with a layout of windows."""
    made = {}

    def make(layout, **kwargs):
        if layout not in made:
            folder = tmp_path_factory.mktemp("sliding") / layout
            windows, _ = LAYOUTS[layout]
            made[layout] = make_tiny_llama(folder, layers=len(windows), windows=windows, **kwargs)
        return made[layout]

    return make


def groups_with_holes(server):
    """Layers of the KV groups that may have holes, in order."""
    groups = server.scheduler.kv_cache_config.kv_cache_groups
    names = [groups[manager.kv_cache_group_id].layer_names for manager in server.managers]
    return [[int(name.split(".")[2]) for name in group] for group in names]


def assert_groups_like_oracle(dense, prompt, output, trace, policy, groups):
    """The same blocks evicted from each KV group after the same steps, and the same log-probabilities."""
    if len(groups) == 1:
        return assert_like_oracle(dense, prompt, output, trace, policy)
    heads = torch.zeros(len(groups), dense.layers, dense.kv_heads, dtype=torch.bool)
    for group, layers in enumerate(groups):
        heads[group, layers] = True
    tokens, config = [*prompt, *output.outputs[0].token_ids], oracle_config(policy, prompt, BLOCK)
    replays = replay_heads(dense, tokens, trace.steps, [(config, each) for each in heads], trace.start)
    for got, want in zip(trace.groups, replays, strict=True):
        assert got.evicted[:-1] == want.evicted[: len(trace.steps) - 1]
    assert_logprobs(output, prompt, trace, replays[0].logits)
    return sum(len(blocks) for group in trace.groups for blocks in group.evicted)


@pytest.mark.parametrize("layout, name", CASES)
def test_evictions_and_logprobs_match_the_dense_oracle(engine, models, layout, name):
    """Three requests in one batch, prompts longer and shorter than a chunk, decoded past several decisions."""
    model, policy, (windows, groups) = models(layout), POLICIES[name], LAYOUTS[layout]
    server = engine(policy, model=model, max_num_batched_tokens=192)
    given = [[int(name.split(".")[2]) for name in group.layer_names] for group in server.scheduler.kv_cache_config.kv_cache_groups]
    assert given == groups
    assert groups_with_holes(server) == [group for group in groups if not windows[group[0]]]
    requests = [
        (random_prompt(length, seed), {"max_tokens": tokens, "logprobs": 1})
        for seed, (length, tokens) in enumerate([(500, 80), (90, 220), (333, 64)])
    ]
    outputs, traces = server.traced(requests)
    dense, full = DenseLlama(model), groups_with_holes(server)
    for (prompt, _), output, trace in zip(requests, outputs, traces):
        assert assert_groups_like_oracle(dense, prompt, output, trace, policy, full) > 2
    server.assert_nothing_left()


def exactly(outputs):
    return [(output.outputs[0].token_ids, logprobs_of(output).tolist(), output.num_cached_tokens) for output in outputs]


PREFIX = random_prompt(300, 7)
PROMPTS = [random_prompt(length, length) for length in (500, 40)] + [PREFIX + random_prompt(90, seed) for seed in (1, 2)]


@pytest.mark.parametrize("caching", [True, False], ids=["prefix-cache", "no-prefix-cache"])
@pytest.mark.parametrize("layout", ["windows-first"] if V2 else LAYOUTS)
def test_full_is_stock_to_the_byte(engine, models, layout, caching):
    """Twice the same prompts: with prefix caching, the same hits; windows need the end of a prefix, others all of it.
    So are requests of another policy that lack nothing."""
    options = dict(model=models(layout), max_num_batched_tokens=192, enable_prefix_caching=caching)
    subjects = engine(**options), engine({"name": "full"}, **options), engine({"name": "h2o", "budget": 1024}, **options)
    rounds = [[exactly(subject.generate(PROMPTS, max_tokens=40, logprobs=0)) for subject in subjects] for _ in range(2)]
    for stock, *policies in rounds:
        assert policies == [stock] * 2
    assert any(cached for _, _, cached in rounds[1][0]) == caching
    for subject in subjects[1:]:
        subject.assert_nothing_left()


# --- prefix caching --------------------------------------------------------------------------------------------------


def published(server, group):
    """Logical blocks of the only request under whose hash something can be hit in a KV group."""
    (request,) = server.scheduler.requests.values()
    hashes = enumerate(request.block_hashes)
    return [block for block, hashed in hashes if server.pool.get_cached_block(hashed, [group])]


@pytest.mark.parametrize("name", ["h2o"] if V2 else ["sink-window", "h2o"])
@pytest.mark.parametrize("layout", ["in-turn"] if V2 else ["windows-first", "full-first", "in-turn", "two-full"])
def test_nothing_of_a_reduced_context_is_published(engine, models, layout, name):
    """Windows, too, hold what was computed from layers that lacked blocks. Somebody else's full attention blocks under
    the same hashes must not be joined by these."""
    model = models(layout)
    server = engine({**POLICIES[name], "allow": ["full"]}, model=model, max_num_batched_tokens=96)
    prompt, seen = random_prompt(600), []

    def look(server):
        if server.scheduler.requests:
            ((req_id, resident),) = server.scheduler.residents.items()
            seen.append((resident.pure_tokens, server.scheduler.requests[req_id].num_computed_tokens))
            for group, manager in enumerate(server.all_managers if resident.pure_tokens else ()):
                blocks, end = published(server, group), resident.pure_tokens // BLOCK
                # Of a window as many as reach back as far as the next query sees.
                assert blocks == list(range(0 if manager in server.managers else end - 2, end))

    server.add(prompt, max_tokens=40)
    server.run(look)
    pure, computed = seen[-1]
    assert 256 < pure < 400 and pure % BLOCK == 0 and computed > 600
    # Who keeps everything hits what is pure, computes the rest and publishes it; the next one hits all of that.
    everything = {"max_tokens": 8, "logprobs": 0, "extra_args": {"kv_policy": "full"}}
    dense = DenseLlama(model)
    for cached in (pure, 576):
        (output,) = server.generate([prompt], **everything)
        assert output.num_cached_tokens == cached
        assert_like_dense(dense, prompt, output)


def assert_like_dense(dense, prompt, output):
    """The log-probabilities of a model that lacks nothing."""
    ids = [*prompt, *output.outputs[0].token_ids]
    logits, _ = dense.forward(ids, dense.new_cache(), torch.ones(len(ids), len(ids)).tril().bool())
    logprobs = torch.log_softmax(logits.double(), -1)[len(prompt) - 1 : -1]
    np.testing.assert_allclose(logprobs_of(output), logprobs[range(len(logprobs)), ids[len(prompt) :]], atol=2e-3)


# --- the pool --------------------------------------------------------------------------------------------------------

MASS = test_poison.MASS
#: Layout, the server's policy, what budgets requests ask for by policy, blocks of the pool.
CROWDS = {
    "h2o": ("in-turn", *test_poison.SERVERS["h2o"][:2], 44),
    "h2o-full-first": ("full-first", *test_poison.SERVERS["h2o"][:2], 56),
    "h2o-two-full": ("two-full", *test_poison.SERVERS["h2o"][:2], 80),
    "sink-window": ("windows-first", *test_poison.SERVERS["sink-window"][:2], 44),
    "h2o-pressure": ("in-turn", *test_poison.SERVERS["h2o-pressure"][:2], 44),
    "rkv": ("padded", *test_poison.SERVERS["rkv"][:2], 56),
}


CROWDED = [(name, caching) for name in CROWDS for caching in test_poison.CACHING]
CROWDED.remove(("h2o-pressure", "prefix-cache"))  # all that goes is published, so nothing is poisoned


@pytest.mark.parametrize("name, caching", [("h2o", "prefix-cache")] if V2 else CROWDED)
def test_freed_blocks_are_never_read_and_all_come_back(engine, models, monkeypatch, name, caching):
    """Requests that come, go and are preempted; what a policy frees may be a window's next, and is clean by then."""
    layout, policy, budgets, blocks = CROWDS[name]
    test_poison.check_crowd(engine, models(layout), monkeypatch, policy, budgets, blocks, caching)
