"""Engines whose workers are processes of their own, and whose scheduler is in the test's process."""

import os
from contextlib import contextmanager

import pytest
from engine import Engine
from oracle.visible import watch_bytes, watch_masks
from parts import sums_of
from vllm.platforms.cpu import CpuPlatform


@contextmanager
def forking():
    """vLLM forks its workers in the place of spawning them, which takes it seconds on a CPU."""
    update = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config):
        update(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")  # and what it was comes back
        patch.setenv("VLLM_EVICT_POISON", "1")
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config))
        yield


class Workers(Engine):
    """An engine of several workers."""

    def __init__(self, model, policy, **kwargs):
        super().__init__(model, policy, distributed_executor_backend="mp", **kwargs)

    def ask(self, question, *args):
        """Return `question(worker, *args)` of each worker."""
        return self.llm.collective_rpc(question, args=args)

    def assert_nothing_left(self):
        self.drain()
        assert not self.held_blocks() and self.free_blocks == self.all_blocks
        assert not any(manager.residents for manager in self.managers)
        assert not any(self.ask(remembered))

    def close(self):
        self.core.shutdown()
        super().close()


def remembered(worker):
    """Return a worker's memory of requests."""
    groups, sent = worker.kv_evict.groups, worker._ranks._sent
    assert len(sent) <= 3, "values of old steps were not let go"
    left = {"holes": [group.with_holes for group in groups], "sums": [len(sums_of(group) or ()) for group in groups]}
    return {name: each for name, each in left.items() if any(each)}


class Watched:
    """The workers of an engine, which are watched from now on."""

    def __init__(self, server):
        self._server = server
        server.llm.collective_rpc(_watch)

    def masks(self):
        """Return what each query of a request sees, as `watch_masks` has it; all workers agree on it."""
        first, *others = self._server.llm.collective_rpc(lambda worker: worker.watched_masks)
        for other in others:
            assert other.keys() == first.keys() and all(other[each].equal(first[each]) for each in first)
        return first

    def reports(self):
        """Reports of each step that has some; all workers report the same, to the bit."""
        first, *others = self._server.llm.collective_rpc(lambda worker: worker.watched_reports)
        for other in others:
            assert list(map(_plain, other)) == list(map(_plain, first))
        return first

    def bytes(self):
        """Of each worker, for each block that came back: whether it is, byte for byte, what went."""
        return self._server.llm.collective_rpc(lambda worker: worker.watched_bytes)


def _watch(worker):
    worker = getattr(worker, "worker", worker)  # vLLM's wrapper does not pass on what is set
    worker.watched_masks, worker.watched_bytes, worker.watched_reports = watch_masks(worker), watch_bytes(worker), []
    end = worker.kv_evict.end

    def ended(all_reduce):
        reports = end(all_reduce)
        worker.watched_reports.extend(each for each in reports if each)
        return reports

    worker.kv_evict.end = ended


def _plain(reports):
    return {
        req_id: (each.index.tolist(), {name: values.tolist() for name, values in each.statistics.items()})
        for req_id, each in reports.items()
    }
