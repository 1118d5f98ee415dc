"""Hybrids: layers with states beside full attention, which loses blocks. States stay vLLM's, and impure ones are lost."""

import logging
from contextlib import nullcontext

import numpy as np
import pytest
import test_poison
import test_reach
import test_read
import torch
from engine import after, exactly, logprobs_of, random_prompt
from latent import mended_rotation
from linear import stand_in_for_gdn, stand_in_for_mamba
from oracle.hybrids import HYBRIDS, DenseHybrid, make_tiny_hybrid
from parity import assert_like_oracle
from parts import published
from vllm import _custom_ops
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

from vllm_evict.core.mechanisms import Pressure

pytestmark = pytest.mark.minutes

BLOCK = 32
H2O = {"name": "h2o", "budget": 192, "buffer": 64, "sink": 32, "recent": 64}
WHOLE = {**H2O, "name": "snapkv", "window": 24, "prompt": "whole"}
WINDOW = {"name": "sink-window", "budget": 192, "buffer": 64, "sink": 32}
PROMPTS = [random_prompt(length, length) for length in (500, 40, 120)]
CACHED = {"enable_prefix_caching": True}


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory):
    """Engine arguments of a tiny hybrid, by its kind."""
    made = {}

    def make(kind):
        if kind not in made:
            made[kind] = make_tiny_hybrid(tmp_path_factory.mktemp("hybrids") / kind, kind)
        return {"model": made[kind], "dtype": str(HYBRIDS[kind][1]).removeprefix("torch.")}

    return make


@pytest.fixture(autouse=True)
def packed_in_bfloat16(monkeypatch):
    """vLLM 0.31 and older pack weights of convolutions for a kernel in bfloat16, whatever their dtype is."""
    pack = _custom_ops.causal_conv1d_weight_pack

    def mended(weight):
        return pack(weight) if weight.dtype == torch.bfloat16 else weight[:, None]

    monkeypatch.setattr(_custom_ops, "causal_conv1d_weight_pack", mended)


@pytest.fixture
def whole_chunks(monkeypatch):
    """vLLM's CPU kernel for Mamba2 makes no state inside a chunk. Without blocks for such states vLLM ends chunks where
    states are kept, as with other layers."""
    monkeypatch.setattr(MambaMixer2, "get_kv_cache_spec", MambaBase.get_kv_cache_spec)


def dense_of(hybrids, kind):
    return DenseHybrid(hybrids(kind)["model"])


def apart(dense, prompt, output, trace=None):
    """Differences of an output's log-probabilities from those of the dense model, which lacks what the trace lacks."""
    ids = [*prompt, *output.outputs[0].token_ids]
    mask, done = torch.ones(len(ids), len(ids)).tril().bool(), trace.start if trace else 0
    for count, gone in zip(trace.steps, trace.evicted) if trace else ():
        done += count
        for block in gone:
            mask[done:, block * BLOCK : (block + 1) * BLOCK] = False
    logits, _ = dense.forward(ids, dense.new_cache(), mask)
    logprobs = torch.log_softmax(logits.double(), -1)[len(prompt) - 1 : -1]
    return np.abs(logprobs_of(output) - logprobs[range(len(logprobs)), ids[len(prompt) :]].numpy())


#: Kind -> largest difference of a log-probability from transformers' under the same mask, mean and maximum. GDN runs
#: in bfloat16.
NOISE = {kind: (1e-5, 1e-4) if dtype == torch.float32 else (0.06, 0.5) for kind, (options, dtype) in HYBRIDS.items()}


@pytest.fixture
def mended(kind, monkeypatch):
    """vLLM's CPU engine rotates LFM2's heads wrongly, and has no kernels for Jamba's states."""
    if kind == "jamba":
        stand_in_for_mamba(monkeypatch)
    with mended_rotation() if kind == "lfm2" else nullcontext():
        yield


