"""Serving end to end, on both model runners: what users get, what the pool sees, what requests may ask for."""

import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch
from engine import PLAN, Engine, after, logprobs_of, random_prompt
from parity import assert_like_oracle
from pydantic import TypeAdapter, ValidationError
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.metrics.stats import RequestStateStats

from vllm_evict.config import REQUEST_FIELDS
from vllm_evict.integration.frontend.entrypoints import _misplaced_in
from vllm_evict.integration.start.room import ROOMS

BLOCK = 32
H2O = {"name": "h2o", "budget": 192, "buffer": 64, "sink": 32, "recent": 64}
WINDOW = {"name": "sink-window", "budget": 192, "buffer": 0, "sink": 32}
POLICIES = {"h2o": H2O, "sink-window": WINDOW}


def on(policy):
    """Sampling parameters of a request under one of the policies."""
    return {"extra_args": {"kv_policy": policy}}


def most_held(policy):
    """Blocks that a request may hold once its chunk is done."""
    return math.ceil((policy["budget"] + policy["buffer"]) / BLOCK) + 1


def table_of(logprobs):
    """Everything that vLLM says about log-probabilities, for exact comparison."""
    return [row and {token: value.logprob for token, value in row.items()} for row in logprobs or []]


def everything(output):
    completion = output.outputs[0]
    return list(completion.token_ids), table_of(completion.logprobs), table_of(output.prompt_logprobs)


# --- full, and budgets that cover the sequence -----------------------------------------------------------------------

COVERING = {
    "full": {"name": "full"},
    "h2o": {"name": "h2o", "budget": 512},
    "sink-window": {"name": "sink-window", "budget": 512, "sink": 32},
}
PROMPTS = [random_prompt(length, seed) for seed, length in enumerate((300, 40, 150, 33))]
TOKENS = 20


def answers(subject):
    """Outputs to compare: greedy and sampled, with and without prompt log-probabilities, chunked prefill."""
    outputs = subject.generate(PROMPTS, max_tokens=TOKENS, logprobs=3, prompt_logprobs=2)
    torch.manual_seed(7)
    outputs += subject.generate(PROMPTS, max_tokens=TOKENS, logprobs=1, temperature=0.8)
    return [everything(output) for output in outputs]


@pytest.fixture(scope="module")
def stock_answers(tiny):
    stock = Engine(tiny, max_num_batched_tokens=128)
    try:
        return answers(stock)
    finally:
        stock.close()


@pytest.mark.both_runners("full")
@pytest.mark.parametrize("name", COVERING)
def test_a_budget_that_covers_the_sequence_changes_no_bit(engine, stock_answers, name):
    subject = engine(COVERING[name], max_num_batched_tokens=128)
    assert type(subject.scheduler).__name__ == "EvictionScheduler"
    assert answers(subject) == stock_answers


def test_full_asked_for_by_a_request_changes_no_bit(engine, stock_answers):
    """On a server whose own policy evicts from these very prompts."""
    server = engine({**H2O, "budget": 160, "allow": ["full"]}, max_num_batched_tokens=128)
    evicted = server.generate(PROMPTS[:1], max_tokens=TOKENS)[0]
    assert evicted.kv_usage.evicted_blocks > 0
    server.scheduler.reset_prefix_cache()
    outputs = server.generate(PROMPTS, max_tokens=TOKENS, logprobs=3, prompt_logprobs=2, **on("full"))
    assert [everything(output) for output in outputs] == stock_answers[: len(PROMPTS)]


