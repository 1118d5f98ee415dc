"""Workers that report no scores, or broken ones: it is said once, counted, and after a few times the oldest blocks go,
so that bounds hold.
"""

import math
import re
from copy import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine import PLAN, after, logprobs_of, random_prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from parts import sums_of, tokens_of

from vllm_evict.compute.attention.cpu import CPUOps
from vllm_evict.config import KVPolicyConfig
from vllm_evict.core.mechanisms.base import MOST_MISSES, Misses
from vllm_evict.core.mechanisms.pressure import Offered
from vllm_evict.core.plan import GroupPlan, Report
from vllm_evict.core.reports import Inbox, flaw
from vllm_evict.integration.engine.poison import Fills
from vllm_evict.policies import POLICIES as ALL
from vllm_evict.policies import Blocks

BLOCK = 32
BASE = {"budget": 192, "buffer": 64, "sink": 32, "recent": 64}
TRIGGER = 8
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


@pytest.mark.parametrize("name", POLICIES)
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


def test_one_lost_report_costs_nothing_but_time(engine, complaints):
    server = engine(POLICIES["h2o"], max_num_batched_tokens=64, enable_prefix_caching=False)
    lost = iter([True, False, True, True])
    counts = silence(server, lambda: next(lost, False))
    misses = []

    def on_step(server):
        misses.extend(resident.of(Misses).count for resident in server.manager.residents.values())

    _, (trace,) = server.traced([(random_prompt(600), {"max_tokens": 100})], on_step)
    assert counts == [1, 1, 1] and max(misses) == 2 and misses[-1] == 0
    gone = [block for step in trace.evicted for block in step]
    assert gone != sorted(gone), "by scores, these were the oldest"
    assert len([level for level, _ in complaints if level == "ERROR"]) == 1
    server.assert_nothing_left()


def test_fastgen_chooses_once_scores_come(engine):
    """By then its oldest blocks have gone; holes that a request has when its measuring begins count as missing."""
    server = engine({**POLICIES["fastgen"], "recovery": 0.99}, max_num_batched_tokens=256)
    seen = []
    counts = silence(server, lambda: len(counts) < 5)

    def on_step(server):
        for manager, group in zip(server.managers, server.worker.kv_evict.groups):
            sums = sums_of(group)
            for req_id in sums.requests & manager.residents.keys():
                if manager.residents[req_id].config.name == "h2o" and sums._window[sums._slots[req_id]]:
                    holes = sums._holes[sums._slots[req_id]]
                    seen.append((int(holes), len(group.with_holes.get(req_id, ()))))

    server.add(random_prompt(600), max_tokens=100)
    server.run(on_step)
    late = seen[4:]
    assert late and all(counted == lacking > 8 for counted, lacking in late)
    server.assert_nothing_left()


def test_under_pressure_the_oldest_go(engine, complaints):
    policy = {"name": "h2o", "when": "pressure", "admit": True, "budget": 128, "buffer": 0, "sink": 32, "recent": 32}
    server = engine(policy, blocks=40, max_num_batched_tokens=128, max_model_len=512)
    silence(server)
    for seed in range(4):
        server.add(random_prompt(150 + 10 * seed, seed), max_tokens=200)
    outputs = server.run()
    assert sum(output.kv_usage.evicted_blocks for output in outputs.values()) > 4
    assert len([level for level, _ in complaints if level == "ERROR"]) == 4
    server.assert_nothing_left()


# ---- Reports that came and are wrong


def with_values(change):
    """A report whose statistics are changed."""
    return lambda report: Report(report.index, {name: change(each.copy()) for name, each in report.statistics.items()})


def at(place, value):
    def change(values):
        values[place] = value
        return values

    return with_values(change)


