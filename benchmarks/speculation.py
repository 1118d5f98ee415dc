"""Counts the tokens that each step of n-gram speculation yields, with the embedded model, as stock and under policies.

    python benchmarks/speculation.py [--length 1024] [--samples 24] [--drafts 4]

Documents of the needle model's task `copy` end with a question whose answer is a list of words somewhere in the
document, so n-grams of the document draft it. Budgets are half the document. Counts only: no times are measured. Each
policy has a process of its own.

A row: tokens of a step with drafts (the accepted ones and one more), its ratio to stock's, and right answers.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# A checkout's own package comes before an installed one, and data.py of the embedded model is found.
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "needle")]

from engines import make_llm  # noqa: E402
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


def count(spec: dict) -> tuple[float, int]:
    """Tokens of a step with drafts, and right answers, in a process of its own."""
    from vllm import SamplingParams

    options, policy = spec["options"], spec["policy"]
    prompts, answers = documents(options["length"], options["samples"])
    llm = make_llm(
        MODEL,
        policy,
        block_size=32,
        kv_cache_memory_bytes=256 << 20,
        max_num_batched_tokens=256,
        max_num_seqs=8,
        enable_prefix_caching=False,
        speculative_config={"method": "ngram", "num_speculative_tokens": options["drafts"], "prompt_lookup_max": 3},
    )
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
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads of an engine")
    options = parser.parse_args()
    sizes = {"budget": options.length // 2, "buffer": 0, "sink": 32}
    print("| policy | tokens a step | of stock's | right answers |\n|---|---|---|---|")
    stock = 0.0
    for name, policy in POLICIES.items():
        if policy is not None:
            policy = {**policy, **sizes, **({} if name == "sink-window" else {"recent": 64})}
        spec = {"policy": policy, "options": vars(options)}
        tokens, right = in_child("count", spec, {"VLLM_PLUGINS": ""} if policy is None else {})
        stock = stock or tokens
        print(f"| {name} | {tokens:.2f} | {tokens / stock:.2f} | {right} of {options.samples} |", flush=True)


if __name__ == "__main__":
    run_script(main, count=count)
