"""Counts the tokens that each step of n-gram speculation yields, with the embedded model, as stock and under policies.

    python benchmarks/speculation.py [--length 1024] [--samples 24] [--drafts 4]
    python benchmarks/speculation.py --pool 96      drafts and eviction, each alone and both, in a small pool

Documents of the needle model's task `copy` end with a question whose answer is a list of words somewhere in the
document, so n-grams of the document draft it. Budgets are half the document. Each policy has a process of its own.

A row: tokens of a step with drafts (the accepted ones and one more), its ratio to stock's, and right answers.

With --pool all requests come at once and generate --output tokens, so that the pool holds a few of them. A row: the
engine's steps until the last one ends, CPU time and wall-clock time, and for each of the three how many times as much
stock takes without drafts. Other work on the machine changes wall-clock times a lot, and CPU times less.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# A checkout's own package comes before an installed one, and data.py of the embedded model is found.
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "needle")]

from engines import make_llm, run_batch  # noqa: E402
from reports import in_child, run_script  # noqa: E402

MODEL = ROOT / "examples" / "needle" / "model"
BY_TOKEN = {"name": "snapkv", "granularity": "token"}
#: Name of a row -> policy, without its sizes; None is stock vLLM.
POLICIES: dict[str, dict | None] = {
    "stock": None,
    "h2o": {"name": "h2o"},
    "snapkv": {"name": "snapkv"},
    "snapkv by token": BY_TOKEN,
    "snapkv by token, `sets: all`": {**BY_TOKEN, "sets": "all"},
    "sink-window": {"name": "sink-window"},
}


def documents(length: int, samples: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and their right answers, token ids."""
    import numpy as np
    from data import TASKS, Documents
    from transformers import AutoTokenizer

    docs, prompts, answers = Documents(AutoTokenizer.from_pretrained(MODEL)), [], []
    for seed in range(samples):
        rng = np.random.default_rng([2_000_000, seed])
        ids, said = docs.document(rng, TASKS["copy"](rng), length)
        first = int(said.argmax())
        prompts.append(ids[:first].tolist())
        answers.append(ids[first:].tolist())
    return prompts, answers


def engine(spec: dict, requests: int, **more: Any) -> Any:
    """An engine for so many requests at once, that drafts if the case does."""
    drafts = {"method": "ngram", "num_speculative_tokens": spec["options"]["drafts"], "prompt_lookup_max": 3}
    return make_llm(
        MODEL,
        spec["policy"],
        block_size=32,
        kv_cache_memory_bytes=256 << 20,
        max_num_batched_tokens=256,
        max_num_seqs=requests,
        enable_prefix_caching=False,
        speculative_config=drafts if spec["drafts"] else None,
        **more,
    )


def batch(spec: dict) -> tuple[tuple[int, float, float], int, int]:
    """(steps, CPU time, wall-clock time) of a batch in a small pool, most requests at once, and preemptions.

    It runs in a process of its own.
    """
    options = spec["options"]
    prompts, _ = documents(options["length"], options["samples"])
    small = {"num_gpu_blocks_override": options["pool"], "max_model_len": options["length"] + options["output"]}
    run = run_batch(engine(spec, len(prompts), **small), prompts, options["output"])
    return (len(run.samples), run.cpu_seconds, run.seconds), run.peak_requests, run.preemptions


def count(spec: dict) -> tuple[float, int]:
    """Tokens of a step with drafts, and right answers, in a process of its own."""
    from vllm import SamplingParams

    prompts, answers = documents(spec["options"]["length"], spec["options"]["samples"])
    llm = engine(spec, 8)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = [SamplingParams(temperature=0.0, max_tokens=len(answer)) for answer in answers]
    outputs = llm.generate(given, params, use_tqdm=False)
    names = ("vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_drafts")
    values = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in names}
    right = sum(list(each.outputs[0].token_ids) == answer for each, answer in zip(outputs, answers))
    accepted, steps = (values[name] for name in names)
    return 1 + accepted / steps, right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a document")
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--pool", type=int, default=0, help="blocks of 32 tokens in a pool that is too small")
    parser.add_argument("--policies", nargs="*", choices=POLICIES, help="with --pool, only these; stock comes first")
    parser.add_argument("--output", type=int, default=256, help="tokens of each request, with --pool")
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads of an engine")
    options = parser.parse_args()
    if options.pool:
        in_a_small_pool(options)
        return
    print("| policy | tokens a step | of stock's | right answers |\n|---|---|---|---|")
    stock = 0.0
    for name in POLICIES:
        tokens, right = case("count", name, True, options)
        stock = stock or tokens
        print(f"| {name} | {tokens:.2f} | {tokens / stock:.2f} | {right} of {options.samples} |", flush=True)


def case(what: str, name: str, drafts: bool, options: argparse.Namespace) -> Any:
    """Measure a policy in half of a document, in a process of its own."""
    policy = POLICIES[name]
    if policy is not None:
        sizes = {"budget": options.length // 2, "buffer": 0, "sink": 32}
        policy = {**policy, **sizes, **({} if name == "sink-window" else {"recent": 64})}
    spec = {"policy": policy, "drafts": drafts, "options": vars(options)}
    # Numba, with which vLLM proposes n-grams, sets the threads of torch.
    alone = {"NUMBA_NUM_THREADS": str(options.threads)}
    return in_child(what, spec, alone | ({"VLLM_PLUGINS": ""} if policy is None else {}))


def in_a_small_pool(options: argparse.Namespace) -> None:
    print("| policy | drafts | steps | CPU s | wall s | stock's over these three | requests at once | preemptions |")
    print("|---|---|---|---|---|---|---|---|")
    stock = None
    for name in options.policies or POLICIES:
        for drafts in (False, True):
            (steps, *seconds), at_once, preempted = case("batch", name, drafts, options)
            stock = stock or (steps, *seconds)
            gains = ", ".join(f"{of / its:.2f}" for of, its in zip(stock, (steps, *seconds)))
            used, times = options.drafts if drafts else "none", " | ".join(f"{each:.1f}" for each in seconds)
            print(f"| {name} | {used} | {steps} | {times} | {gains} | {at_once} | {preempted} |", flush=True)


if __name__ == "__main__":
    run_script(main, count=count, batch=batch)
