"""Layers reach blocks of the host behind attention backends for a device, without one (test_device_backends.py)."""

import pytest
import test_device_backends
import test_full_graphs
from engine import after, exactly, logprobs_of, random_prompt, random_requests
from parts import part_of
from test_device_backends import on
from test_full_graphs import EITHER, replays
from test_reach import REACH, assert_counted, assert_nothing_left, assert_reaches_like_dense
from test_read import assert_reads_like_dense
from waits import without_waits

from vllm_evict.compute.reach import Reach
from vllm_evict.features.read.worker import Read

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.minutes,
    pytest.mark.on_triton,
]
backend, server = test_device_backends.backend, test_device_backends.server
replaying = test_full_graphs.replaying
OPTIONS = {"block_size": 32, "blocks": 64, "max_model_len": 512, "max_num_batched_tokens": 160}
FIELDS = {
    "bits": {"read": 256, "hold": 1},
    "bound": {"index": "box", "read": 160, "hold": 3, "fetch": 1, "leaders": 2},
    "prompts": {"read_prompts": 224, "hold": 3, "leaders": 2},
    "prompts-box": {"read_prompts": 224, "index": "box", "hold": 3},
}


@pytest.mark.oracle("full attention")
@pytest.mark.both_runners("triton-bits")
@pytest.mark.parametrize(
    "backend, fields", [on("triton", "bits"), on("fa3", "bound"), on("fa2", "bits")], indirect=["backend"]
)
def test_answers_are_those_of_a_dense_model_that_chooses_for_itself(server, dense, poisoned, backend, fields):
    check_answers(server, dense, FIELDS[fields])


def check_answers(server, dense, policy):
    """Two requests in a batch, one of which outgrows its budget while it decodes. Nothing waits for the device."""
    subject = server({**REACH, **policy}, **OPTIONS)
    for name in ("begin", "end"):
        without_waits(subject.worker.kv_evict, name)
    for name in ("rewrite", "step", "kernel_rows", "read", "told"):
        without_waits(part_of(subject.runtime, Reach), name)
    without_waits(part_of(subject.runtime, Reach).index, "fill")
    chosen, uses = 0, []
    for prompt, output, trace in subject.answered(random_requests((420, 12), (250, 14))):
        uses.append(output.kv_usage)
        chosen += assert_reaches_like_dense(None, prompt, output, trace, dense=dense, tables=False, **policy)
    assert chosen > 20 // policy["hold"]
    assert_counted(uses, policy.get("fetch", 0))
    assert_nothing_left(subject)


@pytest.mark.oracle("full attention")
@pytest.mark.both_runners
@pytest.mark.parametrize("backend", EITHER, indirect=True)
def test_steps_replay_full_graphs_until_a_request_has_blocks_on_the_host(replaying, graphs, dense, backend):
    """One of two has some from its prompt on; the other moves some when it has filled a block in steps of graphs."""
    subject = replaying({**REACH, "read": 160, "hold": 1}, **OPTIONS)
    index, late, requests = part_of(subject.runtime, Reach).index, [], random_requests((420, 3), (235, 58))
    after(subject.scheduler, "schedule", lambda *_: late.append(index._late_count))
    outputs, traces = subject.traced(requests)
    stock, own, decodes = replays(subject, graphs)
    assert 20 < stock < decodes and not own and max(late)
    for (prompt, _), output, trace in zip(requests, outputs, traces):
        assert assert_reaches_like_dense(None, prompt, output, trace, dense=dense, tables=False, read=160, hold=1)
    uses = [output.kv_usage for output in outputs]
    assert_counted(uses)
    assert_nothing_left(subject)


@pytest.mark.both_runners
@pytest.mark.parametrize("backend", EITHER, indirect=True)
def test_a_pool_with_room_replays_what_stock_replays(replaying, graphs, backend):
    """Under pressure that never comes: graphs, launches of layers and answers are stock's."""
    prompts, runs = [random_prompt(300), random_prompt(40, 1)], []
    for policy in ({**REACH, "when": "pressure", "admit": True}, None):
        subject = replaying(policy, **OPTIONS)
        graphs.replayed.clear()
        outputs = subject.generate(prompts, max_tokens=8, logprobs=0)
        runs.append((exactly(outputs), [graph.names[:3] for graph in graphs.replayed]))
    assert runs[0] == runs[1] and len(runs[0][1]) == 7


@pytest.mark.both_runners("triton-prompts")
@pytest.mark.parametrize(
    "backend, fields",
    [
        on("triton", "bits"),
        on("fa3", "bound"),
        on("triton", "prompts"),
        on("fa3", "prompts"),
        on("fa2", "prompts-box"),
    ],
    indirect=["backend"],
)
def test_without_a_host_answers_are_those_of_such_a_dense_model(server, dense, poisoned, backend, fields):
    """One request is shorter than what is read; or it decodes beside tiles, which are more rows than requests may be.

    Nothing waits for the device.
    """
    policy = {**FIELDS[fields], "read": 160, "sink": 32, "recent": 32}
    policy.pop("fetch", None)
    subject = server({"name": "full", **policy}, **OPTIONS, max_num_seqs=2)
    for name in ("cut", "rewrite", "step", "kernel_rows", "read"):
        without_waits(part_of(subject.runtime, Read), name)
    without_waits(part_of(subject.runtime, Read).index, "fill")
    chosen, lengths = 0, ((190, 14), (420, 12)) if "read_prompts" in policy else ((420, 12), (100, 14))
    for answered in subject.answered(random_requests(*lengths)):
        chosen += assert_reads_like_dense(None, *answered, dense=dense, tables=False, **policy)
    assert chosen > 10 // policy["hold"]
    subject.assert_nothing_left()


@pytest.mark.parametrize(
    "backend, policy",
    [on("triton", "host"), on("fa3", "host"), on("triton", "prompts"), on("fa3", "prompts")],
    indirect=["backend"],
)
def test_a_budget_that_covers_all_changes_no_bit(server, policy):
    prompts = [random_prompt(200), random_prompt(20, 1)]
    policy = REACH if policy == "host" else {"name": "full", "read": 224, "read_prompts": 224}
    subject, stock = server(policy, **OPTIONS), server(**OPTIONS)
    ours, theirs = (each.generate(prompts, max_tokens=8, logprobs=0) for each in (subject, stock))
    assert exactly(ours) == exactly(theirs) and len(logprobs_of(ours[0])) == 8
