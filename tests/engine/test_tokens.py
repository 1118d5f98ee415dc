"""Token granularity: each KV head keeps its own tokens, gathered into private blocks; against per-head masks."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine import PLAN, after, logprobs_of
from oracle.replay import Config
from oracle.tiny import make_tiny_llama
from oracle.tokens import replay_tokens
from parity import TOKEN_TIE, assert_logprobs, assert_tokens_like_oracle, token_config
from parts import Drawn, batch_of, orders_of

from vllm_evict.compute.compaction import compact
from vllm_evict.compute.mass import TokenMass
from vllm_evict.compute.tokens import TokenSums
from vllm_evict.config import KVPolicyConfig, KVPolicyError
from vllm_evict.core.actions import Compaction
from vllm_evict.core.arrange import arrange
from vllm_evict.core.plan import Scoring

BLOCK, VOCAB = 32, 4096
BASE = {"budget": 224, "buffer": 64, "sink": 32, "recent": 64, "granularity": "token"}
POLICIES = {
    "h2o": {"name": "h2o", **BASE},
    "h2o-ema": {"name": "h2o", **BASE, "accumulate": "ema", "decay": 0.95},
    "h2o-last": {"name": "h2o", **BASE, "accumulate": "last", "window": 24},
    "h2o-all-max": {"name": "h2o", **BASE, "sets": "all", "heads": "max", "layers": "max"},
    "h2o-odd": {"name": "h2o", **BASE, "budget": 200, "buffer": 0, "sink": 20, "recent": 50},
    "tova": {"name": "tova", **BASE},
    "tova-units": {"name": "tova", **BASE, "unit": BLOCK},
    "snapkv-units-layer": {"name": "snapkv", **BASE, "window": 24, "kernel": 3, "unit": 16, "sets": "layer"},
    "h2o-d2o-layer": {"name": "h2o", **BASE, "merge": "d2o", "unit": 8, "sets": "layer", "heads": "max"},
    "snapkv": {"name": "snapkv", **BASE, "window": 24, "kernel": 7},
    "knorm": {"name": "knorm", **BASE},
    "keydiff": {"name": "keydiff", **BASE},
    "rkv": {"name": "rkv", **BASE, "window": 12, "mix": 0.5},
    "h2o-d2o": {"name": "h2o", **BASE, "merge": "d2o"},
    "knorm-d2o": {"name": "knorm", **BASE, "merge": "d2o", "merge_decay": 0.4},
    "h2o-ems": {"name": "h2o", **BASE, "merge": "ems", "merge_threshold": 0.2},
    "keydiff-ems-all": {"name": "h2o", **BASE, "merge": "ems", "merge_threshold": 0.3, "sets": "all"},
}
#: Of prompts without near ties.
SEED = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens") / "model"
    return make_tiny_llama(folder, layers=3, heads=8, kv_heads=4, vocab=VOCAB)


def prompt_of(length, seed=0):
    """No token twice: in the first layer equal tokens have keys of equal norms, and chance would tell them apart."""
    return np.random.default_rng(seed).permutation(VOCAB)[:length].tolist()


@pytest.mark.oracle("full attention")
@pytest.mark.nightly(
    push=("h2o", "h2o-d2o-layer", "h2o-ema", "keydiff-ems-all", "rkv", "snapkv-units-layer", "tova-units")
)
@pytest.mark.both_runners("h2o")
@pytest.mark.parametrize("name", [name for name in POLICIES if name != "knorm"])
def test_each_head_keeps_what_the_formula_says(engine, model, dense, name):
    """Prompts longer and shorter than a chunk in one batch, decoded past several decisions; tokens that went at one
    decision are no candidates at the next."""
    policy = POLICIES[name]
    server = engine(policy, model=model, max_num_batched_tokens=192)
    requests = [
        (prompt_of(length, SEED + seed), {"max_tokens": tokens, "logprobs": 1})
        for seed, (length, tokens) in enumerate([(500, 100), (90, 260), (20, 30)])
    ]
    outputs, traces = server.traced(requests)
    for (prompt, _), output, trace in zip(requests, outputs, traces):
        (request,) = assert_tokens_like_oracle(dense, prompt, output, trace, policy)
        if len(request.kept) > 1:
            kept = request.kept[-1]
            of_layers = [{tuple(tokens) for at, tokens in kept.items() if at[0] == layer} for layer in range(3)]
            each = {"head": 4, "layer": 1, "all": 1}[policy.get("sets", "head")]
            assert [len(sets) for sets in of_layers] == [each] * 3, "heads were to keep tokens of their own"
            assert (len(set.union(*of_layers)) == 1) == (policy.get("sets") == "all")
            assert len({len(tokens) for tokens in kept.values()}) == 1
            starts = [first for tokens in kept.values() for first in tokens[:: policy.get("unit", 1)]]
            assert not any(first % policy.get("unit", 1) for first in starts), "units were cut"
    assert sum(bool(evicted) for evicted in traces[0].evicted) > 2
    server.assert_nothing_left()


def test_retrieval_heads_may_keep_tokens_of_their_own(engine, model, dense):
    """Layers with different numbers of retrieval heads; streaming heads keep blocks."""
    pattern = ["0110", "1111", "0001"]
    retrieval = POLICIES["h2o"]
    server = engine(
        {"name": "duo", "pattern": pattern, "sink": 32, "recent": 96, "retrieval": retrieval},
        model=model,
        max_num_batched_tokens=192,
    )
    requests = [(prompt_of(n, SEED + n), {"max_tokens": 90, "logprobs": 1}) for n in (400, 170)]
    outputs, traces = server.traced(requests)
    heads = np.array([[digit == "1" for digit in row] for row in pattern])
    places = arrange(heads).places[0]
    window = Config("sink-window", BLOCK, budget=32 + 96 + BLOCK, sink=32, recent=96)
    groups = []
    for which, (config, mine) in enumerate(((token_config(retrieval), heads), (window, ~heads))):
        for part in range(arrange(heads).groups[which]):
            groups.append((config, mine & np.array([layer[which].group == part for layer in places])[:, None]))
    for (prompt, _), output, trace in zip(requests, outputs, traces):
        tokens = [*prompt, *output.outputs[0].token_ids]
        replays = replay_tokens(dense, tokens, trace.steps, groups, trace.start)
        for got, want in zip(trace.groups, replays, strict=True):
            assert got.evicted[:-1] == want.replay.evicted[: len(trace.steps) - 1]
        assert_logprobs(output, prompt, trace, replays[0].replay.logits)
    server.assert_nothing_left()


@pytest.mark.both_runners
def test_shared_blocks_are_copied_never_written(engine, model, dense):
    """Two requests share a prefix, one of them keeps tokens of its own: the other one's answers are the same to the bit,
    what was published still is what its hash says, and the private copies come back."""
    policy = {**POLICIES["h2o"], "allow": ["full"]}
    prefix = prompt_of(320, 7)
    prompts = [prefix + prompt_of(100, seed) for seed in (8, 9)]

    def run(server, which):
        server.generate([prefix], max_tokens=1, extra_args={"kv_policy": "full"})
        ids = [
            server.add(prompts[i], max_tokens=80, logprobs=0, extra_args={"kv_policy": ("h2o", "full")[i]})
            for i in which
        ]
        outputs = server.run()
        again = [
            server.generate([prompt], max_tokens=20, logprobs=0, extra_args={"kv_policy": "full"})[0]
            for prompt in (prompts[1], prompts[0])
        ]
        return [outputs[i] for i in ids], *again

    shared = engine(policy, model=model, max_num_batched_tokens=1024, blocks=120)
    before = shared.metrics()
    (compacted, beside), after, own = run(shared, (0, 1))
    moved = shared.metrics()
    copied = moved["blocks_copied", "h2o"] - before.get(("blocks_copied", "h2o"), 0)
    assert copied > 0 and compacted.kv_usage.evicted_blocks > 4
    shared.assert_nothing_left()
    alone = engine(policy, model=model, max_num_batched_tokens=1024, blocks=120)
    (want,), want_after, want_own = run(alone, (1,))
    for got, expected in ((beside, want), (after, want_after)):
        assert got.num_cached_tokens == expected.num_cached_tokens >= 320
        assert got.outputs[0].token_ids == expected.outputs[0].token_ids
        assert logprobs_of(got).tolist() == logprobs_of(expected).tolist()
    # Nobody else held these when they were compacted, but they had been published.
    assert own.num_cached_tokens > 320 + BLOCK > want_own.num_cached_tokens
    np.testing.assert_allclose(logprobs_of(own), logprobs_of(want_own), atol=1e-4)


def test_shared_blocks_that_no_request_can_hit_are_copied_too(engine, model):
    """vLLM takes blocks out of the prefix cache that requests share, such as those that a connector failed to load."""
    prefix, answers = prompt_of(320, 7), []
    for policy in ("h2o", "full"):
        server = engine({**POLICIES["h2o"], "allow": ["full"]}, model=model, max_num_batched_tokens=1024, blocks=120)
        server.generate([prefix], max_tokens=1, extra_args={"kv_policy": "full"})
        shared = set()

        def unpublish(*_, pool=server.pool, shared=shared):
            shared.update(block.block_id for block in pool.blocks if block.ref_cnt > 1)
            pool.evict_blocks(shared)

        after(server.scheduler, "schedule", unpublish)
        server.add(prefix + prompt_of(100, 8), max_tokens=80, extra_args={"kv_policy": policy})
        other = server.add(prefix + prompt_of(100, 9), max_tokens=80, logprobs=0, extra_args={"kv_policy": "full"})
        answers.append(logprobs_of(server.run()[other]).tolist())
        assert len(shared) == 10
        server.assert_nothing_left()
    assert answers[0] == answers[1]


def test_without_room_for_copies_a_request_takes_its_own_out_of_the_prefix_cache(engine, model, dense):
    """All that it could give up is published, and the pool has not a single block left."""
    server = engine(POLICIES["knorm"], model=model, blocks=16, max_num_batched_tokens=512, max_model_len=480)
    rewrite, tried = server.manager.rewrite, []

    def watched(*args):
        free, changed = server.free_blocks, rewrite(*args)
        tried.append((free, changed is not None))
        return changed

    server.manager.rewrite = watched
    prompt = prompt_of(440)
    (output,), (trace,) = server.traced([(prompt, {"max_tokens": 39, "logprobs": 1})])
    assert tried and min(free for free, _ in tried) < 2 and all(done for _, done in tried)
    assert_tokens_like_oracle(dense, prompt, output, trace, POLICIES["knorm"])
    server.assert_nothing_left()


#: Blocks of the pool, most requests, tokens of a prefix that all prompts share.
CROWDS = {"longer than bounds": (512, 4, 1760), "in a small pool": (60, 8, 192)}


@pytest.mark.parametrize("crowd", CROWDS)
def test_sums_fit_what_is_set_aside_whatever_requests_share(engine, model, crowd):
    """Set aside is a page for each block of the pool, or of requests at their bounds; those that share have one each."""
    blocks, requests, shared = CROWDS[crowd]
    options = dict(model=model, blocks=blocks, max_num_seqs=requests, enable_prefix_caching=True)
    server = engine({**POLICIES["h2o"], "allow": ["full"]}, **options)
    (probe,), prefix, in_use = (
        [each for each in server.runtime.probes if isinstance(each, TokenMass)],
        prompt_of(shared),
        [],
    )
    set_aside = min(blocks, probe._most_blocks)

    def look(server):
        in_use.append(int(probe.sums._held.sum()))
        assert in_use[-1] <= set_aside

    server.generate([prefix], max_tokens=1, extra_args={"kv_policy": "full"})
    for seed in range(1, 9):
        server.add([*prefix, *prompt_of(40, seed)], max_tokens=150)
    outputs = server.run(look).values()
    assert len(outputs) == 8 and all(output.kv_usage.evicted_blocks for output in outputs)
    assert all(output.num_cached_tokens == shared for output in outputs)
    assert max(in_use) > set_aside // 2
    server.assert_nothing_left()


def test_preempted_requests_start_over(engine, model, dense):
    server = engine(POLICIES["h2o"], model=model, blocks=26, max_num_batched_tokens=128, max_model_len=512)
    requests = [(prompt_of(100 + 10 * i, SEED + i), {"max_tokens": 240, "logprobs": 0}) for i in range(4)]
    outputs, traces = server.traced(requests)
    assert sum(trace.restarts for trace in traces) > 0
    assert sum(len(evicted) for trace in traces for evicted in trace.evicted) > 4
    for (prompt, _), output, trace in zip(requests, outputs, traces):
        assert_tokens_like_oracle(dense, prompt, output, trace, POLICIES["h2o"])
    server.assert_nothing_left()


def test_late_decisions_see_what_was_measured_by_then(async_engine, model, dense):
    """With a step in flight tokens go one step later; which ones is settled by what the decision's own step saw."""
    server = async_engine(POLICIES["h2o"], model=model, max_num_batched_tokens=96, enable_prefix_caching=False)
    steps, told = [], []

    def look(output, *_):
        if output.num_scheduled_tokens:
            steps.extend(output.num_scheduled_tokens.values())
            told.append([compaction.position for compaction in orders_of(getattr(output, PLAN), Compaction)])

    after(server.scheduler, "schedule", look)
    prompt = prompt_of(600, SEED)
    server.add(prompt, "late", max_tokens=100, logprobs=0)
    (output,) = server.run().values()
    tokens = [*prompt, *output.outputs[0].token_ids]
    done = np.searchsorted(np.cumsum(steps), len(tokens) - 1) + 1
    ends = np.cumsum(steps)
    late = [ends[step] - position - 1 > steps[step] for step in range(done) for position in told[step]]
    assert len(late) > 3 and all(late), "no step was in flight at any decision"
    (request,) = replay_tokens(dense, tokens, steps[:done], [(token_config(POLICIES["h2o"]), None)], told=told[:done])
    assert request.closest > TOKEN_TIE
    logprobs = torch.log_softmax(request.replay.logits.double(), -1)[len(prompt) - 1 :]
    want = [logprobs[i, token].item() for i, token in enumerate(output.outputs[0].token_ids)]
    np.testing.assert_allclose(logprobs_of(output), want, atol=2e-3)
    server.assert_nothing_left()


