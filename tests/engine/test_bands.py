"""Bands of layers and of heads: KV groups whose budgets differ, are shared, or whose policies do."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine import exactly, logprobs_of, random_prompt, random_requests
from oracle.heads import replay_heads
from oracle.replay import Config
from oracle.tiny import make_tiny_llama
from parity import assert_logprobs
from parts import sums_of

from vllm_evict.config import KVPolicyConfig, KVPolicyError
from vllm_evict.core.blocks import RequestBlocks
from vllm_evict.core.mechanisms import Profiles
from vllm_evict.core.mechanisms.pressure import Offered
from vllm_evict.core.plan import Report

BLOCK = 32
SIZES = {"budget": 320, "buffer": 64, "sink": 32, "recent": 64}
BASE = {**SIZES, "window": 24, "kernel": 3}
#: Policies under their papers' names, and the same allocators with other scores.
PYRAMIDS = {
    "pyramidkv": {"name": "pyramidkv", **BASE},
    "h2o": {"name": "h2o", **SIZES, "allocate": "pyramid"},
    "keydiff": {"name": "keydiff", **SIZES, "allocate": "pyramid"},
}
ADAS = {
    "adakv": {"name": "adakv", **BASE},
    "tova": {"name": "tova", **SIZES, "allocate": "ada"},
    "h2o": {"name": "h2o", **SIZES, "allocate": "ada"},
    "keydiff": {"name": "keydiff", **SIZES, "allocate": "ada"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("bands") / "model", layers=4, heads=8, kv_heads=4)


def test_budgets_fall_with_depth_around_their_mean():
    """3 blocks of sinks and recent tokens and one to choose are the least; the rest falls evenly, layer by layer, from
    1.95 of its mean to 0.05, and a band has what its layers have on average."""
    config = KVPolicyConfig.parse({"name": "pyramidkv", **BASE, "budget": 64 * BLOCK, "buffer": 0})
    layers = np.linspace(1.95, 0.05, 32)

    def budgets(config, layers, tokens=5000):
        return [part.limits(BLOCK, tokens).budget for part in config.for_model(layers, 8, 1).classes.values()]

    assert budgets(config, 32) == [3 + round(61 * share) for share in layers.reshape(4, 8).mean(1)]
    assert sum(budgets(config, 32)) == pytest.approx(4 * 64, abs=2)
    assert budgets(config, 4) == [3 + round(61 * share) for share in (1.95, 0.05 + 1.9 * 2 / 3, 0.05 + 1.9 / 3, 0.05)]
    # Bands of one, one and two layers take as much memory each.
    third = 1.9 / 3
    uneven = [1 + third * (3.5 / 3 - middle) for middle in (0, 1, 2.5)]
    assert budgets(config.replace(bands=3), 4) == [3 + round(61 * share) for share in uneven]
    assert set(budgets(config.replace(beta=1.0), 32)) == {64}
    # A ratio is of the request's prompt.
    config = KVPolicyConfig.parse({"name": "pyramidkv", **BASE, "budget": 0.5, "bands": 2})
    assert budgets(config, 32, 4096) == [3 + round(61 * share) for share in layers.reshape(2, 16).mean(1)]
    assert all(budget >= 4 for budget in budgets(config, 32, 10))
    # A request's own budget is dealt out by the layers of the model as well.
    asked = config.for_model(32, 8, 1).for_request({"kv_budget": 0.25}, 4096, BLOCK)
    assert [part.limits(BLOCK, 4096).budget for part in asked.classes.values()] == [
        3 + round(29 * share) for share in layers.reshape(2, 16).mean(1)
    ]


def test_bands_that_a_model_does_not_have_are_refused():
    config = KVPolicyConfig.parse({"name": "pyramidkv", "bands": 5})
    with pytest.raises(KVPolicyError, match="bands: 'pyramidkv' can't make 5 of 4 layers, at most 4"):
        config.for_model(4, 4, 1)
    config = KVPolicyConfig.parse({"name": "adakv", "bands": 4})
    with pytest.raises(KVPolicyError, match="bands: 'adakv' can't make 4 of 2 KV heads on each rank, at most 2"):
        config.for_model(4, 4, 2)
    assert KVPolicyConfig.parse("adakv").for_model(4, 2, 1).bands == 2
    config = KVPolicyConfig.parse({"name": "h2o", "allocate": "ada", "bands": 4})
    with pytest.raises(KVPolicyError, match="bands: 'h2o' can't make 4 of 2 KV heads on each rank, at most 2"):
        config.for_model(4, 4, 2)


@pytest.mark.parametrize(
    "policy, message",
    [
        ({"name": "h2o", "bands": 2}, "bands: it needs allocate: pyramid or ada"),
        ({"name": "h2o", "allocate": "ada", "beta": 2}, "beta: it needs allocate: pyramid"),
        ({"name": "h2o", "allocate": "pyramid", "floor": 0.5}, "floor: it needs allocate: ada"),
        ({"name": "h2o", "allocate": "heads"}, "allocate: input should be 'uniform', 'pyramid' or 'ada', not 'heads'"),
        ({"name": "sink-window", "allocate": "ada"}, "allocate: 'sink-window' has no scores that compare between"),
        ({"name": "full", "allocate": "ada"}, "allocate: 'full' has no scores that compare between"),
        ({"name": "kvzip", "allocate": "ada"}, "allocate: 'kvzip' repeats prompts in one KV group"),
        ({"name": "duo", "allocate": "ada"}, "allocate: 'duo' has an allocator of its own, 'gates'"),
        ({"name": "fastgen", "allocate": "ada"}, "allocate: 'fastgen' has an allocator of its own, 'heads'"),
        ({"name": "adakv", "allocate": "ada"}, "allocate: 'adakv' has an allocator of its own, 'ada'.*support it: h2o"),
        (
            {"name": "h2o", "allocate": "ada", "granularity": "token"},
            "granularity: token does not go with allocate: ada, which makes KV groups: use granularity: block",
        ),
        (
            {"name": "h2o", "allocate": "pyramid", "evict": "host", "host": "1GiB"},
            "evict: host does not go with allocate: pyramid, which makes KV groups: use evict: drop",
        ),
        (
            {"name": "keybound", "allocate": "ada", "read": 512},
            "read: 512 does not go with allocate: ada, which makes KV groups: leave read out",
        ),
        (
            {"name": "h2o", "budget": 512, "allocate": "ada", "context": 4096},
            "context: 4096 does not go with allocate: ada, which makes KV groups: leave context out",
        ),
        (
            {"name": "tova", "allocate": "ada", "allow": ["h2o"]},
            "allow: requests of a 'tova' server with allocate: ada may pick 'full' beside it, not 'h2o'",
        ),
        (
            {"name": "duo", "retrieval": {"name": "tova", "allocate": "ada"}, "pattern": ["01"], "gates": "made up"},
            "retrieval: got allocate: ada; heads are dealt to retrieval and streaming: leave it out",
        ),
    ],
)
def test_what_does_not_go_with_an_allocator_is_refused(policy, message):
    with pytest.raises(KVPolicyError, match=message):
        KVPolicyConfig.parse(policy)


def test_requests_keep_the_servers_allocator():
    """KV groups exist from the start, so a request runs the server's policy, with any smaller budget, or `full`."""
    config = KVPolicyConfig.parse({"name": "tova", "allocate": "ada", "bands": 2, "budget": 1024})
    assert config.allowed == {"full", "tova"} and list(config.classes) == ["band-0", "band-1"]
    asked = config.for_request({"kv_policy": "tova", "kv_budget": 512}, 4096, BLOCK)
    assert (asked.allocate, asked.bands, asked.budget) == ("ada", 2, 512)
    assert config.for_request({"kv_policy": "full"}, 4096, BLOCK).name == "full"
    for asked, message in (
        ({"kv_policy": "snapkv"}, "kv_policy 'snapkv' is not enabled here: expected one of: full, tova"),
        ({"kv_allocate": "uniform"}, "unknown request field 'kv_allocate'"),
    ):
        with pytest.raises(KVPolicyError, match=message):
            config.for_request(asked, 4096, BLOCK)


