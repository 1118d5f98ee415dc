"""KVzip's reconstruction: internal requests that repeat a prompt, and the scores that they leave.

When a request is over its trigger and its prompt is computed, a *shadow* is added to the scheduler: a request whose
prompt is the same prompt, an instruction, and a part of the prompt once more. It hits the blocks that the request has
published, so the prompt is not computed again; workers measure the queries of the repeated part. One shadow runs at a
time, one after the other for prompts of several parts. It is no client's: its outputs are taken out of the scheduler's.

Scores of blocks are reported, and kept here. Those of tokens and heads stay with the workers: the scheduler numbers the
prompts, says which requests take which, and when to forget them.
"""

import itertools
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from ..config import NEVER, KVPolicyConfig
from .plan import GroupPlan, Repetition, Report, Reports, Scoring
from .residency import Residency

logger = init_logger("vllm.evict")

#: Steps that a shadow lets clients go first, and after which a request whose shadow finds no room does without.
PATIENCE, LONGEST_WAIT = 8, 64
#: Last tokens of one part that lead over to the next one, as in the authors' code.
OVERLAP = 8


class Scores:
    """Scores of reconstructed prompts, by the hash of each block's prefix; the prompts used last are kept.

    Args:
        most_blocks: kept at most, over all prompts.
        forget: told of scores that are dropped.
    """

    def __init__(self, most_blocks: int, forget: Callable[[Any], None] = lambda scores: None) -> None:
        self._most, self._forget = most_blocks, forget
        self._prompts: OrderedDict[Any, tuple[list[Any], Any]] = OrderedDict()
        self._last: dict[Any, Any] = {}  # hash of a block -> hash of the last block of a prompt that it is in
        self._blocks = 0

    def __len__(self) -> int:
        """Blocks that have scores."""
        return self._blocks

    def get(self, hashes: Sequence[Any], slack: int) -> tuple[Any, int] | None:
        """Scores of a prompt that has these blocks, or all but `slack` at their end, and how many; None if less."""
        for count in range(len(hashes), max(len(hashes) - slack, 1) - 1, -1):
            if (last := self._last.get(hashes[count - 1])) is not None:
                self._prompts.move_to_end(last)
                return self._prompts[last][1], count
        return None

    def put(self, hashes: Sequence[Any], scores: Any) -> None:
        self._drop(hashes[-1])
        self._prompts[hashes[-1]] = (list(hashes), scores)
        self._last.update(dict.fromkeys(hashes, hashes[-1]))
        self._blocks += len(hashes)
        while self._blocks > self._most:
            self._drop(next(iter(self._prompts)))

    def clear(self) -> None:
        for last in list(self._prompts):
            self._drop(last)

    def _drop(self, last: Any) -> None:
        if last not in self._prompts:
            return
        hashes, scores = self._prompts.pop(last)
        self._forget(scores)
        self._blocks -= len(hashes)
        for each in hashes:
            if self._last.get(each) == last:
                del self._last[each]


def parts(prompt: int, chunk: int, instruction: int, max_model_len: int) -> list[tuple[int, int]]:
    """Ranges of a prompt's tokens that are repeated one by one; none if there is too little room for them.

    Args:
        prompt, instruction: tokens.
        chunk: most tokens of a part.
        max_model_len: tokens, of which one is sampled.
    """
    room = max_model_len - 1 - prompt - instruction
    # All at once needs no overlap.
    size = prompt if prompt <= min(chunk, room) else min(chunk, room - OVERLAP)
    if size < min(prompt, chunk) / 8:
        return []  # the repetition would be more instruction and overlap than prompt
    return [(start, min(start + size, prompt)) for start in range(0, prompt, size)]


