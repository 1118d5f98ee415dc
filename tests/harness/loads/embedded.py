"""Random load on engines in this process, with freed blocks full of NaN.

    python tests/harness/loads/embedded.py --requests 100000 --state out/load.json      # continues where it stopped
    python tests/harness/loads/embedded.py --case 17 --kind tokens                      # one case again
    python tests/harness/loads/embedded.py --program FILE                               # a failing program again
    python tests/harness/loads/embedded.py --shrink FILE                                # a smaller program that fails

A *case* is an engine: a policy, a pool, sizes of blocks and chunks, async scheduling or not, priorities or not, prefix
caching or not. A *program* is what requests do in it: when each arrives, its prompt and its policy, when it is aborted,
when the prefix cache is reset. A case follows from its number, a program from its own and its case's. A case runs one
program after the other. Each begins on an idle engine with an empty prefix cache, so that it can be run again alone.

After each step of a program these hold: each block of the pool is free or held; no held block contains NaN (looked at
after every third step); the same of host blocks, and free ones hold nothing else (host_memory.py); workers' block tables
equal the scheduler's; log-probabilities are finite. After each program: every request finished or was aborted; engine
and workers remember no request; the pool is as full as before; each published block equals what stock vLLM computes for
its hash (pages.py); requests without evicted blocks, whose steps read all others, got stock vLLM's log-probabilities.
"""

import argparse
import json
import math
import os
import sys
import time
import traceback
from collections import Counter, defaultdict
from dataclasses import asdict
from itertools import count
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.path.remove(str(Path(__file__).parent))
    import preparation

    preparation.prepare()  # settings of vLLM that have to come first

import numpy as np
import torch
from drafting import accepted
from engine import V2, async_as_asked, greedy
from parts import orders_of
from vllm.exceptions import VLLMValidationError
from vllm.v1.request import RequestStatus

from loads.cases import BY_NAME, KINDS, VOCAB, Case, make_case, make_program
from loads.host_memory import HostMemory, pool_of
from loads.images import asked, cut, of_pieces
from loads.live import Live
from loads.models import Models
from loads.pages import Published, numbers, slices_of
from loads.shrink import shrink_record
from vllm_evict.core.host_pool import Copy

#: Largest difference of a published key or value from stock's; keys and values of these models go up to about 10.
TOLERANCE = 1e-4
#: A program takes at most this many times the steps that its requests take one after the other.
PATIENCE = 3


#: Programs that have run.
RUNS = count()


