"""Parts of recall, each alone: bounds of keys, what goes for a block, room in a full pool, and what is refused."""

import mmap
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine import PLAN, after, random_prompt
from oracle.model import DenseLlama
from oracle.visible import BLOCK, assert_like_dense, visible
from parts import part_of
from test_recall import HOST, QUEST
from test_refusals_backends import plain_config

from vllm_evict.compute import pinned
from vllm_evict.compute.holes import Holes
from vllm_evict.compute.kernels.bounds import bound_scores, bound_scores_reference, key_bounds
from vllm_evict.compute.offload import Offload, OffloadedBlocks
from vllm_evict.compute.offload_pages import MemoryPages
from vllm_evict.config import KVPolicyConfig, KVPolicyError
from vllm_evict.core.actions import Swap
from vllm_evict.core.blocks import RequestBlocks
from vllm_evict.core.mechanisms import Recall
from vllm_evict.core.mechanisms.base import Due, Misses
from vllm_evict.core.mechanisms.recall import Looks, Recalled
from vllm_evict.core.offload import Copy, OffloadPool
from vllm_evict.core.plan import EvictionPlan, GroupPlan
from vllm_evict.core.residence import HOLE
from vllm_evict.integration.engine.offloading import Offloading
from vllm_evict.integration.engine.spec import host_blocks
from vllm_evict.integration.start import machine
from vllm_evict.integration.start.capabilities import refuse


def test_scores_are_those_of_the_reference_and_bound_the_keys():
    torch.manual_seed(0)
    keys, query = torch.randn(5, 2, 8, 16), torch.randn(7, 6, 16)
    bounds = key_bounds(keys, 4 * 8 + 3)
    high, low = bounds.chunk(2, -1)
    assert torch.equal(low[4], keys[4, :, :3].amin(1)) and torch.equal(high[:4], keys[:4].amax(2))
    torch.testing.assert_close(bound_scores(query, bounds, 0.25), bound_scores_reference(query, bounds, 0.25))
    most = torch.maximum(query[:, :1, None] * low[:, 0], query[:, :1, None] * high[:, 0]).sum(-1)[:, 0]
    true = torch.einsum("qd,nbd->qnb", query[:, 0], keys[:, 0])
    true[:, 4, 3:] = -torch.inf
    assert (true.amax(2) <= most + 1e-5).all()


def numbers_of(blocks):
    """Logical block -> host block."""
    return {logical: offloaded.number for logical, offloaded in blocks.residence.host.items()}


def test_the_block_goes_that_was_unwanted_longest():
    pool, plan, config = OffloadPool(2), EvictionPlan.empty(1), KVPolicyConfig(name="h2o")
    a, b = (RequestBlocks(config, None, BLOCK) for _ in range(2))
    assert pool.spill(plan, "a", 0, a, [3, 4], [7, 8]) == []
    pool.want(a, [3])
    assert pool.spill(plan, "b", 0, b, [5], [9]) == [a]
    assert a.residence.host.keys() == {3} and numbers_of(b) == {5: 1} and a.state.counts["dropped"] == 1
    pool.fetch(plan, "a", 0, a, [3], [6])
    pool.release(plan, b)
    assert not a.residence.host and not b.residence.host and pool.used == 0
    assert [(copy.kind, copy.physical) for copy in plan.orders] == [
        ("spill", 7),
        ("spill", 8),
        ("spill", 9),
        ("fetch", 6),
    ]


def test_what_goes_for_a_block_does_not_take_its_place_on_the_host():
    pool, plan, config = OffloadPool(2), EvictionPlan.empty(1), KVPolicyConfig(name="h2o")
    a = RequestBlocks(config, None, BLOCK)
    pool.spill(plan, "a", 0, a, [3, 4], [7, 8])
    # Both come back: what goes for them is dropped.
    assert pool.spill(plan, "a", 0, a, [5, 6], [9, 10], coming=[0, 1]) == [a, a]
    assert (
        numbers_of(a) == {3: 0, 4: 1}
        and a.state.counts["spilled"] == len(plan.orders) == a.state.counts["dropped"] == 2
    )
    # One comes back: the other one is dropped.
    assert pool.spill(plan, "a", 0, a, [5], [9], coming=[0]) == [a]
    assert (
        numbers_of(a) == {3: 0, 5: 1}
        and a.state.counts["spilled"] == len(plan.orders) == a.state.counts["dropped"] == 3
    )


