"""The interface of mechanisms, the scheduler as they see it, and the mechanisms of a scheduler."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from ...config import KVPolicyConfig
from ..actions import Action, Applied, Judged
from ..blocks import RequestBlocks
from ..plan import EvictionPlan, Report, Reports
from ..residence import NO_BLOCKS

M = TypeVar("M", bound="Mechanism")
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

    def note(self, req_id: str) -> None:
        """Note a request whose blocks may be over its trigger, though its table does not grow."""
        ...

    def exceeds(self, req_id: str) -> bool:
        """Return whether a request holds more blocks than its trigger."""
        ...


class SchedulerView(Protocol):
    """The scheduler, as mechanisms see it.

    Attributes:
        groups: KV groups that may have holes, in the order of `Group.number`.
        requests: request id -> vLLM's `Request`.
        current_step: steps scheduled so far.
        next_plan: the plan that workers get with the next step.
        free_blocks: free blocks of the pool.
        kv_policy: the server's policy.
        max_in_flight_tokens: most tokens of a request in flight.
        max_model_len: most tokens of a request.
        mechanisms: of the server.
    """

    kv_policy: KVPolicyConfig
    max_in_flight_tokens: int
    max_model_len: int

    groups: Sequence[Group]
    requests: Mapping[str, Any]
    current_step: int
    mechanisms: "Mechanisms"

    @property
    def next_plan(self) -> EvictionPlan: ...

    @property
    def free_blocks(self) -> int: ...

    def running_request(self, req_id: str) -> Any | None:
        """Return vLLM's `Request` of this id; None if it does not run."""
        ...

    def idle_session(self, req_id: str) -> Any | None:
        """Return vLLM's `Request` of an idle session: between two turns, with no token in flight; else None."""
        ...

    def miss(self, req_id: str, blocks: RequestBlocks) -> None:
        """Count and log a missing report."""
        ...

    def count(self, blocks: RequestBlocks, **events: int) -> None:
        """Count events of a request, for its usage and for /metrics."""
        ...

    def part(self, kind: type[M]) -> M:
        """Return the server's mechanism of this class."""
        ...

    def scoring_of(self, request: Any, blocks: RequestBlocks) -> Any:
        """Return the `Scoring` of a request under its current policy; None if workers do not measure the request."""
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


class Offer(NamedTuple):
    """The blocks that a request can lose in one KV group when the pool runs out.

    Attributes:
        blocks: int64 [n], logical blocks, ascending.
        cost: float64 [n], see `RequestBlocks.offer`.
        spare: how many of them may go.
        writes: int64 [m], blocks that become private to the request with the first one that goes.
    """

    blocks: np.ndarray
    cost: np.ndarray
    spare: int
    writes: np.ndarray = NO_BLOCKS


class Due(defaultdict[int, dict[str, int]]):
    """Notes on a step: KV group -> request -> incarnation, of requests that may exceed their trigger after the step."""

    def __init__(self) -> None:
        super().__init__(dict)


class Misses:
    """State of a request: successive decisions of its budget without a report."""

    count = 0


class Metric(NamedTuple):
    """A series of /metrics that each policy has.

    Attributes:
        name, help: of the metric; the name comes after `vllm:kv_evict_`.
        kind: "counter", "gauge", or "field": a gauge that shows the policy's field of the metric's key, if it has one.
        label: of its series, beside the model's, the engine's and the policy's; "" for none.
        values: of the label, whose series are there from the start.
    """

    name: str
    help: str
    kind: str = "counter"
    label: str = ""
    values: Sequence[str] = ("",)


