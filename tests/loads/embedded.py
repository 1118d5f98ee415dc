"""Random load on engines in this process, with freed blocks full of NaN.

    python tests/loads/embedded.py --requests 100000 --state out/load.json      # continues where it stopped
    python tests/loads/embedded.py --case 17 --kind tokens                      # one case again
    python tests/loads/embedded.py --program FILE                               # a failing program again
    python tests/loads/embedded.py --shrink FILE                                # a smaller program that fails

A *case* is an engine: a policy, a pool, sizes of blocks and chunks, async scheduling or not, priorities or not, prefix
caching or not. A *program* is what requests do in it: when each arrives, its prompt and its policy, when it is aborted,
when the prefix cache is reset. A case follows from its number, a program from its own and its case's. A case runs one
program after the other. Each begins on an idle engine with an empty prefix cache, so that it can be run again alone.

After each step of a program these hold: each block of the pool is free or held; no held block contains NaN (looked at
after every third step); workers' block tables equal the scheduler's; log-probabilities are finite. After each program:
every request finished or was aborted; engine and workers remember no request; the pool is as full as before; each
published block equals what stock vLLM computes for its hash (pages.py); requests without evicted blocks got stock
vLLM's log-probabilities.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
import traceback
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest.mock import patch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.path.remove(str(Path(__file__).parent))
    import conftest  # noqa: F401  (settings of vLLM that have to come first)

import numpy as np
import torch
from engine import V2, Engine, greedy, random_prompt
from oracle.tiny import make_tiny_llama
from vllm.exceptions import VLLMValidationError
from vllm.platforms.cpu import CpuPlatform

from loads.pages import Published, Stock, slices_of

#: Blocks of the longest request.
LONGEST = 16
#: Largest difference of a published key or value from stock's; keys and values of these models go up to about 10.
TOLERANCE = 1e-4
#: Largest difference of a log-probability from stock's, for requests without evicted blocks.
LOGPROB_TOLERANCE = 2e-3
#: A program takes at most this many times the steps that its requests take one after the other.
PATIENCE = 3

MODELS = {
    "plain": {},
    "heads": {"layers": 4, "heads": 8, "kv_heads": 4},
    "windows": {"layers": 4, "windows": [48, 0, 48, 0]},
}
BLOCK_POLICIES = ["sink-window", "strided", "scissorhands", "tova", "snapkv", "rkv", "knorm", "keydiff"]
BLOCK_POLICIES += ["pagedeviction", "random", "h2o"]
TOKEN_POLICIES = ["h2o", "tova", "snapkv", "rkv", "knorm", "keydiff"]
ADD_UP = ["sink-window", "strided", "scissorhands", "tova", "snapkv", "h2o", "random"]
#: Layers x KV heads: one layer has no retrieval head, one has nothing else.
RETRIEVAL = [[0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]]


def _others(names, name):
    return [each for each in names if each != name]


def _blocks(rng, sizes):
    name = rng.choice(BLOCK_POLICIES)
    return {"name": name, **sizes, "allow": [*_others(BLOCK_POLICIES, name), "full"]}


def _tokens(rng, sizes):
    name = rng.choice(TOKEN_POLICIES)
    policy = {"name": name, "granularity": "token", "sets": rng.choice(["head", "all"]), **sizes}
    policy["merge"] = rng.choice([None, None, "d2o", "ems"])
    return {**policy, "allow": [*_others(TOKEN_POLICIES, name), "sink-window", "full"]}


def _pressure(rng, sizes):
    name = rng.choice(ADD_UP)
    return {"name": name, "when": "pressure", **sizes, "allow": [*_others(ADD_UP, name), "full"]}


def _kvzip(rng, sizes):
    if rng.random() < 0.5:
        return {"name": "kvzip", **sizes, "allow": ["h2o", "full"]}
    return {"name": "snapkv", "granularity": "token", **sizes, "allow": ["kvzip", "keydiff", "full"]}


def _bands(rng, sizes):
    return {"name": rng.choice(["adakv", "pyramidkv", "fastgen"]), "bands": 2, **sizes, "allow": ["full"]}


def _duo(rng, sizes):
    retrieval = rng.choice([None, {"name": "h2o", **sizes}, {"name": "snapkv", "granularity": "token", **sizes}])
    policy = {"name": "duo", "gates": "HEADS", "sink": sizes["sink"], "recent": 3 * sizes["recent"]}
    return policy if retrieval is None else {**policy, "retrieval": retrieval, "allow": ["full"]}


def _context(rng, sizes):
    name = rng.choice(["sink-window", "h2o", "keydiff"])
    return {"name": name, **sizes, "context": "CONTEXT", "allow": _others(["sink-window", "h2o", "keydiff"], name)}


def _full(rng, sizes):
    return {"name": "full"}


#: Kind -> model, and what makes a policy of it.
KINDS = {
    "blocks": ("plain", _blocks),
    "tokens": ("plain", _tokens),
    "pressure": ("plain", _pressure),
    "kvzip": ("plain", _kvzip),
    "bands": ("plain", _bands),
    "duo": ("heads", _duo),
    "context": ("plain", _context),
    "windows": ("windows", _blocks),
    "full": ("plain", _full),
}


@dataclass
class Case:
    """An engine's arguments.

    Attributes:
        number, kind: see `make_case`.
        model: one of `MODELS`.
        policy: of the server; "HEADS" and "CONTEXT" stand for a file of gates and a number of tokens.
        block_size: tokens.
        blocks: of the pool; None: the smallest one that start-up accepts.
        options: further engine arguments.
    """

    number: int
    kind: str
    model: str
    policy: dict
    block_size: int
    blocks: int | None
    options: dict

    @property
    def longest(self):
        """Tokens of the longest request."""
        return LONGEST * self.block_size


def make_case(number, kind=None, smallest=False):
    """The case of this number: kinds take turns unless one is named."""
    rng = random.Random(f"case {number}")
    kind = kind or list(KINDS)[number % len(KINDS)]
    model, make_policy = KINDS[kind]
    size = 32 if V2 else rng.choice([32, 32, 32, 64])
    sizes = {"budget": size * rng.choice([4, 5, 6]), "sink": size, "recent": size, "buffer": rng.choice([0, size])}
    if model == "windows":
        size = 32
        sizes = {"budget": 160, "sink": 32, "recent": 32, "buffer": rng.choice([0, 32])}
    policy = make_policy(rng, sizes)
    asynchronous = rng.random() < 0.4
    chunk = size * rng.choice([2, 3, 5, 8])
    if kind == "context":
        # Room for the budget, the buffer, a block and two chunks in flight.
        policy["context"] = sizes["budget"] + sizes["buffer"] + size + 2 * chunk + size
    seqs = rng.choice([2, 4, 8, 8, 16])
    groups = {"bands": 2, "duo": 2, "windows": 2}.get(kind, 1)
    options = {
        "max_num_batched_tokens": chunk,
        "max_num_seqs": 16 if kind == "pressure" else seqs,
        "enable_prefix_caching": kind == "kvzip" or rng.random() < 0.85,
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "async_scheduling": asynchronous,
    }
    # Room for the longest request whole; for two of them where small pools are known to stall.
    roomy = kind in ("tokens", "pressure", "kvzip", "duo")
    blocks = (
        None if smallest else 1 + int(groups * LONGEST * rng.choice([2, 2.5, 3, 4] if roomy else [1.25, 1.5, 2, 3]))
    )
    return Case(number, kind, model, policy, size, blocks, options)


def make_program(case, number, requests):
    """What requests do: a list of dicts in the order of their steps, ready for JSON.

    Each dict has `at`, the step before which it happens. A reset of the prefix cache has `reset` (True: running requests
    start over). A request has its `number`, `prompt` (pieces of random prompts: seed, tokens), `tokens` (max_tokens) and
    `priority`, and may have `after` (number of a request whose prompt and answer so far come first), `n`, `extra` (its
    extra_args), `stop`, `prompt_logprobs`, `abort` (steps from its arrival), `turns` (of a session: further pieces, and
    tokens of each).
    """
    rng = random.Random(f"program {case.number} {case.kind} {number}")
    size, longest, program, at = case.block_size, case.longest, [], 0
    crowded = rng.choice([0.5, 1, 2, 5])
    allowed = [case.policy["name"], *case.policy.get("allow", ["sink-window", "h2o"] if case.kind == "full" else [])]
    for index in range(requests):
        at += int(rng.expovariate(1 / crowded))
        if rng.random() < 0.01:
            program.append({"at": at, "reset": rng.random() < 0.5})
        shared = rng.choice([0, 1, 2.3, 4, 4, 7]) * size
        own = rng.choice([1, size // 2, size, 2 * size, int(size * rng.uniform(1, 8))])
        request = {
            "number": index,
            "at": at,
            "prompt": [[number * 1000 + rng.randrange(3), int(shared)], [number * 1000 + 10 + index, own]],
            "tokens": rng.choice([1, 2, 5, 10, 20, 40, int(1.5 * size), int(3.2 * size)]),
            "priority": rng.randrange(3),
        }
        if index and rng.random() < 0.15:
            request |= {"after": rng.randrange(index), "prompt": request["prompt"][1:]}
        if rng.random() < 0.5:
            request["extra"] = _extra(rng, case, allowed)
        kind = rng.random()
        if kind < 0.08:
            request["n"] = rng.choice([2, 3])
        elif kind < 0.16:
            turns = rng.randrange(1, 4)
            request["turns"] = [
                [[number * 1000 + 500 + 4 * index + turn, rng.randrange(1, 3 * size)], rng.choice([1, 3, 10, 2 * size])]
                for turn in range(turns)
            ]
            request.pop("after", None)
        elif kind < 0.2:
            request["stop"] = True
        elif kind < 0.25:
            request["prompt_logprobs"] = True
        if rng.random() < 0.12:
            request["abort"] = rng.choice([0, 1, 2, 5, 20, 60])
        if "turns" in request:
            pieces = [*request["prompt"], *(piece for piece, _ in request["turns"])]
            total = sum(length for _, length in pieces) + request["tokens"] + sum(t for _, t in request["turns"])
            if total > longest - 2:
                request.pop("turns")
        program.append(request)
    return program


def _extra(rng, case, allowed):
    """A request's extra_args. Some are refused."""
    size = case.block_size
    if rng.random() < 0.04:
        return rng.choice([{"kv_budget": 10**9}, {"kv_policy": "h3o"}, {"kv_buget": 1}, {"kv_budget": -1}])
    extra = {"kv_policy": rng.choice(allowed)} if rng.random() < 0.8 else {}
    if extra.get("kv_policy") != "full" and case.kind != "duo":
        if rng.random() < 0.5:
            extra["kv_budget"] = rng.choice([3 * size, 4 * size, 4 * size + 7, 0.5])
        if rng.random() < 0.1:
            extra["kv_sink"] = rng.choice([0, 2 * size])
    if rng.random() < 0.1:
        extra["kv_usage"] = True
    return extra


