"""Compiles the Triton kernels for a GPU, without one, and prints what each takes as JSON.

A process of its own, without the interpreter: python tests/harness/triton_compile.py [CAPABILITY [NUMBER...]], of some shapes
or of all. fp8 needs 89 or more. With `--publish` it writes benchmarks/results/performance/compiled.json anew, with what
kernels take on each of SHARED's GPUs.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from vllm_evict.compute.kernels.codes import packed_bytes
from vllm_evict.compute.kernels.paged import PagedAttention
from vllm_evict.compute.kernels.reach import OF_ROWS, ReachRows, ReachState
from vllm_evict.compute.kernels.view import View
from vllm_evict.triton_kernels import (
    compact,
    decode_classes,
    decode_mass,
    fold,
    mass_from_lse,
    moved,
    put,
    query_lse,
    reach,
    reach_bits,
    reach_signs,
    resident_view,
    take,
)
from vllm_evict.triton_kernels.tiles import MAX_DIM

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FP8 = torch.float8_e4m3fn
SHAPES = [  # query heads, KV heads, head size, block size, dtype, queries, whether there is mass; dtype of the cache
    (32, 8, 128, 16, BF16, 256, True),
    (28, 4, 128, 256, F16, 4, False),
    (8, 8, 96, 32, BF16, 4, True),
    (16, 1, 256, 48, BF16, 256, True),
    (32, 32, 128, 16, F16, 4, True),  # Llama-2
    (64, 8, 64, 16, BF16, 256, True),  # gpt-oss
    (8, 2, 192, 16, BF16, 4, True),
    (4, 2, 128, 16, F32, 256, True),
    (32, 8, 128, 16, BF16, 256, True, FP8),
    (8, 8, 96, 32, F16, 4, True, FP8),
    (16, 2, 256, 64, BF16, 256, True, FP8),
    (128, 1, 576, 64, BF16, 256, True),  # latents
    (16, 1, 576, 16, F16, 4, True),
    (128, 1, 576, 64, BF16, 256, True, FP8),
]
#: Shapes by which hosts' blocks are reached: the first one, latents, and heads of 64.
REACHED = (0, 11, 5)
ROWS, WIDTH = 4, 512
#: Shared memory of an SM in KiB, by compute capability; a program takes 1 KiB beside its own.
SHARED = {80: 164, 90: 228, 100: 228}
#: Kernels that read keys.
READERS = ("_attend", "_attend_classes", "_mass_from_lse", "_query_lse")
PUBLISHED = Path(__file__).parents[2] / "benchmarks/results/performance/compiled.json"
#: A machine instruction, with its address and operands.
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
#: Slow conversions of one element each, loads of single bytes from shared memory, spills.
KINDS = {"conversions": ("F2F.",), "bytes": ("LDS.U8", "LDS.S8"), "spills": ("LDL", "STL")}
#: Instructions of the shortest loop that does more than wait.
LEAST_LOOP = 50
#: A copy from global to shared memory beside the program, in PTX, with its bytes.
COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global\s*\[[^]]*\],\s*\[[^]]*\],\s*(\w+)")


class Driver:
    """A driver that knows its target and nothing else."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """Stands for a kernel: a launch compiles it.

    Attributes:
        found: what each launch took.
        shape: of the launches that follow.
    """

    found: list[dict] = []
    shape = ""

    def __init__(self, kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*args, **options):
            binary = self.kernel.warmup(*args, grid=grid, **options)
            code = dumped(binary.asm["cubin"])
            (line,) = (line for line in code.splitlines() if "REG:" in line)
            taken = dict(item.split(":") for item in line.split() if item.startswith(("REG", "STACK")))
            ptx = binary.asm["ptx"]
            words = "cp.async", "mma.sync", "wgmma.mma_async", "atom.", "ld.global.v4", "bar.sync", "e4m3x2"
            self.found.append(
                {"kernel": self.kernel.__name__, "shape": Compiled.shape, "binary": binary.hash, "grid": list(grid)}
                | {"threads": 32 * binary.metadata.num_warps, "copies": sorted({int(n, 0) for n in COPY.findall(ptx)})}
                | {"shared": binary.metadata.shared, "registers": int(taken["REG"]), "spilled": int(taken["STACK"])}
                | {word: ptx.count(word) for word in words}
                | instructions(code)
            )

        return launch


def dumped(cubin: bytes) -> str:
    """Return what a kernel takes, and its machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP, "-res-usage", "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions(code: str) -> dict:
    """How many machine instructions a kernel has: in all, in its longest innermost loop, and of a kind in all loops.

    A loop lies between a branch back and its target, with no exit between them: code behind an exit belongs to other
    loops. A loop is innermost if no other of `LEAST_LOOP` instructions lies in it.
    """
    every = [(int(at, 16), f"{condition}{word}", rest) for at, condition, word, rest in INSTRUCTION.findall(code)]
    found = [each for each in every if each[1] != "NOP"]
    at, loops = [each[0] for each in found], []
    for end, (here, word, rest) in enumerate(found):
        target = int(rest.split("0x")[-1], 16) if "BRA" in word and "0x" in rest else here
        if target < here and "EXIT" not in (words := [each[1] for each in found[bisect_left(at, target) : end + 1]]):
            loops.append((end - len(words), end, words))
    long = [each for each in loops if len(each[2]) >= LEAST_LOOP]
    inner = [its for its in long if not any(its[0] <= other[0] and other[1] < its[1] for other in long)]
    looped = {number for begin, end, _ in loops for number in range(begin + 1, end + 1)}
    words = [found[number][1].split()[-1] for number in looped]
    kinds = {kind: sum(word.startswith(start) for word in words) for kind, start in KINDS.items()}
    return {"instructions": len(found), "loop": max((len(each[2]) for each in inner), default=0)} | kinds


