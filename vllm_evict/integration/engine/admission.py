"""Grants a policy to each request on arrival, and to each session at each turn."""

import math
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.request import Request, RequestStatus

from ...config import REQUEST_SIZES, KVPolicyConfig, KVPolicyError, given
from ...core.actions import back_to_budget
from ...core.blocks import RequestBlocks, RequestState
from ...core.plan import EvictionPlan, Scoring

if TYPE_CHECKING:
    from .managers import EvictableManager

logger = init_logger("vllm.evict")

#: Steps in a row in which requests wait and none runs, after which a session gives its blocks to them.
STALLED = 16


class AdmissionMixin:
    """The part of the scheduler that grants requests their policy."""

    kv_policy: KVPolicyConfig
    kv_managers: "list[EvictableManager]"
    _plan: EvictionPlan
    _may_bound: bool
    #: Steps in a row in which no request ran.
    _empty_steps: int

    @property
    def residents(self) -> dict[str, RequestBlocks]:
        """Blocks of all requests in the first KV group that may have holes."""
        return self.kv_managers[0].residents

    def add_request(self, request: Request) -> None:
        if request.request_id not in self.residents:
            self._admit(request)
            if request.resumable or (request.sampling_params and request.sampling_params.stop):
                self._stoppable[request.request_id] = ()
        super().add_request(request)

    def _admit(self, request: Request) -> None:
        """Make the request's `RequestBlocks` in each KV group."""
        block_size, longest = self.kv_managers[0].block_size, self._longest(request)
        asked = dict((request.sampling_params and request.sampling_params.extra_args) or {})
        config = self._granted(request, asked)
        state, classes = RequestState(asked), config.classes
        for manager in self.kv_managers:
            part = classes.get(manager.kv_cache_spec.head_class, config)
            limits = part.limits(block_size, request.num_prompt_tokens)
            key = _key(request.prompt_token_ids) if part.policy.by_prompt else 0
            # A resumable session has no known final length.
            may_outgrow = request.resumable or bool(limits and math.ceil(longest / block_size) > limits.bound)
            resident = RequestBlocks(part, limits, block_size, config.name, may_outgrow, key, state=state)
            manager.residents[request.request_id] = resident
            self._may_bound |= part.name != "full"

    def _granted(self, request: Request, asked: dict[str, Any]) -> KVPolicyConfig:
        """The policy of a request with these arguments and this prompt so far."""
        block_size = self.kv_managers[0].block_size
        try:
            config = self.kv_policy.for_request(asked, request.num_prompt_tokens, block_size)
            longest = self._longest_table(request)
            blocks = self._room_for(longest) // len(self.kv_managers)
            self.kv_policy.check_room(config, longest, self.max_model_len, block_size, blocks)
            return config
        except KVPolicyError as error:
            # The front end refuses wrong arguments. One that it did not see must not end the engine. A session's sizes
            # may be valid only once its prompt has grown.
            sizes = request.resumable and not asked.keys().isdisjoint(REQUEST_SIZES)
            which = "budget, sinks and window" if sizes else "KV policy"
            logger.warning("request %s runs under the server's %s: %s", request.request_id, which, error)
            if sizes:
                return self._granted(request, {key: asked[key] for key in asked.keys() - {*REQUEST_SIZES}})
            return self.kv_policy

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        # A turn may end among the drafts that its last step accepted. vLLM counts the tokens after its end as computed,
        # and would take their keys for those of the next turn's first tokens.
        session.num_computed_tokens = min(session.num_computed_tokens, session.num_tokens)
        super()._update_request_as_session(session, update)
        state = self.residents[session.request_id].state
        if state.emptied:
            state.emptied, session.num_computed_tokens = False, 0
        self._renew(session)

    def _renew(self, session: Request) -> None:
        """Compute a session's limits again, by its longer prompt and the next turn's arguments."""
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
            if self.follower is not None and resident.pure_tokens is not None:
                self.follower.stay_pure(req_id, resident.pure_tokens)
            before, resident.scoring = resident.scoring, self.scoring_of(session, resident)
            if not resident.started or resident.scoring == before:
                continue
            if resident.scoring is None:
                plan.untrack.add(req_id)
            elif before is not None and replace(before, trigger=resident.scoring.trigger) == resident.scoring:
                plan.triggers[req_id] = resident.scoring.trigger
            else:
                plan.track[req_id], resident.first_query = resident.scoring, session.num_computed_tokens
        self._make_room_of_own(session, residents)

    def _make_room_of_own(self, session: Request, residents: list[RequestBlocks]) -> None:
        """Bring a session back to its budget, if it is over its trigger and the pool has no room for its next chunk.

        A turn may end over its trigger where no decision followed it (`Budget`). No scores are at hand. By block the
        oldest blocks go. By token workers need scores to choose, and with a context keys have to be rotated after a
        decision: such a session starts over, as if it was preempted.
        """
        req_id = session.request_id
        if self.free_blocks >= sum(manager.in_flight for manager in self.kv_managers):
            return
        over = [
            (manager, resident)
            for manager, resident in zip(self.kv_managers, residents)
            if resident.evictable and resident.exceeds(len(manager.req_to_blocks[req_id]))
        ]
        if any(resident.config.granularity == "token" or resident.config.context for _, resident in over):
            self._start_over(session)
            return
        for manager, resident in over:
            action = back_to_budget(req_id, manager.number, resident, session.num_computed_tokens, None)
            if action is not None:
                self.apply(action)

    def _start_over(self, session: Request) -> None:
        """Free all blocks of a session between two turns, which is computed again from its first token on."""
        self._free_request_blocks(session)
        self.encoder_cache_manager.free(session)
        self.reset_preempted_req_ids.add(session.request_id)
        if session.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
            # vLLM reads by the computed tokens which of them the next turn keeps.
            self.residents[session.request_id].state.emptied = True
        else:
            session.num_computed_tokens = 0

    def _end_stall(self, scheduled: bool) -> None:
        """Have a session start over after `STALLED` steps in which requests waited and none ran.

        Sessions between two turns hold their blocks, and vLLM preempts running requests alone. So without this,
        sessions that fill the pool would wait for each other's blocks for ever, and other requests for theirs. Idle
        sessions start over first, then the session that waits behind all others.
        """
        self._empty_steps = 0 if scheduled or self.running else self._empty_steps + 1
        if self._empty_steps < STALLED or self._pause_state.name != "UNPAUSED":
            return
        idle, waits = RequestStatus.WAITING_FOR_STREAMING_REQ, (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        # The last one gives first. Requests of another status wait for something that comes: a grammar, a connector.
        order = sorted(self.requests.values(), key=lambda each: (each.status == idle, each.priority, each.arrival_time))
        if not order or order[0].status not in waits or any(each.status not in (idle, *waits) for each in order):
            return
        for session in reversed(order[1:]):
            if not session.num_in_flight_tokens and self.kv_managers[0].req_to_blocks.get(session.request_id):
                self._start_over(session)
                self._empty_steps = 0
                return

    @staticmethod
    def scoring_of(request: Request, resident: RequestBlocks) -> Scoring | None:
        """How workers measure a request from now on; None if they do not."""
        scoring = Scoring.of(resident.config, resident.limits.trigger) if resident.measured else None
        if scoring is not None and resident.waits and scoring.accumulate == "last":
            # The decision is taken with the prompt's last tokens, or in a later step if no report comes.
            scoring = replace(scoring, trigger=0, start=max(request.num_prompt_tokens - scoring.window, 0))
        return scoring


def _key(prompt: list[int] | None) -> int:
    """CRC-32 of the prompt's token ids as int64 (`policies.Blocks.key`). Request ids differ from run to run."""
    return zlib.crc32(np.asarray(prompt or [], np.int64).tobytes())