def test_a_host_block_that_one_plan_writes_twice_holds_what_came_last():
    page, written = torch.arange(32.0).view(8, 4), []
    host = OffloadedBlocks(SimpleNamespace(pages=lambda: [page]), 2, torch.device("cpu"), None)
    write = host.pages.write
    host.pages.write = lambda pages, physical, numbers: written.append(numbers) or write(pages, physical, numbers)
    host.obey([Copy("a", 0, "spill", 3, 0), Copy("a", 0, "spill", 2, 1), Copy("b", 0, "spill", 5, 0)], None)
    assert torch.equal(host.pages.own[0], page[[5, 2]])
    assert all(len(set(numbers)) == len(numbers) for numbers in written)


@pytest.mark.parametrize(
    "spare, returns, holes", [(8, [3, 2, 1], []), (1, [3, 2, 1], [4, 5]), (0, [3, 2, 1], [4, 5, 6])]
)
def test_where_the_pool_has_no_room_blocks_change_places(spare, returns, holes):
    """What a prompt's end wants comes back in a full pool, too: the least wanted resident blocks go for it."""
    config = KVPolicyConfig.parse(QUEST)
    blocks = RequestBlocks(config, config.limits(BLOCK, 512), BLOCK, may_outgrow=True)
    blocks.residence.learn(12 * BLOCK)
    blocks.state.peak_blocks = blocks.held_blocks + 6
    blocks.evict(np.array([1, 2, 3]), 12 * BLOCK)
    pool = OffloadPool(4)
    pool.spill(EvictionPlan.empty(1), "r", 0, blocks, [1, 2, 3], [7, 8, 9])
    blocks.of(Recalled).scores = dict.fromkeys(range(12), 0.1) | {4: 0.01, 5: 0.02, 6: 0.03, 1: 1.0, 2: 2.0, 3: 3.0}
    view = SimpleNamespace(spare_blocks=spare, kv_policy=config, part=lambda kind: SimpleNamespace(pool=pool))
    swap = Recall(view)._choose("r", 0, blocks, 12 * BLOCK, True)
    assert swap.returns.tolist() == returns and swap.holes.tolist() == holes


def test_in_a_full_pool_a_request_holds_as_many_blocks_after_a_recall(engine, tiny, monkeypatch):
    monkeypatch.setenv("VLLM_EVICT_POISON", "1")
    server = engine({**QUEST, "recall_every": 4}, enable_prefix_caching=False)
    monkeypatch.setattr(type(server.scheduler), "spare_blocks", 0)
    masks, dense, swaps = visible(server), DenseLlama(tiny), []
    after(server.scheduler, "apply", lambda _, action: swaps.append(action) if isinstance(action, Swap) else None)
    prompts = [random_prompt(700), random_prompt(530, 1)]
    ids = [server.add(prompt, max_tokens=40, logprobs=1) for prompt in prompts]
    outputs = server.run()
    for prompt, req_id in zip(prompts, ids):
        assert outputs[req_id].kv_usage.recalled_blocks > 0
        assert_like_dense(dense, prompt, outputs[req_id], masks[req_id])
    assert sum(map(len, (swap.returns for swap in swaps))) > 4
    assert all(len(swap.returns) <= len(swap.holes) for swap in swaps)
    server.assert_nothing_left()


@pytest.mark.parametrize("spare, holes, returns", [(0, [5], [3]), (1, [5], [3, 2]), (2, [4, 5], [3, 2, 1])])
def test_a_shared_block_makes_no_room(spare, holes, returns):
    """Block 4 is shared with another request, block 5 is not; 1 to 3 are wanted."""
    pool = SimpleNamespace(blocks={14: SimpleNamespace(ref_cnt=2), 15: SimpleNamespace(ref_cnt=1)})
    manager = SimpleNamespace(blocks_at=lambda req_id, logical: [10 + block for block in logical.tolist()])
    offloading = SimpleNamespace(
        _manager=manager, _cache=SimpleNamespace(block_pool=pool), view=SimpleNamespace(spare_blocks=spare)
    )
    action = Swap("r", 0, holes=np.array([4, 5], np.int64), returns=np.array([3, 2, 1], np.int64))
    afforded = Offloading.before_apply(offloading, action)
    assert afforded.holes.tolist() == holes and afforded.returns.tolist() == returns


