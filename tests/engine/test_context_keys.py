"""Which models' keys can be turned to later positions, and how often moved keys are rounded."""

from types import SimpleNamespace

import numpy as np
import pytest
import test_context
import torch
from engine import random_prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from parts import part_of
from test_context import BLOCK, CONTEXT, EMBEDDINGS, WINDOW, watched
from transformers import AutoConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding import get_rope

from vllm_evict.compute.attention.device import DeviceOps
from vllm_evict.compute.group import GroupRuntime
from vllm_evict.compute.holes import Start
from vllm_evict.compute.kernels.rotate import Rotation
from vllm_evict.compute.runtime import EvictionRuntime
from vllm_evict.compute.shape import Shape
from vllm_evict.compute.store import Store
from vllm_evict.config import KVPolicyConfig, KVPolicyError
from vllm_evict.core.blocks import RequestBlocks
from vllm_evict.core.plan import PLAN, EvictionPlan, GroupPlan
from vllm_evict.core.residence import HOLE
from vllm_evict.features.context import positions
from vllm_evict.features.context.plan import KeyRotation
from vllm_evict.features.context.worker import Originals

short, server, vllm_config = test_context.short, test_context.server, test_context.vllm_config


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
    """Rotate as a model does that rotates the second half of each key: the halves change places."""
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


def group_of(shape, frequencies, caches, scale=1.0):
    """A KV group of layers with these caches, as on a device."""
    layers = [torch.nn.Identity() for _ in caches]
    for layer, cache in zip(layers, caches):
        layer._k_scale_float = layer._v_scale_float = scale
        layer.impl = SimpleNamespace(head_size=cache.shape[-1] // 2)
    group = GroupRuntime(KVPolicyConfig.parse(WINDOW), shape, Store(DeviceOps(), lambda: zip(layers, caches)))
    part_of(group, Originals).rotations = dict.fromkeys(layers, Rotation(frequencies, neox=True))
    return group


def step(runtime, moves=(), holes=()):
    none = SimpleNamespace(resumed_req_ids=set())
    output = SimpleNamespace(
        finished_req_ids=set(), preempted_req_ids=None, scheduled_cached_reqs=none, scheduled_new_reqs=[]
    )
    setattr(output, PLAN, EvictionPlan([GroupPlan(changes={"r": dict.fromkeys(holes, HOLE)})], list(moves)))
    runtime.begin(output)
    runtime.rearrange(None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_are_rounded_once_however_often_they_move(dtype):
    """Also of a block that goes into another physical block on its way, and of one that begins later."""
    kind, scale, size = DTYPES[dtype], 0.05 if dtype == "fp8" else 1.0, 64
    made = torch.randn(2, 8, 2, BLOCK, 2 * size, generator=torch.Generator().manual_seed(0)).div(scale).to(kind)
    caches = made.clone()
    frequencies = 5e5 ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    given = caches.view(torch.uint8) if dtype == "fp8" else caches
    runtime = EvictionRuntime([group_of(Shape(BLOCK, 4, 4096, 2, 2), frequencies, list(given), scale)])
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
        step(runtime, [KeyRotation("r", 0, source, target, which, tokens, again)])
        assert part_of(runtime.groups[0], Originals).blocks("r") == set(which)
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
    originals = part_of(runtime.groups[0], Originals)
    originals.begin(Start(GroupPlan(), {"r"}, set(), set(), set(), runtime.groups[0].holes))
    assert originals.is_empty


def test_a_block_that_has_moved_needs_its_original():
    """Keys that are turned already are never taken for those that were computed."""
    caches = [torch.randn(4, 1, BLOCK, 32)]
    runtime = EvictionRuntime([group_of(Shape(BLOCK, 4, 4096, 1, 1), torch.ones(8, dtype=torch.float64), caches)])
    with pytest.raises(KeyError):
        step(runtime, [KeyRotation("r", 0, [1], [1], [0], [64], [True])])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), min_size=1, max_size=12), st.randoms())
def test_originals_are_of_the_blocks_that_have_moved(rounds, chance):
    """However decisions follow one another, several of them in one plan too: keys lie where they should, and nothing is
    kept of blocks that are gone, nor of a request that begins again."""
    frequencies = torch.tensor([0.3, 0.01], dtype=torch.float64)
    (cache,) = caches = [torch.zeros(200, 1, BLOCK, 8)]
    group = group_of(Shape(BLOCK, 4, 8192, 1, 1), frequencies, caches)
    runtime, resident = EvictionRuntime([group]), RequestBlocks(KVPolicyConfig.parse(WINDOW), None, BLOCK)
    table, made, blocks, free = {}, {}, 0, list(range(1, 200))
    moves, holes = [], []
    for gone, moving, told in rounds:
        for block in range(blocks, blocks + 3):
            table[block] = free.pop(chance.randrange(len(free)))
            made[block] = cache[table[block]] = torch.randn(1, BLOCK, 8)
        blocks += 3
        resident.residence.span(blocks * BLOCK)
        victims = sorted(chance.sample(sorted(table)[:-1], min(gone, len(table) - 1)))
        resident.evict(np.array(victims, np.int64), blocks * BLOCK)
        holes += victims
        for block in victims:
            del table[block]
        if moving:
            which, distances, again = (each.tolist() for each in resident.residence.gaps())
            source = [table[block] for block in which]
            for block in which:
                if chance.random() < 0.2:
                    table[block] = free.pop(chance.randrange(len(free)))
            target, tokens = [table[block] for block in which], [BLOCK * distance for distance in distances]
            moves.append(KeyRotation("r", 0, source, target, which, tokens, again))
            resident.residence.move_up()
        if told:
            step(runtime, moves, holes)
            moves, holes = [], []
    step(runtime, moves, holes)
    turn = Rotation(frequencies, neox=True)
    for block, place in zip(resident.residence.pool.tolist(), resident.residence.places.tolist()):
        want = turn(made[block][None, ..., :4], torch.tensor([(place - block) * BLOCK]))[0]
        torch.testing.assert_close(cache[table[block]][..., :4], want, atol=0, rtol=0)
    moved = resident.residence.pool[resident.residence.places > resident.residence.pool].tolist()
    assert part_of(group, Originals).blocks("r") == set(moved)