def test_requests_shorter_than_the_budget_are_left_alone(engine, stock_answers):
    """Up to 320 tokens just fit in 10 blocks; the trigger is at 10."""
    server = engine({**H2O, "budget": 320, "buffer": 0}, max_num_batched_tokens=128)
    outputs = server.generate(PROMPTS, max_tokens=TOKENS, logprobs=3, prompt_logprobs=2)
    assert [everything(output) for output in outputs] == stock_answers[: len(PROMPTS)]
    assert [output.kv_usage.evicted_blocks for output in outputs] == [0] * len(PROMPTS)
    # The last token is sampled and never computed.
    held = [math.ceil((len(prompt) + TOKENS - 1) / 32) for prompt in PROMPTS]
    assert [output.kv_usage.peak_resident_blocks for output in outputs] == held


# --- blocks go back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, chunk", [("h2o", 96), ("sink-window", 256)])
def test_blocks_go_back_to_the_pool(engine, name, chunk):
    """After every step the pool's free count is its size less what requests hold, and no request holds more than
    ceil((budget + buffer) / block) + 1; with a chunk in flight, budget + buffer + the chunk."""
    policy = POLICIES[name]
    server = engine(policy, max_num_batched_tokens=chunk)
    peaks, steady = {}, []

    def look(output, *_):
        for req_id in output.num_scheduled_tokens:
            peaks[req_id] = max(peaks.get(req_id, 0), len(server.held_by(req_id)))

    after(server.scheduler, "schedule", look)

    def check(server):
        assert server.free_blocks == server.all_blocks - len(server.held_blocks())
        for request in server.scheduler.running:
            held = server.held_by(request.request_id)
            assert len(held) == len(set(held))
            assert len(held) <= most_held(policy)
            steady.append(len(held))

    for seed, (length, tokens) in enumerate([(700, 40), (64, 250), (330, 90)]):
        server.add(random_prompt(length, seed), max_tokens=tokens)
    outputs = server.run(check)
    assert max(steady) >= most_held(policy) - 1, "the bound was never reached: nothing was shown"
    limit = math.ceil((policy["budget"] + policy["buffer"] + chunk) / BLOCK) + 1
    assert max(peaks.values()) <= limit < 700 // BLOCK
    assert sorted(peaks.values()) == sorted(output.kv_usage.peak_resident_blocks for output in outputs.values())
    server.assert_nothing_left()


def test_one_request_after_another_is_evicted_from(engine):
    server = engine(WINDOW)
    usages = [server.generate([random_prompt(400, seed)], max_tokens=8)[0].kv_usage for seed in range(3)]
    assert [usage.evicted_blocks for usage in usages] == [usages[0].evicted_blocks] * 3
    assert usages[0].evicted_blocks >= 6


# --- admission -------------------------------------------------------------------------------------------------------


def concurrency(server):
    return server.llm.llm_engine.vllm_config.cache_config.kv_cache_max_concurrency


def most_running(server):
    """8 requests of 300 + 30 tokens: how many run at once, and the outputs' lengths."""
    running = []
    for seed in range(8):
        server.add(random_prompt(300, seed), max_tokens=30)
    outputs = server.run(lambda server: running.append(len(server.scheduler.running)))
    assert [len(output.outputs[0].token_ids) for output in outputs.values()] == [30] * 8
    assert server.free_blocks == server.all_blocks
    return max(running)


def test_a_small_pool_serves_more_requests_at_once(engine):
    """40 blocks hold 3 whole requests of 11 blocks (vLLM starts a fourth, and takes it back)."""
    small = dict(blocks=41, max_model_len=512, max_num_batched_tokens=64, enable_prefix_caching=False)
    stock, evicting = engine(**small), engine({**H2O, "buffer": 0}, **small)
    assert most_running(stock) <= 4
    assert most_running(evicting) >= 6
    # At most: the trigger of 6 blocks, and a chunk of 2 in flight that may reach into one more.
    assert concurrency(stock) == pytest.approx(41 / 16, rel=0.05)
    assert concurrency(evicting) == pytest.approx(41 / 9, rel=0.05)


