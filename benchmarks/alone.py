"""vLLM's scheduler with a made-up worker, and what `scale.py` measures of it: times, bytecodes, bytes."""

import gc
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests/harness"))

import numpy as np
from loads.engines import make_hasher, make_scheduler
from loads.program import Settings
from vllm import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_evict.core.mechanisms import budget, shared
from vllm_evict.core.plan import PLAN, REPORTS, Report
from vllm_evict.integration.engine.reaching import Reaching
from vllm_evict.integration.engine.scheduler import EvictionMixin

BLOCK, CHUNK = 32, 8192
#: Packages whose objects all requests share.
SHARED = ("vllm_evict.config", "vllm_evict.policies")
#: Requests of a point that end one by one, at most.
ENDS = 64
#: Steps of a case before the next one has its turn.
TURN = 16


class Alone:
    """A scheduler whose worker is made up.

    Args:
        policy: as `KVPolicyConfig.parse` takes it; None: vLLM's own scheduler.
        requests: most at once.
        tokens: most of a request, generated ones included.
        chunk: most tokens of a step.
    """

    def __init__(self, policy: dict | None, requests: int, tokens: int, chunk: int = CHUNK) -> None:
        blocks = requests * (math.ceil(tokens / BLOCK) + 2)
        settings = Settings(policy, BLOCK, chunk, tokens, requests, blocks * (2 if policy else 1))
        self.scheduler: Any = make_scheduler(settings)
        self._chance, self._hasher = np.random.default_rng(0), make_hasher(BLOCK)

    def request(self, number: int, tokens: int) -> Request:
        """Make a request with a prompt of its own, whose blocks no other request hits."""
        params = SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True, detokenize=False)
        prompt = [number, *[0] * (tokens - 1)]
        return Request(f"request-{number}", prompt, params, None, arrival_time=number, block_hasher=self._hasher)

    def add(self, requests: int, tokens: int) -> list[float]:
        """Add requests, each a token longer than the one before, so that they fill blocks in different steps.

        Returns:
            Seconds that each takes.
        """
        made = [self.request(number, tokens + number % BLOCK) for number in range(requests)]
        return [_seconds(self.scheduler.add_request, each)[0] for each in made]

    def step(self) -> tuple[float, float]:
        """Run a step; return the seconds of `schedule` and of `update_from_output`."""
        planned, output = _seconds(self.scheduler.schedule)
        updated, _ = _seconds(self.scheduler.update_from_output, output, self._answer(output))
        return planned, updated

    def count_step(self, within: str = "") -> int:
        """Run a step; return the bytecodes of `schedule` and of `update_from_output` (see `operations`)."""
        planned, output = operations(self.scheduler.schedule, within=within)
        return planned + operations(self.scheduler.update_from_output, output, self._answer(output), within=within)[0]

    def to_decode(self) -> None:
        """Run steps until all requests decode, and each has had a block's worth of steps with all others."""
        while any(request.num_output_tokens < 2 for request in self.scheduler.requests.values()):
            self.step()
        for _ in range(BLOCK):
            self.step()

    def end(self, req_id: str) -> float:
        """End a request; return the seconds that it takes."""
        return _seconds(self.scheduler.finish_requests, req_id, RequestStatus.FINISHED_ABORTED)[0]

    def _answer(self, output: Any) -> ModelRunnerOutput:
        """Return what a worker would: tokens, and the reports that the plan asks for."""
        req_ids, requests = list(output.num_scheduled_tokens), self.scheduler.requests
        sampled = [[1] if _is_computed(requests[req_id]) else [] for req_id in req_ids]
        made = ModelRunnerOutput(req_ids, {req_id: row for row, req_id in enumerate(req_ids)}, sampled)
        if (plan := getattr(output, PLAN, None)) is not None:
            reports = [
                {req_id: self._report(manager, req_id, names) for req_id, names in told.report.items()}
                for manager, told in zip(self.scheduler.kv_managers, plan.groups)
            ]
            setattr(made, REPORTS, reports)
        return made

    def _report(self, manager: Any, req_id: str, names: frozenset[str]) -> Report:
        """Make up the report of one request, of its resident blocks."""
        residence = manager.residents[req_id].residence
        blocks = math.ceil(self.scheduler.requests[req_id].num_computed_tokens / BLOCK)
        index = np.concatenate((residence.pool, np.arange(residence.known, blocks)))
        return Report(index, {name: self._chance.random(len(index)) for name in names})


def _is_computed(request: Request) -> bool:
    return request.num_computed_tokens >= request.num_tokens


def _seconds(function: Callable, *args: Any) -> tuple[float, Any]:
    """CPU seconds of a call, and what it returns."""
    start = time.thread_time()
    result = function(*args)
    return time.thread_time() - start, result


