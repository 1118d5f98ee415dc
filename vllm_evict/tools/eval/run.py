"""Runs the matrix: every task, length and depth under every policy and budget, one engine for a set of policies."""

import datetime
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...config import KVPolicyConfig
from . import EvalError, external, ruler
from .backends import SETTINGS, Answer, Offline, engine_config
from .policies import Contender, contenders, servers
from .progress import Progress
from .prompts import Prompts
from .rows import ResultRows, Row, key_of
from .score import score
from .served import Http
from .tasks import ALONE, MOST_TURNS, NLL, SEVERAL, TASKS, Sample, make
from .words import HAYSTACKS, Filler

#: RULER's tasks that are made from a folder of texts.
RULER = [f"ruler/{subset}" for subset in ruler.SUBSETS]


@dataclass(frozen=True)
class RunOptions:
    """The options of a run; `cli.py` explains each."""

    model: str
    out: Path
    tasks: tuple[str, ...]
    policies: str
    budgets: tuple[int | float, ...] = ()
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    samples: int = 4
    settings: tuple[str, ...] = ()
    turns: int = 4
    haystacks: tuple[str, ...] = ("grammar",)
    url: str | None = None
    tokenizer: str | None = None
    chat: bool = True
    seed: int = 0
    sink: int | None = None
    recent: int | None = None
    buffer: int | None = None
    chunk: int = 256
    block_size: int | None = None
    batch: int = 8
    limit: int | None = None
    engine_args: dict[str, Any] = field(default_factory=dict)

    @property
    def backend(self) -> str:
        return "http" if self.url else "offline"

    @property
    def engine(self) -> dict[str, Any]:
        """Arguments of an engine in this process."""
        return self.engine_args | ({"tokenizer": self.tokenizer} if self.tokenizer else {})


@dataclass(frozen=True)
class Case:
    """One sample, made when it is needed; external samples differ in `prompt`, not in seed.

    Attributes:
        later: of a session, the depths of the facts that its later turns ask for; None: one question, no session.
        haystack: a name in `HAYSTACKS`.
    """

    task: str
    length: int
    depth: float | None
    index: int
    sample: Callable[[], Sample]
    prompt: str | None = None
    later: tuple[float, ...] | None = None
    haystack: str = "grammar"


@dataclass(frozen=True)
class Job:
    """One engine: how to start it, its setting, its contenders, and `full` if the engine can serve it."""

    start: Callable[[], Offline | Http]
    setting: str
    contenders: list[Contender]
    full: Contender | None = None


@dataclass(frozen=True)
class Cell:
    """One request before it runs: the identifying fields of its rows, one a turn, its contender and its case."""

    rows: list[Row]
    contender: Contender
    case: Case

    @property
    def keys(self) -> set[str]:
        return {row["key"] for row in self.rows}


