"""Requests that outgrow the model's context: what they keep moves up, its keys turned to their new positions."""

import math
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from engine import PLAN, after, logprobs_of, random_prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.model import DenseLlama
from oracle.tiny import make_tiny_llama
from parity import assert_like_oracle
from parts import orders_of, part_of
from vllm import envs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from vllm_evict.compute import memory
from vllm_evict.compute.kernels.rotate import Rotation
from vllm_evict.config import KVPolicyConfig, KVPolicyError
from vllm_evict.core.blocks import NO_BLOCKS, RequestBlocks
from vllm_evict.features.context import positions
from vllm_evict.features.context.plan import KeyRotation
from vllm_evict.features.context.start import ALLOW_LONG, longer_than_the_model
from vllm_evict.features.context.worker import Originals
from vllm_evict.policies import POLICIES as NAMED

BLOCK, CHUNK, CONTEXT = 32, 64, 384
POLICIES = {
    "sink-window": {"name": "sink-window", "budget": 192, "sink": 32, "context": CONTEXT},
    "h2o": {"name": "h2o", "budget": 192, "buffer": 32, "sink": 32, "recent": 64, "context": CONTEXT},
    "keydiff": {"name": "keydiff", "budget": 192, "buffer": 0, "sink": 32, "recent": 64, "context": CONTEXT},
}
WINDOW, H2O = POLICIES["sink-window"], POLICIES["h2o"]


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A model that was made for 384 tokens."""
    return make_tiny_llama(tmp_path_factory.mktemp("short") / "model", max_len=CONTEXT)


@pytest.fixture
def server(engine, short):
    def make(policy, **kwargs):
        return engine(policy, **{**dict(model=short, max_model_len=2048, max_num_batched_tokens=CHUNK), **kwargs})

    return make


@pytest.fixture
def vllm_config():
    """vLLM's embeddings ask for one."""
    with set_current_vllm_config(VllmConfig()):
        yield


@contextmanager
def watched(server):
    """Moves that workers are told of, as steps come. In each, nobody looks back further than the context."""
    moves, schedule = [], server.scheduler.schedule

    def look(output, *_):
        moves.extend(orders_of(getattr(output, PLAN), KeyRotation))
        for req_id in output.num_scheduled_tokens:
            resident, request = server.manager.residents[req_id], server.scheduler.requests[req_id]
            if len(resident.residence.places):
                # The newest query of the step, whose tokens count as computed by now.
                assert request.num_computed_tokens - resident.residence.places[0] * BLOCK <= CONTEXT

    after(server.scheduler, "schedule", look)
    yield moves
    server.scheduler.schedule = schedule


# --- on the engine ---------------------------------------------------------------------------------------------------


@pytest.mark.oracle("full attention")
@pytest.mark.both_runners("h2o")
@pytest.mark.parametrize("name", ["h2o", "keydiff"])
def test_a_request_outgrows_its_model(server, short, name):
    """Its positions come to three times what the model was made for, and each token is that of a dense model in which
    kept keys follow on themselves."""
    subject, prompt = server({**POLICIES[name], "context": "model"}), random_prompt(500)
    with watched(subject) as moves:
        (output,), (trace,) = subject.traced([(prompt, {"max_tokens": 700, "logprobs": 1})])
    assert len(moves) > 3 and subject.metrics()["moves", name] == len(moves)
    assert assert_like_oracle(DenseLlama(short), prompt, output, trace, POLICIES[name], chunk=CHUNK) > 20
    subject.assert_nothing_left()


def test_many_requests_that_share_a_prefix(server, short, poisoned):
    """Published blocks stay what they are: sinks that move up are copies. What is freed is poisoned."""
    subject, prefix = server(H2O), random_prompt(96)
    prompts = [prefix + random_prompt(length, length) for length in (20, 200, 430)]
    tokens = [500, 450, 400]
    with watched(subject) as moves:
        first, _ = subject.traced([(prompts[0], {"max_tokens": 8, "logprobs": 1})])
        outputs, traces = subject.traced(
            [(prompt, {"max_tokens": count, "logprobs": 1}) for prompt, count in zip(prompts, tokens)]
        )
    assert [trace.start for trace in traces] == [96, 96, 96] and len({move.req_id for move in moves}) == 3
    assert subject.metrics()["blocks_copied", "h2o"] >= 3, "all three moved the block of sinks that they share"
    for prompt, output, trace in zip(prompts, outputs, traces):
        assert np.isfinite(logprobs_of(output)).all()
        assert_like_oracle(DenseLlama(short), prompt, output, trace, H2O, chunk=CHUNK)
    (again,), (trace,) = subject.traced([(prompts[0], {"max_tokens": 8, "logprobs": 1})])
    assert trace.start == 96, "what was published still is"
    np.testing.assert_allclose(logprobs_of(again), logprobs_of(first[0]), atol=1e-5)
    subject.assert_nothing_left()


