"""The scheduler, as its parts and the engine's own mechanisms see it."""

from typing import Any, Protocol

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from ...config import Room
from ...core.actions import Action
from ...core.blocks import RequestBlocks
from ...core.mechanisms.base import SchedulerView
from .managers import ChunkManager, EvictableManager, SlidingManager, StateManager
from .seats import Seats
from .tally import Tally


class EngineView(SchedulerView, Protocol):
    """`EvictionMixin`, with what its parts read of vLLM's scheduler.

    Attributes:
        kv_managers: managers of the KV groups that may have holes, in the order of `Group.number`.
        other_managers: those of sliding windows, of chunks and of states.
        tally: counts for /metrics.
        room: of the pool.
        hits, admission: `Hits` and `Admission`.
        seats: counts the slots of workers that requests hold.
        slots: `Slots`, what mechanisms do where vLLM allocates blocks.
        residents: request -> its blocks in the first KV group that may have holes.
        others: vLLM's own.
    """

    kv_managers: list[EvictableManager]
    other_managers: list[SlidingManager | ChunkManager | StateManager]
    tally: Tally
    room: Room
    hits: Any
    admission: Any
    slots: Any
    seats: Seats

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    kv_cache_manager: KVCacheManager
    encoder_cache_manager: Any
    connector: Any
    running: list[Request]
    waiting: RequestQueue
    policy: SchedulingPolicy
    max_num_running_reqs: int
    num_waiting_for_streaming_input: int
    num_spec_tokens: int
    num_lookahead_tokens: int
    structured_output_manager: Any
    defer_block_free: bool
    reset_preempted_req_ids: set[str]

    @property
    def residents(self) -> dict[str, RequestBlocks]: ...

    @property
    def pause_state(self) -> PauseState: ...

    def blocks_of(self, req_id: str) -> list[RequestBlocks]:
        """Return the blocks of a request in each KV group that may have holes."""
        ...

    def apply(self, action: Action) -> bool:
        """Carry out an action of a mechanism; return whether any of it was carried out."""
        ...

    def add_request(self, request: Request) -> None: ...

    def finish_requests(self, *args: Any, **kwargs: Any) -> list[Request]: ...

    def get_num_unfinished_requests(self) -> int: ...

    def _free_request_blocks(self, request: Request) -> None: ...

    def _preempt_request(self, request: Request, timestamp: float) -> None: ...
