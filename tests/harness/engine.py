"""One vLLM engine inside the test process, stepped by hand."""

import functools
import gc
import itertools
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import graphs
import numpy as np
import pytest
from parts import holes_of, part_of, sums_of
from vllm import LLM, SamplingParams
from vllm.platforms.cpu import CpuPlatform

from vllm_evict.compute.compaction import Compactor
from vllm_evict.core.plan import PLAN
from vllm_evict.features.context.worker import Originals
from vllm_evict.features.kvzip.engine import Reconstructions
from vllm_evict.features.kvzip.worker import PromptScores

#: Whether this run is on Model Runner V2 (see preparation.py).
V2 = os.environ.get("VLLM_EVICT_TEST_RUNNER") == "v2"

#: vLLM 0.30 has no such method: a stand-in is patched in, which nothing calls.
REGISTER = "register_triton_kernel_overrides"


@staticmethod
@functools.cache
def _register_kernels_once(register=getattr(CpuPlatform, REGISTER, lambda: None)):
    """vLLM's scan of all modules for kernels, past one on whose objects it fails; drafts by n-grams load that."""
    name = "llvmlite.binding.ffi"
    hidden = sys.modules.pop(name, None)
    try:
        register()
    finally:
        if hidden is not None:
            sys.modules[name] = hidden


