"""A worker never waits for tensors of a device. Without a GPU: tensors that can't be looked at."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from parts import part_of, tokens_of

from vllm_evict.compute import cached, compaction, sums
from vllm_evict.compute.attention.device import DeviceOps
from vllm_evict.compute.attention.ops import BatchMetadata
from vllm_evict.compute.graphs import Attends
from vllm_evict.compute.group import GroupRuntime
from vllm_evict.compute.holes import Start
from vllm_evict.compute.kernels import alike, keys
from vllm_evict.compute.kernels.fold import fold
from vllm_evict.compute.kernels.keys import key_scores
from vllm_evict.compute.kernels.rotate import Rotation
from vllm_evict.compute.mass import BlockMass, TokenMass
from vllm_evict.compute.measure import MassBuffers
from vllm_evict.compute.probes import LayerCall
from vllm_evict.compute.runtime import EvictionRuntime
from vllm_evict.compute.shape import Shape
from vllm_evict.compute.store import Store
from vllm_evict.compute.tokens import TokenBuffers, TokenStep
from vllm_evict.compute.work import StepWork
from vllm_evict.config import KVPolicyConfig
from vllm_evict.core.actions import Compaction, Judged
from vllm_evict.core.plan import PLAN, EvictionPlan, GroupPlan, Scoring
from vllm_evict.core.residence import HOLE
from vllm_evict.features.context import worker as context
from vllm_evict.features.context.plan import KeyRotation
from vllm_evict.features.kvzip import worker as worker_prompts
from vllm_evict.features.kvzip.plan import Repetition, Repetitions
from vllm_evict.features.kvzip.worker import PromptScores
from vllm_evict.integration.worker import worker
from vllm_evict.policies import CACHED

SIZE, HEADS, DIM, LAYERS, LENGTH = 16, 2, 8, 2, 16 * 9 + 5
BASE = {"budget": 64, "sink": 16, "recent": 16, "buffer": 0}
#: What needs a tensor's contents on the host.
WAITS = {
    getattr(torch.Tensor, name)
    for name in (
        *("item", "tolist", "numpy", "cpu", "nonzero", "is_nonzero", "masked_select"),
        *("__array__", "__bool__", "__int__", "__float__", "__index__"),
    )
} | {torch.nonzero, torch.equal, torch.masked_select, torch.repeat_interleave}


class OnDevice(torch.Tensor):
    """Stands for a tensor on a device: all that comes of it is one too, and to look at one is an error."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in WAITS:
            raise AssertionError(f"the host waits for the device: {func.__name__}")
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            for each in index:
                masks = isinstance(each, torch.Tensor) and each.dtype == torch.bool
                assert not masks, "the host waits for the device: a mask as an index"
                assert not isinstance(each, (np.ndarray, list)), "the host waits for the device: an index on the host"
        return super().__torch_function__(func, types, args, kwargs or {})


def on_device(tensor):
    return tensor.as_subclass(OnDevice)


def on_host(tensor):
    """The one copy to the host that a step may make (`transfer.to_host`)."""
    return tensor.as_subclass(torch.Tensor).numpy()


def launched(*tensors):
    """`fold`, one launch on a device."""
    fold(*(each if each is None else each.as_subclass(torch.Tensor) for each in tensors))


@pytest.fixture(autouse=True)
def compare_keys_as_on_a_device(monkeypatch):
    """These tensors say that they are on the host, where R-KV looks at what it has compared."""
    search = alike.last_alike
    monkeypatch.setattr(
        keys, "last_alike", lambda units: (alike.last_alike_dense if isinstance(units, OnDevice) else search)(units)
    )


