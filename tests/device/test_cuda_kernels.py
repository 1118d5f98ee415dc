"""The CUDA C++ kernels of csrc/cuda without a GPU: run on a CPU by tests/harness/cuda/emulator.h, and compiled by nvcc.

Where there is a GPU and nvcc they run on it.
"""

import ctypes
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_evict.compute.attention.device import DeviceOps
from vllm_evict.compute.kernels import decode_cuda
from vllm_evict.compute.kernels.decode_cuda import Library, depth_for, plan_decode, refused, splits_for
from vllm_evict.compute.kernels.paged import DecodeShape, PagedAttention
from vllm_evict.config import KVPolicyError

pytest.importorskip("triton")

from triton_batch import (
    BF16,
    DEVICE,
    F16,
    F32,
    HEAD_MAJOR,
    ON_GPU,
    TOKEN_MAJOR,
    TOLERANCE,
    Batch,
    assert_close,
    beyond_2_to_the_31,
    check_captured,
    check_large_scores,
    check_mass_adds_up,
    check_nan_keys,
    check_no_tokens,
    check_without_mass,
    ints,
)

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "csrc/cuda/decode_mass.cu"
needs_emulator = pytest.mark.skipif(ON_GPU, reason="the kernels run on a GPU here")
needs_bulk = pytest.mark.skipif(
    ON_GPU and torch.cuda.get_device_capability() < (9, 0), reason="bulk copies need compute capability 9.0"
)
both_copies = pytest.mark.parametrize("bulk", [pytest.param(True, marks=needs_bulk), False], ids=["bulk", "cp.async"])


def compile_emulated(source: Path, path: Path) -> Library:
    """A `decode_mass.cu` and its kernels, for this CPU."""
    compiler = shutil.which("g++") or pytest.skip("no g++")
    options = "-std=c++17", "-O1", "-march=native", "-fPIC", "-shared", "-Wall", "-Werror", "-Wno-unknown-pragmas"
    include = "-I", str(ROOT / "tests/harness/cuda")
    subprocess.run([compiler, *options, *include, "-x", "c++", str(source), "-o", str(path)], check=True)
    return Library(str(path))


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    path = tmp_path_factory.mktemp("cuda") / "kernels.so"
    if not ON_GPU:
        return compile_emulated(SOURCE, path)
    nvcc = shutil.which("nvcc") or pytest.skip("no nvcc")
    command = [nvcc, "-std=c++17", "-O3", "-arch=native", "-shared", "-Xcompiler", "-fPIC", "-o", path, SOURCE]
    subprocess.run(command, check=True)
    return Library(str(path))


class CudaBatch(Batch):
    """Arguments as for the Triton kernels; `decode` and `plan` of the CUDA kernels."""

    def __init__(self, kernels, *args, **options):
        super().__init__(*args, **options)
        self.kernels = kernels

    def plan(self, **options):
        shape = len(self.rows), self.heads, self.kv_heads, self.query.shape[2], self.block_size, self.table.shape[1]
        plan = plan_decode(DecodeShape(*shape, self.query.dtype, DEVICE), **options)
        for scratch in (plan.partial, plan.stats, plan.granules):
            if scratch is not None:
                scratch.fill_(torch.nan)
        return plan

    def decode(self, rows_of_mass=None, *, plan=None, weights=True, **options):
        output = torch.full_like(self.query, 7.0)
        lse = torch.full((len(output), self.heads + 1), 7.0, device=DEVICE)[:, 1:]
        out = self.new_out(rows_of_mass or self.kv_heads) if rows_of_mass != 0 else None
        decode_cuda.decode_mass(
            *(self.attention(out, weights=self.weights if weights is True else weights), self.rows, output),
            plan=plan or self.plan(mass=out is not None),
            kernels=self.kernels,
            **{"lse": lse} | options,
        )
        return output, out, lse


LENS = [1, 0, 3, 1, 1, 1], [1, 20, 64, 48, 130, 300]
SHAPES = [  # heads, dim, block size, dtype, layout, splits, rows of mass
    ((2, 2), 64, 16, BF16, HEAD_MAJOR, 1, None),
    ((4, 1), 128, 16, BF16, TOKEN_MAJOR, 3, None),
    ((8, 1), 64, 32, F16, TOKEN_MAJOR, 2, 1),
    ((8, 2), 128, 128, F16, HEAD_MAJOR, 1, 1),
    ((8, 1), 128, 256, BF16, TOKEN_MAJOR, 7, None),
    ((16, 1), 128, 48, BF16, HEAD_MAJOR, 2, None),
    ((14, 1), 64, 16, F16, TOKEN_MAJOR, 1, 1),
    ((3, 1), 256, 32, BF16, HEAD_MAJOR, 2, None),
]


