"""Division of a step's attention: the requests that `decode_mass` computes, and those that stay with the stock kernel."""

import numpy as np
import pytest
import torch
from parts import batch_of
from test_mass import needs_extension

from vllm_evict.compute.attention import cpu
from vllm_evict.compute.attention.ops import BatchMetadata
from vllm_evict.compute.kernels.decode import decode_mass
from vllm_evict.compute.probes import LayerCall
from vllm_evict.compute.sums import RunningSums
from vllm_evict.compute.work import StepWork
from vllm_evict.core.plan import Scoring


def work_of(rows, q_lens, weights=None, lens=None):
    starts = np.concatenate(([0], np.cumsum(q_lens))).astype(np.int32)
    lens = torch.tensor(lens or [50] * len(q_lens), dtype=torch.int32)
    sums = RunningSums(4, 1, 1, 8, 32, "sum", "sum")
    logical = torch.arange(8, dtype=torch.int32).expand(len(q_lens), 8)
    mass = None
    if weights is not None:
        for name in weights:
            sums.start(name, Scoring("sum", 0.9, 1, 1, 100))
        mass = sums.step(batch_of([f"r{i}" for i in range(len(q_lens))], starts, lens.numpy(), lens, logical))
    return StepWork([] if mass is None else [mass], np.array(rows, np.int64), np.diff(starts), lens)


class Recorder:
    batch = BatchMetadata()

    def __init__(self):
        self.calls = []

    def mass(self, call, measured):
        each = measured.weights, measured.last
        self.calls.append(("mass", *(None if its is None else its.tolist() for its in each)))

    def mass_of(self, call, queries, width):
        self.calls.append(("mass_of", queries.tokens.tolist()))

    def decode(self, call, rows, seq_lens, measured):
        weights = None if measured.weights is None else measured.weights.tolist()
        self.calls.append(("decode", rows.tolist(), weights, measured.out is not None))


@pytest.mark.parametrize(
    ("rows", "q_lens", "measured", "is_all", "calls"),
    [
        ([0, 1], [1, 1], None, True, [("decode", [0, 1], None, False)]),
        ([0, 1], [1, 1], ["r0", "r1"], True, [("decode", [0, 1], None, True)]),
        ([0, 1], [1, 1], ["r1"], True, [("decode", [0, 1], [0, 1], True)]),
        ([1], [3, 1], ["r0", "r1"], False, [("decode", [1], None, True), ("mass", [1, 1, 1, 0], None)]),
        ([], [3, 1], ["r0", "r1"], False, [("mass", None, None)]),
        ([], [3, 2], ["r1"], False, [("mass", [0, 0, 0, 1, 1], [0, 2])]),
        ([1], [1, 1], None, False, [("decode", [1], None, False)]),
        ([0, 1], [3, 1], ["r0", "r1"], True, [("decode", [0, 1], None, True)]),
        ([0, 1], [3, 1], ["r0"], True, [("decode", [0, 1], [1, 1, 1, 0], True)]),
        ([0], [3, 2], ["r0", "r1"], False, [("decode", [0], None, True), ("mass", [0, 0, 0, 1, 1], None)]),
    ],
)
def test_work_is_divided(rows, q_lens, measured, is_all, calls):
    work, recorder = work_of(rows, q_lens, measured), Recorder()
    work.do(LayerCall(recorder, None, 0, torch.zeros(sum(q_lens), 2, 16), torch.zeros(1, 1, 16, 32), None))
    assert recorder.calls == calls and work.is_all == is_all
    assert work.stock_lens.tolist() == [length if row in rows else 50 for row, length in enumerate(q_lens)]


@needs_extension
@pytest.mark.parametrize("exact", [False, True])
def test_measured_requests_leave_the_stock_kernel(engine, monkeypatch, exact):
    """A request that may lose blocks is ours from its first token on; with `exact`, from its first hole on."""
    seen = []

    def watched(*args, **options):
        seen.append((args[1].tolist(), args[0].query_start_loc.diff().tolist()))
        return decode_mass(*args, **options)

    monkeypatch.setattr(cpu, "decode_mass", watched)
    server = engine({"name": "h2o", "budget": 96, "buffer": 32, "sink": 32, "recent": 32, "exact": exact})
    assert server.runtime.decodes
    server.generate([range(1, 40)], max_tokens=20)
    assert not seen
    server.generate([range(100, 199)], max_tokens=60)
    # 129 tokens are more than four blocks: the query at position 129 is the first over holes, that at 157 the last.
    layers = 2
    if exact:
        assert seen == [([0], [1])] * layers * (158 - 129)
    else:
        assert seen == [([0], [99])] * layers + [([0], [1])] * layers * (158 - 99)


@needs_extension
def test_prompts_beside_requests_that_are_not_measured_stay_with_the_stock_kernel(engine, monkeypatch):
    """vLLM's kernel cannot skip a prompt's queries, so it computes all prompts of such a step."""
    seen = []

    def watched(*args, **options):
        seen.append(args[0].query_start_loc.diff()[args[1].long()].tolist())
        return decode_mass(*args, **options)

    monkeypatch.setattr(cpu, "decode_mass", watched)
    policy = {"name": "h2o", "budget": 96, "buffer": 32, "sink": 32, "recent": 32, "exact": False, "allow": ["full"]}
    server = engine(policy)
    asked = [(range(1, 100), {"extra_args": {"kv_policy": "full"}}), (range(1, 100), {})]
    server.answered([(prompt, {"max_tokens": 60, **options}) for prompt, options in asked])
    assert seen and {length for lengths in seen for length in lengths} == {1}


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_each_row_is_attended_for_once_though_two_sums_measure(reduce):
    """Sums of one form share a call; else each has a call for its own rows, and the first one for the others too."""
    starts, lens = np.arange(4, dtype=np.int32), torch.full((3,), 50, dtype=torch.int32)
    logical, steps, ops = torch.arange(8, dtype=torch.int32).expand(3, 8), [], Recorder()
    sums = RunningSums(4, 2, 1, 8, 32, reduce, "sum"), RunningSums(1, 2, 1, 8, 32, "sum", "sum")
    for each, name in zip(sums, ("r0", "r2")):
        each.start(name, Scoring("sum", 0.9, 1, 1, 100))
        steps.append(each.step(batch_of(["r0", "r1", "r2"], starts, lens.numpy(), lens, logical)))
    joined = steps[0].joins(steps[1])
    assert joined is (reduce == "sum")
    work = StepWork(steps[:1] if joined else steps, np.arange(3), np.ones(3, np.int32), lens)
    work.do(LayerCall(ops, None, 0, torch.zeros(3, 2, 4), torch.zeros(1, 1, 16, 8), None))
    if joined:
        assert ops.calls == [("decode", [0, 1, 2], [1, 0, 1], True)]
        steps[0].mass[:, 0] = torch.arange(3.0)[:, None]
        for each, step in zip(sums, steps):
            each.fold(step)
        assert [each._sums[each._slots[name], 0, 0] for each, name in zip(sums, ("r0", "r2"))] == [0, 2]
    else:
        assert sorted(ops.calls) == [("decode", [0, 1], [1, 0, 0], True), ("decode", [2], [0, 0, 1], True)]