def run(args: RunOptions, say: Callable[[str], None]) -> list[Row]:
    """Run the rows that are missing in the folder, and return all its rows.

    Args:
        args: the matrix.
        say: prints a line for the user.

    Raises:
        EvalError: the options are wrong; finished rows are kept.
    """
    settings = args.settings or ("served" if args.url else "agnostic",)
    check(args, settings)
    if args.url:
        only_names(args.policies)
    # Over HTTP all options but name and budget are the server's, also classes of heads.
    sizes = {} if args.url else {"sink": args.sink, "recent": args.recent, "buffer": args.buffer}
    wanted = contenders(args.policies, args.budgets, **sizes, pattern=("1",) if args.url else ())
    if "turns" in settings and (shadows := [each for each in wanted if each.config.policy.reconstructs]):
        raise EvalError(f"turns got {shadows[0]}, which does not score sessions: leave it out, or take other settings")
    if args.url:
        connect = functools.partial(Http, args.url, args.model, batch=args.batch, chat=args.chat)
        jobs = [Job(connect, setting, wanted) for setting in settings]
        count = Prompts(args.tokenizer, args.chat).count if args.tokenizer else connect().count
    else:
        config = engine_config(args.model, args.engine)
        args = replace(args, block_size=args.block_size or config.cache_config.block_size)
        prompts = Prompts(config, args.chat, args.engine.get("chat_template"))
        max_len = config.model_config.max_model_len
        jobs, count = offline_jobs(args, settings, wanted, prompts, max_len), prompts.count
    rows = ResultRows(args.out, args.model)
    if rows.mended:
        say(f"{rows.path}: its last line was only half written, and is dropped")
    cases = all_cases(args, count)
    if not args.url:
        _check_lengths(cases, prompts, max_len)
    every = [(job, list(cells_of(args, job, cases))) for job in jobs]
    todo = [(job, [cell for cell in cells if not cell.keys <= rows.done]) for job, cells in every]
    total, left = (sum(len(cell.rows) for _, cells in part for cell in cells) for part in (every, todo))
    if left < total:
        say(f"{rows.path}: {total - left} of {total} rows are there already")
    progress = Progress(say, "row")
    progress.total = left
    try:
        for number, (job, cells) in enumerate(todo, 1):
            if cells:
                if not args.url:
                    engine = f"engine {number} of {len(todo)}: {job.setting}"
                    progress.begin(f"starting vLLM on {args.model}, {engine}", told=True)
                _work(args, job, cells, rows, progress)
    finally:
        progress.close()
    return rows.rows


def _work(args: RunOptions, job: Job, cells: list[Cell], rows: ResultRows, progress: Progress) -> None:
    """Start a job's engine and run its cells, batch by batch."""
    backend = job.start()
    try:
        for cell in {cell.case.task: cell for cell in reversed(cells)}.values():
            backend.answer([cell.case.sample()], cell.contender)  # warm-up for the timing of the first rows
        measured: set[tuple[Contender, int, str]] = set()
        runs = list(batches(cells, args.batch))
        if isinstance(backend, Offline) and backend.shares:
            # A prompt's beginning is still cached when the next contender asks it.
            order = {case: i for i, case in enumerate(dict.fromkeys(cell.case for cell in cells))}
            runs.sort(key=lambda batch: order[batch[0].case])
        for batch in runs:
            contender, case = batch[0].contender, batch[0].case
            progress.begin(f"{job.setting}, {contender}, {case.task}")
            samples = [cell.case.sample() for cell in batch]
            start = time.perf_counter()
            answers = backend.answer(samples, contender)
            seconds = (time.perf_counter() - start) / sum(len(cell.rows) for cell in batch)
            about = backend.about | {"seconds": seconds}
            if case.task != "ppl" and (key := (contender, case.length, case.haystack)) not in measured:
                measured.add(key)
                about |= _at_equal_memory(args, job, backend, samples, answers, contender)
            filled = [row for parts in zip(batch, samples, answers, strict=True) for row in fill(*parts, about)]
            # Of a session that was written in part, all turns run again.
            rows.append([row for row in filled if row["key"] not in rows.done])
            progress.update(len(filled))
    finally:
        backend.close()


def _at_equal_memory(
    args: RunOptions,
    job: Job,
    backend: Offline | Http,
    samples: list[Sample],
    answers: list[Answer],
    contender: Contender,
) -> Row:
    """Throughput of a batch in a pool that its budgets fill, and that of `full` in the same pool, as fields of rows.

    The pool has room for the budget and a chunk of every request, and for the longest prompt with its answer. There are
    no fields for requests without a budget, for engines that cannot serve `full` or run in a process of their own, for
    sessions (which hold their blocks while they wait), and for prompts that are reconstructed or begin in the prefix
    cache.
    """
    if job.full is None or not isinstance(backend, Offline) or backend.scheduler is None or job.setting == "turns":
        return {}
    if backend.shares or contender.config.policy.reconstructs or not answers[0].budget_tokens:
        return {}
    longest = max(
        (answer.prompt_tokens or 0) + sample.max_tokens for answer, sample in zip(answers, samples, strict=True)
    )
    budgets = sum((answer.budget_tokens or 0) + args.chunk for answer in answers)
    assert args.block_size is not None  # as for all engines of this process
    tokens = max(budgets, longest + args.block_size)
    with backend.pool_of(tokens):
        own, full = (backend.answer(samples, each)[0].tokens_per_s for each in (contender, job.full))
    return {"pool": {"tokens": tokens, "tokens_per_s": own, "full_tokens_per_s": full}}


