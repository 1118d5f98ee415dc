"""Measures what audits say of policies and budgets, beside the needles that the answers name, and what audits cost.

    python benchmarks/audit.py [--requests 100] [--policies h2o snapkv] [--budgets 0.5 0.25 0.1]

The embedded model answers questions about texts of --context tokens, in bfloat16. *What audits say*: all answers are
audited, a fifth of the requests run under `full`, as the control. *What they cost*: the batch of the first policy and
budget, with shares of the answers audited, timed from the first request to the last audit; the CPUs of the machine
compute audits and requests alike, one after the other.

Each run is a process of its own. Writes a Markdown table and a JSON with hardware, versions, command and figures to
--out.
"""

import argparse
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from engines import greedy, make_llm, scheduler_of
from prometheus_client import REGISTRY
from reports import in_child, progress, publish, run_script

MODEL = Path(__file__).parents[1] / "examples" / "needle" / "model"
TOKENS = 16
#: Shares of the answers that are audited to measure the cost.
SHARES = (0.0, 0.01, 0.05, 1.0)


def needles(context: int, requests: int) -> tuple[list, list[list[int]], object]:
    """Samples with a needle each, their token ids, and the model's tokenizer."""
    from vllm_evict.eval.prompts import Prompts
    from vllm_evict.eval.tasks import make
    from vllm_evict.eval.words import Filler

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
    """What /metrics shows of audits: of requests that lost blocks, and of those that lost none."""
    audits: dict[str, dict[str, float]] = {"evicted": defaultdict(float), "control": defaultdict(float)}
    for family in REGISTRY.collect():
        for sample in family.samples:
            name = sample.name.removeprefix("vllm:kv_evict_audit_")
            if name != sample.name and name.endswith("_total") and "kept" in sample.labels:
                audits["control" if sample.labels["kept"] == "all" else "evicted"][name[:-6]] += sample.value
    return audits


def child(spec: dict) -> dict:
    """Figures of one run: needles found, audits by share kept, seconds."""
    from vllm_evict.eval.score import score

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


def share(part: float, whole: float) -> str:
    from vllm_evict.core.audit import wilson

    low, high = wilson(part, int(whole))
    return f"{part / whole:.2f} ({low:.2f}-{high:.2f})"


def table(report: dict) -> str:
    lines = [
        "| policy | budget | needles | identical | changed | nats a token | control identical | needles under `full` | "
        "tokens computed for audits |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
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
            f"{control['identical']:.0f} of {control['requests']:.0f}",
            f"{full[0]} of {full[1]}",
            f"{(evicted['computed_tokens'] + control['computed_tokens']) / run['tokens']:.1%}",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    if not report["costs"]:
        return "\n".join(lines)
    lines += [
        "",
        "| audited | audits | tokens computed for them | of the requests' own | requests, s | with audits, s |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for run in report["costs"]:
        parts = run["audits"].values()
        computed, audits = (sum(each.get(name, 0) for each in parts) for name in ("computed_tokens", "requests"))
        cells = (
            f"{run['audit']:.0%}",
            f"{audits:.0f}",
            f"{computed:,.0f}",
            f"{computed / run['tokens']:.1%}",
            f"{run['served_seconds']:.1f}",
            f"{run['seconds']:.1f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--context", type=int, default=1024, help="tokens of a text")
    parser.add_argument("--policies", nargs="+", default=["h2o", "snapkv"])
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.5, 0.25, 0.1], help="shares of the prompt")
    parser.add_argument(
        "--shares", nargs="*", type=float, default=SHARES, help="of answers that are audited, for costs"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="OpenMP threads")
    parser.add_argument("--out", default="out/audit")
    parser.add_argument("--write", type=Path, help="measure nothing: write the prompts as JSONL, for vllm-evict tune")
    options = parser.parse_args()
    if options.write:
        rows = ({"prompt": sample.text} for sample in needles(options.context, options.requests)[0])
        options.write.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    cases = [(policy, budget) for policy in options.policies for budget in options.budgets]
    specs = [("says", *case, 1.0) for case in cases] + [("costs", *cases[0], audit) for audit in options.shares]
    report: dict[str, list[dict]] = {"says": [], "costs": []}
    with progress() as bar:
        task = bar.add_task("", total=len(specs))
        for kind, policy, budget, audit in specs:
            bar.update(task, description=f"{kind} {policy} {budget}")
            spec = {"policy": policy, "budget": budget, "audit": audit}
            report[kind].append({**spec, **in_child("audit", {**spec, "options": vars(options)})})
            bar.advance(task)
    publish(options, "audit", f"Audits of {options.requests} answers", table, report)


if __name__ == "__main__":
    run_script(main, audit=child)
