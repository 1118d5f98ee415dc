"""Latents (MLA) beside linear attention, behind views: tiny models against dense ones under explicit masks.

States' kernels have stand-ins in plain torch (linear.py). Latents lie in blocks as large as a state, which vLLM splits
into kernel blocks of 16 tokens.
"""

from types import SimpleNamespace

import drafting
import numpy as np
import pytest
import test_reach
import test_read
import torch
from engine import PLAN, V2, after, assert_like_stock, logprobs_of, random_prompt
from interpreter import in_place_of, use_kernels
from latent import keep_what_is_asked, reference_mla, take_large_tiles
from latent import stand_in as in_place_of_device
from linear import stand_in, stand_in_for_kimi
from oracle.latent_hybrids import LATENT_HYBRIDS, DenseLatentHybrid, make_latent_hybrid
from parity import assert_like_oracle
from parts import published

from vllm_evict.compute.kernel_blocks import KernelBlockViews
from vllm_evict.compute.kernels.view import View
from vllm_evict.config import KVPolicyError
from vllm_evict.integration.engine.poison import Fills
from vllm_evict.integration.worker import backend as backends
from vllm_evict.integration.worker.latents import latent_types

BLOCK = 128
SIZES = {"budget": 512, "sink": 128, "recent": 128, "buffer": 0}
H2O = {"name": "h2o", **SIZES}
NAMES = ["h2o", "sink-window", "knorm", "keydiff"]
LIGHTNING, DELTA, KIMI = LATENT_HYBRIDS
#: Chunks end inside of blocks.
OPTIONS = {"block_size": BLOCK, "attention_backend": "CPU_MLA", "max_num_batched_tokens": 320, "max_model_len": 4096}
WHOLE = {"max_num_batched_tokens": 1024}
#: Differences of log-probabilities from the dense model's, in float32.
ATOL = 1e-4


pytestmark = pytest.mark.since("0.32", "it splits blocks for backends in block tables, which is refused")


@pytest.fixture(autouse=True)
def linear(monkeypatch):
    stand_in(monkeypatch)
    keep_what_is_asked(monkeypatch)
    with reference_mla():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {each: make_latent_hybrid(tmp_path_factory.mktemp("hybrids") / each, each) for each in LATENT_HYBRIDS}


@pytest.fixture
def hybrids(folders, monkeypatch):
    """Architecture -> directory and dense model."""

    def make(architecture):
        if architecture == KIMI:
            stand_in_for_kimi(monkeypatch)
        return folders[architecture], DenseLatentHybrid(folders[architecture])

    return make


def expected(dense, prompt, output, trace=None, size=BLOCK):
    """Log-probabilities of a request's tokens where queries see no block that was evicted before."""
    ids, done = [*prompt, *output.outputs[0].token_ids], trace.start if trace else 0
    seen = torch.ones(len(ids), len(ids)).tril().bool()
    for count, evicted in zip(trace.steps, trace.evicted) if trace else ():
        done += count
        for block in evicted:
            seen[done:, block * size : (block + 1) * size] = False
    logits, _ = dense.forward(ids, dense.new_cache(), seen)
    logprobs = torch.log_softmax(logits.double(), -1)[len(prompt) - 1 : -1]
    return logprobs[range(len(logprobs)), ids[len(prompt) :]].numpy()


def layers_of(server):
    """The layers whose latents are cached."""
    layers = server.core.vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if isinstance(layer, latent_types())]


