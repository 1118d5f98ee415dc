"""Decodes that attend to the best resident blocks of each layer: against a dense model that chooses for itself."""

import math
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine import Engine, after, logprobs_of, random_prompt, random_requests
from loads.pages import Published, Stock
from oracle.model import DenseLlama
from oracle.selection import BLOCK, Chooser
from oracle.tiny import make_tiny_llama
from parts import part_of
from streaming import Sessions, talk

from vllm_evict.compute.select import Selection
from vllm_evict.config import KVPolicyConfig, KVPolicyError
from vllm_evict.core.blocks import RequestBlocks
from vllm_evict.eval.policies import contenders, servers
from vllm_evict.integration.engine.allocation import Reads

SELECT = {"select": 256, "select_sink": 32, "select_recent": 32, "dense_layers": 1}
OWN = {*SELECT, "select_every", "filter_layers", "select_bounds"}
SIZES = {"sink": 32, "recent": 32, "buffer": 0}
EVICTING = {"budget": 384, "buffer": 64, "sink": 32, "recent": 64}


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A model of five layers, so that filters have layers before, between and after them."""
    return make_tiny_llama(tmp_path_factory.mktemp("deep"), layers=5)


def assert_selects_like_dense(model, prompt, output, trace, *, dense=None, atol=2e-3, **select):
    """Log-probabilities of a traced request are those of a dense model that chooses for itself. Returns its choices."""
    dense = dense or DenseLlama(model)
    chooser, tokens = Chooser(dense, **select), [*prompt, *output.outputs[0].token_ids]
    cache, n, gone, logits = dense.new_cache(), 0, set(), []
    if trace.start:
        dense.forward(tokens[: trace.start], cache, torch.ones(trace.start, trace.start).tril().bool())
        n = trace.start
    for count, evicted in zip(trace.steps, trace.evicted):
        first, n = n, n + count
        resident = [block for block in range(math.ceil(n / BLOCK)) if block not in gone]
        base = torch.arange(n) <= torch.arange(first, n)[:, None]
        base &= torch.isin(torch.arange(n) // BLOCK, torch.tensor(resident))
        logits.append(dense.forward(tokens[first:n], cache, chooser.mask(base, resident))[0])
        if set(evicted) - gone:
            chooser.held, chooser.steps = {}, 0
        gone |= set(evicted)
    logprobs = torch.log_softmax(torch.cat(logits).double(), -1)
    assert chooser.closest > 1e-5, "rounding could choose another block: take another prompt"
    want = [
        logprobs[len(prompt) - 1 - trace.start + i, token].item() for i, token in enumerate(output.outputs[0].token_ids)
    ]
    np.testing.assert_allclose(logprobs_of(output), want, atol=atol)
    return chooser.chosen


CASES = {
    "full": {"name": "full", **SELECT},
    "every": {"name": "full", **SELECT, "select_every": 5},
    "spheres": {"name": "full", **SELECT, "select_bounds": "sphere"},
    "means": {"name": "full", **SELECT, "select_bounds": "mean"},
    "filters": {"name": "full", **SELECT, "filter_layers": [0, 2]},
    "wide": {"name": "full", "select": 320, "select_sink": 40, "select_recent": 100, "dense_layers": 0},
    "sink-window": {"name": "sink-window", "budget": 448, "buffer": 96, "sink": 32, **SELECT},
    "keydiff": {"name": "keydiff", **EVICTING, **SELECT, "select_every": 3},
    "quest": {"name": "quest", **EVICTING, **SELECT},
}


@pytest.mark.nightly(push=("full", "every", "filters", "quest"))
@pytest.mark.both_runners("full", "quest")
@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_a_dense_model_that_chooses_for_itself(engine, deep, poisoned, name):
    """Three requests in one batch; one is shorter than the selection at first."""
    policy = dict(CASES[name])
    if "filter_layers" in policy:
        del policy["dense_layers"]
    server = engine(policy, model=deep, max_num_batched_tokens=192)
    requests = random_requests((700, 50), (230, 80), (500, 40))
    outputs, traces = server.traced(requests)
    chosen = 0
    given = {field: value for field, value in policy.items() if field in OWN}
    for (prompt, _), output, trace in zip(requests, outputs, traces):
        chosen += assert_selects_like_dense(deep, prompt, output, trace, **given)
    assert chosen > 100 / policy.get("select_every", 1)
    server.assert_nothing_left()
    assert not list(part_of(server.runtime, Selection).requests)


def test_under_async_scheduling_with_prefixes_that_are_cached(async_engine, deep):
    """The second request hits the blocks of the first, and with them their bounds."""
    server = async_engine({"name": "full", **SELECT}, model=deep)
    prefix = random_prompt(400)
    server.generate([prefix], max_tokens=1)
    prompts = [prefix + random_prompt(90, seed) for seed in (1, 2)]
    for prompt, output, trace in server.answered([(prompt, {"max_tokens": 40, "logprobs": 1}) for prompt in prompts]):
        assert trace.start >= 384
        # A step that is planned before the request is known to have ended computes nothing of it.
        trace.steps, trace.evicted = trace.steps[: len(trace.evicted)], trace.evicted
        assert assert_selects_like_dense(deep, prompt, output, trace, **SELECT) > 100
    server.assert_nothing_left()


def test_a_selection_that_covers_all_changes_no_bit(engine, monkeypatch):
    """Requests with no more blocks than the selection are vLLM's; the step of the first block more selects."""
    select = {"select": 512, "select_sink": 32, "select_recent": 32, "dense_layers": 0}
    prompts = [random_prompt(440), random_prompt(300, 1), random_prompt(20, 2)]
    subject, stock = engine({"name": "full", **select}), engine()
    chosen = []
    choose = Selection.choose
    monkeypatch.setattr(Selection, "choose", lambda self, *args: chosen.append(1) or choose(self, *args))
    outputs = [server.generate(prompts, max_tokens=72, logprobs=1) for server in (subject, stock)]
    for ours, theirs in zip(*outputs):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert (logprobs_of(ours) == logprobs_of(theirs)).all()
    assert not chosen
    subject.generate([prompts[0]], max_tokens=74)
    assert len(chosen) == 2  # layers


