"""Models some of whose layers have sliding windows: full attention layers lose blocks, windows stay vLLM's own."""

import logging
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import streaming
import test_async
import test_poison
import test_reach
import test_read
import test_serving_cache
import test_tokens
import torch
from engine import exactly, greedy, logprobs_of, random_prompt, random_requests
from oracle.heads import replay_heads
from oracle.model import DenseLlama
from oracle.tiny import make_tiny_llama
from oracle.tokens import replay_tokens
from parity import TOKEN_TIE, assert_like_oracle, assert_logprobs, oracle_config, steps_of, token_config
from parts import published
from vllm.exceptions import VLLMValidationError
from vllm.v1.core.block_pool import BlockPool

from vllm_evict.config import KVPolicyError
from vllm_evict.integration.engine.allocation import take_from_host
from vllm_evict.integration.engine.managers import FROM_HOST
from vllm_evict.integration.worker import layers

pytestmark = pytest.mark.minutes

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
    "scissorhands": {"name": "scissorhands", **BASE, "window": 48},
    "snapkv-whole": {"name": "snapkv", **BASE, "window": 24, "prompt": "whole"},
    "rkv": {"name": "rkv", **BASE, "window": 12, "mix": 0.5},
    "keydiff": {"name": "keydiff", **BASE},
}
CASES = [(layout, "h2o") for layout in LAYOUTS]
CASES += [("in-turn", name) for name in POLICIES if name != "h2o"] + [("two-full", "sink-window")]


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


def layers_of(group):
    """Numbers of the layers in one of vLLM's KV groups."""
    return [int(name.split(".")[2]) for name in group.layer_names]


def groups_with_holes(server):
    """Layers of the KV groups that may have holes, in order."""
    groups = server.scheduler.kv_cache_config.kv_cache_groups
    return [layers_of(groups[manager.kv_cache_group_id]) for manager in server.managers]


def assert_groups_like_oracle(dense, prompt, output, trace, policy, groups):
    """The same blocks evicted from each KV group after the same steps, and the same log-probabilities."""
    if len(groups) == 1:
        return assert_like_oracle(dense, prompt, output, trace, policy)
    heads = torch.zeros(len(groups), dense.layers, dense.kv_heads, dtype=torch.bool)
    for group, its in enumerate(groups):
        heads[group, its] = True
    tokens, config = [*prompt, *output.outputs[0].token_ids], oracle_config(policy, prompt, BLOCK)
    each, steps = [(config, each) for each in heads], steps_of(trace, tokens)
    replays = replay_heads(dense, tokens, steps, each, trace.start, settled=trace.settled)
    for got, want in zip(trace.groups, replays, strict=True):
        assert got.evicted[:-1] == want.evicted[: len(trace.steps) - 1]
    assert_logprobs(output, prompt, trace, replays[0].logits)
    return sum(len(blocks) for group in trace.groups for blocks in group.evicted)


@pytest.mark.oracle("sliding windows")
@pytest.mark.both_runners("in-turn-h2o")
@pytest.mark.parametrize("layout, name", CASES)
def test_evictions_and_logprobs_match_the_dense_oracle(engine, models, layout, name):
    """Two requests in one batch, prompts longer and shorter than a chunk, decoded past decisions."""
    check_like_oracle(engine, models(layout), POLICIES[name], *LAYOUTS[layout])


def check_like_oracle(engine, model, policy, windows, groups):
    server = engine(policy, model=model, max_num_batched_tokens=192)
    assert [layers_of(group) for group in server.scheduler.kv_cache_config.kv_cache_groups] == groups
    full = groups_with_holes(server)
    assert full == [group for group in groups if not windows[group[0]]]
    requests = random_requests((500, 80), (150, 120))
    outputs, traces = server.traced(requests)
    dense = DenseLlama(model)
    for (prompt, _), output, trace in zip(requests, outputs, traces):
        assert assert_groups_like_oracle(dense, prompt, output, trace, policy, full) > 2
    server.assert_nothing_left()


#: Three layers that see all, in two groups, and two with a window in one.
MIXED = [0, WINDOW, 0, WINDOW, 0]


@pytest.mark.both_runners("order0")
@pytest.mark.parametrize("order", [[0, 2, 1], [2, 1, 0]])
def test_groups_may_come_in_any_order(engine, tmp_path, monkeypatch, order):
    """With windows between groups that may have holes, too: plans, reports, tables and views are told apart."""
    make = layers._get_kv_cache_groups_uniform_page_size

    def reordered(specs):
        groups = make(specs)
        return [groups[number] for number in order]

    for module in (sys.modules[make.__module__], layers):
        monkeypatch.setattr(module, make.__name__, reordered)
    model = make_tiny_llama(tmp_path / "model", layers=len(MIXED), windows=MIXED)
    groups = [[[0, 4], [2], [1, 3]][number] for number in order]
    check_like_oracle(engine, model, POLICIES["h2o"], MIXED, groups)


