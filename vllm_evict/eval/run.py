"""The matrix: every task, length and depth under every policy and budget, with one engine start a set of policies."""

import datetime
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from . import EvalError, external
from .backends import SETTINGS, Answer, Http, Offline, check_model, model_length
from .policies import Contender, contenders, servers
from .prompts import Prompts
from .rows import Row, Rows, key_of
from .score import METRICS, score
from .tasks import NLL, TASKS, Sample, make
from .words import Filler


@dataclass(frozen=True)
class Plan:
    """All that a run is told; what each means is in `cli.py`."""

    model: str
    out: Path
    tasks: tuple[str, ...]
    policies: str
    budgets: tuple[int | float, ...] = ()
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 4
    settings: tuple[str, ...] = ()
    url: str | None = None
    tokenizer: str | None = None
    chat: bool = True
    seed: int = 0
    sink: int = 32
    recent: int = 32
    buffer: int = 0
    chunk: int = 256
    block_size: int = 32
    batch: int = 8
    limit: int | None = None
    engine_args: dict[str, Any] = field(default_factory=dict)

    @property
    def backend(self) -> str:
        return "http" if self.url else "offline"


@dataclass(frozen=True)
class Case:
    """One sample, not made yet."""

    task: str
    length: int
    depth: float | None
    index: int
    sample: Callable[[], Sample]


def run(plan: Plan, say: Callable[[str], None]) -> list[Row]:
    """Do what is not done yet and return all rows of the folder.

    Args:
        plan: the matrix.
        say: takes lines for the user.

    Raises:
        EvalError: something in the plan cannot be; rows that are done are kept.
    """
    settings = plan.settings or ("served" if plan.url else "agnostic",)
    check(plan, settings)
    wanted = contenders(
        plan.policies,
        plan.budgets,
        sink=plan.sink,
        recent=plan.recent,
        buffer=plan.buffer,
        # A server's block size is its own business, and so is what it inherits from its own policy.
        block_size=1 if plan.url else plan.block_size,
    )
    if plan.url:
        _only_names(wanted)
    else:
        check_model(plan.model)
    rows = Rows(plan.out, plan.model)
    if rows.mended:
        say(f"{rows.path}: its last line was only half written, and is dropped")
    prompts = None if plan.url and not plan.tokenizer else Prompts(plan.tokenizer or plan.model, plan.chat)
    engines = http_engines(plan, wanted, settings) if plan.url else offline_engines(plan, wanted, settings, prompts)
    first = next(engines) if plan.url else None
    count = prompts.count if prompts else first.start().count
    cases = list(all_cases(plan, count))
    total = len(settings) * len(wanted) * len(cases)
    todo = [first, *engines] if first else list(engines)
    missing = [[c for c in engine.rows(cases) if c[0]["key"] not in rows.done] for engine in todo]
    left = sum(map(len, missing))
    if left < total:
        say(f"{rows.path}: {total - left} of {total} rows are there already")
    with tqdm(total=total, initial=total - left, unit="row", disable=None) as bar:
        for engine, cells in zip(todo, missing, strict=True):
            if not cells:
                continue
            try:
                for group in batches(cells, plan.batch):
                    bar.set_description(f"{group[0][0]['setting']} {group[0][1]} {group[0][0]['task']}")
                    rows.append(engine.answer(group))
                    bar.update(len(group))
            finally:
                engine.close()
    return rows.rows
