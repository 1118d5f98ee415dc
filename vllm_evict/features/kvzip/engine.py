"""KVzip's reconstruction: internal requests that repeat a prompt, and their scores.

When a request is over its trigger and its prompt is computed, the scheduler adds a *shadow*: a request whose prompt is
the same prompt, an instruction, and a part of the prompt again. The shadow hits the blocks that the request has
published, so the prompt is not computed again. Workers measure the queries of the repeated part. Shadows of several
parts run one after the other (see `integration.engine.shadows`).

Workers report scores of blocks, and `Scores` keeps them. Scores of tokens and heads stay with the workers: the
scheduler numbers the prompts, and says which requests take which prompt's scores, and when to forget them.
"""

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from ...config import NEVER, KVPolicyConfig
from ...core.actions import Action, back_to_budget
from ...core.blocks import RequestBlocks
from ...core.mechanisms import Step
from ...core.mechanisms.base import settled
from ...core.plan import EvictionPlan, Report, Reports, Scoring
from ...core.reports import flaw
from ...integration.engine.shadows import Shadow, ShadowUser
from ...integration.engine.view import EngineView
from .plan import Repetition, Repetitions

logger = init_logger("vllm.evict")

#: Steps for which a shadow lets waiting requests go first; steps without room after which a request gets no scores.
PATIENCE, LONGEST_WAIT = 8, 64
#: Last tokens of one part that stand before the next part, as in the authors' code.
OVERLAP = 8

#: Reason why a request gets no scores -> words of the log.
WITHOUT = {
    "session": "a streaming session, whose prompt grows; expected a prompt that stays; send each turn as a new request",
    "tokens": "a prompt that is not of token ids alone; expected text or token ids; leave embeddings and media out",
    "short": "a prompt of {prompt} tokens; expected {least} or more, a whole block; use another policy for them",
    "length": (
        "a prompt of {prompt} tokens, which leaves {room} of --max-model-len {longest} to repeat it; expected {least} "
        "or more; raise --max-model-len, or send a shorter prompt"
    ),
    "seats": "--max-num-seqs 1; expected 2 or more, one of them for the repetition of a prompt; raise --max-num-seqs",
    "pool": (
        "a pool of {pool} blocks; expected more than {least}, for one request and its repetition; raise "
        "--gpu-memory-utilization (on a CPU VLLM_CPU_KVCACHE_SPACE), or send a shorter prompt"
    ),
    "room": (
        "no room for the repetition of a prompt in {steps} steps; expected {least} free blocks, a place among "
        "--max-num-seqs {seats} and tokens of --max-num-batched-tokens; send fewer at once, or raise the full one"
    ),
}


class Scores:
    """Scores of reconstructed prompts, by the hash of each block's prefix; drops the prompts used longest ago.

    Args:
        most_blocks: most blocks with scores, over all prompts.
        forget: called with scores that are dropped.
    """

    def __init__(self, most_blocks: int, forget: Callable[[Any], None] = lambda scores: None) -> None:
        self._most, self._forget = most_blocks, forget
        #: Hash of a prompt's last block -> hashes of its blocks, and scores. The prompt used last is at the end.
        self._prompts: OrderedDict[Any, tuple[list[Any], Any]] = OrderedDict()
        #: Hash of a block -> all prompts with this block, by the hashes of their last blocks. The newest is at the end.
        self._having: dict[Any, dict[Any, None]] = {}
        self._blocks = 0

    def __len__(self) -> int:
        """Return the blocks that have scores."""
        return self._blocks

    def get(self, hashes: Sequence[Any], slack: int) -> tuple[Any, int] | None:
        """Return the scores of a prompt with these blocks, or all but the last `slack`, and their number, or None."""
        for count in range(len(hashes), max(len(hashes) - slack, 1) - 1, -1):
            if having := self._having.get(hashes[count - 1]):
                last = next(reversed(having))
                self._prompts.move_to_end(last)
                return self._prompts[last][1], count
        return None

    def put(self, hashes: Sequence[Any], scores: Any) -> None:
        self.drop(hashes[-1])
        self._prompts[hashes[-1]] = (list(hashes), scores)
        for each in hashes:
            self._having.setdefault(each, {})[hashes[-1]] = None
        self._blocks += len(hashes)
        while self._blocks > self._most:
            self.drop(next(iter(self._prompts)))

    def clear(self) -> None:
        for last in list(self._prompts):
            self.drop(last)

    def drop(self, last: Any) -> None:
        """Drop the scores of the prompt whose last block has this hash."""
        if last not in self._prompts:
            return
        hashes, scores = self._prompts.pop(last)
        self._forget(scores)
        self._blocks -= len(hashes)
        for each in hashes:
            del self._having[each][last]
            if not self._having[each]:
                del self._having[each]