@dataclass(slots=True)
class Job:
    """One request's reconstruction."""

    request: Request
    resident: Residency
    incarnation: int
    #: The scheduler's step since which it waits for room.
    since: int
    #: What is still to be repeated; None until it is its turn.
    parts: list[tuple[int, int]] | None = None
    #: What is known by now: mass of its blocks, or the number by which workers know its tokens' scores.
    scores: np.ndarray | int | None = None

    @property
    def alive(self) -> bool:
        """Whether its request still runs, and holds what is to be scored."""
        return self.request.status == RequestStatus.RUNNING and self.resident.incarnation == self.incarnation

    @property
    def per_token(self) -> bool:
        return self.resident.config.granularity == "token"

    @property
    def hashes(self) -> list[Any]:
        return self.request.block_hashes[: self.blocks]

    @property
    def blocks(self) -> int:
        """Whole blocks of its prompt."""
        return self.request.num_prompt_tokens // self.resident.block_size


@dataclass(slots=True)
class Shadow:
    """One part of a job, as it runs; `scoring` and `repetition` say how its blocks or its tokens are measured."""

    request: Request
    job: Job
    scoring: Scoring
    repetition: Repetition | None
    #: Blocks beside those of the prompt.
    needed: int


class Reconstructions:
    """All reconstructions of one scheduler.

    Args:
        scheduler: an `EvictionMixin`.
        manager: of its only KV group.
    """

    def __init__(self, scheduler: Any, manager: Any) -> None:
        self._scheduler, self._manager = scheduler, manager
        self.scores = Scores(scheduler.kv_cache_manager.block_pool.num_gpu_blocks, self._forget)
        self._jobs: dict[str, Job] = {}
        self._shadow: Shadow | None = None
        self._hidden: set[str] = set()
        self._ids, self._numbers = itertools.count(), itertools.count()
        self._warned = False

    def __len__(self) -> int:
        """Requests that wait for scores."""
        return len(self._jobs)

    def is_shadow(self, request_id: str) -> bool:
        return request_id in self._hidden

    def measure(self, plan: GroupPlan) -> None:
        """Tell workers how the shadow that starts is measured."""
        req_id = self._shadow.request.request_id
        if self._shadow.repetition is None:
            plan.track[req_id] = self._shadow.scoring
        else:
            plan.repeats[req_id] = self._shadow.repetition

    def want(self, request: Request, resident: Residency) -> None:
        """A request is over its trigger: evict by the scores it has, or see that it gets some."""
        if resident.prompt_scores is None:
            self._look_up(request, resident)
        if resident.prompt_scores is not None:
            self._scheduler._evict(request, self._manager, resident.prompt_scores)
        elif request.request_id not in self._jobs:
            self._jobs[request.request_id] = Job(
                request, resident, resident.incarnation, since=self._scheduler.current_step
            )

    def before_schedule(self) -> None:
        """Withdraw a shadow that is not running, let the next one begin, and put it behind all that run."""
        self.tidy()
        if self._shadow is not None and not self._gets_on(self._shadow):
            self._withdraw()
        if self._shadow is None and self._scheduler.pause_state == PauseState.UNPAUSED:
            for job in list(self._jobs.values()):
                if self._begin(job):
                    break
        if self._shadow is not None:
            # The last one is served last and preempted first.
            self._scheduler.running.sort(key=lambda request: request is self._shadow.request)

    def tidy(self) -> None:
        """Forget requests that ended or were preempted, and their shadow."""
        for req_id in [req_id for req_id, job in self._jobs.items() if not job.alive]:
            self._give_up(self._jobs.pop(req_id))
        if self._shadow is not None and not self._waits(self._shadow.job):
            self._withdraw()

    def reset(self) -> None:
        """Forget all scores, and what is being measured."""
        self.scores.clear()
        if self._shadow is not None:
            self._withdraw()
        for job in self._jobs.values():
            self._give_up(job)
            job.parts = None

    def reported(self, output: Any) -> str | None:
        """The shadow, if this step is its last and blocks are what it is for."""
        if self._shadow is not None and self._shadow.repetition is None:
            shadow = self._shadow.request
            done = shadow.num_computed_tokens >= shadow.num_prompt_tokens
            if done and shadow.request_id in output.num_scheduled_tokens:
                return shadow.request_id
        return None

    def take(self, reports: Reports) -> None:
        """Take the shadow's scores, and evict by them once they are complete."""
        shadow = self._shadow
        self.tidy()
        if self._shadow is not None and shadow.request.is_finished():
            self._shadow = None
            self._add_up(shadow.job, reports.get(shadow.request.request_id))
        for req_id, job in list(self._jobs.items()):
            if job.resident.prompt_scores is not None:
                self._give_up(self._jobs.pop(req_id))
                self._scheduler._evict(job.request, self._manager, job.resident.prompt_scores)

    def _add_up(self, job: Job, report: Report | None) -> None:
        """A shadow is done."""
        if not job.per_token:
            if report is None:
                logger.error("no scores came back of the reconstruction for request %s", job.request.request_id)
                return self._do_without(job)
            job.scores += report.statistics["mass"][: job.blocks]
        job.parts.pop(0)
        job.since = self._scheduler.current_step
        if not job.parts:
            self.scores.put(job.hashes, job.scores)
            job.scores = None
            for other in self._jobs.values():
                self._look_up(other.request, other.resident)

    def hide(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Take shadows out of what clients get."""
        if not self._hidden:
            return
        for client in outputs.values():
            client.outputs = [output for output in client.outputs if output.request_id not in self._hidden]
            if client.finished_requests:
                client.finished_requests = client.finished_requests - self._hidden
        # Who has ended is told at once.
        self._hidden &= {self._shadow.request.request_id} if self._shadow else set()

    def visible(self, requests: Iterable[Request]) -> list[Request]:
        return [request for request in requests if request.request_id not in self._hidden]

    def _look_up(self, request: Request, resident: Residency) -> None:
        """Scores that another request with this prompt left, or with one that differs in recent tokens only."""
        blocks = request.num_prompt_tokens // resident.block_size
        found = self.scores.get(request.block_hashes[:blocks], resident.limits.recent // resident.block_size)
        if found is None:
            return
        scores, known = found
        if resident.config.granularity == "token":
            self._plan.scored[request.request_id] = (scores, known * resident.block_size)
            resident.prompt_scores = Report(np.arange(known), {})
        else:
            resident.prompt_scores = Report(np.arange(known), {"mass": scores[:known]})

    def _waits(self, job: Job) -> bool:
        return self._jobs.get(job.request.request_id) is job

    def _gets_on(self, shadow: Shadow) -> bool:
        """Whether a shadow runs, or may be admitted yet. Clients would wait behind one that was preempted."""
        if shadow.request.status == RequestStatus.WAITING:
            return self._fits(shadow.needed) and self._scheduler.current_step - shadow.job.since <= LONGEST_WAIT
        return shadow.request.status == RequestStatus.RUNNING

    def _do_without(self, job: Job) -> None:
        """No scores: everything weighs nothing, so the oldest goes first."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "KV policy kvzip: request %s could not have its prompt of %d tokens reconstructed (too long, no "
                "room, or not of token ids alone); its oldest blocks go first. Said once.",
                job.request.request_id,
                job.request.num_prompt_tokens,
            )
        job.resident.prompt_scores = Report(np.arange(0), {"mass": np.empty(0)})

    def _give_up(self, job: Job) -> None:
        """Nobody asks for a job's scores, so far as it has any."""
        if job.scores is not None:
            self._forget(job.scores)
            job.scores = None

    def _forget(self, scores: np.ndarray | int) -> None:
        if isinstance(scores, int):
            self._plan.forgotten.append(scores)

    @property
    def _plan(self) -> GroupPlan:
        """What goes to workers with the next step."""
        return self._scheduler._plan.groups[self._manager.number]

    def _begin(self, job: Job) -> bool:
        """Add the next shadow of a request, if it is time. Returns whether it was added."""
        scheduler, request, config = self._scheduler, job.request, job.resident.config
        if job.resident.prompt_scores is not None:
            return False  # its decision falls with this step's output
        if request.num_computed_tokens - request.num_in_flight_tokens < request.num_prompt_tokens:
            job.since = scheduler.current_step
            return False
        if job.parts is None:
            job.parts = self._parts(request, config)
            job.scores = next(self._numbers) if job.per_token else np.zeros(job.blocks)
        waited = scheduler.current_step - job.since
        prompt, start = self._prompt(job, config) if job.parts else ([], 0)
        needed = math.ceil(len(prompt) / job.resident.block_size) - job.blocks
        if not job.parts or waited > LONGEST_WAIT or not self._could_fit(request, needed):
            self._do_without(job)
            return False
        if not self._fits(needed) or (scheduler.waiting and waited < PATIENCE):
            return False
        self._add(job, prompt, start, needed)
        return True

    def _parts(self, request: Request, config: KVPolicyConfig) -> list[tuple[int, int]]:
        # Prompts that are not token ids alone can't be repeated; those of sessions change.
        if request.prompt_token_ids is None or request.prompt_embeds is not None or request.mm_features:
            return []
        if request.resumable or request.num_prompt_tokens < self._manager.block_size:
            return []
        return parts(request.num_prompt_tokens, config.chunk, len(config.instruction), self._scheduler.max_model_len)

    def _prompt(self, job: Job, config: KVPolicyConfig) -> tuple[list[int], int]:
        """Token ids of the next shadow, and where the part that is repeated starts in them."""
        context, (start, end) = job.request.prompt_token_ids, job.parts[0]
        before = [*context, *config.instruction, *context[max(start - OVERLAP, 0) : start]]
        return [*before, *context[start:end]], len(before)

    def _could_fit(self, request: Request, needed: int) -> bool:
        """Whether there is room for a shadow once the request is alone."""
        scheduler = self._scheduler
        held = self._manager.residents[request.request_id].held_blocks
        pool = scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
        return scheduler.max_num_running_reqs > 1 and held + needed < pool

    def _fits(self, needed: int) -> bool:
        scheduler = self._scheduler
        # Everybody who runs may want one more before long.
        spare = scheduler.kv_cache_manager.watermark_blocks + len(scheduler.running)
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free >= needed + spare and len(scheduler.running) < scheduler.max_num_running_reqs

    def _add(self, job: Job, prompt: list[int], start: int, needed: int) -> None:
        scheduler, original = self._scheduler, job.request
        shadow = Request(
            f"reconstruct-{next(self._ids)}-{original.request_id}",
            prompt,
            SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False),
            None,
            client_index=original.client_index,
            lora_request=original.lora_request,
            cache_salt=original.cache_salt,
            priority=sys.maxsize,
            block_hasher=original._block_hasher,
        )
        config, repetition = job.resident.config, None
        if job.per_token:
            sink = job.resident.limits.sink * job.resident.block_size
            repetition = Repetition(job.scores, original.num_prompt_tokens, *job.parts[0], sink)
        resident = Residency(config, None, job.resident.block_size, config.name)
        # Only what is the prompt's own is published: what follows would be of use to nobody.
        resident.pure_tokens = job.blocks * resident.block_size
        self._hidden.add(shadow.request_id)
        self._shadow = Shadow(shadow, job, Scoring("sum", 0.0, 1, 1, NEVER, start=start), repetition, needed)
        self._manager.residents[shadow.request_id] = resident
        scheduler.add_request(shadow)
        scheduler.waiting.remove_request(shadow)
        scheduler.waiting.prepend_request(shadow)

    def _withdraw(self) -> None:
        shadow, self._shadow = self._shadow, None
        self._scheduler.finish_requests(shadow.request.request_id, RequestStatus.FINISHED_ABORTED)
