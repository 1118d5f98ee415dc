"""Sizes of a policy in blocks, and the bound of a request."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import KVPolicyError, shown
from .frozen import C, Frozen
from .registry import REGISTRY

#: Trigger of requests under `when: pressure`, above any number of blocks.
NEVER = 1 << 40
#: Tokens of vLLM's smallest block on a device. `effective` rounds sizes that follow a budget by it.
SMALLEST_BLOCK = 16
#: Default of `dense_layers`.
DENSE = 2
#: Size that follows the budget -> (the other size, blocks of the budget for each block of this size).
FOLLOWING = {"sink": ("recent", 8), "recent": ("sink", 2)}


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request in one KV group, in whole blocks.

    Attributes:
        budget: resident blocks after a decision.
        trigger: resident blocks above which a decision is due; `NEVER` under `when: pressure`.
        sink: leading blocks that are never evicted.
        recent: trailing *tokens* whose blocks are never evicted.
    """

    budget: int
    trigger: int
    sink: int
    recent: int

    @property
    def bound(self) -> int:
        """Most blocks that a request holds between steps; under pressure the blocks that it never loses."""
        return self.budget if self.trigger == NEVER else self.trigger


def fitted(budget: Any, sizes: Mapping[str, int], unsaid: frozenset[str], block_size: int) -> dict[str, int]:
    """Fit sizes that are not given to a budget.

    Sinks get at most an eighth of the budget's blocks, the recent window at most half of them. Beside a given size they
    leave one block that can be evicted, if the given size does.

    Args:
        budget: tokens as int. For any other budget sizes stay.
        sizes: tokens of `sink` and `recent`, given or the policy's defaults.
        unsaid: names of sizes that are not given.
        block_size: tokens.

    Returns:
        Tokens of `sink` and `recent`; fitted sizes are whole blocks if they shrink.
    """
    found = dict(sizes)
    blocks = math.ceil(budget / block_size) if isinstance(budget, int) else 0
    for size in unsaid if blocks else ():
        other, share = FOLLOWING[size]
        beside = 0 if other in unsaid else math.ceil(sizes[other] / block_size)
        found[size] = min(sizes[size], max(min(blocks // share, blocks - beside - 1), 0) * block_size)
    return found


class Sizes(Frozen):
    """The part of `KVPolicyConfig` about sizes."""

    def _fitted(self: C, block_size: int) -> dict[str, int]:
        return fitted(self.budget, {"sink": self.sink, "recent": self.recent}, self.unsaid, block_size)

    def minimum(self: C, block_size: int) -> int:
        """Return the smallest budget with a block that can be evicted, in blocks."""
        return self._sinks_and_recent(block_size) + 1 if self.protect else 1

    def _sinks_and_recent(self: C, block_size: int) -> int:
        return sum(math.ceil(size / block_size) for size in self._fitted(block_size).values())

    def limits(self: C, block_size: int, prompt_len: int) -> Limits | None:
        """Return the limits of a request with a prompt of this length; None if it keeps everything.

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
            # Without `protect` too, so that ablations compare equal budgets.
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

    def selected(self: C, block_size: int) -> tuple[int, int, int]:
        """Return the blocks that a decode attends to under `select`, and the sinks and recent blocks of them.

        Recent blocks hold `select_recent` tokens wherever the newest one lies in its block.

        Raises:
            KVPolicyError: `select` leaves no block to choose.
        """
        recent = -(-(max(self.select_recent, 1) - 1) // block_size) + 1
        blocks, sinks = -(-self.select // block_size), -(-self.select_sink // block_size)
        if blocks <= sinks + recent:
            raise KVPolicyError(
                f"select: {self.select} tokens leave nothing to choose: blocks of {block_size} tokens with select_sink "
                f"{self.select_sink} and select_recent {self.select_recent} need at least "
                f"{(sinks + recent + 1) * block_size}"
            )
        return blocks, sinks, recent

    def reads_less(self: C, tokens: Any, held: Any, block_size: int) -> Any:
        """Whether a step attends to a part of a request's resident tokens: `select` names fewer, and it decodes.

        Args:
            tokens: that the step computes of the request, int; or of several requests, int array.
            held: resident tokens, those of the step included; as `tokens`.
        """
        return (tokens == 1) & (held > self.selected(block_size)[0] * block_size) if self.select else False

    def selecting(self: C, layers: int) -> tuple[frozenset[int], frozenset[int]]:
        """Return the layers that choose under `select`, and the layers that attend to a choice, of so many layers."""
        if not self.filter_layers:
            own = frozenset(range(DENSE if self.dense_layers is None else self.dense_layers, layers))
            return own, own
        filters = frozenset(self.filter_layers)
        return filters, frozenset(range(min(filters), layers)) - filters

    def bound(self: C, block_size: int, max_model_len: int) -> int | None:
        """Return the most blocks that any request holds between steps; None if a request may keep everything."""
        profiles = any(REGISTRY[name].profiles for name in self.allowed | {self.name})
        whole = self.prompt == "whole" or self.min_prompt > 1
        if "full" in self.allowed or self.reconstructs or profiles or whole:
            return None
        limits = self.limits(block_size, max_model_len)
        return None if limits is None else limits.bound

    def check(self: C, block_size: int, layers: int, kv_heads: int, max_model_len: int, ahead: int = 0) -> None:
        """Check this configuration against a model and its block size.

        Args:
            block_size: tokens.
            layers, kv_heads: of the model.
            max_model_len: tokens.
            ahead: most tokens of a request in flight.

        Raises:
            KVPolicyError: a budget is below `minimum`; the context has no room for a budget; the pattern of heads has
                another shape than the model; `select` leaves no block or no layer to choose.
        """
        if self.pattern and self.head_pattern.retrieval.shape != (layers, kv_heads):
            shape = self.head_pattern.retrieval.shape
            has = f"{self.gates or 'pattern'} has {shape[0]} layers x {shape[1]} KV heads"
            raise KVPolicyError(f"{has}, the model has {layers} x {kv_heads}")
        for part in (part for part in self.classes.values() if part.select):
            part.selected(block_size)
            choosing, sparse = part.selecting(layers)
            if not sparse or max(choosing) >= layers:
                field = "filter_layers" if part.filter_layers else "dense_layers"
                raise KVPolicyError(
                    f"{field} of a model with {layers} layers, from 0 on, got {shown(getattr(part, field) or DENSE)}; "
                    "expected layers of the model, and a layer after them that selects"
                )
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
        """Check the token ids of kvzip's `instruction`. An unknown id would end the engine with the first request.

        Raises:
            KVPolicyError: an id is not below `vocab_size`.
        """
        for token in self.instruction:
            if token >= vocab_size:
                raise KVPolicyError(f"instruction: {token} is no token of the model, whose ids are below {vocab_size}")
