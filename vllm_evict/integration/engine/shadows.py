"""Shadows: requests inside the engine that compute something about a client's request, after all other work.

One shadow runs at a time. No client sees it: its outputs are removed from the scheduler's.
"""

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request, RequestStatus

from ...config import KVPolicyConfig
from ...core.blocks import RequestBlocks
from ...core.mechanisms import Mechanism
from ..seams import replaces
from .view import EngineView


def for_one_token(params: SamplingParams) -> SamplingParams:
    """Return the parameters of a shadow: those of its original, for one token.

    The front end has checked these, so logits processors can rely on them (`extra_args` above all). Left out is what
    asks for more: tokens, log-probabilities, a prompt that is computed anew, a grammar to wait for.
    """
    params = params.clone()
    params.max_tokens, params.min_tokens, params.skip_reading_prefix_cache = 1, 0, False
    params.logprobs = params.prompt_logprobs = params.structured_outputs = None
    params.prompt_logprob_token_ids = params.prompt_logprob_start = None  # since vLLM 0.31
    return params


@dataclass(slots=True, kw_only=True, eq=False)
class Shadow:
    """A request inside the engine.

    Attributes:
        request: vLLM's request.
        needed: blocks that it needs beside those that it hits.
        computed: tokens that it had computed at the last call of `advances`.
    """

    request: Request
    needed: int
    computed: int = 0

    def advances(self) -> bool:
        """Return whether the last step computed tokens of the shadow, or all are computed. Called once a step."""
        before, self.computed = self.computed, self.request.num_computed_tokens
        return self.computed > before or self.computed >= self.request.num_prompt_tokens


