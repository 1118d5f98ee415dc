"""Kernels are compiled before requests come: all variants, as Triton tells them apart; without a GPU."""

import json
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import test_device_backends
import torch
from engine import random_prompt
from interpreter import use_kernels
from parts import part_of, sums_of, tokens_of
from test_device_backends import BASE, POLICIES, distinct_prompt, on
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import jit
from triton.runtime.interpreter import InterpretedFunction
from vllm.triton_utils import HAS_TRITON

from vllm_evict.compute import sums as worker_sums
from vllm_evict.compute import views as worker_views
from vllm_evict.compute.attention.flash import FlashOps
from vllm_evict.compute.attention.latent_device import DeviceLatentOps
from vllm_evict.compute.attention.triton import TritonOps
from vllm_evict.compute.attention.warmup import LayerHeads, warm_up
from vllm_evict.compute.compaction import Compactor
from vllm_evict.compute.group import GroupRuntime
from vllm_evict.compute.kernels.queries import Queries
from vllm_evict.compute.probes import LayerCall, MassTarget
from vllm_evict.compute.runtime import EvictionRuntime
from vllm_evict.compute.shape import Shape
from vllm_evict.compute.work import HeadSlice
from vllm_evict.config import KVPolicyConfig
from vllm_evict.integration.worker import layers, worker

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"), pytest.mark.on_triton]
backend, server = (getattr(test_device_backends, name) for name in ("backend", "server"))
#: vLLM warms up; there are no CUDA graphs.
WARM = {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "NONE"}, "max_num_seqs": 4}


class Variants:
    """Records what Triton would have compiled for launches of the plugin's kernels: (kernel, Triton's own key)."""

    def __init__(self):
        self.seen = set()
        self._binders = {}

    @contextmanager
    def noted(self, run=InterpretedFunction.run):
        """Launches within it; `run` runs them."""

        def noting(kernel, *args, grid, warmup, **kwargs):
            if kernel.fn.__module__.startswith("vllm_evict."):
                self.seen.add(self._key(kernel, args, kwargs))
            return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

        with patch.object(InterpretedFunction, "run", noting):
            yield self

    def _key(self, kernel, args, kwargs):
        if kernel.fn not in self._binders:
            compiled = jit.JITFunction(kernel.fn, do_not_specialize=kernel.kwargs["do_not_specialize"])
            bind = jit.create_function_from_signature(compiled.signature, compiled.params, CUDABackend)
            self._binders[kernel.fn] = bind
        _, specialised, options = self._binders[kernel.fn](*args, **kwargs)
        return kernel.fn.__name__, jit.compute_cache_key({}, specialised, options)


def requests(distinct):
    """Two together, one of which is prefilled in chunks and evicted from, then one of a single token."""
    prompt = distinct_prompt if distinct else random_prompt
    return [
        [(prompt(100), {"max_tokens": 3}), (prompt(18, 1), {"max_tokens": 5})],
        [(prompt(1, 2), {"max_tokens": 2})],
    ]


SERVED = {
    "h2o": POLICIES["h2o"],
    "h2o-max": {**POLICIES["h2o"], "heads": "max", "layers": "max"},
    "snapkv": {"name": "snapkv", **BASE, "window": 4},
    "sink-window": {**POLICIES["sink-window"], "allow": []},
    "scissorhands": {**POLICIES["scissorhands"], "allow": ["h2o"]},
    "token": {**POLICIES["h2o"], "granularity": "token", "allow": ["keydiff"]},
    "reach": {"name": "full", **BASE, "evict": "host", "host": "1MiB", "leaders": 2},
    "reach-box": {"name": "full", **BASE, "evict": "host", "host": "1MiB", "index": "box", "fetch": 1},
}
ENGINES = ["h2o", "snapkv", "sink-window", "scissorhands", "token"]
CASES = [on("triton", name) for name in (*ENGINES, "reach")]
CASES += [on("fa3", name) for name in ("h2o", "scissorhands", "token", "reach-box")]


@pytest.mark.both_runners("triton-h2o")
@pytest.mark.parametrize("backend, name", CASES, indirect=["backend"])
def test_nothing_is_compiled_while_requests_wait(server, backend, name):
    # FlashAttention takes half precision only, and tiles depend on it.
    check_served(server, name, "float16" if backend else "float32")


