"""A model may call one attention layer several times a step: what is measured of a layer stays that layer's."""

import numpy as np
import pytest
from engine import logprobs_of
from oracle.tiny import make_tiny_llama

VOCAB = 4096
BASE = {"budget": 224, "buffer": 64, "sink": 32, "recent": 64}
BY_TOKEN = {**BASE, "granularity": "token"}
POLICIES = {
    "tokens": {"name": "h2o", **BY_TOKEN},
    "tokens-of-split-heads": {
        "name": "duo",
        "pattern": ["0110", "1111", "0001"],
        "sink": 32,
        "recent": 96,
        "retrieval": {"name": "h2o", **BY_TOKEN},
    },
    "kvzip-tokens": {"name": "kvzip", **BY_TOKEN},
    "blocks": {"name": "h2o", **BASE, "layers": "max"},
    "cached-tokens": {"name": "knorm", **BY_TOKEN},
}
#: Calls of each of three layers in a step.
CALLS = (2, 3, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repeated") / "model"
    return make_tiny_llama(folder, layers=3, heads=8, kv_heads=4, vocab=VOCAB)


def repeat(server, calls):
    """Have the model call its attention layers so many times: the last output counts, and all are the same."""
    for layer, times in zip(server.worker.model_runner.model.model.layers, calls):
        attention = layer.self_attn.attn

        def forward(*args, forward=attention.forward, times=times, **kwargs):
            return [forward(*args, **kwargs) for _ in range(times)][-1]

        attention.forward = forward


@pytest.mark.nightly(push=("blocks", "tokens"))
@pytest.mark.parametrize("name", POLICIES)
def test_a_layer_that_is_called_twice_keeps_its_own_scores(engine, model, name):
    requests = [
        (np.random.default_rng(40 + seed).permutation(VOCAB)[:length].tolist(), {"max_tokens": tokens, "logprobs": 0})
        for seed, (length, tokens) in enumerate([(500, 100), (90, 260)])
    ]
    found = []
    for calls in ((1, 1, 1), CALLS):
        server = engine(POLICIES[name], model=model, max_num_batched_tokens=192)
        repeat(server, calls)
        outputs, traces = server.traced(requests)
        assert any(traces[0].evicted)
        found.append([(trace.evicted, output.outputs[0].token_ids) for output, trace in zip(outputs, traces)])
        found[-1].append(np.concatenate([logprobs_of(output) for output in outputs]).tolist())
        server.assert_nothing_left()
    assert found[1] == found[0]
