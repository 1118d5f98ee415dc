"""Checks whether eviction is right on this machine: real vLLM engines behind each attention backend of its device.

    python benchmarks/gpu/check.py [--seconds 480] [--cases stock full h2o] [--out out/gpu/check.json]

The model is examples/needle/model, in bfloat16: it finds every needle with full attention, and none in evicted blocks.
On a GPU cases run behind FLASH_ATTN, TRITON_ATTN and, if it is installed, FLASHINFER, eager and with CUDA graphs;
without a GPU, behind CPU_ATTN. Cases, the most telling first:

stock      vLLM without the plugin, the reference of the others. If it fails, these are skipped.
full       has stock's tokens, and its log-probabilities to the bit.
covering   the same for h2o with a budget that no request outgrows.
measured   the same, within 0.15 in log-probabilities, for h2o whose requests could outgrow the budget and never do.
oracle     h2o, one request: log-probabilities and evicted blocks against a dense Llama in float32.
context    the same for a request that outgrows its context, so that keys are rotated on the device.
h2o, snapkv, snapkv by token, keydiff, sink-window, duo
           a budget of a quarter of the prompt (keydiff: a half; duo: half of the heads keep all): evictions, blocks
           held and given back, needles found, and a second pass with the prefix cache of the first.
mixed      requests under full beside requests that lose blocks, on the same cached prefixes.
pressure   h2o, `when: pressure`, `admit: true`, in a pool for half of the requests: all end, none is preempted.
host       blocks over a quarter of the prompt go to the host, and decodes read a quarter: all needles are found, and in
           a second pass, whose prefixes are hits. "host, pressure" is the same in a pool for half of the requests.
read       nothing is evicted, and decodes read a quarter: all needles are found. "prompts": prompts read a half, too.
host, oracle; read, oracle; prompts, oracle
           one request: log-probabilities against a dense Llama whose layers choose blocks for themselves.
drafts     h2o with drafts by n-grams. fp8: h2o over a cache in fp8.
windows, latents, states
           h2o on small random models (Gemma 2, DeepSeek V3, Granite 4 without experts): log-probabilities against
           transformers' own model of the same weights, whose queries do not see what was evicted.
waits      h2o, with vLLM told to fail a step that waits for the device or compiles a kernel, the plugin's parts before
           and after vLLM's runner included. "waits, host" is the same for host.
kernels    the tests of the Triton and CUDA kernels, on the device (they need pytest and tests/).

Freed blocks are full of NaN (VLLM_EVICT_POISON=1). The expected number of needles of a policy was measured on vLLM's
CPU engine, with the same documents; two more or fewer are right. Each case is a process of its own, has --limit
seconds, and prints a line when it is done: OK, FAIL or skipped, with the reason. When --seconds are over no case
begins, running cases are ended, and cases that did not run are named. The exit status is 1 if a case failed, or none
was OK.

Writes a JSON with the machine, versions, command and all findings to --out, after every case, and the engines' logs
beside it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import ready  # noqa: F401 - before what may be missing
from machine import the_gpu
from reports import ENVIRONMENT, conditions, to_json

ROOT = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("check_child.py")
OK, FAIL, SKIPPED, LEFT_OUT = "OK", "FAIL", "skipped", "left out"
MODES = EAGER, GRAPHS = "eager", "graphs"
#: Documents, tokens of each and of its answer: the last token is never computed, and the others fill 34 blocks.
LOAD = {"requests": 12, "context": 1024, "output": 57, "chunk": 1056, "blocks": 1024, "cached": True}
TOKENS = 1024 + 8 + 57
HEADS = str(ROOT / "configs" / "heads" / "needle")
KEPT = {"budget": 256, "buffer": 0, "sink": 32, "recent": 64}
HOST = {"name": "full", "evict": "host", "host": "64MiB", **KEPT}
READING = {"name": "full", "read": 256, "sink": 32, "recent": 64}
#: Of one request, whose layers choose anew with each token.
CHOSEN = {"name": "full", "sink": 32, "recent": 32, "read": 128, "hold": 1}
H2O = {"name": "h2o", "accumulate": "last", "window": 16, **KEPT}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
#: Case -> its model.
CLASSES = {"windows": "gemma2", "latents": "DeepseekV3ForCausalLM", "states": "granitemoehybrid"}
#: Backends of latents that are like those of keys and values.
OF_LATENTS = {"FLASH_ATTN": "FLASH_ATTN_MLA", "TRITON_ATTN": "TRITON_MLA", "CPU_ATTN": "CPU_MLA"}
POISON = {"VLLM_EVICT_POISON": "1"}
#: Seconds that a case needs at least: none begins with less.
LEAST = 30


@dataclass(frozen=True)
class Case:
    """One engine and what is checked of it (`check_child.CHECKS`).

    Attributes:
        wanted: expected result.
        load: differences from `LOAD`.
        environment, engine: variables and further arguments of this case's engine.
        limit: seconds, if not `--limit`.
        needs: a case of the same backend and mode whose findings this one gets.
        model: class of a random model (`check_models.MODELS`); empty for the one that finds needles.
        backend, mode: empty for cases without an engine.
    """

    name: str
    check: str
    policy: dict[str, Any] | None = None
    wanted: dict[str, Any] = field(default_factory=dict)
    load: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    limit: float = 0
    needs: str = ""
    model: str = ""
    backend: str = ""
    mode: str = ""

    @property
    def title(self) -> str:
        return " ".join(part for part in (self.backend, self.mode, self.name) if part)


def evicts(name: str, policy: dict[str, Any], found: int, again: int, **wanted: Any) -> Case:
    """`found`, `again`: needles on the CPU engine, in the first pass and in the second."""
    counts = {"found": around(found), "found again": around(again)}
    wanted = {"kept": KEPT["budget"], "measures": True, "decides": True, **counts, **wanted}
    return Case(name, "evicts", policy, wanted, environment=POISON)


def around(found: int) -> tuple[int, int]:
    return max(found - 2, 0), min(found + 2, LOAD["requests"])


ALL = {"found": (LOAD["requests"],) * 2}
EVERY = {"found": around(12), "found again": around(12)}
ONE = {"requests": 1, "context": 600, "output": 97, "chunk": 256, "cached": False}
CLOSER, OF_RANDOM = {"error": 0.1, "nearer": 3.0}, {"error": 0.3, "nearer": 4.0}
NEAR = {"error": 0.05, "control": 0.1, "alike": 0.9}
SAME = {"needs": "stock", "load": {"cached": False}}
CASES = [
    Case("stock", "stock", None, ALL, {"cached": False}, {"VLLM_PLUGINS": ""}),
    Case("full", "same", {"name": "full"}, ALL, **SAME),
    evicts("h2o", H2O, 12, 12),
    Case(
        "oracle",
        "oracle",
        H2O | {"budget": 128, "recent": 32},
        NEAR,
        ONE,
        POISON,
    ),
    Case("kernels", "kernels"),
    Case(
        "pressure",
        "under_pressure",
        H2O | {"when": "pressure", "admit": True},
        {"found": around(12)},
        {"chunk": 512, "blocks": 6 * 35, "cached": False},
        POISON,
    ),
    Case("host", "reaches", HOST, EVERY, environment=POISON),
    Case("read", "reaches", READING, EVERY, environment=POISON),
    Case(
        "host, oracle",
        "chooses",
        CHOSEN | HOST | {"budget": 160, "recent": 32},
        CLOSER,
        ONE,
        POISON,
    ),
    Case("read, oracle", "chooses", CHOSEN, CLOSER, ONE, POISON),
    Case("prompts", "reaches", {**READING, "read_prompts": 512}, EVERY, environment=POISON),
    Case("prompts, oracle", "chooses", CHOSEN | {"read_prompts": 288}, CLOSER, ONE, POISON),
    Case(
        "host, pressure",
        "reaches",
        HOST | {"when": "pressure", "admit": True},
        EVERY,
        {"chunk": 512, "blocks": 6 * 35 + 35, "cached": False},
        POISON,
    ),
    Case("mixed", "mixed", H2O | {"allow": ["full"]}, {"found": (6, 6)}, environment=POISON),
    Case(
        "context",
        "oracle",
        H2O | {"budget": 128, "recent": 32, "context": 320, "allow": []},
        NEAR,
        ONE | {"chunk": 64, "cached": True},
        POISON,
    ),
    # Half of the heads keep all blocks, the others sinks, window and the block that is being written.
    evicts(
        "duo",
        {"name": "duo", "gates": HEADS, "sparsity": 0.5, "sink": 32, "recent": 64},
        *(12, 12),
        kept=TOKENS - 1 + 32 + 64 + 32,
        measures=False,
    ),
    evicts("snapkv by token", {"name": "snapkv", "granularity": "token", "kernel": 7, **KEPT}, 12, 12, decides=False),
    Case("measured", "same", H2O | {"budget": TOKENS - 1}, ALL | {"close": 0.15}, **SAME),
    Case("covering", "same", H2O | {"budget": TOKENS}, ALL, **SAME),
    replace(
        evicts("waits", H2O, 12, 12),
        environment={"VLLM_GPU_SYNC_CHECK": "error"},  # filling blocks with NaN waits, so there is no poison
        engine={"jit_monitor_mode": "error"},
    ),
    evicts("snapkv", {"name": "snapkv", **KEPT}, 12, 12),
    # keydiff finds no more at half of the prompt; sink-window finds the needles inside its window.
    replace(evicts("drafts", H2O, 12, 12), engine={"speculative_config": NGRAM}),
    replace(evicts("fp8", H2O, 12, 12), engine={"kv_cache_dtype": "fp8"}),
    *(
        Case(name, "masked", H2O | {"budget": 128, "recent": 32}, OF_RANDOM, ONE | {"output": 65}, POISON, model=model)
        for name, model in CLASSES.items()
    ),
    Case(
        "waits, host",
        "reaches",
        HOST,
        EVERY,
        environment={"VLLM_GPU_SYNC_CHECK": "error"},
        engine={"jit_monitor_mode": "error"},
    ),
    evicts("keydiff", {"name": "keydiff", **KEPT, "budget": 512}, 7, 7, kept=512, measures=False),
    evicts("sink-window", {"name": "sink-window", "sink": 32, "recent": 192, "buffer": 0}, 2, 2, measures=False),
]
#: This many first cases run behind all backends and in both modes before any other begins.
TELLING = 4
#: Files of tests that launch kernels; test_triton_compiled.py compiles for other GPUs.
KERNELS = (
    *("test_triton_[!c]*.py", "test_fold.py", "test_put.py", "test_take.py"),
    *("test_cuda_kernels.py", "test_xformers.py"),
)


def places() -> list[tuple[str, str]]:
    """Backends of the device, with the modes that each has."""
    import torch

    if not torch.cuda.is_available():
        return [("CPU_ATTN", EAGER)]
    backends = ["FLASH_ATTN", "TRITON_ATTN"] + ["FLASHINFER"] * (find_spec("flashinfer") is not None)
    return [(backend, mode) for backend in backends for mode in (EAGER, GRAPHS)]


def ordered(cases: list[Case], where: list[tuple[str, str]]) -> Iterator[Case]:
    """All cases, the most telling first."""
    for some in (cases[:TELLING], cases[TELLING:]):
        for name in [case.name for case in some if case.check == "kernels"]:
            yield next(case for case in some if case.name == name)
        for backend, mode in where:
            for case in some:
                if case.check != "kernels":
                    yield replace(case, backend=backend, mode=mode)


def unserved(case: Case) -> str:
    """Why a case can't run; empty if it can."""
    from vllm_evict.compute.attention.backends import WHOLE_LAYERS

    if case.name == "duo" and case.backend in WHOLE_LAYERS:
        return f"policies that split heads are not for {case.backend}"
    if "read_prompts" in (case.policy or {}) and case.backend in WHOLE_LAYERS:
        return f"prompts that read less are not for {case.backend}"
    if case.check in ("oracle", "chooses", "masked", "kernels") and not (ROOT / "tests/harness/oracle").is_dir():
        return "there is no tests/ here"
    if case.name == "latents" and case.backend == "CPU_ATTN":
        return "vLLM's kernel for rotations on CPUs turns the wrong heads of latents"
    if case.name == "kernels" and find_spec("pytest") is None:
        return "there is no pytest here"
    return ""