def test_what_cannot_be_had_is_refused():
    parse = KVPolicyConfig.parse
    with pytest.raises(
        KVPolicyError, match="granularity: 'strided' supports only 'block'. Policies that support 'token': h2o, "
    ):
        parse({"name": "strided", "granularity": "token"})
    with pytest.raises(KVPolicyError, match="granularity: 'adakv' supports only 'block'"):
        parse({"name": "adakv", "granularity": "token"})
    with pytest.raises(KVPolicyError, match="granularity: 'when: pressure' compares"):
        parse({"name": "h2o", "granularity": "token", "when": "pressure"})
    with pytest.raises(KVPolicyError, match="granularity: input should be 'block' or 'token', not 'word'"):
        parse({"name": "h2o", "granularity": "word"})
    with pytest.raises(
        KVPolicyError, match="unit: 16 tokens of a head stay or go together: it needs granularity: token"
    ):
        parse({"name": "h2o", "unit": 16})
    with pytest.raises(KVPolicyError, match="retrieval: sets: heads of a layer lie in several KV groups"):
        parse({"name": "duo", "pattern": ["01"], "retrieval": {**POLICIES["h2o"], "sets": "layer"}})
    with pytest.raises(KVPolicyError, match="unit: 12 tokens do not divide a block of 32; .* 1, 2, 4, 8, 16, 32"):
        parse({**POLICIES["h2o"], "unit": 12}).check(BLOCK, 3, 4, 2048)
    config = parse(POLICIES["h2o"])
    assert config.for_request({"kv_policy": "knorm"}, 1000, 32).granularity == "token"
    assert config.for_request({"kv_policy": "sink-window"}, 1000, 32).granularity == "block"


