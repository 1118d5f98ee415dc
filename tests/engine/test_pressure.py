"""`when: pressure`: nothing goes while there is room, and then what hurts least, of all requests."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine import PLAN, after, exactly, greedy, logprobs_of, random_prompt
from hypothesis import given
from hypothesis import strategies as st
from parts import holes_of
from vllm.v1.core.block_pool import BlockPool

from vllm_evict.config import NEVER, KVPolicyConfig, KVPolicyError
from vllm_evict.core.blocks import RequestBlocks
from vllm_evict.core.mechanisms import Pressure
from vllm_evict.core.mechanisms.pressure import SCORES_STAY_FRESH, Offered, ascending
from vllm_evict.core.plan import Report, Scoring
from vllm_evict.integration.engine.allocation import publish_part, publish_whole
from vllm_evict.policies import POLICIES

FLOOR = {"when": "pressure", "admit": True, "budget": 128, "buffer": 32, "sink": 32}
SERVERS = {
    "h2o": {"name": "h2o", **FLOOR, "recent": 32},
    "h2o-ema": {"name": "h2o", **FLOOR, "recent": 32, "accumulate": "ema", "decay": 0.9},
    "tova": {"name": "tova", **FLOOR, "recent": 32},
    "snapkv": {"name": "snapkv", **FLOOR, "recent": 32, "window": 8},
    "scissorhands": {"name": "scissorhands", **FLOOR, "recent": 32, "window": 16},
    "sink-window": {"name": "sink-window", **FLOOR},
    "strided": {"name": "strided", **FLOOR, "recent": 32},
    "random": {"name": "random", **FLOOR, "recent": 32},
}
PROMPTS = [random_prompt(150 + 25 * i, seed=i) for i in range(12)]
TOKENS = 90
# Together the requests would grow to 148 blocks.
SMALL = dict(blocks=64, max_model_len=1024)


# ---- Configuration


def test_every_policy_whose_scores_add_up_has_it():
    for name, policy in POLICIES.items():
        if "when" not in policy.options or name == "full":
            continue
        if "pressure" in policy.triggers:
            limits = KVPolicyConfig.parse({"name": name, "when": "pressure", "budget": 512}).limits(32, 4096)
            assert limits.trigger == NEVER and limits.bound == limits.budget == 16
        else:
            with pytest.raises(KVPolicyError, match=rf"when: '{name}' supports only 'budget'. Policies that .* h2o"):
                KVPolicyConfig.parse({"name": name, "when": "pressure"})
    assert {name for name in SERVERS if "-" not in name} < {n for n, p in POLICIES.items() if "pressure" in p.triggers}


def test_requests_pick_what_has_the_trigger():
    server = KVPolicyConfig.parse(SERVERS["h2o"])
    assert "full" in server.allowed and "tova" in server.allowed and "knorm" not in server.allowed
    assert server.bound(32, 1024) == 4, "what `full` takes is not planned for"
    picked = server.for_request({"kv_policy": "tova", "kv_budget": 96}, 500, 32)
    assert picked.when == "pressure" and picked.limits(32, 500).budget == 3 and picked.buffer == 32
    with pytest.raises(KVPolicyError, match="'knorm' is not enabled here"):
        server.for_request({"kv_policy": "knorm"}, 500, 32)


def test_windows_of_last_queries_become_exponential():
    scoring = Scoring.of(KVPolicyConfig.parse(SERVERS["snapkv"]), NEVER)
    assert scoring.accumulate == "ema" and scoring.decay == pytest.approx(1 - 1 / 8)
    assert Scoring.of(KVPolicyConfig.parse(SERVERS["tova"]), NEVER).decay < 1e-5
    assert Scoring.of(KVPolicyConfig.parse(SERVERS["h2o"]), NEVER).accumulate == "sum"


# ---- What a request offers


def request_of(name="h2o", blocks=20, mass=None, **options):
    config = KVPolicyConfig.parse({**SERVERS[name], **options})
    resident = RequestBlocks(config, config.limits(32, 1000), 32, may_outgrow=mass is not None)
    if mass is not None:
        resident.of(Offered).report = Report(np.arange(len(mass)), {"mass": np.array(mass, float)})
    return resident


def offer(blocks, tokens=20 * 32, **options):
    return blocks.offer(tokens, blocks.of(Offered).report, **options)


def test_it_offers_what_is_above_its_floor():
    mass = [9.0, *range(1, 20)]
    blocks, cost, spare = offer(request_of(mass=mass))
    # Block 0 is the sink, block 19 holds the last 32 tokens; 4 of the 20 are its floor.
    assert blocks.tolist() == list(range(1, 19)) and spare == 16
    np.testing.assert_allclose(cost, np.arange(1, 19) / sum(range(1, 19)))
    assert offer(request_of(mass=mass[:4]), 4 * 32)[2] == 0


def test_blocks_younger_than_the_scores_go_last():
    blocks, cost, spare = offer(request_of(mass=[1.0] * 10))
    assert blocks.tolist() == list(range(1, 19)) and spare == 16
    assert cost[:9].max() < 1 < cost[9] and (np.diff(cost[9:]) > 0).all()
    resident = request_of(mass=[1.0] * 10)
    blocks, _, spare = offer(resident, unscored=False)
    assert blocks.tolist() == list(range(1, 10)) and spare == 9
    resident.evict(np.array([3]), 10 * 32)
    assert offer(resident, unscored=False)[0].tolist() == [1, 2, *range(4, 10)]


def test_the_oldest_go_where_no_scores_were_reported_yet():
    resident = request_of()
    resident.may_outgrow = True
    blocks, cost, spare = offer(resident)
    assert blocks.tolist() == list(range(1, 19)) and (np.diff(cost) > 0).all() and spare == 16


def test_an_offer_changes_nothing_until_it_is_taken():
    resident = request_of("sink-window")
    first = offer(resident)
    assert all(np.array_equal(a, b) for a, b in zip(first, offer(resident), strict=True))
    resident.evict(first[0][:3], 20 * 32)
    blocks, _, spare = offer(resident)
    assert blocks.tolist() == first[0][3:].tolist() and spare == first[2] - 3


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 70), st.integers(0, 60))
def test_the_least_of_all_come_first(values, few, taken):
    """The order of a stable sort, whatever is sorted at once, and however much of it is taken."""
    values = np.array(values, float)
    order = np.argsort(values, kind="stable").tolist()
    assert list(itertools.islice(ascending(values, few), taken)) == order[:taken]


@pytest.mark.parametrize("name", ["h2o", "random"])
def test_costs_are_shares_of_a_request(name):
    policy = POLICIES[name]
    for importance in ([3.0, 1.0, 0.0, 4.0], [0.0, 0.0], [7.0], []):
        cost = policy.cost(np.array(importance))
        assert cost.sum() == pytest.approx(1 if importance else 0)
        assert (np.argsort(cost, kind="stable") == np.argsort(importance, kind="stable")).all()
    # The same evenly spread attention: a block of the longer request is the smaller loss.
    assert policy.cost(np.ones(40)).max() < policy.cost(np.ones(10)).max()


# ---- On an engine


def outputs_of(server, **sampling):
    return server.generate(PROMPTS, max_tokens=TOKENS, logprobs=0, **sampling)


def preemptions(server):
    return server.metrics()["vllm:num_preemptions"]


@pytest.mark.parametrize(
    "name, admit", [("h2o", True), ("h2o", False), ("snapkv", True), ("sink-window", True), ("sink-window", False)]
)
def test_it_preempts_nobody_where_floors_fit(engine, name, admit):
    """Stock vLLM preempts on this load; here nobody is, no request falls below its floor, and all blocks come back."""
    server = engine({**SERVERS[name], "admit": admit}, **SMALL)
    least = []

    def on_step(server):
        for req_id, resident in server.scheduler.residents.items():
            if resident.evicted_blocks and req_id in server.scheduler.requests:
                least.append(len(server.held_by(req_id)))

    for index, prompt in enumerate(PROMPTS):
        server.add(prompt, f"p{index}", max_tokens=TOKENS)
    done = server.run(on_step)
    assert len(done) == len(PROMPTS) and preemptions(server) == 0
    assert sum(output.kv_usage.evicted_blocks for output in done.values()) > (30 if admit else 5)
    assert min(least) >= 4
    server.assert_nothing_left()


def test_requests_are_not_compared_in_every_step(engine):
    """To compare them costs the host time with each request and block: once for what decodes begin in some steps."""
    server = engine(SERVERS["h2o"], **SMALL)
    steps, counts = [], []
    after(server.scheduler.part(Pressure), "choose", lambda *_: steps.append(len(counts)))
    for index, prompt in enumerate(PROMPTS[:8]):
        server.add(prompt, f"p{index}", max_tokens=200)
    server.run(lambda server: counts.append(len(server.scheduler.running)))
    # All 8 decode, without a new one, when the pool runs out again and again.
    decoding = [step for step in steps if step > counts.index(8) + 1]
    assert len(decoding) > 5 and min(np.diff(decoding)) >= SCORES_STAY_FRESH, decoding
    server.assert_nothing_left()


@pytest.mark.both_runners
def test_requests_wait_for_room_unless_pressure_admits_them(engine, complaints):
    """Short answers: stock vLLM keeps requests waiting and preempts none. So does the default, to the bit."""
    prompts = [random_prompt(length, seed) for seed, length in enumerate(range(300, 700, 40))]
    stock, waits = engine(**SMALL), engine({**SERVERS["h2o"], "admit": False}, **SMALL)
    expected, outputs = (server.generate(prompts, max_tokens=4, logprobs=0) for server in (stock, waits))
    assert exactly(outputs) == exactly(expected) and preemptions(stock) == preemptions(waits) == 0
    assert not any(output.kv_usage.evicted_blocks for output in outputs)
    assert waits.metrics()["requests_at_budget", "h2o"] == 0 and not complaints
    admits = engine(SERVERS["h2o"], **SMALL)
    outputs = admits.generate(prompts, max_tokens=TOKENS, logprobs=0)
    fallen = [output.kv_usage for output in outputs if output.kv_usage.evicted_blocks]
    assert len(fallen) > 3
    assert 0 < admits.metrics()["requests_at_budget", "h2o"] <= len(fallen)
    (line,) = (message for _, message in complaints if "is down to its budget, 4 of the" in message)
    assert "or admit: false keep more" in line and "Said once" in line
    admits.assert_nothing_left()


def test_a_share_of_the_prompt_is_a_floor(engine):
    """Of the server's for all requests, and of a larger one for those that ask for it."""
    server, spare = engine({**SERVERS["h2o"], "budget": 0.75}, **SMALL), []

    def on_step(server):
        for req_id, resident in server.scheduler.residents.items():
            if resident.evicted_blocks and (request := server.scheduler.requests.get(req_id)):
                share = 0.9 if int(req_id[1:].split("-")[0]) % 2 else 0.75
                spare.append(len(server.held_by(req_id)) - math.ceil(share * request.num_prompt_tokens / 32))

    for index, prompt in enumerate(PROMPTS):
        server.add(prompt, f"p{index}", max_tokens=TOKENS, extra_args={"kv_budget": 0.9} if index % 2 else {})
    assert len(server.run(on_step)) == len(PROMPTS) and min(spare) == 0
    server.assert_nothing_left()


