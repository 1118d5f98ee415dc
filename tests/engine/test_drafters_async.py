"""Drafters with layers under async scheduling: holes come a step late, and lengths are known to the device alone."""

from collections import deque

import numpy as np
import pytest
import torch
from drafting import (
    MODEL,
    SERVED,
    VOCAB,
    LayeredDrafter,
    accepted,
    make_dflash,
    make_eagle,
    prompt_of,
    speculative,
)
from engine import V2, logprobs_of
from oracle.model import DenseLlama
from oracle.replay import replay_told
from oracle.tiny import make_tiny_llama
from parity import oracle_config
from test_async import Recorder, check_poison_with_steps_in_flight

pytestmark = SERVED

WINDOW = {"name": "sink-window", "budget": 160, "sink": 32, "allow": []}
BASE = {**WINDOW, "buffer": 32, "recent": 32}
POLICIES = {
    "sink-window": WINDOW,
    "h2o": {**BASE, "name": "h2o"},
    "h2o-ema-every": {**BASE, "name": "h2o", "every": 3, "accumulate": "ema", "decay": 0.9},
    "h2o-last": {**BASE, "name": "h2o", "accumulate": "last", "window": 24, "every": 2},
    "keydiff": {**BASE, "name": "keydiff"},
    "keybound": {**BASE, "name": "keybound"},
    "snapkv": {**BASE, "name": "snapkv", "window": 24},
    "scissorhands": {**BASE, "name": "scissorhands", "window": 48},
    "rkv": {**BASE, "name": "rkv", "window": 16},
}
#: A drafter for each policy; `eagle` for the others.
DRAFTERS = {"sink-window": "draft_model", "snapkv": "draft_model"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Drafter -> `speculative_config`; None -> the model."""
    root = tmp_path_factory.mktemp("drafters")
    model = make_tiny_llama(root / "model", **MODEL)
    small = make_tiny_llama(root / "small", layers=1, heads=4, kv_heads=2, vocab=VOCAB, seed=3)
    return {
        None: model,
        "draft_model": speculative("draft_model", small),
        "eagle": speculative("eagle", make_eagle(root / "eagle", model, "eagle")),
        "dflash": speculative("dflash", make_dflash(root / "dflash", model)),
    }


class SpeculativeRecorder(Recorder):
    """Steps are planned before their drafts are known; when a step is done, its rejected drafts leave the record."""

    def __init__(self, server, block=32):
        super().__init__(server)
        self.block = block
        self.settled = {}  # request and step -> leading tokens that were no drafts
        self.reports = {}  # request and step -> its report
        schedule, update, planned = server.scheduler.schedule, server.scheduler.update_from_output, deque()

        def watched_schedule(*args):
            output = schedule(*args)
            planned.append({req_id: len(self.records[req_id].steps) - 1 for req_id in output.num_scheduled_tokens})
            return output

        def watched_update(output, result):
            steps, rows = planned.popleft(), result.req_id_to_index
            self.done = {req_id: (at, output.num_scheduled_tokens[req_id]) for req_id, at in steps.items()}
            for req_id, drafts in output.scheduled_spec_decode_tokens.items():
                tokens = output.num_scheduled_tokens[req_id] - len(drafts)
                made = len(result.sampled_token_ids[rows[req_id]])
                self.records[req_id].steps[steps[req_id]] = tokens + made - 1
                self.settled[self.records[req_id], steps[req_id]] = tokens
                self.done[req_id] = steps[req_id], tokens
            return update(output, result)

        server.scheduler.schedule, server.scheduler.update_from_output = watched_schedule, watched_update
        for mechanism in server.scheduler.mechanisms:
            self.watch_reports(mechanism)

    def watch_reports(self, mechanism):
        """A report has the blocks of tokens that were no drafts, and none beyond them."""
        decide = mechanism.decide

        def watched_decide(plan, reports):
            for req_id, report in reports[0].items():
                done, settled = self.done[req_id]
                assert report.index[-1] == (sum(self.records[req_id].steps[:done]) + settled - 1) // self.block
                self.reports[self.records[req_id], done] = report
            return decide(plan, reports)

        mechanism.decide = watched_decide


@pytest.mark.both_runners("sink-window")
@pytest.mark.nightly(push=("sink-window", "h2o", "keydiff"))
@pytest.mark.parametrize("name", POLICIES)
def test_holes_that_come_a_step_late_match_the_dense_oracle(async_engine, folders, poisoned, name):
    check_late_holes(async_engine, folders[None], folders[DRAFTERS.get(name, "eagle")], name)


@pytest.mark.skipif(not V2, reason="served on Model Runner V2 alone")
@pytest.mark.nightly
def test_late_holes_with_dflash_match_the_dense_oracle(async_engine, folders, poisoned):
    check_late_holes(async_engine, folders[None], folders["dflash"], "h2o")


@pytest.mark.nightly
def test_late_holes_beside_sliding_windows(async_engine, folders, tmp_path, poisoned):
    model = make_tiny_llama(tmp_path / "model", **{**MODEL, "windows": [48, 0, 48]})
    check_late_holes(async_engine, model, folders["eagle"], "snapkv")


def check_late_holes(
    async_engine,
    model,
    drafter,
    name,
    dense=None,
    mean=2e-3,
    most=2e-3,
    block=32,
    policy=None,
    lengths=(250, 90),
    tokens_each=160,
    **options,
):
    """Drafts are all wrong, then some are: the lengths that workers are told are off by those.

    Log-probabilities differ from the oracle's by at most `most`, and by `mean` on average.
    """
    policy, prompts = policy or POLICIES[name], [prompt_of(length, length) for length in lengths]
    chunks = dict(max_num_batched_tokens=96, enable_prefix_caching=False, **options)
    dense = dense or DenseLlama(model)
    server = async_engine(policy, model=model, speculative_config=drafter, **chunks)
    double, recorder = LayeredDrafter(server), SpeculativeRecorder(server, block)
    for right in (0, "some"):
        double.right, before = right, accepted(server)
        ids = [server.add(prompt, max_tokens=tokens_each, logprobs=1) for prompt in prompts]
        outputs = server.run()
        drafts, kept = (new - old for new, old in zip(accepted(server)[::-1], before[::-1]))
        assert drafts and (kept == 0 if right == 0 else kept > 10)
        double.texts = [[*prompt, *outputs[each].outputs[0].token_ids] for prompt, each in zip(prompts, ids)]
        for request_id, prompt in zip(ids, prompts):
            output, record = outputs[request_id], recorder.of(request_id)
            tokens = [*prompt, *output.outputs[0].token_ids]
            steps = np.searchsorted(np.cumsum(record.steps), len(tokens) - 1) + 1
            counts = record.steps[:steps]
            counts[-1] = min(counts[-1], len(tokens) - sum(counts[:-1]))
            decided = record.by_step(steps)
            assert sum(map(len, decided)) >= 2
            told, settled = record.told[:steps], [recorder.settled.get((record, step)) for step in range(steps)]
            config = oracle_config(policy, prompt, block_size=block)
            reference = replay_told(dense, tokens, counts, config, told, decided, settled=settled)
            assert decided[:-1] == reference.evicted[:-1]
            for decision in reference.decisions if name not in ("sink-window", "snapkv", "rkv") else ():
                assert_scores(recorder.reports[record, decision.step], decision.importance)
            logprobs = torch.log_softmax(reference.logits.double(), -1)[len(prompt) - 1 :]
            got = logprobs_of(output)[: len(logprobs)]
            want = [row[token].item() for row, token in zip(logprobs, output.outputs[0].token_ids)]
            np.testing.assert_allclose(got, want, rtol=0, atol=most)
            assert np.abs(got - want).mean() < mean
    assert max(recorder.in_flight) > 0 and double.runs > 100 * tokens_each // 160
    server.assert_nothing_left()
    return server


def assert_scores(report, importance):
    """A report of one statistic has the oracle's scores: of all blocks, the last one included."""
    ((_, scores),) = report.statistics.items()
    want = [(at, importance[block]) for at, block in enumerate(report.index.tolist()) if block in importance]
    places, values = zip(*want)
    np.testing.assert_allclose(scores[[*places]], values, rtol=2e-4)


def test_no_poison_with_drafts_in_flight(async_engine, folders, monkeypatch):
    """A pool small enough to preempt, requests that come and go, freed blocks full of NaN."""

    def speculative_engine(policy, **options):
        policy = {**policy, **POLICIES["h2o"], "budget": policy["budget"]}
        return async_engine(policy, speculative_config=folders["eagle"], **options)

    check_poison_with_steps_in_flight(speculative_engine, folders[None], monkeypatch, "h2o", True, 23)


@pytest.mark.both_runners
def test_full_serves_as_stock_does(engine, async_stays, folders):
    """The tokens of a server without drafts, and as many accepted drafts as in stock vLLM."""
    model, config = folders[None], folders["draft_model"]
    prompts, counts = [prompt_of(90 + seed, seed) for seed in range(3)], []
    answers = [[each.outputs[0].token_ids for each in engine(model=model).generate(prompts, max_tokens=60)]]
    for policy in (None, {"name": "full", "allow": []}):
        server = engine(policy, model=model, speculative_config=config, async_scheduling=True)
        assert server.core.batch_queue_size == 2
        answers.append([each.outputs[0].token_ids for each in server.generate(prompts, max_tokens=60)])
        counts.append(accepted(server))
    assert answers[0] == answers[1] == answers[2] and counts[0] == counts[1]
    server.assert_nothing_left()