def test_a_preempted_request_begins_with_its_own_positions(server, short):
    """It is computed again from its first token, and moves up again."""
    subject, seen = server(WINDOW, enable_prefix_caching=False), []
    prompts = [random_prompt(length, length) for length in (450, 300)]

    def preempt(subject):
        seen.append(len(moves))
        if len(seen) == 250:
            subject.core.reset_prefix_cache(reset_running_requests=True)

    with watched(subject) as moves:
        outputs, traces = subject.traced([(prompt, {"max_tokens": 400, "logprobs": 1}) for prompt in prompts], preempt)
    assert [trace.restarts for trace in traces] == [1, 1] and 0 < seen[249] < seen[-1]
    for prompt, output, trace in zip(prompts, outputs, traces):
        assert_like_oracle(DenseLlama(short), prompt, output, trace, WINDOW, chunk=CHUNK)
    subject.assert_nothing_left()


def test_under_async_scheduling_nobody_looks_too_far(async_engine, short):
    """With two steps in flight, which still read blocks as they were (test_sessions.py has what comes of it)."""
    options = dict(model=short, max_model_len=2048, max_num_batched_tokens=CHUNK)
    subject = async_engine({**WINDOW, "budget": 160}, **options)
    with watched(subject) as moves:
        request = subject.add(random_prompt(300), max_tokens=500)
        output = subject.run()[request]
    assert len(moves) > 3 and len(output.outputs[0].token_ids) == 500
    subject.assert_nothing_left()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_turned_keys_are_computed_ones_rounded_once(server, poisoned, dtype):
    """In a cache of low precision: after each step every key that has moved is, to the bit, the one that was computed,
    turned to its place in float32. Sinks move with every decision, heavy hitters from some decision on."""
    subject, computed, moves, before, held = server(H2O, dtype=dtype), {}, {}, [], []
    group, manager = subject.runtime, subject.manager
    request = subject.add(random_prompt(300), max_tokens=1000, detokenize=False)

    originals = part_of(group, Originals)

    def look(_):
        # What was decided on at the end of a step is told with the next one: caches are what was decided before it.
        for block, place, physical in before:
            keys = [keys for keys, _ in group.store.read(torch.tensor([physical]), False)]
            if place == block:
                computed[block] = [each.clone() for each in keys]
            else:
                moves.setdefault(block, set()).add(place)
                for each, was, turn in zip(keys, computed[block], originals.rotations.values()):
                    want = turn(was, torch.tensor([(place - block) * BLOCK])).to(was.dtype)
                    assert torch.equal(each, want), f"block {block} at {place}, after {len(moves[block])} moves"
        for req_id, resident in manager.residents.items():
            assert originals.blocks(req_id) == {block for block, place, _ in before if place > block}
            held.append(len(originals.blocks(req_id)))
            full = resident.residence.pool < subject.scheduler.requests[req_id].num_computed_tokens // BLOCK
            table = manager.req_to_blocks[req_id]
            each = zip(resident.residence.pool[full].tolist(), resident.residence.places[full].tolist())
            before[:] = [(block, place, table[block].block_id) for block, place in each]

    output = subject.run(look)[request]
    assert len(output.outputs[0].token_ids) == 1000
    assert max(held) <= group.shape.held_blocks
    kib = group.shape.held_blocks * originals.block_bytes / 1024
    assert kib == group.shape.held_blocks * 2 * BLOCK * 2 * 32 * 2 / 1024, "of two layers, two heads, 32 dimensions"
    assert f"up to {math.ceil(kib / 1024)} MiB of host memory" in memory.put_aside("h2o", subject.worker.kv_evict)
    assert len(moves[0]) >= 8, "sinks"
    assert any(len(places) > 2 for block, places in moves.items() if block), "heavy hitters"
    subject.assert_nothing_left()