class ShadowRequests(Mechanism):
    """The shadow of one scheduler: admits it where it fits, keeps it behind all other requests, and hides it.

    Other mechanisms begin shadows and learn from them. This one comes after them.

    Args:
        scheduler: an `EvictionMixin`.

    Attributes:
        current: the shadow that waits or runs; None if there is none.
    """

    def __init__(self, scheduler: EngineView) -> None:
        super().__init__(scheduler)
        self._scheduler = scheduler
        self.current: Shadow | None = None
        self._hidden: set[str] = set()
        self._ids = itertools.count()
        leave_shadows_out.on(scheduler.kv_cache_manager, self)

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return config.runs_shadows

    def before_schedule(self) -> None:
        """Move the shadow behind all running requests: vLLM serves the last one last and preempts it first."""
        if (shadow := self.current) is not None:
            self._scheduler.running.sort(key=lambda request: request is shadow.request)

    def after_output(self, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """Remove shadows from the outputs that clients get."""
        if not self._hidden:
            return
        for client in outputs.values():
            client.outputs = [output for output in client.outputs if output.request_id not in self._hidden]
            if client.finished_requests:
                client.finished_requests = client.finished_requests - self._hidden
        # vLLM names a finished request once, so earlier shadows need no hiding any more.
        self._hidden &= {self.current.request.request_id} if self.current else set()

    def on_stats(self, stats: SchedulerStats) -> None:
        """Leave the shadow out of what vLLM counts of requests and of the blocks that they hold."""
        if self.current is None or self.current.request.is_finished():
            return
        request, cache = self.current.request, self._scheduler.kv_cache_manager
        if request.status == RequestStatus.RUNNING:
            stats.num_running_reqs -= 1
        else:
            stats.num_waiting_reqs -= 1
        held = {
            block.block_id
            for table in cache.get_blocks(request.request_id).blocks
            for block in table
            if block.ref_cnt == 1
        }
        stats.kv_cache_usage = max(stats.kv_cache_usage - len(held) / max(cache.block_pool.num_gpu_blocks - 1, 1), 0.0)

    def on_finish(self, finished: list[Request]) -> list[Request]:
        return [request for request in finished if request.request_id not in self._hidden]

    def owns(self, req_id: str) -> bool:
        """Return whether a request is the shadow, or one that has ended with this step or call."""
        return req_id in self._hidden

    @property
    def lent(self) -> int:
        """Blocks that the shadow holds. A running request that lacks blocks gets them."""
        if self.current is None or self.current.request.is_finished():
            return 0
        return int(self._scheduler.residents[self.current.request.request_id].state.held_blocks)

    @property
    def spare(self) -> int:
        """Free blocks that a shadow leaves: each running request may need one more before long."""
        return int(self._scheduler.kv_cache_manager.watermark_blocks + len(self._scheduler.running))

    @property
    def seats(self) -> int:
        """Most requests that run at once; since vLLM 0.32 `max_num_active_seqs` may be below `max_num_seqs`."""
        return int(getattr(self._scheduler, "max_num_active_reqs", self._scheduler.max_num_running_reqs))

    def fits(self, needed: int) -> bool:
        """Return whether the pool has room for a shadow that needs so many blocks, and the batch has a place for it."""
        scheduler = self._scheduler
        return scheduler.free_blocks >= needed + self.spare and scheduler.seats.taken < self.seats

    def spares(self, original: Request, first: int, needed: int) -> bool:
        """Return whether a shadow finds its blocks without any that is in a cached prefix, but for those that it hits.

        vLLM hands out free blocks of no prefix first, then those of the prefixes that were used least lately.

        Args:
            original: the request whose prompt the shadow has.
            first: tokens that the shadow hits at most.
            needed: blocks that it takes, those that it hits included.
        """
        cache = self._scheduler.kv_cache_manager
        if not cache.enable_caching:
            return True
        pool, free = cache.block_pool, 0
        block = pool.free_block_queue.fake_free_list_head.next_free_block
        while free < needed and block is not None and block.block_id >= 0 and block.block_hash is None:
            free, block = free + 1, block.next_free_block
        if free == needed:
            return True
        hit = cache.coordinator.find_longest_cache_hit(original.block_hashes, first)[1]
        return free >= needed - hit // self._scheduler.kv_managers[0].block_size

    def gets_on(self, shadow: Shadow) -> bool:
        """Return whether a shadow runs or still fits. Requests would wait behind a preempted shadow."""
        if shadow.request.status == RequestStatus.WAITING:
            return self.fits(shadow.needed)
        return shadow.request.status == RequestStatus.RUNNING

    def request(self, kind: str, original: Request, prompt: list[int]) -> Request:
        """Make the request of a shadow, for `add`.

        Args:
            kind: what its id begins with.
            original: the request whose parameters, adapter and cache salt it has.
            prompt: token ids.
        """
        request = Request(
            f"{kind}-{next(self._ids)}-{original.request_id}",
            prompt,
            for_one_token(original.sampling_params),
            None,
            client_index=original.client_index,
            lora_request=original.lora_request,
            cache_salt=original.cache_salt,
            priority=sys.maxsize,
            block_hasher=original._block_hasher,
        )
        # Arguments for connectors, and for events of the prefix cache, are about what the client sent.
        request.kv_transfer_params = request.ec_transfer_params = None
        request.kv_cache_report_mode = "incremental"
        return request

    def add(self, shadow: Shadow, groups: Sequence[RequestBlocks]) -> None:
        """Add a shadow in front of all waiting requests.

        Args:
            shadow: with a request by `request`.
            groups: its blocks in each KV group. Their `pure_tokens` are the most that it hits and publishes.
        """
        scheduler, request = self._scheduler, shadow.request
        # From now on there are blocks that may not be published, also where no request loses any.
        scheduler.admission.changes = True
        self.current = shadow
        self._hidden.add(request.request_id)
        for manager, blocks in zip(scheduler.kv_managers, groups, strict=True):
            manager.residents[request.request_id] = blocks
        scheduler.add_request(request)
        scheduler.waiting.remove_request(request)
        scheduler.waiting.prepend_request(request)

    def ended(self, shadow: Shadow) -> bool:
        """Return whether a shadow has ended, and make place for the next one if so."""
        if not shadow.request.is_finished():
            return False
        self.current = None
        return True

    def withdraw(self, shadow: Shadow) -> None:
        """End a shadow at once."""
        self.current = None
        self._scheduler.finish_requests(shadow.request.request_id, RequestStatus.FINISHED_ABORTED)


class ShadowUser(Mechanism):
    """A mechanism that begins shadows, and learns from them."""

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return config.runs_shadows

    @property
    def waiting(self) -> int:
        """Requests that wait for a shadow. Answers of requests that have ended do not count."""
        return 0

    @property
    def _shadows(self) -> ShadowRequests:
        return self.view.part(ShadowRequests)


@replaces(
    "vllm.v1.core.kv_cache_manager:KVCacheManager.record_prefix_cache_stats",
    why="statistics of the prefix cache count what clients' requests look up, not shadows",
    remove_when="vLLM counts requests of its own apart",
)
def leave_shadows_out(record: Callable[..., None], shadows: ShadowRequests) -> Callable[..., None]:
    def record_prefix_cache_stats(request: Request, *args: Any, **kwargs: Any) -> None:
        if not shadows.owns(request.request_id):
            record(request, *args, **kwargs)

    return record_prefix_cache_stats
