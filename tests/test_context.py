"""Requests that outgrow the model's context: what they keep moves up, its keys turned to their new positions."""

import math
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine import PLAN, logprobs_of, random_prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.model import DenseLlama
from oracle.tiny import make_tiny_llama
from parity import assert_like_oracle
from transformers import AutoConfig
from vllm import envs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding import get_rope

from vllm_evict.compute import memory
from vllm_evict.compute.attention.device import DeviceOps
from vllm_evict.compute.attention.store import LayerStore
from vllm_evict.compute.group import GroupRuntime
from vllm_evict.compute.kernels.rotate import Rotation
from vllm_evict.compute.runtime import EvictionRuntime
from vllm_evict.config import KVPolicyConfig, KVPolicyError
from vllm_evict.core.blocks import NO_BLOCKS, RequestBlocks
from vllm_evict.core.plan import EvictionPlan, GroupPlan, KeyRotation
from vllm_evict.integration import positions
from vllm_evict.integration.arguments import ALLOW_LONG, longer_than_the_model
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

    def recorded(*args, **kwargs):
        output = schedule(*args, **kwargs)
        moves.extend(getattr(output, PLAN).rotations)
        for req_id in output.num_scheduled_tokens:
            resident, request = server.manager.residents[req_id], server.scheduler.requests[req_id]
            if len(resident.places):
                # The newest query of the step, whose tokens count as computed by now.
                assert request.num_computed_tokens - resident.places[0] * BLOCK <= CONTEXT
        return output

    server.scheduler.schedule = recorded
    yield moves
    server.scheduler.schedule = schedule


# --- on the engine ---------------------------------------------------------------------------------------------------


@pytest.mark.both_runners("h2o")
@pytest.mark.parametrize("name", POLICIES)
def test_a_request_outgrows_its_model(server, short, name):
    """Its positions come to three times what the model was made for, and each token is that of a dense model in which
    kept keys follow on themselves."""
    subject, prompt = server({**POLICIES[name], "context": "model"}), random_prompt(500)
    with watched(subject) as moves:
        (output,), (trace,) = subject.traced([(prompt, {"max_tokens": 700, "logprobs": 1})])
    assert len(moves) > 3 and subject.metrics()["moves", name] == len(moves)
    assert assert_like_oracle(DenseLlama(short), prompt, output, trace, POLICIES[name], chunk=CHUNK) > 20
    subject.assert_nothing_left()


