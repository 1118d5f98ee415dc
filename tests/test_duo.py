"""Retrieval and streaming heads on the engine: KV groups with block tables of their own, against per-head masks."""

import json

import numpy as np
import pytest
import torch
from engine import V2, logprobs_of, random_prompt
from oracle.heads import replay_heads
from oracle.model import DenseLlama
from oracle.replay import Config
from oracle.tiny import make_tiny_llama

from vllm_evict.heads.arrange import arrange

BLOCK = 32
SINK, RECENT = 32, 96
#: Layers x KV heads; one layer has no retrieval head, one has nothing else.
PATTERN = np.array([[0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]])
H2O = {"name": "h2o", "budget": 224, "buffer": 64, "sink": 32, "recent": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("duo") / "model", layers=4, heads=8, kv_heads=4)


@pytest.fixture(scope="module")
def dense(model):
    return DenseLlama(model)


@pytest.fixture
def heads(tmp_path):
    """Write a file of gates; returns its path."""

    def write(pattern, sink=SINK, recent=RECENT):
        np.savetxt(tmp_path / "heads.tsv", np.asarray(pattern, float), delimiter="\t")
        (tmp_path / "config.json").write_text(json.dumps({"sink_size": sink, "recent_size": recent}))
        return str(tmp_path / "heads.tsv")

    return write


@pytest.fixture
def duo(engine, model, heads):
    """An engine with split heads."""

    def make(pattern=PATTERN, *, retrieval=None, **kwargs):
        policy = {"name": "duo", "heads": heads(pattern), **({"retrieval": retrieval} if retrieval else {})}
        return engine(policy, model=model, **kwargs)

    return make


def groups_of(pattern, retrieval=None):
    """The oracle's KV groups, in the engine's order."""
    pattern = np.asarray(pattern, bool)
    arranged = arrange(pattern)
    policy = dict(retrieval or {"name": "full"})
    configs = (
        Config(policy.pop("name"), BLOCK, **policy),
        Config("sink-window", BLOCK, budget=SINK + RECENT + BLOCK, sink=SINK, recent=RECENT),
    )
    groups = []
    for which, config in enumerate(configs):
        for part in range(arranged.groups[which]):
            layers = [place[which].group == part for place in arranged.places[0]]
            groups.append((config, (pattern if which == 0 else ~pattern) & np.array(layers)[:, None]))
    return groups


def assert_like_oracle(dense, prompt, output, trace, groups):
    """The same blocks evicted from each group after the same steps, the same log-probabilities."""
    tokens = [*prompt, *output.outputs[0].token_ids]
    replays = replay_heads(dense, tokens, trace.steps, groups, trace.start)
    for got, want in zip(trace.groups, replays, strict=True):
        assert got.evicted[:-1] == want.evicted[: len(trace.steps) - 1]
    logprobs = torch.log_softmax(replays[0].logits.double(), -1)
    before = trace.known - len(prompt)  # generated before a restart
    want = [
        logprobs[len(prompt) + i - 1 - trace.start, token].item()
        for i, token in enumerate(output.outputs[0].token_ids)
        if i >= before
    ]
    np.testing.assert_allclose(logprobs_of(output)[before:], want, atol=2e-3)


@pytest.mark.parametrize("retrieval", [None, H2O, {**H2O, "name": "knorm"}, {"name": "strided", "budget": 192, "buffer": 0, "sink": 32, "recent": 64}], ids=lambda x: x and x["name"])
def test_blocks_and_logprobs_match_per_head_masks(duo, dense, retrieval):
    """Prompts longer and shorter than a chunk and a window in one batch, decoded past several decisions."""
    server = duo(retrieval=retrieval, max_num_batched_tokens=192)
    requests = [
        (random_prompt(length, seed), {"max_tokens": tokens, "logprobs": 1})
        for seed, (length, tokens) in enumerate([(500, 80), (90, 150), (20, 30)])
    ]
    outputs, traces = server.traced(requests)
    groups = groups_of(PATTERN, retrieval)
    for (prompt, _), output, trace in zip(requests, outputs, traces):
        assert_like_oracle(dense, prompt, output, trace, groups)
    assert sum(map(len, traces[0].groups[-1].evicted)) > 10, "streaming heads never lost a block"
    assert any(map(any, traces[0].evicted)) == (retrieval is not None)
    server.assert_nothing_left()
