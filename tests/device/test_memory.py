"""Device memory beside vLLM's KV cache: what is set aside before the pool is sized covers what requests then take."""

import gc
from types import SimpleNamespace

import graphs
import numpy as np
import pytest
import test_device_backends
import torch
from engine import random_prompt
from parts import batch_of, part_of, sums_of, tokens_of
from test_device_backends import BASE, POLICIES, distinct_prompt, on
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_evict.compute import cached, compaction, measure, memory
from vllm_evict.compute.attention import decoding
from vllm_evict.compute.compaction import Compactor
from vllm_evict.compute.group import GroupRuntime
from vllm_evict.compute.mass import BlockMass
from vllm_evict.compute.memory import Needs
from vllm_evict.compute.needs import AT_A_TIME, OF_DIMENSION
from vllm_evict.compute.shape import Shape
from vllm_evict.compute.tokens import TokenSums
from vllm_evict.compute.work import StepWork
from vllm_evict.config import KVPolicyConfig
from vllm_evict.core.plan import Scoring
from vllm_evict.features.context import worker as originals
from vllm_evict.integration.worker import layers, runners, worker

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"), pytest.mark.on_triton]
backend, server = (getattr(test_device_backends, name) for name in ("backend", "server"))
BACKENDS = [on("triton"), on("fa3")]
TOKEN = {**BASE, "granularity": "token"}
CASES = {
    "h2o": POLICIES["h2o"],
    "h2o-max": {**POLICIES["h2o"], "heads": "max", "layers": "max"},
    "scissorhands": {**POLICIES["scissorhands"], "allow": []},
    "keydiff": {**POLICIES["keydiff"], "allow": []},
    "rkv": {"name": "rkv", **BASE, "window": 8, "allow": []},
    "context": {"name": "sink-window", **BASE, "context": 144, "allow": []},
    "tokens": {"name": "h2o", **TOKEN, "accumulate": "mean", "allow": []},
    "merged": {"name": "h2o", **TOKEN, "merge": "d2o", "allow": []},
    "token-keys": {"name": "keydiff", **TOKEN, "allow": []},
}


class Peak(TorchDispatchMode):
    """Bytes that ops allocate within it, at most, and that are still there when the next op runs.

    Attributes:
        most: so far.
    """

    def __init__(self):
        super().__init__()
        self.most, self._there = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {
            each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
        }
        results = func(*args, **(kwargs or {}))
        for each in tree_leaves(results):
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in before:
                storage = each.untyped_storage()
                self._there.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self._there = {key: found for key, found in self._there.items() if not found[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._there.values()))
        return results


def reachable(start):
    """Bytes of all tensors that the plugin's objects hold, through each other and their containers."""
    seen, storages, waiting = set(), {}, [start]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        elif isinstance(each, dict):
            waiting.extend(each.values())
        elif isinstance(each, (list, tuple, set)):
            waiting.extend(each)
        elif type(each).__module__.startswith("vllm_evict.") and not isinstance(each, type):
            waiting.extend(getattr(each, "__dict__", {}).values())
            waiting.extend(getattr(each, name) for name in getattr(type(each), "__slots__", ()))
    return sum(storages.values())


@pytest.mark.both_runners("h2o-triton")
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize("name", CASES)
def test_what_is_set_aside_covers_what_requests_take(server, monkeypatch, name):
    """While layers run, in between, and from step to step; a pool's worth of pages is enough."""
    for method, in_place in graphs._IN_PLACE.items():  # the interpreter's own copies are no memory of ours
        monkeypatch.setattr(GridExecutor, method, in_place)
    # Constants that would hide all else in a model as small as this.
    for module in (cached, compaction):
        monkeypatch.setattr(module, "AT_A_TIME", 1 << 16)
    monkeypatch.setattr(measure, "PIVOT_SCRATCH", 1 << 16)
    monkeypatch.setattr(originals, "TURNED", 64)
    # The host's memory, which is none of the device's.
    monkeypatch.setattr(originals, "stashed", lambda tensor: tensor.numpy().copy())
    monkeypatch.setattr(originals, "restored", lambda arrays, device: torch.tensor(np.stack(arrays), device=device))
    subject = server(CASES[name], max_num_seqs=4)
    runtime, needs = subject.worker.kv_evict, subject.worker._needs
    (group,) = runtime.groups
    kept = memory.kept_bytes(runtime)
    assert kept == reachable(runtime) > decoding.SPLIT_SCRATCH * (name not in ("keydiff", "token-keys", "context"))
    between, step, held = Peak(), Peak(), [0]

    def measured(where, peak, method):
        run = getattr(where, method)

        def noted(*args):
            with peak:
                return run(*args)

        monkeypatch.setattr(where, method, noted)

    for method in ("rearrange", "end"):
        measured(runtime, between, method)
    measured(group, step, "view")
    do = StepWork.do

    def doing(*args):
        with step:
            do(*args)

    monkeypatch.setattr(StepWork, "do", doing)

    def note(_):
        gc.collect()
        runtime.views.tables = ()  # vLLM's own, of the step
        taken = reachable(runtime) - kept
        addresses = 8 * group.shape.layers  # of layers whose tokens have moved
        most = needs.block * len(subject.held_blocks()) + needs.step + addresses
        assert taken <= most, f"{taken} bytes beside {kept}, at most {most}"
        held.append(taken)

    prompt = distinct_prompt if part_of(group, Compactor) else random_prompt
    requests = [(prompt(length, seed), {"max_tokens": 8}) for seed, length in enumerate((100, 70, 20))]
    _, traces = subject.traced(requests, note)
    assert any(map(len, traces[0].evicted))
    assert 0 < between.most <= needs.between + needs.block * group.shape.held_blocks
    assert step.most <= needs.step + (1 << 14), "indices beside it"
    # A step of the largest batch, all as long as a request may be, which these were not.
    full, mass = (group.shape.max_requests, group.shape.held_blocks), 0
    if (sums := sums_of(group)) is not None:
        tests = part_of(group, BlockMass)._tests
        buffers = sums.buffers(*full, torch.zeros(4), None, tests)
        mass += buffers.mass.nbytes + (0 if buffers.layer is None else buffers.layer.nbytes)
        mass += group.shape.queries * (3 if tests else 1) + measure.PIVOT_SCRATCH * tests
    if (tokens := tokens_of(group)) is not None:
        mass += tokens.token_buffers(*full, 1).mass.nbytes
    assert mass <= needs.step
    if tokens is not None:
        assert not tokens.outgrown and tokens.pages == min(subject.pool.num_gpu_blocks, 4 * group.shape.held_blocks)
    subject.assert_nothing_left()


