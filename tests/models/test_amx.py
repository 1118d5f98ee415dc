"""CPUs with AMX, where vLLM has kernels of its own for bfloat16: MLA on AMX_MLA, and caches packed for tiles of AMX."""

from functools import partial

import numpy as np
import pytest
import torch
from drafting import NGRAM
from engine import assert_like_stock, logprobs_of, random_prompt
from evaluation import NEEDLE, ROOT, needles
from latent import MODELS, mended_rotation
from oracle.model import DenseLlama
from oracle.visible import assert_like_dense, visible
from test_mla import POLICIES as ALL
from test_mla import check_all_policies, expected, importances, truths  # noqa: F401

from vllm_evict.compute import sums
from vllm_evict.compute.attention import cpu
from vllm_evict.tools.eval.score import score

BLOCK = 32
SIZES = {"budget": 160, "sink": 32, "recent": 32, "buffer": 32}
H2O = {"name": "h2o", **SIZES}
#: Largest difference of a log-probability in bfloat16 from the reference's in float32, by rounding.
NOISE = 0.08
#: Difference, of some token at least, if the reference saw what was evicted.
MATTERS = 0.3
pytestmark = [
    pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this CPU has no AMX"),
    pytest.mark.since("0.32", "no CPU with AMX has run these tests on it"),
]


@pytest.fixture(autouse=True)
def rotation():
    with mended_rotation():
        yield


@pytest.fixture
def serve(engine, truths):  # noqa: F811
    """Makes engines on AMX_MLA, which vLLM chooses by itself."""

    def make(policy=H2O, architecture="DeepseekV3ForCausalLM", **options):
        folder, _ = truths(architecture)
        server = engine(policy, model=folder, dtype="bfloat16", block_size=BLOCK, **options)
        assert server.manager.kv_cache_spec.backend == "AMX_MLA" and server.manager.block_size == BLOCK
        return server

    return make


@pytest.mark.both_runners("DeepseekV3ForCausalLM")
@pytest.mark.parametrize("architecture", MODELS)
def test_logprobs_after_evictions_are_those_of_transformers(serve, truths, poisoned, architecture):  # noqa: F811
    """Prompts in chunks beside decodes; freed blocks are full of NaN."""
    server = serve({**H2O, "allow": [*ALL]}, architecture, max_num_batched_tokens=200)
    check_all_policies(server, truths(architecture)[1], 230, 70, NOISE, MATTERS)


def test_later_requests_hit_pure_blocks(serve, truths):  # noqa: F811
    _, model = truths()
    server = serve(max_num_batched_tokens=96)
    prompts = [random_prompt(n, n) for n in (40, 300, 350)]
    asked = {"max_tokens": 30, "logprobs": 0}
    server.traced([(prompt, asked) for prompt in prompts])
    outputs, traces = server.traced([(prompt, asked) for prompt in prompts])
    for prompt, output, trace in zip(prompts, outputs, traces):
        assert BLOCK <= trace.start <= 288  # what was computed before the first eviction
        trace.steps.insert(0, trace.start)
        trace.evicted.insert(0, [])
        np.testing.assert_allclose(logprobs_of(output), expected(model, prompt, output, trace, BLOCK), atol=NOISE)
    server.assert_nothing_left()


@pytest.mark.parametrize("architecture", MODELS)
def test_full_is_stock_to_the_byte(engine, truths, architecture):  # noqa: F811
    options = {"model": truths(architecture)[0], "dtype": "bfloat16", "block_size": BLOCK}
    assert_like_stock(engine, [random_prompt(200)], {"name": "h2o", **SIZES, "budget": 512}, **options)


def test_full_with_drafts_is_stock_to_the_byte(engine, truths):  # noqa: F811
    options = {"model": truths()[0], "dtype": "bfloat16", "block_size": BLOCK, "speculative_config": NGRAM}
    assert_like_stock(engine, [random_prompt(20) * 10], **options)


def test_mass_is_what_transformers_attends_to(serve, truths, monkeypatch):  # noqa: F811
    reports, report = [], sums.RunningSums.report
    monkeypatch.setattr(sums.RunningSums, "report", lambda *args: reports.append(report(*args)) or reports[-1])
    _, model = truths()
    server = serve({**H2O, "accumulate": "sum"})
    prompt = random_prompt(250)
    want, _ = importances(model, prompt, BLOCK)
    server.generate([prompt], max_tokens=2)
    (mass,) = (each.statistics["mass"] for found in reports for each in found.values())
    np.testing.assert_allclose(mass / mass.sum(), np.divide(want, sum(want)), rtol=0.02)


