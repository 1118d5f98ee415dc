"""Host blocks in a file: the same answers as from memory, and a disk that can't be used, fills or fails."""

import errno
import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine import logprobs_of, random_prompt
from oracle.model import DenseLlama
from oracle.visible import assert_like_dense, visible
from streaming import Sessions
from test_refusals_backends import plain_config

from vllm_evict.compute import offload_pages
from vllm_evict.compute.offload import OffloadedBlocks
from vllm_evict.config import KVPolicyConfig, KVPolicyError
from vllm_evict.core.offload import Copy
from vllm_evict.core.plan import Trouble
from vllm_evict.integration.engine.offloading import Offloading
from vllm_evict.integration.start.capabilities import refuse

QUEST = {"name": "h2o", "budget": 128, "buffer": 0, "sink": 32, "recent": 32, "evict": "host", "host": "16MiB"}
QUEST |= {"recall": "quest", "recall_every": 2}
PROMPTS = [random_prompt(700), random_prompt(530, 1), random_prompt(300, 2)]


def open_files():
    folder = Path("/proc/self/fd")
    return {os.readlink(each) for each in folder.iterdir() if each.is_symlink()}


@pytest.mark.both_runners("float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_those_of_a_host_in_memory_to_the_bit(engine, tmp_path, poisoned, dtype):
    path = tmp_path / "blocks"
    outputs = []
    for tier in ({}, {"host_path": str(path)}):
        server = engine({**QUEST, **tier}, dtype=dtype)
        outputs.append(server.generate(PROMPTS, max_tokens=40, logprobs=1))
        assert not path.exists()  # it has no name, and goes with the process
        server.assert_nothing_left()
    for memory, file in zip(*outputs):
        assert memory.outputs[0].token_ids == file.outputs[0].token_ids
        assert (logprobs_of(memory) == logprobs_of(file)).all()
        assert file.kv_usage == memory.kv_usage and file.kv_usage.recalled_blocks > 3


# --- a disk that fills or fails ---------------------------------------------------------------------------------------


def fails(monkeypatch, call, after, error):
    """Have a call on the file fail from so many calls on: with an error, or for None with half of the bytes."""
    real, calls = getattr(os, call), []

    def failing(*args):
        calls.append(call)
        if len(calls) <= after:
            return real(*args)
        if error is None:
            return real(*args) // 2
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(offload_pages.os, call, failing)
    return calls


FAULTS = {
    "a disk that fills": ("pwritev", 9, errno.ENOSPC),
    "a write that fails at once": ("pwritev", 0, errno.EIO),
    "half a write": ("pwritev", 12, None),
    "a read that fails": ("preadv", 2, errno.EIO),
    "half a read": ("preadv", 0, None),
}


def check(server, dense, masks, complaints, calls):
    ids = [server.add(prompt, max_tokens=60, logprobs=1) for prompt in PROMPTS]
    outputs = server.run()
    for prompt, req_id in zip(PROMPTS, ids):
        assert_like_dense(dense, prompt, outputs[req_id], masks[req_id])
    metrics = server.metrics()
    assert metrics["host_failures", "h2o"] > 0 and metrics["host_blocks", "h2o"] == 0
    assert metrics["reports_missing", "h2o"] == 0
    warnings = [message for level, message in complaints if "host blocks can't be written or read" in message]
    assert len(warnings) == 1 and "expected a disk that works" in warnings[0]
    tried, spilled = len(calls), metrics["blocks_spilled", "h2o"]
    outputs = server.generate([random_prompt(600, 7)], max_tokens=40, logprobs=1)
    assert np.isfinite(logprobs_of(outputs[0])).all() and outputs[0].kv_usage.evicted_blocks > 10
    assert outputs[0].kv_usage.spilled_blocks is None
    assert len(calls) == tried and server.metrics()["blocks_spilled", "h2o"] == spilled
    server.assert_nothing_left()


@pytest.mark.both_runners("a read that fails", "a disk that fills")
@pytest.mark.parametrize("fault", FAULTS)
def test_requests_go_on_without_the_host(engine, tiny, tmp_path, monkeypatch, poisoned, complaints, fault):
    """Each answer is that of a dense model that sees the blocks which are there; no query reads what is not."""
    server = engine({**QUEST, "host_path": str(tmp_path / "blocks")}, enable_prefix_caching=False)
    calls = fails(monkeypatch, *FAULTS[fault])
    check(server, DenseLlama(tiny), visible(server), complaints, calls)


@pytest.mark.parametrize("fault", FAULTS)
def test_requests_go_on_without_the_host_under_async_scheduling(
    async_engine, tiny, tmp_path, monkeypatch, poisoned, complaints, fault
):
    # Where freed blocks are poisoned, blocks come from the file though no request has taken their place.
    server = async_engine({**QUEST, "host_path": str(tmp_path / "blocks")}, enable_prefix_caching=False)
    calls = fails(monkeypatch, *FAULTS[fault])
    check(server, DenseLlama(tiny), visible(server), complaints, calls)


def test_a_block_that_failed_in_the_last_step_of_a_turn_is_a_hole_in_the_next(engine, tiny, tmp_path):
    """Between two turns a session does not run, and its table is what the next turn starts from."""
    server = engine({**QUEST, "host_path": str(tmp_path / "blocks")}, enable_prefix_caching=False)
    sessions = Sessions(server)
    sessions.send("s", random_prompt(600), 20)
    sessions.run()
    block = int(server.manager.residents["s"].residence.pool[2])
    assert not server.manager.req_to_blocks["s"][block].is_null and not server.scheduler.running_request("s")
    server.scheduler.part(Offloading)._lose(Trouble("a disk that fails", [("s", block)]))
    assert server.manager.req_to_blocks["s"][block].is_null
    sessions.send("s", random_prompt(40, 1), 20)
    sessions.run()
    assert len(sessions.answers["s"]) == 2
    sessions.close("s")
    sessions.run()
    server.assert_nothing_left()


def test_blocks_that_another_rank_lost_are_lost_here(tmp_path):
    page = torch.arange(32.0).view(8, 4)
    store = SimpleNamespace(pages=lambda: [page])
    host = OffloadedBlocks(store, 2, torch.device("cpu"), None, str(tmp_path / "blocks"))
    spilled = [Copy("a", 0, "spill", 3, 0), Copy("a", 0, "spill", 2, 1)]
    fetched = [Copy("a", 0, "fetch", 5, 0), Copy("a", 0, "fetch", 6, 1)]
    assert host.obey(spilled, lambda marks, maximise: marks) == [] and host.pages.error is None
    reductions = []

    def reduced(marks, maximise):
        reductions.append((marks.tolist(), maximise))
        return torch.maximum(marks, torch.tensor([0.0, 1.0, 1.0]))

    assert host.obey(fetched, reduced) == fetched[1:] and host.pages.error == "on another rank"
    assert reductions == [([0.0, 0.0, 0.0], True)] and torch.equal(page[[5, 6]], page[[3, 2]])
    host._void.add(0)
    assert host.obey(fetched, reduced) == fetched and not page[5].any() and page[6].any()


# --- a file that can't be made ----------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_made_is_refused(engine, tmp_path, monkeypatch):
    there = tmp_path / "there"
    there.write_text("of somebody else")
    for path, why in (
        (there, "File exists"),
        (tmp_path / "nowhere" / "blocks", "No such file or directory"),
        (tmp_path, "File exists"),
        (there / "blocks", "Not a directory"),
        (f"{tmp_path}/null\0", "embedded null byte"),
    ):
        shown = repr(path) if "\0" in str(path) else path
        expected = f"host_path: {shown} can't be made ({why}); expected a file that does not exist yet"
        with pytest.raises(Exception, match=re.escape(expected)):
            engine({**QUEST, "host_path": str(path)})
    assert there.read_text() == "of somebody else"

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(offload_pages.os, "posix_fallocate", full)
    path, before = tmp_path / "blocks", open_files()
    with pytest.raises(
        Exception, match=f"can't have {16 << 20} bytes .No space left on device.; expected room for host"
    ):
        engine({**QUEST, "host_path": str(path)})
    assert not path.exists() and not any(str(path) in each for each in open_files() - before)


def test_where_there_is_no_file_it_is_refused_by_name():
    with pytest.raises(KVPolicyError, match="host_path: blocks that are dropped have no copy on the host"):
        KVPolicyConfig.parse({"name": "h2o", "host_path": "/disk/blocks"})
    with pytest.raises(KVPolicyError, match="it needs a size of host memory"):
        KVPolicyConfig.parse({"name": "h2o", "evict": "host", "host_path": "/disk/blocks"})


def test_no_file_behind_a_gpu():
    # A file may be larger than memory.
    policy = KVPolicyConfig.parse({**QUEST, "host": 1 << 42, "host_path": "/disk/blocks"})
    refuse.check_config(plain_config(cache_config__block_size=4096), policy)
    with pytest.raises(KVPolicyError, match="host_path and a GPU, whose copies would wait for a disk: leave host_path"):
        refuse.check_config(plain_config(device_config__device_type="cuda", cache_config__block_size=4096), policy)
