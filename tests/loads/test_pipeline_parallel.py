"""Stages of a pipeline keep what one process keeps: each sees its own layers, and the last one reports for all."""

from functools import partial

import numpy as np
import pytest
from engine import V2, Engine, logprobs_of, random_prompt
from test_async import check_late_decisions
from workers import Workers, forking

#: What requests ask for on the servers below.
POLICIES = (
    *("sink-window", "strided", "random", "h2o", "tova", "snapkv", "scissorhands"),
    *("knorm", "keydiff", "pagedeviction", "rkv", "keybound"),
)
SERVER = {"name": "h2o", "budget": 160, "buffer": 32, "sink": 32, "recent": 64, "layers": "mean", "allow": [*POLICIES]}
#: A step computes a whole prompt: then a request's steps are the same however many are in flight.
WHOLE = dict(max_num_batched_tokens=512, max_num_seqs=8, max_model_len=1024)
PROMPTS = [random_prompt(length, length) for length in (420, 180, 260)]


@pytest.fixture(scope="module")
def forks():
    with forking():
        yield


class Staged(Workers):
    """An engine with two stages."""

    def __init__(self, model, policy, **kwargs):
        # Behind enforce_eager no stage of a CPU worker has memory for what the stage before it sends (docs/limits.md).
        compiled = dict(enforce_eager=False, compilation_config={"mode": 1})
        super().__init__(model, policy, pipeline_parallel_size=2, **compiled, **kwargs)
        assert self.core.batch_queue_size == 2 + kwargs.get("async_scheduling", False)
        assert self.core.vllm_config.use_v2_model_runner is V2


@pytest.fixture(scope="module")
def alone(tiny):
    """Answers of one process, by policy."""
    server = Engine(tiny, SERVER, **WHOLE)
    answers = {policy: answers_of(server, policy) for policy in POLICIES}
    server.close()
    return answers


@pytest.fixture(scope="module")
def stages(tiny, forks):
    server = Staged(tiny, SERVER, **WHOLE)
    yield server
    server.assert_nothing_left()
    server.close()


def answers_of(server, policy):
    """Answers, and the reports that decisions took, in order."""
    reports, take = [], server.scheduler.reports._inbox.take

    def watched(*args):
        taken = take(*args)
        reports.extend(sorted(taken[0].values(), key=lambda report: len(report.index)))
        return taken

    server.scheduler.reports._inbox.take = watched
    outputs = server.generate(PROMPTS, max_tokens=24, logprobs=0, extra_args={"kv_policy": policy})
    server.scheduler.reports._inbox.take = take
    server.llm.reset_prefix_cache()
    return outputs, reports


@pytest.mark.both_runners("sink-window", "h2o", "snapkv", "scissorhands", "keydiff")
@pytest.mark.parametrize("policy", POLICIES)
def test_two_stages_evict_and_say_what_one_process_does(alone, stages, policy):
    assert_alike(alone[policy], answers_of(stages, policy))


def assert_alike(alone, together):
    for one, two in zip(alone[1], together[1], strict=True):
        assert one.index.tolist() == two.index.tolist() and one.statistics.keys() == two.statistics.keys()
        for name, values in one.statistics.items():
            np.testing.assert_allclose(two.statistics[name], values, rtol=1e-4, atol=1e-6)
    for one, two in zip(alone[0], together[0], strict=True):
        assert two.kv_usage == one.kv_usage and two.kv_usage.evicted_blocks > 0
        assert two.outputs[0].token_ids == one.outputs[0].token_ids
        np.testing.assert_allclose(logprobs_of(two), logprobs_of(one), atol=1e-3)


@pytest.fixture
def staged_engine(tiny, forks):
    """Factory of engines with two stages."""
    made = []

    def make(policy, model=tiny, **kwargs):
        made.append(Staged(model, policy, **kwargs))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.mark.both_runners
def test_two_stages_of_two_ranks(alone, staged_engine):
    """Each rank adds up the stages of its own heads, and the last stage's ranks add up theirs."""
    server = staged_engine(SERVER, tensor_parallel_size=2, **WHOLE)
    for policy in ("sink-window", "h2o", "keydiff"):
        assert_alike(alone[policy], answers_of(server, policy))
    server.assert_nothing_left()


LATE = {**SERVER, "name": "h2o", "budget": 192, "buffer": 64, "allow": []}


@pytest.mark.both_runners
def test_decisions_while_another_stage_computes_are_the_right_ones(staged_engine, tiny):
    """Chunks of a prompt are in several stages at once; against the dense oracle, told of holes when stages are."""
    check_late_decisions(staged_engine, tiny, LATE)


@pytest.mark.both_runners
@pytest.mark.skipif(not V2, reason="Model Runner V1 has no stages under async scheduling")
def test_stages_under_async_scheduling(staged_engine, async_stays, tiny):
    """Steps are planned before those in the stages are done."""
    check_late_decisions(partial(staged_engine, async_scheduling=True), tiny, LATE)


@pytest.mark.both_runners
def test_stages_under_pressure(staged_engine):
    """A pool for two requests serves eight: all finish, on numbers, and all blocks come back."""
    policy = {"name": "h2o", "when": "pressure", "admit": True, "budget": 128, "sink": 32, "recent": 64}
    server = staged_engine(policy, blocks=40, max_num_batched_tokens=128, max_model_len=640)
    ids = [server.add(random_prompt(300 + 20 * seed, seed), max_tokens=60, logprobs=0) for seed in range(8)]
    outputs = server.run()
    assert sum(outputs[each].kv_usage.evicted_blocks for each in ids) > 20
    assert all(np.isfinite(logprobs_of(outputs[each])).all() for each in ids)
    server.assert_nothing_left()