class Ops:
    """Stand for a backend's: each query puts mass on every block, or token."""

    decodes_measured = False
    batch = BatchMetadata()

    def mass(self, call, measured):
        out, weights = measured.out, measured.weights
        total = 1.0 if weights is None else weights.sum()
        out += HEADS // out.shape[1] * total * torch.arange(1.0, out.shape[2] + 1)

    def mass_of(self, call, queries, width):
        return on_device(torch.rand(len(queries.tokens), HEADS, width, generator=torch.Generator().manual_seed(0)))

    def decode(self, call, rows, seq_lens, measured):
        out, weights = measured.out, measured.weights
        if out is not None:
            assert (rows >= -1).all() and len(rows) <= len(out)
            of_row = 1.0 if weights is None else weights[: len(out), None, None]
            out += HEADS // out.shape[1] * of_row * torch.arange(1.0, out.shape[2] + 1)


def steps(policy, wrap, in_graphs=False, rejected=None, **options):
    """Three steps of a request that loses blocks, or tokens, before the second, with another beside it; its reports,
    and what its store was told. The second and third are decodes, for full CUDA graphs if `in_graphs`. `rejected`:
    drafts that are part of its length on the host then; None: the server does not speculate.
    """
    options |= {"window": 8} if policy == "scissorhands" else {}
    config = KVPolicyConfig.parse({"name": policy, **BASE, **options})
    by_token = config.granularity == "token"
    generator = torch.Generator().manual_seed(1)
    caches = [torch.randn(20, HEADS, SIZE, 2 * DIM, generator=generator) for _ in range(LAYERS)]

    def read(blocks, values):
        for cache in caches:
            yield wrap(cache[blocks][..., :DIM]), wrap(cache[blocks][..., DIM:]) if values else None

    told = []
    store = SimpleNamespace(
        read=read,
        kv_heads=lambda: [HEADS] * LAYERS,
        compact=lambda source, keep, target: told.extend([source.tolist(), *keep, target.tolist()]),
        write=lambda layer, blocks, keys, values: told.extend([keys, values]),
    )
    group = GroupRuntime(config, Shape(SIZE, 4, 256, HEADS, LAYERS, graph_blocks=12), store)
    group.decodes = True
    group.reserve()
    by_block, per_token, tokens = part_of(group, BlockMass), part_of(group, TokenMass), tokens_of(group)
    if per_token is not None:
        per_token.memory = TokenBuffers(*map(wrap, per_token.memory))
        tokens._pages = wrap(tokens._pages)
    if by_block is not None:
        if (memory := by_block.memory) is not None:
            by_block.memory = MassBuffers(*(wrap(each) if isinstance(each, torch.Tensor) else each for each in memory))
        by_block.sums._sums = wrap(by_block.sums._sums)
    group.identity = wrap(group.identity)
    runtime = EvictionRuntime([group], Ops())
    runtime.outruns = True
    table = torch.zeros(4, 17, dtype=torch.int32)
    table[0, :10], table[1, :2] = torch.arange(1, 11), torch.arange(11, 13)
    found = []
    for step, (length, count) in enumerate([(LENGTH - 2, LENGTH - 2), (LENGTH - 1, 1), (LENGTH, 1)]):
        plan, compactions = GroupPlan(), []
        if step == 0 and (scoring := Scoring.of(config, 4)):
            plan.track["r"] = scoring
        if step == 1:
            holes = [6, 7] if by_token else [2, 5]
            plan.changes["r"] = dict.fromkeys(holes, HOLE)
            table[0, holes] = HOLE
        if step == 1 and by_token:
            resident, target = list(range(1, 11)), list(range(2, 7))
            compactions = [Compaction("r", 0, resident, target, config, LENGTH - 2, 1, 7, LENGTH - 3)]
        if step in (0, 2) and by_token:
            Judged.add_to(plan).numbers["r"] = step
        elif step in (0, 2):
            plan.report["r"] = config.policy.measures
        none = SimpleNamespace(resumed_req_ids=set())
        output = SimpleNamespace(
            finished_req_ids=set(), preempted_req_ids=None, scheduled_cached_reqs=none, scheduled_new_reqs=[]
        )
        setattr(output, PLAN, EvictionPlan([plan], compactions))
        runtime.begin(output)
        runtime.rearrange(lambda values, maximise: values)
        runtime.batch.req_ids = ["r", "other"]
        over = torch.zeros(2, dtype=torch.int32)
        if rejected is not None:
            over[0] = rejected if step else 0
            runtime.batch.verified, runtime.batch.unsure = {}, {"r": int(over[0])}
        if in_graphs and step:
            runtime.batch.graph = Attends.OWN
        padding = 2 * (runtime.batch.graph is not None)
        starts = torch.tensor([0, count] + [count + 1] * (1 + padding), dtype=torch.int32)
        lens = torch.tensor([length, 20] + [0] * padding, dtype=torch.int32)
        metadata = SimpleNamespace(
            block_table_tensor=wrap(table[: 2 + padding].clone()),
            seq_lens=wrap(lens.clone()),
            query_start_loc=wrap(starts.clone()),
            query_start_loc_cpu=starts,
            seq_lens_cpu_upper_bound=lens if padding else lens + over,
        )
        runtime.views.tables = [metadata.block_table_tensor]
        metadata, work = group.view(metadata)
        more = metadata.seq_lens_cpu_upper_bound - metadata.seq_lens.as_subclass(torch.Tensor)
        assert more[0] in (0, over[0]) and not more[1:].any()
        if work is not None:
            for layer in range(LAYERS):
                if padding:  # a graph was captured on the memory of a whole batch, whatever the step
                    made = []
                    if per_token is not None:
                        made.append(TokenStep(tokens._pages, per_token.memory, work.seq_lens))
                    elif by_block is not None:
                        made.append(by_block.captured(4, work.seq_lens))
                    work = StepWork.of_graph(made, group.graph_rows.rows, work.seq_lens)
                work.do(
                    LayerCall(
                        Ops(), None, layer, torch.zeros(1, 2 * HEADS, DIM), torch.zeros(1, HEADS, 16, 2 * DIM), metadata
                    )
                )
        found += runtime.end(lambda values, maximise: values)
    if "r" in (tokens or ()):
        told += tokens.judged("r", LENGTH - 1, step)
    return found, told


