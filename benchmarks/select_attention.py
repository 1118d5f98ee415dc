"""CPU time of one layer's decode attention: all tokens, against the choice of blocks and the chosen blocks.

    python benchmarks/select_attention.py       16,384 tokens with 1,024 selected, heads of benchmarks/duo.py's models

Times are CPU time of the only thread, so other work on the machine moves them little. Dense attention is the plugin's
decode kernel on all blocks. `benchmarks/duo.py --select` measures whole steps of an engine by the clock.
"""

import argparse
import statistics
import time
from types import SimpleNamespace

import numpy as np
import torch

from vllm_evict.compute.attention.cpu import CPUOps
from vllm_evict.compute.attention.store import LayerStore
from vllm_evict.compute.kernels.mass import pack_keys
from vllm_evict.compute.parts import Room
from vllm_evict.compute.probes import LayerCall
from vllm_evict.compute.select import Selection
from vllm_evict.compute.work import StepWork
from vllm_evict.config import KVPolicyConfig
from vllm_evict.core.offload import Copy

DIM, BLOCK = 64, 32


def milliseconds(work, repeats: int) -> float:
    """Median CPU time of this thread."""
    spent = []
    for _ in range(repeats):
        start = time.thread_time()
        work()
        spent.append(time.thread_time() - start)
    return 1e3 * statistics.median(spent)


def measure(heads: int, kv_heads: int, tokens: int, select: int, repeats: int) -> tuple[float, float]:
    """Milliseconds of dense and of selected attention of one decode."""
    blocks = tokens // BLOCK
    keys = pack_keys(torch.randn(blocks + 1, kv_heads, BLOCK, DIM))
    cache = torch.cat((keys, torch.randn(blocks + 1, kv_heads, BLOCK, DIM)), 2).view(-1, kv_heads, BLOCK, 2 * DIM)
    layer = SimpleNamespace(isa="vec", impl=SimpleNamespace(scale=DIM**-0.5))
    config = KVPolicyConfig.parse({"name": "full", "select": select, "dense_layers": 0})
    selection = Selection(config, BLOCK, [0], LayerStore(CPUOps, lambda: [(layer, cache)]), torch.device("cpu"))
    selection.allocate(Room(blocks + 1))
    selection.copied([Copy("r", 0, "fetch", block, 0) for block in range(1, blocks + 1)])
    table = 1 + torch.randperm(blocks).int()[None]
    starts, held = np.array([0, 1], np.int32), np.array([tokens], np.int32)
    metadata = SimpleNamespace(block_table=table, query_start_loc=torch.from_numpy(starts), num_actual_tokens=1)
    query, output = torch.randn(1, heads, DIM), torch.empty(1, heads, DIM)
    row, lens = torch.zeros(1, dtype=torch.int32), torch.from_numpy(held)

    def dense() -> None:
        CPUOps.decode(layer, query, cache, metadata, output, row, lens, None, None)

    def selected() -> None:
        batch = SimpleNamespace(
            req_ids=["r"],
            starts=starts,
            queries=np.diff(starts),
            seq_lens=held + 1,
            resident_tokens=held,
            lens=lens,
            written=table,
            table=table,
            filled=lambda block_size: None,
        )
        work = StepWork([], np.zeros(1, np.int64), np.ones(1, np.int32), lens, selection.step(batch))
        work.do(LayerCall(CPUOps, layer, 0, query, cache, metadata, output))

    return milliseconds(dense, repeats), milliseconds(selected, repeats)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--select", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| heads, KV heads | dense | selected | share |\n|---|---:|---:|---:|")
    for heads, kv_heads in ((32, 32), (32, 8)):
        dense, selected = measure(heads, kv_heads, options.tokens, options.select, options.repeats)
        print(f"| {heads}, {kv_heads} | {dense:.2f} ms | {selected:.2f} ms | {selected / dense:.0%} |")


if __name__ == "__main__":
    main()
