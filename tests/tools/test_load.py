"""benchmarks/load.py: the same load and engine for all cases, and figures that follow from what the engine did."""

from types import SimpleNamespace

import pytest


@pytest.fixture
def load(script):
    return script("load")


def test_arrivals_are_the_load_that_was_asked_for(load):
    options = load.parse_arguments()
    times = load.arrivals(options, 0)
    assert times == sorted(times) == load.arrivals(options, 0) != load.arrivals(options, 1)
    # A request that nothing hinders decodes 768 steps after 5 of prefill, and holds 2,440 tokens on average.
    in_system = 773 / load.spacing(options)
    assert in_system * 2440 / 32 == pytest.approx(2 * 384, rel=0.01)
    assert times[-1] < options.requests * load.spacing(options)


def test_all_cases_get_the_same_engine_requests_and_arrivals(load, monkeypatch):
    options = load.parse_arguments()
    options.rounds, seen, started = 1, [], []

    def in_child(what, spec, environment=None):
        started.append((spec, environment))
        return vars(load.Run(1, 1, 1, residency=30.2, latency_steps=[1], latency_cpu_seconds=[1], found=[True]))

    monkeypatch.setattr(load, "in_child", in_child)
    reports = []
    load.load(options, reports.append)
    (report,) = reports
    assert report["budgets"] == [31 * 32]  # no less than under pressure
    assert load.table(report).count("\n") == len(started) + 1

    monkeypatch.setattr(load, "needles", lambda options, seed: (None, [(None, [seed])]))
    monkeypatch.setattr(load, "has_found", lambda *args: True)
    monkeypatch.setattr(load, "run_batch", lambda llm, prompts, tokens: seen[-1].append((prompts, tokens)))

    def make_llm(model, policy, **engine_options):
        seen.append([engine_options])

    def run_load(llm, prompts, times, tokens, clock, outputs):
        seen[-1].append((prompts, times, tokens, clock))
        outputs[0] = []
        return load.Run()

    monkeypatch.setattr(load, "make_llm", make_llm)
    monkeypatch.setattr(load, "run_load", run_load)
    for spec, environment in started:
        assert environment == ({"VLLM_PLUGINS": ""} if spec["policy"] is None else {})
        load.load_child(spec)
    assert started[0][0]["policy"] is None
    assert all(case == seen[0] for case in seen)
    for spec, _ in started[1:]:
        assert spec["policy"]["budget"] == (256 if spec["policy"].get("when") == "pressure" else 992)


class Engine:
    """Serves one request at a time, a token a step; a prompt takes one step."""

    def __init__(self):
        self.requests, self.steps = [], 0
        self.llm_engine = self
        self.running = []
        self.free = 10
        self.kv_cache_manager = SimpleNamespace(block_pool=SimpleNamespace(get_num_free_blocks=lambda: self.free))

    def add_request(self, request_id, prompt, params):
        self.requests.append([request_id, len(prompt["prompt_token_ids"]), params.max_tokens, []])

    def has_unfinished_requests(self):
        return bool(self.requests)

    def schedule(self):
        return SimpleNamespace(total_num_scheduled_tokens=1 if self.requests[0][3] else self.requests[0][1])

    def step(self):
        self.scheduler.schedule()
        request_id, _, tokens, done = self.requests[0]
        done.append(7)
        self.running, self.free = [0], 6
        if len(done) < tokens:
            return []
        del self.requests[0]
        self.running, self.free = [], 10
        return [SimpleNamespace(request_id=request_id, outputs=[SimpleNamespace(token_ids=done)])]


def test_figures_of_a_run(load, monkeypatch):
    engine = Engine()
    engine.scheduler = engine
    monkeypatch.setattr(load, "scheduler_of", lambda llm: llm)
    monkeypatch.setattr(load, "preemptions", lambda llm: 0)
    outputs = {}
    # The second comes while the first runs and waits for it; before the third nobody is there.
    run = load.run_load(engine, [[1, 2, 3]] * 3, [0.0, 1.5, 20.0], 4, "steps", outputs)
    assert (run.steps, run.idle) == (12, 12.0)
    assert run.latency_steps == [4.0, 6.5, 4.0]
    assert run.output_tokens == 12 and outputs == {i: [7] * 4 for i in range(3)}
    assert run.scheduled_tokens == 3 * (3 + 3) and run.recomputed_tokens == 0
    assert run.residency == 4 * 9 / 9 and run.peak_blocks == 4 and run.peak_requests == 1
