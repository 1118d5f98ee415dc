"""Prompts whose answers are all audited, by an engine in this process or a server: what full attention says of them."""

import math
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from ...config import KVPolicyConfig
from ...features.audit.verdicts import CONTROL, Verdict
from ..eval import EvalError
from ..eval.backends import Offline, one_line
from ..eval.policies import Contender
from ..eval.prompts import Prompts
from ..eval.questions import Question
from ..eval.served import PLAIN, Http

#: Measure -> what it counts, in words.
MEASURES = {
    "identical": "answers that full attention gives word by word",
    "unchanged": "answers without a token that full attention clearly would not give",
    "tokens": "tokens that full attention prefers too, by answer",
}
PREFIX = "vllm:kv_evict_audit_"
#: Seconds from one look at a server's metrics to the next; seconds without an audit after which none is expected. A
#: server drops answers after 60 seconds, and counts them.
LOOK, STILL = 0.25, 75.0

#: Reasons for which an answer is not audited that hold of all answers of a run, if of one.
OF_ALL = {"penalties", "bias", "truncated", "grammar", "processors"}

#: Measure -> score of each audited answer, from 0 to 1.
Scores = dict[str, list[float]]


@dataclass
class Audit:
    """Audits of the answers under one policy and budget.

    Attributes:
        lost: of requests that lost blocks.
        kept: of requests that lost none.
        skipped: reason -> answers that were not audited.
        memory: share of its tokens that a request's budget holds, in whole blocks; the mean over requests.
        peak: the same of the most that it held at once.
        lengths: tokens of a prompt, the shortest and the longest that are like these (`alike`); none known: [].
    """

    lost: Scores = field(default_factory=lambda: defaultdict(list))
    kept: Scores = field(default_factory=lambda: defaultdict(list))
    skipped: Counter[str] = field(default_factory=Counter)
    memory: float = 1.0
    peak: float = 1.0
    lengths: list[int] = field(default_factory=list)

    def add(self, kept: bool, scores: dict[str, float]) -> None:
        """Count an answer."""
        for measure, score in scores.items():
            (self.kept if kept else self.lost)[measure].append(score)

    def hold(self, usages: Sequence["Held"]) -> None:
        """Note what requests held."""
        self.memory = fmean(each.share(each.budget) for each in usages)
        self.peak = fmean(each.share(each.peak) for each in usages)
        self.lengths = alike([each.prompt for each in usages])


class Held(NamedTuple):
    """Tokens of one request: of its prompt, of prompt and answer, of its budget (None: it has none), and most that it
    held.
    """

    prompt: int
    tokens: int
    budget: int | None
    peak: int

    def share(self, held: int | None) -> float:
        return 1.0 if held is None else min(1.0, held / self.tokens)


def alike(prompts: Sequence[int]) -> list[int]:
    """Return the tokens of the shortest and of the longest prompt that is like these: a fifth below their 5th
    percentile, and a quarter above their 95th.
    """
    low, high = np.percentile(prompts, [5, 95])
    return [math.floor(low * 4 / 5), math.ceil(high * 5 / 4)]


def auditing(server: KVPolicyConfig) -> KVPolicyConfig:
    """Return a server's policy that audits every answer."""
    return KVPolicyConfig.parse(server.to_dict() | {"audit": 1.0})


