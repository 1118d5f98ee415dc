"""`prompt: whole`: no block goes before the prompt is computed, and the first decision sees all of it."""

import pytest
import test_sessions
import test_tokens
from engine import assert_like_stock, random_prompt
from evaluation import NEEDLE, needles
from oracle.model import DenseLlama
from oracle.tiny import make_tiny_llama
from parity import assert_like_oracle, assert_tokens_like_oracle

from vllm_evict.config import KVPolicyConfig, KVPolicyError
from vllm_evict.tools.eval.score import score

BASE = {"budget": 192, "buffer": 64, "sink": 32, "recent": 64, "prompt": "whole", "exact": False}
POLICIES = {
    "sink-window": {"name": "sink-window", **BASE},
    "h2o": {"name": "h2o", **BASE},
    "h2o-last": {"name": "h2o", **BASE, "accumulate": "last", "window": 100, "every": 3},
    "snapkv": {"name": "snapkv", **BASE, "window": 24},
    "scissorhands": {"name": "scissorhands", **BASE, "window": 48},
    "rkv": {"name": "rkv", **BASE, "window": 12, "mix": 0.5},
    "keydiff": {"name": "keydiff", **BASE},
}
#: The last one ends with a chunk that is shorter than the windows above.
LENGTHS = ((500, 80), (150, 120), (392, 30))


def held_before(trace, prompt):
    """Whether no step before the end of the prompt led to a decision."""
    computed = trace.start
    for tokens, evicted in zip(trace.steps, trace.evicted):
        computed += tokens
        if evicted:
            return computed >= len(prompt)
    return True


@pytest.mark.oracle("full attention")
@pytest.mark.both_runners("h2o", "snapkv")
@pytest.mark.parametrize("name", POLICIES)
def test_evictions_and_logprobs_match_the_dense_oracle(engine, dense, name):
    server = engine(POLICIES[name], max_num_batched_tokens=128)
    asked = [
        (random_prompt(length, seed), {"max_tokens": n, "logprobs": 1}) for seed, (length, n) in enumerate(LENGTHS)
    ]
    for prompt, output, trace in server.answered(asked):
        assert assert_like_oracle(dense, prompt, output, trace, POLICIES[name]) >= 3
        assert held_before(trace, prompt)
        assert output.kv_usage.peak_resident_tokens >= len(prompt)
    server.assert_nothing_left()


@pytest.mark.parametrize("name", ["h2o", "snapkv"])
def test_heads_keep_the_tokens_of_the_dense_oracle(engine, tmp_path, name):
    path = make_tiny_llama(tmp_path / "model", layers=3, heads=8, kv_heads=4, vocab=test_tokens.VOCAB)
    policy = {**test_tokens.POLICIES[name], "prompt": "whole", "exact": False}
    server = engine(policy, model=path, max_num_batched_tokens=192)
    asked = [
        (test_tokens.prompt_of(length, test_tokens.SEED + seed), {"max_tokens": n, "logprobs": 1})
        for seed, (length, n) in enumerate([(500, 100), (90, 260)])
    ]
    for prompt, output, trace in server.answered(asked):
        assert_tokens_like_oracle(DenseLlama(path), prompt, output, trace, policy)
        assert sum(map(len, trace.evicted)) >= 3 and held_before(trace, prompt)
    server.assert_nothing_left()


@pytest.mark.parametrize("server", [{"name": "full"}, POLICIES["snapkv"]], ids=["full", "whole"])
def test_requests_of_one_server_have_their_prompts_whole_or_in_chunks(engine, dense, server):
    """A server for questions about documents, and for chats; and one under `full`, whose requests pick a policy."""
    served, picked = engine(server, max_num_batched_tokens=128), KVPolicyConfig.parse(server)
    asked = [
        (random_prompt(480, seed), {"max_tokens": 60, "logprobs": 1, "extra_args": {"kv_policy": "snapkv", **fields}})
        for seed, fields in enumerate([{"kv_prompt": "whole"}, {"kv_prompt": "chunks"}, {}])
        for fields in [{**fields, "kv_budget": 192, "kv_sink": 32, "kv_recent": 64}]
    ]
    peaks = []
    for (prompt, output, trace), (_, sampling) in zip(served.answered(asked), asked, strict=True):
        policy = picked.for_request(sampling["extra_args"], len(prompt), 32)
        assert assert_like_oracle(dense, prompt, output, trace, policy.to_dict()) >= 2
        peaks.append(output.kv_usage.peak_resident_tokens)
        assert (policy.prompt == "whole") == (peaks[-1] >= len(prompt)) == held_before(trace, prompt)
    assert peaks[1] < peaks[0]
    served.assert_nothing_left()