def unsuited(task: str, setting: str, haystack: str = "grammar") -> str:
    """Return why a task (a built-in one, or a benchmark's name) cannot run in a setting and a haystack; empty if it
    can.
    """
    if haystack == "pairs" and task in ALONE:
        return f"documents of {', '.join(ALONE)} have a single fact, or no question"
    if setting == "turns" and task not in SEVERAL:
        return f"only documents of {', '.join(SEVERAL)} have a fact for each question"
    if setting == "agnostic" and task not in TASKS:
        return "its prompts are of any length, so no chunk ends before the question"
    if setting == "aware" and task == "ppl":
        return "it has no question, and a single chunk is read before anything is evicted"
    return ""


def check(args: RunOptions, settings: tuple[str, ...]) -> None:
    """Refuse wrong options before anything starts.

    Raises:
        EvalError: naming what is allowed.
    """
    for haystack in args.haystacks:
        if haystack not in HAYSTACKS:
            raise EvalError(f"--haystacks got {haystack!r}; expected some of: {', '.join(HAYSTACKS)}")
    if not args.haystacks:
        raise EvalError(f"--haystacks got none; expected some of: {', '.join(HAYSTACKS)}")
    if not args.tasks:
        raise EvalError(f"no task to run: give --tasks, such as {','.join(TASKS)}")
    for setting in settings:
        if setting not in SETTINGS:
            raise EvalError(f"unknown setting {setting!r}; choose from: {', '.join(SETTINGS)}")
    for task in args.tasks:
        name, _, source = task.partition("=")
        benchmark, _, subset = name.partition("/")
        if source and benchmark not in external.BENCHMARKS:
            raise EvalError(f"unknown benchmark {benchmark!r}; there are: {', '.join(external.BENCHMARKS)}")
        if subset and (name not in RULER or not ruler.is_texts(source)):
            raise EvalError(f"{task} got a part of a benchmark; expected {', '.join(RULER)}, of a folder of .txt files")
        if not source and name in external.BENCHMARKS:
            raise EvalError(f"benchmark {name!r} needs its data: {name}=FILE or {name}=hf:OWNER/NAME/CONFIG")
        if not source and name not in TASKS:
            known = ", ".join([*TASKS, *(f"{benchmark}=FILE" for benchmark in external.BENCHMARKS)])
            raise EvalError(f"unknown task {name!r}; there are: {known}")
        if all(reasons := [unsuited(name, setting) for setting in settings]):
            fitting = ", ".join(setting for setting in SETTINGS if not unsuited(name, setting))
            why = "; ".join(dict.fromkeys(reasons))
            raise EvalError(f"{name} cannot be {' or '.join(settings)} ({why}): --settings {fitting}")
        if not source and set(args.haystacks) == {"pairs"} and (why := unsuited(name, "aware", "pairs")):
            raise EvalError(f"haystack 'pairs' got {name}; expected tasks of several facts ({why}); leave {name} out")
    sizes = {"lengths": args.lengths, "samples": (args.samples,), "batch": (args.batch,), "chunk": (args.chunk,)}
    if args.limit is not None:
        sizes["limit"] = (args.limit,)
    for name, values in sizes.items():
        if not values or min(values) < 1:
            raise EvalError(f"--{name} must be at least 1")
    if "turns" in settings:
        if args.url:
            raise EvalError("turns needs sessions (streaming input), which no server has over HTTP: leave --url out")
        if not 1 <= args.turns <= MOST_TURNS:
            raise EvalError(f"--turns got {args.turns}; expected 1 to {MOST_TURNS}")
    if "agnostic" in settings or "turns" in settings:
        for length in args.lengths:
            if length % args.chunk:
                raise EvalError(f"length {length} is no multiple of the prefill chunk of {args.chunk}: see --chunk")
        if args.url and not args.tokenizer:
            raise EvalError("agnostic over HTTP has to count exactly: give the server's --tokenizer and its --chunk")
    if not args.depths or not all(0 <= depth <= 1 for depth in args.depths):
        raise EvalError("depths are shares of the context, from 0 (its start) to 1 (its end)")


