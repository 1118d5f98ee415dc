"""Eviction that is undone: blocks on the host come back when bounds of their keys promise them attention.

`Again` decides before `Budget`, so that a request whose last tokens are computed again is brought back to its budget as
of the first of them; `Recall` decides after it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ...config import KVPolicyConfig
from ..actions import Action, Swap, back_to_budget
from ..blocks import RequestBlocks
from ..host import HostPool
from ..plan import EvictionPlan, Reports, Waiting
from .base import Host, Mechanism, Step, scores_prompt, settled

#: The statistic that workers report of resident blocks and of host blocks: the attention that the last queries of a
#: step may pay to a block, by bounds of its keys (`compute.kernels.bounds`), summed up over heads and layers. The
#: last query counts most.
BOUND = "bound"
#: Queries want a block whose score is at least so much of the mean score of a request's blocks.
WANTED = 0.5
#: In a decode a host block takes the place of a resident one if its score is so many times as high.
MARGIN = 1.25


def least_score(blocks: RequestBlocks) -> float:
    """The score from which on queries want a block."""
    return WANTED * sum(blocks.scores.values()) / max(len(blocks.scores), 1)


class Again(Mechanism):
    """The last tokens of a prompt are computed again once blocks came back, so that its first answer token sees them.

    A request that has host blocks ends its prompt's last chunk one token early (`shorten`). The report of that chunk
    says which blocks its queries want. They come back, and the last `again` tokens of the chunk are computed again with
    the last token, without those that other requests can hit and those before a hole.

    Args:
        host: the scheduler.
        config: the server's policy.
    """

    def __init__(self, host: Host, config: KVPolicyConfig) -> None:
        super().__init__(host)
        self._tokens, self._rounds = config.again, config.again_rounds if config.again else 0

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return config.recall != "none"

    def shorten(self, request: Any, computed_tokens: int, new_tokens: int) -> int:
        """Tokens that a request may compute in the step being planned, of `new_tokens` that vLLM has room for."""
        blocks = self.host.groups[0].residents.get(request.request_id)
        if blocks is None:
            return new_tokens
        if blocks.recalls.waits:
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
        """Whether the end of a request's prompt may be computed again.

        Images are forgotten once they are computed, log-probabilities of a prompt are collected chunk by chunk, and a
        grammar follows tokens as they are planned.
        """
        if request.mm_features or request.use_structured_output or scores_prompt(request):
            return False
        recalls = blocks.recalls
        return bool(blocks.host) and not recalls.answered and recalls.rounds < self._rounds

    def plan(self, plan: EvictionPlan, step: Step) -> None:
        (group,), (noted,) = self.host.groups, plan.groups
        for req_id, tokens in step.tokens.items():
            blocks = group.residents[req_id]
            if blocks.recalls.answered:
                continue
            request = self.host.requests[req_id]
            if request.num_computed_tokens >= request.num_tokens:
                blocks.recalls.answered = blocks.recalls.is_due = True
            elif request.num_computed_tokens == request.num_tokens - 1 and self._may(request, blocks):
                blocks.recalls.waits = True
                noted.again[req_id] = blocks.incarnation, request.num_computed_tokens - tokens

    def decide(self, plan: EvictionPlan, reports: Sequence[Reports]) -> Iterable[Action]:
        (group,), (noted,), (reported,) = self.host.groups, plan.groups, reports
        for req_id, incarnation in noted.looked.items():
            blocks = group.residents.get(req_id)
            if req_id in reported and blocks is not None and blocks.incarnation == incarnation:
                report = reported[req_id]
                blocks.scores = dict(zip(report.index.tolist(), report.statistics[BOUND].tolist()))
                blocks.want(least_score(blocks))
        for req_id, (incarnation, first) in noted.again.items():
            request = self.host.running_request(req_id)
            if request is None or group.residents[req_id].incarnation != incarnation:
                continue
            blocks, computed = group.residents[req_id], settled(request)
            blocks.recalls.waits = False
            blocks.recalls.rounds += 1
            if req_id not in reported or request.num_in_flight_tokens:
                continue
            # Nothing is written that others may read, nor into a hole.
            first = max(first, computed + 1 - self._tokens, blocks.pure_tokens or 0, blocks.unbroken(computed))
            if first < computed:
                self.host.rewind(request, first)
        return ()


class Recall(Mechanism):
    """Looks at a request's blocks at the end of its prompt, and every `recall_every` decodes.

    A request without host blocks is looked at once, in the step after which it first loses blocks.
    While each look brings blocks back, looks become rarer (`Recalls.pause`).

    Args:
        host: the scheduler.
        config: the server's policy.
        pool: host blocks.
    """

    def __init__(self, host: Host, config: KVPolicyConfig, pool: HostPool) -> None:
        super().__init__(host)
        self._pool, self._every, self._most = pool, config.recall_every, config.recall_blocks

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return config.recall != "none"

    def plan(self, plan: EvictionPlan, step: Step) -> None:
        (group,), (noted,) = self.host.groups, plan.groups
        for req_id in step.tokens:
            blocks = group.residents[req_id]
            # The decision after this step evicts for the first time: the blocks that the prompt's end wants stay.
            is_first = blocks.recalls.is_due and req_id in noted.due
            if not (blocks.host or is_first) or blocks.recalls.is_vain:
                continue
            if req_id not in noted.again:
                blocks.recalls.steps += blocks.recalls.answered
                if blocks.recalls.steps < self._every * blocks.recalls.pause and not blocks.recalls.is_due:
                    continue
            blocks.recalls.steps, blocks.recalls.is_due = 0, False
            logical = sorted(blocks.host)
            noted.waiting[req_id] = Waiting(logical, [blocks.host[block] for block in logical])
            noted.report[req_id] = noted.report.get(req_id, frozenset()) | {BOUND}
            noted.looked[req_id] = blocks.incarnation

    def decide(self, plan: EvictionPlan, reports: Sequence[Reports]) -> Iterable[Action]:
        (group,), (noted,), (reported,) = self.host.groups, plan.groups, reports
        for req_id, incarnation in noted.looked.items():
            request = self.host.running_request(req_id)
            blocks = group.residents.get(req_id)
            if request is None or blocks is None or blocks.incarnation != incarnation:
                continue
            if req_id not in reported:
                if req_id not in noted.due or not blocks.measured:  # else `Budget` has counted it
                    self.host.miss(req_id, blocks)
                continue
            again = req_id in noted.again
            came = blocks.state.recalled_blocks
            if (swap := self._choose(req_id, group.number, blocks, settled(request), again)) is not None:
                yield swap
            if not again:
                blocks.recalls.in_a_row = blocks.recalls.in_a_row + 1 if blocks.state.recalled_blocks > came else 0
            if again and blocks.state.recalled_blocks == came:
                # `Budget` has decided as of the first token that was to be computed again.
                self.host.rewind(request, None)
                report = reported[req_id] if req_id in noted.due else None
                action = back_to_budget(req_id, group.number, blocks, settled(request), report)
                if action is not None and (report is not None or not blocks.measured):
                    yield action

    def _choose(self, req_id: str, group: int, blocks: RequestBlocks, computed_tokens: int, again: bool) -> Swap | None:
        """Which blocks come back, and which go for them; None if none do.

        The best of the host blocks that queries want come back, and each takes the place of a resident block that has
        a lower score.
        """
        scores, least = blocks.scores, least_score(blocks)
        wanted = sorted((block for block in blocks.host if block in scores), key=lambda block: -scores[block])
        wanted = [block for block in wanted if scores[block] >= least]
        self._pool.want(blocks, wanted[::-1])
        candidates, room = blocks.replaceable(computed_tokens)
        if again:
            # What is computed again may see as many blocks as the largest chunk before it has.
            room = max(room, blocks.state.peak_blocks - blocks.held_blocks)
        room = min(room, self.host.spare_blocks)
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