def test_needs_of_a_decision_follow_from_the_heads_of_a_layer():
    """Statistics of keys are computed layer by layer, so the number of layers adds nothing."""
    store = SimpleNamespace(read=None, kept_bytes=0)
    for count in (2, 40):
        group = GroupRuntime(
            KVPolicyConfig.parse(CASES["keydiff"]), Shape(16, 2, 256, 8, count, head_size=64, itemsize=2), store
        )
        keys = group.shape.held_blocks * 16 * 8 * 64
        needs = memory.needs([group])
        assert needs.between == keys * (2 * 2 + OF_DIMENSION) + AT_A_TIME


def test_the_share_of_the_pool():
    """So many blocks that they and what is kept of each fit; no more than requests can hold."""
    assert Needs().left(1000, 7) == 1000
    left = Needs(block=3, blocks=10**6).left(10**9, 97)
    assert 10**9 - 3 * (10**7 + 1) <= 10**9 - 3 * 10**6 == left
    left = Needs(block=3, blocks=10**8).left(10**9, 97)
    blocks = left // 97
    assert blocks * (97 + 3) <= 10**9 and (blocks + 2) * (97 + 3) > 10**9


@pytest.mark.both_runners("triton")
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_vllm_is_told_before_it_sizes_its_pool(server, monkeypatch):
    """Pages for sums by token come out of the pool's memory, all else is there, or taken, while vLLM measures."""
    available, order = CPUWorker.determine_available_memory, []

    def profiled(self):
        order.append(("profiled", self.kv_evict.ops.scratch._memory is not None))
        peak = Peak()
        with peak:
            self.model_runner.profile_run(1)
        order.append(peak.most)
        return available(self)

    profile = lambda *args: order.append(("ran", *args))  # noqa: E731
    monkeypatch.setattr(CPUWorker, "determine_available_memory", profiled)
    get = runners.profiling

    def profiling(runner, step, between, where):
        runner.profile_run = profile
        return get(runner, step, between, where)

    monkeypatch.setattr(worker.runners, "profiling", profiling)
    said = []
    monkeypatch.setattr(worker.logger, "info", lambda line, *args: said.append(line % args if args else line))
    subject = server(CASES["tokens"], max_num_seqs=4)
    needs = subject.worker._needs
    assert order == [("profiled", True), ("ran", 1), max(needs.step, needs.between)]
    (told,) = (line for line in said if "set aside" in line)
    runtime, tokens = subject.worker.kv_evict, tokens_of(subject.runtime)
    blocks = tokens.pages
    kept = memory.kept_bytes(runtime) + needs.block * blocks - 4 * tokens._pages.numel()
    sizes = [-(-size // memory.MIB) for size in (kept, needs.block * blocks)]
    assert "{} MiB of device memory are set aside beside the KV cache, {} MiB of them".format(*sizes) in told
    assert f"scores by token of {blocks} blocks" in told
    specs = subject.worker.get_kv_cache_spec()
    page = layers.block_bytes(runtime, specs)
    assert page == sum(cache.nbytes for cache in subject.worker.model_runner.kv_caches) // subject.pool.num_gpu_blocks
    assert needs.left(256 << 20, page) < 256 << 20


def test_pages_that_run_out_are_added():
    """Requests that share blocks have sums of their own for each, so there may be more than the pool has blocks."""
    sums = TokenSums(2, 1, 1, 16, 100)
    sums.allocate(3)
    assert sums.pages == 3 and not sums.outgrown
    for req_id in ("a", "b"):
        sums.start(req_id, Scoring("sum", 0.0, 0, 1, 9, per_token=True))
    starts = torch.arange(3).numpy()
    for length in (16, 48):
        lens = torch.full((2,), length, dtype=torch.int32).numpy()
        sums.token_step(batch_of(["a", "b"], starts, lens, torch.from_numpy(lens), held=lens))
        assert sums.outgrown == (length > 16)
    assert 6 <= sums.pages <= 3 + 16 + 16


def test_what_a_step_takes_is_held_while_vllm_s_own_runs():
    """Memory that is taken in between is there when that has ended."""

    class Runner:
        def profile_run(self, randomize_inputs=False):
            torch.empty(100 + randomize_inputs, dtype=torch.uint8)

    runner, most = Runner(), []
    for step, between in ((1000, 300), (200, 700)):
        with runners.profiling(runner, step, between, torch.device("cpu")), Peak() as peak:
            runner.profile_run(randomize_inputs=True)
        most.append(peak.most)
    assert most == [1101, 700] and vars(runner) == {}
