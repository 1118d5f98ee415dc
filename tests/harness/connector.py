"""Doubles of what lies behind vLLM's KV connectors, in the process of a test: another engine, and memory of a host.

Copies take some steps, and are done as late as they may be: what is written too early, or freed too early, shows.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

NAN = float("nan")


def prompt_blocks(engine, prompt):
    """What an engine computes for a prompt: for each layer, the content of its blocks [blocks, ...]."""
    request_id, found = engine.add(prompt, max_tokens=2, extra_args={"kv_policy": "full"}), []

    def take(engine):
        for request in engine.scheduler.running:
            if not found and request.num_computed_tokens >= len(prompt):
                blocks = engine.held_by(request.request_id)[: -(-len(prompt) // 32)]
                found.extend(cache[blocks].clone() for cache in engine.worker.model_runner.kv_caches)

    assert request_id in engine.run(take) and found
    return found


class Shelf:
    """Prompts' blocks that other engines computed, and how they come.

    Attributes:
        prompts: prompt -> for each layer, the content of its blocks.
        waits: the engine takes up a request when its blocks have come; else they come with its first step.
        delay: steps that a load takes.
        spoiled: prompt -> indices of its blocks that do not come the next time.
        loaded: physical blocks of each load, as it is asked for.
    """

    prompts: dict[tuple[int, ...], list[torch.Tensor]] = {}
    waits, delay = True, 2
    spoiled: dict[tuple[int, ...], list[int]] = {}
    loaded: list[list[int]] = []

    @classmethod
    def clear(cls):
        cls.prompts, cls.spoiled, cls.loaded, cls.waits, cls.delay = {}, {}, [], True, 2


@dataclass
class Loads(KVConnectorMetadata):
    """Request -> its prompt, its first block that comes, and the physical blocks."""

    loads: dict[str, tuple[tuple[int, ...], int, list[int]]] = field(default_factory=dict)


class ShelfConnector(KVConnectorBase_V1):
    """Brings prompts from `Shelf`, all blocks with the last one, as vLLM's NixlConnector does on the side of decodes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._next, self._first, self._loads = Loads(), {}, set()
        self._caches, self._under_way, self._invalid = [], {}, set()

    # The scheduler's side

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        there = len(Shelf.prompts.get(tuple(request.prompt_token_ids), [[]])[0])
        tokens = min(there * 32, request.num_prompt_tokens)
        if request.request_id in self._loads:  # a load that failed is not tried again
            return 0, False
        if not Shelf.waits:
            tokens = (request.num_prompt_tokens - 1) // 32 * 32 if there else 0
        self._first[request.request_id] = num_computed_tokens // 32
        return max(tokens - num_computed_tokens, 0), Shelf.waits and tokens > num_computed_tokens

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            (table,), first = blocks.get_block_ids(), self._first[request.request_id]
            come = table[first : first + -(-num_external_tokens // 32)]
            self._next.loads[request.request_id] = (tuple(request.prompt_token_ids), first, come)
            self._loads.add(request.request_id)
            Shelf.loaded.append(come)

    def build_connector_meta(self, scheduler_output):
        meta, self._next = self._next, Loads()
        return meta

    def request_finished(self, request, block_ids):
        self._loads.discard(request.request_id)
        return False, None

    # The worker's side

    def register_kv_caches(self, kv_caches):
        self._caches = list(kv_caches.values())

    def start_load_kv(self, forward_context, **kwargs):
        for req_id, load in self._get_connector_metadata().loads.items():
            if Shelf.waits:
                self._under_way[req_id] = [Shelf.delay, *load]
            else:
                self._load(*load)

    def _load(self, prompt, first, blocks):
        spoiled = Shelf.spoiled.pop(prompt, [])
        self._invalid |= {block for index, block in enumerate(blocks, first) if index in spoiled}
        for cache, content in zip(self._caches, Shelf.prompts[prompt]):
            cache[blocks] = content[first : first + len(blocks)]
            cache[list(self._invalid)] = NAN

    def get_finished(self, finished_req_ids):
        done = set()
        for req_id, load in self._under_way.items():
            load[0] -= 1
            if load[0] <= 0:
                self._load(*load[1:])
                done.add(req_id)
        for req_id in done:
            del self._under_way[req_id]
        return None, done

    def get_block_ids_with_load_errors(self):
        invalid, self._invalid = self._invalid, set()
        return invalid

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass


class HostSpec(CPUOffloadingSpec):
    """vLLM's offloading, with `HostWorker` in the place of CUDA's copies."""

    workers: list["HostWorker"] = []

    def get_worker(self, kv_caches):
        HostWorker.delay = int(self.extra_config.get("delay", 2))
        self.workers[:] = [HostWorker(kv_caches, self.num_chunks, self.blocks_per_chunk)]
        return self.workers[0]


class HostWorker(OffloadingWorker):
    """Copies blocks between an engine's cache and the host, `delay` steps after it is asked to, or when it has to."""

    delay = 2

    def __init__(self, kv_caches, chunks, blocks_per_chunk):
        self._caches = [each.tensor for each in kv_caches.tensors]
        self._host = [
            torch.zeros(chunks * blocks_per_chunk, *each.shape[1:], dtype=each.dtype) for each in self._caches
        ]
        self._per_chunk, self._jobs, self.waited, self.done = blocks_per_chunk, {}, 0, 0

    def _places(self, gpu, host):
        """Block of the cache and block of the host, for each block of a transfer."""
        offset = gpu.block_indices[0] % self._per_chunk
        blocks = [chunk * self._per_chunk + i for chunk in host.block_ids.tolist() for i in range(self._per_chunk)]
        return gpu.block_ids.tolist(), blocks[offset : offset + len(gpu.block_ids)]

    def submit_store(self, job_id, src_spec, dst_spec):
        self._jobs[job_id] = [self.delay, True, *self._places(src_spec, dst_spec)]
        return True

    def submit_load(self, job_id, src_spec, dst_spec):
        self._jobs[job_id] = [self.delay, False, *self._places(dst_spec, src_spec)]
        return True

    def _copy(self, job):
        _, stores, blocks, places = job
        for cache, host in zip(self._caches, self._host):
            if stores:
                host[places] = cache[blocks]
            else:
                cache[blocks] = host[places]
        job[0], job[1:] = 0, [None, [], []]

    def get_finished(self):
        done = []
        for job_id, job in self._jobs.items():
            job[0] -= 1
            if job[0] <= 0:
                if job[2]:
                    self._copy(job)
                done.append(job_id)
        for job_id in done:
            del self._jobs[job_id]
        self.done += len(done)
        return [TransferResult(job_id, True) for job_id in done]

    def wait(self, job_ids):
        for job_id in job_ids:
            if (job := self._jobs.get(job_id)) is not None and job[2]:
                self.waited += 1
                self._copy(job)

    def content(self, place):
        """What a host block holds, for each layer."""
        return [host[place] for host in self._host]


class SimpleHostWorker:
    """In the place of vLLM's `SimpleCPUOffloadWorker`, which needs CUDA."""

    delay = 2

    def __init__(self, vllm_config, kv_cache_config, cpu_capacity_bytes, **kwargs):
        self._bytes, self._under_way, self._metadata, self._stored = cpu_capacity_bytes, [], None, {}

    def register_kv_caches(self, kv_caches):
        self._caches = list(kv_caches.values())
        block = sum(cache[0].numel() * cache.element_size() for cache in self._caches)
        self._host = [torch.zeros(self._bytes // block + 1, *cache.shape[1:]) for cache in self._caches]

    def bind_connector_metadata(self, metadata):
        self._metadata = metadata

    def clear_connector_metadata(self):
        self._metadata = None

    def start_load_kv(self):
        meta = self._metadata
        if meta.load_cpu_blocks:
            self._under_way.append([self.delay, False, meta.load_event, meta.load_gpu_blocks, meta.load_cpu_blocks])

    def wait_for_save(self):
        meta = self._metadata
        if meta.store_gpu_blocks:
            self._under_way.append([self.delay, True, meta.store_event, meta.store_gpu_blocks, meta.store_cpu_blocks])

    def get_finished(self, finished_req_ids):
        came = set()
        for transfer in [*self._under_way]:
            transfer[0] -= 1
            if transfer[0] > 0:
                continue
            self._under_way.remove(transfer)
            _, stores, event, blocks, places = transfer
            for cache, host in zip(self._caches, self._host):
                if stores:
                    host[places] = cache[blocks]
                else:
                    cache[blocks] = host[places]
            if stores:
                self._stored[event] = 1
            else:
                came.update(self._metadata.load_event_to_reqs[event])
        return None, came or None

    def build_connector_worker_meta(self):
        stored, self._stored = self._stored, {}
        return SimpleCPUOffloadWorkerMetadata(completed_store_events=stored) if stored else None

    def handle_preemptions(self, metadata):
        if metadata.need_flush:
            for transfer in self._under_way:
                transfer[0] = 0  # copied with the next `get_finished`; held until then

    def content(self, place):
        return [host[place] for host in self._host]
