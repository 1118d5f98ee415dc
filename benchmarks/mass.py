"""Measures `block_mass` and `decode_mass` beside vLLM's own CPU attention on the same batch.

    python benchmarks/mass.py [--isa avx2] [--block-size 32] [--only decode] [--threads 1] [--per-token]

"hot": attention and mass alternate, as in a model's layer, so that mass finds keys in the CPU's caches. "fused" gives
output and mass in one read, and is compared with attention alone. "cold": the caches are overwritten before each call.
Times are the least of `--repeats` runs.
"""

import argparse
import itertools
import platform
import sys
import time

import torch
import vllm
from reports import hardware, listed
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from vllm_evict.compute.kernels.decode import decode_mass
from vllm_evict.compute.kernels.mass import block_mass, kernel_path
from vllm_evict.compute.kernels.paged import PagedAttention

RESIDENT = 4096
CHUNK = 2048


class Batch:
    """Random tensors of one attention layer, and the two calls to time."""

    def __init__(self, query_lens, seq_lens, heads, kv_heads, dim, block_size, dtype, isa, per_token):
        self.isa = isa
        self.per_token = per_token
        self.scale = dim**-0.5
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
        self.starts = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32)
        width = -(-max(seq_lens) // block_size)
        num_blocks = width * len(seq_lens)
        self.table = torch.randperm(num_blocks, dtype=torch.int32).view(len(seq_lens), width)
        tokens = num_blocks * block_size
        pages = torch.empty(num_blocks, kv_heads, 2 * block_size, dim, dtype=dtype)
        self.keys, self.values = pages.chunk(2, dim=2)
        self.layout = _get_attn_isa(dtype, block_size, dim)
        ops.cpu_attn_reshape_and_cache(
            torch.randn(tokens, kv_heads, dim).to(dtype),
            torch.randn(tokens, kv_heads, dim).to(dtype),
            self.keys,
            self.values,
            torch.arange(tokens),
            self.layout,
        )
        self.query = torch.randn(sum(query_lens), heads, dim).to(dtype)
        self.output = torch.empty_like(self.query)
        self.mass = torch.zeros(len(seq_lens), kv_heads, width * (block_size if per_token else 1))
        self.rows = torch.arange(len(seq_lens), dtype=torch.int32)
        self.metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(seq_lens),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            seq_lens=self.seq_lens,
            dtype=dtype,
            query_start_loc=self.starts,
            causal=True,
            sliding_window_size=-1,
            isa=self.layout,
            enable_kv_split=vllm.envs.VLLM_CPU_ATTN_SPLIT_KV,
        )

    def run_attention(self):
        ops.cpu_attention_with_kv_cache(
            query=self.query,
            key_cache=self.keys,
            value_cache=self.values,
            output=self.output,
            query_start_loc=self.starts,
            seq_lens=self.seq_lens,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self.table,
            softcap=0.0,
            scheduler_metadata=self.metadata,
            s_aux=None,
        )

    def attention(self):
        lists, measured = (self.table, self.starts, self.seq_lens), {"mass": self.mass, "per_token": self.per_token}
        return PagedAttention(self.query, self.keys, *lists, self.scale, self.values, layout=self.layout, **measured)

    def run_mass(self):
        block_mass(self.attention(), isa=self.isa)

    def run_decode(self):
        decode_mass(self.attention(), self.rows, self.output, isa=self.isa)


def measure(batch: Batch, repeats: int, flush: torch.Tensor | None) -> list[float]:
    """Least seconds of attention, of mass and of both in one call."""
    runs = [batch.run_attention, batch.run_mass, batch.run_decode]
    times = [[] for _ in runs]
    for _ in range(repeats):
        for run, seconds in zip(runs, times, strict=True):
            if flush is not None:
                flush.add_(1)
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
    return [min(seconds) for seconds in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", help="avx512, avx2 or portable; default: the best of this CPU")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--only", choices=("decode", "prefill"))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--per-token", action="store_true", help="mass of each token, not of each block")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)

    torch.cpu._init_amx()  # vLLM's kernels need Linux's permission; engines ask for it, too

    print(f"hardware   {listed(hardware())}")
    print(
        f"versions   python {platform.python_version()}, torch {torch.__version__}, "
        f"vllm {vllm.__version__}, kernel {kernel_path(options.isa)}, "
        f"{torch.get_num_threads()} threads"
    )
    print(f"command    python {' '.join(sys.argv)}")
    print(
        f"\n{'batch':<22}{'H/Hkv':>7}{'D':>5}{'dtype':>10}"
        + f"{'attention':>14}{'mass':>9}{'ratio':>7}{'fused':>9}{'ratio':>7}" * 2
        + f"\n{'':<44}{'hot, us':>14}{'':>32}{'cold, us':>14}"
    )
    batches = {
        "decode 1 x 4096": ([1], [RESIDENT]),
        "decode 16 x 4096": ([1] * 16, [RESIDENT] * 16),
        "prefill 2048": ([CHUNK], [CHUNK]),
    }
    flush = torch.zeros(24 << 20)  # 96 MiB
    for name, (query_lens, seq_lens) in batches.items():
        if options.only and not name.startswith(options.only):
            continue
        for (heads, kv_heads), dim, dtype in itertools.product(
            ((8, 2), (32, 8)), (64, 128), (torch.float32, torch.bfloat16)
        ):
            sizes = heads, kv_heads, dim, options.block_size
            batch = Batch(query_lens, seq_lens, *sizes, dtype, options.isa, options.per_token)
            row = f"{name:<22}{f'{heads}/{kv_heads}':>7}{dim:>5}{str(dtype)[6:]:>10}"
            for buffer in (None, flush):
                attention, mass, fused = measure(batch, options.repeats, buffer)
                row += f"{attention * 1e6:>14.0f}{mass * 1e6:>9.0f}{mass / attention:>7.0%}"
                row += f"{fused * 1e6:>9.0f}{fused / attention:>7.0%}"
            print(row, flush=True)


if __name__ == "__main__":
    main()