BROKEN = {
    "one NaN": (at(1, math.nan), "that is no finite number"),
    "all NaN": (at(slice(None), math.nan), "that is no finite number"),
    "inf": (at(-1, math.inf), "that is no finite number"),
    "too few": (with_values(lambda values: values[:-1]), "for each of their blocks"),
    "too many dimensions": (with_values(lambda values: values[None]), "for each of their blocks"),
    "a list": (with_values(lambda values: values.tolist()), "for each of their blocks"),
    "other statistics": (lambda report: Report(report.index, {"weight": report.index.astype(float)}), "no mass|no key"),
    "short": (
        lambda report: Report(report.index[:-1], {n: v[:-1] for n, v in report.statistics.items()}),
        "none for some",
    ),
    "cut": (lambda report: Report(report.index[:3], {n: v[:3] for n, v in report.statistics.items()}), "none for some"),
    "late": (lambda report: Report(report.index + 1, report.statistics), "none for some of the blocks"),
    "backwards": (lambda report: Report(report.index[::-1], report.statistics), "do not ascend"),
    "no blocks": (lambda report: Report(report.index[:0], {n: v[:0] for n, v in report.statistics.items()}), "ascend"),
    "no index": (lambda report: Report(None, report.statistics), "do not ascend"),
    "no report": (lambda report: "report", "the type str"),
    "none": (lambda report: None, "the type NoneType"),
}
MANGLED = {
    "one group too many": lambda groups: [*groups, {}],
    "no list": lambda groups: dict(enumerate(groups)),
    "no dicts": lambda groups: [list(group.items()) for group in groups],
}
PRESSED = {"name": "h2o", "when": "pressure", "admit": True, "budget": 128, "buffer": 0, "sink": 32, "recent": 32}


def mangle(server, change):
    """Change the reports of workers, if there are any. Returns whether each was."""
    end, changed = server.worker.kv_evict.end, []

    def mangled(all_reduce):
        groups = end(all_reduce)
        if not any(groups):
            return groups
        changed.append(True)
        return change(groups)

    server.worker.kv_evict.end = mangled
    return changed


def each(change):
    """Every report of every group changed, and one of a request that there is not."""

    def every(groups):
        return [
            {"stranger": Report(np.arange(2), {}), **{name: change(it) for name, it in of.items()}} for of in groups
        ]

    return every


@pytest.mark.parametrize(
    "name, broken", [("h2o", "all NaN"), ("h2o", "short"), ("h2o", "none"), ("adakv", "one NaN"), ("adakv", "late")]
)
def test_a_broken_report_counts_as_missing(engine, complaints, name, broken):
    check_broken(engine, complaints, name, each(BROKEN[broken][0]), BROKEN[broken][1])


def test_reports_that_are_no_dict_for_each_group_count_as_missing(engine, complaints):
    check_broken(engine, complaints, "adakv", MANGLED["no list"], "no dict for each KV group")


@pytest.mark.parametrize("name", ["keydiff", "fastgen"])
def test_broken_reports_of_keys_and_profiles_count_as_missing(engine, complaints, name):
    check_broken(engine, complaints, name, each(BROKEN["one NaN"][0]), BROKEN["one NaN"][1])


def check_broken(engine, complaints, name, change, said):
    server = engine(POLICIES[name], max_num_batched_tokens=64, enable_prefix_caching=False)
    assert mangle(server, change) == []
    _, (trace,) = server.traced([(random_prompt(600), {"max_tokens": 150})])
    for group in trace.groups:
        first = trace.steps.index(1) + MOST_MISSES if name == "fastgen" else TRIGGER * BLOCK // 64 + 2 * MOST_MISSES
        assert max(group.held[first:]) <= TRIGGER
        gone = [block for step in group.evicted for block in step]
        assert gone == list(range(1, 1 + len(gone))) and len(gone) >= math.ceil(750 / BLOCK) - TRIGGER
    why, missing = (message for level, message in complaints if level == "ERROR")
    assert re.search(f"workers reported scores of .* with .*({said}).*; expected a finite number", why), why
    assert "no scores came back" in missing
    server.drain()
    assert server.metrics()["reports_missing", name] >= 2 * MOST_MISSES
    server.assert_nothing_left()


