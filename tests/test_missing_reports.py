"""Workers that report no scores: it is said once, counted, and after a few times the oldest blocks go, so that bounds hold."""

import math

import pytest
from engine import V2, random_prompt

from vllm_evict.core.scheduler import MOST_MISSES

BLOCK = 32
BASE = {"budget": 192, "buffer": 64, "sink": 32, "recent": 64}
TRIGGER, BUDGET = 8, 6
POLICIES = {
    "h2o": {"name": "h2o", **BASE},
    "keydiff": {"name": "keydiff", **BASE},
    "adakv": {"name": "adakv", **BASE, "bands": 2},
    "fastgen": {"name": "fastgen", **BASE, "bands": 2},
}


def silence(server, lost=lambda: True):
    """Reports are lost on their way, while `lost()`. Returns how many were, as they are."""
    end, counts = server.worker.kv_evict.end, []

    def lose(all_reduce):
        reports = end(all_reduce)
        if not any(reports) or not lost():
            return reports
        counts.append(sum(map(len, reports)))
        return [{} for _ in reports]

    server.worker.kv_evict.end = lose
    return counts


@pytest.mark.parametrize("name", ["h2o"] if V2 else POLICIES)
def test_bounds_hold_and_it_is_said_once(engine, complaints, name):
    server = engine(POLICIES[name], max_num_batched_tokens=64, enable_prefix_caching=False)
    counts = silence(server)
    requests = [(random_prompt(600, seed), {"max_tokens": 150}) for seed in range(2)]
    outputs, traces = server.traced(requests)
    assert counts, "nothing was asked for"
    for output, trace in zip(outputs, traces):
        # Prompts of fastgen are computed before anything is asked for.
        first = trace.steps.index(1) + MOST_MISSES if name == "fastgen" else TRIGGER * BLOCK // 64 + 2 * MOST_MISSES
        for group in trace.groups:
            assert max(group.held[first:]) <= TRIGGER
            gone = [block for step in group.evicted for block in step]
            assert gone == list(range(1, 1 + len(gone))) and len(gone) >= math.ceil(750 / BLOCK) - TRIGGER
        assert output.kv_usage.evicted_blocks == sum(len(sum(group.evicted, [])) for group in trace.groups)
    errors = [message for level, message in complaints if level == "ERROR"]
    assert len(errors) == len(requests) and all("no scores came back" in message for message in errors)
    server.drain()
    missing = server.metrics()["reports_missing", name]
    # Groups that share a budget miss their reports together; fastgen asks until the end, with which nothing is decided.
    unmissed = 2 * len(requests) if name == "fastgen" else 0
    assert missing == sum(counts) // (2 if name == "adakv" else 1) - unmissed >= 2 * MOST_MISSES
    server.assert_nothing_left()


@pytest.mark.v1_only
def test_one_lost_report_costs_nothing_but_time(engine, complaints):
    server = engine(POLICIES["h2o"], max_num_batched_tokens=64, enable_prefix_caching=False)
    lost = iter([True, False, True, True])
    counts = silence(server, lambda: next(lost, False))
    misses = []

    def on_step(server):
        misses.extend(resident.misses for resident in server.manager.residents.values())

    _, (trace,) = server.traced([(random_prompt(600), {"max_tokens": 100})], on_step)
    assert counts == [1, 1, 1] and max(misses) == 2 and misses[-1] == 0
    gone = [block for step in trace.evicted for block in step]
    assert gone != sorted(gone), "by scores, these were the oldest"
    assert len([level for level, _ in complaints if level == "ERROR"]) == 1
    server.assert_nothing_left()


@pytest.mark.v1_only
def test_fastgen_chooses_once_scores_come(engine):
    """By then its oldest blocks have gone; holes that a request has when its measuring begins count as missing."""
    server = engine({**POLICIES["fastgen"], "recovery": 0.99}, max_num_batched_tokens=256)
    seen = []
    counts = silence(server, lambda: len(counts) < 5)

    def on_step(server):
        for manager, group in zip(server.managers, server.worker.kv_evict.groups):
            for req_id in group.sums.requests & manager.residents.keys():
                if manager.residents[req_id].config.name == "h2o" and group.sums._window[group.sums._slots[req_id]]:
                    holes = group.sums._holes[group.sums._slots[req_id]]
                    seen.append((int(holes), len(group.with_holes.get(req_id, ()))))

    server.add(random_prompt(600), max_tokens=100)
    server.run(on_step)
    late = seen[4:]
    assert late and all(counted == lacking > 8 for counted, lacking in late)
    server.assert_nothing_left()


@pytest.mark.v1_only
def test_under_pressure_the_oldest_go(engine, complaints):
    policy = {"name": "h2o", "when": "pressure", "budget": 128, "buffer": 0, "sink": 32, "recent": 32}
    server = engine(policy, blocks=40, max_num_batched_tokens=128, max_model_len=512)
    silence(server)
    for seed in range(4):
        server.add(random_prompt(150 + 10 * seed, seed), max_tokens=200)
    outputs = server.run()
    assert sum(output.kv_usage.evicted_blocks for output in outputs.values()) > 4
    assert len([level for level, _ in complaints if level == "ERROR"]) == 4
    server.assert_nothing_left()
