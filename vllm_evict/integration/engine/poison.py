"""Test mode: freed blocks are filled with NaN, so that a read of one shows."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from ...config import KVPolicyConfig
from ...core.actions import Applied
from ...core.mechanisms import Mechanism, Step
from ...core.plan import EvictionPlan, Payload
from ...environment import poison_mode
from ..seams import replaces
from .view import EngineView


@dataclass(slots=True)
class Fills(Payload):
    """Blocks of the pool that workers fill, once they have carried out the orders of the step.

    Attributes:
        poison: freed physical blocks, filled with NaN.
        clean: reallocated physical blocks, filled with zeros.
    """

    feature = "poison"

    poison: list[int] = field(default_factory=list)
    clean: list[int] = field(default_factory=list)

    @property
    def writes(self) -> Collection[int]:
        return self.poison

    def use(self, blocks: Collection[int]) -> None:
        if self.poison:
            self.poison = [block for block in self.poison if block not in blocks]


class Poison(Mechanism):
    """Has workers fill freed blocks with NaN, and blocks that requests get with zeros.

    Args:
        scheduler: an `EvictionMixin`.

    Attributes:
        allocated: blocks that requests got since the last plan.
    """

    def __init__(self, scheduler: EngineView) -> None:
        super().__init__(scheduler)
        self.allocated: list[int] = []
        for manager in (*scheduler.kv_managers, *scheduler.other_managers):
            note_new.on(manager, self)

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return poison_mode()

    def on_applied(self, applied: Applied) -> None:
        plan = self.view.next_plan
        plan.use(applied.written)
        if applied.freed:
            Fills.add_to(plan).poison += applied.freed

    def plan(self, plan: EvictionPlan, step: Step) -> None:
        if self.allocated:
            Fills.add_to(plan).clean, self.allocated = self.allocated, []


@replaces(
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.allocate_new_blocks",
    "vllm.v1.core.single_type_kv_cache_manager:MambaManager.allocate_new_blocks",
    "vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager.allocate_new_blocks",
    "vllm.v1.core.single_type_kv_cache_manager:ChunkedLocalAttentionManager.allocate_new_blocks",
    why="in tests blocks that requests get are filled with zeros",
    remove_when="never: it is there in poison mode alone",
)
def note_new(allocate: Callable[..., list[KVCacheBlock]], poison: Poison) -> Callable[..., list[KVCacheBlock]]:
    def noted(request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        new_blocks = allocate(request_id, num_tokens, num_tokens_main_model)
        poison.allocated += [block.block_id for block in new_blocks]
        return new_blocks

    return noted