POLICIES = ["h2o", "snapkv", "scissorhands", "tova", "rkv", "keydiff", "sink-window"]
#: Those whose decodes may be in full CUDA graphs in which the plugin's kernel attends.
FITTING = ["h2o", "snapkv", "scissorhands", "tova", "rkv", "keydiff"]
CASES = [(each, False, {}) for each in POLICIES] + [(each, True, {}) for each in FITTING]
#: The query of the second step counts, or that of the third; with a maximum over heads; for half.
CASES += [("h2o", True, {"every": 7}), ("h2o", True, {"every": 4, "heads": "max"})]
CASES += [("h2o", True, {"layers": "max"}), ("scissorhands", True, {"layers": "max"})]
CASES += [("h2o", True, {"accumulate": "ema", "decay": 0.5})]


@pytest.mark.parametrize("policy, in_graphs, options", CASES, ids=str)
def test_no_step_waits_for_the_device(policy, in_graphs, options, monkeypatch):
    """And what comes of it is what comes of tensors on the CPU."""
    expected, _ = steps(policy, lambda tensor: tensor, **options)
    for module in (sums, cached):
        monkeypatch.setattr(module, "to_host", on_host)
    monkeypatch.setattr(sums, "fold", launched)
    got, _ = steps(policy, on_device, in_graphs, **options)
    assert [sorted(reports) for reports in got] == [sorted(reports) for reports in expected]
    assert policy == "sink-window" or [len(reports) for reports in got] == [1, 0, 1]
    for one, other in zip(got, expected):
        for req_id, report in one.items():
            assert report.index.tolist() == other[req_id].index.tolist()
            assert report.statistics.keys() == other[req_id].statistics.keys()
            for name, values in report.statistics.items():
                np.testing.assert_array_equal(values, other[req_id].statistics[name])


