"""vLLM's schedulers with eviction: workers measure, the scheduler decides, and tells workers with the step it plans."""

import math
import zlib
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from ..compat.allocation import count_published
from ..config import REQUEST_SIZES, KVPolicyConfig, KVPolicyError, given
from ..environment import poison_mode
from ..metrics import STATS_KEY, Tally
from ..usage import SHOWN_KEY, USAGE_KEY, KVUsage
from .manager import EvictableManager, SlidingManager
from .plan import PLAN, REPORTS, Compaction, EvictionPlan, GroupPlan, Move, Report, Reports, Scoring
from .pressure import Pressure
from .reconstruction import Reconstructions
from .residency import RequestState, Residency, choose_jointly, over_shared_trigger
from .spec import EvictableSpec, policy_config

logger = init_logger("vllm.evict")

#: Reports in a row that a request may miss; then its oldest blocks go first, so that its bound holds.
MOST_MISSES = 3


class EvictionMixin:
    """Adds eviction to a vLLM scheduler: plans with `schedule`, decides with `update_from_output`.

    A request over its trigger is found when its block table grows (`EvictableManager.allocate_new_blocks`), and decided
    on when its step is done. Its blocks go back to the pool at once; the holes travel with the next `schedule`, the
    first one that could hand those blocks out. Steps in flight still read the old table, and every worker runs them
    before the step that writes a reused block.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv_policy = policy_config(self.vllm_config)
        self.tally = Tally()
        self._poison = poison_mode()
        self.kv_managers, self.sliding_managers = self._managers()
        count_published(self.kv_cache_manager, self._published_tokens)
        self._plan = EvictionPlan.empty(len(self.kv_managers))
        waits = any(part.when == "pressure" for part in self.kv_policy.classes.values())
        #: None where nobody waits for the pool to run out.
        self.pressure = Pressure(self, self.kv_managers, self.sliding_managers) if waits else None
        #: None where nobody's prompt is ever reconstructed.
        self.reconstructions = Reconstructions(self, self.kv_managers[0]) if self.kv_policy.reconstructs else None
        #: Requests that the front end ends, on any of their outputs: those with stop strings, and sessions. And what it
        #: was told last of their usage: peak, evicted blocks of each KV group.
        self._stoppable: dict[str, tuple[int, ...]] = {}
        self._policies = sorted(self.kv_policy.allowed)
        logger.info(self._start_up_line())

    def _managers(self) -> tuple[list[EvictableManager], list[SlidingManager]]:
        """Those of KV groups that may have holes, in order, and those of sliding windows beside them.

        More than one may have holes only where heads are split, or where fewer layers slide than do not.
        """
        managers = self.kv_cache_manager.coordinator.single_type_managers
        evictable = [manager for manager in managers if isinstance(manager, EvictableManager)]
        others = [manager for manager in managers if manager not in evictable]
        served = evictable and all(type(manager) is SlidingWindowManager for manager in others)
        if not served or (len(managers) > 1 and not others and not managers[0].kv_cache_spec.head_class):
            raise KVPolicyError(
                f"KV policy {self.kv_policy.name!r} can't be used with layers whose caches differ in shape "
                f"({len(managers)} KV groups: {', '.join(type(m).__name__ for m in managers)}): leave --kv-policy out"
            )
        order = [manager.kv_cache_spec.head_class for manager in evictable]
        assert [name for name in self.kv_policy.classes for _ in range(order.count(name))] == order, order
        for number, manager in enumerate(evictable):
            manager.bind(number, self.vllm_config.max_in_flight_tokens, self._poison)
        return evictable, [SlidingManager.beside(each, evictable[0].residents, self._poison) for each in others]

    @property
    def residents(self) -> dict[str, Residency]:
        """All requests, in the first KV group that may have holes."""
        return self.kv_managers[0].residents

    def _start_up_line(self) -> str:
        groups = [self.kv_cache_config.kv_cache_groups[each.kv_cache_group_id] for each in self.kv_managers]
        spec: EvictableSpec = groups[0].kv_cache_spec
        bounds = [
            self.kv_policy.of_class(group.kv_cache_spec.head_class).bound(spec.block_size, self.max_model_len)
            for group in groups
        ]
        bound = None if None in bounds else sum(bounds)
        if len(groups) == 1:
            what = f"1 KV group of {len(groups[0].layer_names)} layers"
        elif not spec.head_class:
            what = f"{len(groups)} KV groups of {sum(len(group.layer_names) for group in groups)} layers"
        else:
            counts = Counter(group.kv_cache_spec.head_class for group in groups)
            what = f"{len(groups)} KV groups of {spec.num_kv_heads} heads ({_listed(counts)})"
        if self.sliding_managers:
            what += f", beside {len(self.sliding_managers)} of sliding windows, which stay vLLM's"
        return (
            f"KV policy {_described(self.kv_policy)}"
            + f"; requests may use {', '.join(sorted(self.kv_policy.allowed))}"
            + (f" and hold {bound} blocks of {spec.block_size} tokens" if bound else " and hold all their blocks")
            + (" when the pool runs out" if bound and self.pressure else "")
            + f"; model runner V{2 if self.use_v2_model_runner else 1}"
            + f"{', async scheduling' if self.scheduler_config.async_scheduling else ''}"
            + f"; attention backend {spec.backend}; {what}"
        )

    def add_request(self, request: Request) -> None:
        if request.request_id not in self.residents:
            self._admit(request)
            if request.resumable or (request.sampling_params and request.sampling_params.stop):
                self._stoppable[request.request_id] = ()
        super().add_request(request)

    def _admit(self, request: Request) -> None:
        """Give a request a residency in each KV group."""
        block_size, longest = self.kv_managers[0].block_size, self._longest(request)
        asked = dict((request.sampling_params and request.sampling_params.extra_args) or {})
        config = self._granted(request, asked)
        state, classes = RequestState(asked), config.classes
        for manager in self.kv_managers:
            part = classes.get(manager.kv_cache_spec.head_class, config)
            limits = part.limits(block_size, request.num_prompt_tokens)
            key = _key(request.prompt_token_ids) if part.policy.by_prompt else 0
            # A session may come to anything.
            may_outgrow = request.resumable or bool(limits and math.ceil(longest / block_size) > limits.bound)
            resident = Residency(part, limits, block_size, config.name, may_outgrow, key, state=state)
            manager.residents[request.request_id] = resident

    def _granted(self, request: Request, asked: dict[str, Any]) -> KVPolicyConfig:
        """What a request runs under that asks for this, by its prompt so far."""
        block_size = self.kv_managers[0].block_size
        try:
            return self.kv_policy.for_request(asked, request.num_prompt_tokens, block_size)
        except KVPolicyError as error:
            # The front end has refused what it could; a request that got past it must not take the engine down. A
            # session's sizes may be some that its prompt has to grow to first.
            sizes = request.resumable and not asked.keys().isdisjoint(REQUEST_SIZES)
            which = "budget, sinks and window" if sizes else "KV policy"
            logger.warning("request %s runs under the server's %s: %s", request.request_id, which, error)
            if sizes:
                return self._granted(request, {key: asked[key] for key in asked.keys() - {*REQUEST_SIZES}})
            return self.kv_policy

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        super()._update_request_as_session(session, update)
        self._renew(session)

    def _renew(self, session: Request) -> None:
        """Let what a session may keep follow its prompt, and what its next turn asks for."""
        req_id, residents = session.request_id, self._residents_of(session.request_id)
        asked, name = residents[0].state.asked, residents[0].policy
        extra_args = given(session.sampling_params and session.sampling_params.extra_args)
        if extra_args.get("kv_policy", name) != name:
            logger.warning("request %s: a session keeps the KV policy of its first turn, %r", req_id, name)
        asked |= {key: extra_args[key] for key in REQUEST_SIZES if key in extra_args}
        config = self._granted(session, asked)
        for manager, resident, plan in zip(self.kv_managers, residents, self._plan.groups):
            part = config.of_class(manager.kv_cache_spec.head_class)
            resident.renew(part, session.num_prompt_tokens, session.num_computed_tokens)
            before, resident.scoring = resident.scoring, self._scoring(session, resident)
            if not resident.started or resident.scoring == before:
                continue
            if resident.scoring is None:
                plan.untrack.add(req_id)
            elif before is not None and replace(before, trigger=resident.scoring.trigger) == resident.scoring:
                plan.triggers[req_id] = resident.scoring.trigger
            else:
                plan.track[req_id], resident.first_query = resident.scoring, session.num_computed_tokens

    @staticmethod
    def _scoring(request: Request, resident: Residency) -> Scoring | None:
        """How workers measure a request from now on; None: not at all."""
        scoring = Scoring.of(resident.config, resident.limits.trigger) if resident.measured else None
        if scoring is not None and resident.config.policy.profiles:
            # Its decision falls with its prompt's last tokens, or in any step after them if no report comes.
            scoring = replace(scoring, trigger=0, start=max(request.num_prompt_tokens - scoring.window, 0))
        return scoring

    def _get_local_prefix_cache_hit(self, request: Request, *args: Any, **kwargs: Any) -> tuple[Any, int, int, bool]:
        """The request's hit, as far as the pool can hold it beside the first chunk.

        vLLM plans its pool for requests that hold what their policy lets them; a prefix that other requests left in the
        cache may be longer, and a request that waits for more blocks than there are would wait for ever.
        """
        blocks, tokens, boundary, diverged = super()._get_local_prefix_cache_hit(request, *args, **kwargs)
        most, resident = self._longest_hit(request), self.residents[request.request_id]
        shadow = self.reconstructions is not None and self.reconstructions.is_shadow(request.request_id)
        if shadow:
            most = resident.pure_tokens  # what it repeats has to be computed
        alone = len(self.kv_managers) + len(self.sliding_managers) == 1
        if alone and tokens > most and (resident.limits or shadow):
            blocks, tokens = self.kv_cache_manager.truncate_computed_blocks(blocks, most), most
        if not alone and tokens:
            blocks, tokens = self._joint_hit(request, blocks, tokens, most)
        return blocks, tokens, boundary, diverged

    def _joint_hit(self, request: Request, blocks: Any, tokens: int, most: int) -> tuple[Any, int]:
        """A hit in several KV groups: as long as the pool can hold it, and with holes only where they are allowed."""
        residents = self._residents_of(request.request_id)
        find = self.kv_cache_manager.coordinator.find_longest_cache_hit
        found, room = list(blocks.blocks), tokens
        if residents[0].limits and tokens > most:
            room = most  # what streaming heads and sliding windows need of a shorter prefix are other blocks
        while True:
            # Heads that keep everything need everything.
            parts = [found[manager.kv_cache_group_id] for manager in self.kv_managers]
            ends = [next((i for i, block in enumerate(part) if block.is_null), None) for part in parts]
            ends = [end for end, resident in zip(ends, residents) if end is not None and resident.limits is None]
            room = min([room, *(end * self.kv_managers[0].block_size for end in ends)])
            if room == tokens:
                break
            hit, tokens, _ = find(request.block_hashes, room)
            found, room = list(hit), tokens
        if tokens > most:
            for manager, resident in zip(self.kv_managers, residents):
                if resident.limits:
                    group = manager.kv_cache_group_id
                    found[group] = manager.without_middle(found[group])
        return self.kv_cache_manager.create_kv_cache_blocks(tuple(found)), tokens

    def _longest_hit(self, request: Request) -> int:
        """Tokens of a cached prefix that leave room for a first chunk in an otherwise empty pool."""
        longest, block_size = self._longest(request), self.kv_managers[0].block_size
        # One block is vLLM's null block.
        pool = self.kv_cache_manager.block_pool.num_gpu_blocks - 1
        pool -= sum(manager.most_blocks(longest) for manager in self.sliding_managers)
        if not request.resumable and math.ceil(longest / block_size) * len(self.kv_managers) <= pool:
            return longest  # it would fit even if nothing of it went
        room = pool - sum(manager.in_flight for manager in self.kv_managers)
        return max(room // len(self.kv_managers), 0) * block_size

    def _longest(self, request: Request) -> int:
        """Tokens that a request may grow to."""
        return min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self.reconstructions is not None:
            self.reconstructions.before_schedule()
        output = super().schedule(*args, **kwargs)
        plan, self._plan = self._plan, EvictionPlan.empty(len(self.kv_managers))
        starts = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        cached = output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            starts += [
                (req_id, computed)
                for req_id, computed in zip(cached.req_ids, cached.num_computed_tokens)
                if req_id in cached.resumed_req_ids
            ]
        for manager, group in zip(self.kv_managers, plan.groups):
            self._plan_group(manager, group, starts, output)
        if self.kv_policy.policy.pools:
            self._plan_jointly(plan)
        if self.reconstructions is not None and (shadow := self.reconstructions.reported(output)):
            plan.groups[0].report[shadow] = self.residents[shadow].config.policy.measures
        if self._poison:
            for manager in (*self.kv_managers, *self.sliding_managers):
                plan.clean += manager.allocated
                manager.allocated = []
        setattr(output, PLAN, plan)
        return output

    def _plan_group(
        self, manager: EvictableManager, plan: GroupPlan, starts: list[tuple[str, int]], output: SchedulerOutput
    ) -> None:
        """Tell workers what to measure and to report in one KV group; note who has to be decided on."""
        for req_id, computed_tokens in starts:
            resident = manager.residents[req_id]
            if resident.started:  # the next turn of a streaming session: what it may keep may have changed
                manager.note(req_id)
                continue
            resident.started, resident.first_query = True, computed_tokens
            if self.reconstructions is not None and self.reconstructions.is_shadow(req_id):
                self.reconstructions.measure(plan)
                continue
            resident.scoring = self._scoring(self.requests[req_id], resident)
            if resident.scoring is not None:
                plan.track[req_id] = resident.scoring
        if self.kv_policy.policy.profiles:
            self._plan_profiles(manager, plan, output)
        for req_id in manager.take_over_trigger():
            if req_id in output.num_scheduled_tokens:
                resident = manager.residents[req_id]
                plan.due[req_id] = resident.incarnation
                if resident.config.granularity == "token":
                    plan.judged.add(req_id)
                elif resident.measured:
                    plan.report[req_id] = resident.config.policy.measures
        if self.pressure is not None:
            self.pressure.ask_for_scores(manager, plan, output)

    def _plan_profiles(self, manager: EvictableManager, plan: GroupPlan, output: SchedulerOutput) -> None:
        """Requests whose prompt is computed with this step, and whose policy is chosen then."""
        for req_id in output.num_scheduled_tokens:
            resident, request = manager.residents[req_id], self.requests[req_id]
            waits = resident.measured and resident.config.policy.profiles
            if waits and request.num_computed_tokens >= request.num_prompt_tokens:
                plan.due[req_id] = resident.incarnation
                plan.report[req_id] = resident.config.policy.measures

    def _plan_jointly(self, plan: EvictionPlan) -> None:
        """One KV group that grew makes all of a request's groups due, if they hold too much together."""
        for req_id in set().union(*(group.due for group in plan.groups)):
            residents = self._residents_of(req_id)
            over = over_shared_trigger(residents)
            for group, resident in zip(plan.groups, residents):
                if over:
                    group.due[req_id] = resident.incarnation
                    group.report[req_id] = resident.config.policy.measures
                else:
                    group.due.pop(req_id, None)
                    group.report.pop(req_id, None)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        plan: EvictionPlan = getattr(scheduler_output, PLAN, None) or EvictionPlan.empty(len(self.kv_managers))
        reports: list[Reports] = getattr(model_runner_output, REPORTS, None) or [{}] * len(self.kv_managers)
        for manager, group, reported in zip(self.kv_managers, plan.groups, reports):
            if self.pressure is not None:
                self.pressure.take_scores(manager, group, reported)
            if not self.kv_policy.policy.pools:
                self._decide(manager, group, reported)
        if self.kv_policy.policy.pools:
            self._decide_jointly(plan, reports)
        if self.reconstructions is not None:
            self.reconstructions.take(reports[0])
            self.reconstructions.hide(outputs)
        if self._stoppable:
            self._send_usage(outputs)
        return outputs

    def _decide(self, manager: EvictableManager, plan: GroupPlan, reports: Reports) -> None:
        """Evict in one KV group what a finished step calls for."""
        for req_id, incarnation in plan.due.items():
            request = self.requests.get(req_id)
            if request is None or request.status != RequestStatus.RUNNING:
                continue
            resident = manager.residents[req_id]
            if resident.incarnation != incarnation:
                continue  # preempted since; it starts anew, with nothing missing
            if resident.config.policy.reconstructs:
                self.reconstructions.want(request, resident)
                continue
            if resident.config.granularity == "token":
                self._compact(request, manager)
                continue
            report = reports.get(req_id)
            if resident.measured and self._waits_for(report, req_id, resident):
                continue
            if resident.config.policy.profiles and report is not None:
                computed = request.num_computed_tokens - request.num_in_flight_tokens
                resident.profile(report, computed, request.num_prompt_tokens)
                told, resident.scoring = self._plan.groups[manager.number], self._scoring(request, resident)
                if resident.scoring is None:
                    told.untrack.add(req_id)
                else:
                    told.track[req_id] = resident.scoring
            self._evict(request, manager, report)
            if resident.config.context is not None:
                self._move_up(request, manager)

    def _waits_for(self, report: Report | None, req_id: str, resident: Residency) -> bool:
        """Whether a request's blocks stay this time, because its scores did not come."""
        if report is not None:
            resident.misses = 0
            return False
        self.miss(req_id, resident)
        return resident.misses < MOST_MISSES

    def miss(self, req_id: str, resident: Residency) -> None:
        """A report that was asked for did not come."""
        resident.misses += 1
        self.tally.miss(resident.policy)
        if not resident.state.complained:
            resident.state.complained = True
            logger.error(
                "no scores came back for request %s; while none come its oldest KV blocks go first. Said once.", req_id
            )

    def _decide_jointly(self, plan: EvictionPlan, reports: list[Reports]) -> None:
        """Evict what a finished step calls for where KV groups share a budget."""
        for req_id, incarnation in plan.groups[0].due.items():
            request = self.requests.get(req_id)
            if request is None or request.status != RequestStatus.RUNNING:
                continue
            residents = self._residents_of(req_id)
            if residents[0].incarnation != incarnation or residents[0].limits is None:
                continue
            of_groups = [group.get(req_id) for group in reports]
            if None in of_groups:
                of_groups = [None] * len(of_groups)  # some have nothing to compare with
            if self._waits_for(of_groups[0], req_id, residents[0]):
                continue
            computed = request.num_computed_tokens - request.num_in_flight_tokens
            chosen = choose_jointly(residents, computed, of_groups)
            for manager, victims in zip(self.kv_managers, chosen):
                if len(victims):
                    self.make_holes(request, manager, victims)
            missing = sum(map(len, chosen)) and sum(resident.holes for resident in residents) // len(residents)
            for group in self._plan.groups if missing else ():
                group.missing[req_id] = missing

    def _residents_of(self, req_id: str) -> list[Residency]:
        return [manager.residents[req_id] for manager in self.kv_managers]

    def _send_usage(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Put usage so far on outputs that the front end may make the last, where it is news to it."""
        for client in outputs.values():
            for output in client.outputs:
                req_id = output.request_id
                if req_id not in self._stoppable:
                    continue
                residents = self._residents_of(req_id)
                usage = (residents[0].state.peak_blocks, *(resident.evicted_blocks for resident in residents))
                if usage != self._stoppable[req_id]:
                    self._stoppable[req_id] = usage
                    output.kv_transfer_params = self._usage(self.requests[req_id])

    def _published_tokens(self, request: Request) -> int | None:
        """Tokens of a request that others can hit, blocks that it has lost included; None: it has all its blocks."""
        resident = self.residents.get(request.request_id)
        if resident is None or resident.pure_tokens is None:
            return None
        return min(manager.published_tokens(request.request_id) for manager in self.kv_managers)

    def _usage(self, request: Request) -> dict[str, Any]:
        """Its usage as it travels to the front end."""
        usage = {USAGE_KEY: KVUsage.of(self._residents_of(request.request_id)).as_dict()}
        params = request.sampling_params
        shown = params and (params.extra_args or {}).get(SHOWN_KEY)
        return usage | ({SHOWN_KEY: True} if shown else {})

    def _evict(self, request: Request, manager: EvictableManager, report: Report | None) -> None:
        resident = manager.residents[request.request_id]
        if resident.config.granularity == "token":
            return self._compact(request, manager)
        victims = resident.choose(request.num_computed_tokens - request.num_in_flight_tokens, report)
        if len(victims):
            self.make_holes(request, manager, victims)

    def _compact(self, request: Request, manager: EvictableManager) -> None:
        """Bring a request whose heads keep tokens of their own back to its budget. Workers choose the tokens."""
        resident, table = manager.residents[request.request_id], manager.req_to_blocks[request.request_id]
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        candidates, spare = resident.spare(computed)
        if not spare:
            return
        first = not any(each.evicted_blocks for each in self._residents_of(request.request_id))
        before = [table[index].block_id for index in resident.resident.tolist()]
        keep, start = len(candidates) - spare, int(np.searchsorted(resident.resident, candidates[0]))
        length = computed - resident.holes * manager.block_size
        moved, given_back = manager.compact(request.request_id, candidates, keep)
        if not given_back:
            return  # there is no room for private copies of shared blocks: the next block that fills asks again
        target = [table[index].block_id for index in candidates[:keep].tolist()]
        group = manager.number
        self._plan.compactions.append(
            Compaction(
                request.request_id, group, resident.config, before, length, start, len(candidates), target, computed - 1
            )
        )
        whole = resident.pure_tokens is None
        resident.evict(candidates[keep:], request.num_computed_tokens)
        # Blocks that were published may still be, those that come next may not.
        resident.pure_tokens = min(resident.pure_tokens, manager.published_tokens(request.request_id))
        if whole:
            self._publish_ends(request)
        plan = self._plan.groups[group]
        plan.holes.setdefault(request.request_id, []).extend(candidates[keep:].tolist())
        plan.moved.setdefault(request.request_id, {}).update(moved)
        freed = [block for block in given_back if block.ref_cnt == 0]
        if self._poison:
            poison = [block.block_id for block in freed if block.block_hash is None]
            self._plan.poison = [block for block in self._plan.poison if block not in target] + poison
        copies = len(given_back) - spare
        self.tally.count(resident.policy, spare, max(len(freed) - copies, 0), first, copies)

    def _move_up(self, request: Request, manager: EvictableManager) -> None:
        """Let what a request keeps follow on itself, where its first tokens are about to be out of its context."""
        req_id, resident = request.request_id, manager.residents[request.request_id]
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        if resident.reach(computed) + self._ahead(resident) <= resident.config.context:
            return
        blocks, by = resident.gaps()
        if not len(blocks):
            return
        table = manager.req_to_blocks[req_id]
        source = [table[at].block_id for at in blocks.tolist()]
        if (owned := manager.own(req_id, blocks)) is None:
            return  # there is no room for private copies of shared blocks: the next decision asks again
        moved, given_back = owned
        resident.move_up()
        # As where tokens are gathered: what was published may still be, what comes next may not.
        resident.pure_tokens = min(resident.pure_tokens, manager.published_tokens(req_id))
        target = [table[at].block_id for at in blocks.tolist()]
        group = manager.number
        self._plan.moves.append(Move(req_id, group, source, target, (by * manager.block_size).tolist()))
        self._plan.groups[group].moved.setdefault(req_id, {}).update(moved)
        if self._poison:
            poison = [block.block_id for block in given_back if block.ref_cnt == 0 and block.block_hash is None]
            self._plan.poison = [block for block in self._plan.poison if block not in target] + poison
        self.tally.move(resident.policy, len(moved))

    def _ahead(self, resident: Residency) -> int:
        """Most tokens that are computed until a request, which was just decided on, is decided on again."""
        growth = (resident.limits.trigger - resident.limits.budget + 1) * resident.block_size
        return growth + self.vllm_config.max_in_flight_tokens

    def make_holes(self, request: Request, manager: EvictableManager, victims: np.ndarray) -> None:
        resident = manager.residents[request.request_id]
        first = not any(each.residents[request.request_id].evicted_blocks for each in self.kv_managers)
        blocks, whole = manager.evict(request.request_id, victims), resident.pure_tokens is None
        resident.evict(victims, request.num_computed_tokens)
        if whole:
            self._publish_ends(request)
        self._plan.groups[manager.number].holes.setdefault(request.request_id, []).extend(victims.tolist())
        freed = [block for block in blocks if block.ref_cnt == 0]
        if self._poison:
            # A published block may still be hit: its content has to stay what its hash says.
            self._plan.poison.extend(block.block_id for block in freed if block.block_hash is None)
        self.tally.count(resident.policy, len(blocks), len(freed), first)

    def _publish_ends(self, request: Request) -> None:
        """What a request that loses its first block has computed until now is the last of it that others may hit."""
        if self.kv_cache_manager.enable_caching:
            for manager in self.sliding_managers:
                manager.publish_end(request)

    def _free_request_blocks(self, request: Request) -> None:
        # Its table is gone, and with it all that workers were to hear of.
        for group in self._plan.groups:
            for told in (group.holes, group.missing, group.moved, group.track, group.triggers, group.scored):
                told.pop(request.request_id, None)
            group.untrack.discard(request.request_id)
        for orders in (self._plan.compactions, self._plan.moves):
            orders[:] = [order for order in orders if order.req_id != request.request_id]
        super()._free_request_blocks(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> tuple[dict | None, dict | None]:
        kv_params, ec_params = super()._free_request(request, *args, **kwargs)
        self._stoppable.pop(request.request_id, None)
        if request.request_id not in self.residents:
            return kv_params, ec_params  # it never came in through `add_request`
        usage = self._usage(request)
        for manager in self.kv_managers:
            del manager.residents[request.request_id]
        return {**(kv_params or {}), **usage}, ec_params

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

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            held = {policy: sum(manager.held[policy] for manager in self.kv_managers) for policy in self._policies}
            # The only free-form field of the stats; without KV connectors (refused at start) nothing else uses it.
            stats.kv_connector_stats = {STATS_KEY: self.tally.take(held)}
        return stats


def _key(prompt: list[int] | None) -> int:
    """See `policies.Blocks.key`: CRC-32 of the prompt's token ids as int64, as request ids differ from run to run."""
    return zlib.crc32(np.asarray(prompt or [], np.int64).tobytes())


def _described(config: KVPolicyConfig) -> str:
    """Its name and options, for the start-up line."""
    options = {field: getattr(config, field) for field in sorted(config.policy.options - {"pattern", "retrieval"})}
    text = config.name + "".join(f" {field}={value}" for field, value in options.items() if value is not None)
    return text if config.retrieval is None else f"{text} retrieval=({_described(config.retrieval)})"


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


class EvictionScheduler(EvictionMixin, Scheduler):
    """vLLM's `Scheduler` with eviction."""


class AsyncEvictionScheduler(EvictionMixin, AsyncScheduler):
    """vLLM's `AsyncScheduler` with eviction."""