def test_stock_preempts_on_that_load(engine):
    stock = engine(**SMALL)
    outputs_of(stock)
    assert preemptions(stock) > 0


def test_a_quiet_server_changes_no_bit(engine):
    stock, server = engine(), engine(SERVERS["h2o"])
    outputs = outputs_of(server)
    assert exactly(outputs) == exactly(outputs_of(stock))
    assert not any(output.kv_usage.evicted_blocks for output in outputs)


@pytest.mark.oracle("full attention")
@pytest.mark.both_runners("async_engine-h2o-ema")
@pytest.mark.parametrize(
    "make, name", [("engine", "sink-window"), ("async_engine", "sink-window"), ("async_engine", "h2o-ema")]
)
def test_each_step_reads_what_is_left(request, dense, name, make):
    """Holes are made while a step is being planned: that very step must not read them, nor miss anything else; steps
    in flight still do."""
    server = request.getfixturevalue(make)(SERVERS[name], enable_prefix_caching=False, **SMALL)
    steps = []

    def look(output, *_):
        steps.append((dict(output.num_scheduled_tokens), holes_of(getattr(output, PLAN).groups[0].changes)))

    after(server.scheduler, "schedule", look)
    prompts = dict(zip([f"p{i}" for i in range(8)], PROMPTS[:8], strict=True))
    for request_id, prompt in prompts.items():
        server.add(prompt, request_id, max_tokens=TOKENS, logprobs=0)
    done = server.run()
    assert preemptions(server) == 0
    evicted = 0
    for request_id, output in done.items():
        tokens = [*prompts[request_id], *output.outputs[0].token_ids]
        cache, holes, logits, n = dense.new_cache(), [], [], 0
        for scheduled, made in steps:
            (inside,) = {key for key in scheduled if key.split("-")[0] == request_id} or (None,)
            if inside is None:
                continue
            holes += made.get(inside, [])
            # Under async scheduling one more step may be computed, for nothing.
            count = min(scheduled[inside], len(tokens) - n)
            mask = torch.ones(count, n + count).tril(n).bool()
            for hole in holes:
                mask[:, hole * 32 : (hole + 1) * 32] = False
            logits.append(dense.forward(tokens[n : n + count], cache, mask)[0])
            n += count
        evicted += len(holes)
        logprobs = torch.log_softmax(torch.cat(logits).double(), -1)[len(prompts[request_id]) - 1 :]
        np.testing.assert_allclose(
            logprobs_of(output), logprobs[range(TOKENS), list(output.outputs[0].token_ids)], atol=2e-3
        )
    assert evicted > 10


