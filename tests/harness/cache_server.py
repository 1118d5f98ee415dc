"""A double of LMCache's server, in the process of a test, behind vLLM's own `LMCacheMPConnector`.

The server copies blocks in the order in which it is asked to, some steps later, or as soon as someone waits.
"""

import importlib.util
import logging
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

BLOCK, PER_CHUNK = 32, 2


@dataclass
class LoadStoreOp:
    token_ids: list[int]
    block_ids: list[int]
    start: int
    end: int
    skip_first_n_tokens: int = 0


class Copy:
    """A copy that the server was asked for, as the future of its answer."""

    def __init__(self, server, copy):
        self._server, self._copy, self._left, self._done = server, copy, server.delay, False
        server.queue.append(self)

    def query(self):
        self._left -= 1
        if self._left <= 0 and not self._done:
            while not self._done:
                self._server.queue.pop(0).run()
        return self._done

    def run(self):
        self._copy()
        self._done = True


class CacheServer:
    """Chunks of tokens that were stored.

    Attributes:
        chunks: tokens up to the end of a chunk -> for each layer, the content of the chunk's blocks.
        queue: copies under way.
        delay: looks at a copy until it is done.
        waited: looks that workers took while they waited.
        block: tokens of an engine's blocks.
    """

    chunks: dict[tuple[int, ...], list[Any]] = {}
    queue: list[Copy] = []
    delay, waited, block = 3, 0, BLOCK

    @classmethod
    def clear(cls):
        cls.chunks, cls.queue, cls.delay, cls.waited, cls.block = {}, [], 3, 0, BLOCK


class SchedulerAdapter:
    """The connector's requests to the server, on the scheduler's side."""

    lmcache_tokens_per_chunk = PER_CHUNK * BLOCK

    def __init__(self, **kwargs):
        self._found = {}

    def num_blocks_per_chunk(self):
        return self.lmcache_tokens_per_chunk // CacheServer.block

    def maybe_submit_lookup_request(self, request_id, token_ids, **kwargs):
        size, found = self.lmcache_tokens_per_chunk, 0
        while found + size < len(token_ids) and tuple(token_ids[: found + size]) in CacheServer.chunks:
            found += size
        self._found.setdefault(request_id, found)

    def check_lookup_result(self, request_id):
        return self._found[request_id]

    def cleanup_lookup_result(self, request_id):
        self._found.pop(request_id, None)

    def free_lookup_locks(self, **kwargs):
        pass

    def end_session(self, request_id):
        pass

    def report_block_allocations(self, records):
        pass

    def shutdown(self):
        pass


class WorkerAdapter:
    """The connector's requests to the server, on the worker's side."""

    use_mla, is_first_rank_of_pp_group, is_kv_writer, is_healthy = False, True, True, True

    def __init__(self, **kwargs):
        self.store_futures, self._retrieves, self._ended, self._came = {}, {}, set(), set()

    def register_kv_caches(self, kv_caches, engine_group_infos=(), **kwargs):
        """Caches with the number of their KV group, which LMCache's connector tells."""
        group_of = {layer: each.engine_group_id for each in engine_group_infos for layer in each.layer_indices}
        self._caches = [(group_of.get(layer, 0), cache) for layer, cache in enumerate(kv_caches.values())]

    def batched_submit_store_requests(self, request_ids, ops, event, **kwargs):
        for request_id, op in zip(request_ids, ops, strict=True):
            self.store_futures[request_id] = Copy(CacheServer, lambda op=op: self._store(op))

    def batched_submit_retrieve_requests(self, request_ids, ops, event, **kwargs):
        for request_id, op in zip(request_ids, ops, strict=True):
            self._retrieves[request_id] = Copy(CacheServer, lambda op=op: self._retrieve(op))

    def _chunks(self, op):
        """Tokens up to the end of each chunk, its blocks in each KV group, and its first token after those of the copy.

        LMCache's connector has blocks by KV group.
        """
        groups = op.block_ids if isinstance(op.block_ids[0], list) else [op.block_ids]
        per_chunk = PER_CHUNK * BLOCK // CacheServer.block
        for first in range(0, len(groups[0]), per_chunk):
            after = first * CacheServer.block
            blocks = [group[first : first + per_chunk] for group in groups]
            yield tuple(op.token_ids[: op.start + after + PER_CHUNK * BLOCK]), blocks, after

    def _store(self, op):
        for tokens, blocks, _ in self._chunks(op):
            CacheServer.chunks[tokens] = [cache[blocks[group]].clone() for group, cache in self._caches]

    def _retrieve(self, op):
        for tokens, blocks, after in self._chunks(op):
            skipped = max(op.skip_first_n_tokens - after, 0) // CacheServer.block
            for (group, cache), content in zip(self._caches, CacheServer.chunks[tokens], strict=True):
                cache[blocks[group][skipped:]] = content[skipped:]

    def get_finished(self, finished_req_ids):
        self._ended |= finished_req_ids
        for futures in (self.store_futures, self._retrieves):
            for req_id in [req_id for req_id, copy in futures.items() if copy.query()]:
                if futures is self._retrieves:
                    self._came.add(req_id)
                del futures[req_id]
        sent, came = self._ended - self.store_futures.keys(), self._came
        self._ended, self._came = self._ended - sent, set()
        return sent, came

    def get_block_ids_with_load_errors(self):
        return set()

    def shutdown(self):
        pass


def install(monkeypatch):
    """Put the double behind LMCache's connector where LMCache is installed, else behind vLLM's. Copies need no events
    of a GPU.
    """
    if importlib.util.find_spec("lmcache") is None:
        _stub(monkeypatch)
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import lmcache_mp_connector

    module = sys.modules[lmcache_mp_connector.LMCacheMPConnector.__module__]
    monkeypatch.setattr(module, "LMCacheMPSchedulerAdapter", SchedulerAdapter)
    monkeypatch.setattr(module, "LMCacheMPWorkerAdapter", WorkerAdapter)

    class Connector(lmcache_mp_connector.LMCacheMPConnector):
        def start_load_kv(self, *args, **kwargs):
            self._submit("RETRIEVE", self.worker_adapter.batched_submit_retrieve_requests)

        def wait_for_save(self):
            self._submit("STORE", self.worker_adapter.batched_submit_store_requests)

        def _submit(self, direction, submit):
            asked = [each for each in self._get_connector_metadata().requests if each.direction == direction]
            submit([each.request_id for each in asked], [each.op for each in asked], None)

    monkeypatch.setitem(KVConnectorFactory._registry, "LMCacheMPConnector", lambda: Connector)


def _stub(monkeypatch):
    """Put stubs in the place of what vLLM's connector imports of LMCache."""
    stubs = {
        "lmcache": {},
        "lmcache.utils": {"init_logger": logging.getLogger},
        "lmcache.integration": {},
        "lmcache.integration.vllm": {},
        "lmcache.integration.vllm.utils": {"mla_enabled": lambda config: False},
        "lmcache.integration.vllm.vllm_multi_process_adapter": {
            **{"LMCacheMPSchedulerAdapter": SchedulerAdapter, "LMCacheMPWorkerAdapter": WorkerAdapter},
            **{"LoadStoreOp": LoadStoreOp, "ParallelStrategy": lambda *args: None},
        },
        "lmcache.v1": {},
        "lmcache.v1.multiprocess": {},
        "lmcache.v1.multiprocess.custom_types": {"RequestAllocationRecord": lambda **kwargs: kwargs},
    }
    for name, has in stubs.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(has)
        monkeypatch.setitem(sys.modules, name, module)
