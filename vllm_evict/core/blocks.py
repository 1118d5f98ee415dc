"""Which blocks of one request stay: its limits, its holes, and the choice of what goes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..config import NEVER, KVPolicyConfig, Limits
from ..policies import Blocks
from .plan import Report, Scoring

NO_BLOCKS = np.empty(0, dtype=np.int64)
#: Cost of the oldest block without a score; costs of those with scores are shares of 1.
UNSCORED = 2.0


@dataclass(slots=True)
class RequestState:
    """What the KV groups of one request have in common."""

    #: What it asks for, as `KVPolicyConfig.for_request` takes it; of a session, by all its turns.
    asked: dict[str, Any] = field(default_factory=dict)
    #: Tokens computed while nothing was missing in any group: one eviction reduces what all later tokens are made from.
    #: None while nothing is.
    pure_tokens: int | None = None
    #: Blocks held now and at most, the step in flight included.
    held_blocks: int = 0
    peak_blocks: int = 0
    #: Whether the log has said that scores are missing.
    complained: bool = False


@dataclass(slots=True)
class RequestBlocks:
    """One request's blocks under its policy. Indices are logical, so positions never move."""

    config: KVPolicyConfig
    limits: Limits | None
    block_size: int
    #: Name of the request's policy: where heads are split, not that of this group's class.
    policy: str = ""
    #: Whether it may come to hold more than `limits`. Requests that cannot are not measured.
    may_outgrow: bool = False
    #: See `policies.Blocks.key`.
    key: int = 0
    #: Counts restarts, so that what was planned before a preemption is not done after it.
    incarnation: int = 0
    #: Whether workers know it.
    started: bool = False
    #: How they measure it; None: they do not.
    scoring: Scoring | None = None
    #: Position of its first own query: tokens before it came out of the prefix cache.
    first_query: int = 0
    #: Resident logical blocks below `known`, ascending.
    resident: np.ndarray = field(default_factory=lambda: NO_BLOCKS)
    known: int = 0
    #: Of each of them, the logical block for which its keys are rotated: its own, or a later one once it has moved up.
    places: np.ndarray = field(default_factory=lambda: NO_BLOCKS)
    #: Shared by the request's KV groups.
    state: RequestState = field(default_factory=RequestState)
    #: Blocks held now, the step in flight included.
    held_blocks: int = 0
    evicted_blocks: int = 0
    #: What it was granted, once its policy has chosen another one for it.
    unprofiled: tuple[KVPolicyConfig, Limits] | None = None
    #: Reports in a row that did not come.
    misses: int = 0
    #: Under pressure: the last scores, and the scheduler's step that asked for them.
    report: Report | None = None
    asked_at: int = 0
    #: Where the policy reconstructs: scores of the prompt's first blocks; of none if it does without.
    prompt_scores: Report | None = None

    @property
    def measured(self) -> bool:
        """Whether workers measure it; what a reconstruction measures, its shadow does."""
        policy = self.config.policy
        return self.may_outgrow and self.limits is not None and bool(policy.measures) and not policy.reconstructs

    @property
    def evictable(self) -> bool:
        """Whether the request loses blocks while its prompt is computed. Other requests hold all blocks until then."""
        policy = self.config.policy
        return self.limits is not None and not policy.reconstructs and not policy.profiles

    @property
    def under_pressure(self) -> bool:
        """Whether it is evicted from when the pool runs out, and only then."""
        return self.limits is not None and self.limits.trigger == NEVER

    @property
    def pure_tokens(self) -> int | None:
        """Tokens computed while nothing was missing, in any KV group; None while nothing is."""
        return self.state.pure_tokens

    @pure_tokens.setter
    def pure_tokens(self, tokens: int | None) -> None:
        self.state.pure_tokens = tokens

    @property
    def holes(self) -> int:
        return self.known - len(self.resident)

    def hold(self, blocks: int) -> None:
        """Note how many blocks are held now."""
        self.state.held_blocks += blocks - self.held_blocks
        self.state.peak_blocks = max(self.state.peak_blocks, self.state.held_blocks)
        self.held_blocks = blocks

    def restart(self) -> None:
        """Forget all blocks: preempted, to be computed again from the first token."""
        self.incarnation += 1
        self.started, self.scoring = False, None
        self.resident, self.places, self.known, self.pure_tokens, self.first_query = NO_BLOCKS, NO_BLOCKS, 0, None, 0
        self.report, self.asked_at, self.prompt_scores, self.misses = None, 0, None, 0
        if self.unprofiled is not None:
            (self.config, self.limits), self.unprofiled = self.unprofiled, None

    def profile(self, report: Report, computed_tokens: int, prompt_len: int) -> None:
        """Choose the policy of this KV group, now that the prompt is computed (see `policies.fastgen`).

        Args:
            report: mass of all its blocks.
            computed_tokens, prompt_len: tokens.
        """
        recent = max(computed_tokens - self.limits.recent, 0) // self.block_size
        protected = (report.index < self.limits.sink) | (report.index >= recent)
        mass = report.statistics["mass"]
        name = self.config.policy.choose(mass, protected, self.limits.budget, self.config.recovery)
        self.unprofiled = (self.config, self.limits)
        self.config = self.config.profiled(name, self.block_size)
        self.limits = self.config.limits(self.block_size, prompt_len)

    def renew(self, config: KVPolicyConfig, prompt_len: int, computed_tokens: int) -> None:
        """Begin the next turn of a streaming session.

        Args:
            config: what it is granted from now on; of the same policy.
            prompt_len: tokens, with what was generated in former turns.
            computed_tokens: those that stay. What steps in flight computed beyond them is dropped.
        """
        # What the former turn made due is looked at anew with this one's first step.
        self.incarnation += 1
        if self.pure_tokens is not None:
            self.pure_tokens = min(self.pure_tokens, computed_tokens)
        if self.unprofiled is not None:
            self.unprofiled = (config, config.limits(self.block_size, prompt_len))
            config = config.profiled(self.config.name, self.block_size)
        self.config, self.limits = config, config.limits(self.block_size, prompt_len)

    def adopt(self, there: np.ndarray, blocks: int) -> None:
        """Start with a cached prefix of which only some blocks were taken.

        Args:
            there: int64 [k], those that were, ascending.
            blocks: of the prefix.
        """
        self.resident, self.places, self.known = there, there, blocks
        self.pure_tokens = blocks * self.block_size

    def held(self, blocks: int) -> int:
        """Resident blocks of a table of `blocks` entries."""
        return blocks - self.holes

    def over_trigger(self, blocks: int) -> bool:
        waits = self.config.policy.profiles  # for the end of its prompt
        return self.limits is not None and not waits and self.held(blocks) > self.limits.trigger

    def choose(self, computed_tokens: int, report: Report | None) -> np.ndarray:
        """Blocks to evict now that `computed_tokens` tokens are computed.

        Back to the budget: the least important first, never a sink, never a block that holds any of the last
        `recent` tokens, and nothing at all while held blocks do not exceed the trigger.

        Args:
            computed_tokens: tokens whose step is done, not those in flight.
            report: this request's statistics; None for policies that measure nothing, or if there are none: then the
                oldest go first.

        Returns:
            int64 [k], logical blocks, ascending.
        """
        candidates, spare = self.spare(computed_tokens)
        if not spare:
            return NO_BLOCKS
        order = np.argsort(self._importance(candidates, report, computed_tokens), kind="stable")
        return np.sort(candidates[order[:spare]])

    def held_after(self, computed_tokens: int) -> np.ndarray:
        """Resident blocks once so many tokens are computed. int64 [n], logical blocks, ascending."""
        self._learn(math.ceil(computed_tokens / self.block_size))
        return self.resident

    def spare(self, computed_tokens: int) -> tuple[np.ndarray, int]:
        """What a decision is about now: blocks that may go, and how many of them have to; 0 below the trigger."""
        candidates, spare = self._candidates(computed_tokens)
        if self.limits is None or self.limits.budget + spare <= self.limits.trigger:
            return NO_BLOCKS, 0
        return candidates, min(spare, len(candidates))

    def unscored(self, computed_tokens: int) -> int:
        """Blocks begun since the last report; all of them if there is none."""
        return math.ceil(computed_tokens / self.block_size) - (int(self.report.index[-1]) + 1 if self.report else 0)

    def offer(self, computed_tokens: int, *, unscored: bool = True) -> tuple[np.ndarray, np.ndarray, int]:
        """What may go when the pool runs out: so many of these blocks as are held above the budget.

        Blocks that are younger than the scores last reported cost more than all that have scores, the oldest of them
        least. Where no scores were reported yet, the oldest of all blocks go first.

        Args:
            computed_tokens: as for `choose`.
            unscored: whether blocks may go that are younger than the scores.

        Returns:
            int64 [n], logical blocks, ascending; float64 [n], their costs (see `Policy.cost`); how many may go.
        """
        candidates, spare = self._candidates(computed_tokens)
        if spare <= 0:
            return NO_BLOCKS, np.empty(0), 0
        count = len(candidates)
        if self.report is not None:
            # What was resident then and still is, is in the report.
            count = int(candidates.searchsorted(self.report.index[-1], side="right"))
        scored, younger = candidates[:count], candidates[count:] if unscored else NO_BLOCKS
        cost = self.config.policy.cost(self._importance(scored, self.report, computed_tokens))
        cost = np.concatenate((cost, UNSCORED + np.arange(len(younger))))
        return candidates[: len(cost)], cost, min(spare, len(cost))

    def _candidates(self, computed_tokens: int) -> tuple[np.ndarray, int]:
        """Resident blocks outside sinks and recent window, and how many blocks are held above the budget."""
        blocks = math.ceil(computed_tokens / self.block_size)
        self._learn(blocks)
        if self.limits is None:
            return NO_BLOCKS, 0
        recent = max(computed_tokens - self.limits.recent, 0) // self.block_size
        first, last, held = self.resident.searchsorted((self.limits.sink, recent, blocks)).tolist()
        return self.resident[first:last], held - self.limits.budget

    def _importance(self, candidates: np.ndarray, report: Report | None, computed_tokens: int) -> np.ndarray:
        if report is None and self.config.policy.measures:
            return candidates
        statistics = {} if report is None else self._statistics(candidates, report, computed_tokens)
        return self.config.policy.importance(Blocks(candidates, self.config, statistics, self.known, self.key))

    def rank(self, computed_tokens: int, report: Report | None) -> tuple[np.ndarray, np.ndarray]:
        """All that may go, the least important first -> int64 [n], logical blocks; [n], their importance."""
        candidates, _ = self._candidates(computed_tokens)
        importance = self._importance(candidates, report, computed_tokens)
        order = np.argsort(importance, kind="stable")
        return candidates[order], importance[order]

    def evict(self, victims: np.ndarray, computed_tokens: int) -> None:
        """Take `victims` out of the resident blocks.

        Args:
            victims: int64 [k], ascending, all of them resident.
            computed_tokens: all tokens computed or in flight: their steps were planned with nothing more missing.
        """
        stays = np.ones(len(self.resident), bool)
        stays[self.resident.searchsorted(victims)] = False
        self.resident, self.places = self.resident[stays], self.places[stays]
        self.evicted_blocks += len(victims)
        if self.pure_tokens is None:
            self.pure_tokens = computed_tokens

    def reach(self, computed_tokens: int) -> int:
        """Tokens from the place of its first block to its newest token: how far back the next one looks."""
        self._learn(math.ceil(computed_tokens / self.block_size))
        return computed_tokens - int(self.places[0]) * self.block_size if len(self.places) else 0

    def gaps(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Resident blocks that can move up, as others that came after them are gone.

        Returns:
            int64 [k], logical blocks, ascending; int64 [k], how many blocks each comes to lie after its own place;
            bool [k], whether it lies after it already.
        """
        ends = np.arange(self.known - len(self.resident), self.known)
        can = ends > self.places
        blocks = self.resident[can]
        return blocks, ends[can] - blocks, self.places[can] > blocks

    def move_up(self) -> None:
        """All moved up: they end at the newest block, one after the other."""
        self.places = np.arange(self.known - len(self.resident), self.known)

    def _learn(self, blocks: int) -> None:
        if blocks > self.known:
            new = np.arange(self.known, blocks)
            self.resident, self.places = np.concatenate((self.resident, new)), np.concatenate((self.places, new))
            self.known = blocks

    def _statistics(self, candidates: np.ndarray, report: Report, computed_tokens: int) -> dict[str, np.ndarray]:
        if self.config.policy.reconstructs:
            # What was computed after the reconstructed prompt has no score.
            missing = max(self.known - len(report.index), 0)
            return {name: np.pad(values, (0, missing))[candidates] for name, values in report.statistics.items()}
        # The report may be older than the last holes, never younger than the candidates: all are in it.
        at = report.index.searchsorted(candidates)
        statistics = {name: values[at] for name, values in report.statistics.items()}
        if self.config.accumulate == "mean" and "mass" in statistics:
            statistics["mass"] = statistics["mass"] / self._age(candidates, computed_tokens)
        return statistics

    def _age(self, blocks: np.ndarray, computed_tokens: int) -> np.ndarray:
        """Counted queries that saw a block, averaged over its tokens, at least 1. float64 [n]."""
        every = self.config.every
        tokens = blocks[:, None] * self.block_size + np.arange(self.block_size)
        first_seen = np.maximum(tokens, self.first_query)
        counted_before = lambda position: -(-position // every)  # noqa: E731  (multiples of `every` below it)
        return np.maximum((counted_before(computed_tokens) - counted_before(first_seen)).mean(axis=1), 1.0)


def over_shared_trigger(groups: Sequence[RequestBlocks]) -> bool:
    """Whether KV groups that share a budget hold more than all their triggers together."""
    limits = groups[0].limits
    return limits is not None and sum(group.held_blocks for group in groups) > len(groups) * limits.trigger


def choose_jointly(
    groups: Sequence[RequestBlocks], computed_tokens: int, reports: Sequence[Report | None]
) -> list[np.ndarray]:
    """Blocks to evict now where KV groups share a budget: the least important of all of them.

    No group goes below the share `floor` of its own budget. Groups are equally wide, so their scores compare.

    Args:
        groups: of one request.
        computed_tokens, reports: as for `RequestBlocks.choose`, a report for each group.

    Returns:
        For each group int64 [k], logical blocks, ascending.
    """
    limits, floor = groups[0].limits, groups[0].config.floor
    ranked = [group.rank(computed_tokens, report) for group, report in zip(groups, reports)]
    held = [len(group.resident) for group in groups]
    spare = sum(held) - len(groups) * limits.budget
    if spare + len(groups) * limits.budget <= len(groups) * limits.trigger:
        return [NO_BLOCKS] * len(groups)
    least = max(math.ceil(floor * limits.budget), 1)
    ranked = [(blocks[: max(count - least, 0)], importance) for (blocks, importance), count in zip(ranked, held)]
    owner = np.repeat(np.arange(len(groups)), [len(blocks) for blocks, _ in ranked])
    importance = np.concatenate([importance[: len(blocks)] for blocks, importance in ranked])
    chosen = np.argsort(importance, kind="stable")[:spare]
    # Of each group the first ones of its own ranking are the ones chosen.
    counts = np.bincount(owner[chosen], minlength=len(groups))
    return [np.sort(blocks[:count]) for (blocks, _), count in zip(ranked, counts)]
