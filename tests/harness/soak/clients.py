"""Random clients of a server, 64 at a time: good ones, bad ones, slow ones. Each checks its own answer."""

import asyncio
import json
import random
import time
from collections import Counter

import httpx
import openai

#: Requests under way at once.
AT_ONCE = 64
WISHES = [
    None,
    {},
    {"kv_policy": "sink-window"},
    {"kv_policy": "sink-window", "kv_budget": 160},
    {"kv_policy": "full"},
    {"kv_policy": "snapkv", "kv_budget": 192},
    {"kv_policy": "keydiff"},
    {"kv_policy": "scissorhands"},
    {"kv_budget": 128},
    {"kv_budget": "160", "kv_sink": 64},
    {"kv_budget": 0.25, "kv_policy": "sink-window"},
    {"kv_usage": True},
]
BAD = [
    {"kv_policy": "h3o"},
    {"kv_budget": 512},
    {"kv_budget": -1},
    {"kv_budget": "many"},
    {"kv_budget": [1, 2]},
    {"kv_buget": 128},
    {"kv_policy": "full", "kv_budget": 64},
    {"kv_usage": "yes"},
    {"kv_policy": "h2o" * 100_000},
    {"kv_budget": "9" * 100_000},
]
#: Bodies that are no request.
TORN = [b"", b"{", b"[]", b"\xff\xfe\x00", b'{"model": "tiny", "prompt": ' + b"[" * 5000, b'{"model": 5}', b"null"]


def words(rng, count):
    return " ".join(f"t{rng.randrange(256)}" for _ in range(count))


