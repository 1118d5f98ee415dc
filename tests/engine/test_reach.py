"""Blocks of the host that layers reach: prompts read all of them, decodes those that their queries want."""

import math

import numpy as np
import pytest
import torch
from engine import Engine, exactly, logprobs_of, random_prompt, random_requests
from loads.pages import Published, Stock
from oracle.model import DenseLlama
from oracle.selection import BLOCK, Chooser
from oracle.tiny import make_tiny_llama
from parts import part_of

from vllm_evict.compute.reach import Reach
from vllm_evict.config import KVPolicyConfig, KVPolicyError
from vllm_evict.integration.engine.offloading import Offloading

#: Of 8 blocks 1 is of sinks, 5 are the room and 2 have recent tokens.
REACH = {"name": "full", "evict": "host", "host": "64MiB", "budget": 256, "buffer": 0, "sink": 32, "recent": 32}


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A model of five layers, in each of which a decode reads other blocks."""
    return make_tiny_llama(tmp_path_factory.mktemp("deep"), layers=5)


def assert_reaches_like_dense(model, prompt, output, trace, read, hold=8, index="box", dense=None, atol=2e-3):
    """Log-probabilities of a traced request are those of a dense model that has everything, and chooses for itself.

    Returns the number of its choices.
    """
    dense = dense or DenseLlama(model)
    chooser = Chooser(
        dense, select=read, select_sink=32, select_recent=32, dense_layers=0, select_every=hold, select_bounds=index
    )
    tokens, cache, n, gone, logits = [*prompt, *output.outputs[0].token_ids], dense.new_cache(), 0, set(), []
    before: tuple = ()
    if trace.start:
        dense.forward(tokens[: trace.start], cache, torch.ones(trace.start, trace.start).tril().bool())
        n = trace.start
    for count, evicted in zip(trace.steps, trace.evicted):
        first, n = n, n + count
        mask = torch.arange(n) <= torch.arange(first, n)[:, None]
        if gone:
            if before != (before := (math.ceil(n / BLOCK), len(gone))):
                chooser.steps = 0  # a block has begun, or some have moved
            mask = chooser.mask(mask, list(range(math.ceil(n / BLOCK))))
        logits.append(dense.forward(tokens[first:n], cache, mask)[0])
        gone |= set(evicted)
    logprobs = torch.log_softmax(torch.cat(logits).double(), -1)
    assert chooser.closest > 1e-5, "rounding could choose another block: take another prompt"
    want = [
        logprobs[len(prompt) - 1 - trace.start + i, token].item() for i, token in enumerate(output.outputs[0].token_ids)
    ]
    np.testing.assert_allclose(logprobs_of(output), want, atol=atol)
    return chooser.chosen


def test_memory_beside_the_pool_comes_from_what_the_cache_may_take(engine, deep):
    """Staging pages, and boxes of the pool; a cache that has no more is refused."""
    block, memory = 5 * 32 * 2 * 2 * 32 * 4, 16 << 20
    options = {"model": deep, "blocks": None, "max_model_len": 1024}
    server = engine({**REACH, "host": 256 * block}, kv_cache_memory_bytes=memory, **options)
    boxes = (server.all_blocks + 1) * block // 32
    taken = (server.all_blocks + 1 + 32) * block + boxes
    assert memory - 2 * block < taken <= memory
    with pytest.raises(KVPolicyError, match="hold no pool beside 32 staging pages"):
        engine({**REACH, "host": 256 * block}, kv_cache_memory_bytes=33 * block, **options)


def assert_nothing_left(server):
    server.assert_nothing_left()
    assert not list(part_of(server.runtime, Reach).requests)
    assert not server.scheduler.part(Offloading).pool.used


@pytest.mark.both_runners("signs-8-8", "box-5-12")
@pytest.mark.parametrize("index, blocks, hold", [("signs", 8, 8), ("signs", 5, 1), ("box", 5, 1), ("box", 5, 12)])
def test_answers_are_those_of_a_dense_model_that_chooses_for_itself(engine, deep, poisoned, index, blocks, hold):
    """Three requests in one batch; one is shorter than its budget at first."""
    server = engine(
        {**REACH, "read": 32 * blocks, "hold": hold, "index": index}, model=deep, max_num_batched_tokens=192
    )
    requests = random_requests((700, 50), (230, 80), (500, 40))
    chosen = 0
    for prompt, output, trace in server.answered(requests):
        chosen += assert_reaches_like_dense(deep, prompt, output, trace, 32 * blocks, hold, index)
        assert output.kv_usage.peak_resident_blocks <= 8 + 6 + 1
    assert chosen > 300 // hold
    counts = part_of(server.runtime, Reach).counts
    assert counts["from_host"] > counts["in_room"] > 0
    assert_nothing_left(server)


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_a_context_is_computed_as_stock_computes_it(engine, poisoned, dtype):
    """Log-probabilities of a prompt of 30 chunks, and its first token, with 8 blocks between chunks."""
    options = {"max_num_batched_tokens": 32, "enable_prefix_caching": False, "kv_cache_dtype": dtype}
    subject, stock = (engine(policy, **options) for policy in (REACH, None))
    prompts = [random_prompt(960), random_prompt(480, 1)]
    ours, theirs = (server.generate(prompts, max_tokens=1, prompt_logprobs=0) for server in (subject, stock))
    for our, their in zip(ours, theirs):
        assert our.outputs[0].token_ids == their.outputs[0].token_ids
        given = zip(our.prompt_logprobs[1:], their.prompt_logprobs[1:], our.prompt_token_ids[1:])
        assert all(one[token].logprob == other[token].logprob for one, other, token in given)
        assert our.kv_usage.evicted_blocks > 5
    assert_nothing_left(subject)


def test_a_budget_that_covers_all_changes_no_bit(engine):
    prompts = [random_prompt(180), random_prompt(100, 1), random_prompt(20, 2)]
    subject, stock = engine(REACH), engine()
    ours, theirs = (exactly(server.generate(prompts, max_tokens=70, logprobs=0)) for server in (subject, stock))
    assert ours == theirs


@pytest.fixture(scope="module")
def stock(deep):
    engine = Engine(
        deep, block_size=BLOCK, max_model_len=1024, max_num_batched_tokens=1024, enable_prefix_caching=False
    )
    yield Stock(engine)
    engine.close()


@pytest.mark.both_runners("engine")
@pytest.mark.parametrize("make", ["engine", "async_engine"])
def test_contexts_are_published_whole_and_what_decodes_read_less_is_not(request, deep, stock, make):
    """What is published is stock's, though most of it left the device as soon as it was computed."""
    server = request.getfixturevalue(make)(REACH, model=deep, max_model_len=1024, enable_prefix_caching=True)
    published = Published(server, stock)
    prompt = random_prompt(600)
    (output,) = server.generate([prompt], max_tokens=100)
    (again,) = server.generate([prompt + list(output.outputs[0].token_ids) + random_prompt(40, 1)], max_tokens=4)
    assert 576 <= again.num_cached_tokens <= 608  # the context, and no block that decodes filled
    published.compare(2e-3)
    assert_nothing_left(server)


