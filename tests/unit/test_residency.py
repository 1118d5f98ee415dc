"""The blocks of one request that stay: the choice against a brute-force rewrite, on random requests."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_evict.config import KVPolicyConfig
from vllm_evict.core.blocks import RequestBlocks, RequestState
from vllm_evict.core.mechanisms import Budget
from vllm_evict.core.mechanisms.base import Due
from vllm_evict.core.plan import EvictionPlan, Report
from vllm_evict.core.residence import Residence

BLOCK = 16


def reports(index, **statistics):
    return Report(np.array(index, np.int64), {name: np.array(of, np.float64) for name, of in statistics.items()})


def residency(block_size=BLOCK, prompt=1000, **options):
    config = KVPolicyConfig.parse({"name": "h2o", "budget": 128, "buffer": 0, "sink": 0, "recent": 0, **options})
    return RequestBlocks(config, config.limits(block_size, prompt), block_size)


def report(index, mass):
    return Report(np.array(index, np.int64), {"mass": np.array(mass, np.float64)})


def full_report(resident, computed, mass):
    """Masses of all blocks that a worker holds: nothing evicted, `computed` tokens."""
    gone = set(range(resident.residence.known)) - set(resident.residence.pool.tolist())
    index = [block for block in range(math.ceil(computed / resident.block_size)) if block not in gone]
    return report(index, [mass[block] for block in index])


def brute_force(resident_blocks, computed, mass, config, block_size):
    """Blocks to evict, one sentence of the documentation a line."""
    trigger = math.ceil((config.budget + config.buffer) / block_size)
    if len(resident_blocks) <= trigger:
        return []
    victims = []
    while len(resident_blocks) - len(victims) > math.ceil(config.budget / block_size):
        candidates = []
        for block in sorted(set(resident_blocks) - set(victims)):
            tokens = range(block * block_size, min((block + 1) * block_size, computed))
            is_sink = config.protect and any(token < config.sink for token in tokens)
            is_recent = config.protect and any(token >= computed - config.recent for token in tokens)
            is_written = (block + 1) * block_size > computed
            if not (is_sink or is_recent or is_written):
                candidates.append(block)
        if not candidates:
            break
        # min() takes the first of several: the oldest.
        victims.append(min(candidates, key=lambda block: mass[block] if config.name == "h2o" else block))
    return sorted(victims)


@st.composite
def lives(draw):
    """A policy, tokens of each step, and the mass of each block at each step."""
    block_size = draw(st.sampled_from([1, 3, 16]))
    sink, recent = draw(st.integers(0, 2 * block_size)), draw(st.integers(0, 4 * block_size))
    least = (math.ceil(sink / block_size) + math.ceil(recent / block_size) + 1) * block_size
    budget = max(draw(st.integers(least, least + 6 * block_size)), sink + recent + 1)
    options = {"budget": budget, "buffer": draw(st.integers(0, 3 * block_size)), "sink": sink, "recent": recent}
    options["protect"] = draw(st.booleans())
    name = draw(st.sampled_from(["h2o", "sink-window"]))
    chunks = st.one_of(st.integers(1, 8 * block_size), st.just(1), st.just(block_size))
    steps = draw(st.lists(chunks, min_size=1, max_size=30))
    return {"name": name, **options}, block_size, steps, draw(st.randoms(use_true_random=False))


@settings(max_examples=300, deadline=None)
@given(lives())
def test_what_goes_is_what_a_brute_force_search_finds(life):
    options, block_size, steps, random = life
    config = KVPolicyConfig.parse(options)
    subject = RequestBlocks(config, config.limits(block_size, 1), block_size)
    here, computed, evicted = [], 0, 0
    for step in steps:
        known = math.ceil(computed / block_size)
        computed += step
        blocks = math.ceil(computed / block_size)
        here += range(known, blocks)
        # Few values: ties are common.
        mass = [random.choice([0.0, 1.0, 1.5, 2.0]) for _ in range(blocks)]
        expected = brute_force(here, computed, mass, config, block_size)
        assert subject.over_trigger(blocks) == (len(here) > subject.limits.trigger)
        victims = subject.choose(computed, report(here, [mass[block] for block in here]))
        assert victims.tolist() == expected
        if expected:
            subject.evict(victims, computed)
            here = sorted(set(here) - set(expected))
            assert len(here) == subject.limits.budget, "not back to the budget"
        evicted += len(expected)
        assert subject.residence.pool.tolist() == here
        assert subject.held(blocks) == len(here) and subject.holes == blocks - len(here) == subject.evicted_blocks
        assert subject.evicted_blocks == evicted


def test_full_keeps_everything():
    config = KVPolicyConfig.parse("full")
    subject = RequestBlocks(config, config.limits(BLOCK, 1), BLOCK)
    assert not subject.over_trigger(10**6)
    assert subject.choose(10**4, None).tolist() == []
    assert subject.held(625) == 625


def test_a_report_older_than_the_last_holes_is_read_by_index():
    """With a step in flight, workers report blocks that have just been taken."""
    subject = residency(budget=64)
    assert subject.choose(80, report(range(5), [1.0, 0.0, 3.0, 4.0, 5.0])).tolist() == [1]
    subject.evict(np.array([1]), 90)
    stale = report(range(6), [1.0, 0.0, 3.0, 0.5, 5.0, 6.0])
    assert subject.choose(81, stale).tolist() == [3]


def test_every_statistic_of_a_report_is_read_by_index():
    """R-KV at equal weights: mass shares (1, 2, 3, 4, -) / 10 less redundancy shares (4, 1, 1, 4, -) / 10."""
    subject = residency(name="rkv", budget=64, mix=0.5)
    first = reports(range(5), mass=[1, 2, 3, 4, 0], **{"-redundancy": [-4, -1, -1, -4, 0]})
    assert subject.choose(80, first).tolist() == [0]
    subject.evict(np.array([0]), 80)
    stale = reports(range(6), mass=[9, 2, 3, 4, 1, 0], **{"-redundancy": [-9, -1, -1, -9, -1, -9]})
    assert subject.choose(95, stale).tolist() == [3]


@pytest.mark.parametrize("name, statistic", [("knorm", "-key_norm"), ("keydiff", "key_diff"), ("tova", "mass")])
def test_policies_of_one_statistic(name, statistic):
    subject = residency(name=name, budget=64)
    assert subject.choose(80, reports(range(5), **{statistic: [5, 1, 6, 9, 0]})).tolist() == [4]
    assert subject.choose(79, reports(range(5), **{statistic: [5, 1, 6, 9, 0]})).tolist() == [1], "4 is not full"


def test_a_prompt_too_short_keeps_everything():
    assert residency(prompt=99, min_prompt=100).limits is None
    exempt = residency(prompt=99, min_prompt=100)
    assert not exempt.over_trigger(10**6) and exempt.choose(10**4, None).tolist() == []
    assert residency(prompt=100, min_prompt=100).over_trigger(9)


def test_tokens_in_flight_are_not_decided_on():
    """96 tokens are planned, 80 are done: the sixth block is neither counted nor taken."""
    subject = residency(budget=64)
    assert subject.over_trigger(6)
    assert subject.choose(80, report(range(6), [3.0, 2.0, 1.0, 4.0, 5.0, 0.0])).tolist() == [2]
    assert subject.residence.known == 5


def test_blocks_of_tokens_that_are_computed_again_are_not_reported_yet():
    resident = residency()
    resident.residence.before(10 * BLOCK)
    resident.evict(np.array([2, 3]), 10 * BLOCK)
    assert resident.residence.before(6 * BLOCK + 1).tolist() == [0, 1, 4, 5, 6]
    assert resident.residence.before(11 * BLOCK).tolist() == [0, 1, 4, 5, 6, 7, 8, 9, 10]


def test_pure_tokens_are_set_once():
    subject = residency(budget=64)
    assert subject.pure_tokens is None
    subject.evict(subject.choose(80, report(range(5), range(5))), 100)
    assert subject.pure_tokens == 100
    subject.evict(subject.choose(112, report([1, 2, 3, 4, 5, 6], range(6))), 112)
    assert subject.pure_tokens == 100
    assert subject.evicted_blocks == 3


def test_a_restart_forgets_holes_but_not_the_count():
    subject = residency(budget=64)
    subject.first_query = 32
    subject.hold(9)
    subject.evict(subject.choose(112, report(range(7), range(7))), 112)
    assert subject.holes == 3 and subject.pure_tokens == 112
    subject.restart()
    assert (subject.holes, subject.residence.known, subject.pure_tokens, subject.first_query) == (0, 0, None, 0)
    assert (subject.incarnation, subject.evicted_blocks, subject.state.peak_blocks) == (1, 3, 9)
    assert subject.choose(112, report(range(7), [9.0, 0, 9, 9, 0, 0, 9])).tolist() == [1, 4, 5]


@pytest.mark.parametrize("every", [1, 2, 5, 16, 40])
@pytest.mark.parametrize("first_query", [0, 7, 32, 90])
@pytest.mark.parametrize("computed", [100, 113, 128])
def test_the_age_of_a_block_counts_the_queries_that_saw_it(every, first_query, computed):
    subject = residency(accumulate="mean", every=every)
    subject.first_query = first_query
    blocks = np.arange(6)
    expected = []
    for block in blocks:
        tokens = range(block * BLOCK, (block + 1) * BLOCK)
        queries = [q for q in range(first_query, computed) if q % every == 0]
        expected.append(max(1.0, np.mean([sum(q >= token for q in queries) for token in tokens])))
    np.testing.assert_allclose(subject._age(blocks, computed), expected)


def test_mean_divides_by_age():
    """Block 0 drew most, and had longest to do it."""
    mass = [40.0, 36.0, 30.0, 20.0, 10.0]
    assert residency(budget=64, accumulate="sum", recent=16).choose(80, report(range(5), mass)).tolist() == [3]
    assert residency(budget=64, accumulate="mean", recent=16).choose(80, report(range(5), mass)).tolist() == [0]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=40))
def test_each_block_is_in_the_pool_or_absent(steps):
    """Against a dict of whether blocks are in the pool."""
    residence, there = Residence(BLOCK), {}
    for grows, at in steps:
        if grows:
            residence.learn((residence.known + 1) * BLOCK - at % BLOCK)
            there[len(there)] = True
        elif those := [block for block, is_there in there.items() if is_there]:
            there[those[at % len(those)]] = False
            residence.leave(np.array([those[at % len(those)]]))
    assert residence.pool.tolist() == [block for block, is_there in there.items() if is_there]
    assert residence.absent.tolist() == [block for block, is_there in there.items() if not is_there]
    assert residence.known == len(there) and residence.holes == len(residence.absent)


def test_the_peak_is_what_all_groups_hold_at_once():
    state = RequestState()
    config = KVPolicyConfig.parse({"name": "h2o", "budget": 64, "sink": 0, "recent": 0, "buffer": 0})
    one, other = (RequestBlocks(config, config.limits(16, 1), 16, state=state) for _ in range(2))
    one.hold(5)
    other.hold(2)
    one.hold(1)
    other.hold(5)
    assert (state.held_blocks, state.peak_blocks) == (6, 7)


def test_a_sessions_next_turn_is_pure_only_as_far_as_the_last_one_is_kept():
    subject = residency()
    before = subject.incarnation
    subject.choose(20 * BLOCK, None)
    subject.evict(np.array([3, 4]), 20 * BLOCK)
    subject.renew(subject.config, 1000, 20 * BLOCK - 1)
    assert subject.pure_tokens == 20 * BLOCK - 1 and subject.incarnation == before + 1 and subject.holes == 2


def decided(blocks, incarnation, running):
    """Blocks evicted by the decision on a request that was due, which runs or is a session between two turns."""
    plan, computed = EvictionPlan.empty(1), 12 * BLOCK
    plan.notes(Due)[0]["r"] = incarnation
    request = SimpleNamespace(request_id="r", num_computed_tokens=computed, num_in_flight_tokens=0)
    host = SimpleNamespace(
        groups=[SimpleNamespace(number=0, residents={"r": blocks})],
        running_request=lambda _: request if running else None,
        idle_session=lambda _: None if running else request,
        miss=lambda *_: None,
    )
    actions = Budget(host).decide(plan, [{"r": full_report(blocks, computed, np.arange(12.0))}])
    return sum(len(action.holes) for action in actions)


@pytest.mark.parametrize("running", [True, False], ids=["running", "session"])
@pytest.mark.parametrize("restarts, evicted", [(0, 4), (1, 0)])
def test_a_request_that_has_restarted_is_not_decided_on_by_a_plan_of_before(restarts, evicted, running):
    """Its report, and the step that made it due, are of blocks that it has given back."""
    blocks = residency()
    incarnation = blocks.incarnation
    for _ in range(restarts):
        blocks.restart()
    assert decided(blocks, incarnation, running) == evicted


@pytest.mark.parametrize(
    "options, evicted",
    [({}, 4), ({"granularity": "token"}, 0), ({"context": 256}, 0), ({"name": "fastgen"}, 0)],
    ids=["block", "token", "context", "fastgen"],
)
def test_a_session_between_turns_is_decided_on_by_block_alone(options, evicted):
    """Workers move tokens and rotate keys of running requests only, and a policy that profiles has to choose first."""
    blocks = residency(**options)
    assert decided(blocks, blocks.incarnation, running=False) == evicted