def parts(prompt: int, chunk: int, instruction: int, max_model_len: int) -> list[tuple[int, int]]:
    """Return the ranges of a prompt's tokens, one for each repetition; none if they do not fit.

    Args:
        prompt, instruction: tokens.
        chunk: most tokens of a part.
        max_model_len: most tokens of a request, the sampled one included.
    """
    room = max_model_len - 1 - prompt - instruction
    # One part needs no overlap.
    size = prompt if prompt <= min(chunk, room) else min(chunk, room - OVERLAP)
    if size < min(prompt, chunk) / 8:
        return []  # a part would be too small beside instruction and overlap
    return [(start, min(start + size, prompt)) for start in range(0, prompt, size)]


class Scored:
    """State of a request: scores of its prompt's leading blocks; an empty report if there are none."""

    scores: Report | None = None


@dataclass(slots=True)
class Reconstruction:
    """One request's reconstruction."""

    request: Request
    blocks: RequestBlocks
    incarnation: int
    #: The scheduler's step in which the job was made, or in which its last part was done.
    since: int
    #: Steps since then in which the job had its turn and found no room. Steps behind other shadows do not count.
    crowded: int = 0
    #: Whether the job had its turn, and the parts that are still to be repeated then.
    begun: bool = False
    parts: list[tuple[int, int]] = field(default_factory=list)
    #: Scores so far: mass of the blocks, or the number under which workers keep the scores of tokens.
    scores: np.ndarray | int | None = None

    @property
    def alive(self) -> bool:
        """Whether its request still runs, without having started over."""
        return self.request.status == RequestStatus.RUNNING and self.blocks.incarnation == self.incarnation

    @property
    def per_token(self) -> bool:
        return self.blocks.config.granularity == "token"

    @property
    def hashes(self) -> list[Any]:
        return self.request.block_hashes[: self.count]

    @property
    def count(self) -> int:
        """Number of whole blocks of the prompt."""
        return self.request.num_prompt_tokens // self.blocks.block_size


@dataclass(slots=True, kw_only=True, eq=False)
class Repeated(Shadow):
    """The request that repeats one part; `scoring` or `repetition` says how workers measure its blocks or tokens."""

    job: Reconstruction
    scoring: Scoring
    repetition: Repetition | None


