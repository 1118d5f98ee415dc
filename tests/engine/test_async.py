"""Async scheduling: a step is planned before the one before it is known, so decisions come a step late.

The `async_engine` fixture keeps it on where vLLM's CPU platform would switch it off: two batches in flight.
"""

import math

import numpy as np
import pytest
import torch
from engine import PLAN, after, logprobs_of, random_prompt
from oracle.model import DenseLlama
from oracle.replay import replay_told
from parity import oracle_config
from parts import holes_of

BLOCK = 32
CHUNK = 96
POLICIES = {
    "h2o": {"name": "h2o", "budget": 192, "buffer": 64, "sink": 32, "recent": 64},
    "sink-window": {"name": "sink-window", "budget": 160, "buffer": 0, "sink": 32},
    "scissorhands": {"name": "scissorhands", "budget": 192, "buffer": 64, "sink": 32, "recent": 64, "window": 48},
    "snapkv-whole": {"name": "snapkv", "budget": 192, "buffer": 64, "sink": 32, "recent": 64, "prompt": "whole"},
}
# The dense oracle holds whole blocks: single tokens are compared in tests/engine/test_tokens.py.
AND_TOKENS = {**POLICIES, "h2o-tokens": {**POLICIES["h2o"], "granularity": "token"}}


class Record:
    """A record of one request's steps: tokens, holes told with each, blocks decided after each."""

    def __init__(self, start):
        self.start, self.steps, self.told, self.decided, self.pending = start, [], [], {}, []

    def by_step(self, count):
        """`decided` as a list over the first `count` steps."""
        done = self.start + np.cumsum(self.steps)
        assert set(self.decided) <= set(done.tolist()), "a decision was taken in the middle of a step"
        return [self.decided.get(tokens, []) for tokens in done[:count].tolist()]


class Recorder:
    """Watches the scheduler: what it plans, what it decides, and in which order."""

    def __init__(self, server):
        self.server, self.records, self.restarts = server, {}, 0
        self.untold = set()  # physical blocks that went back to the pool, and no worker knows
        scheduler = server.scheduler
        schedule, evict = scheduler.schedule, scheduler.apply

        def watched_schedule(*args):
            before = {req_id: set(server.held_by(req_id)) for req_id in scheduler.requests}
            untold = set(self.untold)
            output = schedule(*args)
            plan = getattr(output, PLAN)
            self.untold = set()
            for new in output.scheduled_new_reqs:
                self.records[new.req_id] = Record(new.num_computed_tokens)
            cached = output.scheduled_cached_reqs
            for req_id, computed in zip(cached.req_ids, cached.num_computed_tokens):
                if req_id in cached.resumed_req_ids:
                    self.records[req_id] = Record(computed)
            told = holes_of(plan.groups[0].changes)
            for req_id, holes in told.items():
                if req_id in self.records:
                    self.records[req_id].pending += holes
            for req_id, tokens in output.num_scheduled_tokens.items():
                record = self.records[req_id]
                record.steps.append(tokens)
                record.told.append(record.pending)
                record.pending = []
            handed_out = {b for r in scheduler.requests for b in server.held_by(r)} - set().union(*before.values())
            assert len(self.decisions_waiting) == len(told), "holes were left for a later step"
            self.reused += len(handed_out & untold)
            self.decisions_waiting = set()
            return output

        def watched_apply(action):
            request = scheduler.requests[action.req_id]
            blocks = {index: block.block_id for index, block in enumerate(self.table(request)) if not block.is_null}
            done = request.num_computed_tokens - request.num_in_flight_tokens
            applied = evict(action)
            gone = [index for index in blocks if self.table(request)[index].is_null]
            if gone:
                self.records[request.request_id].decided[done] = gone
                self.in_flight.append(request.num_in_flight_tokens)
                self.decisions_waiting.add(request.request_id)
                self.untold |= {blocks[index] for index in gone}
            return applied

        def restarted(*_):
            self.restarts += 1

        self.reused, self.in_flight, self.decisions_waiting = 0, [], set()
        scheduler.schedule, scheduler.apply = watched_schedule, watched_apply
        after(scheduler, "_preempt_request", restarted)

    def table(self, request):
        return self.server.manager.req_to_blocks[request.request_id]

    def of(self, request_id):
        """The record of a request by the id that the test gave."""
        return next(record for req_id, record in self.records.items() if req_id.split("-")[0] == request_id)


@pytest.mark.both_runners("h2o")
@pytest.mark.parametrize("name", POLICIES)
def test_late_decisions_are_the_right_ones(async_engine, tiny, name):
    """Decided on what is done, with a step in flight that still reads the old table: the oracle, replaying the same
    steps with holes from when workers were told of them, decides the same and computes the same log-probabilities."""
    check_late_decisions(async_engine, tiny, POLICIES[name])


