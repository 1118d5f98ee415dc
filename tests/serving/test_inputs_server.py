"""Wrong inputs over HTTP to one real server: each an answer of the client's fault, at little cost to all others."""

import base64
import io
import itertools
import json
import os
import statistics
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch
from loads import inputs
from test_server import MESSAGES, PROMPT, TOKENS, server  # noqa: F401

pytestmark = pytest.mark.minutes

CASES = int(os.environ.get("VLLM_EVICT_INPUTS", "300"))
#: CPU seconds of all of the server's processes for a wrong request, beyond those for a stock request of its size. The
#: figure is far lower; the margin is for a machine that others use.
MOST_SECONDS = 0.05


def cpu_seconds(group):
    """CPU time so far of all processes in a process group."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def bodies(seed, longest):
    """Bodies of completions with something wrong in `vllm_xargs`: (where, bytes)."""
    right = {"model": "tiny", "prompt": "t1 t2", "max_tokens": 1}
    raw = [
        b'{"kv_budget": NaN}',
        b'{"kv_budget": 1e999}',
        b'{"kv_budget": "\\ud800"}',
        b'{"kv_budget": "\xff"}',
        b'{"kv_budget": ',
    ]
    raw += [
        b'{"kv_\\ud800budget": 1}',
        b'"kv_budget"',
        b"[1]",
        b'{"kv_budget": ' + b"[" * 900 + b"]" * 900 + b"}",
        b"7",
    ]
    raw += [
        b'{"kv_budget": ' + b"9" * 5000 + b"}",
        b'{"kv_budget": "' + b"9" * longest + b'"}',
        b'{"kv_policy": "' + b"x" * longest + b'"}',
    ]
    raw += [b"{" + b", ".join(b'"kv_budgetx%d": 1' % i for i in range(longest // 20)) + b', "kv_window": 1}']
    front = json.dumps(right)[:-1].encode() + b', "vllm_xargs": '
    for value in raw:
        yield "body", front + value + b"}"
    for case in inputs.in_request(seed, longest, json_only=True):
        if isinstance(next(iter(case.value.values())), bool):
            continue  # vLLM's models of requests make a number of it
        yield case.where, json.dumps({**right, "vllm_xargs": case.value}).encode()


class Bystander(threading.Thread):
    """Another client: one small completion after the other, until it is told to stop; `seconds` of each."""

    def __init__(self, address):
        super().__init__(daemon=True)
        self.address, self.seconds, self.wrong = address, [], []
        self.began, self.stopped = threading.Event(), threading.Event()

    def run(self):
        body = {"model": "tiny", "prompt": "t1 t2 t3", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        try:
            with httpx.Client(timeout=60) as client:
                while not self.stopped.is_set():
                    before = time.perf_counter()
                    answer = client.post(f"{self.address}/v1/completions", json=body)
                    self.seconds.append(time.perf_counter() - before)
                    if answer.status_code != 200:
                        self.wrong.append(answer.text)
                    self.began.set()
        except httpx.HTTPError as error:
            self.wrong.append(repr(error))

    @classmethod
    def beside(cls, address, work):
        """Return the result of `work`, and the client: it has an answer before the work begins, and asks until it ends."""
        client = cls(address)
        client.start()
        try:
            assert client.began.wait(60), "the other client has no answer"
            return work(), client
        finally:
            client.stopped.set()
            client.join(60)
            assert not client.is_alive(), "the other client waits for an answer"

    def __str__(self):
        seconds = sorted(self.seconds)
        return f"{len(seconds)} requests, median {1e3 * statistics.median(seconds):.0f} ms, p99 {1e3 * seconds[int(0.99 * len(seconds))]:.0f} ms"


def group_of(address):
    """Process group of the server that listens on an address."""
    port = f"--port\0{address.rpartition(':')[2]}\0".encode()
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if port in command.read_bytes():
                return int(command.with_name("stat").read_text().rpartition(")")[2].split()[2])
        except OSError:
            continue
    raise AssertionError("no such server")


def send(server, sent):  # noqa: F811
    """Send bodies one by one: (status, text) of each answer."""
    answers = []
    with httpx.Client(timeout=120, headers={"content-type": "application/json"}) as client:
        for place, (_, body) in enumerate(sent):
            try:
                answer = client.post(f"{server.address}/v1/completions", content=body)
            except httpx.TransportError as error:
                raise AssertionError(f"no answer to body {place}, {body[:200]}; log: {server.log[-3000:]}") from error
            answers.append((answer.status_code, answer.text))
    return answers


def test_wrong_requests_are_the_clients_fault_and_cost_others_nothing(server):  # noqa: F811
    """Each gets a 4xx that says what is wrong; nothing is logged as an error; the books and a right answer are as
    before.
    """
    sent = list(itertools.islice(bodies(3, 1_000_000), CASES))
    # As many bytes in an argument that is another extension's: what stock vLLM takes to read them.
    stock = [
        (
            "other",
            json.dumps(
                {"model": "tiny", "prompt": "t1", "max_tokens": 1, "vllm_xargs": {"other": "x" * len(body)}}
            ).encode(),
        )
        for _, body in sent
    ]
    right = server.complete(PROMPT, max_tokens=20, xargs={"kv_policy": "full"}).choices[0].text
    group = group_of(server.address)
    begin, log = cpu_seconds(group), len(server.log)
    _, quiet = Bystander.beside(server.address, lambda: time.sleep(5))
    beside_quiet = (cpu_seconds(group) - begin) / len(quiet.seconds)
    figures = {}
    for name, bodies_sent in (("stock", stock), ("wrong", sent)):
        begin = cpu_seconds(group)
        answers, other = Bystander.beside(server.address, lambda: send(server, bodies_sent))
        spent = cpu_seconds(group) - begin - beside_quiet * len(other.seconds)
        figures[name] = max(spent, 0) / len(sent)
        assert not other.wrong, other.wrong
        print(f"{name}: {len(sent)} bodies, {figures[name] * 1e3:.1f} ms of CPU time each; other client: {other}")
    print(f"quiet: other client: {quiet}")
    for (where, body), (status, text) in zip(sent, answers):
        assert 400 <= status < 500, (status, where, body[:300], text[:300])
        assert (
            where in ("body", "unknown field")
            or where.removeprefix("kv_") in text
            or "vllm_xargs" in text
            or "extra_args" in text
        ), (
            where,
            text,
        )
        assert len(text) < 3000 + 2 * len(body), (where, len(text))
    assert figures["wrong"] - figures["stock"] < MOST_SECONDS
    assert "Traceback" not in server.log[log:] and "ERROR" not in server.log[log:], server.log[log:][-3000:]
    assert server.complete(PROMPT, max_tokens=20, xargs={"kv_policy": "full"}).choices[0].text == right
    assert server.metrics()["blocks_resident", "h2o"] == 0


def embeddings(tokens):
    """A prompt of embeddings, as clients send it."""
    file = io.BytesIO()
    torch.save(torch.zeros(tokens, 64), file)
    return base64.b64encode(file.getvalue()).decode()


BEAMS = {"use_beam_search": True, "n": 2}
#: Every endpoint that asks the engine, and every form of a prompt: (path, body, whether it streams).
ASKED = {
    "completion": ("/v1/completions", {"prompt": PROMPT}, True),
    "completion of tokens": ("/v1/completions", {"prompt": TOKENS["token_ids"]}, True),
    "completion of embeddings": ("/v1/completions", {"prompt_embeds": embeddings(300)}, True),
    "completion of text and embeddings": ("/v1/completions", {"prompt": "t1", "prompt_embeds": embeddings(300)}, True),
    "completion of several": ("/v1/completions", {"prompt": ["t1", PROMPT]}, True),
    "several completions": ("/v1/completions", {"prompt": PROMPT, "n": 2}, True),
    "beams of a completion": ("/v1/completions", {"prompt": PROMPT, **BEAMS}, False),
    "beams of embeddings": ("/v1/completions", {"prompt_embeds": embeddings(300), **BEAMS}, False),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}, True),
    "several chats": ("/v1/chat/completions", {"messages": MESSAGES, "n": 2}, True),
    "beams of a chat": ("/v1/chat/completions", {"messages": MESSAGES, **BEAMS}, True),
    "response": ("/v1/responses", {"input": PROMPT}, True),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 40}, True),
    "batch of chats": ("/v1/chat/completions/batch", {"messages": [MESSAGES, MESSAGES]}, False),
    "tokens": ("/inference/v1/generate", TOKENS, True),
    "invocation": ("/invocations", {"prompt": PROMPT}, True),
}
SCORES = {"query": "t1", "items": ["t2", "t3"], "label_token_ids": [1, 2]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", ASKED)
def test_a_bad_request_is_http_400_before_its_answer_begins(server, asked, stream):  # noqa: F811
    """Not HTTP 200 with an error in the stream."""
    path, body, streams = ASKED[asked]
    if stream and not streams:
        pytest.skip("vLLM does not stream it")
    body = {"model": "tiny", **body, "stream": stream}

    def refusal(**fields):
        answer = httpx.post(f"{server.address}{path}", json=body | fields, timeout=120)
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]["message"]

    in_place = "sampling_params" if "sampling_params" in body else "vllm_xargs"
    for bad, reason in (({"kv_budget": 512}, "above the server's 256"), ({"kv_buget": 128}, "'kv_buget'")):
        given = {**body["sampling_params"], "extra_args": bad} if in_place == "sampling_params" else bad
        assert reason in refusal(**{in_place: given})
    in_parts = []
    if in_place == "sampling_params":
        for bad in ({"kv_sink": 64}, {"vllm_xargs": {"kv_sink": 64}}):
            in_parts.append(({in_place: body[in_place] | bad}, "kv_sink in sampling_params"))
    elif stream and "completions" in path:
        in_parts.append(({"stream_options": {"include_usage": True, "kv_sink": 64}}, "kv_sink in stream_options"))
    # What vLLM would drop unseen: clients forget `vllm_xargs`, or send what Python's client takes as arguments.
    for bad, where in (
        ({"kv_budget": 128}, "kv_budget"),
        ({"kv_policy": "full", "vllm_xargs": {"kv_usage": True}}, "kv_policy"),
        ({"extra_args": {"kv_budget": 128}}, "kv_budget in extra_args"),
        ({"extra_body": {"vllm_xargs": {"kv_sink": 64}}}, "kv_sink in extra_body"),
        *in_parts,
    ):
        said = refusal(**bad)
        assert f'{where} would be ignored: a request sets it as {{"{in_place}": {{' in said


@pytest.mark.parametrize("bad", [{"kv_budget": 128}, {"vllm_xargs": {"kv_policy": "full"}}])
def test_scores_take_no_policy_of_a_client(server, bad):  # noqa: F811
    ask = lambda **fields: httpx.post(  # noqa: E731
        f"{server.address}/generative_scoring", json={"model": "tiny", **SCORES, **fields}, timeout=120
    )
    answer = ask(**bad)
    assert answer.status_code == 400 and "run under the server's policy; leave it out" in answer.text
    assert ask(vllm_xargs={"other": 1}).status_code == 200


def test_arguments_of_other_extensions_pass(server):  # noqa: F811
    assert server.complete("t1 t2", max_tokens=2, xargs={"other": 1}).usage.completion_tokens == 2
