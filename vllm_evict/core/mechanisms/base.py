"""What a mechanism is, and what it sees of the scheduler."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...config import KVPolicyConfig
from ..actions import Action
from ..blocks import RequestBlocks
from ..plan import EvictionPlan, GroupPlan, Report, Reports

#: Reports in a row that a request may miss; then its oldest blocks go first, so that its bound holds.
MOST_MISSES = 3


class Group(Protocol):
    """A KV group whose blocks may be evicted.

    Attributes:
        number: its place among them, in plans and reports.
        block_size: tokens.
        in_flight: most blocks that a request holds on top while steps are in flight.
        residents: request -> its blocks in this group.
    """

    number: int
    block_size: int
    residents: Mapping[str, RequestBlocks]

    @property
    def in_flight(self) -> int: ...

    def published_tokens(self, req_id: str) -> int:
        """Tokens of a request whose blocks other requests can hit, those of the step being planned included."""
        ...


class Host(Protocol):
    """The scheduler, as mechanisms see it.

    Attributes:
        groups: KV groups that may have holes, in order.
        requests: vLLM's `Request` of each id.
        current_step: steps scheduled so far.
        next_plan: what goes to the workers with the next step.
    """

    groups: Sequence[Group]
    requests: Mapping[str, Any]
    current_step: int

    @property
    def next_plan(self) -> EvictionPlan: ...

    @property
    def free_blocks(self) -> int: ...

    def running_request(self, req_id: str) -> Any | None:
        """The request of this id, if it runs."""
        ...

    def miss(self, req_id: str, blocks: RequestBlocks) -> None:
        """Count and log a report that did not come."""
        ...

    def scoring_of(self, request: Any, blocks: RequestBlocks) -> Any:
        """How workers measure a request from now on; None: not at all."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """A step that was just scheduled.

    Attributes:
        tokens: request -> tokens that it computes in this step.
        over: for each KV group, the requests of the step whose blocks grew beyond their trigger.
        short: whether the pool may run out before long.
    """

    tokens: Mapping[str, int]
    over: Sequence[Sequence[str]]
    short: bool = False


class Mechanism:
    """One way in which requests lose blocks, or have them rearranged.

    The scheduler gives each of its mechanisms the plan of a step before workers get it (`plan`), and again once the
    step is done (`decide`). It applies the actions of `decide` one by one, so that a later one sees the blocks as an
    earlier one left them.
    A mechanism keeps no state of a request: that is `RequestBlocks`, which end with the request.
    """

    def __init__(self, host: Host) -> None:
        self.host = host

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        """Whether a server under this policy has requests for it."""
        raise NotImplementedError

    def plan(self, plan: EvictionPlan, step: Step) -> None:
        """Say what workers have to report, and note which requests are to be decided on, once the step is done."""

    def decide(self, plan: EvictionPlan, reports: Sequence[Reports]) -> Iterable[Action]:
        """Decide once the step of this plan is done, by what workers reported for each KV group."""
        return ()

    def due(self, plan: EvictionPlan) -> Iterator[tuple[Group, Any, RequestBlocks]]:
        """Requests that the plan noted as due, and that still run without having started over since."""
        for group, noted in zip(self.host.groups, plan.groups):
            for req_id, incarnation in noted.due.items():
                request = self.host.running_request(req_id)
                if request is not None and group.residents[req_id].incarnation == incarnation:
                    yield group, request, group.residents[req_id]

    def waits_for(self, report: Report | None, req_id: str, blocks: RequestBlocks) -> bool:
        """Whether a request's blocks stay this time, because its scores did not come.

        They do not if the pool has too little room for what may be in flight until the next decision: a request that
        ran out of blocks here would be preempted, and begin anew with all its scores to come. Nor do they if the
        request has a context, which has no room for more than one decision's growth.
        """
        if report is not None:
            blocks.misses = 0
            return False
        self.host.miss(req_id, blocks)
        room = sum(group.in_flight for group in self.host.groups)
        patient = blocks.misses < MOST_MISSES and blocks.config.context is None
        return patient and self.host.free_blocks >= room


def settled(request: Any) -> int:
    """Tokens of a request whose steps are done."""
    return request.num_computed_tokens - request.num_in_flight_tokens


def note(plan: GroupPlan, req_id: str, blocks: RequestBlocks) -> None:
    """Make a request due, with the statistics that its decision takes."""
    plan.due[req_id] = blocks.incarnation
    if blocks.config.granularity == "token":
        plan.judged.add(req_id)
    elif blocks.measured:
        plan.report[req_id] = blocks.config.policy.measures