def test_many_requests_that_share_a_prefix(server, short, monkeypatch):
    """Published blocks stay what they are: sinks that move up are copies. What is freed is poisoned."""
    monkeypatch.setenv("VLLM_EVICT_POISON", "1")
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
def test_turned_keys_are_computed_ones_rounded_once(server, monkeypatch, dtype):
    """In a cache of low precision: after each step every key that has moved is, to the bit, the one that was computed,
    turned to its place in float32. Sinks move with every decision, heavy hitters from some decision on."""
    monkeypatch.setenv("VLLM_EVICT_POISON", "1")
    subject, computed, moves, before, held = server(H2O, dtype=dtype), {}, {}, [], []
    group, manager = subject.runtime, subject.manager
    request = subject.add(random_prompt(300), max_tokens=1000, detokenize=False)

    def look(_):
        # What was decided on at the end of a step is told with the next one: caches are what was decided before it.
        for block, place, physical in before:
            keys = [keys for keys, _ in group.store.read(torch.tensor([physical]), False)]
            if place == block:
                computed[block] = [each.clone() for each in keys]
            else:
                moves.setdefault(block, set()).add(place)
                for each, was, turn in zip(keys, computed[block], group.store._rotations.values()):
                    want = turn(was, torch.tensor([(place - block) * BLOCK])).to(was.dtype)
                    assert torch.equal(each, want), f"block {block} at {place}, after {len(moves[block])} moves"
        for req_id, resident in manager.residents.items():
            assert group.originals.blocks(req_id) == {block for block, place, _ in before if place > block}
            held.append(len(group.originals.blocks(req_id)))
            full = resident.resident < subject.scheduler.requests[req_id].num_computed_tokens // BLOCK
            table = manager.req_to_blocks[req_id]
            each = zip(resident.resident[full].tolist(), resident.places[full].tolist())
            before[:] = [(block, place, table[block].block_id) for block, place in each]

    output = subject.run(look)[request]
    assert len(output.outputs[0].token_ids) == 1000
    assert max(held) <= group.held_blocks
    kib = group.held_blocks * group.originals.block_bytes / 1024
    assert kib == group.held_blocks * 2 * BLOCK * 2 * 32 * 2 / 1024, "of two layers, two heads, 32 dimensions"
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
        if subject.scheduler._plan.rotations and not ended:
            ended.append(len(moves))
            if how == "aborted":
                subject.llm.llm_engine.abort_request([request])
            else:
                subject.core.reset_prefix_cache(reset_running_requests=True)
            assert not subject.scheduler._plan.rotations

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

    def none_at_first(request_id, writes, holes):
        if len(writes):
            asked.append(len(writes))
        return None if len(writes) and len(asked) < 3 else rewrite(request_id, writes, holes)

    subject.manager.rewrite = none_at_first
    moves, schedule = [], subject.scheduler.schedule

    def recorded(*args, **kwargs):
        output = schedule(*args, **kwargs)
        moves.extend(getattr(output, PLAN).rotations)
        return output

    subject.scheduler.schedule = recorded
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
    table, rewrite = subject.manager.req_to_blocks[req_id], partial(subject.manager.rewrite, holes=NO_BLOCKS)
    published = [block.block_id for block in table[:3]]
    assert [block.block_hash is not None for block in table] == [True, True, True, False]
    taken = subject.pool.get_new_blocks(subject.free_blocks - 2)
    for block in table[:3]:
        block.ref_cnt += 1  # another request holds them
    assert rewrite(req_id, np.arange(3)) is None
    assert [block.block_id for block in table[:3]] == published and subject.free_blocks == 2
    for block in table[:3]:
        block.ref_cnt -= 1
    assert rewrite(req_id, np.array([3])) == ({}, []), "it is its own, and may stay"
    table[3].ref_cnt += 1
    other, (block,) = rewrite(req_id, np.array([3]))
    assert set(other) == {3} and block.ref_cnt == 1 and table[3] is not block, "another request holds it"
    subject.pool.free_blocks([block])
    moved, given_back = rewrite(req_id, np.array([0, 3]))
    assert set(moved) == {0} and [block.block_id for block in given_back] == published[:1]
    assert moved[0] == table[0].block_id and table[0].block_hash is None and table[0].ref_cnt == 1
    taken += subject.pool.get_new_blocks(subject.free_blocks - 1)
    moved, given_back = rewrite(req_id, np.array([1, 2]))
    assert set(moved) == {1} and [block.block_id for block in given_back] == published[1:2], "one copy has room"
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
    resident.adopt(np.array([0, 2]), 3)  # a prefix out of the cache, one block of which was of no use
    blocks, places = 3, {0: 0, 2: 2}
    for more, gone, moves in rounds:
        places |= {block: block for block in range(blocks, blocks + more)}
        blocks += more
        assert resident.reach(blocks * BLOCK - 5) == (blocks - min(places.values())) * BLOCK - 5
        victims = sorted(chance.sample(sorted(places)[:-1], min(gone, len(places) - 1)))
        resident.evict(np.array(victims, np.int64), blocks * BLOCK)
        places = {block: place for block, place in places.items() if block not in victims}
        assert dict(zip(resident.resident.tolist(), resident.places.tolist())) == places
        if moves:
            ends = dict(zip(reversed(sorted(places)), range(blocks - 1, -1, -1)))
            gaps = zip(*(each.tolist() for each in resident.gaps()))
            assert {block: (distance, again) for block, distance, again in gaps} == {
                block: (ends[block] - block, place > block) for block, place in places.items() if ends[block] > place
            }
            resident.move_up()
            places = ends
    resident.restart()
    assert not len(resident.places)


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
    assert KVPolicyConfig.parse(H2O).allowed == have


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


class SelfAttention(torch.nn.Module):
    """An attention module of a model, of two KV heads, with a layer in it."""

    def __init__(self, rotary=None, keys=lambda positions, keys: keys, values=lambda positions, values: values):
        super().__init__()
        self.attn = torch.nn.Module()
        self.attn.__class__ = type("Layer", (Attention,), {"__init__": lambda self: None})
        self.attn.num_kv_heads = 2
        self.rotary_emb, self._keys, self._values = rotary, keys, values
        size = 2 * getattr(rotary, "head_size", 64)
        self.qkv_proj = torch.nn.Linear(HIDDEN, 3 * size)

    def forward(self, positions, hidden_states, scaling):
        query, key, value = self.qkv_proj(hidden_states).chunk(3, -1)
        query, key = self.rotary_emb(positions, query.contiguous(), key.contiguous())
        return self.attn(query, self._keys(positions, key), value=self._values(positions, value))