@pytest.mark.parametrize("due, misses", [({}, 1), ({"r": 0}, 0)])
def test_a_missing_report_counts_once(due, misses):
    """`Budget` counts it where it decides; a look at host blocks is no decision of the budget."""
    config = KVPolicyConfig.parse(QUEST)
    blocks = RequestBlocks(config, config.limits(BLOCK, 512), BLOCK, may_outgrow=True)
    request = SimpleNamespace(num_computed_tokens=512, num_in_flight_tokens=0)
    counted = []
    view = SimpleNamespace(
        groups=[SimpleNamespace(number=0, residents={"r": blocks})],
        kv_policy=config,
        part=lambda kind: SimpleNamespace(pool=OffloadPool(4)),
        running_request=lambda req_id: request,
        miss=lambda req_id, blocks: counted.append(req_id),
    )
    plan = EvictionPlan.empty(1)
    plan.of(Looks).looked["r"] = 0
    plan.of(Due)[0].update(due)
    assert blocks.measured and not list(Recall(view).decide(plan, [{}]))
    assert len(counted) == misses and blocks.of(Misses).count == 0


def step(finished=(), new=()):
    cached = SimpleNamespace(resumed_req_ids=set(), req_ids=[], new_block_ids=[])
    new = [SimpleNamespace(req_id=req_id, block_ids=[table]) for req_id, table in new]
    return SimpleNamespace(
        finished_req_ids=set(finished), preempted_req_ids=None, scheduled_cached_reqs=cached, scheduled_new_reqs=new
    )


def test_a_plan_says_where_blocks_are_and_not_how_they_came_there():
    """Blocks leave and come back, come back and leave, or move, before workers hear of it; requests end."""
    holes = Holes(BLOCK)
    assert holes.begin(step(new=[("r", [1, 2, 3, 4, 5, 6])]), GroupPlan(), 0).changed == set()
    changes = {"r": {3: HOLE, 4: HOLE}}
    assert holes.begin(step(), GroupPlan(changes), 0).changed == {"r"} and holes.of("r") == {3, 4}
    # 4 came back and left again; 2 left and came back elsewhere; 1 moved.
    changes = {"r": {4: HOLE, 2: 9, 1: 7}}
    assert not holes.begin(step(), GroupPlan(changes), 0).changed and holes.of("r") == {3, 4}
    assert dict(holes.changes(GroupPlan(changes))) == changes
    assert holes.begin(step(), GroupPlan({"r": {4: 8, 3: 6}}), 0).changed == {"r"} and holes.of_request == {}
    assert holes.begin(step(finished="r"), GroupPlan({"r": {5: HOLE}}), 0).gone == {"r"} and holes.of_request == {}