class Run:
    """One program on one engine.

    Attributes:
        counts: what happened.
    """

    def __init__(self, engine, case, program, published=None, stock=None):
        self.engine, self.case, self.program, self.published, self.stock = engine, case, program, published, stock
        self.counts, self.vllm, self.step = Counter(), engine.llm.llm_engine, 0
        #: Number of a request -> what its client sees.
        self.live, self.ended = {}, {}
        self._core = self.vllm.engine_core
        #: A name is given once: vLLM keeps where the states of a request lie that ends in a step without tokens.
        self._named = f"of-{next(RUNS)}"
        self._slices = slices_of(engine)
        #: Adapters that were loaded again since the prefix cache was empty.
        self._mixed = set()
        self._host = (
            HostMemory(engine) if getattr(engine.scheduler, "mechanisms", None) and pool_of(engine.scheduler) else None
        )

    def run(self):
        get_output, preempt = self._core.get_output, self.engine.scheduler._preempt_request

        def heard(*args, **kwargs):
            outputs = get_output(*args, **kwargs)
            for output in outputs.outputs:
                self._hear(output)
            return outputs

        def counted(*args, **kwargs):
            self.counts["preemptions"] += 1
            return preempt(*args, **kwargs)

        self._core.get_output, self.engine.scheduler._preempt_request = heard, counted
        try:
            self._run()
        finally:
            del self._core.get_output, self.engine.scheduler._preempt_request
        self._check_end()

    def _run(self):
        coming = list(self.program)
        patience = 200 + PATIENCE * sum(map(self._alone, self.program))
        while coming or self.live:
            while coming and (coming[0]["at"] <= self.step or not self.live):
                self._begin(coming.pop(0))
            self._abort()
            for output in self.vllm.step():
                self._take(output)
            self._go_on()
            self._check_step()
            self.step += 1
            assert self.step < patience, f"after {self.step} steps have not ended: {sorted(self.live)}"
        while self.engine.scheduler.has_requests():  # audits, and blocks that a connector sends or stores
            self.vllm.step()
            self._check_step()
        self.counts["steps"] += self.step

    def _alone(self, item):
        """Most steps of a request that runs alone."""
        if "tokens" not in item:
            return 5
        turns = 1 + len(item.get("turns", ()))
        tokens = item["tokens"] + sum(tokens for _, tokens in item.get("turns", ()))
        chunks = math.ceil(self.case.longest / self.case.options["max_num_batched_tokens"])
        return turns * (chunks + 10) + item.get("n", 1) * tokens

    def _begin(self, item):
        if "reset" in item:
            return self._reset(item["reset"])
        if "reload" in item:
            return self._reload(item["reload"], item["in_place"])
        number, before, prompt = item["number"], item.get("after"), of_pieces(item["prompt"], self.case.words)
        if before is not None and (known := self.live.get(before) or self.ended.get(before)):
            prompt = [*known.prompt, *(known.answers[0] if known.answers else []), *prompt]
        live = Live(cut(prompt, self.case.longest - 2), item, self.step, mixed=item.get("adapter") in self._mixed)
        try:
            if "turns" in item:
                # vLLM's synchronous front end has no sessions, so they go to the engine core.
                live.answers, live.turns = [[]], [*item["turns"]]
                self._send(live, live.prompt, item["tokens"])
            else:
                params = self._params(item, item["tokens"])
                about = {"priority": item["priority"], "lora_request": self._lora_of(item)}
                self.vllm.add_request(str(number), asked(live.prompt), params, **about)
        except VLLMValidationError as error:
            assert item.get("extra"), error
            self.counts["refused"] += 1
            return
        self.counts["requests"] += 1
        self.counts["completions"] += item.get("n", 1)
        self.live[number] = live

    def _reset(self, running):
        self.counts["resets"] += 1
        # vLLM raises if it is to preempt all that hold blocks, and sessions between two turns do.
        running &= not self.engine.scheduler.kv_holding_waiting
        if self.engine.llm.reset_prefix_cache(reset_running_requests=running) and self.published is not None:
            self.published.reset()
            self._mixed.clear()

    def _reload(self, number, in_place):
        self.counts["reloads"] += 1
        self.published.reload(number)
        self.stock.adapters.reload(self.engine, number, in_place)
        self._mixed.add(number)
        for live in self.live.values():
            live.mixed |= live.item["adapter"] == number

    def _lora_of(self, item):
        return self.stock.adapters.named(item["adapter"]) if "adapter" in item else None

    def _params(self, item, tokens):
        options = {"logprobs": 0, "extra_args": item.get("extra")}
        if item.get("n", 1) > 1:
            options |= {"n": item["n"], "temperature": 1.0, "seed": item["number"]}
        if item.get("stop"):
            options |= {"stop": ["t7 ", "t8 "]}
        if item.get("prompt_logprobs"):
            options |= {"prompt_logprobs": 0}
        if self.case.words < VOCAB:
            options |= {"allowed_token_ids": list(range(self.case.words))}
        return greedy(tokens, **options)

    def _name(self, number):
        return f"s{number}-{self._named}"

    def _send(self, live, prompt, tokens, resumable=True):
        """Send a turn of a session. A turn that is not resumable ends the session."""
        params, request = self._params(live.item, tokens), {"prompt_token_ids": prompt}
        params.detokenize, name = False, self._name(live.item["number"])
        tasks, process = self.engine.llm.supported_tasks, self.vllm.input_processor.process_inputs
        about = {"priority": live.item["priority"], "lora_request": self._lora_of(live.item)}
        made = process(name, request, params, tasks, resumable=resumable, **about)
        self._core.add_request(made)
        live.ended = False
        self.counts["turns"] += resumable

    def _abort(self):
        for number, live in list(self.live.items()):
            if "abort" in live.item and self.step >= live.since + live.item["abort"]:
                self._take_back(number, live)
                self.counts["aborted"] += 1

    def _take_back(self, number, live):
        if live.turns is not None:
            self._core.abort_requests([self._name(number)])
        else:
            self.vllm.abort_request([str(number)])
        self._end(number)

    def _end(self, number):
        self.ended[number] = self.live.pop(number)

    def _hear(self, output):
        """Take an output of the engine core, if it is a session's. The front end takes the others."""
        number = output.request_id[1:].partition("-")[0]
        if not output.request_id.startswith("s") or (live := self.live.get(int(number))) is None:
            return
        live.answers[0] += output.new_token_ids
        if output.new_logprobs is not None:
            assert np.isfinite(output.new_logprobs.logprobs[:, 0]).all(), f"{output.request_id}: NaN"
        live.ended |= output.finish_reason is not None

    def _go_on(self):
        """Send the next turn, or the end, of each session whose last turn has ended."""
        for number, live in list(self.live.items()):
            if live.turns is None or not live.ended:
                continue
            request = self.engine.scheduler.requests[self._name(number)]
            if live.turns and not request.num_computed_tokens:
                # vLLM 0.32 forgets all tokens of a session that is preempted with the step in which its turn ends, as
                # may happen under async scheduling. It then never answers the next turn.
                self._take_back(number, live)
                self.counts["aborted"] += 1
                self.counts["sessions that vLLM forgot"] += 1
            elif live.turns:
                piece, tokens = live.turns.pop(0)
                self._send(live, of_pieces([piece], self.case.words), tokens)
            else:
                self._send(live, [0], 1, resumable=False)
                self.counts["finished"] += 1
                self._end(number)

    def _take(self, output):
        number = int(output.request_id)
        if (live := self.live.get(number)) is None:
            return  # it was aborted
        live.answers = [list(completion.token_ids) for completion in output.outputs]
        for completion in output.outputs:
            assert _finite(completion.logprobs[-1:]), f"request {number}: NaN"
        if output.finished:
            self._check_output(number, live, output)
            self._end(number)

    def _check_output(self, number, live, output):
        item = live.item
        most = min(item["tokens"], self.case.longest - len(live.prompt))
        for completion in output.outputs:
            assert len(completion.token_ids) == most or item.get("stop"), f"request {number}: {completion}"
            assert _finite(completion.logprobs), f"request {number}: NaN"
            self.counts["tokens"] += len(completion.token_ids)
        assert _finite((output.prompt_logprobs or [])[1:]), f"request {number}: NaN in its prompt"
        self.counts["finished"] += 1
        self.counts["hit tokens"] += output.num_cached_tokens or 0
        usage = output.kv_usage
        for each in usage if isinstance(usage, list) else [usage]:
            self.counts["evicted blocks"] += each.evicted_blocks
            on_host = ("host_hit_blocks", "fetched_blocks", "in_room_blocks", "cut_blocks")
            self.counts.update({name.replace("_", " "): getattr(each, name) or 0 for name in on_host})
        # A request may start with blocks on the host, none of which it has evicted.
        least = ("evicted_blocks", "fetched_blocks", "in_room_blocks")
        lost = any(getattr(each, name) for each in (usage if isinstance(usage, list) else [usage]) for name in least)
        self.counts["evicted from"] += lost
        tokens = output.outputs[0].token_ids
        lost |= not self.case.reads_all(len(live.prompt) + len(tokens))
        lost |= live.mixed
        if not lost and self.stock is not None and number % 4 == 0 and item.get("n", 1) == 1 and "stop" not in item:
            self.stock.compare(number, live.prompt, output.outputs[0], item.get("adapter"))
            self.counts["answers compared"] += 1

    def _check_step(self):
        engine, held = self.engine, self.engine.held_blocks()
        # A connector may hold blocks of requests that have ended.
        away = engine.all_blocks - len(held) - engine.free_blocks
        assert away == 0 or (away > 0 and "kv_transfer_config" in self.case.options), "blocks are neither free nor held"
        if self.step % 3 == 0:
            self._check_blocks()
            if self._host is not None:
                self._host.check()
        if not V2 and not self.case.options["async_scheduling"]:
            self._check_tables()

    def _check_blocks(self):
        # The next plan fills these blocks.
        plan = self.engine.scheduler._plan
        coming = {copy.physical for copy in orders_of(plan, Copy) if copy.kind == "fetch"}
        coming |= {block for order in plan.orders if not isinstance(order, Copy) for block in order.target}
        coming |= self._host.unread() if self._host is not None else set()
        rooms = self._host.unread(drafting=True) if self._host is not None else set()
        of_model = {name for group in self.engine.worker.kv_evict.groups for name in group.layers.values()}
        for group, slices in zip(self.engine.all_managers, self._slices):
            tables = [table for req_id, table in group.req_to_blocks.items() if not self._waits(req_id)]
            blocks = {block.block_id for table in tables for block in table if not block.is_null}
            for each in slices:
                held = sorted(blocks - coming if each.layer in of_model else blocks - coming - rooms)
                assert not torch.isnan(numbers(each.cache)[held]).any(), f"a block in use holds NaN in {each.layer}"

    def _waits(self, req_id):
        """Whether a connector is still to bring the blocks of a request."""
        request = self.engine.scheduler.requests.get(req_id)
        return request is not None and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS

    def _check_tables(self):
        """Workers' block tables equal the scheduler's, except for entries that the next plan changes."""
        scheduler, batch = self.engine.scheduler, self.engine.worker.model_runner.input_batch
        for manager in self.engine.managers:
            table = batch.block_table[manager.kv_cache_group_id].block_table.np
            for request in scheduler.running:
                row = batch.req_id_to_index.get(request.request_id)
                if row is None:
                    continue
                blocks = [block.block_id for block in manager.req_to_blocks[request.request_id]]
                untold = set(manager.changes.get(request.request_id, ()))
                differ = set(np.flatnonzero(table[row, : len(blocks)] != blocks).tolist())
                assert differ <= untold, f"{request.request_id}: workers hold others at {sorted(differ - untold)}"

    def _check_end(self):
        self.engine.assert_nothing_left()
        if self._host is not None:
            self._host.check_end()
        if self.published is not None:
            self.published.compare(TOLERANCE)