def check_served(server, name, dtype, **kwargs):
    start, later = Variants(), Variants()
    with start.noted():
        subject = server(SERVED[name], **{**WARM, **kwargs}, dtype=dtype)
    with later.noted():
        for batch in requests(name == "token"):
            _, traces = subject.traced(batch)
            assert any(map(len, traces[0].evicted)) == (len(batch) == 2)
    assert not name.startswith("reach") or "_copy" in {kernel for kernel, _ in later.seen}
    check(later, start)


def check(later, start):
    assert later.seen, "nothing was launched"
    late = later.seen - start.seen
    assert not late, f"{len(late)} variants, such as {sorted(late)[0]}"


@pytest.mark.parametrize("backend, index", [on("triton", "signs"), on("fa3", "box")], indirect=["backend"])
def test_nor_for_prompts_that_read_less(server, backend, index):
    start, later = Variants(), Variants()
    policy = {"name": "full", "read": 64, "read_prompts": 96, "leaders": 2, "index": index}
    with start.noted():
        subject = server(policy, **WARM, dtype="float16" if backend else "float32")
    with later.noted():
        subject.generate([random_prompt(170), random_prompt(18, 1)], max_tokens=3)
    scored = [name for name, _ in later.seen if name == "sign_logits"]  # by tiles, and by decodes
    assert len(scored) >= 2 if index == "signs" else not scored
    check(later, start)


@pytest.mark.parametrize("backend", [on("triton"), on("fa3")], indirect=True)
def test_nor_where_heads_are_split(server, tmp_path):
    start, later = Variants(), Variants()
    with start.noted():
        subject = server(duo(tmp_path, "block"), **WARM)
    with later.noted():
        for batch in (requests(False)[0][:1], requests(False)[0]):
            _, (trace, *_) = subject.traced(batch)
    assert any(map(len, trace.groups[0].evicted)) and any(map(len, trace.groups[1].evicted))
    assert "_attend_classes" in {name for name, _ in later.seen}
    check(later, start)


@pytest.mark.both_runners("triton")
@pytest.mark.parametrize("backend", [on("triton")], indirect=True)
def test_nor_beside_full_graphs(server, graphs):
    start, later = Variants(), Variants()
    with start.noted():
        subject = server(POLICIES["h2o"], **graphs.options, max_num_seqs=4)
    with later.noted():
        subject.traced(requests(False)[0])
    assert graphs.replayed
    check(later, start)


def duo(folder, granularity):
    """Of the tiny model, in whose layers either head is a retrieval head."""
    np.savetxt(folder / "heads.tsv", np.array([[1.0, 0.0], [0.0, 1.0]]), delimiter="\t")
    (folder / "config.json").write_text(json.dumps({"sink_size": 16, "recent_size": 32}))
    retrieval = {**POLICIES["h2o"], "granularity": granularity}
    return {"name": "duo", "gates": str(folder / "heads.tsv"), "retrieval": retrieval}


# Larger than an engine could be under the interpreter. Nothing is run: launches are only looked at.

#: Query heads, KV heads of the layer, their parts, head size, block size, dtype, dtype of the cache.
SHAPES = [
    (32, 8, [8], 128, 16, torch.bfloat16, None),
    (28, 4, [4], 128, 256, torch.float16, None),
    (12, 12, [12], 72, 24, torch.bfloat16, None),  # rows of heads are no multiples of 16
    (16, 1, [1], 256, 48, torch.float32, None),
    (32, 8, [8], 80, 16, torch.bfloat16, torch.uint8),
    (32, 8, [3, 5], 128, 16, torch.bfloat16, None),
    (9, 3, [1, 2], 24, 16, torch.float16, None),
]
MANY, LONG = 300, 40_000  # requests, tokens


@pytest.mark.parametrize("ops", [TritonOps, FlashOps])
@pytest.mark.parametrize("name", ["h2o", "h2o-max", "scissorhands", "token"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape[:5])))
def test_batches_of_any_size_take_what_was_compiled(shape, name, ops, monkeypatch):
    use_kernels(monkeypatch)
    worker_at_work = Work(shape, {**SERVED[name], "sink": 256, "recent": 256, "budget": 1024}, ops())
    start, later = Variants(), Variants()
    with start.noted(run=lambda *_, **__: None):
        worker_at_work.warm_up()
    with later.noted(run=lambda *_, **__: None):
        worker_at_work.steps()
    check(later, start)


