"""A load on the schedulers without a model: vLLM's scheduler, managers and block pool, a worker double, and invariants.

`run` drives one program (see `program.Program`) and checks after each step:

- *books*: each block of the pool is in the free queue or held, and its reference count is the number of its holders;
- *tables*: scheduler and worker agree on every request's blocks and holes;
- *reads*: what a request reads is what it has written, or what others computed of the same prefix with nothing missing;
- *purity*: what is published under a hash was computed of that hash's tokens, with nothing missing;
- *bound*: a request whose step is done, and whose scores came, holds no more than its policy lets it;
- *floor*: what is evicted is no sink and no recent token, and leaves a request its budget;
- *scores*: a prompt is reconstructed if there was room for it all the time (kvzip);
- *admit*: where pressure admits no waiting request, none takes blocks;
- *vain*: blocks are evicted under pressure only if the request that lacked some gets them, and of no request that is
  more important;
- *events*: KV events tell which prefixes are in the pool and on the host, and of which tokens they are;
- *host*: each host block is free, cached or used; worker and scheduler agree who uses it; what is under a hash was
  computed of its tokens; staging pages suffice for the prompts of a step;
- *alone*: a request that alone holds blocks is not preempted;
- *stall*: requests get on, see `Invariants._stall`;
- *left*: once all requests are done, every block is in the pool and nothing is remembered of any request.

From the command line, from the project's root:

    python tests/harness/loads/scheduler.py --requests 100000           # random programs, policies in turn
    python tests/harness/loads/scheduler.py --replay program.json       # one that was printed
"""

import argparse
import atexit
import gc
import logging
import os
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.path.remove(str(Path(__file__).parent))

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import numpy as np
from vllm import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus

from loads.contents import Fault, Row, prompt_tokens
from loads.double import Worker
from loads.engines import make_hasher, make_scheduler
from loads.host import HostTier
from loads.invariants import Invariants
from loads.program import STOP, Maker, Op, Program
from loads.shrink import shrink
from vllm_evict.config import KVPolicyError
from vllm_evict.core.mechanisms import Pressure
from vllm_evict.core.plan import PLAN
from vllm_evict.features.audit.engine import Audits
from vllm_evict.features.kvzip.engine import Reconstructions
from vllm_evict.integration.engine.reaching import Reaching
from vllm_evict.policies import POLICIES