@pytest.mark.oracle("hybrids")
@pytest.mark.both_runners("falcon_h1", "qwen3_next")
@pytest.mark.parametrize("kind", HYBRIDS)
def test_full_is_stock_to_the_byte_and_evictions_are_a_mask(engine, hybrids, mended, kind):
    """On one engine each: requests that lack nothing, twice for prefix hits, then requests that lose blocks."""
    options = {**hybrids(kind), "max_num_batched_tokens": 192, "enable_prefix_caching": kind in ("lfm2", "qwen3_next")}
    stock, server = engine(**options), engine({**H2O, "allow": ["full", "sink-window"]}, **options)
    full = {"max_tokens": 16, "logprobs": 0}
    for caching in (False, options["enable_prefix_caching"]):
        want = exactly(stock.generate(PROMPTS, **full))
        assert exactly(server.generate(PROMPTS, **full, extra_args={"kv_policy": "full"})) == want
        assert any(cached for _, _, cached in want) == caching
    dense, (mean, most) = dense_of(hybrids, kind), NOISE[kind]
    for policy in (H2O, WINDOW):
        asked = {"max_tokens": 36, "logprobs": 1, "extra_args": {"kv_policy": policy["name"]}}
        prompts = [random_prompt(length, 7 * length) for length in (520, 230)]
        for prompt, output, trace in server.answered([(prompt, asked) for prompt in prompts]):
            assert output.kv_usage.evicted_blocks == sum(map(len, trace.evicted)) > 0
            assert max(trace.held) <= 8 + 6 + 1, "nothing comes back to the pool"
            differ, whole = apart(dense, prompt, output, trace), apart(dense, prompt, output)
            assert differ.mean() <= mean and differ.max() <= most < whole.max()
    server.assert_nothing_left()


@pytest.mark.oracle("hybrids")
def test_evictions_match_the_dense_oracle(engine, hybrids):
    """Which blocks go, after which steps: attention mass is measured beside states as anywhere."""
    server = engine(WHOLE, **hybrids("falcon_h1"), max_num_batched_tokens=192, enable_prefix_caching=False)
    prompt = random_prompt(500, 500)
    (output,), (trace,) = server.traced([(prompt, {"max_tokens": 24, "logprobs": 1})])
    assert assert_like_oracle(dense_of(hybrids, "falcon_h1"), prompt, output, trace, WHOLE) > 8
    server.assert_nothing_left()


@pytest.mark.both_runners
@pytest.mark.parametrize("kind, blocks", [("falcon_h1", 24), ("qwen3_next", 60)])
def test_prefixes_on_the_host_are_hits(engine, hybrids, whole_chunks, poisoned, kind, blocks):
    """With their states, which leave a small pool as early as they do. Not of LFM2, whose convolutions stock vLLM
    computes otherwise after a hit."""
    test_reach.check_agents(engine, blocks, **hybrids(kind))


@pytest.mark.oracle("hybrids")
@pytest.mark.both_runners("falcon_h1")
@pytest.mark.parametrize("kind", ["falcon_h1", "lfm2"])
def test_layers_reach_blocks_of_the_host(engine, hybrids, mended, whole_chunks, poisoned, kind):
    """Beside Mamba, and beside short convolutions."""
    test_reach.check_classes(engine, dense_of(hybrids, kind), **hybrids(kind))


@pytest.mark.both_runners("prompts-falcon_h1", "prompts-qwen3_next")
@pytest.mark.parametrize("kind", ["falcon_h1", "lfm2", "qwen3_next"])
@pytest.mark.parametrize("read_prompts", test_read.OF_PROMPTS.values(), ids=test_read.OF_PROMPTS)
def test_layers_read_their_best_blocks(engine, hybrids, mended, whole_chunks, poisoned, kind, read_prompts):
    """GDN in float32: `stand_in_for_gdn` computes what vLLM's kernel does."""
    if kind == "qwen3_next":
        stand_in_for_gdn()
    options = {**hybrids(kind), "dtype": "float32"}
    test_read.check_classes(engine, dense_of(hybrids, kind), read_prompts=read_prompts, **options)


@pytest.mark.parametrize("kind", ["falcon_h1", "qwen3_next"])
def test_prompts_that_are_shorter_change_no_bit(engine, hybrids, whole_chunks, kind):
    test_read.check_shorter(engine, **hybrids(kind))