# --- caches packed for tiles of AMX -----------------------------------------------------------------------------------


@pytest.fixture
def decoded(monkeypatch):
    """(queries, resident tokens) of each request that the plugin's kernel attends for, in each call."""
    seen = []

    def watched(stock, attentions, rows, *args):
        for attention in attentions if isinstance(attentions, list) else [attentions]:
            assert attention.layout == "amx"
            lens = attention.query_start_loc.diff(), attention.seq_lens
            seen.extend(zip(*(each[rows.long()].tolist() for each in lens)))
        return stock(attentions, rows, *args)

    for name in ("decode_mass", "decode_classes"):
        monkeypatch.setattr(cpu, name, partial(watched, getattr(cpu, name)))
    return seen


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ["h2o", "sink-window"])
def test_the_plugin_decodes_measured_requests_alone(engine, tiny, poisoned, decoded, name, exact):
    """Prompts, and requests that nothing measures, stay with vLLM's kernel, which is faster there."""
    policy = {**H2O, "name": name, "exact": exact}
    server = engine(policy, dtype="bfloat16", block_size=BLOCK, max_num_batched_tokens=96, max_model_len=2048)
    prompts, masks = [random_prompt(n, n) for n in (40, 300, 450)], visible(server)
    asked = [(prompt, {"max_tokens": 100, "logprobs": 0}) for prompt in prompts]
    dense = DenseLlama(tiny)
    for (prompt, output, trace), mask in zip(server.answered(asked), masks.values(), strict=True):
        assert_like_dense(dense, prompt, output, mask, atol=2 * NOISE)
        if len(prompt) > 40:
            assert sum(map(len, trace.evicted)) > 4
            with pytest.raises(AssertionError):  # what was evicted matters to this model
                assert_like_dense(dense, prompt, output, torch.ones_like(mask).tril(), atol=2 * MATTERS)
    assert {queries for queries, _ in decoded} == ({1} if name == "h2o" else set())
    server.assert_nothing_left()


def test_full_and_covering_budgets_are_stock_to_the_byte_where_exact(engine):
    prompts = [random_prompt(n, n) for n in (40, 300)]
    covering = {**H2O, "budget": 1024, "exact": True}
    assert_like_stock(engine, prompts, covering, dtype="bfloat16", block_size=BLOCK)


@pytest.mark.parametrize("fields, sparse", [({"hold": 1}, 1), ({"leaders": [2]}, 1 / 4)], ids=["quest", "omnikv"])
def test_decodes_read_their_best_blocks(engine, decoded, fields, sparse):
    """All layers, or the one behind the leader, read a tenth of each context. Answers are right."""
    samples, ids = needles()
    policy = {"name": "full", "read": 224, "sink": 32, "recent": 32, **fields}
    server = engine(policy, model=NEEDLE, dtype="bfloat16", blocks=1500, max_model_len=2304, block_size=BLOCK)
    outputs = server.generate(list(ids.values()), max_tokens=4)
    right = [score(output.outputs[0].text, sample) for output, sample in zip(outputs, samples.values())]
    few = [tokens <= 224 for _, tokens in decoded]
    assert sum(right) >= 9 and few and sum(few) == len(few) * sparse


def test_split_heads_are_decoded_together(engine, decoded):
    """Retrieval heads keep everything, and the others lose blocks."""
    samples, ids = needles()
    gates = str(ROOT / "configs/heads/needle")
    policy = {"name": "duo", "gates": gates, "sparsity": 0.5, "sink": 32, "recent": 64}
    server = engine(policy, model=NEEDLE, dtype="bfloat16", blocks=1500, max_model_len=2304, block_size=BLOCK)
    outputs = server.generate(list(ids.values()), max_tokens=4)
    right = [score(output.outputs[0].text, sample) for output, sample in zip(outputs, samples.values())]
    assert sum(right) >= 9 and {queries for queries, _ in decoded} == {1}
    assert all(output.kv_usage.evicted_blocks > 0 for output in outputs)