@pytest.mark.oracle("latents beside states (simulated)")
@pytest.mark.both_runners(DELTA)
@pytest.mark.parametrize("architecture", LATENT_HYBRIDS)
def test_evictions_and_answers_are_those_of_a_dense_model(engine, hybrids, poisoned, architecture):
    """Policies with and without scores in one batch; freed blocks are full of NaN."""
    folder, dense = hybrids(architecture)
    server = engine(H2O, model=folder, enable_prefix_caching=False, **OPTIONS)
    assert [type(manager).__name__ for manager in server.all_managers] == ["StateManager", "EvictableManager"]
    assert type(server.manager.kv_cache_spec).__name__ == "EvictableLatentSpec" and server.manager.block_size == BLOCK
    assert {layer.kv_cache.shape[1:] for layer in layers_of(server)} == {(16, 576)}
    prompts = [random_prompt(length, length) for length in (900, 800, 780, 790, 40)]
    asked = [{"max_tokens": 6, "logprobs": 0, "extra_args": {"kv_policy": name}} for name in NAMES]
    moved = []
    for name, (prompt, output, trace) in zip(NAMES, server.answered(list(zip(prompts, asked)))):
        got, want = logprobs_of(output), expected(dense, prompt, output, trace)
        np.testing.assert_allclose(got, want, atol=ATOL, err_msg=name)
        assert sum(map(len, trace.evicted)) > 2 and trace.held[-2] <= 5, name
        moved.append(np.abs(got - expected(dense, prompt, output)).max())
        if name == "h2o":
            assert assert_like_oracle(dense, prompt, output, trace, H2O, block_size=BLOCK, atol=ATOL) > 2
    assert min(moved) > 0.01  # what was evicted matters to this model
    server.assert_nothing_left()


#: Of 5 blocks one is of sinks, 3 are the room and one has recent tokens.
REACH = {"budget": 640, "sink": 128, "recent": 1, "read": 512, "hold": 3}


@pytest.mark.oracle("latents beside states (simulated)")
@pytest.mark.both_runners(KIMI)
@pytest.mark.parametrize("architecture", [LIGHTNING, KIMI])
def test_layers_reach_blocks_of_the_host(engine, hybrids, poisoned, architecture):
    """A layer chooses blocks of the pool, and its kernel reads them by kernel blocks."""
    folder, dense = hybrids(architecture)
    policy = {"name": "full", "evict": "host", "host": "256MiB", "buffer": 0, **REACH}
    server = engine(policy, model=folder, enable_prefix_caching=False, **OPTIONS)
    requests = [(random_prompt(length, length), {"max_tokens": 12, "logprobs": 1}) for length in (1200, 1000, 40)]
    for prompt, output, trace in server.answered(requests):
        like = {**REACH, "dense": dense, "size": BLOCK, "atol": ATOL}
        chosen = test_reach.assert_reaches_like_dense(None, prompt, output, trace, **like)
        assert chosen > 2 or len(prompt) == 40
    test_reach.assert_nothing_left(server)


@pytest.mark.oracle("latents beside states (simulated)")
def test_layers_read_their_best_blocks(engine, hybrids, poisoned):
    folder, dense = hybrids(LIGHTNING)
    read = {"read": 512, "sink": 128, "recent": 1, "hold": 3}
    server = engine({"name": "full", **read}, model=folder, enable_prefix_caching=False, **OPTIONS)
    requests = [(random_prompt(length, length), {"max_tokens": 12, "logprobs": 1}) for length in (900, 40)]
    for answered in server.answered(requests):
        assert (
            test_read.assert_reads_like_dense(None, *answered, dense=dense, atol=ATOL, size=BLOCK, **read)
            > 2 * (len(answered[0]) > 40) - 1
        )
    test_read.assert_nothing_left(server)


@pytest.mark.oracle("latents beside states (simulated)")
def test_blocks_with_the_largest_vectors_go_first(engine, hybrids):
    """`knorm` reads the cache by the pool's blocks, as does `keydiff`."""
    folder, dense = hybrids(LIGHTNING)
    server = engine({"name": "knorm", **SIZES}, model=folder, enable_prefix_caching=False, **{**OPTIONS, **WHOLE})
    prompt = random_prompt(900)
    _, (trace,) = server.traced([(prompt, {"max_tokens": 2})])
    dense.forward(prompt, dense.new_cache(), torch.ones(len(prompt), len(prompt)).tril().bool())
    norms = sum(cached.norm(dim=-1) for cached in dense.cached).split(BLOCK)
    # 900 tokens are 8 blocks. The first and the last two stay, and the budget is four.
    order = sorted(range(1, 6), key=lambda block: -norms[block].mean())
    assert trace.evicted[0] == sorted(order[:4])


