"""Full CUDA graphs without a GPU (graphs.py): those of stock vLLM give what it gives without, and they are as strict."""

from collections import Counter
from unittest.mock import patch

import numpy as np
import pytest
import test_device_backends
import torch
import triton
import triton.language as tl
from engine import exactly, random_prompt
from graphs import CaptureError, Graph, capture, kernel
from test_device_backends import on
from vllm.model_executor.models.llama import LlamaAttention
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"), pytest.mark.on_triton]
backend, server = test_device_backends.backend, test_device_backends.server


@pytest.mark.parametrize(
    "backend, write, attend",
    [
        on("triton", "reshape_and_cache_kernel_flash", "kernel_unified_attention"),
        on("fa3", "reshape_and_cache_flash", "flash_attn_varlen_func"),
    ],
    indirect=["backend"],
)
def test_decode_steps_are_replayed_to_the_byte(server, graphs, backend, write, attend):
    """Three requests, in a graph of four, then two, then one."""
    subject = server(**graphs.options, enable_prefix_caching=False, max_num_seqs=4)
    assert sorted(graphs.of(subject).values(), key=id) == sorted(graphs.captured, key=id)
    for descriptor, graph in graphs.of(subject).items():
        launched = Counter(graph.names)
        assert launched[write] == launched[attend] == 2, "one a layer"
        assert launched["reduce_segments"] == (2 if backend is None and descriptor.num_tokens == 1 else 0)

    def run():
        # From 14 tokens on: a second block of 16 comes in between.
        ids = [subject.add(random_prompt(14, seed), max_tokens=3 + 2 * seed, logprobs=0) for seed in range(3)]
        with patch.object(LlamaAttention, "forward", autospec=True, side_effect=LlamaAttention.forward) as forward:
            done = subject.run()
        return [done[each] for each in ids], forward.call_count

    with graphs.without(subject):
        stock, calls = run()
    assert not graphs.replayed and calls == 2 * 7
    replayed, calls = run()
    assert calls == 2, "only the prompts' step runs the model's code"
    assert exactly(replayed) == exactly(stock)
    assert {key.num_tokens: graph.replays for key, graph in graphs.of(subject).items()} == {4: 2, 2: 2, 1: 2}
    assert len(graphs.replayed) == 6
    if backend is not None:
        assert backend.attended == backend.scheduled, "every schedule reached its replay"


@pytest.mark.parametrize("backend", [on("fa3")], indirect=True)
def test_metadata_that_a_step_allocates_is_found(server, graphs, monkeypatch):
    """The builder's schedules go to memory of its own, which is why replays find them."""
    monkeypatch.setattr(FlashAttentionMetadataBuilder, "_store_scheduler_metadata", lambda _, metadata: metadata)
    subject = server(**graphs.options)
    with pytest.raises(CaptureError, match="memory of flash_attn_varlen_func: .* is gone"):
        subject.generate([random_prompt(20)], max_tokens=2)


@triton.jit
def add(out, x, number, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at) + number)


def captured(function):
    graph = Graph()
    with torch.inference_mode(), capture(graph):
        function()
    return graph


@pytest.fixture
def x():
    return torch.arange(4.0)


def test_replays_launch_again_what_was_launched(x):
    """Ops, Triton kernels and stand-ins, on memory of the graph's and from outside; views are not launched."""
    out, number = torch.zeros(4), 2

    @kernel
    def double(x):
        return x.clone().mul_(2)

    def function():
        between = torch.empty_like(x)
        add[lambda meta: (number,)](between, x, number, SIZE=2)
        out[:2] = double(between.view(2, 2)).sum(1)

    graph = captured(function)
    assert graph.names == ["add", "double", "aten.sum.dim_IntList", "aten.copy_"]
    assert out.tolist() == [0, 0, 0, 0] and graph.replays == 0, "a capture runs nothing"
    number = 1
    x += 10
    graph.replay()
    assert out.tolist() == [2 * (12 + 13), 2 * (14 + 15), 0, 0], "number and grid are those of the capture"
    x -= 10
    graph.replay()
    assert out.tolist() == [2 * (2 + 3), 2 * (4 + 5), 0, 0] and graph.replays == 2


READS = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0]),
    "equal": lambda x: torch.equal(x, x),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "array": lambda x: x.__array__(),
    "cpu": lambda x: x.cpu(),
}
SHAPES = {
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "masked write": lambda x: x.index_put_((x > 0,), x[1:]),
    "repeat": lambda x: x.repeat_interleave(x.long()),
}
FROM_HOST = {
    "tensor": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "as_tensor": lambda x: x.index_select(0, torch.as_tensor([1, 2])),
    "from_numpy": lambda x: x.copy_(torch.from_numpy(np.ones(4))),
    "list of indices": lambda x: x[[1, 2]],
    "a number to one element": lambda x: x.__setitem__(0, 3.0),
    "kernel": lambda x: add[(1,)](x, torch.tensor([1.0] * 4), 1, SIZE=4),
    "number of a kernel": lambda x: add[(1,)](x, torch.tensor(1.0), 1, SIZE=1),
}
REFUSED = [(READS, "reads device memory"), (SHAPES, "shape of its result"), (FROM_HOST, "unpinned host memory")]
REFUSED += [({"rand": lambda x: x + torch.rand(4)}, "random numbers")]


@pytest.mark.parametrize(
    "function, why", [pytest.param(each, why, id=name) for cases, why in REFUSED for name, each in cases.items()]
)
def test_captures_refuse(x, function, why):
    with pytest.raises(CaptureError, match=why):
        captured(lambda: function(x))
    # The next capture is none the worse for it.
    captured(lambda: x.add_(1)).replay()
    assert x.tolist() == [1, 2, 3, 4]


def test_captures_allow_what_launches_without_a_copy_from_the_host(x):
    """Numbers, also for a slice or under a mask, and indices on the device."""

    def function():
        x[:2] = 3.0
        x[x > 2.5] = 7
        x.copy_(x[torch.arange(4).flip(0)])

    captured(function).replay()
    assert x.tolist() == [7, 2, 7, 7]


LAUNCHES = {"op": lambda x, out: torch.add(x, 1, out=out), "triton": lambda x, out: add[(1,)](out, x, 1, SIZE=4)}


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_memory_from_outside_has_to_stay(x, launch):
    scratch = [torch.zeros(4)]
    graph = captured(lambda: launch(x, scratch[0]))
    view = scratch.pop()[:]
    graph.replay()
    assert view.tolist() == [1, 2, 3, 4], "who keeps it does not matter"
    del view
    with pytest.raises(CaptureError, match="is gone"):
        graph.replay()


def test_memory_that_is_moved_is_gone(x):
    graph = captured(lambda: x.add_(1))
    x.resize_(1 << 20)
    with pytest.raises(CaptureError, match="is gone"):
        graph.replay()


def test_nothing_of_a_replay_is_there_at_the_next(x):
    """A graph that reads its own memory before it has written it reads garbage."""
    kept = []

    def function():
        if not kept:
            kept.append(torch.empty(4))
        x.add_(kept[0])
        kept[0].fill_(1)

    graph = captured(function)
    assert kept[0].isnan().all(), "a capture has written nothing"
    graph.replay()
    assert x.isnan().all() and kept[0].tolist() == [1, 1, 1, 1]
    x.zero_()
    graph.replay()
    assert x.isnan().all()
