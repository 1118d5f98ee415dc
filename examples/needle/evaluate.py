"""Measures a needle model in plain PyTorch: each task by length and depth, with full attention or a sink-window mask.

    python evaluate.py model --lengths 512,1024,2048,4096 --samples 20
    python evaluate.py model --window 0.1            # only the first 32 tokens and the last tenth are seen
    python evaluate.py aggregates --tasks chain,sort,classify

A cell is the share of documents with right answers only; for `text` it is the perplexity.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from data import AGGREGATES, COUNTS, TASKS, Documents
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaForCausalLM

SINK = 32


def sink_window_mask(length: int, window: int) -> torch.Tensor:
    """Mask of the tokens that a query sees: the first SINK and the last `window` -> bool [1, 1, length, length]."""
    q, k = torch.arange(length)[:, None], torch.arange(length)[None]
    return ((k <= q) & ((k < SINK) | (q - k < window)))[None, None]


@torch.inference_mode()
def logits_of(model: LlamaForCausalLM, ids: torch.Tensor, window: float | None) -> torch.Tensor:
    """ids [batch, length] -> logits [batch, length, vocabulary]; window is a share of the length, None is full."""
    mask = None if window is None else sink_window_mask(ids.shape[1], int(window * ids.shape[1]))
    return model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()


def answers_right(logits: torch.Tensor, ids: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """Whether the model answers each document without an error -> bool [batch].

    With greedy decoding a right prefix is what the model itself would have said, so one pass over the right answer
    decides as generation would. All of [batch, length(, vocabulary)].
    """
    said = logits[:, :-1].argmax(-1)
    return ((said == ids[:, 1:]) | ~answer[:, 1:]).all(1)


def sample(docs: Documents, task: str, length: int, depth: float, seed: int, n: int) -> tuple[torch.Tensor, ...]:
    """n documents of one cell -> ids [n, length], answer [n, length]."""
    own = next(tasks for tasks in (TASKS, AGGREGATES, COUNTS) if task in tasks)
    rng = np.random.default_rng([seed, sorted(own).index(task), length, int(1000 * depth)])
    rows = [docs.document(rng, own[task](rng), length, depth=depth) for _ in range(n)]
    return tuple(torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True))


def measure(model, docs, task, length, depth, n, window=None, seed=1_000_000) -> float:
    """Share of right answers in one cell (for `text`: nats per token)."""
    ids, answer = sample(docs, task, length, depth, seed, n)
    scores = []
    batch = max(1, 4096 // length)
    for x, a in zip(ids.split(batch), answer.split(batch), strict=True):
        logits = logits_of(model, x, window)
        if task == "text":
            scores.append(torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), x[:, 1:]).reshape(1))
        else:
            scores.append(answers_right(logits, x, a).float())
    return torch.cat(scores).mean().item()


def main() -> None:
    """Print a table, and write the cells as JSON to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--lengths", default="512,1024,2048,4096")
    parser.add_argument("--depths", default="0,0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1")
    parser.add_argument("--samples", type=int, default=10, help="documents in each cell of length and depth")
    parser.add_argument("--window", type=float, help="sink-window of this share of the length instead of full")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = LlamaForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    docs = Documents(AutoTokenizer.from_pretrained(args.model))
    cells = [(t, int(n)) for t in args.tasks.split(",") for n in args.lengths.split(",")]
    depths, rows = [float(d) for d in args.depths.split(",")], []
    for task, length in tqdm(cells, unit="cell"):
        at = [0.0] if task == "text" else depths
        scores = [measure(model, docs, task, length, d, args.samples, args.window) for d in at]
        mean = math.exp(np.mean(scores)) if task == "text" else float(np.mean(scores))
        rows.append({"task": task, "length": length, "mean": mean, "depths": dict(zip(at, scores, strict=True))})
        tqdm.write(f"{task:9} {length:5}  {mean:6.3f}  " + " ".join(f"{s:.2f}" for s in scores))
    if args.out:
        args.out.write_text(json.dumps({"window": args.window, "samples": args.samples, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