def check_late_decisions(async_engine, model, policy):
    server = async_engine(policy, model=model, max_num_batched_tokens=CHUNK, enable_prefix_caching=False)
    recorder = Recorder(server)
    requests = [(random_prompt(length, length), tokens) for length, tokens in [(400, 40), (150, 130)]]
    ids = [server.add(prompt, max_tokens=tokens, logprobs=1) for prompt, tokens in requests]
    outputs = server.run()
    assert max(recorder.in_flight) > 0, "no step was in flight at any decision: this was not async"
    dense = DenseLlama(model)
    for request_id, (prompt, max_tokens) in zip(ids, requests):
        output, record = outputs[request_id], recorder.of(request_id)
        tokens = [*prompt, *output.outputs[0].token_ids]
        assert len(tokens) == len(prompt) + max_tokens
        # A step planned after the last token is computed for nothing.
        steps = np.searchsorted(np.cumsum(record.steps), len(tokens) - 1) + 1
        decided = record.by_step(steps)
        assert sum(map(len, decided)) >= 2
        reference = replay_told(
            dense, tokens, record.steps[:steps], oracle_config(policy, prompt), record.told[:steps], decided
        )
        assert decided[:-1] == reference.evicted[:-1]
        logprobs = torch.log_softmax(reference.logits.double(), -1)[len(prompt) - 1 :]
        want = [logprobs[i, token].item() for i, token in enumerate(output.outputs[0].token_ids)]
        np.testing.assert_allclose(logprobs_of(output), want, atol=2e-3)
    server.assert_nothing_left()


def test_the_bound_holds_with_one_more_chunk_in_flight(async_engine):
    policy = POLICIES["h2o"]
    server = async_engine(policy, max_num_batched_tokens=CHUNK)
    peaks, steady = [], []

    def look(*_):
        peaks.extend(len(server.held_by(request.request_id)) for request in server.scheduler.running)

    after(server.scheduler, "schedule", look)

    def check(server):
        assert server.free_blocks == server.all_blocks - len(server.held_blocks())
        for request in server.scheduler.running:
            held = len(server.held_by(request.request_id))
            if request.num_in_flight_tokens <= 1 and request.num_computed_tokens > request.num_prompt_tokens + 2:
                steady.append(held)

    for seed, (length, tokens) in enumerate([(700, 30), (64, 220)]):
        server.add(random_prompt(length, seed), max_tokens=tokens)
    outputs = server.run(check)
    budget = policy["budget"] + policy["buffer"]
    assert max(peaks) <= math.ceil((budget + 2 * CHUNK) / BLOCK) + 1 < 700 // BLOCK
    assert max(output.kv_usage.peak_resident_blocks for output in outputs.values()) == max(peaks)
    assert max(steady) == math.ceil(budget / BLOCK) + 1
    server.assert_nothing_left()


def test_the_pool_is_planned_for_both_chunks(async_engine):
    server = async_engine(POLICIES["sink-window"], max_num_batched_tokens=CHUNK, blocks=100)
    concurrency = server.llm.llm_engine.vllm_config.cache_config.kv_cache_max_concurrency
    assert concurrency == pytest.approx(100 / (5 + 2 * CHUNK // BLOCK + 1), rel=0.02)


@pytest.mark.both_runners("h2o-False")
@pytest.mark.parametrize("name, caching", [("h2o", False), ("sink-window", True), ("h2o-tokens", True)])
def test_no_poison_with_steps_in_flight(async_engine, tiny, monkeypatch, name, caching):
    """A pool small enough to preempt, requests that come and go, freed blocks full of NaN."""
    check_poison_with_steps_in_flight(async_engine, tiny, monkeypatch, name, caching, 22)


def check_poison_with_steps_in_flight(async_engine, model, monkeypatch, name, caching, blocks):
    monkeypatch.setenv("VLLM_EVICT_POISON", "1")
    policy, small = {**AND_TOKENS[name], "budget": 128 + 32}, dict(blocks=blocks, max_model_len=512)
    server = async_engine(policy, model=model, max_num_batched_tokens=CHUNK, enable_prefix_caching=caching, **small)
    recorder = Recorder(server)
    rng = np.random.default_rng(3)
    prefix = random_prompt(200)
    poison = [0]
    left = 16
    aborted, outputs, ids = set(), {}, []
    while left or server.llm.llm_engine.has_unfinished_requests():
        if left and rng.random() < 0.2:
            left -= 1
            prompt = prefix[: rng.choice([0, 100, 200])] + rng.integers(0, 256, int(rng.integers(5, 150))).tolist()
            ids.append(server.add(prompt, max_tokens=int(rng.integers(40, 160)), logprobs=0))
            if len(ids) % 8 == 5:
                server.llm.llm_engine.abort_request(ids[-2:-1])
                if ids[-2] not in outputs:
                    aborted.add(ids[-2])
        for output in server.llm.llm_engine.step():
            if output.finished:
                outputs[output.request_id] = output
        held = sorted(server.held_blocks())
        assert server.free_blocks == server.all_blocks - len(held)
        cache = server.worker.model_runner.kv_caches[-1]
        poison.append(int(torch.isnan(cache).flatten(1).any(1).sum()))
    assert max(poison) > 0 and recorder.restarts > 0 and recorder.reused > 0
    assert set(outputs) | aborted == set(ids) and aborted
    for output in outputs.values():
        assert np.isfinite(logprobs_of(output)).all()
    assert sum(output.kv_usage.evicted_blocks > 0 for output in outputs.values()) >= 2
    server.assert_nothing_left()
