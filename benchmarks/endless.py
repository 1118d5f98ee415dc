"""Measures answers of one request that outgrows its model's context many times.

    python benchmarks/endless.py [--tokens 65536] [--budget 1024]

The embedded model was made for 4,608 tokens. It reads one long chat. Each turn has a fact in filler text, a question
about it, and the right answer. An answer counts as right if each of its tokens is the most probable one. Policies keep
--budget tokens of the chat under `context: model`, so kept keys are rotated many times. Stock vLLM ends a request where
the model's context ends.

Each case is a process of its own. Writes a Markdown table and a JSON with hardware, versions, command and each answer
to --out.
"""

import argparse
import os
from collections import deque
from pathlib import Path

import numpy as np
from engines import make_llm, scheduler_of
from reports import in_child, progress, publish, run_script

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples" / "needle" / "model"
#: Tokens of a turn, approximately.
TURN = 600
#: Turns in which a key is not asked for again: the chat would have two codes for it.
FRESH = 8
BLOCK = 32


def chat(tokens: int, seed: int) -> tuple[list[int], list[list[int]]]:
    """Ids of a chat of at least `tokens` tokens, and the places where each answer begins and ends."""
    from transformers import AutoTokenizer

    from vllm_evict.tools.eval.tasks import make
    from vllm_evict.tools.eval.words import Filler

    tokenizer, filler, rng = AutoTokenizer.from_pretrained(MODEL), Filler(), np.random.default_rng(seed)
    ids: list[int] = []
    answers: list[list[int]] = []
    asked: deque[str] = deque(maxlen=FRESH)

    def encode(messages: list[dict], more: bool) -> list[int]:
        told = tokenizer.apply_chat_template(messages, add_generation_prompt=more, tokenize=True, return_dict=False)
        return told[1:] if ids else told  # <s> comes once

    index = 0
    while len(ids) < tokens:
        count = lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])  # noqa: E731
        turn = make("niah", TURN, float(rng.random()), index, seed, count, filler)
        index += 1
        if turn.question in asked:
            continue
        asked.append(turn.question)
        user, assistant = {"role": "user", "content": turn.text}, {"role": "assistant", "content": turn.answers[0]}
        question, whole = encode([user], True), encode([user, assistant], False)
        answers.append([len(ids) + len(question), len(ids) + len(whole) - 1])  # without the end mark
        ids += whole
    return ids, answers


def child(spec: dict) -> dict:
    """Which answers were right, by their place; most tokens held; number of rotations."""
    options = spec["options"]
    ids, answers = chat(options["tokens"], options["seed"])
    policy = {"name": spec["policy"], "budget": options["budget"], "sink": 32, "context": "model"}
    llm = make_llm(
        MODEL,
        policy,
        max_model_len=len(ids) + 1,
        block_size=BLOCK,
        num_gpu_blocks_override=4 * options["budget"] // BLOCK + 64,
        kv_cache_memory_bytes=1 << 30,
        max_num_batched_tokens=options["chunk"],
        max_num_seqs=1,
    )
    from vllm import SamplingParams

    config = scheduler_of(llm).kv_policy
    assert config.context < len(ids), "nothing was outgrown"
    told = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": ids}], told, use_tqdm=False)
    ranks = [output.prompt_logprobs[at][ids[at]].rank if at else 1 for at in range(len(ids))]
    moves = {metric.name: metric.value for metric in llm.get_metrics() if metric.labels.get("policy") == spec["policy"]}
    return {
        "context": config.context,
        "tokens": len(ids),
        "answers": [[start, all(rank == 1 for rank in ranks[start:end])] for start, end in answers],
        "peak_tokens": output.kv_usage.peak_resident_tokens,
        "moves": moves["vllm:kv_evict_moves"],
    }


def table(report: dict) -> str:
    runs = report["runs"]
    context, tokens = runs[0]["context"], runs[0]["tokens"]
    edges = [context]
    while edges[-1] * 2 < 0.75 * tokens:
        edges.append(edges[-1] * 2)
    spans = list(zip([0, *edges], [*edges, tokens]))
    lines = [
        "| policy | " + " | ".join(f"up to {end:,}" for _, end in spans) + " | tokens held at most | moves |",
        "|---|" + "---:|" * (len(spans) + 2),
    ]
    for run in runs:
        cells = []
        for start, end in spans:
            right = [right for at, right in run["answers"] if start <= at < end]
            cells.append(f"{sum(right)} of {len(right)}")
        lines.append(f"| `{run['policy']}` | " + " | ".join(cells) + f" | {run['peak_tokens']:,} | {run['moves']} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536, help="of the chat, at least")
    parser.add_argument("--budget", type=int, default=1024, help="tokens")
    parser.add_argument("--policies", nargs="+", default=["sink-window", "h2o", "snapkv", "keydiff"])
    parser.add_argument("--chunk", type=int, default=512, help="tokens computed at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="OpenMP threads")
    parser.add_argument("--out", default="out/endless")
    options = parser.parse_args()
    runs = []
    with progress() as bar:
        task = bar.add_task("", total=len(options.policies))
        for policy in options.policies:
            bar.update(task, description=policy)
            runs.append({"policy": policy, **in_child("endless", {"policy": policy, "options": vars(options)})})
            bar.advance(task)
    title = f"A chat of {runs[0]['tokens']:,} tokens with a model that was made for {runs[0]['context']:,}"
    publish(options, "endless", title, table, {"runs": runs})


if __name__ == "__main__":
    run_script(main, endless=child)