@dataclass
class Trace:
    """A record of one request since it (re)started.

    Attributes:
        steps: tokens of each step; rejected drafts are left out.
        settled: leading tokens of each step that were no drafts.
        drafts: drafts of each step, rejected ones too.
        start: tokens that came out of the prefix cache.
        known: tokens it had: its prompt, and after a restart what it had generated.
        evicted: logical blocks evicted after each step.
        held: blocks held after each step.
        groups: KV group -> blocks evicted from it after each step, and blocks held in it; the above are of the first.
        restarts: times it started over.
    """

    steps: list[int] = field(default_factory=list)
    settled: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    start: int = 0
    known: int = 0
    restarts: int = 0
    evicted: list[list[int]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    groups: list["Trace"] = field(default_factory=list)


class Engine:
    """A small engine and a look inside it.

    Args:
        model: directory.
        kv_policy: None for stock vLLM.
        kwargs: engine arguments; the defaults make a small pool of 32-token blocks and short prefill chunks.
    """

    #: Whether what the first one imported is left to the garbage collector no more.
    frozen = False

    def __init__(self, model, kv_policy=None, *, blocks=512, **kwargs):
        defaults = dict(
            dtype="float32",
            max_model_len=2048,
            block_size=32,
            num_gpu_blocks_override=blocks,
            kv_cache_memory_bytes=256 << 20,
            max_num_seqs=16,
            max_num_batched_tokens=256,
            enforce_eager=True,
            seed=0,
            disable_log_stats=False,
        )
        policy = {} if kv_policy is None else {"kv_policy": kv_policy}
        # Engines collect the whole heap nine times between start and end: half a second each, once is enough (`close`).
        # They freeze it with themselves in it (that they thaw it again is off: conftest.py), and scan all modules for
        # kernels, which does nothing the second time.
        register = patch.object(CpuPlatform, REGISTER, _register_kernels_once, create=True)
        # Dummy steps at start are of requests that are made up.
        with patch("gc.collect"), patch("gc.freeze"), register, patch.object(graphs, "made_up", True):
            self.llm = LLM(str(model), **{**defaults, **kwargs}, **policy)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self._ids = itertools.count()

    @property
    def manager(self):
        return self.managers[0]

    @property
    def managers(self):
        """Of each KV group that may have holes, or of all without the plugin."""
        return getattr(self.scheduler, "kv_managers", self.all_managers)

    @property
    def all_managers(self):
        """Of each KV group, those of sliding windows included."""
        return self.scheduler.kv_cache_manager.coordinator.single_type_managers

    @property
    def worker(self):
        return self.core.model_executor.driver_worker.worker

    @property
    def runtime(self):
        """The worker's side of the plugin, in the first KV group."""
        return self.worker.kv_evict.groups[0]

    @property
    def free_blocks(self):
        return self.pool.get_num_free_blocks()

    @property
    def all_blocks(self):
        """Blocks of the pool; the null block is not one of them."""
        return self.pool.num_gpu_blocks - 1

    def held_by(self, req_id):
        """Physical blocks of a request, by its id inside the engine."""
        tables = [manager.req_to_blocks.get(req_id, []) for manager in self.all_managers]
        return [block.block_id for table in tables for block in table if not block.is_null]

    def held_blocks(self):
        """Physical blocks that any request holds."""
        requests = set().union(*(manager.req_to_blocks for manager in self.all_managers))
        return set().union(*map(self.held_by, requests))

    def metrics(self):
        """Values of the plugin's metrics by (name without prefix, policy), and of vLLM's counters by name."""
        values = {}
        for metric in self.llm.get_metrics():
            if metric.name.startswith("vllm:kv_evict_"):
                values[metric.name.removeprefix("vllm:kv_evict_"), metric.labels["policy"]] = metric.value
            elif hasattr(metric, "value"):
                values[metric.name] = metric.value
        return values

    def drain(self):
        """One more step after the last request, with which workers hear that it ended."""
        self.llm.llm_engine.step()

    def assert_nothing_left(self):
        """All is done: every block is back in the pool, and nothing is remembered of any request."""
        self.drain()
        assert not self.held_blocks()
        assert self.free_blocks == self.all_blocks
        assert all(block.ref_cnt == 0 for block in self.pool.blocks if not block.is_null)
        assert not any(getattr(manager, "residents", None) for manager in self.all_managers)
        assert not any(manager.take_over_trigger() for manager in self.managers)
        for group in self.worker.kv_evict.groups:
            kinds = Compactor, Originals, PromptScores
            compactor, originals, prompts = (part_of(group, kind) for kind in kinds)
            assert not group.with_holes and not (compactor and compactor.mergers)
            assert originals is None or originals.is_empty
            if prompts is not None:
                known = self.scheduler.part(Reconstructions).scores
                assert prompts.is_empty and len(prompts.numbers) == len(known._prompts)
            if (sums := sums_of(group)) is not None:
                assert not sums._slots
                assert sorted(sums._free) == list(range(len(sums._sums)))

    def close(self):
        from vllm.distributed import cleanup_dist_env_and_memory

        with patch("gc.collect"):
            del self.llm, self.core, self.scheduler, self.pool
            cleanup_dist_env_and_memory()
        gc.collect()
        if not Engine.frozen:
            # Only once: tests may still hold parts of an engine, which would never be collected.
            gc.freeze()
            Engine.frozen = True

    def generate(self, prompts, params=None, **sampling):
        """Outputs of token-id prompts, greedy by default."""
        return self.llm.generate(
            [{"prompt_token_ids": list(map(int, prompt))} for prompt in prompts],
            params or greedy(**sampling),
            use_tqdm=False,
        )

    def add(self, prompt, request_id=None, priority=0, lora_request=None, **sampling):
        """Queue a request for `run`; `prompt`: token ids, or vLLM's dictionary (images)."""
        request_id = request_id or f"r{next(self._ids)}"
        tokens = prompt if isinstance(prompt, dict) else {"prompt_token_ids": list(map(int, prompt))}
        about = {"priority": priority, "lora_request": lora_request}
        self.llm.llm_engine.add_request(request_id, tokens, greedy(**sampling), **about)
        return request_id

    def run(self, on_step=None):
        """Step until all is done; returns finished outputs by request id. `on_step(self)` is called after each step."""
        done = {}
        while self.llm.llm_engine.has_unfinished_requests():
            for output in self.llm.llm_engine.step():
                if output.finished:
                    done[output.request_id] = output
            if on_step:
                on_step(self)
        return done

    def answered(self, requests, on_step=None):
        """Run requests as `traced`; returns (prompt, output, `Trace`) of each."""
        return [(prompt, *its) for (prompt, _), *its in zip(requests, *self.traced(requests, on_step), strict=True)]

    def traced(self, requests, on_step=None):
        """Run (prompt, sampling dict) pairs together; returns their outputs and `Trace`s, in order.

        Records what the engine does, at the scheduler: tokens of each step and holes decided after it.
        """
        traces, ids = {}, [f"t{next(self._ids)}" for _ in requests]
        schedule, update = self.scheduler.schedule, self.scheduler.update_from_output

        def start(req_id, computed):
            # A request that starts over after preemption starts a new trace.
            before = traces.get(_external(req_id))
            known = self.scheduler.requests[req_id].num_tokens
            traces[_external(req_id)] = Trace(
                start=computed, known=known, restarts=before.restarts + 1 if before else 0
            )

        def recorded_schedule(*args, **kwargs):
            output = schedule(*args, **kwargs)
            for new in output.scheduled_new_reqs:
                start(new.req_id, new.num_computed_tokens)
            cached = output.scheduled_cached_reqs
            for req_id, computed in zip(cached.req_ids, cached.num_computed_tokens):
                if req_id in cached.resumed_req_ids:
                    start(req_id, computed)
            for req_id, tokens in output.num_scheduled_tokens.items():
                trace = traces[_external(req_id)]
                trace.steps.append(tokens)
                trace.drafts.append(list(output.scheduled_spec_decode_tokens.get(req_id, ())))
                trace.settled.append(tokens - len(trace.drafts[-1]))
            return output

        def recorded_update(scheduler_output, model_runner_output):
            result = update(scheduler_output, model_runner_output)
            for req_id in scheduler_output.num_scheduled_tokens:
                trace = traces[_external(req_id)]
                if scheduler_output.scheduled_spec_decode_tokens.get(req_id):
                    row = model_runner_output.req_id_to_index[req_id]
                    trace.steps[-1] = trace.settled[-1] + len(model_runner_output.sampled_token_ids[row]) - 1
                trace.groups = trace.groups or [trace, *(Trace() for _ in self.managers[1:])]
                for group, manager in zip(trace.groups, self.managers):
                    group.evicted.append(sorted(holes_of(getattr(manager, "changes", {})).get(req_id, [])))
                    blocks = manager.req_to_blocks.get(req_id, [])
                    group.held.append(sum(not block.is_null for block in blocks))
            return result

        self.scheduler.schedule, self.scheduler.update_from_output = recorded_schedule, recorded_update
        try:
            for request_id, (prompt, sampling) in zip(ids, requests):
                self.add(prompt, request_id, **sampling)
            outputs = self.run(on_step)
        finally:
            self.scheduler.schedule, self.scheduler.update_from_output = schedule, update
        return [outputs[i] for i in ids], [traces[i] for i in ids]


def _external(req_id):
    """The id that the test gave: vLLM appends a random suffix to it."""
    return req_id.split("-")[0]


def after(owner, name, look):
    """Call `look` with each result of a method of one object, and with the call's positional arguments."""
    call = getattr(owner, name)

    def watched(*args, **kwargs):
        result = call(*args, **kwargs)
        look(result, *args)
        return result

    setattr(owner, name, watched)


def greedy(max_tokens=16, **sampling):
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **sampling})