def test_a_request_longer_than_the_whole_pool_is_served(engine, tiny):
    """20 blocks are 640 tokens; stock vLLM does not even start with a context of 2,048."""
    page = 2 * 2 * 32 * 32 * 4 * BLOCK // 32  # K and V, heads, head size, float32, tokens of one layer's block
    small = dict(kv_cache_memory_bytes=20 * 2 * page, num_gpu_blocks_override=None, max_num_batched_tokens=128)
    with pytest.raises(Exception, match="KV cache"):
        engine(**small)
    server = engine(WINDOW, **small)
    assert server.all_blocks < 20
    output = server.generate([random_prompt(1500)], max_tokens=100)[0]
    assert len(output.outputs[0].token_ids) == 100
    assert output.kv_usage.evicted_tokens > 1200
    server.assert_nothing_left()


def test_a_long_cached_prefix_does_not_starve_its_request(engine):
    """Blocks that a hit would take plus those of the first chunk are more than the pool has: nobody else runs, so
    waiting frees nothing."""
    server = engine({"name": "sink-window", "budget": 320, "sink": 32}, blocks=20)
    prompt = random_prompt(1024)
    server.generate([prompt[:512]], max_tokens=1)
    server.add(prompt, max_tokens=4)
    for _ in range(40):
        done = [output for output in server.llm.llm_engine.step() if output.finished]
        if done:
            break
    assert done, "the request was never scheduled"
    assert len(done[0].outputs[0].token_ids) == 4


# --- requests --------------------------------------------------------------------------------------------------------

MIX = [
    (random_prompt(80, 1), {"max_tokens": 300}, H2O),
    (random_prompt(330, 2), {"max_tokens": 60, "extra_args": {"kv_budget": 128}}, {**H2O, "budget": 128}),
    (random_prompt(200, 3), {"max_tokens": 90, **on("sink-window")}, {**WINDOW, "buffer": 64}),
    (
        random_prompt(60, 4),
        {"max_tokens": 200, "extra_args": {"kv_policy": "sink-window", "kv_budget": 96}},
        {**WINDOW, "buffer": 64, "budget": 96},
    ),
    (random_prompt(250, 5), {"max_tokens": 64, **on("full")}, {"name": "full"}),
    (random_prompt(260, 6), {"max_tokens": 40, "extra_args": {"kv_budget": 0.5}}, {**H2O, "budget": 160}),
]


def test_policies_and_budgets_mix_in_one_batch(engine, dense):
    """Each request of a mixed batch is what the oracle says for it alone, and what the engine says for it alone."""
    server = engine({**H2O, "allow": ["full", "sink-window"]}, max_num_batched_tokens=2048, enable_prefix_caching=False)
    requests = [(prompt, {**sampling, "logprobs": 1}) for prompt, sampling, _ in MIX]
    outputs, traces = server.traced(requests)
    evicted = [
        assert_like_oracle(dense, prompt, output, trace, policy)
        for (prompt, _, policy), output, trace in zip(MIX, outputs, traces)
    ]
    assert [blocks > 0 for blocks in evicted] == [True, True, True, True, False, True]
    assert [output.kv_usage.policy for output in outputs] == [policy["name"] for *_, policy in MIX]
    for request, output in zip(requests, outputs):
        ((alone,), _) = server.traced([request])
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        np.testing.assert_allclose(logprobs_of(alone), logprobs_of(output), atol=1e-3)
        assert alone.kv_usage == output.kv_usage
    server.assert_nothing_left()


def test_a_bounded_request_finds_room_beside_those_of_a_server_that_evicts_nothing(engine):
    """Its long prompt has no room for all its blocks, and needs none: it does not wait for the end of the first one."""
    server = engine({"name": "full"}, blocks=36, max_model_len=1024, max_num_batched_tokens=128)
    whole = server.add(random_prompt(500, 1), max_tokens=40)
    server.llm.llm_engine.step()
    bounded = server.add(random_prompt(800, 2), max_tokens=4, extra_args={"kv_policy": "h2o", "kv_budget": 192})
    most = [0]
    done = server.run(lambda server: most.append(len(server.scheduler.running)))
    assert max(most) == 2
    assert done[whole].kv_usage.evicted_blocks == 0 and done[bounded].kv_usage.evicted_blocks > 0
    server.assert_nothing_left()