def test_full_is_untouchable_and_a_budget_is_a_floor(engine):
    server = engine(SERVERS["h2o"], **SMALL)
    asked = [{"kv_policy": "full"}, {"kv_budget": 96}, {}]
    ids = {
        server.add(prompt, f"p{index}", max_tokens=TOKENS, extra_args=asked[index % 3]): asked[index % 3]
        for index, prompt in enumerate(PROMPTS[:9])
    }
    done = server.run()
    evicted = {str(wish): sum(done[i].kv_usage.evicted_blocks for i in ids if ids[i] is wish) for wish in asked}
    assert evicted["{'kv_policy': 'full'}"] == 0
    assert evicted["{'kv_budget': 96}"] > 0 and evicted["{}"] > 0
    server.assert_nothing_left()


def test_floors_beyond_the_pool_are_preempted_and_said_once(engine, complaints):
    server = engine({**SERVERS["h2o"], "budget": 320}, **SMALL)
    done = outputs_of(server)
    assert preemptions(server) > 0 and len(done) == len(PROMPTS)
    assert sum("requests are at their budgets" in message for _, message in complaints) == 1
    server.assert_nothing_left()


def test_what_is_published_is_pure(engine):
    """Requests that find blocks of evicted ones in the prefix cache get what they would get alone."""
    server, stock = engine(SERVERS["h2o"], **SMALL), engine(max_model_len=1024)
    offer, held_back = server.scheduler.part(Pressure).offer, []

    def watched(manager, request, **kwargs):
        published = server.manager.published_tokens(request.request_id) > request.num_computed_tokens
        offered = offer(manager, request, **kwargs)
        if published:
            held_back.append(len(offered[0]))
        for other in server.scheduler.running:
            resident = server.scheduler.residents[other.request_id]
            if resident.pure_tokens is not None:
                assert server.manager.published_tokens(other.request_id) <= resident.pure_tokens
        return offered

    server.scheduler.part(Pressure).offer = watched
    outputs = outputs_of(server)
    # Some had been planned to fill a block in the very step that ran out of them.
    assert held_back and not any(held_back)
    assert any(output.kv_usage.evicted_blocks for output in outputs)
    hits = 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        # Beyond the answer, so that blocks of generated tokens are asked for as well.
        longer = [*prompt, *output.outputs[0].token_ids, 7]
        (again,) = server.generate([longer], max_tokens=8, logprobs=0)
        (alone,) = stock.generate([longer], max_tokens=8, logprobs=0)
        hits += again.num_cached_tokens or 0
        assert again.outputs[0].token_ids == alone.outputs[0].token_ids
        np.testing.assert_allclose(logprobs_of(again), logprobs_of(alone), atol=2e-4)
    assert hits > 0