@both_copies
@pytest.mark.parametrize(
    "shape", SHAPES, ids=[f"{h}x{d}-bs{b}-{str(t)[6:]}-{o.name}-{n}" for h, d, b, t, o, n, _ in SHAPES]
)
def test_decode_matches_the_reference(kernels, shape, bulk):
    heads, dim, block_size, dtype, layout, splits, rows = shape
    batch = CudaBatch(kernels, *LENS, heads, dim, block_size, dtype, layout)
    output, mass, lse = batch.decode(rows, plan=batch.plan(splits=splits, bulk=bulk))
    expected, expected_mass = batch.decode_reference(rows)
    assert_close(output, expected, TOLERANCE[dtype])
    assert_close(mass, expected_mass, 5e-6)
    tokens = batch.starts[batch.rows.long()].long()
    assert_close(lse[tokens], batch.lse()[tokens])
    others = torch.ones(len(output), dtype=torch.bool, device=DEVICE).index_fill(0, tokens, False)
    assert (output[others] == 7).all() and (lse[others] == 7).all()


def apart(keys, values):
    return keys.clone(), values.clone()


def of_other_strides(keys, values):
    return keys.clone(), torch.cat((values, values[:, :1]), 1)[:, :-1]


def woven(keys, values):
    """The first value follows the first key, the second one does not."""
    blocks, heads, size, dim = keys.shape
    memory = torch.full((blocks, heads, size * 4 * dim), torch.nan, dtype=keys.dtype, device=keys.device)
    strides = memory.stride(0), memory.stride(1)
    both = (memory.as_strided(keys.shape, (*strides, n * dim, 1), o) for n, o in ((4, 0), (2, dim)))
    return [into.copy_(source) for into, source in zip(both, (keys, values))]


@both_copies
@pytest.mark.parametrize("lie", [apart, of_other_strides, woven])
def test_values_need_not_follow_their_keys(kernels, lie, bulk):
    batch = CudaBatch(kernels, *LENS, (4, 2), 64, 32, BF16, TOKEN_MAJOR)
    plan = batch.plan(bulk=bulk)
    joined = batch.decode(plan=plan)
    batch.keys, batch.values = lie(batch.keys, batch.values)
    assert all(torch.equal(a, b) for a, b in zip(batch.decode(plan=plan), joined, strict=True))


@both_copies
@pytest.mark.parametrize("depth", [1, 3])
def test_a_request_of_many_rounds(kernels, depth, bulk):
    """More chunks than slots, and than page numbers that are loaded at once."""
    batch = CudaBatch(kernels, [1], [1201], (2, 1), 64, 16, F16, TOKEN_MAJOR)
    output, mass, lse = batch.decode(plan=batch.plan(splits=1, depth=depth, bulk=bulk))
    expected, expected_mass = batch.decode_reference()
    assert_close(output, expected, TOLERANCE[F16])
    assert_close(mass, expected_mass)
    assert_close(lse, batch.lse())


@pytest.mark.parametrize("rows", [1, 6])
def test_more_than_a_program_combines_at_once(kernels, rows):
    """Splits for a warp's lanes, some of them empty; heads and blocks for a program of the second launch."""
    batch = CudaBatch(kernels, [1, 1], [2100, 400], (36, 6), 64, 16, BF16)
    output, mass, lse = batch.decode(rows, plan=batch.plan(splits=35))
    expected, expected_mass = batch.decode_reference(rows)
    assert_close(output, expected, TOLERANCE[BF16])
    assert_close(mass, expected_mass, 5e-6)
    assert_close(lse, batch.lse())


@needs_emulator
@both_copies
def test_no_order_of_threads_and_copies_changes_a_bit(kernels, bulk):
    batch = CudaBatch(kernels, [1, 1], [333, 40], (4, 2), 64, 16, BF16)
    plan, first = batch.plan(splits=2, depth=1, bulk=bulk), None
    for seed in range(8):
        kernels.handle.vllm_evict_emulator_seed(ctypes.c_uint(seed))
        results = batch.decode(plan=plan)
        first = first or results
        assert all(torch.equal(a, b) for a, b in zip(results, first, strict=True))