@pytest.mark.parametrize("rejected", [3, 12])
@pytest.mark.parametrize(
    "policy, options",
    [*((each, {}) for each in POLICIES[:-1]), ("h2o", {"every": 7}), ("h2o", {"accumulate": "ema", "every": 2})],
    ids=str,
)
def test_lengths_that_the_device_alone_knows_are_not_waited_for(policy, options, rejected, monkeypatch):
    """Reports have the same numbers, and maybe one for a block that rejected drafts had begun."""
    expected, _ = steps(policy, lambda tensor: tensor, rejected=0, **options)
    for module in (sums, cached):
        monkeypatch.setattr(module, "to_host", on_host)
    monkeypatch.setattr(sums, "fold", launched)
    got, _ = steps(policy, on_device, rejected=rejected, **options)
    assert [len(reports) for reports in got] == [1, 0, 1]
    for one, other in zip(got, expected):
        for req_id, report in one.items():
            known = other[req_id].index
            assert report.index.tolist() == [*known.tolist(), known[-1] + 1][: len(report.index)]
            for name, values in report.before(known[-1] + 1).statistics.items():
                np.testing.assert_allclose(values, other[req_id].statistics[name], rtol=1e-5)


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "tova", "rkv", "keydiff"])
@pytest.mark.parametrize("in_graphs", [False, True])
@pytest.mark.parametrize("options", [{}, {"sets": "all"}, {"merge": "d2o"}, {"merge": "ems"}], ids=str)
def test_by_token_only_a_decision_waits_and_once(policy, options, in_graphs, monkeypatch):
    """For what its policy judges by; steps do not, and neither does what is kept, merged and moved."""
    options = {**options, "granularity": "token"}
    (_, expected), waits = steps(policy, lambda tensor: tensor, **options), []
    monkeypatch.setattr(compaction, "fetched", lambda tensor: waits.append(tensor) or on_host(tensor))
    monkeypatch.setattr(sums, "fold", launched)
    for module in (sums, compaction):
        monkeypatch.setattr(module, "to_device", lambda array, device: on_device(torch.from_numpy(array)))
    _, got = steps(policy, on_device, in_graphs, **options)
    assert len(waits) == 1 and len(got) == len(expected) > LAYERS + 1
    for one, other in zip(got, expected):
        if isinstance(other, list):
            assert one == other
        else:
            np.testing.assert_array_equal(on_host(one), other.numpy())


def moved_up(wrap, to_device, monkeypatch):
    """Caches of two layers, as they are when blocks of a request move up, one of them into another block."""
    caches = [torch.randn(20, HEADS, SIZE, 2 * DIM, generator=torch.Generator().manual_seed(3)) for _ in range(LAYERS)]
    rotation = Rotation(wrap(torch.tensor([0.3, 0.02], dtype=torch.float64)), neox=True)
    given = [(torch.nn.Identity(), wrap(cache)) for cache in caches]
    for layer, _ in given:
        layer.impl = SimpleNamespace(head_size=DIM)
    store = Store(DeviceOps(), lambda: given)
    monkeypatch.setattr(context, "to_device", to_device)
    config = KVPolicyConfig.parse({"name": "h2o", **BASE, "context": 128})
    runtime = EvictionRuntime([GroupRuntime(config, Shape(SIZE, 4, 256, HEADS, LAYERS), store)])
    part_of(runtime.groups[0], context.Originals).rotations = {layer: rotation for layer, _ in given}
    first = KeyRotation("r", 0, [3, 5, 9], [12, 5, 9], [0, 1, 4], [64, 64, 16], [False] * 3)
    for move in (first, KeyRotation("r", 0, [5, 9], [5, 9], [1, 4], [96, 48], [True] * 2)):
        runtime.plan = EvictionPlan([GroupPlan()], [move])
        runtime.rearrange(None)
    return caches


