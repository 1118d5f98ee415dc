"""Measures what audits say of policies and budgets, beside the needles that the answers name, and what audits cost.

    python benchmarks/audit.py [--requests 100] [--policies h2o snapkv] [--budgets 0.5 0.25 0.1]

The embedded model answers questions about texts of --context tokens, in bfloat16. *What audits say*: all answers are
audited, a fifth of the requests run under `full`, as the control. *What they cost*: the load of `load.py`, with shares
of the answers audited, in turn, --rounds times. There answers wait for no idle engine, so audits run between requests
that keep coming; what is left runs after the last token, and counts. Time is the CPU time of the process.

    python benchmarks/audit.py --policies --shares 0 0.01 0.05 1 --rounds 3 --requests 32    # costs alone

Each run is a process of its own. Writes a Markdown table and a JSON with hardware, versions, command and figures to
--out.
"""

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import load
import numpy as np
from engines import greedy, make_llm, run_batch, scheduler_of
from prometheus_client import REGISTRY
from reports import in_child, progress, publish, run_script, spread

MODEL = Path(__file__).parents[1] / "examples" / "needle" / "model"
TOKENS = 16
#: Shares of the answers that are audited to measure the cost.
SHARES = (0.0, 0.01, 0.05, 1.0)


def needles(context: int, requests: int) -> tuple[list, list[list[int]], object]:
    """Samples with a needle each, their token ids, and the model's tokenizer."""
    from vllm_evict.tools.eval.prompts import Prompts
    from vllm_evict.tools.eval.tasks import make
    from vllm_evict.tools.eval.words import Filler

    prompts, filler = Prompts(str(MODEL)), Filler()
    samples = [
        make("niah", context, (index + 0.5) / requests, index, 0, prompts.count, filler) for index in range(requests)
    ]
    return samples, [prompts.ids(sample) for sample in samples], prompts.tokenizer


def settle(llm: Any) -> None:
    """Run all audits that wait."""
    while scheduler_of(llm).has_requests():
        llm.llm_engine.step()


def audits_of(llm: Any) -> dict[str, dict[str, float]]:
    """Return the counts of audits from /metrics: of requests that lost blocks, and of those that lost none."""
    audits: dict[str, dict[str, float]] = {"evicted": defaultdict(float), "control": defaultdict(float)}
    for family in REGISTRY.collect():
        for sample in family.samples:
            name = sample.name.removeprefix("vllm:kv_evict_audit_")
            if name != sample.name and name.endswith("_total") and "kept" in sample.labels:
                audits["control" if sample.labels["kept"] == "all" else "evicted"][name[:-6]] += sample.value
    return audits


def child(spec: dict) -> dict:
    """Figures of one run: needles found, audits by share kept, seconds."""
    from vllm_evict.tools.eval.score import score

    options = spec["options"]
    samples, ids, tokenizer = needles(options["context"], options["requests"])
    policy = {"name": spec["policy"], "budget": spec["budget"], "allow": ["full"], "audit": spec["audit"]}
    longest = max(map(len, ids)) + TOKENS
    blocks = options["requests"] * -(-longest // 32)
    llm = make_llm(
        MODEL,
        policy,
        dtype="bfloat16",
        max_model_len=longest,
        block_size=32,
        num_gpu_blocks_override=blocks,
        kv_cache_memory_bytes=1 << 30,
        max_num_batched_tokens=1024,
        max_num_seqs=16,
    )
    llm.generate([{"prompt_token_ids": ids[0]}], greedy(2), use_tqdm=False)
    settle(llm)
    llm.reset_prefix_cache()
    before = audits_of(llm)
    asked = [greedy(TOKENS, extra_args={"kv_policy": "full"} if index % 5 == 0 else None) for index in range(len(ids))]
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in ids], asked, use_tqdm=False)
    served = time.perf_counter() - start
    settle(llm)
    seconds, end = time.perf_counter() - start, tokenizer.eos_token_id
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for index, (sample, output) in enumerate(zip(samples, outputs)):
        tokens = list(output.outputs[0].token_ids)
        text = tokenizer.decode(tokens[: tokens.index(end)] if end in tokens else tokens)
        whose = found["full" if index % 5 == 0 else spec["policy"]]
        whose[0] += score(text, sample) == 1
        whose[1] += 1
    audits = audits_of(llm)
    for kept, figures in before.items():
        audits[kept] = {name: value - figures[name] for name, value in audits[kept].items()}
    return {
        "found": found,
        "audits": audits,
        "served_seconds": served,
        "seconds": seconds,
        "tokens": sum(map(len, ids)) + TOKENS * len(ids),
    }


def cost(spec: dict) -> dict:
    """CPU seconds of one load, to the last token and to the last audit; latencies; what was audited."""
    from vllm_evict.features.audit.engine import Audits

    options, seed = argparse.Namespace(**spec["load"]), spec["round"]
    _, batch = load.needles(options, seed)
    policy = {"name": "h2o", "budget": options.floor, "sink": 32, "recent": 64, "buffer": 0, "audit": spec["audit"]}
    llm = load.engine_for(options, policy, enable_prefix_caching=True)
    run_batch(llm, [ids[::-1] for _, ids in batch[:2]], 8)
    settle(llm)
    parts, before = scheduler_of(llm).mechanisms.of(Audits), audits_of(llm)["evicted"]
    for part in parts:
        part.idle_only = part.sparing = 0.0
        part._skips.clear()
    start = time.process_time()
    times = load.arrivals(options, seed)
    run = load.run_load(llm, [ids for _, ids in batch], times, options.output, "steps", {}, lambda: settle(llm))
    after = audits_of(llm)["evicted"]
    return {
        "cpu_seconds": time.process_time() - start,
        "served_cpu_seconds": run.cpu_seconds,
        "latency_cpu_seconds": run.latency_cpu_seconds,
        "audits": after["requests"] - before["requests"],
        "computed_tokens": after["computed_tokens"] - before["computed_tokens"],
        "skipped": {why: count for part in parts for why, count in part._skips.items()},
        "tokens": sum(len(ids) for _, ids in batch) + options.output * len(batch),
    }


