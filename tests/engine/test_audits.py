"""Audits: what full attention says of answers is what stock vLLM says, and no other request notices."""

import itertools
import logging
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine import logprobs_of, random_prompt
from parts import part_of
from vllm import SamplingParams
from vllm.sampling_params import BeamSearchParams, RepetitionDetectionParams, StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState

from vllm_evict.compute.attention.cpu import CPUOps
from vllm_evict.compute.sums import RunningSums
from vllm_evict.features.audit import engine as audits
from vllm_evict.features.audit.answers import served_tokens
from vllm_evict.features.audit.engine import Audits
from vllm_evict.features.audit.verdicts import CLEARLY
from vllm_evict.features.audit.worker import AnswerMass, Scorer
from vllm_evict.integration.engine.pressure import PoolRelief
from vllm_evict.integration.engine.shadows import ShadowRequests
from vllm_evict.integration.start import ending
from vllm_evict.integration.start.capabilities import refuse

#: A tenth of the longest prompts.
H2O = {"name": "h2o", "budget": 96, "buffer": 32, "sink": 32, "recent": 32, "audit": 1.0}
FULL = {"name": "full", "audit": 1.0, "allow": []}
TOKENS = 12


def prompts(count, longest=500):
    return [random_prompt(200 + 37 * seed % (longest - 200), seed) for seed in range(count)]


@pytest.fixture
def audited(monkeypatch):
    """List of (answer, verdict, tokens that its shadow computed, missed mass) of all audits."""
    found, judge = [], Audits.judge

    def judged(self, *audit):
        found.append(audit)
        judge(self, *audit)

    monkeypatch.setattr(Audits, "judge", judged)
    return found


@pytest.fixture
def scored(monkeypatch):
    """List of the numbers of rows that workers scored."""
    found, score = [], Scorer.score

    def counted(self, compute_logits, *args):
        def rows(hidden):
            found.append(len(hidden))
            return compute_logits(hidden)

        score(self, rows, *args)

    monkeypatch.setattr(Scorer, "score", counted)
    return found


def settle(server):
    """Step until no audit is left."""
    for _ in range(4000):
        if not server.scheduler.has_requests():
            return
        server.llm.llm_engine.step()
    raise AssertionError("audits do not end")


def verdicts(audited):
    """Verdict of each answer by its tokens."""
    return {tuple(answer.request.all_token_ids): verdict for answer, verdict, *_ in audited}


def skipped(server):
    return dict(server.scheduler.part(Audits)._skips)


@pytest.mark.both_runners
@pytest.mark.parametrize("make", ["engine", "async_engine"])
def test_full_attention_gives_what_full_gave(request, audited, make):
    """Bar 1; requests that lost nothing under a policy that evicts are the control, by the same code."""
    server = request.getfixturevalue(make)(FULL, max_num_batched_tokens=128)
    server.generate(prompts(6), max_tokens=TOKENS)
    settle(server)
    own = len(audited)
    assert own == 6
    for answer, verdict, _, missed in audited:
        assert answer.kept == "all" and verdict.identical and not verdict.changed and missed == 0
        assert verdict.tokens == verdict.agreed == TOKENS and 0 <= verdict.gap <= 1e-3 * TOKENS
    server.assert_nothing_left()