def _finite(rows):
    """Whether all log-probabilities of some positions are numbers."""
    return all(math.isfinite(each.logprob) for row in rows for each in row.values())


class Failure(AssertionError):
    """A program failed.

    Attributes:
        record: error, case and program, ready for JSON.
    """

    def __init__(self, record):
        super().__init__(record["error"])
        self.record = record


def run_case(case, models, numbers, requests, counts):
    """Run programs of a case on one engine.

    Args:
        numbers: of the programs.
        requests: of each.
        counts: to which what happened is added.

    Raises:
        Failure: something did not hold.
    """
    stock, engine = models.stock(case), models.engine(case)  # vLLM's metrics are those of the newest engine
    published = _published(engine, case, models)
    for number in numbers:
        run_program(engine, case, make_program(case, number, requests), published, stock, counts)
    if "speculative_config" in case.options:
        drafter = case.options["speculative_config"]
        drafter = drafter if isinstance(drafter, str) else drafter["method"]
        counts.update(dict(zip((f"accepted drafts of {drafter}", f"drafts of {drafter}"), map(int, accepted(engine)))))
    engine.close()


def _published(engine, case, models):
    return Published(engine, models.stock(case)) if case.options["enable_prefix_caching"] else None


def run_program(engine, case, program, published, stock, counts):
    engine.llm.reset_prefix_cache()
    if published is not None:
        published.reset()
    torch.manual_seed(0)
    run = Run(engine, case, program, published, stock)
    try:
        run.run()
    except Exception as error:
        record = {"error": f"{type(error).__name__}: {error}", "case": asdict(case), "program": program}
        raise Failure(record) from error
    worst = max(counts["worst"], published.counts.pop("worst", 0)) if published is not None else counts["worst"]
    counts.update(run.counts)
    if published is not None:
        counts.update(published.counts)
        published.counts.clear()
    counts["worst"] = worst