@pytest.mark.parametrize("paper, allocate", [("adakv", "ada"), ("pyramidkv", "pyramid")])
def test_a_papers_name_is_snapkv_with_its_allocator(paper, allocate):
    named, put = KVPolicyConfig.parse(paper), KVPolicyConfig.parse({"name": "snapkv", "allocate": allocate})
    without = {"name", "allocate", *put.allocator.lacks}
    mine = {field: value for field, value in put.to_dict().items() if field not in without}
    assert mine == {field: value for field, value in named.to_dict().items() if field != "name"}
    assert named.allocator is put.allocator


def bands_of_layers(policy):
    config = KVPolicyConfig.parse(policy).for_model(4, 4, 1)
    groups = []
    for band, part in enumerate(config.classes.values()):
        limits = part.limits(BLOCK, 1)
        heads = np.zeros((4, 4), bool)
        heads[4 * band // config.bands : 4 * (band + 1) // config.bands] = True
        options = {"budget": limits.budget * BLOCK, "buffer": (limits.trigger - limits.budget) * BLOCK}
        groups.append((replace(scoring(policy), **options), heads))
    return groups


def scoring(policy):
    """The oracle's words for the scores of a policy, without its allocator."""
    name = policy["name"].replace("adakv", "snapkv").replace("pyramidkv", "snapkv")
    return Config(name, BLOCK, **{field: policy[field] for field in BASE.keys() & policy})


@pytest.mark.oracle("full attention")
@pytest.mark.both_runners("pyramidkv-2", "h2o-3")
@pytest.mark.parametrize("name, bands", [("pyramidkv", 2), ("h2o", 3), ("keydiff", 4)])
def test_budgets_that_fall_with_depth_match_the_oracle(engine, model, dense, name, bands):
    policy = {**PYRAMIDS[name], "bands": bands}
    server = engine(policy, model=model, max_num_batched_tokens=192)
    requests = random_requests((600, 120), (90, 60))
    outputs, traces = server.traced(requests)
    for (prompt, _), output, trace in zip(requests, outputs, traces):
        tokens = [*prompt, *output.outputs[0].token_ids]
        replays = replay_heads(dense, tokens, trace.steps, bands_of_layers(policy), trace.start)
        assert len(trace.groups) == bands
        for got, want in zip(trace.groups, replays, strict=True):
            assert got.evicted[:-1] == want.evicted[: len(trace.steps) - 1]
        assert_logprobs(output, prompt, trace, replays[0].logits)
    held = [group.held[-2] for group in traces[0].groups]
    assert held == sorted(held, reverse=True) and held[0] > held[-1]
    server.assert_nothing_left()


def replay_shared(dense, tokens, steps, groups, floor):
    """Replay as `replay_heads` does, with one budget for all groups."""
    from oracle.heads import GroupRequest

    requests = [GroupRequest(dense, config, heads) for config, heads in groups]
    config, count = groups[0][0], len(groups)
    cache, logits, evicted, done = dense.new_cache(), [], [], 0
    for request in requests:
        request.cache = cache
    foreseen = 0
    for chunk in steps:
        for request in requests:
            request.n = done + chunk
        mask = torch.zeros(dense.layers, dense.heads, chunk, done + chunk, dtype=torch.bool)
        for request in requests:
            mask[request.of_query_heads()] = request.mask(done)
        out, probs = dense.forward(tokens[done : done + chunk], cache, mask, want_probs=True)
        logits.append(out)
        blocks, over = requests[0].blocks(), False
        over = count * blocks - sum(len(r.evicted) for r in requests) > count * config.trigger_blocks
        position = torch.arange(done, done + chunk)
        decision = done + chunk - 1 if over else (config.trigger_blocks + foreseen) * BLOCK
        for request in requests:
            if config.accumulate == "last":
                request.counted = lambda first: (position > decision - config.window) & (position <= decision)
            if config.wants_probs:
                request.accumulate(probs * request.of_query_heads()[:, :, None, None], done)
        done += chunk
        chosen = [[] for _ in requests]
        if over:
            spare = sum(len(r.held()) for r in requests) - count * config.budget_blocks
            every = [
                (importance, g, b)
                for g, r in enumerate(requests)
                for b, importance in r.importance().items()
                if config.sink_blocks <= b < (done - config.recent) // BLOCK
            ]
            least = math.ceil(floor * config.budget_blocks)
            for _, g, b in sorted(every):
                if spare and len(requests[g].held()) - len(chosen[g]) > least:
                    chosen[g].append(b)
                    spare -= 1
            for request, gone in zip(requests, chosen):
                request.evicted |= set(gone)
                if config.accumulate == "last":
                    request.sums.zero_()
            foreseen = sum(len(r.evicted) for r in requests) // count
        evicted.append([sorted(gone) for gone in chosen])
    return evicted, torch.cat(logits)


@pytest.mark.oracle("full attention")
@pytest.mark.both_runners("adakv-2-0.2", "tova-4-0.2")
@pytest.mark.parametrize(
    "name, bands, floor", [("adakv", 2, 0.2), ("adakv", 4, 0.9), ("tova", 4, 0.2), ("keydiff", 2, 0.2)]
)
def test_heads_that_share_a_budget_match_the_oracle(engine, model, dense, name, bands, floor):
    policy = {**ADAS[name], "bands": bands, "floor": floor}
    server = engine(policy, model=model, max_num_batched_tokens=192)
    requests = random_requests((600, 130), (90, 60))
    outputs, traces = server.traced(requests)
    heads = [np.zeros((4, 4), bool) for _ in range(bands)]
    for band in range(bands):
        heads[band][:, 4 * band // bands : 4 * (band + 1) // bands] = True
    groups = [(scoring(policy), mine) for mine in heads]
    for (prompt, _), output, trace in zip(requests, outputs, traces):
        tokens = [*prompt, *output.outputs[0].token_ids]
        evicted, logits = replay_shared(dense, tokens, trace.steps, groups, floor)
        got = [[group.evicted[step] for group in trace.groups] for step in range(len(trace.steps))]
        assert got[:-1] == evicted[: len(got) - 1]
        assert_logprobs(output, prompt, trace, logits)
    held = np.array([group.held for group in traces[0].groups])
    assert (held != held[0]).any() or floor > 0.5, "no group gave anything to another"
    assert held[:, -2].sum() <= bands * (320 + 64) // BLOCK + bands
    server.assert_nothing_left()


def test_one_band_is_snapkv(engine, model):
    answers = [
        exactly(server.generate([random_prompt(500, 1)], max_tokens=80, logprobs=0))
        for policy in ({"name": "snapkv"}, {"name": "pyramidkv", "bands": 1}, {"name": "adakv", "bands": 1})
        for server in [engine({**policy, **BASE}, model=model, max_num_batched_tokens=192)]
    ]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("name, prompt", [("pyramidkv", "chunks"), ("adakv", "whole")])
def test_preempted_aborted_and_asked_for_less(engine, model, name, prompt):
    policy = {"name": name, **BASE, "allow": ["full"], "prompt": prompt}
    server = engine(policy, model=model, blocks=140, max_num_batched_tokens=128, max_model_len=1024)
    ids = [
        server.add(random_prompt(300 + 20 * i, i), max_tokens=150, extra_args=extra, logprobs=0)
        for i, extra in enumerate([None, {"kv_budget": 192}, {"kv_policy": "full"}, {"kv_budget": 0.3}, None])
    ]
    steps = []

    def on_step(server):
        steps.append(len(server.scheduler.running))
        if len(steps) == 30:
            server.llm.llm_engine.abort_request([ids[4]])

    outputs = server.run(on_step)
    assert all(np.isfinite(logprobs_of(output)).all() for output in outputs.values())
    usage = [outputs[i].kv_usage for i in ids[:4]]
    assert usage[2].evicted_blocks == 0 and all(usage[i].evicted_blocks > 0 for i in (0, 1, 3))
    assert usage[1].budget_tokens < usage[0].budget_tokens == pytest.approx(320, abs=BLOCK / 2)
    server.assert_nothing_left()


def choice(mass, config, limits, tokens):
    """The paper's: the cheapest policy that keeps enough. mass: [blocks]"""
    blocks = np.arange(len(mass))
    protected = (blocks < limits.sink) | (blocks >= (tokens - config.recent) // BLOCK)
    order = sorted(blocks[~protected], key=lambda b: -mass[b])[: limits.budget - protected.sum()]
    if mass[protected].sum() >= config.recovery * mass.sum():
        return "sink-window"
    return "h2o" if mass[protected].sum() + mass[order].sum() >= config.recovery * mass.sum() else "full"


@pytest.mark.oracle("full attention")
@pytest.mark.both_runners("2-0.6")
@pytest.mark.parametrize("bands, recovery", [(2, 0.6), (4, 0.35), (4, 0.97)])
def test_fastgen_matches_the_oracle(engine, model, dense, bands, recovery):
    policy = {
        "name": "fastgen",
        **{k: v for k, v in BASE.items() if k != "kernel"},
        "bands": bands,
        "recovery": recovery,
    }
    server = engine(policy, model=model, max_num_batched_tokens=192)
    config = KVPolicyConfig.parse(policy)
    prompt, chosen = random_prompt(600, 5), []

    def on_step(server):
        for manager in server.managers:
            for resident in manager.residents.values():
                if resident._granted and len(chosen) < bands:
                    chosen.append(resident.config.name)

    (output,), (trace,) = server.traced([(prompt, {"max_tokens": 120, "logprobs": 1})], on_step)
    cache, probs = dense.new_cache(), None
    for start in range(0, 600, 192):
        end = min(start + 192, 600)
        mask = torch.ones(end, end, dtype=torch.bool).tril()[start:]
        _, probs = dense.forward(prompt[start:end], cache, mask, want_probs=True)
    mass = probs[:, :, -24:].double().sum(2).unflatten(1, (4, -1)).sum(2)  # [L, G, 600]
    mass = torch.nn.functional.pad(mass, (0, 8)).unflatten(2, (-1, BLOCK)).sum(3).sum(0).numpy()
    names = []
    for band in range(bands):
        of_band = mass[4 * band // bands : 4 * (band + 1) // bands].sum(0)
        names.append(choice(of_band, config, config.limits(BLOCK, 600), 600))
        gone = trace.groups[band].evicted[3]
        assert not any(trace.groups[band].evicted[:3]), "nothing goes before the prompt is computed"
        candidates = range(1, (600 - 64) // BLOCK)
        if names[-1] == "h2o":
            assert gone == sorted(sorted(candidates, key=lambda b: of_band[b])[: 19 - 10])
        else:
            assert gone == ([] if names[-1] == "full" else list(range(1, 19 - 4 + 1)))
    assert chosen == names
    told = [[[]] + [list(blocks) for blocks in group.evicted[:-1]] for group in trace.groups]
    heads = [np.zeros((4, 4), bool) for _ in range(bands)]
    for band in range(bands):
        heads[band][:, 4 * band // bands : 4 * (band + 1) // bands] = True
    groups = [(Config("snapkv", BLOCK, **BASE), mine) for mine in heads]
    tokens = [*prompt, *output.outputs[0].token_ids]
    replays = replay_heads(dense, tokens, trace.steps, groups, told=told)
    assert_logprobs(output, prompt, trace, replays[0].logits)
    server.assert_nothing_left()


FASTGEN = {"name": "fastgen", **{k: v for k, v in BASE.items() if k != "kernel"}}


@pytest.mark.parametrize("make, recovery", [("engine", 0.65), ("async_engine", 0.2)])
def test_fastgen_keeps_each_group_to_what_it_chose(request, model, complaints, make, recovery):
    """At 0.2 some take sink-window and others h2o, at 0.65 all keep everything; workers measure what h2o needs."""
    server = request.getfixturevalue(make)({**FASTGEN, "bands": 4, "recovery": recovery}, model=model)
    server.add(random_prompt(600, 5), max_tokens=300)
    chosen, held = [], []
    in_flight = 1 if make == "async_engine" else 0

    def on_step(server):
        (one,) = server.scheduler.requests.values() or [None]
        residents = [r for m in server.managers for r in m.residents.values()]
        if not residents or any(r._granted is None for r in residents):
            return
        chosen.append([r.config.name for r in residents])
        held.append([r.held_blocks for r in residents])
        if len(chosen) < 4:  # until workers have heard of it
            return
        sums = [len(sums_of(group)) for group in server.worker.kv_evict.groups]
        assert sums == [int(name == "h2o") for name in chosen[-1]]
        if one.num_computed_tokens % BLOCK > 2:
            for resident, blocks in zip(residents, held[-1]):
                assert resident.limits is None or blocks <= resident.limits.trigger + in_flight

    server.run(on_step)
    assert len(held) >= 290 and chosen[0] == chosen[-1]
    assert set(chosen[0]) == ({"sink-window", "h2o"} if recovery < 0.5 else {"full"})
    assert not complaints
    server.assert_nothing_left()


@pytest.mark.parametrize("recovery, name", [(1e-9, "sink-window"), (0.5, "h2o"), (1.0, "full")])
def test_a_restart_is_measured_and_chosen_for_again(recovery, name):
    policy = {"name": "fastgen", **{k: v for k, v in BASE.items() if k != "kernel"}, "bands": 1, "recovery": recovery}
    (config,) = KVPolicyConfig.parse(policy).classes.values()
    resident = RequestBlocks(config, config.limits(BLOCK, 600), BLOCK, "fastgen", may_outgrow=True)
    name_chosen = Profiles._choose(resident, Report(np.arange(19), {"mass": np.ones(19)}), 600)
    resident.choose_policy(name_chosen, 600)
    assert resident.config.name == name and resident.measured == (name == "h2o")
    resident.restart()
    assert resident.config == config and resident.measured


def test_fastgen_chooses_anew_after_a_restart(engine, model):
    policy = {"name": "fastgen", **{k: v for k, v in BASE.items() if k != "kernel"}, "bands": 2, "recovery": 0.6}
    server = engine(policy, model=model, blocks=66, max_num_batched_tokens=128, max_model_len=1024)
    requests = [(random_prompt(500 + 20 * i, i), {"max_tokens": 250, "logprobs": 0}) for i in range(5)]
    outputs, traces = server.traced(requests)
    assert sum(trace.restarts for trace in traces) > 0
    assert all(np.isfinite(logprobs_of(output)).all() for output in outputs)
    assert any(output.kv_usage.evicted_blocks for output in outputs)
    server.assert_nothing_left()


def test_a_request_that_ends_when_its_policy_is_chosen_is_forgotten(engine, model):
    """The next step tells what its new policy measures, which is one without it."""
    policy = {"name": "fastgen", **{k: v for k, v in BASE.items() if k != "kernel"}, "bands": 4, "recovery": 0.35}
    server = engine(policy, model=model, max_num_batched_tokens=192)
    request_id, chosen = server.add(random_prompt(600, 5), max_tokens=50), []

    def on_step(server):
        names = {resident.config.name for m in server.managers for resident in m.residents.values()}
        if "h2o" in names:
            chosen.append(names)
            server.llm.llm_engine.abort_request([request_id])

    server.run(on_step)
    assert len(chosen) == 1
    server.generate([random_prompt(40)], max_tokens=4)
    server.assert_nothing_left()


def test_adakv_under_pressure_goes_by_scores(engine, model):
    policy = {
        "name": "adakv",
        **BASE,
        "budget": 128,
        "buffer": 0,
        "recent": 32,
        "bands": 2,
        "when": "pressure",
        "admit": True,
    }
    server = engine(policy, model=model, blocks=60, max_num_batched_tokens=128, max_model_len=512)
    reported = []

    def on_step(server):
        reported.extend(
            r.of(Offered).report is not None for m in server.managers for r in m.residents.values() if r.evicted_blocks
        )

    for seed in range(4):
        server.add(random_prompt(150 + 10 * seed, seed), max_tokens=200)
    outputs = server.run(on_step)
    assert sum(output.kv_usage.evicted_blocks for output in outputs.values()) > 8
    assert reported and any(reported)
    server.assert_nothing_left()
