"""Rounds of load on one server, and what an idle server holds after each of them."""

import os
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx

#: Bytes by which a process may grow over the second half of the rounds.
GROWTH = 16 << 20
#: Open files that a process may gain.
FEW = 2
#: Threads that a process may gain: asyncio's executor starts them on demand, up to this number.
THREADS = min(32, (os.cpu_count() or 1) + 4)
#: Python objects that a process may gain, beside a twentieth of what it has.
OBJECTS = 100
#: Objects of a connection. uvicorn remembers one that a client has reset until its keep-alive timer ends.
OF_A_CONNECTION = 40
#: Types of uvicorn: one object for each connection.
CONNECTIONS = ("HttpToolsProtocol", "H11Protocol")
#: Metrics that are 0 on an idle server.
ZERO = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:kv_evict_blocks_resident",
)


@dataclass
class Quiet:
    """Sizes of an idle server after a round.

    Attributes:
        requests: number of requests so far.
        fault: the fault of the round.
        samples: process id -> `server.Sample`.
        books: see `Server.books`.
        series: of vLLM's and the plugin's metrics.
        gauges: `ZERO` -> its sum over labels.
    """

    requests: int
    fault: str
    samples: dict
    books: dict
    series: int
    gauges: dict = field(default_factory=dict)


def at_rest(server, load, fault="", patience=60):
    """Wait until the server is idle and has closed its connections, and look at it.

    A connection that is kept alive is an open file until the server closes it, after some seconds.
    """

    deadline = time.monotonic() + patience
    while True:
        # The scheduler sends gauges with a step, so one step has to follow the last request.
        httpx.post(
            f"{server.address}/v1/completions", json={"model": "tiny", "prompt": "t1", "max_tokens": 2}, timeout=60
        )
        time.sleep(0.5)
        metrics = server.metrics()
        gauges = {name: sum(v for k, v in metrics.items() if k.split("{")[0] == name) for name in ZERO}
        connections = server.connections()
        if not any(gauges.values()) and not connections:
            break
        assert time.monotonic() < deadline, f"not idle: {gauges}, {connections} connections"
    asked = sum(value for name, value in load.counts.items() if hasattr(load, name))
    # Series of HTTP appear with the first answer of each status.
    series = sum(name.startswith("vllm:") for name in metrics)
    return Quiet(asked, fault, server.samples(), server.books(), series, gauges)


def soak(server, load, rounds, requests, say=lambda line: None):
    """Run rounds, each under one fault ("": none). Returns a `Quiet` for each.

    Args:
        rounds: faults, in order.
        requests: number of requests in each round.
        say: called with a line after each round.
    """
    found = []
    for fault in rounds:
        server.break_(fault)
        start = time.monotonic()
        load.round(requests)
        server.break_("")
        found.append(at_rest(server, load, fault))
        last = found[-1]
        memory = ", ".join(f"{each.name[-12:]} {each.resident >> 20} MiB" for each in last.samples.values())
        objects = ", ".join(f"{name} {sum(held['types'].values())}" for name, held in last.books.items())
        say(
            f"round {len(found)} {fault or '-'}: {last.requests} requests, {time.monotonic() - start:.0f} s; {memory}; "
            f"files {[each.files for each in last.samples.values()]}, threads "
            f"{[each.threads for each in last.samples.values()]}, {last.series} series; objects {objects}; "
            f"{len(load.faults)} complaints"
        )
    return found


def check(load, found, growth=GROWTH):
    """Check answers and books, and that nothing grows in the second half of the rounds.

    Args:
        found: what `soak` returned.
        growth: bytes that a process may gain over the second half.

    Raises:
        AssertionError: something did not hold.
    """
    assert not load.faults, load.faults[:10]
    assert load.counts["same answers"]
    assert load.counts["connections lost"] <= found[-1].requests / 500 + 1, load.counts
    for moment in found:
        assert not any(moment.gauges.values()), moment.gauges
        for name, held in moment.books.items():
            left = {key: value for key, value in held.get("books", {}).items() if value}
            assert not left, f"{name} remembers {left} after {moment.requests} requests"
    half = found[len(found) // 2 :]
    assert len(half) > 1, "too few rounds to see whether anything grows"
    first, last = half[0], half[-1]
    assert first.samples.keys() == last.samples.keys(), "processes came or went"
    assert last.series == first.series, f"/metrics went from {first.series} series to {last.series}"
    for name, held in first.books.items():
        then, now = Counter(held["types"]), Counter(last.books[name]["types"])
        connections = sum(now[each] - then[each] for each in CONNECTIONS)
        most = 1.05 * then.total() + OBJECTS + OF_A_CONNECTION * max(0, connections)
        assert now.total() <= most, (
            f"{name}: {then.total()} objects, then {now.total()}; connections {connections:+}; "
            f"most gained {(now - then).most_common(12)}"
        )
    for pid, before in first.samples.items():
        after = last.samples[pid]
        assert after.files <= before.files + FEW, f"{before.name}: {before.files} files, then {after.files}"
        assert after.threads <= before.threads + THREADS, (
            f"{before.name}: {before.threads} threads, then {after.threads}"
        )
        gained = after.resident - before.resident
        assert gained <= growth, (
            f"{before.name} grew by {gained >> 20} MiB over {last.requests - first.requests} requests"
        )