class Check:
    """All cases of one call.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.end = options, time.monotonic() + options.seconds
        self.report: dict[str, Any] = {}
        self.outcomes: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def all(self, cases: list[Case], jobs: int) -> None:
        """Run the cases, `jobs` at once; a case that needs another one begins when that is done."""
        done: dict[str, Future] = {}
        with ThreadPoolExecutor(jobs) as pool:
            for case in cases:
                needed = done.get(replace(case, name=case.needs).title) if case.needs else None
                done[case.title] = pool.submit(self._one, case, needed)

    def _one(self, case: Case, needed: Future | None) -> dict[str, Any]:
        start = time.monotonic()
        given = needed.result() if needed is not None else None
        if reason := unserved(case):
            outcome = {"status": SKIPPED, "reason": reason}
        elif case.needs and (given is None or given["status"] != OK):
            outcome = {"status": SKIPPED, "reason": f"{case.needs} is not there to compare with"}
        elif self.end - time.monotonic() < LEAST:
            outcome = {"status": LEFT_OUT, "reason": "--seconds are over"}
        else:
            start = time.monotonic()
            outcome = self._run(case, given)
        outcome = {"case": case.title, **outcome, "seconds": round(time.monotonic() - start, 1)}
        with self._lock:
            self.outcomes.append(outcome)
            self.write()
            print(line(outcome), flush=True)
        return outcome

    def _run(self, case: Case, given: dict[str, Any] | None) -> dict[str, Any]:
        spec = specification(case, given)
        environment = {**ENVIRONMENT, "VLLM_LOGGING_LEVEL": "INFO", **os.environ, **case.environment}
        left = self.end - time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            given_spec, answer, log = Path(folder, "spec.json"), Path(folder, "answer.json"), Path(folder, "log")
            # Cases side by side would write the same files of torch.compile's cache.
            environment["VLLM_CACHE_ROOT"] = str(Path(folder, "cache"))
            given_spec.write_text(json.dumps(spec))
            limit = case.limit or self.options.limit
            with log.open("w") as file:
                command = [sys.executable, str(CHILD), str(given_spec), str(answer)]
                ended = wait(command, environment, file, min(limit, left))
            words = log.read_text(errors="replace")
            with self._lock, self.options.log.open("a") as file:
                file.write(f"---- {case.title}\n{words}\n")
            if ended is None and left < limit:
                return {"status": LEFT_OUT, "reason": "ended: --seconds were over"}
            if ended is None:
                return {"status": FAIL, "reason": f"it took more than {limit:g} s{last(words)}"}
            if not answer.exists():
                return {"status": FAIL, "reason": f"its process died, status {ended}{last(words)}"}
            result = json.loads(answer.read_text())
        return judged(case, result)

    def write(self) -> None:
        self.options.out.write_text(to_json(self.report | {"cases": self.outcomes}) + "\n")


def specification(case: Case, given: dict[str, Any] | None) -> dict[str, Any]:
    """The specification for `check_child.run`; `given` is the outcome of the case that it needs."""
    spec = {**LOAD, **case.load, "check": case.check, "policy": case.policy, "wanted": case.wanted}
    spec |= {"backend": case.backend, "graphs": case.mode == GRAPHS, "files": KERNELS}
    spec |= {"engine": dict(case.engine), "given": given and given["found"], "model": case.model}
    if case.name == "latents":
        spec["backend"] = OF_LATENTS.get(case.backend, case.backend)
    if case.backend not in ("", "CPU_ATTN"):
        # The pool's size is given, so utilization is only the memory that has to be free at start.
        spec["engine"] |= {"attention_config": {"backend": spec["backend"]}, "gpu_memory_utilization": 0.05}
    if spec["graphs"]:
        # Few graphs, the largest for all requests at once.
        sizes = [size for size in (1, 4, 8) if size < spec["requests"]] + [spec["requests"]]
        spec["engine"]["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    return spec


def wait(command: list[str], environment: dict[str, str], log: Any, seconds: float) -> int | None:
    """Exit status of a process; None if it was ended with its children."""
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        return process.wait(max(seconds, 0))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def last(words: str) -> str:
    lines = [each.strip() for each in words.splitlines() if each.strip()]
    return f"; the last it said: {lines[-1][:300]}" if lines else ""


def judged(case: Case, result: dict[str, Any]) -> dict[str, Any]:
    """Status and findings of a case whose process has answered."""
    if "error" in result:
        # If stock vLLM does not run, the plugin has not failed.
        status, reason = (SKIPPED, "stock vLLM fails: ") if case.check == "stock" else (FAIL, "")
        return {"status": status, "reason": reason + result["error"]}
    found = {name: result[name] for name in ("found", "facts") if name in result}
    if result["wrong"]:
        return {"status": FAIL, "reason": "; ".join(result["wrong"]), **found}
    return {"status": OK, "reason": "", **found}


def line(outcome: dict[str, Any]) -> str:
    figures = {name: value for name, value in outcome.get("found", {}).items() if isinstance(value, bool | int | float)}
    said = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in figures.items())
    reason = ": ".join(part for part in (outcome["reason"], said) if part)
    return f"{outcome['status']:<8} {outcome['case']:<34} {reason} ({outcome['seconds']:.0f} s)"


def table(report: dict[str, Any]) -> str:
    """Return a Markdown table of the cases of engines in a report, or in its `runs`, of which the last that came to an
    end counts: for each backend, eager and with graphs, those that passed and those that failed.
    """
    outcomes: dict[str, str] = {}
    for case in (case for run in report.get("runs", [report]) for case in run["cases"]):
        if case["status"] != LEFT_OUT or case["case"] not in outcomes:
            outcomes[case["case"]] = case["status"]
    lines = ["| backend | | passed | failed |", "|---|---|---|---|"]
    for backend in dict.fromkeys(title.partition(" ")[0] for title in outcomes):
        for mode in MODES:
            own = {name: status for title, status in outcomes.items() for name in title.split(f"{backend} {mode} ")[1:]}
            cells = ["; ".join(name for name, its in own.items() if its == status) for status in (OK, FAIL)]
            lines += [f"| {backend} | {mode} | {' | '.join(cells)} |"] * any(cells)
    return "\n".join(lines)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    every = {"nargs": "+", "metavar": "CASE", "choices": names, "help": ", ".join(names)}
    parser.add_argument("--cases", **every)
    parser.add_argument("--backends", nargs="+", metavar="BACKEND", help="only these, such as TRITON_ATTN")
    parser.add_argument("--modes", nargs="+", choices=(EAGER, GRAPHS), help="only this one")
    parser.add_argument("--seconds", type=float, default=1800, help="limit for all cases of this call")
    parser.add_argument("--limit", type=float, default=240, help="seconds of one case")
    parser.add_argument("--jobs", type=int, help="cases at once; on a GPU a fourth of the CPUs, four at most")
    parser.add_argument("--out", type=Path, default=Path("out/gpu/check.json"), help="JSON with all findings")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    where = places()
    on_gpu = where[0][0] != "CPU_ATTN"
    gpu = the_gpu() if on_gpu else None
    where = [
        (backend, mode)
        for backend, mode in where
        if backend in (options.backends or [backend]) and mode in (options.modes or [mode])
    ]
    chosen = [case for case in CASES if case.name in (options.cases or [case.name])]
    # The cases that chosen ones need run too. On a CPU `make test` runs the tests of kernels.
    needed = {case.needs for case in chosen} - {case.name for case in chosen}
    chosen = [case for case in CASES if case in chosen or case.name in needed]
    if not on_gpu and not options.cases:
        chosen = [case for case in chosen if case.check != "kernels"]
    check = Check(options)
    check.report = {"gpu": gpu, **conditions(), "limit": options.limit, "seconds": options.seconds}
    options.log = options.out.with_suffix(".log")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.log.write_text("")
    print(gpu["name"] if gpu else "no GPU here: vLLM's CPU engine", flush=True)
    jobs = options.jobs or (max(min(len(os.sched_getaffinity(0)) // 4, 4), 1) if gpu and gpu["shared"] else 1)
    check.all(list(ordered(chosen, where)), jobs)
    by_status = {status: [o["case"] for o in check.outcomes if o["status"] == status] for status in (OK, FAIL, SKIPPED)}
    left_out = [outcome["case"] for outcome in check.outcomes if outcome["status"] == LEFT_OUT]
    print(", ".join(f"{len(cases)} {status}" for status, cases in by_status.items()))
    if left_out:
        print(f"left out, --seconds were over: {', '.join(left_out)}")
    print(f"written: {options.out}")
    if by_status[FAIL] or not by_status[OK]:
        sys.exit(1)


if __name__ == "__main__":
    main()
