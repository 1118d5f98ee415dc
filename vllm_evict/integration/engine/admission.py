"""Grants a policy to each request on arrival, and to each session at each turn."""

import math
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from ...config import REQUEST_SIZES, TURN_FIELDS, KVPolicyConfig, KVPolicyError, given
from ...core.actions import back_to_budget
from ...core.blocks import RequestBlocks, RequestState
from ...core.plan import Scoring
from ..start.connectors import hands_on
from .hits import Hits
from .view import EngineView

logger = init_logger("vllm.evict")

#: Steps in a row in which requests wait and none runs, after which a session gives its blocks to them.
STALLED = 16
#: Preemptions after which a request is not to be preempted for what sessions hold.
MOST_PREEMPTIONS = 2


class Admission:
    """Grants the requests of one scheduler their policy.

    Args:
        scheduler: an `EvictionMixin`.
        hits: knows how long requests may grow.

    Attributes:
        changes: whether any request so far may lose blocks, or read a part of them.
    """

    def __init__(self, scheduler: EngineView, hits: Hits) -> None:
        self._scheduler, self._hits, self._managers = scheduler, hits, scheduler.kv_managers
        self.changes = scheduler.kv_policy.sparse_heads
        #: Steps in a row in which no request ran.
        self._empty_steps = 0

    def admit(self, request: Request) -> None:
        """Make the request's `RequestBlocks` in each KV group."""
        block_size, longest = self._managers[0].block_size, self._hits.longest(request)
        asked = dict((request.sampling_params and request.sampling_params.extra_args) or {})
        config = self._granted(request, asked)
        self.changes |= not config.keeps_all
        state, server = RequestState(asked), self._scheduler.kv_policy
        for manager in self._managers:
            part, reads_by = (each.of_class(manager.kv_cache_spec.head_class) for each in (config, server))
            limits = part.limits(block_size, request.num_prompt_tokens)
            key = _key(request.prompt_token_ids) if part.policy.by_prompt else 0
            # A resumable session has no known final length.
            may_outgrow = request.resumable or bool(limits and math.ceil(longest / block_size) > limits.bound)
            blocks = RequestBlocks(part, limits, block_size, config.name, may_outgrow, key, reads_by, state=state)
            manager.residents[request.request_id] = blocks

    def _granted(self, request: Request, asked: dict[str, Any]) -> KVPolicyConfig:
        """Return the policy of a request with these arguments and this prompt so far.

        A request whose blocks go to another engine loses none. If it does not fit the pool with all of them, none of
        its blocks go on.
        """
        scheduler, block_size = self._scheduler, self._managers[0].block_size
        handed_on = hands_on(scheduler.vllm_config, request.kv_transfer_params)
        try:
            config = KVPolicyConfig(name="full")
            if not handed_on:
                config = scheduler.kv_policy.for_request(asked, request.num_prompt_tokens, block_size)
            longest, most = self._hits.longest(request), scheduler.max_model_len
            scheduler.kv_policy.check_room(config, request.num_prompt_tokens, longest, most, scheduler.room)
            return config
        except KVPolicyError as error:
            if handed_on:
                request.kv_transfer_params = {**request.kv_transfer_params, "do_remote_decode": False}
                logger.warning("request %s: none of its blocks go to another engine: %s", request.request_id, error)
                return self._granted(request, asked)
            # The front end refuses wrong arguments. One that it did not see must not end the engine. A session's sizes
            # may be valid only once its prompt has grown.
            sizes = request.resumable and not asked.keys().isdisjoint(REQUEST_SIZES)
            which = "budget, sinks and window" if sizes else "KV policy"
            logger.warning("request %s runs under the server's %s: %s", request.request_id, which, error)
            if sizes:
                return self._granted(request, {key: asked[key] for key in asked.keys() - {*REQUEST_SIZES}})
            return scheduler.kv_policy

    def renew(self, session: Request) -> None:
        """Compute a session's limits again, by its longer prompt and the next turn's arguments."""
        req_id, groups = session.request_id, self._scheduler.blocks_of(session.request_id)
        asked, name = groups[0].state.asked, groups[0].policy
        extra_args = given(session.sampling_params and session.sampling_params.extra_args)
        if extra_args.get("kv_policy", name) != name:
            logger.warning("request %s: a session keeps the KV policy of its first turn, %r", req_id, name)
        asked |= {key: extra_args[key] for key in TURN_FIELDS if key in extra_args}
        config = self._granted(session, asked)
        self.changes |= not config.keeps_all
        for manager, blocks, plan in zip(self._managers, groups, self._scheduler.next_plan.groups):
            part = config.of_class(manager.kv_cache_spec.head_class)
            blocks.renew(part, session.num_prompt_tokens, session.num_computed_tokens)
            before, blocks.scoring = blocks.scoring, self.scoring_of(session, blocks)
            if not blocks.started or blocks.scoring == before:
                continue
            if blocks.scoring is None:
                plan.untrack.add(req_id)
            elif before is not None and replace(before, trigger=blocks.scoring.trigger) == blocks.scoring:
                plan.triggers[req_id] = blocks.scoring.trigger
            else:
                plan.track[req_id], blocks.first_query = blocks.scoring, session.num_computed_tokens

    def make_room(self, session: Request) -> None:
        """Bring a session back to its budget, if it is over its trigger and the pool has no room for its next chunk.

        A turn may end over its trigger where no decision followed it (`Budget`). No scores are at hand. By block the
        oldest blocks go. Where a decision moves content, which workers do of requests in the batch only, the session
        starts over, as if it was preempted.
        """
        req_id = session.request_id
        if self._scheduler.free_blocks >= sum(manager.in_flight for manager in self._managers):
            return
        over = [(each, each.residents[req_id]) for each in self._managers if each.exceeds(req_id)]
        over = [(manager, blocks) for manager, blocks in over if blocks.evictable]
        if any(blocks.config.moves_content for _, blocks in over):
            self.start_over(session)
            return
        for manager, blocks in over:
            action = back_to_budget(req_id, manager.number, blocks, session.num_computed_tokens, None)
            if action is not None:
                self._scheduler.apply(action)

    def start_over(self, session: Request) -> None:
        """Free all blocks of a session between two turns, which is computed again from its first token on."""
        scheduler, req_id = self._scheduler, session.request_id
        scheduler._free_request_blocks(session)
        scheduler.encoder_cache_manager.free(session)
        scheduler.reset_preempted_req_ids.add(req_id)
        if session.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
            # vLLM reads by the computed tokens which of them the next turn keeps.
            self._managers[0].residents[req_id].state.emptied = True
        else:
            session.num_computed_tokens = 0

    def end_stall(self, scheduled: bool) -> None:
        """Have a session start over after `STALLED` steps in which requests waited and none ran.

        Sessions between two turns hold their blocks, and vLLM preempts running requests alone. So without this,
        sessions that fill the pool would wait for each other's blocks for ever, and other requests for theirs. Idle
        sessions start over first, then the session that waits behind all others. The first one does if it alone has
        blocks: it may have more than its bound, where the host had no room for them when its turn ended.

        A request that runs alone and is preempted again and again has room to start, but not to go on: sessions hold
        what it needs on the host. Then one of them starts over at once.
        """
        scheduler = self._scheduler
        self._empty_steps = 0 if scheduled or scheduler.running else self._empty_steps + 1
        if not self._empty_steps or scheduler.pause_state != PauseState.UNPAUSED:
            return
        if self._empty_steps < STALLED and not any(map(_was_preempted, scheduler.waiting)):
            return
        idle, waits = RequestStatus.WAITING_FOR_STREAMING_REQ, (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        # The last one gives first. Requests of another status wait for something that comes: a grammar, a connector.
        requests = scheduler.requests.values()
        order = sorted(requests, key=lambda each: (each.status == idle, each.priority, each.arrival_time))
        if not order or order[0].status not in waits or any(each.status not in (idle, *waits) for each in order):
            return
        for session in (*reversed(order[1:]), order[0]):
            if not session.num_in_flight_tokens and self._managers[0].req_to_blocks.get(session.request_id):
                self.start_over(session)
                self._empty_steps = 0
                return

    @staticmethod
    def scoring_of(request: Request, blocks: RequestBlocks) -> Scoring | None:
        """Return how workers measure a request from now on; None if they do not."""
        limits = blocks.limits if blocks.measured else None
        scoring = None if limits is None else Scoring.of(blocks.config, limits.trigger)
        if scoring is not None and blocks.waits and scoring.accumulate == "last":
            # The decision is taken with the prompt's last tokens, or in a later step if no report comes.
            scoring = replace(scoring, trigger=0, start=max(request.num_prompt_tokens - scoring.window, 0))
        return scoring


def _was_preempted(request: Request) -> bool:
    return request.status == RequestStatus.PREEMPTED and request.num_preemptions > MOST_PREEMPTIONS


def _key(prompt: list[int] | None) -> int:
    """Return the CRC-32 of a prompt's token ids as int64 (`policies.Blocks.key`). Request ids differ by run."""
    return zlib.crc32(np.asarray(prompt or [], np.int64).tobytes())
