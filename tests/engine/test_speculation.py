"""Speculative decoding: drafts neither score nor publish, and decisions see settled tokens; against the dense oracle."""

import numpy as np
import pytest
import torch
from drafting import DRAFTS, MODEL, NGRAM, SERVED, accepted, serve
from engine import after, logprobs_of, random_prompt
from oracle.model import DenseLlama
from oracle.replay import replay
from oracle.tiny import make_tiny_llama
from parity import assert_like_oracle, assert_tokens_like_oracle, oracle_config, steps_of
from vllm.config import CompilationConfig, CompilationMode
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.import_utils import has_arctic_inference
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

from vllm_evict.integration.worker.backend import resident_backend

pytestmark = SERVED

BASE = {"budget": 160, "buffer": 32, "sink": 32, "recent": 32}
POLICIES = {
    "sink-window": {"name": "sink-window", "budget": 160, "sink": 32},
    "h2o": {"name": "h2o", **BASE},
    "h2o-every": {"name": "h2o", **BASE, "every": 3},
    "snapkv": {"name": "snapkv", **BASE, "window": 24},
    "snapkv-whole": {"name": "snapkv", **BASE, "window": 24, "prompt": "whole"},
    "scissorhands": {"name": "scissorhands", **BASE, "window": 48},
}
BY_TOKEN = {
    "h2o": {"name": "h2o", **BASE, "granularity": "token"},
    "snapkv": {"name": "snapkv", **BASE, "granularity": "token", "window": 24},
}


#: vLLM's drafter of suffixes is in a package that has no wheel.
SUFFIX = {"method": "suffix", "num_speculative_tokens": DRAFTS}
HAS_SUFFIX = pytest.mark.skipif(not has_arctic_inference(), reason="arctic-inference is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speculation") / "model"
    return make_tiny_llama(folder, **MODEL)


@pytest.mark.both_runners("ngram")
@pytest.mark.parametrize("config", [NGRAM, pytest.param(SUFFIX, marks=HAS_SUFFIX)], ids=["ngram", "suffix"])
def test_full_serves_as_stock_does(engine, tiny, config):
    """The same tokens as without speculation, and as many accepted drafts as in stock vLLM."""
    prompts, answers, counts = [random_prompt(40, seed) * 5 for seed in range(3)], [], []
    for policy, speculative in ((None, config), ("full", config), ("full", None)):
        server = engine(policy, speculative_config=speculative)
        answers.append([each.outputs[0].token_ids for each in server.generate(prompts, max_tokens=80)])
        counts += [accepted(server)] if speculative else []
        if policy is not None:
            server.assert_nothing_left()
    assert answers[0] == answers[1] == answers[2]
    assert counts[0] == counts[1] and counts[0][0] > 0


@pytest.mark.both_runners("sink-window", "h2o")
@pytest.mark.oracle("full attention")
@pytest.mark.nightly(push=("sink-window", "h2o", "snapkv", "h2o-every"))
@pytest.mark.parametrize("name", POLICIES)
def test_evictions_and_logprobs_match_the_dense_oracle(engine, model, dense, monkeypatch, name):
    def check(prompt, output, trace):
        assert assert_like_oracle(dense, prompt, output, trace, POLICIES[name], tie=2e-6) >= 2

    serve(engine, model, POLICIES[name], check, monkeypatch)


@pytest.mark.both_runners("h2o")
@pytest.mark.parametrize("name", BY_TOKEN)
def test_heads_keep_the_tokens_of_the_dense_oracle(engine, model, dense, monkeypatch, name):
    def check(prompt, output, trace):
        assert_tokens_like_oracle(dense, prompt, output, trace, BY_TOKEN[name])

    serve(engine, model, BY_TOKEN[name], check, monkeypatch)


