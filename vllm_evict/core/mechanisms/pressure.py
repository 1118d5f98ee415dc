"""`when: pressure`: evicts the least important blocks of all requests when the pool runs out, and none before."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ...config import KVPolicyConfig
from ..actions import Action
from ..plan import EvictionPlan, Report, Reports
from ..residence import NO_BLOCKS
from .base import Group, Mechanism, Metric, Offer, SchedulerView, Step, settled

#: Steps between two reports of a request while the pool is short of blocks.
SCORES_STAY_FRESH = 8
#: Added to costs for each step of priority: above any cost (`RequestBlocks.offer`), and small enough that float64 still
#: tells the costs of one request apart.
APART = 1 << 20


class Offered:
    """State of a request: its last report, the scheduler's step that asked for one."""

    report: Report | None = None
    asked_at = 0

    def unscored(self, blocks: int) -> int:
        """Return how many of so many blocks are younger than the report; all if there is none."""
        return blocks - (int(self.report.index[-1]) + 1 if self.report else 0)


class Asked(defaultdict[int, dict[str, int]]):
    """Notes on a step: KV group -> request -> incarnation, of requests whose report is kept until the pool runs out."""

    def __init__(self) -> None:
        super().__init__(dict)


class Pressure(Mechanism):
    """Collects reports while the pool is short, and chooses the blocks to evict when it runs out.

    Args:
        view: the scheduler, of the server's policy.
    """

    metrics = {
        "fallen": Metric("requests_at_budget", "Requests that pressure took down to their budget."),
    }

    def __init__(self, view: SchedulerView) -> None:
        super().__init__(view)
        parts = [part for part in view.kv_policy.classes.values() if part.when == "pressure"]
        self._buffer = max(part.buffer for part in parts)
        #: Whether requests lose blocks for waiting ones, too.
        self._admits = any(part.admit for part in parts)

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return config.presses

    @property
    def described(self) -> str:
        return f"a request that waits {'may take blocks of others' if self._admits else 'takes no blocks of others'}"

    def plan(self, plan: EvictionPlan, step: Step) -> None:
        """Ask for reports of measured requests while the pool is short.

        A request reports with its first step, then every `SCORES_STAY_FRESH` steps, and as soon as more than one block
        has filled since its last report.
        """
        if not step.short:
            return
        now = self.view.current_step
        for group, noted in zip(self.view.groups, plan.groups):
            for req_id in step.tokens:
                blocks = group.residents[req_id]
                if not blocks.measured or not blocks.under_pressure:
                    continue
                offered, tokens = blocks.of(Offered), self.view.requests[req_id].num_computed_tokens
                stale = now - offered.asked_at >= SCORES_STAY_FRESH
                if stale or offered.unscored(math.ceil(tokens / group.block_size)) > 1:
                    noted.report[req_id] = blocks.config.policy.measures
                    plan.notes(Asked)[group.number][req_id] = blocks.incarnation
                    offered.asked_at = now

    def decide(self, plan: EvictionPlan, reports: Sequence[Reports]) -> Iterable[Action]:
        self.keep(plan, reports)
        return ()

    def keep(self, plan: EvictionPlan, reports: Sequence[Reports]) -> bool:
        """Keep the reports for the time when the pool runs out; return whether the plan asked for any."""
        asked = plan.notes(Asked)
        for group, reported in zip(self.view.groups, reports):
            for req_id, incarnation in asked[group.number].items():
                blocks = group.residents.get(req_id)
                if blocks is None or blocks.incarnation != incarnation:
                    continue
                if req_id in reported:
                    blocks.of(Offered).report = reported[req_id]
                else:
                    self.view.miss(req_id, blocks)
        return any(asked.values())

    def cancel(self, plan: EvictionPlan, req_id: str) -> None:
        for asked in plan.notes(Asked).values():
            asked.pop(req_id, None)

    def choose(
        self,
        givers: Sequence[Any],
        missing: int,
        frees: Callable[[Group, str, int], bool],
        *,
        taker: Any,
        unscored: bool,
        by_priority: bool,
    ) -> list[Action]:
        """Choose blocks to evict: of the lowest priority first, then the cheapest of all requests.

        It chooses some blocks beyond `missing`, so that requests are not compared again in each step.

        Args:
            givers: vLLM's requests that may lose blocks.
            missing: blocks that have to become free.
            frees: (group, request, logical block) -> whether evicting the block frees it for the request that lacks
                room.
            taker: the request that lacks room.
            unscored: whether blocks younger than the last report of their request may go.
            by_priority: whether vLLM schedules by priority, where a larger number is a lower priority.

        Returns:
            Actions that free at least `missing` blocks; an empty list if no choice does.
        """
        holders = [(group, giver) for giver in givers for group in self.view.groups]
        offers = [self.offer(*holder, taker=taker, unscored=unscored) for holder in holders]
        gifts = [self._gift(*holder, offer, frees) for holder, offer in zip(holders, offers)]
        left, copies = [spare for spare, _ in gifts], [copies for _, copies in gifts]
        if sum(left) - sum(copies) < missing:
            return []
        owner = np.repeat(np.arange(len(offers)), [len(offer.blocks) for offer in offers])
        block = np.concatenate([offer.blocks for offer in offers])
        cost = np.concatenate([offer.cost for offer in offers])
        if by_priority:
            _, place = np.unique([-giver.priority for _, giver in holders], return_inverse=True)
            cost = cost + APART * place[owner]
        victims: list[list[int]] = [[] for _ in offers]
        wanted, freed = missing + self._reserve(len(givers)), 0
        for at in ascending(cost, 2 * wanted):
            (group, giver), index = holders[owner[at]], int(block[at])
            if left[owner[at]] and frees(group, giver.request_id, index):
                victims[owner[at]].append(index)
                left[owner[at]] -= 1
                if copies[owner[at]]:  # its first blocks pay for those that it writes
                    copies[owner[at]] -= 1
                    continue
                freed += 1
                if freed == wanted:
                    break
        if freed < missing:
            return []
        return [
            Action(giver.request_id, group.number, np.sort(np.array(indices, np.int64)))
            for (group, giver), indices in zip(holders, victims)
            if indices
        ]

    def _gift(
        self, group: Group, giver: Any, offer: Offer, frees: Callable[[Group, str, int], bool]
    ) -> tuple[int, int]:
        """Return how many blocks of an offer may go, and how many of these free nothing.

        With its first block a request gets new blocks for those of `Offer.writes` that others hold. A request that
        would get as many as it gives gives none.
        """
        req_id, spare = giver.request_id, offer.spare
        if not spare:
            return 0, 0
        copies = sum(not frees(group, req_id, block) for block in offer.writes.tolist())
        if copies and min(spare, sum(frees(group, req_id, block) for block in offer.blocks.tolist())) <= copies:
            return 0, 0
        return spare, copies

    def _reserve(self, requests: int) -> int:
        """Return the blocks to free beyond the missing ones: the buffer, or what decodes begin until a report."""
        groups = self.view.groups
        tokens = max(self._buffer, SCORES_STAY_FRESH * requests * len(groups))
        return math.ceil(tokens / groups[0].block_size)

    def offer(self, group: Group, request: Any, *, taker: Any, unscored: bool = True) -> Offer:
        """Return what a request offers `taker`; nothing if it may lose no block in the step being planned."""
        blocks = group.residents[request.request_id]
        # What the step being planned publishes must be computed without holes.
        publishes = blocks.state.published_tokens > request.num_computed_tokens
        if publishes or not blocks.started or not blocks.under_pressure:
            return Offer(NO_BLOCKS, np.empty(0), 0)
        offer = Offer(*blocks.offer(settled(request), blocks.of(Offered).report, unscored=unscored))
        return self.view.mechanisms.passed("on_offer", offer, request, blocks, taker)


def ascending(values: np.ndarray, few: int) -> Iterator[int]:
    """Yield indices in the order of a stable argsort. Sorts about `few` of them first, and more on demand."""
    done = 0
    while done < len(values):
        least = np.arange(len(values))
        if few < len(values):
            least = np.flatnonzero(values <= np.partition(values, few)[few])
        order = least[np.argsort(values[least], kind="stable")]
        yield from order[done:].tolist()
        done, few = len(order), 4 * len(order)