class Models:
    """Random models in a folder, and a stock engine of each. Each is made when it is first needed."""

    def __init__(self, folder):
        self.folder, self._stocks = Path(folder), {}

    def path(self, name):
        path = self.folder / name
        return path if (path / "config.json").exists() else make_tiny_llama(path, **MODELS[name])

    def gates(self, sink, recent):
        """A file of `RETRIEVAL`, for windows of this size."""
        folder = self.folder / f"gates-{sink}-{recent}"
        folder.mkdir(parents=True, exist_ok=True)
        np.savetxt(folder / "heads.tsv", np.array(RETRIEVAL, float), delimiter="\t")
        (folder / "config.json").write_text(json.dumps({"sink_size": sink, "recent_size": recent}))
        return str(folder / "heads.tsv")

    def stock(self, case):
        key = case.model, case.block_size
        if key not in self._stocks:
            longest = case.longest + case.block_size
            engine = Engine(
                self.path(case.model),
                block_size=case.block_size,
                blocks=8 * LONGEST,
                max_model_len=longest,
                max_num_batched_tokens=longest,
                enable_prefix_caching=False,
                async_scheduling=False,
            )
            self._stocks[key] = Stock(engine)
        return self._stocks[key]

    def engine(self, case):
        """A new engine that fills freed blocks with NaN."""
        policy = dict(case.policy)
        if policy.get("gates") == "HEADS":
            policy["gates"] = self.gates(policy.pop("sink"), policy.pop("recent"))
        options = {"max_model_len": case.longest, "block_size": case.block_size, **case.options}
        poison, os.environ["VLLM_EVICT_POISON"] = os.environ.get("VLLM_EVICT_POISON"), "1"
        try:
            if case.blocks is not None:
                return Engine(self.path(case.model), policy, blocks=case.blocks, **options)
            return self._smallest(case, policy, options)
        finally:
            del os.environ["VLLM_EVICT_POISON"]
            if poison is not None:
                os.environ["VLLM_EVICT_POISON"] = poison

    def _smallest(self, case, policy, options):
        for blocks in range(2, 100):
            try:
                return Engine(self.path(case.model), policy, blocks=blocks, **options)
            except ValueError:
                continue
        raise AssertionError("start-up accepts no pool")

    def close(self):
        for stock in self._stocks.values():
            stock.engine.close()
        self._stocks.clear()


