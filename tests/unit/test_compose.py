"""Which parts a KV group's runtime has, by its policy, what parts do that do nothing, and a kind of order of one's own."""

import pickle
from dataclasses import dataclass, field, fields
from types import SimpleNamespace

import pytest

from vllm_evict.compute.compose import compose
from vllm_evict.compute.group import GroupRuntime
from vllm_evict.compute.holes import Holes
from vllm_evict.compute.needs import Needs
from vllm_evict.compute.parts import Mover, Part
from vllm_evict.compute.runtime import EvictionRuntime
from vllm_evict.compute.shape import Shape
from vllm_evict.config import KVPolicyConfig
from vllm_evict.core.host_pool import Copy
from vllm_evict.core.plan import EvictionPlan, GroupPlan, Order, Payload

SMALL = {"budget": 64, "sink": 16, "recent": 16, "allow": []}
HOST = {"evict": "host", "host": "1MiB"}
#: Policy -> names of the classes of its source, probes and movers.
PARTS = {
    "full": ({"name": "full", "allow": []}, "Source", "", ""),
    "sink-window": ({"name": "sink-window", "budget": 64, "allow": []}, "Source", "", ""),
    "h2o": ({"name": "h2o", **SMALL}, "Source", "BlockMass", ""),
    "audits": ({"name": "keydiff", **SMALL, "audit": 0.5}, "Source", "AnswerMass CachedStatistics", ""),
    "audits by token": (
        {"name": "h2o", **SMALL, "granularity": "token", "audit": 0.5},
        "Source",
        "BlockMass TokenMass",
        "Compactor",
    ),
    "tokens": ({"name": "h2o", **SMALL, "granularity": "token"}, "Source", "BlockMass TokenMass", "Compactor"),
    "keys by token": ({"name": "keydiff", **SMALL, "granularity": "token"}, "Source", "CachedStatistics", "Compactor"),
    "keys": ({"name": "keydiff", **SMALL}, "Source", "CachedStatistics", ""),
    "both": ({"name": "rkv", **SMALL}, "Source", "BlockMass CachedStatistics", ""),
    "keybound": ({"name": "keybound", **SMALL}, "Source", "LastQuery", ""),
    "prompts": (
        {"name": "kvzip", **SMALL, "granularity": "token"},
        "Source",
        "BlockMass TokenMass PromptScores",
        "Compactor",
    ),
    "context": ({"name": "h2o", **SMALL, "context": 128}, "Source", "BlockMass", "Originals"),
    "host": ({"name": "full", "budget": 64, "sink": 16, "recent": 16, **HOST}, "Reach", "", "HostCopies"),
    "read": ({"name": "full", "read": 64}, "Read", "", ""),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_group_has_the_parts_that_its_policy_needs(name):
    policy, source, probes, movers = PARTS[name]
    store = SimpleNamespace(read=None)
    made = compose(KVPolicyConfig.parse(policy), Shape(16, 4, 256, 2, 2), store, Holes(16))
    assert type(made.source).__name__ == source
    assert [type(probe).__name__ for probe in made.probes] == probes.split()
    assert [type(mover).__name__ for mover in made.movers] == movers.split()
    assert len({mover.kind for mover in made.movers}) == len(made.movers), "each order has one mover"


def test_needs_of_parts_and_groups_add_up():
    one, other = Needs(step=3, between=5, block=7), Needs(step=4, between=2, block=6)
    assert Needs.of_parts([one, other], 9) == (7, 5, 7, 9)
    assert Needs.of_groups([Needs(1, 5, 2, 8), Needs(2, 4, 3, 9)]) == (3, 5, 5, 9)
    part = Part()
    assert part.needs(Shape(16, 1, 1, 1, 1)) == Needs() and not part.kept_bytes + part.host_bytes


@dataclass(frozen=True, slots=True)
class Pack(Order):
    """Packs a block into a part of another one: (block, part)."""

    source: int
    target: tuple[int, int]


def test_a_kind_of_order_that_the_plan_does_not_know():
    """Orders are carried out as they were decided, by the mover of their kind, and dropped with their request."""
    done = []

    class Packer(Mover):
        kind = Pack

        def obey(self, orders, all_reduce):
            done.append(orders)

    class Copier(Packer):
        kind = Copy

    group = GroupRuntime(KVPolicyConfig(name="full", allow=[]), Shape(16, 4, 256, 2, 2), SimpleNamespace())
    group.movers = [Packer(), Copier()]
    packs = [Pack("a", 0, 5, (9, 0)), Pack("a", 0, 6, (9, 1)), Pack("b", 0, 7, (9, 2))]
    copies = [Copy("a", 0, "spill", 7, 1), Copy("c", 0, "fetch", 8, 1)]
    plan = EvictionPlan.empty(1)
    plan.orders += [*packs[:2], *copies, packs[2]]
    runtime = EvictionRuntime([group])
    runtime.plan = pickle.loads(pickle.dumps(plan))
    runtime.rearrange(None)
    assert done == [packs[:2], copies, packs[2:]]
    plan.forget("a")
    plan.forget("b")
    assert plan.orders == copies[1:]


@dataclass(slots=True)
class Packed(Payload):
    """Packed blocks: request -> the parts that it reads; blocks that are packed no more."""

    feature = "packs"

    parts: dict[str, list[int]] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)

    @property
    def writes(self):
        return self.dropped

    def use(self, blocks):
        self.dropped = [block for block in self.dropped if block not in blocks]


def test_a_plan_travels_whole_and_drops_all_that_it_says_of_a_request():
    plan = EvictionPlan([GroupPlan(untrack={"a"})], [Order("a", 0)], prompts={"b"})
    (told,) = plan.groups
    for each in fields(told):
        if each.name != "of" and isinstance(of_requests := getattr(told, each.name), dict):
            of_requests["a"] = each.name
    Packed.add_to(told).parts["a"] = [1]
    assert pickle.loads(pickle.dumps(plan)) == plan
    plan.forget("a")
    assert told == GroupPlan() and not plan.orders


def test_a_payload_of_a_kind_that_the_plan_does_not_know():
    """A feature adds to its payload, and finds it on the other side. What is of no request stays with the plan."""
    plan = EvictionPlan.empty(1)
    (group,) = plan.groups
    assert Packed.within(plan) is Packed.within(group) is None and not plan.writes
    for where in (plan, group):
        told = Packed.add_to(where)
        told.parts["a"], told.parts["b"] = [1], [2]
        told.dropped += [5, 6]
    assert Packed.add_to(plan) is plan.of["packs"] and plan.writes == [5, 6]
    plan.use({5})
    plan.forget("a")
    there = pickle.loads(pickle.dumps(plan))
    assert Packed.within(there) == Packed({"a": [1], "b": [2]}, [6])
    assert Packed.within(there.groups[0]) == Packed({"b": [2]}, [5, 6])
    plan.forget("b")
    assert Packed.within(group) == Packed(dropped=[5, 6])
    group.of["packs"].dropped.clear()
    plan.forget("b")
    assert group == GroupPlan()


def test_a_plan_drops_orders_that_came_after_it_dropped_as_many():
    plan = EvictionPlan([GroupPlan()], [Order("a", 0)])
    plan.forget("a")
    plan.orders.append(Order("b", 0))
    plan.forget("b")
    assert not plan.orders
