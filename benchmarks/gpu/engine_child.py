"""One engine of benchmarks/gpu/engine.py: what it does, and what is counted meanwhile.

As a script it is the engine's process: it reads a specification, then calls, a line of JSON each, and answers likewise.
"""

import json
import os
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# transformers tries to import a library named kernels: in the process of an engine it must not get kernels.py.
sys.path = [*(each for each in sys.path if __name__ != "__main__" or each != str(HERE)), str(HERE.parent)]

from engines import decoding, make_llm, random_prompts, run_batch, scheduler_of, timed_steps  # noqa: E402

#: Steps before those that are timed.
SETTLE = 4
COUNTED = (
    "scheduled_tokens",
    "preemptions",
    "decisions",
    "evicted_blocks",
    "measured_requests",
    "steps_with_holes",
    "own_decode_steps",
)
#: Of what the plugin does in a step, in a profiler's trace.
MARK = "kv_evict:"
#: The part of it that is attention itself, in the place of vLLM's kernel or beside it; the others are bookkeeping.
ATTENTION = "attention"


class Engine:
    """A vLLM engine in this process.

    Args:
        spec: `model` (a path), `policy` (None: stock vLLM), `engine` (arguments of `LLM`), `vocab`.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        start = time.perf_counter()
        self.spec, self.vocab = spec, spec["vocab"]
        self.llm = make_llm(spec["model"], spec["policy"], **spec["engine"])
        self.worker = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        self.plugin = getattr(self.worker, "kv_evict", None)
        self.counts = Counts(scheduler_of(self.llm), self.plugin)
        self.started = time.perf_counter() - start

    def facts(self) -> dict[str, Any]:
        """The engine's versions, attention backend, mode of CUDA graphs, model runner and KV pool."""
        import torch
        import vllm
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

        config, runner = self.llm.llm_engine.vllm_config, self.worker.model_runner
        layers = config.compilation_config.static_forward_context.values()
        # Layers of states have no implementation of attention.
        layer = next(layer for layer in layers if isinstance(layer, AttentionLayerBase) and hasattr(layer, "impl"))
        flash = getattr(layer.impl, "vllm_flash_attn_version", None)
        mode = runner.compilation_config.cudagraph_mode
        versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        versions |= {name: sys.modules[name].__version__ for name in ("triton", "vllm_evict") if name in sys.modules}
        return {
            "versions": versions,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "attention_backend": layer.attn_backend.get_name() + (f" (version {flash})" if flash else ""),
            "cudagraph_mode": getattr(mode, "name", str(mode)),
            "model_runner": "V2" if self.worker.use_v2_model_runner else "V1",
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "block_size": scheduler_of(self.llm).block_size,
            "pool_blocks": scheduler_of(self.llm).kv_cache_manager.block_pool.num_gpu_blocks,
            "plugin_loaded": "vllm_evict.integration.plugin" in sys.modules,
            "policy": self.spec["policy"],
            "seconds_to_start": self.started,
        }

    def batch(self, requests: int, prompt: int, output: int, seed: int = 0) -> dict[str, Any]:
        """Run all requests, from the first arrival to the last token, and count.

        "recomputed_tokens" were scheduled beyond one pass over prompts and outputs; "prefill_seconds" is the time of
        steps with tokens of prompts in them.
        """
        self.counts.take()
        last, prefill = time.perf_counter(), 0.0

        def on_step(outputs: list) -> None:
            nonlocal last, prefill
            now = time.perf_counter()
            prefill += now - last if self.counts.prefills else 0.0
            last = now

        run = run_batch(self.llm, random_prompts(requests, prompt, self.vocab, seed), output, on_step)
        counts = self.counts.take()
        run.samples.clear()
        # Several engines in a process lose vLLM's own metric of preemptions, so the scheduler counts them.
        result = asdict(run) | counts | {"prefill_seconds": prefill, "tokens_per_second": run.tokens_per_second}
        result["evicted_blocks_by_usage"] = run.evicted_blocks
        del result["samples"]
        result["recomputed_tokens"] = result.pop("scheduled_tokens") - requests * (prompt + output - 1)
        return result

    def latency(self, batch: int, contexts: list[int], steps: int, seed: int = 0) -> dict[str, Any]:
        """Seconds of decode steps of `batch` requests at each context, and counts."""
        size, chunk = self.spec["engine"]["block_size"], self.spec["engine"]["max_num_batched_tokens"]
        # A block more than the budget, if the context is no longer than the budget.
        prompts = random_prompts(batch, max(contexts) + size, self.vocab, seed)
        found = {}
        for context in contexts:
            self.counts.take()
            length = context + size
            with decoding(self.llm, [each[:length] for each in prompts], decode_room(batch, length, chunk, steps)):
                timed_steps(self.llm, SETTLE)
                seconds = timed_steps(self.llm, steps)["seconds"]
            found[str(context)] = {"seconds": seconds, **self.counts.take()}
        return found

    def step(self, batch: int, prompt: int, steps: int, seed: int = 0) -> dict[str, Any]:
        """Decode steps of `batch` requests: plain, under a profiler, and with waits for the device noted."""
        chunk = self.spec["engine"]["max_num_batched_tokens"]
        self.counts.take()
        prompts = random_prompts(batch, prompt, self.vocab, seed)
        with decoding(self.llm, prompts, decode_room(batch, prompt, chunk, 3 * steps)), Parts(self.plugin) as parts:
            timed_steps(self.llm, SETTLE)
            found = {"seconds": timed_steps(self.llm, steps)["seconds"]}
            for watched in ("traced", "waits"):
                self.counts.take()
                parts.clear()
                found[watched] = getattr(self, f"_{watched}")(parts, steps) | self.counts.take()
        return found

    def _traced(self, parts: "Parts", steps: int) -> dict[str, Any]:
        import torch
        from torch.profiler import ProfilerActivity, profile

        on_gpu = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
        with profile(activities=activities) as profiler, parts.watched():
            timed_steps(self.llm, steps)
            if on_gpu:
                torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(path))
            trace = json.loads(path.read_text())
        return {"steps": steps, "parts": device_times(trace), "host_seconds": dict(parts.seconds)}

    def _waits(self, parts: "Parts", steps: int) -> dict[str, Any]:
        """Synchronising calls that torch sees; None without a GPU."""
        import torch

        if not torch.cuda.is_available():
            timed_steps(self.llm, steps)
            return {"steps": steps, "plugin": None, "everywhere": None}
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with parts.watched(), parts.catching():
                timed_steps(self.llm, steps)
        finally:
            torch.cuda.set_sync_debug_mode(before)
        places = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in parts.waits)
        return {"steps": steps, "plugin": dict(parts.waited), "everywhere": dict(places)}

    def close(self) -> None:
        """Free the engine's memory, for the next engine of this process."""
        import gc

        from vllm.distributed import cleanup_dist_env_and_memory

        del self.llm, self.worker, self.plugin, self.counts
        cleanup_dist_env_and_memory()
        gc.collect()


