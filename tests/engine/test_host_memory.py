"""Host memory: what it takes, what is refused, and what earlier releases wrote about it."""

import mmap
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from engine import PLAN, random_prompt
from oracle.visible import BLOCK
from parts import part_of
from test_reach import REACH
from test_refusals_backends import plain_config

from vllm_evict.compute import pinned
from vllm_evict.compute.holes import Holes
from vllm_evict.compute.host_copies import HostCopies, HostPages
from vllm_evict.compute.parts import Capacity
from vllm_evict.config import KVPolicyConfig, KVPolicyError, retired
from vllm_evict.core.host_pool import Copy
from vllm_evict.core.plan import GroupPlan
from vllm_evict.core.residence import HOLE
from vllm_evict.integration.engine.spec import host_blocks
from vllm_evict.integration.start import machine
from vllm_evict.integration.start.capabilities import refuse

HOST = {"name": "h2o", "evict": "host", "host": "64MiB"}


@pytest.fixture
def unsaid():
    """Warnings that are said once a process are said again."""
    for warn in (retired._warn_of_fields, retired._warn_of_name):
        warn.cache_clear()


@pytest.mark.parametrize(
    "fields, served",
    [
        ({"budget": 0.1, "recall": "quest"}, {"budget": 0.1}),
        (
            {"budget": 512, "sink": 32, "recent": 64, "buffer": 0},
            {"budget": 512, "sink": 32, "recent": 64, "buffer": 0},
        ),
        ({"when": "pressure", "allow": ["snapkv"], "accumulate": "ema"}, {"when": "pressure"}),
        ({"name": "sink-window"}, {"budget": 1088}),
        ({"name": "sink-window", "budget": 512, "sink": 4, "recall": "none"}, {"budget": 512, "sink": 4}),
        ({"name": "full", "again": 32, "preempt": "host", "budget": 512}, {"budget": 512}),
    ],
)
def test_blocks_of_any_policy_on_the_host_are_read_there(fields, served, complaints, unsaid):
    """One warning a process says what to write, and what has no effect any more."""
    full, given = {"name": "full", "evict": "host", "host": "64MiB"}, {**HOST, **fields}
    for _ in range(2):
        config = KVPolicyConfig.parse(given)
        assert config == KVPolicyConfig.parse({**full, **served}) == KVPolicyConfig.parse(config.to_dict())
    renamed, dropped = given["name"] != "full", fields.get("recall") == "quest" or "again" in fields
    texts = [text for level, text in complaints if level == "WARNING"]
    assert len(texts) == renamed + dropped
    assert not renamed or f"got the KV policy {given['name']}; expected full" in texts[-1]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"evict": "host"}, "it needs a size of host memory"),
        ({"host": "1GiB"}, "it needs evict: host"),
        ({"recall": "quest"}, "recall: blocks that are dropped have no copy on the host: leave it out"),
        ({"evict": "host", "host": "1GiB", "again": -1}, "again: input should be greater than or equal to 0, not -1"),
        ({"evict": "host", "host": "1GiB", "preempt": "swap"}, "preempt: input should be 'recompute' or 'host', not"),
        ({"evict": "host", "host": "1GiB", "host_path": "/kv"}, "host_path: blocks on the host lie in memory: leave"),
        ({"evict": "host", "host": "1 gigabyte"}, "host: must be a number of bytes above 0, or a size such as '8GiB'"),
        ({"evict": "host", "host": "8GB"}, "in KiB, MiB, GiB or TiB and below 1024TiB, not '8GB'"),
        ({"evict": "host", "host": "4096TiB"}, "in KiB, MiB, GiB or TiB and below 1024TiB, not '4096TiB'"),
        ({"evict": "host", "host": "1GiB", "granularity": "token"}, "it needs granularity: block"),
        ({"evict": "host", "host": "1GiB", "context": 8192}, "leave context out"),
        ({"evict": "host", "host": "1GiB", "allow": ["kvzip"]}, "allow: 'kvzip' has no evict: host"),
        ({"evict": "host", "host": "1GiB", "allocate": "ada"}, "evict: host does not go with allocate: ada"),
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
        engine({**REACH, "host": size})


