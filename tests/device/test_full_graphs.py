"""Decodes under a policy replay full CUDA graphs, with the right kernel in them; without a GPU (graphs.py)."""

import itertools
from collections import Counter
from types import SimpleNamespace
from unittest.mock import patch

import graphs as emulator
import pytest
import test_device_backends
import torch
from engine import V2, after, exactly, random_prompt
from parity import assert_like_oracle, assert_tokens_like_oracle
from parts import sums_of, tokens_of
from test_device_backends import BASE, BLOCK, POLICIES, check_split_heads, distinct_prompt, on, steps_with_views
from vllm import SamplingParams
from vllm.config import CUDAGraphMode
from vllm.v1.worker import cpu_worker
from waits import without_waits

from vllm_evict.compute import tokens
from vllm_evict.compute.attention import decoding

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.minutes,
    pytest.mark.on_triton,
]
FIXTURES = "backend", "server", "view_launches"
backend, server, view_launches = (getattr(test_device_backends, name) for name in FIXTURES)
STOCK = {"triton": "kernel_unified_attention", "fa": "flash_attn_varlen_func"}
OWN = ["_attend", "_combine"]


@pytest.fixture
def replaying(server, graphs, poisoned):
    """Engines with full CUDA graphs, which note each step; memory that was freed is full of NaN. Before and after the
    model runs no call may wait for the device."""

    def make(policy=None, **kwargs):
        subject = server(policy, **{**graphs.options, "max_num_seqs": 4, "enable_prefix_caching": False, **kwargs})
        subject.steps = []
        look = lambda output, *_: subject.steps.append(sorted(output.num_scheduled_tokens.values()))  # noqa: E731
        after(subject.scheduler, "schedule", look)
        if policy is not None:
            for name in ("begin", "end"):
                without_waits(subject.worker.kv_evict, name)
        return subject

    return make


def replays(subject, graphs):
    """By what attends in the graph: (of vLLM's kernel, of the plugin's); and the steps that were decodes."""
    by = {id(graph): type(key).__name__.startswith("Own") for key, graph in graphs.of(subject).items()}
    own = sum(by[id(graph)] for graph in graphs.replayed)
    return len(graphs.replayed) - own, own, sum(set(step) == {1} for step in subject.steps)


#: By block, with what is made of mass: over heads, over layers, of some queries, of the last ones, fading, counted.
MEASURED = {
    "h2o": POLICIES["h2o"],
    "h2o-max": {**POLICIES["h2o"], "heads": "max"},
    "h2o-every": {**POLICIES["h2o"], "every": 3},
    "h2o-ema": {**POLICIES["h2o"], "accumulate": "ema", "decay": 0.8, "heads": "mean"},
    "snapkv": {"name": "snapkv", **BASE, "window": 4},
    "h2o-layers": {**POLICIES["h2o"], "layers": "max"},
    "scissorhands": POLICIES["scissorhands"],
}
#: Those of which a layer's mass is looked at before it is taken in.
BY_LAYER = {"h2o-layers", "scissorhands"}
CASES = [on("triton", "h2o"), on("triton", "sink-window"), on("fa2", "sink-window"), on("fa3", "keydiff")]
CASES += [on("fa3", name) for name in MEASURED if name != "h2o"]
#: What runs on either model runner: V2 has Triton's backend without more, V1 with VLLM_EVICT_TEST_RUNNER=v1-triton.
EITHER = [on("triton") if V2 else on("fa3")]


@pytest.mark.both_runners("triton-h2o")
@pytest.mark.parametrize("backend, name", CASES, indirect=["backend"])
def test_every_decode_is_replayed_and_matches_the_dense_oracle(replaying, graphs, dense, backend, name):
    check_decodes_are_replayed(replaying, graphs, dense, name, STOCK["fa" if backend else "triton"])


