"""Ends a server while it answers, and records what its clients get and what is left of it."""

import os
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import httpx

#: Events that end a server.
WAYS = ("SIGTERM", "engine core killed", "worker raises")

#: Of each answer, so that none is whole when its server ends.
TOKENS = 1700
#: Options of servers whose context has room for these.
ROOM = ["--max-model-len", "2048"]
#: Ways that need a step of the engine -> the fault in it.
BREAKS = {"worker raises": "raises", "plan dropped": "plan"}
#: Seconds in which the server's other processes have to end after its own.
PATIENCE = 15


@dataclass
class Death:
    """How a server ended.

    Attributes:
        answers: number of answers that were "whole", an "error" (by status or event), "aborted" (by `finish_reason`),
            "cut" (the connection broke), or "short": they end as whole answers do, with fewer tokens.
        seconds: from the event to the end of the server's process; None: the process did not end.
        status: exit status of that process.
        left: names of processes that still ran `PATIENCE` seconds later.
        shared: files left in /dev/shm that no process maps; those of other tests' engines are mapped.
    """

    way: str
    answers: dict
    seconds: float | None
    status: int | None
    left: list
    shared: list

    def __str__(self):
        end = "did not end" if self.seconds is None else f"ended after {self.seconds:.1f} s with status {self.status}"
        return f"{self.way}: {end}; answers {self.answers}; processes left {self.left}; /dev/shm {self.shared}"


def die(server, way, streams=5, others=3, patience=60):
    """End a server while it answers; afterwards it does not run.

    Args:
        way: one of `WAYS`, or "plan dropped".
        streams, others: number of requests, streamed or not; the pool has room for all of them at once.
        patience: seconds to wait for the end.
    """
    shared_before, answers, lock = set(os.listdir("/dev/shm")), Counter(), threading.Lock()
    prompt = " ".join(f"t{i * 7 % 256}" for i in range(300))
    body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    begun = threading.Semaphore(0)

    def ask(stream):
        what = "cut"
        try:
            with httpx.Client(timeout=120) as client:
                url = f"{server.address}/v1/completions"
                options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
                with client.stream("POST", url, json={**body, **options}) as answer:
                    text = ""
                    for part in answer.iter_text():
                        if stream and not text:
                            begun.release()
                        text += part
            if answer.status_code != 200 or '"error"' in text:
                what = "error"
            elif f'"completion_tokens":{TOKENS}' in text:
                what = "whole"
            elif '"finish_reason":"abort"' in text:
                what = "aborted"
            elif not stream or "[DONE]" in text:
                what = "short"
        except (httpx.HTTPError, OSError):
            pass
        with lock:
            answers[what] += 1

    def ask_all():
        answers.clear()
        clients = [threading.Thread(target=ask, args=(number < streams,)) for number in range(streams + others)]
        for client in clients:
            client.start()
        return clients

    clients = ask_all()
    for _ in range(streams):
        assert begun.acquire(timeout=120), "streams did not begin"
    processes, titles = server.processes(), {pid: each.name for pid, each in server.samples().items()}
    start = time.monotonic()
    if way == "SIGTERM":
        server.process.terminate()
    elif way == "engine core killed":
        os.kill(server.pid_of("EngineCore"), signal.SIGKILL)
    else:
        server.break_(BREAKS[way])
    while (status := server.process.poll()) is None and time.monotonic() < start + patience:
        if way in BREAKS and not any(client.is_alive() for client in clients):
            clients = ask_all()  # the engine was done before the fault was there
        time.sleep(0.1)
    seconds = None if status is None else time.monotonic() - start
    deadline = time.monotonic() + PATIENCE
    while (
        (left := [titles[pid] for pid in processes if _runs(pid)])
        and seconds is not None
        and time.monotonic() < deadline
    ):
        time.sleep(0.2)
    shared = sorted(set(os.listdir("/dev/shm")) - shared_before - _mapped())
    server.stop()
    for client in clients:
        client.join(120)
    return Death(way, dict(answers), seconds, status, left, shared)


def _mapped():
    """Names of the files in /dev/shm that some process maps."""
    names = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            names.update(
                line.rpartition("/dev/shm/")[2] for line in maps.read_text().splitlines() if "/dev/shm/" in line
            )
        except OSError:  # it has ended
            continue
    return names


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
