"""`vllm serve --kv-policy`, as its clients see it: one real server for all tests here."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import openai
import pytest
from ports import reserve_port

from vllm_evict.core.mechanisms import Pressure
from vllm_evict.features.audit.engine import Audits
from vllm_evict.integration.engine.reaching import Reaching

pytestmark = pytest.mark.minutes

POLICY = {"name": "h2o", "budget": 256, "buffer": 32, "sink": 32, "recent": 64, "allow": ["sink-window", "full"]}
ENGINE = ["--kv-policy", json.dumps(POLICY), "--dtype", "float32", "--enforce-eager", "--block-size", "32"]
ENGINE += ["--max-model-len", "2048", "--max-num-seqs", "8", "--max-num-batched-tokens", "256"]
ENGINE += ["--num-gpu-blocks-override", "128", "--kv-cache-memory-bytes", str(64 << 20)]
WORDS = [f"t{i * 7 % 256}" for i in range(600)]
PROMPT = " ".join(WORDS[:400])


def vllm(*arguments):
    """The `vllm` command of this environment."""
    return [os.path.join(os.path.dirname(sys.executable), "vllm"), *arguments]


def environment():
    # Other tests keep the engine in their own process; a server has processes of its own.
    return {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}


class Server:
    """A running server: its address, what it logged, and its metrics."""

    def __init__(self, address, log):
        self.address, self.log_path = address, log
        self.client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120)

    @property
    def log(self):
        return self.log_path.read_text()

    def complete(self, prompt=PROMPT, max_tokens=40, xargs=None, **options):
        body = {"ignore_eos": True} | ({"vllm_xargs": xargs} if xargs is not None else {})
        return self.client.completions.create(
            model="tiny", prompt=prompt, max_tokens=max_tokens, extra_body=body, **{"temperature": 0, **options}
        )

    def metrics(self):
        """Value of each of the plugin's metrics by (name, policy)."""
        text = urllib.request.urlopen(f"{self.address}/metrics").read().decode()
        found = re.findall(r'^vllm:kv_evict_(\w+)\{([^}]*)policy="([\w-]+)"[^}]*\} (\S+)$', text, re.M)
        return {(name, policy): float(value) for name, _, policy, value in found if not name.endswith("_created")}

    def moved(self, before):
        """How much each metric moved since `before`; waits until none moves any more: the engine may have more to send."""
        seen = None
        while (now := self.metrics()) != seen:
            seen = now
            time.sleep(1)
        return {key: value - before.get(key, 0) for key, value in now.items()}