def check_decodes_are_replayed(replaying, graphs, dense, name, stock_kernel, beside=False):
    """One prompt longer than the budget, one that outgrows it while it decodes, one that never does."""
    policy = {**POLICIES, **MEASURED}[name]
    subject = replaying(policy if name in MEASURED else {**policy, "allow": []})
    for key, graph in graphs.of(subject).items():
        launched, own = Counter(graph.names), type(key).__name__.startswith("Own")
        assert launched[stock_kernel] == (0 if own and not beside else 2)
        assert [launched[kernel] for kernel in OWN] == ([2, 2] if own and not beside else [0, 0])
        assert launched["_mass_from_lse"] == (2 if own and beside else 0)
        assert launched["_take"] == (2 if own and (name in BY_LAYER or beside) else 0)
    assert len(graphs.captured) == (6 if name in MEASURED else 3), "sizes 1, 2 and 4"
    lengths = [(100, 17), (61, 14), (20, 26)]
    requests = [(random_prompt(length), {"max_tokens": tokens, "logprobs": 0}) for length, tokens in lengths]
    outputs, traces = subject.traced(requests)
    stock, own, decodes = replays(subject, graphs)
    assert stock + own == decodes > 20
    alone = sum(step == [1] for step in subject.steps)
    assert (stock, own) == ((alone, decodes - alone) if name in MEASURED else (decodes, 0)) and alone
    evicted = []
    for (prompt, _), output, trace in zip(requests, outputs, traces):
        evicted.append(assert_like_oracle(dense, prompt, output, trace, policy, block_size=BLOCK))
    assert evicted[0] > 0 and evicted[1] > 0 and not evicted[2]
    subject.assert_nothing_left()


@pytest.mark.both_runners("triton")
@pytest.mark.parametrize("backend", [on("triton"), on("fa3")], indirect=True)
def test_split_heads_are_decoded_by_one_call_in_a_graph(replaying, graphs, dense, tmp_path, view_launches, backend):
    """Before each replay one launch makes the views of both classes."""
    subject, trace = check_split_heads(replaying, dense, tmp_path)
    for key, graph in graphs.of(subject).items():
        launched, own = Counter(graph.names), type(key).__name__.startswith("Own")
        assert launched["_attend_classes"] == launched["_combine_classes"] == (2 if own else 0)
    decodes = sum(count == 1 for count in trace.steps)
    assert replays(subject, graphs) == (0, decodes, decodes) and decodes > 10
    assert view_launches == [(1, 2)] * (1 + steps_with_views(trace, decodes=True)), "the first compiles it"


@pytest.mark.both_runners
@pytest.mark.parametrize("backend", EITHER, indirect=True)
def test_decodes_by_token_are_replayed(replaying, graphs, dense, backend):
    """Two requests that are measured, one of which loses tokens while it decodes, and one that is not."""
    policy = {**POLICIES["h2o"], "granularity": "token", "allow": ["keydiff"]}
    subject = replaying(policy)
    for key, graph in graphs.of(subject).items():
        launched, own = Counter(graph.names), type(key).__name__.startswith("Own")
        assert [launched[kernel] for kernel in (*OWN, "_put", "_take")] == ([2, 2, 2, 0] if own else [0, 0, 0, 0])
    named = [("h2o", 100, 14), ("h2o", 50, 6), ("keydiff", 94, 5)]
    requests = [
        (distinct_prompt(length), {"max_tokens": count, "logprobs": 0, "extra_args": {"kv_policy": name}})
        for name, length, count in named
    ]
    outputs, traces = subject.traced(requests)
    decided = []
    for (name, *_), (prompt, _), output, trace in zip(named, requests, outputs, traces):
        (request,) = assert_tokens_like_oracle(dense, prompt, output, trace, {**policy, "name": name}, block_size=BLOCK)
        decided.append(len(request.kept))
    assert decided[0] > 1
    stock, own, decodes = replays(subject, graphs)
    assert not stock and own == decodes > 6
    subject.assert_nothing_left()


@pytest.mark.both_runners("scissorhands-triton")
@pytest.mark.parametrize("backend", EITHER, indirect=True)
@pytest.mark.parametrize("name", [*sorted(BY_LAYER), "token"])
def test_decisions_go_by_the_numbers_that_steps_without_graphs_measure(replaying, graphs, backend, name):
    """Which tokens go may not show it. Most queries of this request are decodes."""
    policy, told = MEASURED.get(name, {**POLICIES["h2o"], "granularity": "token"}), []
    subject = replaying(policy)
    sums = (tokens_of if name == "token" else sums_of)(subject.runtime)
    judge, report = sums.judge if name == "token" else None, sums.report

    def judged(req_id, number):
        judge(req_id, number)
        told.append(sums._judged[req_id][number].clone())

    def reported(*args):
        reports = report(*args)
        told.extend(torch.from_numpy(values) for each in reports.values() for values in each.statistics.values())
        return reports

    sums.judge, sums.report = judged, reported

    def run():
        told.clear()
        subject.generate([distinct_prompt(50)], max_tokens=34)
        return list(told)

    with graphs.without(subject):
        want = run()
    assert not graphs.replayed
    got = run()
    assert len(graphs.replayed) == 33 and len(got) == len(want) > 1
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.both_runners
@pytest.mark.parametrize("backend", [on("triton") if V2 else on("fa2")], indirect=True)
def test_full_is_stock_to_the_byte(replaying, graphs, backend):
    check_full_is_stock(replaying, graphs)