def test_a_host_larger_than_its_container_or_than_all_engines_have_is_refused(engine, monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "OWN_GROUPS", str(tmp_path / "not there"))
    monkeypatch.setattr(machine, "CONTROL_GROUPS", {"": (str(tmp_path), "memory.max")})
    whole = machine.memory_bytes()
    limit.write_text("max\n")
    assert machine.memory_bytes() == whole
    limit.write_text(f"{32 << 20}\n")
    with pytest.raises(Exception, match=f"host: {64 << 20} bytes on a machine of {32 << 20}: set less than the mach"):
        engine(REACH)
    # Ranks of an engine share the bytes.
    config = plain_config(parallel_config__data_parallel_size_local=3, parallel_config__tensor_parallel_size=2)
    limit.write_text(f"{150 << 20}\n")
    message = f"host: {64 << 20} bytes on a machine of {150 << 20} with 3 engines: set less"
    with pytest.raises(KVPolicyError, match=message):
        refuse.check_config(config, KVPolicyConfig.parse(REACH))
    assert host_blocks(config, KVPolicyConfig.parse(REACH), 32768) == 1024
    with pytest.raises(KVPolicyError, match="hold no block of 32768 bytes on 2 ranks; expected at least 65536"):
        host_blocks(config, KVPolicyConfig.parse({**REACH, "host": 65535}), 32768)


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
        engine(REACH)


GPU = torch.device("cuda")


@pytest.fixture
def pins(monkeypatch):
    """Memory pinned by a driver that this machine lacks, address -> bytes; `error` is the driver's answer."""

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
    pages = HostPages(caches, blocks=5, device=GPU)
    pages._device = caches[0].device  # copies run here
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
            HostPages([torch.zeros(1, 2)], blocks, GPU)


def test_a_host_block_that_one_plan_writes_twice_holds_what_came_last():
    page, written = torch.arange(32.0).view(8, 4), []
    index = SimpleNamespace(catch_up=lambda: None, copy=lambda *_: None)
    mover = HostCopies(SimpleNamespace(pages=lambda: [page]), index, torch.device("cpu"))
    mover.allocate(Capacity(8, host_blocks=2))
    write = mover.blocks.write
    mover.blocks.write = lambda pages, physical, numbers: written.append(numbers) or write(pages, physical, numbers)
    mover.obey([Copy("a", 0, "spill", 3, 0), Copy("a", 0, "spill", 2, 1), Copy("b", 0, "spill", 5, 0)], None)
    assert torch.equal(mover.blocks.own[0], page[[5, 2]])
    assert all(len(set(numbers)) == len(numbers) for numbers in written)


def step(finished=(), new=()):
    cached = SimpleNamespace(resumed_req_ids=set(), req_ids=[], new_block_ids=[])
    new = [SimpleNamespace(req_id=req_id, block_ids=[table], prompt_token_ids=[]) for req_id, table in new]
    return SimpleNamespace(
        finished_req_ids=set(finished), preempted_req_ids=None, scheduled_cached_reqs=cached, scheduled_new_reqs=new
    )


def test_a_plan_says_where_blocks_are_and_not_how_they_came_there():
    """Blocks leave, come back, or move, before workers hear of it; requests end."""
    holes = Holes(BLOCK)
    assert holes.begin(step(new=[("r", [1, 2, 3, 4, 5, 6])]), GroupPlan(), 0).changed == set()
    changes = {"r": {3: HOLE, 4: HOLE}}
    assert holes.begin(step(), GroupPlan(changes), 0).changed == {"r"} and holes.of("r") == {3, 4}
    # 4 came back and left again; 2 left and came back elsewhere; 1 moved.
    changes = {"r": {4: HOLE, 2: 9, 1: 7}}
    assert not holes.begin(step(), GroupPlan(changes), 0).changed and holes.of("r") == {3, 4}
    assert holes.begin(step(), GroupPlan({"r": {4: 8, 3: 6}}), 0).changed == {"r"} and holes.of_request == {}
    assert holes.begin(step(finished="r"), GroupPlan({"r": {5: HOLE}}), 0).gone == {"r"} and holes.of_request == {}


def test_without_a_host_nothing_is_planned_for_it(engine):
    server, plans = engine({"name": "h2o", "budget": 128, "buffer": 0, "sink": 32, "recent": 32}), []
    schedule = server.scheduler.schedule

    def recorded(*args, **kwargs):
        output = schedule(*args, **kwargs)
        plans.append(getattr(output, PLAN))
        return output

    server.scheduler.schedule = recorded
    (output,) = server.generate([random_prompt(400)], max_tokens=5)
    assert part_of(server.runtime, HostCopies) is None and not any(
        name.startswith("host") for name, *_ in server.metrics()
    )
    assert not any(plan.orders or plan.groups[0].of for plan in plans)
    assert output.kv_usage.spilled_blocks is None and "spilled_blocks" not in output.kv_usage.as_dict()