def check_choices(monkeypatch):
    """Compare bounds with keys at each choice of engines to come; a selection then has `checked`, places of layers."""
    choose = Selection.choose

    def compared(self, choice, layer, place, query):
        blocks = choice.resident[:-1].long()
        keys = [keys for keys, _ in self._store.read(blocks, False)][place]
        assert torch.equal(self._bounds[place][blocks], torch.cat((keys.amax(2), keys.amin(2)), -1))
        chosen = choose(self, choice, layer, place, query)
        assert set(chosen.tolist()) <= set(choice.resident[1:-2].tolist())
        self.__dict__.setdefault("checked", []).append(place)
        return chosen

    monkeypatch.setattr(Selection, "choose", compared)


def test_bounds_are_those_of_the_blocks_as_they_stand(engine, deep, monkeypatch, poisoned):
    """Requests come and are preempted, blocks go to the host and come back, prefixes are hit; freed blocks are NaN."""
    tier = {"evict": "host", "host": "16MiB", "recall": "quest", "recall_every": 2, "again": 64}
    policy = {"name": "quest", "budget": 224, "buffer": 32, "sink": 32, "recent": 32, **tier}
    select = {"select": 160, "select_sink": 32, "select_recent": 32, "dense_layers": 1}
    server = engine({**policy, **select}, model=deep, blocks=26, max_model_len=1024, max_num_batched_tokens=128)
    check_choices(monkeypatch)
    preempted = []
    after(server.scheduler, "_preempt_request", lambda *_: preempted.append(True))
    rng, ids, outputs, prefix, steps = np.random.default_rng(0), [], {}, random_prompt(200, 9), 0
    while len(ids) < 12 or server.llm.llm_engine.has_unfinished_requests():
        if len(ids) < 12 and rng.random() < 0.4:
            prompt = prefix[: int(rng.choice([0, 96, 200]))] + random_prompt(int(rng.integers(5, 400)), len(ids))
            extra = {"kv_policy": str(rng.choice(["quest", "sink-window", "keydiff"]))}
            if extra["kv_policy"] == "sink-window":
                extra["kv_budget"] = 224
            ids.append(server.add(prompt, max_tokens=int(rng.integers(1, 40)), logprobs=1, extra_args=extra))
        steps += 1
        if steps % 30 == 0:
            server.core.reset_prefix_cache(reset_running_requests=True)
        for output in server.llm.llm_engine.step():
            if output.finished:
                outputs[output.request_id] = output
    checked = part_of(server.runtime, Selection).checked
    assert len(checked) > 200 and set(checked) == {1, 2, 3, 4} and preempted
    assert all(np.isfinite(logprobs_of(output)).all() for output in outputs.values())
    assert any(output.kv_usage.recalled_blocks for output in outputs.values())
    assert any(output.num_cached_tokens for output in outputs.values())
    server.assert_nothing_left()
    assert not list(part_of(server.runtime, Selection).requests)


# --- what is published ------------------------------------------------------------------------------------------------

