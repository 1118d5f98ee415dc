"""KV events of blocks on the host: who mirrors prefix caches, as routers do, hears which prefixes are there."""

from collections.abc import Callable
from typing import Any

import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash

from ...core.host_pool import HostPool
from ..seams import replaces

#: vLLM's name of host memory in events.
MEDIUM = "CPU"
#: KV group, and hash of a block as events have it.
Key = tuple[int | None, Any]


class HostEvents:
    """Adds events of prefixes on the host to those that vLLM takes of its pool.

    A block is told of the host while the host has it and the pool does not, so each block is known of one medium. Its
    departure comes before the events of the pool, and its arrival after them: who looks at no medium knows it, too.

    The event of an arrival has what vLLM's own said when the pool stored that block: tokens, parent, adapter. Where
    that does not tell whose these are, as in sliding windows, the event has the hash alone.

    Args:
        pool: vLLM's `BlockPool`, with events enabled.
        host: the host blocks; it notes what comes and goes from now on.
    """

    def __init__(self, pool: Any, host: HostPool) -> None:
        self._pool, self._host = pool, host
        #: Blocks that the host has, with their hashes, and those that were told of.
        self._on_host: dict[Key, Any] = {}
        self._announced: set[Key] = set()
        #: vLLM's last event that has the tokens of a block, which pool or host may have, and the block's place in it.
        self._told: dict[Key, tuple[Any, int]] = {}
        host.moved = []
        add_events.on(pool, self)

    def extended(self, events: list[Any]) -> list[Any]:
        """Return events of the pool between those of the host."""
        changed, left = self._take_moved(), set()
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._announced.clear()
                changed = dict.fromkeys(self._on_host)
                continue
            keys = [(event.group_idx, each) for each in event.block_hashes]
            changed |= dict.fromkeys(keys)
            if not isinstance(event, BlockStored):
                left.update(keys)
            elif len(event.token_ids) == len(keys) * event.block_size:
                self._told |= {key: (event, at) for at, key in enumerate(keys)}
        before: list[Any] = []
        after: list[Any] = []
        for key in changed:
            there = key in self._on_host and not self._in_pool(self._on_host[key])
            if key in self._announced and (not there or key in left):
                self._announced.discard(key)
                before.append(BlockRemoved(block_hashes=[key[1]], medium=MEDIUM, group_idx=key[0]))
            if there and key not in self._announced:
                self._announced.add(key)
                after.append(self._stored(key))
        self._forget_some()
        return [*before, *events, *after]

    def _take_moved(self) -> dict[Key, None]:
        """Return the blocks that came to the host, or left it, since the last events."""
        moved, self._host.moved = self._host.moved or [], []
        for block_hash, there in moved:
            if there:
                self._on_host[_key(block_hash)] = block_hash
            else:
                self._on_host.pop(_key(block_hash), None)
        return dict.fromkeys(_key(block_hash) for block_hash, _ in moved)

    def _in_pool(self, block_hash: Any) -> bool:
        return bool(self._pool.get_cached_block(get_block_hash(block_hash), [get_group_id(block_hash)]))

    def _forget_some(self) -> None:
        """Forget what was told of blocks that are gone, once these are as many as there can be others."""
        if len(self._told) > 2 * (len(self._pool.blocks) + self._host.blocks):
            of_pool = {_key(block.block_hash) for block in self._pool.blocks if block.block_hash is not None}
            self._told = {key: told for key, told in self._told.items() if key in of_pool or key in self._on_host}

    def _stored(self, key: Key) -> BlockStored:
        (group, own), (event, at) = key, self._told.get(key, (None, 0))
        if event is None:
            return BlockStored(
                block_hashes=[own], parent_block_hash=None, token_ids=[], block_size=0, lora_id=None, medium=MEDIUM,
                lora_name=None, group_idx=group,
            )  # fmt: skip
        return msgspec.structs.replace(
            event,
            block_hashes=[own],
            parent_block_hash=event.block_hashes[at - 1] if at else event.parent_block_hash,
            token_ids=event.token_ids[at * event.block_size : (at + 1) * event.block_size],
            extra_keys=event.extra_keys and event.extra_keys[at : at + 1],
            medium=MEDIUM,
        )


@replaces(
    "vllm.v1.core.block_pool:BlockPool.take_events",
    why="KV events tell of prefixes on the host, too",
    remove_when="vLLM takes events of other caches beside those of its pool",
)
def add_events(take: Callable[[], list[Any]], events: HostEvents) -> Callable[[], list[Any]]:
    def taken() -> list[Any]:
        return events.extended(take())

    return taken


def _key(block_hash: Any) -> Key:
    """Return what events call a block of this hash."""
    return get_group_id(block_hash), maybe_convert_block_hash(get_block_hash(block_hash))