def decode_room(batch: int, prompt: int, chunk: int, steps: int) -> int:
    """Tokens that each request may generate, so that none ends before the last one has decoded `steps` times."""
    return steps + batch * (-(-prompt // chunk) + 1) + 4 * SETTLE


class Counts:
    """Counts of scheduler and worker since the last `take`."""

    def __init__(self, scheduler: Any, plugin: Any) -> None:
        self.prefills = False
        self._counts: Counter[str] = Counter()
        after(scheduler, "schedule", self._planned)
        after(scheduler, "_preempt_request", self._preempted)
        if plugin is not None:
            self._groups = plugin.groups
            after(scheduler, "apply", self._decided)
            for group in plugin.groups:
                after(group, "view", partial(self._viewed, group))

    def take(self) -> dict[str, int]:
        """Return counts by name, and set them to zero.

        decisions: times that a request lost blocks. measured_requests: most that had running sums at once.
        steps_with_holes: steps in which attention looked through a view of tables with holes. own_decode_steps: steps
        in which the plugin's kernel decoded; on a GPU that is requests that are measured, and split heads.
        """
        taken = {name: self._counts[name] for name in COUNTED}
        self._counts.clear()
        return taken

    def _planned(self, output: Any, *_: Any, **__: Any) -> None:
        tokens = output.total_num_scheduled_tokens
        self.prefills = tokens > len(output.num_scheduled_tokens)
        self._counts["scheduled_tokens"] += tokens

    def _preempted(self, *_: Any, **__: Any) -> None:
        self._counts["preemptions"] += 1

    def _decided(self, _: None, action: Any) -> None:
        self._counts["decisions"] += 1
        self._counts["evicted_blocks"] += len(action.holes)

    def _viewed(self, group: Any, viewed: tuple[Any, Any], metadata: Any) -> None:
        seen, work = viewed
        measured = max(len(group.measured) for group in self._groups)
        self._counts["measured_requests"] = max(self._counts["measured_requests"], measured)
        self._counts["steps_with_holes"] += bool(group.with_holes) and seen is not metadata
        self._counts["own_decode_steps"] += work is not None and len(work.rows) > 0


def after(owner: Any, name: str, look: Callable[..., None]) -> None:
    """Call `look` with each result of a method of one object, and its arguments."""
    call = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        look(result, *args, **kwargs)
        return result

    setattr(owner, name, watched)


class Parts:
    """Marks the parts of the plugin in a step, while it is `watched`.

    Holes that are written into block tables are no part: they go into vLLM's own tables on the host, before vLLM copies
    these.
    """

    def __init__(self, plugin: Any) -> None:
        from vllm_evict.compute.work import StepWork

        self._calls = [(plugin, name, name) for name in ("begin", "rearrange", "end")]
        self._calls += [(group, "view", "view") for group in plugin.groups]
        self._calls.append((StepWork, "do", ATTENTION))
        self._on = False
        self.clear()

    def clear(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.waits: list[Any] = []
        self.waited: Counter[str] = Counter()

    def __enter__(self) -> "Parts":
        self._before = [(owner, name, vars(owner).get(name)) for owner, name, _ in self._calls]
        for owner, name, part in self._calls:
            setattr(owner, name, self._wrapped(getattr(owner, name), part))
        return self

    def __exit__(self, *_: Any) -> None:
        for owner, name, before in self._before:
            delattr(owner, name) if before is None else setattr(owner, name, before)

    @contextmanager
    def watched(self) -> Iterator[None]:
        self._on = True
        try:
            yield
        finally:
            self._on = False

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Note each wait that torch warns of."""
        import warnings

        with warnings.catch_warnings(record=True) as self.waits:
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
            yield

    def _wrapped(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        import torch

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not self._on:
                return call(*args, **kwargs)
            start, waits = time.perf_counter(), len(self.waits)
            with torch.profiler.record_function(MARK + part):
                result = call(*args, **kwargs)
            self.seconds[part] += time.perf_counter() - start
            self.waited[part] += len(self.waits) - waits
            return result

        return wrapped


def device_times(trace: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Launches under each mark of a profiler's Chrome trace.

    Args:
        trace: from `torch.profiler`, times in microseconds.

    Returns:
        Part -> `calls`, `host_us`, and on the device `launches` and `device_us`: kernels, copies and fills whose call
        to the CUDA runtime or driver lies within the mark, on its thread.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    parts: dict[str, dict[str, float]] = {}
    spans: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"].startswith(MARK):
            part = event["name"].removeprefix(MARK)
            found = parts.setdefault(part, {"calls": 0, "host_us": 0.0, "launches": 0, "device_us": 0.0})
            found["calls"] += 1
            found["host_us"] += event["dur"]
            spans[event["tid"]].append((event["ts"], event["ts"] + event["dur"], part))
    launched = {}
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {}):
            launched[event["args"]["correlation"]] = event
    if not any(launch["tid"] in spans for launch in launched.values()):
        # The tracer numbers threads differently for the device; all marks are from one thread.
        launched = {number: launch | {"tid": tid} for number, launch in launched.items() for tid in spans}
    for tid in spans:
        spans[tid].sort()
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        launch = launched.get(event["args"].get("correlation"))
        part = None if launch is None else _span_of(spans[launch["tid"]], launch["ts"])
        if part is not None:
            parts[part]["launches"] += 1
            parts[part]["device_us"] += event["dur"]
    return parts


def _span_of(spans: list[tuple[float, float, str]], at: float) -> str | None:
    """The part whose span contains a time; spans are sorted and do not overlap."""
    from bisect import bisect_right

    index = bisect_right(spans, at, key=lambda span: span[0]) - 1
    return spans[index][2] if index >= 0 and at <= spans[index][1] else None


def serve() -> None:
    """Reads a specification, then calls (method, arguments), each a line of JSON; answers (success, result)."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not look like an answer

    def answer(call: Callable[[], Any]) -> bool:
        try:
            worked, result = True, call()
        except BaseException:
            worked, result = False, traceback.format_exc()
        print(json.dumps([worked, result]), file=answers, flush=True)
        return worked

    engine: list[Engine] = []
    spec = json.loads(sys.stdin.readline())
    if answer(lambda: engine.append(Engine(spec))):
        for line in sys.stdin:
            method, arguments = json.loads(line)
            if not answer(lambda: getattr(engine[0], method)(**arguments)):
                break


if __name__ == "__main__":
    serve()