def test_a_block_that_did_not_come_back_stays_a_hole_until_the_scheduler_knows():
    holes, plan = Holes(BLOCK), GroupPlan({"r": {1: 8, 2: 9}})
    holes.begin(step(new=[("r", [5, HOLE, HOLE, 6])]), GroupPlan(), 0)
    holes.begin(step(), plan, 0)
    assert holes.withhold([("r", 9)], plan) == [("r", 2)] and holes.of("r") == {2}
    assert dict(holes.changes(plan)) == {"r": {1: 8, 2: HOLE}}
    # It counts from the next step on; what the scheduler says of it later is nothing new.
    assert holes.begin(step(), GroupPlan(), 0).changed == {"r"}
    assert holes.begin(step(), GroupPlan({"r": {2: HOLE}}), 0).changed == set() and holes.count("r") == 1


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"evict": "host"}, "it needs a size of host memory"),
        ({"host": "1GiB"}, "it needs evict: host"),
        ({"recall": "quest"}, "it needs evict: host"),
        ({"recall_every": 4}, "recall_every: blocks that are dropped have no copy on the host: it needs evict: host"),
        ({"evict": "host", "host": "1GiB", "again": 32}, "again: blocks on the host never come back: it needs recall"),
        ({"evict": "host", "host": "1 gigabyte"}, "host: must be a number of bytes above 0, or a size such as '8GiB'"),
        ({"evict": "host", "host": "8GB"}, "in KiB, MiB, GiB or TiB and below 1024TiB, not '8GB'"),
        ({"evict": "host", "host": "4096TiB"}, "in KiB, MiB, GiB or TiB and below 1024TiB, not '4096TiB'"),
        ({"evict": "host", "host": "1GiB", "when": "pressure"}, "it needs when: budget"),
        ({"evict": "host", "host": "1GiB", "granularity": "token"}, "it needs granularity: block"),
        ({"evict": "host", "host": "1GiB", "context": 8192}, "leave context out"),
        ({"evict": "host", "host": "1GiB", "allow": ["kvzip"]}, "allow: 'kvzip' has no evict: host"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(fields, message):
    with pytest.raises(KVPolicyError, match=re.escape(message)):
        KVPolicyConfig.parse({"name": "h2o", **fields})


@pytest.mark.parametrize("name", ["kvzip", "pyramidkv", "adakv", "fastgen"])
def test_policies_that_cannot_are_refused_by_name(name):
    with pytest.raises(KVPolicyError, match=f"evict: '{name}' supports only 'drop'"):
        KVPolicyConfig.parse({"name": name, "evict": "host", "host": "1GiB"})


@pytest.mark.parametrize("size, message", [(1000, "hold no block of"), (1 << 49, "bytes on a machine of")])
def test_sizes_that_cannot_be_are_refused_at_start(engine, size, message):
    with pytest.raises(Exception, match=message):
        engine({**HOST, "host": size})


def test_a_host_larger_than_its_container_or_than_all_engines_have_is_refused(engine, monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "OWN_GROUPS", str(tmp_path / "not there"))
    monkeypatch.setattr(machine, "CONTROL_GROUPS", {"": (str(tmp_path), "memory.max")})
    whole = machine.memory_bytes()
    limit.write_text("max\n")
    assert machine.memory_bytes() == whole
    limit.write_text(f"{32 << 20}\n")
    with pytest.raises(Exception, match=f"host: {64 << 20} bytes on a machine of {32 << 20}: set less than the mach"):
        engine(HOST)
    # Ranks of an engine share the bytes.
    config = plain_config(parallel_config__data_parallel_size_local=3, parallel_config__tensor_parallel_size=2)
    limit.write_text(f"{150 << 20}\n")
    message = f"host: {64 << 20} bytes on a machine of {150 << 20} with 3 engines: set less"
    with pytest.raises(KVPolicyError, match=message):
        refuse.check_config(config, KVPolicyConfig.parse(HOST))
    assert host_blocks(config, KVPolicyConfig.parse(HOST), 32768) == 1024
    with pytest.raises(KVPolicyError, match="hold no block of 32768 bytes on 2 ranks; expected at least 65536"):
        host_blocks(config, KVPolicyConfig.parse({**HOST, "host": 65535}), 32768)


V2, V1 = "0::/a/b\n", "5:cpu,memory:/a/b\n3:pids:/c\n0::/\n"


@pytest.mark.parametrize(
    "own, files",
    [
        (V2, {"a/b/memory.max": "{}", "a/memory.max": "max"}),
        (V2, {"a/b/memory.max": "max", "a/memory.max": "{}"}),
        (V2, {"a/b/memory.max": "{}", "a/memory.max": "9{}"}),
        (V2, {"memory.max": "{}"}),
        (V1, {"memory/a/b/memory.limit_in_bytes": "{}", "memory/a/memory.limit_in_bytes": "9223372036854771712"}),
        (V1, {"memory/a/memory.limit_in_bytes": "{}", "memory/c/memory.limit_in_bytes": "1"}),
        (V1, {"memory/memory.limit_in_bytes": "{}", "a/b/memory.max": "1"}),
    ],
)
def test_the_least_limit_of_a_process_and_of_all_groups_around_it_counts(monkeypatch, tmp_path, own, files):
    """Kubernetes and systemd nest control groups; of other groups no limit counts."""
    for name, text in {**files, "own": own}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text.format(32 << 20))
    groups = machine.CONTROL_GROUPS.items()
    moved = {name: (root.replace("/sys/fs/cgroup", str(tmp_path)), file) for name, (root, file) in groups}
    monkeypatch.setattr(machine, "CONTROL_GROUPS", moved)
    monkeypatch.setattr(machine, "OWN_GROUPS", str(tmp_path / "own"))
    assert machine.memory_bytes() == 32 << 20