def share(part: float, whole: float) -> str:
    from vllm_evict.tools.eval.stats import wilson

    low, high = wilson(part, int(whole))
    return f"{part / whole:.2f} ({low:.2f}-{high:.2f})"


def table(report: dict) -> str:
    lines = [
        "| policy | budget | needles | identical | changed | nats a token | missed mass | control identical "
        "| needles under `full` | tokens computed for audits |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for run in report["says"]:
        evicted, control = run["audits"]["evicted"], run["audits"]["control"]
        own, full = run["found"][run["policy"]], run["found"]["full"]
        cells = (
            f"`{run['policy']}`",
            run["budget"],
            f"{own[0]} of {own[1]}",
            share(evicted["identical"], evicted["requests"]),
            share(evicted["changed"], evicted["requests"]),
            f"{evicted['gap_nats'] / evicted['tokens']:.3f}",
            f"{evicted['missed_mass'] / evicted['measured']:.0%}",
            f"{control['identical']:.0f} of {control['requests']:.0f}",
            f"{full[0]} of {full[1]}",
            f"{(evicted['computed_tokens'] + control['computed_tokens']) / run['tokens']:.1%}",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def table_of_costs(report: dict) -> str:
    """A row for each share: CPU time beside the round's run without audits, median and each round."""
    lines = [
        "| audited | audits, skipped | tokens computed for them, of the requests' own | CPU time, of that without "
        "| to the last token alone | latency p50 / p99, of that without |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    rounds = defaultdict(list)
    for run in report["costs"]:
        rounds[run["audit"]].append(run)
    without = rounds[0.0]
    for audit, runs in rounds.items():
        audits, skipped = (sum(map(count, runs)) for count in (audited, left_out))
        computed, own = (sum(run[name] for run in runs) for name in ("computed_tokens", "tokens"))
        whole, served = (
            spread([run[name] / bare[name] for run, bare in zip(runs, without)], ".2f")
            for name in ("cpu_seconds", "served_cpu_seconds")
        )
        latencies = " / ".join(
            f"{statistics.median(slowest(run, at) / slowest(bare, at) for run, bare in zip(runs, without)):.2f}"
            for at in (50, 99)
        )
        cells = (f"{audit:.0%}", f"{audits:.0f}, {skipped}", f"{computed / own:.1%}", whole, served, latencies)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def audited(run: dict) -> float:
    return run["audits"]


def left_out(run: dict) -> int:
    return sum(run["skipped"].values())


def slowest(run: dict, percent: int) -> float:
    return float(np.percentile(run["latency_cpu_seconds"], percent))


def tables(report: dict) -> str:
    made = [table(report)] if report["says"] else []
    return "\n\n".join(made + ([table_of_costs(report)] if report["costs"] else []))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--context", type=int, default=1024, help="tokens of a text")
    parser.add_argument("--policies", nargs="*", default=["h2o", "snapkv"])
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.5, 0.25, 0.1], help="shares of the prompt")
    parser.add_argument(
        "--shares", nargs="*", type=float, default=SHARES, help="of answers that are audited, for costs; 0 among them"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of costs")
    parser.add_argument("--load", type=float, default=1.0, help="of costs: see load.py")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="OpenMP threads")
    parser.add_argument("--out", default="out/audit")
    parser.add_argument("--write", type=Path, help="measure nothing: write the prompts as JSONL, for vllm-evict tune")
    options = parser.parse_args()
    if options.write:
        rows = ({"prompt": sample.text} for sample in needles(options.context, options.requests)[0])
        options.write.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    if options.shares and 0 not in options.shares:
        parser.error("costs are beside no audit: --shares needs 0")
    says = [
        {"policy": policy, "budget": budget, "audit": 1.0} for policy in options.policies for budget in options.budgets
    ]
    costs = [{"audit": audit, "round": number} for number in range(options.rounds) for audit in options.shares]
    loaded = vars(loads(options)) if costs else {}
    report: dict[str, Any] = {"says": [], "costs": [], "load": loaded}
    with progress() as bar:
        task = bar.add_task("", total=len(says) + len(costs))
        for kind, spec in [*(("says", spec) for spec in says), *(("costs", spec) for spec in costs)]:
            bar.update(task, description=f"{kind} {spec}")
            asked = {**spec, "options": vars(options), "load": loaded}
            report[kind].append({**spec, **in_child(kind, asked)})
            bar.advance(task)
    publish(options, "audit", f"Audits of {options.requests} answers", tables, report)


def loads(options: argparse.Namespace) -> argparse.Namespace:
    """The options of `load.py`: half its text, a third of its answers, in a pool that has room for most of them."""
    return argparse.Namespace(
        requests=options.requests, context=options.context, output=256, block_size=32, pool_blocks=384, at_once=24,
        load=options.load, floor=options.context // 4, clock="steps", step_seconds=0.005, dtype="bfloat16",
    )  # fmt: skip


if __name__ == "__main__":
    run_script(main, says=child, costs=cost)
