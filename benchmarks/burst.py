"""Measures requests that arrive at once, more than the pool holds, on a model and prompts of yours.

    python benchmarks/burst.py MODEL PROMPTS.jsonl [--pool-tokens 11200] [--output 24] [--cases stock pressure admit]

A line of PROMPTS is {"input": "...", "outputs": ["..."]}, as RULER writes it. An answer is right if its first 24 tokens
hold the first of `outputs`. "like stock": answers of which all tokens are stock vLLM's. Each case is a process of
its own. Steps do not depend on the machine.

Writes a Markdown table and a JSON with hardware, versions, command and all raw figures to --out.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engines import make_llm, run_batch
from load import Run, run_load
from reports import choose_cases, in_child, progress, publish, run_script

#: Tokens in which the answer stands.
ANSWER = 24
KEPT = {"name": "h2o", "when": "pressure", "accumulate": "ema", "buffer": 128}
HOST = {"name": "full", "when": "pressure", "evict": "host", "host": "2GiB", "budget": 512, "index": "signs"}


def cases(options: argparse.Namespace) -> dict[str, dict | None]:
    """Name -> policy."""
    shares = {f"admit, {share:g} of the prompt": {"admit": True, "budget": share} for share in (0.5, 0.75, 0.9)}
    return {
        "stock": None,
        "full": {"name": "full"},
        "pressure": KEPT,
        "pressure, 256 tokens": {**KEPT, "budget": 256},
        "admit": {**KEPT, "admit": True},
        "admit, 256 tokens": {**KEPT, "admit": True, "budget": 256},
        **{name: {**KEPT, **fields} for name, fields in shares.items()},
        "host": HOST,
        "host, admit": {**HOST, "admit": True},
    }


def burst_child(spec: dict) -> dict:
    """One case, in a process of its own."""
    from transformers import AutoTokenizer

    options = argparse.Namespace(**spec["options"])
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = [json.loads(line) for line in Path(options.prompts).read_text().splitlines()][: options.requests]
    prompts = [tokenizer(row["input"])["input_ids"] for row in rows]
    settings = {
        "dtype": options.dtype,
        "max_model_len": max(map(len, prompts)) + options.output,
        "block_size": options.block_size,
        "num_gpu_blocks_override": options.pool_tokens // options.block_size + 1,
        "kv_cache_memory_bytes": options.pool_tokens * options.bytes + (64 << 20),
        "max_num_batched_tokens": options.chunk,
        "enable_prefix_caching": False,
    }
    llm = make_llm(Path(options.model), spec["policy"], **settings)
    run_batch(llm, [prompts[0][::-1][:64]], 4)
    outputs: dict[int, list[int]] = {}
    run = asdict(run_load(llm, prompts, [0.0] * len(prompts), options.output, "steps", outputs))
    run["found"] = [row["outputs"][0] in tokenizer.decode(outputs[at][:ANSWER]) for at, row in enumerate(rows)]
    return run | {"outputs": [outputs[at] for at in range(len(rows))]}


def table(report: dict) -> str:
    lines = [
        "| case | right | like stock | steps | s of CPU | requests at once | preemptions | computed again, tokens "
        "| evicted blocks |",
        "|---|" + "---:|" * 8,
    ]
    stock = report["runs"]["stock"]["outputs"]
    for name, raw in report["runs"].items():
        run = Run(**{key: value for key, value in raw.items() if key != "outputs"})
        alike = sum(one == other for one, other in zip(raw["outputs"], stock, strict=True))
        lines.append(
            f"| {name} | {sum(run.found)} of {len(run.found)} | {alike} | {run.steps} "
            f"| {run.cpu_seconds:.1f} | {run.peak_requests} | {run.preemptions} | {run.recomputed_tokens} "
            f"| {run.evicted_blocks} |"
        )
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("prompts", help="a JSON object a line")
    parser.add_argument("--out", default="out/burst")
    parser.add_argument("--threads", type=int, default=2, help="OpenMP threads of the engine")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--pool-tokens", type=int, default=11200)
    parser.add_argument("--bytes", type=int, default=23040, help="of a token in the cache")
    parser.add_argument("--chunk", type=int, default=512, help="most tokens of a step")
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--output", type=int, default=24, help="tokens generated for each")
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="only these; stock always runs, to compare with")
    options = parser.parse_args()
    options.cases = choose_cases(parser, options.cases, cases(options))
    return options


def main() -> None:
    options = parse_arguments()
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    runs: dict[str, Any] = {}
    title = (
        f"{options.requests} requests at once, {options.output} tokens each, a pool of {options.pool_tokens:,} tokens"
    )
    with progress() as bar:
        task = bar.add_task("", total=len(options.cases))
        chosen = {name: policy for name, policy in cases(options).items() if name in options.cases}
        for name, policy in chosen.items():
            bar.update(task, description=name)
            spec = {"policy": policy, "options": vars(options)}
            runs[name] = in_child("burst", spec, {"VLLM_PLUGINS": ""} if policy is None else {})
            bar.console.print(f"{name}: {sum(runs[name]['found'])} right, {runs[name]['steps']} steps", highlight=False)
            bar.advance(task)
    # Folders of this machine are no condition of a run.
    sys.argv = [Path(word).name if word in (options.model, options.prompts) else word for word in sys.argv]
    options.model, options.prompts = Path(options.model).name, Path(options.prompts).name
    publish(options, "burst", title, table, {"policies": chosen, "runs": runs})


if __name__ == "__main__":
    run_script(main, burst=burst_child)