@pytest.mark.parametrize("sets", ["head", "all"])
def test_a_rank_may_have_no_heads_of_a_group(sets):
    """It chooses nothing, and takes part where one set for all is agreed on."""
    config = KVPolicyConfig.parse({**POLICIES["h2o"], "sets": sets})
    sums, calls = TokenSums(2, 1, 1, BLOCK, 11), []
    sums.start("a", Scoring.of(config, 9))
    lens = np.array([320], np.int32)
    sums.token_step(batch_of(["a"], np.array([0, 320], np.int32), lens, torch.from_numpy(lens), held=lens))
    sums.judge("a", 0)
    store = SimpleNamespace(kv_heads=list, compact=lambda source, keep, target: calls.append(keep))
    plan = Compaction("a", 0, list(range(1, 11)), [2, 3], config, 320, 1, 7, 319)
    compact(plan, store, sums, BLOCK, None, lambda values, maximise: calls.append(values.tolist()) or values)
    assert calls == ([[]] if sets == "head" else [[[0.0] * 7 * BLOCK], []])


def test_bands_of_layers_may_keep_tokens(engine, model, dense):
    """Budgets that fall with depth, in tokens."""
    base = {**BASE, "budget": 256, "window": 24, "kernel": 7}
    policy = {"name": "pyramidkv", **base, "bands": 3}
    server = engine(policy, model=model, max_num_batched_tokens=192)
    groups = []
    for band, part in enumerate(KVPolicyConfig.parse(policy).classes.values()):
        limits = part.limits(BLOCK, 1)
        sizes = {"budget": limits.budget * BLOCK, "buffer": (limits.trigger - limits.budget) * BLOCK}
        heads = np.zeros((3, 4), bool)
        heads[band] = True
        groups.append((token_config({**base, "name": "snapkv", **sizes}), heads))
    prompt = prompt_of(500, SEED + 3)
    (output,), (trace,) = server.traced([(prompt, {"max_tokens": 100, "logprobs": 1})])
    replays = replay_tokens(dense, [*prompt, *output.outputs[0].token_ids], trace.steps, groups, trace.start)
    for got, want in zip(trace.groups, replays, strict=True):
        assert got.evicted[:-1] == want.replay.evicted[: len(trace.steps) - 1] and want.kept
    assert_logprobs(output, prompt, trace, replays[0].replay.logits)
    server.assert_nothing_left()