def test_memory_that_the_machine_does_not_give_is_one_message(engine, monkeypatch):
    empty = torch.empty

    def refusing(shape, *args, **kwargs):
        if isinstance(shape, tuple) and shape[:1] == (2048,):
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return empty(shape, *args, **kwargs)

    monkeypatch.setattr(torch, "empty", refusing)
    with pytest.raises(Exception, match="host: the machine has not 2048 blocks of 32768 bytes left; expected"):
        engine(HOST)


@pytest.fixture
def pins(monkeypatch):
    """What the driver has pinned, address -> bytes, in a machine without one; its `error` is what it says."""

    class Pins(dict):
        error = None

        def register(self, address, size):
            self[address] = size
            return self.error

    held = Pins()
    monkeypatch.setattr(pinned, "register", held.register)
    monkeypatch.setattr(pinned, "unregister", held.pop)
    return held


def test_host_blocks_of_a_device_take_their_bytes_in_pinned_memory_and_no_more(pins):
    """torch rounds pinned memory up to a power of two."""
    caches = [torch.randn(4, 2, 16, 8), torch.randn(4, 3, 16, 8).bfloat16()]
    pages = MemoryPages(caches, blocks=5, on_cpu=False)
    assert [own.nbytes for own in pages.own] == list(pins.values()) == [5 * cache[0].nbytes for cache in caches]
    assert list(pins) == [own.data_ptr() for own in pages.own] and not any(address % mmap.PAGESIZE for address in pins)
    before = [cache.clone() for cache in caches]
    pages.write(caches, [2, 0], [4, 1])
    for cache in caches:
        cache.zero_()
    pages.read(caches, [2, 0], [4, 1])
    for cache, was in zip(caches, before):
        assert torch.equal(cache[[0, 2]], was[[0, 2]]) and not cache[[1, 3]].any()
    some = pages.own[1][3]
    del pages
    assert list(pins) == [some.untyped_storage().data_ptr()]  # as long as anything shares it
    del some
    assert not pins


def test_memory_is_unpinned_when_its_process_ends():
    ends = """
from vllm_evict.compute import pinned
pinned.register, pinned.unregister = lambda address, size: None, lambda address: print("unpinned")
import torch
kept = pinned.pinned((3,), torch.float32)
"""
    assert subprocess.run([sys.executable, "-c", ends], capture_output=True, text=True).stdout == "unpinned\n"


def test_memory_that_is_not_there_or_not_pinned_is_said(pins):
    pins.error = "operation not supported"
    with pytest.raises(KVPolicyError, match="host: 24 bytes .* can't be pinned .operation not supported.*set host to"):
        pinned.pinned((3,), torch.float64)
    for blocks in (1 << 48, 1 << 62):
        with pytest.raises(KVPolicyError, match=f"host: the machine has not {blocks} blocks of 8 bytes left"):
            MemoryPages([torch.zeros(1, 2)], blocks, on_cpu=False)


def test_blocks_that_cannot_come_back_are_warned_of(engine, complaints):
    engine(QUEST)
    assert not complaints
    engine(HOST)
    assert [level for level, message in complaints if "evict: 'host' got recall: 'none'" in message] == ["WARNING"]


def test_without_a_host_nothing_is_planned_for_it(engine):
    server, plans = engine({"name": "h2o", "budget": 128, "buffer": 0, "sink": 32, "recent": 32}), []
    schedule = server.scheduler.schedule

    def recorded(*args, **kwargs):
        output = schedule(*args, **kwargs)
        plans.append(getattr(output, PLAN))
        return output

    server.scheduler.schedule = recorded
    (output,) = server.generate([random_prompt(400)], max_tokens=5)
    assert part_of(server.runtime, Offload) is None and not any(
        name.startswith("host") for name, *_ in server.metrics()
    )
    assert all(not plan.orders and not plan.rewound and not plan.groups[0].waiting for plan in plans)
    assert output.kv_usage.spilled_blocks is None and "spilled_blocks" not in output.kv_usage.as_dict()