#: Streaming heads whose windows are longer than all requests.
SPLIT = {"name": "duo", "gates": "made up", "pattern": ["01", "11", "00", "10", "01"], "sink": 32, "recent": 600}
PUBLISHING = {
    "full": {"name": "full", **SELECT},
    "filters": {"name": "full", **SELECT, "dense_layers": None, "filter_layers": [0, 2]},
    "every": CASES["every"],
    "split": SPLIT | {"retrieval": {"name": "full", **SELECT}},
    "evicting": {"name": "sink-window", "budget": 448, "sink": 32, **SELECT},
    "host": {"name": "keydiff", **EVICTING, "evict": "host", "host": "16MiB", "recall": "quest", **SELECT},
}


@pytest.fixture(scope="module")
def stock(deep):
    engine = Engine(
        deep, block_size=BLOCK, max_model_len=1024, max_num_batched_tokens=1024, enable_prefix_caching=False
    )
    yield Stock(engine)
    engine.close()


@pytest.mark.both_runners("full-engine", "split-engine")
@pytest.mark.parametrize("make", ["engine", "async_engine"])
@pytest.mark.parametrize("name", PUBLISHING)
def test_what_selecting_steps_compute_is_never_published(request, deep, stock, name, make):
    """A later request hits the tokens up to the first step that selected, and each published block is stock vLLM's."""
    server = request.getfixturevalue(make)(PUBLISHING[name], model=deep, max_num_batched_tokens=192)
    published, prompts = Published(server, stock), [random_prompt(350), random_prompt(200, 1)]
    outputs = server.generate(prompts, max_tokens=130)
    later = [[*prompt, *output.outputs[0].token_ids, 1] for prompt, output in zip(prompts, outputs)]
    assert [output.num_cached_tokens for output in server.generate(later, max_tokens=1)] == [320, 256]
    published.compare(1e-4)
    assert published.counts["pages"] > 20
    server.assert_nothing_left()


@pytest.mark.parametrize("make", ["engine", "async_engine"])
def test_turns_after_one_that_selected_publish_nothing(request, deep, stock, make):
    server = request.getfixturevalue(make)(PUBLISHING["full"], model=deep, max_num_batched_tokens=192)
    published, sessions = Published(server, stock), Sessions(server)
    talk(sessions, [(250, 90), (100, 40)])
    tokens = sessions.tokens("s")
    sessions.end("s")
    (output,) = server.generate([tokens], max_tokens=1)
    assert len(tokens) > 470 and output.num_cached_tokens == 256
    published.compare(1e-4)


@pytest.mark.parametrize("saved, pure", [(True, 256), (False, 384)])
def test_after_a_preemption(engine, deep, stock, saved, pure):
    """A request that goes on with its blocks from the host is as impure as before. One that is computed again attends to
    all tokens that it had, 390, so it publishes them after all."""
    policy = {"name": "quest", **EVICTING, "budget": 600, "evict": "host", "host": "16MiB", **SELECT}
    server = engine({**policy, "preempt": "host" if saved else "recompute"}, model=deep, max_num_batched_tokens=512)
    published, prompt = Published(server, stock), random_prompt(200)
    server.add(prompt, max_tokens=250)

    def preempted(_):
        (request,) = server.scheduler.requests.values()
        if request.num_tokens == 391 and not request.num_preemptions:
            server.scheduler.running.remove(request)
            server.scheduler._preempt_request(request, time.monotonic())

    (output,) = server.run(lambda _: server.scheduler.requests and preempted(server)).values()
    assert (output.kv_usage.restored or 0) == int(saved)
    (later,) = server.generate([[*prompt, *output.outputs[0].token_ids, 1]], max_tokens=1)
    assert later.num_cached_tokens == pure
    published.compare(1e-4)