def only_names(policies: str) -> None:
    """Refuse files and objects of policies, for a server.

    Raises:
        EvalError: naming what a request may pick.
    """
    if any(mark in policies for mark in "{./"):
        raise EvalError("over HTTP a request picks a policy by name, all other options are the server's: use names")


def _check_lengths(cases: list[Case], prompts: Prompts, max_len: int) -> None:
    """Refuse prompts that do not fit into the model, by one sample of each task and length."""
    for case in {(case.task, case.length, case.later is None, case.haystack): case for case in cases}.values():
        tokens = sum(len(prompts.ids(turn)) + turn.max_tokens for turn in case.sample().turns)
        if tokens > max_len:
            raise EvalError(
                f"{case.task} at length {case.length}: prompt and answer are {tokens} tokens, the model has {max_len}: "
                f"take a shorter length"
            )


def offline_jobs(
    args: RunOptions, settings: tuple[str, ...], wanted: list[Contender], prompts: Prompts, max_len: int
) -> list[Job]:
    """Return one engine for each setting and set of policies that one server can serve."""
    full = Contender("full", KVPolicyConfig(name="full"))
    assert args.block_size is not None  # as for all engines of this process
    start = functools.partial(
        Offline,
        args.model,
        prompts=prompts,
        chunk=args.chunk,
        batch=args.batch,
        block_size=args.block_size,
        longest=max_len,
        engine_args=args.engine,
    )
    return [
        Job(functools.partial(start, server, setting), setting, served, full if "full" in server.allowed else None)
        for setting in settings
        for server, served in servers(wanted, max_len, args.block_size)
    ]


def _itself(sample: Sample) -> Sample:
    return sample


def all_cases(args: RunOptions, count: Callable[[str], int]) -> list[Case]:
    """Return every sample of every task. Reads external data, so that a wrong row is refused before anything runs."""
    found: list[Case] = []
    for task in args.tasks:
        name, _, source = task.partition("=")
        if source and name.startswith("ruler") and ruler.is_texts(source):
            found += _of_texts(args, name, source, count)
        elif source:
            for sample in external.load(name, source, args.limit, args.seed):
                made = functools.partial(_itself, sample)
                found.append(Case(sample.task, sample.length, None, sample.index, made, sample.sha256))
        else:
            for haystack, length in itertools.product(args.haystacks, args.lengths):
                found += _built_in(args, name, haystack, length, count)
    return found


def _of_texts(args: RunOptions, name: str, folder: str, count: Callable[[str], int]) -> Iterator[Case]:
    """Yield the cases of one task of RULER, or of all, in a folder of texts."""
    digest = ruler.read(folder).sha256
    for task, length, index in itertools.product([name] if "/" in name else RULER, args.lengths, range(args.samples)):
        maker = functools.partial(ruler.make, task.partition("/")[2], folder, length, index, args.seed, count)
        yield Case(task, length, None, index, functools.cache(maker), digest)


