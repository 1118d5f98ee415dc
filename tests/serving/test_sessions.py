"""Streaming input: sessions of several turns, whose blocks, holes and scores go on from one turn to the next."""

import asyncio
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine import greedy, random_prompt
from parts import sums_of
from streaming import BLOCK, CHUNK, H2O, POLICIES, TURNS, Sessions, assert_like_oracle, replay, talk
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

#: Whether turns are sent before the one before has ended, in names of cases.
QUEUED = {False: "one-by-one", True: "queued"}


@pytest.mark.both_runners("h2o-one-by-one")
@pytest.mark.parametrize(
    "name, queued", [*((name, False) for name in POLICIES if name != "snapkv"), ("h2o", True)], ids=QUEUED.get
)
def test_turns_go_on_with_the_holes_and_scores_of_former_ones(engine, dense, name, queued):
    server = engine(POLICIES[name], max_num_batched_tokens=CHUNK)
    sessions, trigger, steady = Sessions(server), 8, []

    def on_step():
        request = server.scheduler.requests["s"]
        if request.num_computed_tokens > request.num_prompt_tokens + 1:
            steady.append(len(server.held_by("s")))

    talk(sessions, TURNS, on_step=on_step, queued=queued)
    tokens = sessions.tokens("s")
    choices, logits = replay(dense, sessions, "s", tokens, [(0, POLICIES[name])], random_prompt(150))
    assert len(choices) >= 4 and all(got == want for got, want in choices.values()), choices
    assert_like_oracle(sessions, "s", dense, logits, tokens, [length for length, _ in TURNS])
    assert max(steady) <= trigger
    assert sessions.usage["s"].evicted_blocks == sum(len(got) for got, _ in choices.values())
    sessions.end("s")


@pytest.mark.since("0.31", "its scheduler fails when a turn ends with a step in flight, without the plugin too")
@pytest.mark.both_runners("h2o-queued")
@pytest.mark.parametrize(
    "name, queued",
    [("h2o", False), *((name, True) for name in ("h2o", "sink-window", "context"))],
    ids=QUEUED.get,
)
def test_with_steps_in_flight(async_engine, dense, monkeypatch, name, queued):
    """Tokens that a step in flight computed beyond the end of its turn are dropped, and computed again over holes."""
    server = async_engine(POLICIES[name], max_num_batched_tokens=CHUNK)
    sessions = Sessions(server, monkeypatch)
    talk(sessions, TURNS, queued=queued)
    again = [first for first, _ in sessions.steps["s"]]
    assert len(again) > len(set(again)), "nothing was computed again"
    tokens = sessions.tokens("s")
    choices, logits = replay(dense, sessions, "s", tokens, [(0, POLICIES[name])], random_prompt(150))
    assert len(choices) >= 5
    if name == "sink-window":
        assert all(got == want for got, want in choices.values())
    assert_like_oracle(sessions, "s", dense, logits, tokens, [length for length, _ in TURNS])
    assert len(server.held_by("s")) <= 8 + 2
    sessions.end("s")


@pytest.mark.parametrize("ends", [90, 91])
def test_a_turn_may_end_on_a_blocks_edge(async_engine, monkeypatch, ends):
    """By token, what counts is settled with the step that makes a request due. If that one is dropped, nothing can be
    decided by it, though the next turn's budget is smaller."""
    policy = {**H2O, "budget": 160, "buffer": 0, "recent": 32, "granularity": "token"}
    server = async_engine(policy, max_num_batched_tokens=CHUNK, max_model_len=1024)
    sessions = Sessions(server, monkeypatch)
    for turn, (length, max_tokens) in enumerate([(70, ends), (40, 60), (33, 40)]):
        asked = {"extra_args": {"kv_budget": 128}} if turn else {}
        sessions.send("s", random_prompt(length, turn), max_tokens, **asked)
    sessions.run()
    assert all(np.isfinite(logprobs).all() for _, logprobs in sessions.answers["s"])
    assert len(server.held_by("s")) <= 4 + 2
    sessions.end("s")