# --- prefix caching --------------------------------------------------------------------------------------------------


#: Kind, and tokens after which vLLM keeps a state; 0: at the end of the prompt.
STATES = {"every-state": ("falcon_h1", BLOCK), "last-state": ("qwen3_next", 0)}


@pytest.mark.parametrize("name", STATES)
def test_states_of_a_reduced_context_are_published_nowhere(engine, hybrids, whole_chunks, name):
    """A state that was computed over holes would be hit under the hash of the whole prefix."""
    kind, every = STATES[name]
    options = {**CACHED, "max_num_batched_tokens": 96, "prefix_cache_retention_interval": every}
    server = engine({**H2O, "allow": ["full"]}, **hybrids(kind), **options)
    prompt, seen = random_prompt(600), []

    def look(server):
        if server.scheduler.requests:
            (resident,) = server.scheduler.residents.values()
            seen.append(resident.pure_tokens)
            for group, manager in enumerate(server.all_managers if resident.pure_tokens else ()):
                blocks, end = published(server, group), resident.pure_tokens // BLOCK
                # Of states those at ends of chunks, or the last one.
                of_states = list(range(2, end, 3)) if every else [end - 1]
                assert blocks == (list(range(end)) if manager in server.managers else of_states)

    server.add(prompt, max_tokens=40)
    server.run(look)
    pure = seen[-1]
    assert 256 < pure < 400 and pure % BLOCK == 0
    # Requests that keep everything hit what is pure, compute the rest and publish it; the next one hits all of that.
    everything = {"max_tokens": 12, "logprobs": 0, "extra_args": {"kv_policy": "full"}}
    dense, (mean, most) = dense_of(hybrids, kind), NOISE[kind]
    for cached in (pure, 576):
        (output,) = server.generate([prompt], **everything)
        assert output.num_cached_tokens == cached
        differ = apart(dense, prompt, output)
        assert differ.mean() <= 2 * mean and differ.max() <= most
    # The same prefix with another end: evicted again, from a hit.
    (output,), _ = server.traced([(prompt + random_prompt(100, 1), {"max_tokens": 4, "logprobs": 1})])
    assert output.num_cached_tokens == 576 and output.kv_usage.evicted_blocks > 0
    server.assert_nothing_left()


@pytest.mark.parametrize("name", STATES)
def test_states_of_prompts_that_read_less_are_published_nowhere(engine, hybrids, whole_chunks, name):
    """The chunk that ends after 288 tokens is the first that reads less; who hits what is before it is stock's."""
    kind, every = STATES[name]
    options = {**hybrids(kind), **CACHED, "max_num_batched_tokens": 96, "prefix_cache_retention_interval": every}
    server, stock = engine({"name": "full", **test_read.READ, "read_prompts": 256}, **options), engine(**options)
    prompt, seen = random_prompt(600), {}

    def look(server):
        if server.scheduler.requests:
            seen.update((manager, published(server, group)) for group, manager in enumerate(server.all_managers))

    for _ in range(2):
        server.add(prompt, max_tokens=40)
        server.run(look)
    for manager, blocks in seen.items():
        assert blocks == (list(range(6)) if manager in server.managers else [2, 5] if every else [5])
    for again in (prompt[:250], prompt[:200] + random_prompt(40, 1)):
        ours, theirs = (each.generate([again], max_tokens=5, logprobs=0)[0] for each in (server, stock))
        assert ours.num_cached_tokens == 192 and np.array_equal(logprobs_of(ours), logprobs_of(theirs))
    server.assert_nothing_left()


