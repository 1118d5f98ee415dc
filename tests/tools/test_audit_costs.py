"""benchmarks/audit.py: what audits cost, beside the same load without them."""

import sys

import pytest


@pytest.fixture
def audit(script):
    script("load")
    return script("audit")


def test_the_load_is_that_of_the_load_benchmark(audit, monkeypatch):
    """All shares get the same requests at the same steps of a round, in turn."""
    started = []

    def in_child(kind, spec):
        started.append((kind, spec["audit"], spec["round"], spec["load"]))
        return {}

    monkeypatch.setattr(audit, "in_child", in_child)
    monkeypatch.setattr(audit, "publish", lambda *_: None)
    monkeypatch.setattr(
        sys, "argv", ["audit.py", "--policies", "--shares", "0", "0.5", "--rounds", "2", "--requests", "9"]
    )
    audit.main()
    assert [each[:3] for each in started] == [("costs", share, number) for number in range(2) for share in (0.0, 0.5)]
    options = audit.argparse.Namespace(**started[0][3])
    assert all(each[3] == started[0][3] for each in started) and options.requests == 9
    times = audit.load.arrivals(options, 1)
    assert len(times) == 9 and times[-1] < 9 * audit.load.spacing(options)


def test_costs_are_beside_the_rounds_run_without_audits(audit):
    def run(share, number, seconds, audits=0):
        return {
            "audit": share,
            "round": number,
            "cpu_seconds": seconds,
            "served_cpu_seconds": seconds / 2,
            "latency_cpu_seconds": [seconds, 2 * seconds],
            "audits": audits,
            "computed_tokens": 100 * audits,
            "skipped": {"room": audits // 2},
            "tokens": 1000,
        }

    costs = [run(0.0, 0, 10), run(0.05, 0, 11, 2), run(0.0, 1, 20), run(0.05, 1, 24, 4)]
    row = audit.table_of_costs({"costs": costs}).splitlines()[-1]
    assert row == "| 5% | 6, 3 | 30.0% | 1.15 (1.10, 1.20) | 1.15 (1.10, 1.20) | 1.15 / 1.15 |"
    with pytest.raises(SystemExit):
        sys.argv = ["audit.py", "--shares", "0.5"]
        audit.main()