def _built_in(args: RunOptions, name: str, haystack: str, length: int, count: Callable[[str], int]) -> Iterator[Case]:
    """Yield the cases of one task, haystack and length."""

    def case(depth: float, index: int, later: tuple[float, ...] | None = None) -> Case:
        filler = _filler(haystack)
        maker = functools.partial(
            make, name, length, depth, index, args.seed, count, filler, later, haystack == "pairs"
        )
        own = None if name == "ppl" else depth
        return Case(name, length, own, index, functools.cache(maker), later=later, haystack=haystack)

    for depth in (0.0,) if name == "ppl" else args.depths:
        for index in range(args.samples * (len(args.depths) if name == "ppl" else 1)):
            yield case(depth, index)
    if "turns" in args.settings and name in SEVERAL:
        for first, index in itertools.product(range(len(args.depths)), range(args.samples)):
            # Each turn asks for a fact at the next depth, so over all documents each turn has each depth.
            depth, *later = (args.depths[(first + turn) % len(args.depths)] for turn in range(args.turns))
            yield case(depth, index, tuple(later))


@functools.cache
def _filler(haystack: str) -> Filler:
    return HAYSTACKS[haystack]()


def cells_of(args: RunOptions, job: Job, cases: list[Case]) -> Iterator[Cell]:
    """Yield the cells of a job, with their keys."""
    for contender in job.contenders:
        for case in cases:
            if unsuited(case.task, job.setting, case.haystack) or (case.later is None) == (job.setting == "turns"):
                continue
            row = {
                "task": case.task,
                "setting": job.setting,
                "length": case.length,
                "depth": case.depth,
                "index": case.index,
                "seed": args.seed,
                "policy": contender.label,
                "budget": contender.xargs.get("kv_budget") if args.url else contender.budget,
                # Over HTTP the other options are the server's, and not known.
                "policy_config": {"name": contender.config.name} if args.url else contender.options,
                "model": args.model,
                "backend": args.backend,
                "engine_args": {"url": args.url} if args.url else {"block_size": args.block_size} | args.engine_args,
                "chat": args.chat,
                "chunk": args.chunk if job.setting in ("agnostic", "turns") else None,
                "prompt": case.prompt,
            } | ({} if case.haystack == "grammar" else {"haystack": case.haystack})
            rows = [row]
            if case.later is not None:
                depths = [case.depth, *case.later]
                rows = [row | {"depth": depths[i], "turn": i + 1, "depths": depths} for i in range(len(depths))]
            yield Cell([{"key": key_of(row)} | row for row in rows], contender, case)


def batches(cells: list[Cell], size: int) -> Iterator[list[Cell]]:
    """Runs of at most `size` cells with one contender, task, length and haystack: each has one throughput."""

    def alike(cell: Cell) -> tuple[Any, ...]:
        return cell.contender, cell.case.task, cell.case.length, cell.case.haystack

    for _, group in itertools.groupby(cells, alike):
        every = list(group)
        yield from (every[i : i + size] for i in range(0, len(every), size))


def fill(cell: Cell, sample: Sample, answer: Answer, about: dict[str, Any]) -> list[Row]:
    """Return the whole rows: the arguments to repeat them, the answers, and their costs."""
    share = None
    if cell.rows[0]["backend"] == "offline":
        size, ranks = (about["engine"].get(name, 1) for name in ("block_size", "tensor_parallel_size"))
        share = cell.contender.share(answer.prompt_tokens or 0, size, ranks)
    turns = zip(cell.rows, sample.turns, answer.turns, strict=True)
    return [_filled(row, asked, said, share) | about for row, asked, said in turns]


def _filled(row: Row, sample: Sample, answer: Answer, share: float | None) -> Row:
    return row | {
        "prompt_sha256": sample.sha256,
        "metric": sample.metric,
        "question": sample.question,
        "expected": list(sample.answers),
        "answer": answer.text,
        "score": answer.nll if sample.metric == NLL else score(answer.text, sample),
        "prompt_tokens": answer.prompt_tokens,
        "output_tokens": answer.output_tokens,
        "budget_tokens": answer.budget_tokens,
        "share": share,
        "peak_blocks": answer.peak_blocks,
        "evicted_tokens": answer.evicted_tokens,
        "block_size": answer.block_size,
        "ttft_s": answer.ttft_s,
        "tokens_per_s": answer.tokens_per_s,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
