"""The interface of mechanisms, and the scheduler as mechanisms see it."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...config import KVPolicyConfig
from ..actions import Action
from ..blocks import RequestBlocks
from ..plan import EvictionPlan, GroupPlan, Report, Reports

#: Successive missing reports after which a decision evicts the oldest blocks instead of waiting.
MOST_MISSES = 3


class Group(Protocol):
    """A KV group whose blocks may be evicted.

    Attributes:
        number: index of the group in plans and reports.
        block_size: tokens.
        in_flight: most blocks that steps in flight add to a request.
        residents: request -> its blocks in this group.
    """

    number: int
    block_size: int
    residents: Mapping[str, RequestBlocks]

    @property
    def in_flight(self) -> int: ...

    def published_tokens(self, req_id: str) -> int:
        """Tokens of a request in published blocks, the step being planned included."""
        ...


class Host(Protocol):
    """The scheduler, as mechanisms see it.

    Attributes:
        groups: KV groups that may have holes, in the order of `Group.number`.
        requests: request id -> vLLM's `Request`.
        current_step: steps scheduled so far.
        next_plan: the plan that workers get with the next step.
        free_blocks: free blocks of the pool.
        spare_blocks: free blocks that running requests do not need for what they may have in flight.
    """

    groups: Sequence[Group]
    requests: Mapping[str, Any]
    current_step: int

    @property
    def next_plan(self) -> EvictionPlan: ...

    @property
    def free_blocks(self) -> int: ...

    @property
    def spare_blocks(self) -> int: ...

    def running_request(self, req_id: str) -> Any | None:
        """vLLM's `Request` of this id; None if it does not run."""
        ...

    def idle_session(self, req_id: str) -> Any | None:
        """vLLM's `Request` of this id, if it is a session between two turns with no token in flight; else None."""
        ...

    def miss(self, req_id: str, blocks: RequestBlocks) -> None:
        """Count and log a missing report."""
        ...

    def rewind(self, request: Any, computed_tokens: int | None) -> None:
        """Have the tokens of a request from so many on computed again; None: not after all."""
        ...

    def scoring_of(self, request: Any, blocks: RequestBlocks) -> Any:
        """The `Scoring` of a request under its current policy; None if workers do not measure the request."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """A step that was just scheduled.

    Attributes:
        tokens: request -> tokens that it computes in this step.
        over: for each KV group, requests of the step whose blocks grew beyond their trigger.
        short: whether the pool is short of free blocks.
    """

    tokens: Mapping[str, int]
    over: Sequence[Sequence[str]]
    short: bool = False


class Mechanism(ABC):
    """One way in which requests lose blocks, or have them rearranged.

    The scheduler calls `plan` before workers get the plan of a step, and `decide` once that step is done. It applies
    each action before it asks for the next one, so a later action sees the blocks that an earlier one left.

    State of a request belongs to its `RequestBlocks`, which end with the request, not to the mechanism.
    """

    def __init__(self, host: Host) -> None:
        self.host = host

    @classmethod
    @abstractmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        """Whether a server with this policy needs the mechanism."""

    def plan(self, plan: EvictionPlan, step: Step) -> None:  # noqa: B027 - optional
        """Add the requests to decide on after the step, and the reports that their decisions need."""

    def decide(self, plan: EvictionPlan, reports: Sequence[Reports]) -> Iterable[Action]:
        """Yield actions once the step of this plan is done.

        Args:
            plan: plan of the step.
            reports: what workers reported, for each KV group.
        """
        return ()

    def due(self, plan: EvictionPlan) -> Iterator[tuple[Group, Any, RequestBlocks]]:
        """Yield the requests that the plan notes as due, if they still run and have not restarted."""
        for group, noted in zip(self.host.groups, plan.groups):
            for req_id, incarnation in noted.due.items():
                request = self.host.running_request(req_id)
                if request is not None and group.residents[req_id].incarnation == incarnation:
                    yield group, request, group.residents[req_id]

    def waits_for(self, report: Report | None, req_id: str, blocks: RequestBlocks) -> bool:
        """Whether the decision on a request is put off because its report is missing.

        The decision is not put off after `MOST_MISSES` missing reports. It is not put off if the pool has no room for
        all blocks in flight, since the request could be preempted before the next decision. It is not put off if the
        request has a context, which has room for the growth up to one decision only.
        """
        if report is not None:
            blocks.misses = 0
            return False
        blocks.misses += 1
        self.host.miss(req_id, blocks)
        room = sum(group.in_flight for group in self.host.groups)
        patient = blocks.misses < MOST_MISSES and blocks.config.context is None
        return patient and self.host.free_blocks >= room


def settled(request: Any) -> int:
    """Tokens of a request whose step is done."""
    return request.num_computed_tokens - request.num_in_flight_tokens


def scores_prompt(request: Any) -> bool:
    """Whether log-probabilities of a request's prompt are collected, chunk by chunk, while it is computed."""
    params = request.sampling_params
    asked = (getattr(params, name, None) for name in ("prompt_logprobs", "prompt_logprob_token_ids"))
    return any(each is not None for each in asked)


def note(plan: GroupPlan, req_id: str, blocks: RequestBlocks, step: int) -> None:
    """Note a request as due after this step, and ask workers for the statistics that its decision needs."""
    plan.due[req_id] = blocks.incarnation
    if blocks.config.granularity == "token":
        plan.judged[req_id] = step
    elif blocks.measured:
        plan.report[req_id] = blocks.config.policy.measures