BROKEN = {  # what is left out -> what is seen
    "barrier_wait(ring.full(slot), parity);": "more arrived than the barrier waits for|wrong",
    "barrier_wait(ring.empty(slot), parity);": "more arrived than the barrier waits for|wrong",
    "barrier_arrive(ring.empty(slot));": "all threads wait for each other",
    "if (lane == 0) barrier_expect(full, valid * 4 * D);": "more arrived than the barrier waits for",
    "sync_some(1, kConsumers * kLanes);\n  float": "wrong",
    "sync_some(1, kConsumers * kLanes);\n  const": "wrong",
}


@needs_emulator
@pytest.mark.parametrize("line", BROKEN)
def test_the_emulator_sees_a_race(kernels, tmp_path, line):
    """On a GPU most of these would go unseen most of the time."""
    for path in SOURCE.parent.iterdir():
        (tmp_path / path.name).write_text(path.read_text())
    path = tmp_path / "decode_mass.cuh"
    before = path.read_text()
    assert before.count(line) == 1
    path.write_text(before.replace(line, f"; {line.partition(';')[2]}"))
    batch = CudaBatch(compile_emulated(tmp_path / SOURCE.name, tmp_path / "broken.so"), [1], [700], (2, 1), dtype=BF16)
    plan = batch.plan(splits=1, depth=1, bulk=True)
    expected, seen = CudaBatch(kernels, [1], [700], (2, 1), dtype=BF16).decode(plan=plan)[0], set()
    for seed in range(4):
        batch.kernels.handle.vllm_evict_emulator_seed(ctypes.c_uint(seed))
        try:
            output, _, _ = batch.decode(plan=plan)
            seen.add("right" if torch.equal(output, expected) else "wrong")
        except RuntimeError as error:
            seen.add(str(error))
    assert any(re.search(BROKEN[line], each) for each in seen), seen


def test_decode_without_mass_is_the_same(kernels):
    batch = CudaBatch(kernels, *LENS, dtype=BF16)
    assert torch.equal(batch.decode(0, lse=None)[0], batch.decode()[0])
    check_without_mass(batch)


def test_mass_adds_up_to_the_queries(kernels):
    check_mass_adds_up(CudaBatch(kernels, *LENS, heads=(6, 2), dtype=BF16))


def test_with_one_number_of_splits_other_requests_change_no_bit(kernels):
    batch = CudaBatch(kernels, *LENS, dtype=F16)
    output, mass, _ = batch.decode(plan=batch.plan(splits=2))
    row = int(batch.rows[-1])
    batch.rows = ints([-1, row])  # -1: padding of a captured batch
    # What stands before row 0 would do for a request.
    batch.seq_lens, batch.starts = torch.cat((ints([64]), batch.seq_lens))[1:], torch.cat((ints([0]), batch.starts))[1:]
    batch.table = torch.cat((batch.table[-1:], batch.table))[1:]
    plan = batch.plan(splits=2)
    alone, its_mass, _ = batch.decode(plan=plan)
    assert plan.stats[0].isnan().all() and not plan.stats[1].isnan().any()
    token = int(batch.starts[row])
    assert torch.equal(alone[token], output[token]) and torch.equal(its_mass[row], mass[row])
    assert (alone[:token] == 7).all() and (its_mass[:row] == 0.25).all()


def test_large_scores_neither_overflow_nor_vanish(kernels):
    check_large_scores(CudaBatch(kernels, *LENS, dtype=F16, magnitude=12.0), 4e-3)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("tokens", [[70], range(112), range(300)], ids=["token", "split", "all"])
def test_nan_keys_give_nan_output_and_mass(kernels, splits, tokens):
    for heads, dim in (((4, 2), 64), ((16, 1), 128)):
        check_nan_keys(CudaBatch(kernels, *LENS, heads=heads, dim=dim, dtype=BF16), splits, tokens)


def test_a_request_without_tokens_gets_zeros(kernels):
    check_no_tokens(CudaBatch(kernels, [1], [16], dtype=BF16))


def test_decode_captures_into_a_graph(kernels):
    check_captured(CudaBatch(kernels, *LENS, dtype=BF16), partial(decode_cuda.decode_mass, kernels=kernels))


