"""Models some of whose layers have sliding windows, behind vLLM's attention backends for a device, without one.

Like test_device_backends.py, on both model runners; decodes are replayed as full CUDA graphs, too (graphs.py).
"""

from collections import Counter

import pytest
import test_device_backends
import test_full_graphs
import test_read
import test_warmup
from engine import random_prompt
from oracle.model import DenseLlama
from oracle.tiny import make_tiny_llama
from parity import assert_like_oracle
from test_device_backends import BLOCK, POLICIES, on
from test_full_graphs import OWN, STOCK, replays

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"), pytest.mark.on_triton]
FIXTURES = "backend", "server", "view_launches"
backend, server, view_launches = (getattr(test_device_backends, name) for name in FIXTURES)
replaying = test_full_graphs.replaying
WINDOW = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A layer with a window before one that sees all, which shows what the other writes, and one after it."""
    folder = tmp_path_factory.mktemp("sliding") / "model"
    return make_tiny_llama(folder, layers=3, windows=[WINDOW, 0, WINDOW])


@pytest.mark.parametrize("backend", [on("triton"), on("fa3")], indirect=True)
def test_full_is_stock(server, model):
    test_device_backends.check_full_is_stock(server, model=model)


CASES = [on("triton", "h2o"), on("triton", "sink-window"), on("fa3", "h2o"), on("fa2", "sink-window")]


@pytest.mark.oracle("sliding windows")
@pytest.mark.parametrize("backend, name", CASES, indirect=["backend"])
def test_evictions_and_logprobs_match_the_dense_oracle(server, backend, model, name):
    check_evictions(server, model, name)


def check_evictions(server, model, name):
    """One prompt longer than the budget and a chunk, one that outgrows its budget while it decodes."""
    subject, dense = server(POLICIES[name], model=model), DenseLlama(model)
    requests = [
        (random_prompt(length), {"max_tokens": tokens, "logprobs": 0}) for length, tokens in [(100, 17), (61, 14)]
    ]
    for prompt, output, trace in subject.answered(requests):
        assert assert_like_oracle(dense, prompt, output, trace, POLICIES[name], block_size=BLOCK) > 0
    subject.assert_nothing_left()


@pytest.mark.both_runners("triton-h2o")
@pytest.mark.parametrize(
    "backend, name", [on("triton", "h2o"), on("fa3", "h2o"), on("triton", "sink-window")], indirect=["backend"]
)
def test_every_decode_is_replayed_and_matches_the_dense_oracle(replaying, graphs, backend, model, name):
    check_decodes_are_replayed(replaying, graphs, model, name, STOCK["fa" if backend else "triton"])


def check_decodes_are_replayed(replaying, graphs, model, name, stock_kernel):
    """Windows are vLLM's kernel's in both graphs of a batch size, by metadata of their own."""
    policy = POLICIES[name] if name == "h2o" else {**POLICIES[name], "allow": []}
    subject, dense = replaying(policy, model=model), DenseLlama(model)
    for key, graph in graphs.of(subject).items():
        launched, own = Counter(graph.names), type(key).__name__.startswith("Own")
        assert launched[stock_kernel] == (2 if own else 3)
        assert [launched[kernel] for kernel in OWN] == ([1, 1] if own else [0, 0])
    requests = [(random_prompt(n), {"max_tokens": m, "logprobs": 0}) for n, m in [(100, 17), (61, 14), (20, 26)]]
    outputs, traces = subject.traced(requests)
    stock, own, decodes = replays(subject, graphs)
    assert stock + own == decodes > 20 and bool(own) == (name == "h2o")
    evicted = []
    for (prompt, _), output, trace in zip(requests, outputs, traces):
        evicted.append(assert_like_oracle(dense, prompt, output, trace, POLICIES[name], block_size=BLOCK))
    assert evicted[0] > 0 and evicted[1] > 0 and not evicted[2]
    subject.assert_nothing_left()


@pytest.mark.parametrize(
    "backend, read_prompts", [on("triton", 0), on("triton", 224), on("fa3", 224)], indirect=["backend"]
)
def test_layers_read_their_best_blocks(server, model, poisoned, read_prompts):
    options = {"model": model, "blocks": 64, "max_model_len": 512}
    test_read.check_classes(server, DenseLlama(model), read_prompts=read_prompts, tables=False, **options)


@pytest.mark.parametrize("backend", [on("triton"), on("fa3")], indirect=True)
def test_nothing_is_compiled_while_requests_wait(server, backend, tmp_path):
    """With full attention layers in two KV groups."""
    model = make_tiny_llama(tmp_path / "model", layers=3, windows=[0, WINDOW, 0])
    test_warmup.check_served(server, "h2o", "float16" if backend else "float32", model=model)