@contextmanager
def watched(alone: Alone) -> Iterator[dict[str, list[float]]]:
    """Time each choice of blocks, each applied action, and what notes its copies, in this context."""
    taken: dict[str, list[float]] = defaultdict(list)

    def timed(owner: Any, name: str, part: str) -> Callable[[], None]:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            result = function(*args, **kwargs)
            taken[part].append(time.thread_time() - start)
            return result

        setattr(owner, name, call)
        return lambda: setattr(owner, name, function)

    scheduler = alone.scheduler
    undo = [timed(budget, "back_to_budget", "choice"), timed(shared, "choose_jointly", "choice")]
    undo.append(timed(scheduler, "apply", "application"))
    undo += [timed(part, "on_applied", "spill") for part in scheduler.mechanisms.of(Reaching)]
    try:
        yield taken
    finally:
        for each in undo:
            each()


def measure(
    policy: dict | None, requests: int, tokens: int, steps: int, pause: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """One point: median seconds of a step and of what happens to a request, and of a step mean, means of turns and 99th
    percentile; bytecodes of a step and of an end, bytes of the plugin's objects. `pause` is called before each turn.
    """
    alone = Alone(policy, requests, tokens + 2 * CHUNK)
    before = plugin_bytes(alone.scheduler) if policy else 0
    taken = {"admission": alone.add(requests, tokens)}
    alone.to_decode()
    gc.collect()
    gc.freeze()  # as vLLM's engine core does
    turns = []
    for _ in range(0, steps, TURN):
        pause()
        turns.append([sum(alone.step()) for _ in range(TURN)])
    taken["step"] = sum(turns, [])
    found: dict[str, Any] = {"turns": [statistics.mean(turn) for turn in turns]}
    found |= {"99th": float(np.percentile(taken["step"], 99)), "mean": statistics.mean(taken["step"])}
    if policy is not None:
        with watched(alone) as of_actions:
            for _ in range(steps):
                alone.step()
        taken |= of_actions
        found["bytes"] = plugin_bytes(alone.scheduler) - before
    counted = max(2 * BLOCK // requests, 1)  # some request fills a block in each, or in two of them
    found["operations"] = sum(alone.count_step() for _ in range(counted)) / counted
    found["operations of an end"] = operations(alone.end, "request-0")[0]
    taken["end"] = [alone.end(f"request-{number}") for number in range(1, min(requests, ENDS))] or [0.0]
    gc.unfreeze()
    return found | {part: statistics.median(seconds) for part, seconds in taken.items()}


def measure_in_turns(
    policies: dict[str, dict | None], requests: int, tokens: int, steps: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each case, and what `measure` returns of it. CPython specialises code for one case in each process."""
    fork, waiting = multiprocessing.get_context("fork"), {}
    for case, policy in policies.items():
        waiting[case], pipe = fork.Pipe()
        fork.Process(target=_measure_in_turns, args=(pipe, policy, requests, tokens, steps), daemon=True).start()
        waiting[case].recv()
    while waiting:
        for case, pipe in list(waiting.items()):
            pipe.send(None)
            if (found := pipe.recv()) is not None:
                del waiting[case]
                yield case, found


def _measure_in_turns(pipe: Any, *point: Any) -> None:
    def pause() -> None:
        pipe.send(None)
        pipe.recv()

    pipe.send(measure(*point, pause=pause))


def operations(function: Callable, *args: Any, within: str = "") -> tuple[int, Any]:
    """Bytecodes that a call runs in files of folder `within`, and what it returns."""
    count = 0

    def enter(frame: Any, event: str, argument: Any) -> Callable | None:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return trace if frame.f_code.co_filename.startswith(within) else None

    def trace(frame: Any, event: str, argument: Any) -> Callable:
        nonlocal count
        count += event == "opcode"
        return trace

    sys.settrace(enter)
    try:
        result = function(*args)
    finally:
        sys.settrace(None)
    return count, result


def plugin_bytes(scheduler: Any) -> int:
    """Bytes of the plugin's objects in a scheduler (`sys.getsizeof`), without vLLM's and what requests share."""
    todo: list[Any] = [*scheduler.mechanisms, scheduler.usages, scheduler.next_plan]
    for manager in scheduler.kv_managers:
        todo += [manager.residents, manager.changes]
    seen, taken = set(), 0
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, (type, str, EvictionMixin)):
            continue
        module = type(each).__module__
        own = module.startswith("vllm_evict") and not module.startswith(SHARED)
        if not own and not isinstance(each, (int, float, np.ndarray, dict, list, tuple, set, frozenset)):
            continue
        seen.add(id(each))
        taken += sys.getsizeof(each)
        if isinstance(each, dict):
            todo += [*each, *each.values()]
        elif isinstance(each, (list, tuple, set, frozenset)):
            todo += each
        if own:
            slots = (name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ()))
            todo += [getattr(each, name) for name in slots if hasattr(each, name)]
            todo += getattr(each, "__dict__", {}).values()
    return taken
