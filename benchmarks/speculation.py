"""Counts the tokens that each step of n-gram speculation yields, with the embedded model, as stock and under policies.

    python benchmarks/speculation.py [--length 1024] [--samples 24] [--drafts 4]

Documents of the needle model's task `copy` end with a question whose answer is a list of words somewhere in the
document, so n-grams of the document draft it. Budgets are half the document. Counts only: no times are measured.

A row: tokens of a step with drafts (the accepted ones and one more), its ratio to stock's, and right answers.
"""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# A checkout's own package comes before an installed one, and data.py of the embedded model is found.
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "needle")]
for name, value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(name, value)

MODEL = ROOT / "examples" / "needle" / "model"
POLICIES = ({"name": "h2o"}, {"name": "snapkv"}, {"name": "snapkv", "granularity": "token"}, {"name": "sink-window"})


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


def count(policy: dict | None, prompts: list[list[int]], answers: list[list[int]], drafts: int) -> tuple[float, int]:
    """Tokens of a step with drafts, and right answers."""
    import gc

    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        str(MODEL),
        dtype="float32",
        enforce_eager=True,
        seed=0,
        block_size=32,
        kv_cache_memory_bytes=256 << 20,
        max_num_batched_tokens=256,
        max_num_seqs=8,
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config={"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 3},
        **({} if policy is None else {"kv_policy": policy}),
    )
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = [SamplingParams(temperature=0.0, max_tokens=len(answer)) for answer in answers]
    outputs = llm.generate(given, params, use_tqdm=False)
    values = {metric.name: metric.value for metric in llm.get_metrics() if "spec_decode" in metric.name}
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()
    right = sum(list(each.outputs[0].token_ids) == answer for each, answer in zip(outputs, answers))
    accepted, steps = (values[f"vllm:spec_decode_num_{what}"] for what in ("accepted_tokens", "drafts"))
    return 1 + accepted / steps, right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a document")
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--drafts", type=int, default=4)
    options = parser.parse_args()
    prompts, answers = documents(options.length, options.samples)
    sizes = {"budget": options.length // 2, "buffer": 0, "sink": 32}
    print("| policy | tokens a step | of stock's | right answers |\n|---|---|---|---|")
    stock, right = count(None, prompts, answers, options.drafts)
    print(f"| stock | {stock:.2f} | 1 | {right} of {options.samples} |", flush=True)
    for policy in POLICIES:
        if policy["name"] != "sink-window":
            policy = {**policy, "recent": 64}
        tokens, right = count({**policy, **sizes}, prompts, answers, options.drafts)
        name = policy["name"] + (" by token" if "granularity" in policy else "")
        print(f"| {name} | {tokens:.2f} | {tokens / stock:.2f} | {right} of {options.samples} |", flush=True)


if __name__ == "__main__":
    main()
