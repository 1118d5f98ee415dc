"""benchmarks/host.py: each part is timed in each step, the same requests in all cases, and what is added to stock."""

import statistics
from pathlib import Path

import pytest


@pytest.fixture
def host(script):
    return script("host")


@pytest.mark.parametrize("case", ["stock", "h2o", "h2o, pressure"])
def test_parts_are_timed_in_every_step(host, tiny, engine, monkeypatch, case):
    made = []

    def make_llm(model, policy, num_gpu_blocks_override, **options):
        made.append(engine(policy, blocks=num_gpu_blocks_override, **options))
        return made[0].llm

    monkeypatch.setattr(host, "make_llm", make_llm)
    options = host.parse_arguments()
    options.requests, options.steps = 4, 40
    policy = host.cases(options)[case]
    spec = {"policy": policy, "model": str(tiny), "options": vars(options), "shape": {"layers": 2, "vocab": 256}}
    run = host.host_child(spec)
    parts = host.SCHEDULER if case == "stock" else host.SCHEDULER + host.WORKER
    for clock in host.CLOCKS:
        assert run[clock].keys() == set(parts)
        assert all(len(seconds) == 40 and min(seconds) > 0 for seconds in run[clock].values())
    assert len(run["calls"]) == host.COUNTED
    # Stock vLLM takes about 65 for each request; the plugin may add a few, and more where the pool runs out.
    calls = statistics.median(run["calls"]) / options.requests
    assert 40 < calls < 120, calls
    if policy is not None:
        evicted = made[0].metrics()["blocks_evicted", "h2o"]
        assert evicted > 0


def test_what_is_added_is_the_mean_step_s_difference_from_stock(host, monkeypatch):
    """Each round is compared with its own stock; here the machine takes twice as long in the second one."""
    options = host.parse_arguments()
    options.rounds, options.cases, seen = 2, ["stock", "h2o"], []
    runs = {
        "stock": {"cpu_seconds": {"schedule": [0.001, 0.003], "update": [0.002, 0.002]}, "calls": [256]},
        "h2o": {
            "cpu_seconds": {"schedule": [0.004, 0.002], "update": [0.002, 0.002], "view": [0.003, 0.0]},
            "calls": [512, 1024],
        },
    }

    def in_child(what, spec, environment):
        seen.append((what, spec["policy"], environment))
        run = runs["stock" if spec["policy"] is None else "h2o"]
        slower = 2 if len(seen) > 2 else 1
        seconds = {part: [slower * each for each in steps] for part, steps in run["cpu_seconds"].items()}
        return run | {"cpu_seconds": seconds}

    monkeypatch.setattr(host, "in_child", in_child)
    report = host.host(options, Path("model"), host.Shape())
    assert report["added"]["stock"] == [0, 0]
    assert report["added"]["h2o"] == pytest.approx([0.0025, 0.005])
    assert [environment for *_, environment in seen] == 2 * [{"VLLM_PLUGINS": ""}, {}]
    row = "| h2o | 4.50 / 4.00 / 8.00 | 3.00 / 3.00 / 4.00 |  |  | 2.25 / 1.50 / 6.00 |  | 3.75 (2.50, 5.00) | 3.0 |"
    assert row in host.table(report)