class Mechanism(ABC):
    """One way in which requests lose blocks, get them back, or have them moved; or what follows from that.

    The scheduler calls the hooks below, of which each does nothing by default, and knows no mechanism by name. State of
    a request is `RequestBlocks.of` a class of the mechanism's, and so are `EvictionPlan.notes` on a step.

    Args:
        view: the scheduler.

    Attributes:
        metrics: what servers that need the mechanism show beside others, by key: a mechanism counts under these keys
            (`integration.engine.tally`). No two mechanisms have one key.
    """

    metrics: Mapping[str, Metric] = {}

    def __init__(self, view: SchedulerView) -> None:
        self.view = view

    @classmethod
    @abstractmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        """Return whether a server with this policy needs the mechanism."""

    @property
    def described(self) -> str:
        """Words of the start-up line about the mechanism; "" for none."""
        return ""

    # A step, in the order of time

    def has_work(self) -> bool:
        """Return whether the engine shall step though no request waits or runs."""
        return False

    def before_schedule(self) -> None:  # noqa: B027
        """Prepare for the step that vLLM is about to schedule."""

    def limit_hit(self, request: Any, most: int) -> int:
        """Return how many tokens of a cached prefix a request may start with, of the `most` that the pool can hold."""
        return most

    def on_hit(self, request: Any, hit: Any) -> Any:
        """Return the prefix that a request starts with, in place of what vLLM found in the prefix cache."""
        return hit

    def limit_tokens(self, request: Any, computed_tokens: int, new_tokens: int) -> int:
        """Return how many of `new_tokens`, for which vLLM has room, a request may compute in the step being planned."""
        return new_tokens

    def on_offer(self, request: Any, blocks: RequestBlocks, taker: Any, offer: Offer) -> Offer:
        """Return what a request can lose when the pool runs out, in place of what its blocks alone tell.

        `taker` is the request that vLLM allocates blocks for. It may be the same one.
        """
        return offer

    def before_metadata(self, tokens: Mapping[str, int]) -> None:  # noqa: B027
        """Note that vLLM's KV connector is about to plan a step: request -> the tokens that it computes."""

    def on_start(self, plan: EvictionPlan, req_id: str, blocks: Sequence[RequestBlocks]) -> None:  # noqa: B027
        """Note that a request starts, starts over or goes on with the step of this plan."""

    def on_scheduled(self, plan: EvictionPlan, tokens: Mapping[str, int]) -> None:  # noqa: B027
        """Note the tokens (request -> number) of a step, before requests over their trigger are taken."""

    def plan(self, plan: EvictionPlan, step: Step) -> None:  # noqa: B027
        """Add the requests to decide on after the step, and the reports that their decisions need."""

    def on_output(self, output: Any) -> None:  # noqa: B027
        """Take in vLLM's `ModelRunnerOutput` of a step, before vLLM ends requests."""

    def cancel(self, plan: EvictionPlan, req_id: str) -> None:
        """Decide nothing on a request after the step of this plan: the step read blocks that did not come."""
        for due in plan.notes(Due).values():
            due.pop(req_id, None)

    def decide(self, plan: EvictionPlan, reports: Sequence[Reports]) -> Iterable[Action]:
        """Yield actions once the step of this plan is done.

        The scheduler applies each action before it asks for the next one, so a later action sees the blocks that an
        earlier one left.

        Args:
            plan: plan of the step.
            reports: what workers reported, for each KV group.
        """
        return ()

    def before_apply(self, action: Action) -> Action | None:
        """Return an action, of any mechanism, as it can be applied: a part of it, or with more; None: not at all."""
        return action

    def on_applied(self, applied: Applied) -> None:  # noqa: B027
        """Do what follows an action, of any mechanism."""

    def after_output(self, outputs: Mapping[int, Any]) -> None:  # noqa: B027
        """Change what clients (client -> vLLM's `EngineCoreOutputs`) get of a step."""

    def before_stats(self) -> None:  # noqa: B027
        """Set the gauges of /metrics."""

    def on_stats(self, stats: Any) -> None:  # noqa: B027
        """Change vLLM's `SchedulerStats` of a step."""

    # A request

    def on_turn(self, req_id: str, blocks: Sequence[RequestBlocks]) -> None:  # noqa: B027
        """Note that a session's next turn begins."""

    def on_free(self, request: Any) -> None:  # noqa: B027
        """Note that a request is about to give back all blocks: it has ended, or it starts over."""

    def on_end(self, req_id: str) -> None:  # noqa: B027
        """Note that a request has ended."""

    # The engine

    @property
    def lent(self) -> int:
        """Blocks that the mechanism holds, and gives back as soon as requests need them."""
        return 0

    def on_finish(self, finished: list[Any]) -> list[Any]:
        """Return the finished requests that clients know, of those that were told to finish."""
        return finished

    def on_pause(self) -> None:  # noqa: B027
        """Note that vLLM is about to pause, or to end all requests."""

    def on_shutdown(self) -> None:  # noqa: B027
        """Note that the engine takes no more requests, and ends once clients have the answers of those that it has."""

    def on_reset(self) -> None:  # noqa: B027
        """Note that what requests have computed is void: vLLM is about to reset its cache, or weights changed."""

    def on_adapter(self, adapter: Any) -> bool:
        """Return whether an adapter, vLLM's `LoRARequest`, has got other weights, now that workers loaded it."""
        return False

    # For subclasses

    def note_due(self, plan: EvictionPlan, group: Group, req_id: str) -> None:
        """Note a request as due after this step, and ask workers for the statistics that its decision needs."""
        blocks, noted = group.residents[req_id], plan.groups[group.number]
        plan.notes(Due)[group.number][req_id] = blocks.incarnation
        if blocks.config.granularity == "token":
            Judged.add_to(noted).numbers[req_id] = self.view.current_step
        elif blocks.measured:
            noted.report[req_id] = blocks.config.policy.measures

    def due(self, plan: EvictionPlan) -> Iterator[tuple[Group, Any, RequestBlocks]]:
        """Yield the requests that the plan notes as due, if they still run and have not restarted."""
        for group in self.view.groups:
            for req_id, incarnation in plan.notes(Due)[group.number].items():
                request = self.view.running_request(req_id)
                if request is not None and group.residents[req_id].incarnation == incarnation:
                    yield group, request, group.residents[req_id]

    def waits_for(self, report: Report | None, req_id: str, blocks: RequestBlocks) -> bool:
        """Return whether the decision on a request is put off because its report is missing.

        The decision is not put off after `MOST_MISSES` missing reports. It is not put off if the pool has no room for
        all blocks in flight, since the request could be preempted before the next decision. It is not put off if the
        request has room for the growth up to one decision only (`KVPolicyConfig.decides_at_once`).
        """
        misses = blocks.of(Misses)
        if report is not None:
            misses.count = 0
            return False
        misses.count += 1
        self.view.miss(req_id, blocks)
        room = sum(group.in_flight for group in self.view.groups)
        patient = misses.count < MOST_MISSES and not blocks.config.decides_at_once
        return patient and self.view.free_blocks >= room