@pytest.mark.both_runners
def test_a_request_may_keep_everything_if_the_pool_has_room_for_it(engine, monkeypatch):
    """A server that evicts starts in a pool for less than its longest request, which would wait for ever under `full`."""
    server = engine(H2O, blocks=20, max_model_len=1024, max_num_batched_tokens=128)
    prompt = [random_prompt(400, 1)]
    (whole,) = server.generate(prompt, max_tokens=40, extra_args={"kv_policy": "full"})
    (bounded,) = server.generate(prompt, max_tokens=40)
    assert (whole.kv_usage.policy, whole.kv_usage.evicted_blocks) == ("full", 0) and bounded.kv_usage.evicted_blocks > 0
    with pytest.raises(
        VLLMValidationError, match="may grow to 700 tokens; expected at most 608, which the cache holds; ask for f"
    ):
        server.add(random_prompt(600, 2), max_tokens=100, extra_args={"kv_policy": "full"})
    # What the front end did not see does not stop the engine.
    monkeypatch.setattr(server.llm.llm_engine.vllm_config, ROOMS, ())
    unseen = server.add(random_prompt(600, 2), max_tokens=100, extra_args={"kv_policy": "full"})
    output = server.run()[unseen]
    assert output.kv_usage.policy == "h2o" and len(output.outputs[0].token_ids) == 100
    server.assert_nothing_left()


def test_streamed_tokens_add_up_to_the_finished_output(engine):
    server = engine({**H2O, "allow": ["sink-window"]}, enable_prefix_caching=False)
    requests = [(random_prompt(300, 1), {}), (random_prompt(280, 2), on("sink-window"))]
    whole = [server.generate([prompt], max_tokens=40, **options)[0] for prompt, options in requests]
    ids = [
        server.add(prompt, max_tokens=40, output_kind=RequestOutputKind.DELTA, **options)
        for prompt, options in requests
    ]
    streamed, usage = {i: [] for i in ids}, {i: [] for i in ids}
    while server.llm.llm_engine.has_unfinished_requests():
        for output in server.llm.llm_engine.step():
            streamed[output.request_id] += output.outputs[0].token_ids
            usage[output.request_id].append(output.kv_usage)
    assert list(streamed.values()) == [output.outputs[0].token_ids for output in whole]
    for request_usage, output in zip(usage.values(), whole):
        assert request_usage[-1] == output.kv_usage and request_usage[-1].evicted_blocks > 0
        assert set(request_usage[:-1]) == {None}


def test_each_of_n_completions_has_its_usage(engine):
    server = engine(H2O)
    output = server.generate([random_prompt(300)], max_tokens=30, n=3, temperature=1.0)[0]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) > 1
    assert [completion.kv_usage.policy for completion in output.outputs] == ["h2o"] * 3
    assert all(completion.kv_usage.evicted_blocks >= 4 for completion in output.outputs)
    assert output.kv_usage == output.outputs[0].kv_usage
    server.assert_nothing_left()


def test_a_request_has_its_usage_in_its_metrics(engine):
    """Ray Data shows `dataclasses.asdict` of an output's metrics. Streamed outputs that nobody has read are merged."""
    server = engine(H2O, disable_log_stats=False)
    prompt = random_prompt(300)
    (output,) = server.generate([prompt], max_tokens=30)
    shown = dataclasses.asdict(pickle.loads(pickle.dumps(output)).metrics)
    assert shown.pop("kv_usage") == output.kv_usage.as_dict() and output.kv_usage.evicted_blocks > 0
    assert shown.keys() == dataclasses.asdict(RequestStateStats()).keys() and shown["num_generation_tokens"] == 30

    server.add(prompt, max_tokens=30, output_kind=RequestOutputKind.DELTA)
    first, *others = [output for _ in range(40) for output in server.llm.llm_engine.step()]
    for output in others:
        first.add(output, aggregate=True)
    assert first.finished and first.metrics.kv_usage == output.kv_usage.as_dict()
    (several,) = server.generate([prompt], max_tokens=30, n=2, temperature=1.0)
    usages = [completion.kv_usage.as_dict() for completion in several.outputs]
    assert several.metrics.kv_usage == usages and len(usages) == 2


