"""Audits: full attention scores the answers of some requests once they ended, to measure what eviction changed.

The scheduler adds a shadow (see `integration.engine.shadows`) whose prompt is the prompt and the answer of such a
request, and workers score the answer's rows. Answers wait for an idle engine first, then for a step in which nothing
else waits; after `LONGEST` seconds an answer is dropped. `verdicts` says what scores mean.
"""

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from time import monotonic
from typing import Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from ...config import NEVER, KVPolicyConfig
from ...core.actions import Action
from ...core.blocks import RequestBlocks
from ...core.mechanisms import Metric, Step
from ...core.plan import EvictionPlan, Reports, Scoring
from ...integration.engine.hits import Hit
from ...integration.engine.shadows import Shadow, ShadowUser
from ...integration.engine.view import EngineView
from ...integration.start.capabilities.refuse import measures_mass
from . import said
from .answers import AuditedAnswer, Loss, Losses, served_tokens, unfit
from .evidence import Promise
from .plan import SCORED, AuditedRows, ScoredRows
from .verdicts import CONTROL, KEPT, Verdict, missed_mass

logger = init_logger("vllm.evict")

#: Seconds for which an answer waits for an idle engine, and for free blocks that are in no cached prefix; seconds after
#: which it is dropped.
IDLE_ONLY, LONGEST = 30.0, 60.0
#: Answers for which such blocks are counted in one step.
LOOKED_AT = 8
#: Most tokens of answers that wait, their prompts included.
MOST_TOKENS = 1 << 20
#: Most shadows of one answer: others withdraw it.
MOST_TRIES = 8
#: Answers from one line of the log to the next.
SAID_EVERY = 100
#: What workers report of a shadow.
MASS = frozenset({"mass"})


@dataclass(slots=True, kw_only=True, eq=False)
class Check(Shadow):
    """The shadow of an answer.

    Attributes:
        answer: the answer that it checks.
        rows: what workers have scored, float32 [n, 5] for each chunk.
    """

    answer: AuditedAnswer
    rows: list[np.ndarray] = field(default_factory=list)

    @property
    def measured(self) -> bool:
        """Whether workers measure the attention of the answer's queries."""
        return self.answer.gone is not None and len(self.answer.gone) > 0


def _by_share(name: str, help: str) -> Metric:
    """Return a counter of audits, by the share of its blocks that a request kept."""
    return Metric(f"audit_{name}", help, label="kept", values=(CONTROL, *KEPT))