# --- by hand ---------------------------------------------------------------------------------------------------------


def main():
    options = _arguments()
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    models = Models(folder / "models")
    with async_as_asked():
        if options.shrink:
            return shrink_record(Path(options.shrink), [sys.executable, __file__, "--program"])
        if options.program:
            record = json.loads(Path(options.program).read_text())
            return _run_record(record, models)
        return _load(options, models, folder)


def _arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="in all")
    parser.add_argument("--minutes", type=float, help="stop after so long; the state file says where to go on")
    parser.add_argument("--case", type=int, help="this case only")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--kind", choices=[*KINDS, *BY_NAME], help="this kind of cases only")
    parser.add_argument("--programs", type=int, default=6, help="of each case")
    parser.add_argument("--size", type=int, default=64, help="requests of each program")
    parser.add_argument("--smallest", action="store_true", help="pools as small as start-up accepts")
    parser.add_argument("--state", help="file of what was done, to go on from")
    parser.add_argument("--out", default="out/load", help="folder of models and failing programs")
    parser.add_argument("--keep-going", action="store_true", help="after a failure, with the next case")
    parser.add_argument("--program", help="run this failing program")
    parser.add_argument("--shrink", help="make this failing program smaller, while it fails")
    return parser.parse_args()


def _load(options, models, folder):
    state = {"next": options.first, "counts": {}, "cases": 0, "failures": [], "seconds": 0.0}
    if options.state and Path(options.state).exists():
        state = json.loads(Path(options.state).read_text())
    kinds = defaultdict(Counter, {kind: Counter(counts) for kind, counts in state["counts"].items()})
    begun = time.monotonic()
    while sum(counts["requests"] for counts in kinds.values()) < options.requests:
        start = time.monotonic()
        if options.minutes and start - begun > 60 * options.minutes:
            break
        number = state["next"] if options.case is None else options.case
        case = make_case(number, options.kind, options.smallest)
        try:
            run_case(case, models, range(options.programs), options.size, kinds[case.kind])
        except Failure as failure:
            path = folder / f"failure-{case.kind}-{number}.json"
            path.write_text(json.dumps(failure.record))
            state["failures"].append(str(path))
            traceback.print_exc()
            print(f"FAILED {case}\nagain: python tests/harness/loads/embedded.py --program {path}", flush=True)
            if not options.keep_going:
                return 1
        state["next"], state["cases"] = number + 1, state["cases"] + 1
        state["seconds"] += time.monotonic() - start
        state["counts"] = kinds
        if options.state:
            Path(options.state).write_text(json.dumps(state))
        took, megabytes = time.monotonic() - start, _resident() >> 20
        print(f"case {number} {took:.1f} s, {megabytes} MiB: all {case.kind}: {_line(kinds[case.kind])}", flush=True)
        if options.case is not None:
            break
    return 1 if state["failures"] else 0


def _line(counts):
    return ", ".join(f"{counts[name]:.3g} {name}" if name == "worst" else f"{counts[name]} {name}" for name in counts)


def _resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _run_record(record, models):
    case = Case(**record["case"])
    engine, counts = models.engine(case), Counter()
    run_program(engine, case, record["program"], _published(engine, case, models), models.stock(case), counts)
    print(_line(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
