"""kvzip: shadows that reconstruct prompts, what they leave, and that nobody ever sees them."""

import re
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine import after, greedy, logprobs_of, random_prompt

from vllm_evict.config import KVPolicyConfig, KVPolicyError
from vllm_evict.core.blocks import RequestBlocks
from vllm_evict.features.kvzip.engine import LONGEST_WAIT, OVERLAP, Reconstruction, Reconstructions
from vllm_evict.integration.engine.shadows import ShadowRequests

SERVER = {"name": "kvzip", "budget": 192, "buffer": 64, "sink": 32, "recent": 64}
SIZE = 32


@pytest.fixture
def shadows(monkeypatch):
    """Prompts of all shadows that are added."""
    seen, add = [], Reconstructions._add
    monkeypatch.setattr(
        Reconstructions, "_add", lambda self, job, prompt, *a: seen.append(prompt) or add(self, job, prompt, *a)
    )
    return seen


# ---- Configuration


def test_it_is_only_for_those_who_name_it():
    for name in ("h2o", "full"):
        assert not KVPolicyConfig.parse(name).reconstructs
    for naming in ("kvzip", {"name": "h2o", "allow": ["kvzip"]}):
        config = KVPolicyConfig.parse(naming)
        assert "kvzip" in config.allowed and config.reconstructs
        assert config.bound(SIZE, 4096) is None, "until it has its scores a request holds all its blocks"
    assert KVPolicyConfig.parse("h2o").bound(SIZE, 4096) is not None


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("when", "pressure", "when: 'kvzip' supports only 'budget'"),
        ("instruction", [-1], "instruction: .* greater than or equal to 0"),
        ("instruction", "Repeat it", "instruction: "),
        ("chunk", 0, "chunk: .* 1"),
        ("window", 8, "has no field 'window'"),
    ],
)
def test_bad_values_say_what_is_allowed(field, value, message):
    with pytest.raises(KVPolicyError, match=message):
        KVPolicyConfig.parse({"name": "kvzip", field: value})


def test_without_a_prefix_cache_it_is_refused(engine):
    for policy in (SERVER, {"name": "h2o", "allow": ["kvzip"]}):
        with pytest.raises(KVPolicyError, match="kvzip and prefix caching off"):
            engine(policy, enable_prefix_caching=False)


# ---- On an engine


