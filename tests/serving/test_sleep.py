"""Servers that sleep, wake, and get other weights: a double forgets the device's memory, which vLLM's CPU worker keeps."""

import pytest
from drafting import NGRAM
from engine import exactly, random_prompt
from oracle.model import DenseLlama
from oracle.tiny import make_tiny_llama
from parity import assert_like_oracle, assert_tokens_like_oracle
from vllm.v1.worker.cpu_worker import CPUWorker

pytestmark = pytest.mark.minutes

#: What device memory holds that was given up and came back. Finite: CPU_ATTN multiplies what it masks by 0.
LEFT = 777.0
BASE = {"budget": 160, "buffer": 32, "sink": 32, "recent": 32}
POLICIES = {
    "sink-window": {"name": "sink-window", "budget": 160, "sink": 32},
    "h2o": {"name": "h2o", **BASE},
    "h2o-tokens": {"name": "h2o", **BASE, "granularity": "token"},
    "kvzip": {"name": "kvzip", **BASE, "instruction": [7, 8, 9]},
    "host": {"name": "full", **BASE, "evict": "host", "host": "64MiB"},
    "adakv": {"name": "adakv", **BASE},
}
ORACLES = {
    name: assert_tokens_like_oracle if "granularity" in POLICIES[name] else assert_like_oracle
    for name in ("h2o", "h2o-tokens")
}
PROMPTS = [random_prompt(length, length) for length in (330, 250)]


@pytest.fixture(autouse=True)
def forgetful(monkeypatch):
    """Sleep as vLLM's GPU worker does by its allocator: level 1 gives up the cache, level 2 the weights too."""

    def sleep(self, level=1):
        self.discard(("kv_cache",))
        for weight in self.model_runner.model.parameters() if level == 2 else ():
            weight.data.fill_(LEFT)

    def discard(self, tags):
        assert tags == ("kv_cache",)
        for cache in self.model_runner.kv_caches:
            cache.fill_(LEFT)

    monkeypatch.setattr(CPUWorker, "sleep", sleep)
    monkeypatch.setattr(CPUWorker, "discard", discard, raising=False)  # not in vLLM 0.30
    monkeypatch.setattr(CPUWorker, "wake_up", lambda self, tags=None: None)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A model of the same shape with other weights."""
    return make_tiny_llama(tmp_path_factory.mktemp("other") / "model", seed=1)


def answers(server):
    """Tokens, log-probabilities and evictions of requests that run together."""
    outputs, traces = server.traced([(prompt, {"max_tokens": 60, "logprobs": 1}) for prompt in PROMPTS])
    assert all(sum(map(len, trace.evicted)) > 3 for trace in traces)
    return [(*its, trace.evicted) for its, trace in zip(exactly(outputs), traces)]


@pytest.mark.parametrize("name", POLICIES)
def test_a_server_that_slept_answers_as_one_that_has_just_started(engine, name):
    """At level 1 and, with the weights loaded again, at level 2; requests are under way when it falls asleep."""
    server = engine(POLICIES[name])
    before = answers(server)
    for level in (1, 2):
        begun = [server.add(prompt, max_tokens=100) for prompt in PROMPTS]
        for _ in range(12):
            server.llm.llm_engine.step()
        assert all(residents.holes for residents in server.scheduler.residents.values())
        server.llm.sleep(level=level)
        assert not server.scheduler.residents and server.free_blocks == server.all_blocks
        server.llm.wake_up()
        if level == 2:
            server.llm.collective_rpc("reload_weights")
        server.llm.llm_engine.abort_request(begun)  # the front end has not heard that they ended
        assert answers(server) == before, level
        server.assert_nothing_left()


@pytest.mark.since("0.31", "it has no release_kv_cache_memory")
@pytest.mark.parametrize(("name", "speculates"), [*((name, False) for name in ORACLES), ("h2o", True)])
def test_requests_that_wait_for_the_waking_start_over(engine, tiny, name, speculates):
    """`mode="keep"` forgets what requests computed, and `release_kv_cache_memory` too; a reset of the prefix cache does
    so while requests run. They lose blocks before it and after it, against the dense oracle."""
    options = dict(speculative_config=NGRAM) if speculates else {}
    server, dense, steps = engine(POLICIES[name], max_num_batched_tokens=96, **options), DenseLlama(tiny), 0

    def forget(server):
        nonlocal steps
        steps += 1
        if steps == 9:
            server.llm.sleep(level=1, mode="keep")
            server.llm.wake_up()
        elif steps == 18:
            server.llm.sleep(level=0, mode="keep")
            server.llm.release_kv_cache_memory()
            server.llm.wake_up()
        elif steps == 27:
            assert server.core.reset_prefix_cache(reset_running_requests=True)

    for prompt, output, trace in server.answered(
        [(prompt, {"max_tokens": 90, "logprobs": 1}) for prompt in PROMPTS], forget
    ):
        assert trace.restarts == 3 and trace.start == 0
        assert ORACLES[name](dense, prompt, output, trace, POLICIES[name])
    server.assert_nothing_left()


@pytest.mark.parametrize("name", ["h2o-tokens", "kvzip", "host", "adakv"])
def test_after_a_reload_requests_are_served_by_the_new_weights(engine, other, name):
    """Everything that an earlier request left (its prefix, the scores of its prompt) is of the old weights, and not
    used.
    """
    server = engine(POLICIES[name])
    before = answers(server)
    server.llm.sleep(level=2)
    server.llm.wake_up()
    server.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
    after = answers(server)
    server.assert_nothing_left()
    assert after == answers(engine(POLICIES[name], model=other)) != before


def test_weights_change_under_requests_that_wait(engine, tiny, other, poisoned):
    """Paused, reloaded, resumed: what a request had generated stays, and the rest is the new weights' with their
    evictions.
    """
    server, steps = engine(POLICIES["h2o"], max_num_batched_tokens=96), 0

    def reload(server):
        nonlocal steps
        steps += 1
        if steps == 20:
            server.llm.sleep(level=2, mode="keep")
            server.llm.wake_up()
            server.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})

    for prompt, output, trace in server.answered(
        [(prompt, {"max_tokens": 90, "logprobs": 1}) for prompt in PROMPTS], reload
    ):
        assert trace.restarts == 1 and trace.known > len(prompt)
        assert assert_like_oracle(DenseLlama(other), prompt, output, trace, POLICIES["h2o"]) > 3
    server.assert_nothing_left()
