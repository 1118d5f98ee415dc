"""One vLLM engine inside the test process, stepped by hand."""

import gc
import itertools
from dataclasses import dataclass, field

import numpy as np
from vllm import LLM, SamplingParams

from vllm_evict.core.plan import PLAN


@dataclass
class Trace:
    """What happened to one request: tokens of each step, and logical blocks evicted after it."""

    steps: list[int] = field(default_factory=list)
    start: int = 0
    evicted: list[list[int]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)


class Engine:
    """A small engine and a look inside it.

    Args:
        model: directory.
        kv_policy: None for stock vLLM.
        kwargs: engine arguments; the defaults make a small pool of 32-token blocks and short prefill chunks.
    """

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
        self.llm = LLM(str(model), **{**defaults, **kwargs}, **policy)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self._ids = itertools.count()

    @property
    def manager(self):
        return self.scheduler.kv_cache_manager.coordinator.single_type_managers[0]

    @property
    def worker(self):
        return self.core.model_executor.driver_worker.worker

    @property
    def free_blocks(self):
        return self.pool.get_num_free_blocks()

    def close(self):
        from vllm.distributed import cleanup_dist_env_and_memory

        del self.llm, self.core, self.scheduler, self.pool
        gc.collect()
        cleanup_dist_env_and_memory()

    def generate(self, prompts, params=None, **sampling):
        """Outputs of token-id prompts, greedy by default."""
        return self.llm.generate(
            [{"prompt_token_ids": list(map(int, prompt))} for prompt in prompts],
            params or greedy(**sampling),
            use_tqdm=False,
        )

    def add(self, prompt, request_id=None, **sampling):
        """Queue a request for `run`."""
        request_id = request_id or f"r{next(self._ids)}"
        self.llm.llm_engine.add_request(
            request_id, {"prompt_token_ids": list(map(int, prompt))}, greedy(**sampling)
        )
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

    def traced(self, requests):
        """Run (prompt, sampling dict) pairs together; returns their outputs and `Trace`s, in order.

        Records what the engine does, at the scheduler: tokens of each step and holes decided after it.
        """
        traces, ids = {}, [f"t{next(self._ids)}" for _ in requests]
        schedule, update = self.scheduler.schedule, self.scheduler.update_from_output

        def recorded_schedule(*args, **kwargs):
            output = schedule(*args, **kwargs)
            for new in output.scheduled_new_reqs:
                # A request that starts over after preemption starts a new trace.
                traces[_external(new.req_id)] = Trace(start=new.num_computed_tokens)
            cached = output.scheduled_cached_reqs
            for req_id, computed in zip(cached.req_ids, cached.num_computed_tokens):
                if req_id in cached.resumed_req_ids:
                    traces[_external(req_id)] = Trace(start=computed)
            for req_id, tokens in output.num_scheduled_tokens.items():
                traces[_external(req_id)].steps.append(tokens)
            return output

        def recorded_update(scheduler_output, model_runner_output):
            result = update(scheduler_output, model_runner_output)
            holes = getattr(self.scheduler, "_plan").holes if hasattr(self.scheduler, "_plan") else {}
            for req_id in scheduler_output.num_scheduled_tokens:
                trace = traces[_external(req_id)]
                trace.evicted.append(sorted(holes.get(req_id, [])))
                blocks = self.manager.req_to_blocks.get(req_id, [])
                trace.held.append(sum(not block.is_null for block in blocks))
            return result

        self.scheduler.schedule, self.scheduler.update_from_output = recorded_schedule, recorded_update
        try:
            for request_id, (prompt, sampling) in zip(ids, requests):
                self.add(prompt, request_id, **sampling)
            outputs = self.run()
        finally:
            self.scheduler.schedule, self.scheduler.update_from_output = schedule, update
        return [outputs[i] for i in ids], [traces[i] for i in ids]


def _external(req_id):
    """The id that the test gave: vLLM appends a random suffix to it."""
    return req_id.split("-")[0]


def greedy(max_tokens=16, **sampling):
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **sampling})


def random_prompt(length, seed=0, vocab=256):
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


def logprobs_of(output, index=0):
    """Sampled tokens' log-probabilities of one completion, float [n]."""
    completion = output.outputs[index]
    return np.array([step[token].logprob for step, token in zip(completion.logprobs, completion.token_ids)])


__all__ = ["PLAN", "Engine", "Trace", "greedy", "logprobs_of", "random_prompt"]
