"""Nothing in the scheduler grows faster than requests or their tokens: bytecodes are counted, no time is measured."""

from pathlib import Path

import pytest

import vllm_evict
from vllm_evict.core.plan import EvictionPlan, Order

CASES = ["full", "sink-window", "h2o", "full, host", "duo", "adakv"]
#: Most growth of a step. Which heads' blocks a shared budget takes is drawn.
BY_REQUESTS = {"adakv": 1.15}
#: Bytecodes of the plugin alone are counted. vLLM's are many more, and hide what grows.
OWN = str(Path(vllm_evict.__file__).parent)


@pytest.fixture
def scale(script, tmp_path):
    return script("alone"), script("scale").cases(str(tmp_path))


def decoding(scale, case, requests, tokens):
    """A scheduler whose requests all decode, under a budget of 256 tokens."""
    module, cases = scale
    policy = dict(cases[case])
    policy |= {"budget": 256, "buffer": 32} if "budget" in policy else {}
    policy |= {"host": "64MiB"} if "host" in policy else {}
    alone = module.Alone(policy, requests, tokens + 512, chunk=256)
    alone.add(requests, tokens)
    alone.to_decode()
    return alone


def step(alone):
    """Count bytecodes of as many steps as two blocks have tokens: each request fills two, and loses two at once."""
    return sum(alone.count_step(OWN) for _ in range(64))


def end(alone, module):
    """Count bytecodes of the end of all requests, in their order: a set of them has another one in each process."""
    ids, aborted = list(alone.scheduler.requests), module.RequestStatus.FINISHED_ABORTED
    finish = alone.scheduler.finish_requests
    return sum(module.operations(finish, [req_id], aborted, within=OWN)[0] for req_id in ids)


def assert_no_faster(counts, most=1.02):
    """So many more requests add what as many added before."""
    assert counts[2] - counts[1] <= most * (counts[1] - counts[0]), counts


@pytest.mark.parametrize("case", CASES)
def test_no_step_and_no_end_grows_faster_than_requests(scale, case):
    module = scale[0]
    made = [decoding(scale, case, requests, 512) for requests in (4, 12, 20)]
    assert_no_faster([step(alone) for alone in made], BY_REQUESTS.get(case, 1.02))
    assert_no_faster([module.plugin_bytes(alone.scheduler) for alone in made], 1.3)
    assert_no_faster([end(alone, module) for alone in made], 1.1)


def test_a_plan_forgets_a_request_that_has_no_orders_without_a_look_at_those_of_others(scale):
    counts = []
    for orders in (10, 1000):
        plan = EvictionPlan.empty(1)
        plan.orders = [Order(f"request-{number}", 0) for number in range(orders)]
        plan.forget("another")
        counts.append(scale[0].operations(plan.forget, "a third")[0])
        plan.forget("request-9")
        assert len(plan.orders) == orders - 1
    assert counts[0] == counts[1]


@pytest.mark.parametrize("case", CASES)
def test_no_step_grows_with_tokens_that_are_not_looked_at(scale, case):
    module = scale[0]
    short, long = (decoding(scale, case, 2, tokens) for tokens in (1024, 4096))
    assert step(long) <= 1.02 * step(short)
    assert module.plugin_bytes(long.scheduler) <= 4.1 * module.plugin_bytes(short.scheduler)
