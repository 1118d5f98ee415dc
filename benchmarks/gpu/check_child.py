"""One case of benchmarks/gpu/check.py, in a process of its own: runs an engine and lists faults.

As a script: python check_child.py SPECIFICATION ANSWER, both of JSON.
"""

import argparse
import json
import math
import os
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from check_models import RandomModel
from check_steps import Steps
from engine_child import Engine, after
from engines import greedy, scheduler_of
from load import DTYPES, KV_NUMBERS, MODEL, QUESTION, has_found, needles

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
BLOCK = 32
#: Largest difference of log-probabilities from stock's, in bfloat16, if two runs of stock differ too.
CLOSE = 0.15


class Wrong(list[str]):
    """The faults, a sentence each."""

    def unless(self, right: bool, sentence: str) -> None:
        if not right:
            self.append(sentence)


class Checked:
    """An engine with the needle model, and its documents.

    Args:
        spec: of `check.py`: `policy`, `backend`, `graphs`, `requests`, `context`, `output`, `chunk`, `blocks`, `cached`
            (whether there is a prefix cache), `engine` (further arguments).
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        engine = {
            "dtype": "bfloat16",
            "max_model_len": spec["context"] + QUESTION + spec["output"],
            "block_size": BLOCK,
            "kv_cache_memory_bytes": spec["blocks"] * BLOCK * KV_NUMBERS * DTYPES["bfloat16"],
            "max_num_seqs": spec["requests"],
            "max_num_batched_tokens": spec["chunk"],
            "enable_prefix_caching": spec["cached"],
            "enforce_eager": not spec["graphs"],
            **spec["engine"],
        }
        model = self.random = None
        if spec["model"]:
            self.random = RandomModel(spec["model"])
            model, engine = self.random.folder, engine | self.random.engine(spec["blocks"])
        self.engine = Engine({"model": str(model or MODEL), "policy": spec["policy"], "engine": engine, "vocab": 0})
        self.llm = self.engine.llm
        if self.random is None:
            self.tokenizer, self.batch = needles(argparse.Namespace(**spec), seed=0)
        else:
            self.batch = [(None, self.random.prompt(spec["context"]))]
        #: Kernel that attended in full CUDA graphs -> steps.
        self.graphs: Counter[str] = Counter()
        if self.engine.plugin is not None:
            after(self.engine.plugin, "choose_graph", lambda chosen, *_: self.graphs.update([chosen and chosen.value]))
            if os.environ.get("VLLM_GPU_SYNC_CHECK"):
                # vLLM checks its runner alone; these run before and after it.
                for name in ("begin", "rearrange", "end"):
                    setattr(self.engine.plugin, name, without_waits(getattr(self.engine.plugin, name)))
        self.pool = scheduler_of(self.llm).kv_cache_manager.block_pool
        self.usable = self.pool.get_num_free_blocks()
        self.wrong = Wrong()

    @property
    def steps_in_flight(self) -> int:
        return 1 + bool(self.llm.llm_engine.vllm_config.scheduler_config.async_scheduling)

    def ask(self, policies: list[str] | None = None) -> list[Any]:
        """Outputs for all documents at once. Checks that all log-probabilities are numbers and all blocks are returned.

        Args:
            policies: of each request; None: the server's.
        """
        prompts = [{"prompt_token_ids": ids} for _, ids in self.batch]
        extra = [{}] * len(prompts) if policies is None else [{"extra_args": {"kv_policy": name}} for name in policies]
        sampling = [greedy(self.spec["output"], logprobs=0, **each) for each in extra]
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        for _ in range(self.steps_in_flight + 1):  # workers get the end of the last request
            self.llm.llm_engine.step()
        finite = all(math.isfinite(value) for output in outputs for value in logprobs(output))
        self.wrong.unless(finite, "a log-probability is no number")
        short = sum(len(output.outputs[0].token_ids) < self.spec["output"] for output in outputs)
        self.wrong.unless(not short, f"{short} requests ended early")
        free = self.pool.get_num_free_blocks()
        self.wrong.unless(free == self.usable, f"{self.usable - free} blocks did not come back to the pool")
        for group in self.engine.plugin.groups if self.engine.plugin else ():
            left = [len(group.with_holes), len(group.measured)]
            self.wrong.unless(not any(left), f"holes or sums of {max(left)} requests were left in a worker")
        return outputs

    def found(self, outputs: list[Any]) -> int:
        """Answers that hold the number of their document."""
        answers = zip(self.batch, outputs, strict=True)
        return sum(has_found(self.tokenizer, sample, list(o.outputs[0].token_ids)) for (sample, _), o in answers)

    def check_usage(self, outputs: list[Any], kept: int, groups: int = 1) -> dict[str, Any]:
        """Check that each request lost blocks, held no more than its bound, and ended with its budget.

        Args:
            kept: tokens of the budget, over KV groups.
        """
        usages = [output.kv_usage for output in outputs]
        tokens = self.spec["context"] + QUESTION + self.spec["output"] - 1  # the last token is never computed
        budget, all_blocks = -(-kept // BLOCK), -(-tokens // BLOCK) * groups
        ahead = groups * (-(-self.spec["chunk"] * self.steps_in_flight // BLOCK) + 1)
        evicted, peak = [usage.evicted_blocks for usage in usages], max(u.peak_resident_blocks for u in usages)
        self.wrong.unless(min(evicted) > 0, f"{evicted.count(0)} of {len(evicted)} requests lost no block")
        self.wrong.unless(peak <= budget + ahead, f"a request held {peak} blocks, {budget} + {ahead} are allowed")
        at_end = all_blocks - min(evicted)
        most = budget + groups * (1 + self.steps_in_flight)
        self.wrong.unless(at_end <= most, f"a request ended with {at_end} blocks, at most {most} are right")
        return {"evicted_blocks": sum(evicted), "peak_blocks": peak, "bound": budget + ahead, "blocks_at_end": at_end}

    def check_acted(self, measures: bool = True, decides: bool = True) -> None:
        """Check that the plugin's parts ran, as far as `Counts` counts them (not tokens)."""
        counts = self.engine.counts.take()
        self.wrong.unless(counts["preemptions"] == 0, f"{counts['preemptions']} preemptions")
        if decides:
            self.wrong.unless(counts["decisions"] > 0, "the scheduler decided nothing")
            sums = counts["measured_requests"]
            self.wrong.unless((sums > 0) == measures, f"running sums of {sums} requests")
            self.wrong.unless(counts["steps_with_holes"] > 0, "no step went over a table with holes")
            # On a device vLLM's kernel decodes requests that are not measured.
            own = measures and self.engine.plugin.groups[0].decodes
            self.wrong.unless(not own or counts["own_decode_steps"] > 0, "no step was decoded by the plugin's kernel")
            kind = "own" if measures else "stock"
            replayed = self.graphs[kind] + (self.graphs["own"] if len(self.engine.plugin.groups) > 1 else 0)
            graphs = not self.spec["graphs"] or replayed > 0
            self.wrong.unless(graphs, f"no step replayed a full CUDA graph in which {kind} kernels attend")

    def check_found(self, name: str, found: int) -> None:
        """Check the number of needles: `wanted` is [least, most]."""
        least, most = self.spec["wanted"][name]
        counted = f"{name}: {found} of {len(self.batch)} needles"
        self.wrong.unless(least <= found <= most, f"{counted}, {least} to {most} are right")