def check_full_is_stock(replaying, graphs):
    """So is a budget that covers the sequence, whose requests are not measured."""
    prompts, found = [random_prompt(40), random_prompt(20, 1)], []
    for policy in (None, {"name": "full"}, {"name": "h2o", **BASE, "budget": 256}):
        subject = replaying(policy)
        outputs = subject.generate(prompts, max_tokens=6, logprobs=0)
        found.append(exactly(outputs))
        assert replays(subject, graphs) == (5, 0, 5)
        graphs.replayed.clear()
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("backend", EITHER, indirect=True)
def test_mass_beside_a_kernel_of_vllm_s(replaying, graphs, dense, backend, monkeypatch):
    """Where the plugin's kernel attends to nothing, a graph of vLLM's kernel measures."""
    monkeypatch.setenv("VLLM_EVICT_DECODE", "stock")
    check_decodes_are_replayed(replaying, graphs, dense, "h2o", STOCK["triton" if V2 else "fa"], beside=True)


class TestNotInAGraph:
    """A step that full graphs can't hold runs without one, and gives what it should."""

    @pytest.mark.both_runners
    @pytest.mark.parametrize("backend", EITHER, indirect=True)
    def test_queries_that_the_server_s_own_policy_does_not_test(self, replaying, graphs, dense, backend):
        subject = replaying({**POLICIES["h2o"], "allow": ["scissorhands"]})
        request = {"extra_args": {"kv_policy": "scissorhands"}}
        self.check(subject, graphs, dense, {**POLICIES["scissorhands"], "window": 256}, replayed=0, **request)

    @pytest.mark.parametrize("backend", EITHER, indirect=True)
    def test_requests_that_the_graphs_scratch_has_no_room_for(self, replaying, graphs, dense, backend, monkeypatch):
        """Four blocks: a request that holds five or six is decoded without graphs, in larger scratch, until it has lost
        some.
        """
        monkeypatch.setattr(decoding, "MASS_SCRATCH", 4 * 4 * 4 * dense.heads)
        policy = {**POLICIES["h2o"], "buffer": 16}
        subject = replaying(policy)
        assert subject.runtime.shape.graph_tokens == 64
        self.check(subject, graphs, dense, policy, replayed=None)

    def check(self, subject, graphs, dense, policy, replayed, **request):
        prompt = random_prompt(76)
        (output,), (trace,) = subject.traced([(prompt, {"max_tokens": 26, "logprobs": 0, **request})])
        assert assert_like_oracle(dense, prompt, output, trace, policy, block_size=BLOCK) > 0
        stock, own, decodes = replays(subject, graphs)
        assert not stock and decodes == 25
        assert own == replayed if replayed is not None else 0 < own < decodes
        subject.assert_nothing_left()

    @pytest.mark.parametrize("backend", EITHER, indirect=True)
    def test_sums_by_token_that_had_to_grow(self, replaying, graphs, dense, backend, monkeypatch):
        """From then on; the log says so once."""
        hold, said = tokens.TokenSums.allocate, []
        monkeypatch.setattr(tokens.TokenSums, "allocate", lambda sums, blocks: hold(sums, 6))
        monkeypatch.setattr(tokens.logger, "warning", said.append)
        policy = {**POLICIES["h2o"], "granularity": "token"}
        subject = replaying(policy)
        for prompt in (distinct_prompt(66, 1), distinct_prompt(100)):
            (output,), (trace,) = subject.traced([(prompt, {"max_tokens": 4, "logprobs": 0})])
            assert assert_tokens_like_oracle(dense, prompt, output, trace, policy, block_size=BLOCK)
            assert replays(subject, graphs)[:2] == (0, 3), "the first one's"
        (line,) = said
        assert line.startswith("Requests share so many blocks")