@pytest.mark.parametrize("how", ["aborted", "preempted"])
def test_nothing_moves_of_a_request_whose_blocks_are_gone(server, how):
    """Between the decision and the next plan: its blocks may be another's by then."""
    subject, ended = server(WINDOW), []
    request = subject.add(random_prompt(300), max_tokens=300)

    def end(subject):
        if subject.scheduler._plan.orders and not ended:
            ended.append(len(moves))
            if how == "aborted":
                subject.llm.llm_engine.abort_request([request])
            else:
                subject.core.reset_prefix_cache(reset_running_requests=True)
            assert not subject.scheduler._plan.orders

    with watched(subject) as moves:
        subject.run(end)
    assert ended and (len(moves) == ended[0]) == (how == "aborted")
    subject.assert_nothing_left()


def test_a_context_that_is_not_outgrown_changes_nothing(engine):
    outputs = []
    for context in (None, 1024):
        subject = engine({**H2O, "context": context}, max_num_batched_tokens=CHUNK)
        outputs += subject.generate([random_prompt(500)], max_tokens=200, logprobs=1)
        metrics = subject.metrics()
        assert metrics["moves", "h2o"] == 0 and metrics["blocks_evicted", "h2o"] > 0
    np.testing.assert_array_equal(*map(logprobs_of, outputs))


def test_without_room_for_copies_a_request_is_preempted(server):
    """If the pool has no block for a copy of the sinks, the request begins anew: it never looks further back than its
    context."""
    subject, asked = server(WINDOW), []
    rewrite = subject.manager.rewrite

    def none_at_first(request_id, writes, *args):
        if len(writes):
            asked.append(len(writes))
        return None if len(writes) and len(asked) < 3 else rewrite(request_id, writes, *args)

    subject.manager.rewrite = none_at_first
    moves = []
    after(subject.scheduler, "schedule", lambda output, *_: moves.extend(getattr(output, PLAN).orders))
    (output,) = subject.generate([random_prompt(300)], max_tokens=300)
    assert len(asked) > 3 and len(moves) == len(asked) - 2 and len(output.outputs[0].token_ids) == 300
    assert subject.metrics()["vllm:num_preemptions"] == 2
    del subject.manager.rewrite, subject.scheduler.schedule
    subject.assert_nothing_left()


def test_a_full_pool_has_no_copies_to_give(engine):
    """`rewrite` takes nothing where it can't take all; published blocks of the request alone need no copies then."""
    subject = engine({**WINDOW, "context": 512})
    request = subject.add(random_prompt(100), max_tokens=40)
    subject.llm.llm_engine.step()
    (req_id,) = subject.scheduler.requests
    manager, table = subject.manager, subject.manager.req_to_blocks[req_id]
    rewrite = partial(manager.rewrite, holes=NO_BLOCKS, computed_tokens=0)
    published = [block.block_id for block in table[:3]]
    assert [block.block_hash is not None for block in table] == [True, True, True, False]
    taken = subject.pool.get_new_blocks(subject.free_blocks - 2)
    for block in table[:3]:
        block.ref_cnt += 1  # another request holds them
    assert rewrite(req_id, np.arange(3)) is None
    assert [block.block_id for block in table[:3]] == published and subject.free_blocks == 2
    for block in table[:3]:
        block.ref_cnt -= 1
    assert rewrite(req_id, np.array([3])) == ({3: table[3].block_id}, [], []) and not manager.changes, "may stay"
    table[3].ref_cnt += 1
    _, (block,), _ = rewrite(req_id, np.array([3]))
    assert set(manager.take_changes()[req_id]) == {3} and block.ref_cnt == 1 and table[3] is not block, (
        "another request holds it"
    )
    subject.pool.free_blocks([block])
    _, given_back, _ = rewrite(req_id, np.array([0, 3]))
    moved = manager.take_changes()[req_id]
    assert set(moved) == {0} and [block.block_id for block in given_back] == published[:1]
    assert moved[0] == table[0].block_id and table[0].block_hash is None and table[0].ref_cnt == 1
    taken += subject.pool.get_new_blocks(subject.free_blocks - 1)
    _, given_back, _ = rewrite(req_id, np.array([1, 2]))
    assert set(manager.take_changes()[req_id]) == {1} and [block.block_id for block in given_back] == published[1:2], (
        "one copy has room"
    )
    assert table[2].block_id == published[2] and table[2].block_hash is None, "the other is written in place"
    subject.pool.free_blocks(taken)
    subject.llm.llm_engine.abort_request([request])
    subject.assert_nothing_left()


