"""Sends sessions of several turns to an engine, and replays what it did with the dense oracle."""

import numpy as np
import pytest
import torch
from engine import PLAN, after, greedy, random_prompt
from oracle.replay import Request
from parity import oracle_config
from parts import holes_of, orders_of
from vllm.v1.request import RequestStatus

from vllm_evict.features.context.plan import KeyRotation

BLOCK, CHUNK = 32, 96
H2O = {"name": "h2o", "budget": 192, "buffer": 64, "sink": 32, "recent": 64}
POLICIES = {
    "h2o": H2O,
    "h2o-mean": {**H2O, "accumulate": "mean"},
    "snapkv": {**H2O, "name": "snapkv", "window": 24, "kernel": 3},
    "sink-window": {"name": "sink-window", "budget": 192, "buffer": 64, "sink": 32},
    "context": {**H2O, "context": 512},
}
TURNS = [(150, 40), (200, 70), (30, 60), (120, 50)]


class Sessions:
    """Sends turns to an engine, and keeps what comes back and what happened.

    Attributes:
        sent: session -> turns sent.
        answers: session -> for each turn that ended, its tokens and their log-probabilities.
        steps: session -> tokens of each step since it (re)started, as (position of the first, tokens).
        told, decided: session -> {step: logical blocks} that workers were told of with it, and that were decided after it.
        moved: session -> steps before which what it keeps moved up.
        usage: session -> its `KVUsage` so far.
    """

    def __init__(self, server, monkeypatch=None):
        """With `monkeypatch` turns end as by a stop token, which no plan foresees: a step in flight goes on."""
        self.ends = {}
        if monkeypatch is not None:
            monkeypatch.setattr("vllm.v1.core.sched.scheduler.check_stop", self._stops)
        self._unforeseen = monkeypatch is not None
        self.server, self.core = server, server.llm.llm_engine.engine_core
        self.sent, self.answers, self.usage, self._open, self._pending = {}, {}, {}, {}, {}
        self.steps, self.told, self.decided, self.moved, self.restarts = {}, {}, {}, {}, 0
        scheduler = server.scheduler

        def plan(output, *_):
            for req_id, holes in holes_of(getattr(output, PLAN).groups[0].changes).items():
                self._pending.setdefault(req_id, []).extend(holes)
            for req_id, tokens in output.num_scheduled_tokens.items():
                steps = self.steps.setdefault(req_id, [])
                first = scheduler.requests[req_id].num_computed_tokens - tokens
                if first == 0:
                    steps.clear()
                    for known in (self.told, self.decided, self._pending):
                        known.pop(req_id, None)
                self.told.setdefault(req_id, {})[len(steps)] = self._pending.pop(req_id, [])
                steps.append((first, tokens))
            for move in orders_of(getattr(output, PLAN), KeyRotation):
                self.moved.setdefault(move.req_id, set()).add(len(self.steps[move.req_id]) - 1)
            output.at = {req_id: len(self.steps[req_id]) - 1 for req_id in output.num_scheduled_tokens}

        def settle(_, output, *args):
            for req_id, holes in holes_of(scheduler.kv_managers[0].changes).items():
                if req_id in output.at:
                    self.decided.setdefault(req_id, {})[output.at[req_id]] = sorted(holes)

        def restarted(*_):
            self.restarts += 1

        after(scheduler, "schedule", plan)
        after(scheduler, "update_from_output", settle)
        after(scheduler, "_preempt_request", restarted)

    def _stops(self, request, max_model_len):
        turn = len(self.answers.get(request.request_id, ()))
        if request.num_output_tokens < self.ends[request.request_id][turn]:
            return False
        request.status = RequestStatus.FINISHED_STOPPED
        return True

    def send(self, name, prompt, max_tokens=16, resumable=True, **sampling):
        self.ends.setdefault(name, []).append(max_tokens)
        max_tokens = 1000 if self._unforeseen else max_tokens
        self.core.add_request(self.made(name, prompt, max_tokens, resumable, **sampling))
        self.sent[name] = self.sent.get(name, 0) + resumable

    def made(self, name, prompt, max_tokens=16, resumable=True, lora_request=None, **sampling):
        engine = self.server.llm.llm_engine
        params = greedy(max_tokens, logprobs=0, detokenize=False, **sampling)
        prompt = {"prompt_token_ids": list(map(int, prompt))}
        tasks = self.server.llm.supported_tasks
        about = {"lora_request": lora_request, "resumable": resumable}
        return engine.input_processor.process_inputs(name, prompt, params, tasks, **about)

    def close(self, *names):
        """No more input. A request of the same name says so."""
        for name in names:
            self.send(name, [0], resumable=False)
        for _ in range(4):
            self.step()

    def end(self, *names):
        """No more input, after which nothing is left."""
        self.close(*names)
        self.server.assert_nothing_left()

    def step(self):
        for output in self.core.get_output().outputs:
            tokens, logprobs = self._open.setdefault(output.request_id, ([], []))
            tokens += output.new_token_ids
            if output.new_logprobs is not None:
                logprobs += output.new_logprobs.logprobs[:, 0].tolist()
            if output.finish_reason is not None:
                self.answers.setdefault(output.request_id, []).append(self._open.pop(output.request_id))
            if usage := getattr(output, "kv_usage", None):
                self.usage[output.request_id] = usage

    def run(self, on_step=lambda: None):
        """Until all turns that were sent have ended."""
        for _ in range(3000):
            if all(len(self.answers.get(name, ())) >= sent for name, sent in self.sent.items()):
                return
            self.step()
            on_step()
        pytest.fail("turns did not end")

    def tokens(self, name):
        """All that a session has computed, and the last token, which it has not."""
        request = self.server.scheduler.requests[name]
        return list(request._all_token_ids)

    def resident(self, name):
        return self.server.manager.residents[name]