def test_under_pressure_broken_reports_are_as_none(engine, complaints):
    """Costs of NaN would come first and last, and for ever."""
    found = []
    for change in (lambda report: None, *(BROKEN[broken][0] for broken in ("one NaN", "inf", "late"))):
        server = engine(PRESSED, blocks=40, max_num_batched_tokens=128, max_model_len=512)
        mangle(server, each(change))
        for seed in range(4):
            server.add(random_prompt(150 + 10 * seed, seed), max_tokens=200)
        outputs = server.run()
        found.append([(one.kv_usage.evicted_blocks, one.outputs[0].token_ids) for _, one in sorted(outputs.items())])
        assert sum(evicted for evicted, _ in found[-1]) > 4
        server.assert_nothing_left()
    assert found == found[:1] * 4


def test_a_broken_report_leaves_the_last_one_under_pressure(engine):
    server = engine(PRESSED, blocks=40, max_num_batched_tokens=128, max_model_len=512)
    good = []

    def every(groups):
        broken = bool(good)
        good.append({name: report for group in groups for name, report in group.items()})
        return each(BROKEN["all NaN"][0])(groups) if broken else groups

    mangle(server, every)
    server.add(random_prompt(300), max_tokens=200)
    server.add(random_prompt(300, 1), max_tokens=200)

    def on_step(server):
        for req_id, resident in server.manager.residents.items():
            assert (report := resident.of(Offered).report) is None or report is good[0].get(req_id)

    server.run(on_step)
    assert len(good) > 3


@pytest.mark.parametrize("broken", ["one NaN", "cut"])
def test_without_a_sound_report_a_reconstruction_is_none(engine, complaints, broken):
    server = engine({"name": "kvzip", **BASE})
    mangle(server, each(BROKEN[broken][0]))
    _, (trace,) = server.traced([(random_prompt(600), {"max_tokens": 90})])
    gone = [block for step in trace.evicted for block in step]
    assert gone == list(range(1, 1 + len(gone))) and len(gone) > 10
    assert "no scores came back" in complaints[-1][1] and len(complaints) == 1 + (broken != "cut")
    server.drain()
    assert server.metrics()["reports_missing", "kvzip"] == 1
    server.assert_nothing_left()


@pytest.mark.parametrize("sets", ["head", "all"])
def test_heads_without_finite_scores_of_tokens_give_up_their_oldest(engine, complaints, sets):
    """Here one head of one layer. With one set for all heads it is left out."""
    policy = {"name": "h2o", **BASE, "granularity": "token", "sets": sets}
    server = engine(policy, max_num_batched_tokens=128)
    tokens = tokens_of(server.runtime)
    judged, compact, kept = tokens.judged, server.runtime.store.compact, []

    def spoiled(*args):
        scores, positions = judged(*args)
        scores = scores.clone()
        scores[1, 0, 40:50] = torch.nan
        return scores, positions

    tokens.judged = spoiled
    server.runtime.store.compact = lambda source, keep, target: kept.append(keep) or compact(source, keep, target)
    (output,) = server.generate([random_prompt(600)], max_tokens=100, logprobs=0)
    assert np.isfinite(logprobs_of(output)).all() and kept
    for (layer, head), keep in {
        (i, j): keep for i, heads in enumerate(kept[0]) for j, keep in enumerate(heads)
    }.items():
        newest = bool((keep.diff() == 1).all())
        assert newest == (sets == "head" and (layer, head) == (1, 0))
    ((_, said),) = complaints
    assert "got NaN or inf as scores of tokens" in said
    server.assert_nothing_left()