def test_whatever_is_published_of_a_request_counts():
    """Blocks of a group that has smaller ones than others, and the end of a prompt, which fills a block in part."""
    pool, noted = BlockPool(6, True, 16), []
    for seam in (publish_whole, publish_part):
        seam.on(pool, [lambda request, tokens, blocks: noted.append((tokens, [each.block_id for each in blocks]))])
    request = SimpleNamespace(block_hashes=[bytes([number]) * 32 for number in range(6)])
    small, (large,) = pool.get_new_blocks(3), pool.get_new_blocks(1)
    at = {"request": request, "num_cached_blocks": 1, "num_full_blocks": 3, "block_size": 16, "kv_cache_group_id": 1}
    pool.cache_full_blocks(blocks=small, **at)
    pool.cache_partial_block(request=request, block=large, num_tokens=80, kv_cache_group_id=0, block_size=32)
    assert noted == [(48, [each.block_id for each in small[1:]]), (80, [large.block_id])]
    assert pool.get_cached_block(request.block_hashes[4], [0]) == [large]


def test_one_request_longer_than_the_pool(engine):
    """It has nobody to take from but itself."""
    server = engine({**SERVERS["h2o"], "allow": []}, blocks=24, max_model_len=1024, max_num_batched_tokens=128)
    (output,) = server.generate([random_prompt(900)], greedy(max_tokens=60))
    assert preemptions(server) == 0 and len(output.outputs[0].token_ids) == 60
    assert output.kv_usage.peak_resident_blocks <= 23 and output.kv_usage.evicted_blocks > 0
    server.assert_nothing_left()