def test_moving_up_does_not_wait(monkeypatch):
    same = lambda array, device: torch.from_numpy(array)  # noqa: E731
    expected = moved_up(lambda tensor: tensor, same, monkeypatch)
    got = moved_up(on_device, lambda array, device: on_device(torch.from_numpy(array)), monkeypatch)
    for one, other in zip(got, expected):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    before = torch.randn(20, HEADS, SIZE, 2 * DIM, generator=torch.Generator().manual_seed(3))
    changed = (got[0] != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [5, 9, 12], "what others read stays"
    np.testing.assert_array_equal(got[0][12, ..., DIM:].numpy(), before[3, ..., DIM:].numpy())


def test_statistics_of_keys_do_not_wait():
    cached = torch.randn(2, 4, HEADS, SIZE, DIM).unbind()
    expected = key_scores(*cached, 60, CACHED)
    for name, score in key_scores(*map(on_device, cached), 60, CACHED).items():
        assert isinstance(score, OnDevice)
        np.testing.assert_array_equal(on_host(score), expected[name].numpy())


def shares(wrap):
    """Of a prompt of 40 tokens, from two steps of a shadow; then what is left after eight of 32 tokens went."""
    generator = torch.Generator().manual_seed(2)
    query, cache = (torch.randn(60, *shape, generator=generator) for shape in ((2 * HEADS, DIM), (HEADS, SIZE, DIM)))
    scores, table = PromptScores(HEADS, 1, SIZE), torch.randperm(60, generator=generator).int()[None, :4]
    plan = GroupPlan(of={"kvzip": Repetitions({"shadow": Repetition(0, 40, 8, 40, 4)})})
    scores.begin(Start(plan, set(), set(), set(), set(), None))
    scores._prompts[0] = wrap(scores._prompts[0])
    ops = SimpleNamespace(read=lambda layer, cache, blocks, values: (cache[blocks], None))
    layer = SimpleNamespace(impl=SimpleNamespace(scale=1.0))
    for start, end in ((38, 50), (50, 60)):
        batch = SimpleNamespace(req_ids=["shadow"], starts=np.array([0, end - start]), seq_lens=np.array([end]))
        metadata = SimpleNamespace(block_table=wrap(table))
        scores.step(batch).add(LayerCall(ops, layer, 0, wrap(query[start:end]), wrap(cache), metadata))
    plan = GroupPlan(of={"kvzip": Repetitions(scored={"r": (0, 40)})})
    scores.begin(Start(plan, set(), set(), set(), set(), None))
    scores.judged("r", 50)
    scores.gather("r", 50, 4, 32, wrap(torch.arange(8, 32).expand(1, HEADS, 24)))
    return scores.judged("r", 52)[0]


def test_repetitions_do_not_wait(monkeypatch):
    monkeypatch.setattr(worker_prompts, "SCRATCH", 4096)
    expected, got = shares(lambda tensor: tensor), shares(on_device)
    assert isinstance(got, OnDevice) and expected[:, :, 4:30].all()
    np.testing.assert_array_equal(on_host(got), expected.numpy())


def test_a_look_is_noticed():
    tensor = on_device(torch.ones(3))
    for look in (
        lambda: tensor.sum().item(),
        lambda: bool(tensor.any()),
        lambda: int(tensor.max()),
        lambda: tensor[tensor > 0],
        lambda: (tensor + 1).numpy(),
    ):
        with pytest.raises(AssertionError, match="waits for the device"):
            look()


def test_reports_are_handed_out_once_they_have_come():
    """With async outputs when they are awaited, and not before; else at once."""
    order = []
    copied = SimpleNamespace(synchronize=lambda: order.append("copied"))

    class Output(worker.AsyncModelRunnerOutput):
        def get_output(self):
            order.append("sampled")
            return worker.ModelRunnerOutput(req_ids=[], req_id_to_index={})

        def get_kv_connector_output(self):
            return None

    waiting = worker.with_reports(Output(), {"kv_evict_reports": [{"r": None}]}, copied)
    assert not order
    assert waiting.get_output().kv_evict_reports == [{"r": None}]
    assert order == ["sampled", "copied"]
    worker.with_reports(worker.ModelRunnerOutput(req_ids=[], req_id_to_index={}), {}, copied)
    assert order == ["sampled", "copied", "copied"]