class Audits(ShadowUser):
    """All audits of one scheduler.

    Args:
        scheduler: an `EvictionMixin`.

    Attributes:
        drawn: answers drawn so far.
        idle_only: seconds for which each waits for an idle engine.
        sparing: seconds for which each waits for free blocks that are in no cached prefix.
        longest: seconds after which it is dropped.
        most_tokens: most tokens of answers that wait, their prompts included.
        told: called with each answer that was drawn, and its verdict, or why it has none.
    """

    metrics = {
        "audited": _by_share("requests", "Greedy answers that full attention has scored."),
        "identical": _by_share("identical", "Of these, answers that full attention gives too."),
        "changed": _by_share("changed", "Of these, answers with a token that it clearly would not give."),
        "tokens": _by_share("tokens", "Tokens of these answers."),
        "agreed": _by_share("tokens_agreed", "Tokens that full attention prefers to all others."),
        "gap": _by_share("gap_nats", "Nats by which it prefers its own tokens, summed over tokens."),
        "sampled_requests": _by_share("sampled_requests", "Sampled answers that full attention has scored."),
        "sampled_tokens": _by_share("sampled_tokens", "Tokens of these that full attention can sample, too."),
        "outside_tokens": _by_share("outside_tokens", "Tokens of these that its top-k, top-p or min-p leave out."),
        "surprise": _by_share("surprise_nats", "Nats by which sampled tokens surprise full attention, summed."),
        "expected": _by_share("expected_nats", "The same had full attention sampled them: entropy, summed."),
        "measured": _by_share("measured", "Answers whose attention to lost blocks was measured."),
        "missed_mass": _by_share("missed_mass", "Shares of attention that answers pay to lost blocks, summed."),
        "computed_tokens": _by_share("computed_tokens", "Tokens computed to score answers."),
        "skipped": Metric(
            "audit_skipped", "Answers that were drawn for an audit and have none, by reason.", "counter", "reason", ()
        ),
        "audit": Metric("audit_share", "Share of answers that are drawn for an audit.", "field"),
        "target": Metric("audit_target", "Share of audited answers that should be identical.", "field"),
        "missed": Metric(
            "audit_target_missed",
            "1 while audits, or prompts of other lengths, speak against the target; else 0.",
            "gauge",
        ),
    }

    def __init__(self, scheduler: EngineView) -> None:
        super().__init__(scheduler)
        self._scheduler = scheduler
        self._drawn = random.Random(0)
        self._backlog: deque[AuditedAnswer] = deque()
        self._tokens = 0
        self._shadow: Check | None = None
        #: Whether a request was left waiting by the last step.
        self._waits = False
        self.drawn = 0
        self.idle_only, self.longest, self.most_tokens = IDLE_ONLY, LONGEST, float(MOST_TOKENS)
        self.sparing = IDLE_ONLY
        self.told: Callable[[AuditedAnswer, Verdict | str], None] | None = None
        self._measures = measures_mass(scheduler.vllm_config)
        self._processed = bool(scheduler.vllm_config.model_config.logits_processors)
        #: Whether a request lost blocks -> counts of verdicts; first differences since the last line of the log.
        self._totals: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
        self._firsts: list[int] = []
        self._skips: Counter[str] = Counter()
        self._losses = Losses()
        #: Whether the log has said that most answers have no audit.
        self._warned = False
        #: Whether the engine ends once clients have their answers.
        self._ending = False
        if _penalises(scheduler.vllm_config.model_config):
            logger.warning(said.OF_MODEL)

    @classmethod
    def serves(cls, config: KVPolicyConfig) -> bool:
        return config.audit > 0

    @property
    def described(self) -> str:
        missed = "" if self._measures else ", without missed mass, since no kernel measures attention here"
        return f"full attention scores {100 * self.view.kv_policy.audit:.4g} % of all answers again{missed}"

    def __len__(self) -> int:
        """Return the answers that wait."""
        return len(self._backlog)

    # --- answers -----------------------------------------------------------------------------------------------------

    def on_free(self, request: Request) -> None:
        """Take in the answer of a request that has ended, if it is drawn."""
        manager, req_id = self._scheduler.kv_managers[0], request.request_id
        blocks = manager.residents.get(req_id)  # None if it never came in through `add_request`
        if blocks is None or self._shadows.owns(req_id):
            return
        table = manager.req_to_blocks.get(req_id, ())
        loss = Loss(blocks.held(len(table)), len(table), blocks.residence.absent) if table else Loss()
        if not request.is_finished():
            if blocks.evicted_blocks and table:
                self._losses.start_over(req_id, loss)
            return
        kept, gone = self._losses.end(req_id, blocks.evicted_blocks, loss)
        if self._drawn.random() < self.view.kv_policy.audit:
            # With token granularity each head has lost tokens of its own.
            known = gone if self._measures and blocks.config.granularity == "block" else None
            self._take(AuditedAnswer(request, blocks.policy, kept, known, monotonic()))

    def _take(self, answer: AuditedAnswer) -> None:
        """Have an answer wait that was drawn, or skip it."""
        self.drawn += 1
        request, served = answer.request, None
        why = "shutdown" if self._ending else "processors" if self._processed else unfit(request)
        if why != "beam" and self._promise is not None:
            alike = self._promise.draw(request.num_prompt_tokens)
            if alike is not None:
                logger.warning(said.lengths(self._promise, alike))
        if why is None:
            tokenizer = getattr(self._scheduler.structured_output_manager, "tokenizer", None)
            if (served := served_tokens(request, tokenizer)) is None:
                why = "aborted"
            elif self._tokens + request.num_prompt_tokens + served > self.most_tokens:
                why = "backlog"
        if why is not None:
            self._skip(answer, why)
        else:
            answer.token_ids = list(request.all_token_ids[: request.num_prompt_tokens + (served or 0)])
            self._backlog.append(answer)
            self._tokens += len(answer.token_ids)
        if self.drawn == SAID_EVERY:
            logger.info(said.begun(self.drawn, len(self), self._skips))

    def _drop(self, answer: AuditedAnswer) -> None:
        self._backlog.remove(answer)
        self._tokens -= len(answer.token_ids)

    def _skip(self, answer: AuditedAnswer, why: str) -> None:
        self._skips[why] += 1
        self._scheduler.tally.add(answer.policy, why, skipped=1)
        if answer.computed:
            self._scheduler.tally.add(answer.policy, answer.kept, computed_tokens=answer.computed)
        skipped, audited = sum(self._skips.values()), sum(map(said.audited, self._totals.values()))
        if not self._warned and skipped >= SAID_EVERY and skipped > audited:
            self._warned = True
            logger.warning(said.coverage(self._skips, audited))
        if self.told is not None:
            self.told(answer, why)

    def _stop(self, why: str) -> None:
        """Drop all answers that wait, and the shadow."""
        for answer in list(self._backlog):
            self._drop(answer)
            self._skip(answer, why)
        self._withdraw()

    def on_pause(self) -> None:
        self._stop("paused")

    def on_reset(self) -> None:
        """Drop all answers: a prefix cache is reset where weights change, too."""
        self._stop("reset")

    def on_shutdown(self) -> None:
        """Drop all answers, and take no more: the engine ends once clients have their answers."""
        self._ending = True
        self._stop("shutdown")

    def has_work(self) -> bool:
        return bool(self._backlog) and self._scheduler.pause_state == PauseState.UNPAUSED

    # --- shadows -----------------------------------------------------------------------------------------------------

    def before_schedule(self) -> None:
        """Withdraw a shadow for which requests wait, drop what waits too long, and begin the next shadow."""
        now = monotonic()
        shadow = self._shadow
        crowded = self._waits or self._others_first()
        if shadow and not shadow.request.is_finished() and (crowded or not self._shadows.gets_on(shadow)):
            self._withdraw()
        while self._backlog and now - self._backlog[0].since > self.longest:
            answer = self._backlog[0]
            if self._shadow is not None and self._shadow.answer is answer:
                self._withdraw()
            self._drop(answer)
            self._skip(answer, "late")
        if self._shadows.current is None and self._scheduler.pause_state == PauseState.UNPAUSED:
            self._begin(now)

    def _begin(self, now: float) -> None:
        """Begin the shadow of the first answer that has its turn and fits; drop those that never fit."""
        scheduler = self._scheduler
        unfinished = scheduler.get_num_unfinished_requests()
        if unfinished > len(scheduler.running) or self._others_first():
            return
        if unfinished and not self._shadows.fits(1):
            return  # no answer fits, however short
        pool, looked_at = scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1, 0
        for answer in list(self._backlog):
            if unfinished and now - answer.since < self.idle_only:
                return
            needed = self._needed(answer)
            if answer.tries < MOST_TRIES and self._shadows.fits(needed):
                if now - answer.since < self.sparing:
                    looked_at += 1
                    if looked_at > LOOKED_AT:
                        return
                    if not self._shadows.spares(answer.request, answer.first, needed):
                        continue
                answer.tries += 1
                self._add(answer, needed)
                return
            if answer.tries == MOST_TRIES or needed + self._shadows.spare > pool or not unfinished:
                self._drop(answer)
                self._skip(answer, "room")

    def _others_first(self) -> bool:
        """Return whether a request waits for a shadow of another kind."""
        return any(each.waiting for each in self._scheduler.mechanisms.of(ShadowUser))

    def _needed(self, answer: AuditedAnswer) -> int:
        """Return the blocks that the shadow of an answer takes at most."""
        tokens, (manager,) = len(answer.token_ids), self._scheduler.kv_managers
        return math.ceil(tokens / manager.block_size) + self._scheduler.room.beside(tokens, hit=True)

    def _add(self, answer: AuditedAnswer, needed: int) -> None:
        # The answer's last token predicts nothing that was served.
        request = self._shadows.request("audit", answer.request, answer.token_ids[:-1])
        block_size = self._scheduler.kv_managers[0].block_size
        blocks = RequestBlocks(KVPolicyConfig(name="full"), None, block_size, answer.policy)
        # It hits no block of the answer, whose rows have to be computed.
        blocks.pure_tokens = answer.first // block_size * block_size
        self._shadow = Check(request=request, needed=needed, answer=answer)
        self._shadows.add(self._shadow, [blocks])

    def _withdraw(self) -> None:
        shadow, self._shadow = self._shadow, None
        if shadow is not None:
            self._shadows.withdraw(shadow)

    def on_hit(self, request: Request, hit: Hit) -> Hit:
        """End a shadow's pure tokens with its hit: it publishes nothing."""
        if (shadow := self._shadow) is not None and request is shadow.request:
            self._scheduler.residents[request.request_id].pure_tokens = hit.tokens
        return hit

    def on_start(self, plan: EvictionPlan, req_id: str, blocks: Sequence[RequestBlocks]) -> None:
        """Have workers measure the queries that give the answer's tokens, if the answer lost blocks."""
        if (shadow := self._shadow) is not None and shadow.request.request_id == req_id and shadow.measured:
            plan.groups[0].track[req_id] = Scoring("sum", 0.0, 1, 1, NEVER, start=shadow.answer.first, summed=True)

    def limit_tokens(self, request: Request, computed_tokens: int, new_tokens: int) -> int:
        """Keep a shadow that runs from the tokens of a step for which other requests wait."""
        shadow, scheduler = self._shadow, self._scheduler
        runs = shadow is not None and request is shadow.request and request.status == RequestStatus.RUNNING
        return 0 if runs and scheduler.get_num_unfinished_requests() > len(scheduler.running) else new_tokens

    def plan(self, plan: EvictionPlan, step: Step) -> None:
        """Have workers score the rows of the answer that the shadow computes in this step."""
        scheduler, shadow = self._scheduler, self._shadow
        self._waits = scheduler.get_num_unfinished_requests() > len(scheduler.running)
        if shadow is None or (count := step.tokens.get(shadow.request.request_id)) is None:
            return
        answer, end = shadow.answer, shadow.request.num_computed_tokens
        start = end - count
        answer.computed += count
        if end > (first := max(start, answer.first)):
            tokens = answer.token_ids[first + 1 : end + 1]
            temperature = 1.0 if answer.greedy else answer.request.sampling_params.temperature
            rows = ScoredRows(first - start, tokens, temperature, answer.truncation)
            AuditedRows.add_to(plan).of_requests[shadow.request.request_id] = rows
        if shadow.measured and end >= shadow.request.num_prompt_tokens:
            plan.groups[0].report[shadow.request.request_id] = MASS

    def on_output(self, output: Any) -> None:
        """Take in scored rows."""
        scored: Mapping[str, Any] = getattr(output, SCORED, None) or {}
        if (shadow := self._shadow) is not None and shadow.request.request_id in scored:
            shadow.rows.append(scored[shadow.request.request_id])

    def decide(self, plan: EvictionPlan, reports: Sequence[Reports]) -> Iterator[Action]:
        """Judge the answer whose shadow has ended."""
        if (shadow := self._shadow) is not None and self._shadows.ended(shadow):
            self._shadow, answer = None, shadow.answer
            self._drop(answer)
            rows = _sound(shadow.rows, answer.tokens)
            if rows is None or shadow.request.status == RequestStatus.FINISHED_ERROR:
                self._skip(answer, "failed")
            else:
                report = reports[0].get(shadow.request.request_id)
                missed = None if answer.gone is None else missed_mass(report, answer.gone)
                self.judge(answer, Verdict.of(rows), answer.computed, missed)
        yield from ()

    # --- figures -----------------------------------------------------------------------------------------------------

    def judge(self, answer: AuditedAnswer, verdict: Verdict, computed: int, missed: float | None) -> None:
        """Count a verdict, for /metrics and the log.

        Args:
            answer, verdict: of the audit.
            computed: tokens that its shadows computed.
            missed: see `verdicts.missed_mass`.
        """
        counts: dict[str, float] = {"computed_tokens": computed}
        if missed is not None:
            counts |= {"measured": 1, "missed_mass": missed}
        if answer.greedy:
            counts |= {"audited": 1, "identical": verdict.identical, "changed": verdict.changed}
            counts |= {"tokens": verdict.tokens, "agreed": verdict.agreed, "gap": verdict.gap}
        else:
            counts |= {"sampled_requests": 1, "sampled_tokens": verdict.tokens - verdict.outside}
            counts |= {"outside_tokens": verdict.outside}
            counts |= {"surprise": verdict.surprise, "expected": verdict.expected}
        self._scheduler.tally.add(answer.policy, answer.kept, **counts)
        lost = answer.kept != CONTROL
        self._totals[lost].update(counts)
        if lost and answer.greedy and verdict.first is not None:
            self._firsts.append(verdict.first)
        if sum(map(said.audited, self._totals.values())) % SAID_EVERY == 0:
            logger.info("KV policies, answers audited: %s", said.figures(self._totals, self._firsts, self._skips))
            self._firsts.clear()
        if lost and answer.greedy and self._promise is not None:
            kept = self._promise.audit(verdict.identical)
            if kept is not None:
                logger.warning(said.target(self._promise, kept, self._totals[False]))
        if self.told is not None:
            self.told(answer, verdict)

    # --- the target --------------------------------------------------------------------------------------------------

    @cached_property
    def _promise(self) -> Promise | None:
        """The share of identical answers that the server expects; None: it expects none."""
        policy = self.view.kv_policy
        return None if policy.target is None else Promise(policy.target, getattr(policy, "tuned", None))

    def before_stats(self) -> None:
        if self._promise is not None:
            self._scheduler.tally.hold(self.view.kv_policy.name, missed=int(not self._promise.kept))


def _penalises(model_config: Any) -> bool:
    """Return whether the model gives requests a repetition penalty; no if its files are not there any more."""
    try:
        own = model_config.get_diff_sampling_param() or {}
    except (OSError, ValueError):  # vLLM's front end has read them
        return False
    return bool(own.get("repetition_penalty", 1) != 1)


def _sound(rows: list[Any], tokens: int) -> np.ndarray | None:
    """Return the rows of all chunks, float32 [tokens, 5]; None if some are missing or are no numbers."""
    if not rows or not all(isinstance(each, np.ndarray) and each.ndim == 2 and each.shape[1] == 5 for each in rows):
        return None
    whole = np.concatenate(rows)
    return whole if len(whole) == tokens and np.isfinite(whole).all() else None
