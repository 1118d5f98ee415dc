"""Measures the answers that retrieval and streaming heads cost: a dense model with every head masked by its class.

    python benchmarks/heads.py --model examples/needle/model --heads configs/heads/needle

Each prompt of a built-in task is answered under full attention, the pattern at --threshold, the pattern at --sparsity,
and its inverse. An answer counts if every token of it is right. No engine runs and no block is evicted: this measures
the pattern.

Prints a table and writes it as JSON, with hardware, versions and command, to --out.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import transformers
from reports import hardware, to_json
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from vllm_evict.config import HeadGates, HeadPattern
from vllm_evict.tools.eval.prompts import Prompts
from vllm_evict.tools.eval.stats import wilson
from vllm_evict.tools.eval.tasks import make
from vllm_evict.tools.eval.words import Filler
from vllm_evict.tools.heads import dense
from vllm_evict.tools.heads.passkeys import Document, Reader


def documents(prompts: Prompts, task: str, lengths: list[int], depths: list[float], samples: int) -> list[Document]:
    """All prompts of a task with their right answers."""
    reader, filler = Reader(prompts.tokenizer), Filler()
    made = [make(task, n, d, i, 0, prompts.count, filler) for n in lengths for d in depths for i in range(samples)]
    return [reader.document(x.context, [(x.question, x.answers[0])]) for x in made]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="examples/needle/model")
    parser.add_argument("--heads", default="configs/heads/needle")
    parser.add_argument("--threshold", type=float, default=0.5)
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--tasks", default="niah,multikey,kv,twostage,vt")
    parser.add_argument("--lengths", default="1024,2048,4096")
    parser.add_argument("--depths", default="0.1,0.3,0.5,0.7,0.9")
    parser.add_argument("--samples", type=int, default=4, help="prompts for each task, length and depth")
    parser.add_argument("--out", type=Path, default=Path("out/heads.json"))
    args = parser.parse_args()

    model, _ = dense.load(args.model)
    gates = HeadGates.read(args.heads, dense.shape(model.config))
    own, half = gates.pattern(threshold=args.threshold), gates.pattern(sparsity=args.sparsity)

    def named(what: str, pattern: HeadPattern) -> str:
        return f"{what} ({int(pattern.retrieval.sum())} of {pattern.retrieval.size})"

    ways = {"full": dense.FullHeads()} | {
        named(what, pattern): dense.PatternHeads(pattern)
        for what, pattern in (
            (f"threshold {args.threshold:g}", own),
            (f"sparsity {args.sparsity:g}", half),
            ("inverted", half.inverted),
        )
    }
    prompts = Prompts(args.model)
    lengths, depths = ([kind(x) for x in text.split(",")] for kind, text in ((int, args.lengths), (float, args.depths)))
    rows, started = [], time.monotonic()
    for task in args.tasks.split(","):
        asked = documents(prompts, task, lengths, depths, args.samples)
        for way, heads in ways.items():
            right = dense.answers_right(model, tqdm(asked, desc=f"{task} {way}", leave=False), heads)
            rows.append({"task": task, "heads": way, "right": sum(right), "of": len(right)})
            tqdm.write(f"{task}, {way}: {cell(rows[-1])}")
    table = Table("heads")
    for task in args.tasks.split(","):
        table.add_column(task, justify="right")
    for way in ways:
        table.add_row(way, *(cell(row) for row in rows if row["heads"] == way))
    Console(width=150).print(table)
    about = {
        "command": "python benchmarks/heads.py " + " ".join(sys.argv[1:]),
        "processor": hardware().get("Model name"),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seconds": round(time.monotonic() - started),
        "sink": gates.sink,
        "recent": gates.recent,
    }
    print(about)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(to_json({**about, "rows": rows}) + "\n")


def cell(row: dict) -> str:
    """A share, its 95 % interval, and the number of answers."""
    low, high = wilson(row["right"], row["of"])
    share = row["right"] / row["of"]
    return f"{share:.1%} [{100 * low:.0f}, {100 * high:.0f}] ({row['of']})"


if __name__ == "__main__":
    main()