@pytest.mark.both_runners
def test_a_tenth_of_the_cache_is_judged_as_stock_vllm_judges_it(engine, audited, scored):
    """Bar 2: ranks and log-probabilities are those of stock `prompt_logprobs` on the same ids, and the first other token
    is where a free run of stock vLLM leaves the answer. Bar 6: what audits compute is what they have to."""
    asked = prompts(100)
    server = engine(H2O, max_num_batched_tokens=256)
    answers = server.generate(asked, max_tokens=TOKENS)
    settle(server)
    server.assert_nothing_left()
    assert len(audited) == 100 and not skipped(server)
    assert sum(scored) == 100 * TOKENS
    hits = [(len(answer.request.all_token_ids) - 1 - computed) for answer, _, computed, _ in audited]
    assert all(0 <= hit <= answer.first and hit % 32 == 0 for hit, (answer, *_) in zip(hits, audited)) and sum(hits) > 0
    assert {answer.kept for answer, *_ in audited} <= {"all", "50-100", "25-50", "10-25"}
    stock = engine(None, max_num_batched_tokens=256)
    free = stock.generate(asked, max_tokens=TOKENS)
    again = stock.generate(
        [[*prompt, *answer.outputs[0].token_ids] for prompt, answer in zip(asked, answers)],
        max_tokens=1,
        prompt_logprobs=1,
    )
    known, differ = verdicts(audited), 0
    for prompt, answer, alone, judged in zip(asked, answers, free, again):
        tokens = answer.outputs[0].token_ids
        verdict = known[(*prompt, *tokens)]
        steps = judged.prompt_logprobs[len(prompt) :]
        ranks = [step[token].rank for step, token in zip(steps, tokens)]
        likely = [max(each.logprob for each in step.values()) for step in steps]
        own = [step[token].logprob for step, token in zip(steps, tokens)]
        gaps = np.subtract(likely, own)
        assert verdict.agreed == sum(rank == 1 for rank in ranks)
        np.testing.assert_allclose(verdict.gap, gaps.sum(), atol=2e-3)
        np.testing.assert_allclose(verdict.surprise, -np.sum(own), atol=2e-3)
        assert verdict.changed == any(gap > CLEARLY for gap in gaps)
        first = next((at for at, pair in enumerate(zip(tokens, alone.outputs[0].token_ids)) if len({*pair}) > 1), None)
        assert verdict.first == first
        differ += first is not None
    assert differ > 50


KEYS = {**H2O, "name": "keydiff", "allow": []}
MISSED = {
    "h2o": ("engine", H2O, {"max_num_batched_tokens": 96}),
    "async": ("async_engine", H2O, {"max_num_batched_tokens": 256}),
    # What decisions compare is no sum of shares, or no attention at all.
    "maximum": ("engine", {**H2O, "heads": "max", "layers": "max"}, {}),
    "keys": ("engine", KEYS, {"enable_prefix_caching": False}),
}


@pytest.mark.both_runners("h2o", "keys")
@pytest.mark.parametrize("name", MISSED)
def test_missed_mass_is_that_of_the_dense_oracle(request, audited, dense, name):
    """Bar 7: the share of their attention that the answer's queries pay to blocks that were gone by its end."""
    make, policy, options = MISSED[name]
    server = request.getfixturevalue(make)(policy, **options)
    answered = server.answered(
        [(prompt, {"max_tokens": TOKENS + 30 * (at % 2)}) for at, prompt in enumerate(prompts(8))]
    )
    settle(server)
    assert len(audited) == 8 and not skipped(server)
    missed = {tuple(answer.request.all_token_ids): share for answer, _, _, share in audited}
    for prompt, output, trace in answered:
        ids, gone = [*prompt, *output.outputs[0].token_ids], sorted(sum(trace.evicted, []))
        known = missed_by(dense, ids, len(prompt) - 1, gone)
        np.testing.assert_allclose(missed[tuple(ids)], known, atol=1e-5)
        assert (known > 0) == bool(gone)
    counts = server.scheduler.part(Audits)._totals[True]
    assert counts["measured"] == sum(share > 0 for share in missed.values()) > 4
    np.testing.assert_allclose(counts["missed_mass"], sum(missed.values()))
    server.assert_nothing_left()