@pytest.mark.oracle("sliding windows")
def test_tokens_of_each_head_match_the_dense_oracle(engine, tmp_path):
    """With `granularity: token`, each KV head of each full attention layer keeps its own."""
    windows, _ = LAYOUTS["two-full"]
    model = make_tiny_llama(tmp_path / "model", layers=len(windows), windows=windows, vocab=test_tokens.VOCAB)
    policy = {"name": "h2o", **BASE, "budget": 224, "granularity": "token"}
    server, dense = engine(policy, model=model, max_num_batched_tokens=192), DenseLlama(model)
    requests = [
        (test_tokens.prompt_of(length, test_tokens.SEED + seed), {"max_tokens": tokens, "logprobs": 1})
        for seed, (length, tokens) in enumerate([(500, 100), (90, 260)])
    ]
    outputs, traces = server.traced(requests)
    heads = torch.zeros(len(server.managers), dense.layers, dense.kv_heads, dtype=torch.bool)
    for group, its in enumerate(groups_with_holes(server)):
        heads[group, its] = True
    for (prompt, _), output, trace in zip(requests, outputs, traces):
        tokens = [*prompt, *output.outputs[0].token_ids]
        replays = replay_tokens(dense, tokens, trace.steps, [(token_config(policy), its) for its in heads], trace.start)
        for got, want in zip(trace.groups, replays, strict=True):
            assert got.evicted[:-1] == want.replay.evicted[: len(trace.steps) - 1] and any(got.evicted)
            assert want.closest > TOKEN_TIE, "rounding could choose another token: take another prompt"
        assert_logprobs(output, prompt, trace, replays[0].replay.logits)
    assert sum(map(bool, traces[0].evicted)) > 1, "tokens that went once are no candidates later"
    server.assert_nothing_left()


@pytest.mark.oracle("sliding windows")
@pytest.mark.both_runners("in-turn")
@pytest.mark.parametrize("layout", ["in-turn", "windows-first"])
def test_layers_reach_blocks_of_the_host(engine, models, poisoned, layout):
    test_reach.check_classes(engine, DenseLlama(models(layout)), beside=3, model=models(layout))


@pytest.mark.both_runners("windows-first-0")
@pytest.mark.parametrize(
    "layout, retained",
    [("windows-first", 0), ("windows-first", BLOCK), ("full-first", 0), ("in-turn", 0), ("padded", 0)],
)
def test_prefixes_on_the_host_are_hits(engine, models, poisoned, layout, retained):
    """With their windows, which leave a small pool as early as they do. `retained`: tokens after which vLLM keeps a
    window in the prefix cache; 0: at the end of a prompt."""
    test_reach.check_agents(engine, 45, model=models(layout), prefix_cache_retention_interval=retained)


#: Place -> tokens of the prefix that ends there, in whole blocks.
PARTS = {"prompt": 224, "answer": 352, "hit": 224}


@pytest.mark.parametrize("place", PARTS)
def test_a_prefix_on_the_host_is_a_hit_where_prompts_part(engine, models, poisoned, place):
    """At the end of a prompt, at that of an answer, and where a request has hit, once others have taken the pool."""
    options = dict(model=models("windows-first"), max_model_len=1024, max_num_batched_tokens=192, blocks=60)
    options |= dict(enable_prefix_caching=True, prefix_cache_retention_interval=BLOCK)
    server = engine({**test_reach.REACH, "when": "pressure", "admit": True}, **options)
    prompt = random_prompt(230)
    following = [[*prompt, *random_prompt(170, seed)] for seed in (1, 2, 3)]
    if place == "hit":
        hits = [server.generate([each], max_tokens=1)[0].num_cached_tokens for each in following[:2]]
        assert hits == [0, PARTS["hit"]]
    else:
        (output,) = server.generate([prompt], max_tokens=130)
        answer = list(output.outputs[0].token_ids)
        following = [[*prompt, *answer[: 0 if place == "prompt" else None], *random_prompt(170, 3)]]
    for seed in (4, 5):
        server.generate([random_prompt(900, seed)], max_tokens=1)
    (output,) = server.generate(following[-1:], max_tokens=1)
    assert output.num_cached_tokens == PARTS[place] and output.kv_usage.host_hit_blocks
    test_reach.assert_nothing_left(server)