class Simulation(Invariants):
    """One program as it runs.

    Attributes:
        counts: what happened.
        live: requests that were sent and have not ended, in the order of their arrival.
    """

    def __init__(self, program: Program) -> None:
        settings = program.settings
        self.program, self.settings = program, settings
        self.scheduler = make_scheduler(settings)
        self.cache = self.scheduler.kv_cache_manager
        self.pool = self.cache.block_pool
        self.managers = self.cache.coordinator.single_type_managers
        self.evictable = list(getattr(self.scheduler, "kv_managers", ()))
        groups = [manager.kv_cache_group_id for manager in self.evictable]
        specs = [manager.kv_cache_spec for manager in self.managers]
        windows = [
            getattr(spec, "sliding_window", None) or -(getattr(spec, "attention_chunk_size", None) or 0)
            for spec in specs
        ]
        config = getattr(self.scheduler, "kv_policy", None)
        context = config.context if config is not None and config.context != "model" else None
        of = getattr(self.scheduler, "mechanisms", None)
        pool = next((each.pool for each in of.of(Reaching)), None) if of else None
        host = None if pool is None else HostTier(pool.blocks, settings.block, settings.length)
        parts = [config.of_class(manager.kv_cache_spec.head_class) for manager in self.evictable]
        read = [
            [part.sparse and part.read_blocks(settings.block)[0] for part in parts],
            [part.read_prompts and part.read_blocks(settings.block, prompts=True)[0] for part in parts],
        ]
        self.worker = Worker(settings, self.pool.num_gpu_blocks, groups, windows, context, host, read)
        self.counts: Counter[str] = Counter()
        self.live: dict[str, Request] = {}
        #: Steps in flight: the plan, what will come back, and the rows and turns that requests had.
        self._queue: deque[tuple[Any, Any, dict[str, tuple[Row, int]]]] = deque()
        self._depth = self.scheduler.vllm_config.max_concurrent_batches
        self._hashes: list[Any] = [None] * self.pool.num_gpu_blocks
        #: Block hash -> content of a block of these tokens, and for each request how many of its hashes are in it.
        self._meaning: dict[Any, np.ndarray] = {}
        self._known: dict[str, int] = {}
        self._sent: dict[str, int] = {}
        self._outputs: Counter[str] = Counter()
        #: Policy -> blocks that /metrics shows.
        self._shown: dict[str, int] = {}
        if self.evictable:
            self._watch_shown()
        self._furthest: dict[str, int] = {}
        self._since = self._since_oldest = 0
        self._paused = 0
        #: Requests that are to have their prompts reconstructed: whether there was room in each step so far.
        self._room: dict[str, bool] = {}
        self._cut: set[str] = set()
        if host is not None:
            self._watch_host()
        if settings.events:
            self._watch_events()
        if of and of.of(Pressure):
            self._watch_pressure()
        if self.evictable:
            self._watch_preemptions()
        elif settings.priorities:
            self._withdraw_what_is_not_computed()
        if of and of.of(Audits):
            self._watch_audits()

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> Counter[str]:
        """Run the program to its end; returns `counts`.

        Raises:
            Fault: an invariant does not hold.
        """
        ops, at = deque(self.program.ops), 0
        while True:
            middle = []
            while ops and ops[0].at <= at:
                op = ops.popleft()
                if op.middle:
                    middle.append(op)
                else:
                    self._apply(op)
            at += 1
            if self._paused:
                self._paused -= 1
                if not self._paused:
                    self.scheduler.set_pause_state(PauseState.UNPAUSED)
            ran = self._step(middle)
            if ran:
                continue
            if ops:
                at = max(at, ops[0].at)
            elif self._paused:
                continue
            elif self.live:
                self._end_sessions()
            else:
                break
        self._check_nothing_left()
        self.counts.update({name: value for name, value in vars(self.worker.counts).items()})
        return self.counts

    def _step(self, middle: list[Op]) -> bool:
        """One turn of the engine core's loop (`EngineCore.step` and `step_with_batch_queue`); False: nothing to do."""
        scheduler = self.scheduler
        if scheduler.has_requests():
            output = scheduler.schedule()
            answer = self.worker.run(output)
            rows = {req_id: self.worker.rows[req_id] for req_id in output.num_scheduled_tokens}
            self._queue.append((output, answer, {req_id: (row, row.turns) for req_id, row in rows.items()}))
            self._learn(output.num_scheduled_tokens)
            self._check(self.worker.written)
            if self.evictable:
                self._check_floors(getattr(output, PLAN))
            self._stall(output)
            more = output.total_num_scheduled_tokens > 0 or scheduler.has_requests()
            if len(self._queue) < self._depth and more:
                for op in middle:
                    self._apply(op)
                return True
        elif not self._queue:
            for op in middle:
                self._apply(op)
            return bool(middle)
        output, answer, rows = self._queue.popleft()
        for op in middle:
            self._apply(op)
        free = self.pool.get_num_free_blocks()
        shared = {block.block_id for block in self.pool.blocks if block.ref_cnt > 1}
        taken = scheduler.update_from_output(output, answer)
        if self.settings.events:
            self._check_events()
        if self.settings.drafts and not self.settings.ahead:
            scheduler.update_draft_token_ids(self._drafts(output))
        self._learn(output.num_scheduled_tokens)
        self._take(taken)
        if self.settings.ahead and self.settings.caching:
            self._check_published(())  # what was sampled may fill a block
        if self.evictable:
            self._check_bounds(output, rows, min(free, self.pool.get_num_free_blocks()), shared)
            settings = self.settings
            scores_come = not (settings.lost or settings.late or settings.answers == "nan")
            if self.scheduler.mechanisms.of(Reconstructions) and scores_come:
                self._check_reconstructions(output.total_num_scheduled_tokens)
        return True

    def _drafts(self, output: Any) -> DraftTokenIds:
        """Drafts of the requests of a step. The worker accepts some of them, whatever they are."""
        req_ids, settings = list(output.num_scheduled_tokens), self.settings
        known = {req_id: request.num_tokens for req_id in req_ids if (request := self.live.get(req_id))}
        counts = [(7 * known.get(req_id, 0) + settings.seed) % (settings.drafts + 1) for req_id in req_ids]
        return DraftTokenIds(req_ids, [[0] * count for count in counts])

    # --- clients ------------------------------------------------------------------------------------------------------

    def _apply(self, op: Op) -> None:
        scheduler = self.scheduler
        if op.do == "add":
            self._add(op)
        elif op.do == "turn":
            self._turn(op)
        elif op.do == "close":
            self._close(op.id)
        elif op.do == "abort":
            for req_id in (op.id, *(f"{op.id}.{copy}" for copy in range(1, 3))):
                if req_id in self.live:
                    scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)
                    self._ended(req_id)
                    self.counts["aborted"] += 1
        elif op.do == "reset":
            self._reset(op.running)
        elif op.do == "pause":
            scheduler.set_pause_state(PauseState(op.level))
            self._paused = op.steps
        else:
            raise ValueError(f"no such operation: {op.do}")

    def _params(self, op: Op) -> SamplingParams:
        return SamplingParams(
            temperature=0.0,
            max_tokens=op.tokens,
            ignore_eos=True,
            stop_token_ids=[STOP] if op.stops else None,
            extra_args=dict(op.ask) or None,
            detokenize=False,
        )

    def _refused(self, op: Op) -> bool:
        """Whether the front end refuses what a request asks for."""
        if not op.ask or self.settings.policy is None:
            return False
        try:
            self.scheduler.kv_policy.for_request(op.ask, op.length, self.settings.block)
        except KVPolicyError:
            self.counts["refused"] += 1
            return True
        return False

    def _add(self, op: Op) -> None:
        if op.id in self.live or op.length >= self.settings.length or self._refused(op):
            return
        tokens = prompt_tokens(op.id, op.length, op.family, min(op.shared, op.length))
        for copy_ in range(op.n):
            self._send(op, f"{op.id}.{copy_}" if copy_ else op.id, tokens)

    def _send(self, op: Op, req_id: str, tokens: list[int]) -> None:
        self.counts["requests"] += 1
        request = Request(
            req_id,
            list(tokens),
            self._params(op),
            None,
            arrival_time=float(self.counts["requests"]),
            priority=op.priority,
            block_hasher=make_hasher(self.settings.block) if self.settings.caching else None,
            resumable=op.session,
        )
        if op.hot:
            self.worker.hot.add(req_id)
        self.live[req_id] = request
        self._sent[req_id] = len(tokens) + op.tokens
        self._outputs[req_id] = 0
        self.scheduler.add_request(request)

    def _turn(self, op: Op) -> None:
        """The next turn of a session, if its context has room for it."""
        session = self.live.get(op.id)
        longest = self._sent.get(op.id, 0) + op.length + op.tokens
        if session is None or not session.resumable or longest >= self.settings.length or self._refused(op):
            return
        tokens = prompt_tokens(f"{op.id}+{self._sent[op.id]}", op.length, op.family, 0)
        self._sent[op.id] = longest
        turn = Request(op.id, tokens, self._params(op), None, arrival_time=session.arrival_time, resumable=True)
        self.scheduler.add_request(turn)

    def _close(self, req_id: str) -> None:
        """No more turns. A request of the same name says so."""
        session = self.live.get(req_id)
        if session is not None and session.resumable:
            self.scheduler.add_request(Request(req_id, [0], self._params(Op()), None, resumable=False))
            if req_id not in self.scheduler.requests:
                self._ended(req_id)

    def _end_sessions(self) -> None:
        """The program is over, and sessions wait for turns."""
        if self._end_lost_sessions():
            return
        waiting = [req_id for req_id, request in self.live.items() if request.resumable]
        if not waiting:
            raise Fault("stall", f"{list(self.live)} live, and the scheduler has nothing to do")
        for req_id in waiting:
            self._close(req_id)

    def _reset(self, running: bool) -> None:
        self._since = self._since_oldest = 0
        self._resets = True
        try:
            self.scheduler.reset_prefix_cache(reset_running_requests=running)
        except RuntimeError:
            # Sessions between two turns hold blocks that vLLM cannot take from them.
            if not self.scheduler.kv_holding_waiting:
                raise
        finally:
            self._resets = False
        self.counts["resets"] += 1

    def _ended(self, req_id: str) -> None:
        del self.live[req_id]
        self._furthest.pop(req_id, None)
        self._room.pop(req_id, None)
        self._since = 0

    def _take(self, taken: dict[int, Any]) -> None:
        """Outputs to clients."""
        for client in taken.values():
            for output in client.outputs:
                if output.request_id not in self.live:
                    raise Fault("outputs", f"an output for {output.request_id}, which no client waits for")
                self._outputs[output.request_id] += len(output.new_token_ids)
                if output.request_id not in self.scheduler.requests:
                    self._ended(output.request_id)
                    self.counts["finished"] += 1
            stats = client.scheduler_stats
            if stats is not None and self.evictable and getattr(stats, "kv_evict", None) is None:
                raise Fault("books", "statistics without the plugin's")
        for req_id in [req_id for req_id in self.live if req_id not in self.scheduler.requests]:
            self._ended(req_id)  # a session that ended with its last turn

    def _watch_audits(self) -> None:
        """Count verdicts. Answers wait for no idle engine, so that shadows run beside other requests."""
        part = self.scheduler.part(Audits)
        part.idle_only = part.sparing = 0.0
        judge = part.judge

        def judged(*audit: Any) -> None:
            answer, *_, missed = audit
            self.counts["audits"] += 1
            self.counts["measured"] += missed is not None and len(answer.gone) > 0
            if missed is not None and not 0 <= missed <= len(answer.gone):
                raise Fault("audits", f"{answer.request.request_id} missed {missed} of its attention")
            judge(*audit)

        part.judge = judged  # type: ignore[method-assign]

    def _watch_shown(self) -> None:
        """Check that what is sent, and was sent before, are the blocks that requests of each policy hold."""
        make_stats = self.scheduler.make_stats

        def watched(*args: Any, **kwargs: Any) -> Any:
            stats = make_stats(*args, **kwargs)
            if stats is not None:
                self._shown |= {policy: counts[""]["resident"] for policy, counts in stats.kv_evict.items()}
                held: Counter[str] = sum((manager.held for manager in self.evictable), Counter())
                if +Counter(self._shown) != held:
                    raise Fault("books", f"/metrics shows {self._shown}, requests hold {dict(held)}")
            return stats

        self.scheduler.make_stats = watched