def missed_by(dense, ids, first, gone):
    """The share by the oracle: of queries from `first` to the last but one token, over all heads and layers."""
    causal = torch.ones(len(ids) - 1, len(ids) - 1, dtype=torch.bool).tril()
    _, probs = dense.forward(ids[:-1], dense.new_cache(), causal, want_probs=True)
    lost = torch.isin(torch.arange(len(ids) - 1) // 32, torch.tensor(gone))
    paid = probs[:, :, first:].double()
    return float(paid[..., lost].sum() / paid.sum())


def test_what_cannot_be_measured_is_left_out(engine, audited, monkeypatch):
    """By token, where no kernel measures, and where a report does not come: the rest of the audit stays."""
    by_token = engine({**H2O, "granularity": "token"})
    by_token.generate(prompts(2), max_tokens=TOKENS)
    settle(by_token)
    with pytest.MonkeyPatch.context() as patched:
        for module in (audits, refuse):
            patched.setattr(module, "measures_mass", lambda vllm_config: False)
        unread = engine(KEYS)
    assert "without missed mass" in unread.scheduler.part(Audits).described
    assert part_of(unread.runtime, AnswerMass) is None
    unread.generate(prompts(2), max_tokens=TOKENS)
    settle(unread)
    late = engine(KEYS)
    monkeypatch.setattr(RunningSums, "report", lambda self, *_: {})
    late.generate([random_prompt(300)], max_tokens=TOKENS)
    settle(late)
    assert len(audited) == 5 and [missed for *_, missed in audited] == [None] * 5
    assert not any(skipped(server) for server in (by_token, unread, late))


@pytest.mark.both_runners
def test_verdicts_do_not_depend_on_how_the_engine_runs(request, engine, audited):
    """Bar 3: async scheduling, sizes of chunks, prefix caching: the same answers get the same verdicts."""
    for make, options in (
        ("engine", {}),
        ("async_engine", {}),
        ("engine", {"max_num_batched_tokens": 48, "max_num_seqs": 4}),
        ("engine", {"enable_prefix_caching": False}),
    ):
        server = request.getfixturevalue(make)(FULL, **{"max_num_batched_tokens": 1024, **options})
        same_verdicts(server, audited)


#: Answer -> its verdict, of the first server that judged it.
KNOWN = {}


def same_verdicts(server, audited):
    """Judge answers that are put in place of a server's own, half of their tokens random; all servers agree on them."""
    on_free = Audits.on_free
    forced = {tuple(prompt): random_prompt(TOKENS, seed) for seed, prompt in enumerate(prompts(8))}

    def replaced(self, request):
        if request.is_finished() and (answer := forced.get(tuple(request.prompt_token_ids))):
            place = slice(request.num_prompt_tokens, None, 2)
            request._all_token_ids[place] = answer[::2]
        on_free(self, request)

    audited.clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Audits, "on_free", replaced)
        server.generate(forced, max_tokens=TOKENS)
        settle(server)
    found = verdicts(audited)
    KNOWN.update(KNOWN or found)
    assert found.keys() == KNOWN.keys() and len(found) == 8
    for answer, verdict in found.items():
        assert verdict[:3] == KNOWN[answer][:3] and verdict.changed == KNOWN[answer].changed
        np.testing.assert_allclose(np.array(verdict, float), np.array(KNOWN[answer], float), atol=2e-3)
    server.assert_nothing_left()


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_ranks_come_to_the_same_verdicts(ranked_engine, audited, ranks):
    same_verdicts(ranked_engine(FULL, ranks, max_num_batched_tokens=128), audited)


@pytest.fixture
def at_once(monkeypatch):
    """Answers wait for no idle engine."""
    monkeypatch.setattr(audits, "IDLE_ONLY", 0.0)  # of engines that are made later


LOADS = {
    "budget": ({}, {}),
    "pressure": ({"when": "pressure", "admit": True, "budget": 160}, {"blocks": 60}),
    "full pool": ({}, {"blocks": 40}),
    "kvzip": ({"allow": ["full", "kvzip"]}, {}),
    "by token": ({"granularity": "token"}, {}),
}


@pytest.mark.both_runners("budget")
@pytest.mark.parametrize("load", LOADS)
def test_nobody_else_notices(request, monkeypatch, engine, audited, at_once, load):
    """Bars 4 and 5: tokens, log-probabilities, preemptions and published blocks are those without audits."""
    fields, options = LOADS[load]
    known = []
    for audit in (0.0, 1.0):
        server = engine({**H2O, **fields, "audit": audit}, **{"max_num_batched_tokens": 96, **options})
        preempted, preempt = [], server.scheduler._preempt_request

        def counted(request, *args, preempt=preempt, preempted=preempted):
            preempted.append(request.request_id)
            preempt(request, *args)

        server.scheduler._preempt_request = counted
        turns, mixed = itertools.count(), []

        def more(server, turns=turns, mixed=mixed):
            turn = next(turns)
            if turn % 9 == 0 and turn < 90:
                asks = {"extra_args": {"kv_policy": "kvzip"}} if load == "kvzip" and turn % 2 else {}
                server.add(random_prompt(150 + 3 * turn, turn), f"x{turn}", max_tokens=40, logprobs=1, **asks)
            for each in server.scheduler.mechanisms.of(ShadowRequests):
                mixed.append(each.current is not None and len(server.scheduler.running) > 1)

        server.add(random_prompt(400, 77), "first", max_tokens=150, logprobs=1)
        done = server.run(more)
        settle(server)
        hashes = set(server.pool.cached_block_hash_to_block._cache)
        preempted = [req_id for req_id in preempted if not req_id.startswith("audit")]
        known.append((done, len(preempted), hashes))
        if audit:
            assert any(mixed) and len(audited) + sum(skipped(server).values()) == 11
            assert len(audited) >= (1 if load in ("pressure", "full pool") else 11)
        server.assert_nothing_left()
    (without, preemptions, hashes), (done, preemptions_then, hashes_then) = known
    assert without.keys() == done.keys()
    for req_id, output in done.items():
        assert output.outputs[0].token_ids == without[req_id].outputs[0].token_ids
        np.testing.assert_allclose(logprobs_of(output), logprobs_of(without[req_id]), atol=1e-4)
    assert preemptions_then <= preemptions
    if load in ("budget", "kvzip", "by token"):
        assert hashes_then == hashes


