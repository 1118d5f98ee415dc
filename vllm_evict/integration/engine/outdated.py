"""Tells what was computed before weights changed, so that nothing outlives vLLM's pool for which it is void."""

import os
from collections.abc import Callable, Iterable
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from ...config import KVPolicyConfig
from ...core.mechanisms import Mechanism
from ..seams import replaces
from .hits import Hit
from .view import EngineView

logger = init_logger("vllm.evict")


class Outdated(Mechanism):
    """Knows blocks of the pool that are outdated, and notes requests that are (`RequestState.outdated`).

    All that is there when weights change is outdated. So is what requests that run compute from then on, and what is
    computed from a prefix of outdated blocks, which vLLM's prefix cache has until it is reset.

    Comes before the mechanisms that keep what was computed: the host's blocks, scores of prompts.

    Args:
        scheduler: an `EvictionMixin`.

    Attributes:
        blocks: outdated blocks of the pool.
        before_handing_out: each called with a block that the pool is about to hand out, while `blocks` has it.
    """

    def __init__(self, scheduler: EngineView) -> None:
        super().__init__(scheduler)
        self._scheduler, self._pool = scheduler, scheduler.kv_cache_manager.block_pool
        self.blocks: set[int] = set()
        #: Name of an adapter -> what was loaded under it: id, path, and `_state_of` the files.
        self._loaded: dict[str, tuple[Any, ...]] = {}
        self._warned = False
        self.before_handing_out: list[Callable[[KVCacheBlock], None]] = []
        scheduler.slots.published.append(self._note)
        hand_out.on(self._pool, self)

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return config.reaches or config.reconstructs

    def on_reset(self) -> None:
        self.blocks.update(block.block_id for block in self._pool.blocks if block.block_hash is not None)
        for blocks in self._scheduler.residents.values():
            blocks.state.outdated |= blocks.state.held_blocks > 0

    def _note(self, request: Request, tokens: int, published: Iterable[KVCacheBlock]) -> None:
        blocks = self._scheduler.residents.get(request.request_id)
        if blocks is not None and blocks.state.outdated:
            self.blocks.update(block.block_id for block in published)

    def on_hit(self, request: Request, hit: Hit) -> Hit:
        """Note whether a request that may start with this hit is outdated."""
        taken = (block.block_id for blocks in hit.blocks.blocks for block in blocks)
        outdated = not self.blocks.isdisjoint(taken) if self.blocks else False
        self._scheduler.residents[request.request_id].state.outdated = outdated or self._is_unsure(request.lora_request)
        return hit

    def on_adapter(self, adapter: Any) -> bool:
        before, self._loaded[adapter.lora_name] = self._loaded.get(adapter.lora_name), (now := _state_of(adapter))
        return before is not None and (before != now or now[-1] is None)

    def _is_unsure(self, adapter: Any) -> bool:
        """Return whether an adapter's files changed since it was loaded.

        A worker loads an adapter with the first step that needs it, once more if others took its place meanwhile, and
        in each such step if the request says so (`load_inplace`). The scheduler does not hear of that.
        """
        if adapter is None:
            return False
        now = _state_of(adapter)
        unsure = self._loaded.setdefault(adapter.lora_name, now) != now
        if unsure and not self._warned:
            self._warned = True
            logger.warning(
                "LoRA adapter %r got other files, or another id, since it was loaded; nothing that outlives the prefix "
                "cache is used for it until it is loaded again by an `add_lora` (HTTP: /v1/load_lora_adapter). Said "
                "once.",
                adapter.lora_name,
            )
        return unsure


@replaces(
    "vllm.v1.core.block_pool:BlockPool._maybe_evict_cached_block",
    why="a block that the pool hands out is outdated no more; before, its content may be kept on the host",
    remove_when="vLLM tells what leaves its prefix cache, before the block is handed out",
)
def hand_out(evict: Callable[..., bool], outdated: Outdated) -> Callable[..., bool]:
    def evicted(block: KVCacheBlock) -> bool:
        for heard in outdated.before_handing_out:
            heard(block)
        outdated.blocks.discard(block.block_id)
        return bool(evict(block))

    return evicted


def _state_of(adapter: Any) -> tuple[Any, ...]:
    """Return what tells an adapter's weights from others: its id, its path, and the state of its files.

    The state is None where there is no such folder: the path may be a name on a hub.
    """
    try:
        with os.scandir(adapter.lora_path) as entries:
            stats = [(entry.name, entry.stat()) for entry in entries]
    except OSError:
        return adapter.lora_int_id, adapter.lora_path, None
    files = sorted((name, its.st_ino, its.st_size, its.st_mtime_ns, its.st_ctime_ns) for name, its in stats)
    return adapter.lora_int_id, adapter.lora_path, tuple(files)
