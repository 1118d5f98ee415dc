"""Eviction, shown: three policies on one batch in a small pool, then a server and its clients.

    make demo        (or: python examples/demo.py [--out out/demo])

Needs no download and no GPU: the model is a random Llama, made on the spot.
"""

import argparse
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

# A model this small gains nothing from a second thread, and a busy machine would make two wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import openai
import psutil
from models import Shape, make_model
from pressure import ENVIRONMENT, Run, make_llm, random_prompts, run_batch
from prometheus_client.parser import text_string_to_metric_families
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

console = Console(highlight=False)

SHAPE = Shape(layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=512, vocab=1024, max_len=2048)
BLOCK = 32
REQUESTS, PROMPT, OUTPUT = 16, 320, 320
POOL_BLOCKS = 112
POLICIES = {
    "full": {"name": "full"},
    "sink-window": {"name": "sink-window", "sink": 32, "recent": 128},
    "h2o": {"name": "h2o", "budget": 192, "buffer": 0, "sink": 32, "recent": 64},
}
SERVER_POLICY = {"name": "h2o", "budget": 256, "buffer": 32, "sink": 32, "recent": 64}
START_UP_SECONDS = 300


class DemoError(Exception):
    """Something did not work; the message says what."""


def require(works: Any, message: str) -> None:
    if not works:
        raise DemoError(message)


# ---- offline: one batch, three policies, one small pool


def offline(model: Path, out: Path) -> None:
    console.rule("Offline: one batch, three policies")
    console.print(f"{REQUESTS} requests of {PROMPT} + {OUTPUT} tokens in a pool of {POOL_BLOCKS * BLOCK:,} tokens")
    runs = {}
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        for name, policy in POLICIES.items():
            task = progress.add_task(name, total=REQUESTS)
            runs[name] = run_policy(model, policy, lambda done, task=task: progress.update(task, completed=done))
    console.print(runs_table(runs))
    require(runs["full"].evicted_blocks == 0, "full evicted something")
    for name in ("sink-window", "h2o"):
        require(runs[name].evicted_blocks > 0, f"{name} evicted nothing")
    picture = out / "resident_blocks.png"
    draw(runs, picture)
    console.print(f"Resident blocks over time: {picture}")


def run_policy(model: Path, policy: dict, on_step: Any) -> Run:
    """The batch under one policy, in an engine of its own."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = make_llm(
        model,
        policy,
        max_model_len=PROMPT + OUTPUT,
        block_size=BLOCK,
        num_gpu_blocks_override=POOL_BLOCKS,
        kv_cache_memory_bytes=POOL_BLOCKS * BLOCK * SHAPE.kv_bytes_per_token(),
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        use_tqdm_on_load=False,
    )
    try:
        run_batch(llm, random_prompts(1, BLOCK, SHAPE.vocab, seed=1), 8)
        return run_batch(llm, random_prompts(REQUESTS, PROMPT, SHAPE.vocab), OUTPUT, on_step)
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def runs_table(runs: dict[str, Run]) -> Table:
    table = Table(box=SIMPLE, show_edge=False, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for heading in ("requests", "at once", "tokens/s", "peak blocks", "evicted blocks", "preemptions"):
        table.add_column(heading, justify="right", no_wrap=" " not in heading)
    for name, run in runs.items():
        table.add_row(
            name,
            str(REQUESTS),
            str(run.peak_requests),
            f"{run.tokens_per_second:,.0f}",
            str(run.peak_blocks),
            str(run.evicted_blocks),
            str(run.preemptions),
        )
    return table


def draw(runs: dict[str, Run], path: Path) -> None:
    """Blocks in use after each step, by policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for name, run in runs.items():
        seconds, blocks = zip(*run.samples, strict=True)
        axes.plot(seconds, blocks, label=f"{name}: {run.seconds:.1f} s, {run.preemptions} preemptions")
    axes.axhline(POOL_BLOCKS, color="grey", linestyle="--", linewidth=1, label=f"pool: {POOL_BLOCKS} blocks")
    axes.set(
        xlabel="seconds",
        ylabel=f"resident blocks of {BLOCK} tokens",
        title=f"{REQUESTS} requests of {PROMPT} + {OUTPUT} tokens",
        ylim=(0, None),
    )
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


# ---- online: a server and its clients


def online(model: Path, out: Path) -> None:
    console.rule("Online: vllm serve --kv-policy")
    port = free_port()
    with serving(model, port, out / "server.log"):
        start_up = [line for line in (out / "server.log").read_text().splitlines() if "KV policy" in line]
        require(start_up, "the server did not say what it evicts")
        console.print(start_up[0][start_up[0].index("KV policy") :], style="green")
        before = scrape(port)
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            name = client.models.list().data[0].id
            complete(client, name)
            chat(client, name)
            refuse(client, name)
            choose(client, name)
        console.print(moved_table(before, wait_for_evictions(port)))
    console.print("The server is gone, and every process it started.")


def complete(client: openai.OpenAI, model: str) -> None:
    done = client.completions.create(model=model, prompt=words(600), max_tokens=64, temperature=0)
    show("completion", done.usage, done.choices[0].text)


def chat(client: openai.OpenAI, model: str) -> None:
    """A streamed chat."""
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": words(500, seed=1)}],
        max_tokens=96,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    with console.status("streaming") as status:
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                status.update(f"streaming: ...{text[-60:]}")
    show("streamed chat", usage, text)