def test_new_blocks_in_the_place_of_host_blocks_are_no_hits_of_other_groups():
    """The next free block of a pool may be one that the request hits."""
    pool, tables = BlockPool(4, True, BLOCK), []
    hit = pool.free_block_queue.get_all_free_blocks()[0]
    coordinator = SimpleNamespace(allocate_new_computed_blocks=lambda _, blocks: tables.extend(blocks))
    take_from_host.on(coordinator, pool)
    coordinator.allocate_new_computed_blocks("first", ([FROM_HOST], [hit]))
    (new,), (kept,) = tables
    assert kept is hit and new not in (hit, FROM_HOST) and pool.get_num_free_blocks() == 3


def test_windows_of_more_layers_than_full_attention_stay_on_the_device(engine, tmp_path, poisoned):
    """A host block has no place for their fourth layer. While the pool has the window a prefix is a hit."""
    windows = [WINDOW, WINDOW, WINDOW, 0, WINDOW, 0, 0]
    model = make_tiny_llama(tmp_path / "model", layers=len(windows), windows=windows)
    test_reach.check_agents(engine, 45, whole=False, model=model)


@pytest.mark.parametrize("when", ["budget", "pressure"])
def test_a_prefix_on_the_host_starves_no_request(engine, models, when):
    """In the smallest pool, and in larger ones that hold the prefix, but not the windows beside it."""
    options = dict(model=models("windows-first"), max_model_len=1024, max_num_batched_tokens=64)
    for blocks in (28, 33, 38, 43):
        server = engine({**test_reach.REACH, "when": when}, blocks=blocks, enable_prefix_caching=True, **options)
        for turn in range(3):
            server.llm.llm_engine.add_request(str(turn), {"prompt_token_ids": random_prompt(960)}, greedy(1))
            done: list = []
            for _ in range(100):
                done += [output for output in server.llm.llm_engine.step() if output.finished]
            assert [output.num_cached_tokens for output in done] == [928 * (turn > 0)]
        test_reach.assert_nothing_left(server)


@pytest.mark.both_runners("prompts")
@pytest.mark.parametrize("read_prompts", test_read.OF_PROMPTS.values(), ids=test_read.OF_PROMPTS)
def test_layers_read_their_best_blocks(engine, models, poisoned, read_prompts):
    model = models("in-turn")
    test_read.check_classes(engine, DenseLlama(model), read_prompts=read_prompts, model=model)


def test_prompts_that_are_shorter_change_no_bit(engine, models):
    test_read.check_shorter(engine, model=models("in-turn"))


def test_several_groups_of_full_attention_have_no_host(engine, models):
    with pytest.raises(KVPolicyError, match="evict: host and 2 KV groups of full attention layers: set evict: drop"):
        engine(test_reach.REACH, model=models("two-full"))


def test_with_a_step_in_flight(async_engine, models):
    test_async.check_late_decisions(async_engine, models("in-turn"), test_async.POLICIES["h2o"])


@pytest.mark.both_runners
def test_no_poison_with_steps_in_flight(async_engine, models, monkeypatch):
    test_async.check_poison_with_steps_in_flight(async_engine, models("in-turn"), monkeypatch, "h2o", False, 28)


def test_a_request_that_pauses_keeps_its_holes(engine, models):
    """It comes back with a row made anew, of what the runner knows of all KV groups."""
    test_serving_cache.check_pauses(engine, models("in-turn"), POLICIES["h2o"])


def test_turns_of_a_session_go_on_with_holes_and_scores(engine, models):
    model, policy = models("in-turn"), streaming.POLICIES["h2o"]
    server, dense = engine(policy, model=model, max_num_batched_tokens=streaming.CHUNK), DenseLlama(model)
    sessions = streaming.Sessions(server)
    streaming.talk(sessions, streaming.TURNS)
    tokens = sessions.tokens("s")
    choices, logits = streaming.replay(dense, sessions, "s", tokens, [(0, policy)], random_prompt(150))
    assert len(choices) >= 4 and all(got == want for got, want in choices.values()), choices
    turns = [length for length, _ in streaming.TURNS]
    streaming.assert_like_oracle(sessions, "s", dense, logits, tokens, turns)
    sessions.end("s")


PREFIX = random_prompt(300, 7)
PROMPTS = [random_prompt(length, length) for length in (500, 40)] + [
    PREFIX + random_prompt(90, seed) for seed in (1, 2)
]


