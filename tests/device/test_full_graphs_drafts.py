"""Decodes with drafts replay full CUDA graphs of `1 + k` queries a request; without a GPU (graphs.py)."""

from collections import Counter

import drafting
import pytest
import test_full_graphs
from drafting import DRAFTS, MODEL, NGRAM, SERVED, Drafter, accepted, make_eagle, speculative
from engine import V2, exactly
from oracle.tiny import make_tiny_llama
from parity import assert_like_oracle, assert_tokens_like_oracle
from test_drafters_async import check_late_holes
from test_full_graphs import BASE, BLOCK, EITHER, POLICIES, STOCK, distinct_prompt, on, replays

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.minutes,
    pytest.mark.on_triton,
    SERVED,
]
backend, server, replaying = (getattr(test_full_graphs, name) for name in ("backend", "server", "replaying"))
TOKENS = {**POLICIES["h2o"], "granularity": "token"}
CASES = [on("triton", name) for name in ("sink-window", "h2o", "scissorhands", "token")]
CASES += [on("fa3", "h2o"), on("fa2", "sink-window")]


@pytest.fixture
def speculating(replaying, graphs, monkeypatch):
    """Engines that verify drafts in graphs of one, two and four requests."""
    monkeypatch.setattr(drafting, "VOCAB", 256)
    sizes = {"cudagraph_capture_sizes": [requests * (1 + DRAFTS) for requests in (1, 2, 4)]}
    modes = {**graphs.options["compilation_config"], **sizes}

    def make(policy=None, **kwargs):
        policy = None if policy is None else {"allow": [], **policy}
        return replaying(policy, **{"compilation_config": modes, "speculative_config": NGRAM, **kwargs})

    return make


@pytest.mark.both_runners("triton-sink-window", "triton-h2o", "triton-token")
@pytest.mark.parametrize("backend, name", CASES, indirect=["backend"])
def test_verified_drafts_match_the_dense_oracle(speculating, graphs, dense, backend, name):
    """Three requests in a graph of four. vLLM's kernel attends in each graph, and mass is taken beside it."""
    policy, compare = POLICIES.get(name, TOKENS), assert_tokens_like_oracle if name == "token" else assert_like_oracle
    subject, measures = speculating(policy), name in ("h2o", "token")
    for key, graph in graphs.of(subject).items():
        launched, own = Counter(graph.names), type(key).__name__.startswith("Own")
        assert launched[STOCK["fa" if backend else "triton"]] == 2 and not launched["_attend"]
        if measures:
            assert launched["_mass_from_lse"] == (2 if own else 0)
            assert launched["_query_lse"] == (0 if backend else launched["_mass_from_lse"])
    drafter, evicted = Drafter(subject), []
    requests = [(distinct_prompt(length, 2), {"max_tokens": 26, "logprobs": 0}) for length in (70, 56, 20)]
    for drafter.right in (0, "some"):
        outputs, traces = subject.traced(requests)
        drafter.texts = [[*prompt, *output.outputs[0].token_ids] for (prompt, _), output in zip(requests, outputs)]
        for (prompt, _), output, trace in zip(requests, outputs, traces):
            compare(dense, prompt, output, trace, policy, block_size=BLOCK)
            evicted.append(output.kv_usage.evicted_blocks)
    kept, _ = accepted(subject)
    assert kept > 5 and all(evicted[:2]), (kept, evicted)
    stock, own, _ = replays(subject, graphs)
    full = sum(set(step) == {1 + DRAFTS} for step in subject.steps)
    assert full > 30 and (own + stock == full or name == "scissorhands")
    assert bool(own) == measures and (stock < own or not measures)
    subject.assert_nothing_left()


@pytest.mark.parametrize("backend", EITHER, indirect=True)
def test_full_is_stock_to_the_byte(speculating, graphs, backend):
    prompts, found = [distinct_prompt(length, 2) for length in (40, 20)], []
    for policy in (None, {"name": "full"}, {"name": "h2o", **BASE, "budget": 256}):
        subject = speculating(policy)
        Drafter(subject)
        outputs = subject.generate(prompts, max_tokens=12, logprobs=0)
        found.append(exactly(outputs))
        stock, own, _ = replays(subject, graphs)
        assert stock > 3 and not own
        graphs.replayed.clear()
    assert found[0] == found[1] == found[2]


@pytest.mark.nightly
@pytest.mark.both_runners
@pytest.mark.skipif(not V2, reason="under async scheduling V1 pads no step of drafts")
@pytest.mark.parametrize("backend", [on("triton")], indirect=True)
def test_lengths_that_the_device_alone_knows(async_engine, graphs, poisoned, tmp_path, backend):
    """Under async scheduling, with a drafter whose layers read views of their own outside of graphs."""
    model = make_tiny_llama(tmp_path / "model", **MODEL)
    drafter = speculative("eagle", make_eagle(tmp_path / "eagle", model, "eagle"))
    modes = {**graphs.options["compilation_config"], "cudagraph_capture_sizes": [4, 8]}

    def make(policy, **options):
        sizes = dict(block_size=BLOCK, blocks=48, max_model_len=256, max_num_seqs=2, enforce_eager=False)
        return async_engine(policy, **{**options, **sizes, "compilation_config": modes})

    policy = {"name": "h2o", **BASE, "every": 2, "allow": []}
    own = dict(policy=policy, lengths=(100, 40), tokens_each=52, block=BLOCK)
    subject = check_late_holes(make, model, drafter, "h2o-every", **own)
    stock, own = (
        sum(
            type(key).__name__.startswith("Own") is which
            for key, graph in graphs.of(subject).items()
            for _ in range(graph.replays)
        )
        for which in (False, True)
    )
    assert own > 20 and not stock