# --- what moves ------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3), st.booleans()), max_size=12), st.randoms())
def test_places(rounds, chance):
    """However blocks come and go: places rise one by one, never past a block's successor, and the newest blocks are at
    their own; after a move there is no gap."""
    resident = RequestBlocks(KVPolicyConfig.parse("h2o"), None, BLOCK)
    resident.adopt(np.array([0, 2]), 3, 3 * BLOCK)  # a prefix out of the cache, one block of which was of no use
    blocks, places = 3, {0: 0, 2: 2}
    for more, gone, moves in rounds:
        places |= {block: block for block in range(blocks, blocks + more)}
        blocks += more
        assert resident.residence.span(blocks * BLOCK - 5) == (blocks - min(places.values())) * BLOCK - 5
        victims = sorted(chance.sample(sorted(places)[:-1], min(gone, len(places) - 1)))
        resident.evict(np.array(victims, np.int64), blocks * BLOCK)
        places = {block: place for block, place in places.items() if block not in victims}
        assert dict(zip(resident.residence.pool.tolist(), resident.residence.places.tolist())) == places
        if moves:
            ends = dict(zip(reversed(sorted(places)), range(blocks - 1, -1, -1)))
            gaps = zip(*(each.tolist() for each in resident.residence.gaps()))
            assert {block: (distance, again) for block, distance, again in gaps} == {
                block: (ends[block] - block, place > block) for block, place in places.items() if ends[block] > place
            }
            resident.residence.move_up()
            places = ends
    resident.restart()
    assert not len(resident.residence.places)


EMBEDDINGS = {
    "default": {},
    "not neox": {"is_neox_style": False},
    "partial": {"rope_parameters": {"partial_rotary_factor": 0.5}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
    "ntk": {"rope_parameters": {"rope_type": "ntk", "factor": 2.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 1e6,
        }
    },
}


def rotated(rotary, keys, position):
    """vLLM's embedding of keys [n, D] at one position."""
    at = torch.full((len(keys),), position)
    return rotary.forward_native(at, keys.clone(), keys.clone())[1]


@pytest.mark.parametrize("kind", EMBEDDINGS)
def test_turned_keys_are_those_of_later_positions(vllm_config, kind):
    """Of every kind of embedding, in rows that it had and in rows that it gets."""
    rotary = get_rope(64, 256, dtype=torch.float32, **EMBEDDINGS[kind])
    had = rotary.cos_sin_cache.clone()
    rotation = positions._extended("layer", rotary, 5000)
    assert len(rotary.cos_sin_cache) == 5000 and torch.equal(rotary.cos_sin_cache[: len(had)], had)
    keys = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    for start, by in ((0, 1), (3, 200), (250, 10), (len(had) - 1, 1), (100, 4000), (4000, 999)):
        turned = rotation(rotated(rotary, keys, start)[None, None], torch.tensor([by]))[0, 0]
        assert turned.dtype == torch.float32
        torch.testing.assert_close(turned, rotated(rotary, keys, start + by), atol=2e-3, rtol=0)
        assert not torch.allclose(turned, rotated(rotary, keys, start), atol=2e-2)


def test_far_rows_are_right_to_a_small_part_of_a_turn(vllm_config):
    """A million positions on, as float64 says; what vLLM makes in float32 is off by a hundredth there."""
    rotary = get_rope(64, 128, dtype=torch.float32, rope_parameters={"rope_theta": 5e5})
    rotation = positions._extended("layer", rotary, 10**6)
    angles = np.longdouble(10**6 - 1) * rotation.frequencies.numpy().astype(np.longdouble)
    want = np.concatenate((np.cos(angles), np.sin(angles))).astype(np.float32)
    np.testing.assert_allclose(rotary.cos_sin_cache[-1].numpy(), want, atol=1e-6)


def test_a_batch_of_blocks_turns_each_by_its_own():
    rotation = Rotation(torch.tensor([0.5, 0.01], dtype=torch.float64), neox=True)
    keys = torch.randn(3, 2, 5, 6, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    turned = rotation(keys, torch.tensor([0, 7, 900]))
    assert torch.equal(turned[0], keys[0].float()) and torch.equal(turned[..., 4:], keys[..., 4:].float())
    for block, by in enumerate((0, 7, 900)):
        pairs = keys[block, ..., :2].double() + 1j * keys[block, ..., 2:4].double()
        want = pairs * torch.exp(1j * by * rotation.frequencies)
        torch.testing.assert_close(turned[block, ..., :2], want.real.float(), atol=1e-5, rtol=0)
        torch.testing.assert_close(turned[block, ..., 2:4], want.imag.float(), atol=1e-5, rtol=0)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"context": 0}, "context: must be a whole number of tokens above 0, or 'model', not 0"),
        ({"context": "all"}, "context: must be a whole number of tokens above 0, or 'model', not 'all'"),
        ({"context": True}, "above 0, or 'model', not True"),
        ({"context": 0.5}, "above 0, or 'model', not 0.5"),
        ({"when": "pressure"}, "context: .* needs when: budget"),
        ({"granularity": "token"}, "context: .* needs granularity: block"),
        ({"budget": 0.5}, "context: .* needs a budget in tokens"),
        ({"min_prompt": 600}, "context: .* leave min_prompt out"),
        ({"allow": ["sink-window", "full"]}, "allow: requests under 'full' would outgrow .* pick: h2o, "),
        ({"allow": ["kvzip"]}, "allow: requests under 'kvzip' would outgrow"),
    ],
)
def test_what_can_not_move_up_is_refused(changed, message):
    with pytest.raises(KVPolicyError, match=message):
        KVPolicyConfig.parse({**H2O, **changed})


