"""fp8 caches on the CPU engine under policies with scores, against a dense oracle that holds keys and values as fp8.

vLLM's kernel truncates them, and so does the oracle. Scales are not 1, and freed blocks are full of NaN.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from engine import exactly, logprobs_of, random_prompt
from oracle.model import DenseLlama, truncated
from oracle.replay import replay
from oracle.tiny import make_tiny_llama
from parity import assert_like_oracle, assert_tokens_like_oracle, oracle_config
from test_context import CHUNK, CONTEXT, WINDOW
from test_oracle_parity import POLICIES
from test_reach import REACH, assert_reaches_like_dense
from test_read import OF_PROMPTS, READ, assert_reads_like_dense
from vllm.model_executor.layers.attention import Attention

DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SCALES = {"k": 0.3, "v": 0.6}
#: A key or value that rounding takes to the next number of fp8 changes a log-probability by up to so much.
NOISE = 3e-2


@pytest.fixture
def fp8_engine(engine, poisoned):
    """Factory of engines with fp8 caches of these scales, and dense oracles of their models."""

    def make(path, policy, name, **options):
        server = engine(policy, model=path, kv_cache_dtype=name, **options)
        for layer in server.core.vllm_config.compilation_config.static_forward_context.values():
            if isinstance(layer, Attention):
                assert layer.kv_cache.dtype == torch.uint8
                layer._k_scale_float, layer._v_scale_float = SCALES.values()
        to_fp8 = partial(truncated, dtype=DTYPES[name])
        return server, DenseLlama(path, fp8_scales=list(SCALES.values()), to_fp8=to_fp8)

    return make


CASES = [("fp8", "h2o"), ("fp8", "snapkv"), ("fp8", "rkv"), ("fp8_e5m2", "h2o"), ("fp8_e5m2", "keydiff")]


@pytest.mark.oracle("full attention")
@pytest.mark.both_runners("fp8-h2o")
@pytest.mark.parametrize("dtype, name", CASES)
def test_evictions_and_logprobs_match_the_dense_oracle(fp8_engine, tiny, dtype, name):
    """A prompt longer than a chunk and a shorter one, decoded past several decisions."""
    server, dense = fp8_engine(tiny, POLICIES[name], dtype, max_num_batched_tokens=192)
    requests = [(random_prompt(n, n), {"max_tokens": tokens, "logprobs": 0}) for n, tokens in ((400, 80), (150, 120))]
    for answered in server.answered(requests):
        assert assert_like_oracle(dense, *answered, POLICIES[name], atol=NOISE, tie=1e-2) > 2
    server.assert_nothing_left()


@pytest.mark.oracle("full attention")
@pytest.mark.parametrize("dtype, name", [("fp8", "snapkv"), ("fp8_e5m2", "h2o")])
def test_each_head_keeps_tokens_of_its_own(fp8_engine, tiny, dtype, name):
    policy = {"name": name, "budget": 128, "buffer": 32, "sink": 32, "recent": 32, "granularity": "token"}
    server, dense = fp8_engine(tiny, policy, dtype, max_num_batched_tokens=96)
    for prompt, output, trace in server.answered([(random_prompt(200, 1), {"max_tokens": 90, "logprobs": 1})]):
        (request,) = assert_tokens_like_oracle(dense, prompt, output, trace, policy, atol=NOISE)
        assert len(request.kept) > 1 and len({tuple(kept) for kept in request.kept[-1].values()}) > 1
    server.assert_nothing_left()


@pytest.mark.both_runners("fp8")
@pytest.mark.parametrize("dtype", DTYPES)
def test_full_and_budgets_that_cover_a_request_are_stock(engine, dtype):
    prompts = [random_prompt(100 + 40 * seed, seed) for seed in range(3)]

    def answers(policy):
        return exactly(engine(policy, kv_cache_dtype=dtype).generate(prompts, max_tokens=20, logprobs=0))

    stock = answers(None)
    for policy in ("full", {"name": "h2o", "budget": 512}, {"name": "keydiff", "budget": 512}):
        assert answers(policy) == stock


@pytest.mark.parametrize("read_prompts", OF_PROMPTS.values(), ids=OF_PROMPTS)
def test_layers_choose_blocks_by_what_keys_stand_for(fp8_engine, tiny, read_prompts):
    # Numbers of fp8 lie at the seams of codes of two bits, and rounding takes them to either side.
    policy = {**READ, "index": "signs", "hold": 1, "read_prompts": read_prompts}
    server, dense = fp8_engine(tiny, {"name": "full", **policy}, "fp8", max_num_batched_tokens=192)
    (answered,) = server.answered([(random_prompt(400, 3), {"max_tokens": 40, "logprobs": 0})])
    assert assert_reads_like_dense(tiny, *answered, dense=dense, atol=NOISE, **policy) > 20
    server.assert_nothing_left()


def test_decodes_reach_blocks_of_the_host_by_boxes_of_what_keys_stand_for(fp8_engine, tiny):
    server, dense = fp8_engine(tiny, {**REACH, "index": "box"}, "fp8", max_num_batched_tokens=192)
    ((prompt, output, trace),) = server.answered([(random_prompt(500, 3), {"max_tokens": 60, "logprobs": 0})])
    assert assert_reaches_like_dense(tiny, prompt, output, trace, 256, index="box", dense=dense, atol=NOISE) > 10
    server.assert_nothing_left()


def test_keys_that_turn_are_rounded_once_more(fp8_engine, tmp_path):
    """The oracle turns what it holds without rounding it. Keys that were not turned would matter more than that."""
    path = make_tiny_llama(tmp_path / "model", max_len=CONTEXT)
    server, dense = fp8_engine(path, WINDOW, "fp8", max_model_len=2048, max_num_batched_tokens=CHUNK)
    ((prompt, output, trace),) = server.answered([(random_prompt(100), {"max_tokens": 500, "logprobs": 0})])
    tokens, config = [*prompt, *output.outputs[0].token_ids], oracle_config(WINDOW, prompt, chunk=CHUNK)
    off = []
    for each in config, replace(config, context=2**62, ahead=0):
        reference = replay(dense, tokens, trace.steps, each, start=trace.start)
        assert trace.evicted[:-1] == reference.evicted[: len(trace.steps) - 1]
        logprobs = torch.log_softmax(reference.logits.double(), -1)[len(prompt) - 1 :]
        want = logprobs.gather(1, torch.tensor(tokens[len(prompt) :])[:, None])[:, 0]
        off.append(np.abs(logprobs_of(output) - want.numpy()).mean())
    assert off[0] < 0.1 < 3 * off[0] < off[1]
    server.assert_nothing_left()
