"""Counts what layers of decodes read on the host: blocks that were in the room, and that the layer before chose too.

    python benchmarks/reach.py [--budget 0.1] [--output 32] [--hold 1] [--leaders 1] [--fetch 0]

Questions of the needle tasks about texts of 2,048 tokens on examples/needle/model, one engine. It prints a row for each
layer: blocks of the host that a decode reads, the share that the step before had in the room, and the share that the
layer before chose in the same step.
"""

import argparse
import os
from collections import Counter
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

MODEL = Path(__file__).resolve().parents[1] / "examples" / "needle" / "model"
TASKS = ("niah", "multikey", "twostage", "vt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=0.1, help="of the prompt")
    parser.add_argument("--output", type=int, default=32, help="tokens generated for each question")
    parser.add_argument("--hold", type=int, default=1, help="steps that read one choice; rows count when they choose")
    parser.add_argument("--leaders", type=int, default=1, help="layers that choose by the scores of the first of them")
    parser.add_argument("--fetch", type=int, default=0, help="most blocks that a choice brings; 0: any number")
    options = parser.parse_args()

    from engines import greedy, make_llm

    from vllm_evict.compute.choosing import Choosing
    from vllm_evict.core.host_pool import COUNTED
    from vllm_evict.tools.eval import tasks, words
    from vllm_evict.tools.eval.prompts import Prompts

    prompts, filler = Prompts(str(MODEL)), words.Filler()
    asked = [tasks.make(task, 2048, depth, 0, 0, prompts.count, filler) for task in TASKS for depth in (0.17, 0.61)]
    counts, read, chosen = {}, Choosing.read, {}

    def counted(self, call, rows, table):
        """Look at the table that a layer has written."""
        before = self.counts.sum(0)
        read(self, call, rows, table)
        its = counts.setdefault(call.place, Counter())
        its.update(dict(zip(COUNTED, (self.counts.sum(0) - before).tolist())))
        held = self._held[call.place]
        for slot in rows.slots[rows.chooses.bool()].tolist():
            now = set(held[slot].tolist())
            its["like the layer before"] += len(now & chosen.get(slot, now)) if call.place else 0
            chosen[slot] = now

    Choosing.read = counted
    policy = {"name": "full", "evict": "host", "host": "1GiB", "budget": options.budget, "hold": options.hold}
    policy |= {"sink": 32, "recent": 32, "buffer": 0, "leaders": options.leaders, "fetch": options.fetch}
    llm = make_llm(MODEL, policy, dtype="bfloat16", max_model_len=2304, block_size=32, max_num_batched_tokens=512,
                   kv_cache_memory_bytes=256 << 20, max_num_seqs=8, enforce_eager=True)  # fmt: skip
    llm.generate([{"prompt_token_ids": prompts.ids(each)} for each in asked], greedy(options.output), use_tqdm=False)
    print(
        "| layer | blocks of the host that were read | in the room | chosen by the layer before |\n|---|---:|---:|---:|"
    )
    for place, its in sorted(counts.items()):
        chosen = its["fetched"] + its["in_room"]
        share, like = (its[name] / chosen for name in ("in_room", "like the layer before"))
        print(f"| {place} | {chosen:,} | {share:.0%} | {f'{like:.0%}' if place else ''} |")


if __name__ == "__main__":
    main()