class TestDataParallelRanks:
    """Ranks of a mixture of experts agree on each step's size and mode. Here the other rank is made up."""

    @pytest.fixture
    def agreeing(self, replaying, graphs, monkeypatch):
        """Engines that agree with another rank, which says so many tokens, of such a mode, and how many a request.

        Step by step, `votes` are their own, `agreed` the modes that came out, `views` the graphs that views were made for.
        """

        def make(policy, others, **kwargs):
            subject = replaying(policy, **kwargs)
            subject.votes, subject.agreed, others = [], [], iter(others)

            def exchange(tokens, mode, uniform):
                other = next(others)
                subject.votes.append((tokens, CUDAGraphMode(mode), uniform))
                subject.agreed.append(CUDAGraphMode(min(mode, other[1].value)))
                return other

            (self.exchange_on_v2 if V2 else self.exchange_on_v1)(exchange, monkeypatch)
            subject.worker.vllm_config.parallel_config.data_parallel_size = 2
            subject.views, view = [], subject.runtime.view
            subject.runtime.view = lambda metadata: subject.views.append(subject.runtime.batch.graph) or view(metadata)
            return subject

        return make

    @staticmethod
    def exchange_on_v2(exchange, monkeypatch):
        from vllm.v1.worker.gpu import dp_utils

        def all_reduce(votes, group):
            tokens, mode, uniform = exchange(*votes[:3, 0].tolist())
            votes[:3, 1] = torch.tensor([tokens, mode.value, uniform])
            votes[3:, 1] = votes[3:, 0]

        monkeypatch.setattr(dp_utils, "get_dp_group", lambda: SimpleNamespace(cpu_group=None))
        monkeypatch.setattr(dp_utils.dist, "all_reduce", all_reduce)

    @staticmethod
    def exchange_on_v1(exchange, monkeypatch):
        from vllm.v1.worker import gpu_model_runner

        def coordinate(num_tokens_unpadded, num_tokens_padded, uniform_decode, cudagraph_mode, **_):
            tokens, mode, _ = exchange(num_tokens_padded, cudagraph_mode, int(uniform_decode))
            mode = min(mode.value, cudagraph_mode)
            count = max(tokens, num_tokens_padded) if mode else num_tokens_padded
            return False, torch.tensor([count, count]), mode

        monkeypatch.setattr(gpu_model_runner, "coordinate_batch_across_dp", coordinate)

    def check(self, subject, graphs, dense, policy):
        """All steps ran as agreed, and as if there were no other rank."""
        prompt, replayed = random_prompt(76), []
        note = lambda _: replayed.append(len(graphs.replayed))  # noqa: E731
        (output,), (trace,) = subject.traced([(prompt, {"max_tokens": 12, "logprobs": 0})], note)
        assert assert_like_oracle(dense, prompt, output, trace, policy, block_size=BLOCK) > 0
        full = [after > before for before, after in zip([0, *replayed], replayed)]
        assert full == [mode == CUDAGraphMode.FULL for mode in subject.agreed]
        assert [graph is not None for graph in subject.views] == full
        return full

    @pytest.mark.both_runners
    @pytest.mark.parametrize("backend", EITHER, indirect=True)
    def test_padded_to_the_larger_rank_s_size(self, agreeing, graphs, dense, backend):
        policy, full = POLICIES["h2o"], CUDAGraphMode.FULL
        subject = agreeing(policy, itertools.repeat((4, full, 1)))
        assert sum(self.check(subject, graphs, dense, policy)) == 11
        sizes = {id(graph): key.num_tokens for key, graph in graphs.of(subject).items()}
        assert {sizes[id(graph)] for graph in graphs.replayed} == {4}

    @pytest.mark.both_runners
    @pytest.mark.parametrize("backend", EITHER, indirect=True)
    def test_without_graphs_where_the_other_rank_needs_it(self, agreeing, graphs, dense, backend):
        policy, none, full = POLICIES["h2o"], CUDAGraphMode.NONE, CUDAGraphMode.FULL
        subject = agreeing(policy, itertools.cycle([(40, none, 0), (1, full, 1), (1, full, 1)]))
        assert 5 < sum(self.check(subject, graphs, dense, policy)) < 11

    @pytest.mark.both_runners
    @pytest.mark.parametrize("backend", EITHER, indirect=True)
    def test_what_fits_no_graph_is_voted_for_as_that(self, agreeing, graphs, dense, backend, monkeypatch):
        monkeypatch.setattr(decoding, "MASS_SCRATCH", 4 * 4 * 4 * dense.heads)
        policy = {**POLICIES["h2o"], "buffer": 16}
        subject = agreeing(policy, itertools.repeat((1, CUDAGraphMode.FULL, 1)))
        assert 0 < sum(self.check(subject, graphs, dense, policy)) < 11
        if V2:  # what all ranks dispatch by, once they know it of each other
            assert all((uniform == 1) == (mode == CUDAGraphMode.FULL) for _, mode, uniform in subject.votes)


