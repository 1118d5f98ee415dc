"""Tells KV connectors which blocks requests lose.

Blocks that a connector loads are whole and pure, like blocks of a prefix hit. Blocks that it stores have to be pure,
and stay as they are until they are stored.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...config import KVPolicyConfig
from ...core.actions import Applied
from ...core.blocks import RequestBlocks
from ...core.mechanisms import Mechanism
from ..start.connectors import LMCACHE, Unread, named, of_lmcache
from .allocation import Reads
from .view import EngineView

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Follower(Mechanism):
    """Tells a connector what requests lose.

    Args:
        scheduler: an `EvictionMixin`.
        connector: the scheduler's side of vLLM's, or of one in a MultiConnector.
    """

    def __init__(self, scheduler: EngineView, connector: Any) -> None:
        super().__init__(scheduler)
        self._scheduler, self._connector = scheduler, connector

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return True

    def on_applied(self, applied: Applied) -> None:
        action, blocks = applied.action, applied.blocks
        group = self._scheduler.kv_managers[action.group].kv_cache_group_id
        self.lost(action.req_id, group, applied.before, blocks.pure_tokens)

    def on_turn(self, req_id: str, blocks: Sequence[RequestBlocks]) -> None:
        if (pure_tokens := blocks[0].pure_tokens) is not None:
            self.stay_pure(req_id, pure_tokens)

    def on_free(self, request: "Request") -> None:
        if not request.is_finished():
            self.starts_over(request)

    def before_metadata(self, tokens: Mapping[str, int]) -> None:
        # A step that reads less than all bounds pure tokens by itself, without an action.
        for req_id in tokens if self._scheduler.mechanisms.of(Reads) else ():
            if (pure_tokens := self._scheduler.residents[req_id].pure_tokens) is not None:
                self.stay_pure(req_id, pure_tokens)

    def lost(self, req_id: str, group: int, blocks: Mapping[int, int], pure_tokens: int | None) -> None:
        """Note that blocks of a request are holes now, or are about to be written.

        Args:
            req_id: the request.
            group: number of vLLM's KV group.
            blocks: logical block -> the physical block that it was.
            pure_tokens: of the request; None: all its tokens are pure, since layers still read what it has lost.
        """

    def stay_pure(self, req_id: str, pure_tokens: int) -> None:
        """Note that no more than so many tokens of a request are pure."""

    def starts_over(self, request: "Request") -> None:
        """Note that a request has no blocks any more, and is computed again."""


class OffloadingFollower(Follower):
    """Follows vLLM's `OffloadingConnector`, which stores what a request computed by its hashes, published or not.

    - It stores a request's first `max_offload_tokens` tokens: no more than are pure.
    - It reads blocks by the table that the request had: a block that is a hole now is 0 there, as of sliding windows.
    - Blocks that it still reads are fenced, as it fences blocks of sliding windows: when the pool hands one out,
      workers wait until it is stored. It fences those of full attention when a request ends.
    """

    def __init__(self, scheduler: EngineView, connector: Any) -> None:
        super().__init__(scheduler, connector)
        self._stores = connector.scheduler
        #: Request -> the tokens to store that its client asked for.
        self._asked: dict[str, int | None] = {}
        #: Blocks that workers write by the next plan.
        self._written: set[int] = set()

    def on_applied(self, applied: Applied) -> None:
        super().on_applied(applied)
        self._written.update(applied.written)

    def lost(self, req_id: str, group: int, blocks: Mapping[int, int], pure_tokens: int | None) -> None:
        if (status := self._stores._req_status.get(req_id)) is None:
            return
        config = self._stores.config
        for group_config, state in zip(config.kv_group_configs, status.group_states):
            if group_config.group_idx != group:
                continue
            for index in blocks:
                # A chunk that lacks one of its blocks can't be stored.
                first = index // config.blocks_per_chunk * config.blocks_per_chunk
                chunk = range(first, min(first + config.blocks_per_chunk, len(state.block_ids)))
                state.block_ids[chunk.start : chunk.stop] = [0] * len(chunk)
        self._fence(status, set(blocks.values()))
        if pure_tokens is not None:
            self.stay_pure(req_id, pure_tokens)

    def _fence(self, status: Any, blocks: set[int]) -> None:
        """Have workers wait for the stores of these blocks before the blocks are written."""
        for job_id in status.transfer_jobs:
            job = self._stores._jobs[job_id]
            if fenced := [block for block in job.deferred_fence_block_ids or () if block in blocks]:
                job.deferred_fence_block_ids = [each for each in job.deferred_fence_block_ids if each not in blocks]
                job.fenced_block_ids = [*(job.fenced_block_ids or ()), *fenced]
                for block in fenced:
                    self._stores._block_id_to_pending_jobs.setdefault(block, set()).add(job_id)

    def stay_pure(self, req_id: str, pure_tokens: int) -> None:
        if (status := self._stores._req_status.get(req_id)) is not None:
            asked = self._asked.setdefault(req_id, status.max_offload_tokens)
            status.max_offload_tokens = pure_tokens if asked is None else min(asked, pure_tokens)

    def starts_over(self, request: "Request") -> None:
        req_id = request.request_id
        if req_id in self._asked and (status := self._stores._req_status.get(req_id)) is not None:
            status.max_offload_tokens = self._asked[req_id]
        self.on_end(req_id)

    def on_end(self, req_id: str) -> None:
        self._asked.pop(req_id, None)

    def before_metadata(self, tokens: Mapping[str, int]) -> None:
        super().before_metadata(tokens)
        # Workers write these beside new blocks.
        self._stores._current_batch_allocated_block_ids.update(self._written, self._scheduler.next_plan.writes)
        self._written.clear()


class SimpleFollower(Follower):
    """Follows vLLM's `SimpleCPUOffloadConnector`.

    It stores blocks that are published, under their own hashes, and holds them until they are stored. But it says of a
    block that it stored which tokens of which request it is: a block that is a hole now, and another request's later,
    must not be taken for the first one's.
    """

    def lost(self, req_id: str, group: int, blocks: Mapping[int, int], pure_tokens: int | None) -> None:
        stores = self._connector.scheduler_manager
        if stores is not None and (state := stores._reqs_to_store.get(req_id)) is not None:
            table = state.block_ids[group]
            for index in blocks:
                if index < len(table):
                    table[index] = 0


#: What a request of `LMCacheFollower` has stored if it is to store nothing more: whole chunks of any size.
STOPPED = 1 << 62


class LMCacheFollower(Follower):
    """Follows vLLM's `LMCacheMPConnector`, by which another process copies what a request computed, after each step.

    - A request that lost a block stores nothing more: what follows is impure, and some of what comes before is gone.
    - What it stored may still be copied. A step before which a request loses blocks waits for its copies, on workers.
    """

    def __init__(self, scheduler: EngineView, connector: Any) -> None:
        super().__init__(scheduler, connector)
        of_lmcache(connector, "request_trackers")

    def lost(self, req_id: str, group: int, blocks: Mapping[int, int], pure_tokens: int | None) -> None:
        if self._stop(req_id):
            Unread.add_to(self._scheduler.next_plan).req_ids.add(req_id)

    def stay_pure(self, req_id: str, pure_tokens: int) -> None:
        self._stop(req_id)

    def _stop(self, req_id: str) -> bool:
        """Have a request store nothing more, and return whether it stored until now."""
        if (tracker := self._connector.request_trackers.get(req_id)) is None:
            return False
        # Its unit depends on the release: vLLM's own counts blocks, that of LMCache tokens.
        counted = of_lmcache(tracker, "num_stored_tokens", "num_stored_blocks")
        stored = getattr(tracker, counted)
        setattr(tracker, counted, STOPPED)
        return bool(stored < STOPPED)


#: vLLM's connectors that store blocks -> what follows them. Others store nothing, or what is whole.
FOLLOWERS: dict[str, type[Follower]] = {
    "OffloadingConnector": OffloadingFollower,
    "SimpleCPUOffloadConnector": SimpleFollower,
    LMCACHE: LMCacheFollower,
}


def follow(scheduler: EngineView) -> list[Follower]:
    """Make what follows each connector of a scheduler that stores blocks."""
    if scheduler.connector is None:
        return []
    found = named(scheduler.vllm_config, scheduler.connector)
    return [FOLLOWERS[name](scheduler, connector) for name, connector in found if name in FOLLOWERS]
