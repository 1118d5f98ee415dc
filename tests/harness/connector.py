"""Doubles of what lies behind vLLM's KV connectors, in the process of a test: another engine, and memory of a host.

Copies take some steps, and are done as late as they may be: what is written too early, or freed too early, shows.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

NAN = float("nan")


def prompt_blocks(engine, prompt):
    """Return the cache of a prompt as an engine computes it: for each layer, the content of its blocks [blocks, ...]."""
    request_id, found = engine.add(prompt, max_tokens=2, extra_args={"kv_policy": "full"}), []

    def take(engine):
        for request in engine.scheduler.running:
            if not found and request.num_computed_tokens >= len(prompt):
                blocks = engine.held_by(request.request_id)[: -(-len(prompt) // engine.manager.block_size)]
                found.extend(cache[blocks].clone() for cache in engine.worker.model_runner.kv_caches)

    assert request_id in engine.run(take) and found
    return found


class Shelf:
    """Prompts' blocks that engines computed, and how they come.

    Attributes:
        prompts: prompt -> for each tensor of the cache, the content of its blocks, by their place in the prompt.
        waits: the engine takes up a request when its blocks have come; else they come with its first step.
        delay: steps that a load takes, or a request that ended keeps its blocks.
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


#: Of a request, for each KV group: its place in the prompt -> physical block.
Tables = list[dict[int, int]]


@dataclass
class Transfers(KVConnectorMetadata):
    """Request -> its prompt, and its blocks that come, or that go."""

    loads: dict[str, tuple[tuple[int, ...], Tables]] = field(default_factory=dict)
    sends: dict[str, tuple[tuple[int, ...], Tables]] = field(default_factory=dict)


class ShelfConnector(KVConnectorBase_V1, SupportsHMA):
    """Brings prompts from `Shelf`, all blocks with the last one, and puts those there that requests hand on: both sides
    of vLLM's NixlConnector.

    States come without the prompt's last token, which the engine computes: a prompt is also found without it.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._groups = kv_cache_config.kv_cache_groups
        self._sizes = [group.kv_cache_spec.block_size for group in self._groups]
        self._next, self._first, self._loads = Transfers(), {}, set()
        self._caches, self._coming, self._going, self._invalid = [], {}, {}, set()

    # The scheduler's side

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        prompt = self._found(request)
        if request.request_id in self._loads or not prompt:  # a load that failed is not tried again
            return 0, False
        tokens = len(prompt)
        if not Shelf.waits:
            tokens = (request.num_prompt_tokens - 1) // self._sizes[0] * self._sizes[0]
        self._first[request.request_id] = num_computed_tokens
        return max(tokens - num_computed_tokens, 0), Shelf.waits and tokens > num_computed_tokens

    @staticmethod
    def _found(request):
        prompt = tuple(request.prompt_token_ids)
        return next((known for known in (prompt, prompt[:-1]) if known in Shelf.prompts), ())

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            first = self._first[request.request_id]
            tables = self._tables(blocks.get_block_ids(), first, first + num_external_tokens)
            self._next.loads[request.request_id] = (self._found(request), tables)
            self._loads.add(request.request_id)
            Shelf.loaded.append([block for table in tables for block in table.values()])

    def _tables(self, block_ids, first, end):
        return [
            {place: block for place, block in enumerate(ids) if block and first // size <= place < -(-end // size)}
            for ids, size in zip(block_ids, self._sizes, strict=True)
        ]

    def build_connector_meta(self, scheduler_output):
        meta, self._next = self._next, Transfers()
        return meta

    def request_finished(self, request, block_ids):
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request, block_ids):
        self._loads.discard(request.request_id)
        if not (request.kv_transfer_params or {}).get("do_remote_decode"):
            return False, None
        prompt = tuple(request.prompt_token_ids)
        self._next.sends[request.request_id] = (prompt, self._tables(block_ids, 0, len(prompt)))
        return True, {"do_remote_prefill": True}

    # The worker's side

    def register_kv_caches(self, kv_caches):
        """Caches as tensors with their KV group: a layer with states has several."""
        groups = {layer: number for number, group in enumerate(self._groups) for layer in group.layer_names}
        self._caches = [
            (groups[layer], part)
            for layer, cache in sorted(kv_caches.items())  # vLLM has them by group
            for part in (cache if isinstance(cache, (list, tuple)) else [cache])
        ]

    def start_load_kv(self, forward_context, **kwargs):
        meta = self._get_connector_metadata()
        for req_id, send in meta.sends.items():
            self._going[req_id] = [Shelf.delay, *send]
        for req_id, load in meta.loads.items():
            if Shelf.waits:
                self._coming[req_id] = [Shelf.delay, *load]
            else:
                self._load(*load)

    def _load(self, prompt, tables):
        spoiled = Shelf.spoiled.pop(prompt, [])
        self._invalid |= {block for table in tables for place, block in table.items() if place in spoiled}
        for (group, cache), content in zip(self._caches, Shelf.prompts[prompt], strict=True):
            places, blocks = list(tables[group]), list(tables[group].values())
            cache[blocks] = content[places]
            if self._invalid:
                cache[list(self._invalid)] = NAN

    def _send(self, prompt, tables):
        contents = []
        for group, cache in self._caches:
            places, blocks = list(tables[group]), list(tables[group].values())
            content = cache.new_full((max(places) + 1, *cache.shape[1:]), 0)
            content[places] = cache[blocks]
            contents.append(content)
        Shelf.prompts[prompt] = contents

    def get_finished(self, finished_req_ids):
        sent, came = _due(self._going), _due(self._coming)
        for transfer in sent.values():
            self._send(*transfer)
        for transfer in came.values():
            self._load(*transfer)
        return set(sent), set(came)

    def get_block_ids_with_load_errors(self):
        invalid, self._invalid = self._invalid, set()
        return invalid

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass


def _due(transfers):
    """Take those transfers whose last step this is: request -> transfer."""
    for transfer in transfers.values():
        transfer[0] -= 1
    return {req_id: transfers.pop(req_id)[1:] for req_id in [*transfers] if transfers[req_id][0] <= 0}


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
        """Return the content of a host block, for each layer."""
        return [host[place] for host in self._host]


class SimpleHostWorker:
    """In the place of vLLM's `SimpleCPUOffloadWorker`, which needs CUDA."""

    delay = 2

    def __init__(self, vllm_config, kv_cache_config, cpu_capacity_bytes, **kwargs):
        self._bytes, self._under_way, self._metadata, self._stored = cpu_capacity_bytes, [], None, {}
        self._blocks = kv_cache_config.num_blocks

    def register_kv_caches(self, kv_caches):
        """Layers with states have several tensors, and layers of several groups may have the same memory. A block of
        the pool may be several kernel blocks.
        """
        self._caches = [
            cache.unflatten(0, (self._blocks, -1))
            for each in kv_caches.values()
            for cache in (each if isinstance(each, (list, tuple)) else [each])
        ]
        memory = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in self._caches}
        self.num_cpu_blocks = self._bytes * len(self._caches[0]) // sum(memory.values())
        self._host = [cache.new_zeros(self.num_cpu_blocks + 1, *cache.shape[1:]) for cache in self._caches]

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
