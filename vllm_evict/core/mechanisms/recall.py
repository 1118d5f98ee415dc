"""Eviction that is undone: blocks on the host come back when bounds of their keys promise them attention.

`Again` decides before `Budget`, so that a request whose last tokens are computed again is brought back to its budget as
of the first of them; `Recall` decides after it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ...config import KVPolicyConfig
from ..actions import Action, Applied, Swap, back_to_budget
from ..blocks import RequestBlocks
from ..plan import EvictionPlan, Reports, Waiting
from .base import Due, Mechanism, SchedulerView, Step, scores_prompt, settled
from .offload import Offload

#: The statistic that workers report of resident blocks and of host blocks: the attention that the last queries of a
#: step may pay to a block, by bounds of its keys (`compute.kernels.bounds`), summed up over heads and layers. The
#: last query counts most.
BOUND = "bound"
#: Queries want a block whose score is at least so much of the mean score of a request's blocks.
WANTED = 0.5
#: In a decode a host block takes the place of a resident one if its score is so many times as high.
MARGIN = 1.25


#: Decisions of its policy for which a block stays that queries wanted.
STAY = 2
#: Of blocks that came back: below so many nothing is said of a request; then recall ends for it if more than half of
#: them left again at once.
FEW_RETURNS = 32
#: Most periods of `recall_every` decodes from one look to the next.
LONGEST_PAUSE = 32


class Stay(NamedTuple):
    """Why a block stays.

    Attributes:
        decisions: of the policy, in which it goes after all others.
        came: whether it came back from the host in a decode.
    """

    decisions: int = STAY
    came: bool = False


@dataclass(slots=True)
class Recalls:
    """What recall has done for one request since it started, or since its turn began.

    Attributes:
        rounds: times that the last tokens of its prompt were computed again.
        waits: whether the last token of its prompt waits for scores of host blocks.
        answered: whether the last token of its prompt was computed, or is in flight.
        steps: decodes since its host blocks were looked at.
        is_due: whether they are looked at with the step that computes the last token of its prompt.
        returned, bounced: blocks that came back in decodes, and those of them that left again while they were to stay.
        in_a_row: looks of decodes that brought blocks back, since the last one that brought none.
    """

    rounds: int = 0
    waits: bool = False
    answered: bool = False
    steps: int = 0
    is_due: bool = False
    returned: int = 0
    bounced: int = 0
    in_a_row: int = 0

    @property
    def pause(self) -> int:
        """Periods of `recall_every` decodes to the next look: blocks that come back look after look may take turns."""
        return min(1 << max(self.in_a_row - 1, 0), LONGEST_PAUSE)

    @property
    def is_vain(self) -> bool:
        """Whether blocks leave again about as soon as they come back."""
        return self.returned >= FEW_RETURNS and 2 * self.bounced > self.returned


@dataclass(slots=True)
class Recalled:
    """State of a request.

    Attributes:
        recalls: what recall has done for it.
        scores: scores of blocks, resident or on the host, when host blocks were last looked at.
        stays: blocks that queries wanted then -> how long they stay.
    """

    recalls: Recalls = field(default_factory=Recalls)
    scores: dict[int, float] = field(default_factory=dict)
    stays: dict[int, Stay] = field(default_factory=dict)

    def least_score(self) -> float:
        """Return the score from which on queries want a block."""
        return WANTED * sum(self.scores.values()) / max(len(self.scores), 1)

    def want(self, blocks: RequestBlocks) -> None:
        """Have resident blocks stay that were just scored, if queries want them."""
        least, came = self.least_score(), {block for block, stay in self.stays.items() if stay.came}
        wanted = [block for block in blocks.residence.pool.tolist() if self.scores.get(block, 0) >= least]
        self.stays = {block: Stay(came=block in came) for block in wanted}
        blocks.favoured = {block: self.scores[block] for block in wanted}

    def lose(self, blocks: RequestBlocks, holes: Sequence[int], decides: bool) -> None:
        """Note that blocks left; `decides`: by a decision of the policy."""
        if decides:
            left = {block: stay._replace(decisions=stay.decisions - 1) for block, stay in self.stays.items()}
            self.stays = {block: stay for block, stay in left.items() if stay.decisions}
            blocks.favoured = {block: score for block, score in blocks.favoured.items() if block in self.stays}
        for block in holes:
            if (stay := self.stays.pop(block, None)) is not None:
                self.recalls.bounced += stay.came

    def get_back(self, blocks: RequestBlocks, returns: Sequence[int], again: bool) -> None:
        """Note that blocks came back.

        Args:
            blocks: of the request.
            returns: logical blocks.
            again: whether they came back for a prompt's end that is computed again. Such blocks do not count as
                returned, and may leave with it.
        """
        self.stays |= {block: Stay(came=not again) for block in returns}
        blocks.favoured |= {block: self.scores.get(block, 0.0) for block in returns}
        self.recalls.returned += 0 if again else len(returns)


@dataclass(slots=True)
class Looks:
    """Notes on a step.

    Attributes:
        looked: request -> its incarnation; its host blocks are decided on after the step.
        again: request -> its incarnation, and the first token that may be computed again after the step.
    """

    looked: dict[str, int] = field(default_factory=dict)
    again: dict[str, tuple[int, int]] = field(default_factory=dict)


class Again(Mechanism):
    """The last tokens of a prompt are computed again once blocks came back, so that its first answer token sees them.

    A request that has host blocks ends its prompt's last chunk one token early (`shorten`). The report of that chunk
    says which blocks its queries want. They come back, and the last `again` tokens of the chunk are computed again with
    the last token, without those that other requests can hit and those before a hole.

    Args:
        view: the scheduler, of the server's policy.
    """

    def __init__(self, view: SchedulerView) -> None:
        super().__init__(view)
        config = view.kv_policy
        self._tokens, self._rounds = config.again, config.again_rounds if config.again else 0
        #: Request -> its computed tokens before it was rewound, until the next step is planned.
        self._rewound: dict[str, int] = {}

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return config.recall != "none"

    def limit_tokens(self, request: Any, computed_tokens: int, new_tokens: int) -> int:
        blocks = self.view.groups[0].residents.get(request.request_id)
        if blocks is None:
            return new_tokens
        if blocks.of(Recalled).recalls.waits:
            return 0
        if new_tokens < 2 or not self._may(request, blocks):
            return new_tokens
        left = request.num_tokens - computed_tokens - new_tokens
        if left <= 0:
            return new_tokens - 1
        # This chunk leaves to the last one what is computed again, so that one chunk computes it again.
        missing = min(self._tokens, new_tokens) - left
        return new_tokens - missing if 0 < missing < new_tokens else new_tokens

    def _may(self, request: Any, blocks: RequestBlocks) -> bool:
        """Return whether the end of a request's prompt may be computed again.

        Images are forgotten once they are computed, log-probabilities of a prompt are collected chunk by chunk, and a
        grammar follows tokens as they are planned.
        """
        if request.mm_features or request.use_structured_output or scores_prompt(request):
            return False
        recalls = blocks.of(Recalled).recalls
        return bool(blocks.residence.host) and not recalls.answered and recalls.rounds < self._rounds

    def plan(self, plan: EvictionPlan, step: Step) -> None:
        (group,) = self.view.groups
        for req_id, tokens in step.tokens.items():
            blocks = group.residents[req_id]
            recalls = blocks.of(Recalled).recalls
            if recalls.answered:
                continue
            request = self.view.requests[req_id]
            if request.num_computed_tokens >= request.num_tokens:
                recalls.answered = recalls.is_due = True
            elif request.num_computed_tokens == request.num_tokens - 1 and self._may(request, blocks):
                recalls.waits = True
                plan.of(Looks).again[req_id] = blocks.incarnation, request.num_computed_tokens - tokens

    def decide(self, plan: EvictionPlan, reports: Sequence[Reports]) -> Iterable[Action]:
        (group,), (reported,), looks = self.view.groups, reports, plan.of(Looks)
        for req_id, incarnation in looks.looked.items():
            blocks = group.residents.get(req_id)
            if req_id in reported and blocks is not None and blocks.incarnation == incarnation:
                report, recalled = reported[req_id], blocks.of(Recalled)
                recalled.scores = dict(zip(report.index.tolist(), report.statistics[BOUND].tolist()))
                recalled.want(blocks)
        for req_id, (incarnation, first) in looks.again.items():
            request = self.view.running_request(req_id)
            if request is None or group.residents[req_id].incarnation != incarnation:
                continue
            blocks, computed = group.residents[req_id], settled(request)
            recalls = blocks.of(Recalled).recalls
            recalls.waits = False
            recalls.rounds += 1
            if req_id not in reported or request.num_in_flight_tokens:
                continue
            # Nothing is written that others may read, nor into a hole.
            first = max(
                first, computed + 1 - self._tokens, blocks.pure_tokens or 0, blocks.residence.unbroken(computed)
            )
            if first < computed:
                self._rewind(request, blocks, first)
        return ()

    def _rewind(self, request: Any, blocks: RequestBlocks, computed_tokens: int) -> None:
        """Have the tokens of a request from so many on computed again with the next step.

        Nothing of the request is in flight, and no token was sampled after what is computed again.
        """
        req_id = request.request_id
        self._rewound[req_id] = request.num_computed_tokens
        request.num_computed_tokens = self.view.next_plan.rewound[req_id] = computed_tokens
        for group in self.view.groups:
            group.note(req_id)  # its table does not grow in the step to come
        self.view.count(blocks, again=1)

    def undo(self, request: Any, blocks: RequestBlocks) -> None:
        """Have no token of a request computed again after all."""
        if (before := self._rewound.pop(request.request_id, None)) is not None:
            request.num_computed_tokens = before
            del self.view.next_plan.rewound[request.request_id]
            self.view.count(blocks, again=-1)

    def on_scheduled(self, plan: EvictionPlan, tokens: Mapping[str, int]) -> None:
        self._rewound.clear()

    def on_applied(self, applied: Applied) -> None:
        action, blocks = applied.action, applied.blocks
        recalled, returns = blocks.of(Recalled), action.returns.tolist()
        again = isinstance(action, Swap) and action.again
        recalled.lose(blocks, action.holes.tolist(), decides=not returns)
        if returns:
            recalled.get_back(blocks, returns, again)
        if again:
            self.view.groups[action.group].note(action.req_id)  # it may hold more than its trigger, and does not grow

    def on_turn(self, req_id: str, blocks: Sequence[RequestBlocks]) -> None:
        for each in blocks:
            each.of(Recalled).recalls = Recalls()


class Recall(Mechanism):
    """Brings blocks back. It looks at a request's blocks at the end of its prompt, and every `recall_every` decodes.

    A request without host blocks is looked at once, in the step after which it first loses blocks.
    While each look brings blocks back, looks become rarer (`Recalls.pause`).

    Args:
        view: the scheduler, of the server's policy.
    """

    def __init__(self, view: SchedulerView) -> None:
        super().__init__(view)
        self._again, self._pool = view.part(Again), view.part(Offload).pool
        self._every, self._most = view.kv_policy.recall_every, view.kv_policy.recall_blocks

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return config.recall != "none"

    def plan(self, plan: EvictionPlan, step: Step) -> None:
        (group,), (noted,), looks = self.view.groups, plan.groups, plan.of(Looks)
        for req_id in step.tokens:
            blocks = group.residents[req_id]
            recalls, host = blocks.of(Recalled).recalls, blocks.residence.host
            # The decision after this step evicts for the first time: the blocks that the prompt's end wants stay.
            is_first = recalls.is_due and req_id in plan.of(Due)[group.number]
            if not (host or is_first) or recalls.is_vain:
                continue
            if req_id not in looks.again:
                recalls.steps += recalls.answered
                if recalls.steps < self._every * recalls.pause and not recalls.is_due:
                    continue
            recalls.steps, recalls.is_due = 0, False
            logical = sorted(host)
            noted.waiting[req_id] = Waiting(logical, [host[block].number for block in logical])
            noted.report[req_id] = noted.report.get(req_id, frozenset()) | {BOUND}
            looks.looked[req_id] = blocks.incarnation

    def decide(self, plan: EvictionPlan, reports: Sequence[Reports]) -> Iterable[Action]:
        (group,), (reported,), looks = self.view.groups, reports, plan.of(Looks)
        due = plan.of(Due)[group.number]
        for req_id, incarnation in looks.looked.items():
            request = self.view.running_request(req_id)
            blocks = group.residents.get(req_id)
            if request is None or blocks is None or blocks.incarnation != incarnation:
                continue
            if req_id not in reported:
                if req_id not in due or not blocks.measured:  # else `Budget` has counted it
                    self.view.miss(req_id, blocks)
                continue
            again, recalls = req_id in looks.again, blocks.of(Recalled).recalls
            came = blocks.state.counts["recalled"]
            if (swap := self._choose(req_id, group.number, blocks, settled(request), again)) is not None:
                yield swap
            if not again:
                recalls.in_a_row = recalls.in_a_row + 1 if blocks.state.counts["recalled"] > came else 0
            if again and blocks.state.counts["recalled"] == came:
                # `Budget` has decided as of the first token that was to be computed again.
                self._again.undo(request, blocks)
                report = reported[req_id] if req_id in due else None
                action = back_to_budget(req_id, group.number, blocks, settled(request), report)
                if action is not None and (report is not None or not blocks.measured):
                    yield action

    def _choose(self, req_id: str, group: int, blocks: RequestBlocks, computed_tokens: int, again: bool) -> Swap | None:
        """Choose which blocks come back, and which go for them; None if none do.

        The best of the host blocks that queries want come back, and each takes the place of a resident block that has
        a lower score.
        """
        recalled = blocks.of(Recalled)
        scores, least = recalled.scores, recalled.least_score()
        wanted = sorted((block for block in blocks.residence.host if block in scores), key=lambda block: -scores[block])
        wanted = [block for block in wanted if scores[block] >= least]
        self._pool.want(blocks, wanted[::-1])
        candidates, room = blocks.replaceable(computed_tokens)
        if again:
            # What is computed again may see as many blocks as the largest chunk before it has.
            room = max(room, blocks.state.peak_blocks - blocks.held_blocks)
        room = min(room, self.view.spare_blocks)
        if blocks.waits:  # no block of the prompt goes yet
            candidates = candidates[:0]
        weakest = sorted((block for block in candidates.tolist() if block in scores), key=lambda block: scores[block])
        margin = 1.0 if again else MARGIN
        returns: list[int] = []
        victims: list[int] = []
        for block in wanted if again else wanted[: self._most]:
            if len(returns) < room:
                returns.append(block)
            elif len(victims) < len(weakest) and scores[weakest[len(victims)]] * margin < scores[block]:
                victims.append(weakest[len(victims)])
                returns.append(block)
            else:
                break
        if not returns:
            return None
        return Swap(req_id, group, holes=np.array(victims, np.int64), returns=np.array(returns, np.int64), again=again)