class Reconstructions(ShadowUser):
    """All reconstructions of one scheduler, which has one KV group that may have holes.

    Args:
        scheduler: an `EvictionMixin`.
    """

    def __init__(self, scheduler: EngineView) -> None:
        super().__init__(scheduler)
        self._scheduler, self._manager = scheduler, scheduler.kv_managers[0]
        self.scores = Scores(scheduler.kv_cache_manager.block_pool.num_gpu_blocks, self._forget)
        self._jobs: dict[str, Reconstruction] = {}
        self._shadow: Repeated | None = None
        self._numbers = itertools.count()
        #: Keys of `WITHOUT` that were logged.
        self._said: set[str] = set()

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return config.reconstructs

    @property
    def waiting(self) -> int:
        """Requests that wait for scores."""
        return len(self._jobs)

    def on_start(self, plan: EvictionPlan, req_id: str, blocks: Sequence[RequestBlocks]) -> None:
        """Add to the plan how workers measure the shadow that starts."""
        shadow = self._shadow
        if shadow is None or shadow.request.request_id != req_id:
            return
        if shadow.repetition is None:
            plan.groups[0].track[req_id] = shadow.scoring
        else:
            Repetitions.add_to(plan.groups[0]).repeats[req_id] = shadow.repetition

    def plan(self, plan: EvictionPlan, step: Step) -> None:
        """Ask for a report of blocks with the last step of a shadow."""
        if self._shadow is None or self._shadow.repetition is not None:
            return
        shadow = self._shadow.request
        if shadow.request_id in step.tokens and shadow.num_computed_tokens >= shadow.num_prompt_tokens:
            plan.groups[0].report[shadow.request_id] = self._shadow.job.blocks.config.policy.measures

    def decide(self, plan: EvictionPlan, reports: Sequence[Reports]) -> Iterator[Action]:
        """Evict blocks of requests over their trigger that have scores; make jobs for the others."""
        for _, request, blocks in self.due(plan):
            if not blocks.config.policy.reconstructs:
                continue
            if blocks.of(Scored).scores is None:
                self._look_up(request, blocks)
            if blocks.of(Scored).scores is not None:
                yield from self._evict(request, blocks)
            elif request.request_id not in self._jobs:
                now = self._scheduler.current_step
                self._jobs[request.request_id] = Reconstruction(request, blocks, blocks.incarnation, since=now)
        yield from self._take(reports[0])

    def _evict(self, request: Request, blocks: RequestBlocks) -> Iterator[Action]:
        """Yield the action that brings a request back to its budget by the scores of its prompt."""
        group, scores = self._manager.number, blocks.of(Scored).scores
        action = back_to_budget(request.request_id, group, blocks, settled(request), scores)
        if action is not None:
            yield action

    def before_schedule(self) -> None:
        """Withdraw a shadow that does not run, and begin the next one."""
        self.tidy()
        if self._shadow is not None:
            self._shadow.job.crowded += not self._shadow.advances()
            if self._shadow.job.crowded > LONGEST_WAIT or not self._shadows.gets_on(self._shadow):
                self._withdraw()
        if self._shadows.current is None and self._scheduler.pause_state == PauseState.UNPAUSED:
            for job in list(self._jobs.values()):
                if self._begin(job):
                    break

    def tidy(self) -> None:
        """Forget jobs of requests that ended or were preempted, and their shadow."""
        for req_id in [req_id for req_id, job in self._jobs.items() if not job.alive]:
            self._give_up(self._jobs.pop(req_id))
        shadow = self._shadow
        if shadow is not None and all(job is not shadow.job for job in self._jobs.values()):
            self._withdraw()

    def on_reset(self) -> None:
        """Forget all scores, complete and incomplete."""
        self.scores.clear()
        if self._shadow is not None:
            self._withdraw()
        for job in self._jobs.values():
            self._give_up(job)
            job.begun = False

    def _take(self, reports: Reports) -> Iterator[Action]:
        """Take the shadow's scores, and evict by them when they are complete."""
        self.tidy()
        if (shadow := self._shadow) is not None and self._shadows.ended(shadow):
            self._shadow = None
            self._add_up(shadow.job, reports.get(shadow.request.request_id))
        for req_id, job in list(self._jobs.items()):
            if job.blocks.of(Scored).scores is not None:
                self._give_up(self._jobs.pop(req_id))
                yield from self._evict(job.request, job.blocks)

    def _add_up(self, job: Reconstruction, report: Report | None) -> None:
        """Add the scores of a finished shadow to its job."""
        if not job.per_token:
            # The inbox could not check its blocks: the shadow has ended, so the scheduler does not know them.
            if report is None or flaw(report, frozenset({"mass"}), np.arange(job.count)):
                self._scheduler.miss(job.request.request_id, job.blocks)
                return self._do_without(job)
            job.scores += report.statistics["mass"][: job.count]
        job.parts.pop(0)
        job.since, job.crowded = self._scheduler.current_step, 0
        if not job.parts:
            self.scores.put(job.hashes, job.scores)
            job.scores, outdated = None, job.blocks.state.outdated
            for other in self._jobs.values():
                if other is job or not outdated:
                    self._look_up(other.request, other.blocks)
            if outdated:  # no later request gets them
                self.scores.drop(job.hashes[-1])

    def on_finish(self, finished: list[Request]) -> list[Request]:
        self.tidy()
        return finished

    def _look_up(self, request: Request, blocks: RequestBlocks) -> None:
        """Give a request the scores of the same prompt, or of one that differs in recent tokens only, if known."""
        hashes = request.block_hashes[: request.num_prompt_tokens // blocks.block_size]
        recent = 0 if blocks.limits is None else blocks.limits.recent
        if (found := self.scores.get(hashes, recent // blocks.block_size)) is None:
            return
        scores, known = found
        by_token = blocks.config.granularity == "token"
        if by_token:
            self._told.scored[request.request_id] = (scores, known * blocks.block_size)
        blocks.of(Scored).scores = Report(np.arange(known), {} if by_token else {"mass": scores[:known]})

    def _do_without(self, job: Reconstruction, why: str | None = None, **numbers: int) -> None:
        """Give a request no scores: all its blocks have importance 0, so the oldest are evicted first.

        Args:
            job: of the request.
            why: a key of `WITHOUT`; None if the reason was logged.
            numbers: values for the words of the log.
        """
        if why is not None and why not in self._said:
            self._said.add(why)
            logger.warning(
                "KV policy %s got %s. The oldest blocks of request %s go first. Said once for this reason.",
                job.blocks.policy,
                WITHOUT[why].format(**numbers),
                job.request.request_id,
            )
        job.blocks.of(Scored).scores = Report(np.arange(0), {"mass": np.empty(0)})

    def _give_up(self, job: Reconstruction) -> None:
        """Drop the scores that a job has so far."""
        if job.scores is not None:
            self._forget(job.scores)
            job.scores = None

    def _forget(self, scores: np.ndarray | int) -> None:
        if isinstance(scores, int):
            self._told.forgotten.append(scores)

    @property
    def _told(self) -> Repetitions:
        """The payload of the next plan of the KV group."""
        return Repetitions.add_to(self.view.next_plan.groups[self._manager.number])

    def _begin(self, job: Reconstruction) -> bool:
        """Add the next shadow of a job if it fits and has its turn. Returns whether it was added."""
        scheduler, request, config = self._scheduler, job.request, job.blocks.config
        if job.blocks.of(Scored).scores is not None:
            return False  # the decision is taken with this step's output
        if request.num_computed_tokens - request.num_in_flight_tokens < request.num_prompt_tokens:
            job.since = scheduler.current_step
            return False
        size, longest = request.num_prompt_tokens, scheduler.max_model_len
        if not job.begun:
            job.begun = True
            if (why := self._unrepeatable(request)) is not None:
                self._do_without(job, why, prompt=size, least=self._manager.block_size)
                return False
            job.parts = parts(size, config.chunk, len(config.instruction), longest)
            job.scores = next(self._numbers) if job.per_token else np.zeros(job.count)
        if not job.parts:
            least = math.ceil(min(size, config.chunk) / 8) + OVERLAP + len(config.instruction)
            self._do_without(job, "length", prompt=size, room=longest - 1 - size, longest=longest, least=least)
            return False
        prompt, start = self._prompt(job, config)
        needed = math.ceil(len(prompt) / job.blocks.block_size) - job.count
        if self._shadows.seats < 2:
            self._do_without(job, "seats")
            return False
        pool, held = scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1, job.blocks.held_blocks
        if held + needed >= pool:  # it would not fit in an otherwise empty pool
            self._do_without(job, "pool", pool=pool, least=held + needed)
            return False
        fits = self._shadows.fits(needed)
        job.crowded += not fits
        if job.crowded > LONGEST_WAIT:
            numbers = {"steps": LONGEST_WAIT, "seats": self._shadows.seats}
            self._do_without(job, "room", least=needed + self._shadows.spare, **numbers)
            return False
        if not fits or (scheduler.waiting and scheduler.current_step - job.since < PATIENCE):
            return False
        self._add(job, prompt, start, needed)
        return True

    def _unrepeatable(self, request: Request) -> str | None:
        """Return why a prompt cannot be repeated (see `WITHOUT`); None if it can."""
        if request.resumable:
            return "session"
        if request.prompt_token_ids is None or request.prompt_embeds is not None or request.mm_features:
            return "tokens"
        return "short" if request.num_prompt_tokens < self._manager.block_size else None

    def _prompt(self, job: Reconstruction, config: KVPolicyConfig) -> tuple[list[int], int]:
        """Return the token ids of the next shadow, and the index where the repeated part starts."""
        context, (start, end) = job.request.prompt_token_ids, job.parts[0]
        before = [*context, *config.instruction, *context[max(start - OVERLAP, 0) : start]]
        return [*before, *context[start:end]], len(before)

    def _add(self, job: Reconstruction, prompt: list[int], start: int, needed: int) -> None:
        original = job.request
        request = self._shadows.request("reconstruct", original, prompt)
        config, repetition = job.blocks.config, None
        if job.per_token:
            limits = job.blocks.limits
            sink = 0 if limits is None else limits.sink * job.blocks.block_size
            assert isinstance(job.scores, int)  # a number, with token granularity
            repetition = Repetition(job.scores, original.num_prompt_tokens, *job.parts[0], sink)
        blocks = RequestBlocks(config, None, job.blocks.block_size, config.name)
        # It hits and publishes blocks of the prompt only: no request can hit the others.
        blocks.pure_tokens = job.count * blocks.block_size
        scoring = Scoring("sum", 0.0, 1, 1, NEVER, start=start)
        self._shadow = Repeated(request=request, needed=needed, job=job, scoring=scoring, repetition=repetition)
        self._shadows.add(self._shadow, [blocks])

    def _withdraw(self) -> None:
        shadow, self._shadow = self._shadow, None
        if shadow is not None:
            self._shadows.withdraw(shadow)