def test_a_mass_pass_that_reads_a_freed_block_shows(engine, complaints, monkeypatch, poisoned):
    """A view that is stale for the mass pass alone: what attends, and so every output, is sound. Without NaN keys that
    count as NaN mass, block 1 would seem to draw nothing."""
    monkeypatch.setenv("VLLM_EVICT_DECODE", "stock")
    server = engine(POLICIES["h2o"], max_num_batched_tokens=64, enable_prefix_caching=False)
    cache, mass = server.worker.model_runner.kv_caches[0], CPUOps.mass
    freed, stale = [], []

    def look(output, *_):
        fills = Fills.within(getattr(output, PLAN)) or Fills()
        freed[:] = [block for block in [*freed, *fills.poison] if block not in fills.clean]

    def stale_mass(ops, call, measured):
        if freed:
            assert cache[freed[0]].isnan().all()
            metadata, table = copy(call.metadata), call.metadata.block_table.clone()
            table[0, 1] = freed[0]
            metadata.block_table = table
            stale.append(freed[0])
            call = replace(call, metadata=metadata)
        mass(ops, call, measured)

    after(server.scheduler, "schedule", look)
    monkeypatch.setattr(CPUOps, "mass", stale_mass)
    (output,) = server.generate([random_prompt(600)], max_tokens=10, logprobs=0)
    assert stale and np.isfinite(logprobs_of(output)).all()
    assert any("a mass that is no finite number" in message for _, message in complaints)
    server.drain()
    assert server.metrics()["reports_missing", "h2o"] > 0
    server.assert_nothing_left()


# ---- What decides, alone


HELD = np.array([0, 2, 3, 8])
GOOD = Report(np.array([0, 1, 2, 3, 6, 7, 8]), {"mass": np.arange(7.0), "key_norm": np.zeros(7)})


def test_what_is_asked_for_is_handed_on():
    """Reports that no plan asks for are left out. Reports of ended requests are not compared with blocks."""
    plans = [GroupPlan(report={"a": frozenset({"mass"}), "gone": frozenset({"mass"}), "lost": frozenset()})]
    reports = [{"a": GOOD, "gone": GOOD, "stranger": GOOD}]
    held = {"a": HELD, "gone": None}
    (taken,) = Inbox().take(reports, plans, lambda group, req_id: held[req_id])
    assert taken.keys() == {"a", "gone"} and taken["a"] is GOOD
    assert Inbox().take(None, plans, None) == [{}] and Inbox().take([{"b": None}], [GroupPlan()], None) == [{}]


@pytest.mark.parametrize("broken", BROKEN)
def test_each_flaw_has_a_name_and_its_report_counts_as_missing(broken, complaints):
    (change, said), names = BROKEN[broken], frozenset({"mass", "key_norm"})
    assert flaw(GOOD, names, HELD) is None
    assert re.search(said, flaw(change(GOOD), names, HELD))
    inbox, plans = Inbox(), [GroupPlan(report={"a": names, "b": names})]
    for _ in range(2):
        assert inbox.take([{"a": change(GOOD), "b": GOOD}], plans, lambda *_: HELD) == [{"b": GOOD}]
    ((level, message),) = complaints
    assert level == "ERROR" and re.search(f"scores of request a with .*({said})", message), "said once"


@pytest.mark.parametrize("mangled", MANGLED)
def test_what_is_no_dict_for_each_group_has_no_reports(mangled, complaints):
    plans = [GroupPlan(report={"a": frozenset({"mass"})}) for _ in range(2)]
    assert Inbox().take(MANGLED[mangled]([{"a": GOOD}, {"a": GOOD}]), plans, lambda *_: HELD) == [{}, {}]
    assert "with no dict for each KV group" in complaints[0][1]


FINITE = st.floats(0, 1e300, allow_nan=False, width=64)


@pytest.mark.parametrize("name", sorted(set(ALL) - {"full", "duo"}))
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_of_finite_statistics_nothing_but_numbers_comes(name, data):
    """All zeros and what overflows when it is added up included: no cost is NaN, or below 0."""
    config = KVPolicyConfig.parse(name)
    count = data.draw(st.integers(1, 12))
    values = st.one_of(
        st.lists(FINITE, min_size=count, max_size=count), st.just([0.0] * count), st.just([1e308] * count)
    )
    policy = config.policy
    statistics = {each: np.array(data.draw(values)) for each in policy.measures}
    with np.errstate(over="ignore"):
        importance = policy.importance(Blocks(np.arange(1, count + 1), config, statistics, count + 2, 3))
        cost = policy.cost(importance)
    assert len(importance) == len(cost) == count
    assert not np.isnan(importance.astype(float)).any() and (cost >= 0).all() and cost.sum() <= 1 + 1e-9