@pytest.mark.parametrize("make", ["engine", "async_engine"])
def test_preempted_turns_start_over_with_everything(request, dense, make):
    server = request.getfixturevalue(make)(H2O, max_num_batched_tokens=CHUNK)
    sessions = Sessions(server)

    def between(turn):
        """The next turn is under way when it is preempted."""
        if turn in (1, 2):
            sessions.send("s", random_prompt(60, 7), 40)
            for _ in range(6):
                sessions.step()
            server.scheduler.reset_prefix_cache(reset_running_requests=True)

    turns = [(150, 40), (200, 70), (50, 60)]
    talk(sessions, turns, between=between)
    assert sessions.restarts == 2 and len(sessions.answers["s"]) == 5
    tokens = sessions.tokens("s")
    choices, logits = replay(dense, sessions, "s", tokens, [(0, H2O)], random_prompt(150))
    assert len(choices) >= 2
    if make == "engine":
        assert all(got == want for got, want in choices.values())
    # Of the last turn, which started over.
    logprobs, (answer, got) = torch.log_softmax(logits.double(), -1), sessions.answers["s"][-1]
    at = len(tokens) - len(answer) - 1
    want = [logprobs[at + i, token].item() for i, token in enumerate(answer)]
    np.testing.assert_allclose(got[-20:], want[-20:], atol=2e-3)
    sessions.end("s")


@pytest.mark.parametrize("make", ["engine", "async_engine"])
def test_under_pressure(request, make):
    policy = {"name": "h2o", "when": "pressure", "budget": 96, "buffer": 32, "sink": 32, "recent": 32}
    server = request.getfixturevalue(make)(policy, blocks=44, max_num_batched_tokens=CHUNK, max_model_len=1024)
    sessions = Sessions(server)
    names = [f"s{i}" for i in range(4)]
    turns = [(100, 60), (120, 50), (40, 80)]
    told_twice = []

    def on_step():
        for holes in server.runtime.with_holes.values():
            told_twice.append(len(holes) != len(set(holes)))

    for turn, (length, max_tokens) in enumerate(turns):
        for i, name in enumerate(names):
            sessions.send(name, random_prompt(length + 9 * i, 10 * turn + i), max_tokens)
        if turn:
            sessions.run(on_step)
    assert told_twice and not any(told_twice)
    assert all(np.isfinite(logprobs).all() for name in names for _, logprobs in sessions.answers[name])
    assert sum(sessions.resident(name).evicted_blocks for name in names) > 8
    sessions.end(*names)


def test_what_a_turn_leaves_out_as_null_stays_what_it_was(engine, complaints):
    server = engine(H2O, max_num_batched_tokens=CHUNK)
    sessions = Sessions(server)
    for turn, asked in enumerate([{"kv_budget": 160, "kv_policy": None}, {"kv_budget": None, "kv_policy": None}]):
        sessions.send("s", random_prompt(300, turn), 40, extra_args=asked)
        sessions.run()
        assert sessions.resident("s").config.budget == 160 < H2O["budget"]
    assert not complaints
    sessions.end("s")


def test_sessions_that_fill_the_pool_between_turns_make_room_for_the_next(engine):
    policy = {"name": "h2o", "when": "pressure", "budget": 96, "buffer": 32, "sink": 32, "recent": 32}
    server = engine(policy, blocks=42, max_num_batched_tokens=CHUNK, max_model_len=1024)
    sessions, names = Sessions(server), ["s0", "s1", "s2"]
    for turn, length in enumerate([380, 100]):
        for i, name in enumerate(names):
            sessions.send(name, random_prompt(length, 10 * turn + i), 16)
        sessions.run()
        evicted = sum(sessions.resident(name).evicted_blocks for name in names)
        assert (evicted > 0) == (turn > 0) and server.free_blocks < 8
    sessions.end(*names)