class Mechanisms:
    """The mechanisms that a server's requests may need.

    Args:
        scheduler: as mechanisms see it.
        kinds: classes of mechanisms, in the order in which their hooks are called.
    """

    def __init__(self, scheduler: SchedulerView, kinds: Sequence[type[Mechanism]]) -> None:
        self._all: list[Mechanism] = []
        self._having: dict[str, list[Mechanism]] = {}
        scheduler.mechanisms = self
        for kind in kinds:
            if kind.serves(scheduler.kv_policy):
                self.add(kind(scheduler))

    def __iter__(self) -> Iterator[Mechanism]:
        return iter(self._all)

    def add(self, mechanism: Mechanism, last: bool = True) -> None:
        """Add a mechanism, whose hooks are called after those of all others, or before them.

        One that limits tokens has to be there when the scheduler is made (see `EvictionMixin.__init__`).
        """
        self._all.insert(len(self._all) if last else 0, mechanism)
        self._having = {}

    def of(self, kind: type[M]) -> list[M]:
        """Return the mechanisms of a class."""
        return [mechanism for mechanism in self._all if isinstance(mechanism, kind)]

    def having(self, hook: str) -> list[Mechanism]:
        """Return the mechanisms that have a hook of their own."""
        if hook not in self._having:
            default = getattr(Mechanism, hook)
            self._having[hook] = [each for each in self._all if getattr(type(each), hook) is not default]
        return self._having[hook]

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook that returns nothing."""
        for mechanism in self.having(hook):
            getattr(mechanism, hook)(*args)

    def passed(self, hook: str, value: Any, *before: Any) -> Any:
        """Return a value that each hook has changed in turn, until one returns None.

        Args:
            hook: its name.
            value: the hook's last argument.
            before: the hook's other arguments.
        """
        for mechanism in self.having(hook):
            if value is None:
                break
            value = getattr(mechanism, hook)(*before, value)
        return value


def settled(request: Any) -> int:
    """Return the tokens of a request whose step is done."""
    return request.num_computed_tokens - request.num_in_flight_tokens


def decodes(request: Any, first: int) -> bool:
    """Return whether a step of a request from token `first` on is a decode: of its newest token, a generated one.

    Other steps are chunks of a prompt, even those of one token. Tokens that are computed again after a preemption count
    as a prompt's.
    """
    generated: bool = first >= max(request.num_prompt_tokens, request.num_tokens - 1)
    return generated


def verified(request: Any, first: int, tokens: int) -> int:
    """Return how many of `tokens` tokens that a request computes from token `first` on are no drafts; one at least."""
    return min(tokens, max(request.num_tokens - first, 1))