def test_policies_that_have_none_are_those_whose_requests_may_keep_all_or_split():
    have = {name for name, policy in NAMED.items() if "context" in policy.options}
    assert have == set(NAMED) - {"full", "kvzip", "duo", "pyramidkv", "adakv", "fastgen"}
    assert KVPolicyConfig.parse(H2O).allowed == have - {"random"}


def test_a_request_takes_the_context_with_it():
    server = KVPolicyConfig.parse(H2O)
    other = server.for_request({"kv_policy": "tova"}, 100, BLOCK)
    assert other.name == "tova" and other.context == CONTEXT
    assert server.for_request({"kv_budget": 0.5}, 300, BLOCK).budget == 150
    with pytest.raises(KVPolicyError, match="above the server's"):
        server.for_request({"kv_budget": 0.9}, 300, BLOCK)


def test_there_has_to_be_room_in_the_context(server, engine):
    # 192 + 32 in blocks, one block more, and a chunk.
    assert server({**H2O, "context": 7 * BLOCK + BLOCK + CHUNK})
    message = "context: 319 tokens have no room for budget and buffer .224., one block of 32 and 64 in flight: set"
    with pytest.raises(KVPolicyError, match=message):
        server({**H2O, "context": 319})


def test_a_model_has_the_context_that_it_has(server, short, engine, complaints):
    with pytest.raises(KVPolicyError, match="context got 385; expected at most 384"):
        server({**WINDOW, "context": 385})
    assert not complaints
    assert server(WINDOW, max_model_len=CONTEXT)
    assert [message for _, message in complaints] == [
        "KV policy sink-window: its context of 384 tokens has no effect, because --max-model-len is 384; "
        "raise the latter"
    ]
    # Without one a longer request is what it is in stock vLLM, and this is left as it was.
    with pytest.raises(ValueError, match="VLLM_ALLOW_LONG_MAX_MODEL_LEN"):
        engine({"name": "sink-window", "budget": 192, "sink": 32}, model=short, max_model_len=2048)


@pytest.mark.parametrize("before", [None, "0", "1"])
def test_vllms_setting_is_left_as_it_was(monkeypatch, before):
    """Whether it reads its environment anew or not."""
    monkeypatch.delenv(ALLOW_LONG, raising=False)
    if before is not None:
        monkeypatch.setenv(ALLOW_LONG, before)
    monkeypatch.setattr(envs, "__getattr__", getattr(envs.__getattr__, "__wrapped__", envs.__getattr__))
    for config, within in ((KVPolicyConfig.parse(H2O), True), (KVPolicyConfig.parse("h2o"), before == "1")):
        with pytest.raises(KeyError), longer_than_the_model(config):
            assert getattr(envs, ALLOW_LONG) is within
            raise KeyError
        assert getattr(envs, ALLOW_LONG) is (before == "1")