@contextmanager
def quiet() -> Iterator[None]:
    """vLLM and the plugin log faults that programs provoke."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def run(program: Program) -> Counter[str]:
    """Run a program; returns what happened.

    Raises:
        Fault: an invariant does not hold, or the scheduler raised.
    """
    with quiet():
        try:
            return Simulation(program).run()
        except Fault:
            raise
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{type(error).__name__} in {last.name}"
            raise Fault(kind, f"{error}\n{traceback.format_exc()}") from error


def failure(program: Program) -> Fault | None:
    try:
        run(program)
    except Fault as fault:
        return fault
    return None


def shortest(program: Program, fault: Fault, seconds: float = 60.0) -> Program:
    """A short program that fails in the same way."""

    def fails(candidate: Program) -> bool:
        found = failure(candidate)
        return found is not None and found.kind == fault.kind

    return shrink(program, fails, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", action="append", choices=[*sorted(POLICIES), "stock"], help="all, if left out")
    parser.add_argument("--faithful", action="store_true", help="no report is lost or late")
    parser.add_argument("--drafts", action="store_true", help="all servers speculate")
    parser.add_argument("--host", action="store_true", help="all servers have blocks on the host")
    parser.add_argument("--replay", help="a file with a program, as it was printed; - for standard input")
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds to shorten a failing program; 0: do not")
    parser.add_argument("--most", type=int, default=1, help="stop after so many kinds of faults")
    options = parser.parse_args()
    gc.collect()
    gc.freeze()  # a million objects of modules, which the collector would traverse again and again
    atexit.register(gc.unfreeze)
    if options.replay:
        text = sys.stdin.read() if options.replay == "-" else Path(options.replay).read_text()
        print(dict(run(Program.parse(text))))
        return
    maker = Maker(options.seed, options.policy, options.faithful, drafts=options.drafts, host=options.host, audits=0.2)
    sys.exit(search(maker, options.requests, options.shrink, options.most))


def search(maker: Maker, requests: int, seconds: float, most: int) -> int:
    """Run random programs; prints failing ones, shortened, and returns how many kinds of faults they show.

    Args:
        maker: of the programs.
        requests: to stop after.
        seconds: to shorten a program.
        most: kinds of faults to stop after.
    """
    counts, found = Counter(), Counter()
    start, programs = time.monotonic(), 0
    while counts["requests"] < requests and len(found) < most:
        program = maker.program()
        programs += 1
        try:
            counts.update(run(program))
        except Fault as fault:
            name = f"{fault.kind} ({(program.settings.policy or {'name': 'stock'})['name']})"
            found[name] += 1
            counts["requests"] += len(program.ops)
            if found[name] == 1:
                print(f"--- program {programs}: {name}\n{fault}", flush=True)
                if seconds:
                    program = shortest(program, fault, seconds)
                    print(f"shortened: {failure(program)}")
                print(program, flush=True)
    print(f"{programs} programs in {time.monotonic() - start:.0f} s: {dict(counts)}")
    print(f"faults: {dict(found)}" if found else "no faults")
    return len(found)


if __name__ == "__main__":
    main()