@pytest.mark.parametrize("name", ["h2o", "sink-window"])
def test_sessions_wait_for_their_turns_within_their_budgets(engine, poisoned, name):
    """Turns end with a chunk. The pool has room for one session's chunk beside the budgets of the others."""
    policy = {"name": name, "budget": 128, "buffer": 0, "sink": 32}
    server = engine(policy, blocks=2 * 4 + (128 + 256) // BLOCK + 3, max_num_batched_tokens=256, max_model_len=1024)
    sessions, names = Sessions(server), ["s0", "s1", "s2"]
    for turn in range(2):
        for i, each in enumerate(names):
            sessions.send(each, random_prompt(256, 10 * turn + i), 1)
        sessions.run()
        assert [len(sessions.resident(each).residence.pool) for each in names] == [4, 4, 4]
    sessions.end(*names)


@pytest.mark.both_runners("token")
@pytest.mark.parametrize("granularity", ["block", "token"])
def test_a_turn_that_ends_over_its_trigger_leaves_room_for_the_next(engine, poisoned, granularity):
    """Nothing is decided after a turn by token, nor if the next turn is there. The pool is the smallest that is
    accepted.
    """
    policy = {"name": "h2o", "budget": 128, "buffer": 0, "sink": 32, "recent": 32, "granularity": granularity}
    server = engine(policy, blocks=(128 + CHUNK) // BLOCK + 2, max_num_batched_tokens=CHUNK, max_model_len=1024)
    sessions = Sessions(server)
    for turn, length in enumerate([4 * CHUNK - 7, 2 * CHUNK, CHUNK]):
        sessions.send("s", random_prompt(length, turn), 1)
        if granularity == "token":
            sessions.run()
    sessions.run()
    assert sessions.resident("s").evicted_blocks
    sessions.end("s")


# ---- What a session may keep follows its prompt, and what its turns ask for


def test_it_is_evicted_from_once_it_has_grown_beyond_min_prompt(engine, dense):
    policy = {**POLICIES["h2o-mean"], "min_prompt": 300}
    server = engine(policy, max_num_batched_tokens=CHUNK)
    sessions, seen = Sessions(server), []

    def between(turn):
        seen.append((sessions.resident("s").evicted_blocks, len(sums_of(server.runtime))))

    talk(sessions, TURNS, between=between)
    # 150 tokens, then 150 + 39 + 200: from the second turn on.
    assert seen[0] == (0, 0) and seen[1][0] > 4 and seen[1][1] == 1 and seen[3][0] > seen[1][0]
    tokens = sessions.tokens("s")
    choices, logits = replay(
        dense, sessions, "s", tokens, [(0, POLICIES["h2o-mean"])], random_prompt(150), from_=150 + 39
    )
    assert len(choices) >= 4 and all(got == want for got, want in choices.values())
    assert_like_oracle(sessions, "s", dense, logits, tokens, [length for length, _ in TURNS])
    sessions.end("s")


@pytest.mark.since("0.31", "each turn of a session has the max_tokens of the first")
@pytest.mark.parametrize("name", ["snapkv", "fastgen"])
def test_a_ratio_is_of_the_prompt_so_far(engine, dense, name):
    policy = {**POLICIES.get(name, H2O), "name": name, "budget": 0.5, "buffer": 32}
    server = engine(policy, max_num_batched_tokens=CHUNK)
    sessions, seen, prompts = Sessions(server), [], []

    def between(turn):
        prompts.append(server.scheduler.requests["s"].num_prompt_tokens)
        seen.append({m.residents["s"].limits.budget for m in server.managers if m.residents["s"].limits})

    talk(sessions, TURNS, between=between)
    assert prompts == [150, 389, 488, 667]
    if name != "fastgen":
        assert seen == [{max(math.ceil(prompt / 2 / BLOCK), 4)} for prompt in prompts]
        starts = [0, *(prompt - length for prompt, (length, _) in zip(prompts[1:], TURNS[1:]))]
        policies = [(at, {**policy, "budget": budget * BLOCK}) for at, (budget,) in zip(starts, seen)]
        tokens = sessions.tokens("s")
        choices, logits = replay(dense, sessions, "s", tokens, policies, random_prompt(150))
        assert len(choices) >= 4 and all(got == want for got, want in choices.values())
        assert_like_oracle(sessions, "s", dense, logits, tokens, [length for length, _ in TURNS])
    sessions.end("s")


def test_a_turn_may_ask_for_another_budget(engine, complaints):
    server = engine({**H2O, "buffer": 0, "recent": 32}, max_num_batched_tokens=CHUNK)
    sessions, held, sinks = Sessions(server), [], []
    with pytest.raises(VLLMValidationError, match="above the server's 192"):
        sessions.send("s", random_prompt(70), extra_args={"kv_budget": 512})
    turns = {"kv_budget": 160}, {"kv_budget": 96}, {}, {"kv_budget": 192, "kv_sink": 64}, {"kv_budget": 512}
    for turn, extra in enumerate(turns):
        made = sessions.made("s", random_prompt(70, turn), 100)
        made.sampling_params.extra_args = extra  # past the front end
        sessions.core.add_request(made)
        sessions.sent["s"] = turn + 1
        sessions.run()
        held.append(sessions.resident("s").limits.budget)
        sinks.append(sessions.resident("s").limits.sink)
        # One more block may have been begun with the turn's last token.
        assert len(server.held_by("s")) <= held[-1] + 1
    assert held == [5, 3, 3, 6, 6] and sinks == [1, 1, 1, 2, 1], "what can't be granted is the server's, all of it"
    assert [level for level, _ in complaints] == ["WARNING"] and "above the server's 192" in complaints[0][1]
    sessions.send("s", random_prompt(70, 9), 10, extra_args={"kv_policy": "tova"})
    sessions.run()
    assert "keeps the KV policy of its first turn, 'h2o'" in complaints[1][1]
    assert sessions.resident("s").config.name == "h2o"
    assert sessions.usage["s"].policy == "h2o"
    sessions.end("s")


def test_a_smaller_budget_holds_from_the_next_step_on(engine):
    server = engine({**H2O, "buffer": 0, "recent": 32, "budget": 320}, max_num_batched_tokens=CHUNK)
    sessions = Sessions(server)
    sessions.send("s", random_prompt(320 + 5), 16)
    sessions.run()
    assert len(server.held_by("s")) == 10
    # Four tokens, which begin no block.
    sessions.send("s", random_prompt(3, 1), 2, extra_args={"kv_budget": 96})
    sessions.run()
    assert len(server.held_by("s")) == 3
    sessions.end("s")


def test_the_front_end_refuses_another_policy(engine):
    """Yield inputs as `AsyncLLM.generate` takes a stream of them in."""
    server = engine({**H2O, "budget": 0.5})
    sent, delta = [], {"output_kind": RequestOutputKind.DELTA}

    class Front(AsyncLLM):
        def __init__(self):
            llm = server.llm.llm_engine
            self.vllm_config, self.model_config = llm.vllm_config, llm.model_config
            self.input_processor = llm.input_processor
            self.output_processor = SimpleNamespace(has_request=lambda _: True)

        async def get_supported_tasks(self):
            return server.llm.supported_tasks

        def _run_output_handler(self):
            pass

        async def _add_request(self, request, *args):
            sent.append(request)

    async def talk(*asked):
        sent.clear()

        async def inputs():
            for turn, extra in enumerate(asked):
                prompt = {"prompt_token_ids": random_prompt(40, turn)}
                yield SimpleNamespace(prompt=prompt, sampling_params=extra and greedy(8, extra_args=extra, **delta))

        queue = await Front()._add_streaming_input_request("s", inputs(), greedy(8, **delta))
        await queue._input_stream_task
        return queue.output

    # What the whole session may come to is what a budget is held against: 0.5 of 2,048.
    asked = {"kv_policy": "tova", "kv_budget": 512}, {"kv_budget": 600}, None, {"kv_policy": "tova"}
    assert asyncio.run(talk(*asked)) is None
    assert [request.resumable for request in sent] == [True] * 4 + [False]
    for asked in (({"kv_policy": "tova"}, {"kv_policy": "h2o"}), (None, {"kv_policy": "tova"}), ({"kv_budget": 1100},)):
        cause = asyncio.run(talk(*asked)).cause
        assert isinstance(cause, VLLMValidationError), asked
        assert ("a session keeps the policy of its first turn" in str(cause)) == (len(asked) == 2)
    # Another request does not know of sessions.
    server.generate([random_prompt(100)], max_tokens=2, extra_args={"kv_policy": "tova"})


# --- sessions that fill the pool -------------------------------------------------------------------------------------


def answers_of_three(engine, policy, blocks):
    """Answers of three sessions whose second turns come together, and of a request that comes once all of them wait."""
    server = engine(policy, blocks=blocks, max_num_batched_tokens=CHUNK, max_model_len=512, enable_prefix_caching=False)
    sessions = Sessions(server)
    for seed, name in enumerate("abc"):
        sessions.send(name, random_prompt(190, seed), 20)
    sessions.run()
    held = sum(len(server.held_by(name)) for name in "abc")
    sessions.send("d", random_prompt(200, 9), 8, resumable=False)
    sessions.sent["d"] = 1
    sessions.run()
    for seed, name in enumerate("abc"):
        sessions.send(name, random_prompt(70, 50 + seed), 20)
    sessions.run()
    answers = {name: [tokens for tokens, _ in sessions.answers[name]] for name in "abcd"}
    sessions.end(*"abc")
    return answers, held


@pytest.mark.parametrize("policy", [{"name": "full"}, POLICIES["sink-window"]], ids=["full", "sink-window"])
def test_sessions_that_fill_the_pool_give_way(engine, policy):
    """vLLM preempts no session between two turns: three that hold nearly all blocks, one of which has to go on."""
    roomy, held = answers_of_three(engine, policy, 200)
    narrow, same = answers_of_three(engine, policy, held + 3)
    assert held == same and narrow.keys() == roomy.keys()
    if policy["name"] == "full":  # a session that starts over loses other blocks than before
        assert narrow == roomy
