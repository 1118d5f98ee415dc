"""`vllm serve --api-server-count 2`: two front ends check requests and pass them to one engine."""

import os
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import pytest
from preparation import FOLDERS
from test_server import WORDS, running

#: What a request asks for, and what comes of it.
WISHES = [
    ({"kv_usage": True}, ("h2o", 256)),
    ({"kv_usage": True, "kv_policy": "sink-window", "kv_budget": 192}, ("sink-window", 192)),
    ({"kv_usage": True, "kv_budget": 160}, ("h2o", 160)),
    ({"kv_budget": 512}, "above the server's 256"),
    ({"kv_buget": 128}, "'kv_buget'"),
]
MOST = 200


async def name_process(request, call_next):
    """Middleware of the front ends: an answer has the process that gave it."""
    response = await call_next(request)
    response.headers["x-process"] = str(os.getpid())
    return response


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory):
    arguments = ("--api-server-count", "2", "--middleware", f"{Path(__file__).stem}.{name_process.__name__}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([*FOLDERS, os.environ.get("PYTHONPATH", "")]))
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # /sleep and /wake_up
        with running(tiny, tmp_path_factory.mktemp("servers") / "log.txt", *arguments) as server:
            yield server


def test_each_front_end_checks_requests_and_metrics_count_all(server):
    before, evicted, requests, answered = server.metrics(), Counter(), Counter(), Counter()

    def ask(number):
        """A request by a connection of its own; the kernel chooses the front end."""
        wish, expected = WISHES[number % len(WISHES)]
        prompt = " ".join(WORDS[number % 150 : number % 150 + 330])
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{server.address}/v1/completions", json={**body, "vllm_xargs": wish}, timeout=120)
        answered[answer.headers["x-process"], answer.status_code] += 1
        return expected, answer.status_code, answer.json()

    asked = 0
    with ThreadPoolExecutor(4) as pool:
        while len(answered) < 4 and asked < MOST:
            for expected, status, body in pool.map(ask, range(asked, asked + 20)):
                if isinstance(expected, str):
                    assert status == 400 and expected in body["error"]["message"]
                    continue
                usage = body["usage"]["kv_usage"]
                assert status == 200 and (usage["policy"], usage["budget_tokens"]) == expected
                evicted[usage["policy"]] += usage["evicted_blocks"]
                requests[usage["policy"]] += usage["evicted_blocks"] > 0
            asked += 20
    front_ends = {process for process, _ in answered}
    assert len(front_ends) == 2
    assert set(answered) == {(process, status) for process in front_ends for status in (200, 400)}, answered
    moved = server.moved(before)
    for policy in ("h2o", "sink-window"):
        assert moved["blocks_evicted_total", policy] == evicted[policy] > 5
        assert moved["requests_total", policy] == requests[policy] > 3
    # Each front end tells of all.
    for _ in range(10):
        now = server.metrics()
        assert now["blocks_resident", "h2o"] == now["blocks_resident", "sink-window"] == 0
        assert now["blocks_evicted_total", "h2o"] == before["blocks_evicted_total", "h2o"] + evicted["h2o"]


def test_a_server_sleeps_and_wakes_over_http(server):
    """Requests under way end, and their blocks go back. A request that comes meanwhile waits, and hits no prefix."""

    def post(path):
        answer = httpx.post(f"{server.address}{path}", timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def said(answer):
        return answer.choices[0].text, answer.usage.kv_usage

    post("/reset_prefix_cache")
    before = said(server.complete(xargs={"kv_usage": True}))
    assert before[1]["evicted_blocks"] > 3
    # While the engine reads prompts it has few outputs: a front end that is busy with outputs hears of nothing else.
    prompts = [" ".join(WORDS[(place * 7 + number) % 599] for place in range(1700)) for number in range(150)]
    for _ in range(10):
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.complete, prompts, max_tokens=16)
            while not server.metrics()["blocks_resident", "h2o"] and not answer.done():
                pass
            assert post("/sleep?level=1")["status"] == "sleeping"
            # Prompts that a slow front end sends to the engine after this wait until it wakes.
            late = not wait([answer], timeout=10).done
            if late:
                assert post("/wake_up")["status"] == "awake"
            ends = {choice.finish_reason for choice in answer.result().choices}
        if "abort" in ends:
            break
        if not late:
            assert post("/wake_up")["status"] == "awake"
        post("/reset_prefix_cache")
    assert "abort" in ends
    if late:
        assert post("/sleep?level=1")["status"] == "sleeping"
    assert httpx.get(f"{server.address}/is_sleeping").json()["is_sleeping"]
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(server.complete, xargs={"kv_usage": True})
        time.sleep(1)
        assert not waits.done()
        assert post("/wake_up")["status"] == "awake"
        assert said(waits.result()) == before
    post("/reset_prefix_cache")
    assert said(server.complete(xargs={"kv_usage": True})) == before
    assert server.moved({})["blocks_resident", "h2o"] == 0


def test_the_engine_says_its_policy_once(server):
    assert len(re.findall(r"KV policy h2o .*budget=256.*", server.log)) == 1