def test_full_and_budgets_that_cover_are_stock_to_the_byte(engine, hybrids):
    options = dict(model=hybrids(LIGHTNING)[0], enable_prefix_caching=False, **OPTIONS)
    assert_like_stock(engine, [random_prompt(400), random_prompt(70)], {**H2O, "budget": 1024}, **options)


@pytest.mark.nightly(push=(DELTA,))
@pytest.mark.parametrize("architecture", LATENT_HYBRIDS)
def test_states_and_latents_of_a_reduced_context_are_published_nowhere(engine, hybrids, architecture):
    """Prefix caching, which vLLM's CPU platform switches off beside latents: a hit has latents and a state."""
    folder, dense = hybrids(architecture)
    server = engine({**H2O, "allow": ["full"]}, model=folder, enable_prefix_caching=True, **OPTIONS)
    prompt, seen = random_prompt(1000), []

    def look(server):
        if server.scheduler.requests:
            (resident,) = server.scheduler.residents.values()
            seen.append(resident.pure_tokens)
            for group, manager in enumerate(server.all_managers if resident.pure_tokens else ()):
                blocks, end = published(server, group), resident.pure_tokens // BLOCK
                assert blocks == (list(range(end)) if manager in server.managers else [end - 1])

    server.add(prompt, max_tokens=10)
    server.run(look)
    pure = seen[-1]
    assert 512 <= pure < 900 and pure % BLOCK == 0
    everything = {"max_tokens": 6, "logprobs": 0, "extra_args": {"kv_policy": "full"}}
    for cached in (pure, 896):
        (output,) = server.generate([prompt], **everything)
        assert output.num_cached_tokens == cached
        np.testing.assert_allclose(logprobs_of(output), expected(dense, prompt, output), atol=ATOL)
    # The same prefix with another end: evicted again, from a hit.
    longer = prompt + random_prompt(100, 1)
    (output,), (trace,) = server.traced([(longer, {"max_tokens": 6, "logprobs": 0})])
    assert trace.start == 896 and output.kv_usage.evicted_blocks > 0
    np.testing.assert_allclose(logprobs_of(output), expected(dense, longer, output, trace), atol=ATOL)
    server.assert_nothing_left()