@pytest.mark.both_runners
def test_a_step_that_comes_to_the_runner_past_the_worker_ends(engine):
    """vLLM's older Ray executor does so, and so may executors of others: nobody would obey the plan."""
    server = engine(H2O)
    server.add(random_prompt(40), max_tokens=4)
    step = server.scheduler.schedule()
    with pytest.raises(RuntimeError, match="to the model runner past the worker"):
        server.worker.model_runner.execute_model(step)
    server.worker.execute_model(step)


def test_a_step_without_its_plan_ends(engine):
    """An executor that makes steps anew may lose it. Requests would read blocks that are others' by now."""
    server = engine(H2O)
    server.add(random_prompt(40), max_tokens=4)
    server.llm.llm_engine.step()
    step = server.scheduler.schedule()
    delattr(step, PLAN)
    with pytest.raises(RuntimeError, match="got a step without its plan"):
        server.worker.execute_model(step)


def test_a_stop_string_ends_a_request_with_its_usage(engine):
    """Stop strings are found by the front end, which then aborts the request in the engine."""
    server = engine(H2O, enable_prefix_caching=False)
    prompt = random_prompt(300)
    whole = server.generate([prompt], max_tokens=30)[0]
    word = whole.outputs[0].text.split()[20]
    output = server.generate([prompt], max_tokens=30, stop=[word + " "])[0]
    assert output.outputs[0].finish_reason == "stop"
    assert output.kv_usage is not None
    assert output.kv_usage.evicted_blocks == whole.kv_usage.evicted_blocks


def test_usage_so_far_is_sent_when_it_is_news(engine):
    """The front end keeps the last one, as a stop string may end the request with any token."""
    server = engine(H2O, enable_prefix_caching=False)
    sent = []

    def look(clients, *_):
        sent.extend(getattr(output, "kv_usage", None) for client in clients.values() for output in client.outputs)

    after(server.scheduler, "update_from_output", look)
    server.add(random_prompt(300), max_tokens=100, stop=["no such words"])
    (output,) = server.run().values()
    usages = [usage for usage in sent[:-1] if usage]
    assert len(sent) == 100 and 2 <= len(usages) <= 100 // BLOCK + 2
    assert all(one != other for one, other in zip(usages, usages[1:]))
    assert usages[-1].evicted_blocks == output.kv_usage.evicted_blocks > 0


BAD = {
    "unknown policy": ({"kv_policy": "h2"}, "unknown KV policy 'h2'.*h2o"),
    "too large a budget": ({"kv_budget": 256}, "above the server's 192"),
    "a typo": ({"kv_buget": 128}, "'kv_buget'.*kv_budget"),
    "sinks that are the budget": ({"kv_sink": 160}, "budget 192 leaves nothing to choose.*160 . 64"),
}


def protocols():
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    messages = {"messages": [{"role": "user", "content": "x"}]}
    yield AnthropicMessagesRequest, {**messages, "max_tokens": 1}
    yield ChatCompletionRequest, messages
    yield CompletionRequest, {"prompt": "x"}
    yield ResponsesRequest, {"input": "x"}


