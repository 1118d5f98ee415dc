"""The blocks of one request in one KV group: limits, and the choice of blocks to evict."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from ..config import NEVER, KVPolicyConfig, Limits
from ..config.sizes import share_of
from ..policies import Blocks
from .plan import Report, Scoring
from .residence import NO_BLOCKS, Residence

S = TypeVar("S")
#: Cost of the oldest block without a score, above the cost of any block with one (at most 1).
UNSCORED = 2.0


@dataclass(slots=True)
class RequestState:
    """State of one request that its KV groups share."""

    #: Arguments of the request, as `KVPolicyConfig.for_request` takes them; of a session, the arguments of all turns.
    asked: dict[str, Any] = field(default_factory=dict)
    #: Leading tokens that were computed before the first eviction in any group, and before the first step that read
    #: less than all. None: neither has happened.
    pure_tokens: int | None = None
    #: Leading tokens that vLLM has published a block, a state or a prompt's end of, in any group; those that the step
    #: being planned computes included.
    published_tokens: int = 0
    #: Whether any of its tokens were computed before weights changed, or may have been: no other request gets them, but
    #: by vLLM's own prefix cache.
    outdated: bool = False
    #: Blocks of all groups, the step in flight included: now, and the maximum so far.
    held_blocks: int = 0
    peak_blocks: int = 0
    #: Whether a missing report of the request has been logged.
    complained: bool = False
    #: Whether a session lost all its blocks between two turns.
    emptied: bool = False
    #: Events of the request by key of the tally's counters, for its usage.
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class RequestBlocks:
    """The blocks of one request in one KV group, under its policy. Block indices are logical, so they never change.

    State of a mechanism about the request is `of` a class of the mechanism's, and ends when the request starts over.
    """

    config: KVPolicyConfig
    limits: Limits | None
    block_size: int
    #: Name of the request's policy. Differs from `config.name` if heads are split.
    policy: str = ""
    #: Whether the request can exceed `limits`. If False (prompt + max_tokens fits the budget), workers collect no
    #: scores for the request.
    may_outgrow: bool = False
    #: See `policies.Blocks.key`.
    key: int = 0
    #: The server's policy of this group, by whose fields layers read a part of the blocks; None: `config`.
    reads_by: KVPolicyConfig | None = None
    #: Counts restarts, so that a decision planned before a preemption is not applied after it.
    incarnation: int = 0
    #: Whether workers have got the request.
    started: bool = False
    #: Whether the prompt, or the prompt of a session's turn, is computed; set under `prompt: whole` alone.
    prompted: bool = False
    #: How workers measure the request; None: not at all.
    scoring: Scoring | None = None
    #: Position of the first query that the request computes. Tokens before it came from the prefix cache.
    first_query: int = 0
    #: Shared by the request's KV groups.
    state: RequestState = field(default_factory=RequestState)
    #: Blocks of this group, the step in flight included.
    held_blocks: int = 0
    evicted_blocks: int = 0
    residence: Residence = field(init=False)
    #: Policy and limits with which the request starts over, where `choose_policy` has replaced them.
    _granted: tuple[KVPolicyConfig, Limits | None] | None = None
    _of_mechanisms: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.residence = Residence(self.block_size)

    def of(self, kind: Callable[[], S]) -> S:
        """Return a mechanism's state about the request: its object of this class, made when first asked for."""
        state: S | None = self._of_mechanisms.get(kind)
        if state is None:
            state = self._of_mechanisms[kind] = kind()
        return state

    @property
    def measured(self) -> bool:
        """Whether workers measure the request itself. For a reconstruction they measure its shadow instead."""
        policy = self.config.policy
        return self.may_outgrow and self.limits is not None and bool(policy.measures) and not policy.reconstructs

    @property
    def evictable(self) -> bool:
        """Whether the request loses blocks without a second pass over its prompt, or a profile of it."""
        policy = self.config.policy
        return self.limits is not None and not policy.reconstructs and not policy.profiles

    @property
    def waits(self) -> bool:
        """Whether no block goes yet, since the prompt is not computed."""
        return bool(self.config.policy.profiles) or (self.config.prompt == "whole" and not self.prompted)

    @property
    def under_pressure(self) -> bool:
        """Whether the request loses blocks only when the pool runs out."""
        return self.limits is not None and self.limits.trigger == NEVER

    @property
    def pure_tokens(self) -> int | None:
        """The number of its first tokens that are pure: `RequestState.pure_tokens`."""
        return self.state.pure_tokens

    @pure_tokens.setter
    def pure_tokens(self, tokens: int | None) -> None:
        self.state.pure_tokens = tokens

    @property
    def holes(self) -> int:
        return self.residence.holes

    def most(self, whole: int, in_flight: int, there: int = 0) -> int:
        """Return the most blocks that the request holds at once, steps in flight included.

        A request that loses blocks while its prompt is computed never holds more than the bound of its policy. Other
        requests hold all blocks until then.

        Args:
            whole: blocks of the request's last token.
            in_flight: blocks that steps in flight add.
            there: blocks with which the request starts: of a cached prefix, or of a connector's load.
        """
        if not self.evictable or self.config.prompt != "chunks" or self.limits is None:
            return whole
        return min(max(self.limits.bound, there) + in_flight, whole)

    def to_start(self, whole: int, in_flight: int, there: int, room: int) -> int:
        """Return the blocks for which the pool has to have room before the request starts.

        Where requests under pressure lose no blocks for waiting ones (`admit`), it waits for room for all its tokens,
        as in stock vLLM. One that the pool can never hold whole starts as other requests do, with the most that it
        will hold at once.

        Args:
            whole, in_flight, there: as for `most`; `whole` of the tokens that it has so far.
            room: blocks of an otherwise empty pool.
        """
        if self.under_pressure and not self.config.admit and whole <= room:
            return whole
        return self.most(whole, in_flight, there)

    def above_budget(self, computed_tokens: int) -> int:
        """Return how many blocks the request holds above its budget, those in flight not counted; negative below it."""
        return self._candidates(computed_tokens)[1]

    def hold(self, blocks: int) -> None:
        """Set the number of blocks that the request holds now."""
        self.state.held_blocks += blocks - self.held_blocks
        self.state.peak_blocks = max(self.state.peak_blocks, self.state.held_blocks)
        self.held_blocks = blocks

    def restart(self) -> None:
        """Forget all blocks of a preempted request, which is computed again from its first token."""
        self.incarnation += 1
        self.started, self.scoring, self.prompted, self.pure_tokens, self.first_query = False, None, False, None, 0
        self.residence, self._of_mechanisms = Residence(self.block_size), {}
        self.state.published_tokens, self.state.outdated = 0, False
        if self._granted is not None:
            (self.config, self.limits), self._granted = self._granted, None

    def compute_again(self, first: int, prompt_len: int) -> None:
        """Note that tokens from token `first` on are computed, and measured, again."""
        self.first_query = first
        self.prompted &= first >= prompt_len

    def choose_policy(self, name: str, prompt_len: int) -> None:
        """Put the request under another policy of its configuration until it starts over (see `policies.fastgen`)."""
        self._granted = (self.config, self.limits)
        self.config = self.config.profiled(name, self.block_size, prompt_len)
        self.limits = self.config.limits(self.block_size, prompt_len)

    def renew(self, config: KVPolicyConfig, prompt_len: int, computed_tokens: int) -> None:
        """Begin the next turn of a streaming session.

        Args:
            config: the request's configuration from this turn on, of the same policy.
            prompt_len: tokens of all turns so far, generated ones included.
            computed_tokens: computed tokens that stay. vLLM drops what steps in flight computed beyond them.
        """
        # A new incarnation cancels decisions that are due: the first step of this turn makes them due again.
        self.incarnation += 1
        self.prompted = False
        if self.pure_tokens is not None:
            self.pure_tokens = min(self.pure_tokens, computed_tokens)
        if self._granted is not None:
            self._granted = (config, config.limits(self.block_size, prompt_len))
            config = config.profiled(self.config.name, self.block_size, prompt_len)
        self.config, self.limits = config, config.limits(self.block_size, prompt_len)

    def adopt(self, there: np.ndarray, blocks: int, tokens: int) -> None:
        """Start with some blocks of a cached prefix of `tokens` tokens (see `Residence.adopt`)."""
        self.residence.adopt(there, blocks)
        if not self.config.reaches:  # prompts read its holes on the host
            self.pure_tokens = tokens

    def note_step(self, first: int, tokens: int, decodes: bool) -> None:
        """Note a step that computes `tokens` tokens from token `first` on, before vLLM publishes what it fills.

        Tokens of a step that attends to a part of the resident ones are not pure, nor are those that see them later.
        `tokens` are verified ones, without drafts. `decodes`: see `mechanisms.base.decodes`.
        """
        held, reads_by = first + tokens - self.holes * self.block_size, self.reads_by or self.config
        if self.pure_tokens is None and reads_by.reads_less(decodes, held, self.block_size, self.holes):
            self.pure_tokens = first

    def held(self, blocks: int) -> int:
        """Return the number of resident blocks in a table of `blocks` entries."""
        return blocks - self.holes

    def over_trigger(self, blocks: int) -> bool:
        """Return whether a decision is due with a table of `blocks` entries."""
        return not self.waits and self.exceeds(blocks)

    def exceeds(self, blocks: int) -> bool:
        """Return whether a table of `blocks` entries has more resident blocks than the trigger."""
        return self.limits is not None and self.held(blocks) > self.limits.trigger

    def choose(self, computed_tokens: int, report: Report | None) -> np.ndarray:
        """Choose the blocks to evict: the least important ones, until the request is back at its budget.

        Sinks and blocks with any of the last `recent` tokens stay. A request that does not exceed its trigger loses no
        block.

        Args:
            computed_tokens: tokens whose step is done, without tokens in flight.
            report: statistics of the request; None if its policy measures nothing, or if the report is missing. Without
                statistics that the policy needs, the oldest blocks go first.

        Returns:
            int64 [k], logical blocks, ascending.
        """
        candidates, spare = self.spare(computed_tokens)
        if not spare:
            return NO_BLOCKS
        importance = self._importance(candidates, report, computed_tokens)
        if importance is candidates:  # the oldest go first
            return candidates[:spare]
        return np.sort(candidates[np.argsort(importance, kind="stable")[:spare]])

    def spare(self, computed_tokens: int) -> tuple[np.ndarray, int]:
        """Return the candidates, int64 [n], and how many of them a decision has to evict; 0 up to the trigger."""
        candidates, spare = self._candidates(computed_tokens)
        if self.limits is None or self.limits.budget + spare <= self.limits.trigger:
            return NO_BLOCKS, 0
        return candidates, min(spare, len(candidates))

    def offer(
        self, computed_tokens: int, report: Report | None, *, unscored: bool = True
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Return the blocks that the request can spare when the pool runs out, and their costs.

        A block that is younger than the last report costs more than any block with a score, and more than any older
        block. Without a report, costs rise from the oldest block on.

        Args:
            computed_tokens: as for `choose`.
            report: the last report of the request; it may be older than its newest blocks.
            unscored: whether blocks younger than the last report are offered.

        Returns:
            int64 [n], logical blocks, ascending; float64 [n], their costs (see `Policy.cost`); how many of them may
            go, the number of blocks held above the budget.
        """
        candidates, spare = self._candidates(computed_tokens)
        if spare <= 0:
            return NO_BLOCKS, np.empty(0), 0
        count = len(candidates)
        if report is not None:
            # The report has a score for each older block that is still resident.
            count = int(candidates.searchsorted(report.index[-1], side="right"))
        scored, younger = candidates[:count], candidates[count:] if unscored else NO_BLOCKS
        cost = self.config.policy.cost(self._importance(scored, report, computed_tokens))
        cost = np.concatenate((cost, UNSCORED + np.arange(len(younger))))
        return candidates[: len(cost)], cost, min(spare, len(cost))

    def _candidates(self, computed_tokens: int) -> tuple[np.ndarray, int]:
        """Return the resident blocks outside sinks, recent window and room, and how many are held above the budget."""
        blocks, pool = self.residence.learn(computed_tokens), self.residence.pool
        if self.limits is None:
            return NO_BLOCKS, 0
        recent = max(computed_tokens - self.limits.recent, 0) // self.block_size
        recent = min(recent, blocks - self.limits.recent_blocks)
        first, last, held = pool.searchsorted((self.limits.sink, recent, blocks)).tolist()
        return pool[first + self.limits.room : last], held - self.limits.budget

    def _importance(self, candidates: np.ndarray, report: Report | None, computed_tokens: int) -> np.ndarray:
        if report is None and self.config.policy.measures:
            return candidates
        statistics = {} if report is None else self._statistics(candidates, report, computed_tokens)
        return self.config.policy.importance(
            Blocks(candidates, self.config, statistics, self.residence.known, self.key)
        )

    def rank(self, computed_tokens: int, report: Report | None) -> tuple[np.ndarray, np.ndarray]:
        """Return all candidates, the least important first: int64 [n], logical blocks, and [n], their importance."""
        candidates, _ = self._candidates(computed_tokens)
        importance = self._importance(candidates, report, computed_tokens)
        order = np.argsort(importance, kind="stable")
        return candidates[order], importance[order]

    def evict(self, victims: np.ndarray, computed_tokens: int | None) -> None:
        """Take `victims` out of the resident blocks.

        Args:
            victims: int64 [k], resident logical blocks, ascending.
            computed_tokens: tokens computed or in flight, whose steps do not see the new holes; None: later steps read
                what was in them.
        """
        self.residence.leave(victims)
        self.evicted_blocks += len(victims)
        if self.pure_tokens is None:
            self.pure_tokens = computed_tokens

    def _statistics(self, candidates: np.ndarray, report: Report, computed_tokens: int) -> dict[str, np.ndarray]:
        if self.config.policy.reconstructs:
            # Blocks after the reconstructed prompt have no score and weigh 0.
            missing = max(self.residence.known - len(report.index), 0)
            return {name: np.pad(values, (0, missing))[candidates] for name, values in report.statistics.items()}
        # The report may be older than the last holes, but it has all candidates.
        at = report.index.searchsorted(candidates)
        statistics = {name: values[at] for name, values in report.statistics.items()}
        if self.config.accumulate == "mean" and "mass" in statistics:
            statistics["mass"] = statistics["mass"] / self._age(candidates, computed_tokens)
        return statistics

    def _age(self, blocks: np.ndarray, computed_tokens: int) -> np.ndarray:
        """Return the number of counted queries that saw a block, averaged over its tokens, at least 1: float64 [n]."""
        every = self.config.every
        tokens = blocks[:, None] * self.block_size + np.arange(self.block_size)
        counted = counted_before(computed_tokens, every) - counted_before(np.maximum(tokens, self.first_query), every)
        return np.maximum(counted.mean(axis=1), 1.0)


def counted_before(position: Any, every: int) -> Any:
    """Return how many queries before a position count: the multiples of `every` below it. Ints, or arrays of ints."""
    return -(-position // every)


def over_shared_trigger(groups: Sequence[RequestBlocks]) -> bool:
    """Return whether KV groups that share a budget hold more blocks than the sum of their triggers."""
    limits = groups[0].limits
    return limits is not None and sum(group.held_blocks for group in groups) > len(groups) * limits.trigger


def choose_jointly(
    groups: Sequence[RequestBlocks], computed_tokens: int, reports: Sequence[Report | None]
) -> list[np.ndarray]:
    """Choose the blocks to evict if KV groups share a budget: the least important ones of all groups.

    Each group keeps at least the share `floor` of its own budget. Groups are equally wide, so their scores compare.

    Args:
        groups: blocks of one request in each group.
        computed_tokens, reports: as for `RequestBlocks.choose`, a report for each group.

    Returns:
        For each group int64 [k], logical blocks, ascending.
    """
    limits, floor = groups[0].limits, groups[0].config.floor
    assert limits is not None  # `over_shared_trigger`
    ranked = [group.rank(computed_tokens, report) for group, report in zip(groups, reports)]
    held = [len(group.residence.pool) for group in groups]
    spare = sum(held) - len(groups) * limits.budget
    if spare + len(groups) * limits.budget <= len(groups) * limits.trigger:
        return [NO_BLOCKS] * len(groups)
    least = max(share_of(floor, limits.budget), 1)
    ranked = [(blocks[: max(count - least, 0)], importance) for (blocks, importance), count in zip(ranked, held)]
    owner = np.repeat(np.arange(len(groups)), [len(blocks) for blocks, _ in ranked])
    importance = np.concatenate([importance[: len(blocks)] for blocks, importance in ranked])
    chosen = np.argsort(importance, kind="stable")[:spare]
    # The chosen blocks of a group are the first of its own ranking.
    counts = np.bincount(owner[chosen], minlength=len(groups))
    return [np.sort(blocks[:count]) for (blocks, _), count in zip(ranked, counts)]