def limits(found: list[dict], capability: int) -> dict[str, dict]:
    """Sizes of the launches of each kernel and shape, at most, and how many of their programs fit on an SM."""
    taken: dict[str, dict] = {}
    for kernel in found:
        registers = -(-kernel["registers"] // 8) * 8  # ptxas gives them out by eights
        threads, shared = kernel["threads"], kernel["shared"] + 1024
        fit = min(65536 // (registers * threads), SHARED[capability] * 1024 // shared, 2048 // threads, 32)
        its = {"registers": registers, "shared": kernel["shared"], "spilled": kernel["spilled"], "programs": -fit}
        its |= {key: kernel[key] for key in ("threads", "instructions", "loop", "copies")}
        known = taken.setdefault(", ".join(filter(None, (kernel["kernel"], kernel["shape"]))), its)
        for key in ("registers", "shared", "spilled", "programs", "threads", "instructions", "loop"):
            known[key] = max(known[key], its[key])
        known["copies"] = sorted({*known["copies"], *its["copies"]})
    return {name: {**its, "programs": -its["programs"]} for name, its in taken.items()}


def compiled(capability: int, shapes: Sequence[int] = (), **variables: str) -> list[dict]:
    """Return the sizes of each launch on a GPU, of shapes by their number in `SHAPES` or of all; ptxas comes with
    Triton. A process of its own, since tests interpret kernels.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_DEFAULT_FP_FUSION": "1", **variables}
    command = [sys.executable, __file__, *map(str, (capability, *shapes))]
    return json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)


def publish() -> None:
    every = {"triton": triton.__version__}
    for capability in SHARED:
        every[str(capability)] = limits(compiled(capability), capability)
    rows = json.dumps(every, indent=1)
    PUBLISHED.write_text(re.sub(r"\n {3,}|\n  (?=})", " ", rows).replace("{ ", "{").replace(" }", "}") + "\n")


def ints(*shape) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32)


def replace_kernels() -> None:
    """Let launches compile."""
    for module, kernels in (
        (compact, ("_compact",)),
        (decode_classes, ("_attend_classes", "_combine_classes")),
        (decode_mass, ("_attend", "_combine")),
        (fold, ("_fold",)),
        (mass_from_lse, ("_mass_from_lse",)),
        (moved, ("_moved",)),
        (put, ("_put",)),
        (query_lse, ("_query_lse",)),
        (
            reach,
            (
                "bit_logits",
                "box_logits",
                "sign_logits",
                "_sums",
                "_shares",
                "_choose",
                "_take_places",
                "_copy",
                "_name",
            ),
        ),
        (reach_bits, ("_store_codes",)),
        (reach_signs, ("_store_signs",)),
        (resident_view, ("_resident_view",)),
        (take, ("_take",)),
    ):
        for kernel in kernels:
            setattr(module, kernel, Compiled(getattr(module, kernel)))


def compile_bookkeeping(capability: int) -> None:
    Compiled.shape = ""
    table, lens = ints(ROWS, 8192), ints(ROWS)
    for groups, width in ((1, 8192), (4, 8192), (4, 33), (4, 1)):
        view = View(table[:, :width], lens, table[:, :width])
        for first in (view, None) if groups > 1 else (view,):
            resident_view.resident_view([table] * groups, lens, 16, [first] + [view] * (groups - 1))
    sums = torch.empty(ROWS, 8, 8192)
    fold.fold(sums, lens, sums, table, torch.empty(ROWS))
    put.put(torch.empty(9, 8, 16), table[:, :512], sums, lens)
    take.take(sums, sums, lens, 16, maximise=True)
    take.take(sums[:, :1], sums, lens, 16, tested=lens, share=0.25)
    take.take(sums[:, :1], sums, lens, 16)
    for dtype, dim in ((BF16, 128), (FP8, 80))[: 1 + (capability >= 89)]:
        caches, blocks = [torch.empty(8, 8, 16, 2 * dim, dtype=dtype) for _ in range(2)], ints(WIDTH)
        for ordered in (True, False):
            compact.compact(caches, blocks, ints(2, 8, 1024), blocks, ints(3, ROWS), ordered=ordered)


def compile_reaching(shapes: list[tuple]) -> None:
    """Of some shapes, by each index, of few queries and of tiles. Blocks that are smaller or of other dtypes take no
    more.
    """
    lens, wide, counts = ints(ROWS), ints(ROWS, WIDTH), ints(ROWS, 3)
    rows = ReachRows(*[lens] * len(OF_ROWS), wide, 8, most=4)
    for heads, kv_heads, dim, block_size, dtype, tokens, *_ in shapes:
        words = f"{heads}/{kv_heads} heads of {dim}, blocks of {block_size}", str(dtype).removeprefix("torch.")
        boxes = torch.empty(8, kv_heads, 2 * dim, dtype=dtype)
        signs = torch.empty(8, kv_heads, dim + block_size + block_size // 16 * dim, dtype=torch.int16)
        codes = torch.empty(8, kv_heads, packed_bytes(block_size, dim), dtype=torch.uint8)
        page = torch.empty((8, kv_heads, block_size, 2 * dim) if kv_heads > 1 else (8, block_size, dim), dtype=dtype)
        held, scores = ints(ROWS, 128), torch.empty(ROWS, WIDTH)
        for kind, index in (("boxes", boxes), ("codes", codes), ("signs", signs)):
            Compiled.shape = ", ".join((*words, kind))
            query = torch.empty(tokens, heads, dim, dtype=dtype)
            state = ReachState(index, wide, held, held, held, scores, counts, 0.1)
            for queries in (4, 32):
                reach.reach(replace(rows, most=queries), state, query, page, page, wide)
        moved.moved(rows, query, torch.empty(9, heads, dim, dtype=BF16), 0.8)
        filled, keys = torch.empty(3, dtype=torch.int64), torch.empty(3, kv_heads, block_size, dim, dtype=dtype)
        reach_signs.store_signs(signs, filled, keys)
        reach_bits.store_codes(codes, filled, keys)
    if heads != SHAPES[REACHED[-1]][0]:
        return
    Compiled.shape = "a cap and sinks"
    for leads in (False, True):
        reach.reach(rows, replace(state, soft_cap=50.0), query, page, page, wide, torch.empty(heads), leads=leads)


def compile_readers(shapes: list[tuple]) -> None:
    lens = ints(ROWS)
    for heads, kv_heads, dim, block_size, dtype, tokens, has_mass, *kept in shapes:
        words = f"{heads}/{kv_heads} heads of {dim}, blocks of {block_size}", dtype, *(f"{each} cache" for each in kept)
        Compiled.shape = ", ".join(str(word).removeprefix("torch.") for word in words)
        keys, values = torch.empty(8, kv_heads, block_size, 2 * dim, dtype=kept[0] if kept else dtype).split(dim, -1)
        table, starts, out = ints(ROWS, WIDTH), ints(ROWS + 1), torch.empty(ROWS, kv_heads, WIDTH)
        query, lse, weights = (
            torch.empty(tokens, heads, dim, dtype=dtype),
            torch.empty(tokens, heads),
            torch.empty(tokens),
        )
        plain = PagedAttention(query, keys, table, starts, lens, 0.1, values, weights=weights)
        measured, output = replace(plain, mass=out), torch.empty_like(query)
        mass_from_lse.mass_from_lse(measured, lse)
        # A chunk whose last queries alone count, and a sum over heads where the scratch has no room for each head.
        mass_from_lse.mass_from_lse(measured, lse, last=lens)
        mass_from_lse.mass_from_lse(replace(plain, mass=out[:, :1]), lse)
        query_lse.query_lse(plain, lse)
        if dim > MAX_DIM:  # no kernel decodes such heads
            continue
        attention = measured if has_mass else plain
        decode_mass.decode_mass(attention, lens, output, lse=lse)
        if has_mass:
            decode_mass.decode_mass(replace(plain, mass=out[:, :1]), lens, output)
        both = torch.empty(tokens, 2 * heads, dim, dtype=dtype)
        halves = [replace(its, query=part) for its, part in zip((attention, plain), both.split(heads, 1))]
        decode_classes.decode_classes(halves, lens, torch.empty_like(both).split(heads, 1))
        if has_mass:
            of_tokens = replace(plain, mass=torch.empty(ROWS, kv_heads, WIDTH * block_size), per_token=True)
            decode_mass.decode_mass(of_tokens, lens, output)
        if heads == 32:
            mass_from_lse.mass_from_lse(of_tokens, lse)
    # Gemma 2's cap and gpt-oss' sinks are variants of their own.
    heads, kv_heads, dim, block_size, dtype, tokens = shapes[0][:6]
    keys, values = torch.empty(8, kv_heads, block_size, 2 * dim, dtype=dtype).split(dim, -1)
    query, lse = torch.empty(tokens, heads, dim, dtype=dtype), torch.empty(tokens, heads)
    table, starts, mass = ints(ROWS, WIDTH), ints(ROWS + 1), torch.empty(ROWS, kv_heads, WIDTH)
    for logits in ({"soft_cap": 50.0}, {"sinks": torch.empty(heads)}):
        Compiled.shape = ", ".join(logits)
        attention = PagedAttention(query, keys, table, starts, lens, 0.1, values, mass=mass, **logits)
        decode_mass.decode_mass(attention, lens, torch.empty_like(query), lse=lse)
        mass_from_lse.mass_from_lse(attention, lse)
        query_lse.query_lse(replace(attention, mass=None), lse)


if __name__ == "__main__":
    if sys.argv[1:] == ["--publish"]:
        publish()
        sys.exit()
    capability, *chosen = map(int, sys.argv[1:] or ["90"])
    numbers = [number for number in chosen or range(len(SHAPES)) if FP8 not in SHAPES[number] or capability >= 89]
    driver.set_active(Driver(capability))
    replace_kernels()
    mass_from_lse.capability_of = lambda device: divmod(capability, 10)
    compile_bookkeeping(capability)
    compile_reaching([SHAPES[number] for number in REACHED if number in numbers])
    compile_readers([SHAPES[number] for number in numbers])
    print(json.dumps(Compiled.found))