@pytest.mark.both_runners("windows-first-prefix-cache")
@pytest.mark.parametrize(
    "layout, caching",
    [*((layout, "prefix-cache") for layout in ("windows-first", "padded", "two-full")), ("in-turn", "no-prefix-cache")],
)
def test_full_is_stock_to_the_byte(engine, models, layout, caching):
    """Twice the same prompts: with prefix caching, the same hits; windows need the end of a prefix, others all of it.
    So are requests of another policy that lack nothing."""
    caching = test_poison.CACHING[caching]
    options = dict(model=models(layout), max_num_batched_tokens=192, enable_prefix_caching=caching)
    subjects = (
        engine(**options),
        engine({"name": "full"}, **options),
        engine({"name": "h2o", "budget": 1024}, **options),
    )
    rounds = [[exactly(subject.generate(PROMPTS, max_tokens=16, logprobs=0)) for subject in subjects] for _ in range(2)]
    for stock, *policies in rounds:
        assert policies == [stock] * 2
    assert any(cached for _, _, cached in rounds[1][0]) == caching
    for subject in subjects[1:]:
        subject.assert_nothing_left()


def test_the_start_up_line_says_which_groups_are_whose(engine, models, monkeypatch):
    for layout, what in {
        "windows-first": "; 1 KV group of 1 layers, beside 3 with sliding windows, managed by vLLM",
        "two-full": "; 2 KV groups of 2 layers, beside 1 with sliding windows, managed by vLLM",
    }.items():
        lines = []
        monkeypatch.setattr(logging.getLogger("vllm.evict"), "info", lines.append)
        engine(POLICIES["h2o"], model=models(layout))
        assert lines[-1].startswith("KV policy h2o") and f"{what}; the pool has " in lines[-1]


# --- prefix caching --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout, name",
    [("windows-first", "h2o"), ("two-full", "h2o"), ("in-turn", "sink-window")],
)
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
    "h2o-two-full": ("two-full", *test_poison.SERVERS["h2o"][:2], 80),
    "h2o-pressure": ("in-turn", *test_poison.SERVERS["h2o-pressure"][:2], 44),
    "rkv": ("padded", *test_poison.SERVERS["rkv"][:2], 56),
}


#: Without a prefix cache all that goes is poisoned, with one what was never published: under pressure nothing.
CROWDED = [("h2o-pressure", "no-prefix-cache"), *((name, "prefix-cache") for name in ("h2o", "h2o-two-full", "rkv"))]


@pytest.mark.nightly(push=("h2o-prefix-cache",))
@pytest.mark.parametrize("name, caching", CROWDED)
def test_freed_blocks_are_never_read_and_all_come_back(engine, models, monkeypatch, name, caching):
    """Requests that come, go and are preempted; what a policy frees may be a window's next, and is clean by then."""
    layout, *rest = CROWDS[name]
    test_poison.check_crowd(engine, models(layout), monkeypatch, *rest, caching)


