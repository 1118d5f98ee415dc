"""The smallest budget of each policy that meets a target on a user's own prompts, as audits see it.

All prompts run under `full` first: the control. Then budgets of a policy are searched on one half of the prompts, and
what the search finds is confirmed on the other half (`search`). A run goes on where it was stopped: each policy, budget
and half is a row of a file.
"""

import datetime
import functools
import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...config import KVPolicyConfig
from ..eval import EvalError
from ..eval.backends import engine_config, versions
from ..eval.policies import Contender, contenders, servers
from ..eval.progress import Progress
from ..eval.prompts import Prompts
from ..eval.questions import Question, halves, load
from ..eval.rows import ResultRows, Row, key_of
from ..eval.run import only_names
from .audited import MEASURES, Audit, AuditedEngine, AuditedServer, auditing
from .search import CHAIN, Figure, chain, confirmed, least, most_measured, smallest

FILE = "tune.jsonl"
TARGET = 0.95
FULL = Contender("full", KVPolicyConfig(name="full"))
#: Parts of the prompts.
CONTROL, SEARCH, CONFIRM = "control", "search", "confirm"


@dataclass(frozen=True)
class TuneOptions:
    """The options of a run; `cli.py` explains each."""

    prompts: Path
    out: Path
    model: str | None = None
    url: str | None = None
    target: float | None = None
    measure: str = "identical"
    policies: str = "h2o,snapkv,keydiff"
    budgets: tuple[int | float, ...] = tuple(n / 20 for n in range(1, 20))
    budget_bytes: int | None = None
    max_tokens: int = 256
    batch: int = 16
    chat: bool = True
    engine_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """Figures of one policy, and the budget that they confirm.

    Attributes:
        contender: the smallest budget that was confirmed; if none was, the one that the search found; if none met the
            target in the search, the largest.
        row: of that budget, on the half that confirms, or that was searched.
        confirmed: whether the half that confirms says that the target is met.
        needed: prompts with which it says so four times of five; None if no number would do, or none is needed.
    """

    contender: Contender
    row: Row
    confirmed: bool
    needed: int | None = None


@dataclass(frozen=True)
class Result:
    """A run: its rows, what was found of each policy, and the best of these; None if no budget met the target."""

    args: TuneOptions
    model: str
    target: float
    rows: list[Row]
    control: Row
    outcomes: list[Outcome]

    @property
    def best(self) -> Outcome | None:
        """The least memory, of confirmed outcomes if there are any, else of those that more prompts may confirm; for a
        number of bytes the best answers."""
        if self.args.budget_bytes is not None:
            return next(each for each in self.outcomes if each.row["part"] == CONFIRM)
        met = [each for each in self.outcomes if each.row["part"] == CONFIRM and self.figure(each.row).n]

        def worse(outcome: Outcome) -> tuple[bool, bool, float, float]:
            hopeless = not outcome.confirmed and outcome.needed is None
            return not outcome.confirmed, hopeless, outcome.row["memory"], -self.figure(outcome.row).share

        return min(met, key=worse, default=None)

    def figure(self, row: Row) -> Figure:
        """Return the scores of a row by the measure of the run."""
        return figure_of(row, self.args.measure)


def figure_of(row: Row, measure: str) -> Figure:
    """Return the scores of answers that lost blocks; of the control, of all answers."""
    scores = row["kept" if row["part"] == CONTROL else "lost"].get(measure, ())
    return Figure(tuple(scores), sum(row["skipped"].values()))


def run(args: TuneOptions, say: Callable[[str], None]) -> Result:
    """Measure what is missing in the folder, and return what was found.

    Args:
        args: the options.
        say: prints a line for the user.

    Raises:
        EvalError: the options are wrong, or their target is above the control; what was measured is kept.
    """
    target = check(args)
    questions = load(args.prompts, args.max_tokens)
    tuner = _served(args, questions) if args.url else _offline(args, questions)
    try:
        return tuner.run(target, say)
    finally:
        tuner.close()