@HAS_SUFFIX
@pytest.mark.parametrize("name", ["sink-window", "h2o", "snapkv", "h2o-tokens"])
def test_suffixes_match_the_dense_oracle(engine, tiny, poisoned, name):
    """A request has as many drafts in a step as its suffix tree proposes: up to three."""
    policy, compare = POLICIES.get(name), assert_like_oracle
    if policy is None:
        policy, compare = BY_TOKEN["h2o"], assert_tokens_like_oracle
    server = engine(policy, max_num_batched_tokens=96, speculative_config=SUFFIX)
    dense, lengths = DenseLlama(tiny), set()

    def look(output, *_):
        lengths.update(map(len, output.scheduled_spec_decode_tokens.values()))

    after(server.scheduler, "schedule", look)
    requests = [(random_prompt(50, seed) * 5, {"max_tokens": 160, "logprobs": 1}) for seed in range(3)]
    for prompt, output, trace in server.answered(requests):
        compare(dense, prompt, output, trace, policy)
        assert sum(map(len, trace.evicted)) >= 2
    kept, drafts = accepted(server)
    assert drafts > kept > 10 and len(lengths) > 1
    server.assert_nothing_left()


@pytest.mark.parametrize("drafts", [0, 3])
def test_decodes_with_drafts_keep_full_graphs(drafts):
    """The plugin's builder says that its full graphs are for decodes with equally many queries, and vLLM chooses."""
    backend = resident_backend(FlashAttentionBackend, runtime=None, ops=None, head_class="all")
    support = backend.get_builder_cls().get_cudagraph_support(None, None)
    config = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, cudagraph_mode="FULL_AND_PIECEWISE")
    config.set_splitting_ops_for_v1(all2all_backend="")
    config.max_cudagraph_capture_size, config.cudagraph_capture_sizes = 8, [4, 8]
    chosen = config.resolve_cudagraph_mode_and_sizes(support, "FLASH_ATTN", 1 + drafts)
    assert chosen.name == "FULL_AND_PIECEWISE"


@pytest.mark.both_runners
def test_drafts_that_a_grammar_cuts_neither_score_nor_count(engine, tiny, poisoned):
    """A grammar of three words refuses what the prompt drafts; evictions are those of the dense oracle."""
    words, policy, dense = [1, 2, 3], POLICIES["h2o"], DenseLlama(tiny)
    grammar = StructuredOutputsParams(regex="(t1|t2|t3){20,500}")
    server = engine(
        policy,
        max_num_batched_tokens=96,
        speculative_config=NGRAM,
        structured_outputs_config={"backend": "xgrammar"},
    )
    cut = []

    def look(_, drafts):
        for req_id, tokens in zip(drafts.req_ids, drafts.draft_token_ids):
            if (request := server.scheduler.requests.get(req_id)) is not None:
                cut.append(len(tokens) - sum(token != -1 for token in request.spec_token_ids))

    after(server.scheduler, "update_draft_token_ids", look)
    prompts = [random_prompt(length, length) for length in (250, 90)]
    bound = {"max_tokens": 160, "logprobs": 1, "structured_outputs": grammar}
    outputs, traces = server.traced([(prompts[0], bound), (prompts[1], {"max_tokens": 160, "logprobs": 1})])
    kept, drafts = accepted(server)
    assert sum(cut) > 10 and drafts > kept > 10
    assert set(outputs[0].outputs[0].token_ids) <= set(words)
    assert assert_like_oracle(dense, prompts[1], outputs[1], traces[1], policy, tie=2e-6) >= 2
    tokens = [*prompts[0], *outputs[0].outputs[0].token_ids]
    steps, trace = steps_of(traces[0], tokens), traces[0]
    reference = replay(dense, tokens, steps, oracle_config(policy, prompts[0]), settled=trace.settled)
    assert trace.evicted[:-1] == reference.evicted[:-1] and sum(map(len, trace.evicted)) >= 2
    allowed = torch.log_softmax(reference.logits[len(prompts[0]) - 1 : -1, words].double(), -1)
    want = [row[words.index(token)].item() for row, token in zip(allowed, outputs[0].outputs[0].token_ids)]
    np.testing.assert_allclose(logprobs_of(outputs[0])[: len(want)], want, atol=2e-3)
    server.assert_nothing_left()