def without_waits(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call in which torch raises if the host waits for the device."""
    import torch

    def checked(*args: Any, **kwargs: Any) -> Any:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return call(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    return checked


def logprobs(output: Any) -> list[float]:
    """Log-probabilities of the tokens of an output, natural logarithms."""
    completion = output.outputs[0]
    return [step[token].logprob for step, token in zip(completion.logprobs, completion.token_ids, strict=True)]


def said(outputs: list[Any]) -> dict[str, list]:
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return {"tokens": tokens, "logprobs": [logprobs(output) for output in outputs]}


# ---- checks: engine -> findings


def stock(checked: Checked) -> dict[str, Any]:
    """Tokens of vLLM without the plugin, and whether a second run equals the first."""
    outputs, again = checked.ask(), checked.ask()
    found = checked.found(outputs)
    checked.check_found("found", found)
    return {"found": found, "said": said(outputs), "steady": said(outputs) == said(again)}


def same(checked: Checked) -> dict[str, Any]:
    """Compare with stock, to the bit; or, if `wanted` is "close", within a tolerance up to the first other token."""
    want, outputs = checked.spec["given"]["said"], checked.ask()
    got, found = said(outputs), checked.found(outputs)
    checked.check_found("found", found)
    off, agree = 0.0, 0
    for tokens, logs, wanted, wanted_logs in zip(*got.values(), *want.values(), strict=True):
        differs = (at for at, pair in enumerate(zip(tokens, wanted, strict=True)) if pair[0] != pair[1])
        until = next(differs, len(tokens))
        agree += until == len(tokens)
        off = max([off, *(abs(a - b) for a, b in zip(logs[:until], wanted_logs))])
    result = {"found": found, "same_tokens": agree, "requests": len(outputs), "largest_difference": off}
    usages = [output.kv_usage.evicted_blocks for output in outputs]
    checked.wrong.unless(not any(usages), f"{sum(usages)} blocks were evicted, wanted none")
    tolerance, sums = checked.spec["wanted"].get("close"), checked.engine.counts.take()["measured_requests"]
    checked.wrong.unless((sums > 0) == (tolerance is not None), f"running sums of {sums} requests")
    if tolerance is not None or not checked.spec["given"]["steady"]:
        tolerance = CLOSE if tolerance is None else tolerance
        checked.wrong.unless(off <= tolerance, f"log-probabilities are {off:.3g} off stock's, {tolerance:g} is allowed")
    else:
        checked.wrong.unless(got == want, f"{agree} of {len(outputs)} requests say what stock says; off by {off:.3g}")
    return result


def evicts(checked: Checked) -> dict[str, Any]:
    """A tight budget: check needles, held blocks, and the prefix cache."""
    wanted, groups = checked.spec["wanted"], len(checked.engine.plugin.groups)
    outputs = checked.ask()
    result = {"found": checked.found(outputs), **checked.check_usage(outputs, wanted["kept"], groups)}
    checked.check_acted(wanted["measures"], wanted["decides"])
    # The same prompts hit their pure blocks, and lose the others again.
    outputs = checked.ask()
    result["cached_tokens"] = sum(output.num_cached_tokens for output in outputs)
    result["found again"] = checked.found(outputs)
    checked.wrong.unless(result["cached_tokens"] > 0, "the prefix cache was never hit")
    for name in ("found", "found again"):
        checked.check_found(name, result[name])
    return result


def reaches(checked: Checked) -> dict[str, Any]:
    """Layers of decodes read a part of all blocks, which are on the host or not: needles, and blocks that came back."""
    from vllm_evict.compute.choosing import Choosing

    host, choices = "evict" in checked.spec["policy"], Counter[int]()
    read = Choosing.read

    def counted(self: Any, call: Any, *args: Any, **kwargs: Any) -> None:
        choices[call.place] += 1
        read(self, call, *args, **kwargs)

    Choosing.read = counted  # type: ignore[method-assign]
    outputs = checked.ask()
    usages = [output.kv_usage for output in outputs]
    again = checked.ask()
    Choosing.read = read  # type: ignore[method-assign]
    result = {"found": checked.found(outputs), "found again": checked.found(again)}
    for name, found in result.items():
        checked.check_found(name, found)
    result["choices"] = sum(choices.values())
    checked.wrong.unless(result["choices"] > 0, "no layer chose what it reads")
    lost = sum(usage.evicted_blocks for usage in usages) if host else 0
    if host:
        result["spilled_blocks"], result["fetched_blocks"], result["in_room_blocks"] = (
            sum(getattr(usage, name) or 0 for usage in usages)
            for name in ("spilled_blocks", "fetched_blocks", "in_room_blocks")
        )
        checked.wrong.unless(result["spilled_blocks"] > 0, "no block went to the host")
        checked.wrong.unless(result["fetched_blocks"] > 0, "no block came from the host")
        checked.wrong.unless(lost > 0, "no block left the pool")
    if checked.spec["cached"]:
        result["cached_tokens"] = sum(output.num_cached_tokens for output in again)
        checked.wrong.unless(result["cached_tokens"] > 0, "the prefix cache was never hit")
    return result


def mixed(checked: Checked) -> dict[str, Any]:
    """Requests with and without evictions in one batch, on prefixes that the former have published."""
    policy = checked.spec["policy"]["name"]
    checked.ask()
    names = ["full" if index % 2 else policy for index in range(len(checked.batch))]
    outputs = checked.ask(names)
    full = [output for output, name in zip(outputs, names, strict=True) if name == "full"]
    lost = sum(output.kv_usage.evicted_blocks for output in full)
    checked.wrong.unless(not lost, f"requests under full lost {lost} blocks")
    hit = sum(output.num_cached_tokens for output in full)
    checked.wrong.unless(hit > 0, "requests under full never hit the prefix cache")
    batch = checked.batch
    checked.batch = [each for each, name in zip(batch, names, strict=True) if name == "full"]
    found = checked.found(full)
    checked.check_found("found", found)
    return {"found": found, "cached_tokens": hit}


def under_pressure(checked: Checked) -> dict[str, Any]:
    """More requests than the pool holds: all end, none is preempted."""
    outputs = checked.ask()
    found, lost = checked.found(outputs), sum(output.kv_usage.evicted_blocks for output in outputs)
    checked.wrong.unless(lost > 0, "nothing was evicted: the pool was not too small")
    checked.check_acted()
    checked.check_found("found", found)
    return {"found": found, "evicted_blocks": lost, "pool_blocks": checked.usable}


def oracle(checked: Checked) -> dict[str, Any]:
    """Compare log-probabilities and decisions of one request with a dense Llama in float32 (tests/harness/oracle).

    The Llama has holes from the same steps as the workers.
    """
    sys.path.insert(0, str(ROOT / "tests/harness"))
    import torch
    from oracle.model import DenseLlama
    from oracle.replay import Config, replay_told

    steps = Steps(scheduler_of(checked.llm))
    (output,) = checked.ask()
    checked.check_acted()
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    counts, told, decided, moved = steps.of_request(len(tokens) - 1)
    policy, kept = checked.spec["policy"], {"accumulate", "window", "budget", "buffer", "sink", "recent"}
    config = Config(policy["name"], BLOCK, **{key: value for key, value in policy.items() if key in kept})
    dense, first = DenseLlama(MODEL), len(output.prompt_token_ids) - 1
    replayed = replay_told(dense, tokens, counts, config, told, decided, moved=moved)
    full = replay_told(dense, tokens, counts, Config("full", BLOCK), [[]] * len(counts), [[]] * len(counts))

    def error(replay: Any) -> float:
        logs = torch.log_softmax(replay.logits.double(), -1)
        want = [logs[first + at, token].item() for at, token in enumerate(output.outputs[0].token_ids)]
        return sum(abs(a - b) for a, b in zip(logprobs(output), want, strict=True)) / len(want)

    chosen = [(set(ours), set(its)) for ours, its in zip(decided[:-1], replayed.evicted[:-1], strict=True) if ours]
    alike = sum(len(ours & its) for ours, its in chosen) / max(sum(len(ours) for ours, _ in chosen), 1)
    result = {"mean_error": error(replayed), "without_eviction": error(full), "decisions": len(chosen), "alike": alike}
    off = f"log-probabilities are {result['mean_error']:.3g} off the oracle's on average"
    if "context" in policy:
        still = replay_told(dense, tokens, counts, config, told, decided)
        result |= {"moves": len(moved), "without_moves": error(still)}
        checked.wrong.unless(len(moved) > 1, f"what it keeps moved up {len(moved)} times")
        nearer = 2 * result["mean_error"] <= result["without_moves"]
        checked.wrong.unless(nearer, f"{off}, and {result['without_moves']:.3g} from what it were without moves")
    limits = checked.spec["wanted"]
    checked.wrong.unless(result["mean_error"] <= limits["error"], f"{off}, {limits['error']:g} is allowed")
    control = result["without_eviction"] > limits["control"]
    checked.wrong.unless(control, "what was evicted makes no difference: this says nothing")
    checked.wrong.unless(alike >= limits["alike"], f"{alike:.0%} of the blocks that went are the oracle's choice")
    return result


def compared(checked: Checked, of_holes: Any, of_all: Any, output: Any, **counts: Any) -> dict[str, Any]:
    """Compare log-probabilities with logits [n, V] of a dense model, and with those of one that sees everything."""
    import torch

    first = len(output.prompt_token_ids) - 1

    def error(logits: Any) -> float:
        logs = torch.log_softmax(logits.double(), -1)
        want = [logs[first + at, token].item() for at, token in enumerate(output.outputs[0].token_ids)]
        return sum(abs(a - b) for a, b in zip(logprobs(output), want, strict=True)) / len(want)

    result = {"mean_error": error(of_holes), "of_all": error(of_all), **counts}
    wanted = checked.spec["wanted"]
    off = f"log-probabilities are {result['mean_error']:.3g} off the oracle's on average"
    checked.wrong.unless(result["mean_error"] <= wanted["error"], f"{off}, {wanted['error']:g} is allowed")
    nearer = wanted["nearer"] * result["mean_error"] <= result["of_all"]
    checked.wrong.unless(nearer, f"{off}, and {result['of_all']:.3g} off those of a model that sees everything")
    return result


def chooses(checked: Checked) -> dict[str, Any]:
    """Compare log-probabilities of one request with a dense Llama in float32 whose layers choose for themselves."""
    sys.path.insert(0, str(ROOT / "tests/harness"))
    import torch
    from oracle.model import DenseLlama
    from oracle.selection import Chooser

    steps = Steps(scheduler_of(checked.llm))
    (output,) = checked.ask()
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    counts, *_ = steps.of_request(len(tokens) - 1)
    policy = checked.spec["policy"]
    fields = {key: policy[key] for key in ("read", "sink", "recent", "hold", "read_prompts") if key in policy}
    dense = DenseLlama(MODEL)
    chooser, logits = Chooser(dense, **fields, tables=checked.spec["backend"] == "CPU_ATTN"), {}
    for all_of in (False, True):
        cache, end, found = dense.new_cache(), 0, []
        for count in counts:
            first, end = end, end + count
            mask = torch.arange(end) <= torch.arange(first, end)[:, None]
            if not all_of:
                mask = chooser.mask(mask, list(range(-(-end // BLOCK))), count == 1)
            found.append(dense.forward(tokens[first:end], cache, mask)[0])
        logits[all_of] = torch.cat(found)
    checked.wrong.unless(chooser.chosen > 0, "the oracle never chose")
    return compared(checked, logits[False], logits[True], output, choices=chooser.chosen)


def masked(checked: Checked) -> dict[str, Any]:
    """Compare log-probabilities of one request on a random model with transformers', whose queries miss what went."""
    sys.path.insert(0, str(ROOT / "tests/harness"))
    from oracle.replay import Config, replay_told

    scheduler = scheduler_of(checked.llm)
    steps, size = Steps(scheduler), scheduler.kv_managers[0].block_size
    (output,) = checked.ask()
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    counts, told, decided, _ = steps.of_request(len(tokens) - 1)
    dense, nothing = checked.random.dense(), [[]] * len(counts)
    of_holes, of_all = (
        replay_told(dense, tokens, counts, Config("full", size), holes, nothing).logits for holes in (told, nothing)
    )
    gone = sum(map(len, decided))
    checked.wrong.unless(gone > 0, "nothing was evicted")
    return compared(checked, of_holes, of_all, output, evicted_blocks=gone)


OF_ENGINES = stock, same, evicts, reaches, mixed, under_pressure, oracle, chooses, masked
CHECKS = {check.__name__: check for check in OF_ENGINES}


def kernels(spec: dict[str, Any]) -> dict[str, Any]:
    """Tests of the kernels alone, on this device."""
    import importlib.util

    import pytest

    class Counter:
        def __init__(self) -> None:
            self.outcomes: dict[str, list[str]] = defaultdict(list)

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                self.outcomes[report.outcome].append(report.nodeid)

    counter = Counter()
    parallel = ["-n", "4", "--dist", "worksteal"] if importlib.util.find_spec("xdist") else []
    files = sorted(str(path) for pattern in spec["files"] for path in (ROOT / "tests").rglob(pattern))
    sys.path = [path for path in sys.path if path not in (str(FOLDER), str(FOLDER.parent))]  # they have an engine.py
    status = int(pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *parallel, *files], [counter]))
    counts = {outcome: len(ids) for outcome, ids in counter.outcomes.items()}
    failed = counter.outcomes["failed"]
    wrong = Wrong()
    wrong.unless(not failed, f"{len(failed)} tests failed: {', '.join(failed[:3])}{' …' * (len(failed) > 3)}")
    wrong.unless(bool(failed) or status == 0, f"pytest left with status {status}")
    wrong.unless(counts.get("passed", 0) > 0, "no test ran")
    return {"found": counts | {"failures": failed}, "wrong": wrong}


def run(spec: dict[str, Any]) -> dict[str, Any]:
    if spec["check"] == "kernels":
        return kernels(spec)
    checked = Checked(spec)
    facts = checked.engine.facts()
    found = CHECKS[spec["check"]](checked)
    backend, wanted = facts["attention_backend"].split()[0], spec["backend"]
    checked.wrong.unless(backend == wanted, f"attention backend {backend} in the place of {wanted}")
    graphs = facts["cudagraph_mode"] != "NONE"
    checked.wrong.unless(graphs == spec["graphs"], f"CUDA graphs: {facts['cudagraph_mode']}")
    checked.wrong.unless(facts["plugin_loaded"] == (spec["policy"] is not None), "the plugin is where it should not be")
    return {"facts": facts, "found": found, "wrong": checked.wrong}


def main(spec: str, answer: str) -> None:
    try:
        result = run(json.loads(Path(spec).read_text()))
    except BaseException as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    Path(answer).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
