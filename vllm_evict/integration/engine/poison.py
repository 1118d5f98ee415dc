"""Test mode: freed blocks are filled with NaN, so that a read of one shows."""

from collections.abc import Callable

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from ...config import KVPolicyConfig
from ...core.actions import Applied
from ...core.mechanisms import Mechanism, Step
from ...core.plan import EvictionPlan
from ...environment import poison_mode
from .view import EngineView


class Poison(Mechanism):
    """Has workers fill freed blocks with NaN, and blocks that requests get with zeros.

    Args:
        scheduler: an `EvictionMixin`.
    """

    def __init__(self, scheduler: EngineView) -> None:
        super().__init__(scheduler)
        self._allocated: list[int] = []
        for manager in (*scheduler.kv_managers, *scheduler.other_managers):
            manager.allocate_new_blocks = self._noting(manager.allocate_new_blocks)

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return poison_mode()

    def _noting(self, allocate: Callable[..., list[KVCacheBlock]]) -> Callable[..., list[KVCacheBlock]]:
        def noted(request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
            new_blocks = allocate(request_id, num_tokens, num_tokens_main_model)
            self._allocated += [block.block_id for block in new_blocks]
            return new_blocks

        return noted

    def on_applied(self, applied: Applied) -> None:
        plan = self.view.next_plan
        plan.use(applied.written)
        plan.poison += applied.freed

    def plan(self, plan: EvictionPlan, step: Step) -> None:
        plan.clean, self._allocated = self._allocated, []
