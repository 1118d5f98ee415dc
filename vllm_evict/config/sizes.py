"""What sizes in tokens come to in blocks, and what bounds a request."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import KVPolicyError
from .frozen import C, Frozen
from .registry import REGISTRY

#: Trigger of requests that are evicted from only when the pool runs out.
NEVER = 1 << 40
#: Tokens of vLLM's smallest block on a device, in which sizes that follow a budget are shown.
SMALLEST_BLOCK = 16
#: Size that follows the budget -> the size beside it, and blocks of the budget for one block of it.
FOLLOWING = {"sink": ("recent", 8), "recent": ("sink", 2)}


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may keep resident, in whole blocks of one KV group.

    Attributes:
        budget: blocks left after a decision.
        trigger: blocks above which a decision is taken; `NEVER` under `when: pressure`.
        sink: leading blocks that are never evicted.
        recent: trailing *tokens* whose blocks are never evicted.
    """

    budget: int
    trigger: int
    sink: int
    recent: int

    @property
    def bound(self) -> int:
        """Blocks that a request may insist on between steps: under pressure its floor."""
        return self.budget if self.trigger == NEVER else self.trigger


def fitted(budget: Any, sizes: Mapping[str, int], unsaid: frozenset[str], block_size: int) -> dict[str, int]:
    """Tokens of `sink` and `recent`; sizes that were not given in whole blocks where the budget is small for them.

    Sinks are at most an eighth of the budget's blocks and the recent window at most half of them. Beside a size that
    was given they leave one block that can go, if that size does.

    Args:
        budget: tokens; sizes follow no other budget.
        sizes: tokens of both, given or the policy's defaults.
        unsaid: names of those that were not given.
        block_size: tokens.
    """
    found = dict(sizes)
    blocks = math.ceil(budget / block_size) if isinstance(budget, int) else 0
    for size in unsaid if blocks else ():
        other, share = FOLLOWING[size]
        beside = 0 if other in unsaid else math.ceil(sizes[other] / block_size)
        found[size] = min(sizes[size], max(min(blocks // share, blocks - beside - 1), 0) * block_size)
    return found


class Sizes(Frozen):
    """Of `KVPolicyConfig`: sizes."""

    def _fitted(self: C, block_size: int) -> dict[str, int]:
        return fitted(self.budget, {"sink": self.sink, "recent": self.recent}, self.unsaid, block_size)

    def minimum(self: C, block_size: int) -> int:
        """The smallest budget that leaves something to choose, in blocks."""
        return self._sinks_and_recent(block_size) + 1 if self.protect else 1

    def _sinks_and_recent(self: C, block_size: int) -> int:
        # A window that does not end on a block's edge reaches into one block more.
        return sum(math.ceil(size / block_size) for size in self._fitted(block_size).values())

    def limits(self: C, block_size: int, prompt_len: int) -> Limits | None:
        """Blocks that a request with this prompt may keep; None if all of them.

        Raises:
            KVPolicyError: the budget is smaller than `minimum`.
        """
        if self.name == "full":
            return None
        limits = self._limits(block_size, prompt_len)
        return None if prompt_len < self.min_prompt else limits

    def _limits(self: C, block_size: int, prompt_len: int) -> Limits:
        minimum = self.minimum(block_size)
        if self.budget is None:
            # The same without protection: an ablation compares equal budgets.
            budget = self._sinks_and_recent(block_size) + 1
        elif isinstance(self.budget, float):
            budget = max(math.ceil(math.ceil(self.budget * prompt_len) / block_size), minimum)
        else:
            budget = math.ceil(self.budget / block_size)
            if budget < minimum:
                raise KVPolicyError(
                    f"budget {self.budget} is too small for blocks of {block_size} tokens: sink {self.sink} + recent "
                    f"{self.recent} + one block need at least {minimum * block_size}"
                )
        tokens = self.budget if isinstance(self.budget, int) else budget * block_size
        if self._share not in (None, 1):
            budget = max(minimum, minimum - 1 + round(self._share * (budget - minimum + 1)))
            tokens = budget * block_size
        trigger = NEVER if self.when == "pressure" else math.ceil((tokens + self.buffer) / block_size)
        if not self.protect:
            return Limits(budget, trigger, 0, 0)
        sizes = self._fitted(block_size)
        return Limits(budget, trigger, math.ceil(sizes["sink"] / block_size), sizes["recent"])

    def bound(self: C, block_size: int, max_model_len: int) -> int | None:
        """Most blocks that any request may hold between steps; None if requests may keep everything."""
        profiles = any(REGISTRY[name].profiles for name in self.allowed | {self.name})
        if "full" in self.allowed or self.reconstructs or profiles or self.min_prompt > 1:
            return None
        limits = self.limits(block_size, max_model_len)
        return None if limits is None else limits.bound

    def check(self: C, block_size: int, layers: int, kv_heads: int, max_model_len: int, ahead: int = 0) -> None:
        """Make sure that this config means something for a model and its blocks.

        Args:
            block_size: tokens.
            layers, kv_heads: of the model.
            max_model_len: tokens.
            ahead: most tokens of a request that are in flight.

        Raises:
            KVPolicyError: a budget leaves nothing to choose, or more than the context has room for; heads are split for
                a model of another shape.
        """
        if self.pattern and self.head_pattern.retrieval.shape != (layers, kv_heads):
            shape = self.head_pattern.retrieval.shape
            has = f"{self.gates or 'pattern'} has {shape[0]} layers x {shape[1]} KV heads"
            raise KVPolicyError(f"{has}, the model has {layers} x {kv_heads}")
        for part in self.classes.values():
            limits = part.limits(block_size, max_model_len)
            if not limits or not isinstance(self.context, int):
                continue
            if (limits.trigger + 1) * block_size + ahead > self.context:
                raise KVPolicyError(
                    f"context: {self.context} tokens have no room for budget and buffer "
                    f"({limits.trigger * block_size}), one block of {block_size} and {ahead} in flight: "
                    "set a smaller budget or --max-num-batched-tokens"
                )

    def check_instruction(self: C, vocab_size: int) -> None:
        """Make sure that the model knows the tokens that kvzip puts between a prompt and its repetition.

        Raises:
            KVPolicyError: naming one that it does not know, which would end the engine with the first request.
        """
        for token in self.instruction:
            if token >= vocab_size:
                raise KVPolicyError(f"instruction: {token} is no token of the model, whose ids are below {vocab_size}")