def random_prompt(length, seed=0, vocab=256):
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


def random_requests(*lengths):
    """Requests for `Engine.traced`, of pairs (tokens of a random prompt, tokens to generate)."""
    return [
        (random_prompt(length, seed), {"max_tokens": tokens, "logprobs": 1})
        for seed, (length, tokens) in enumerate(lengths)
    ]


def logprobs_of(output):
    """Sampled tokens' log-probabilities of an output's first completion, float [n]."""
    completion = output.outputs[0]
    return np.array([step[token].logprob for step, token in zip(completion.logprobs, completion.token_ids)])


def exactly(outputs):
    """Tokens, log-probabilities and cached tokens of each output, to compare to the bit."""
    return [(output.outputs[0].token_ids, logprobs_of(output).tolist(), output.num_cached_tokens) for output in outputs]


def assert_like_stock(make, prompts, *policies, max_tokens=20, **options):
    """`full` answers as stock vLLM does, to the bit; so do policies that evict nothing of these prompts."""
    stock, *others = (
        exactly(make(policy, **options).generate(prompts, max_tokens=max_tokens, logprobs=0))
        for policy in (None, {"name": "full"}, *policies)
    )
    assert all(answers == stock for answers in others)


__all__ = [
    "PLAN",
    "V2",
    "Engine",
    "Trace",
    "after",
    "assert_like_stock",
    "exactly",
    "greedy",
    "logprobs_of",
    "random_prompt",
    "random_requests",
]


def leave_async(patched):
    """Async scheduling is left as it was asked for, until `patched`, a MonkeyPatch, undoes it.

    vLLM's CPU platform switches it off at start.
    """
    update = CpuPlatform.check_and_update_config.__func__

    def keep_async(cls, vllm_config):
        wanted = vllm_config.scheduler_config.async_scheduling
        update(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    patched.setattr(CpuPlatform, "check_and_update_config", classmethod(keep_async))


@contextmanager
def async_as_asked():
    """Leave engines asynchronous in a context, as `leave_async` does."""
    with pytest.MonkeyPatch.context() as patched:
        leave_async(patched)
        yield