@dataclass
class Live:
    """A request as its client sees it.

    Attributes:
        prompt: token ids.
        item: of the program.
        since: step of its arrival.
        answers: token ids of each completion so far; of a session, of all turns.
        turns: of a session, the turns not sent yet; None for other requests.
        ended: whether the session's last sent turn has ended.
    """

    prompt: list[int]
    item: dict
    since: int
    answers: list[list[int]] = field(default_factory=list)
    turns: list | None = None
    ended: bool = False


class Run:
    """One program on one engine.

    Attributes:
        counts: what happened.
    """

    def __init__(self, engine, case, program, published=None, stock=None):
        self.engine, self.case, self.program = engine, case, program
        self.published, self.stock = published, stock
        self.counts, self.vllm, self.step = Counter(), engine.llm.llm_engine, 0
        #: Number of a request -> what its client sees.
        self.live, self.ended = {}, {}
        self._turns, self._core = {}, self.vllm.engine_core
        self._slices = slices_of(engine)

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
        self.counts["steps"] += self.step

    def _alone(self, item):
        """Most steps of a request that runs alone."""
        if "reset" in item:
            return 5
        turns = 1 + len(item.get("turns", ()))
        tokens = item["tokens"] + sum(tokens for _, tokens in item.get("turns", ()))
        chunks = math.ceil(self.case.longest / self.case.options["max_num_batched_tokens"])
        return turns * (chunks + 10) + item.get("n", 1) * tokens

    def _begin(self, item):
        if "reset" in item:
            self.counts["resets"] += 1
            # vLLM raises if it is to preempt all that hold blocks, and sessions between two turns do.
            running = item["reset"] and not self.engine.scheduler.kv_holding_waiting
            self.engine.llm.reset_prefix_cache(reset_running_requests=running)
            return
        number, before, prompt = item["number"], item.get("after"), self._prompt(item["prompt"])
        if before is not None and (known := self.live.get(before) or self.ended.get(before)):
            prompt = [*known.prompt, *(known.answers[0] if known.answers else []), *prompt]
        live = Live(prompt[: self.case.longest - 2], item, self.step)
        try:
            if "turns" in item:
                # vLLM's synchronous front end has no sessions, so they go to the engine core.
                live.answers, live.turns = [[]], [*item["turns"]]
                self._send(live, live.prompt, item["tokens"])
            else:
                request, params = {"prompt_token_ids": live.prompt}, self._params(item, item["tokens"])
                self.vllm.add_request(str(number), request, params, priority=item["priority"])
        except VLLMValidationError as error:
            assert item.get("extra"), error
            self.counts["refused"] += 1
            return
        self.counts["requests"] += 1
        self.counts["completions"] += item.get("n", 1)
        self.live[number] = live

    @staticmethod
    def _prompt(pieces):
        return [token for seed, length in pieces for token in random_prompt(2048, seed)[:length]]

    def _params(self, item, tokens):
        options = {"logprobs": 0, "extra_args": item.get("extra")}
        if item.get("n", 1) > 1:
            # No seed of its own: vLLM's CPU engine ends with one that is given beside chunks of a prompt.
            options |= {"n": item["n"], "temperature": 1.0}
        if item.get("stop"):
            options |= {"stop": ["t7 ", "t8 "]}
        if item.get("prompt_logprobs"):
            options |= {"prompt_logprobs": 0}
        return greedy(tokens, **options)

    def _send(self, live, prompt, tokens, resumable=True):
        """Send a turn of a session. A turn that is not resumable ends the session."""
        params, request = self._params(live.item, tokens), {"prompt_token_ids": prompt}
        params.detokenize, name = False, f"s{live.item['number']}"
        tasks, process = self.engine.llm.supported_tasks, self.vllm.input_processor.process_inputs
        made = process(name, request, params, tasks, resumable=resumable, priority=live.item["priority"])
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
            self._core.abort_requests([f"s{number}"])
        else:
            self.vllm.abort_request([str(number)])
        self._end(number)

    def _end(self, number):
        self.ended[number] = self.live.pop(number)

    def _hear(self, output):
        """Take an output of the engine core, if it is a session's. The front end takes the others."""
        if not output.request_id.startswith("s") or (live := self.live.get(int(output.request_id[1:]))) is None:
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
            request = self.engine.scheduler.requests[f"s{number}"]
            if live.turns and not request.num_computed_tokens:
                # vLLM 0.32 forgets all tokens of a session that is preempted with the step in which its turn ends, as
                # may happen under async scheduling. It then never answers the next turn.
                self._take_back(number, live)
                self.counts["aborted"] += 1
                self.counts["sessions that vLLM forgot"] += 1
            elif live.turns:
                piece, tokens = live.turns.pop(0)
                self._send(live, self._prompt([piece]), tokens)
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
        lost = any(each.evicted_blocks for each in (usage if isinstance(usage, list) else [usage]))
        self.counts["evicted from"] += lost
        if not lost and self.stock is not None and number % 4 == 0 and item.get("n", 1) == 1 and "stop" not in item:
            tokens = output.outputs[0].token_ids
            got = [row[token].logprob for row, token in zip(output.outputs[0].logprobs, tokens)]
            want = self.stock.logprobs(live.prompt, tokens)
            np.testing.assert_allclose(
                got, want, atol=LOGPROB_TOLERANCE, err_msg=f"request {number}, without evicted blocks"
            )
            self.counts["answers compared"] += 1

    def _check_step(self):
        engine, held = self.engine, self.engine.held_blocks()
        assert engine.free_blocks == engine.all_blocks - len(held), "blocks are neither free nor held"
        if self.step % 3 == 0:
            self._check_blocks()
        if not V2 and not self.case.options["async_scheduling"]:
            self._check_tables()

    def _check_blocks(self):
        # The next plan fills these blocks.
        plan = self.engine.scheduler._plan
        coming = {block for order in (*plan.compactions, *plan.rotations) for block in order.target}
        for group, slices in zip(self.engine.all_managers, self._slices):
            blocks = {block.block_id for table in group.req_to_blocks.values() for block in table if not block.is_null}
            blocks = sorted(blocks - coming)
            for each in slices:
                assert not torch.isnan(each.cache[blocks]).any(), f"a block in use holds NaN in {each.layer}"

    def _check_tables(self):
        """Workers' block tables equal the scheduler's, except for entries that the next plan changes."""
        scheduler, batch = self.engine.scheduler, self.engine.worker.model_runner.input_batch
        for manager, plan in zip(self.engine.managers, scheduler._plan.groups):
            table = batch.block_table[manager.kv_cache_group_id].block_table.np
            for request in scheduler.running:
                row = batch.req_id_to_index.get(request.request_id)
                if row is None:
                    continue
                blocks = [block.block_id for block in manager.req_to_blocks[request.request_id]]
                untold = {*plan.holes.get(request.request_id, ()), *plan.moved.get(request.request_id, ())}
                differ = set(np.flatnonzero(table[row, : len(blocks)] != blocks).tolist())
                assert differ <= untold, f"{request.request_id}: workers hold others at {sorted(differ - untold)}"

    def _check_end(self):
        self.engine.assert_nothing_left()
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
    engine = models.engine(case)
    published = _published(engine, case, models)
    for number in numbers:
        run_program(engine, case, make_program(case, number, requests), published, models.stock(case), counts)
    engine.close()