def test_sampled_answers_surprise_as_much_as_they_should(engine, audited):
    """Under full attention the mean surprise is the entropy; with fewer blocks it is more."""
    more = []
    for policy in (FULL, H2O):
        server = engine(policy)
        for truncated in ({}, {"top_k": 60, "top_p": 0.9, "min_p": 0.05}):
            audited.clear()
            sampled = SamplingParams(temperature=0.7, max_tokens=40, ignore_eos=True, seed=3, **truncated)
            server.generate(prompts(40), sampled)
            settle(server)
            assert len(audited) == 40 and not skipped(server)
            outside = sum(verdict.outside for _, verdict, *_ in audited)
            tokens = sum(verdict.tokens for _, verdict, *_ in audited) - outside
            more.append(sum(verdict.surprise - verdict.expected for _, verdict, *_ in audited) / tokens)
            # Full attention samples no token that it leaves out.
            assert (outside > 0) is (policy is H2O and bool(truncated))
        assert server.scheduler.part(Audits)._totals[policy is H2O]["sampled_requests"] > 60
    assert all(abs(each) < 0.15 for each in more[:2]) and more[2] > 0.15


SKIPPED = {
    "penalties": {"repetition_penalty": 1.2},
    "bias": {"min_tokens": 3},
    "grammar": {"structured_outputs": StructuredOutputsParams(regex="(t1|t2|t3){60,500}")},
}


def test_what_full_attention_cannot_judge_is_counted(engine, audited, monkeypatch, messages):
    monkeypatch.setattr(audits, "SAID_EVERY", 4)
    server = engine(H2O, structured_outputs_config={"backend": "xgrammar"})
    for asked in SKIPPED.values():
        server.generate([random_prompt(200)], max_tokens=8, **asked)
    server.add(random_prompt(300), "gone", max_tokens=100)
    for _ in range(10):
        server.llm.llm_engine.step()
    server.llm.llm_engine.abort_request(["gone"])
    settle(server)
    assert not audited and skipped(server) == dict.fromkeys([*SKIPPED, "aborted"], 1)
    assert sum("audit 4 have none (aborted 1, bias 1, grammar 1, penalties 1)" in message for message in messages) == 1
    assert sum("of the first 4 answers drawn" in message for message in messages) == 1
    values = server.metrics()
    assert values["vllm:num_preemptions"] == 0
    server.assert_nothing_left()


def test_answers_end_where_their_clients_saw_them_end(async_engine, audited):
    """At a stop string, which the front end finds while the engine goes on, or in a loop; a beam search is no answer."""
    server, prompt = async_engine(H2O), random_prompt(300)
    (plain,) = server.generate([prompt], max_tokens=40)
    word = plain.outputs[0].text.split()[5] + " "
    (stopped,) = server.generate([prompt], max_tokens=40, stop=[word, "no such text"])
    loop = RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=1, min_count=2)
    looped = server.generate(prompts(8), max_tokens=300, repetition_detection=loop)
    settle(server)
    known, ends = verdicts(audited), {output.outputs[0].finish_reason for output in looped}
    assert stopped.outputs[0].finish_reason == "stop" and "repetition" in ends and not skipped(server)
    tokens = stopped.outputs[0].token_ids
    assert len(tokens) < 40 and known[(*prompt, *tokens)].tokens == len(tokens) and len(audited) == 10
    # The engine may go on until it hears of it.
    (request,) = (answer.request for answer, *_ in audited if answer.token_ids == [*prompt, *tokens])
    tokenizer = server.scheduler.structured_output_manager.tokenizer
    request.append_output_token_ids([1, 2, 3])
    assert served_tokens(request, tokenizer) == len(tokens) < request.num_output_tokens
    server.add(random_prompt(300, 1), "gone", max_tokens=200, stop=["no such text"])
    for _ in range(10):
        server.llm.llm_engine.step()
    server.llm.llm_engine.abort_request(["gone"])
    server.llm.beam_search([{"prompt_token_ids": prompt}], BeamSearchParams(beam_width=2, max_tokens=4))
    settle(server)
    assert len(audited) == 10 and skipped(server).keys() == {"aborted", "beam"} and skipped(server)["aborted"] == 1
    server.generate([prompt], max_tokens=1, logprobs=4, detokenize=False)  # not one of a beam search
    settle(server)
    assert len(audited) == 11
    server.assert_nothing_left()