@contextmanager
def running(model, log, *arguments):
    """A server until the block ends."""
    keeper, port = reserve_port()
    command = vllm("serve", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port))
    with open(log, "w") as output:
        process = subprocess.Popen(
            [*command, *ENGINE, *arguments],
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.time() + 300
        while True:
            assert process.poll() is None and time.time() < deadline, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        yield Server(f"http://127.0.0.1:{port}", log)
    finally:
        keeper.close()
        with suppress(ProcessLookupError):  # a server that ended by itself
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with running(tiny, log, "--enable-prompt-embeds", "--enable-scale-out") as server:
        yield server


def test_the_log_says_what_the_server_does(server):
    (line,) = re.findall(r"KV policy h2o .*", server.log)
    assert "budget=256" in line and "model runner V1" in line and "backend CPU_ATTN" in line
    assert re.search(r"and hold \d+ blocks of 32 tokens, under full all their blocks", line)
    assert "requests may use full, h2o, sink-window" in line


def test_the_example_of_a_client(server):
    example = Path(__file__).parents[2] / "examples/online_client.py"
    done = subprocess.run(
        [sys.executable, example, f"{server.address}/v1"], capture_output=True, text=True, timeout=120
    )
    first, second, third = done.stdout.splitlines()
    assert first.startswith("the server: ") and "sink-window" in second and first.endswith("+ 64 tokens")
    assert "unknown KV policy 'nothing-of-the-kind': expected one of: " in third and not done.returncode


def test_the_dashboard_asks_for_metrics_that_are_there(server):
    text = urllib.request.urlopen(f"{server.address}/metrics").read().decode()
    labels = {
        name: set(re.findall(r'(\w+)="', inside)) for name, inside in re.findall(r"^([\w:]+)\{([^}]*)\}", text, re.M)
    }
    board = (Path(__file__).parents[2] / "examples/grafana.json").read_text()
    asked = {
        query for panel in json.loads(board)["panels"] for target in panel["targets"] for query in [target["expr"]]
    }
    # Metrics of servers with evict: host, with audit, or under pressure.
    shared, shown = (
        labels["vllm:kv_evict_blocks_resident"],
        [*Reaching.metrics.values(), *Audits.metrics.values(), *Pressure.metrics.values()],
    )
    for metric in (each for each in shown if each.name != "audit_share"):
        total = "_total" * (metric.kind == "counter")
        labels[f"vllm:kv_evict_{metric.name}{total}"] = {*shared, *filter(None, [metric.label])}
    for query in asked:
        by = {*re.findall(r"by \((\w+)\)", query), *re.findall(r"(\w+)=~", query)}
        assert all(by <= labels[name] for name in re.findall(r"vllm:\w+", query)), query
    ours = {name for name in labels if name.startswith("vllm:kv_evict") and not name.endswith("_created")}
    assert ours == set(re.findall(r"vllm:kv_evict\w+", " ".join(asked)))


def test_completions_are_evicted_from_and_metrics_move(server):
    before = server.metrics()
    answer = server.complete()
    assert answer.usage.completion_tokens == 40 and len(answer.choices[0].text.split()) == 40
    moved = server.moved(before)
    # The prompt's 13 blocks are more than 9 and go back to 8; one more is begun by token 417.
    assert moved["blocks_evicted_total", "h2o"] == 5 == moved["blocks_freed_total", "h2o"]
    assert moved["blocks_shared_total", "h2o"] == 0 and moved["requests_total", "h2o"] == 1
    assert moved["blocks_evicted_total", "sink-window"] == moved["blocks_evicted_total", "full"] == 0
    assert server.metrics()["blocks_resident", "h2o"] == 0


def test_a_streamed_chat_is_evicted_from(server):
    before = server.metrics()
    stream = server.client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": " ".join(WORDS[100:500])}],
        max_tokens=400,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "vllm_xargs": {"kv_policy": "sink-window", "kv_budget": 192}},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    # As they are made; where vLLM's front end gets little of the CPU, it puts some together.
    assert len(text.split()) == 400 and len(chunks) > 10
    assert chunks[-1].usage.completion_tokens == 400
    moved = server.moved(before)
    assert moved["blocks_evicted_total", "sink-window"] >= 7 and moved["requests_total", "sink-window"] == 1
    assert moved["blocks_evicted_total", "h2o"] == 0


BAD = [
    ({"kv_policy": "h3o"}, "unknown KV policy 'h3o': did you mean 'h2o'?"),
    ({"kv_budget": 512}, "above the server's 256"),
    ({"kv_buget": 128}, "'kv_buget'"),
    ({"kv_policy": "full", "kv_budget": 64}, "takes no kv_budget"),
    ({"kv_usage": "yes"}, "kv_usage must be true or false"),
]


@pytest.mark.parametrize("xargs, reason", BAD, ids=[str(xargs) for xargs, _ in BAD])
def test_bad_requests_are_http_400_with_the_reason_and_the_server_goes_on(server, xargs, reason):
    with pytest.raises(openai.BadRequestError) as refused:
        server.complete(xargs=xargs)
    assert refused.value.status_code == 400 and reason in refused.value.message
    assert server.complete("t1 t2 t3", max_tokens=3).usage.completion_tokens == 3


MESSAGES = [{"role": "user", "content": PROMPT}]
TOKENS = {"token_ids": [i * 7 % 256 for i in range(400)], "sampling_params": {"max_tokens": 40, "ignore_eos": True}}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
#: Ways to the engine that the clients above don't take, and what they are asked.
ENDPOINTS = {
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 40},
    "/v1/chat/completions/batch": {"messages": [MESSAGES, MESSAGES], "max_tokens": 40},
    "/inference/v1/generate": TOKENS,
    "/invocations": {"prompt": PROMPT, "max_tokens": 40},
}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_other_ways_to_the_engine_take_the_same(server, path):
    body = ENDPOINTS[path]

    def ask(xargs, **options):
        request = {"model": "tiny", **body, **options}
        if "sampling_params" in request:
            request["sampling_params"] = {**request["sampling_params"], "extra_args": xargs}
        else:
            request["vllm_xargs"] = xargs
        return httpx.post(f"{server.address}{path}", json=request, timeout=120)

    before, several = server.metrics(), path.endswith("batch")
    answer = ask({"kv_usage": True, "kv_budget": 160})
    assert answer.status_code == 200
    assert server.moved(before)["blocks_evicted_total", "h2o"] >= 8
    usages = answer.json()["usage"]["kv_usage"]
    assert [one["budget_tokens"] for one in (usages if several else [usages])] == [160] * (1 + several)
    for options in ({},) if several else ({}, {"stream": True}):
        refused = ask({"kv_budget": 512}, **options)
        assert refused.status_code == 400 and "above the server's 256" in refused.json()["error"]["message"]
    if not several:
        *_, last = (line for line in ask({"kv_usage": True}, **STREAMED).text.splitlines() if '"usage"' in line)
        assert json.loads(last.removeprefix("data: "))["usage"]["kv_usage"]["policy"] == "h2o"