def test_a_short_pool_preempts_and_answers_stay(engine, dense):
    """The pool has room for one prompt and a half."""
    server = engine(POLICIES["snapkv"], blocks=30, max_num_batched_tokens=128, max_model_len=640)
    asked = [(random_prompt(480, seed), {"max_tokens": 60, "logprobs": 1}) for seed in range(4)]
    for prompt, output, trace in server.answered(asked):
        assert assert_like_oracle(dense, prompt, output, trace, POLICIES["snapkv"]) > 3
    server.assert_nothing_left()


@pytest.mark.parametrize("name, exact", [("h2o", False), ("snapkv", False), ("h2o", True)])
def test_a_prompt_that_is_in_the_prefix_cache_is_hit_whole(engine, dense, name, exact):
    """No hole of the request before is in what it published: its whole prompt. The second one measures the rest alone."""
    policy = {**POLICIES[name], "exact": exact}
    server = engine(policy, max_num_batched_tokens=128, enable_prefix_caching=True)
    shared = random_prompt(448, 1)
    for length, hit in ((0, 0), (100, 448), (37, 448)):
        prompt = [*shared, *random_prompt(length, length)]
        ((_, output, trace),) = server.answered([(prompt, {"max_tokens": 80, "logprobs": 1})])
        assert trace.start == hit and held_before(trace, prompt)
        assert assert_like_oracle(dense, prompt, output, trace, policy) >= 8
    server.assert_nothing_left()


def test_each_turn_of_a_session_keeps_its_prompt_whole(engine):
    server, held = engine(POLICIES["snapkv"], max_num_batched_tokens=96), []
    sessions = test_sessions.Sessions(server)

    def on_step():
        request = server.scheduler.requests["s"]
        whole = request.num_computed_tokens < request.num_prompt_tokens
        held.append((whole, len(server.held_by("s"))))

    ends = []
    test_sessions.talk(
        sessions, test_sessions.TURNS, on_step=on_step, between=lambda _: ends.append(len(server.held_by("s")))
    )
    assert max(n for whole, n in held if whole) > 9 and max(ends) <= 9
    assert sessions.usage["s"].evicted_blocks > 10
    sessions.end("s")


def test_a_budget_that_covers_all_changes_nothing(engine):
    prompts = [random_prompt(300, seed) for seed in range(3)]
    assert_like_stock(engine, prompts, {"name": "snapkv", "budget": 512, "prompt": "whole"})


def test_a_question_at_the_end_of_a_prompt_of_several_chunks_is_answered(engine):
    """Chunk by chunk the fact goes before the question comes."""
    samples, ids = needles()
    right = {}
    for prompt in ("chunks", "whole"):
        policy = {"name": "snapkv", "budget": 320, "buffer": 0, "sink": 32, "recent": 64, "window": 8, "prompt": prompt}
        server = engine(policy, model=NEEDLE, blocks=500, max_model_len=2304, max_num_batched_tokens=512)
        outputs = server.generate(list(ids.values()), max_tokens=4)
        texts = [output.outputs[0].text for output in outputs]
        right[prompt] = sum(score(text, sample) for text, sample in zip(texts, samples.values(), strict=True))
    assert right["whole"] >= 9 and right["chunks"] <= 6, right


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"name": "h2o", "when": "pressure"}, "prompt: whole: the pool may run out .*: it needs when: budget"),
        ({"name": "h2o", "context": 4096}, "prompt: whole: .*leave context out"),
        ({"name": "kvzip"}, "policy 'kvzip' has no field 'prompt'"),
        ({"name": "h2o", "prompt": "half"}, "prompt: .*'chunks'.*'whole'"),
    ],
)
def test_what_does_not_go_with_it_is_refused(fields, message):
    with pytest.raises(KVPolicyError, match=message):
        KVPolicyConfig(**{"prompt": "whole", **fields})


def test_the_pool_has_to_hold_whole_prompts():
    assert KVPolicyConfig(name="h2o", budget=1024).bound(32, 4096) == 36
    assert KVPolicyConfig(name="h2o", budget=1024, prompt="whole").bound(32, 4096) is None
    asked = KVPolicyConfig(name="h2o", prompt="whole").for_request({"kv_policy": "tova"}, 4096, 32)
    assert asked.prompt == "whole"