def reconstructed(dense, prompt, config):
    """Mass on each whole block of a prompt, from dense forward passes over all that shadows compute."""
    size, total = len(prompt), 0
    chunk = min(config.chunk, 2047 - size - len(config.instruction))
    for start in range(0, size, chunk):
        before = [*prompt, *config.instruction, *prompt[max(start - OVERLAP, 0) : start]]
        ids = [*before, *prompt[start : start + chunk]]
        causal = torch.ones(len(ids), len(ids)).tril().bool()
        _, probs = dense.forward(ids, dense.new_cache(), causal, want_probs=True)
        total = total + probs[:, :, len(before) :].double().sum((0, 1, 2))[: size // SIZE * SIZE]
    return total.view(-1, SIZE).sum(1).numpy()


@pytest.mark.oracle("full attention")
@pytest.mark.both_runners("engine-250")
@pytest.mark.parametrize("chunk", [2048, 250])
@pytest.mark.parametrize("make", ["engine", "async_engine"])
def test_kept_blocks_are_those_of_a_dense_reconstruction(request, dense, shadows, make, chunk):
    policy = {**SERVER, "chunk": chunk, "instruction": [7, 8, 9, 10, 11]}
    config = KVPolicyConfig.parse(policy)
    server = request.getfixturevalue(make)(policy, max_num_batched_tokens=200)
    prompt = random_prompt(610, 3)
    (output,), (trace,) = server.traced([(prompt, {"max_tokens": 150, "logprobs": 0})])
    assert len(shadows) == (1 if chunk == 2048 else 3)
    mass = reconstructed(dense, prompt, config)
    ((hashes, stored),) = server.scheduler.part(Reconstructions).scores._prompts.values()
    assert len(hashes) == len(mass) == 19
    np.testing.assert_allclose(stored, mass, rtol=1e-3)
    # Decisions, by hand: after each of them the sink, what is recent, and the heaviest of the rest are left.
    resident, computed, known, decisions = [], 0, 0, 0
    for step, count in enumerate(trace.steps[:-1]):
        computed += count
        blocks = -(-computed // SIZE)
        resident += range(known, blocks)
        known = blocks
        if not trace.evicted[step]:
            continue
        decisions += 1
        if decisions == 1:
            assert computed > len(prompt), "not before it is reconstructed"
        weight = np.pad(mass, (0, known - len(mass)))
        candidates = [b for b in resident if 1 <= b < (computed - 64) // SIZE]
        spare = len(resident) - 6
        order = sorted(candidates, key=lambda b: (weight[b], b))
        assert trace.evicted[step] == sorted(order[:spare])
        resident = [b for b in resident if b not in trace.evicted[step]]
    assert decisions >= 2
    late = make == "async_engine"
    np.testing.assert_allclose(logprobs_of(output), replayed(dense, prompt, output, trace, late), atol=2e-3)
    server.assert_nothing_left()


def replayed(dense, prompt, output, trace, late=False):
    """Log-probabilities of a request's tokens where its queries see what was left in their step.

    Late: the step that was in flight when a decision fell sees what goes.
    """
    tokens = [*prompt, *output.outputs[0].token_ids]
    cache, holes, logits, n = dense.new_cache(), [], [], trace.start
    if n:
        dense.forward(tokens[:n], cache, torch.ones(n, n).tril().bool())
    for count, evicted in zip(trace.steps, [[], *trace.evicted] if late else trace.evicted):
        count = min(count, len(tokens) - n)
        mask = torch.ones(count, n + count).tril(n).bool()
        for hole in holes:
            mask[:, hole * SIZE : (hole + 1) * SIZE] = False
        logits.append(dense.forward(tokens[n : n + count], cache, mask)[0])
        holes += evicted
        n += count
    logprobs = torch.log_softmax(torch.cat(logits).double(), -1)[len(prompt) - 1 - trace.start :]
    ids = list(output.outputs[0].token_ids)
    return logprobs[range(len(ids)), ids]


def test_a_prompt_is_reconstructed_once(engine, dense, shadows):
    """By itself, together with its twin, and with another question at its end; not under another salt."""
    server = engine(SERVER)
    context = random_prompt(640, 1)
    both = [(context, {"max_tokens": 60, "logprobs": 0})] * 2
    first = server.traced(both)
    assert len(shadows) == 1
    for output, trace in zip(*first):
        assert output.kv_usage.evicted_blocks >= 14
        np.testing.assert_allclose(logprobs_of(output), replayed(dense, context, output, trace), atol=2e-3)
    asked = [*context, *random_prompt(50, 2)]
    (output,), (trace,) = server.traced([(asked, {"max_tokens": 20, "logprobs": 0})])
    assert len(shadows) == 1 and trace.evicted[0], "at once, with the step that computes the question"
    np.testing.assert_allclose(logprobs_of(output), replayed(dense, asked, output, trace), atol=2e-3)
    server.generate([[*context, *random_prompt(200, 2)]], max_tokens=40)
    assert len(shadows) == 2, "a longer question is a context of its own"
    salted = [{"prompt_token_ids": context, "cache_salt": "other"}]
    server.llm.generate(salted, greedy(60), use_tqdm=False)
    assert len(shadows) == 3
    server.assert_nothing_left()


def test_a_repetition_that_is_cached_is_computed_all_the_same(engine, dense, shadows):
    """A client may have sent what a shadow sends; its blocks would leave nothing to measure. And no shadow leaves any."""
    server = engine({**SERVER, "allow": ["full"]})
    prompt = random_prompt(608, 5)
    server.generate([[*prompt, *prompt, 1]], max_tokens=2, extra_args={"kv_policy": "full"})
    server.generate([prompt], max_tokens=60)
    assert shadows == [[*prompt, *prompt]]
    ((_, mass),) = server.scheduler.part(Reconstructions).scores._prompts.values()
    np.testing.assert_allclose(mass, reconstructed(dense, prompt, server.scheduler.kv_policy), rtol=1e-3)
    other = random_prompt(608, 6)
    server.generate([other], max_tokens=60)
    (output,) = server.generate([[*other, *other]], max_tokens=1, extra_args={"kv_policy": "full"})
    assert output.num_cached_tokens == 608


def test_what_keeps_its_budget_is_not_reconstructed(engine, shadows):
    server = engine({**SERVER, "allow": ["h2o", "full"]})
    server.generate([random_prompt(200)], max_tokens=50)
    for name in ("h2o", "full"):
        server.generate([random_prompt(600)], max_tokens=50, extra_args={"kv_policy": name})
    assert not shadows
    server.generate([random_prompt(600)], max_tokens=50, extra_args={"kv_budget": 160})
    assert len(shadows) == 1


def test_nobody_sees_a_shadow(engine, shadows):
    server = engine(SERVER, max_num_batched_tokens=128)
    told = set()

    def look(outputs, *_):
        for client in outputs.values():
            told.update(output.request_id for output in client.outputs)
            told.update(client.finished_requests or ())

    after(server.scheduler, "update_from_output", look)
    server.scheduler.finished_req_ids_dict = defaultdict(set)
    for index in range(3):
        server.add(random_prompt(400 + index, index), f"p{index}", max_tokens=80)
    done = server.run()
    assert len(shadows) == 3 and set(done) == {"p0", "p1", "p2"}
    assert {req_id.split("-")[0] for req_id in told} == set(done)
    assert server.metrics()["vllm:prompt_tokens"] == sum(400 + index for index in range(3))
    assert server.metrics()["vllm:generation_tokens"] == 240
    assert not server.scheduler.part(ShadowRequests)._hidden
    server.assert_nothing_left()


def until_a_shadow_runs(server, steps=100):
    for _ in range(steps):
        server.llm.llm_engine.step()
        shadow = server.scheduler.part(Reconstructions)._shadow
        if shadow is not None and 0 < shadow.request.num_computed_tokens < shadow.request.num_prompt_tokens:
            return shadow.request
    raise AssertionError("there was none")


@pytest.mark.parametrize("make", ["engine", "async_engine"])
def test_an_aborted_request_takes_its_shadow_along(request, make):
    server = request.getfixturevalue(make)(SERVER, max_num_batched_tokens=64)
    server.add(random_prompt(600), "gone", max_tokens=200)
    shadow = until_a_shadow_runs(server)
    server.llm.llm_engine.abort_request(["gone"])
    assert shadow.is_finished() and not server.scheduler.running
    server.drain()
    server.assert_nothing_left()
    assert server.scheduler.part(Reconstructions).waiting == len(server.scheduler.part(Reconstructions).scores) == 0


def test_a_request_that_ends_first_takes_its_shadow_along(engine, shadows):
    server = engine(SERVER, max_num_batched_tokens=64)
    (output,) = server.generate([random_prompt(600)], max_tokens=5)
    assert len(shadows) == 1 and output.kv_usage.evicted_blocks == 0
    assert not server.scheduler.requests
    server.assert_nothing_left()


def test_all_is_aborted(engine):
    from vllm.v1.request import RequestStatus

    server = engine(SERVER, max_num_batched_tokens=64)
    server.add(random_prompt(600), "gone", max_tokens=200)
    until_a_shadow_runs(server)
    aborted = server.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert [request.request_id.split("-")[0] for request in aborted] == ["gone"]
    assert not server.scheduler.requests and not server.scheduler.residents


@pytest.mark.parametrize("running", [True, False])
def test_a_reset_forgets_scores_and_what_is_under_way(engine, dense, shadows, running):
    server = engine(SERVER, max_num_batched_tokens=64)
    other = random_prompt(500, 9)
    server.generate([other], max_tokens=60)
    assert len(server.scheduler.part(Reconstructions).scores) == 15
    prompt, resets = random_prompt(600), []

    def on_step(server):
        shadow = server.scheduler.part(Reconstructions)._shadow
        if shadow is not None and not resets and shadow.request.num_computed_tokens > 650:
            resets.append(server.scheduler.reset_prefix_cache(reset_running_requests=running))
            assert len(server.scheduler.part(Reconstructions).scores) == 0

    (output,), (trace,) = server.traced([(prompt, {"max_tokens": 120, "logprobs": 0})], on_step)
    assert resets == [running] and len(shadows) == 3 and output.kv_usage.evicted_blocks > 0
    assert trace.restarts == running
    if not running:
        np.testing.assert_allclose(logprobs_of(output), replayed(dense, prompt, output, trace), atol=2e-3)
    server.assert_nothing_left()


@pytest.mark.parametrize("make, scheduling", [("engine", "priority"), ("async_engine", "fcfs")])
def test_load_beyond_the_pool(request, poisoned, shadows, make, scheduling):
    """Originals and shadows are preempted; all end, and every block comes back."""
    server = request.getfixturevalue(make)(
        {**SERVER, "buffer": 32, "allow": ["full"]}, blocks=66, max_num_batched_tokens=128, scheduling_policy=scheduling
    )
    preempted = []
    after(server.scheduler, "_preempt_request", lambda _, request, *a: preempted.append(request.request_id))
    for index in range(12):
        asks = {"extra_args": {"kv_policy": "full"}} if index % 4 == 3 else {}
        server.add(random_prompt(250 + 30 * index, index), f"p{index}", max_tokens=150, logprobs=0, **asks)
    done = server.run()
    assert len(done) == 12 and all(np.isfinite(logprobs_of(output)).all() for output in done.values())
    assert shadows and any(not req_id.startswith("reconstruct") for req_id in preempted)
    assert sum(output.kv_usage.evicted_blocks > 0 for output in done.values()) >= 7
    server.assert_nothing_left()
    assert server.scheduler.part(Reconstructions).waiting == 0


def test_a_preempted_shadow_begins_again(engine, dense, shadows):
    """Others grow until the pool is full: the shadow goes first, and later gives the same scores."""
    server = engine({**SERVER, "allow": ["full"]}, max_num_batched_tokens=64)
    prompt, preempted = random_prompt(600), []

    def on_step(server):
        shadow = server.scheduler.part(Reconstructions)._shadow
        if shadow is not None and not preempted and shadow.request.num_computed_tokens > 700:
            assert server.scheduler.running[-1] is shadow.request
            server.scheduler._preempt_request(server.scheduler.running.pop(), 0.0)
            preempted.append(shadow.request.request_id)

    (output,), _ = server.traced([(prompt, {"max_tokens": 120})], on_step)
    assert len(preempted) == 1 and len(shadows) == 2
    ((_, mass),) = server.scheduler.part(Reconstructions).scores._prompts.values()
    np.testing.assert_allclose(mass, reconstructed(dense, prompt, server.scheduler.kv_policy), rtol=1e-3)
    assert output.kv_usage.evicted_blocks > 0
    server.assert_nothing_left()


@pytest.mark.parametrize(
    "why, arguments, length, said",
    [
        ("length", {}, 1900, "a prompt of 1900 tokens, which leaves 147 of --max-model-len 2048 .* 246 or more"),
        ("seats", {"max_num_seqs": 1}, 600, "--max-num-seqs 1; expected 2 or more"),
        ("pool", {"blocks": 34, "max_model_len": 1024}, 505, "a pool of 33 blocks; expected more than 3[3-9]"),
        ("short", {}, 31, "a prompt of 31 tokens; expected 32 or more"),
    ],
)
def test_a_request_that_can_have_no_scores_gives_up_its_oldest(
    engine, shadows, complaints, why, arguments, length, said
):
    """At once, and the log names the reason, once."""
    server = engine(SERVER, **arguments)
    for seed in range(2):
        _, (trace,) = server.traced([(random_prompt(length, seed), {"max_tokens": 90 if length > 300 else 300})])
        gone = next(evicted for evicted in trace.evicted if evicted)
        assert gone == list(range(1, 1 + len(gone)))
    assert not shadows
    (warning,) = [message for level, message in complaints if "oldest blocks" in message]
    assert re.search(f"^KV policy kvzip got {said}.* Said once for this reason.$", warning), warning
    server.assert_nothing_left()


def test_each_reason_is_said(engine, complaints):
    server = engine({**SERVER, "allow": ["full"]}, blocks=80)
    server.generate([random_prompt(31)] * 2, max_tokens=300)
    server.generate([random_prompt(1900)], max_tokens=90)
    (one, two) = [message for _, message in complaints if "oldest blocks" in message]
    assert "31 tokens" in one and "1900 tokens" in two


@pytest.mark.parametrize("change, why", [
    ({}, None),
    ({"resumable": True}, "session"),
    ({"prompt_embeds": torch.zeros(64, 8)}, "tokens"),
    ({"prompt_token_ids": None}, "tokens"),
    ({"mm_features": [object()]}, "tokens"),
    ({"num_prompt_tokens": 31}, "short"),
])  # fmt: skip
def test_prompts_that_cannot_be_repeated(change, why, complaints):
    asked = {
        "resumable": False,
        "prompt_embeds": None,
        "prompt_token_ids": [0] * 64,
        "mm_features": [],
        "request_id": "r",
    }
    request = SimpleNamespace(**{**asked, "num_prompt_tokens": 64, **change})
    reconstructions = Reconstructions.__new__(Reconstructions)
    reconstructions._manager, reconstructions._said = SimpleNamespace(block_size=32), set()
    assert reconstructions._unrepeatable(request) == why
    if why is not None:
        job = Reconstruction(request, RequestBlocks(KVPolicyConfig(name="kvzip"), None, 32, "kvzip"), 0, 0)
        for _ in range(2):
            reconstructions._do_without(job, why, prompt=request.num_prompt_tokens, least=32)
        ((_, said),) = complaints
        assert re.search(r"kvzip got a .*; expected .*; .* request r go first\. Said once", said)


def test_kvzip_does_not_give_scores_up_for_queueing(engine, shadows, complaints):
    """Prompts that wait behind the many parts of others have room, and get their scores in the end."""
    server = engine({**SERVER, "chunk": 16}, max_num_batched_tokens=512)
    held, waited = [], {}

    def on_step(server):
        reconstructions = server.scheduler.part(Reconstructions)
        held.append(len(server.held_blocks()))
        for req_id, job in reconstructions._jobs.items():
            assert job.crowded == 0
            if job.scores is None:
                waited[req_id] = server.scheduler.current_step - job.since

    for index in range(4):
        server.add(random_prompt(480 + index, index), f"p{index}", max_tokens=200)
    done = server.run(on_step)
    assert max(waited.values()) > LONGEST_WAIT and max(held) < server.all_blocks // 2
    assert len(shadows) == 30 + 31 * 3 and not complaints
    assert len(server.scheduler.part(Reconstructions).scores._prompts) == 4
    assert all(output.kv_usage.evicted_blocks > 0 for output in done.values())
    server.assert_nothing_left()


@pytest.mark.parametrize("lacks", ["blocks", "places", "tokens"])
def test_only_steps_without_room_count(engine, shadows, complaints, lacks):
    """The pool, the places among requests that run, or the tokens of each step are others'."""
    others = {"blocks": 2, "places": 2, "tokens": 1}[lacks]
    arguments = {"blocks": 110} if lacks == "blocks" else {"max_num_seqs": 3} if lacks == "places" else {}
    server = engine({**SERVER, "allow": ["full"]}, **arguments)
    for index in range(others):
        length = 1250 if lacks == "blocks" else 40
        server.add(random_prompt(length, index), max_tokens=300, extra_args={"kv_policy": "full"})
    server.add(random_prompt(600, 9), "waits", max_tokens=200)
    crowded = []

    def on_step(server):
        reconstructions = server.scheduler.part(Reconstructions)
        (job,) = reconstructions._jobs.values() or (None,)
        if job is not None:
            if reconstructions._shadow is not None:  # a token for each request that decodes
                server.scheduler.max_num_scheduled_tokens = 2
            crowded.append(job.crowded)
        assert (reconstructions._shadow is not None) <= (lacks == "tokens")

    done = server.run(on_step)
    assert [count for count in crowded if count] == list(range(1, LONGEST_WAIT + 1))
    assert len(shadows) == (lacks == "tokens")
    (warning,) = [message for _, message in complaints if "oldest blocks" in message]
    assert f"got no room for the repetition of a prompt in {LONGEST_WAIT} steps; expected" in warning
    assert done["waits"].kv_usage.evicted_blocks > 10
    server.assert_nothing_left()


def test_requests_that_wait_for_scores_do_not_outgrow_the_pool(engine, shadows, complaints):
    """A long queue in a pool that their answers fill: those without room evict, no block is lost, and all end."""
    server = engine({**SERVER, "chunk": 32, "buffer": 32}, blocks=66, max_num_batched_tokens=256)
    for index in range(6):
        server.add(random_prompt(300 + index, index), f"p{index}", max_tokens=400)
    steps = []
    done = server.run(lambda server: steps.append(len(server.scheduler.running)))
    assert len(done) == 6 and len(steps) < 6 * 400
    assert shadows and len(server.scheduler.part(Reconstructions).scores._prompts) > 0
    assert all(output.kv_usage.evicted_blocks > 0 for output in done.values())
    assert all("no room for" in message for _, message in complaints if "oldest blocks" in message)
    server.assert_nothing_left()


def test_clients_go_first(engine):
    """A shadow lets those go first who wait, and a new request is not behind it in the queue."""
    server = engine(SERVER, max_num_batched_tokens=64, max_num_seqs=3)
    server.add(random_prompt(600), "first", max_tokens=150)
    until_a_shadow_runs(server)
    server.add(random_prompt(40, 1), "second", max_tokens=4)
    steps = 0
    while "second" not in {output.request_id for output in server.llm.llm_engine.step() if output.finished}:
        steps += 1
        assert steps < 30
    server.run()
    server.assert_nothing_left()