def test_beams_have_what_their_search_asks_for(server):
    def ask(xargs, words, chat):
        text = " ".join(words)
        body = {"model": "tiny", "n": 2, "max_tokens": 3, "extra_body": {"use_beam_search": True, "vllm_xargs": xargs}}
        if chat:
            return server.client.chat.completions.create(messages=[{"role": "user", "content": text}], **body)
        return server.client.completions.create(prompt=text, **body)

    for chat, words in ((False, WORDS[3:403]), (True, WORDS[5:405])):
        before = server.metrics()
        assert len(ask({"kv_policy": "sink-window", "kv_budget": 192}, words, chat).choices) == 2
        moved = server.moved(before)
        # Later tokens hit what the first one's request has published, and end with the step that computes the rest.
        assert moved["requests_total", "sink-window"] == 1 and moved["requests_total", "h2o"] == 0
        for bad, reason in (({"kv_budget": 512}, "above the server's 256"), ({"kv_buget": 128}, "'kv_buget'")):
            with pytest.raises(openai.BadRequestError, match=reason):
                ask(bad, words, chat)
    assert server.complete(xargs={"kv_usage": True}).usage.kv_usage["policy"] == "h2o"


def test_many_clients_with_policies_of_their_own(server):
    before = server.metrics()
    wishes = [None, {"kv_policy": "sink-window"}, {"kv_policy": "full"}, {"kv_budget": 160}, {"kv_buget": 1}] * 4

    def ask(number):
        prompt = " ".join(WORDS[number * 10 : number * 10 + 330])
        try:
            return server.complete(prompt, max_tokens=30, xargs=wishes[number]).usage.completion_tokens
        except openai.BadRequestError:
            return "refused"

    with ThreadPoolExecutor(len(wishes)) as pool:
        answers = list(pool.map(ask, range(len(wishes))))
    assert answers == [30, 30, 30, 30, "refused"] * 4
    moved = server.moved(before)
    assert moved["requests_total", "h2o"] == 8 and moved["requests_total", "sink-window"] == 4
    for policy in ("h2o", "sink-window", "full"):
        assert (
            moved["blocks_freed_total", policy] + moved["blocks_shared_total", policy]
            == (moved["blocks_evicted_total", policy])
        )
        assert server.metrics()["blocks_resident", policy] == 0
    assert moved["requests_total", "full"] == 0


USAGE = {
    "policy": "h2o",
    "budget_tokens": 256,
    "peak_resident_blocks": 13,
    "peak_resident_tokens": 416,
    "evicted_blocks": 5,
    "evicted_tokens": 160,
}


@pytest.mark.parametrize("asks", [True, 1])
def test_a_completion_has_its_usage_if_it_asks(server, asks):
    prompt = " ".join(WORDS[7:407])
    assert server.complete(prompt, xargs={"kv_usage": asks}).usage.kv_usage == USAGE
    for xargs in (None, {"kv_usage": False}, {"kv_policy": "h2o"}):
        assert not hasattr(server.complete(prompt, xargs=xargs).usage, "kv_usage")


def test_each_choice_has_its_usage(server):
    answer = server.complete(xargs={"kv_usage": True}, n=3, temperature=1)
    usages = answer.usage.kv_usage
    assert len(usages) == len(answer.choices) == 3
    for usage in usages:
        assert usage["policy"] == "h2o" and usage["evicted_blocks"] >= 5


def test_each_of_many_prompts_has_its_usage(server):
    answer = server.complete([" ".join(WORDS[11:411]), "t1 t2"], xargs={"kv_usage": True})
    assert [usage["evicted_blocks"] for usage in answer.usage.kv_usage] == [5, 0]