class Work:
    """A worker with one layer, and calls as steps make them."""

    def __init__(self, shape, policy, ops):
        self.heads, self.kv_heads, parts, self.dim, self.block_size, self.dtype, kept = shape
        scales = {f"_{name}_scale_float": 0.5 for name in "qkv"}
        self.layer = SimpleNamespace(
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            dtype=self.dtype,
            impl=SimpleNamespace(scale=0.1, head_size=self.dim),
            **scales,
        )
        self.blocks, self.group_size = -(-LONG // self.block_size), self.heads // self.kv_heads
        self.groups, self.parts, first = [], [], 0
        pages = torch.zeros(2, self.block_size, sum(parts), 2 * self.dim, dtype=kept or self.dtype).transpose(1, 2)
        config = KVPolicyConfig.parse(policy)
        self.tests = "pivots" in config.statistics
        for index, count in enumerate(parts):
            group = GroupRuntime(config, Shape(self.block_size, MANY, LONG, count, 1), SimpleNamespace(read=None))
            group.decodes = True
            self.groups.append(group)
            which = slice(first * self.group_size, (first + count) * self.group_size)
            self.parts.append(LayerHeads(index, which, pages[:, first : first + count]))
            first += count
        self.runtime = EvictionRuntime(self.groups, ops, ["pages"] * len(parts) if len(parts) > 1 else ())
        self.ops = ops
        self.table = torch.zeros(MANY, self.blocks + 3, dtype=torch.int32)

    def warm_up(self):
        warm_up(self.runtime, [(self.layer, self.parts)], [self.table] * len(self.parts), 512, self.blocks)

    def steps(self):
        for rows, tokens in product((1, 2, 3, 16, 33, 130, MANY), (1, 16, 17, 300, 4_000, LONG)):
            self.decodes(rows, tokens)
        for rows, count in ((1, 1), (1, 5), (2, 9), (3, 100), (16, 512)):
            self.chunks(rows, count)
        for part, group in zip(self.parts, self.groups):
            if part_of(group, Compactor):
                self.compactions(part)

    def compactions(self, part):
        """Of whole blocks, in any order."""
        for kept, first in product((1, 2, 5), (0, 9)):
            target = torch.arange(kept, dtype=torch.int32)
            source = torch.cat((torch.tensor([first], dtype=torch.int32), target + 1, target))
            keep = torch.zeros(2, part.kv_cache.shape[1], kept * self.block_size, dtype=torch.int32)
            self.ops.compact(self.layer, [part.kv_cache] * 2, source, keep, target)

    def queries(self, tokens):
        """Contiguous, or beside keys and values."""
        for width in (self.heads, self.heads + 2 * self.kv_heads):
            yield torch.empty(tokens, width, self.dim, dtype=self.dtype)[:, : self.heads]

    def batch(self, rows, tokens, longest):
        """Return metadata as builders and views give it."""
        starts = torch.arange(rows + 1, dtype=torch.int32) * (tokens // rows)
        lens = torch.full((rows,), longest, dtype=torch.int32)
        return SimpleNamespace(
            block_table=self.table[:rows], query_start_loc=starts, seq_lens=lens, num_actual_tokens=tokens,
            max_query_len=tokens // rows, max_seq_len=longest,
        )  # fmt: skip

    def ways(self, group, part, rows, queries, longest):
        """Return the measurements of a step, as `MassStep` and `TokenStep` have them."""
        width, weights = -(-longest // self.block_size), torch.ones(queries)
        if tokens_of(group) is not None:
            kv_heads = part.kv_cache.shape[1]
            return [MassTarget(torch.zeros(rows, kv_heads + 1, width * self.block_size)[:, :kv_heads], weights, True)]
        sums = sums_of(group)
        mass = torch.zeros(rows, sums.heads, width)
        pivots = []
        if self.tests:
            layer = torch.zeros(rows, sums.kv_heads + 1, width)[:, : part.kv_cache.shape[1]]
            pivots = [MassTarget(None, weights), MassTarget(layer, weights)]
        return [MassTarget(mass), MassTarget(mass, weights), MassTarget(), *pivots]

    def call(self, *where):
        return LayerCall(self.ops, self.layer, 0, *where)

    def decodes(self, rows, longest):
        metadata, numbers = self.batch(rows, rows, longest), torch.arange(rows, dtype=torch.int32)
        output = torch.empty(rows, self.heads * self.dim, dtype=self.dtype).view(rows, self.heads, self.dim)
        for query, (part, group) in product(self.queries(rows), zip(self.parts, self.groups)):
            query_, output_ = query[:, part.query_heads], output[:, part.query_heads]
            alone = torch.empty(query_.shape, dtype=self.dtype)
            for measured in self.ways(group, part, rows, rows, longest):
                out, per_token = measured.out, measured.per_token
                for into in (output_, alone):
                    call = self.call(query_, part.kv_cache, metadata, into)
                    self.ops.decode(call, numbers, metadata.seq_lens, measured)
                if len(self.parts) == 2:
                    self.together(query, metadata, output, part, measured)
                sums = sums_of(group)
                if out is not None and not per_token and (sums.maximise_layers or out.shape[1] > 1):
                    self.layers(group, out, rows)
                if out is not None and not per_token and out.shape[1] == sums.heads:
                    slots, logical = torch.zeros(rows, dtype=torch.int32), group.identity[: out.shape[2]]
                    for kept in (None, torch.ones(rows)):
                        worker_sums.fold(sums._sums, slots, out, logical.expand(rows, -1), kept)
            if self.tests:
                looked_at = Queries(numbers.long(), numbers.long(), metadata.seq_lens)
                self.ops.mass_of(self.call(query_, part.kv_cache, metadata), looked_at, -(-longest // self.block_size))

    def layers(self, group, layer, rows):
        sums = sums_of(group)
        mass, lens = torch.zeros(rows, sums.heads, layer.shape[2]), torch.zeros(rows, dtype=torch.int32)
        options = {"maximise": sums.maximise_layers, "share": 1 / self.group_size}
        for tested in [None] * sums.maximise_layers + [lens] * self.tests:
            worker_sums.take(mass, layer, lens, self.block_size, tested=tested, **options)

    def together(self, query, metadata, output, its, measured):
        numbers = torch.arange(len(query), dtype=torch.int32)
        work = SimpleNamespace(rows=numbers, seq_lens=metadata.seq_lens)
        # The other class holds less.
        others = [SimpleNamespace(**{**vars(metadata), "max_seq_len": 300}), metadata]
        shares = [
            HeadSlice(work, self.call(query[:, heads], part.kv_cache, others[part is its], output[:, heads]))
            for part in self.parts
            for heads in [part.query_heads]
        ]
        self.ops.decode_together(
            shares, [measured if part is its else measured._replace(out=None) for part in self.parts]
        )

    def chunks(self, rows, tokens):
        longest = tokens // rows + 33
        metadata = self.batch(rows, tokens - tokens % rows, longest)
        for query, (part, group) in product(self.queries(metadata.num_actual_tokens), zip(self.parts, self.groups)):
            query = query[:, part.query_heads]
            for measured in self.ways(group, part, rows, len(query), longest):
                if measured.out is None:
                    continue
                if measured.weights is not None and len(query) > rows:
                    measured = measured._replace(last=torch.ones(rows, dtype=torch.int32))
                heard = [None]
                if isinstance(self.ops, FlashOps):
                    heard.append(torch.zeros(query.shape[1], len(query)))
                for self.ops._lse in heard:
                    self.ops.mass(self.call(query, part.kv_cache, metadata), measured)


#: Query heads, elements of a latent and its key, block size, dtype, dtype of the cache.
LATENTS = [
    (128, 576, 64, torch.bfloat16, None),
    (16, 576, 16, torch.float16, None),
    (20, 576, 64, torch.bfloat16, torch.uint8),
    (6, 48, 16, torch.float32, None),
]


@pytest.mark.parametrize("name", ["h2o", "h2o-max", "scissorhands"])
@pytest.mark.parametrize("shape", LATENTS, ids=lambda shape: "-".join(map(str, shape[:4])))
def test_batches_of_latents_take_what_was_compiled(shape, name):
    worker_at_work = LatentWork(shape, {**SERVED[name], "sink": 256, "recent": 256, "budget": 1024})
    start, later = Variants(), Variants()
    with start.noted(run=lambda *_, **__: None):
        worker_at_work.warm_up()
    with later.noted(run=lambda *_, **__: None):
        worker_at_work.steps()
    assert {kernel for kernel, _ in later.seen} == {"_mass_from_lse", "_query_lse"}
    check(later, start)


class LatentWork(Work):
    """A worker with one layer of latents, which measures beside vLLM's kernels."""

    def __init__(self, shape, policy):
        heads, dim, *kind = shape
        super().__init__((heads, 1, [1], dim, *kind), policy, DeviceLatentOps())
        (self.part,), (self.group,) = self.parts, self.groups
        self.parts = [self.part._replace(kv_cache=self.part.kv_cache[..., :dim].contiguous())]
        self.group.decodes = False
        self.ops.scratch.size_for(MANY, 0, heads, self.block_size, self.blocks, False)

    def decodes(self, rows, longest):
        metadata, query = self.batch(rows, rows, longest), torch.empty(rows, self.heads, self.dim, dtype=self.dtype)
        self.measured(metadata, query, longest)
        if self.tests:
            numbers = torch.arange(rows)
            looked_at, width = Queries(numbers, numbers, metadata.seq_lens), -(-longest // self.block_size)
            self.ops.mass_of(self.call(query, self.parts[0].kv_cache[:, 0], metadata), looked_at, width)

    def chunks(self, rows, tokens):
        if rows < tokens:  # others are decodes
            longest, count = tokens // rows + 33, tokens - tokens % rows
            query = torch.empty(count, self.heads, self.dim, dtype=self.dtype)
            self.measured(self.batch(rows, count, longest), query, longest)

    def measured(self, metadata, query, longest):
        rows, cache = len(metadata.seq_lens), self.parts[0].kv_cache[:, 0]
        for measured in self.ways(self.group, self.parts[0], rows, len(query), longest):
            if measured.weights is not None and len(query) > rows:
                measured = measured._replace(last=torch.ones(rows, dtype=torch.int32))
            if measured.out is not None:
                self.ops.mass(self.call(query, cache, metadata), measured)


# What else a start is to do, and not to do


@pytest.mark.parametrize("backend", [on("triton")], indirect=True)
@pytest.mark.parametrize("granularity", ["block", "token"])
def test_nothing_is_left_behind(server, tmp_path, monkeypatch, granularity):
    """Caches, the null block too, and sums hold what they held, to the byte; nothing is known of any request."""
    looked = []

    def looking(config, runtime, tables):
        caches = [layer.kv_cache for layer in layers.get_layers_from_vllm_config(config, layers.Attention).values()]
        caches += [config.compilation_config.static_forward_context[name].kv_cache for name in runtime.pages]
        sums = [each._sums for each in map(sums_of, runtime.groups) if each is not None]
        sums += [each._pages for each in map(tokens_of, runtime.groups) if each is not None]
        held = [each for each in [*caches, *sums] if each.numel()] + list(tables)
        for each in held:
            each.random_(1, 9)
        before = [each.clone() for each in held]
        layers_warm_up(config, runtime, tables)
        assert len(sums) == (2 if granularity == "token" else 1) and all(map(torch.equal, held, before))
        for group in runtime.groups:
            assert not group.in_step and not group.with_holes and not group.measured and group._viewed is None
        assert not runtime.in_step and not runtime.ops.decoding._plans and not runtime.ops._places
        for each in held:
            each.zero_()
        looked.append(len(held))

    layers_warm_up = layers.warm_up
    monkeypatch.setattr(worker.layers, "warm_up", looking)
    server(duo(tmp_path, granularity), **WARM)
    assert looked


@pytest.mark.parametrize("backend", [on("triton")], indirect=True)
def test_a_failure_is_told_once_and_requests_are_served(server, monkeypatch):
    prompt = random_prompt(70)
    expected = server(POLICIES["h2o"]).generate([prompt], max_tokens=3)

    def broken(*args):
        raise RuntimeError("no compiler")

    told = []
    monkeypatch.setattr(worker.logger, "warning", lambda line, *args, **kwargs: told.append((line, kwargs)))
    with patch.object(worker_views.Views, "warm_up", broken):
        subject = server(POLICIES["h2o"], **WARM)
    ((line, options),) = told
    assert line.startswith("Kernels of KV policies could not be compiled ahead.") and options == {"exc_info": True}
    assert subject.generate([prompt], max_tokens=3)[0].outputs[0].token_ids == expected[0].outputs[0].token_ids


@pytest.mark.parametrize("backend", [on("triton")], indirect=True)
def test_not_where_vllm_does_not_warm_up(server, monkeypatch):
    started = []
    monkeypatch.setattr(worker.layers, "warm_up", lambda *_: started.append("warm-up"))
    server(POLICIES["h2o"])
    assert not started, "eager servers start without"


@pytest.mark.skipif(HAS_TRITON, reason="the same as on V1")
def test_nothing_is_launched_on_a_cpu(engine, monkeypatch):
    monkeypatch.setattr(worker.layers, "warm_up", lambda *_: pytest.fail("nothing is compiled there"))
    start = Variants()
    with start.noted():
        subject = engine(POLICIES["h2o"] | {"budget": 128, "sink": 32, "recent": 32}, **WARM)
    assert subject.core.vllm_config.kernel_config.enable_jit_warmup and not start.seen
