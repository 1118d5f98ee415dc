"""KV connectors beside eviction: which of them are served, and what they have to know of blocks that requests lose.

Blocks that a connector loads are whole and pure, like blocks of a prefix hit. Blocks that it stores have to be pure,
and stay as they are until they are stored.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..config import KVPolicyConfig

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from .scheduler import EvictionMixin

#: vLLM's connectors that bring a prompt's blocks from the engine that computed it.
ARRIVING = (
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "MooncakeConnector",
    "DecodeBenchConnector",
    "ExampleConnector",
)
#: vLLM's connectors that keep blocks of the prefix cache in host memory or on disk.
OFFLOADING = ("OffloadingConnector", "SimpleCPUOffloadConnector")


def check(vllm_config: Any, config: KVPolicyConfig) -> list[tuple[bool, str, str]]:
    """What is refused of a configuration with a KV connector: (whether, what, what to do instead)."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return []
    name, role = transfer.kv_connector, transfer.kv_role
    connector = f"the KV connector {name}"
    own = bool(transfer.kv_connector_module_path)
    return [
        (
            role == "kv_producer",
            'kv_role "kv_producer": it would evict blocks of a prompt before the other engine has them',
            'leave --kv-policy out on the server that prefills, and set it where prompts arrive ("kv_consumer")',
        ),
        (
            own or name not in (*ARRIVING, *OFFLOADING),
            f"{connector}{' of your own' if own else ''}, which may store blocks that were computed over holes",
            f"use {', '.join(ARRIVING[:4])} as kv_consumer, or {' or '.join(OFFLOADING)}, or leave --kv-policy out",
        ),
        (
            name in ARRIVING and role != "kv_consumer",
            f"{connector} and kv_role {role!r}: an engine that evicts has no whole prompts to send",
            'set "kv_role": "kv_consumer" here, and prefill on a server without --kv-policy',
        ),
        (
            name in ARRIVING and bool(transfer.get_from_extra_config("bidirectional_kv_xfer", False)),
            f"{connector} and bidirectional_kv_xfer, which reads blocks of requests that have ended here",
            "leave bidirectional_kv_xfer out",
        ),
        (config.evict == "host", f"evict: host and {connector}", "set evict: drop"),
        (config.context is not None, f"a context and {connector}", "leave context out"),
        (
            config.reconstructs,
            f"{connector} while requests may use kvzip, which reads prompts again",
            "leave kvzip out; keydiff, h2o and snapkv need no second pass",
        ),
        (
            len(config.classes) > 1,
            f"{connector}, because it puts heads into pages that other engines and the host don't know",
            "use a policy for whole layers, such as h2o, keydiff or sink-window",
        ),
        (
            config.when == "pressure" and vllm_config.max_concurrent_batches > 1,
            f"when: pressure, {connector} and async scheduling: what it evicts is free a step too late",
            "set when: budget, or --no-async-scheduling",
        ),
    ]


def hands_on(params: Any) -> bool:
    """Whether a request's `extra_args` ask that another engine gets its blocks when it ends."""
    transfer = (params or {}).get("kv_transfer_params")
    return isinstance(transfer, Mapping) and bool(transfer.get("do_remote_decode"))


class Follower:
    """Tells a connector what requests lose. This one tells nothing: its connector stores nothing.

    Args:
        scheduler: whose connector it is.
    """

    def __init__(self, scheduler: "EvictionMixin") -> None:
        self._scheduler = scheduler

    def lost(self, req_id: str, group: int, blocks: Mapping[int, int], pure_tokens: int) -> None:
        """Blocks of a request are holes now, or are about to be written.

        Args:
            group: number of vLLM's KV group.
            blocks: logical block -> the physical block that it was.
            pure_tokens: of the request.
        """

    def stay_pure(self, req_id: str, pure_tokens: int) -> None:
        """No more than so many tokens of a request are pure."""

    def starts_over(self, request: "Request") -> None:
        """A request has no blocks any more, and is computed again."""

    def forget(self, req_id: str) -> None:
        """A request ends."""

    def before_metadata(self, written: Iterable[int]) -> None:
        """The connector is about to plan a step in which workers write these blocks, beside new ones."""


class Offloading(Follower):
    """Follows vLLM's `OffloadingConnector`, which stores what a request computed by its hashes, published or not.

    - It stores a request's first `max_offload_tokens` tokens: no more than are pure.
    - It reads blocks by the table that the request had: a block that is a hole now is 0 there, as of sliding windows.
    - Blocks that it still reads are fenced, as it fences blocks of sliding windows: when the pool hands one out,
      workers wait until it is stored. It fences those of full attention when a request ends.
    """

    def __init__(self, scheduler: "EvictionMixin") -> None:
        self._scheduler, self._stores = scheduler, scheduler.connector.scheduler
        #: Request -> the tokens to store that its client asked for.
        self._asked: dict[str, int | None] = {}

    def lost(self, req_id: str, group: int, blocks: Mapping[int, int], pure_tokens: int) -> None:
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
        self.forget(req_id)

    def forget(self, req_id: str) -> None:
        self._asked.pop(req_id, None)

    def before_metadata(self, written: Iterable[int]) -> None:
        self._stores._current_batch_allocated_block_ids.update(written)


class SimpleOffloading(Follower):
    """Follows vLLM's `SimpleCPUOffloadConnector`.

    It stores blocks that are published, under their own hashes, and holds them until they are stored. But it says of a
    block that it stored which tokens of which request it is: a block that is a hole now, and another request's later,
    must not be taken for the first one's.
    """

    def lost(self, req_id: str, group: int, blocks: Mapping[int, int], pure_tokens: int) -> None:
        stores = self._scheduler.connector.scheduler_manager
        if stores is not None and (state := stores._reqs_to_store.get(req_id)) is not None:
            table = state.block_ids[group]
            for index in blocks:
                if index < len(table):
                    table[index] = 0


def follow(scheduler: "EvictionMixin") -> Follower | None:
    """What follows the connector of a scheduler; None if it has none."""
    if scheduler.connector is None:
        return None
    followers = {"OffloadingConnector": Offloading, "SimpleCPUOffloadConnector": SimpleOffloading}
    return followers.get(scheduler.vllm_config.kv_transfer_config.kv_connector, Follower)(scheduler)
