"""`evict: host` of `full`: prompts read blocks of the host from staging pages, which steps share."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...config import KVPolicyConfig
from ..actions import Applied
from ..blocks import RequestBlocks
from ..host_pool import HostPool
from ..plan import EvictionPlan
from ..residence import NO_BLOCKS
from .base import Mechanism, Offer, SchedulerView, decodes
from .pressure import APART


@dataclass(slots=True)
class Arriving:
    """The blocks of the host with which a request starts, if the step being planned has room for it.

    They are in use until that step is planned.

    Attributes:
        numbers: logical block -> host block, ascending, of what it takes from the host.
        beside: KV group of vLLM -> the same of other groups, all of which comes to the device.
        holes: of `numbers`, blocks that stay there.
        room: of these, blocks whose place layers fill.
        from_host: how many blocks of its prefix the device does not have, in all groups.
    """

    numbers: dict[int, int]
    beside: dict[int, dict[int, int]]
    holes: range
    room: range
    from_host: int

    @property
    def used(self) -> list[int]:
        """Host blocks, of all groups."""
        return [number for each in (self.numbers, *self.beside.values()) for number in each.values()]


class Staging(Mechanism):
    """Plans prompts such that staging pages hold the host blocks of all of them, and keeps the host blocks of requests.

    What moves blocks knows vLLM (`integration.engine.reaching`).

    Args:
        view: the scheduler, of the server's policy.

    Attributes:
        pool: the host blocks.
        arriving: request -> what it takes from the host, if it starts with the step being planned.
    """

    pool: HostPool

    def __init__(self, view: SchedulerView) -> None:
        super().__init__(view)
        self._pages = staging_blocks(view.max_model_len, view.groups[0].block_size)
        #: Staging pages that no prompt of the step being planned needs.
        self._free = self._pages
        #: Request of the step being planned -> whether it decodes.
        self._planned: dict[str, bool] = {}
        self.arriving: dict[str, Arriving] = {}

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return config.reaches

    def before_schedule(self) -> None:
        self._free = self._pages

    def limit_tokens(self, request: Any, computed_tokens: int, new_tokens: int) -> int:
        req_id, is_decode = request.request_id, decodes(request, computed_tokens)
        blocks = self.view.groups[0].residents.get(req_id)
        if new_tokens and not is_decode and blocks is not None and blocks.config.reaches:
            new_tokens = self._limit_chunk(req_id, blocks, new_tokens)
        if new_tokens:
            self._planned[req_id] = is_decode
        return new_tokens

    def _limit_chunk(self, req_id: str, blocks: RequestBlocks, new_tokens: int) -> int:
        """Return how many tokens of a prompt are computed: all or none. Reserve staging pages for them."""
        arriving = self.arriving.get(req_id)
        holes = blocks.holes if arriving is None else len(arriving.holes)
        if holes > self._free:
            return 0
        self._free -= holes
        return new_tokens

    def on_offer(self, request: Any, blocks: RequestBlocks, taker: Any, offer: Offer) -> Offer:
        """Do as `Mechanism.on_offer` says.

        Decodes of a request read less from its first block on the host on. So few requests give many blocks: one gives
        all before the next one gives any.
        """
        if not blocks.config.reaches:
            return offer
        spare, writes, cost = self._movable(request, taker, offer.spare), room_to_come(blocks), offer.cost
        if len(writes):
            cost = np.full(len(cost), APART // 2 - spare, float)
        return Offer(offer.blocks, cost, spare, writes)

    def _movable(self, request: Any, taker: Any, spare: int) -> int:
        """Return how many of `spare` blocks a request may move to the host with the step being planned.

        Staging has pages for the holes that a prompt had when its chunk was planned. So it moves no more blocks,
        but for the prompt that lacks room itself, which takes free pages.
        """
        if self._planned.get(request.request_id, True):
            return spare
        return min(spare, self._free) if request is taker else 0

    def on_applied(self, applied: Applied) -> None:
        action = applied.action
        if action.req_id not in self._planned or not applied.blocks.config.reaches:
            return
        if self._planned[action.req_id]:  # the decode was planned without these holes
            applied.blocks.note_step(self.view.requests[action.req_id].num_computed_tokens, 1, True)
        else:
            self._free -= len(action.holes)

    def on_scheduled(self, plan: EvictionPlan, tokens: Mapping[str, int]) -> None:
        self._planned.clear()
        # Requests that run need the host before the next step: those that found no room hold nothing there.
        self._cancel_all()

    def on_free(self, request: Any) -> None:
        self._planned.pop(request.request_id, None)
        self.cancel_arrival(request.request_id)
        for group in self.view.groups:
            if (blocks := group.residents.get(request.request_id)) is not None:
                self.pool.release(self.view.next_plan, blocks)

    def on_reset(self) -> None:
        # Weights may have changed.
        self._cancel_all()
        self.pool.forget(self.view.next_plan)

    def cancel_arrival(self, req_id: str) -> None:
        """Let go what a request would have started with, if it has not started."""
        if (arriving := self.arriving.pop(req_id, None)) is not None:
            self.pool.leave(self.view.next_plan, arriving.used)

    def _cancel_all(self) -> None:
        for req_id in list(self.arriving):
            self.cancel_arrival(req_id)


def room_to_come(blocks: RequestBlocks) -> np.ndarray:
    """Return the blocks that become a request's room with its first one on the host: int64 [n]; none if it has one."""
    limits = blocks.limits
    if limits is None or blocks.residence.host:
        return NO_BLOCKS
    return np.arange(limits.sink, limits.sink + limits.room)


def staging_blocks(max_model_len: int, block_size: int) -> int:
    """Return the pages that hold the host blocks of a step's prompts: those of the longest request."""
    return math.ceil(max_model_len / block_size)