def replay(dense, sessions, name, tokens, policies, prompt, from_=0):
    """The oracle's choices and logits, given the session's steps and what was missing in each.

    Args:
        policies: (first position, policy) in force from there on.
        from_: position of the first query that is measured.
    """
    steps = [(i, first, count) for i, (first, count) in enumerate(sessions.steps[name])]
    # What a step computed beyond the end of its turn was dropped, and computed again.
    kept = [
        (i, first, min(count, later[0] - first)) for (i, first, count), later in zip(steps, sessions.steps[name][1:])
    ]
    kept = [each for each in [*kept, steps[-1]] if each[2] > 0 and each[1] < len(tokens)]
    request, gone, logits, choices = Request(dense, oracle_config(policies[0][1], prompt)), set(), [], {}
    for i, first, count in kept:
        assert first == request.n
        request.config = next(oracle_config(policy, prompt) for start, policy in reversed(policies) if start <= first)
        request.evicted |= set(sessions.told[name][i])
        if i in sessions.moved.get(name, ()):
            request.close_gaps()
        request.n = first + count
        out, probs = dense.forward(tokens[first : first + count], request.cache, request.mask(first), True)
        if request.config.wants_probs and first >= from_:
            request.accumulate(probs, first)
        logits.append(out)
        # As if all that was decided had taken effect.
        told, request.evicted = request.evicted, set(gone)
        blocks = sorted(sessions.decided.get(name, {}).get(i, []))
        if blocks:
            request.start = from_
            request.replay.evicted.clear()
            places = dict(request.places)
            request.decide()
            request.places = places
            choices[i] = blocks, request.replay.evicted[0]
        request.evicted = told
        gone |= set(blocks)
    return choices, torch.cat(logits)


def assert_like_oracle(sessions, name, dense, logits, tokens, turns):
    """Log-probabilities of all that was sampled. `turns` are the lengths of what was sent."""
    logprobs, at = torch.log_softmax(logits.double(), -1), 0
    for sent, (answer, got) in zip(turns, sessions.answers[name], strict=True):
        at += sent
        want = [logprobs[at - 1 + i, token].item() for i, token in enumerate(answer)]
        np.testing.assert_allclose(got, want, atol=2e-3)
        at += len(answer) - 1  # the last one is no part of the session
    assert at == len(tokens) - 1


def talk(sessions, turns, name="s", on_step=lambda: None, queued=False, between=lambda turn: None, seed=0):
    """Send a session's turns, one after the other or all at once, and run them."""
    for turn, (length, max_tokens) in enumerate(turns):
        sessions.send(name, random_prompt(length, 100 * seed + turn), max_tokens)
        if not queued:
            sessions.run(on_step)
            between(turn)
    sessions.run(on_step)
