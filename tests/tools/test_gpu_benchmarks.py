"""benchmarks/gpu/engine.py without a GPU: its arithmetic, a dry run of every row, and what it never says of one."""

import copy
import json
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

ROOM = 1 << 40
FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path += [str(FOLDER), str(FOLDER / "gpu")]  # behind tests/, which has an engine.py too

import engine_child as child  # noqa: E402
import engine_plots as plots  # noqa: E402
import engine_rows as rows  # noqa: E402
import engine_sizes as sizes  # noqa: E402


@pytest.fixture(scope="module")
def bench():
    import importlib.util

    spec = importlib.util.spec_from_file_location("gpu_engine", FOLDER / "gpu" / "engine.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def dry(bench, tmp_path_factory):
    """The JSON of a dry run of all rows, and what it printed."""
    out, said = tmp_path_factory.mktemp("dry") / "engine.json", []

    def say(*words, **_):
        said.append(" ".join(map(str, words)))

    # Engines collect the whole heap nine times between start and end.
    with patch("gc.collect"), patch("builtins.print", say):
        bench.main(["--dry-run", "--out", str(out)])
    return SimpleNamespace(report=json.loads(out.read_text()), said=said, path=out)


# ---- arithmetic


def test_models_have_as_many_parameters_as_the_published_ones():
    assert sizes.parameters(sizes.LLAMA_2_7B) == 6_738_415_616
    assert sizes.parameters(sizes.LLAMA_3_1_8B) == 8_030_261_248


def test_pool_of_a_24_gb_card():
    """21.6 GiB less 12.55 GiB of weights less 1 GiB, at 512 KiB a token."""
    assert sizes.LLAMA_2_7B.kv_bytes_per_token(2) == 512 * 1024
    assert sizes.card_blocks(sizes.LLAMA_2_7B, 16) == 1030
    free = sizes.CARD * 9 // 10 - 2 * 6_738_415_616 - 2**30
    assert 1030 * 16 * 512 * 1024 <= free < 1031 * 16 * 512 * 1024
    # It does not even hold the weights of a model of twice the layers.
    assert sizes.card_blocks(rows.replace(sizes.LLAMA_2_7B, layers=64), 16) == 0


def test_a_quarter_of_a_load_in_blocks():
    assert sizes.load_blocks(32, 9216, 16, 1 / 4) == 32 * 576 // 4 + 1 == 4609
    assert sizes.load_blocks(3, 33, 16) == 3 * 3 + 1  # each request has a block of its own for what is left over


def test_rows_are_what_was_promised():
    plans = {name: plan(False, 139 * sizes.GIB) for name, (plan, _) in rows.ROWS.items()}
    armed, paper, pressure, latency, step = plans.values()
    assert [plan.shape.kv_heads for plan in plans.values()] == [8, 32, 8, 8, 8]
    assert armed.facts == {"requests": 64, "prompt": 2049, "output": 512, "pool_blocks": 64 * 161 + 1, "block_size": 16}
    assert paper.facts == {"requests": 64, "prompt": 2048, "output": 2048, "pool_blocks": 1030, "block_size": 16}
    assert paper.cases["h2o"]["budget"] == 816 and 0.19 < 816 / 4096 <= 0.2
    assert (pressure.blocks, pressure.requests, pressure.tokens) == (4609, 32, 9216)
    assert [pressure.cases[case]["budget"] for case in ("h2o", "snapkv")] == [9216 // 8] * 2
    window = pressure.cases["sink-window"]
    assert window["sink"] + window["recent"] + 16 == 9216 // 8
    assert latency.facts["contexts"]["1"] == [4096, 8192, 16384, 32768, 65536, 131072]
    assert latency.facts["contexts"]["8"] == [4096, 8192, 16384, 32768, 65536]
    assert step.requests == step.work["step"].arguments["batch"] == 256
    # An H200 holds the engines of all rows but pressure's and latency's together, and four of pressure's.
    free = 139 * sizes.GIB * rows.FILL
    assert [len(plan.cases) * plan.memory <= free for plan in plans.values()] == [True, True, False, False, True]
    assert 4 * pressure.memory <= free
    assert all(plan.memory <= free for plan in plans.values())


def test_latency_leaves_out_what_does_not_fit():
    small = rows.latency(False, 40 * sizes.GIB)
    assert small.facts["contexts"] == {"1": [4096 << n for n in range(6)], "8": [4096, 8192]}
    assert small.memory <= 40 * sizes.GIB
    with pytest.raises(rows.RowError, match="no context fits"):
        rows.latency(False, 16 * sizes.GIB)


# ---- dry run

EVICTING = {
    "paper": ["h2o"],
    "pressure": ["h2o", "snapkv", "sink-window", "reach"],
    "latency": ["h2o", "sink-window"],
    "step": ["h2o"],
}


def test_dry_run_has_all_rows(dry):
    assert dry.report["dry_run"] and list(dry.report["rows"]) == list(rows.ROWS)
    for row in dry.report["rows"].values():
        assert "error" not in row and row["lines"] and row["together"]
        for case, facts in row["engines"].items():
            asked = row["load"]["pool_blocks"]
            assert facts["pool_blocks"] < asked if case in ("reach", "read") else facts["pool_blocks"] == asked
            assert facts["versions"].keys() >= {"vllm", "torch"}
            assert facts["attention_backend"] == "CPU_ATTN" and facts["cudagraph_mode"] == "NONE"
            assert facts["model_runner"] == "V1" and facts["seconds_to_start"] > 0


def test_dry_run_evicts_where_it_should_and_nowhere_else(dry):
    for name in ("armed", "paper", "pressure"):
        for case, (round_,) in dry.report["rows"][name]["runs"].items():
            run = round_["batch"]
            evicts = case in EVICTING.get(name, ())
            assert (run["evicted_blocks"] > 0) == (run["decisions"] > 0) == (run["steps_with_holes"] > 0) == evicts
            measures = case in ("h2o that could", "h2o", "snapkv")
            assert (run["measured_requests"] > 0) == measures, (name, case)
            assert (run["own_decode_steps"] > 0) == (evicts or measures), (name, case)
            assert 0 < run["prefill_seconds"] < run["seconds"] and run["tokens_per_second"] > 0
    stock = dry.report["rows"]["paper"]["runs"]["stock"][0]["batch"]
    assert stock["preemptions"] > 0 and stock["recomputed_tokens"] > 0
    assert dry.report["rows"]["paper"]["runs"]["h2o"][0]["batch"]["preemptions"] == 0
    for case in EVICTING["latency"]:
        for work, contexts in (("batch 1", 3), ("batch 2", 3)):
            found = dry.report["rows"]["latency"]["runs"][case][0][work]
            assert len(found) == contexts and all(run["evicted_blocks"] > 0 for run in found.values())
    (step,) = dry.report["rows"]["step"]["runs"]["h2o"]
    for watched in ("traced", "waits"):
        assert step["step"][watched]["evicted_blocks"] > 0
    parts = step["step"]["traced"]["parts"]
    assert parts.keys() == {"begin", "rearrange", "view", "attention", "end"}
    assert {part["calls"] for name, part in parts.items() if name != "attention"} == {64}


def test_dry_run_holds_nothing_against_what_is_wanted(dry):
    lines = [line for row in dry.report["rows"].values() for line in row["lines"]]
    wanted = [line for line in lines if line["wanted"] is not None]
    assert len(wanted) == 1 + 1 + 3 + 2 * 2 + 2
    assert all(line["met"] is None for line in wanted)
    text = "\n".join(dry.said)
    assert text.count("dry run, not compared") == len(wanted) and "DRY RUN" in text
    assert "met" not in text.replace("method", "").split() and "missed" not in text
    ratios = [line["value"] for line in lines if "over stock" in line["figure"]]
    assert len(ratios) == 3 + 2 + 5 and min(ratios) > 0
    # What only a GPU can say is not said.
    unknown = [line["figure"] for line in lines if line["value"] is None]
    assert len(unknown) == 3 and all("device" in figure for figure in unknown)


def test_pictures(dry, tmp_path):
    with pytest.raises(plots.NothingToDraw, match="dry run"):
        plots.draw([dry.path], tmp_path)
    assert [path.name for path in plots.draw([dry.path], tmp_path, dry_run=True)] == [
        "gpu-ratios.png",
        "gpu-latency.png",
    ]
    assert all(path.stat().st_size > 5000 for path in tmp_path.iterdir())


def test_pictures_of_a_dry_run_hold_nothing_against_what_is_wanted(dry):
    from matplotlib import pyplot

    for title, marks in ((plots.DRY, 0), ("a GPU: ", 1 + 1 + 3)):
        figure = plots.ratios(pyplot, dry.report["rows"], title)
        (axis,) = figure.axes
        vertical = [line for line in axis.lines if len(line.get_xdata()) == 2 and len(set(line.get_xdata())) == 1]
        assert len(vertical) - 1 == marks and axis.get_title().startswith(title)  # less the line at 1
        pyplot.close(figure)


# ---- what a row refuses


def broken(dry, name, change):
    """Lines of a row whose raw results were changed."""
    plan, lines = rows.ROWS[name]
    runs = copy.deepcopy(dry.report["rows"][name]["runs"])
    change(runs)
    return lines(plan(True, ROOM), runs)


def test_a_row_in_which_a_policy_did_not_act_is_an_error(dry):
    def nothing_evicted(runs):
        runs["h2o"][0]["batch"] |= {"evicted_blocks": 0, "decisions": 0}

    for name in ("paper", "pressure"):
        assert broken(dry, name, lambda runs: None)
        with pytest.raises(rows.RowError, match="nothing was evicted"):
            broken(dry, name, nothing_evicted)
    with pytest.raises(rows.RowError, match="the pool was not too small"):
        broken(dry, "paper", lambda runs: runs["stock"][0]["batch"].update(peak_requests=6))
    with pytest.raises(rows.RowError, match="running sums of 0"):
        broken(dry, "armed", lambda runs: runs["h2o that could"][0]["batch"].update(measured_requests=0))
    with pytest.raises(rows.RowError, match="were evicted, wanted none"):
        broken(dry, "armed", lambda runs: runs["h2o that could"][0]["batch"].update(evicted_blocks=1))
    with pytest.raises(rows.RowError, match="by the requests' own account"):
        broken(dry, "pressure", lambda runs: runs["snapkv"][0]["batch"].update(evicted_blocks_by_usage=1))
    with pytest.raises(rows.RowError, match="1 tokens"):
        broken(dry, "pressure", lambda runs: runs["snapkv"][0]["batch"].update(output_tokens=1))
    for case, of_holes, of_own in (("h2o", 0, 1), ("h2o", 1, 0), ("sink-window", 0, 1)):
        counts = {"steps_with_holes": of_holes, "own_decode_steps": of_own}
        with pytest.raises(rows.RowError, match=f"^{case}: no step (went over|was decoded by)"):
            broken(dry, "latency", lambda runs: runs[case][0]["batch 1"]["512"].update(counts))
    # On a GPU vLLM's kernel decodes requests that lack blocks, unless they are measured.
    assert broken(dry, "latency", lambda runs: runs["sink-window"][0]["batch 1"]["512"].update(own_decode_steps=0))
    with pytest.raises(rows.RowError, match="the profiler saw nothing of: view"):
        broken(dry, "step", lambda runs: runs["h2o"][0]["step"]["traced"]["parts"].pop("view"))


def test_on_a_gpu_figures_are_held_against_what_is_wanted(dry):
    def on_gpu(runs):
        found = runs["h2o"][0]["step"]
        found["waits"]["plugin"] = {"view": 0, "end": 3}
        for part in found["traced"]["parts"].values():
            part["device_us"] = 64 * 5.0

    device, waits, *_ = [line.judge(dry_run=False) for line in broken(dry, "step", on_gpu)]
    assert (device.value, device.wanted, device.met) == (20.0, ("<=", 30.0), True)
    assert (waits.value, waits.wanted, waits.met) == (3, ("<=", 0.0), False)
    assert ": met" in device.said(False) and ": missed" in waits.said(False)

    def in_a_graph(runs):
        on_gpu(runs)
        del runs["h2o"][0]["step"]["traced"]["parts"]["attention"]

    attention = broken(dry, "step", in_a_graph)[3]
    assert attention.figure.endswith("the plugin's attention") and attention.value is None
    assert broken(dry, "step", on_gpu)[3].value == 5.0

    def slow(runs):
        runs["h2o"][0]["batch"]["seconds"] = runs["stock"][0]["batch"]["seconds"] / 2

    line = broken(dry, "paper", slow)[1].judge(dry_run=False)
    assert line.value == pytest.approx(2) and line.wanted == (">=", 2.5) and line.met is False


# ---- what is launched


def test_device_time_is_that_of_what_was_launched_under_a_mark():
    def event(cat, name, ts, dur, tid=1, **args):
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}

    events = [
        event("user_annotation", "kv_evict:view", 100, 50),
        event("user_annotation", "kv_evict:view", 300, 50),
        event("user_annotation", "kv_evict:end", 400, 50),
        event("user_annotation", "model", 0, 1000),
        event("cuda_driver", "cuLaunchKernelEx", 110, 2, correlation=1),
        event("cuda_runtime", "cudaMemcpyAsync", 349, 2, correlation=2),
        event("cuda_runtime", "cudaLaunchKernel", 351, 2, correlation=3),  # between two marks
        event("cuda_runtime", "cudaLaunchKernel", 420, 2, correlation=4),
        event("cuda_runtime", "cudaLaunchKernel", 120, 2, tid=2, correlation=5),  # another thread's
        event("kernel", "_resident_view", 900, 7, tid=7, correlation=1),
        event("gpu_memcpy", "HtoD", 950, 3, tid=7, correlation=2),
        event("kernel", "matmul", 960, 100, tid=7, correlation=3),
        event("kernel", "index_put", 1100, 11, tid=7, correlation=4),
        event("kernel", "other", 1200, 100, tid=7, correlation=5),
        {"ph": "M", "name": "process_name"},
    ]
    assert child.device_times({"traceEvents": events}) == {
        "view": {"calls": 2, "host_us": 100.0, "launches": 2, "device_us": 10.0},
        "end": {"calls": 1, "host_us": 50.0, "launches": 1, "device_us": 11.0},
    }

    # Threads that are numbered otherwise: by time alone.
    for each in events:
        if each.get("cat", "").startswith("cuda_"):
            each["tid"] += 100
    found = child.device_times({"traceEvents": events})
    assert (found["view"]["device_us"], found["end"]["device_us"]) == (110.0, 11.0)


def test_waits_are_counted_for_the_part_that_waits():
    def warns(*_):
        warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    quiet = lambda *_: None  # noqa: E731
    plugin = SimpleNamespace(begin=quiet, rearrange=quiet, end=warns, groups=[SimpleNamespace(view=quiet)])
    before = vars(plugin).copy()
    with child.Parts(plugin) as parts:
        with pytest.warns(UserWarning):
            plugin.end()  # nobody watches
        with parts.watched(), parts.catching():
            for _ in range(3):
                plugin.begin()
                plugin.end()
                warns()  # the model's
        assert dict(parts.waited) == {"begin": 0, "end": 3} and len(parts.waits) == 6
        assert parts.seconds.keys() == {"begin", "end"}
        parts.clear()
        assert not parts.waited and not parts.waits
    assert vars(plugin) == before


# ---- processes


def test_engines_that_do_not_fit_together_are_up_one_at_a_time(bench, monkeypatch):
    """Rounds alternate in order; each engine is warmed up, works and ends before the next one starts."""
    plan, options, told = rows.armed(True, ROOM), bench.parse_arguments(["--dry-run", "--rounds", "2"]), []

    class Told:
        def __init__(self, spec):
            self.case = spec["case"]
            told.append(("up", self.case))

        def call(self, method, **arguments):
            if method != "facts":
                told.append((arguments.get("seed", 0), self.case))
                return len(told)
            same = dict.fromkeys(("device", "attention_backend", "model_runner", "async_scheduling", "block_size"))
            return {**same, "pool_blocks": plan.blocks}

        def close(self):
            told.append(("down", self.case))

    monkeypatch.setattr(bench, "Here", Told)
    for gpu in ({"shared": False, "free": ROOM}, {"shared": True, "free": 2 * plan.memory}):
        told.clear()
        found = {}
        bench.measure(plan, options, bench.Clock(60), gpu, found)
        cases = list(plan.cases)
        order = [cases[0], cases[1], cases[2], cases[2], cases[1], cases[0]]
        assert told == [(what, case) for case in order for what in ("up", 1, 0, "down")] and not found["together"]
        assert all(len(rounds) == 2 for rounds in found["runs"].values()) and "unfinished" not in found
    told.clear()
    bench.measure(plan, options, bench.Clock(60), bench.NO_GPU, found)
    assert found["together"]
    assert [what for what, _ in told] == ["up", 1] * 3 + [0] * 6 + ["down"] * 3
    # No time for another round: the first one counts.
    bench.measure(plan, options, SimpleNamespace(left=-1), bench.NO_GPU, found)
    assert all(len(rounds) == 1 for rounds in found["runs"].values())


def test_engines_that_differ_are_refused(bench):
    plan = rows.armed(True, ROOM)
    same = dict.fromkeys(("device", "attention_backend", "model_runner", "async_scheduling", "block_size"), 1)
    stock = {**same, "pool_blocks": plan.blocks, "plugin_loaded": False}
    bench.check_facts(plan, {"stock": stock, "h2o": stock | {"plugin_loaded": True}}, alone=True)
    for wrong in ({"attention_backend": 2}, {"pool_blocks": plan.blocks // 2}, {"plugin_loaded": False}):
        with pytest.raises(rows.RowError, match=r"^h2o: .*(backend|blocks|plugin)"):
            bench.check_facts(plan, {"stock": stock, "h2o": stock | {"plugin_loaded": True} | wrong}, alone=True)


def test_all_engines_of_a_row_get_the_same_but_for_the_policy(bench):
    for plan in (plan(False, ROOM) for plan, _ in rows.ROWS.values()):
        options = bench.parse_arguments(["--backend", "TRITON_ATTN", "--cudagraph-mode", "PIECEWISE"])
        specs = [bench.specification(plan, case, "model", options) for case in plan.cases]
        assert [spec.pop("policy") for spec in specs] == list(plan.cases.values())
        assert all(spec["engine"] == specs[0]["engine"] for spec in specs)
        engine = specs[0]["engine"]
        assert engine["kv_cache_memory_bytes"] == plan.blocks * 16 * plan.shape.kv_bytes_per_token(2)
        assert engine["attention_config"] == {"backend": "TRITON_ATTN"} and not engine["enforce_eager"]
        assert engine["compilation_config"]["cudagraph_mode"] == "PIECEWISE"


def test_stock_runs_in_a_process_without_the_plugin(bench, tmp_path):
    plan, options = rows.armed(True, ROOM), bench.parse_arguments(["--dry-run"])
    rows_model = bench.write_config(tmp_path, rows.replace(plan.shape, max_len=plan.tokens))
    spec = bench.specification(plan, "stock", str(rows_model), options)
    engine = bench.Process(spec, bench.Clock(120), tmp_path / "log")
    try:
        facts = engine.call("facts")
        bench.check_facts(plan, {"stock": facts}, alone=True)
        assert facts["plugin_loaded"] is False and "vllm_evict" not in facts["versions"]
        run = engine.call("batch", requests=2, prompt=40, output=3)
        assert run["output_tokens"] == 6 and run["evicted_blocks"] == run["recomputed_tokens"] == 0
        with pytest.raises(bench.RowError, match="no such method|has no attribute 'nonsense'"):
            engine.call("nonsense")
    finally:
        engine.close()
    assert engine.process.returncode == 0


def test_an_engine_that_takes_too_long_is_ended(bench, tmp_path):
    spec = {"case": "slow", "policy": None, "model": str(tmp_path), "engine": {}, "vocab": 2}
    with pytest.raises(bench.RowError, match="--seconds were over"):
        bench.Process(spec, bench.Clock(0.01), tmp_path / "log")


def test_without_a_gpu_nothing_is_measured(bench, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as left:
        bench.main(["--out", str(tmp_path / "engine.json")])
    assert left.value.code == 0 and "nothing was measured" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_row_that_fails_is_said_and_the_rest_runs(bench, monkeypatch, tmp_path, capsys):
    def fails(*_):
        raise bench.RowError("this one")

    def measured(plan, options, clock, gpu, row):
        row["runs"] = {"h2o": [1]}

    monkeypatch.setattr(bench, "measure", measured)
    monkeypatch.setitem(bench.ROWS, "paper", (rows.paper, fails))
    monkeypatch.setitem(
        bench.ROWS, "step", (rows.step, lambda *_: [rows.Line("h2o", "figure", 1.0, wanted=(">=", 0.5))])
    )
    out = tmp_path / "engine.json"
    with pytest.raises(SystemExit) as left:
        bench.main(["--dry-run", "--rows", "paper", "step", "--out", str(out)])
    found = json.loads(out.read_text())["rows"]
    assert left.value.code == 1 and found["paper"]["error"] == "this one" and "lines" not in found["paper"]
    assert found["step"]["lines"][0]["value"] == 1.0 and "failed: this one" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["paper", "latency", "step"])
def test_rows_under_async_scheduling(bench, monkeypatch, async_stays, tmp_path, name):
    """Run as on a GPU."""
    specification = bench.specification

    def asynchronous(*args):
        spec = specification(*args)
        spec["engine"]["async_scheduling"] = True
        return spec

    monkeypatch.setattr(bench, "specification", asynchronous)
    out = tmp_path / "engine.json"
    with patch("gc.collect"):
        bench.main(["--dry-run", "--rows", name, "--out", str(out)])
    row = json.loads(out.read_text())["rows"][name]
    assert row["lines"] and all(facts["async_scheduling"] for facts in row["engines"].values())


def test_rounds_before_one_that_fails_count(bench, dry, monkeypatch, tmp_path, capsys):
    results = dry.report["rows"]["paper"]["runs"]

    def measured(plan, options, clock, gpu, row):
        row |= {"runs": results, "engines": {}, "unfinished": {"stock": {"batch": 1}, "h2o": {}}}
        raise bench.RowError("the second round")

    monkeypatch.setattr(bench, "measure", measured)
    out = tmp_path / "engine.json"
    with pytest.raises(SystemExit) as left:
        bench.main(["--dry-run", "--rows", "paper", "--out", str(out)])
    row = json.loads(out.read_text())["rows"]["paper"]
    assert left.value.code == 1 and row["error"] == "the second round" and row["unfinished"]["stock"] == {"batch": 1}
    assert row["lines"] == dry.report["rows"]["paper"]["lines"]
    results = {"stock": [], "h2o": []}
    with pytest.raises(SystemExit):
        bench.main(["--dry-run", "--rows", "paper", "--out", str(out)])
    assert "lines" not in json.loads(out.read_text())["rows"]["paper"]


def test_no_row_is_begun_for_which_too_little_time_is_left(bench, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "the_gpu", lambda: bench.NO_GPU | {"name": "a GPU"})
    monkeypatch.setattr(bench, "run_row", lambda *_: {})
    out = tmp_path / "engine.json"
    bench.main(["--rows", "step", "paper", "armed", "--seconds", "250", "--out", str(out)])
    assert json.loads(out.read_text())["rows"] == {"step": {}, "paper": {"left_out": True}, "armed": {}}
    assert "paper: left out" in capsys.readouterr().out