@pytest.mark.parametrize("seed", range(4))
def test_sums_by_token_are_those_of_one_request_at_a_time(seed):
    """Requests come, grow, lose tokens and go, in any order; pages that are used again start from zero."""
    rng, layers, heads, size = np.random.default_rng(seed), 2, 3, 16
    config = KVPolicyConfig.parse({**POLICIES["h2o"], "accumulate": ["sum", "ema"][seed % 2], "decay": 0.5})
    sums = TokenSums(4, heads, layers, size, 20)
    known: dict[str, list] = {}  # scores [L, H, n], positions [L, H, n], the position that comes next
    names = iter(map(str, range(100)))
    for turn in range(40):
        if len(known) < 4 and rng.random() < 0.5:
            name = next(names)
            sums.start(name, Scoring.of(config, 9))
            known[name] = [np.zeros((layers, heads, 0)), np.zeros((layers, heads, 0), int), 0]
        if known and rng.random() < 0.15:
            name = rng.choice(list(known))
            sums.stop(name)
            del known[name]
        if not known:
            continue
        batch = [str(name) for name in rng.permutation(list(known))]
        queries = [int(rng.integers(1, 40)) if rng.random() < 0.3 else 1 for _ in batch]
        for name, count in zip(batch, queries):
            scores, positions, position = known[name]
            new = np.broadcast_to(np.arange(position, position + count), (layers, heads, count))
            faded = scores * (0.5**count if seed % 2 else 1)
            known[name] = [
                np.pad(faded, ((0, 0), (0, 0), (0, count))),
                np.concatenate([positions, new], 2),
                new[0, 0, -1] + 1,
            ]
        batch.insert(at := int(rng.integers(len(batch) + 1)), "unmeasured")
        queries.insert(at, 1)
        lens = np.array([known[name][0].shape[2] if name in known else 17 for name in batch], np.int32)
        ends = np.array([known[name][2] if name in known else 17 for name in batch], np.int32)
        starts = np.concatenate(([0], np.cumsum(queries))).astype(np.int32)
        step = sums.token_step(batch_of(batch, starts, ends, torch.from_numpy(lens), held=lens))
        # A model may call them in any order, and one more than once in a step.
        for layer in [*rng.permutation(range(layers)).tolist(), 1]:
            mass = rng.random((len(batch), heads, 320)).astype(np.float32)

            def weigh(weights, out):
                for row, name in enumerate(batch):
                    if name in known:
                        out[row, :, : lens[row]] += torch.from_numpy(mass[row, :, : lens[row]])

            Drawn(weigh, heads, heads, place=layer).on(step)
            for row, name in enumerate(batch):
                if name in known:
                    known[name][0][layer] += mass[row, :, : lens[row]]
        for name in list(known):
            scores, positions, position = known[name]
            if rng.random() < 0.5 or scores.shape[2] < 2 * size:
                continue
            sums.judge(name, turn)
            got = sums.judged(name, position - 1, turn)
            np.testing.assert_allclose(got[0], scores, rtol=1e-5)
            np.testing.assert_array_equal(got[1], positions)
            count = scores.shape[2] // size * size - size
            keep = np.sort(rng.permuted(np.tile(np.arange(count), (layers, heads, 1)), axis=2)[..., : count - size])
            sums.gather(name, turn, size, count, torch.from_numpy(keep))
            for i in range(2):
                chosen = np.take_along_axis(known[name][i][..., size : size + count], keep, 2)
                parts = known[name][i][..., :size], chosen, known[name][i][..., size + count :]
                known[name][i] = np.concatenate(parts, 2)
    for name in known:
        sums.stop(name)
    assert len(sums._unused) == sums._pages.shape[1] - 1, "pages leaked"
    assert not sums._pages[:, 0].any(), "something was added to nobody's page"