def test_shadows_leave_no_trace_in_the_prefix_cache_and_in_vllms_figures(engine, audited):
    """On a server where nothing is lost: none of their blocks is published, counted or takes the place of a prefix."""
    server = engine(FULL, blocks=60, max_model_len=1536)
    part, stats = server.scheduler.part(Audits), []
    make_stats = server.scheduler.make_stats

    def noted(*args, **kwargs):
        found = make_stats(*args, **kwargs)
        if found is not None and part._shadow is not None and part._shadow.request.num_computed_tokens:
            stats.append((found.num_running_reqs, found.num_waiting_reqs, round(found.kv_cache_usage, 6)))
        return found

    server.scheduler.make_stats = noted
    server.generate([random_prompt(400)], max_tokens=40)
    server.pool.evict_blocks({block.block_id for block in server.pool.blocks if block.block_hash is not None})
    settle(server)
    assert len(audited) == 1 and set(stats) == {(0, 0, 0.0)}
    assert not any(block.block_hash is not None for block in server.pool.blocks)
    assert server.metrics()["vllm:prefix_cache_queries"] == 400
    kept = random_prompt(640, 9)
    server.generate([kept], max_tokens=1)
    settle(server)
    server.generate([random_prompt(1200, 10)], max_tokens=20)
    for _ in range(50):
        server.llm.llm_engine.step()
    assert len(audited) == 2 and len(part) == 1  # its answer is in the way of the first prefix
    (again,) = server.generate([[*kept, 1]], max_tokens=1)
    assert again.num_cached_tokens == 640
    part.sparing = 0.0
    settle(server)
    assert len(audited) == 4 and not skipped(server)
    server.generate([random_prompt(300, 11)], max_tokens=4)
    server.scheduler.end()
    assert not len(part) and skipped(server) == {"shutdown": 1}
    server.generate([random_prompt(300, 12)], max_tokens=4)
    assert not len(part) and skipped(server) == {"shutdown": 2}
    server.assert_nothing_left()


def test_a_scheduler_hears_that_its_engine_drains():
    class Core:
        running, handled = True, 0
        scheduler = SimpleNamespace(end=lambda: heard.append(1))

        def is_running(self):
            return self.running

        def _handle_shutdown(self):
            return True

    heard, core = [], Core()
    for _ in range(2):  # replaced once
        ending.handle_shutdown.once(Core)
    assert core._handle_shutdown() and not heard
    core.running = False
    assert core._handle_shutdown() and heard == [1]
    core.scheduler = SimpleNamespace()  # vLLM's own
    assert core._handle_shutdown() and heard == [1]


@pytest.mark.both_runners
def test_an_audit_beside_measured_requests_attends_once(engine, audited, at_once, dense, monkeypatch):
    """One call of each layer attends for all rows and measures for both; what it measures is right."""
    calls, mixed, decode = Counter(), [], CPUOps.decode

    def counted(self, call, rows, *args):
        calls[call.place] += 1
        decode(self, call, rows, *args)

    monkeypatch.setattr(CPUOps, "decode", counted)
    server = engine(H2O, enable_prefix_caching=False, max_num_batched_tokens=64)
    shadows = server.scheduler.part(ShadowRequests)

    def once(server):
        mixed.append(shadows.current is not None and max(calls.values(), default=0))
        assert max(calls.values(), default=0) <= 1
        calls.clear()

    asked = [(random_prompt(300, 1), {"max_tokens": 6}), (random_prompt(100, 2), {"max_tokens": 200})]
    answered = server.answered(asked, once)
    settle(server)
    assert any(mixed) and len(audited) == 2
    missed = {tuple(answer.request.all_token_ids): share for answer, _, _, share in audited}
    for prompt, output, trace in answered:
        ids, gone = [*prompt, *output.outputs[0].token_ids], sorted(sum(trace.evicted, []))
        np.testing.assert_allclose(missed[tuple(ids)], missed_by(dense, ids, len(prompt) - 1, gone), atol=1e-5)
    server.assert_nothing_left()