def _published(engine, case, models):
    return Published(engine, models.stock(case)) if case.options["enable_prefix_caching"] else None


def run_program(engine, case, program, published, stock, counts):
    engine.llm.reset_prefix_cache()
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


@contextmanager
def async_as_asked():
    """Async scheduling is left as it was asked for; vLLM's CPU platform switches it off at start."""
    update = CpuPlatform.check_and_update_config.__func__

    def keep_async(cls, vllm_config):
        wanted = vllm_config.scheduler_config.async_scheduling
        update(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    with patch.object(CpuPlatform, "check_and_update_config", classmethod(keep_async)):
        yield


# --- by hand ---------------------------------------------------------------------------------------------------------


def main():
    options = _arguments()
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    models = Models(folder / "models")
    with async_as_asked():
        if options.shrink:
            return shrink(Path(options.shrink))
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
    parser.add_argument("--kind", choices=KINDS, help="this kind of cases only")
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
    counts, begun = Counter(state["counts"]), time.monotonic()
    while counts["requests"] < options.requests:
        start = time.monotonic()
        if options.minutes and start - begun > 60 * options.minutes:
            break
        number = state["next"] if options.case is None else options.case
        case = make_case(number, options.kind, options.smallest)
        try:
            run_case(case, models, range(options.programs), options.size, counts)
        except Failure as failure:
            path = folder / f"failure-{case.kind}-{number}.json"
            path.write_text(json.dumps(failure.record))
            state["failures"].append(str(path))
            traceback.print_exc()
            print(f"FAILED {case}\nagain: python tests/loads/embedded.py --program {path}", flush=True)
            if not options.keep_going:
                return 1
        state["next"], state["cases"] = number + 1, state["cases"] + 1
        state["seconds"] += time.monotonic() - start
        state["counts"] = dict(counts)
        if options.state:
            Path(options.state).write_text(json.dumps(state))
        print(
            f"case {number} {case.kind} {time.monotonic() - start:.1f} s, {_resident() >> 20} MiB: {_line(counts)}",
            flush=True,
        )
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


def shrink(path):
    """Remove parts of a failing program while it fails, and write the rest beside it."""
    record, smaller = json.loads(path.read_text()), path.with_suffix(".small.json")

    def fails(program):
        smaller.write_text(json.dumps({**record, "program": program}))
        command = [sys.executable, __file__, "--program", str(smaller)]
        return subprocess.run(command, capture_output=True).returncode != 0

    program, size = record["program"], len(record["program"]) // 2
    while size:
        for start in range(0, len(program), size):
            rest = program[:start] + program[start + size :]
            if rest and fails(rest):
                program = rest
                break
        else:
            size //= 2
    smaller.write_text(json.dumps({**record, "program": program}, indent=1))
    print(f"{len(program)} of {len(record['program'])}: {smaller}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