@pytest.mark.both_runners("h2o")
@pytest.mark.parametrize("name", ["h2o", "sink-window"])
def test_a_prompts_end_is_published_over_no_hole(engine, hybrids, whole_chunks, name):
    """vLLM publishes the end of a prompt that fills a block in part with the step that computes it, and the state
    there. Another request needs room in that very step, and in the steps around it.
    """
    policy = {"name": name, "when": "pressure", "admit": True, "budget": 128, "sink": 32, "recent": 32, "buffer": 0}
    options = {
        **hybrids("falcon_h1"),
        **CACHED,
        "prefix_match_unit": 16,
        "max_num_seqs": 4,
        "mamba_cache_mode": "align",
    }
    server, full, held_back = engine({**policy, "allow": ["full"]}, blocks=62, **options), {"kv_policy": "full"}, []
    crowd, prompt, other = (random_prompt(tokens, tokens) for tokens in (1000, 18 * BLOCK + 20, 20 * BLOCK))
    end = 19 * BLOCK - 16

    def look(server):
        """Tokens of the prompt that can be hit are pure."""
        for req_id, request in server.scheduler.requests.items():
            pure = server.scheduler.residents[req_id].pure_tokens
            if req_id.startswith("prompt") and pure is not None:
                hits = [server.pool.get_cached_block(request.block_hashes[end // 16 - 1], [each]) for each in range(2)]
                assert pure >= end or not any(hits)

    def offered(offer, group, request):
        if request.num_computed_tokens < end <= server.scheduler.residents[request.request_id].state.published_tokens:
            held_back.append(len(offer.blocks))

    after(server.scheduler.part(Pressure), "offer", offered)
    for step in range(3, 10):
        server.llm.reset_prefix_cache()
        server.add(crowd, max_tokens=5, extra_args=full)
        for _ in range(5):
            server.llm.llm_engine.step()
        server.add(prompt, f"prompt{step}", max_tokens=5)
        for _ in range(step - 5):
            server.llm.llm_engine.step()
        server.add(other, max_tokens=5)
        server.run(look)
    assert held_back and not any(held_back)
    server.assert_nothing_left()


# --- the pool --------------------------------------------------------------------------------------------------------


def test_freed_blocks_are_never_read_and_all_come_back(engine, hybrids, whole_chunks, monkeypatch):
    """A crowd that is preempted and aborted: a freed block may become a state, and a state's block a request's keys."""
    crowd, dense = (*test_poison.SERVERS["h2o"][:2], 48), dense_of(hybrids, "falcon_h1")

    def hybrid_engine(policy, **kwargs):
        return engine(policy, **{**kwargs, **hybrids("falcon_h1")})

    test_poison.check_crowd(hybrid_engine, None, monkeypatch, *crowd, "prefix-cache", dense)


@pytest.mark.oracle("hybrids")
def test_by_token_beside_states(engine, hybrids, whole_chunks, poisoned):
    """Each head keeps its own tokens; nothing of that reaches states, and nothing is left."""
    policy = {**H2O, "granularity": "token", "allow": ["full"]}
    server = engine(policy, **hybrids("falcon_h1"), max_num_batched_tokens=192, **CACHED)
    prompt = random_prompt(600, 3)
    (output,) = server.generate([prompt], max_tokens=120, logprobs=0)
    assert output.kv_usage.evicted_blocks > 8 and np.isfinite(logprobs_of(output)).all()
    (output,) = server.generate([prompt], max_tokens=20, logprobs=0, extra_args={"kv_policy": "full"})
    assert output.num_cached_tokens >= 256
    assert apart(dense_of(hybrids, "falcon_h1"), prompt, output).max() <= NOISE["falcon_h1"][1]
    server.assert_nothing_left()


def test_the_start_up_line_says_whose_groups_are_whose_and_what_a_budget_rounds_to(engine, hybrids, monkeypatch):
    lines = []
    monkeypatch.setattr(logging.getLogger("vllm.evict"), "info", lines.append)
    engine({**H2O, "budget": 600}, **hybrids("granitemoehybrid"), block_size=128, enable_prefix_caching=False)
    (line,) = [line for line in lines if "model runner" in line]
    assert "; 1 KV group of 1 layers, beside 3 with states, managed by vLLM" in line
    became = "640 tokens, 5 blocks of 128: 1 of sinks, 1 of recent tokens, 3 to choose"
    assert line.endswith(f"; a budget of 600 tokens becomes {became}")