def test_all_that_shadows_compute_is_counted(engine, audited):
    """Also for one that was withdrawn for a request, and for an answer that is never audited."""
    server, spent = engine(H2O, max_num_seqs=1, max_num_batched_tokens=64, enable_prefix_caching=False), Counter()
    schedule, part = server.scheduler.schedule, server.scheduler.part(Audits)

    def counted(*args, **kwargs):
        output = schedule(*args, **kwargs)
        for name, tokens in output.num_scheduled_tokens.items():
            spent["audits"] += tokens * name.startswith("audit")
        return output

    server.scheduler.schedule = counted
    for seed in range(4):
        server.generate([random_prompt(400, seed)], max_tokens=4)
        for _ in range(4):
            server.llm.llm_engine.step()
    assert part._shadow is not None and len(part) > 1
    server.scheduler.finish_requests(None, audits.RequestStatus.FINISHED_ABORTED)
    server.generate([random_prompt(400, 9)], max_tokens=4)
    settle(server)
    server.drain()
    found = sum(each.value for each in server.llm.get_metrics() if each.name.endswith("audit_computed_tokens"))
    assert found == spent["audits"] > 3 * 256 and skipped(server)["paused"] > 1


@pytest.mark.parametrize("make", ["engine", "async_engine"])
def test_a_backlog_holds_nothing_up(request, audited, make):
    """Pause, reset and the end of all requests drop what waits at once; a paused engine has no work."""
    server = request.getfixturevalue(make)(H2O, max_num_batched_tokens=64)
    for round_, (end, why) in enumerate((
        (lambda: server.core.pause_scheduler("keep"), "paused"),
        (lambda: server.core.pause_scheduler("abort"), "paused"),
        (lambda: server.core.reset_prefix_cache(), "reset"),
        (lambda: server.scheduler.finish_requests(None, audits.RequestStatus.FINISHED_ABORTED), "paused"),
    )):  # fmt: skip
        before = skipped(server).get(why, 0)
        server.generate([random_prompt(400, seed) for seed in range(3)], max_tokens=8)
        part, shadows = server.scheduler.part(Audits), server.scheduler.part(ShadowRequests)
        assert len(part) == 3 and server.scheduler.has_requests()
        if round_ % 2:
            while shadows.current is None or not shadows.current.request.num_computed_tokens:
                server.core.step_fn()
        end()
        assert len(part) == 0 and shadows.current is None and skipped(server)[why] == before + 3
        assert "aborted" not in skipped(server)  # a shadow that is withdrawn is no client's request
        for _ in range(4):
            server.core.step_fn()
        assert not server.scheduler.has_requests() and not server.scheduler.requests
        server.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert not audited
    server.assert_nothing_left()


def test_no_request_loses_blocks_for_a_shadow(engine, monkeypatch):
    """A shadow whose first allocation fails, though it fitted when the step began, waits."""
    server = engine(H2O | {"when": "pressure", "admit": True})
    server.generate([random_prompt(300, 1)], max_tokens=4)
    relieved, maker = [], server.scheduler.part(PoolRelief)
    monkeypatch.setattr(maker, "_relieve", lambda request, *_: relieved.append(request) or True)
    server.scheduler.part(Audits).before_schedule()
    shadow = server.scheduler.part(ShadowRequests).current.request
    assert not maker.make_room(shadow, wanted=10**6, reserved=0, hit=(), watermark=False) and not relieved
    settle(server)
    server.assert_nothing_left()


def test_an_answer_waits_a_minute_at_most(engine, audited, monkeypatch):
    """For an idle engine first, then for a step in which none waits."""
    now = [0.0]
    monkeypatch.setattr(audits, "monotonic", lambda: now[0])
    server = engine(H2O, max_num_seqs=2)
    server.add(random_prompt(100, 1), "long", max_tokens=900)
    server.add(random_prompt(300, 2), "short", max_tokens=4)
    part = server.scheduler.part(Audits)
    while not len(part):
        server.llm.llm_engine.step()
    for now[0] in (1.0, audits.IDLE_ONLY - 1):
        server.llm.llm_engine.step()
        assert len(part) == 1 and not audited
    now[0] = audits.IDLE_ONLY + 1
    for _ in range(6):
        server.llm.llm_engine.step()
    assert len(audited) == 1 and len(part) == 0
    server.add(random_prompt(300, 3), "next", max_tokens=4)
    while not len(part):
        server.llm.llm_engine.step()
    server.add(random_prompt(100, 4), "other", max_tokens=900)
    now[0] += audits.LONGEST + 1
    server.llm.llm_engine.step()
    assert len(part) == 0 and skipped(server) == {"late": 1}
    server.run()
    settle(server)
    server.assert_nothing_left()


