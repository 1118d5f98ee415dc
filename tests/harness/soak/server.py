"""`vllm serve` and what can be seen of it: its log, its metrics, /proc, and its books (see `faults`)."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ports import reserve_port

from soak import faults

#: The pool has room for five of the longest requests.
OPTIONS = ["--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "1024"]
OPTIONS += ["--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--num-gpu-blocks-override", "160"]
OPTIONS += ["--kv-cache-memory-bytes", str(64 << 20)]
ALLOWED = ["sink-window", "keydiff", "snapkv", "scissorhands", "full"]
POLICY = {"name": "h2o", "budget": 256, "buffer": 32, "sink": 32, "recent": 64, "allow": ALLOWED}


@dataclass
class Sample:
    """Resources of one process.

    Attributes:
        resident: bytes of memory.
        files: open file descriptors.
        threads: of its own.
    """

    name: str
    resident: int
    files: int
    threads: int


class Server:
    """A server, running from `start` to `stop`.

    Args:
        model: directory.
        policy: of the server; None: stock vLLM without the plugin.
        folder: for its log, its control file and its books.
        options: of the command line, after `OPTIONS`.
        settings: of the environment.
    """

    def __init__(self, model, policy, folder, options=(), settings=()):
        self.model, self.policy, self.folder = Path(model).resolve(), policy, Path(folder).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.options, self.settings = list(options), dict(settings)
        self.log_path, self.process = self.folder / "log.txt", None
        self._keeper, self.port = reserve_port()
        self.address = f"http://127.0.0.1:{self.port}"

    def start(self, patience=300):
        command = [os.path.join(os.path.dirname(sys.executable), "vllm"), "serve", str(self.model)]
        command += [
            "--served-model-name",
            "tiny",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            *OPTIONS,
            *self.options,
        ]
        command += [] if self.policy is None else ["--kv-policy", json.dumps(self.policy)]
        settings = {
            **os.environ,
            **faults.environment(self.folder),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            # oneDNN keeps a kernel for each of 1,024 batch sizes. Their memory would hide other growth.
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
            **self.settings,
        }
        if self.policy is None:
            settings["VLLM_PLUGINS"] = "vllm_evict_soak"
        self.break_("")
        with open(self.log_path, "w") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=settings, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        deadline = time.monotonic() + patience
        while True:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log[-4000:]
            try:
                urllib.request.urlopen(f"{self.address}/health", timeout=5)
                return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)

    @property
    def log(self):
        return self.log_path.read_text(errors="replace")

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        """Terminate the server as a service manager does, and kill what is left of it after 30 seconds."""
        if self.process is None:
            return
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def processes(self):
        """Ids of the server's process and of all its descendants."""
        parents = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    stat = (entry / "stat").read_text()
                except (FileNotFoundError, ProcessLookupError):
                    continue
                fields = stat.rsplit(")", 1)[1].split()
                if fields[0] != "Z":
                    parents[int(entry.name)] = int(fields[1])
        found, todo = [], [self.process.pid]
        while todo:
            pid = todo.pop()
            if pid in parents:
                found.append(pid)
            todo += [child for child, parent in parents.items() if parent == pid]
        return found

    def pid_of(self, name):
        """Id of the process that vLLM calls so: EngineCore or Worker."""
        return next(pid for pid in self.processes() if _title(pid) == f"VLLM::{name}")

    def samples(self):
        """A `Sample` of each process, by process id."""
        found = {}
        for pid in self.processes():
            process = Path("/proc") / str(pid)
            resident = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            files, threads = len(list((process / "fd").iterdir())), len(list((process / "task").iterdir()))
            found[pid] = Sample(_title(pid), resident, files, threads)
        return found

    def connections(self):
        """Number of TCP connections that the server has not closed yet: established, or closed by the client alone."""
        port = f":{self.port:04X}"
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return sum(row[1].endswith(port) and row[3] in ("01", "08") for row in rows)

    def metrics(self):
        """Value of each series of /metrics, by name and labels."""
        text = urllib.request.urlopen(f"{self.address}/metrics", timeout=60).read().decode()
        rows = re.findall(r"^([\w:]+(?:\{[^\n]*\})?) (\S+)$", text, re.M)
        return {name: float(value) for name, value in rows}

    def total(self, metric):
        """A metric, summed over its labels."""
        return sum(value for name, value in self.metrics().items() if name.split("{")[0] == metric)

    def books(self):
        """Books of the processes "api", "EngineCore" and "Worker". The worker has to have executed a step before."""
        found = {}
        for name in ("api", "EngineCore", "Worker"):
            pid = self.process.pid if name == "api" else self.pid_of(name)
            path = self.folder / f"{pid}.json"
            path.unlink(missing_ok=True)
            os.kill(pid, signal.SIGUSR1)
            deadline = time.monotonic() + 60
            while not path.exists():
                assert time.monotonic() < deadline, f"{name} shows no books"
                time.sleep(0.05)
            found[name] = json.loads(path.read_text())
        return found

    def break_(self, fault):
        """Inject a fault from now on (see `faults`); "": none."""
        control = self.folder / "fault"
        with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False) as new:
            new.write(fault)
        os.replace(new.name, control)


def _title(pid):
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()[:40]
    except (FileNotFoundError, ProcessLookupError):
        return ""