def test_a_row_of_mass_may_be_short(kernels):
    """Blocks beyond it, or beyond the plan's longest request, are attended to and not measured."""
    batch = CudaBatch(kernels, [1], [130], dtype=BF16)
    output, mass, _ = batch.decode(weights=None)
    short = batch.new_out(batch.kv_heads)[:, :, :4].contiguous()
    plan, again = batch.plan()._replace(max_blocks=4), torch.empty_like(output)
    plan = plan._replace(granules=plan.granules[:, :, :4].clone())
    for out, its in ((short, None), (batch.new_out(batch.kv_heads), plan)):
        decode_cuda.decode_mass(batch.attention(out), batch.rows, again, plan=its, kernels=kernels)
        assert torch.equal(again, output) and torch.equal(out[:, :, :4], mass[:, :, :4])
    assert (out[:, :, 4:] == 0.25).all()


@both_copies
@pytest.mark.parametrize("axis", ["block", "head"])
def test_slots_beyond_2_to_the_31(kernels, axis, bulk):
    near, batch = beyond_2_to_the_31(axis, 64, partial(CudaBatch, kernels))
    plan = near.plan(bulk=bulk)
    assert all(torch.equal(a, b) for a, b in zip(batch.decode(plan=plan), near.decode(plan=plan), strict=True))


def test_what_the_kernel_does_not_take():
    def sentence(heads=4, kv_heads=2, dim=64, block_size=16, dtype=BF16, cut=slice(None), values=None):
        query = torch.empty(3, heads, dim, dtype=dtype)
        cache = torch.empty(2, kv_heads, block_size, dim + 8, dtype=dtype)[..., cut][..., :dim]
        return refused(attention(query, cache, cache if values is None else values))

    def attention(query, keys, values, **options):
        return PagedAttention(query, keys, ints([[0]]), ints([0, 3]), ints([3]), 1.0, values, **options)

    assert sentence() is None and sentence(32, 2) is None and sentence(8, 1, 256, 48, F16) is None
    assert sentence(cut=slice(8, None)) is None
    assert "one dtype" in sentence(dtype=F32)
    assert "one dtype" in sentence(values=torch.empty(2, 2, 16, 64, dtype=F16))
    fp8 = torch.empty(2, 2, 16, 64, dtype=torch.float8_e4m3fn)
    query = torch.empty(3, 4, 64, dtype=BF16)
    assert "one dtype" in refused(attention(query, fp8, fp8))
    for more in ({"soft_cap": 30.0}, {"sinks": torch.zeros(4)}, {"per_token": True}):
        assert "no soft caps and no sinks" in refused(attention(query, query[None], query[None], **more))
    assert "one of 64, 128, 256" in sentence(dim=96)
    assert "1 to 16 heads" in sentence(34, 2) and "1 to 8 heads" in sentence(9, 1, 256)
    assert "multiple of 16" in sentence(block_size=24)
    assert "of one shape" in sentence(values=torch.empty(2, 2, 32, 64, dtype=BF16))
    assert "aligned to 16 bytes" in sentence(cut=slice(4, None))
    batch = CudaBatch(None, [1], [16], dtype=F32)
    with pytest.raises(ValueError, match="one dtype"):
        batch.decode(plan=plan_decode(DecodeShape(1, 4, 2, 64, 16, 4, BF16, DEVICE)))


def test_errors_are_the_librarys(kernels):
    batch = CudaBatch(kernels, [1], [16], dtype=BF16)
    with pytest.raises(RuntimeError, match="CUDA: invalid argument"):
        batch.decode(plan=batch.plan()._replace(depth=0))
    with pytest.raises(ValueError, match="plan must be for"):
        batch.decode(plan=batch.plan(mass=False))
    with pytest.raises(TypeError, match="rows must be int32"):
        batch.rows = batch.rows.long()
        batch.decode(plan=plan_decode(DecodeShape(1, 4, 2, 64, 16, 4, BF16, DEVICE)))


def test_splits_fill_whole_waves():
    places = 3 * 132
    assert splits_for(8, 131_072, places) == 49  # 392 programs
    assert splits_for(8, 1024, places) == 4  # 256 tokens each
    assert splits_for(1, 131_072, places) == 128
    assert splits_for(128, 8192, places) == 3  # 384 programs
    assert splits_for(512, 8192, places) in range(2, 9)  # one wave and a third would take two
    assert splits_for(396, 8192, places) == 1