def test_a_host_that_is_full_loses_nothing(engine, deep, poisoned):
    """Requests that find no room on the host keep their blocks on the device, and may be preempted for them."""
    host = 40 * 5 * 32 * 2 * 2 * 32 * 4  # 40 blocks
    server = engine({**REACH, "host": host}, model=deep, blocks=64, max_num_seqs=4, max_model_len=1024)
    for prompt, output, trace in server.answered(random_requests((700, 30), (650, 30), (600, 30), (680, 30))):
        assert np.isfinite(logprobs_of(output)).all() and not output.kv_usage.dropped_blocks
        if not trace.restarts:
            assert_reaches_like_dense(deep, prompt, output, trace, 256)
    assert_nothing_left(server)


def test_a_host_smaller_than_the_longest_request_is_refused(engine, deep):
    with pytest.raises(KVPolicyError, match="expected at least the 64 of a request of 2048 tokens"):
        engine({**REACH, "host": "1MiB"}, model=deep)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"read": 512}, "read: .* needs evict: host"),
        ({"hold": 2}, "hold: .* needs evict: host"),
        ({"evict": "host"}, "needs a size of host memory"),
        ({"evict": "host", "host": "1GiB", "select": 512}, "leave select out"),
        ({"evict": "host", "host": "1GiB", "allow": ["h2o"]}, "leave h2o out"),
    ],
)
def test_fields_that_do_not_go_together_are_refused_by_name(fields, message):
    with pytest.raises(KVPolicyError, match=message):
        KVPolicyConfig(name="full", **fields)