def check(args: TuneOptions) -> float:
    """Refuse wrong options before anything starts, and return the target.

    Raises:
        EvalError: naming what is allowed.
    """
    if args.url is None and args.model is None:
        raise EvalError("tune got neither --model nor --url; expected the model, or a server that audits all answers")
    if args.measure not in MEASURES:
        raise EvalError(f"--measure got {args.measure!r}; expected one of: {', '.join(MEASURES)}")
    for option, value in (("--batch", args.batch), ("--max-tokens", args.max_tokens)):
        if value < 1:
            raise EvalError(f"{option} got {value}; expected 1 or more")
    if not args.budgets or len({isinstance(budget, float) for budget in args.budgets}) > 1:
        raise EvalError("--budgets got none, or both tokens and ratios; expected one or more of the same kind")
    if args.url:
        only_names(args.policies)
        for given, option, why in (
            (args.measure == "tokens", "--measure tokens", "its metrics do not tell tokens by answer"),
            (args.budget_bytes is not None, "--budget-bytes", "it does not tell the bytes of a token"),
            (bool(args.engine_args), "--engine-args", "they are the server's own"),
        ):
            if given:
                raise EvalError(f"a server got {option}; {why}: leave {option} out, or give --model without --url")
    if args.budget_bytes is not None and args.target is not None:
        raise EvalError(
            "--budget-bytes got a --target too; expected one: the best for so much memory, or the least for it"
        )
    if args.budget_bytes is not None and args.budget_bytes < 1:
        raise EvalError(
            f"--budget-bytes got {args.budget_bytes}; expected 1 or more, the bytes of a request's KV cache"
        )
    if args.target is not None and not 0 < args.target < 1:
        raise EvalError(
            f"--target got {args.target:g}; expected a share above 0 and below 1, which prompts can confirm"
        )
    return TARGET if args.target is None else args.target


def wanted(args: TuneOptions, budgets: Sequence[int | float]) -> dict[str, list[Contender]]:
    """Return label -> contenders, smallest budget first; without `full`, the control.

    Raises:
        EvalError: no policy is left, or two have one label.
    """
    found: dict[str, list[Contender]] = {}
    for each in contenders(args.policies, sorted(set(budgets))):
        if each.config.name == "full":
            continue
        own = found.setdefault(each.label, [])
        if own and own[0].options != each.options:
            raise EvalError(
                f"--policies got two that are shown as {each.label!r}; expected files with names of their own"
            )
        own.append(each)
    if not found:
        raise EvalError("--policies got full alone, which is the control; expected policies that evict, such as h2o")
    return found


