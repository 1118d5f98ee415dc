"""Sizes of a policy in blocks, and the bound of a request."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from .errors import KVPolicyError, shown
from .frozen import C, Frozen
from .registry import REGISTRY

#: Trigger of requests under `when: pressure`, above any number of blocks.
NEVER = 1 << 40
#: Tokens of vLLM's smallest block on a device. `effective` rounds sizes that follow a budget by it.
SMALLEST_BLOCK = 16
#: Blocks of the least budget that is not given: sinks of one block are an eighth of them.
LEAST_BUDGET = 8
#: Budget under `when: pressure` that is not given: a share of the prompt, and the fewest tokens.
FLOOR, LEAST_FLOOR = 0.5, 1024
#: Blocks that a decision chooses among at least, where the user gave no recent tokens.
LEAST_CHOICE = 2
#: Most tokens of a prompt that read the same blocks under `read_prompts`.
TILE = 32
#: Size that follows the budget -> how many times it fits into the budget at least. In this order they get their blocks.
SHARES = {"recent": 4, "sink": 8}


def share_of(share: float, count: int) -> int:
    """Return a share of a count, rounded up, by the share's decimal digits: a hundredth of 700 is 7."""
    return math.ceil(Fraction(str(share)) * count)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request in one KV group, in whole blocks.

    Attributes:
        budget: resident blocks after a decision.
        trigger: resident blocks above which a decision is due; `NEVER` under `when: pressure`.
        sink: leading blocks that are never evicted.
        recent: trailing *tokens* whose blocks are never evicted.
        room: where evicted blocks wait on the host, blocks after the sinks into which layers bring what they read; 0
            elsewhere.
        recent_blocks: blocks that hold the recent tokens there, wherever the newest one lies in its block.
    """

    budget: int
    trigger: int
    sink: int
    recent: int
    room: int = 0
    recent_blocks: int = 0

    @property
    def bound(self) -> int:
        """Most blocks that a request holds between steps; under pressure the blocks that it never loses."""
        return self.budget if self.trigger == NEVER else self.trigger


class Sizes(Frozen):
    """The part of `KVPolicyConfig` about sizes.

    Sizes become whole blocks, which may have thousands of tokens. One rule serves all block sizes (`_resolved`):

    - Sizes that the user gave stay. A budget grows to the fewest blocks that hold sinks, recent tokens and one block to
      choose; `LEAST_CHOICE` blocks, if the user gave no recent tokens.
    - A budget that is not given has at least `LEAST_BUDGET` blocks. Under `when: pressure` it is `FLOOR` of the prompt,
      and at least `LEAST_FLOOR` tokens.
    - Sinks and recent tokens that are not given are the policy's, but at most an eighth and a quarter of the budget's
      blocks, and at least one block each.
    """

    @property
    def unsaid(self) -> frozenset[str]:
        """Names of `budget`, `sink` and `recent` that the user did not give, and that follow the size of blocks."""
        return frozenset({"budget", "sink", "recent"} & self.policy.options) - self.given

    @property
    def reaches(self) -> bool:
        """Whether blocks of a request over its budget wait on the host, and are read from there."""
        return bool(self.name == "full" and self.evict == "host")

    @property
    def sparse(self) -> bool:
        """Whether decodes read a part of the blocks that a request has on the device."""
        return bool(self.read and self.evict != "host")

    @property
    def holds(self) -> int:
        """Most steps that read one choice."""
        return self.hold if isinstance(self.hold, int) else 1 << 30

    @property
    def holds_until(self) -> float:
        """The cosine of queries below which a choice ends; 0: it stands for a number of steps."""
        return 0.0 if isinstance(self.hold, int) else float(self.hold)

    @property
    def leads_by_list(self) -> bool:
        """Whether `leaders` names layers, which read all resident blocks."""
        return not isinstance(self.leaders, int)

    @property
    def layers_differ(self) -> bool:
        """Whether some layers of decodes read all resident blocks, and others a part."""
        return bool(self.dense_layers) or self.leads_by_list

    @property
    def keeps_all(self) -> bool:
        """Whether a request keeps all its blocks on the device."""
        return self.name == "full" and not self.reaches

    @property
    def takes_whole(self) -> bool:
        """Whether requests may hold whole prompts before their first decision (`prompt: whole`)."""
        return self.prompt == "whole" or (self.keeps_all and not self.sparse)

    def _most(self, size: str) -> int:
        """Return the tokens of `sink` or `recent` as given, or as the policy has them in a budget of any size."""
        if size not in self.unsaid:
            return int(getattr(self, size))
        if size == "recent" and self.policy.window_is_the_budget and self.budget is not None:
            return 0
        return int(self.policy.defaults[size])

    def _least(self, block_size: int) -> int:
        """Return the fewest blocks with sinks, recent tokens and blocks to choose."""
        blocks = {size: math.ceil(self._most(size) / block_size) for size in SHARES}
        said = sum(count for size, count in blocks.items() if size not in self.unsaid)
        least = said + sum(min(blocks[size], 1) for size in SHARES.keys() & self.unsaid)
        least += LEAST_CHOICE if "recent" in self.unsaid else 1
        return least if self._granted is None else max(min(least, self._granted), said + 1)

    def _resolved(self, block_size: int, prompt_len: int) -> tuple[int, dict[str, int]]:
        """Return the budget in blocks, and tokens of `sink` and `recent`."""
        sizes = {size: self._most(size) for size in SHARES}
        if self.budget is None and self._granted is None:
            # Without `protect` too, so that ablations compare equal budgets.
            return sum(math.ceil(tokens / block_size) for tokens in sizes.values()) + 1, sizes
        if self.budget is None:
            blocks = self._granted
        else:
            tokens = share_of(self.budget, prompt_len) if isinstance(self.budget, float) else self.budget
            if self.when == "pressure" and "budget" in self.unsaid:
                tokens = max(tokens, LEAST_FLOOR)
            blocks, least = math.ceil(tokens / block_size), self._least(block_size) if self.protect else 1
            blocks = max(blocks, least, LEAST_BUDGET if "budget" in self.unsaid else 1)
        room = blocks - 1 - sum(math.ceil(sizes[size] / block_size) for size in SHARES.keys() - self.unsaid)
        for size, share in SHARES.items():
            if size in self.unsaid:
                most = max(min(max(blocks // share, 1), room), 0)
                sizes[size] = min(sizes[size], most * block_size)
                room -= math.ceil(sizes[size] / block_size)
        if self.budget is None:
            blocks = sum(math.ceil(tokens / block_size) for tokens in sizes.values()) + 1
        return blocks, sizes

    def minimum(self: C, block_size: int, prompt_len: int = 0) -> int:
        """Return the blocks of sinks and recent tokens, and one that can be evicted: 1 if nothing is protected."""
        _, sizes = self._resolved(block_size, prompt_len)
        return sum(math.ceil(tokens / block_size) for tokens in sizes.values()) + 1 if self.protect else 1

    def limits(self: C, block_size: int, prompt_len: int) -> Limits | None:
        """Return the limits of a request with a prompt of this length; None if it keeps everything."""
        if self.keeps_all or prompt_len < self.min_prompt:
            return None
        return self._limits(block_size, prompt_len)

    def _limits(self: C, block_size: int, prompt_len: int) -> Limits:
        budget, sizes = self._resolved(block_size, prompt_len)
        if self._share not in (None, 1):
            minimum = self.minimum(block_size, prompt_len)
            budget = max(minimum, minimum - 1 + round(self._share * (budget - minimum + 1)))
        sink, beside = math.ceil(sizes["sink"] / block_size), (0, 0)
        if self.reaches:  # a room of one block at least; older blocks are holes, which layers can't read as recent ones
            recent_blocks = _spanned(sizes["recent"], block_size)
            budget = max(budget, sink + recent_blocks + 1)
            beside = budget - sink - recent_blocks, recent_blocks
        tokens = budget * block_size
        if isinstance(self.budget, int) and budget == math.ceil(self.budget / block_size):
            tokens = self.budget
        trigger = NEVER if self.when == "pressure" else math.ceil((tokens + self.buffer) / block_size)
        if not self.protect:
            return Limits(budget, trigger, 0, 0)
        return Limits(budget, trigger, sink, sizes["recent"], *beside)

    def outgrows(self: C, block_size: int, prompt_len: int) -> bool:
        """Return whether a prompt of this length has holes at its end, whatever room the pool has."""
        limits = self.limits(block_size, prompt_len)
        return limits is not None and prompt_len > limits.trigger * block_size

    def became(self: C, block_size: int) -> str:
        """Return what the budget and `read` come to in blocks of this size, in words; "" if they stay."""
        return "; ".join(filter(None, (self._budget_became(block_size), self._read_became(block_size))))

    def _read_became(self: C, block_size: int) -> str:
        if not self.sparse:
            return ""
        blocks, sinks, recent = self.read_blocks(block_size)
        if blocks * block_size - self.read < block_size:
            return ""
        return (
            f"a read of {self.read} tokens becomes {blocks * block_size} tokens, {blocks} blocks of {block_size}: "
            f"{sinks} of sinks, {recent} of recent tokens, {blocks - sinks - recent} to choose"
        )

    def _budget_became(self: C, block_size: int) -> str:
        if self.keeps_all or self.budget is None:
            return ""
        limits = self._limits(block_size, 1)
        tokens, recent = limits.budget * block_size, math.ceil(limits.recent / block_size)
        if tokens == self.budget:
            return ""
        ratio = isinstance(self.budget, float)
        budget = f"{100 * self.budget:g} % of a prompt is at least" if ratio else f"{self.budget} tokens becomes"
        return (
            f"a budget of {budget} {tokens} tokens, {limits.budget} blocks of {block_size}: {limits.sink} of sinks, "
            f"{recent} of recent tokens, {limits.budget - limits.sink - recent} to choose"
        )

    def read_blocks(self: C, block_size: int, prompts: bool = False) -> tuple[int, int, int]:
        """Return the blocks that a decode reads where nothing is on the host, and the sinks and recent blocks of them.

        Recent blocks hold the recent tokens wherever the newest one lies in its block. The rule of `Sizes` holds:
        `read` is the budget. What a policy protects of eviction is more than has to be read, so it counts as not given.
        `prompts`: what a tile of a prompt reads instead, by `read_prompts`; the tile's first block is recent.
        """
        given = self.given if self.name == "full" else frozenset[str]()
        blocks, choice = -(-self.read // block_size), 1 if "recent" in given else LEAST_CHOICE
        if prompts:
            blocks, choice = -(-self.read_prompts // block_size), choice + _spanned(TILE, block_size) - 1
        window = self.policy.defaults["recent"] if self.policy.window_is_the_budget else self._most("recent")
        sinks, recent = math.ceil(self._most("sink") / block_size), _spanned(window, block_size)
        if "recent" not in given:
            recent = min(recent, max(blocks // SHARES["recent"], 1))
        if "sink" not in given:
            sinks = min(sinks, max(blocks // SHARES["sink"], 1))
        return max(blocks, sinks + recent + choice), sinks, recent

    def reads_less(self: C, decodes: Any, held: Any, block_size: int, holes: int = 0) -> Any:
        """Return whether a step reads a part of what a request has, on the device and on the host.

        A decode does if `read` is less, a chunk of a prompt if `read_prompts` is, and a decode with blocks on the host.

        Args:
            decodes: whether the step is a decode of the request, bool; or of several requests, bool array.
            held: resident tokens, those of the step included, int; or int array.
            holes: of the request.
        """
        if self.reaches:
            return decodes and holes > 0
        if not self.sparse:
            return False
        less = decodes & (held > self.read_blocks(block_size)[0] * block_size)
        if self.read_prompts:
            less |= np.logical_not(decodes) & (held > self.read_blocks(block_size, prompts=True)[0] * block_size)
        return less

    def chosen(self: C, room: int, sinks: int, recent: int, block_size: int) -> int:
        """Return the blocks that a decode chooses under `read`, beside sinks and recent blocks; at most its room."""
        return min(max(-(-self.read // block_size) - sinks - recent, 1), room) if self.read else room

    def reading(self: C, layers: Sequence[int]) -> tuple[frozenset[int], frozenset[int]]:
        """Return the places of layers that score blocks, and of those that read all resident blocks.

        Args:
            layers: of the model, the layer of each place in a KV group.
        """
        if not self.leads_by_list:
            dense = frozenset(place for place, layer in enumerate(layers) if layer < self.dense_layers)
            return frozenset(range(len(dense), len(layers), self.leaders)), dense
        leads = frozenset(place for place, layer in enumerate(layers) if layer in self.leaders)
        return leads, leads | frozenset(place for place, layer in enumerate(layers) if layer < self.leaders[0])

    def bound(self: C, block_size: int, max_model_len: int) -> int | None:
        """Return the most blocks that a request holds between steps; None if it may hold all of its blocks.

        Requests under `full` beside another policy do not count: they get what the pool has.
        """
        profiles = any(REGISTRY[name].profiles for name in self.allowed)
        if self.reconstructs or profiles or self.prompt == "whole" or self.min_prompt > 1:
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
            KVPolicyError: the context has no room for a budget; the pattern of heads has another shape than the model;
                no layer is left that reads a part; a unit of tokens does not divide a block.
        """
        if self.pattern and self.head_pattern.retrieval.shape != (layers, kv_heads):
            shape = self.head_pattern.retrieval.shape
            has = f"{self.gates or 'pattern'} has {shape[0]} layers x {shape[1]} KV heads"
            raise KVPolicyError(f"{has}, the model has {layers} x {kv_heads}")
        for part in (part for part in self.classes.values() if part.layers_differ):
            _, dense = part.reading(range(layers))
            if len(dense) == layers or (part.leads_by_list and part.leaders[-1] >= layers):
                field = "leaders" if part.leads_by_list else "dense_layers"
                raise KVPolicyError(
                    f"{field} of a model with {layers} layers, from 0 on, got {shown(getattr(part, field))}; "
                    "expected layers of the model, and a layer after them that chooses"
                )
        for part in self.classes.values():
            if block_size % part.unit:
                raise KVPolicyError(
                    f"unit: {part.unit} tokens do not divide a block of {block_size}; expected a divisor; set one of "
                    f"{', '.join(str(n) for n in range(1, block_size + 1) if block_size % n == 0)}"
                )
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


def _spanned(tokens: int, block_size: int) -> int:
    """Return the most blocks that so many successive tokens lie in; one at least."""
    return -(-(max(tokens, 1) - 1) // block_size) + 1
