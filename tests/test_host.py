"""benchmarks/host.py: each part is timed in each step, the same requests in all cases, and what is added to stock."""

import importlib.util
import statistics
import sys
from pathlib import Path

import pytest


@pytest.fixture
def host(monkeypatch):
    folder = Path(__file__).parents[1] / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location("host", folder / "host.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "host", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["host.py"])
    return module


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
        assert len(run[clock]) == 40
        assert all(step.keys() == set(parts) and min(step.values()) > 0 for step in run[clock])
    assert len(run["calls"]) == host.COUNTED
    # Stock vLLM takes about 65 for each request; the plugin may add a few, and more where the pool runs out.
    calls = statistics.median(run["calls"]) / options.requests
    assert 40 < calls < 120, calls
    if policy is not None:
        evicted = made[0].metrics()["blocks_evicted", "h2o"]
        assert evicted > 0


def test_what_is_added_is_the_mean_step_s_difference_from_stock(host, monkeypatch):
    options = host.parse_arguments()
    options.cases, seen = ["stock", "h2o"], []
    runs = {
        "stock": {
            "cpu_seconds": [{"schedule": 0.001, "update": 0.002}, {"schedule": 0.003, "update": 0.002}],
            "calls": [256],
        },
        "h2o": {
            "cpu_seconds": [{"schedule": 0.004, "update": 0.002, "view": 0.003}, {"schedule": 0.002, "update": 0.002}],
            "calls": [512, 1024],
        },
    }

    def in_child(what, spec, environment):
        seen.append((what, spec["policy"], environment))
        return runs["stock" if spec["policy"] is None else "h2o"]

    monkeypatch.setattr(host, "in_child", in_child)
    report = host.host(options, Path("model"), host.Shape())
    assert report["added"] == pytest.approx({"stock": 0, "h2o": 0.0025})
    assert [environment for *_, environment in seen] == [{"VLLM_PLUGINS": ""}, {}]
    row = "| h2o | 3.00 / 3.00 / 4.00 | 2.00 / 2.00 / 2.00 |  |  | 1.50 / 1.50 / 3.00 |  | 2.50 | 3.0 |"
    assert row in host.table(report)