class Tuner:
    """Runs one args.

    Args:
        args: the options.
        model: name in the rows.
        questions: the prompts.
        policies: label -> contenders.
        starts: how to start each backend, and the labels that it serves; `full` is one of them.
    """

    def __init__(
        self,
        args: TuneOptions,
        model: str,
        questions: list[Question],
        policies: dict[str, list[Contender]],
        starts: list[tuple[Callable[[], AuditedEngine | AuditedServer], set[str]]],
    ):
        self.args, self.model, self.policies, self._starts = args, model, policies, starts
        search, confirm = halves(questions)
        self.parts = {CONTROL: questions, SEARCH: search, CONFIRM: confirm}
        prompts = hashlib.sha256("".join(sorted(each.sha256 for each in questions)).encode()).hexdigest()
        #: What all rows of a folder have in common.
        self._same = {
            "prompts": prompts,
            "chat": args.chat,
            "engine_args": args.engine_args,
            "url": args.url,
            "batch": args.batch,
            "versions": {} if args.url else versions(),
        }
        self.rows = ResultRows(args.out, model, FILE)
        for row in self.rows.rows:
            if others := [name for name, value in self._same.items() if row["same"].get(name) != value]:
                raise EvalError(
                    f"{self.rows.path} was measured with other {', '.join(others)}; expected the same, to go on there: "
                    "give them, or another --out"
                )
        self._backend: AuditedEngine | AuditedServer | None = None
        self._running: Callable[[], AuditedEngine | AuditedServer] | None = None
        self._progress: Progress  # of `run`

    def close(self) -> None:
        """Stop what was started."""
        if self._backend is not None:
            self._backend.close()
        self._backend = self._running = None

    def backend(self, label: str) -> AuditedEngine | AuditedServer:
        """Return the backend that serves a policy, started if it is not running."""
        number, start, labels = next((n, *each) for n, each in enumerate(self._starts, 1) if label in each[1])
        if start is not self._running or self._backend is None:
            self.close()
            if self.args.url is None:
                which = f", engine {number} of {len(self._starts)}" * (len(self._starts) > 1)
                self._progress.begin(f"starting vLLM on {self.model} for {', '.join(sorted(labels))}{which}", told=True)
            self._backend, self._running = start(), start
        return self._backend

    def measure(self, contender: Contender, part: str) -> Row:
        """Return the row of a contender on a part of the prompts; measure it if it is not there."""
        args, questions = self.args, self.parts[part]
        row = {
            "task": "tune",
            "model": self.model,
            "policy": contender.label,
            "policy_config": contender.options,
            "budget": contender.budget,
            "part": part,
            "setting": part,
            "prompt": self._same["prompts"],
            "chat": args.chat,
            "engine_args": args.engine_args,
            "backend": args.url or "offline",
        }
        row["key"] = key = key_of(row)
        if (known := next((each for each in self.rows.rows if each["key"] == key), None)) is not None:
            return known
        backend = self.backend(contender.label)
        self._progress.begin(f"{contender}, {part}")
        start = time.perf_counter()
        audit: Audit = backend.ask(contender, questions, key, self._progress.update)
        row |= {"same": self._same, "asked": len(questions), **vars(audit), **backend.about}
        row |= {"score": figure_of(row, "identical").share, "seconds": time.perf_counter() - start}
        row["time"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self.rows.append([row])
        figure = figure_of(row, args.measure)
        self._progress.say(
            f"{contender}, {part}: {sum(figure.scores):.4g} of {figure.n} answers {args.measure}"
            f"{' of requests that lost blocks' * (part != CONTROL)}, {row['seconds']:.0f} s{self._progress.left}"
        )
        return row

    def run(self, target: float, say: Callable[[str], None]) -> Result:
        """Run the control, then each policy."""
        args = self.args
        if args.budget_bytes is None and not self._enough(target):
            say(
                f"{len(self.parts[CONTROL])} prompts are too few to confirm {target:g}, even if no answer of a half "
                f"differs: that takes {2 * least(target)}"
            )
        if self.rows.rows:
            say(f"{self.rows.path}: {len(self.rows.rows)} cells are there already")
        self._progress = Progress(say, "prompt")
        try:
            if args.budget_bytes is not None:
                self._tokens_of(FULL.label, args.budget_bytes)  # refused before anything runs
                self._progress.total = len(self.parts[CONFIRM]) * (len(self.policies) + 1)
            else:
                self._progress.total = sum(map(self._most, self.policies))
            self._progress.total += len(self.parts[CONTROL])
            control = self.measure(FULL, CONTROL)
            self._check_control(control, target)
            outcomes = self._for_bytes(args.budget_bytes) if args.budget_bytes is not None else self._all(target)
        finally:
            self._progress.close()
        # The folder may have rows of policies that had the same names.
        options = {label: tried[0].options for label, tried in self.policies.items()} | {FULL.label: FULL.options}
        rows = [row for row in self.rows.rows if options.get(row["policy"]) == row["policy_config"]]
        return Result(args, self.model, target, rows, control, outcomes)

    def _enough(self, target: float) -> bool:
        """Return whether one half of the prompts could confirm the target."""
        return Figure((1.0,) * len(self.parts[CONFIRM])).confirms(target)

    def _check_control(self, control: Row, target: float) -> None:
        figure = figure_of(control, self.args.measure)
        if not figure.n:
            why = ", ".join(f"{why} {count}" for why, count in control["skipped"].items())
            raise EvalError(f"no answer under full attention could be audited ({why or 'all lost blocks'})")
        if self.args.budget_bytes is None and figure.share < target:
            low, high = figure.interval
            raise EvalError(
                f"--target got {target:g}; expected at most {figure.share:.3f}, the control: of {figure.n} answers "
                f"under full attention so many are {self.args.measure} ({low:.3f} to {high:.3f}), by rounding alone. "
                + self._ways(control, target)
            )

    def _ways(self, control: Row, target: float) -> str:
        """Return how to go on with a control below the target: measures by which it meets the target come first."""
        shares = [(measure, figure_of(control, measure)) for measure in MEASURES if measure != self.args.measure]
        others = sorted((each for each in shares if each[1].n), key=lambda each: not each[1].meets(target))
        said = [f"{measure} {figure.share:.3f}" for measure, figure in others]
        met = [f"--measure {measure}" for measure, figure in others if figure.meets(target)]
        by = f"By other measures the control is {', '.join(said)}. " * bool(said)
        return f"{by}Take {' or '.join([*met, f'a lower target than {target:g}'])}"

    def _all(self, target: float) -> list[Outcome]:
        """Return what is found of each policy."""
        found = []
        # The policies of the backend that runs come first.
        order = [label for _, labels in self._starts for label in self.policies if label in labels]
        for at, label in enumerate(order):
            self._progress.total = self._progress.done + sum(map(self._most, order[at:]))
            found.append(self._policy(self.policies[label], target))
        return found

    def _most(self, label: str) -> int:
        """Return how many prompts a policy is asked at most."""
        searched = most_measured(len(self.policies[label])) * len(self.parts[SEARCH])
        return searched + CHAIN * len(self.parts[CONFIRM])

    def _policy(self, tried: list[Contender], target: float) -> Outcome:
        """Search the budgets of a policy, and confirm what is found."""
        measure = self.args.measure

        def figure(index: int, part: str) -> Figure:
            return figure_of(self.measure(tried[index], part), measure)

        found = smallest(len(tried), lambda index: figure(index, SEARCH).meets(target))
        if found is None:
            return Outcome(tried[-1], self.measure(tried[-1], SEARCH), False)
        order = chain(found, len(tried)) if self._enough(target) else [found]
        # Requests that lose blocks at the budget found. So few at a larger one that they could confirm nothing, or half
        # as many, say nothing of the others: such a budget is no advice, and hides no other one.
        at_found = figure(found, CONFIRM)
        few = max(at_found.n / 2, least(target))
        order = [index for index in order if index == found or figure(index, CONFIRM).n >= few]
        last = confirmed(order, lambda index: figure(index, CONFIRM).confirms(target))
        if last is not None and figure(last, CONFIRM).n:
            return Outcome(tried[last], self.measure(tried[last], CONFIRM), True)
        row = self.measure(tried[found], CONFIRM)
        # A larger budget may have failed: then it has to be confirmed, too.
        needed = [figure(index, CONFIRM).needed(target) for index in order]
        if None in needed or not at_found.n:
            return Outcome(tried[found], row, False)
        # Of a half, some requests lose nothing.
        prompts = math.ceil(2 * max(filter(None, needed)) * row["asked"] / at_found.n)
        return Outcome(tried[found], row, False, prompts)

    def _for_bytes(self, size: int) -> list[Outcome]:
        """Return each policy at a budget of so many bytes on the half that is searched; the best on the other half."""
        searched = {}
        for label in self.policies:
            (contender,) = wanted(self.args, [self._tokens_of(label, size)])[label]
            searched[label] = Outcome(contender, self.measure(contender, SEARCH), False)
        best = max(
            searched.values(),
            key=lambda each: (figure_of(each.row, self.args.measure).share, -each.row["memory"]),
        )
        row = self.measure(best.contender, CONFIRM)
        return [Outcome(best.contender, row, False) if each is best else each for each in searched.values()]

    def _tokens_of(self, label: str, size: int) -> int:
        """Return the budget in tokens, whole blocks of a policy's engine, that takes so many bytes."""
        backend = self.backend(label)
        assert isinstance(backend, AuditedEngine)
        block = backend.about["engine"]["block_size"]
        tokens = int(size / backend.bytes_per_token) // block * block
        if not tokens:
            least = math.ceil(backend.bytes_per_token * block)
            raise EvalError(f"--budget-bytes got {size}; expected {least:,} or more: a block of {block} tokens")
        return tokens


def _served(args: TuneOptions, questions: list[Question]) -> Tuner:
    """Return what tunes on a server."""
    policies = wanted(args, args.budgets)
    every = [each for tried in policies.values() for each in tried]
    assert args.url is not None
    server = AuditedServer(args.url, args.model, every, batch=args.batch, chat=args.chat)
    # What the server grants to no request of a policy is refused here, before hours of others.
    longest = max(questions, key=lambda each: len(str(each.prompt)))
    for tried in policies.values():
        server.ask(tried[-1], [replace(longest, max_tokens=1)], "first", lambda done: None)
    return Tuner(args, server.model, questions, policies, [(lambda: server, {"full", *policies})])


def _offline(args: TuneOptions, questions: list[Question]) -> Tuner:
    """Return what tunes in engines of this process, as few as serve all policies."""
    assert args.model is not None
    config = engine_config(args.model, args.engine_args)
    prompts = Prompts(config, args.chat, args.engine_args.get("chat_template"))
    longest = config.model_config.max_model_len
    for each in questions:
        try:
            tokens = len(prompts.sent(each.prompt))
        except EvalError as error:
            raise EvalError(f"{each.place}: {error}") from None
        if tokens + each.max_tokens > longest:
            raise EvalError(
                f"{each.place}: prompt and answer are {tokens} + {each.max_tokens} tokens, the model has {longest}: "
                "leave the row out, or give fewer --max-tokens, or a larger max_model_len in --engine-args"
            )
    policies = wanted(args, args.budgets if args.budget_bytes is None else [longest])
    block_size = config.cache_config.block_size
    # What a policy sees of a prompt depends on its chunks, which are to be those of a server.
    chunks = {"max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens}
    # Requests of one server have other budgets than its own, as far as that goes.
    largest = [FULL, *(tried[-1] for tried in policies.values())]
    start = functools.partial(
        AuditedEngine,
        args.model,
        prompts=prompts,
        batch=args.batch,
        block_size=block_size,
        engine_args=chunks | args.engine_args,
    )
    starts = []
    for server, served in servers(largest, longest, block_size):
        server = auditing(server)
        engine_config(args.model, args.engine_args | {"kv_policy": server.to_dict()})  # refused before any of them runs
        starts.append((functools.partial(start, server), {each.label for each in served}))
    return Tuner(args, args.model, questions, policies, sorted(starts, key=lambda each: "full" not in each[1]))