@pytest.mark.since("0.32", "it has no max_num_active_seqs")
def test_a_shadow_needs_a_place_among_active_requests(engine, audited, at_once):
    """Else it would wait before all requests of clients, which cannot run either."""
    server = engine(H2O, max_num_seqs=4, max_num_active_seqs=1)
    server.generate([random_prompt(300, 1)], max_tokens=4)
    server.add(random_prompt(100, 2), "long", max_tokens=40)
    shadows = server.scheduler.part(ShadowRequests)
    server.run(lambda server: [] if shadows.current is None else pytest.fail("a shadow waits"))
    settle(server)
    assert len(audited) == 2
    server.assert_nothing_left()


def test_rows_that_do_not_come_make_no_verdict(engine, audited, monkeypatch):
    server = engine(H2O)
    for broken in (lambda *_: None, lambda self, *_: self._scored.update(dict.fromkeys(self.rows, np.zeros((1, 3))))):
        monkeypatch.setattr(Scorer, "score", broken)
        server.generate([random_prompt(300)], max_tokens=8)
        settle(server)
    assert not audited and skipped(server) == {"failed": 2}
    server.assert_nothing_left()


def test_clients_see_no_audit(engine, audited):
    server = engine(H2O)
    told, update = set(), server.scheduler.update_from_output

    def look(*args):
        outputs = update(*args)
        for client in outputs.values():
            told.update(output.request_id for output in client.outputs)
        return outputs

    server.scheduler.update_from_output = look
    server.generate(prompts(3), max_tokens=TOKENS)
    settle(server)
    assert len(audited) == 3 and not [req_id for req_id in told if req_id.startswith("audit")]
    assert server.metrics()["vllm:generation_tokens"] == 3 * TOKENS


def test_figures_are_shown_and_the_target_is_judged(engine, audited, monkeypatch, messages):
    monkeypatch.setattr(audits, "SAID_EVERY", 20)
    server = engine({**H2O, "target": 0.98, "tuned": [10, 20], "allow": ["full"]})
    server.generate(prompts(36), max_tokens=TOKENS)
    server.generate(prompts(4), max_tokens=TOKENS, extra_args={"kv_policy": "full"})
    settle(server)
    server.generate([random_prompt(40)], max_tokens=2, extra_args={"kv_policy": "full"})
    totals = server.scheduler.part(Audits)._totals
    assert totals[False]["audited"] >= 4 and totals[False]["identical"] == totals[False]["audited"]
    assert totals[True]["audited"] > 30 and totals[True]["identical"] < totals[True]["audited"]
    said = [message for message in messages if "answers audited: " in message]
    warned = [message for message in messages if "expected the target" in message]
    assert len(said) == 2 and "lost blocks, full attention gives" in said[0]
    assert len(warned) == 1 and "0.980 or more: raise the budget" in warned[0]
    assert sum("0 of the last 30 prompts have the 10 to 20 tokens of the field" in message for message in messages) == 1
    found = {
        (metric.name.removeprefix("vllm:kv_evict_audit_"), metric.labels["policy"], metric.labels.get("kept")): metric
        for metric in server.llm.get_metrics()
        if metric.name.startswith("vllm:kv_evict_audit_")
    }
    shares = [kept for name, policy, kept in found if name == "requests" and policy == "h2o"]
    assert sorted(shares) == ["0-10", "10-25", "25-50", "50-100", "all"]
    assert sum(found["requests", "h2o", kept].value for kept in shares) == 36
    assert found["identical", "full", "all"].value == found["requests", "full", "all"].value == 4
    assert found["target", "h2o", None].value == 0.98 and found["target_missed", "h2o", None].value == 1


@pytest.fixture
def messages():
    records, logger = [], logging.getLogger("vllm.evict")
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield records
    logger.setLevel(level)
    logger.removeHandler(handler)