def test_a_step_that_gets_no_blocks_ends_no_purity():
    config = KVPolicyConfig.parse({"name": "full", **SELECT})
    resident = RequestBlocks(config, None, BLOCK)
    request = SimpleNamespace(request_id="a", num_computed_tokens=320)
    cache = SimpleNamespace(allocate_slots=lambda *args, **kwargs: None)
    Reads(SimpleNamespace(kv_cache_manager=cache, blocks_of=lambda _: [resident]))
    assert cache.allocate_slots(request, 1) is None and resident.pure_tokens is None
    cache = SimpleNamespace(allocate_slots=lambda *args, **kwargs: ())
    Reads(SimpleNamespace(kv_cache_manager=cache, blocks_of=lambda _: [resident]))
    cache.allocate_slots(request, 2)
    assert resident.pure_tokens is None
    cache.allocate_slots(request, 1)
    request.num_computed_tokens = 321
    cache.allocate_slots(request, 1)
    assert resident.pure_tokens == 320


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h2o", "snapkv", "rkv", "tova", "scissorhands", "kvzip", "pyramidkv", "duo"])
def test_policies_of_attention_do_not_select(name):
    with pytest.raises(KVPolicyError, match=f"select: '{name}' sees only what a decode attends to"):
        KVPolicyConfig.parse({"name": name, "select": 1024})


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"select_every": 2}, "select_every: decodes attend to all resident tokens: it needs select"),
        ({"select": 1024, "granularity": "token"}, "select: each head has tokens of its own"),
        ({"select": 1024, "context": 8192}, "select: bounds are of keys as they were computed: leave context out"),
        ({"select": 1024, "filter_layers": [3, 1]}, "filter_layers: expected ascending layers"),
        ({"select": 1024, "filter_layers": [1], "dense_layers": 1}, "leave dense_layers out"),
        ({"select": 1024, "allow": ["h2o"]}, "allow: 'h2o' measures attention"),
    ],
)
def test_fields_that_do_not_go_together_are_refused_by_name(fields, message):
    with pytest.raises(KVPolicyError, match=re.escape(message)):
        KVPolicyConfig.parse({"name": "keydiff", **fields})


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"select": 1024, "filter_layers": [1, 7]}, "filter_layers of a model with 5 layers, from 0 on, got (1, 7)"),
        ({"select": 1024, "filter_layers": [4]}, "filter_layers of a model with 5 layers, from 0 on, got (4,)"),
        ({"select": 1024, "dense_layers": 5}, "dense_layers of a model with 5 layers, from 0 on, got 5"),
    ],
)
def test_a_selection_has_to_fit_the_model(fields, message):
    with pytest.raises(KVPolicyError, match=re.escape(message)):
        KVPolicyConfig.parse({"name": "full", **fields}).check(BLOCK, 5, 2, 4096)


@pytest.mark.parametrize("size", [16, 32, 128, 528, 2096])
@pytest.mark.parametrize("select", [100, 512, 2048])
def test_sizes_of_a_selection_that_nobody_gave_follow_it(size, select):
    """As sinks and recent tokens follow a budget: a choice is left, and what was given stays."""
    config = KVPolicyConfig.parse({"name": "full", "select": select})
    blocks, sinks, recent = config.selected(size)
    assert blocks == max(-(-select // size), 4) and blocks - sinks - recent >= 2
    assert sinks == min(-(-64 // size), max(blocks // 8, 1)) and recent == min(-(-127 // size) + 1, max(blocks // 4, 1))
    carried = KVPolicyConfig.parse(config.to_dict())
    assert carried.selected(size) == (blocks, sinks, recent) == carried.for_request({}, 100, size).selected(size)
    given = KVPolicyConfig.parse({"name": "full", "select": select, "select_sink": 96, "select_recent": 96})
    assert given.selected(size)[1:] == (-(-96 // size), -(-95 // size) + 1)
    assert given.selected(size)[0] == max(-(-select // size), sum(given.selected(size)[1:]) + 1)


def test_requests_of_a_server_that_selects_measure_no_attention():
    config = KVPolicyConfig.parse({"name": "full", "select": 1024})
    assert config.allowed >= {"full", "sink-window", "knorm", "keydiff", "pagedeviction", "quest", "random", "strided"}
    assert not config.allowed & {"h2o", "tova", "snapkv", "rkv", "scissorhands"}
    with pytest.raises(KVPolicyError, match="kv_policy 'h2o' is not enabled here"):
        config.for_request({"kv_policy": "h2o"}, 100, BLOCK)


@pytest.mark.parametrize("name", ["full", "quest", "sink-window"])
def test_a_request_of_another_policy_selects_as_its_server_does(name):
    server = KVPolicyConfig.parse({"name": name, "allow": ["full", "quest", "sink-window"], **SELECT})
    for other in ("full", "quest", "sink-window"):
        own = server.for_request({"kv_policy": other}, 5000, BLOCK)
        assert own.name == other and {field: getattr(own, field) for field in SELECT} == SELECT


def test_the_harness_compares_selections_on_servers_of_their_own():
    wanted = contenders('full,sink-window,{"name": "full", "select": 512}', [], **SIZES)
    assert [[each.config.select for each in served] for _, served in servers(wanted, 4096, BLOCK)] == [[0, 0], [512]]


def test_engines_without_the_plugins_decode_kernel_are_refused(engine, monkeypatch):
    monkeypatch.setenv("VLLM_EVICT_DECODE", "stock")
    with pytest.raises(Exception, match="select: the plugin's decode kernel does not run here"):
        engine({"name": "full", **SELECT})
