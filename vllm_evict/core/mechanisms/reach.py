"""`evict: host` of `full`: prompts read blocks of the host from staging pages, which steps share."""

import math
from typing import Any

from ...config import KVPolicyConfig
from .base import Mechanism, SchedulerView


class Reach(Mechanism):
    """Plans prompts such that staging pages hold the host blocks of all of them.

    Args:
        view: the scheduler, of the server's policy.
    """

    def __init__(self, view: SchedulerView) -> None:
        super().__init__(view)
        self._pages = staging_blocks(view.max_model_len, view.groups[0].block_size)
        self._free = self._pages

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return config.reaches

    def before_schedule(self) -> None:
        self._free = self._pages

    def limit_tokens(self, request: Any, computed_tokens: int, new_tokens: int) -> int:
        blocks = self.view.groups[0].residents.get(request.request_id)
        left = request.num_tokens - computed_tokens
        if blocks is None or not blocks.holes or not new_tokens or left <= 1:
            return new_tokens
        # A chunk of one token would read as a decode does.
        if new_tokens == 1 or blocks.holes > self._free:
            return 0
        self._free -= blocks.holes
        return new_tokens


def staging_blocks(max_model_len: int, block_size: int) -> int:
    """Return the pages that hold the host blocks of a step's prompts: those of the longest request."""
    return math.ceil(max_model_len / block_size)