def test_a_chat_has_its_usage_if_it_asks(server):
    def ask(**xargs):
        return server.client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": " ".join(WORDS[:400])}],
            max_tokens=40,
            extra_body={"ignore_eos": True, "vllm_xargs": xargs},
        )

    usage = ask(kv_usage=True, kv_policy="sink-window", kv_budget=192).usage.kv_usage
    assert (usage["policy"], usage["budget_tokens"]) == ("sink-window", 192) and usage["evicted_blocks"] >= 7
    assert not hasattr(ask().usage, "kv_usage")


def test_a_response_has_its_usage_if_it_asks_streamed_or_not(server):
    body = {"model": "tiny", "input": " ".join(WORDS[:300]), "max_output_tokens": 20, "store": False}
    body["extra_body"] = {"vllm_xargs": {"kv_usage": True}}
    assert server.client.responses.create(**body).usage.kv_usage["policy"] == "h2o"
    *_, last = server.client.responses.create(**body, stream=True)
    assert last.response.usage.kv_usage["policy"] == "h2o"


@pytest.mark.parametrize("continuous", [False, True])
def test_a_stream_has_its_usage_with_its_counts_of_tokens(server, continuous):
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    chunks = list(server.complete(" ".join(WORDS[13:413]), xargs={"kv_usage": 1}, stream=True, stream_options=options))
    shown = [getattr(chunk.usage, "kv_usage", None) for chunk in chunks]
    # On a busy machine a chunk has several tokens.
    assert len(chunks) > 2 and set(map(str, shown[:-2])) == {"None"} and shown[-1] == USAGE
    assert not any(chunk.usage for chunk in server.complete(xargs={"kv_usage": True}, stream=True))


def test_a_client_that_hangs_up_leaves_nothing_behind(server):
    # On a busy machine a whole answer may be computed before the first look, more than once.
    resident, deadline = 0, time.time() + 90
    while not resident and time.time() < deadline:
        stream = server.complete(" ".join(WORDS[:400]), max_tokens=1500, stream=True)
        resident = max(server.metrics()["blocks_resident", "h2o"] for _ in zip(range(200), stream))
        stream.close()
    assert resident > 0
    deadline = time.time() + 30
    while server.metrics()["blocks_resident", "h2o"] and time.time() < deadline:
        server.complete("t1", max_tokens=1)
        time.sleep(0.2)
    assert server.metrics()["blocks_resident", "h2o"] == 0


@pytest.mark.nightly
def test_a_batch_file_has_a_bad_line_answered_by_its_own_error(tiny, tmp_path):
    """`vllm run-batch`, without a server."""
    wishes = {"plain": None, "asks": {"kv_usage": True, "kv_budget": 192}, "wrong": {"kv_budget": 512}}
    body = {"model": str(tiny), "messages": MESSAGES, "max_tokens": 20, "ignore_eos": True}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {**body, "vllm_xargs": xargs}}
        for name, xargs in wishes.items()
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = vllm("run-batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"))
    done = subprocess.run(
        [*command, "--model", str(tiny), *ENGINE], env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers = {(line := json.loads(text))["custom_id"]: line for text in (tmp_path / "out.jsonl").open()}
    assert {name: line["response"]["status_code"] for name, line in answers.items()} == {
        "plain": 200,
        "asks": 200,
        "wrong": 400,
    }
    assert "above the server's 256" in answers["wrong"]["error"]["error"]["message"]
    usage = answers["asks"]["response"]["body"]["usage"]["kv_usage"]
    assert usage["budget_tokens"] == 192 and usage["evicted_blocks"] >= 7


@pytest.mark.nightly
def test_help_shows_the_flag():
    done = subprocess.run(vllm("serve", "--help=all"), env=environment(), capture_output=True, text=True, timeout=300)
    assert "--kv-policy" in done.stdout, done.stdout[-500:] + done.stderr[-2000:]
    text = "".join(done.stdout.split())  # lines may break at hyphens
    assert "KVpolicy" in text and "sink-window" in text and "budget" in text and "YAML" in text


def test_a_bad_flag_is_one_clear_message(tiny):
    command = vllm("serve", str(tiny), "--kv-policy", '{"name": "h2o", "buget": 512}')
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "'h2o' has no field 'buget': did you mean 'budget'?" in done.stderr
    assert "Traceback" not in done.stderr
