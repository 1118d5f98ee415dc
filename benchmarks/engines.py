"""Engines in the process of a benchmark: prompts, runs of a batch, and timed decode steps."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Wall time and this process's CPU time, by their names in `Run`.
CLOCKS = ("seconds", "cpu_seconds")


@dataclass
class Run:
    """One batch on one engine, timed from the first request to the last token."""

    seconds: float
    cpu_seconds: float
    output_tokens: int
    preemptions: int
    peak_blocks: int
    peak_requests: int
    evicted_blocks: int
    #: After each step: seconds since the start, and blocks in use.
    samples: list[tuple[float, int]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


def make_llm(model: Path, kv_policy: Any = None, **options: Any) -> Any:
    """A vLLM engine in this process; without a policy it does not need the plugin."""
    from vllm import LLM

    policy = {} if kv_policy is None else {"kv_policy": kv_policy}
    options = {"dtype": "float32", "enforce_eager": True, "seed": 0, "disable_log_stats": False, **options}
    return LLM(str(model), **policy, **options)


def greedy(max_tokens: int, **options: Any) -> Any:
    """Greedy sampling of a fixed number of tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        max_tokens=max_tokens,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **options,
    )


def random_prompts(requests: int, tokens: int, vocab: int, seed: int = 0) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (requests, tokens), generator=generator).tolist()


def scheduler_of(llm: Any) -> Any:
    """The engine's scheduler: it lives in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def run_batch(llm: Any, prompts: list[list[int]], output_tokens: int, on_step: Any = None) -> Run:
    """Run a batch like `LLM.generate`, and note the pool's use after each step.

    Args:
        llm: from `make_llm`.
        prompts: token ids.
        output_tokens: of each request.
        on_step: called after each step with the outputs of the requests that it ended, if given.
    """
    scheduler, engine = scheduler_of(llm), llm.llm_engine
    pool = scheduler.kv_cache_manager.block_pool
    usable = pool.get_num_free_blocks()
    preempted = preemptions(llm)
    run = Run(0.0, 0.0, 0, 0, 0, 0, 0)
    start, cpu_start = time.perf_counter(), time.process_time()
    for index, prompt in enumerate(prompts):
        engine.add_request(f"request-{index}", {"prompt_token_ids": prompt}, greedy(output_tokens))
    while engine.has_unfinished_requests():
        outputs = engine.step()
        used = usable - pool.get_num_free_blocks()
        run.samples.append((time.perf_counter() - start, used))
        run.peak_blocks = max(run.peak_blocks, used)
        run.peak_requests = max(run.peak_requests, len(scheduler.running))
        for output in outputs:
            run.output_tokens += len(output.outputs[0].token_ids)
            usage = getattr(output, "kv_usage", None)
            run.evicted_blocks += usage.evicted_blocks if usage else 0
        if on_step:
            on_step(outputs)
    run.seconds, run.cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    run.preemptions = preemptions(llm) - preempted
    return run


def preemptions(llm: Any) -> int:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")


@contextmanager
def decoding(llm: Any, prompts: list[list[int]], max_tokens: int, **options: Any) -> Iterator[None]:
    """In this context every step decodes all of these requests, up to `max_tokens`; then they are aborted.

    Args:
        llm: from `make_llm`.
        prompts: token ids.
        max_tokens: of each request. The first ones decode while the last ones' prompts are computed.
        options: of `greedy`.
    """
    engine, scheduler = llm.llm_engine, scheduler_of(llm)
    ids = [f"request-{index}" for index in range(len(prompts))]
    for request_id, prompt in zip(ids, prompts, strict=True):
        engine.add_request(request_id, {"prompt_token_ids": prompt}, greedy(max_tokens, **options))
    # Two tokens each, because the first decode steps allocate buffers.
    while len(scheduler.running) < len(ids) or any(r.num_output_tokens < 2 for r in scheduler.running):
        engine.step()
        assert engine.has_unfinished_requests(), "requests ended before the last one decoded"
    yield
    assert len(scheduler.running) == len(ids), "a request ended or was preempted: these were not steps of all"
    engine.abort_request(ids)
    while engine.has_unfinished_requests() or scheduler.has_unfinished_requests():
        engine.step()


def timed_steps(llm: Any, steps: int) -> dict[str, list[float]]:
    """Seconds and CPU seconds of each of `steps` steps."""
    timings: dict[str, list[float]] = {clock: [] for clock in CLOCKS}
    for _ in range(steps):
        start, cpu_start = time.perf_counter(), time.process_time()
        llm.llm_engine.step()
        timings["seconds"].append(time.perf_counter() - start)
        timings["cpu_seconds"].append(time.process_time() - cpu_start)
    return timings
