"""Blocks that layers read on the host under tensor parallelism: each rank chooses for its own heads."""

import numpy as np
import pytest
import test_reach
from engine import logprobs_of, random_requests
from evaluation import NEEDLE, needles

from vllm_evict.integration.engine.reaching import Reaching
from vllm_evict.tools.eval.score import score

pytestmark = pytest.mark.minutes


@pytest.mark.both_runners
def test_each_rank_reaches_blocks_for_its_own_heads(ranked_engine, tiny):
    server = ranked_engine({**test_reach.REACH, "read": 160, "hold": 3}, max_num_batched_tokens=192)
    part, chosen = server.scheduler.part(Reaching), 0
    assert part.pool.blocks * part.block_bytes == 64 << 20  # ranks share the bytes
    for prompt, output, trace in server.answered(random_requests((700, 40), (240, 60))):
        chosen += test_reach.assert_reaches_like_dense(tiny, prompt, output, trace, 160, 3, ranks=2)
    assert chosen > 40
    server.assert_nothing_left()


def test_under_async_scheduling_and_pressure(ranked_engine, async_stays):
    """In a pool that is too small, with a host that is: ranks see the same, and read no NaN."""
    options = {"blocks": 64, "max_model_len": 1024, "max_num_batched_tokens": 192, "max_num_seqs": 4}
    policy = {**test_reach.REACH, "when": "pressure", "admit": True, "host": 40 * 32768}
    server = ranked_engine(policy, async_scheduling=True, enable_prefix_caching=True, **options)
    assert server.core.batch_queue_size == 2
    outputs = [each[1] for each in server.answered(random_requests((700, 40), (650, 40), (600, 40), (680, 40)))]
    assert all(np.isfinite(logprobs_of(output)).all() for output in outputs)
    assert any(output.kv_usage.evicted_blocks for output in outputs)
    server.assert_nothing_left()


def test_needles_are_found(ranked_engine):
    """The question comes when a tenth of the context is on the device."""
    samples, ids = needles()
    policy = {**test_reach.REACH, "budget": 224}
    server = ranked_engine(policy, model=NEEDLE, dtype="bfloat16", max_model_len=2304, enable_prefix_caching=False)
    outputs = server.generate(list(ids.values()), max_tokens=4)
    assert sum(score(output.outputs[0].text, sample) for output, sample in zip(outputs, samples.values())) >= 9
    server.assert_nothing_left()