HIDDEN = 16


def rotations(model, layers, longest=512, dtype=torch.float32):
    made_for = SimpleNamespace(max_model_len=longest, dtype=dtype, get_hidden_size=lambda: HIDDEN)
    return positions.rotations(SimpleNamespace(model_config=made_for), model.to(dtype), layers)


def other_dimensions(at, keys):
    """As of a model that rotates the second half of each key: the halves change places."""
    return keys.unflatten(-1, (2, 2, -1)).flip(-2).flatten(-3)


def without_positions(at, keys):
    return keys[:1].expand_as(keys)


REFUSED = {
    "no embedding": (None, {}, r"has no rotary embedding beside it .* \(SelfAttention\)"),
    "other": ("other", {}, r"has no rotary embedding beside it by which keys can be rotated \(Identity\)"),
    "uneven": ("uneven", {}, "has a RotaryEmbedding whose angles don't grow evenly"),
    "other dimensions": ("default", dict(keys=other_dimensions), r"\(SelfAttention\) computes other keys .* by \d+%"),
    "a part of them": ("partial", dict(keys=other_dimensions), r"\(SelfAttention\) computes other keys"),
    "without positions": ("default", dict(keys=without_positions), r"\(SelfAttention\) computes other keys"),
    "scaled by position": (
        "default",
        dict(keys=lambda at, keys: keys * (1 + at[:, None] / 100)),
        "computes other keys",
    ),
    "NaN": ("default", dict(keys=lambda at, keys: keys * torch.nan), "computes other keys"),
    "values too": ("default", dict(values=lambda at, values: values + at[:, None]), "computes other values"),
    "no call": (
        "default",
        dict(keys=lambda at, keys: keys.no_such()),
        r"can't compute keys at other .*: AttributeError: .*no_such",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_whose_keys_can_not_be_turned_are_refused(vllm_config, case):
    kind, how, message = REFUSED[case]
    rotary = torch.nn.Identity() if kind == "other" else None
    if kind in ("default", "partial", "uneven"):
        parameters = {"partial_rotary_factor": 0.5} if kind == "partial" else {}
        rotary = get_rope(64, 192 if kind == "uneven" else 256, dtype=torch.float32, rope_parameters=parameters)
    if kind == "uneven":
        steps = torch.arange(192.0)[:, None] ** 1.1 * torch.linspace(1, 0.1, 32)
        rotary._compute_cos_sin_cache = lambda: (
            rotary._compute_inv_freq(1e4) is not None and torch.cat((steps.cos(), steps.sin()), -1)
        )
    model = torch.nn.Sequential(SelfAttention(rotary, **how))
    with pytest.raises(KVPolicyError, match=f"context: layers.0.attn.*{message}.*: leave context out for this model"):
        rotations(model, {"layers.0.attn": model[0].attn})
    assert "forward" not in vars(model[0].attn), "its own again"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", EMBEDDINGS)
def test_keys_that_can_be_turned_are_not_refused(vllm_config, kind, dtype):
    rotary = get_rope(64, 256, dtype=dtype, **EMBEDDINGS[kind])
    model = torch.nn.Sequential(SelfAttention(rotary))
    assert rotations(model, {"layers.0.attn": model[0].attn}, 100_000, dtype)


def test_adapters_are_left_out_of_the_comparison(vllm_config):
    """They can't be called before the first step, which says which request has which."""
    model = torch.nn.Sequential(SelfAttention(get_rope(64, 256, dtype=torch.float32)))
    adapted = torch.nn.Identity()
    adapted.base_layer, model[0].qkv_proj = model[0].qkv_proj, adapted
    assert rotations(model, {"layers.0.attn": model[0].attn})
    assert "forward" not in vars(adapted), "its own again"


def test_a_layer_that_is_unlike_the_others_is_named(vllm_config):
    rotary = get_rope(64, 256, dtype=torch.float32)
    model = torch.nn.Sequential(SelfAttention(rotary), SelfAttention(rotary, keys=without_positions))
    with pytest.raises(KVPolicyError, match=r"context: layers.1.attn \(SelfAttention\) computes other keys"):
        rotations(model, {f"layers.{i}.attn": each.attn for i, each in enumerate(model)})


def test_layers_share_an_embedding_that_grows_once(vllm_config):
    rotary = get_rope(32, 300, dtype=torch.float32)
    model = torch.nn.Sequential(SelfAttention(rotary), SelfAttention(rotary))
    layers = {f"layers.{i}.attn": each.attn for i, each in enumerate(model)}
    found = rotations(model, layers, 400)
    assert list(found) == list(layers.values()) and len(set(map(id, found.values()))) == 1
    assert len(rotary.cos_sin_cache) == 400
    elsewhere = {"layers.9.attn": SimpleNamespace()}
    with pytest.raises(KVPolicyError, match="layers.9.attn has no rotary embedding beside it"):
        rotations(model, elsewhere, 400)


LATENT = dict(qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32, kv_lora_rank=32, num_key_value_heads=4)
ARCHITECTURES = {
    # Its rotated dimensions are the last of each key.
    "MiniCPM3ForCausalLM": ("minicpm3", dict(q_lora_rank=64, head_dim=64, **LATENT)),
    # Run as plain attention.
    "DeepseekV2ForCausalLM": (
        "deepseek_v2",
        dict(q_lora_rank=None, n_routed_experts=2, first_k_dense_replace=2, moe_intermediate_size=32, **LATENT),
    ),
    # Half of a key's dimensions, in pairs of neighbours, and other names of arguments.
    "GPTJForCausalLM": ("gptj", dict(num_attention_heads=2, n_inner=128, rotary_dim=16)),
}


@pytest.fixture
def random_server(server, tmp_path, monkeypatch):
    """Of an architecture, with random weights; latent attention is run as plain attention."""
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")

    def make(architecture):
        kind, own = ARCHITECTURES[architecture]
        sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
        config = AutoConfig.for_model(kind, **{**sizes, "max_position_embeddings": CONTEXT, **own})
        config.architectures = [architecture]
        config.save_pretrained(tmp_path)
        policy = {**WINDOW, "allow": []}
        return server(policy, model=tmp_path, load_format="dummy", skip_tokenizer_init=True)

    return make


@pytest.mark.parametrize("architecture", ["MiniCPM3ForCausalLM", "DeepseekV2ForCausalLM"])
def test_rotated_dimensions_that_come_last_are_refused(random_server, architecture):
    """Turning the first dimensions would spoil keys of the first, and leave the second where they are."""
    with pytest.raises(KVPolicyError, match=r"model.layers.0.self_attn.attn \(\w+\) computes other keys at later"):
        random_server(architecture)


def test_rotated_dimensions_in_pairs_of_neighbours_are_served(random_server):
    subject = random_server("GPTJForCausalLM")
    with watched(subject) as moves:
        subject.generate([random_prompt(100)], max_tokens=400, detokenize=False)
    assert moves
    subject.assert_nothing_left()


# --- roundings -------------------------------------------------------------------------------------------------------


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def layer_store(frequencies, caches, scale=1.0):
    """Of layers with these caches, as on a device."""
    layers = [torch.nn.Identity() for _ in caches]
    for layer in layers:
        layer._k_scale_float = layer._v_scale_float = scale
    turns = dict.fromkeys(layers, Rotation(frequencies, neox=True))
    return LayerStore(DeviceOps(), lambda: zip(layers, caches), turns)


def step(runtime, moves=(), holes=()):
    runtime.plan = EvictionPlan([GroupPlan(holes={"r": list(holes)})], rotations=list(moves))
    runtime.rearrange(None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_are_rounded_once_however_often_they_move(dtype):
    """Also of a block that goes into another physical block on its way, and of one that begins later."""
    kind, scale, size = DTYPES[dtype], 0.05 if dtype == "fp8" else 1.0, 64
    made = torch.randn(2, 8, 2, BLOCK, 2 * size, generator=torch.Generator().manual_seed(0)).div(scale).to(kind)
    caches = made.clone()
    frequencies = 5e5 ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    given = caches.view(torch.uint8) if dtype == "fp8" else caches
    store = layer_store(frequencies, list(given), scale)
    runtime = EvictionRuntime([GroupRuntime(KVPolicyConfig.parse(WINDOW), BLOCK, 4, 4096, 2, 2, store)])
    # Logical block -> where it was made, where it is, positions that it has moved by.
    blocks = {0: [1, 1, 0], 3: [2, 2, 0], 9: [3, 3, 0]}
    for move in range(1, 501):
        if move == 7:
            blocks[0][1] = 5
        if move == 30:
            step(runtime, holes=[9])
            del blocks[9]
        which = [block for block in blocks if block != 3 or move > 60]
        source = [2 if block == 3 else 3 if block == 9 else 5 if move > 7 else 1 for block in which]
        again = [blocks[block][2] > 0 for block in which]
        for block in which:
            blocks[block][2] += 1024 + BLOCK * block
        target, tokens = ([blocks[block][at] for block in which] for at in (1, 2))
        step(runtime, [KeyRotation("r", 0, which, source, target, tokens, again)])
        assert runtime.groups[0].originals.blocks("r") == set(which)
        if move not in (1, 20, 100, 500):
            continue
        for was, now, total in blocks.values():
            first, second = made[:, was, ..., :size].double().chunk(2, -1)
            angles = total * frequencies
            cos, sin = angles.cos(), angles.sin()
            exact = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
            off, numbers = (caches[:, now, ..., :size].double() - exact).abs(), torch.finfo(kind)
            largest = numbers.eps / 2 * exact.abs() + numbers.smallest_normal * numbers.eps
            clipped = exact.abs() > numbers.max
            assert (clipped | (off <= largest * (1 + 1e-3) + 1e-6 * first.abs().max())).all(), f"after {move} moves"
            assert torch.equal(caches[:, now, ..., size:].float(), made[:, was, ..., size:].float())
    runtime.groups[0].originals.forget({"r"})
    assert runtime.groups[0].originals.is_empty


def test_a_block_that_has_moved_needs_its_original():
    """Keys that are turned already are never taken for those that were computed."""
    store = layer_store(torch.ones(8, dtype=torch.float64), [torch.randn(4, 1, BLOCK, 32)])
    runtime = EvictionRuntime([GroupRuntime(KVPolicyConfig.parse(WINDOW), BLOCK, 4, 4096, 1, 1, store)])
    with pytest.raises(KeyError):
        step(runtime, [KeyRotation("r", 0, [0], [1], [1], [64], [True])])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), min_size=1, max_size=12), st.randoms())
