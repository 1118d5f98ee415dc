"""vLLM's schedulers with eviction: workers measure, the scheduler decides, and its plan tells the workers."""

import time
from collections.abc import Container, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from ...config import KVPolicyError, Room
from ...core.actions import Action, Applied
from ...core.blocks import RequestBlocks
from ...core.mechanisms import Step
from ...core.mechanisms.base import M, Mechanisms, settled
from ...core.plan import PLAN, EvictionPlan, Scoring
from ..seams import replaces
from ..start.drafters import lookahead
from ..start.room import tell
from ..start.versions import any_waits
from .admission import Admission
from .allocation import Slots, count_published, limit_tokens
from .followers import follow
from .hits import Hit, Hits
from .managers import BESIDE, ChunkManager, EvictableManager, SlidingManager, StateManager, put_beside
from .mechanisms import KINDS
from .outputs import Usages
from .seats import Seats
from .spec import policy_config
from .start_up import start_up_line
from .step_reports import StepReports
from .tally import Tally

logger = init_logger("vllm.evict")

#: One of vLLM's schedulers comes after the mixin in each class.
Base: Any = object


@replaces(
    "vllm.v1.core.sched.scheduler:Scheduler",
    methods="__init__ schedule update_from_output _free_request_blocks _free_request finish_requests "
    "reset_prefix_cache _build_kv_connector_meta _handle_invalid_blocks make_stats add_request "
    "_update_request_as_session _get_local_prefix_cache_hit has_requests set_pause_state",
    why="plans and decides with each step; `scheduler_cls` of vLLM's configuration names it",
    remove_when="never: vLLM has schedulers of plugins",
)
class EvictionMixin(Base):
    """Adds eviction to a vLLM scheduler: plans with `schedule`, decides with `update_from_output`.

    `schedule` notes requests whose block table grows past their trigger. When the step is done, mechanisms decide on
    them. Evicted blocks go back to the pool at once, and their holes go to workers with the plan of the next `schedule`
    (docs/architecture.md, "When an evicted block is used again").

    The parts are objects: `mechanisms` decide, `admission` grants policies, `hits` cuts prefix hits, `reports` takes
    what workers report, `usages` tells the front end, `seats` counts slots of workers, `slots` has what mechanisms
    do where vLLM allocates blocks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv_policy = policy_config(self.vllm_config)
        self.max_in_flight_tokens = self.vllm_config.max_in_flight_tokens
        self.tally = Tally()
        self.kv_managers, self.other_managers = self._managers()
        count_published.on(self.kv_cache_manager, self._published_tokens)
        self.slots = Slots(self.kv_cache_manager)
        self.slots.published.append(self._note_published)
        self._plan = EvictionPlan.empty(len(self.kv_managers))
        self.hits = Hits(self)
        self.admission = Admission(self, self.hits)
        self.reports, self.usages = StepReports(self), Usages(self)
        #: Requests of the step that is done that read blocks which did not come.
        self._failed_loads: set[str] = set()
        self.mechanisms = Mechanisms(self, KINDS)
        for follower in follow(self):
            self.mechanisms.add(follower, last=False)
        self.seats = Seats(self)
        self.slots.replace()
        if limits := [*self.seats.limits, *(each.limit_tokens for each in self.mechanisms.having("limit_tokens"))]:
            limit_tokens.on(self, limits)
        logger.info(start_up_line(self))

    def _managers(self) -> tuple[list[EvictableManager], list[SlidingManager | ChunkManager | StateManager]]:
        """Return the managers of KV groups that may have holes, in order, and those of windows, chunks and states.

        Several groups may have holes only where heads are split, or where most layers have full attention.
        """
        managers = self.kv_cache_manager.coordinator.single_type_managers
        evictable = [manager for manager in managers if isinstance(manager, EvictableManager)]
        others = [manager for manager in managers if manager not in evictable]
        served = evictable and all(type(manager) in BESIDE for manager in others)
        if not served or (len(managers) > 1 and not others and not managers[0].kv_cache_spec.head_class):
            raise KVPolicyError(
                f"KV policy {self.kv_policy.name!r} can't be used with layers whose caches differ in shape "
                f"({len(managers)} KV groups: {', '.join(type(m).__name__ for m in managers)}): leave --kv-policy out"
            )
        order = [manager.kv_cache_spec.head_class for manager in evictable]
        assert [name for name in self.kv_policy.classes for _ in range(order.count(name))] == order, order
        in_flight = self.max_in_flight_tokens + lookahead(self.vllm_config)
        for manager in others:
            put_beside(manager, evictable[0].residents)
        for number, manager in enumerate(evictable):
            manager.bind(number, in_flight, self._give_back)
        self.room = Room(
            evictable[0].block_size,
            self.kv_cache_manager.block_pool.num_gpu_blocks - 1,  # one is vLLM's null block
            len(evictable),
            evictable[0].in_flight,
            # Drafts may go beyond max_tokens, and a drafter with layers beyond drafts.
            self.num_spec_tokens + self.num_lookahead_tokens,
            tuple(manager.beside for manager in others),
        )
        tell(self.vllm_config, self.room)
        for manager in evictable:
            manager.room = self.room.left(self.max_model_len) // len(evictable)
        return evictable, others

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self.seats.before_schedule()
        self.mechanisms.call("before_schedule")
        changes = self.admission.changes
        admits = changes and any_waits(self)
        for manager in self.kv_managers:
            manager.begin_step(changes, admits)
        output = super().schedule(*args, **kwargs)
        self._note_growth(output)
        plan, self._plan = self._plan, EvictionPlan.empty(len(self.kv_managers))
        for manager, group in zip(self.kv_managers, plan.groups):
            group.changes = manager.take_changes()
        self._plan_starts(plan, output)
        tokens = output.num_scheduled_tokens
        self.admission.end_stall(bool(tokens))
        self.mechanisms.call("on_scheduled", plan, tokens)
        self.mechanisms.call("plan", plan, Step(tokens, self._take_over_trigger(tokens), self._is_short()))
        setattr(output, PLAN, plan)
        return output

    def _note_growth(self, output: SchedulerOutput) -> None:
        """Count the blocks that requests got for a step, and note the requests that they take over their trigger.

        The step's output names each request that got blocks for it, and these alone are examined. Others got blocks
        too: requests that were preempted in the same step, which hold none, and those that wait for a connector, which
        `EvictableManager.allocate_external_computed_blocks` counts.
        """
        cached = output.scheduled_cached_reqs
        grown = list(compress(zip(cached.req_ids, cached.new_block_ids), cached.new_block_ids))
        grown += [(new.req_id, new.block_ids) for new in output.scheduled_new_reqs]
        for req_id, blocks in grown:
            for manager in self.kv_managers:
                if blocks[manager.kv_cache_group_id]:
                    manager.count(req_id)
                    # The limits of a session's next turn may have changed. Blocks that a connector loaded came before.
                    manager.note(req_id)

    def _take_over_trigger(self, tokens: Container[str]) -> list[list[str]]:
        """Return for each KV group the requests of a step that may be over their trigger once it is done.

        Args:
            tokens: requests of the step being planned.
        """
        over = [manager.take_over_trigger() for manager in self.kv_managers]
        for manager, noted in zip(self.kv_managers, over):
            for req_id in noted:
                # Where the server speculates, the step may begin blocks with drafts that are rejected.
                if req_id not in tokens or self.num_spec_tokens:
                    manager.note(req_id)
        return [[req_id for req_id in noted if req_id in tokens] for noted in over]

    def _plan_starts(self, plan: EvictionPlan, output: SchedulerOutput) -> None:
        """Add to a plan how workers measure the requests that start, or start over, with its step."""
        starts = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        cached = output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            computed = zip(cached.req_ids, cached.num_computed_tokens)
            starts += [start for start in computed if start[0] in cached.resumed_req_ids]
        for req_id, computed_tokens in starts:
            groups = self.blocks_of(req_id)
            self.mechanisms.call("on_start", plan, req_id, groups)
            for blocks, group in zip(groups, plan.groups):
                if blocks.started:
                    continue
                blocks.started, blocks.first_query = True, computed_tokens
                blocks.scoring = self.scoring_of(self.requests[req_id], blocks)
                if blocks.scoring is not None:
                    group.track[req_id] = blocks.scoring

    def _is_short(self) -> bool:
        """Return whether the pool may run out before long: a quarter of it is left, or a request waits."""
        enough = max(self.kv_cache_manager.block_pool.num_gpu_blocks // 4, 2 * len(self.running))
        lent = sum(each.lent for each in self.mechanisms)
        return bool(self.waiting) or self.free_blocks + lent < enough

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        self.usages.next_step()
        self._failed_loads = set()
        self.mechanisms.call("on_output", model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        plan: EvictionPlan = getattr(scheduler_output, PLAN, None) or EvictionPlan.empty(len(self.kv_managers))
        for req_id in self._failed_loads:
            for group in plan.groups:
                group.report.pop(req_id, None)
            for mechanism in self.mechanisms:
                mechanism.cancel(plan, req_id)
        reports = self.reports.take(scheduler_output, model_runner_output, plan)
        for mechanism in self.mechanisms.having("decide"):
            for action in mechanism.decide(plan, reports):
                self.apply(action)
        self.mechanisms.call("after_output", outputs)
        self.usages.send(outputs)
        return outputs

    def _give_back(self, blocks: list[KVCacheBlock]) -> None:
        """Free blocks that a request lost, tail first, as vLLM frees: the head of a cached prefix stays longest.

        A step in flight still reads them. A later step writes them after it, but a connector may load into them at any
        time: then vLLM defers frees, and they are free once that step is done.
        """
        if self.defer_block_free and self.sched_step_seq > self.processed_step_seq:
            self.deferred_frees.append((self.sched_step_seq, blocks))
        else:
            self.kv_cache_manager.block_pool.free_blocks(reversed(blocks))

    def _build_kv_connector_meta(self, connector: Any, scheduler_output: SchedulerOutput) -> Any:
        self.mechanisms.call("before_metadata", scheduler_output.num_scheduled_tokens)
        return super()._build_kv_connector_meta(connector, scheduler_output)

    def _handle_invalid_blocks(self, *args: Any, **kwargs: Any) -> set[str]:
        """Have what a connector failed to load computed and measured again, from zero: the step has read it."""
        affected = super()._handle_invalid_blocks(*args, **kwargs)
        for req_id in affected if self.recompute_kv_load_failures else ():
            for manager, plan in zip(self.kv_managers, self._plan.groups):
                blocks, request = manager.residents[req_id], self.requests[req_id]
                blocks.compute_again(request.num_computed_tokens, request.num_prompt_tokens)
                manager.note(req_id)
                blocks.scoring = self.scoring_of(request, blocks)
                plan.triggers.pop(req_id, None)
                if blocks.scoring is not None:
                    plan.track[req_id] = blocks.scoring
        self._failed_loads = affected
        return affected

    def apply(self, action: Action) -> bool:
        """Carry out an action of a mechanism: move blocks of the request, and add orders to the next plan.

        An action may need private copies of blocks that other requests hold. If the pool has no room for them, nothing
        changes and the next decision tries again; a request that can't go on without the action is preempted.

        Returns:
            Whether the action, or a part of it, was carried out.
        """
        if (action := self.mechanisms.passed("before_apply", action)) is None:
            return False
        req_id, manager, plan = action.req_id, self.kv_managers[action.group], self._plan
        request, groups = self.requests[req_id], self.blocks_of(req_id)
        blocks, source = groups[action.group], manager.blocks_at(req_id, action.reads)
        for each in self.kv_managers:
            each.count(req_id)  # the peak includes blocks that it got earlier in the step that is being planned
        first, holes = not any(each.evicted_blocks for each in groups), len(action.holes)
        whole = blocks.pure_tokens is None
        # What is in flight was computed without the new holes; drafts among it may be computed again.
        computed = settled(request) if self.num_spec_tokens else request.num_computed_tokens
        computed = computed if action.ends_purity else None
        if (rewritten := manager.rewrite(req_id, action.writes, action.holes, computed)) is None:
            if action.must:
                self.running.remove(request)
                self._preempt_request(request, time.monotonic())
            return False
        before, given_back, freed = rewritten
        target = manager.blocks_at(req_id, action.writes)
        pure = blocks.pure_tokens
        # None: layers read all blocks, though some are holes.
        if len(action.writes) and pure is not None:
            # Published blocks stay published; blocks that follow them are never published.
            blocks.pure_tokens = min(pure, manager.published_tokens(req_id))
        if whole and blocks.pure_tokens is not None:
            self._publish_ends(request)
        if action.work is not None:
            plan.orders.append(replace(action.work, source=source, target=target))
        # A published block may still be hit, so its content has to match its hash.
        unpublished = [block.block_id for block in freed if block.block_hash is None]
        self.mechanisms.call("on_applied", Applied(action, blocks, before, target, unpublished))
        copies = len(given_back) - holes
        gone, begins = max(len(freed) - copies, 0), int(first and holes > 0)
        self.tally.add(blocks.policy, evicted=holes, freed=gone, shared=holes - gone, requests=begins, copied=copies)
        return True

    # What mechanisms see (`core.mechanisms.SchedulerView`)

    @property
    def groups(self) -> list[EvictableManager]:
        return self.kv_managers

    @property
    def next_plan(self) -> EvictionPlan:
        return self._plan

    @property
    def free_blocks(self) -> int:
        return self.kv_cache_manager.block_pool.get_num_free_blocks()

    def running_request(self, req_id: str) -> Request | None:
        request = self.requests.get(req_id)
        return request if request is not None and request.status == RequestStatus.RUNNING else None

    def idle_session(self, req_id: str) -> Request | None:
        request = self.requests.get(req_id)
        if request is None or request.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            return None
        return None if request.num_in_flight_tokens else request

    def miss(self, req_id: str, blocks: RequestBlocks) -> None:
        self.tally.add(blocks.policy, missing=1)
        if not blocks.state.complained:
            blocks.state.complained = True
            logger.error(
                "no scores came back for request %s; while none come its oldest KV blocks go first. Said once.", req_id
            )

    def count(self, blocks: RequestBlocks, **events: int) -> None:
        blocks.state.counts.update(events)
        self.tally.add(blocks.policy, **events)

    def part(self, kind: type[M]) -> M:
        (part,) = self.mechanisms.of(kind)
        return part

    def scoring_of(self, request: Request, blocks: RequestBlocks) -> Scoring | None:
        return self.admission.scoring_of(request, blocks)

    @property
    def residents(self) -> dict[str, RequestBlocks]:
        """Blocks of all requests in the first KV group that may have holes."""
        return self.kv_managers[0].residents

    def blocks_of(self, req_id: str) -> list[RequestBlocks]:
        """Return the blocks of a request in each KV group that may have holes."""
        return [manager.residents[req_id] for manager in self.kv_managers]

    def _note_published(self, request: Request, tokens: int, blocks_of_pool: Sequence[KVCacheBlock]) -> None:
        """Note that others can hit so many tokens of a request in a KV group (`RequestState.published_tokens`)."""
        if (blocks := self.residents.get(request.request_id)) is not None:
            blocks.state.published_tokens = max(blocks.state.published_tokens, tokens)

    def _published_tokens(self, request: Request) -> int | None:
        """Return the tokens of a request that others can hit, with evicted blocks; None if it has all its blocks."""
        blocks = self.residents.get(request.request_id)
        if blocks is None or blocks.pure_tokens is None:
            return None
        return min(manager.published_tokens(request.request_id) for manager in self.kv_managers)

    def _publish_ends(self, request: Request) -> None:
        """Publish blocks of sliding windows, where a request loses its first block: later ones are never published."""
        if self.kv_cache_manager.enable_caching:
            for manager in self.other_managers:
                manager.publish_end(request)

    def _withdraw(self, request: Request) -> None:
        """Take blocks of a request out of the prefix cache that no step computes.

        vLLM publishes what a step fills as it plans the step. By priority it may then preempt the request in that same
        step, and keeps these blocks published (its pull request 43569).
        """
        for manager in (*self.kv_managers, *self.other_managers):
            planned = manager.req_to_blocks.get(request.request_id, ())
            for block in planned[request.num_computed_tokens // manager.block_size :]:
                if block.block_hash is not None:
                    self.kv_cache_manager.block_pool._maybe_evict_cached_block(block)

    # vLLM's own methods, with the parts' say

    def add_request(self, request: Request) -> None:
        if request.request_id not in self.residents:
            self.admission.admit(request)
            self.usages.begin(request)
        super().add_request(request)

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        # A turn may end among the drafts that its last step accepted. vLLM counts the tokens after its end as computed,
        # and would take their keys for those of the next turn's first tokens.
        session.num_computed_tokens = min(session.num_computed_tokens, session.num_tokens)
        super()._update_request_as_session(session, update)
        state = self.residents[session.request_id].state
        if state.emptied:
            state.emptied, session.num_computed_tokens = False, 0
        self.admission.renew(session)
        self.mechanisms.call("on_turn", session.request_id, self.blocks_of(session.request_id))
        self.admission.make_room(session)

    def _get_local_prefix_cache_hit(self, request: Request, *args: Any, **kwargs: Any) -> Hit:
        hit = Hit(*super()._get_local_prefix_cache_hit(request, *args, **kwargs))
        return self.mechanisms.passed("on_hit", self.hits.cut(request, hit), request)

    def _free_request_blocks(self, request: Request) -> None:
        self._withdraw(request)
        self._plan.forget(request.request_id)
        self.mechanisms.call("on_free", request)
        super()._free_request_blocks(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> tuple[dict | None, dict | None]:
        params = super()._free_request(request, *args, **kwargs)
        req_id = request.request_id
        if req_id in self.residents:  # else it never came in through `add_request`
            if req_id in self.kv_managers[0].req_to_blocks:
                # A connector holds its blocks for longer.
                self._plan.forget(req_id)
                self.mechanisms.call("on_free", request)
            self.usages.end(req_id)
            for manager in self.kv_managers:
                manager.forget(req_id)
        self.mechanisms.call("on_end", req_id)
        return params

    def has_requests(self) -> bool:
        return super().has_requests() or any(each.has_work() for each in self.mechanisms.having("has_work"))

    def set_pause_state(self, pause_state: PauseState) -> None:
        if pause_state != PauseState.UNPAUSED:
            self.mechanisms.call("on_pause")
        super().set_pause_state(pause_state)

    def end(self) -> None:
        """Tell mechanisms that the engine takes no more requests (see `start.ending`)."""
        self.mechanisms.call("on_shutdown")

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> list[Request]:
        if request_ids is None:
            self.mechanisms.call("on_pause")
        return self.mechanisms.passed("on_finish", super().finish_requests(request_ids, *args, **kwargs))

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self.weights_changed()
        return super().reset_prefix_cache(*args, **kwargs)

    def weights_changed(self) -> None:
        """Forget what was computed, where it outlives vLLM's pool (see `start.reloads`)."""
        self.mechanisms.call("on_reset")

    def adapter_loaded(self, adapter: LoRARequest) -> None:
        """Forget what was computed if workers have loaded other weights under an adapter's name."""
        if any([each.on_adapter(adapter) for each in self.mechanisms.having("on_adapter")]):
            self.weights_changed()

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats = super().make_stats(*args, **kwargs)
        return None if stats is None else self.usages.stats(stats)


class EvictionScheduler(EvictionMixin, Scheduler):
    """vLLM's `Scheduler` with eviction."""


class AsyncEvictionScheduler(EvictionMixin, AsyncScheduler):
    """vLLM's `AsyncScheduler` with eviction."""
