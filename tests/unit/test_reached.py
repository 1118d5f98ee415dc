"""Host blocks that layers read: one content is there once, and what no request uses goes first."""

from vllm_evict.config import KVPolicyConfig
from vllm_evict.core.blocks import RequestBlocks
from vllm_evict.core.host_pool import HostPool, Reached
from vllm_evict.core.plan import EvictionPlan

FULL = KVPolicyConfig(name="full", evict="host", host="1MiB")


def request():
    return RequestBlocks(FULL, FULL.limits(16, 1), 16)


def numbers(blocks):
    return list(blocks.residence.host.values())


def test_a_prefix_is_on_the_host_once_and_stays_until_its_room_is_needed():
    pool, plan, a, b = HostPool(6, poison=True), EvictionPlan.empty(1), request(), request()
    pool.spill(plan, "a", 0, a, [4, 5, 6], [40, 50, 60], ["four", "five", None])
    pool.spill(plan, "b", 0, b, [4, 5], [41, 51], ["four", "other"])
    assert [(copy.req_id, copy.physical) for copy in plan.orders] == [("", 40), ("", 50), ("a", 60), ("", 51)]
    assert numbers(a)[0] == numbers(b)[0] and Reached.within(plan.groups[0]).blocks["b"] == dict(
        zip([4, 5], numbers(b))
    )
    assert (pool.used, pool.available, pool.unused) == (4, 2, 0)
    four, private = numbers(a)[0], numbers(a)[2]
    pool.release(plan, a)
    assert (pool.used, pool.unused) == (3, 1) and pool.find("four") == four and numbers(a) == []
    assert [copy.number for copy in plan.orders if copy.kind == "poison"] == [private]
    pool.release(plan, b)
    assert pool.available == 6
    # Room is taken of the request that ended first, and of its last block first.
    for number in range(3):
        pool.keep(plan, 0, number, 70 + number)
    assert pool.used == 6
    order = ["five", "other", "four"]
    for number in range(3):
        assert [name for name in order if pool.find(name) is not None] == order[number:]
        pool.keep(plan, 0, 3 + number, 80 + number)
    pool.forget(plan)
    assert pool.used == 0 and pool.find("four") is None


def test_what_a_request_uses_is_never_dropped():
    pool, plan, a = HostPool(4), EvictionPlan.empty(1), request()
    pool.keep(plan, 0, "old", 9)
    pool.spill(plan, "a", 0, a, [1, 2], [10, 20], ["one", "two"])
    # One host block is free, and one is of a prefix.
    assert pool.fitting([None, None, None]) == 2
    assert pool.fitting(["one", None, "two", None]) == 4
    assert pool.fitting(["old", None, None]) == 2
    pool.spill(plan, "a", 0, a, [3, 4], [30, 40], [None, None])
    assert pool.find("old") is None and pool.find("one") is not None and pool.available == 0
    assert pool.keep(plan, 0, "old", 9) is None
    pool.forget(plan)
    assert pool.used == 4
    pool.release(plan, a)
    assert pool.used == 0
