"""Evidence about a share, and promises: chance says rarely that they are broken, however often one looks."""

import math

import numpy as np
import pytest

from vllm_evict.features.audit.evidence import CHANCE, Promise, Watched, evidence_above, evidence_below, interval


@pytest.mark.parametrize("target, servers", [(0.95, 100), (0.98, 60)])
def test_chance_warns_few_servers_that_meet_their_target(target, servers):
    """At their target exactly, looked at after each of 10,000 audits. A 95 % interval warns more than a fifth of them."""
    audits, warned = np.arange(1, 10_001), 0
    for seed in range(servers):
        right = np.cumsum(np.random.default_rng(seed).random(len(audits)) < target)
        # The first verdict has a part of the chance of all of them.
        warned += bool((evidence_below(right, audits, target)[30:] >= math.log(1 / CHANCE)).any())
    assert warned / servers <= CHANCE


def verdicts(watched, share, audits, seed=0):
    """Return (number of the audit, verdict) of a server with this share of identical answers."""
    right = np.random.default_rng(seed).random(audits) < share
    found = [(number, watched.add(bool(each))) for number, each in enumerate(right, 1)]
    return [(number, verdict) for number, verdict in found if verdict is not None]


def test_a_share_that_is_missed_is_told_soon_and_after_a_good_time_too():
    for target, share, most in ((0.98, 0.9, 200), (0.95, 0.5, 40), (0.95, 0.9, 900)):
        taken = [verdicts(Watched(target), share, 2 * most, seed)[0] for seed in range(20)]
        assert not any(kept for _, kept in taken) and np.median([number for number, _ in taken]) <= most
    for seed in range(5):
        watched = Watched(0.95)
        assert all(kept for _, kept in verdicts(watched, 0.985, 4000, seed)) and watched.kept
        assert not verdicts(watched, 0.85, 1000, seed)[0][1]
        assert verdicts(watched, 1.0, 1000, seed)[-1][1] and watched.kept


def test_evidence_is_none_without_answers_and_mirrors():
    assert evidence_below(0, 0, 0.9) == pytest.approx(0) and evidence_below(50, 50, 0.9) < 0 < evidence_below(
        5, 50, 0.9
    )
    assert evidence_above(45, 50, 0.5) == pytest.approx(evidence_below(5, 50, 0.5))
    assert evidence_below(9, 10, 1.0) == math.inf and evidence_below(10, 10, 1.0) == -math.inf
    assert evidence_below(0, 10, 0.0) == -math.inf
    low, high = interval(95, 100)
    assert 0.84 < low < 0.88 and 0.98 < high < 1 and interval(0, 5)[0] == 0 and interval(5, 5)[1] == 1


def told(call, values):
    return [said for each in values if (said := call(each)) is not None]


def test_a_promise_is_withdrawn_and_renewed():
    """By audits, and by the lengths of prompts that it was measured on."""
    promise = Promise(0.9, (1000, 2000))
    assert not told(promise.draw, [1000, 1500, 2000] * 40) and not told(promise.audit, [True] * 120)
    assert told(promise.audit, [True, False] * 60) == [False] and not promise.kept
    assert told(promise.audit, [True] * 500) == [True] and promise.kept
    assert told(promise.draw, [5000] * 200) == [False] and not promise.kept
    assert told(promise.draw, [1500] * 500) == [True] and promise.kept
    # Audits of longer prompts confirm the target for these.
    assert told(promise.draw, [5000] * 500) == [False]
    assert told(promise.audit, [True] * 500) == [True] and promise.kept
    assert not told(promise.draw, [9000] * 500) and promise.kept
    # Other lengths, and then a miss.
    promise = Promise(0.9, (1000, 2000))
    assert told(promise.draw, [10] * 100) == [False]
    assert told(promise.audit, [False] * 60) == [False] and not promise.kept
    assert told(Promise(0.9, None).draw, [10] * 100) == []