class Load:
    """Random requests to one server.

    Args:
        server: that runs.
        seed: of the requests. Their timing depends on the machine.
        policies: whether the server has policies; False: requests have no `vllm_xargs`.

    Attributes:
        counts: kinds of clients and of results.
        probes: requests from which nothing is evicted, so that their answers do not depend on other requests.
        answers: number of a probe -> its text on a quiet server.
        faults: what clients complain of.
    """

    def __init__(self, server, seed=0, policies=True):
        self.server, self.rng, self.policies = server, random.Random(seed), policies
        self.counts, self.answers = Counter(), {}
        rng = random.Random(f"probes {seed}")
        self.probes = [
            {"prompt": words(rng, count), "max_tokens": 24, "vllm_xargs": wish}
            for count in (3, 40, 150, 220, 400, 700)
            for wish in ({"kv_policy": "full"}, *([{}, {"kv_policy": "sink-window"}] if count < 200 else []))
        ]
        self.faults = []

    def ask_quietly(self):
        """Ask `probes` one after the other of a server that does nothing else.

        The last request is larger than 64 KiB. With the first message of that size pyzmq starts its garbage collector:
        a thread, a ZMQ context and seven open files, which stay.
        """
        with httpx.Client(timeout=120) as client:
            for number, probe in enumerate(self.probes):
                answer = client.post(f"{self.server.address}/v1/completions", json=self._body(probe))
                self.answers[number] = answer.json()["choices"][0]["text"]
            large = self._body({"prompt": "t1", "max_tokens": 2, "stop": ["s" * 100_000]})
            assert client.post(f"{self.server.address}/v1/completions", json=large).status_code == 200

    def _body(self, options):
        body = {"model": "tiny", "temperature": 0, "ignore_eos": True, **options}
        if not self.policies or body.get("vllm_xargs") is None:
            body.pop("vllm_xargs", None)
        return body

    def round(self, requests):
        """Run this many clients, `AT_ONCE` at a time, and wait for their answers."""
        asyncio.run(self._round(requests))

    async def _round(self, requests):
        room = asyncio.Semaphore(AT_ONCE)
        # The server closes idle connections after 5 seconds, and a request may meet one that is being closed.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=AT_ONCE, keepalive_expiry=1)
        async with httpx.AsyncClient(timeout=300, limits=limits) as self.http:
            self.openai = openai.AsyncOpenAI(
                base_url=f"{self.server.address}/v1", api_key="none", max_retries=0, http_client=self.http
            )
            kinds = [self.complete, self.stream, self.chat, self.probe, self.hang_up, self.cancel, self.bad]
            kinds += [self.huge, self.slow, self.torn, self.several, self.scrape]
            weights = [20, 15, 8, 15, 10, 8, 8, 3, 3, 4, 6, 1]

            async def one(kind):
                async with room:
                    self.counts[kind.__name__] += 1
                    try:
                        await kind()
                    except (httpx.TimeoutException, openai.APITimeoutError) as error:
                        self.faults.append(f"{kind.__name__}: {type(error).__name__} {error}"[:500])
                    except (httpx.TransportError, openai.APIConnectionError, OSError):
                        # Under this load stock vLLM's HTTP server drops one connection in thousands, too.
                        self.counts["connections lost"] += 1
                    except openai.APIError as error:
                        self.faults.append(f"{kind.__name__}: {type(error).__name__} {error}"[:500])
                    except AssertionError as error:
                        self.faults.append(f"{kind.__name__}: {error}"[:500])

            await asyncio.gather(*(one(kind) for kind in self.rng.choices(kinds, weights, k=requests)))

    # --- kinds of clients ---

    def _request(self, longest=600):
        return {
            "prompt": words(self.rng, int(3 * (longest / 3) ** self.rng.random())),
            "max_tokens": self.rng.choice([1, 2, 10, 30, 60, 120]),
            "vllm_xargs": self.rng.choice(WISHES),
        }

    async def _post(self, body, path="/v1/completions", **options):
        return await self.http.post(f"{self.server.address}{path}", json=self._body(body), **options)

    async def complete(self):
        request = self._request()
        answer = await self._post(request)
        assert answer.status_code == 200, f"{answer.status_code} {answer.text[:300]}"
        assert answer.json()["usage"]["completion_tokens"] == request["max_tokens"], answer.text[:300]
        self.counts["tokens"] += request["max_tokens"]

    async def several(self):
        request = self._request(300) | {"n": 3, "temperature": 1, "logprobs": 1}
        request |= self.rng.choice([{}, {"stop": ["t7 ", "t100 "]}])
        answer = await self._post(request)
        assert answer.status_code == 200, f"{answer.status_code} {answer.text[:300]}"
        assert len(answer.json()["choices"]) == 3, answer.text[:300]

    async def stream(self):
        request = self._body(self._request())
        extra = {key: request.pop(key) for key in ("ignore_eos", "vllm_xargs") if key in request}
        chunks = await self.openai.completions.create(
            **request, extra_body=extra, stream=True, stream_options={"include_usage": True}
        )
        last = None
        async for chunk in chunks:
            last = chunk
        assert last is not None and last.usage is not None, "a stream without an end"
        assert last.usage.completion_tokens == request["max_tokens"], f"{last.usage}"
        self.counts["tokens"] += request["max_tokens"]

    async def chat(self):
        request = self._body(self._request())
        message = {"role": "user", "content": request.pop("prompt")}
        extra = {key: request.pop(key) for key in ("ignore_eos", "vllm_xargs") if key in request}
        answer = await self.openai.chat.completions.create(**request, messages=[message], extra_body=extra)
        assert answer.usage.completion_tokens == request["max_tokens"], f"{answer.usage}"

    async def probe(self):
        number = self.rng.randrange(len(self.probes))
        answer = await self._post(self.probes[number])
        assert answer.status_code == 200, f"{answer.status_code} {answer.text[:300]}"
        said = answer.json()["choices"][0]["text"]
        assert said == self.answers[number], f"probe {number} says {said!r}, and said {self.answers[number]!r}"
        self.counts["same answers"] += 1

    async def hang_up(self):
        body, chunks = self._body(self._request() | {"stream": True, "max_tokens": 400}), self.rng.choice([0, 1, 3, 20])
        async with self.http.stream("POST", f"{self.server.address}/v1/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                chunks -= 1
                if chunks < 0:
                    break

    async def cancel(self):
        try:
            await self._post(self._request() | {"max_tokens": 400}, timeout=self.rng.choice([0.01, 0.1, 0.5, 1]))
        except httpx.TimeoutException:
            self.counts["cancelled"] += 1

    async def bad(self):
        if not self.policies:
            return
        answer = await self._post(
            self._request() | {"vllm_xargs": self.rng.choice(BAD), "stream": self.rng.random() < 0.3}
        )
        assert answer.status_code == 400, f"{answer.status_code} {answer.text[:300]}"
        assert len(answer.text) < 3000, f"an answer of {len(answer.text)} characters"

    async def huge(self):
        request = self.rng.choice(
            [
                {"prompt": words(self.rng, 50_000)},
                {"prompt": "t1", "vllm_xargs": {f"key{i}": i for i in range(2000)}},
                {"prompt": "t1", "vllm_xargs": {"kv_policy": "x" * 1_000_000}},
                {"prompt": "t1", "stop": ["s" * 100_000]},
                {"prompt": "t1", "user": "u" * 1_000_000},
            ]
        )
        answer = await self._post({"max_tokens": 2, **request})
        assert answer.status_code in (200, 400, 413), f"{answer.status_code} {answer.text[:300]}"

    async def slow(self):
        """Read a stream 256 bytes at a time for a while, then hang up."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port, limit=1024)
        try:
            body = json.dumps(self._body(self._request() | {"stream": True, "max_tokens": 200})).encode()
            writer.write(_head(len(body)) + body)
            until = time.monotonic() + self.rng.choice([0.5, 2, 5])
            while time.monotonic() < until and await reader.read(256):
                await asyncio.sleep(0.05)
        finally:
            writer.close()

    async def torn(self):
        body, length = self.rng.choice(TORN), self.rng.choice([0, 0, 1000])
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        try:
            writer.write(_head(len(body) + length) + body)
            if not length:
                status = await asyncio.wait_for(reader.readline(), 60)
                assert status.split()[1:2] in ([b"400"], [b"422"]), f"{body[:40]}: {status}"
        finally:
            writer.close()

    async def scrape(self):
        answer = await self.http.get(f"{self.server.address}/metrics")
        assert answer.status_code == 200, f"{answer.status_code} of /metrics"


def _head(length):
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}connection: close\r\ncontent-length: {length}\r\n\r\n".encode()
