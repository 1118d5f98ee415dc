"""Counts of the scheduler by policy: what is sent to the front end, and what a scrape shows of it."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from vllm_evict.config import KVPolicyConfig
from vllm_evict.integration.engine.mechanisms import KINDS
from vllm_evict.integration.engine.tally import METRICS, Tally
from vllm_evict.integration.frontend.metrics import PrometheusMetrics

H2O = {"name": "h2o", "allow": ["full"], "audit": 0.5, "target": 0.9}
HOST = {"name": "full", "evict": "host", "host": "1MiB"}


@pytest.fixture
def shown(request):
    """A function that records what a tally gives, and returns (counter or gauge, policy) -> value."""
    registry = CollectorRegistry()

    def counter(name, help, labels):
        return Counter(name, help, labels, registry=registry)

    def gauge(name, help, labels, multiprocess_mode):
        return Gauge(name, help, labels, registry=registry)

    policy = KVPolicyConfig.parse(getattr(request, "param", H2O))
    metrics = PrometheusMetrics("m", [0], policy, KINDS, counter, gauge)

    def record(counts):
        metrics.record(counts, 0)
        samples = (sample for family in registry.collect() for sample in family.samples)
        return {
            (sample.name.removeprefix("vllm:kv_evict_"), *list(sample.labels.values())[2:]): sample.value
            for sample in samples
            if not sample.name.endswith("_created")
        }

    return record


def test_no_two_mechanisms_count_under_one_key():
    keys = [key for each in (METRICS, *(kind.metrics for kind in KINDS)) for key in each]
    assert len(keys) == len({*keys}) == 35


def test_policies_without_requests_are_not_sent_and_show_nothing_held(shown):
    tally = Tally()
    assert tally.take({}) == {} and shown({})["blocks_resident", "h2o"] == 0
    tally.add("h2o", evicted=3, freed=2, shared=1, requests=1)
    taken = tally.take({"h2o": 8})
    found = shown(taken)
    assert taken.keys() == {"h2o"}
    assert (found["blocks_resident", "h2o"], found["blocks_resident", "full"]) == (8, 0)
    assert (found["blocks_evicted_total", "h2o"], found["blocks_evicted_total", "full"]) == (3, 0)
    tally.add("h2o", missing=1)
    # Sent again though it did not change: another front end may have shown an older number last.
    taken = tally.take({"h2o": 8, "full": 5})
    found = shown(taken)
    assert taken.keys() == {"h2o", "full"}
    assert (found["blocks_resident", "h2o"], found["blocks_resident", "full"]) == (8, 5)
    assert (found["reports_missing_total", "h2o"], found["blocks_evicted_total", "h2o"]) == (1, 3)
    assert shown(tally.take({"h2o": 8, "full": 0}))["blocks_resident", "full"] == 0


@pytest.mark.parametrize("shown", [HOST], indirect=True)
def test_host_blocks_are_sent_for_a_policy_without_requests(shown):
    tally = Tally()
    tally.hold("full", used=4, bytes=400)
    found = shown(tally.take({}))
    assert (found["host_blocks", "full"], found["host_bytes", "full"], found["blocks_resident", "full"]) == (4, 400, 0)


def test_audits_are_shown_by_policy_and_share_kept(shown):
    tally = Tally()
    found = shown(tally.take({}))
    assert (found["audit_share", "h2o"], found["audit_target", "h2o"]) == (0.5, 0.9)
    assert found["audit_requests_total", "h2o", "all"] == found["audit_requests_total", "h2o", "10-25"] == 0
    tally.add("h2o", "10-25", audited=1, identical=True, tokens=8, agreed=8, gap=0.0, measured=1, missed_mass=0.25)
    tally.add("h2o", "10-25", audited=1, identical=False, tokens=4, agreed=3, gap=0.75)
    tally.add("h2o", "all", sampled_requests=1, sampled_tokens=5, surprise=2.5, expected=3.0)
    tally.add("full", "grammar", skipped=1)
    tally.hold("h2o", missed=1)
    found = shown(tally.take({}))
    assert found["audit_requests_total", "h2o", "10-25"] == 2
    assert found["audit_identical_total", "h2o", "10-25"] == 1
    assert found["audit_tokens_agreed_total", "h2o", "10-25"] == 11
    assert found["audit_gap_nats_total", "h2o", "10-25"] == 0.75
    assert found["audit_missed_mass_total", "h2o", "10-25"] == 0.25
    assert found["audit_measured_total", "h2o", "10-25"] == 1
    assert found["audit_surprise_nats_total", "h2o", "all"] == 2.5
    assert found["audit_expected_nats_total", "h2o", "all"] == 3
    assert found["audit_skipped_total", "full", "grammar"] == 1
    assert (found["audit_target_missed", "h2o"], found["audit_target_missed", "full"]) == (1, 0)
    assert tally.take({}) == {}