def in_flight(tokens):
    return -(-tokens // BLOCK) + 1


#: Most blocks of a group with windows, and of one that may have holes beside its bound, with chunks of 256 tokens.
OF_A_WINDOW, CHUNK = in_flight(WINDOW - 1 + 256), in_flight(256)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_pool_is_planned_with_both_bounds(engine, models, layout):
    """vLLM's line on maximum concurrency: policies bound groups with holes, windows theirs."""
    windows, groups = LAYOUTS[layout]
    with_windows = sum(windows[group[0]] > 0 for group in groups)
    server = engine({"name": "sink-window", "budget": 128, "sink": 32}, model=models(layout), blocks=200)
    each = (len(groups) - with_windows) * (4 + CHUNK) + with_windows * OF_A_WINDOW
    # What is set aside beside the pool is told in its blocks.
    tensors = server.scheduler.kv_cache_config.kv_cache_tensors
    assert layers.block_bytes(server.worker.kv_evict, server.worker.get_kv_cache_spec()) * 200 == tensors[0].size
    assert server.core.vllm_config.cache_config.kv_cache_max_concurrency == pytest.approx(200 / each)


@pytest.mark.parametrize("layout", ["windows-first", "two-full"])
def test_a_request_longer_than_the_pool_is_served(engine, models, layout):
    """Nobody holds more than the bounds say, and each block comes back."""
    windows, groups = LAYOUTS[layout]
    with_windows = sum(windows[group[0]] > 0 for group in groups)
    most = (len(groups) - with_windows) * (6 + CHUNK) + with_windows * OF_A_WINDOW
    server, held = (
        engine(
            {"name": "h2o", "budget": 128, "buffer": 64, "sink": 32, "recent": 32},
            model=models(layout),
            blocks=most + 1,
        ),
        [],
    )
    (output,), (trace,) = server.traced(
        [(random_prompt(1700), {"max_tokens": 100})], lambda s: held.append(len(s.held_blocks()))
    )
    assert len(output.outputs[0].token_ids) == 100 and not trace.restarts
    assert most / len(groups) < 1800 // BLOCK and max(held) <= most
    assert output.kv_usage.evicted_blocks == sum(len(blocks) for group in trace.groups for blocks in group.evicted)
    server.assert_nothing_left()
    # Beside windows a request that keeps everything gets what they leave, or is told what that is.
    each = (most - with_windows * OF_A_WINDOW) // (len(groups) - with_windows) * BLOCK
    fits, above = ({"max_tokens": 8 + more, "extra_args": {"kv_policy": "full"}} for more in (0, 1))
    with pytest.raises(VLLMValidationError, match=f"grow to {each + 1} tokens; expected at most {each}, .* windows or"):
        server.generate([random_prompt(each - 8)], **above)
    (whole,) = server.generate([random_prompt(each - 8)], **fits)
    assert (whole.kv_usage.policy, whole.kv_usage.evicted_blocks) == ("full", 0)
    server.assert_nothing_left()


@pytest.mark.parametrize("layout, retained", [("two-full", None), ("in-turn", 0)], ids=["all-windows", "last-window"])
def test_a_long_cached_prefix_does_not_starve_its_request(engine, models, layout, retained):
    """A hit, a chunk and windows would take more than the pool has. A shorter hit needs other blocks of windows;
    where vLLM has not retained these, there is none."""
    windows, groups = LAYOUTS[layout]
    with_windows = sum(windows[group[0]] > 0 for group in groups)
    most = (len(groups) - with_windows) * (10 + CHUNK) + with_windows * OF_A_WINDOW
    policy = {"name": "sink-window", "budget": 320, "sink": 32}
    server = engine(policy, model=models(layout), blocks=most + 1, prefix_cache_retention_interval=retained)
    prompt, steps = random_prompt(1024), []
    server.generate([prompt[:512]], max_tokens=1)

    def not_for_ever(server):
        steps.append(None)
        assert len(steps) < 40, "the request was never scheduled"

    (output,), (trace,) = server.traced([(prompt, {"max_tokens": 4, "logprobs": 1})], not_for_ever)
    assert output.num_cached_tokens == trace.start == (320 if retained is None else 0)
    full = groups_with_holes(server)
    assert assert_groups_like_oracle(DenseLlama(models(layout)), prompt, output, trace, policy, full) > 10
    server.assert_nothing_left()


def test_a_prefix_that_fits_is_used_whole(engine, models):
    """A request that fits even whole, beside what its windows hold at most, waits for nothing."""
    small = dict(blocks=26, max_model_len=416)
    server = engine({"name": "sink-window", "budget": 256, "sink": 32}, model=models("in-turn"), **small)
    prompt = random_prompt(330)
    for cached in (0, 320):
        (output,) = server.generate([prompt], max_tokens=60)
        assert output.num_cached_tokens == cached
    assert output.kv_usage.evicted_blocks > 0


def test_under_pressure_room_is_made_for_windows_too(engine, models):
    """A request whose full attention layers would find room, but its three windows not, is begun at once."""
    policy = {"name": "sink-window", "when": "pressure", "admit": True, "budget": 128, "sink": 32}
    small = dict(blocks=37, max_model_len=640, max_num_batched_tokens=64)
    server = engine(policy, model=models("windows-first"), **small)
    server.add(random_prompt(590), "first", max_tokens=30)
    for _ in range(14):
        server.llm.llm_engine.step()
    assert 5 < server.free_blocks < 20
    server.add(random_prompt(150, 1), "second", max_tokens=4)
    server.llm.llm_engine.step()
    assert len(server.scheduler.running) == 2
    assert server.run()["first"].kv_usage.evicted_blocks > 0
    server.assert_nothing_left()


@pytest.mark.parametrize("layout", ["windows-first", "two-full"])
def test_under_pressure_windows_get_their_blocks_too(engine, models, layout):
    """All that an allocation lacks is freed, of all groups: nobody is preempted where floors fit."""
    policy = {"name": "h2o", "when": "pressure", "admit": True, "budget": 128, "buffer": 32, "sink": 32, "recent": 32}
    server = engine(policy, model=models(layout), blocks=120, max_model_len=1024, max_num_batched_tokens=96)
    for seed in range(8):
        server.add(random_prompt(150 + 25 * seed, seed), max_tokens=100)
    done = server.run()
    assert len(done) == 8 and server.metrics()["vllm:num_preemptions"] == 0
    assert sum(output.kv_usage.evicted_blocks for output in done.values()) > 10
    server.assert_nothing_left()