@pytest.mark.parametrize("backend", EITHER, indirect=True)
def test_a_crowd_of_policies_gets_the_same_with_and_without(replaying, graphs, backend, monkeypatch):
    """Requests of several policies come and go, share a prefix, are preempted and aborted, in batches of all sizes."""
    subject = replaying({**POLICIES["h2o"], "allow": ["sink-window", "full"]}, enable_prefix_caching=True)
    policies, prefix = ["h2o", "sink-window", "full", "h2o"], random_prompt(32, 9)
    prompts = [(prefix if i % 2 else []) + random_prompt(30 + 20 * (i % 4), i) for i in range(6)]

    preempted, preempt = [], subject.scheduler._preempt_request
    monkeypatch.setattr(
        subject.scheduler,
        "_preempt_request",
        lambda *args, **kwargs: preempted.append(args) or preempt(*args, **kwargs),
    )

    def run():
        done = {}
        ids = [
            subject.add(prompt, max_tokens=8 + 3 * (i % 4), extra_args={"kv_policy": policies[i % 4]})
            for i, prompt in enumerate(prompts)
        ]
        for step in range(300):
            if step == 9:
                subject.llm.llm_engine.abort_request([ids[1]])
            if step == 13:
                assert subject.llm.reset_prefix_cache(reset_running_requests=True)
            for output in subject.llm.llm_engine.step():
                if output.finished:
                    done[output.request_id] = output.outputs[0].token_ids, output.kv_usage.evicted_blocks
            if not subject.llm.llm_engine.has_unfinished_requests():
                break
        subject.assert_nothing_left()
        assert subject.llm.reset_prefix_cache()
        return [done.get(each) for each in ids]

    with graphs.without(subject):
        want = run()
    assert not graphs.replayed and preempted and sum(evicted for each in want if each for evicted in each[1:]) > 3
    assert run() == want
    assert len(set(map(id, graphs.replayed))) > 1 and replays(subject, graphs)[1] > 10


@pytest.mark.both_runners
@pytest.mark.parametrize("backend", EITHER, indirect=True)
def test_graphs_are_profiled_before_the_cache_is_there(replaying, graphs, dense, tmp_path, monkeypatch, backend):
    """Capture as a GPU's worker does, with a cache of a few blocks that goes again. What graphs share is there before
    that, so that it does not look like the price of each, and stays.
    """
    available, there = cpu_worker.CPUWorker.determine_available_memory, []

    def shared(runtime):
        memory = (group.graph_rows for group in runtime.groups)
        views = (view.table.data_ptr() for group in runtime.groups for view in [runtime.views.memory(group)])
        return [runtime.ops.scratch._memory.data_ptr(), *(each.rows.data_ptr() for each in memory), *views]

    def profiling(worker):
        there.append(shared(worker.kv_evict))
        found = available(worker)
        with patch.object(emulator, "made_up", True):
            worker.model_runner.profile_cudagraph_memory()
        return found

    monkeypatch.setattr(cpu_worker.CPUWorker, "determine_available_memory", profiling)
    subject, _ = check_split_heads(replaying, dense, tmp_path)
    assert there == [shared(subject.worker.kv_evict)] and replays(subject, graphs)[1] > 0


@pytest.mark.both_runners
@pytest.mark.skipif(not V2, reason="Model Runner V2's")
@pytest.mark.parametrize("backend", [on("triton")], indirect=True)
def test_steps_that_vllm_makes_up_before_requests_come(replaying, graphs, backend):
    """A GPU's worker runs prefills and decodes without a scheduler, and so without a plan, after graphs are captured."""
    from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup, warmup_kernels

    subject = replaying(POLICIES["h2o"])
    # The interpreter can't run some of the sampler's kernels.
    run = subject.worker.model_runner, subject.worker.execute_model, lambda _: subject.worker.sample_tokens(None)
    with patch.object(SamplingParams, "for_sampler_warmup", lambda: SamplingParams(temperature=0.0)):
        warmup_kernels(*run)
    assert run_mixed_prefill_decode_warmup(*run, 40)
    assert len(graphs.replayed) == 3 and replays(subject, graphs)[:2] == (3, 0)
    (output,) = subject.generate([random_prompt(90)], max_tokens=3)
    assert output.kv_usage.evicted_blocks > 0
    subject.assert_nothing_left()
