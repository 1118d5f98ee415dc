"""vLLM's schedulers with eviction: workers measure, the scheduler decides, and its plan tells the workers."""

import time
from collections.abc import Container, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from ...config import KVPolicyError
from ...core.actions import Action, Rotate, Swap
from ...core.blocks import RequestBlocks
from ...core.mechanisms import Again, Budget, Context, Mechanism, Pressure, Profiles, Recall, SharedBudget, Step
from ...core.mechanisms.base import settled
from ...core.plan import PLAN, REPORTS, TROUBLE, EvictionPlan, Reports
from ...core.reports import Inbox
from ...environment import poison_mode
from ..start.drafters import lookahead
from ..start.versions import any_waits
from .admission import AdmissionMixin
from .allocation import count_published, note_steps
from .followers import follow
from .hits import HitsMixin
from .managers import BESIDE, EvictableManager, SlidingManager, StateManager, put_beside
from .outputs import OutputsMixin
from .preempted import PreemptedMixin
from .pressure import RoomMaker
from .reconstruction import Reconstructions
from .spec import policy_config
from .start_up import start_up_line
from .tally import Tally
from .tier import TierMixin

logger = init_logger("vllm.evict")


class EvictionMixin(PreemptedMixin, AdmissionMixin, HitsMixin, TierMixin, OutputsMixin):
    """Adds eviction to a vLLM scheduler: plans with `schedule`, decides with `update_from_output`.

    `schedule` notes requests whose block table grows past their trigger. When the step is done, they are decided on.
    Evicted blocks go back to the pool at once. The holes travel with the plan of the next `schedule`, the first one
    that could hand those blocks out. Steps in flight still read the old table, and every worker runs them before the
    step that writes a reused block.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv_policy = policy_config(self.vllm_config)
        self.tally = Tally()
        self._poison = poison_mode()
        self.kv_managers, self.other_managers = self._managers()
        count_published(self.kv_cache_manager, self._published_tokens)
        if self.kv_policy.selects:
            note_steps(self.kv_cache_manager, self._residents_of)
        self._plan, self._inbox = EvictionPlan.empty(len(self.kv_managers)), Inbox()
        #: None unless some KV group uses `when: pressure`.
        self.pressure = Pressure(self, self.kv_policy) if Pressure.serves(self.kv_policy) else None
        self.room = RoomMaker(self, self.pressure) if self.pressure is not None else None
        #: Whether a request ever had a policy other than `full`.
        self._may_bound = False
        for manager in self.kv_managers if self.kv_policy.preempt != "host" else ():
            manager.spare_saved()
        #: None unless requests may use a policy that reconstructs prompts.
        self.reconstructions = Reconstructions(self) if Reconstructions.serves(self.kv_policy) else None
        #: None without a KV connector.
        self.follower = follow(self)
        #: Blocks that workers write by the next plan.
        self._written: set[int] = set()
        #: Requests that are not decided on after the step that is done: it read blocks that did not come.
        self._failed_loads: set[str] = set()
        #: Request -> drafts of it that the step that is done has accepted.
        self._accepted: dict[str, int] = {}
        #: None if evicted blocks are dropped.
        self.host_pool = self._host_pool()
        self._lingers = self.host_pool is not None and self._may_linger()
        #: None if no prompt's last tokens are ever computed again.
        self.again = Again(self, self.kv_policy) if Again.serves(self.kv_policy) else None
        if self.again is None:  # vLLM asks for each request of each step
            own = super(TierMixin, self)._reserve_prefill_lookahead
            self._reserve_prefill_lookahead = own  # type: ignore[method-assign]
        #: Request -> its computed tokens before it was rewound, until the next step is planned.
        self._rewound: dict[str, int] = {}
        self.mechanisms = self._mechanisms()
        self._stoppable, self._ended = {}, {}
        self._empty_steps = 0
        self._keeps_prompts = any(part.prompt == "whole" for part in self.kv_policy.classes.values())
        logger.info(start_up_line(self))

    def _mechanisms(self) -> list[Mechanism]:
        """The mechanisms that this server's requests may need, in the order in which they decide."""
        config, made = self.kv_policy, [self.pressure, self.again]
        for kind in (Profiles, Budget, SharedBudget):
            made.append(kind(self) if kind.serves(config) else None)
        made.append(Recall(self, config, self.host_pool) if Recall.serves(config) else None)
        made.append(Context(self, self.vllm_config.max_in_flight_tokens) if Context.serves(config) else None)
        made.append(self.reconstructions)
        return [mechanism for mechanism in made if mechanism is not None]

    def _managers(self) -> tuple[list[EvictableManager], list[SlidingManager | StateManager]]:
        """Managers of KV groups that may have holes, in order, and managers of sliding windows and of states.

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
        in_flight = self.vllm_config.max_in_flight_tokens + lookahead(self.vllm_config)
        for number, manager in enumerate(evictable):
            manager.bind(number, in_flight, self._poison, self._give_back)
        for manager in others:
            put_beside(manager, evictable[0].residents, self._poison)
        return evictable, others

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self.reconstructions is not None:
            self.reconstructions.before_schedule()
        admits = self.room is not None or (self._may_bound and any_waits(self))
        for manager in self.kv_managers:
            manager.bound_admissions(admits)
        output = super().schedule(*args, **kwargs)
        self._note_growth(output)
        plan, self._plan = self._plan, EvictionPlan.empty(len(self.kv_managers))
        self._rewound = {}
        self._plan_starts(plan, output)
        tokens = output.num_scheduled_tokens
        self._end_stall(bool(tokens))
        if self._keeps_prompts:
            self._note_prompts(tokens)
        step = Step(tokens, self._take_over_trigger(tokens), self._is_short())
        for mechanism in self.mechanisms:
            mechanism.plan(plan, step)
        if self._poison:
            for manager in (*self.kv_managers, *self.other_managers):
                plan.clean += manager.allocated
                manager.allocated = []
        setattr(output, PLAN, plan)
        return output

    def _note_growth(self, output: SchedulerOutput) -> None:
        """Count the blocks that requests got for a step, and note the requests that they take over their trigger.

        The step's output names each request that got blocks for it, and these alone are examined. Others got blocks
        too: requests that were preempted in the same step, which hold none, and those that wait for a connector, which
        `EvictableManager.allocate_external_computed_blocks` counts.
        """
        cached = output.scheduled_cached_reqs
        grown = [new for new in zip(cached.req_ids, cached.new_block_ids) if new[1] is not None]
        grown += [(new.req_id, new.block_ids) for new in output.scheduled_new_reqs]
        for req_id, blocks in grown:
            for manager in self.kv_managers:
                if blocks[manager.kv_cache_group_id]:
                    manager.count(req_id)
                    # The limits of a session's next turn may have changed. Blocks that a connector loaded came before.
                    manager.note(req_id)

    def _take_over_trigger(self, tokens: Container[str]) -> list[list[str]]:
        """For each KV group, the requests of a step that may be over their trigger once it is done.

        Args:
            tokens: requests of the step being planned.
        """
        over = [manager.take_over_trigger() for manager in self.kv_managers]
        for manager, noted in zip(self.kv_managers, over):
            for req_id in noted:
                if req_id not in tokens or self._reaches_later(manager, req_id):
                    manager.note(req_id)
        return [[req_id for req_id in noted if req_id in tokens] for noted in over]

    def _reaches_later(self, manager: EvictableManager, req_id: str) -> bool:
        """Whether settled tokens of a request reach the end of its table with a later step, for which it need not grow.

        That is so of a request whose last tokens are computed again in several steps. Where the server speculates, the
        step may begin blocks with drafts that are rejected.
        """
        reached = -(-self.requests[req_id].num_computed_tokens // manager.block_size)
        return bool(self.num_spec_tokens) or reached < len(manager.req_to_blocks[req_id])

    def _note_prompts(self, tokens: Iterable[str]) -> None:
        """Note the requests of a step that computes the end of their prompt, under `prompt: whole`.

        Workers that count the last queries before a decision foresee the next decisions by the trigger. If no decision
        follows this step, they forget the last queries of the prompt.
        """
        for manager, following in zip(self.kv_managers, self._plan.groups):
            for req_id in tokens:
                request, resident = self.requests[req_id], manager.residents[req_id]
                waits = resident.config.prompt == "whole" and not resident.prompted
                if not waits or request.num_computed_tokens < request.num_prompt_tokens:
                    continue
                resident.prompted = True
                manager.note(req_id)
                if resident.scoring is None or resident.scoring.trigger == resident.limits.trigger:
                    continue
                resident.scoring = replace(resident.scoring, trigger=resident.limits.trigger)
                if resident.exceeds(len(manager.req_to_blocks[req_id])):
                    following.triggers[req_id] = resident.limits.trigger
                else:
                    following.track[req_id], resident.first_query = resident.scoring, request.num_computed_tokens

    def _plan_starts(self, plan: EvictionPlan, output: SchedulerOutput) -> None:
        """Add to a plan how workers measure the requests that start, or start over, with its step."""
        starts = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        cached = output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            computed = zip(cached.req_ids, cached.num_computed_tokens)
            starts += [start for start in computed if start[0] in cached.resumed_req_ids]
        for manager, group in zip(self.kv_managers, plan.groups):
            for req_id, computed_tokens in starts:
                resident = manager.residents[req_id]
                if resident.saved is not None:
                    self._restore(plan, req_id, resident)
                if resident.started:
                    continue
                resident.started, resident.first_query = True, computed_tokens
                if self.reconstructions is not None and self.reconstructions.is_shadow(req_id):
                    self.reconstructions.measure(group)
                    continue
                resident.scoring = self.scoring_of(self.requests[req_id], resident)
                if resident.scoring is not None:
                    group.track[req_id] = resident.scoring

    def _is_short(self) -> bool:
        """Whether the pool may run out before long: a quarter of it is left, or a request waits."""
        enough = max(self.kv_cache_manager.block_pool.num_gpu_blocks // 4, 2 * len(self.running))
        return bool(self.waiting) or self.free_blocks < enough

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        self._ended.clear()
        self._failed_loads = set()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        plan: EvictionPlan = getattr(scheduler_output, PLAN, None) or EvictionPlan.empty(len(self.kv_managers))
        for req_id in self._failed_loads:
            for group in plan.groups:
                for noted in (group.due, group.report, group.asked):
                    noted.pop(req_id, None)
        if (trouble := getattr(model_runner_output, TROUBLE, None)) is not None:
            self._lose_host(trouble)
        if self.num_spec_tokens:
            self._accepted = _accepted(scheduler_output, model_runner_output)
        reports = self._inbox.take(getattr(model_runner_output, REPORTS, None), plan.groups, self._held)
        if self.num_spec_tokens:
            reports = [self._settled_alone(of_group) for of_group in reports]
        for mechanism in self.mechanisms:
            for action in mechanism.decide(plan, reports):
                self.apply(action)
        if self.room is not None and any(group.asked for group in plan.groups):
            self.room.scores_came()
        if self.reconstructions is not None:
            self.reconstructions.hide(outputs)
        if self._stoppable or self._ended:
            self._send_usage(outputs)
        return outputs

    def _give_back(self, blocks: list[KVCacheBlock]) -> None:
        """Free blocks that a request lost, tail first, as vLLM frees: the head of a cached prefix stays longest.

        A step in flight still reads them. A later step writes them after it, but a connector may load into them at any
        time: then vLLM defers frees, and they are free once that step is done.
        """
        if self.defer_block_free and self.sched_step_seq > self.processed_step_seq:
            self.deferred_frees.append((self.sched_step_seq, blocks))
        elif self._lingers:
            self.kv_cache_manager.block_pool.unpin_blocks(reversed(blocks), self._reused)
        else:
            self.kv_cache_manager.block_pool.free_blocks(reversed(blocks))

    def _build_kv_connector_meta(self, connector: Any, scheduler_output: SchedulerOutput) -> Any:
        self.follower.before_metadata(self._written.union(self._plan.poison))
        self._written.clear()
        return super()._build_kv_connector_meta(connector, scheduler_output)

    def _handle_invalid_blocks(self, *args: Any, **kwargs: Any) -> set[str]:
        """What a connector failed to load is computed again, and measured again from zero: the step has read it."""
        affected = super()._handle_invalid_blocks(*args, **kwargs)
        for req_id in affected if self.recompute_kv_load_failures else ():
            for manager, plan in zip(self.kv_managers, self._plan.groups):
                resident, request = manager.residents[req_id], self.requests[req_id]
                resident.first_query = request.num_computed_tokens
                resident.prompted &= request.num_computed_tokens >= request.num_prompt_tokens
                manager.note(req_id)
                resident.scoring = self.scoring_of(request, resident)
                plan.triggers.pop(req_id, None)
                if resident.scoring is not None:
                    plan.track[req_id] = resident.scoring
        self._failed_loads = affected
        return affected

    def _held(self, group: int, req_id: str) -> np.ndarray | None:
        """Blocks of a request in a KV group for which a report has numbers; None if it has ended.

        These are the blocks that it holds, without blocks of steps in flight, of accepted drafts alone, and without
        blocks that came back: a step that is in flight does not see them.
        """
        request = self.requests.get(req_id)
        if request is None:
            return None
        resident = self.kv_managers[group].residents[req_id]
        held = resident.held_after(settled(request))
        if self.num_spec_tokens:
            held = held[: held.searchsorted(self._scored_blocks(request))]
        return held[~np.isin(held, list(resident.stays))] if resident.stays else held

    def _scored_blocks(self, request: Request) -> int:
        """Blocks of a request, holes included, without those that only drafts have begun in the step that is done."""
        known = settled(request) - self._accepted.get(request.request_id, 0)
        return -(-max(known, 1) // self.kv_managers[0].block_size)

    def _settled_alone(self, reports: Reports) -> Reports:
        """Reports without blocks of drafts: where workers do not know how many were accepted, they report some."""
        known = {req_id: self._scored_blocks(self.requests[req_id]) for req_id in reports if req_id in self.requests}
        return {req_id: report.before(known.get(req_id)) for req_id, report in reports.items()}

    def apply(self, action: Action) -> None:
        """Carry out an action of a mechanism: free blocks, and add holes and orders to the next plan.

        An action may need private copies of blocks that other requests hold. If the pool has no room for them, nothing
        changes and the next decision tries again; a request that can't go on without the action is preempted.
        """
        req_id, manager, plan = action.req_id, self.kv_managers[action.group], self._plan
        request, residents = self.requests[req_id], self._residents_of(req_id)
        if isinstance(action, Swap):
            action = self._afforded(action)
            if not len(action.returns):
                return
        resident, policy = residents[action.group], residents[action.group].policy
        source = manager.blocks_at(req_id, action.reads)
        leaving = None if self.host_pool is None else manager.blocks_at(req_id, action.holes)
        lost = np.concatenate((action.writes, action.holes))
        before = dict(zip(lost.tolist(), manager.blocks_at(req_id, lost))) if self.follower is not None else {}
        for each in self.kv_managers:
            each.count(req_id)  # the peak includes blocks that it got earlier in the step that is being planned
        if (changed := manager.rewrite(req_id, action.writes, action.holes)) is None:
            if action.must:
                self.running.remove(request)
                self._preempt_request(request, time.monotonic())
            return
        moved, given_back, freed = changed
        target = manager.blocks_at(req_id, action.writes)
        first, whole = not any(each.evicted_blocks for each in residents), resident.pure_tokens is None
        if len(action.holes):
            # What is in flight was computed without the new holes; drafts among it may be computed again.
            pure = settled(request) if self.num_spec_tokens else request.num_computed_tokens
            resident.evict(action.holes, pure)
        if len(action.writes):
            # Published blocks stay published; blocks that follow them are never published.
            resident.pure_tokens = min(resident.pure_tokens, manager.published_tokens(req_id))
        if whole:
            self._publish_ends(request)
        group = plan.groups[action.group]
        if len(action.holes):
            group.leave_holes(req_id, action.holes.tolist())
        if len(action.writes):
            group.moved.setdefault(req_id, {}).update(moved)
        action.order(plan, source, target)
        if self.follower is not None:
            self.follower.lost(req_id, manager.kv_cache_group_id, before, resident.pure_tokens)
            self._written.update(target)
        if leaving:
            self._spill(action, resident, leaving)
        if self._poison:
            # A published block may still be hit, so its content has to match its hash.
            poison = [block.block_id for block in freed if block.block_hash is None]
            plan.poison = [block for block in plan.poison if block not in target] + poison
        if isinstance(action, Swap):
            self._bring_back(action, resident)
        copies = len(given_back) - len(action.holes)
        if isinstance(action, Rotate):
            resident.move_up()
            self.tally.move(policy, copies)
        else:
            self.tally.count(policy, len(action.holes), max(len(freed) - copies, 0), first, copies)

    # The interface for mechanisms (`core.mechanisms.Host`)

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

    def miss(self, req_id: str, resident: RequestBlocks) -> None:
        """Count and log a missing report."""
        self.tally.miss(resident.policy)
        if not resident.state.complained:
            resident.state.complained = True
            logger.error(
                "no scores came back for request %s; while none come its oldest KV blocks go first. Said once.", req_id
            )

    def _residents_of(self, req_id: str) -> list[RequestBlocks]:
        return [manager.residents[req_id] for manager in self.kv_managers]

    def _published_tokens(self, request: Request) -> int | None:
        """Tokens of a request that other requests can hit, evicted blocks included; None if it has all its blocks."""
        resident = self.residents.get(request.request_id)
        if resident is None or resident.pure_tokens is None:
            return None
        return min(manager.published_tokens(request.request_id) for manager in self.kv_managers)

    def _publish_ends(self, request: Request) -> None:
        """Publish blocks of sliding windows, where a request loses its first block: later ones are never published."""
        if self.kv_cache_manager.enable_caching:
            for manager in self.other_managers:
                manager.publish_end(request)

    def _free_request_blocks(self, request: Request) -> None:
        # The request's table is gone, so the next plan has no orders for it.
        for group in self._plan.groups:
            told_of = (group.holes, group.missing, group.moved, group.track, group.triggers, group.scored)
            for told in (*told_of, group.returned, self._plan.rewound):
                told.pop(request.request_id, None)
            group.untrack.discard(request.request_id)
        resident = self.residents.get(request.request_id)
        # Blocks that come back with this plan are saved by it too.
        saves = resident is not None and resident.saved is not None and request.status == RequestStatus.RUNNING
        for orders in (self._plan.compactions, self._plan.rotations, *(() if saves else (self._plan.copies,))):
            orders[:] = [order for order in orders if order.req_id != request.request_id]
        if self.host_pool is not None and resident is not None and not saves:
            self.host_pool.release(self._plan, resident)
        if self.follower is not None and not request.is_finished():
            self.follower.starts_over(request)
        super()._free_request_blocks(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> tuple[dict | None, dict | None]:
        params = super()._free_request(request, *args, **kwargs)
        if request.request_id in self.residents:  # else it never came in through `add_request`
            self._note_end(request.request_id)
            for manager in self.kv_managers:
                manager.forget(request.request_id)
        if self.follower is not None:
            self.follower.forget(request.request_id)
        return params

    def finish_requests(self, *args: Any, **kwargs: Any) -> list[Request]:
        finished = super().finish_requests(*args, **kwargs)
        if self.reconstructions is not None:
            self.reconstructions.tidy()
            finished = self.reconstructions.visible(finished)
        return finished

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        if self.reconstructions is not None:
            self.reconstructions.reset()
        return super().reset_prefix_cache(*args, **kwargs)


def _accepted(scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> dict[str, int]:
    """Request -> drafts of it that a step has accepted, of requests that had some in it."""
    sampled, rows = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
    drafted = scheduler_output.scheduled_spec_decode_tokens
    return {req_id: max(len(sampled[rows[req_id]]) - 1, 0) for req_id in drafted if sampled and req_id in rows}


class EvictionScheduler(EvictionMixin, Scheduler):
    """vLLM's `Scheduler` with eviction."""


class AsyncEvictionScheduler(EvictionMixin, AsyncScheduler):
    """vLLM's `AsyncScheduler` with eviction."""