@pytest.mark.nightly(push=("budget",))
@pytest.mark.parametrize("when", ["budget", "pressure"])
def test_freed_blocks_are_never_read_and_all_come_back(engine, hybrids, poisoned, when):
    """More requests than the pool has room for: a freed block may become a state, and a state's block latents."""
    folder, dense = hybrids(LIGHTNING)
    options = {**OPTIONS, "max_model_len": 1200, "blocks": 22, "enable_prefix_caching": False}
    server = engine({**H2O, "when": when, "admit": when == "pressure"}, model=folder, **options)
    caches, plans, poison = [layer.kv_cache for layer in layers_of(server)], [], set()
    assert all(len(cache) == 22 * BLOCK // 16 for cache in caches)
    after(server.scheduler, "schedule", lambda output, *_: plans.append(getattr(output, PLAN)))

    def look(server):
        assert server.free_blocks == server.all_blocks - len(server.held_blocks())
        tables = [table for manager in server.managers for table in manager.req_to_blocks.values()]
        held = [block.block_id for table in tables for block in table if not block.is_null]
        plan = plans.pop()
        fills = Fills.within(plan) or Fills()
        gone = sorted(set(fills.poison) - set(fills.clean))
        poison.update(gone)
        for cache in caches:
            pages = cache.unflatten(0, (22, -1))
            assert not torch.isnan(pages[held]).any(), "a block in use holds poison"
            assert torch.isnan(pages[gone]).all(), "a freed block was not poisoned"

    requests = [(random_prompt(n, n), {"max_tokens": 10, "logprobs": 0}) for n in (700, 900, 600, 850, 500, 950)]
    evicted = []
    for prompt, output, trace in server.answered(requests, look):
        evicted.append(output.kv_usage.evicted_blocks)
        assert np.isfinite(logprobs_of(output)).all()
        if when == "budget" or not evicted[-1]:  # under pressure blocks go before a step, which no trace tells
            np.testing.assert_allclose(logprobs_of(output), expected(dense, prompt, output, trace), atol=ATOL)
    # Under pressure blocks are free for the very allocation that lacks room.
    assert (poison or when == "pressure") and sum(evicted) > 2
    server.assert_nothing_left()


@pytest.mark.oracle("latents beside states (simulated)")
@pytest.mark.parametrize("backend, kernel", [("FLASHMLA", 64), ("FLASH_ATTN_MLA", BLOCK)])
def test_builders_for_a_device_get_views_of_their_kernel_blocks(engine, hybrids, monkeypatch, backend, kernel):
    """Kernels for latents have stand-ins, too."""
    in_place_of_device(monkeypatch, backend)
    folder, dense = hybrids(LIGHTNING)
    with in_place_of("CPU_MLA", "latent.Shown"):
        options = {**OPTIONS, "attention_backend": None}
        server = engine({"name": "knorm", **SIZES, "allow": ["sink-window"]}, model=folder, **options)
    assert server.manager.kv_cache_spec.backend == backend and server.manager.block_size == BLOCK
    assert {layer.kv_cache.shape[1] for layer in layers_of(server)} == {kernel}
    prompts = [random_prompt(n, n) for n in (40, 700, 900)]
    for prompt, output, trace in server.answered([(prompt, {"max_tokens": 6, "logprobs": 0}) for prompt in prompts]):
        np.testing.assert_allclose(logprobs_of(output), expected(dense, prompt, output, trace), atol=ATOL)
        assert (sum(map(len, trace.evicted)) > 1) == (len(prompt) > 40)
    server.assert_nothing_left()


@pytest.mark.oracle("latents beside states (simulated)")
@pytest.mark.nightly
def test_scores_on_a_device_evict_what_those_of_a_cpu_evict(engine, hybrids, monkeypatch):
    """The plugin's kernels, in the interpreter, read the pool's blocks where vLLM's read kernel blocks of 64 tokens."""
    folder, dense = hybrids(LIGHTNING)
    policy, options = {"name": "h2o", "budget": 256, "sink": 0, "recent": 16, "buffer": 0}, {**OPTIONS, **WHOLE}
    prompts = [(random_prompt(400), {"max_tokens": 3, "logprobs": 0})]
    _, wanted = engine(policy, model=folder, **options).traced(prompts)
    in_place_of_device(monkeypatch, "FLASHMLA")
    use_kernels(monkeypatch)
    take_large_tiles(monkeypatch)
    with in_place_of("CPU_MLA", "latent.Shown"):
        server = engine(policy, model=folder, **{**options, "attention_backend": None})
    assert type(server.worker.kv_evict.ops).__name__ == "DeviceLatentOps"
    for (prompt, output, trace), want in zip(server.answered(prompts), wanted):
        assert trace.evicted == want.evicted and any(trace.evicted)
        np.testing.assert_allclose(logprobs_of(output), expected(dense, prompt, output, trace), atol=ATOL)


def test_views_in_kernel_blocks_stay_where_graphs_read_them():
    """Of a dummy step that captures a graph, and of a step that replays it with a hole at block 1."""
    pool = torch.tensor([[4, 0, 6]], dtype=torch.int32)
    views = SimpleNamespace(
        memory=lambda _: View(torch.zeros(2, 4).int(), torch.zeros(2).int()), table_of=lambda _: pool
    )
    table = views.memory(None).table[:1]

    def view(metadata):
        blocks = metadata.block_table_tensor[metadata.block_table_tensor != 0]
        table[0, : len(blocks)] = blocks
        return SimpleNamespace(block_table_tensor=table, max_seq_len=128 * len(blocks)), None

    batch = SimpleNamespace(graph=object())
    group = SimpleNamespace(block_size=128, device="cpu", in_step=False, batch=batch, views=views, view=view)
    kernel, addresses = KernelBlockViews(group, 64), set()
    for group.in_step, blocks in ((False, [4, 5, 6]), (True, [4, 6])):
        # What vLLM gives, of which only a dummy step's is read.
        given = SimpleNamespace(block_table_tensor=torch.tensor([[8, 9, 10, 11, 12, 13]], dtype=torch.int32))
        viewed, read, _ = kernel.view(given)
        assert viewed.block_table_tensor[0, : len(blocks)].tolist() == blocks
        halves = [2 * block + half for block in blocks for half in (0, 1)]
        assert read.block_table_tensor[0, : len(halves)].tolist() == halves and read.block_table_tensor.shape == (1, 8)
        addresses.add(read.block_table_tensor.data_ptr())
    assert len(addresses) == 1
    group.in_step, batch.graph = False, None  # other dummy steps attend to what vLLM says
    assert kernel.view(given) == (given, given, None)


def test_releases_that_split_block_tables_are_refused(engine, hybrids, monkeypatch):
    monkeypatch.setattr(backends, "splits_in_builders", lambda: False)
    with pytest.raises(ValueError, match="CPU_MLA splits KV blocks of 128 .* of 16, .*FLASH_ATTN_MLA or TRITON_MLA"):
        engine(H2O, model=hybrids(LIGHTNING)[0], enable_prefix_caching=False, **OPTIONS)


@pytest.mark.oracle("latents beside states (simulated)")
@pytest.mark.both_runners
def test_drafts_after_evictions_are_verified_as_a_dense_model_answers(engine, tmp_path, monkeypatch):
    """By n-grams. Kimi delta attention takes rejected drafts back; a step's first state may be a block of the prompt."""
    stand_in_for_kimi(monkeypatch)
    folder = make_latent_hybrid(tmp_path / "model", KIMI, drafting.VOCAB)
    dense = DenseLatentHybrid(folder)

    def check(prompt, output, trace):
        np.testing.assert_allclose(logprobs_of(output), expected(dense, prompt, output, trace), atol=ATOL)
        assert np.abs(logprobs_of(output) - expected(dense, prompt, output)).max() > 0.01

    options = {**OPTIONS, "enable_prefix_caching": V2}
    drafting.serve(engine, folder, H2O, check, monkeypatch, tokens=60, lengths=(900, 790), **options)


@pytest.mark.oracle("latents beside states (simulated)")
def test_rows_with_drafts_choose_what_they_read(engine, tmp_path, monkeypatch):
    stand_in_for_kimi(monkeypatch)
    folder = make_latent_hybrid(tmp_path / "model", KIMI, drafting.VOCAB)
    policy = {"name": "full", "evict": "host", "host": "256MiB", "buffer": 0, **REACH}
    dense, chosen = DenseLatentHybrid(folder), []

    def check(*answered):
        like = {**REACH, "dense": dense, "size": BLOCK, "atol": ATOL}
        chosen.append(test_reach.assert_reaches_like_dense(None, *answered, **like))

    # Steps with accepted drafts choose at other tokens, so answers part from those before.
    options = {**OPTIONS, "enable_prefix_caching": V2, "kept": 0}
    drafting.serve(engine, folder, policy, check, monkeypatch, tokens=120, lengths=(900, 790), **options)
    assert min(chosen) > 2


def test_drafts_beside_states_that_do_not_take_them_back_are_refused(engine, hybrids):
    options = dict(model=hybrids(LIGHTNING)[0], enable_prefix_caching=False, **OPTIONS)
    with pytest.raises(
        KVPolicyError, match="got states of BAILING_LINEAR_ATTN; expected GDN_ATTN, .*; leave --speculative"
    ):
        engine(H2O, speculative_config=drafting.NGRAM, **options)