def test_originals_are_of_the_blocks_that_have_moved(rounds, chance):
    """However decisions follow one another, several of them in one plan too: keys lie where they should, and nothing is
    kept of blocks that are gone, nor of a request that begins again."""
    frequencies = torch.tensor([0.3, 0.01], dtype=torch.float64)
    (cache,) = caches = [torch.zeros(200, 1, BLOCK, 8)]
    group = GroupRuntime(KVPolicyConfig.parse(WINDOW), BLOCK, 4, 8192, 1, 1, layer_store(frequencies, caches))
    runtime, resident = EvictionRuntime([group]), RequestBlocks(KVPolicyConfig.parse(WINDOW), None, BLOCK)
    table, made, blocks, free = {}, {}, 0, list(range(1, 200))
    moves, holes = [], []
    for gone, moving, told in rounds:
        for block in range(blocks, blocks + 3):
            table[block] = free.pop(chance.randrange(len(free)))
            made[block] = cache[table[block]] = torch.randn(1, BLOCK, 8)
        blocks += 3
        resident.reach(blocks * BLOCK)
        victims = sorted(chance.sample(sorted(table)[:-1], min(gone, len(table) - 1)))
        resident.evict(np.array(victims, np.int64), blocks * BLOCK)
        holes += victims
        for block in victims:
            del table[block]
        if moving:
            which, distances, again = (each.tolist() for each in resident.gaps())
            source = [table[block] for block in which]
            for block in which:
                if chance.random() < 0.2:
                    table[block] = free.pop(chance.randrange(len(free)))
            target, tokens = [table[block] for block in which], [BLOCK * distance for distance in distances]
            moves.append(KeyRotation("r", 0, which, source, target, tokens, again))
            resident.move_up()
        if told:
            step(runtime, moves, holes)
            moves, holes = [], []
    step(runtime, moves, holes)
    turn = Rotation(frequencies, neox=True)
    for block, place in zip(resident.resident.tolist(), resident.places.tolist()):
        want = turn(made[block][None, ..., :4], torch.tensor([(place - block) * BLOCK]))[0]
        torch.testing.assert_close(cache[table[block]][..., :4], want, atol=0, rtol=0)
    moved = resident.resident[resident.places > resident.resident].tolist()
    assert group.originals.blocks("r") == set(moved)