def test_a_null_of_a_client_counts_as_not_given():
    """Of a field of the plugin alone: vLLM refuses any other null in `vllm_xargs`."""
    for cls, body in protocols():
        validate = TypeAdapter(cls).validate_python  # as the server does
        nulls = dict.fromkeys(REQUEST_FIELDS)
        request = validate({"model": "m", **body, "vllm_xargs": {**nulls, "kv_budget": 128, "mine": "1"}, **nulls})
        assert request.vllm_xargs == {"kv_budget": 128, "mine": "1"}
        assert validate({"model": "m", **body}).vllm_xargs is None
        with pytest.raises(ValidationError, match="vllm_xargs"):
            validate({"model": "m", **body, "vllm_xargs": {"mine": None}})
        assert _misplaced_in(request) is None
        elsewhere = validate({"model": "m", **body, "extra_body": {"vllm_xargs": {"kv_sink": 8, "kv_budget": None}}})
        # Messages know no further fields, so the request does not have them.
        assert _misplaced_in(elsewhere) == ("kv_sink in extra_body" if elsewhere.model_extra else None)


def test_bad_requests_are_refused_with_the_reason_and_the_engine_goes_on(engine):
    server = engine({**H2O, "allow": ["sink-window"]})
    running = server.add(random_prompt(300), max_tokens=40)
    server.llm.llm_engine.step()
    for what, (extra_args, reason) in BAD.items():
        with pytest.raises(VLLMValidationError, match=reason):
            server.add(random_prompt(300), extra_args=extra_args)
            pytest.fail(f"{what} was accepted")
        server.llm.llm_engine.step()
    outputs = server.run()
    assert list(outputs) == [running] and len(outputs[running].outputs[0].token_ids) == 40
    server.assert_nothing_left()
    with pytest.raises(VLLMValidationError, match="'kv_buget'"):
        server.generate([random_prompt(50)], extra_args={"kv_buget": 128})
    assert server.generate([random_prompt(400)], max_tokens=2, **on("sink-window"))[0].kv_usage.evicted_blocks > 0


def test_a_request_pins_the_start_of_its_prompt(engine):
    """A system prompt, say: `kv_sink` tokens stay, whatever they draw, within the server's budget."""
    server = engine(H2O)
    kept = {}

    def check(server):
        for request in server.scheduler.running:
            table = server.manager.req_to_blocks[request.request_id]
            kept[request.request_id] = [index for index, block in enumerate(table) if not block.is_null]

    pinned = server.add(prompt := random_prompt(400), max_tokens=60, extra_args={"kv_sink": 96, "kv_recent": 32})
    plain = server.add(prompt, max_tokens=60)
    usage = {req_id: output.kv_usage for req_id, output in server.run(check).items()}
    assert usage[pinned].budget_tokens == usage[plain].budget_tokens and usage[pinned].evicted_blocks > 0
    held = {
        name: next(blocks for req_id, blocks in kept.items() if req_id.startswith(name)) for name in (pinned, plain)
    }
    assert held[pinned][: 96 // BLOCK] == list(range(96 // BLOCK)) != held[plain][: 96 // BLOCK]
    server.assert_nothing_left()


def test_no_request_holds_more_than_the_servers_bound(engine):
    """Whatever a request may ask for keeps within what admission and the pool were planned with."""
    policy = {"name": "h2o", "budget": 200, "buffer": 40, "sink": 20, "recent": 50}
    server = engine(policy, enable_prefix_caching=False)
    bound = math.ceil((200 + 40) / BLOCK)
    held = []

    def check(server):
        held.extend(len(server.held_by(request.request_id)) for request in server.scheduler.running)

    for extra_args in ({}, {"kv_policy": "sink-window"}, {"kv_budget": 200}, {"kv_budget": 224}, {"kv_budget": 0.5}):
        try:
            server.add(random_prompt(250), max_tokens=100, extra_args=extra_args)
        except VLLMValidationError:
            assert extra_args == {"kv_budget": 224}  # may as well be refused
    server.run(check)
    assert max(held) == bound
