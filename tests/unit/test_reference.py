"""Worker statistics and policies against the papers' formulas, on the same random queries, keys and values."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from reference import papers

from vllm_evict.compute.attention.cpu import CPUOps
from vllm_evict.compute.cached import CachedStatistics
from vllm_evict.compute.group import GroupRuntime
from vllm_evict.compute.kernels.mass import pack_keys, pack_values, unpack_values
from vllm_evict.compute.probes import LayerCall
from vllm_evict.compute.runtime import EvictionRuntime
from vllm_evict.compute.shape import Shape
from vllm_evict.compute.step_batch import Row
from vllm_evict.config import KVPolicyConfig
from vllm_evict.core.blocks import RequestBlocks
from vllm_evict.core.plan import PLAN, EvictionPlan, GroupPlan, Scoring
from vllm_evict.core.residence import HOLE
from vllm_evict.policies import POLICIES, Blocks

SIZE, HEADS, KV_HEADS, DIM, LAYERS, TOKENS = 16, 6, 2, 32, 2, 194
#: A decision after the third chunk (10 blocks, 8 allowed), the next at position 192, when a ninth is begun again.
STEPS = [70, 45, 30] + [1] * 49
BASE = {"budget": 96, "buffer": 32, "sink": 16, "recent": 20}
WINDOW = 12
#: Of others tell test_kvzip.py, whose scores another request measures, and test_bands.py.
SCORED = [name for name, each in POLICIES.items() if each.measures and not (each.reconstructs or each.allocator.splits)]


def local(values, maximise):
    return values


class Served:
    """One request's tensors in a packed cache, behind the worker's runtime, beside a request that is not measured."""

    def __init__(self, config, seed=0):
        gen = torch.Generator().manual_seed(seed)
        common = torch.randn(KV_HEADS, DIM, generator=gen)
        self.layers = []
        for _ in range(LAYERS):
            # Keys have something in common, and differ in length; some come twice.
            k = torch.randn(TOKENS, KV_HEADS, DIM, generator=gen) + 0.5 * common
            k *= 0.5 + torch.rand(TOKENS, 1, 1, generator=gen)
            k[60:90] = k[20:50] + 0.1 * torch.randn(30, KV_HEADS, DIM, generator=gen)
            q = torch.randn(TOKENS, HEADS, DIM, generator=gen) * 1.5
            self.layers.append((q, k, torch.randn(TOKENS, KV_HEADS, DIM, generator=gen)))
        self.blocks = -(-TOKENS // SIZE)
        # Physical blocks in random order; block 0 is the null block.
        self.table = 1 + torch.randperm(self.blocks, generator=gen).int()
        self.config = config
        self.group = GroupRuntime(config, Shape(SIZE, 2, TOKENS, KV_HEADS, LAYERS), self)
        self.runtime = EvictionRuntime([self.group])
        self.resident = RequestBlocks(config, config.limits(SIZE, TOKENS), SIZE)
        self.computed, self.holes, self.new_holes = 0, set(), []
        self.seen = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
        self.caches = [torch.zeros(self.blocks + 1, KV_HEADS, SIZE, 2 * DIM) for _ in range(LAYERS)]

    def read(self, physical, values):
        return (CPUOps().read(SimpleNamespace(isa="vec"), cache, physical, values) for cache in self.caches)

    def write(self):
        """Compute into the caches."""
        for (_, k, v), cache in zip(self.layers, self.caches):
            for block, physical in enumerate(self.table.tolist()):
                part = slice(block * SIZE, min((block + 1) * SIZE, self.computed))
                packed = torch.full((2, 1, KV_HEADS, SIZE, DIM), float("nan"))  # what is not there is never read
                for half, values in zip(packed, (k, v)):
                    tokens = values[part].transpose(0, 1)
                    half[0, :, : tokens.shape[1]] = tokens
                keys = pack_keys(packed[0])
                cache[physical] = torch.cat((keys[0], packed[1, 0]), 1).view(KV_HEADS, SIZE, 2 * DIM)

    def step(self, count):
        """Compute `count` tokens; returns blocks that were evicted and the `Blocks` that were judged, or None."""
        first, self.computed = self.computed, self.computed + count
        tokens = torch.arange(self.computed)
        there = torch.tensor([t // SIZE not in self.holes for t in tokens.tolist()])
        self.seen[first : self.computed, : self.computed] = there & (tokens <= tokens[first:, None])
        self.write()
        plan = GroupPlan(changes={"r": dict.fromkeys(self.new_holes, HOLE)})
        due = self.resident.over_trigger(-(-self.computed // SIZE))
        if due:
            plan.report["r"] = self.config.policy.measures
        if first == 0 and (scoring := Scoring.of(self.config, self.resident.limits.trigger)):
            plan.track["r"] = scoring
        self.new_holes = []
        none = SimpleNamespace(resumed_req_ids=set())
        output = SimpleNamespace(
            finished_req_ids=set(), preempted_req_ids=None, scheduled_cached_reqs=none, scheduled_new_reqs=[]
        )
        setattr(output, PLAN, EvictionPlan([plan]))
        self.runtime.begin(output)
        self.runtime.batch.req_ids = ["other", "r"]
        table = torch.zeros(2, self.blocks + 1, dtype=torch.int32)
        table[0, 0] = 1
        table[1, : self.blocks] = self.table * torch.tensor([b not in self.holes for b in range(self.blocks)])
        metadata = SimpleNamespace(
            block_table_tensor=table,
            seq_lens=torch.tensor([3, self.computed], dtype=torch.int32),
            query_start_loc=torch.tensor([0, 2, 2 + count], dtype=torch.int32),
        )
        metadata.query_start_loc_cpu, metadata.seq_lens_cpu_upper_bound = metadata.query_start_loc, metadata.seq_lens
        self.runtime.views.tables = [table]
        metadata, work = self.group.view(metadata)
        metadata.block_table, metadata.num_actual_tokens = metadata.block_table_tensor, 2 + count
        for place, ((q, _, _), cache) in enumerate(zip(self.layers, self.caches)):
            query = torch.cat((torch.zeros(2, HEADS, DIM), q[first : self.computed]))
            if work is not None:
                layer = SimpleNamespace(isa="vec", impl=SimpleNamespace(scale=DIM**-0.5))
                work.do(LayerCall(CPUOps(), layer, place, query, cache, metadata, torch.empty_like(query)))
        (reports,) = self.runtime.end(local)
        if not due:
            return None
        judged = []
        importance = self.config.policy.importance

        def watched(blocks: Blocks):
            judged.append((blocks, importance(blocks)))
            return judged[-1][1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(self.config.policy), "importance", lambda _, blocks: watched(blocks))
            victims = self.resident.choose(self.computed, reports["r"])
        self.resident.evict(victims, self.computed)
        self.new_holes = victims.tolist()
        resident = [t for t in range(self.computed) if t // SIZE not in self.holes]
        self.holes |= set(self.new_holes)
        return self.new_holes, *judged[0], resident


def by_paper(name, served, index, resident):
    """Scores of candidate blocks, in order."""
    blocks = [list(range(b * SIZE, (b + 1) * SIZE)) for b in index]
    n = served.computed
    layers = [(q[:n], k[:n], v[:n]) for q, k, v in served.layers]
    seen, last = served.seen[:n, :n], range(n - WINDOW, n)
    return {
        "h2o": lambda: papers.h2o(layers, seen, blocks, range(n)),
        "tova": lambda: papers.tova(layers, seen, blocks, n - 1),
        "snapkv": lambda: papers.snapkv(layers, seen, blocks, last, SIZE, 5),
        "scissorhands": lambda: papers.scissorhands(layers, seen, blocks, last),
        "rkv": lambda: papers.rkv(layers, seen, blocks, last, resident, 0.4),
        "knorm": lambda: papers.knorm(layers, blocks),
        "keydiff": lambda: papers.keydiff(layers, blocks, resident),
        "pagedeviction": lambda: papers.pagedeviction(layers, blocks),
        "keybound": lambda: papers.keybound(layers, SIZE, resident, n - 1, index),
    }[name]()


@pytest.mark.parametrize("name", SCORED)
@pytest.mark.parametrize("seed", range(2))
def test_scores_and_kept_blocks_are_the_papers(name, seed):
    own = {"window": WINDOW, "kernel": 5, "mix": 0.4}
    own = {field: value for field, value in own.items() if field in POLICIES[name].options - {"accumulate"}}
    served = Served(KVPolicyConfig.parse({"name": name, **BASE, **own}), seed)
    decisions = 0
    for count in STEPS:
        done = served.step(count)
        if done is None:
            continue
        decisions += 1
        victims, blocks, importance, resident = done
        want = by_paper(name, served, blocks.index.tolist(), resident)
        if name == "scissorhands":
            assert importance.tolist() == want and len(set(want)) > 2
        else:
            np.testing.assert_allclose(importance, want, rtol=2e-4, atol=1e-6)
        order = sorted(range(len(want)), key=lambda i: (want[i], i))
        assert victims == sorted(blocks.index[order[: len(victims)]].tolist()) and victims
        assert len(victims) == len(set(t // SIZE for t in resident)) - 6
    assert decisions == 2


@pytest.mark.parametrize("heads", ["sum", "mean", "max"])
@pytest.mark.parametrize("layers", ["sum", "mean", "max"])
@pytest.mark.parametrize("name", ["knorm", "keydiff", "rkv"])
def test_cached_statistics_are_reduced_as_asked(name, heads, layers):
    """By head and layer first; a maximum takes what speaks most for a block."""
    served = Served(KVPolicyConfig.parse({"name": name, **BASE, "heads": heads, "layers": layers}))
    done = [served.step(count) for count in STEPS[:3]][-1]
    _, blocks, _, resident = done
    tokens = [list(range(b * SIZE, (b + 1) * SIZE)) for b in blocks.index.tolist()]
    scores = np.array(
        [
            [
                {
                    "knorm": lambda one: papers.knorm(one, tokens),
                    "keydiff": lambda one: papers.keydiff(one, tokens, resident),
                    "rkv": lambda one: [-x for x in papers.redundancy(one, tokens, resident)],
                }[name]([(q, k[: served.computed, g : g + 1], v)])
                for g in range(KV_HEADS)
            ]
            for q, k, v in served.layers
        ]
    )
    reduce = {"sum": np.sum, "mean": np.mean, "max": np.max}
    want = reduce[heads](reduce[layers](scores, axis=0), axis=0)
    statistic = {"knorm": "-key_norm", "keydiff": "key_diff", "rkv": "-redundancy"}[name]
    np.testing.assert_allclose(blocks[statistic], want, rtol=1e-4)


def test_policies_that_keep_large_and_small_norms_get_a_maximum_of_their_own():
    keys = torch.randn(4, KV_HEADS, SIZE, 16)
    statistics = CachedStatistics(lambda rows, values: [(keys[rows], None)], [KV_HEADS], "max", "sum")
    asked = {"large": frozenset({"key_norm"}), "small": frozenset({"-key_norm"})}
    rows = dict.fromkeys(asked, Row(np.arange(4), torch.arange(4), 4 * SIZE))
    reports, norms = statistics.report(asked, rows, local), keys.norm(dim=-1).mean(-1)
    np.testing.assert_allclose(reports["large"].statistics["key_norm"], norms.amax(1), rtol=1e-6)
    np.testing.assert_allclose(reports["small"].statistics["-key_norm"], -norms.amin(1), rtol=1e-6)


@pytest.mark.parametrize("layout", ["vec", "amx"])
def test_values_are_unpacked(layout):
    values = torch.randn(3, 2, 32, 64).bfloat16()
    assert torch.equal(unpack_values(pack_values(values, layout), layout), values)
    if layout == "amx":
        # vLLM's rule for token t, element d: tiles of 16 elements, in each pairs of tokens.
        packed = pack_values(values, layout).flatten(2)
        for t, d in ((0, 0), (5, 17), (30, 40), (31, 63)):
            at = d // 16 * 32 * 16 + t // 2 * 32 + d % 16 * 2 + t % 2
            assert torch.equal(packed[:, :, at], values[:, :, t, d])