class AuditedEngine:
    """A vLLM engine in this process that audits every answer.

    Args:
        model: directory or Hub name.
        server: the engine's policy; it audits whatever its field says.
        prompts: the model's tokenizer.
        batch: requests at once.
        block_size: tokens of a KV block.
        engine_args: further arguments of `LLM`.

    Raises:
        EvalError: the engine does not start; it may not support audits.
    """

    def __init__(
        self,
        model: str,
        server: KVPolicyConfig,
        prompts: Prompts,
        *,
        batch: int,
        block_size: int,
        engine_args: dict[str, Any],
    ):
        from ...features.audit.engine import Audits

        server = auditing(server)
        # vLLM decides about its prefix cache: audits hit the prompts there.
        options = {"enable_prefix_caching": None} | engine_args
        self._offline = Offline(
            model, server, "served", prompts, chunk=0, batch=batch, block_size=block_size, engine_args=options
        )
        self.about, self._prompts, self._batch = self._offline.about, prompts, batch
        scheduler = self._offline.scheduler
        assert scheduler is not None  # the command keeps the engine in this process
        self._audits, self._groups = scheduler.part(Audits), scheduler.kv_cache_config.kv_cache_groups
        # No other requests wait in this engine, so no answer is dropped, and no prefix is worth waiting for.
        self._audits.longest = self._audits.most_tokens = math.inf
        self._audits.sparing = 0.0

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a token in the KV cache of one worker, in all layers."""
        pages = (len(group.layer_names) * group.kv_cache_spec.page_size_bytes for group in self._groups)
        return sum(pages) / self._offline.block_size

    def ask(
        self, contender: Contender, questions: Sequence[Question], salt: str, advance: Callable[[int], object]
    ) -> Audit:
        """Answer questions under a contender and audit the answers.

        Args:
            contender: policy and budget.
            questions: prompts.
            salt: requests with another one share no prefix.
            advance: told how many questions are done.

        Raises:
            EvalError: the engine refuses a request, or audits no answer whatever it is.
        """
        audit, held = Audit(), []

        def told(answer: Any, said: Verdict | str) -> None:
            if isinstance(said, str):
                audit.skipped[said] += 1
            else:
                scores = {"identical": said.identical, "unchanged": not said.changed}
                agreed = said.agreed / said.tokens
                audit.add(answer.kept == CONTROL, {**{k: float(v) for k, v in scores.items()}, "tokens": agreed})
            advance(1)

        self._audits.told = told
        for start in range(0, len(questions), self._batch):
            batch = questions[start : start + self._batch]
            ids = [self._prompts.sent(each.prompt) for each in batch]
            prompts = [{"prompt_token_ids": each, "cache_salt": salt} for each in ids]
            outputs = self._offline.generate(prompts, [each.max_tokens for each in batch], contender)
            for prompt, output in zip(ids, outputs, strict=True):
                usage, tokens = output.kv_usage, len(prompt) + len(output.outputs[0].token_ids)
                held.append(Held(len(prompt), tokens, usage.budget_tokens, usage.peak_resident_tokens))
            _refuse_unheard(audit, "the engine")
        audit.hold(held)
        return audit

    def close(self) -> None:
        self._offline.close()


class AuditedServer:
    """A server that audits every answer, and allows the policies.

    Args:
        url: of its API, such as http://localhost:8000/v1.
        model: name under which it has the model; None: its first.
        contenders: what will be asked for.
        batch: requests at once.
        chat: whether text goes through the chat template.

    Raises:
        EvalError: no server answers, it does not audit every answer, or it does not allow a policy.
    """

    def __init__(self, url: str, model: str | None, contenders: Sequence[Contender], *, batch: int, chat: bool):
        self._http, self._batch, self._chat = Http(url, model, batch=batch, chat=chat), batch, chat
        self.model, self.about = self._http.model, self._http.about
        shares = {labels["policy"]: value for name, labels, value in self._metrics() if name == "share"}
        audit = """--kv-policy '{"name": "h2o", "budget": 0.9, "audit": 1}'"""
        if not shares or min(shares.values()) < 1:
            share = f"{min(shares.values()):.4g} of its" if shares else "no"
            raise EvalError(f"{url} audits {share} answers; expected a server that audits all, such as {audit}")
        for name in dict.fromkeys(["full", *(each.config.name for each in contenders)]):
            if name not in shares:
                raise EvalError(
                    f"{url} does not allow {name!r}; expected some of {', '.join(sorted(shares))}: add it to the field "
                    f"allow of the server's policy{', for the control' * (name == 'full')}"
                )

    def _metrics(self) -> list[tuple[str, dict[str, str], float]]:
        """Return name, labels and value of all the server's metrics of audits."""
        root = self._http.url.removesuffix("/v1")
        try:
            text = httpx.get(f"{root}/metrics", timeout=60).raise_for_status().text
        except httpx.HTTPError as error:
            raise EvalError(f"{root}/metrics does not answer ({one_line(error)}): audits are counted there") from None
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        own = [sample for sample in samples if sample.name.startswith(PREFIX)]
        return [
            (sample.name.removeprefix(PREFIX).removesuffix("_total"), sample.labels, sample.value) for sample in own
        ]

    def _counts(self, policy: str) -> Counter[tuple[str, str]]:
        """Return the counts of a policy: by metric, and share kept or reason of a skip."""
        counts: Counter[tuple[str, str]] = Counter()
        for name, labels, value in self._metrics():
            if labels["policy"] == policy:
                counts[name, labels.get("kept") or labels.get("reason") or ""] += int(value)
        return counts

    def ask(
        self, contender: Contender, questions: Sequence[Question], salt: str, advance: Callable[[int], object]
    ) -> Audit:
        """Answer questions under a contender and wait for the audits of all answers. As `AuditedEngine.ask`.

        Raises:
            EvalError: the server refuses a request, audits no answer whatever it is, or audits answers of others at the
                same time.
        """
        salt = f"{salt} {uuid.uuid4().hex}"  # another run may have asked the same
        before = self._counts(contender.config.name)

        def one(question: Question) -> Held:
            held = self._one(contender, question, salt)
            advance(1)
            return held

        with ThreadPoolExecutor(max_workers=self._batch) as pool:
            held = list(pool.map(one, questions))
        audit = _audit_of(self._settled(contender, before, len(questions)))
        _refuse_unheard(audit, self._http.url)
        audit.hold(held)
        return audit

    def _one(self, contender: Contender, question: Question, salt: str) -> Held:
        xargs = contender.xargs | {"kv_usage": 1}
        body = PLAIN | {"vllm_xargs": xargs, "cache_salt": salt}
        common = {"model": self.model, "temperature": 0, "max_tokens": question.max_tokens, "extra_body": body}
        client = self._http.client
        what = f"{contender}, {question.place}"
        if self._chat or not isinstance(question.prompt, str):
            create = client.chat.completions.create
            reply = self._http.ask(lambda: create(**common, messages=question.messages), what)
        else:
            reply = self._http.ask(lambda: client.completions.create(**common, prompt=question.prompt), what)
        self._http.check_end(reply.choices[0].finish_reason, reply.usage.completion_tokens, question.max_tokens)
        usage = reply.usage.kv_usage
        if usage["policy"] != contender.config.name:
            raise EvalError(
                f"{self._http.url} served {what} under {usage['policy']!r}; expected {contender.config.name!r}: serve "
                "without what changes the policy of requests"
            )
        prompt = reply.usage.prompt_tokens
        return Held(
            prompt, prompt + reply.usage.completion_tokens, usage["budget_tokens"], usage["peak_resident_tokens"]
        )

    def _settled(self, contender: Contender, before: Counter[tuple[str, str]], asked: int) -> Counter[tuple[str, str]]:
        """Return what a policy's counts grew by, once all its answers are audited or skipped."""
        done, since = -1, time.monotonic()
        while True:
            grown = self._counts(contender.config.name)
            grown.subtract(before)
            now = sum(
                count for (name, _), count in grown.items() if name in ("requests", "sampled_requests", "skipped")
            )
            if now == asked:
                return grown
            if now > asked:
                raise EvalError(
                    f"{self._http.url} audited {now} answers under {contender.config.name}, of which {asked} were "
                    "asked for here; expected no other clients: try again when there are none"
                )
            if now > done:
                done, since = now, time.monotonic()
            elif time.monotonic() - since > STILL:
                raise EvalError(
                    f"{self._http.url} audited {now} of {asked} answers under {contender} and then none for "
                    f"{STILL:.0f} s; expected all: its log may say why"
                )
            time.sleep(LOOK)

    def close(self) -> None:
        self._http.close()


def _refuse_unheard(audit: Audit, where: str) -> None:
    """Refuse to go on where no answer was audited, for a reason that all others share.

    Raises:
        EvalError: none was.
    """
    if audit.skipped and not audit.lost and not audit.kept and audit.skipped.keys() <= OF_ALL:
        why = ", ".join(audit.skipped)
        raise EvalError(
            f"{where} audited none of {audit.skipped.total()} greedy answers ({why}); expected audits: serve "
            "without what adds that to requests, such as --logits-processors"
        )


def _audit_of(grown: Counter[tuple[str, str]]) -> Audit:
    """Return what counts say; they do not tell token agreement by answer."""
    audit = Audit(skipped=Counter({why: count for (name, why), count in grown.items() if name == "skipped" and count}))
    for (name, kept), n in grown.items():
        if name == "requests":
            scores = audit.kept if kept == CONTROL else audit.lost
            for measure, right in (("identical", grown["identical", kept]), ("unchanged", n - grown["changed", kept])):
                scores[measure] += [1.0] * right + [0.0] * (n - right)
    return audit
