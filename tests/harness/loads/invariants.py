"""Invariants after each step of a load on the schedulers; scheduler.py says what each invariant is."""

import math
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
from parts import holes_of
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_evict.core.mechanisms.base import Due, Misses
from vllm_evict.core.plan import PLAN
from vllm_evict.features.audit.engine import Audits
from vllm_evict.features.kvzip.engine import OVERLAP, Reconstructions, Scored, parts
from vllm_evict.features.kvzip.plan import Repetitions
from vllm_evict.integration.engine.shadows import ShadowRequests

from .contents import SALTS, Fault, Row
from .double import Worker
from .host import HostInvariants

#: Steps beyond what follows from the requests in which nothing needs to get on.
PATIENCE = 64


class Invariants(HostInvariants):
    """The checks of a `Simulation`, which has what they look at."""

    scheduler: Scheduler
    worker: Worker
    counts: Counter[str]
    live: dict[str, Request]
    #: Whether vLLM resets the prefix cache now, and preempts all running requests for it.
    _resets = False

    def _learn(self, req_ids: Any) -> None:
        """Note which tokens the hashes of requests' blocks stand for."""
        block = self.settings.block
        for req_id in req_ids:
            request, row = self.scheduler.requests.get(req_id) or self.live.get(req_id), self.worker.rows.get(req_id)
            if request is None or row is None:
                continue
            known, count = self._known.get(req_id, 0), len(request.block_hashes)
            if request.resumable:
                known, count = 0, min(count, request.num_computed_tokens // block)
            row.learn()
            for at in range(known, min(count, row.counted // block)):
                self._meaning[request.block_hashes[at]] = row.known[at * block : (at + 1) * block]
            self._known[req_id] = max(min(count, row.counted // block), known)

    def _check(self, written: Any) -> None:
        """*books*, *tables* and *purity*."""
        ids: list[int] = []
        rows, pool = self.worker.rows, self.pool
        for group, manager in enumerate(self.managers):
            slides = bool(self.worker.windows[group])
            for req_id, blocks in manager.req_to_blocks.items():
                table = [block.block_id for block in blocks]
                ids += table
                if not table:
                    continue
                row = rows.get(req_id)
                if row is None:
                    raise Fault("tables", f"{req_id} holds {table}, and no worker knows it")
                own = row.tables[group]
                if slides:
                    own = [block if there else 0 for block, there in zip(own, table)]
                if own != table or not row.active:
                    raise Fault("tables", f"{req_id}, group {group}: scheduler {table}, worker {own}")
        holders = np.bincount(ids, minlength=pool.num_gpu_blocks).tolist()
        refs = [block.ref_cnt for block in pool.blocks]
        refs[0] = holders[0] = 0
        if refs != holders:
            wrong = [(i, ref, count) for i, (ref, count) in enumerate(zip(refs, holders)) if ref != count]
            raise Fault("books", f"(block, reference count, holders): {wrong}")
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        if len(free) != pool.get_num_free_blocks() or len(set(free)) < len(free):
            raise Fault("books", f"the free queue says {pool.get_num_free_blocks()} and has {free}")
        if any(holders[block] for block in free) or len(free) + sum(map(bool, holders)) != pool.num_gpu_blocks - 1:
            lost = set(range(1, len(holders))) - set(free) - {i for i, count in enumerate(holders) if count}
            raise Fault("books", f"blocks both free and held, or lost: {[b for b in free if holders[b]]}, {lost}")
        for manager in self.evictable:
            held: Counter[str] = Counter()
            for req_id, resident in manager.residents.items():
                blocks = sum(not block.is_null for block in manager.req_to_blocks.get(req_id, ()))
                held[resident.policy] += blocks
                if resident.held_blocks != blocks:
                    raise Fault("books", f"{req_id} counts {resident.held_blocks} blocks and holds {blocks}")
            if +manager.held != +held:
                raise Fault("books", f"counted by policy {dict(manager.held)}, held {dict(held)}")
        if self.settings.caching:
            self._check_published(written)
        if self.worker.host is not None:
            self._check_host()

    def _check_published(self, written: Any) -> None:
        hashes = [block.block_hash for block in self.pool.blocks]
        changed = {at for at, (new, old) in enumerate(zip(hashes, self._hashes)) if new is not old}
        self._hashes = hashes
        for at in changed.union(written):
            if (key := hashes[at]) is None:
                continue
            meaning = self._meaning.get(get_block_hash(key))
            if meaning is None:
                raise Fault("purity", f"block {at} is published under a hash that no request has")
            same = self.worker.memory[at] == meaning + SALTS[get_group_id(key)]
            if not same.all():
                raise Fault("purity", f"block {at} is published, and holds something else than its hash says")

    def _check_bounds(self, output: Any, rows: dict[str, tuple[Row, int]], free: int, shared: set[int]) -> None:
        """Requests whose step is done hold no more than they may. Those that wait for scores may hold all.

        Tokens are gathered in private blocks. A request finds enough of them if it shares nothing (`shared`: blocks
        with several holders before the decisions of this step), or if the pool has room for all decisions, in all KV
        groups: `free` blocks, before them and after. Without these it tries again with its next block.
        """
        due = [getattr(output, PLAN).notes(Due)[number].keys() for number in range(len(self.evictable))]
        decisions = sum(map(len, due))
        pools = self.scheduler.kv_policy.allocator.pools
        for req_id, (row, turns) in rows.items():
            request = self.scheduler.requests.get(req_id)
            if request is None or request.status != RequestStatus.RUNNING:
                continue
            if self.worker.rows.get(req_id) is not row or row.turns != turns:
                continue  # it started over, or its next turn has begun, with a step that is not done
            settled = request.num_computed_tokens - request.num_in_flight_tokens
            total, most = 0, 0
            for manager, decided in zip(self.evictable, due):
                resident = manager.residents[req_id]
                limits, policy = resident.limits, resident.config.policy
                waits = bool(policy.profiles) or (policy.reconstructs and resident.of(Scored).scores is None)
                waits |= resident.config.prompt == "whole" and settled < request.num_prompt_tokens
                if limits is None or resident.under_pressure or waits or resident.of(Misses).count:
                    break
                table = manager.req_to_blocks[req_id][: -(-settled // self.settings.block)]
                held = sum(not block.is_null for block in table)
                alone = not any(block.block_id in shared or block.ref_cnt > 1 for block in table if not block.is_null)
                roomy = free >= held * decisions
                compacts = req_id in decided and (alone or roomy)
                if req_id in self._cut:
                    break
                if not pools and held > limits.trigger and (compacts or resident.config.granularity == "block"):
                    raise Fault("bound", f"{req_id}: {held} blocks of {settled} tokens, above {limits.trigger}")
                total, most = total + held, most + limits.trigger
            else:
                if pools and total > most:
                    raise Fault("bound", f"{req_id}: {total} blocks of all groups together, above {most}")

    def _check_floors(self, plan: Any) -> None:
        """Blocks that went since the last step are neither sinks nor recent, nor of a prompt that stays whole.

        It leaves what the policy keeps.
        """
        block, pools = self.settings.block, self.scheduler.kv_policy.allocator.pools
        for manager, group in zip(self.evictable, plan.groups):
            for req_id, holes in holes_of(group.changes).items():
                request, resident = self.scheduler.requests[req_id], manager.residents[req_id]
                limits = resident.limits
                if limits is None or request.resumable:
                    continue  # a session's next turn may have other sizes already
                settled = request.num_computed_tokens - request.num_in_flight_tokens
                recent = max(settled - limits.recent, 0) // block
                if resident.config.prompt == "whole" and settled < request.num_prompt_tokens:
                    raise Fault("floor", f"{req_id} lost {holes} when {settled} tokens of its prompt were computed")
                if min(holes) < limits.sink or max(holes) >= recent:
                    raise Fault("floor", f"{req_id} lost {holes}, {limits.sink} are sinks, from {recent} on recent")
                table = manager.req_to_blocks[req_id][: -(-settled // block)]
                held = sum(not block.is_null for block in table)
                least = (
                    max(math.ceil(Fraction(str(resident.config.floor)) * limits.budget), 1) if pools else limits.budget
                )
                if held < least:
                    raise Fault("floor", f"{req_id} has {held} blocks left, its budget is {limits.budget}")

    def _check_reconstructions(self, tokens: int) -> None:
        """A request does without scores only where its prompt is too long to be repeated, or there was no room.

        There is no room in a step whose `tokens` are as many as a step may have.
        """
        scheduler, block = self.scheduler, self.settings.block
        for req_id, resident in self.evictable[0].residents.items():
            request = self.live.get(req_id)
            if request is None or not resident.config.policy.reconstructs or request.resumable:
                continue
            scores = resident.of(Scored).scores
            if scores is not None and not len(scores.index) and self._room.pop(req_id, False):
                raise Fault("scores", f"{req_id} goes without scores, and there was room for its reconstruction")
            if scores is not None or request.status != RequestStatus.RUNNING:
                self._room[req_id] = False
                continue
            if request.num_computed_tokens - request.num_in_flight_tokens < request.num_prompt_tokens:
                self._room.pop(req_id, None)
                continue
            config, prompt = resident.config, request.num_prompt_tokens
            repeated = parts(prompt, config.chunk, len(config.instruction), self.settings.length)
            longest = max((end - max(start - OVERLAP, 0) for start, end in repeated), default=0)
            needed = math.ceil((prompt + len(config.instruction) + longest) / block) - prompt // block
            free = self.pool.get_num_free_blocks() - self.cache.watermark_blocks
            slots = len(scheduler.running) + scheduler.num_waiting_for_streaming_input < self.settings.seqs
            shadows = scheduler.part(ShadowRequests)._hidden & self.evictable[0].residents.keys()
            room = (
                bool(repeated) and prompt >= block and (shadows or (slots and free >= needed + len(scheduler.running)))
            ) and tokens < self.settings.chunk
            self._room[req_id] = self._room.get(req_id, True) and bool(room)

    def _withdraw_what_is_not_computed(self) -> None:
        """Mend a fault of vLLM's, which is no matter of this load.

        With priorities a request may be preempted that the very step has planned for, and its blocks published: these
        stay in the prefix cache, and are never computed (vLLM's pull request 43569).
        """
        preempt, evict = self.scheduler._preempt_request, self.pool._maybe_evict_cached_block
        evict = getattr(evict, "__wrapped__", evict)  # what has no content does not go to the host

        def mended(request: Request, *args: Any, **kwargs: Any) -> None:
            computed = request.num_computed_tokens // self.settings.block
            planned = [manager.req_to_blocks.get(request.request_id, [])[computed:] for manager in self.managers]
            for block in (block for blocks in planned for block in blocks if not block.is_null):
                self.counts["published by vLLM, and not computed"] += evict(block)
            preempt(request, *args, **kwargs)

        self.scheduler._preempt_request = mended

    def _watch_preemptions(self) -> None:
        """*alone*: what start-up and admission accept has room for, if no other request holds any."""
        preempt = self.scheduler._preempt_request

        def watched(request: Request, *args: Any, **kwargs: Any) -> None:
            others = [req_id for each in self.managers for req_id in each.req_to_blocks if req_id != request.request_id]
            if not others and not self._resets:
                free = self.pool.get_num_free_blocks()
                raise Fault("alone", f"{request.request_id} is preempted, and no other holds any; {free} are free")
            preempt(request, *args, **kwargs)

        self.scheduler._preempt_request = watched

    def _watch_pressure(self) -> None:
        """*vain*: see what each allocation that lacked blocks has cost, and whether it succeeded."""
        allocate = self.cache.allocate_slots
        admits = any(part.admit for part in self.scheduler.kv_policy.classes.values())

        def watched(request: Request, *args: Any, **kwargs: Any) -> Any:
            starts = not any(each.req_to_blocks.get(request.request_id) for each in self.evictable)
            before = [{r: len(holes) for r, holes in holes_of(each.changes).items()} for each in self.evictable]
            blocks = allocate(request, *args, **kwargs)
            lost = {
                req_id
                for each, known in zip(self.evictable, before)
                for req_id, holes in holes_of(each.changes).items()
                if len(holes) > known.get(req_id, 0)
            }
            if lost and blocks is None and not lost & self._cut:
                raise Fault("vain", f"{sorted(lost)} lost blocks for {request.request_id}, which gets none")
            if lost and starts and not admits and request.status != RequestStatus.RUNNING:
                raise Fault("admit", f"{sorted(lost)} lost blocks for {request.request_id}, which does not run yet")
            for req_id in lost if self.settings.priorities else ():
                if self.scheduler.requests[req_id].priority < request.priority:
                    raise Fault("priority", f"{req_id} lost blocks for {request.request_id}, which is less important")
            self.counts["relieved"] += bool(lost)
            return blocks

        self.cache.allocate_slots = watched

    def _stall(self, output: Any) -> None:
        """*stall*: requests get on.

        Counted are steps in a row in which no request ends and none computes a token that it has not computed before,
        not even before it was preempted. Allowed are four times the steps that all live requests would take one after
        the other, and 64. The same is asked of the oldest request on its own, unless priorities say that others go
        first. Sessions are left out there: vLLM queues each turn behind the requests that wait. Steps in which the scheduler is paused, all requests are sessions that wait for a turn, or audits alone run, do
        not count.
        """
        idle = all(r.status == RequestStatus.WAITING_FOR_STREAMING_REQ for r in self.live.values())
        if self._paused or idle or not self.scheduler.get_num_unfinished_requests():
            return
        self._since += 1
        self._since_oldest += 1
        oldest = next((r for r in self.live.values() if not r.resumable), None)
        for req_id in output.num_scheduled_tokens:
            request = self.live.get(req_id)
            if request is None:
                continue  # a shadow
            computed = request.num_computed_tokens
            if computed > self._furthest.get(req_id, 0):
                self._furthest[req_id] = computed
                self._since = 0
                if request is oldest:
                    self._since_oldest = 0
        if oldest is None or oldest.request_id not in self._furthest or self.settings.priorities:
            self._since_oldest = 0
        if max(self._since, self._since_oldest) <= PATIENCE:
            return
        chunk = min(self.settings.chunk, self.settings.long or self.settings.chunk)
        steps = sum(math.ceil(r.num_tokens / chunk) + r.max_tokens for r in self.live.values())
        if max(self._since, self._since_oldest) > 4 * steps + PATIENCE:
            if self._held_by_sessions():
                return
            states = [
                (r.request_id, r.status.name, r.num_computed_tokens, r.num_preemptions) for r in self.live.values()
            ]
            oldest_only = "" if self._since > 4 * steps + PATIENCE else f" of {oldest.request_id}, the oldest,"
            raise Fault(
                self._kind_of_stall(),
                f"no progress{oldest_only} in {max(self._since, self._since_oldest)} steps in a pool of "
                f"{self.pool.num_gpu_blocks - 1} blocks; requests, computed tokens, preemptions: {states}",
            )

    def _kind_of_stall(self) -> str:
        """With what may be the reason, so that different ones are told apart."""
        reasons = []
        if self.evictable:
            residents = [resident for manager in self.evictable for resident in manager.residents.values()]
            lost = self.worker.counts.lost or self.settings.late
            for reason, holds in (
                ("under pressure", any(resident.under_pressure for resident in residents)),
                ("by token", any(resident.config.granularity == "token" for resident in residents)),
                ("reports lost", lost),
            ):
                reasons += [reason] if holds else []
        return ", ".join(["stall", *reasons])

    def _end_lost_sessions(self) -> bool:
        """End sessions that vLLM has lost; whether there were any.

        A session that is preempted while a step of it is in flight, and whose turn ends with that step's output, is put
        into a queue for its next turn, and taken out again with requests that ended while they were preempted.
        """
        scheduler = self.scheduler
        queued = {r.request_id for r in (*scheduler.running, *scheduler.waiting, *scheduler.kv_holding_waiting)}
        lost = [req_id for req_id, request in self.live.items() if request.resumable and req_id not in queued]
        for req_id in lost:
            scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)
            self._ended(req_id)
            self.counts["sessions lost by vLLM"] += 1
        return bool(lost)

    def _held_by_sessions(self) -> bool:
        """Whether sessions between turns, which vLLM never preempts, have all the blocks; one is ended if so.

        With blocks on the host they give them, so there they may have but all places of requests that run.
        """
        if self._end_lost_sessions():
            self._since_oldest = 0
            return True
        places = len(self.scheduler.running) + self.scheduler.num_waiting_for_streaming_input
        if self.worker.host is not None and places < self.settings.seqs:
            return False
        sessions = [r for r in self.live.values() if r.resumable and r.status != RequestStatus.RUNNING]
        holders = [r.request_id for r in sessions if r.num_computed_tokens]
        if not holders or (len(holders) == 1 and len(self.live) == 1):
            return False
        self.scheduler.finish_requests(holders[-1], RequestStatus.FINISHED_ABORTED)
        self._ended(holders[-1])
        self._since_oldest = 0
        self.counts["sessions ended to go on"] += 1
        return True

    def _check_nothing_left(self) -> None:
        scheduler, pool = self.scheduler, self.pool
        if scheduler.requests or scheduler.running or scheduler.waiting or scheduler.kv_holding_waiting:
            raise Fault("left", f"requests: {list(scheduler.requests)}")
        if pool.get_num_free_blocks() != pool.num_gpu_blocks - 1:
            raise Fault("left", f"{pool.get_num_free_blocks()} blocks are free of {pool.num_gpu_blocks - 1}")
        if self.worker.rows:
            raise Fault("left", f"workers were not told of the end of {list(self.worker.rows)}")
        for manager in self.managers:
            for name in ("req_to_blocks", "num_cached_block", "residents", "changes"):
                if getattr(manager, name, None):
                    raise Fault("left", f"{name} of group {manager.kv_cache_group_id}: {getattr(manager, name)}")
        if not self.evictable:
            return
        if self.worker.host is not None:
            self._check_no_host_left()
        for manager in self.evictable:
            if any(manager.held.values()) or manager.take_over_trigger():
                raise Fault("left", f"group {manager.kv_cache_group_id}: held {manager.held}")
        if scheduler.usages._stoppable:
            raise Fault("left", f"usage of {list(scheduler.usages._stoppable)}")
        for group in scheduler._plan.groups:
            told = {name: getattr(group, name) for name in group.__slots__ if name != "of"}
            told |= {feature: payload for feature, payload in group.of.items() if feature != Repetitions.feature}
            repetitions = Repetitions.within(group)
            if any(told.values()) or (repetitions and (repetitions.repeats or repetitions.scored)):
                raise Fault("left", f"of plans: {told}, {repetitions}")
        if any(order.req_id for order in scheduler._plan.orders):
            raise Fault("left", f"orders: {scheduler._plan}")
        for part in scheduler.mechanisms.of(Audits):
            if len(part) or part._tokens or part._shadow:
                raise Fault("left", f"audits: {len(part)} of {part._tokens} tokens, {part._shadow}")
            done = self.counts["audits"] + sum(part._skips.values())
            if done != part.drawn:
                raise Fault("audits", f"{part.drawn} answers were drawn, {done} were judged or counted as skipped")
        for shadows in scheduler.mechanisms.of(ShadowRequests):
            if shadows.current or shadows._hidden:
                raise Fault("left", f"shadows: {shadows.current}, {shadows._hidden}")
        for reconstructions in scheduler.mechanisms.of(Reconstructions):
            for name in ("_jobs", "_shadow"):
                if getattr(reconstructions, name):
                    raise Fault("left", f"reconstructions: {name} {getattr(reconstructions, name)}")
            repetitions = Repetitions.within(scheduler._plan.groups[0])
            forgotten = set(repetitions.forgotten) if repetitions else set()
            kept = {scores for _, scores in reconstructions.scores._prompts.values() if isinstance(scores, int)}
            if self.worker.prompts.keys() - forgotten != kept:
                raise Fault("left", f"scores of prompts {set(self.worker.prompts)} at workers, {kept} at the scheduler")