def test_programs_fit_on_an_sm(kernels):
    """A ring with its barriers, in the kernels' own words, and the 1 KiB that CUDA takes of each."""
    for dim, programs, chunks in ((64, 3, 4), (128, 3, 2), (128, 2, 3), (256, 2, 1)):
        depth = depth_for(dim, programs)
        taken = [kernels.handle.vllm_evict_decode_shared_bytes(dim, 1, each) + 1024 for each in (depth, depth + 1)]
        assert depth == chunks and programs * taken[0] <= 228 * 1024 < programs * taken[1]
    assert depth_for(128, 2, 100 * 1024) == depth_for(256, 3, 100 * 1024) == 1


# ---- chosen behind a GPU backend


class Ops(DeviceOps):
    """Of tensors on the host."""

    def decode_with(self, batch, out):
        output = torch.full_like(batch.query, 7.0)
        self.decoding.decode(batch.attention(out, weights=batch.weights), batch.rows, output)
        return output


@pytest.fixture
def on_hopper(monkeypatch):
    """A GPU for those who ask for one; tensors are on the host."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setenv("VLLM_EVICT_DECODE", "cuda")


def test_passes_decode_in_cuda_where_it_is_asked_for(on_hopper, monkeypatch, kernels, caplog):
    monkeypatch.setattr(decode_cuda, "library", lambda: kernels)
    calls = []
    monkeypatch.setattr(Library, "decode_mass", lambda *args, run=Library.decode_mass: (calls.append(args), run(*args)))
    batch = CudaBatch(kernels, *LENS, dtype=BF16)
    with caplog.at_level("INFO"):
        ops, out = Ops(), batch.new_out(2)
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("VLLM_EVICT_DECODE=cuda: decodes in CUDA C++")
    expected, expected_mass = batch.decode_reference()
    calls.clear()
    assert_close(ops.decode_with(batch, out), expected, TOLERANCE[BF16])
    assert_close(out, expected_mass)
    ((plan, at_once),) = ops.decoding._plans.values()
    assert len(calls) == 1 and plan.max_blocks == 32 and len(plan.partial) == at_once == 4
    assert plan.partial.untyped_storage().data_ptr() == ops.scratch._memory.data_ptr()
    ops.decode_with(batch, None)
    assert len(calls) == 2
    # What the kernel does not take is Triton's.
    ops.decode_with(CudaBatch(kernels, [1], [20], dtype=F32), None)
    assert len(calls) == 2
    # Without room for all requests at once it is called for some at a time.
    one, out = Ops(), batch.new_out(2)
    monkeypatch.setattr(one.scratch, "nbytes", sum(each.nbytes for each in plan[2:5]) // 2)
    assert_close(one.decode_with(batch, out), expected, TOLERANCE[BF16])
    assert_close(out, expected_mass)
    assert len(calls) == 2 + -(-len(batch.rows) // 2)


def test_triton_decodes_unless_cuda_is_asked_for(on_hopper, monkeypatch):
    monkeypatch.setattr(decode_cuda, "library", lambda: pytest.fail("nobody asked for it"))
    monkeypatch.delenv("VLLM_EVICT_DECODE")
    assert Ops().decoding._cuda is None
    monkeypatch.setenv("VLLM_EVICT_DECODE", "triton")
    assert Ops().decoding._cuda is None
    monkeypatch.setenv("VLLM_EVICT_DECODE", "cutlass")
    with pytest.raises(KVPolicyError, match="got 'cutlass'; expected stock, triton or cuda"):
        Ops()


@pytest.mark.parametrize("case", ["not built", "no library", "another version", "old GPU"])
def test_a_library_that_does_not_load_is_one_line(on_hopper, monkeypatch, kernels, tmp_path, caplog, case):
    decode_cuda.library.cache_clear()
    path = tmp_path / "_C_cuda.so"
    path.write_text("no library")
    spec = SimpleNamespace(origin=kernels.handle._name if case in ("another version", "old GPU") else str(path))
    monkeypatch.setattr(decode_cuda.importlib.util, "find_spec", lambda name: None if case == "not built" else spec)
    if case == "another version":
        monkeypatch.setattr(decode_cuda.ctypes, "sizeof", lambda kind: 8)
    if case == "old GPU":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    with caplog.at_level("WARNING"):
        ops = Ops()
    decode_cuda.library.cache_clear()
    (line,) = (record.getMessage() for record in caplog.records)
    said = {
        "not built": "was not built",
        "no library": str(path),
        "another version": "build it again",
        "old GPU": "8.0",
    }
    assert line.startswith("VLLM_EVICT_DECODE=cuda: ") and said[case] in line and line.endswith("Triton kernel decodes")
    ops.decode_with(CudaBatch(kernels, [1], [20], dtype=BF16), None)
