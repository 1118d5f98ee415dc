"""Every request that start-up and admission accept finishes: engines with the smallest pool that vLLM accepts
(docs/design.md).
"""

import itertools
from types import SimpleNamespace

import pytest
from engine import after, random_prompt
from lora import RANK, write_adapter
from oracle.hybrids import make_tiny_hybrid
from streaming import Sessions
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.v1.request import RequestStatus

from vllm_evict.core.mechanisms import Pressure
from vllm_evict.integration.engine.pressure import MOST_TAKINGS

pytestmark = pytest.mark.minutes

BLOCK, CHUNK = 32, 256
#: Host memory of the longest request: 64 blocks in two layers.
HOST = "2MiB"
SIZES = {"budget": 512, "buffer": 0, "sink": 32, "recent": 64, "allow": []}
SPLIT = {"sink": 32, "recent": 96, "allow": []}
POLICIES = {
    "h2o": {"name": "h2o", **SIZES},
    "keydiff": {"name": "keydiff", **SIZES},
    "token": {"name": "h2o", **SIZES, "granularity": "token"},
    "pressure": {"name": "h2o", **SIZES, "when": "pressure"},
    "admits": {"name": "h2o", **SIZES, "when": "pressure", "admit": True},
    "context": {"name": "h2o", **SIZES, "context": 900},
    "adakv": {"name": "adakv", **SIZES, "bands": 2},
    "host": {"name": "full", **SIZES, "evict": "host", "host": HOST},
    "host-pressure": {"name": "full", **SIZES, "evict": "host", "host": HOST, "when": "pressure"},
    "duo-token": {
        "name": "duo",
        "pattern": ["10", "01"],
        **SPLIT,
        "retrieval": {"name": "h2o", "budget": 512, "buffer": 0, "sink": 32, "recent": 64, "granularity": "token"},
    },
}
#: Blocks of 512 tokens, of a step's chunk, one that the chunk begins, and vLLM's null block.
LEAST = 16 + CHUNK // BLOCK + 1 + 1
LEAST_OF = {"adakv": 2 * LEAST - 1, "duo-token": LEAST - 1 + 5 + CHUNK // BLOCK + 1 + 1}


def run(server, steps):
    """Step until all is done, at most so often; returns outputs by id."""
    done = {}
    for _ in range(steps):
        done |= {output.request_id: output for output in server.llm.llm_engine.step() if output.finished}
        if not server.llm.llm_engine.has_unfinished_requests():
            break
    return done


@pytest.mark.parametrize("name, spare", [*((name, 0) for name in POLICIES), ("h2o", 7), ("token", 7), ("adakv", 7)])
def test_the_smallest_pool_serves_any_load(engine, name, spare):
    """Two prompts three times as long as the budget, one of them with the other's prefix: both finish."""
    blocks = LEAST_OF.get(name, LEAST)
    options = dict(max_num_batched_tokens=CHUNK, max_model_len=2048)
    options |= {"scheduling_policy": "priority"} if "host" in name else {}
    if not spare:
        with pytest.raises(ValueError, match="KV cache"):
            engine(POLICIES[name], blocks=blocks - 1, **options)
    server = engine(POLICIES[name], blocks=blocks + spare, **options)
    first = random_prompt(1500, 1)
    for priority, prompt in enumerate((first, random_prompt(1500, 2), first[:900] + random_prompt(600, 3))):
        server.add(prompt, priority=-priority if "host" in name else 0, max_tokens=50)
        server.llm.llm_engine.step()
    # One after the other they take 56 steps each; each may be preempted a few times.
    done = run(server, 6 * 3 * 56)
    assert len(done) == 3
    server.assert_nothing_left()


def send_all(sessions, turns, then=lambda: None):
    """Send (name, prompt, adapter) of each of `turns`, a step apart, and run until all have ended; returns steps.

    `then` is called before the last one is sent. The turn of a name that is sent twice leaves its session open.
    """
    steps, names = itertools.count(), [name for name, _, _ in turns]
    for number, (name, prompt, adapter) in enumerate(turns):
        if number == len(turns) - 1:
            then()
        lasts = names.count(name) > 1
        sessions.send(name, prompt, 20, lasts, lora_request=adapter)
        sessions.sent[name] += not lasts
        sessions.run(lambda: next(steps)) if lasts else sessions.step()
    sessions.run(lambda: next(steps))
    return next(steps)


@pytest.mark.both_runners("host")
@pytest.mark.parametrize("name", ["h2o", "host", "host-pressure"])
def test_the_smallest_pool_serves_adapters(engine, tiny, tmp_path, poisoned, name):
    """Of two adapters a step has one. One gets other weights under its name while requests with it wait, or idle."""
    files = [tmp_path / each for each in "ab"]
    for number, path in enumerate(files):
        write_adapter(tiny, path, number)
    one, two = (LoRARequest(path.name, number, str(path)) for number, path in enumerate(files, 1))
    serves = dict(enable_lora=True, max_loras=1, max_lora_rank=RANK)
    server = engine(POLICIES[name], blocks=LEAST, max_num_batched_tokens=CHUNK, max_model_len=2048, **serves)
    sessions, first = Sessions(server), random_prompt(900, 1)

    def reload():
        write_adapter(tiny, files[0], 9)
        server.core.add_lora(LoRARequest("a", 1, str(files[0]), load_inplace=True))

    turns = [("session", first, one), ("b1", random_prompt(1500, 2), two), ("a", first + random_prompt(500, 3), one)]
    turns += [("b2", random_prompt(1500, 2), two), ("session", random_prompt(300, 4), one)]
    assert send_all(sessions, turns, reload) < 6 * 5 * 28
    sessions.end("session")


@pytest.mark.both_runners("host")
@pytest.mark.parametrize("name", ["h2o", "host", "host-pressure"])
def test_the_smallest_pool_serves_prompts_whose_ends_are_published(engine, tmp_path, monkeypatch, poisoned, name):
    """Hashes of 16 tokens beside states: prompts go on in the middle of a block, where another one ended."""
    monkeypatch.setattr(MambaMixer2, "get_kv_cache_spec", MambaBase.get_kv_cache_spec)
    serves = dict(mamba_cache_mode="align", prefix_match_unit=16, enable_prefix_caching=True, dtype="float32")
    serves |= dict(max_num_batched_tokens=CHUNK, max_model_len=2048)
    model = make_tiny_hybrid(tmp_path / "hybrid", "falcon_h1")
    with pytest.raises(ValueError, match="KV cache"):
        engine(POLICIES[name], model=model, blocks=LEAST + 1, **serves)
    server = engine(POLICIES[name], model=model, blocks=LEAST + 2, **serves)
    sessions, first = Sessions(server), random_prompt(900 + 20, 1)
    turns = [("session", first, None), ("r1", first + random_prompt(500, 2), None)]
    turns += [("r2", random_prompt(1500, 3), None), ("session", random_prompt(300, 4), None)]
    assert send_all(sessions, turns) < 6 * 4 * 28
    sessions.end("session")


@pytest.mark.parametrize("name", ["pressure", "admits"])
@pytest.mark.parametrize("blocks", [LEAST, 43])
def test_pressure_livelock(engine, blocks, name):
    """Blocks that filled since the last report may go, too: a request never preempts itself for ever."""
    server = engine(POLICIES[name], blocks=blocks, max_num_batched_tokens=CHUNK, max_model_len=2048)
    for seed in range(2):
        server.add(random_prompt(1500, seed), max_tokens=50)
    assert len(run(server, 150)) == 2
    assert server.metrics()["vllm:num_preemptions"] <= 1
    server.assert_nothing_left()


@pytest.mark.parametrize("blocks, caching", [(LEAST, True), (LEAST, False), (34, True)])
def test_token_small_pool(engine, blocks, caching):
    """Blocks that are published take no copies where there is no room for any: they leave the prefix cache."""
    server = engine(
        POLICIES["token"],
        blocks=blocks,
        max_num_batched_tokens=CHUNK,
        max_model_len=2048,
        enable_prefix_caching=caching,
    )
    server.add(random_prompt(1500, 1), max_tokens=50)
    (output,) = run(server, 60).values()
    assert server.metrics()["vllm:num_preemptions"] == 0
    assert output.kv_usage.peak_resident_blocks <= LEAST - 1
    server.assert_nothing_left()


@pytest.mark.parametrize("name", ["h2o", "adakv", "pressure"])
def test_reports_that_never_come_do_not_stop_the_smallest_pool(engine, complaints, name):
    server = engine(POLICIES[name], blocks=LEAST_OF.get(name, LEAST), max_num_batched_tokens=CHUNK, max_model_len=2048)
    end = server.worker.kv_evict.end
    server.worker.kv_evict.end = lambda *args: [{} for _ in end(*args)]
    for seed in range(2):
        server.add(random_prompt(1500, seed), max_tokens=50)
    assert len(run(server, 250)) == 2
    assert complaints and all(level in ("ERROR", "WARNING") for level, _ in complaints)
    server.assert_nothing_left()


def test_pressure_takes_no_prefix_that_the_waiting_request_hits(engine):
    """Blocks of a cached prefix that only a running request holds are no gain for the request that would take them."""
    server = engine(
        {
            "name": "h2o",
            "when": "pressure",
            "admit": True,
            "budget": 256,
            "buffer": 0,
            "sink": 32,
            "recent": 64,
            "allow": [],
        },
        blocks=59,
    )
    evicted = {}
    for shares in (True, False):
        prompt = random_prompt(1800, 1 + shares)
        server.add(prompt, "runs", max_tokens=100)
        for _ in range(10):
            server.llm.llm_engine.step()
        (resident,) = server.scheduler.residents.values()
        same = prompt[:1700] if shares else random_prompt(1700, 5)
        server.add(same + random_prompt(250, 6), "waits", max_tokens=20)
        for _ in range(20):
            server.llm.llm_engine.step()
        evicted[shares] = resident.evicted_blocks
        assert len(server.run()) == 2
    # The request that shares waits until the other one has ended; the one that does not takes what can be spared.
    assert evicted[True] <= 4 and evicted[False] >= 25
    server.assert_nothing_left()


def test_a_try_without_success_is_not_repeated_in_each_step(engine):
    server = engine(
        {
            "name": "h2o",
            "when": "pressure",
            "admit": True,
            "budget": 1024,
            "buffer": 0,
            "sink": 32,
            "recent": 64,
            "allow": [],
        },
        blocks=46,
    )
    tries = []
    after(server.scheduler.part(Pressure), "offer", lambda *_: tries.append(server.scheduler.current_step))
    server.add(random_prompt(1000, 1), max_tokens=200)
    for _ in range(8):
        server.llm.llm_engine.step()
    server.add(random_prompt(1100, 2), max_tokens=20)
    tries.clear()
    for _ in range(80):
        server.llm.llm_engine.step()
    assert len(server.scheduler.waiting) == 1 and 5 < len(set(tries)) <= 80 // 8 + 2
    assert len(server.run()) == 2


@pytest.mark.parametrize("high, low", [(0, 1000), (1000, 0)])
def test_pressure_knows_priorities(engine, high, low):
    """A request takes blocks from requests of its own or a lower priority; a larger number is a lower priority."""
    policy = {
        "name": "h2o",
        "when": "pressure",
        "admit": True,
        "budget": 256,
        "buffer": 0,
        "sink": 32,
        "recent": 64,
        "allow": [],
    }
    server = engine(policy, blocks=66, scheduling_policy="priority")
    server.add(random_prompt(1800, 1), "first", priority=high, max_tokens=120)
    for _ in range(10):
        server.llm.llm_engine.step()
    (resident,) = server.scheduler.residents.values()
    server.add(random_prompt(1900, 2), "second", priority=low, max_tokens=20)
    assert len(server.run()) == 2
    assert (resident.evicted_blocks > 0) == (low < high)


def test_the_lowest_priority_gives_first(engine):
    policy = {
        "name": "h2o",
        "when": "pressure",
        "admit": True,
        "budget": 128,
        "buffer": 0,
        "sink": 32,
        "recent": 32,
        "allow": [],
    }
    server = engine(policy, blocks=56, scheduling_policy="priority")
    residents = {}
    for number in (3, 1, 2):
        server.add(random_prompt(500, number), f"r{number}", priority=number, max_tokens=100)
        server.llm.llm_engine.step()
    for _ in range(15):  # the first block that each of them decodes is full by then
        server.llm.llm_engine.step()
    for request in server.scheduler.running:
        residents[request.priority] = server.scheduler.residents[request.request_id]
    server.add(random_prompt(450, 9), "r0", priority=0, max_tokens=20)
    server.llm.llm_engine.step()
    gone = {number: resident.evicted_blocks for number, resident in residents.items()}
    assert gone[3] > 0 and gone[1] == 0, gone
    assert len(server.run()) == 4


def test_a_request_preempted_twice_takes_no_more_blocks(engine):
    server = engine({**POLICIES["admits"], "budget": 256}, blocks=46)
    server.add(random_prompt(1000, 1), max_tokens=60)
    for _ in range(8):
        server.llm.llm_engine.step()
    (runs,) = server.scheduler.residents.values()
    again = SimpleNamespace(request_id="again", status=RequestStatus.PREEMPTED, num_preemptions=MOST_TAKINGS)
    make_room = server.scheduler.part(Pressure).make_room
    room = {"wanted": server.free_blocks + 4, "reserved": 0, "hit": (), "watermark": True}
    assert not make_room(again, **room) and not runs.evicted_blocks
    again.num_preemptions -= 1
    again.request_id = "another"
    assert make_room(again, **room) and runs.evicted_blocks >= 4
    assert len(server.run()) == 1
