"""kvzip with single tokens: each head's largest shares of the reconstruction's attention, and what is kept by them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine import PLAN, after, logprobs_of
from oracle.replay import Config
from oracle.tiny import make_tiny_llama
from oracle.tokens import kvzip_scores, replay_tokens
from parity import assert_logprobs
from parts import orders_of, part_of

from vllm_evict.compute.holes import Start
from vllm_evict.compute.probes import LayerCall
from vllm_evict.config import KVPolicyConfig
from vllm_evict.core.actions import Compaction
from vllm_evict.core.plan import GroupPlan
from vllm_evict.features.kvzip import worker as worker_prompts
from vllm_evict.features.kvzip.engine import Reconstructions, parts
from vllm_evict.features.kvzip.plan import Repetition, Repetitions
from vllm_evict.features.kvzip.worker import PromptScores

BLOCK, VOCAB, TIE = 32, 4096, 2e-6
SERVER = {"name": "kvzip", "budget": 224, "buffer": 64, "sink": 32, "recent": 64, "granularity": "token"}
INSTRUCTION = [7, 8, 9, 10, 11]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kvzip") / "model"
    return make_tiny_llama(folder, layers=3, heads=8, kv_heads=4, vocab=VOCAB)


@pytest.fixture
def shadows(monkeypatch):
    """Parts of all shadows that are added."""
    seen, add = [], Reconstructions._add
    monkeypatch.setattr(
        Reconstructions, "_add", lambda self, job, *args: seen.append(job.parts[0]) or add(self, job, *args)
    )
    return seen


def prompt_of(length, seed=0):
    return np.random.default_rng(seed).permutation(VOCAB)[:length].tolist()


def scores_of(dense, prompt, policy):
    """Of its whole blocks."""
    instruction = policy.get("instruction", ())
    repeated = parts(len(prompt), policy.get("chunk", 2048), len(instruction), 2048)
    scores = kvzip_scores(dense, prompt, repeated, instruction, policy["sink"])
    return scores[:, :, : len(prompt) // BLOCK * BLOCK]


def stored(server):
    """The only scores that the worker remembers."""
    (scores,) = part_of(server.runtime, PromptScores)._prompts.values()
    return scores


def assert_like_oracle(dense, prompt, output, trace, policy, scores, told=None):
    """Compare the tokens that went, those that each head keeps, and the probabilities of the answer."""
    tokens = [*prompt, *output.outputs[0].token_ids]
    options = {k: v for k, v in policy.items() if k in Config.__dataclass_fields__}
    config = Config(policy="kvzip", block_size=BLOCK, **options)
    ready = next(step for step, evicted in enumerate(trace.evicted) if evicted)
    merge = policy if policy.get("merge") else None
    (request,) = replay_tokens(
        dense,
        tokens,
        trace.steps,
        [(config, None)],
        trace.start,
        policy.get("sets", "head"),
        merge,
        told,
        scores,
        ready,
    )
    assert trace.evicted[:-1] == request.replay.evicted[: len(trace.steps) - 1]
    assert request.closest > TIE, "rounding could choose another token: take another prompt"
    assert_logprobs(output, prompt, trace, request.replay.logits)
    return request


CASES = {
    "plain": {},
    "parts": {"chunk": 200, "instruction": INSTRUCTION},
    "all": {"sets": "all", "instruction": INSTRUCTION},
    "ems": {"merge": "ems", "merge_threshold": 0.2},
}


@pytest.mark.nightly(push=("plain", "all"))
@pytest.mark.both_runners("plain")
@pytest.mark.parametrize("name", CASES)
def test_each_head_keeps_what_the_formula_says(engine, model, dense, shadows, name):
    """A prompt of 19 whole blocks and a few tokens, decoded past several decisions."""
    policy = {**SERVER, **CASES[name]}
    server = engine(policy, model=model, max_num_batched_tokens=200)
    prompt = prompt_of(610, 40)
    (output,), (trace,) = server.traced([(prompt, {"max_tokens": 110, "logprobs": 0})])
    assert shadows == parts(610, policy.get("chunk", 2048), len(policy.get("instruction", ())), 2048)
    scores = scores_of(dense, prompt, policy)
    np.testing.assert_allclose(stored(server)[:, :, : scores.shape[2]], scores, rtol=1e-3)
    request = assert_like_oracle(dense, prompt, output, trace, policy, scores)
    assert len(request.kept) >= 2
    sets = {tuple(kept) for kept in request.kept[0].values()}
    assert (len(sets) == 1) == (policy.get("sets") == "all"), "heads were to keep their own tokens"
    assert output.kv_usage.evicted_blocks >= 12
    server.assert_nothing_left()


def test_the_first_decision_takes_the_lowest_of_each_head(engine, model, dense):
    """By hand: 7 of 20 blocks stay, the sinks, 3 with recent tokens, and 96 tokens of each head's own."""
    server = engine({**SERVER, "buffer": 0}, model=model)
    prompt, kept, compact = prompt_of(610, 40), [], server.runtime.store.compact

    def watched(source, keep, target):
        kept.append([layer.long() + BLOCK for layer in keep])
        return compact(source, keep, target)

    server.runtime.store.compact = watched
    (_,), (trace,) = server.traced([(prompt, {"max_tokens": 40})])
    step = next(step for step, evicted in enumerate(trace.evicted) if evicted)
    computed = sum(trace.steps[: step + 1])
    held, last = -(-computed // BLOCK), (computed - 64) // BLOCK
    scores = scores_of(dense, prompt, SERVER)
    own = (7 - 1 - (held - last)) * BLOCK
    assert own >= 64 and trace.evicted[step] == list(range(last - (held - 7), last))
    for layer in range(3):
        for head in range(4):
            candidates = scores[layer, head, BLOCK : last * BLOCK]
            want = candidates.argsort(descending=True)[:own].sort().values + BLOCK
            assert kept[0][layer][head].tolist() == want.tolist()
    server.assert_nothing_left()


def test_late_decisions(async_engine, model, dense):
    """With a step in flight tokens go one step later; scores are the same."""
    server = async_engine(SERVER, model=model, max_num_batched_tokens=200)
    steps, told = [], []

    def look(output, *_):
        for req_id, count in output.num_scheduled_tokens.items():
            if not req_id.startswith("reconstruct"):
                steps.append(count)
                told.append([compaction.position for compaction in orders_of(getattr(output, PLAN), Compaction)])

    after(server.scheduler, "schedule", look)
    prompt = prompt_of(610, 40)
    server.add(prompt, "late", max_tokens=120, logprobs=0)
    (output,) = server.run().values()
    tokens, ends = [*prompt, *output.outputs[0].token_ids], np.cumsum(steps)
    done = np.searchsorted(ends, len(tokens) - 1) + 1
    decided = [position for step in told[:done] for position in step]
    assert len(decided) >= 2 and all(
        ends[step] - position - 1 > steps[step] for step in range(done) for position in told[step]
    ), "no step was in flight at any decision"
    config = Config(policy="kvzip", block_size=BLOCK, **{k: SERVER[k] for k in ("budget", "buffer", "sink", "recent")})
    ready = int(np.searchsorted(ends, decided[0] + 1))
    (request,) = replay_tokens(
        dense,
        tokens,
        steps[:done],
        [(config, None)],
        told=told[:done],
        scores=scores_of(dense, prompt, SERVER),
        ready=ready,
    )
    assert request.closest > TIE
    logprobs = torch.log_softmax(request.replay.logits.double(), -1)[len(prompt) - 1 :]
    want = [logprobs[i, token].item() for i, token in enumerate(output.outputs[0].token_ids)]
    np.testing.assert_allclose(logprobs_of(output), want, atol=2e-3)
    server.assert_nothing_left()


def test_a_prompt_is_reconstructed_once_and_its_blocks_are_never_written(engine, model, dense, shadows):
    """Twins, then a question about the same prompt, which is evicted from while it is computed, and a request that
    keeps everything beside them: it hits the prompt's blocks, and answers to the bit as on a server of its own."""
    policy = {**SERVER, "allow": ["full"]}
    server = engine(policy, model=model)
    context = prompt_of(640, 40)
    outputs, traces = server.traced([(context, {"max_tokens": 60, "logprobs": 0})] * 2)
    assert len(shadows) == 1
    scores = scores_of(dense, context, SERVER)
    for output, trace in zip(outputs, traces):
        assert_like_oracle(dense, context, output, trace, SERVER, scores)
    asked = [*context, *[token for token in prompt_of(700, 41) if token not in context][:50]]
    (output,), (trace,) = server.traced([(asked, {"max_tokens": 20, "logprobs": 0})])
    assert len(shadows) == 1 and output.num_cached_tokens == 640 and trace.evicted[0]
    assert_like_oracle(dense, asked, output, trace, SERVER, scores)
    ids = [server.add(context, max_tokens=60, logprobs=0, extra_args={"kv_policy": name}) for name in ("kvzip", "full")]
    done = server.run()
    beside = done[ids[1]]
    assert done[ids[0]].kv_usage.evicted_blocks > 8 and server.metrics()["blocks_copied", "kvzip"] > 0
    server.assert_nothing_left()
    alone = engine({"name": "full"}, model=model)
    alone.generate([context], max_tokens=1)
    (want,) = alone.generate([context], max_tokens=60, logprobs=0)
    assert beside.num_cached_tokens == want.num_cached_tokens >= 600
    assert beside.outputs[0].token_ids == want.outputs[0].token_ids
    assert logprobs_of(beside).tolist() == logprobs_of(want).tolist()


def test_scores_serve_a_request_whose_prompt_is_being_computed(engine, model, dense, shadows):
    """Without what the prefix cache has, chunks are evicted from as they come, by scores that cover all of the prompt."""
    server = engine(SERVER, model=model, max_num_batched_tokens=128)
    prompt = prompt_of(620, 40)
    server.generate([prompt], max_tokens=60)
    sampling = {"max_tokens": 40, "logprobs": 0, "skip_reading_prefix_cache": True}
    (output,), (trace,) = server.traced([(prompt, sampling)])
    assert len(shadows) == 1 and output.num_cached_tokens == 0
    assert trace.steps[:4] == [128] * 4 and trace.evicted[2] and trace.evicted[3]
    assert_like_oracle(dense, prompt, output, trace, SERVER, scores_of(dense, prompt, SERVER))
    server.assert_nothing_left()


def test_other_policies_beside_it(engine, model, shadows):
    """Workers measure what each request's own policy needs; blocks of prompts, or tokens, as the server says."""
    server = engine(
        {"name": "h2o", **{k: v for k, v in SERVER.items() if k != "name"}, "allow": ["kvzip", "knorm"]}, model
    )
    ids = [
        server.add(prompt_of(500, 40 + i), max_tokens=80, logprobs=0, extra_args={"kv_policy": name})
        for i, name in enumerate(["kvzip", "h2o", "knorm"])
    ]
    done = server.run()
    assert len(shadows) == 1 and all(done[i].kv_usage.evicted_blocks >= 8 for i in ids)
    assert all(np.isfinite(logprobs_of(done[i])).all() for i in ids)
    server.assert_nothing_left()


@pytest.mark.parametrize("make", ["engine", "async_engine"])
def test_load_beyond_the_pool(request, poisoned, model, shadows, make):
    """Originals and shadows are preempted, aborted and begin again while freed blocks are full of NaN; all comes back,
    and workers remember the scores that the scheduler does.
    """
    server = request.getfixturevalue(make)(
        {**SERVER, "buffer": 32, "allow": ["full"]}, model=model, blocks=66, max_num_batched_tokens=128
    )
    preempted = []
    after(server.scheduler, "_preempt_request", lambda _, request, *a: preempted.append(request.request_id))
    for index in range(12):
        asks = {"extra_args": {"kv_policy": "full"}} if index % 4 == 3 else {}
        server.add(prompt_of(250 + 30 * index, index), f"p{index}", max_tokens=150, logprobs=0, **asks)
    aborted = []

    def on_step(server):
        shadow = server.scheduler.part(Reconstructions)._shadow
        if shadow is not None and not aborted and len(shadows) == 3:
            aborted.append(shadow.job.request.request_id.split("-")[0])
            server.llm.llm_engine.abort_request(aborted)

    done = server.run(on_step)
    assert len(aborted) == 1 and len(done) == 11
    assert all(np.isfinite(logprobs_of(output)).all() for output in done.values())
    assert any(not req_id.startswith("reconstruct") for req_id in preempted)
    assert sum(output.kv_usage.evicted_blocks > 0 for output in done.values()) >= 6
    server.assert_nothing_left()
    numbered = next(server.scheduler.part(Reconstructions)._numbers)
    assert numbered > len(part_of(server.runtime, PromptScores).numbers) >= 1, "some were dropped for others"


def test_a_request_that_ends_when_its_scores_are_there_is_forgotten(engine, model):
    """They are told with the next step, which is one without it."""
    server = engine(SERVER, model=model)
    request_id, told = server.add(prompt_of(600, 40), max_tokens=80), []

    def on_step(server):
        if (its := Repetitions.within(server.scheduler._plan.groups[0])) and its.scored:
            told.append(dict(its.scored))
            server.llm.llm_engine.abort_request([request_id])

    server.run(on_step)
    assert len(told) == 1
    server.generate([prompt_of(40)], max_tokens=4)
    server.assert_nothing_left()


def test_a_reset_forgets_scores_on_both_sides(engine, model, dense, shadows):
    server = engine(SERVER, model=model, max_num_batched_tokens=64)
    prompt, resets = prompt_of(600, 40), []
    server.generate([prompt_of(500, 9)], max_tokens=60)
    assert len(part_of(server.runtime, PromptScores).numbers) == 1

    def on_step(server):
        shadow = server.scheduler.part(Reconstructions)._shadow
        if shadow is not None and not resets and shadow.request.num_computed_tokens > 650:
            resets.append(server.scheduler.reset_prefix_cache(reset_running_requests=True))

    (output,), (trace,) = server.traced([(prompt, {"max_tokens": 120, "logprobs": 0})], on_step)
    assert resets == [True] and len(shadows) == 3 and output.kv_usage.evicted_blocks > 0 and trace.restarts
    assert len(part_of(server.runtime, PromptScores).numbers) == 1
    server.assert_nothing_left()
    server.scheduler.reset_prefix_cache()
    server.generate([prompt_of(20)], max_tokens=4)
    server.drain()
    assert not part_of(server.runtime, PromptScores).numbers


def test_without_room_the_oldest_go(engine, model, shadows):
    server = engine(SERVER, model=model, max_num_seqs=1)
    prompt, kept, compact = prompt_of(600, 40), [], server.runtime.store.compact
    server.runtime.store.compact = lambda source, keep, target: kept.append(keep) or compact(source, keep, target)
    (output,) = server.generate([prompt], max_tokens=40, logprobs=0)
    assert not shadows and output.kv_usage.evicted_blocks > 8 and np.isfinite(logprobs_of(output)).all()
    for keep in kept:
        assert all(torch.equal(head, keep[0][0]) for layer in keep for head in layer)
        assert (keep[0][0].diff() == 1).all(), "the newest of the candidates stay"
    server.assert_nothing_left()


def test_it_is_configured_like_other_scores_of_tokens():
    config = KVPolicyConfig.parse(SERVER)
    assert config.granularity == "token" and config.sets == "head"
    server = KVPolicyConfig.parse({**SERVER, "name": "h2o", "allow": ["kvzip"]})
    assert server.for_request({"kv_policy": "kvzip"}, 1000, BLOCK).granularity == "token"


@pytest.mark.parametrize("scratch", [1, 40_000, 8 << 20])
@pytest.mark.parametrize("start, end, sink", [(0, 40, 8), (40, 70, 8), (40, 70, 0), (3, 9, 16)])
def test_shares_in_parts_of_any_size(monkeypatch, start, end, sink, scratch):
    """On plain tensors: steps of several chunks, in slices of queries, are the formula's all at once."""
    monkeypatch.setattr(worker_prompts, "SCRATCH", scratch)
    torch.manual_seed(0)
    size, prompt, tokens, heads, kv_heads, dim = 16, 70, 70 + 5 + 30, 4, 2, 8
    query, keys = torch.randn(2, tokens, heads, dim), torch.randn(2, tokens, kv_heads, dim)
    table = torch.randperm(11).int()
    cache = torch.randn(2, 11, kv_heads, size, dim)
    for place in range(tokens):
        cache[:, table[place // size], :, place % size] = keys[:, place]
    ops = SimpleNamespace(read=lambda layer, cache, blocks, values: (cache[blocks], None))
    layer = SimpleNamespace(impl=SimpleNamespace(scale=dim**-0.5))
    scores = PromptScores(kv_heads, 2, size)
    plan = GroupPlan(of={"kvzip": Repetitions({"shadow": Repetition(3, prompt, start, end, sink)})})
    scores.begin(Start(plan, set(), set(), set(), set(), None))
    metadata, done = SimpleNamespace(block_table=torch.stack((torch.zeros_like(table), table))), 64

    def step_of(req_ids, starts, lens):
        return scores.step(SimpleNamespace(req_ids=req_ids, starts=np.array(starts), seq_lens=np.array(lens)))

    assert step_of(["other"], [0, 1], [9]) is None
    assert step_of(["other", "shadow"], [0, 1, 7], [9, 70]) is None, "the prompt's last token"
    for count in (20, 1, 20):
        step = step_of(["other", "shadow"], [0, 1, 1 + count], [9, done + count])
        batch = torch.cat((torch.randn(2, 1, heads, dim), query[:, done : done + count]), 1)
        for at in range(2):
            step.add(LayerCall(ops, layer, at, batch[at], cache[at], metadata))
        done += count
    place = torch.arange(tokens)
    seen = (place < sink) | ((place >= start) & (place < end)) | (place >= prompt)
    logits = torch.einsum("lqhd,lnhd->lhqn", query, keys.repeat_interleave(2, 2)) * dim**-0.5
    shares = logits.masked_fill(~(seen & (place <= place[:, None])), -torch.inf)[:, :, prompt:].softmax(-1)
    want = torch.zeros(2, kv_heads, prompt)
    want[:, :, start:end] = shares[..., start:end].unflatten(1, (kv_heads, -1)).amax((2, 3))
    plan = GroupPlan(of={"kvzip": Repetitions(scored={"asker": (3, 64)}, forgotten=[3])})
    scores.begin(Start(plan, set(), set(), set(), set(), None))
    got, positions = scores.judged("asker", 79)
    torch.testing.assert_close(got[:, :, :64], want[:, :, :64])
    assert not got[:, :, 64:].any() and positions[1, 1].tolist() == list(range(80)) and not scores.numbers
    scores.begin(Start(GroupPlan(), {"asker", "shadow"}, set(), set(), set(), None))
    assert scores.is_empty