def refuse(client: openai.OpenAI, model: str) -> None:
    """A request may not have more than the server gives."""
    try:
        client.completions.create(
            model=model, prompt=words(100), max_tokens=8, extra_body={"vllm_xargs": {"kv_budget": 4096}}
        )
    except openai.BadRequestError as error:
        message = error.body["message"] if isinstance(error.body, dict) else str(error)
        console.print(f"[bold]asking for kv_budget 4096[/]: HTTP {error.status_code}: {escape(message)}")
    else:
        raise DemoError("the server granted a budget above its own")


def choose(client: openai.OpenAI, model: str) -> None:
    """A request picks its own policy and a smaller budget; the server went on after the bad one."""
    done = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": words(500, seed=2)}],
        max_tokens=64,
        temperature=0,
        extra_body={"vllm_xargs": {"kv_policy": "sink-window", "kv_budget": 160}},
    )
    show("chat with kv_policy sink-window, kv_budget 160", done.usage, done.choices[0].message.content)


def show(what: str, usage: Any, text: str) -> None:
    require(text and usage, f"{what}: no text came back")
    console.print(f"[bold]{what}[/]: {usage.prompt_tokens} + {usage.completion_tokens} tokens: {text[:40].strip()} ...")


def words(count: int, seed: int = 0) -> str:
    """A prompt that the random model's tokenizer knows."""
    return " ".join(f"w{token}" for token in random_prompts(1, count, SHAPE.vocab, seed)[0])


def scrape(port: int) -> dict[tuple[str, str], float]:
    """(metric, policy) -> value of the plugin's metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        families = text_string_to_metric_families(response.read().decode())
    return {
        (sample.name, sample.labels["policy"]): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("vllm:kv_evict_") and not sample.name.endswith("_created")
    }


def wait_for_evictions(port: int) -> dict[tuple[str, str], float]:
    """The metrics once both policies' evictions are on them; they come with the engine's next statistics."""
    for _ in range(50):
        metrics = scrape(port)
        if all(metrics.get(("vllm:kv_evict_blocks_evicted_total", name)) for name in ("h2o", "sink-window")):
            return metrics
        time.sleep(0.2)
    raise DemoError(f"/metrics shows no evictions by h2o and sink-window: {metrics}")


def moved_table(before: dict[tuple[str, str], float], after: dict[tuple[str, str], float]) -> Table:
    table = Table("moved on /metrics", "policy", box=SIMPLE, show_edge=False, pad_edge=False)
    for heading in ("before", "after"):
        table.add_column(heading, justify="right")
    for key, value in after.items():
        if value != before.get(key, 0):
            table.add_row(*key, f"{before.get(key, 0):.0f}", f"{value:.0f}")
    return table


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def serving(model: Path, port: int, log: Path) -> Iterator[None]:
    """`vllm serve` in a process group of its own, which ends with the block, however it ends."""
    policy = json.dumps(SERVER_POLICY)
    console.print(f"$ vllm serve MODEL --kv-policy '{policy}'", style="bold")
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--kv-policy", policy]
    command += f"--served-model-name random --host 127.0.0.1 --port {port} --dtype float32 --enforce-eager".split()
    command += f"--block-size {BLOCK} --max-model-len {SHAPE.max_len} --max-num-seqs 8".split()
    command += f"--max-num-batched-tokens 512 --num-gpu-blocks-override {POOL_BLOCKS}".split()
    command += ["--kv-cache-memory-bytes", str(POOL_BLOCKS * BLOCK * SHAPE.kv_bytes_per_token())]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    with log.open("w") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            wait_until_up(server, port, log)
            yield
        finally:
            end(server)


def wait_until_up(server: subprocess.Popen, port: int, log: Path) -> None:
    start = time.monotonic()
    with console.status("") as status:
        while (waited := time.monotonic() - start) < START_UP_SECONDS:
            status.update(f"starting, {waited:.0f} s (log: {log})")
            if server.poll() is not None:
                break
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                console.print(f"up after {waited:.0f} s")
                return
            time.sleep(0.5)
    tail = "\n".join(log.read_text().splitlines()[-20:])
    raise DemoError(f"the server did not come up. The end of {log}:\n{tail}")


def end(server: subprocess.Popen) -> None:
    """Ask the server to go, then make its whole process group go: the engine runs in a process of its own."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it does not take long, and must not be cut short
    for send, number, patience in ((os.kill, signal.SIGTERM, 20), (os.killpg, signal.SIGKILL, 10)):
        with contextlib.suppress(ProcessLookupError):
            send(server.pid, number)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            server.poll()
            if not running(server.pid):
                return
            time.sleep(0.1)
    raise DemoError(f"processes of the server are still there: {running(server.pid)}")


def running(group: int) -> list[int]:
    """Ids of a process group's processes that have not ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


# ---- command line


def stop(number: int, frame: FrameType | None) -> None:
    """A signal ends the demo like Ctrl-C does: through every `finally`."""
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    os.environ.update(ENVIRONMENT, VLLM_LOGGING_LEVEL="ERROR")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(Path(folder, "model"), SHAPE)
            console.print("The model is a random Llama: what it writes is noise.")
            offline(model, out)
            online(model, out)
    except DemoError as error:
        console.print(f"The demo failed: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
